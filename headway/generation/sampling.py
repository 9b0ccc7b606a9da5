"""Choosing the next token from logits: greedy, temperature, top-k, top-p.

Sampling is argmax(log p + Gumbel noise), with the noise of each row drawn from that row's own generator: what a row
samples does not depend on which other rows stand in the batch.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 is greedy; top_k = 0 and top_p = 1 leave every token in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature ({self.temperature:g}) must be 0 (greedy) or above")
        if self.top_k < 0:
            raise UserError(f"top_k ({self.top_k}) must be 0 (all tokens) or above")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p ({self.top_p:g}) must be above 0 and at most 1")

    def generators(self, numbers: Iterable[int]) -> list[torch.Generator]:
        """One source of noise a row: prompt number n is seeded with seed + n."""
        return [torch.Generator().manual_seed(self.seed + number) for number in numbers]

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """The chosen token of each row, (B,), from logits (B, V)."""
        if self.temperature == 0.0:
            return logits.argmax(-1)
        kept = keep_top(logits / self.temperature, self.top_k, self.top_p)
        uniform = torch.stack([torch.rand(kept.shape[-1], generator=generator) for generator in generators])
        noise = -torch.log(-torch.log(uniform.clamp(1e-20, 1.0 - 1e-7)))
        return (kept + noise.to(kept)).argmax(-1)


GREEDY = Sampling()


def keep_top(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set to −inf all but the `top_k` largest, and all beyond the smallest set whose probability reaches `top_p`."""
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # probability of what stands before each token
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(dropped, float("-inf"))
    return logits
