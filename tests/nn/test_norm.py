"""A norm beside its residual: the gradients of both, against torch's in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headway.nn import Block, FeedForward, SelfAttention
from headway.nn import norm as norms
from headway.nn.norm import Beside, beside, by_kernel, fits, in_words
from tests.nn.gpu import DEVICE, HALVES, INTERPRETED, by_triton, on_gpu

MANY = [] if INTERPRETED else [(norms.PARTS + 1, 384), (5 * norms.PARTS, 512)]  # rows and width, for a GPU


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x + Norm(x)², with the norm as torch has it."""
    return x + nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5) ** 2


def layer_beside(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x, normed = Beside.apply(x, weight, bias, 1e-5)
    return x + normed**2


def with_gradients(function, *given: Tensor) -> list[Tensor]:
    given = tuple(each.detach().requires_grad_() for each in given)
    out = function(*given)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype))
    return [out.detach(), *(each.grad for each in given if each.grad is not None)]


def samples(*shape: int, device: str = "cpu") -> list[Tensor]:
    """x, weight and bias; x with a mean and a spread of its own."""
    width = shape[-1]
    return [each.to(device) for each in (3 * torch.randn(*shape) + 1, torch.randn(width), torch.randn(width))]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 7), (1500, 2, 16)])
def test_the_equations_give_torchs_gradients(shape: tuple[int, ...]) -> None:
    """In a compiled graph. The last shape has more tokens than there are parts of a sum."""
    torch.manual_seed(0)
    given = samples(*shape)
    compiled = torch.compile(layer_beside, fullgraph=True, backend="aot_eager")
    exact = with_gradients(layer, *(each.double() for each in given))
    for found, true in zip(with_gradients(compiled, *given), exact, strict=True):
        assert torch.allclose(found.double(), true, rtol=1e-4, atol=2e-4)


def test_outside_of_compiled_gpu_code_it_is_the_norm_itself() -> None:
    norm, x = nn.LayerNorm(6), torch.randn(2, 3, 6)
    same, normed = beside(x, norm)
    assert same is x and torch.equal(normed, norm(x))


def test_only_a_plain_norm_is_taken() -> None:
    assert fits(nn.LayerNorm(6))
    for other in (nn.LayerNorm((2, 6)), nn.LayerNorm(6, bias=False), nn.LayerNorm(6, elementwise_affine=False)):
        assert not fits(other)
    watched = nn.LayerNorm(6)
    watched.register_forward_hook(lambda *_: None)
    assert not fits(watched)
    assert not fits(type("Other", (nn.LayerNorm,), {})(6))


@by_triton
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("parts", [8, norms.PARTS])
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 20), (17, 384), (70, 1000), (9, 4096), (301, 16), *MANY])
def test_the_kernel_computes_what_the_equations_say(
    dtype: torch.dtype, parts: int, rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tokens than parts, as many, and more."""
    monkeypatch.setattr(norms, "PARTS", parts)
    torch.manual_seed(rows)
    x, weight, _ = samples(rows, width, device=DEVICE)
    gradient, residual = torch.randn_like(x), torch.randn_like(x)
    given = [each.to(dtype) for each in (gradient, residual, x, weight)]
    mean, rstd = x.mean(-1, keepdim=True), torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-5)
    out, sums = by_kernel(*given, mean, rstd)
    expected, total = in_words(*(each.cpu() for each in (*given, mean, rstd)))
    assert sums.shape == total.shape
    assert float((out.cpu() - expected).float().norm() / expected.float().norm()) < torch.finfo(dtype).eps
    for found, true in zip(sums.sum(0).cpu(), total.sum(0), strict=True):
        assert torch.allclose(found, true, rtol=1e-3, atol=1e-3 * rows**0.5)


@on_gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_compiled_for_a_gpu_a_block_has_torchs_gradients(dtype: torch.dtype) -> None:
    """x + f(Norm(x)) twice, as a layer has it: as near to float64 as torch's own kernels in 16 bits."""
    torch.manual_seed(0)
    block = Block(48, SelfAttention(48, 4, causal=True), FeedForward(48, 96)).cuda()
    for norm in (block.attention_norm, block.feed_forward_norm):
        nn.init.normal_(norm.weight)
    x, places = torch.randn(6, 50, 48, device="cuda"), torch.arange(50, device="cuda")
    wanted = with_weights(block.double(), x.double(), places)
    plain = with_weights(block.to(dtype), x.to(dtype), places)
    found = with_weights(torch.compile(block, fullgraph=True), x.to(dtype), places)
    for ours, torchs, true in zip(found, plain, wanted, strict=True):
        error, usual = (float((each.double() - true).norm()) for each in (ours, torchs))
        assert error < 2 * usual + torch.finfo(dtype).eps * float(true.norm())


def with_weights(block: nn.Module, x: Tensor, places: Tensor) -> list[Tensor]:
    """What comes out, the gradient of x and those of the block's weights."""
    block.zero_grad()
    x = x.requires_grad_()
    out = block(x, places)
    out.backward(torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype))
    assert x.grad is not None
    return [out.detach(), x.grad, *(each.grad.clone() for each in block.parameters() if each.grad is not None)]
