"""GELU that costs no more than reading and writing.

    GELU(x) = x·Φ(x) = max(x, 0) − |x|·Q(|x|),   Q = 1 − Φ, the upper tail of the normal distribution

"Gaussian error linear units" (Hendrycks and Gimpel 2016). Time and memory are linear in the number of elements. torch
takes Φ from an error function that is right to the last bit of a float32, and on a GPU computes longer than it needs to
move the numbers. In code compiled for a GPU, where activations have 16 bits, the tail is

    Q(x) = ½ e^(−x²/2) (a₁t + a₂t² + … + a₅t⁵),   t = 1 / (1 + p·x/√2)

which is off by less than 10⁻⁷ ("Handbook of mathematical functions", Abramowitz and Stegun 1964, 7.1.26), computed in
float32 by less than 3·10⁻⁷; a 16-bit number near 1 is off by up to 2·10⁻⁴ and more. Its e^(−x²/2) is the one that the
derivative Φ(x) + x·φ(x) needs too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

P = 0.3275911 / math.sqrt(2)
HALVED = tuple(a / 2 for a in (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429))
PEAK = 1 / math.sqrt(2 * math.pi)  # φ(0)
EXPONENT = -0.5 * math.log2(math.e)  # e^(−x²/2) = 2^(EXPONENT·x²): powers of 2 are what the hardware has


def gelu(x: Tensor) -> Tensor:
    """x·Φ(x), the shape and dtype of x."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return ByTail.apply(x) if half and x.is_cuda and torch.compiler.is_compiling() else F.gelu(x)


def bell_and_tail(x: Tensor) -> tuple[Tensor, Tensor]:
    """e^(−x²/2) and Q(|x|)."""
    bell = torch.exp2(x * x * EXPONENT)
    t = 1.0 / (1.0 + P * x.abs())
    a1, a2, a3, a4, a5 = HALVED
    return bell, bell * (t * (a1 + t * (a2 + t * (a3 + t * (a4 + t * a5)))))


class ByTail(torch.autograd.Function):
    """GELU by its tail, computed in float32 whatever x has; nothing but x is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        exact = x.float()
        _, tail = bell_and_tail(exact)
        # a copy even of a float32: torch 2.11 compiles a result that is its own conversion without its gradient
        return (exact.relu() - exact.abs() * tail).to(x.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        exact = x.float()
        bell, tail = bell_and_tail(exact)
        normal = torch.where(exact < 0, tail, 1.0 - tail)  # Φ(x)
        return (gradient.float() * (normal + exact * bell * PEAK)).to(x.dtype)


class GELU(nn.Module):
    """`gelu` as a module, in the place of `torch.nn.GELU`."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x)
