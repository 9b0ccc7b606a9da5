"""What a model keeps between decoding steps, so that a token is never computed twice.

Slot s of a row holds the key and value of the token at position s. Rows may hold different numbers of tokens: a
prompt is padded on the right, what the padding left in its slots is hidden by `lengths` and overwritten by the
tokens that come. A recurrent layer keeps the states of its last pass, of which `lengths` says the one that counts.

    cache = model.empty_cache(rows=B, length=64)
    logits = model(prompts, cache)          # writes the slots
    cache.lengths += prompt_lengths         # says how many of them count
    logits = model(next_tokens, cache)      # continues at each row's own position

Shapes: B rows, H heads, S slots, K head width, T new tokens, D state width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SPARE = 16  # slots that a full cache grows by


class LayerCache:
    """The keys and values of one attention layer, each (B, H, S, K); more slots are made when these are full."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    @classmethod
    def empty(cls, rows: int, heads: int, length: int, head_width: int, like: Tensor) -> LayerCache:
        shape = (rows, heads, length, head_width)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def extend(self, keys: Tensor, values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, H, T, K) at `positions` (B, T); return every slot up to the last one in use."""
        used = int(positions.max()) + 1
        if used > self.keys.shape[2]:
            self.keys, self.values = (with_slots(each, used + SPARE - 1) for each in (self.keys, self.values))
        rows = torch.arange(len(positions), device=positions.device)[:, None]  # (B, 1)
        self.keys[rows, :, positions] = keys.transpose(1, 2).to(self.keys.dtype)
        self.values[rows, :, positions] = values.transpose(1, 2).to(self.values.dtype)
        return self.keys[:, :, :used], self.values[:, :, :used]

    def select(self, rows: Tensor) -> LayerCache:
        return LayerCache(self.keys.index_select(0, rows), self.values.index_select(0, rows))


def with_slots(x: Tensor, count: int) -> Tensor:
    """(B, H, S, K) with zeros up to `count` slots."""
    return torch.cat([x, x.new_zeros(*x.shape[:2], count - x.shape[2], x.shape[3])], 2)


class LayerStates:
    """The states of one recurrent layer: the one before its last pass, then that after each token of the pass.

    A padded row has gone on past its end, so which of them counts is known when `lengths` has grown. What a row needs
    does not grow with its length.
    """

    def __init__(self, parts: tuple[Tensor, ...], begun: Tensor) -> None:
        self.parts = parts  # (B, 1 + T, D) each: the state, and an LSTM's cell
        self.begun = begun  # (B,): how many tokens the rows held before the pass

    @classmethod
    def empty(cls, rows: int, parts: int, width: int, like: Tensor) -> LayerStates:
        begun = torch.zeros(rows, dtype=torch.long, device=like.device)
        return cls((like.new_zeros(rows, 1, width),) * parts, begun)

    def at(self, lengths: Tensor) -> tuple[Tensor, ...]:
        """The state of each row after `lengths` (B,) tokens: (B, D) each."""
        rows = torch.arange(len(lengths), device=lengths.device)
        place = (lengths - self.begun).clamp(min=0)  # a row that has stopped may stand anywhere
        return tuple(part[rows, place] for part in self.parts)

    def keep(self, states: tuple[Tensor, ...], lengths: Tensor) -> None:
        """The states (B, 1 + T, D) of a pass that began where the rows held `lengths` (B,) tokens."""
        self.parts, self.begun = states, lengths.clone()

    def select(self, rows: Tensor) -> LayerStates:
        return LayerStates(tuple(part.index_select(0, rows) for part in self.parts), self.begun[rows])


class Cache:
    """What each layer keeps (`LayerCache`, `LayerStates`) and the number of tokens each row holds."""

    def __init__(self, layers: Sequence[Any], lengths: Tensor) -> None:
        self.layers = layers
        self.lengths = lengths  # (B,)

    def positions(self, count: int) -> Tensor:
        """Where the next `count` tokens of each row stand: (B, T)."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def select(self, rows: Tensor) -> Cache:
        """A cache of these rows only, in this order; a row may be named several times."""
        return Cache([layer.select(rows) for layer in self.layers], self.lengths[rows])
