"""What logging, checkpoints and the scheduling of evaluations cost: a run with them, against the same steps without.

Both train the first stage of the recipe world/demo (a GPT of width 128, batches of 64) on a CPU, from the same weights
and in the same process. One is the whole loop: progress lines, metrics.jsonl, a look at every loss and gradient,
checkpoints in the background, and evaluations that are due but do nothing. The other calls the engine step after step
and does nothing else. They take turns, and each is also timed in seconds of processor time, which other programs on the
machine disturb less. Prints both times and their ratio; the aim is at most 1.03.

    python benchmarks/overhead.py [--steps 200] [--turns 5] [--every 50]

Checkpoints and evaluations come every 50 steps here, ten times as often as by default.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from headway.configuration import load_settings
from headway.console import Lines, Reporter
from headway.run import build_tokenizer
from headway.training.device import describe_machine
from headway.training.loop import Stage, Trainer


def timed(body: Callable[[], object]) -> tuple[float, float]:
    """(seconds on the wall, seconds of the processor)."""
    wall, processor = time.perf_counter(), time.process_time()
    body()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints, and two evaluations")
    options = parser.parse_args()

    settings = load_settings("world/demo")
    assert settings.pretraining is not None
    training = replace(
        settings.pretraining.training,
        steps=options.steps,
        checkpoint_every=options.every,
        evaluate_every=options.every,
        device="cpu",
    )
    tokenizer = build_tokenizer(settings, Reporter())
    task = settings.pretraining.task.build(tokenizer, settings.model.block)
    task.load()
    task.evaluate = lambda model, split="dev": {}  # type: ignore[method-assign]
    stage = Stage("pretraining", task, training, 0, final=False)

    def trainer(directory: Path, report: Reporter) -> Trainer:
        torch.manual_seed(0)
        return Trainer(settings.model.build(len(tokenizer)), [stage], directory, tokenizer.fingerprint(), report)

    def with_all(directory: Path) -> tuple[float, float]:
        with open(directory / "log.txt", "w", encoding="utf-8") as log:
            return timed(trainer(directory, Lines(log, seconds=1.0)).run)

    def steps_alone(directory: Path) -> tuple[float, float]:
        bare = trainer(directory, Reporter())

        def body() -> None:
            plan = bare.plan(stage)
            bare.model.train()
            for step in range(options.steps):
                plan.engine.step(step, plan.rate(step))

        return timed(body)

    times: dict[str, list[tuple[float, float]]] = {"steps alone": [], "the whole loop": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns + 1):  # the first one is for warming up
            for name, measure in (("steps alone", steps_alone), ("the whole loop", with_all)):
                directory = Path(folder, f"{name}-{turn}")
                directory.mkdir()
                times[name].append(measure(directory))
    alone, whole = (turns[1:] for turns in times.values())
    print(f"{describe_machine()}, {options.turns} turns of {options.steps} steps, a checkpoint every {options.every}")
    for name, turns in (("steps alone", alone), ("the whole loop", whole)):
        wall, processor = (median(part) for part in zip(*turns, strict=True))
        print(f"{name:15} {wall:7.2f} s   {processor:7.2f} s of processor time   (medians)")
    for number, name in enumerate(("wall", "processor")):
        ratios = [after[number] / before[number] for before, after in zip(alone, whole, strict=True)]
        shown = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
        print(f"ratio, {name:9} {median(ratios):6.3f}   (turn by turn: {shown})")


if __name__ == "__main__":
    main()
