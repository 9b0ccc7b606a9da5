"""Dropout that costs little on a CPU.

    y = x · m / (1 − p),   m = 0 with probability p, else 1

"Dropout: a simple way to prevent neural networks from overfitting" (Srivastava et al. 2014). Time and memory are linear
in the number of elements. torch draws one random number for each element, which on a CPU takes longer than the matrix
products around it. Here a 64-bit draw decides four elements, 16 bits each. p is rounded to the nearest multiple of
1/65536 and the scale is that of the rounded p, so the expectation of y is x exactly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

LEVELS = 2**16  # what 16 bits tell apart
FEW = 2048  # elements up to which torch's own way is the quicker one


def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """x with each element zeroed with probability p and the others scaled by 1/(1 − p): the shape and dtype of x.

    Repeats under `torch.manual_seed`. Small tensors, other devices and compiled code take torch's own dropout.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout is a probability between 0 and 1, not {p}")
    if not training or p == 0.0:
        return x
    if p == 1.0 or x.numel() <= FEW or x.device.type != "cpu" or not has_values(x):
        return F.dropout(x, p)
    dropped = min(round(p * LEVELS), LEVELS - 1)  # of LEVELS equally likely values, those that drop
    kept = torch.ge(sixteen_bits(x.shape), dropped - LEVELS // 2, out=torch.empty_like(x))
    return x * kept.mul_(LEVELS / (LEVELS - dropped))


def has_values(x: Tensor) -> bool:
    """Whether x holds numbers that can be looked at: not while compiling, inside torch.func, or for a fake tensor."""
    return not (
        torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(x) or isinstance(x, FakeTensor)
    )


def sixteen_bits(shape: torch.Size) -> Tensor:
    """Independent, uniform integers of the whole int16 range."""
    count = shape.numel()
    draws = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    return draws.view(torch.int16)[:count].view(shape)


class Dropout(nn.Dropout):
    """`dropout` as a module, in the place of `torch.nn.Dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        out = dropout(input, self.p, self.training)
        return input.copy_(out) if self.inplace and out is not input else out
