"""Which examples a step sees: a pure function of (seed, step), so that resuming needs nothing but the step's number."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from headway.training.permutation import permuted

LARGE = 10_000_000  # examples from which an order is computed, not stored


def mix(*parts: int | str) -> int:
    """One 63-bit seed from several parts; different parts give unrelated seeds."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(mix(*parts))


class Shuffled:
    """Epoch after epoch, each in a random order of its own; every step has `batch_size` rows."""

    def __init__(self, examples: int, batch_size: int, seed: int) -> None:
        self.examples, self.batch_size, self.seed = examples, batch_size, seed
        self.last = (-1, torch.empty(0, dtype=torch.long))  # an epoch and its order; set as one, for several threads

    def rows(self, step: int) -> Tensor:
        begin = step * self.batch_size
        parts: list[Tensor] = []
        missing = self.batch_size
        while missing:
            epoch, place = divmod(begin, self.examples)
            part = self.part(epoch, place, min(place + missing, self.examples))
            parts.append(part)
            begin, missing = begin + len(part), missing - len(part)
        return torch.cat(parts)

    def part(self, epoch: int, begin: int, end: int) -> Tensor:
        """The rows at the places begin … end − 1 of an epoch's order."""
        if self.examples > LARGE:
            return permuted(torch.arange(begin, end), self.examples, mix(self.seed, "epoch", epoch))
        return self.order(epoch)[begin:end]

    def order(self, epoch: int) -> Tensor:
        known, order = self.last
        if epoch != known:
            order = torch.randperm(self.examples, generator=generator(self.seed, "epoch", epoch))
            self.last = (epoch, order)
        return order

    def rows_through(self, step: int) -> int:
        return (step + 1) * self.batch_size


class Sequential:
    """Every epoch in the order of the file; the last batch of an epoch holds what is left."""

    def __init__(self, examples: int, batch_size: int) -> None:
        self.examples, self.batch_size = examples, batch_size
        self.steps = -(-examples // batch_size)  # an epoch's

    def rows(self, step: int) -> Tensor:
        begin = step % self.steps * self.batch_size
        return torch.arange(begin, min(begin + self.batch_size, self.examples))

    def rows_through(self, step: int) -> int:
        """Rows seen in steps 0 … step."""
        epochs, place = divmod(step + 1, self.steps)
        return epochs * self.examples + place * self.batch_size
