"""Dropout that costs little.

    y = x · m / (1 − p),   m = 0 with probability p, else 1

"Dropout: a simple way to prevent neural networks from overfitting" (Srivastava et al. 2014). Time and memory are linear
in the number of elements. torch draws one random number for each element, which takes longer than the work around it.

On a CPU a 64-bit draw decides four elements, 16 bits each: p is rounded to the nearest multiple of 1/65536, and the
scale is that of the rounded p, so the expectation of y is x exactly. In code compiled for a GPU two draws decide the
whole tensor: an element's bits are a hash of its number and of the two, a few whole-number operations that are fused
into the kernel around them, and are done again in the backward pass instead of being kept.
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

    Repeats under `torch.manual_seed`. Small tensors and other devices take torch's own dropout.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout is a probability between 0 and 1, not {p}")
    if not training or p == 0.0:
        return x
    if p < 1.0 and x.device.type == "cuda" and torch.compiler.is_compiling() and x.numel() < 2**31:
        seeds = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=x.device)
        kept = hashed_bits(x.shape, seeds) >= round(p * 2**32) - 2**31
        return torch.where(kept, x * (1.0 / (1.0 - p)), 0.0)
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


def hashed_bits(shape: torch.Size, seeds: Tensor) -> Tensor:
    """Whole numbers over the int32 range, one for each element: its number, mixed twice with two random ones.

    Each round folds the upper bits onto the lower ones and multiplies by an odd number, which carries them up again.
    The two numbers are those of a published search for little bias (Wellons, "lowbias32").
    """
    x = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device) + seeds[0]
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ seeds[1] ^ (x >> 15 & 0x1FFFF)) * -0x7B935975
    return (x ^ (x >> 16 & 0xFFFF)).view(shape)


class Dropout(nn.Dropout):
    """`dropout` as a module, in the place of `torch.nn.Dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        out = dropout(input, self.p, self.training)
        return input.copy_(out) if self.inplace and out is not input else out
