"""Muon for a GPU equals torch's own, matrix by matrix."""

from __future__ import annotations

import pytest
import torch

from headway.training.muon import BatchedMuon, orthogonal

SHAPES = [(8, 8), (16, 4), (8, 8), (4, 16), (16, 4)]


def test_it_equals_torch() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours]
    rate = torch.tensor(0.02)
    one = BatchedMuon(ours, rate, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95)
    for step in range(6):
        rate.fill_(0.02 / (step + 1))
        other.param_groups[0]["lr"] = 0.02 / (step + 1)
        for mine, yours in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            yours.grad = mine.grad.clone()
        one.step()
        other.step()
    for mine, yours in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, yours, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(one.state[mine]["momentum_buffer"], other.state[yours]["momentum_buffer"])


def test_a_step_that_must_not_happen_changes_nothing() -> None:
    torch.manual_seed(1)
    matrices = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    muon = BatchedMuon(matrices, torch.tensor(0.02), weight_decay=0.1)
    for matrix in matrices:
        matrix.grad = torch.randn(matrix.shape)
    muon.found_inf = torch.tensor(0.0)
    muon.step()
    before = [(matrix.detach().clone(), muon.state[matrix]["momentum_buffer"].clone()) for matrix in matrices]
    for matrix in matrices:
        matrix.grad[0, 0] = float("nan")
    muon.found_inf = torch.tensor(1.0)
    muon.step()
    for matrix, (weight, momentum) in zip(matrices, before, strict=True):
        assert torch.equal(matrix, weight) and torch.equal(muon.state[matrix]["momentum_buffer"], momentum)


@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 32, 8), (2, 8, 32)])
def test_orthogonal_brings_all_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.3 and values.max() < 1.3


def test_only_matrices() -> None:
    with pytest.raises(ValueError, match=r"not a tensor of shape \(3,\)"):
        BatchedMuon([torch.zeros(3, requires_grad=True)], 0.1, 0.0)
