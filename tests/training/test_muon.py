"""Muon, all matrices of a shape at once, equals torch's own, matrix by matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headway.models import GPTSettings
from headway.training import muon, optimizer
from headway.training.muon import BatchedMuon, orthogonal
from headway.training.stage import TrainingSettings

SHAPES = [(8, 8), (16, 4), (8, 8), (4, 16), (16, 4)]


def with_bfloat16(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """This device computes in bfloat16, or does not."""
    for module in (muon, optimizer):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: (there, ""))


@pytest.mark.parametrize(("there", "tolerance"), [(True, 1e-6), (False, 2e-3)])
def test_it_equals_torch(there: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which orthogonalises in bfloat16; in float32 only the rounding differs."""
    with_bfloat16(monkeypatch, there)
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
        torch.testing.assert_close(mine, yours, atol=tolerance, rtol=tolerance)
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


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("shape", [(3, 12, 12), (2, 32, 8), (2, 8, 32)])
def test_orthogonal_brings_all_singular_values_near_one(
    shape: tuple[int, ...], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bfloat16(monkeypatch, there)
    torch.manual_seed(2)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.3 and values.max() < 1.3


def test_only_matrices() -> None:
    with pytest.raises(ValueError, match=r"not a tensor of shape \(3,\)"):
        BatchedMuon([torch.zeros(3, requires_grad=True)], 0.1, 0.0)


@pytest.mark.parametrize("there", [True, False])
def test_no_bfloat16_is_computed_where_it_is_slow(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without instructions for it, torch's own takes most of a step."""
    with_bfloat16(monkeypatch, there)
    model = GPTSettings(width=16, heads=2, layers=1).build(20)
    built = optimizer.build_optimizer(model, TrainingSettings(optimizer="muon"))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    types = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
            types.update(each.dtype for each in args if isinstance(each, torch.Tensor))
            return operation(*args, **(kwargs or {}))

    with Seen():
        built.parts[0].step()
    assert (torch.bfloat16 in types) == there
    before = {name: tensor.clone() for name, tensor in built.state().items()}
    with_bfloat16(monkeypatch, not there)  # resumed on another machine
    other = optimizer.build_optimizer(model, TrainingSettings(optimizer="muon"))
    other.load(before)
    after = {name: tensor for name, tensor in other.state().items() if name in before}
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
