"""Kernels of our own for CUDA GPUs, in Triton: where the compiler's would read the same numbers several times.

    attention.py   attention over short rows, and its gradients       used by `headway.nn.short`
    gelu.py        the gradients of GELU and of the bias before it    used by `headway.nn.gelu`
    norm.py        the gradients of a layer norm beside a residual    used by `headway.nn.norm`

Triton is imported where a kernel is first used: what they compute can also be had without it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

WITH_TRITON = find_spec("triton") is not None
broken: set[str] = set()  # the kernels that turned out not to work here


def usable(name: str, x: Tensor) -> bool:
    """Whether the kernel of this name can take numbers such as these."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    return WITH_TRITON and name not in broken and x.is_cuda and half


def plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether its weight and bias say all about it: nothing put in its place, nobody watching."""
    return type(module) is kind and module.bias is not None and not watched(module)


def watched(module: nn.Module) -> bool:
    """Whether somebody wants to see what goes into it, out of it or back through it."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def try_out(name: str, trial: Callable[[], object], say: Callable[[str], None]) -> None:
    """See whether a kernel works on this GPU; where it does not, what torch has is used from then on."""
    if not WITH_TRITON or name in broken:
        return
    try:
        trial()
        torch.cuda.synchronize()
    except Exception as error:  # whatever Triton or its compiler says
        broken.add(name)
        words = (str(error).splitlines() or [type(error).__name__])[0]
        say(f"{name}: computed by torch's kernels, as ours do not work here: {words[:150]}")
