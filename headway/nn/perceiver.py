"""Perceiver: a row is read through a bottleneck of m learned latents.

    down:  L = Attention(C, X, X)     m latents read T positions      O(m·T·D)
    up:    Z = Attention(X, L, L)     T positions read m latents      O(T·m·D)

"Perceiver: general perception with iterative attention" (Jaegle et al. 2021); down and up around one self-attention are
the induced points of the Set Transformer (Lee et al. 2019).

A causal model must not let a position read a latent that has read what comes after it. Two ways:

`FirstPositions` (as a university course teaches it): latent j reads positions 0 … j, position t reads latents 0 … t.
Only the first m positions ever enter the bottleneck; what stands later is seen by nobody but itself.

`Perceiver`: the longest row is cut into m segments. Latent j reads everything up to the end of segment j. A position
reads the latents of the segments that ended before its own began, and its own segment's positions up to itself
directly. So every earlier position reaches every later one. Time O(T·(m + length/m)·D): linear in T for one `length`,
and T^1.5 at best for rows that grow with it, with m = √length.

Shapes: B batch, T positions, S positions read, m latents, D width, H heads, K head width, N segments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn.attention import Attention, attend, check_row, join_heads
from headway.nn.cache import LayerCache
from headway.nn.cross import CrossAttention
from headway.nn.positions import InAttention


class Perceiver(Attention):
    """Self-attention through `bottleneck` latents; causal, by segments of ⌈length / bottleneck⌉ positions."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        bottleneck: int = 32,
    ) -> None:
        super().__init__()
        if position is not None:
            raise ValueError(
                f"a latent stands at no position, so {type(position).__name__} has nothing to act on; "
                "use positions on the embeddings: learned, sinusoidal or none"
            )
        if bottleneck < 1:
            raise ValueError(f"the bottleneck ({bottleneck}) must hold at least 1 latent")
        if causal and length is None:
            raise ValueError(
                f"a causal {type(self).__name__} is built for rows of a known length: give the longest as length"
            )
        self.causal = causal
        self.length = length
        self.segment = -(-length // bottleneck) if causal and length is not None else 0
        self.latents = nn.Parameter(nn.init.xavier_uniform_(torch.empty(bottleneck, width)))
        self.down = CrossAttention(width, heads, dropout)
        self.up = CrossAttention(width, heads, dropout)

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        check_row(x, positions, mask, self.latents.shape[1])
        if cache is None:
            written = self.write(x, self.read(x, self.latents, mask), mask)
            return written if mask is None else written.masked_fill(~self.heard(x, mask)[..., None], 0.0)
        rows = keep(cache, x, positions)
        return self.write_next(x, positions, self.read(rows, self.latents), rows)

    def read(self, x: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
        """The latents (m, D) look at the rows: (B, m, D)."""
        return self.down(latents.expand(len(x), -1, -1), x, self.read_mask(x.shape[1], mask, x.device))

    def read_mask(self, count: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Which of `count` positions each latent reads: broadcasts to (B, 1, m, T), or None for all."""
        self.check_length(count)
        padding = None if mask is None else mask[:, None, None, :]
        if not self.causal:
            return padding
        before = torch.arange(count, device=device) < self.ends(device)[:, None]  # (m, T)
        return before if padding is None else before & padding

    def heard(self, x: Tensor, mask: Tensor) -> Tensor:
        """Which positions have anybody to take from, directly or through the latents: (B, T)."""
        if not self.causal:
            return mask.any(1, keepdim=True).expand_as(mask)
        return mask.cumsum(1) > 0

    def ends(self, device: torch.device) -> Tensor:
        """(m,): latent j reads the positions before ends[j]."""
        return (torch.arange(len(self.latents), device=device) + 1) * self.segment

    def check_length(self, count: int) -> None:
        if self.causal and self.length is not None and count > self.length:
            raise ValueError(f"a row of {count} positions, and this causal perceiver was built for {self.length}")

    def write(self, x: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
        """The rows look at what the latents have read, (B, m, D), and causal ones at their own segment: (B, T, D)."""
        if not self.causal:
            return self.up(x, latents)
        rows, count = x.shape[:2]
        blocks = max(1, -(-count // self.segment))
        latents = latents[:, : blocks - 1]  # nobody reads the latent of the last segment
        own = (
            F.pad(x, (0, 0, 0, blocks * self.segment - count)).unflatten(1, (blocks, self.segment)).flatten(0, 1)
        )  # (B·N, b, D)
        q, k, v = self.up.project(own, own)  # (B·N, H, b, K)
        _, *pair = self.up.project(latents[:, :0], latents)
        k, v = (torch.cat([repeat_rows(a, blocks), b], -2) for a, b in zip(pair, (k, v), strict=True))
        number = torch.arange(blocks, device=x.device)
        ended = (torch.arange(blocks - 1, device=x.device) < number[:, None])[:, None].expand(-1, self.segment, -1)
        order = torch.ones(self.segment, self.segment, dtype=torch.bool, device=x.device).tril()
        allowed = torch.cat([ended, order.expand(blocks, -1, -1)], -1).repeat(rows, 1, 1)[:, None]  # (B·N, 1, b, N-1+b)
        if mask is not None:
            counted = F.pad(mask, (0, blocks * self.segment - count)).unflatten(1, (blocks, self.segment)).flatten(0, 1)
            allowed = allowed & F.pad(counted, (blocks - 1, 0), value=True)[:, None, None]
        heads = attend(q, k, v, allowed, dropout=self.up.dropout if self.training else 0.0)
        return self.up.output(join_heads(heads)).unflatten(0, (rows, blocks)).flatten(1, 2)[:, :count]

    def write_next(self, x: Tensor, positions: Tensor, latents: Tensor, rows: Tensor) -> Tensor:
        """New positions (B, T) look at the latents (B, m, D) and at their own segment of the `rows` (B, S, D)."""
        segment = positions[:, :, None] // self.segment  # (B, T, 1)
        slots = torch.arange(rows.shape[1], device=x.device)
        ended = torch.arange(latents.shape[1], device=x.device) < segment  # (B, T, m)
        own = (slots // self.segment == segment) & (slots <= positions[:, :, None])  # (B, T, S)
        return self.up(x, torch.cat([latents, rows], 1), torch.cat([ended, own], -1)[:, None])

    def weights(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, H, T, T): what each position takes of each through the latents (a product of two maps) and directly."""
        start = self.latents.expand(len(x), -1, -1)
        through = self.down.weights(start, x, self.read_mask(x.shape[1], mask, x.device))  # (B, H, m, T)
        latents = self.read(x, self.latents, mask)
        if not self.causal:
            return self.up.weights(x, latents) @ through
        t = torch.arange(x.shape[1], device=x.device)
        ended = torch.arange(len(self.latents), device=x.device) < t[:, None] // self.segment  # (T, m)
        own = (t // self.segment == t[:, None] // self.segment) & (t <= t[:, None])  # (T, T)
        allowed = torch.cat([ended, own], -1)
        if mask is not None:
            allowed = allowed & F.pad(mask, (len(self.latents), 0), value=True)[:, None, None]
        both = self.up.weights(x, torch.cat([latents, x], 1), allowed)  # (B, H, T, m + T)
        return both[..., : len(self.latents)] @ through + both[..., len(self.latents) :]

    def empty_cache(self, rows: int, length: int) -> LayerCache:
        """The inputs themselves are kept: latents are read anew at every step, O(m·S·D)."""
        inputs = self.latents.new_zeros(rows, 1, length, self.latents.shape[1])
        return LayerCache(inputs, inputs[..., :0])


class FirstPositions(Perceiver):
    """The bottleneck as the course builds it: causal, latent j reads positions 0 … j and is read from position j on.

    Not causal, it is the same as `Perceiver`.
    """

    def ends(self, device: torch.device) -> Tensor:
        return torch.arange(len(self.latents), device=device) + 1

    def write(self, x: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.up(x, latents, self.written(torch.arange(x.shape[1], device=x.device)))

    def write_next(self, x: Tensor, positions: Tensor, latents: Tensor, rows: Tensor) -> Tensor:
        allowed = self.written(positions)
        assert allowed is not None  # only causal attention is continued
        return self.up(x, latents, allowed[:, None])

    def heard(self, x: Tensor, mask: Tensor) -> Tensor:
        first = mask if not self.causal else mask & (torch.arange(x.shape[1], device=x.device) < len(self.latents))
        return super().heard(x, first)

    def written(self, positions: Tensor) -> Tensor | None:
        """Which latents each position reads: (…, T, m), or None for all."""
        return self.ends(positions.device) <= positions[..., None] + 1 if self.causal else None

    def weights(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        start = self.latents.expand(len(x), -1, -1)
        through = self.down.weights(start, x, self.read_mask(x.shape[1], mask, x.device))  # (B, H, m, T)
        latents = self.read(x, self.latents, mask)
        return self.up.weights(x, latents, self.written(torch.arange(x.shape[1], device=x.device))) @ through


def keep(cache: LayerCache, x: Tensor, positions: Tensor) -> Tensor:
    """Write the inputs x (B, T, D) to the cache at `positions`; return every row so far, (B, S, D)."""
    rows, _ = cache.extend(x[:, None], x[:, None, :, :0], positions)
    return rows[:, 0].to(x.dtype)


def repeat_rows(x: Tensor, times: int) -> Tensor:
    """(B, …) → (B·N, …): each row `times` times."""
    return x[:, None].expand(-1, times, *x.shape[1:]).flatten(0, 1)
