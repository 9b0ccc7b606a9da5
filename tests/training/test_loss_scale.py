"""The loss scale: gradients come out as if there were none, and it finds its size by itself."""

from __future__ import annotations

import torch

from headway.training.loss_scale import CALM, FIRST, LossScale
from headway.training.optimizer import build_optimizer
from headway.training.stage import TrainingSettings
from tests.conftest import tiny_gpt


def test_it_halves_when_a_gradient_overflows_and_doubles_after_calm_steps() -> None:
    scale = LossScale(torch.device("cpu"))
    for _ in range(3):
        scale.update(torch.tensor(False))
    assert float(scale.value) == FIRST / 8
    for _ in range(CALM - 1):
        scale.update(torch.tensor(True))
    assert float(scale.value) == FIRST / 8
    scale.update(torch.tensor(True))
    assert float(scale.value) == FIRST / 4 and float(scale.calm) == 0
    scale.update(torch.tensor(True))
    scale.update(torch.tensor(False))
    assert float(scale.value) == FIRST / 8 and float(scale.calm) == 0


def test_gradients_and_steps_are_those_without_it() -> None:
    tokens = torch.randint(19, (3, 12), generator=torch.Generator().manual_seed(0))
    weights = []
    for precision in (torch.float32, torch.float16):
        model = tiny_gpt()
        optimizer = build_optimizer(model, TrainingSettings(), precision)
        loss = model(tokens).logsumexp(-1).mean()
        optimizer.backward(loss)
        optimizer.unscale()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step_if_finite(loss, norm)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for first, second in zip(*weights, strict=True):
        torch.testing.assert_close(first, second, atol=1e-12, rtol=1e-12)


def test_an_overflow_changes_no_weight_and_is_told_from_a_loss_that_is_no_number() -> None:
    model = tiny_gpt()
    optimizer = build_optimizer(model, TrainingSettings(), torch.float16)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.backward(model(torch.zeros(1, 4, dtype=torch.long)).sum())
    for pair in ((1.0, float("inf")), (float("nan"), 1.0), (float("inf"), 1.0)):
        optimizer.step_if_finite(*map(torch.tensor, pair))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), pair
    optimizer.step_if_finite(torch.tensor(1.0), torch.tensor(1.0))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    loss, nan, overflown = 2.0, float("nan"), float("inf")
    assert optimizer.is_fine(loss, overflown) and not optimizer.is_fine(nan, loss)
    assert optimizer.scale is not None
    optimizer.scale.value.fill_(0.5)  # so small that the scale cannot be the reason
    assert not optimizer.is_fine(loss, overflown)
    assert not build_optimizer(model, TrainingSettings()).is_fine(loss, overflown)


def test_it_is_saved_and_loaded_with_the_optimizer() -> None:
    model = tiny_gpt()
    first, second = (build_optimizer(model, TrainingSettings(), torch.float16) for _ in range(2))
    assert first.scale is not None and second.scale is not None
    first.scale.update(torch.tensor(False))
    first.scale.update(torch.tensor(True))
    second.load(first.state())
    assert {key: float(value) for key, value in second.scale.tensors().items()} == {"value": FIRST / 2, "calm": 1.0}
    build_optimizer(model, TrainingSettings()).load(first.state())  # the precision was changed since
