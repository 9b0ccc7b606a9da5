"""GELU by its tail: against torch's in float64, values and gradients, and where it is used."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn import FeedForward
from headway.nn.gelu import FAR, GELU, ROWS, ByTail, WithBias, by_kernel, gelu, in_words, slope, tail, value
from tests.nn.gpu import DEVICE, HALVES, INTERPRETED, by_triton, on_gpu

MANY = [] if INTERPRETED else [(1000, 2048)]  # rows and width, for a GPU


def values_and_gradients(function, *given: Tensor) -> list[Tensor]:
    """What comes out for these tensors, and the gradient of each."""
    given = tuple(each.detach().requires_grad_() for each in given)
    out = function(*given)
    out.backward(torch.full_like(out, -2.0))  # a product with it is exact
    return [out.detach(), *(each.grad for each in given if each.grad is not None)]


def test_the_tail_is_that_of_the_normal_distribution() -> None:
    """Off by less than 3·10⁻⁵ of itself, also where each step is rounded to float32."""
    u = torch.linspace(0, FAR, 100_001, dtype=torch.float64)
    true = torch.special.ndtr(-u)
    assert ((tail(u) - true).abs() < 2.6e-5 * true).all()
    assert ((tail(u.float()).double() - true).abs() < 3e-5 * true).all()


def test_value_and_slope_are_gelus_everywhere() -> None:
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.tensor([-1e30, -100.0, 100.0, 1e30])]).double()
    exact = x.clone().requires_grad_()
    F.gelu(exact).sum().backward()
    assert exact.grad is not None
    assert ((value(x) - F.gelu(x)).abs() <= 3e-5 * F.gelu(x).abs() + 2e-7).all()
    assert ((slope(x) - exact.grad).abs() <= 2e-5).all()
    assert value(torch.tensor(torch.inf)) == torch.inf and slope(torch.tensor(torch.inf)).isfinite()
    assert abs(float(value(torch.tensor(-torch.inf)))) < 2e-7 and abs(float(slope(torch.tensor(-torch.inf)))) < 1e-6
    assert value(torch.tensor(torch.nan)).isnan() and slope(torch.tensor(torch.nan)).isnan()


@pytest.mark.parametrize("dtype", HALVES)
def test_values_and_gradients_are_torchs_to_the_last_bits_of_16(dtype: torch.dtype) -> None:
    """Every finite number of 16 bits: off by rounding to 16 bits once, and by what the tail is off."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = numbers[numbers.isfinite()]
    (ours, gradient), (true, slopes) = values_and_gradients(ByTail.apply, x), values_and_gradients(F.gelu, x.double())
    assert ours.dtype == gradient.dtype == dtype
    step = torch.finfo(dtype).eps / 2
    assert ((ours.double() - true).abs() <= (step + 3e-5) * true.abs() + 1e-6).all()
    assert ((gradient.double() - slopes).abs() <= step * slopes.abs() + 3e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_compiled_graph_can_hold_it(dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x: ByTail.apply(2 * x), fullgraph=True, backend="aot_eager")
    x = torch.randn(33).to(dtype)
    for ours, plain in zip(
        values_and_gradients(compiled, x), values_and_gradients(lambda x: F.gelu(2 * x), x), strict=True
    ):
        assert torch.allclose(ours, plain, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_with_a_bias_it_is_gelu_of_the_sum(dtype: torch.dtype) -> None:
    """In a compiled graph; its gradients by the equations, which the kernel stands for on a GPU."""
    torch.manual_seed(0)
    x, bias = torch.randn(3, 700, 20).to(dtype), torch.randn(20).to(dtype)
    compiled = torch.compile(lambda x, bias: WithBias.apply(2 * x, bias), fullgraph=True, backend="aot_eager")
    ours = values_and_gradients(compiled, x, bias)
    exact = values_and_gradients(lambda x, bias: F.gelu(2 * x + bias), x.double(), bias.double())
    assert [each.dtype for each in ours] == [dtype] * 3
    for each, true in zip(ours, exact, strict=True):
        assert float((each.double() - true).norm() / true.norm()) < torch.finfo(dtype).eps + 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outside_of_compiled_gpu_code_it_is_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(5, 7).to(dtype)
    assert torch.equal(gelu(x), F.gelu(x)) and torch.equal(GELU()(x), nn.GELU()(x))
    assert not GELU().state_dict()
    linear = nn.Linear(7, 3).to(dtype)
    assert torch.equal(GELU().of(linear, x), F.gelu(linear(x)))
    wide = torch.linspace(-4, 4, 4097).to(dtype)  # by the tail a few of these would differ
    assert torch.equal(torch.compile(gelu, fullgraph=True, backend="eager")(wide), F.gelu(wide))


@on_gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_compiled_for_a_gpu_it_means_the_same(dtype: torch.dtype) -> None:
    x = torch.randn(4096, device="cuda").to(dtype)
    ours = values_and_gradients(torch.compile(GELU(), fullgraph=True), x)
    for each, true in zip(ours, values_and_gradients(F.gelu, x.double()), strict=True):
        assert ((each.double() - true).abs() <= 1.1 * torch.finfo(dtype).eps * true.abs() + 3e-5).all()


@by_triton
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 20), (ROWS + 1, 128), (2 * ROWS, 136), *MANY])
def test_the_kernel_computes_what_the_equations_say(dtype: torch.dtype, rows: int, width: int) -> None:
    torch.manual_seed(rows)
    given = [torch.randn(*shape, device=DEVICE).to(dtype) for shape in ((rows, width), (rows, width), (width,))]
    (out, sums), (expected, total) = by_kernel(*given), in_words(*(each.cpu() for each in given))
    assert sums.shape == total.shape
    assert ((out.cpu() - expected).abs() <= 2 * torch.finfo(dtype).eps * expected.abs() + 1e-6).all()
    assert float((sums.sum(0).cpu() - total.sum(0)).norm() / total.sum(0).norm()) < 1e-4
    strided = torch.stack([given[2], -given[2]], 1)[:, 0]
    assert torch.equal(by_kernel(*given[:2], strided)[0], out)


@on_gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_a_compiled_feed_forward_layer_has_torchs_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = FeedForward(48, 100).cuda()
    x = torch.randn(5, 70, 48, device="cuda")
    exact, low = x.double().requires_grad_(), x.to(dtype).requires_grad_()
    out = layer.double()(exact)
    out.backward(torch.ones_like(out))
    wanted = [out, exact.grad, *(each.grad.clone() for each in layer.parameters())]
    layer.zero_grad(set_to_none=True)
    out = torch.compile(layer.to(dtype), fullgraph=True)(low)
    out.backward(torch.ones_like(out))
    for found, true in zip([out, low.grad, *(each.grad for each in layer.parameters())], wanted, strict=True):
        assert float((found.double() - true).norm() / true.norm()) < 20 * torch.finfo(dtype).eps
