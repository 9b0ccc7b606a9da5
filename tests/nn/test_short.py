"""Attention over short rows in one kernel: what it computes, against the same in float64 written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.nn import SelfAttention, make_position
from headway.nn.dropout import hashed_bits
from headway.nn.kernels import power_of_two
from headway.nn.short import LEAST, LONGEST, attend, fits, short_attention
from tests.nn.gpu import DEVICE, INTERPRETED, by_triton, on_gpu

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def pair_bits(programs: int, count: int, seeds: Tensor) -> Tensor:
    """The bits by which dropout decides over the weights of every head of every row, (B·H, T, T), up to 2³²."""
    block = 2 * power_of_two((count + 1) // 2, LEAST)
    rows = hashed_bits(torch.Size([programs, block]), seeds)[:, :count, None]
    columns = hashed_bits(torch.Size([block // 2]), seeds.flip(0)) | 1
    columns = torch.cat([columns, columns * (0x9E3779B1 - 2**32)])[:count]
    return (rows * columns).long() % 2**32


def reference(packed: Tensor, seeds: Tensor, scale: float, dropout: float) -> Tensor:
    rows, count, _, heads, _ = packed.shape
    q, k, v = packed.transpose(1, 3).unbind(2)  # (B, H, T, K)
    later = ~torch.ones(count, count, dtype=torch.bool, device=packed.device).tril()
    weights = (q @ k.mT * scale).masked_fill(later, -math.inf).softmax(-1)
    bits = pair_bits(rows * heads, count, seeds).view(rows, heads, count, count)
    kept = bits >= round(dropout * 2**32)
    return torch.where(kept, weights / (1 - dropout), 0.0).matmul(v).transpose(1, 2)


@by_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count, width", [(1, 16), (17, 24), (127, 64), (128, 32)])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_output_and_gradient_are_those_of_the_equation(
    dtype: torch.dtype, count: int, width: int, dropout: float
) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter takes bfloat16 in products for whole numbers")
    torch.manual_seed(count)
    packed = torch.randn(3, count, 3, 5, width, device=DEVICE).to(dtype).requires_grad_()
    exact = packed.detach().double().requires_grad_()
    seeds = torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=DEVICE)
    out, expected = attend(packed, seeds, 0.3, dropout), reference(exact, seeds, 0.3, dropout)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient.double())
    assert packed.grad is not None and exact.grad is not None
    for found, wanted in ((out, expected), (packed.grad, exact.grad)):
        assert float((found - wanted).norm() / wanted.norm()) < TOLERANCE[dtype]


@on_gpu
@pytest.mark.parametrize("positions", ["none", "rotary"])
def test_self_attention_takes_it_where_it_can_and_means_the_same(positions: str, monkeypatch) -> None:
    torch.manual_seed(0)
    scheme = make_position(positions, 64, 4, 32) if positions != "none" else None
    layer = SelfAttention(64, 4, causal=True, position=scheme).cuda()
    x, places = torch.randn(2, 30, 64, device="cuda"), torch.arange(30, device="cuda")
    calls = []
    monkeypatch.setattr(
        "headway.nn.short.attend", lambda *arguments: calls.append(arguments) or attend(*arguments), raising=True
    )
    exact = layer(x, places)
    assert not calls  # float32 goes the general way
    low = layer.bfloat16()(x.bfloat16(), places)
    assert len(calls) == 1
    assert float((low - exact).norm() / exact.norm()) < 2e-2


@by_triton
def test_the_share_that_is_dropped_and_another_draw_each_time() -> None:
    count, width = 128, 16
    packed = torch.zeros(8, count, 3, 4, width, device=DEVICE, dtype=torch.float16)
    packed[:, :, 2] = 1.0  # so an output is the kept share of the weights, over 1 − p
    torch.manual_seed(0)
    first, second = short_attention(packed, 0.5), short_attention(packed, 0.5)
    assert not torch.equal(first, second)
    assert float(first.float().mean()) == pytest.approx(1.0, abs=0.02)
    torch.manual_seed(0)
    assert torch.equal(short_attention(packed, 0.5), first)


def test_what_does_not_fit_is_known_without_a_gpu() -> None:
    packed = torch.zeros(2, LONGEST, 3, 2, 16, dtype=torch.bfloat16)
    assert not fits(packed)


def test_pairs_are_dropped_independently() -> None:
    """Decisions of neighbouring weights, rows and heads agree as often as chance has it, and no share is off."""
    dropped = pair_bits(200, 64, torch.tensor([11, -5], dtype=torch.int32)) < round(0.3 * 2**32)
    share = dropped.double()
    spread = 5 * math.sqrt(0.3 * 0.7)
    assert abs(float(share.mean()) - 0.3) < spread / math.sqrt(share.numel())
    for axis in (0, 1, 2):  # of every head, query and key
        means = share.mean([other for other in range(3) if other != axis])
        assert float((means - 0.3).abs().max()) < spread / math.sqrt(share.numel() / len(means))
    halves = (0, 0, 32)  # of a row, whose columns' bits are made of one another
    for shifts in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (3, 0, 0), (0, 8, 0), (0, 0, 16), halves):
        both = (share * share.roll(shifts, (0, 1, 2))).mean()
        assert abs(float(both) - 0.09) < spread / math.sqrt(share.numel())
    apart = (share - 0.3) / math.sqrt(0.3 * 0.7)
    for down, right in ((1, 1), (8, 16), (3, 5), (1, 32)):  # corners of a rectangle: two rows' bits, two columns'
        corners = apart * apart.roll(down, 1) * apart.roll(right, 2) * apart.roll((down, right), (1, 2))
        assert abs(float(corners.mean())) < 5 / math.sqrt(share.numel())
