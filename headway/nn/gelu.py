"""GELU that costs no more than reading and writing.

    GELU(x) = x·Φ(x) = max(x, 0) − |x|·Q(|x|),   Q = 1 − Φ, the upper tail of the normal distribution

"Gaussian error linear units" (Hendrycks and Gimpel 2016). Time and memory are linear in the number of elements. torch
takes Φ from an error function that is right to the last bit of a float32, and on a GPU computes longer than it needs to
move the numbers. In code compiled for a GPU, where activations have 16 bits, the tail is a power of 2,

    Q(u) = 2^(t₀ + t₁u + … + t₆u⁶),   0 ≤ u ≤ 5.5

whose polynomial is the one of its degree that is nearest to log₂ Q everywhere: Q is off by less than 3·10⁻⁵ of itself,
where rounding to bfloat16 costs 4·10⁻³ and to float16 5·10⁻⁴ at the worst. Beyond 5.5, |x|·Q(|x|) is less than 10⁻⁶ and
stays what it is there: GELU(−∞) is nearly 0, as its limit is 0, where torch's is no number; ∞ and NaN stay themselves.

The bias of the product before it is added inside, GELU(W x + b), so that one kernel of ours writes the gradient of W x
and sums it up to that of b (`headway.nn.kernels`); the compiler would read it a second time for the sum.

Shapes: N tokens, D width, P parts of a sum.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn import kernels

KERNEL = "gradients of GELU"
TAIL = (-1.0000361, -1.150584, -0.46032948, -0.051970403, 0.0074883094, -0.00066098117, 2.6153749e-05)
FAR = 5.5  # where the tail no longer counts
PEAK = 1 / math.sqrt(2 * math.pi)  # φ(0)
EXPONENT = -0.5 * math.log2(math.e)  # e^(−x²/2) = 2^(EXPONENT·x²): powers of 2 are what the hardware has
ROWS = 128  # tokens over which one program of the kernel sums


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x), the shape and dtype of x."""
    return ByTail.apply(x) if by_tail(x) else F.gelu(x)


def by_tail(x: Tensor) -> bool:
    """Whether GELU of these numbers is computed by its tail: compiled for a GPU, in 16 bits."""
    return torch.compiler.is_compiling() and kernels.halves_on_gpu(x)


def tail(u: Tensor) -> Tensor:
    """Q(u), 0 ≤ u ≤ FAR."""
    power = torch.full_like(u, TAIL[-1])
    for term in reversed(TAIL[:-1]):
        power = power * u + term
    return torch.exp2(power)


def value(x: Tensor) -> Tensor:
    """GELU(x)."""
    u = x.abs().clamp(max=FAR)
    return x.relu() - u * tail(u)


def slope(x: Tensor) -> Tensor:
    """GELU's derivative, Φ(x) + x·φ(x)."""
    near = x.clamp(-FAR, FAR)
    beyond = tail(near.abs())
    return torch.where(x < 0, beyond, 1.0 - beyond) + near * torch.exp2(near * near * EXPONENT) * PEAK


class ByTail(torch.autograd.Function):
    """GELU by its tail, computed in float32 whatever x has; nothing but x is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        # a copy even of a float32: torch 2.11 compiles a result that is its own conversion without its gradient
        return value(x.float()).to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        return (gradient.float() * slope(x.float())).to(x.dtype)


class WithBias(torch.autograd.Function):
    """GELU(x + b) by its tail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return value(x.float() + bias.float()).to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, bias) = given, ctx.saved_tensors
        of_x, sums = gradients(gradient, x, bias)
        return of_x, sums.sum(0).to(bias.dtype)


def by_kernel(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x (…, D) in GELU(x + b), and the sums for the bias in parts, (P, D)."""
    from headway.nn.kernels.gelu import gelu_gradients

    gradient, x, bias = gradient.contiguous(), x.contiguous(), bias.contiguous()
    out, sums = room(gradient, x, bias)
    width = x.shape[-1]
    columns = min(128, kernels.power_of_two(width, least=16))
    grid = (math.ceil(width / columns) * len(sums),)
    gelu_gradients[grid](gradient, x, bias, out, sums, x.numel() // width, width, ROWS=ROWS, R=8, C=columns)
    return out, sums


gradients = torch.library.custom_op("headway::gelu_gradients", by_kernel, mutates_args=(), device_types="cuda")


@gradients.register_fake
def room(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    parts = (x.numel() // width + ROWS - 1) // ROWS
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(parts, width, dtype=torch.float32)


@gradients.register_kernel("cpu")
def in_words(gradient: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same, as the equation has it."""
    out, sums = room(gradient, x, bias)
    exact = gradient.float() * slope(x.float() + bias.float())
    sums.zero_()[:1] = exact.reshape(-1, x.shape[-1]).sum(0)
    return out.copy_(exact), sums


def trial(device: torch.device) -> None:
    """A small case of the kernel, to see whether it works."""
    x = torch.zeros(2, 16, dtype=torch.float16, device=device)
    gradients(x, x, x[0])


class GELU(nn.Module):
    """`gelu` as a module, in the place of `torch.nn.GELU`."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)

    def of(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """GELU(W x + b)."""
        plain = type(self) is GELU and not kernels.watched(self) and kernels.plain(linear)
        if plain and by_tail(x) and kernels.usable(KERNEL, x):
            return WithBias.apply(F.linear(x, linear.weight), linear.bias)
        return self(linear(x))
