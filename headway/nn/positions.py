"""Where a token stands: position schemes.

Two kinds, by the place where they act:
  on the embeddings   `Learned`, `Sinusoidal`:  x + p(t)
  on queries and keys `Rotary`:                 R(t) q,  R(t) k

Every scheme takes explicit positions, (T,) for rows that all begin at the same place or (B, T) for rows that do not
(decoding a batch of unequal prompts), so a cached step and a full pass ask for the same numbers.

Shapes: B batch, T length, D width, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Learned(nn.Module):
    """x_t + P_t with P a table of `length` learned rows, zero at first. Cannot go past `length`."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(length, width))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table[positions]  # (B, T, D) + (T, D) or (B, T, D)


class Sinusoidal(nn.Module):
    """x_t + p_t with p_t[2i] = sin(t / 10000^(2i/D)) and p_t[2i+1] = cos of the same angle.

    "Attention is all you need", section 3.5. Computed on the fly, so it extends to any length.
    """

    inverse: Tensor

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"sinusoidal positions come in sin / cos pairs: width ({width}) must be even")
        self.register_buffer("inverse", frequencies(width, base), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * self.inverse  # (…, T, D/2)
        return x + torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(x.dtype)


class Rotary(nn.Module):
    """Turns each pair (x[2i], x[2i+1]) of a query or key by the angle t·θ_i, θ_i = base^(−2i/K).

    The score of a query at t and a key at s then depends on t − s alone. RoFormer (Su et al. 2021), section 3.2.
    """

    inverse: Tensor

    def __init__(self, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_width % 2:
            raise ValueError(f"rotary positions turn pairs: the width of a head ({head_width}) must be even")
        self.register_buffer("inverse", frequencies(head_width, base), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * self.inverse  # (T, K/2) or (B, T, K/2)
        if angles.dim() == 3:
            angles = angles[:, None]  # (B, 1, T, K/2): the same for every head
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]  # (B, H, T, K/2)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def frequencies(width: int, base: float) -> Tensor:
    """base^(−2i/width) for i = 0 … width/2 − 1, in the precision of the time of asking."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.get_default_dtype()) / width)
