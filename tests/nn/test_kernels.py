"""Kernels of our own are used where they work, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headway.nn import Block, FeedForward, SelfAttention, kernels
from headway.nn.gelu import GELU
from tests.nn.gpu import needs_triton

GPU = torch.device("cuda")
ON_GPU: Any = SimpleNamespace(dtype=torch.float16, is_cuda=True)


def old_triton() -> bool:
    return kernels.WITH_TRITON and tuple(map(int, version("triton").split(".")[:2])) < (3, 7)


@pytest.fixture(autouse=True)
def a_machine_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "WITH_TRITON", True)
    monkeypatch.setattr(kernels, "broken", set())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@needs_triton
@pytest.mark.skipif(old_triton(), reason="NumPy 2.4 breaks the interpreter of Triton before 3.7")
@pytest.mark.parametrize("kernel", ["short", "gelu", "norm"])
def test_what_they_compute_where_there_is_no_gpu(kernel: str) -> None:
    """The tests of a kernel, in a process in which Triton interprets it."""
    test = Path(__file__).with_name(f"test_{kernel}.py")
    chosen = "kernel_computes or of_the_equation or share_that_is_dropped"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, str(test)]
    surroundings = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, check=False, env=surroundings, capture_output=True, text=True, cwd=test.parents[2])
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_kernel_that_does_not_work_is_said_once_and_used_no_more() -> None:
    said: list[str] = []
    tried: list[int] = []

    def fails(device: torch.device) -> None:
        tried.append(1)
        raise RuntimeError("no such instruction\nand much more")

    for _ in range(2):
        kernels.try_out("one", fails, GPU, said.append)
        kernels.try_out("other", lambda device: None, GPU, said.append)
    assert said == ["one: computed by torch's kernels, as ours do not work here: no such instruction"]
    assert len(tried) == 1
    assert not kernels.usable("one", ON_GPU) and kernels.usable("other", ON_GPU)


def test_an_error_without_words_is_told_by_its_name() -> None:
    said: list[str] = []
    kernels.try_out("one", lambda device: (_ for _ in ()).throw(AssertionError), GPU, said.append)
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


class Called(TorchDispatchMode):
    """Notes which of our own operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace == "headway":
            self.names.append(function._opname)
        return function(*arguments, **(options or {}))


def compiled_gradients(block: Block, x: Tensor, taken: bool) -> tuple[list[Tensor], list[str]]:
    """What a block computes where code is compiled, with all gradients; and our own operations that were called."""
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    block.zero_grad()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "halves_on_gpu", lambda x: taken)
        out = compiled(x, torch.arange(x.shape[1]))
        with Called() as called:
            out.backward(torch.ones_like(out))
    assert x.grad is not None
    return [out.detach(), x.grad, *(each.grad.clone() for each in block.parameters())], sorted(called.names)


def small_block(**parts: nn.Module) -> Block:
    torch.manual_seed(0)
    return Block(12, SelfAttention(12, 2, causal=True), FeedForward(12, 20, **parts))


def test_a_compiled_block_takes_them_and_means_the_same() -> None:
    """As on a GPU, with the equations in the place of the kernels."""
    block, x = small_block(), torch.randn(3, 7, 12)
    plain, none = compiled_gradients(block, x, taken=False)
    ours, called = compiled_gradients(block, x, taken=True)
    assert none == [] and called == ["gelu_gradients", "norm_gradients", "norm_gradients"]
    for found, true in zip(ours, plain, strict=True):
        assert torch.allclose(found, true, rtol=1e-3, atol=3e-4)


class Louder(GELU):
    """Another function by the same name."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_was_put_in_the_place_of_a_part_is_used() -> None:
    block, x = small_block(activation=Louder()), torch.randn(3, 7, 12)
    assert compiled_gradients(block, x, taken=True)[1] == ["norm_gradients", "norm_gradients"]


@pytest.mark.parametrize(
    ("part", "left"),
    [
        ("feed_forward.activation", ["norm_gradients", "norm_gradients"]),
        ("feed_forward.inner", ["norm_gradients", "norm_gradients"]),
        ("attention_norm", ["gelu_gradients", "norm_gradients"]),
    ],
)
def test_a_part_that_is_watched_is_computed_by_itself(part: str, left: list[str]) -> None:
    block, x = small_block(), torch.randn(3, 7, 12)
    block.get_submodule(part).register_forward_hook(lambda *_: None)
    assert compiled_gradients(block, x, taken=True)[1] == left
