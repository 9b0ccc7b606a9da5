"""What a step is made of: one task's rows, or those of several, each stream with rows, length and weight of its own.

    loss = Σ_streams weight · (sum of the loss over the stream's learned tokens ÷ their number)

Which rows a stream sees at a step and how they are corrupted is a pure function of (seed, stream, step). Streams whose
rows have like lengths are run through the model together.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

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

    def losses(self, model: Callable[..., Tensor], batch: Batch) -> Tensor:
        """Of every target (B, T)."""
        return token_losses(model, batch.targets, *batch.given, smoothing=self.task.smoothing)

    def batch(self, step: int) -> Batch:
        rows, noise = self.draw(step)
        return self.task.make(rows, noise)


def by_length(streams: Sequence[Stream]) -> list[list[Stream]]:
    """Streams of like row lengths stand together, the longest first: a row may be padded to half as much again.

    What is read, and how it is learned, must be alike too.
    """
    groups: list[list[Stream]] = []
    for stream in sorted(streams, key=lambda stream: -stream.task.width):
        if groups and are_alike(groups[-1][0].task, stream.task):
            groups[-1].append(stream)
        else:
            groups.append([stream])
    return groups


def are_alike(wide: Task, narrow: Task) -> bool:
    if (wide.source_width, wide.smoothing) != (narrow.source_width, narrow.smoothing):
        return False
    return wide.width <= 1.5 * narrow.width


def token_losses(model: Callable[..., Tensor], targets: Tensor, *given: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of every target (B, T), 0 where nothing is learned; the model is called with what is `given`.

    With smoothing ε the target is right with probability 1 − ε, and the rest is spread evenly over the vocabulary:
    "Rethinking the Inception architecture" (Szegedy et al. 2015), section 7.
    """
    logits = model(*given).flatten(0, 1).float()  # (B · T, V)
    losses = F.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
    )
    return losses.view_as(targets)
