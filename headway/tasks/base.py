"""What every task has in common: batches, the objective, the metric.

A task turns text into examples, examples into batches, and says how a model is scored. Training sees a task through
this interface only.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.memory import Room
from headway.models import CausalModel
from headway.ranks import ALONE, Ranks
from headway.text import Tokenizer

IGNORE = -100  # a target that is not learned


@dataclass
class Batch:
    """Rows padded on the right: what the model reads and what it should say next.

    `targets` are IGNORE where nothing is learned; `lengths` says how many inputs of each row are not padding. Rows that
    are written after something that was read have a `source`, padded on the right with 0.
    """

    inputs: Tensor  # (B, T)
    targets: Tensor  # (B, T)
    lengths: Tensor  # (B,)
    source: Tensor | None = None  # (B, S)

    @classmethod
    def next_token(cls, rows: Tensor, lengths: Tensor, learned: Tensor | None = None) -> Batch:
        """Every row teaches its next token: inputs are rows[:, :-1], targets rows[:, 1:] where `learned` (B, T+1)."""
        there = torch.arange(rows.shape[1] - 1, device=rows.device) < lengths[:, None] - 1
        if learned is not None:
            there = there & learned[:, 1:]
        return cls(rows[:, :-1], rows[:, 1:].masked_fill(~there, IGNORE), lengths - 1)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice | Tensor) -> Batch:
        """Some of its rows."""
        return self.each(lambda part: part[rows])

    @property
    def tokens(self) -> int:
        """Inputs that are not padding."""
        return int(self.lengths.sum())

    def learned(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORE).sum())

    @property
    def given(self) -> tuple[Tensor, ...]:
        """What the model is called with."""
        return (self.inputs,) if self.source is None else (self.inputs, self.source)

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with every part of it changed."""
        parts = (self.inputs, self.targets, self.lengths, self.source)
        return Batch(*(None if part is None else change(part) for part in parts))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Batch:
        return self.each(lambda part: part.to(device, non_blocking=True))

    def trimmed(self) -> Batch:
        """Without the columns that are padding in every row."""
        longest = int(self.lengths.max())
        source = None if self.source is None else self.source[:, : int((self.source != 0).sum(1).max())]
        return Batch(self.inputs[:, :longest], self.targets[:, :longest], self.lengths, source)

    def pieces(self, count: int) -> list[Batch]:
        """The same rows in `count` batches of like lengths, each as narrow as its longest row.

        Their losses and gradients add up to those of the whole batch; only padding is no longer computed.
        """
        if count <= 1:
            return [self.trimmed()]
        lengths = self.lengths if self.source is None else self.lengths + (self.source != 0).sum(1)
        order = lengths.argsort(stable=True)
        return [self[rows].trimmed() for rows in order.tensor_split(min(count, len(order)))]


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy summed over the targets that count."""
    logits = model(*batch.given)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORE, reduction="sum")


class Task(ABC):
    """One way of learning from text.

    `examples` is the number of rows in an epoch; `batch` is a pure function of which rows and of the generator's state.
    `metric` names the score in `evaluate`'s result by which checkpoints are compared.
    """

    metric: ClassVar[str] = "loss"
    higher_is_better: ClassVar[bool] = False
    settings: Any  # the table that it was built from
    examples: int
    source_width: int = 0  # the most tokens of a source; 0: rows have none
    limit: str = "model.block"  # the setting that `block` comes from
    smoothing: float = 0.0  # the share of a target's probability that all tokens have in common

    def __init__(self, tokenizer: Tokenizer, block: int) -> None:
        self.tokenizer = tokenizer
        self.block = block
        self.notes: list[str] = []  # what should be known of the data, once it is loaded

    def note(self, text: str) -> None:
        """Something that should be known of the data; it is said once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def width(self) -> int:
        """The most inputs that a row has; known once the task is loaded."""
        return self.block

    @abstractmethod
    def load(self) -> None:
        """Read and encode what training needs."""

    @abstractmethod
    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        """The examples `rows` (B,) as a batch, by the random numbers `noise` (…, B), where the task's data lie."""

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        """The random numbers that `make` needs for `count` rows, the rows last; none unless a task says otherwise."""
        return torch.empty(0, count)

    def batch(self, rows: Tensor, generator: torch.Generator) -> Batch:
        return self.make(rows, self.noise(len(rows), generator))

    def on(self, device: torch.device) -> Self:
        """A copy of the task whose data lie on `device`, to make batches there."""
        twin = copy.copy(self)
        for name, value in movable(self).items():
            setattr(twin, name, value.to(device))
        return twin

    @property
    def nbytes(self) -> int:
        """Of its data, what they take of memory."""
        parts = ([value] if isinstance(value, Tensor) else vars(value).values() for value in movable(self).values())
        return sum(each.nbytes for part in parts for each in part if isinstance(each, Tensor))

    @property
    def on_disk(self) -> bool:
        """Whether some of its data are read from disk when they are needed."""
        return any(getattr(value, "on_disk", False) for value in vars(self).values())

    @abstractmethod
    def evaluate(self, model: Any, split: str = "dev", among: Ranks = ALONE) -> dict[str, Any]:
        """Score the model on a split of the task's data or on a file; includes `metric` where it can be known.

        The work is shared among the processes, and each of them gets the whole result.
        """


def movable(task: Task) -> dict[str, Any]:
    """Of what a task has loaded, the tensors and what consists of tensors, by name."""
    return {name: value for name, value in vars(task).items() if hasattr(value, "to")}


@torch.inference_mode()
def mean_loss(model: CausalModel, batches: Sequence[Batch], among: Ranks = ALONE) -> tuple[float, int]:
    """(loss a learned token, number of such tokens) over the batches of all processes, without dropout."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device

    def summed(rows: Batch) -> float:
        return float(next_token_loss(model, rows.trimmed().to(device)))

    room = Room()
    total, count = 0.0, 0
    for batch in batches:
        total += sum(room.each(summed, batch))
        count += batch.learned()
    model.train(training)
    total, count = among.total(torch.tensor([total, count], dtype=torch.float64)).tolist()
    return total / max(1, count), int(count)


class Sampled(Task):
    """A task that holds nothing back: its score is its loss on fixed rows of a sample of its own examples."""

    def evaluate(self, model: CausalModel, split: str = "dev", among: Ranks = ALONE, rows: int = 512) -> dict[str, Any]:
        if not hasattr(self, "examples"):
            self.load()
        generator = torch.Generator().manual_seed(0)
        sample = torch.randperm(self.examples, generator=generator)[:rows]
        batches = [self.batch(part, generator) for part in sample.split(64)]
        loss, count = mean_loss(model, among.share(batches), among)
        return {"loss": loss, "tokens": count}
