"""Kernels of our own are used where they work, and only there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from headway.nn import kernels

ON_GPU: Any = SimpleNamespace(dtype=torch.float16, is_cuda=True)


@pytest.fixture(autouse=True)
def a_machine_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WITH_TRITON", True)
    monkeypatch.setattr(kernels, "broken", set())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_a_kernel_that_does_not_work_is_said_once_and_used_no_more() -> None:
    said: list[str] = []
    tried: list[int] = []

    def fails() -> None:
        tried.append(1)
        raise RuntimeError("no such instruction\nand much more")

    for _ in range(2):
        kernels.try_out("one", fails, said.append)
        kernels.try_out("other", lambda: None, said.append)
    assert said == ["one: computed by torch's kernels, as ours do not work here: no such instruction"]
    assert len(tried) == 1
    assert not kernels.usable("one", ON_GPU) and kernels.usable("other", ON_GPU)


def test_an_error_without_words_is_told_by_its_name() -> None:
    said: list[str] = []
    kernels.try_out("one", lambda: (_ for _ in ()).throw(AssertionError), said.append)
    assert said[0].endswith("AssertionError")


def test_they_are_for_16_bits_on_a_gpu_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels.usable("one", ON_GPU)
    assert not kernels.usable("one", SimpleNamespace(dtype=torch.float32, is_cuda=True))
    assert not kernels.usable("one", torch.zeros(1, dtype=torch.float16))
    monkeypatch.setattr(kernels, "WITH_TRITON", False)
    assert not kernels.usable("one", ON_GPU)


@pytest.mark.parametrize("watch", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_who_watches_a_module_sees_all_of_it(watch: str) -> None:
    linear = nn.Linear(2, 3)
    assert kernels.plain(linear)
    getattr(linear, watch)(lambda *_: None)
    assert kernels.watched(linear) and not kernels.plain(linear)


def test_another_kind_of_layer_is_not_plain() -> None:
    assert not kernels.plain(nn.Linear(2, 3, bias=False))
    assert not kernels.plain(type("Other", (nn.Linear,), {})(2, 3))
