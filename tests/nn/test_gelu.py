"""GELU by its tail: against torch's in float64, values and gradients, and where it is used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn.gelu import GELU, ByTail, bell_and_tail, gelu


def values_and_gradients(function, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    out = function(x)
    out.backward(torch.full_like(out, -2.0))  # a product with it is exact
    assert x.grad is not None
    return out.detach(), x.grad


def test_the_tail_is_that_of_the_normal_distribution() -> None:
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64)
    bell, tail = bell_and_tail(x)
    assert torch.allclose(bell, torch.exp(-x * x / 2), rtol=1e-13)
    assert (tail - torch.special.ndtr(-x.abs())).abs().max() < 7.5e-8
    assert bell_and_tail(torch.zeros((), dtype=torch.float64))[1] == pytest.approx(0.5, abs=1e-9)
    _, rounded = bell_and_tail(x.float())
    assert (rounded - torch.special.ndtr(-x.float().double().abs())).abs().max() < 3e-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients_are_torchs_to_the_last_bits_of_16(dtype: torch.dtype) -> None:
    """Every finite number of 16 bits: off by no more than rounding to 16 bits once."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = numbers[numbers.isfinite()]
    found = values_and_gradients(ByTail.apply, x)
    exact = values_and_gradients(F.gelu, x.double())
    step = torch.finfo(dtype).eps / 2
    for ours, true in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert ((ours.double() - true).abs() <= 1.01 * step * true.abs() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_compiled_graph_can_hold_it(dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x: ByTail.apply(2 * x), fullgraph=True, backend="aot_eager")
    x = torch.randn(33).to(dtype)
    for ours, plain in zip(
        values_and_gradients(compiled, x), values_and_gradients(lambda x: F.gelu(2 * x), x), strict=True
    ):
        assert torch.allclose(ours, plain, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outside_of_compiled_gpu_code_it_is_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7).to(dtype)
    assert torch.equal(gelu(x), F.gelu(x)) and torch.equal(GELU()(x), nn.GELU()(x))
    assert not GELU().state_dict()
    wide = torch.linspace(-4, 4, 4097).to(dtype)  # by the tail a few of these would differ
    assert torch.equal(torch.compile(gelu, fullgraph=True, backend="eager")(wide), F.gelu(wide))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_for_a_gpu_it_means_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(4096, device="cuda").to(dtype)
    ours = values_and_gradients(torch.compile(GELU(), fullgraph=True), x)
    for each, true in zip(ours, values_and_gradients(F.gelu, x.double()), strict=True):
        assert ((each.double() - true).abs() <= 1.01 * torch.finfo(dtype).eps * true.abs() + 1e-6).all()
