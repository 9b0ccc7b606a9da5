"""Losses and gradients that are no numbers, and spikes: no weight changes, and what is said names the rows."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import headway
from headway.configuration import load_settings
from headway.errors import Interrupted, UserError
from headway.training.engine import Outcome, Plain
from headway.training.guard import Spikes, Unseen
from tests.training.faults import INF, LOGGED, NAN, Spoilt, nobody_waits
from tests.training.test_checkpoint import OFTEN, Said
from tests.training.test_resume import StopAt, final_weights, same
from tests.training.torture import TIMES

# ---- losses and gradients that are no numbers


@pytest.mark.parametrize("spoil", [{"loss": NAN}, {"loss": INF}, {"gradient": NAN}, {"gradient": -INF}], ids=str)
def test_a_step_that_is_no_number_ends_the_run_before_its_update(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: dict[str, float]
) -> None:
    """Step 9 is the third of its stage, with nothing logged and no checkpoint due around it."""
    sets = ["training.log_every=5", "training.checkpoint_every=0", "training.evaluate_every=0"]
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "good", [*sets, "training.log_every=1"], watch=StopAt(8))
    from headway.tasks import QuestionAnswering

    Spoilt(monkeypatch, {2}, **spoil)
    made: list[list[int]] = []
    plain = QuestionAnswering.make

    def make(self: QuestionAnswering, rows: torch.Tensor, noise: torch.Tensor) -> Any:
        made.append(rows.tolist())
        return plain(self, rows, noise)

    monkeypatch.setattr(QuestionAnswering, "make", make)
    with pytest.raises(UserError, match=r"Lower training\.learning_rate .*bad_steps = \"skip\"") as caught:
        headway.train(run_file, tmp_path / "run", sets)
    words = str(caught.value)
    assert re.match(r"the loss is \S+ and the gradient's norm (nan|inf) at step 9 \(learning rate", words), words
    assert "such a step changes no weight; the last checkpoint is of step 8" in words
    assert words.endswith(f"the rows of step 9 are training {', '.join(map(str, made[-1]))}")
    assert same(final_weights(tmp_path / "run"), final_weights(tmp_path / "good"))


def test_the_rows_of_every_stream_are_named(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = {"task": {"name": "span_corruption", "corpus": str(run_file.parent / "wiki.txt")}, "rows": 40}
    tables = load_settings(run_file).tables()
    tables["streams"] = {"text": stream, "late": stream | {"start": 0.9, "rows": 2}}
    Spoilt(monkeypatch, {1})
    with pytest.raises(UserError, match=r"rows of step 8 are training (\d+, ){4}\d+; text (\d+, ){4}\d+ and 35 more$"):
        headway.train(tables, tmp_path / "run")


def test_bad_steps_may_be_passed_over_also_after_the_run_has_stopped(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end is that of a run that passed over them from the start, wherever it is interrupted."""
    Spoilt(monkeypatch, {1, 2})
    sets = [*LOGGED, "training.bad_steps=skip"]
    report = Said()
    whole = headway.train(run_file, tmp_path / "whole", sets, report=report)
    said = [line for line in report.lines if "passed over" in line]
    assert [re.search(r"at step (\d+); passed over, (\d) so far", line).groups() for line in said] == [
        ("8", "1"),
        ("9", "2"),
    ]
    assert whole.state.skipped == 2 and whole.state.step == 11
    assert [record["step"] for record in whole.metrics if record["step"] > 6 and "loss" in record] == [7, 10, 11]
    assert whole.metrics[-2]["skipped"] == 2
    assert all(math.isfinite(record.get("loss", 0.0)) for record in whole.metrics)

    with pytest.raises(UserError, match="at step 8"):
        headway.train(run_file, tmp_path / "run", LOGGED)
    again = headway.train(run_file, tmp_path / "run", sets, resume=True)  # a harmless change
    assert again.state.skipped == 2 and same(final_weights(again.path), final_weights(whole.path))


@pytest.mark.parametrize(("bad", "stops"), [(set(range(3, 13)), 18), (set(range(40)) - {9, 19, 29}, None)])
def test_ten_bad_steps_in_a_row_are_enough(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int], stops: int | None
) -> None:
    Spoilt(monkeypatch, bad)
    sets = ["training.bad_steps=skip", "training.steps=39", "training.evaluate_every=0", "training.keep=30"]
    if stops is None:
        assert headway.train(run_file, tmp_path / "run", sets).state.skipped == 36
    else:
        with pytest.raises(UserError, match=f"at step {stops + 1} .*, 10 such steps in a row; such a step changes"):
            headway.train(run_file, tmp_path / "run", sets)
        with pytest.raises(UserError, match=f"at step {stops + 1} "):  # resuming does not begin to count anew
            headway.train(run_file, tmp_path / "run", sets, resume=True)


def test_every_record_is_json_that_any_reader_takes(run_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """NaN and Infinity are no JSON; a bad step leaves no line."""
    Spoilt(monkeypatch, {0, 3, 4})
    run = headway.train(run_file, tmp_path / "run", [*OFTEN, "training.bad_steps=skip"])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} in metrics.jsonl")

    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


# ---- spikes


def spikes_of(losses: list[float], times: float = 8.0) -> list[int]:
    found = Spikes(times)
    return [number for number, loss in enumerate(losses) if found.see(loss) is not None]


def slow_spikes(losses: list[float], times: float = 8.0) -> list[int]:
    """The same by numpy, from the whole list every time."""
    found: list[int] = []
    for number, loss in enumerate(losses):
        before = np.array(losses[max(0, number - 20) : number])
        if len(before) < 20 or (found and number - found[-1] < 100):
            continue
        spread = np.median(np.abs(before - np.median(before))) / NormalDist().inv_cdf(0.75)
        if loss > np.median(before) + max(times * spread, 0.1):
            found.append(number)
    return found


def test_spikes_are_those_that_the_definition_finds() -> None:
    numbers = random.Random(0)
    for _ in range(30):
        losses = [
            3 * math.exp(-step / 200) + numbers.gauss(0, 0.05) + (numbers.random() < 0.02) * numbers.uniform(0, 3)
            for step in range(400)
        ]
        assert spikes_of(losses) == slow_spikes(losses)
    assert spikes_of([1.0] * 20 + [1.2]) == [20] and spikes_of([1.0] * 19 + [9.0]) == []
    assert spikes_of([1.0] * 20 + [9.0], times=0.0) == []


def test_noise_and_falling_losses_are_no_spikes_and_one_line_in_a_hundred_is_enough() -> None:
    numbers = random.Random(1)
    assert spikes_of([numbers.gauss(2.0, 0.2) for _ in range(20_000)]) == []
    assert spikes_of([5.0 * 0.99**step for step in range(2000)]) == []
    assert spikes_of([1e-4 * 10 ** numbers.random() for _ in range(5000)]) == []
    steady = [numbers.gauss(2.0, 0.02) for _ in range(400)]
    for number in range(150, 400, 3):
        steady[number] = 6.0
    assert spikes_of(steady) == [150, 252, 354]


def test_a_spike_is_said_with_its_step_once_also_when_the_run_is_resumed(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain.step

    def step(self: Plain, step: int, rate: float) -> Outcome:
        done = plain(self, step, rate)
        return replace(done, loss=torch.tensor(30.0 if step in (24, 30) else 2.0 + step % 2 / 100))

    monkeypatch.setattr(Plain, "step", step)
    sets = [*LOGGED, "training.steps=34", "pretraining.training.steps=3"]
    report = Said()
    headway.train(run_file, tmp_path / "whole", sets, report=report)
    said = [line for line in report.lines if "far above" in line]
    words = "training: step 28 of the run: the loss is 30.0000, far above the last 20 logged (median 2.0050)"
    assert len(said) == 1 and said[0].startswith(words)
    report = Said()
    for stop in (15, 29):  # before the first one, and between the two
        with pytest.raises(Interrupted):
            headway.train(run_file, tmp_path / "run", sets, resume=True, report=report, watch=StopAt(stop))
    headway.train(run_file, tmp_path / "run", sets, resume=True, report=report)
    assert [line for line in report.lines if "far above" in line] == said
    report = Said()
    headway.train(run_file, tmp_path / "quiet", [*sets, "training.spike_warning=0"], report=report)
    assert not [line for line in report.lines if "far above" in line]


# ---- numbers that nobody waited for


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_waits(monkeypatch)


@pytest.mark.usefixtures("far_away")
def test_steps_that_nobody_waited_for_are_counted(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a step is looked at when a line is due; what was no number in between ends the run then, or counts."""
    Spoilt(monkeypatch, {1, 2}, gradient=NAN)
    sets = ["training.log_every=5", "training.evaluate_every=0", "training.checkpoint_every=0"]
    with pytest.raises(UserError, match=r"2 steps since the last line, from step 8 to step 9, .* rows of step 8 are"):
        headway.train(run_file, run_file.parent / "stopped", sets)
    run = headway.train(run_file, run_file.parent / "skipped", [*sets, "training.bad_steps=skip"])
    assert run.state.skipped == 2


@pytest.mark.usefixtures("far_away")
def test_somebody_looks_at_last_though_no_line_is_due(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Spoilt(monkeypatch, {1}, gradient=NAN)
    monkeypatch.setattr(Unseen, "MOST", 3)
    sets = ["training.steps=30", "training.log_every=30", "training.checkpoint_every=0"]
    with pytest.raises(UserError, match=r"^step 8 had a loss .* the last checkpoint is of step 9 "):
        headway.train(run_file, run_file.parent / "out", sets)


@pytest.mark.usefixtures("far_away")
def test_what_is_saved_when_a_run_is_given_up_later_goes_on_exactly(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step after a bad one has been taken by then: the checkpoint counts it."""
    Spoilt(monkeypatch, {1}, gradient=NAN)
    sets = ["training.log_every=2", "training.evaluate_every=0", "training.checkpoint_every=0"]
    whole = headway.train(run_file, run_file.parent / "whole", [*sets, "training.bad_steps=skip"])
    out = run_file.parent / "stopped"
    with pytest.raises(UserError, match=r"step 8 had a loss .* the last checkpoint is of step 9"):
        headway.train(run_file, out, sets)
    headway.train(run_file, out, [*sets, "training.bad_steps=skip"], resume=True, accept_changes=True)
    assert same(final_weights(out), final_weights(whole.path))


@pytest.mark.usefixtures("far_away")
def test_ten_bad_steps_in_a_row_end_a_run_that_is_logged_at_every_step(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spoilt(monkeypatch, set(range(3, 40)), gradient=NAN)
    sets = ["training.steps=40", "training.log_every=1", "training.bad_steps=skip", "training.evaluate_every=0"]
    with pytest.raises(UserError, match="10 such steps in a row"):
        headway.train(run_file, run_file.parent / "out", sets)


@pytest.mark.usefixtures("far_away")
def test_ten_bad_steps_in_a_row_are_noticed_after_good_ones(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine in a row, twice, may pass; ten may not, though a good step came before anybody looked."""
    sets = ["training.steps=30", "training.log_every=30", "training.bad_steps=skip", "training.checkpoint_every=0"]
    with monkeypatch.context() as patch:
        Spoilt(patch, {*range(2, 11), *range(12, 21)}, gradient=NAN)
        assert headway.train(run_file, run_file.parent / "nine", sets).state.skipped == 18
    Spoilt(monkeypatch, {*range(2, 12)}, gradient=NAN)
    with pytest.raises(UserError, match="10 such steps in a row"):
        headway.train(run_file, run_file.parent / "ten", sets)


@pytest.mark.usefixtures("far_away")
def test_bad_steps_that_nobody_waited_for_are_counted_through_stops(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal between two lines forgets nothing: neither a step that was no number, nor how many in a row."""
    Spoilt(monkeypatch, {1, 4, *range(8, 30)}, gradient=NAN)
    sets = ["training.steps=30", "training.log_every=4", "training.bad_steps=skip", "training.checkpoint_every=0"]
    out = run_file.parent / "out"
    step, at = Plain.step, 0

    def stopping(self: Plain, number: int, rate: float) -> Outcome:
        if self.streams[0].name == "training" and number == at:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, number, rate)

    monkeypatch.setattr(Plain, "step", stopping)
    for at, skipped in ((2, 1), (5, 2), (9, 4), (13, 8)):
        with pytest.raises(Interrupted):
            headway.train(run_file, out, sets, resume=at > 2)
        assert headway.load(out).state.skipped == skipped
    at = -1
    with pytest.raises(UserError, match="10 such steps in a row"):
        headway.train(run_file, out, sets, resume=True)
    assert headway.load(out).state.skipped <= 16


@pytest.mark.usefixtures("far_away")
def test_a_run_that_was_given_up_at_its_last_step_can_be_finished(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Spoilt(monkeypatch, {3}, gradient=NAN)
    sets = ["training.log_every=5", "training.checkpoint_every=0"]
    out = run_file.parent / "out"
    with pytest.raises(UserError, match=r"^step 10 had a loss or gradient that is no number"):
        headway.train(run_file, out, sets)
    assert not headway.load(out).state.done
    run = headway.train(run_file, out, [*sets, "training.bad_steps=skip"], resume=True, accept_changes=True)
    assert run.state.done and run.state.skipped == 1 and run.state.best_value is not None


@pytest.mark.usefixtures("far_away")
def test_a_line_is_not_lost_when_the_next_step_fails(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Plain.step

    def full(self: Plain, number: int, rate: float) -> Outcome:
        if self.streams[0].name == "training" and number == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(self, number, rate)

    monkeypatch.setattr(Plain, "step", full)
    out = run_file.parent / "out"
    with pytest.raises(UserError, match="out of memory at step 10"):
        headway.train(run_file, out, ["training.log_every=1", "training.checkpoint_every=0"])
    assert headway.load(out).metrics[-1]["step"] == 9


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize("stop", range(1, 5))
def test_a_signal_leaves_every_line_that_was_due(run_file: Path, stop: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Plain.step

    def stopping(self: Plain, number: int, rate: float) -> Outcome:
        if self.streams[0].name == "training" and number == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, number, rate)

    monkeypatch.setattr(Plain, "step", stopping)
    out = run_file.parent / "out"
    sets = ["training.log_every=1", "training.checkpoint_every=0", "training.steps=6"]
    with pytest.raises(Interrupted):
        headway.train(run_file, out, sets)
    assert headway.load(out).metrics[-1]["step"] == 6 + stop + 1 == headway.load(out).state.step


@pytest.mark.parametrize("log_every", [1, 2, 3])
def test_lines_that_are_written_later_say_the_same(
    run_file: Path, request: pytest.FixtureRequest, log_every: int
) -> None:
    sets = [f"training.log_every={log_every}", "training.evaluate_every=2", "training.checkpoint_every=3"]
    near = headway.train(run_file, run_file.parent / "near", sets)
    request.getfixturevalue("far_away")
    far = headway.train(run_file, run_file.parent / "far", sets)
    timeless = [[{key: each[key] for key in each if key not in TIMES} for each in run.metrics] for run in (near, far)]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_run_that_a_bad_step_ended_goes_on_as_one_that_passed_over_it(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, at_hand: bool
) -> None:
    """With every line: where nobody waits, a step was made behind the bad one before that was known."""
    if not at_hand:
        nobody_waits(monkeypatch)
    sets = [*LOGGED, "training.steps=9"]
    Spoilt(monkeypatch, {2, 3})
    whole = headway.train(run_file, run_file.parent / "whole", [*sets, "training.bad_steps=skip"])
    for stop in (True, True, False):
        try:
            way = "stop" if stop else "skip"
            run = headway.train(
                run_file,
                run_file.parent / "run",
                [*sets, f"training.bad_steps={way}"],
                resume=True,
                accept_changes=True,
            )
        except UserError:
            assert stop
    assert lines_of(run) == lines_of(whole)
    assert same(final_weights(run.path), final_weights(whole.path))
    assert run.state.skipped == whole.state.skipped == 2


def lines_of(run: headway.Run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.metrics if "loss" in record]
