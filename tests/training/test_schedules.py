"""Schedules against their formulas, and the course's against its published log."""

from __future__ import annotations

import math

import pytest
import torch

from headway.models import EncoderDecoderSettings, GPTSettings
from headway.training.optimizer import build_optimizer
from headway.training.order import Sequential, Shuffled
from headway.training.schedules import course_schedule, schedule
from headway.training.stage import TrainingSettings


def test_warm_up_rises_in_a_line_to_the_peak() -> None:
    for name in ("cosine", "linear", "inverse-sqrt", "constant"):
        rate = schedule(name, 100, 10, 0.1)
        assert [rate(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])
        assert max(rate(step) for step in range(100)) == pytest.approx(1.0)


def test_cosine_and_linear_end_where_they_should() -> None:
    for name in ("cosine", "linear"):
        rate = schedule(name, 101, 0.0, 0.1)
        assert (rate(0), rate(50), rate(100)) == pytest.approx((1.0, 0.55, 0.1))
        values = [rate(step) for step in range(101)]
        assert values == sorted(values, reverse=True)


def test_inverse_square_root_is_noam() -> None:
    """lr = d^-0.5 · min(s^-0.5, s · w^-1.5) up to its peak value, with s counted from 1."""
    rate = schedule("inverse-sqrt", 1000, 40, 0.0)
    noam = [min(s**-0.5, s * 40**-1.5) for s in range(1, 1001)]
    assert [rate(step) for step in range(1000)] == pytest.approx([value / max(noam) for value in noam])


def test_a_share_of_the_steps_may_be_the_warm_up() -> None:
    assert schedule("cosine", 200, 0.05, 0.0)(4) == schedule("cosine", 200, 10, 0.0)(4) == 0.5


@pytest.mark.parametrize(
    ("examples", "batch", "peak", "epoch", "printed"),
    [
        (2000, 256, 6e-4, 1, 5.999844e-04),
        (2000, 256, 6e-4, 10, 5.983263e-04),
        (2000, 256, 6e-4, 75, 5.100024e-04),
        (2938, 128, 6e-3, 640, 6.000000e-04),
        (2938, 128, 6e-3, 649, 6.881640e-04),
        (2938, 128, 6e-3, 650, 7.182453e-04),
    ],
)
def test_the_course_schedule_prints_what_published_logs_print(examples, batch, peak, epoch, printed) -> None:
    order = Sequential(examples, batch)
    rate = course_schedule(lambda step: order.rows_through(step) * 127, 200 * 2938 * 128)
    assert peak * rate(epoch * order.steps) == pytest.approx(printed, rel=1e-6)


def test_shuffled_order_is_a_pure_function_and_covers_every_epoch() -> None:
    order, other = Shuffled(10, 4, seed=3), Shuffled(10, 4, seed=3)
    rows = torch.cat([order.rows(step) for step in range(5)])  # two epochs
    assert sorted(rows[:10].tolist()) == sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    for step in (4, 1, 3, 0, 2):
        assert torch.equal(order.rows(step), other.rows(step))
    assert len(Shuffled(3, 8, 0).rows(0)) == 8  # fewer examples than a batch: epochs follow each other


def test_sequential_order_is_the_file_with_a_short_last_batch() -> None:
    order = Sequential(10, 4)
    assert [order.rows(step).tolist() for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert [order.rows_through(step) for step in range(4)] == [4, 8, 10, 14]


def test_decay_pulls_on_matrices_only() -> None:
    model = GPTSettings(width=16, heads=2, layers=1, positions="learned").build(20)
    optimizer = build_optimizer(model, TrainingSettings())
    decayed = {
        optimizer.names[parameter]
        for group in optimizer.parts[0].param_groups
        if group["weight_decay"] > 0
        for parameter in group["params"]
    }
    linear = {name for name, p in model.named_parameters() if p.dim() == 2} - {"embedding.weight", "positions.table"}
    assert decayed == linear


def test_a_matrix_that_is_an_embedding_too_is_not_pulled_on() -> None:
    model = EncoderDecoderSettings(width=16, heads=2, layers=1, tied="all").build(20)
    groups = build_optimizer(model, TrainingSettings()).parts[0].param_groups
    decayed = [parameter for group in groups if group["weight_decay"] > 0 for parameter in group["params"]]
    assert decayed and not any(parameter is model.head.weight for parameter in decayed)


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = GPTSettings(width=16, heads=2, layers=2).build(20)
    optimizer = build_optimizer(model, TrainingSettings(optimizer="muon"))
    muon, adamw = (
        {optimizer.names[p] for group in part.param_groups for p in group["params"]} for part in optimizer.parts
    )
    assert muon == {name for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}
    assert muon | adamw == {name for name, _ in model.named_parameters()}
    assert not muon & adamw


def test_rates_scale_every_group() -> None:
    optimizer = build_optimizer(
        GPTSettings(width=16, heads=2).build(20), TrainingSettings(optimizer="muon", learning_rate=1.0)
    )
    optimizer.set_rate(0.25)
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.015 / 4, 0.25, 0.25]
    optimizer.set_rate(1.0)
    assert math.isclose(optimizer.parts[0].param_groups[0]["lr"], 0.015)
