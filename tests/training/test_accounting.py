"""What training says of itself: its arithmetic by an independent count, its clock, the device's peak."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import headway
from headway.console import Reporter
from headway.models import CausalModel
from headway.models.attentions import KINDS
from headway.training.accounting import Costs, Meter, listed_peak, measured_peak, peak_memory, row_flops
from headway.training.checkpoint import State
from headway.training.engine import Outcome
from headway.training.order import Shuffled
from headway.training.streams import Stream
from tests.conftest import tiny_gpt, tiny_recurrent
from tests.training.test_streams import Rows

LENGTH = 20
FUSED = ("dot-product", "unscaled", "local", "bigbird", "perceiver", "perceiver-first")  # pairs can be told apart


def counted_by_torch(model: CausalModel, length: int) -> int:
    """FLOPs of both passes; attention written out, so that hidden pairs count too."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long)).sum().backward()
    return counter.get_total_flops()


def weights_of_products(model: CausalModel) -> int:
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["rotary", "alibi", "learned"])
def test_a_gpt_takes_six_flops_a_weight_and_token_and_attention_over_the_pairs_it_sees(
    positions: str, tied: bool
) -> None:
    model = tiny_gpt(positions, tied=tied)
    width, layers = 16, 2
    seen = LENGTH * (LENGTH + 1) // 2
    expected = 6 * weights_of_products(model) * LENGTH + 3 * layers * 2 * 2 * seen * width
    assert row_flops(model, LENGTH) == expected
    hidden = LENGTH**2 - seen
    assert counted_by_torch(model, LENGTH) == expected + 3 * layers * 2 * 2 * hidden * width


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "linformer"])
def test_every_attention_is_counted(kind: str) -> None:
    model = tiny_gpt("learned", attention=kind)
    ours, theirs = row_flops(model, LENGTH), counted_by_torch(model, LENGTH)
    if kind in FUSED:
        assert 0.2 * theirs < ours < theirs
    else:
        assert ours == theirs


@pytest.mark.parametrize("reading", ["segments", "first"])
def test_a_bottleneck_is_counted(reading: str) -> None:
    model = tiny_gpt("learned", bottleneck=4, layers=3, reading=reading)
    ours, theirs = row_flops(model, LENGTH), counted_by_torch(model, LENGTH)
    assert 0.8 * theirs < ours < theirs


@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_a_recurrent_model_takes_six_flops_a_weight_and_token(cell: str) -> None:
    """However it is computed; a fused kernel shows torch no product."""
    model = tiny_recurrent(cell=cell)
    weights = [*model.hidden_matrices(), model.head.weight]
    assert row_flops(model, LENGTH) == 6 * sum(weight.numel() for weight in weights) * LENGTH


def test_counting_leaves_the_model_and_the_random_numbers_as_they_are() -> None:
    model = tiny_gpt("rotary", dropout=0.3).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    row_flops(model, LENGTH)
    assert model.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_streams_cost_what_their_rows_cost() -> None:
    model = tiny_gpt("rotary")
    streams = [
        Stream(name, Rows(torch.ones(5, width + 1, dtype=torch.long)), rows, Shuffled(5, rows, 0), 0)
        for name, width, rows in (("long", 20, 2), ("short", 5, 3))
    ]
    costs = Costs(model, streams)
    long, short = row_flops(model, 20), row_flops(model, 5)
    assert costs(["long"]) * 20 == pytest.approx(long)
    assert costs({"long": 0, "short": 0}) * (2 * 20 + 3 * 5) == pytest.approx(2 * long + 3 * short)


@pytest.mark.parametrize(
    ("name", "low", "full"),
    [
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        *((name, None, None) for name in ("NVIDIA L40", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "")),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
    ],
)
def test_a_gpus_peak_goes_by_its_name(name: str, low: float | None, full: float | None) -> None:
    assert (listed_peak(name, torch.bfloat16), listed_peak(name, torch.float32)) == (low, full)
    assert listed_peak(name, torch.float32, tf32=True) == (low and low / 2)


def test_the_peak_of_a_cpu_is_no_less_than_what_a_product_reaches() -> None:
    peak = measured_peak(torch.float32, torch.get_num_threads())
    matrix = torch.ones(128, 128)
    began = time.perf_counter()
    matrix @ matrix
    assert peak is not None and peak > 0.1 * 2 * 128**3 / (time.perf_counter() - began)


def test_memory_grows_by_what_is_taken() -> None:
    before = peak_memory(torch.device("cpu"))
    taken = torch.ones(before // 4 + 2**24)  # 4 bytes each
    assert before + 4 * len(taken) // 2 < peak_memory(torch.device("cpu")) < 4 * before + 8 * len(taken)


# ---- the meter


def outcome(tokens: int, positions: int = 0) -> Outcome:
    nothing = torch.zeros(())
    return Outcome(tokens, positions or tokens, nothing, nothing, {"s": nothing})


def test_the_meter_counts_only_time_that_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 12.0, 3.0, 3.0, 4.0, 1.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    meter = Meter(State())

    def read() -> tuple[float, float, float]:
        found = meter.read()
        return found["seconds"], found["tokens_per_second"], found["useful_tokens_per_second"]

    meter.add(outcome(100, 150))
    assert read() == (2.0, 75.0, 50.0)
    meter.add(outcome(100, 150))
    assert read() == (2.0, 75.0, 50.0)  # set back: the speed stays what it was
    meter.add(outcome(30, 60))
    meter.lap()
    assert read() == (3.0, 60.0, 30.0)
    meter.add(outcome(5))
    assert read() == (3.0, 60.0, 30.0)


def test_utilisation_is_the_useful_arithmetic_over_time_and_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    meter = Meter(State(), lambda names: {("s",): 7.0}[tuple(names)], peak=1000.0)
    meter.add(outcome(100, 400))
    assert meter.read()["flops_utilisation"] == pytest.approx(7 * 100 / 2 / 1000)


def test_without_a_known_peak_there_is_no_utilisation() -> None:
    meter = Meter(State(), lambda names: 7.0, peak=None)
    meter.add(outcome(100))
    assert "flops_utilisation" not in meter.read() and "peak" not in meter.summary()


def test_the_summarys_rates_leave_out_the_first_step_and_its_time_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 60.0, 60.0, 61.0, 62.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    meter = Meter(State(), lambda names: 5.0, peak=1000.0)
    meter.add(outcome(100, 200))
    meter.read()
    meter.lap()
    for _ in range(2):
        meter.add(outcome(100, 200))
        meter.lap()
    words = "3 steps in 1:02, 1 it/s, 100 useful tokens/s, 50% padding, 50.0% of the measured peak, "
    assert meter.summary().startswith(words)


def test_the_summary_of_no_steps_says_nothing_of_padding() -> None:
    summary = Meter(State(), lambda names: 5.0, peak=1000.0).summary()
    assert summary.startswith("0 steps in 0:00, ") and "padding" not in summary


class Said(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_records_and_says_what_it_cost(run_file: Path, tmp_path: Path) -> None:
    report = Said()
    records: list[dict[str, Any]] = []
    headway.train(run_file, tmp_path / "run", report=report, watch=records.append)
    for record in records:
        if "loss" in record:
            assert 0 < record["useful_tokens_per_second"] <= record["tokens_per_second"]
            assert 0 < record["flops_utilisation"] < 1
            assert 2**24 < record["memory"] < 2**40
    said = [line for line in report.lines if "useful tokens/s" in line]
    assert [line.split(" in ")[0] for line in said] == ["pretraining: 6 steps", "training: 5 steps"]
