"""Useful tokens a second in CPU pretraining, against a plain padded loop around the same model.

Both do the course's pretraining step: the same model, the same rows, the same optimizer, float32, all cores. The plain
loop pads every row to the block, as the course does; Headway cuts the step's rows by length and computes no padding
that it can avoid. Padding is not counted as useful.
Also prints what making a batch costs, as a share of Headway's step.

    python benchmarks/padding_speed.py [--steps 6]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch
from torch import nn

from headway.configuration import load_settings
from headway.console import Lines
from headway.run import build_tokenizer
from headway.tasks import Batch
from headway.tasks.base import IGNORE, next_token_loss
from headway.training.device import describe_machine
from headway.training.loop import accumulate, clip, pieces_of
from headway.training.optimizer import build_optimizer
from headway.training.order import Shuffled, generator


def padded_to(batch: Batch, width: int) -> Batch:
    more = (0, width - batch.inputs.shape[1])
    return Batch(
        nn.functional.pad(batch.inputs, more), nn.functional.pad(batch.targets, more, value=IGNORE), batch.lengths
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()

    settings = load_settings("birthplaces/course-vanilla")
    assert settings.pretraining is not None
    training = replace(settings.pretraining.training, shuffle=True)
    tokenizer = build_tokenizer(settings, Lines())
    task = settings.pretraining.task.build(tokenizer, settings.model.block)
    task.load()
    device = torch.device("cpu")
    order = Shuffled(task.examples, training.batch_size, 0)
    making = []

    def batch_of(step: int) -> Batch:
        began = time.perf_counter()
        batch = task.batch(order.rows(step), generator(0, step))
        making.append(time.perf_counter() - began)
        return batch

    def measure(headway: bool) -> tuple[float, float]:
        """(useful tokens a second, seconds a step), the first step left out."""
        torch.manual_seed(0)
        model = settings.model.build(len(tokenizer)).train()
        optimizer = build_optimizer(model, training)
        tokens = 0
        for step in range(options.steps + 1):
            if step == 1:
                began, tokens = time.perf_counter(), 0
            batch = batch_of(step)
            if headway:
                accumulate(model, task, batch, pieces_of(training, batch, device), device)
            else:
                (next_token_loss(model, padded_to(batch, settings.model.block - 1)) / batch.learned()).backward()
            clip(model, training.clip)
            optimizer.step()
            optimizer.zero_grad()
            tokens += batch.tokens
        seconds = time.perf_counter() - began
        return tokens / seconds, seconds / options.steps

    ours, step_time = measure(headway=True)
    plain, plain_time = measure(headway=False)
    share = sorted(making)[len(making) // 2] / step_time
    print(f"{describe_machine()}, {options.steps} steps each")
    print(f"plain padded loop   {plain:8,.0f} useful tokens/s   {plain_time:.2f} s a step")
    print(f"Headway             {ours:8,.0f} useful tokens/s   {step_time:.2f} s a step")
    print(f"ratio               {ours / plain:8.2f} ×")
    print(f"making a batch      {share:8.2%} of Headway's step")


if __name__ == "__main__":
    main()
