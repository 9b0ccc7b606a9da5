"""What a step is made of: one task's rows, or those of several, each stream with rows, length and weight of its own.

    loss = Σ_streams weight · (sum of the loss over the stream's learned tokens ÷ their number)

Which rows a stream sees at a step and how they are corrupted is a pure function of (seed, stream, step). Streams whose
rows have like lengths are run through the model together.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from headway.models import CausalModel
from headway.tasks.base import IGNORE, Batch, Task
from headway.training.order import Sequential, Shuffled, generator


@dataclass
class Stream:
    """A task's share of every step from `begin` up to `end`, counted in the stage's own steps."""

    name: str
    task: Task
    rows: int
    order: Shuffled | Sequential
    seed: int
    weight: float = 1.0
    begin: int = 0
    end: int = 1 << 62

    def takes_part(self, step: int) -> bool:
        return self.begin <= step < self.end

    def draw(self, step: int) -> tuple[Tensor, Tensor]:
        """Which examples the step sees (B,), and the random numbers by which they are made into rows (…, B)."""
        rows = self.order.rows(step - self.begin)
        return rows, self.task.noise(len(rows), generator(self.seed, "batch", step))

    def batch(self, step: int) -> Batch:
        rows, noise = self.draw(step)
        return self.task.make(rows, noise)


def by_length(streams: Sequence[Stream]) -> list[list[Stream]]:
    """Streams of like row lengths stand together, the longest first: a row may be padded to half as much again."""
    groups: list[list[Stream]] = []
    for stream in sorted(streams, key=lambda stream: -stream.task.width):
        if groups and groups[-1][0].task.width <= 1.5 * stream.task.width:
            groups[-1].append(stream)
        else:
            groups.append([stream])
    return groups


def token_losses(model: CausalModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every target (B, T), 0 where nothing is learned."""
    logits = model(inputs)  # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets)
