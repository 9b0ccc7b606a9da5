"""What the tests of kernels share: where they run.

That is a GPU; or, with TRITON_INTERPRET=1 in the environment, a CPU on which Triton takes a kernel operation by
operation (`test_kernels.py` starts the tests so).
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from headway.nn.kernels import WITH_TRITON

HALVES = [torch.bfloat16, torch.float16]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_triton = pytest.mark.skipif(not WITH_TRITON, reason="needs Triton")


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(needs_triton(test))


def by_triton(test: Any) -> Any:
    """A test of a kernel, whose tensors lie on DEVICE."""
    return needs_triton(test) if INTERPRETED else on_gpu(test)
