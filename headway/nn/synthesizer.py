"""Synthesizers: attention whose weights come from each token alone, or from its place, without comparing tokens.

    Y = softmax(S) X V,    S one of
      DenseSynthesizer     S_t  = ReLU(x_t A + b₁) B + b₂             a small network of the token
      RandomSynthesizer    S    = R                                   a table, learned or left as drawn
      FactorisedDense      S_ts = a(x_t)_{s ÷ n} · b(x_t)_{s mod n}   two short vectors of the token, b of n numbers
      FactorisedRandom     S    = R₁ R₂ᵀ                              a table of low rank
      Mixture              S    = Σ_i α_i S_i,   Σ_i α_i = 1          several of these, the dot product among them
    Y = M X V
      TokenMixer           M a table: a linear layer across the row, no softmax

for each head, whose outputs are joined and projected as ever. "Synthesizer: rethinking self-attention for transformer
models" (Tay et al. 2020), section 3. Column s of S belongs to position s, so a synthesizer is built for a longest row,
`length`, and knows places by itself. Mixing the values costs time O(T²·D) and memory O(T²·H), as attention does; what
S costs on top is said with each.

Shapes: B batch, T queries, S keys, D width, H heads, K head width, L length. Masks are boolean, True = may attend.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import nearest
from headway.nn.attention import (
    Attention,
    check_heads,
    check_row,
    clear,
    join_heads,
    masked_softmax,
    place,
    split_heads,
    visible,
)
from headway.nn.cache import LayerCache
from headway.nn.dropout import dropout
from headway.nn.positions import InAttention


class Synthesizer(Attention):
    """What all synthesizers share: values, output, masks, the cache. A variant says what its `scores` are.

    The cache keeps values alone: its keys have a width of 0, except in a `Mixture` with the dot product.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
    ) -> None:
        super().__init__()
        check_heads(width, heads)
        name = type(self).__name__
        self.length = known_length(name, length)
        if position is not None:
            raise ValueError(
                f"{name} has no queries and keys for {type(position).__name__} to act on: leave position out, or take "
                'a Mixture with "dot-product"'
            )
        self.heads = heads
        self.head_width = width // heads
        self.key_width = 0
        self.causal = causal
        self.dropout = dropout
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    @abstractmethod
    def scores(self, x: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """How much each token of x (B, T, D) at t, (T,) or (B, T), looks at s, (S,) or (B, S): (B or 1, H, T, S).

        `k` are the `keys` at s.
        """

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        """What later tokens need for their scores, besides the place: (B, H, T, 0), that is nothing."""
        return x.new_zeros(x.shape[0], self.heads, x.shape[1], 0)

    def normalise(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """The weights (B or 1, H, T, S) that scores give to the columns that are `allowed`."""
        return masked_softmax(scores, allowed)

    def mix(self, weights: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """The values at s, weighed: (B, H, T, K)."""
        return weights @ v

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        check_row(x, positions, mask, self.heads * self.head_width)
        check_places(type(self).__name__, self.length, positions, cached=cache is not None)
        k, v = self.keys(x, positions), split_heads(self.value(x), self.heads)
        if cache is None:
            columns = positions
            allowed = visible(x.shape[1], self.causal, mask, x.device)
        else:
            k, v = (kept.to(v.dtype) for kept in cache.extend(k, v, positions))
            columns = torch.arange(v.shape[-2], device=x.device)
            allowed = columns <= positions[:, None, :, None]  # (B, 1, T, S): nothing after the token's own place
        weights = self.normalise(self.scores(x, k, positions, columns), allowed).expand(len(x), -1, -1, -1)
        weights = dropout(weights, self.dropout, self.training)
        mixed = join_heads(self.mix(weights, v, positions, columns))
        return clear(self.output(mixed), mixed, mask)

    def weights(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        check_places(type(self).__name__, self.length, positions)
        scores = self.scores(x, self.keys(x, positions), positions, positions)
        allowed = visible(x.shape[1], self.causal, mask, x.device)
        return self.normalise(scores, allowed).expand(len(x), -1, -1, -1)

    def empty_cache(self, rows: int, length: int) -> LayerCache:
        new = self.value.weight.new_zeros
        return LayerCache(new(rows, self.heads, length, self.key_width), new(rows, self.heads, length, self.head_width))


class DenseSynthesizer(Synthesizer):
    """S_t = ReLU(x_t A + b₁) B + b₂: two layers turn each token into its scores for every place.

    A (`inner`) is D × D, cut into heads; B (`columns`) is K × L and b₂ (`offsets`) has L numbers for each head, or for
    all heads together with `shared`. Time O(T·D² + T²·D); parameters D² + L·D, or D² + L·K with `shared`.
    Tay et al. 2020, section 3, "dense".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position)
        each = () if shared else (heads,)
        self.inner = nn.Linear(width, width)
        self.columns = nn.Parameter(torch.empty(*each, self.head_width, self.length))
        self.offsets = nn.Parameter(torch.zeros(*each, self.length))
        nn.init.uniform_(self.columns, -0.001, 0.001)

    def scores(self, x: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        inner = split_heads(F.relu(self.inner(x)), self.heads)  # (B, H, T, K)
        columns = self.columns.view(1, -1, self.head_width, self.length)  # (1, H or 1, K, L)
        offsets = self.offsets.view(1, -1, 1, self.length)  # (1, H or 1, 1, L)
        return inner @ columns_at(columns, s) + columns_at(offsets, s)


class RandomSynthesizer(Synthesizer):
    """S = R: where a token looks is a matter of its place alone, whatever the tokens are.

    R (`table`) is drawn from N(0, 1), L × L for each head. It is learned, or stays as it was drawn with
    `trainable=False`, the paper's fixed form. Time O(T²·H); parameters L²·H. Tay et al. 2020, section 3, "random".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position)
        table = torch.randn(heads, self.length, self.length)
        self.table: Tensor
        if trainable:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)  # saved with the weights, never stepped

    def scores(self, x: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return columns_at(rows_at(self.table, t), s)


class FactorisedDense(Synthesizer):
    """S_ts = a(x_t)_{s ÷ n} · b(x_t)_{s mod n}: the scores for m·n ≥ L places from m + n numbers.

    a and b (`first`, `second`) are linear in the token. Each number of a is repeated for a run of n columns, the whole
    of b is laid m times side by side, so no two columns have both factors in common. `factors` are (m, n), near √L
    where not given. Time O(T·D·(m + n)·H + T²·H); parameters D·(m + n)·H. Tay et al. 2020, section 3, "factorized
    dense".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        factors: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position)
        m, n = near_root(self.length) if factors is None else factors
        if min(m, n) < 1 or m * n < self.length:
            raise ValueError(f"factors ({m}, {n}) make {max(m, 0) * max(n, 0)} columns, and length is {self.length}")
        self.factors = (m, n)
        self.first = nn.Linear(width, heads * m)
        self.second = nn.Linear(width, heads * n)

    def scores(self, x: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        a = split_heads(self.first(x), self.heads)  # (B, H, T, m)
        b = split_heads(self.second(x), self.heads)  # (B, H, T, n)
        n = self.factors[1]
        return columns_at(a, s // n) * columns_at(b, s % n)


class FactorisedRandom(Synthesizer):
    """S = R₁ R₂ᵀ: the random table with a low `rank`, R₁ (`first`) and R₂ (`second`) L × rank for each head.

    Drawn so that S begins with variance 1. Time O(T²·rank·H); parameters 2·L·rank·H. Tay et al. 2020, section 3,
    "factorized random", rank 8 there too.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        rank: int = 8,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position)
        if rank < 1:
            raise ValueError(f"rank ({rank}) must be at least 1")
        self.first = nn.Parameter(torch.randn(heads, self.length, rank) * rank**-0.25)
        self.second = nn.Parameter(torch.randn(heads, self.length, rank) * rank**-0.25)

    def scores(self, x: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return rows_at(self.first, t) @ rows_at(self.second, s).transpose(-2, -1)


class TokenMixer(RandomSynthesizer):
    """Y = M X V: a linear layer across the row instead of across the width, M (`table`) L × L for each head.

    The random synthesizer without the softmax: weights may be any real numbers and need not sum to one. Lower
    triangular when causal; a token that does not count adds nothing. M is drawn from N(0, 1/L), so that what a full row
    adds up to is as large as its values. The token-mixing half of "MLP-Mixer" (Tolstikhin et al. 2021), section 2, with
    one layer where that has two. Time O(T²·D); parameters L²·H.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position, trainable=trainable)
        nn.init.normal_(self.table, std=self.length**-0.5)

    def normalise(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        return scores if allowed is None else scores.masked_fill(~allowed, 0.0)


class DotProduct(Synthesizer):
    """S_ts = q_tᵀ k_s / √K, what synthesizers are measured by: a part of `Mixture`; by itself it is `SelfAttention`."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length)
        self.key_width = self.head_width
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.position = position

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.turned(self.key(x), positions)

    def scores(self, x: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        q = self.turned(self.query(x), t) * self.head_width**-0.5
        scores = q @ k.transpose(-2, -1)
        bias = self.position.bias(q, place(t), place(s)) if self.position is not None else None
        return scores if bias is None else scores + bias

    def mix(self, weights: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
        mixed = super().mix(weights, v, t, s)
        return mixed if self.position is None else mixed + self.position.values(weights, place(t), place(s))

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (B, T, D), cut into heads and turned to their positions: (B, H, T, K)."""
        x = split_heads(x, self.heads)
        return x if self.position is None else self.position.turn(x, positions)


PARTS: dict[str, Callable[..., Synthesizer]] = {
    "dense": DenseSynthesizer,
    "random": RandomSynthesizer,
    "factorised-dense": FactorisedDense,
    "factorised-random": FactorisedRandom,
    "dot-product": DotProduct,
}


class Mixture(Synthesizer):
    """S = Σ_i α_i S_i with α = softmax(`shares`), N learned numbers for each head, equal at first.

    `parts` are names of `PARTS`; values and output are projected once for all of them. A `position` goes to the dot
    product, so what it adds to the scores is weighed by that part's α. Time and parameters: the sum of the parts'.
    Tay et al. 2020, section 3, "mixture of synthesizers".
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        parts: Sequence[str] = ("dense", "dot-product"),
    ) -> None:
        for name in parts:
            if name not in PARTS:
                raise ValueError(f"a mixture has no part {name!r}{nearest(name, PARTS)}")
        if not parts or len(set(parts)) < len(parts):
            raise ValueError(f"a mixture takes each part once and at least one of {', '.join(PARTS)}, not {parts}")
        refused = None if "dot-product" in parts else position
        super().__init__(width, heads, dropout, causal=causal, length=length, position=refused)
        self.parts = nn.ModuleDict()
        for name in parts:
            part = PARTS[name](width, heads, length=length, position=position if name == "dot-product" else None)
            del part.value, part.output  # its scores are mixed, not its values
            self.parts[name] = part
            self.key_width = max(self.key_width, part.key_width)
        self.shares = nn.Parameter(torch.zeros(len(self.parts), heads))

    def scores(self, x: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        alpha = self.shares.softmax(0)[:, :, None, None]  # (N, H, 1, 1)
        parts = (cast(Synthesizer, part) for part in self.parts.values())
        return sum((share * part.scores(x, k, t, s) for share, part in zip(alpha, parts, strict=True)), x.new_zeros(()))

    def take_position(self, scheme: InAttention) -> None:
        if self.dot_product is None or self.dot_product.position is not None:
            super().take_position(scheme)
        else:
            self.dot_product.position = scheme

    def keys(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().keys(x, positions) if self.dot_product is None else self.dot_product.keys(x, positions)

    def mix(self, weights: Tensor, v: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return super().mix(weights, v, t, s) if self.dot_product is None else self.dot_product.mix(weights, v, t, s)

    @property
    def dot_product(self) -> DotProduct | None:
        """The part that compares tokens, where there is one."""
        return cast(DotProduct, self.parts["dot-product"]) if "dot-product" in self.parts else None


def columns_at(table: Tensor, s: Tensor) -> Tensor:
    """The columns s, (S,) or (B, S), of a table (B or 1, H, T, L): (B or 1, H, T, S)."""
    if s.dim() == 1:
        return table.index_select(-1, s)
    table = table.expand(len(s), -1, -1, -1)
    return table.gather(-1, s[:, None, None].expand(*table.shape[:-1], -1))


def rows_at(table: Tensor, t: Tensor) -> Tensor:
    """The rows t, (T,) or (B, T), of each head's table (H, L, R): (1 or B, H, T, R)."""
    rows = table.index_select(1, t.flatten())
    return rows.unflatten(1, (1 if t.dim() == 1 else len(t), t.shape[-1])).transpose(0, 1)


def near_root(length: int) -> tuple[int, int]:
    """Two numbers near √length whose product reaches `length`."""
    m = math.isqrt(length - 1) + 1
    return m, -(-length // m)


def known_length(name: str, length: int | None) -> int:
    if length is None or length < 1:
        raise ValueError(f"{name} has a column for every position: give the longest row as length, not {length}")
    return length


def check_places(name: str, length: int, positions: Tensor, cached: bool = False) -> None:
    """Refuse rows longer than `length` and positions beyond it.

    Positions are looked at where that is free: on a CPU, and with a cache, which looks at them too. Elsewhere it would
    hold up the device, and the device's own check of indices stands in.
    """
    count = positions.shape[-1]
    if count > length:
        raise ValueError(f"a row of {count} tokens, and this {name} was built for length {length}: build a longer one")
    free = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    if (free or cached) and positions.numel() and int(positions.max()) >= length:
        raise ValueError(
            f"position {int(positions.max())}, and this {name} was built for length {length}, positions 0 to "
            f"{length - 1}: build a longer one"
        )
