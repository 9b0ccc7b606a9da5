"""Where a token stands: position schemes.

By the place where they act:
  on the embeddings      `Learned`, `Sinusoidal`             x_t + p(t)
  on queries and keys    `Rotary`                            (R(t) q_t)ᵀ (R(s) k_s)
  on the scores          `ALiBi`, `T5Bias`                   q_tᵀ k_s / √K + b(t, s)
  on scores and values   `Relative`                          q_tᵀ (k_s + a(s − t)) / √K,   Σ_s w_ts (v_s + c(s − t))

Every scheme takes explicit positions, (T,) for rows that all begin at the same place or (B, T) for rows that do not
(decoding a batch of unequal prompts), so a cached step and a full pass ask for the same numbers.

Shapes: B batch, T queries, S keys, D width, H heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headway.errors import nearest

IN_ATTENTION = ("relative", "rotary", "alibi", "t5")  # those that act on queries, keys, scores or values
NAMES = ("learned", "sinusoidal", *IN_ATTENTION, "none")


def make_position(
    name: str, width: int, heads: int, length: int | None = None, causal: bool = False, base: float = 10_000.0
) -> nn.Module | None:
    """The scheme of this name; an `InAttention` is for the attention layers, any other module for the embeddings."""
    if name == "learned" and length is None:
        raise ValueError("learned positions are a table: give the longest length it is for")
    schemes: dict[str, Callable[[], nn.Module | None]] = {
        "learned": lambda: Learned(length or 0, width),
        "sinusoidal": lambda: Sinusoidal(width),
        "relative": lambda: Relative(width // heads),
        "rotary": lambda: Rotary(width // heads, base),
        "alibi": lambda: ALiBi(heads),
        "t5": lambda: T5Bias(heads, causal=causal),
        "none": lambda: None,
    }
    if name not in schemes:
        raise ValueError(f"positions {name!r} are unknown{nearest(name, schemes)}")
    return schemes[name]()


class Learned(nn.Module):
    """x_t + P_t with P a table of `length` learned rows, zero at first. Cannot go past `length`."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(length, width))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if x.shape[-2] > len(self.table):
            raise ValueError(
                f"a row of {x.shape[-2]} positions, and the learned table has {len(self.table)}; make a longer one, "
                "Learned(length, width), or use positions without a length"
            )
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            first, last = int(positions.min()), int(positions.max())
            if first < 0 or last >= len(self.table):
                raise ValueError(f"positions {first} to {last}, and the learned table has 0 to {len(self.table) - 1}")
        return x + self.table[positions]  # (B, T, D) + (T, D) or (B, T, D)


class Sinusoidal(nn.Module):
    """x_t + p_t with p_t[2i] = sin(t / 10000^(2i/D)) and p_t[2i+1] = cos of the same angle.

    "Attention is all you need", section 3.5. Computed on the fly, so it extends to any length. p_tᵀ p_s depends on
    t − s alone, and p_{t+Δ} is a rotation of p_t.
    """

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"sinusoidal positions come in sin / cos pairs: width ({width}) must be even")
        self.width, self.base = width, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.table(positions, x.dtype).to(x.dtype)

    def table(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """p_t for every position: (…, T, D), in float32 or better."""
        angles = positions[..., None] * frequencies(self.width, self.base, positions.device, dtype)  # (…, T, D/2)
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


class InAttention(nn.Module):
    """A scheme that acts inside attention. Each hook does nothing unless a scheme says otherwise.

    `t` and `s` are the positions of the queries and the keys, (T,) and (S,), or (B, 1, T) and (B, 1, S) where rows
    differ, or with axes between: they broadcast against queries (B, H, …, T, K) and scores (B, H, …, T, S).
    """

    on_values = False  # does `values` add anything? If not, no weights need to be written out for it

    @property
    def only_turns(self) -> bool:
        """Does the scheme act on queries and keys alone? Then a kernel that knows no biases will do."""
        return not self.on_values and type(self).bias is InAttention.bias

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys (B, H, T, K), turned to their positions, (T,) or (B, T)."""
        return x

    def bias(self, q: Tensor, t: Tensor, s: Tensor) -> Tensor | None:
        """What is added to the scores of the queries q, already divided by √K: broadcasts to (B, H, …, T, S)."""
        return None

    def values(self, weights: Tensor, t: Tensor, s: Tensor) -> Tensor:
        """What is added to the weighted values, for weights (B, H, …, T, S): broadcasts to (B, H, …, T, K)."""
        return weights.new_zeros(())


class Rotary(InAttention):
    """Turns each pair (x[2i], x[2i+1]) of a query or key by the angle t·θ_i, θ_i = base^(−2i/K).

    The score of a query at t and a key at s then depends on t − s alone. RoFormer (Su et al. 2021), section 3.2.
    """

    def __init__(self, head_width: int, base: float = 10_000.0) -> None:
        super().__init__()
        if head_width % 2:
            raise ValueError(f"rotary positions turn pairs: the width of a head ({head_width}) must be even")
        self.width, self.base = head_width, base

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * frequencies(self.width, self.base, x.device, x.dtype)  # (T, K/2) or (B, T, K/2)
        if angles.dim() == 3:
            angles = angles[:, None]  # (B, 1, T, K/2): the same for every head
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]  # (B, H, T, K/2)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class ALiBi(InAttention):
    """Scores fall with distance: q_tᵀk_s/√K − m_h·|t − s|, the slope m_h = 2^(−8h/H) for head h = 1 … H.

    "Train short, test long" (Press et al. 2022). Nothing is learned, so any length goes. Where H is no power of two,
    the slopes of the next smaller one come first and every other slope of the next larger one fills up.
    """

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        lower = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * h / lower) for h in range(1, lower + 1)]
        slopes += [2 ** (-8 * h / (2 * lower)) for h in range(1, 2 * (heads - lower), 2)]
        self.register_buffer("slopes", torch.tensor(slopes, dtype=torch.get_default_dtype()), persistent=False)

    def bias(self, q: Tensor, t: Tensor, s: Tensor) -> Tensor:
        slopes = self.slopes.to(q.dtype).view(-1, *[1] * (q.dim() - 2))  # (H, 1, …, 1)
        return -slopes * distance(t, s).abs()


class T5Bias(InAttention):
    """A learned number for each head and each bucket of distances is added to the scores: q_tᵀk_s/√K + b_h(s − t).

    "Exploring the limits of transfer learning" (Raffel et al. 2020), section 2.1. Half of the buckets hold one distance
    each, the other half grow logarithmically up to `furthest`, beyond which all distances are alike. A causal model
    spends all its buckets on the past, any other half of them on each side. Two things T5 does otherwise: it does not
    divide by √K, and all its layers share one table (give them the same `T5Bias` for that).
    """

    def __init__(self, heads: int, buckets: int = 32, furthest: int = 128, causal: bool = False) -> None:
        super().__init__()
        if buckets < 4 or buckets % 2 or furthest <= buckets:
            raise ValueError(
                f"T5 needs an even number of buckets from 4 on ({buckets}) and a furthest ({furthest}) above"
            )
        self.buckets, self.furthest, self.causal = buckets, furthest, causal
        self.table = nn.Parameter(torch.zeros(buckets, heads))

    def bias(self, q: Tensor, t: Tensor, s: Tensor) -> Tensor:
        found = self.table[self.bucket(distance(t, s))]  # (…, T, S, H)
        if found.dim() - 1 == q.dim():  # rows differ: (B, 1, …, T, S, H), the heads take the place of the 1
            return found.movedim(-1, 1).squeeze(2)
        return found.movedim(-1, 0)  # (H, …, T, S)

    def bucket(self, offsets: Tensor) -> Tensor:
        """The bucket of each s − t."""
        count = self.buckets if self.causal else self.buckets // 2
        side = torch.zeros_like(offsets) if self.causal else count * (offsets > 0)
        far = (-offsets).clamp(min=0) if self.causal else offsets.abs()
        single = count // 2
        steps = torch.log(far.clamp(min=single) / single) / math.log(self.furthest / single) * (count - single)
        return side + torch.where(far < single, far, (single + steps.long()).clamp(max=count - 1))


class Relative(InAttention):
    """Learned vectors for clipped distances join keys and values.

        e_ts = q_tᵀ (k_s + a_{clip(s−t)}) / √K,    z_t = Σ_s softmax(e)_ts (v_s + c_{clip(s−t)}),   clip to ±`reach`

    "Self-attention with relative position representations" (Shaw et al. 2018). Both tables are shared by the heads.
    The terms are taken distance by distance, so no (T, S, K) tensor is built: time O(T·S·K), memory O(T·S).
    """

    on_values = True

    def __init__(self, head_width: int, reach: int = 16) -> None:
        super().__init__()
        if reach < 1:
            raise ValueError(f"relative positions reach at least 1 token, not {reach}")
        self.reach = reach
        self.key_table = nn.Parameter(torch.empty(2 * reach + 1, head_width))
        self.value_table = nn.Parameter(torch.empty(2 * reach + 1, head_width))
        nn.init.xavier_uniform_(self.key_table)
        nn.init.xavier_uniform_(self.value_table)

    def bias(self, q: Tensor, t: Tensor, s: Tensor) -> Tensor:
        by_offset = q @ self.key_table.T  # (B, H, …, T, 2·reach + 1)
        return by_offset.gather(-1, self.index(t, s, by_offset.shape[:-1]))

    def values(self, weights: Tensor, t: Tensor, s: Tensor) -> Tensor:
        by_offset = weights.new_zeros(*weights.shape[:-1], 2 * self.reach + 1)
        by_offset = by_offset.scatter_add(-1, self.index(t, s, weights.shape[:-1]), weights)
        return by_offset @ self.value_table

    def index(self, t: Tensor, s: Tensor, shape: torch.Size) -> Tensor:
        """The row of the tables for each pair: (B, H, …, T, S)."""
        offsets = distance(t, s).clamp(-self.reach, self.reach) + self.reach
        return offsets.expand(*shape, offsets.shape[-1])


def distance(t: Tensor, s: Tensor) -> Tensor:
    """s − t for every pair: (…, T, S)."""
    return s[..., None, :] - t[..., :, None]


def frequencies(width: int, base: float, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """base^(−2i/width) for i = 0 … width/2 − 1, in float32 or better whatever the weights are in."""
    dtype = torch.promote_types(dtype or torch.get_default_dtype(), torch.float32)
    return base ** (-torch.arange(0, width, 2, dtype=dtype, device=device) / width)
