"""Dropout by 16-bit decisions: what it promises about single elements, pairs of them, and gradients."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from headway.nn.dropout import FEW, LEVELS, Dropout, dropout, hashed_bits, sixteen_bits

P = (0.1, 0.3, 0.5, 0.9)


def test_every_lane_of_a_draw_is_uniform() -> None:
    """Each of the 16 bits of each of the four lanes is set half of the time, and no two of the 64 agree by more."""
    torch.manual_seed(0)
    count = 100_000
    lanes = sixteen_bits(torch.Size([count, 4])).int() & 0xFFFF
    bits = torch.stack([(lanes >> bit) & 1 for bit in range(16)], dim=-1).flatten(1).double()  # (count, 64)
    spread = 5 / (2 * math.sqrt(count))  # five standard deviations of a mean of fair coins
    assert (bits.mean(0) - 0.5).abs().max() < spread
    signs = 2 * bits - 1
    together = signs.T @ signs / count - torch.eye(64, dtype=torch.float64)
    assert together.abs().max() < 2 * spread


@pytest.mark.parametrize("p", P)
def test_the_share_that_is_dropped_and_the_mean(p: float) -> None:
    torch.manual_seed(1)
    x = torch.ones(400_000, dtype=torch.float64)
    y = dropout(x, p)
    dropped = round(p * LEVELS) / LEVELS
    spread = 5 * math.sqrt(dropped * (1 - dropped) / len(x))
    assert abs(float((y == 0).double().mean()) - dropped) < spread
    assert set(y.unique().tolist()) == {0.0, 1 / (1 - dropped)}  # so the expectation is x exactly
    for lane in range(4):
        assert abs(float((y[lane::4] == 0).double().mean()) - dropped) < 2 * spread


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 5])
def test_neighbours_are_dropped_independently(shift: int) -> None:
    torch.manual_seed(2)
    dropped = (dropout(torch.ones(400_000), 0.5) == 0).double()
    both = float((dropped[shift:] * dropped[:-shift]).mean())
    assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(dropped))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (FEW,), (FEW + 1,), (3, 5, FEW // 8 + 3)])
def test_any_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    x = torch.randn(shape).to(dtype)
    y = dropout(x, 0.5)
    assert y.dtype == dtype and y.shape == x.shape
    assert ((y == 0) | (y == 2 * x)).all()
    assert y.numel() <= 1 or 0.4 < float((y != 0).double().mean()) < 0.6


def test_axes_in_any_order() -> None:
    x = torch.randn(640, 3, 5).permute(2, 0, 1)
    y = dropout(x, 0.5)
    assert ((y == 0) | (y == 2 * x)).all() and 0 < int((y == 0).sum()) < y.numel()


def test_the_gradient_is_the_mask() -> None:
    torch.manual_seed(4)
    x = torch.randn(500, 7, dtype=torch.float64, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)
    torch.testing.assert_close(x.grad * x.detach(), y.detach(), atol=1e-15, rtol=1e-15)


def test_the_seed_decides() -> None:
    x = torch.randn(2 * FEW)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return dropout(x, 0.5)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    torch.manual_seed(1)
    assert not torch.equal(dropout(x, 0.5), dropout(x, 0.5))


def test_edges() -> None:
    x = torch.randn(2 * FEW)
    assert dropout(x, 0.0) is x
    assert dropout(x, 0.7, training=False) is x
    assert (dropout(x, 1.0) == 0).all()
    assert torch.equal(dropout(x, 1e-9), x)  # rounds to 0
    assert torch.isfinite(dropout(x, 1 - 1e-9)).all()
    for wrong in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"not {wrong}"):
            dropout(x, wrong)


def test_the_module_is_torchs_module() -> None:
    module = Dropout(0.5)
    x = torch.randn(4000)
    assert isinstance(module, nn.Dropout)
    assert 1800 < int((module(x) == 0).sum()) < 2200
    assert module.eval()(x) is x
    assert not module.state_dict()
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.p == 0.5 and not again.training
    with torch.no_grad():
        changed = Dropout(0.5, inplace=True)(y := x.clone())
    assert changed is y and (y == 0).any()


def test_hashed_bits_are_like_draws() -> None:
    """Of the bits that decide, each is set half of the time, no two agree by more, and other seeds give others."""
    count = 200_000
    spread = 5 / (2 * math.sqrt(count))
    seeds = torch.randint(-(2**31), 2**31, (4, 2), generator=torch.Generator().manual_seed(0)).int()
    drawn = torch.stack([hashed_bits(torch.Size([count]), pair) for pair in seeds])  # (4, count)
    bits = torch.stack([(drawn >> bit) & 1 for bit in range(16, 32)], dim=1).double()  # (4, 16, count)
    assert (bits.mean(-1) - 0.5).abs().max() < spread
    signs = 2 * bits.flatten(0, 1) - 1
    together = signs @ signs.T / count - torch.eye(4 * 16, dtype=torch.float64)
    assert together.abs().max() < 2.5 * spread


@pytest.mark.parametrize("shift", [1, 2, 8, 256, 4096])
def test_neighbours_are_hashed_independently(shift: int) -> None:
    dropped = (hashed_bits(torch.Size([400_000]), torch.tensor([5, 9], dtype=torch.int32)) < 0).double()
    both = float((dropped[shift:] * dropped[:-shift]).mean())
    assert abs(both - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(dropped))
