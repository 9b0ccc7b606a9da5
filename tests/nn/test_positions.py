"""Position schemes: what they promise about distances."""

from __future__ import annotations

import math

import pytest
import torch

from headway.nn import Learned, Rotary, Sinusoidal


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotate = Rotary(8).double()
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def score(t: int, s: int) -> float:
        return float((rotate.turn(q, torch.tensor([t])) * rotate.turn(k, torch.tensor([s]))).sum())

    assert math.isclose(score(5, 2), score(45, 42), rel_tol=1e-6)
    assert not math.isclose(score(5, 2), score(5, 3), rel_tol=1e-3)


def test_rotary_is_multiplication_by_a_complex_unit() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.arange(5)
    rates = 10_000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones(5, 4, dtype=torch.float64), positions[:, None] * rates
    )
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(Rotary(8).double().turn(x, positions), expected, atol=1e-6, rtol=0)


def test_positions_may_differ_by_row() -> None:
    rotate = Rotary(4)
    x = torch.randn(2, 1, 3, 4)
    rows = torch.tensor([[0, 1, 2], [7, 8, 9]])
    both = rotate.turn(x, rows)
    for row in range(2):
        torch.testing.assert_close(both[row : row + 1], rotate.turn(x[row : row + 1], rows[row]))


def test_sinusoids_follow_the_formula_at_any_position() -> None:
    out = Sinusoidal(6)(torch.zeros(1, 2, 6), torch.tensor([3, 5000]))[0]
    for row, t in enumerate((3, 5000)):
        for i in range(3):
            angle = t / 10_000 ** (2 * i / 6)
            assert math.isclose(out[row, 2 * i], math.sin(angle), abs_tol=1e-3)
            assert math.isclose(out[row, 2 * i + 1], math.cos(angle), abs_tol=1e-3)


def test_learned_positions_begin_at_zero() -> None:
    x = torch.randn(1, 4, 6)
    assert torch.equal(Learned(8, 6)(x, torch.arange(4)), x)


@pytest.mark.parametrize("scheme", [Rotary, Sinusoidal])
def test_pairs_need_an_even_width(scheme: type) -> None:
    with pytest.raises(ValueError, match=r"\(5\) must be even"):
        scheme(5)
