"""Where the norm stands around a part of a layer.

    after    Norm(x + Dropout(part(x)))     "Attention is all you need" (Vaswani et al. 2017), section 3.1
    before   x + Dropout(part(Norm(x)))     "On layer normalization in the Transformer architecture" (Xiong et al. 2020)

With the norm before, what leaves the last layer was never normed: a stack of them ends with a norm of its own. With the
norm after, gradients near the output are large at first, and training wants a warm-up.

Shapes: B batch, T length, D width.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from headway.nn.dropout import Dropout
from headway.nn.norm import beside

Part = Callable[[Tensor], Tensor]


class PostNorm(nn.Module):
    """Norm(x + Dropout(part(x)))."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, part: Part) -> Tensor:
        return self.norm(x + self.dropout(part(self.enter(x))))  # (B, T, D)

    def enter(self, x: Tensor) -> Tensor:
        """What the part is given of x."""
        return x


class PreNorm(PostNorm):
    """x + Dropout(part(Norm(x)))."""

    def forward(self, x: Tensor, part: Part) -> Tensor:
        x, entering = beside(x, self.norm)
        return x + self.dropout(part(entering))  # (B, T, D)

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x)
