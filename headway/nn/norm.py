"""A layer norm beside the residual it reads.

    y = w ∘ (x − mean(x)) / √(var(x) + ε) + b

"Layer normalization" (Ba, Kiros and Hinton 2016), section 3. In a layer x ← x + part(Norm(x)) the gradient of x comes
from two sides, and those of w and b are sums over all tokens of what one of the sides is made of. The compiler computes
the first in one kernel and the sums in a second that reads everything again; in code compiled for a GPU one kernel of
ours does it all (`headway.nn.kernels`). Time and memory are linear in the number of elements.

Shapes: N tokens, D width, P parts of a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headway.nn import kernels

KERNEL = "gradients of norms"
PARTS = 2048  # that the sums over all tokens are taken in, at most
ROWS = 2  # tokens that a program of the kernel takes at once
WIDEST = 4096  # numbers a token that the registers of one program hold


def beside(x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """x as it is, and Norm(x). Go on with the x that is returned, and do not change it in place."""
    if torch.compiler.is_compiling() and kernels.usable(KERNEL, x) and fits(norm):
        return Beside.apply(x, norm.weight, norm.bias, norm.eps)
    return x, norm(x)


def fits(norm: nn.LayerNorm) -> bool:
    return kernels.plain(norm, nn.LayerNorm) and norm.weight.dim() == 1 and norm.weight.numel() <= WIDEST


class Beside(torch.autograd.Function):
    """x and its norm, which the compiler puts into one kernel with what makes x; the gradients by one of ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return x.view_as(x), y

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        residual, gradient = given
        x, weight, mean, rstd = ctx.saved_tensors
        of_x, sums = gradients(gradient, residual, x, weight, mean, rstd)
        of_weight, of_bias = sums.sum(0).to(weight.dtype).unbind()
        return of_x, of_weight, of_bias, None


def by_kernel(
    gradient: Tensor, residual: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x (…, D), from that of its norm and that of the residual beside it; and the sums for the weight
    and the bias in parts, (P, 2, D)."""
    from headway.nn.kernels.norm import norm_gradients

    gradient, residual, x, weight = (each.contiguous() for each in (gradient, residual, x, weight))
    out, sums = room(gradient, residual, x, weight, mean, rstd)
    width = x.shape[-1]
    padded = kernels.power_of_two(width)
    norm_gradients[(len(sums),)](
        gradient,
        residual,
        x,
        weight,
        mean.contiguous(),
        rstd.contiguous(),
        out,
        sums,
        x.numel() // width,
        width,
        R=ROWS,
        WIDTH=padded,
        num_warps=max(1, padded // 256),
    )
    return out, sums


gradients = torch.library.custom_op("headway::norm_gradients", by_kernel, mutates_args=(), device_types="cuda")


@gradients.register_fake
def room(
    gradient: Tensor, residual: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    parts = min(PARTS, (x.numel() // width + ROWS - 1) // ROWS)
    sums = x.new_empty(parts, 2, width, dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.contiguous_format), sums


@gradients.register_kernel("cpu")
def in_words(
    gradient: Tensor, residual: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The same, as the equations have it."""
    out, sums = room(gradient, residual, x, weight, mean, rstd)
    n = (x.float() - mean) * rstd
    g = gradient.float()
    sums.zero_()[:1] = torch.stack([g * n, g]).reshape(2, -1, x.shape[-1]).sum(1)
    g = g * weight.float()
    along = rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
    return out.copy_(residual.float() + along), sums


def trial(device: torch.device) -> None:
    """A small case of the kernel, to see whether it works."""
    x = torch.zeros(2, 16, dtype=torch.float16, device=device)
    mean = torch.zeros(2, 1, device=device)
    gradients(x, x, x, x[0], mean, mean)
