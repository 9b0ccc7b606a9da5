"""What the tests of kernels share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headway.nn.kernels import WITH_TRITON

HALVES = [torch.bfloat16, torch.float16]
needs_triton = pytest.mark.skipif(not WITH_TRITON, reason="needs Triton")


def on_gpu(test: Any) -> Any:
    return pytest.mark.gpu(needs_triton(test))
