"""Causal attention over short rows in one kernel, for CUDA GPUs.

    O = dropout(softmax(Q Kᵀ · scale + causal)) V

The scores of a row of at most 128 tokens fit the registers of one processor: they are computed at once, without the
running softmax that longer rows need ("FlashAttention", Dao et al. 2022), and nothing of them is kept; the backward
pass computes them again, and needs one kernel where the general one needs three. Queries, keys and values are read from
one packed tensor, as one product makes them, and their gradients are written into one. Time O(T²·D), memory O(T·D).

Shapes: B rows, T tokens, H heads, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headway.nn import kernels

LONGEST = 128  # tokens whose scores fit the registers
WIDEST = 64  # numbers a head whose sums fit beside them
LEAST = 16  # numbers on a side that a matrix product of the GPU can take
KERNEL = "attention over short rows"


def fits(packed: Tensor) -> bool:
    """Whether `short_attention` can take these queries, keys and values (B, T, 3, H, K)."""
    return kernels.usable(KERNEL, packed) and packed.shape[1] <= LONGEST and packed.shape[-1] <= WIDEST


def trial(device: torch.device) -> None:
    """A small case of the kernels, to see whether they work."""
    packed = torch.zeros(1, 2, 3, 1, 16, dtype=torch.float16, device=device, requires_grad=True)
    short_attention(packed, 0.1).sum().backward()


def short_attention(packed: Tensor, dropout: float = 0.0, scale: float | None = None) -> Tensor:
    """Causal attention of packed queries, keys and values (B, T, 3, H, K) → (B, T, H, K)."""
    scale = packed.shape[-1] ** -0.5 if scale is None else scale
    if dropout > 0:
        seeds = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=packed.device)
    else:
        seeds = torch.zeros(2, dtype=torch.int32, device=packed.device)
    return attend(packed.contiguous(), seeds, scale, dropout)


@torch.library.custom_op("headway::short_attention", mutates_args=())
def attend(packed: Tensor, seeds: Tensor, scale: float, dropout: float) -> Tensor:
    from headway.nn.kernels.attention import short_attention_forward

    rows, count, _, heads, width = packed.shape
    out = packed.new_empty(rows, count, heads, width)
    short_attention_forward[(rows * heads,)](packed, out, seeds, scale, 1.0 - dropout, count, **shape(packed, dropout))
    return out


@torch.library.custom_op("headway::short_attention_backward", mutates_args=())
def attend_backward(packed: Tensor, gradient: Tensor, seeds: Tensor, scale: float, dropout: float) -> Tensor:
    from headway.nn.kernels.attention import short_attention_backward

    rows, count, _, heads, _ = packed.shape
    out = torch.empty_like(packed)
    gradient = gradient.contiguous()
    short_attention_backward[(rows * heads,)](
        packed, gradient, out, seeds, scale, 1.0 - dropout, count, **shape(packed, dropout)
    )
    return out


def shape(packed: Tensor, dropout: float) -> dict[str, Any]:
    """What the kernels are compiled for."""
    _, count, _, heads, width = packed.shape
    return {
        "H": heads,
        "K": width,
        "HALF": kernels.power_of_two((count + 1) // 2, LEAST),
        "WIDTH": kernels.power_of_two(width, LEAST),
        "THRESHOLD": round(dropout * 2**32),
    }


@attend.register_fake
def _(packed: Tensor, seeds: Tensor, scale: float, dropout: float) -> Tensor:
    rows, count, _, heads, width = packed.shape
    return packed.new_empty(rows, count, heads, width)


@attend_backward.register_fake
def _(packed: Tensor, gradient: Tensor, seeds: Tensor, scale: float, dropout: float) -> Tensor:
    return torch.empty_like(packed)


def keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, float, float], output: Tensor) -> None:
    packed, seeds, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(packed, seeds)


def gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    packed, seeds = ctx.saved_tensors
    return attend_backward(packed, gradient, seeds, ctx.scale, ctx.dropout), None, None, None


attend.register_autograd(gradients, setup_context=keep_inputs)
