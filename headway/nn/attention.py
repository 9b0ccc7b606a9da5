"""Scaled dot-product attention with several heads.

    Attention(Q, K, V) = softmax(Q Kᵀ / √K_width + mask) V
    MultiHead(X)       = [head_1; …; head_H] W_O,   head_i = Attention(X Wq_i, X Wk_i, X Wv_i)

"Attention is all you need" (Vaswani et al. 2017), section 3.2. Time O(T·S·D), memory O(T·S·H) at the worst, less with
the fused kernels of `scaled_dot_product_attention`.

Shapes: B batch, T queries, S keys, D width, H heads, K head width. Masks are boolean, True = may attend.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn.cache import LayerCache


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """softmax(q kᵀ / √K) v over the keys that `mask` allows: q (B, H, T, K), k and v (B, H, S, K) → (B, H, T, K).

    A query with nothing to attend to gets zeros and passes zero gradients on, never NaN.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
    if causal:
        mask = mask & causal_mask(q.shape[-2], k.shape[-2], q.device)
    nothing = ~mask.any(-1, keepdim=True)  # (…, T, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask | nothing, dropout_p=dropout)
    return out.masked_fill(nothing, 0.0)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """The weights that `attend` applies, written out: (B, H, T, S). For looking at, not for training."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # (B, H, T, S)
    allowed = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
    if causal:
        allowed = allowed & causal_mask(q.shape[-2], k.shape[-2], q.device)
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)


def causal_mask(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """(T, S): query t may look at key s where s ≤ t."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


class Attention(nn.Module):
    """What a block asks of its attention, whichever mechanism it is."""

    @abstractmethod
    def forward(self, x: Tensor, positions: Tensor, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, D), positions (T,) or (B, T), this layer's cache or None → (B, T, D)."""

    @abstractmethod
    def weights(self, x: Tensor, positions: Tensor) -> Tensor:
        """What each position attends to: (B, H, T, T)."""

    @abstractmethod
    def empty_cache(self, rows: int, length: int) -> LayerCache:
        """Room for `length` tokens in each of `rows` rows."""


class SelfAttention(Attention):
    """Causal self-attention with `heads` heads; `rotate` turns queries and keys by their positions, where given."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, rotate: nn.Module | None = None) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads ({heads}) must divide width ({width})")
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.dropout = dropout
        self.rotate = rotate

    def forward(self, x: Tensor, positions: Tensor, cache: LayerCache | None = None) -> Tensor:
        q, k, v = self.project(x, positions)
        dropout = self.dropout if self.training else 0.0
        if cache is None:
            heads = attend(q, k, v, causal=True, dropout=dropout)
        else:
            k, v = cache.extend(k, v, positions)
            slots = torch.arange(k.shape[-2], device=x.device)
            mask = slots <= positions[:, None, :, None]  # (B, 1, T, S): nothing after the query's own place
            heads = attend(q, k.to(q.dtype), v.to(q.dtype), mask=mask, dropout=dropout)
        return self.output(heads.transpose(1, 2).flatten(2))

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, (B, H, T, K) each, turned to their positions."""
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        if self.rotate is not None:
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        return q, k, v

    def weights(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, _ = self.project(x, positions)
        return attention_weights(q, k, causal=True)

    def empty_cache(self, rows: int, length: int) -> LayerCache:
        weight = self.key.weight
        return LayerCache.empty(rows, self.heads, length, weight.shape[0] // self.heads, like=weight)
