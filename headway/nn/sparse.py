"""Attention over chosen blocks of keys: what local attention and BigBird have in common.

A row is cut into blocks of b positions. A table says, for each block of queries, which C blocks of keys it looks into;
these are gathered, and each query block attends to its C·b keys:

    head_n = softmax(Q_n K[table_n]ᵀ / √K + mask) V[table_n],        n = 1 … N = T/b

Time O(T·C·b·D), memory O(T·C·D): no T×T matrix is ever built, whatever T is. Only `weights` writes the whole map out,
for looking at.

Shapes: B batch, T length, S slots of a cache, H heads, K head width, N blocks of b positions, C key blocks for each.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.nn.attention import SelfAttention, masked_softmax, place


class BlockSparse(SelfAttention):
    """Self-attention whose pattern is a table of blocks; a subclass says which."""

    block: int
    by_products = False  # pairs are left out

    @abstractmethod
    def key_blocks(self, blocks: int, device: torch.device) -> Tensor:
        """(N, C): the blocks of keys that each of `blocks` query blocks looks into; −1 where there is none."""

    @abstractmethod
    def near(self, t: Tensor, s: Tensor) -> Tensor | None:
        """Which pairs of positions inside those blocks see each other, (…, T, S); None for all of them."""

    def sees(self, t: Tensor, s: Tensor) -> Tensor:
        """Whether a query at t (…, T) looks at a key at s (…, S), pair by pair: (…, T, S)."""
        last = int(max(t.max(), s.max())) // self.block
        table = self.key_blocks(last + 1, t.device)[t // self.block]  # (…, T, C)
        keys = (s // self.block)[..., None, :]  # (…, 1, S)
        seen = torch.zeros(torch.broadcast_shapes(keys.shape, (*t.shape, 1)), dtype=torch.bool, device=t.device)
        for column in table.unbind(-1):
            seen = seen | (column[..., None] == keys)
        near = self.near(t, s)
        seen = seen if near is None else seen & near
        return seen & (s[..., None, :] <= t[..., :, None]) if self.causal else seen

    def whole(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        count, b = q.shape[-2], self.block
        blocks = -(-count // b)
        table = self.key_blocks(blocks, q.device)  # (N, C)
        rest = blocks * b - count
        q, k, v = (F.pad(x, (0, 0, 0, rest)) for x in (q, k, v))
        t = torch.arange(blocks * b, device=q.device).view(blocks, b)
        s = (table[..., None] * b + torch.arange(b, device=q.device)).flatten(1)  # (N, C·b), below 0 where none
        allowed = ((s >= 0) & (s < count))[:, None, :]  # (N, 1, C·b)
        near = self.near(t, s)
        if near is not None:
            allowed = allowed & near
        if self.causal:
            allowed = allowed & (s[:, None, :] <= t[:, :, None])  # (N, b, C·b)
        rows = q.shape[0]
        allowed = allowed.expand(blocks, b, -1)[None]  # (1, N, b, C·b)
        if mask is not None:
            counted = F.pad(mask, (0, rest)).unflatten(1, (blocks, b))[:, table].flatten(2)  # (B, N, C·b)
            allowed = allowed & counted[:, :, None]
        allowed = allowed.expand(rows, -1, -1, -1).flatten(0, 1)[:, None]  # (B·N, 1, b, C·b)
        everywhere = place(positions).expand(rows, 1, count) if positions.dim() > 1 else positions.expand(rows, 1, -1)
        everywhere = F.pad(everywhere, (0, rest))[:, 0]  # (B, T): where each token stands, for schemes on scores
        mixed = self.mix(
            cut(q, b).flatten(0, 1).transpose(1, 2),
            gather(k, table, b),
            gather(v, table, b),
            everywhere.unflatten(1, (blocks, b)).flatten(0, 1)[:, None],
            everywhere.unflatten(1, (blocks, b))[:, table].flatten(2).flatten(0, 1)[:, None],
            allowed,
        )  # (B·N, H, b, K)
        return mixed.unflatten(0, (rows, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :count]

    def step(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """The new queries against the slots of the cache: a whole row at once, one token by the blocks it looks into,
        and anything between a block of queries at a time.
        """
        count, slots = q.shape[-2], torch.arange(k.shape[-2], device=q.device)
        if count == len(slots) and bool((positions == slots).all()):
            return self.whole(q, k, v, positions, None)
        if count == 1:
            return self.next(q, k, v, positions)
        parts = []
        for begin in range(0, count, self.block):
            t = place(positions[:, begin : begin + self.block])  # (B, 1, T)
            parts.append(self.mix(q[:, :, begin : begin + self.block], k, v, t, slots, self.sees(t, slots)))
        return torch.cat(parts, -2)

    def next(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """One new query a row, (B, H, 1, K), looks into its blocks of the cache: O(C·b) whatever the row's length."""
        last = int(positions.max()) // self.block
        table = self.key_blocks(last + 1, q.device)[positions[:, 0] // self.block]  # (B, C)
        s = (table[..., None] * self.block + torch.arange(self.block, device=q.device)).flatten(1)[
            :, None
        ]  # (B, 1, C·b)
        here = s.clamp(0, k.shape[-2] - 1)[..., None].expand(-1, k.shape[1], -1, k.shape[-1])  # (B, H, C·b, K)
        t = place(positions)
        allowed = (s >= 0) & (s <= t)  # (B, 1, C·b)
        near = self.near(t, s)
        allowed = allowed[:, :, None] if near is None else allowed[:, :, None] & near
        return self.mix(q, k.gather(2, here), v.gather(2, here), t, s, allowed)

    def weights(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, _ = self.project(x, positions)
        t = torch.arange(x.shape[1], device=x.device)
        allowed = self.sees(t, t)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        return masked_softmax(self.scores(q, k, place(positions), place(positions)), allowed)


def cut(x: Tensor, block: int) -> Tensor:
    """(B, H, T, K) → (B, N, b, H, K)."""
    return x.transpose(1, 2).unflatten(1, (-1, block))


def gather(x: Tensor, table: Tensor, block: int) -> Tensor:
    """The blocks that the table (N, C) names, side by side: (B, H, T, K) → (B·N, H, C·b, K)."""
    found = cut(x, block)[:, table.clamp(min=0)]  # (B, N, C, b, H, K)
    return found.flatten(2, 3).flatten(0, 1).transpose(1, 2)
