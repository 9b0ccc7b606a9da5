"""BigBird: a window, a few global blocks and a few random ones, block by block.

    position t looks at   the blocks beside its own           (window)
                          the first g blocks                  (global; these look at everything themselves)
                          r blocks chosen once by chance      (random)

"Big Bird: Transformers for longer sequences" (Zaheer et al. 2020), section 2. With C = window + g + r blocks of b
positions: time O(T·C·b·D), memory O(T·C·D). Causal, every block looks only backwards: the window is its left half, the
random blocks lie before it, and nobody looks at everything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.nn.attention import place
from headway.nn.positions import InAttention
from headway.nn.sparse import BlockSparse


class BigBird(BlockSparse):
    """Block-sparse attention for rows of at most `length` positions.

    `window` is the number of blocks in the window, the own one in the middle (odd). The random blocks are drawn at
    construction from torch's generator and kept with the weights. They are drawn for `length`, so a shorter row sees
    those of them that it has, and padding a row changes nothing.
    """

    pattern: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float = 0.0,
        *,
        causal: bool = False,
        length: int | None = None,
        position: InAttention | None = None,
        block: int = 64,
        window: int = 3,
        globals: int = 1,
        randoms: int = 2,
    ) -> None:
        super().__init__(width, heads, dropout, causal=causal, length=length, position=position)
        if length is None:
            raise ValueError("BigBird draws its random blocks once: give the longest length it is for")
        if block < 1 or window < 1 or window % 2 == 0 or globals < 0 or randoms < 0:
            raise ValueError(
                f"BigBird needs blocks of at least 1 position ({block}), an odd window of blocks ({window}), "
                f"and no negative number of global ({globals}) or random ({randoms}) blocks"
            )
        block = min(block, length)  # a row shorter than a block is one block
        self.block, self.length, self.globals = block, length, globals
        pattern = draw_pattern(-(-length // block), window, globals, randoms, causal)
        self.register_buffer("pattern", pattern)

    def key_blocks(self, blocks: int, device: torch.device) -> Tensor:
        if blocks > len(self.pattern):
            raise ValueError(
                f"a row of {blocks} blocks of {self.block}, and this BigBird was built for {self.length} positions"
            )
        table = self.pattern[:blocks]
        return table.masked_fill(table >= blocks, -1)

    def near(self, t: Tensor, s: Tensor) -> None:
        return None

    def sees(self, t: Tensor, s: Tensor) -> Tensor:
        seen = super().sees(t, s)
        return seen if self.causal else seen | (t < self.globals * self.block)[..., None]

    def whole(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        if q.shape[-2] > self.length:
            raise ValueError(f"a row of {q.shape[-2]} positions, and this BigBird was built for {self.length}")
        mixed = super().whole(q, k, v, positions, mask)
        count = min(self.globals * self.block, q.shape[-2])
        if self.causal or not count:
            return mixed
        padding = None if mask is None else mask[:, None, None, :]
        t = place(positions)
        everywhere = self.mix(q[:, :, :count], k, v, t[..., :count], t, padding)  # (B, H, g·b, K): O(T)
        return torch.cat([everywhere, mixed[:, :, count:]], -2)


def draw_pattern(blocks: int, window: int, globals: int, randoms: int, causal: bool) -> Tensor:
    """(N, C): for each block the blocks it looks into, none twice; −1 fills up."""
    rows = []
    for block in range(blocks):
        last = block if causal else min(blocks - 1, block + window // 2)
        beside = range(max(0, block - window // 2), last + 1)
        chosen = sorted({*beside, *range(min(globals, block + 1 if causal else blocks))})
        others = [other for other in range(block if causal else blocks) if other not in chosen]
        picked = torch.randperm(len(others))[:randoms].tolist()
        chosen += [others[place] for place in picked]
        rows.append(chosen + [-1] * (window + globals + randoms - len(chosen)))
    return torch.tensor(rows)
