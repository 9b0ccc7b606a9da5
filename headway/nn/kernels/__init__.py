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
    return WITH_TRITON and name not in broken and halves_on_gpu(x)


def halves_on_gpu(x: Tensor) -> bool:
    """Whether these are numbers of 16 bits on a CUDA GPU."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def power_of_two(count: int, least: int = 1) -> int:
    """The least one that holds `count`, and at least `least`."""
    return max(least, 1 << (count - 1).bit_length())


def plain(module: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether its weight and bias say all about it: nothing put in its place, nobody watching."""
    return type(module) is kind and module.bias is not None and not watched(module)


def watched(module: nn.Module) -> bool:
    """Whether somebody wants to see what goes into it, out of it or back through it."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return sum(map(len, hooks)) > 0


def try_out(
    name: str, trial: Callable[[torch.device], object], device: torch.device, say: Callable[[str], None]
) -> None:
    """See whether a kernel works on this GPU; where it does not, what torch has is used from then on."""
    if not WITH_TRITON or name in broken:
        return
    try:
        trial(device)
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever Triton or its compiler says
        broken.add(name)
        words = (str(error).splitlines() or [type(error).__name__])[0]
        say(f"{name}: computed by torch's kernels, as ours do not work here: {words[:150]}")
