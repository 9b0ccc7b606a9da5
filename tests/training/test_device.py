"""Which precision is chosen and why, and that what is set for a step is put back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headway
from headway.training import device as devices
from tests.training.test_checkpoint import Said

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("wanted", ["tf32", "float16"])
def test_what_is_for_gpus_is_float32_on_a_cpu_and_says_so(wanted: str) -> None:
    precision, why = devices.choose_precision(CPU, wanted)
    assert precision == torch.float32 and wanted in why


@pytest.mark.parametrize(("capability", "tf32"), [((9, 0), True), ((8, 0), True), ((7, 5), False)])
def test_tf32_holds_within_a_step_and_no_longer(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], tf32: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    precision, why = devices.choose_precision(GPU, "tf32")
    assert precision == torch.float32 and why.startswith("products in TF32") == tf32
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="broken"), devices.tf32_products(GPU, True):
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else before)
        raise RuntimeError("broken")
    assert torch.get_float32_matmul_precision() == before
    with devices.tf32_products(GPU, False):
        assert torch.get_float32_matmul_precision() == before


def test_a_run_that_asks_for_tf32_trains_on_a_cpu_as_in_float32(run_file: Path) -> None:
    found = []
    for precision in ("float32", "tf32"):
        sets = [f"{stage}.precision={precision}" for stage in ("pretraining.training", "training")]
        run = headway.train(run_file, run_file.parent / precision, [*sets, "training.device=cpu"])
        found.append([record["loss"] for record in run.metrics if "loss" in record])
    assert found[0] == found[1]


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine of sixteen cores; what the number of threads was set to."""
    for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    seen = [16]
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen[-1])
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    return seen


@pytest.mark.parametrize(("tokens", "width", "threads"), [(1, 16, 1), (512, 128, 5), (900, 256, 16), (10**6, 64, 16)])
def test_small_passes_get_few_threads_unless_somebody_has_chosen(
    sixteen: list[int], monkeypatch: pytest.MonkeyPatch, tokens: int, width: int, threads: int
) -> None:
    assert devices.threads_that_pay(tokens, width) == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert devices.threads_that_pay(tokens, width) == 16


def test_a_stage_says_how_many_threads_it_takes_and_gives_them_back(run_file: Path, sixteen: list[int]) -> None:
    report = Said()
    headway.train(run_file, run_file.parent / "run", ["training.device=cpu"], report=report)
    assert sixteen == [16, 1, 16, 1, 16]  # in each of two stages
    assert sum("1 of 16 threads (its rows keep no more busy)" in line for line in report.lines) == 2
    with pytest.raises(ValueError, match="broken"), devices.threads_at_most(3):
        assert sixteen[-1] == 3
        raise ValueError("broken")
    assert sixteen[-1] == 16
