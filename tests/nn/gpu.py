"""What the tests of kernels share."""

from __future__ import annotations

import pytest
import torch

from headway.nn.kernels import WITH_TRITON

HALVES = [torch.bfloat16, torch.float16]
on_gpu = pytest.mark.skipif(not (torch.cuda.is_available() and WITH_TRITON), reason="needs a CUDA GPU and Triton")
