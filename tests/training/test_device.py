"""Which precision is chosen and why, and that what is set for a step is put back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import headway
from headway.training import device as devices

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
