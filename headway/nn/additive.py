"""Additive attention: a small network says how well a query fits a key.

    score_ts = uᵀ tanh(W_q x_t + W_k x_s),    one u for each head

"Neural machine translation by jointly learning to align and translate" (Bahdanau et al. 2015), section 3.1 and
appendix A.1.2, there between a decoder and an encoder, here within a row. Time O(T²·D) with a tanh for each of the
T²·D numbers, which no matrix product takes over: many times slower than the dot product at the same width. Memory
O(T²·H): queries are taken a few at a time, and training computes their tanh once more instead of keeping it.

Shapes: B batch, T queries, S keys, D width, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.nn.attention import SelfAttention
from headway.nn.positions import InAttention

AT_ONCE = 2**20  # numbers under the tanh at a time


class Additive(SelfAttention):
    """softmax_s(uᵀ tanh(q_t + k_s)) V with several heads.

    What a position scheme adds to scores and values is added here too. `Rotary` turns queries and keys before they
    are added: a score then depends on both places, not on their difference alone.
    """

    by_products = False

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
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position)
        self.u = nn.Parameter(torch.empty(heads, width // heads))
        nn.init.uniform_(self.u, -self.scale, self.scale)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, t: Tensor, s: Tensor, allowed: Tensor | None, causal: bool = False
    ) -> Tensor:
        return self.mix_in_full(q, k, v, t, s, allowed, causal)

    def scores(self, q: Tensor, k: Tensor, t: Tensor, s: Tensor) -> Tensor:
        pieces = q.split(max(1, AT_ONCE // max(1, k.numel())), dim=-2)
        again = len(pieces) > 1 and torch.is_grad_enabled()  # rather than keep every tanh for the backward pass
        scores = torch.cat([self.fit_again(piece, k) if again else self.fit(piece, k) for piece in pieces], dim=-2)
        bias = self.position.bias(q * self.scale, t, s) if self.position is not None else None
        return scores if bias is None else scores + bias

    def fit(self, q: Tensor, k: Tensor) -> Tensor:
        """uᵀ tanh(q_t + k_s) for every pair: q (B, H, …, T, K), k (B, H, …, S, K) → (B, H, …, T, S)."""
        joined = torch.tanh(q[..., :, None, :] + k[..., None, :, :])  # (B, H, …, T, S, K)
        return torch.einsum("bh...k,hk->bh...", joined, self.u)

    def fit_again(self, q: Tensor, k: Tensor) -> Tensor:
        """`fit`, computed once more when gradients are asked for."""
        return checkpoint(self.fit, q, k, use_reentrant=False, preserve_rng_state=False)
