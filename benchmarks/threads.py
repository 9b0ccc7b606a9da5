"""How many threads train a model of a CPU's size fastest, against the number that torch takes by itself.

For each recipe the steps of its first stage are timed with 1, 2, 4 … threads, in turns, three times each; the middle
one counts. Prints the time of a step for every number, and how near it comes to the fastest.

    python benchmarks/threads.py [RECIPE …] [--steps 8] [--counts 1,2,4]

Without --counts, powers of two up to the number of cores, and that number.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from headway.configuration import load_settings
from headway.console import Lines
from headway.making import build_stages, build_tokenizer
from headway.training import device as devices
from headway.training.engine import Plain
from headway.training.optimizer import build_optimizer
from headway.training.stage import streams_of

RECIPES = ("world/demo", "shakespeare/char-laptop", "birthplaces/course-vanilla")
TURNS = 3


def step_of(recipe: str) -> tuple[str, Callable[[int], object]]:
    """(what the model is, its training step on the CPU)."""
    settings = load_settings(recipe)
    tokenizer = build_tokenizer(settings, Lines())
    stage = build_stages(settings, tokenizer)[0]
    stage.task.load()
    torch.manual_seed(0)
    model = settings.model.build(len(tokenizer)).train()
    precision, _ = devices.choose_precision(torch.device("cpu"), "auto", model.settings.width)
    optimizer = build_optimizer(model, stage.settings, precision)
    plain = Plain(model, streams_of(stage, 0), optimizer, 0, precision, stage.settings.clip)
    weights = sum(parameter.numel() for parameter in model.parameters())
    name = f"{recipe}: {weights / 1e6:.1f}M parameters, width {model.settings.width}, {stage.settings.batch_size} rows"
    return name, lambda number: plain.step(number, 1.0)


def measure(step: Callable[[int], object], counts: list[int], steps: int) -> dict[int, float]:
    """Seconds a step for every number of threads."""
    times: dict[int, list[float]] = {count: [] for count in counts}
    for turn in range(TURNS):
        for count in counts:
            torch.set_num_threads(count)
            step(turn * (steps + 1))  # the first one wakes the threads
            began = time.perf_counter()
            for number in range(turn * (steps + 1) + 1, (turn + 1) * (steps + 1)):
                step(number)
            times[count].append((time.perf_counter() - began) / steps)
    return {count: median(each) for count, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    parser.add_argument("--steps", type=int, default=8, help="steps measured a turn")
    parser.add_argument("--counts", default="", help="numbers of threads, with commas between them")
    options = parser.parse_args()
    own = torch.get_num_threads()
    powers = {2**power for power in range(own.bit_length()) if 2**power <= own}
    counts = sorted({int(count) for count in options.counts.split(",") if count} or powers | {own})
    print(f"{devices.describe_machine()}; milliseconds a step, median of {TURNS} turns of {options.steps} steps")
    for recipe in options.recipes:
        name, step = step_of(recipe)
        found = measure(step, counts, options.steps)
        print(name)
        for count, seconds in found.items():
            print(f"  {count:3} threads {1000 * seconds:9.1f}   {min(found.values()) / seconds:5.2f} of the fastest")


if __name__ == "__main__":
    main()
