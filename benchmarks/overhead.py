"""What logging, checkpoints and the scheduling of evaluations cost: a run with them, against the same steps without.

Both train the first stage of the recipe world/demo (a GPT of width 128, batches of 64) on a CPU, from the same weights
and in the same process. One is the whole loop: progress lines, metrics.jsonl, a look at every loss and gradient,
checkpoints in the background, and evaluations that are due but do nothing. The other calls the engine step after step
and does nothing else. They take turns. Prints both times and their ratio; the aim is at most 1.03.

Other programs on the machine disturb such a ratio. So the whole loop is also looked at from inside: the time between
its steps, and the processor time of the thread that writes checkpoints, both as a share of the time in its steps. It is
one and the same run, and what disturbs one part of it disturbs the other.

    python benchmarks/overhead.py [--steps 100] [--turns 5] [--every 50]

Checkpoints and evaluations come every 50 steps here, ten times as often as by default.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from headway.configuration import load_settings
from headway.console import Lines, Reporter
from headway.making import build_tokenizer
from headway.training.checkpoint import Writer
from headway.training.device import describe_machine
from headway.training.engine import Block, Engine, Outcome
from headway.training.loop import Plan, Trainer
from headway.training.stage import Stage


@dataclass
class Timed(Engine):
    """An engine that adds up the time of its steps."""

    engine: Engine
    began: float = 0.0
    inside: float = 0.0

    def prepare(self, step: int, undisturbed: Block = nullcontext) -> None:
        self.engine.prepare(step, undisturbed)

    def step(self, step: int, rate: float) -> Outcome:
        before = time.perf_counter()
        self.began = self.began or before
        done = self.engine.step(step, rate)
        self.inside += time.perf_counter() - before
        return done


class TimedWriter(Writer):
    """A writer that adds up the processor time of its thread."""

    processor = 0.0

    def write(self) -> None:
        before = time.thread_time()
        super().write()
        self.processor += time.thread_time() - before


class TimedTrainer(Trainer):
    """A trainer that knows where its time went."""

    engine: Timed

    def __post_init__(self) -> None:
        super().__post_init__()
        self.writer = TimedWriter(self.checkpoints)

    def plan(self, stage: Stage) -> Plan:
        plan = super().plan(stage)
        plan.engine = self.engine = Timed(plan.engine)
        return plan

    def shares(self) -> tuple[float, float]:
        """(time between the steps, time of the writing thread), as shares of the time in the steps."""
        between = time.perf_counter() - self.engine.began - self.engine.inside
        assert isinstance(self.writer, TimedWriter)
        return between / self.engine.inside, self.writer.processor / self.engine.inside


def timed(body: Callable[[], object]) -> float:
    began = time.perf_counter()
    body()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
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
    task.evaluate = lambda model, split="dev": {}
    stage = Stage("pretraining", task, training, 0, final=False)

    def trainer(directory: Path, report: Reporter) -> TimedTrainer:
        torch.manual_seed(0)
        return TimedTrainer(settings.model.build(len(tokenizer)), [stage], directory, tokenizer.fingerprint(), report)

    def whole_loop(directory: Path) -> tuple[float, tuple[float, float]]:
        """(seconds, shares as in `TimedTrainer`)."""
        with open(directory / "log.txt", "w", encoding="utf-8") as log:
            full = trainer(directory, Lines(log, seconds=1.0))
            return timed(full.run), full.shares()

    def steps_alone(directory: Path) -> float:
        bare = trainer(directory, Reporter())

        def body() -> None:
            plan = bare.plan(stage)
            bare.model.train()
            for step in range(options.steps):
                plan.engine.step(step, plan.rate(step))

        return timed(body)

    alone, whole, shares = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.turns + 1):  # the first one is for warming up
            directories = [Path(folder, f"{name}-{turn}") for name in ("alone", "whole")]
            for directory in directories:
                directory.mkdir()
            alone.append(steps_alone(directories[0]))
            seconds, share = whole_loop(directories[1])
            whole.append(seconds)
            shares.append(share)
    ratios = sorted(after / before for before, after in zip(alone[1:], whole[1:], strict=True))
    between, writing = (median(part) for part in zip(*shares[1:], strict=True))
    print(f"{describe_machine()}, {options.turns} turns of {options.steps} steps, a checkpoint every {options.every}")
    print(f"steps alone      {median(alone[1:]):7.2f} s   (medians)")
    print(f"the whole loop   {median(whole[1:]):7.2f} s")
    print(f"ratio            {median(ratios):7.3f}     (turn by turn: {', '.join(f'{each:.3f}' for each in ratios)})")
    print(f"between steps    {between:7.2%}     of the time in steps: logging, copies of tensors, scheduling, the end")
    print(f"writing thread   {writing:7.2%}     of processor time beside it")


if __name__ == "__main__":
    main()
