"""Which device and which precision, and why."""

from __future__ import annotations

import contextlib
import math
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch

from headway.cores import was_chosen
from headway.errors import UserError, nearest

DEVICES = ("auto", "cpu", "cuda", "mps")
CPU_BFLOAT16_WIDTH = 256  # below it the casts cost more than the products save
WORK = 2_000_000  # tokens · width² that keep a thread of a CPU busy (docs/training.md)
PRECISIONS = ("auto", "float32", "tf32", "bfloat16", "float16")


def choose_device(wanted: str = "auto") -> tuple[torch.device, str]:
    """(device, why it was chosen)."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        name = next(name for name in ("cuda", "mps", "cpu") if available[name])
        return torch.device(name), "the fastest here" if name != "cpu" else "no GPU here"
    if wanted not in available:
        raise UserError(f"device '{wanted}': unknown{nearest(wanted, DEVICES)}")
    if not available[wanted]:
        there = ", ".join(name for name, has in available.items() if has)
        raise UserError(f"device '{wanted}': not on this machine; here: {there}, or auto for the fastest")
    return torch.device(wanted), "as asked"


def choose_precision(device: torch.device, wanted: str = "auto", width: int = 256) -> tuple[torch.dtype, str]:
    """(type of the matrix products, why it was chosen). Weights and optimizer state are float32 in either case."""
    has, reason = has_bfloat16(device)
    if device.type == "cpu" and has and wanted == "auto" and width < CPU_BFLOAT16_WIDTH:
        return torch.float32, f"on a CPU bfloat16 pays from width {CPU_BFLOAT16_WIDTH} on, this model has {width}"
    if wanted == "bfloat16" and not has:
        return torch.float32, f"bfloat16 was asked for, and {reason}"
    if wanted == "float16" and device.type != "cuda":
        return torch.float32, "float16 was asked for, which is for CUDA GPUs"
    if wanted == "tf32":
        there = has_tf32(device)
        return torch.float32, "products in TF32, as asked" if there else "tf32 was asked for, which this device lacks"
    if wanted == "auto":
        return (torch.bfloat16 if has else torch.float32), reason
    return getattr(torch, wanted), "as asked"


def has_bfloat16(device: torch.device) -> tuple[bool, str]:
    if device.type == "cuda":
        has = torch.cuda.get_device_capability(device) >= (8, 0)
        return has, "this GPU multiplies bfloat16 natively" if has else "this GPU has no bfloat16 units"
    if device.type == "cpu":
        tests = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        has = any(getattr(torch.cpu, test, lambda: False)() for test in tests)
        return has, "this CPU has bfloat16 instructions" if has else "this CPU has no bfloat16 instructions"
    return False, "bfloat16 is not fast on this device"


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def autocast(device: torch.device, precision: torch.dtype) -> Any:
    """The context in which forward passes run at `precision`."""
    if precision == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=precision)


def fix_workspaces() -> None:
    """Let cuBLAS multiply in the same way each time. It listens before its first product only."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def repeatable(device: torch.device, wanted: bool) -> Iterator[None]:
    """Within it, where wanted, a GPU adds up in the same order every time. A CPU does so always."""
    if not wanted or device.type != "cuda":
        yield
        return
    fix_workspaces()
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


@contextlib.contextmanager
def tf32_products(device: torch.device, wanted: bool) -> Iterator[None]:
    """Within it, where wanted, a GPU multiplies float32 matrices in TF32: 10 bits of each number behind the point, as
    float16 has, in the range of float32; sums are float32."""
    if not wanted or not has_tf32(device):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({threads()})" if device.type == "cpu" else device.type


def threads_that_pay(tokens: int, width: int) -> int:
    """How many threads of a CPU to use for passes over so many tokens: small ones are over before more have met."""
    own = torch.get_num_threads()
    return own if was_chosen() else min(own, max(1, math.ceil(tokens * width**2 / WORK)))


@contextlib.contextmanager
def threads_at_most(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count < before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count < before:
            torch.set_num_threads(before)


def threads() -> str:
    count = torch.get_num_threads()
    return f"{count} thread{'s' if count > 1 else ''}"


def describe_machine() -> str:
    """One line that says where a number was measured."""
    return f"{platform.system()} {platform.machine()}, {threads()}, torch {torch.__version__}"
