"""A layer around any attention, pre-norm: x + Attention(Norm(x)), then x + FeedForward(Norm(x)).

Shapes: B batch, T length, D width.
"""

from __future__ import annotations

from torch import Tensor, nn

from headway.nn.attention import Attention
from headway.nn.cache import LayerCache
from headway.nn.dropout import Dropout
from headway.nn.gelu import GELU
from headway.nn.norm import beside


class FeedForward(nn.Module):
    """W₂ f(W₁ x), applied to each position by itself; f is GELU where no other `activation` is given."""

    def __init__(self, width: int, hidden: int, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.activation = GELU() if activation is None else activation
        self.output = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.activation, GELU):
            return self.output(self.activation.of(self.inner, x))
        return self.output(self.activation(self.inner(x)))


class Block(nn.Module):
    """One layer around any attention."""

    def __init__(self, width: int, attention: Attention, feed_forward: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = attention
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = feed_forward
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, positions: Tensor, cache: LayerCache | None = None) -> Tensor:
        x, normed = beside(x, self.attention_norm)
        x = x + self.dropout(self.attention(normed, positions, cache))
        x, normed = beside(x, self.feed_forward_norm)
        return x + self.dropout(self.feed_forward(normed))  # (B, T, D)

    def empty_cache(self, rows: int, length: int) -> LayerCache:
        return self.attention.empty_cache(rows, length)
