"""Local attention: every position looks at its `reach` nearest neighbours on each side.

    z_t = Σ_{|t−s| ≤ r} softmax_s(q_tᵀ k_s / √K) v_s          (causal: 0 ≤ t − s ≤ r)

"Attention is all you need", section 4 ("restricted self-attention"). Time O(T·r·D), memory O(T·D); the path between two
distant positions grows to T/r layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.nn.positions import InAttention, distance
from headway.nn.sparse import BlockSparse


class Local(BlockSparse):
    """Attention restricted to `reach` neighbours before and, unless causal, after each position."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        reach: int = 32,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position)
        if reach < 0:
            raise ValueError(f"local attention reaches at least 0 neighbours, not {reach}")
        self.reach = reach
        self.block = max(16, reach)  # a block's neighbours are then all in the blocks beside it

    def key_blocks(self, blocks: int, device: torch.device) -> Tensor:
        offsets = torch.arange(-1, 1 if self.causal else 2, device=device)  # the block before, its own, the one behind
        table = torch.arange(blocks, device=device)[:, None] + offsets
        return table.masked_fill(table >= blocks, -1)

    def near(self, t: Tensor, s: Tensor) -> Tensor:
        return distance(t, s).abs() <= self.reach
