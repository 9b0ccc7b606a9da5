"""Self-attention: what every mechanism offers, and the one the others are measured by.

    Attention(Q, K, V) = softmax(Q Kᵀ / √K_width + mask) V
    MultiHead(X)       = [head_1; …; head_H] W_O,   head_i = Attention(X Wq_i, X Wk_i, X Wv_i)

"Attention is all you need" (Vaswani et al. 2017), section 3.2. Time O(T²·D); memory O(T²·H) at the worst, O(T·D)
with the fused kernels of `scaled_dot_product_attention`.

Shapes: B batch, T queries, S keys, D width, H heads, K head width. Masks are boolean, True = may attend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn import kernels, short
from headway.nn.cache import LayerCache
from headway.nn.dropout import dropout
from headway.nn.positions import InAttention


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """softmax(q kᵀ·scale + bias) v over the keys that `mask` allows: q (…, T, K), k and v (…, S, K) → (…, T, K).

    `scale` is 1/√K where it is not given; `mask` and `bias` broadcast to (…, T, S). A query with nothing to attend to
    gets zeros and passes zero gradients on, never NaN.
    """
    check_mask(mask)
    if bias is not None:
        bias = bias.to(q.dtype)
    if mask is None and bias is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout, scale=scale)
    if causal:
        order = causal_mask(q.shape[-2], k.shape[-2], q.device)
        mask = order if mask is None else mask & order
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    nothing = ~mask.any(-1, keepdim=True)  # (…, T, 1)
    allowed = mask | nothing
    added = allowed if bias is None else bias.masked_fill(~allowed, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, scale=scale)
    return out.masked_fill(nothing, 0.0)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax over the keys that `mask` allows; a row without any gives zeros and passes zero gradients on."""
    check_mask(mask)
    if mask is None:
        return scores.softmax(-1)
    nothing = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~(mask | nothing), float("-inf")).softmax(-1).masked_fill(nothing, 0.0)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(T, S): query t may look at key s where s ≤ t."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def visible(count: int, causal: bool, mask: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    """Who may look at whom in rows of `count` tokens, of which `mask` (B, T) counts some: (B, 1, T, T) or (T, T)."""
    order = causal_mask(count, count, device) if causal else None
    if mask is None:
        return order
    padding = mask[:, None, None, :]  # (B, 1, 1, S)
    return padding.expand(-1, 1, count, -1) if order is None else padding & order


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, D) → (B, H, T, K)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(B, H, T, K) → (B, T, D)."""
    return x.transpose(1, 2).flatten(2)


def check_mask(mask: Tensor | None) -> None:
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"a mask is torch.bool, True = may attend; this one is {mask.dtype}")


def check_row(x: Tensor, positions: Tensor, mask: Tensor | None, width: int) -> None:
    """x (B, T, D), its positions (T,) or (B, T), its mask (B, T): what does not fit is named."""
    if x.dim() != 3 or x.shape[-1] != width:
        raise ValueError(f"x has the shape {tuple(x.shape)}; (B, T, {width}) is wanted")
    rows, count = x.shape[:2]
    if tuple(positions.shape) not in ((count,), (rows, count)):
        raise ValueError(
            f"positions {tuple(positions.shape)} for {rows} rows of {count} tokens; give one for each token"
        )
    check_mask(mask)
    if mask is not None and tuple(mask.shape) != (rows, count):
        raise ValueError(f"the mask says which tokens count, ({rows}, {count}), and has the shape {tuple(mask.shape)}")


def clear(out: Tensor, mixed: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros, not the output's bias, for positions that took nothing from anybody; only padding (`mask`) makes any."""
    return out if mask is None else out.masked_fill((mixed == 0).all(-1, keepdim=True), 0.0)


def check_heads(width: int, heads: int) -> None:
    if heads < 1 or width % heads:
        raise ValueError(f"heads ({heads}) must divide width ({width})")


class Attention(nn.Module, ABC):
    """What a layer asks of its self-attention, whichever mechanism it is.

    Every mechanism is built as `Mechanism(width, heads, dropout, causal=…, length=…, position=…, its own options)`:
    `causal` keeps each position from seeing later ones, `length` is the longest row (only those that are built for a
    fixed length need it), `position` acts on queries and keys (only those that have them take one).
    """

    causal: bool

    def take_position(self, scheme: InAttention) -> None:
        """Let a scheme act in this attention, where there is something for it to act on."""
        raise ValueError(f"{type(self).__name__} has no queries and keys for {type(scheme).__name__} to act on")

    @abstractmethod
    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """x (B, T, D), positions (T,) or (B, T) → (B, T, D).

        `mask` (B, T) is True where a token counts: nobody looks at the others, and who has nobody to look at gets
        zeros. With this layer's `cache` (causal attention only), x continues the cache's rows at `positions` (B, T),
        and no mask is needed.
        """

    @abstractmethod
    def weights(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """How much of each position every position takes: (B, H, T, T). For looking at, not for training."""

    @abstractmethod
    def empty_cache(self, rows: int, length: int) -> LayerCache:
        """Room for `length` tokens in each of `rows` rows."""


class SelfAttention(Attention):
    """Scaled dot-product self-attention with several heads; a `position` scheme acts on queries, keys and scores."""

    by_products = True  # every query meets every key it may see, and their product is the score

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
        self.width = width
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.position = position

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return (self.width // self.heads) ** -0.5

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        check_row(x, positions, mask, self.width)
        packed = self.packed(x) if cache is None else None  # joining the weights costs more than a token does
        if packed is not None and mask is None and self.plainly_causal() and short.fits(packed):
            turned = self.turn_packed(packed, positions)
            mixed = short.short_attention(turned, self.dropout if self.training else 0.0, self.scale).flatten(2)
            return self.output(mixed)
        q, k, v = self.split(x, packed, positions)
        if cache is None:
            heads = self.whole(q, k, v, positions, mask)
        else:
            k, v = cache.extend(k, v, positions)
            heads = self.step(q, k.to(q.dtype), v.to(q.dtype), positions)
        mixed = join_heads(heads)
        return clear(self.output(mixed), mixed, mask)

    def take_position(self, scheme: InAttention) -> None:
        if self.position is not None:
            raise ValueError(f"it has {type(self.position).__name__} positions already; leave one of the two out")
        self.position = scheme

    def packed(self, x: Tensor) -> Tensor | None:
        """Queries, keys and values by one product, (B, T, 3, H, K), on a GPU, which three small ones would not fill."""
        linears = (self.query, self.key, self.value)
        if not x.is_cuda or not all(kernels.plain(each) for each in linears):
            return None
        weight, bias = torch.cat([each.weight for each in linears]), torch.cat([each.bias for each in linears])
        return F.linear(x, weight, bias).unflatten(-1, (3, self.heads, -1))

    def plainly_causal(self) -> bool:
        """Whether nothing but the order of the tokens and the turning of queries and keys bears on the scores."""
        return (
            self.causal
            and self.by_products
            and self.dropout < 1
            and (self.position is None or self.position.only_turns)
        )

    def turn_packed(self, packed: Tensor, positions: Tensor) -> Tensor:
        if self.position is None:
            return packed
        q, k, v = packed.unbind(2)  # (B, T, H, K) each
        turned = (self.position.turn(each.transpose(1, 2), positions).transpose(1, 2) for each in (q, k))
        return torch.stack([*turned, v], 2)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, (B, H, T, K) each, turned to their positions."""
        return self.split(x, self.packed(x), positions)

    def split(self, x: Tensor, packed: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`project`, where the packed product may be there already."""
        if packed is not None:
            q, k, v = packed.transpose(1, 3).unbind(2)
        else:
            q, k, v = (split_heads(linear(x), self.heads) for linear in (self.query, self.key, self.value))
        if self.position is not None:
            q, k = self.position.turn(q, positions), self.position.turn(k, positions)
        return q, k, v

    def whole(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """Every position of the rows looks at the rows: (B, H, T, K)."""
        padding = None if mask is None else mask[:, None, None, :]  # (B, 1, 1, S)
        return self.mix(q, k, v, place(positions), place(positions), padding, self.causal)

    def step(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """New queries at `positions` (B, T) look at the slots of the cache: (B, H, T, K)."""
        slots = torch.arange(k.shape[-2], device=q.device)
        allowed = slots <= positions[:, None, :, None]  # (B, 1, T, S): nothing after the query's own place
        return self.mix(q, k, v, place(positions), slots, allowed)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, t: Tensor, s: Tensor, allowed: Tensor | None, causal: bool = False
    ) -> Tensor:
        """The values, weighed: queries at positions t look at the keys at s that are `allowed` → (…, T, K)."""
        if self.position is not None and self.position.on_values:
            return self.mix_in_full(q, k, v, t, s, allowed, causal)
        bias = self.position.bias(q * self.scale, t, s) if self.position is not None else None
        return attend(q, k, v, allowed, causal, self.dropout if self.training else 0.0, self.scale, bias)

    def mix_in_full(
        self, q: Tensor, k: Tensor, v: Tensor, t: Tensor, s: Tensor, allowed: Tensor | None, causal: bool = False
    ) -> Tensor:
        """`mix` with the weights written out, for what no fused kernel computes."""
        if causal:
            order = causal_mask(q.shape[-2], k.shape[-2], q.device)
            allowed = order if allowed is None else allowed & order
        weights = dropout(masked_softmax(self.scores(q, k, t, s), allowed), self.dropout, self.training)
        mixed = weights @ v
        return mixed if self.position is None else mixed + self.position.values(weights, t, s)

    def scores(self, q: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """How well each query fits each key: (…, T, S)."""
        scores = q @ k.transpose(-2, -1) * self.scale
        bias = self.position.bias(q * self.scale, t, s) if self.position is not None else None
        return scores if bias is None else scores + bias

    def weights(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, _ = self.project(x, positions)
        allowed = visible(x.shape[1], self.causal, mask, x.device)
        return masked_softmax(self.scores(q, k, place(positions), place(positions)), allowed)

    def empty_cache(self, rows: int, length: int) -> LayerCache:
        weight = self.key.weight
        return LayerCache.empty(rows, self.heads, length, weight.shape[0] // self.heads, like=weight)


def place(positions: Tensor) -> Tensor:
    """Positions with room for the heads: (T,) stays, (B, T) becomes (B, 1, T)."""
    return positions if positions.dim() == 1 else positions[:, None]


class Unscaled(SelfAttention):
    """softmax(Q Kᵀ) V, without the division by √K: for comparison. The scores grow with the head width and the
    softmax saturates ("Attention is all you need", section 3.2.1; `headway lab scaling`). Time O(T²·D).
    """

    scale = 1.0
