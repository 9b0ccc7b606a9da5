"""Useful tokens a second in CPU pretraining, against a plain padded loop around the same model.

Both do the course's pretraining step: the same model, the same rows, the same optimizer, float32, all cores. The plain
loop pads every row to the block, as the course does; Headway cuts the step's rows by length and computes no padding
that it can avoid. Padding is not counted as useful.
Also prints what making a batch costs, as a share of Headway's step.

    python benchmarks/padding_speed.py [--steps 6] [--rows 128]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from headway.configuration import load_settings
from headway.console import Lines
from headway.making import build_tokenizer
from headway.models import CausalModel
from headway.tasks import Batch
from headway.tasks.base import IGNORE, next_token_loss
from headway.training.device import describe_machine
from headway.training.engine import Engine, Outcome, Plain, clip_gradients
from headway.training.optimizer import Optimizer, build_optimizer
from headway.training.order import Shuffled
from headway.training.streams import Stream


@dataclass
class Padded(Engine):
    """The plain loop: every row padded to the block, one batch, one mean."""

    model: CausalModel
    stream: Stream
    optimizer: Optimizer
    width: int
    clip: float

    def step(self, step: int, rate: float) -> Outcome:
        batch = self.stream.batch(step)
        loss = next_token_loss(self.model, padded_to(batch, self.width)) / batch.learned()
        loss.backward()
        norm = clip_gradients(self.model, self.clip)
        self.optimizer.step_if_finite(loss, norm)
        self.optimizer.zero_grad()
        return Outcome(batch.tokens, len(batch.inputs) * self.width, loss.detach(), norm, {})


def padded_to(batch: Batch, width: int) -> Batch:
    more = (0, width - batch.inputs.shape[1])
    return Batch(
        nn.functional.pad(batch.inputs, more), nn.functional.pad(batch.targets, more, value=IGNORE), batch.lengths
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=128, help="rows a step; the course has 128")
    options = parser.parse_args()

    settings = load_settings("birthplaces/course-vanilla")
    assert settings.pretraining is not None
    training = replace(settings.pretraining.training, shuffle=True, batch_size=options.rows)
    tokenizer = build_tokenizer(settings, Lines())
    task = settings.pretraining.task.build(tokenizer, settings.model.block)
    task.load()
    stream = Stream("pretraining", task, training.batch_size, Shuffled(task.examples, training.batch_size, 0), 0)

    def measure(engine_of: Callable[[CausalModel, Optimizer], Engine]) -> tuple[float, float]:
        """(useful tokens a second, seconds a step), the first step left out."""
        torch.manual_seed(0)
        model = settings.model.build(len(tokenizer)).train()
        engine = engine_of(model, build_optimizer(model, training))
        engine.step(0, 1.0)
        began = time.perf_counter()
        tokens = sum(engine.step(step, 1.0).tokens for step in range(1, options.steps + 1))
        seconds = time.perf_counter() - began
        return tokens / seconds, seconds / options.steps

    def ours_of(model: CausalModel, optimizer: Optimizer) -> Engine:
        return Plain(model, [stream], optimizer, 0, torch.float32, training.clip)

    def padded_of(model: CausalModel, optimizer: Optimizer) -> Engine:
        return Padded(model, stream, optimizer, settings.model.block - 1, training.clip)

    began = time.perf_counter()
    for step in range(20):
        stream.batch(step)
    making = (time.perf_counter() - began) / 20
    ours, step_time = measure(ours_of)
    plain, plain_time = measure(padded_of)
    share = making / step_time
    print(f"{describe_machine()}, {options.steps} steps each")
    print(f"plain padded loop   {plain:8,.0f} useful tokens/s   {plain_time:.2f} s a step")
    print(f"Headway             {ours:8,.0f} useful tokens/s   {step_time:.2f} s a step")
    print(f"ratio               {ours / plain:8.2f} ×")
    print(f"making a batch      {share:8.2%} of Headway's step")


if __name__ == "__main__":
    main()
