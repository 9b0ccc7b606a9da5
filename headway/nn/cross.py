"""Attention to another row: queries from x, keys and values from a source.

    Attention(x, source) = softmax((x Wq) (source Wk)ᵀ / √K) (source Wv)     in every head

"Attention is all you need" (Vaswani et al. 2017), section 3.2.3. Time O(T·S·D). A source that is looked at again and
again, as in decoding, is read once: `look(x, *read(source))` is `forward(x, source)`.

Shapes: B batch, T queries, S source length, D width, H heads, K head width. Masks are boolean, True = may attend.
"""

from __future__ import annotations

from torch import Tensor, nn

from headway.nn.attention import attend, check_heads, join_heads, masked_softmax, split_heads


class CrossAttention(nn.Module):
    """Rows look at another source, with several heads."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(width, heads)
        self.heads = heads
        self.dropout = dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D), source (B, S, D), mask broadcasting to (B, H, T, S), True = may attend → (B, T, D)."""
        return self.look(x, *self.read(source), mask)

    def read(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a source (B, S, D): (B, H, S, K) each."""
        return split_heads(self.key(source), self.heads), split_heads(self.value(source), self.heads)

    def look(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D) looks at a source that was read before → (B, T, D)."""
        q = split_heads(self.query(x), self.heads)
        return self.output(join_heads(attend(q, keys, values, mask, dropout=self.dropout if self.training else 0.0)))

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, K), keys and values (B, H, S, K)."""
        return split_heads(self.query(x), self.heads), *self.read(source)

    def weights(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, H, T, S)."""
        q, k, _ = self.project(x, source)
        return masked_softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, mask)
