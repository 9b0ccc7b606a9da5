"""What fails costs no steps that were made before it, and a run can go back to an earlier checkpoint."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.cli import run_command
from headway.commands import summary
from headway.errors import Interrupted, RunError, UserError
from headway.models import GPTSettings
from headway.report.comparison import comparison_table
from headway.tasks import QuestionAnswering
from headway.training import checkpoint
from headway.training.checkpoint import Checkpoints, Snapshot, Writer
from headway.training.engine import Outcome, Plain
from headway.training.loop import Trainer
from headway.training.optimizer import Optimizer
from tests.training.faults import LOGGED, Spoilt
from tests.training.test_checkpoint import Said, contents
from tests.training.test_resume import StopAt, final_weights, same

RARELY = [*LOGGED, "pretraining.training.checkpoint_every=0", "training.checkpoint_every=0"]


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, at: int = 3) -> None:
    """The step `at` of the second stage fails, before its update."""
    plain = Plain.step

    def step(self: Plain, step: int, rate: float) -> Outcome:
        if self.streams[0].name == "training" and step == at:
            raise error
        return plain(self, step, rate)

    monkeypatch.setattr(Plain, "step", step)


@pytest.mark.parametrize("error", [UserError("a damaged shard"), OSError("gone"), MemoryError(), ValueError("a fault")])
def test_steps_before_one_that_fails_are_saved_and_go_on_exactly(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    expected = final_weights(headway.train(run_file, tmp_path / "whole", RARELY).path)
    with monkeypatch.context() as patch:
        failing(patch, error)
        with pytest.raises(UserError if isinstance(error, MemoryError) else type(error)):
            headway.train(run_file, tmp_path / "run", RARELY)
    assert Checkpoints(tmp_path / "run").steps() == [6, 9]
    assert same(final_weights(headway.train(run_file, tmp_path / "run", RARELY, resume=True).path), expected)


def test_a_step_that_fails_in_its_update_is_not_saved(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights may have had their update, and others not."""
    plain, calls = torch.optim.AdamW.step, [0]

    def step(self: torch.optim.AdamW, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9:
            raise RuntimeError("half way")
        return plain(self, *given)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    report = Said()
    with pytest.raises(RuntimeError, match="half way"):
        headway.train(run_file, tmp_path / "run", RARELY, report=report)
    assert Checkpoints(tmp_path / "run").steps() == [6]
    assert report.lines[-1] == "not saved, to be trained again: steps 7 to 8"


def test_a_step_that_fails_behind_its_update_is_not_saved_as_the_one_before(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are there already, and the state does not know of it."""
    whole = headway.train(run_file, tmp_path / "whole", RARELY)
    plain, calls = Optimizer.zero_grad, [0]

    def zero_grad(self: Optimizer) -> None:
        calls[0] += 1
        if calls[0] == 9:
            raise MemoryError
        plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "zero_grad", zero_grad)
        with pytest.raises(UserError, match=r"out of memory at step 9.*the last checkpoint is of step 6"):
            headway.train(run_file, tmp_path / "run", RARELY)
    run = headway.train(run_file, tmp_path / "run", RARELY, resume=True)
    assert same(final_weights(run.path), final_weights(whole.path))


def test_an_evaluation_that_fails_costs_no_step(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = headway.train(run_file, tmp_path / "whole", RARELY)

    def fail(*given: Any, **options: Any) -> None:
        raise UserError("out of memory, even for one row at a time")

    with monkeypatch.context() as patch:
        patch.setattr(QuestionAnswering, "evaluate", fail)
        with pytest.raises(UserError, match="one row"):
            headway.train(run_file, tmp_path / "run", RARELY)
    assert Checkpoints(tmp_path / "run").steps() == [6, 11] and not Checkpoints(tmp_path / "run").state(11).done
    run = headway.train(run_file, tmp_path / "run", RARELY, resume=True)
    assert run.state.done and run.evaluation == expected.evaluation
    assert same(final_weights(run.path), final_weights(expected.path))


@pytest.mark.parametrize("fails", [2, 3, 4])
def test_an_evaluation_that_failed_on_the_way_is_made_when_the_run_is_resumed(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    values = [0.1, 0.9, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8]
    sets = [*EVERY, "training.patience=3"]
    scored(monkeypatch, values)
    whole = headway.train(run_file, tmp_path / "whole", sets)
    scored(monkeypatch, values)
    plain, calls = QuestionAnswering.evaluate, [0]

    def evaluate(self: QuestionAnswering, *given: Any, **options: Any) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == fails:
            raise UserError("once")
        return plain(self, *given, **options)

    monkeypatch.setattr(QuestionAnswering, "evaluate", evaluate)
    with pytest.raises(UserError, match="once"):
        headway.train(run_file, tmp_path / "run", sets)
    run = headway.train(run_file, tmp_path / "run", sets, resume=True)
    seen = [
        (each.state.step, each.state.best_step, each.state.best_value, each.state.since_best) for each in (whole, run)
    ]
    assert seen[0] == seen[1] and seen[0][0] == 11
    scores = [[each for each in one.metrics if "evaluation" in each] for one in (whole, run)]
    assert scores[0] == scores[1]
    assert same(final_weights(run.path), final_weights(whole.path))


class Once:
    """Fails once: at the line of a step or of its evaluation, as it is said, written or shown."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, where: str, step: int, of_evaluation: bool) -> None:
        self.where, self.step, self.of_evaluation, self.failed = where, step, of_evaluation, False
        plain = Trainer.write

        def write(trainer: Trainer, record: dict[str, Any]) -> None:
            self.at("write", record)
            plain(trainer, record)

        monkeypatch.setattr(Trainer, "write", write)

    def at(self, where: str, record: dict[str, Any]) -> None:
        wanted = (self.where, self.step, self.of_evaluation)
        if not self.failed and wanted == (where, record["step"], "evaluation" in record):
            self.failed = True
            raise ValueError("once")

    def __call__(self, record: dict[str, Any]) -> None:
        self.at("show", record)


class SaysOnce(Said):
    """Whose words about an evaluation fail once, as those to a terminal that is gone."""

    def __init__(self, once: Once) -> None:
        super().__init__()
        self.once = once

    def say(self, line: str) -> None:
        if f"step {self.once.step} of the run: dev" in line:
            self.once.at("say", {"step": self.once.step, "evaluation": {}})
        super().say(line)


@pytest.mark.parametrize(
    ("where", "of_evaluation"), [("write", False), ("show", False), ("say", True), ("write", True), ("show", True)]
)
@pytest.mark.parametrize("step", [8, 10, 12])
def test_no_evaluation_is_lost_or_made_twice_whatever_fails_around_it(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, of_evaluation: bool, step: int
) -> None:
    """Scores and patience are those of a run in which nothing failed."""
    values, now = {8: 0.5, 10: 0.3, 12: 0.4, 14: 0.9, 16: 0.8}, [0]
    plain = Trainer.evaluate

    def evaluate(self: Trainer, *given: Any) -> Any:
        now[0] = self.state.step
        return plain(self, *given)

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    monkeypatch.setattr(QuestionAnswering, "evaluate", lambda *given, **options: {"accuracy": values[now[0]]})
    sets = [*RARELY, "training.evaluate_every=2", "training.patience=2", "training.steps=10"]
    whole = headway.train(run_file, tmp_path / "whole", sets)
    assert whole.state.step == 12
    once = Once(monkeypatch, where, step, of_evaluation)
    with pytest.raises(ValueError, match="once"):
        headway.train(run_file, tmp_path / "run", sets, watch=once, report=SaysOnce(once))
    assert Checkpoints(tmp_path / "run").steps()[-1] == step
    run = headway.train(run_file, tmp_path / "run", sets, resume=True)
    states = [(each.step, each.best_step, each.best_value, each.since_best) for each in (whole.state, run.state)]
    assert states[0] == states[1]
    records = [[line for line in one.metrics if "evaluation" in line] for one in (whole, run)]
    assert records[0] == records[1]
    assert same(final_weights(run.path), final_weights(whole.path))


def test_whoever_watches_may_fail_too(run_file: Path, tmp_path: Path) -> None:
    expected = final_weights(headway.train(run_file, tmp_path / "whole", RARELY).path)

    def watch(record: dict[str, Any]) -> None:
        if record["step"] == 10:
            raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="own"):
        headway.train(run_file, tmp_path / "run", RARELY, watch=watch)
    assert Checkpoints(tmp_path / "run").steps() == [6, 10]
    assert same(final_weights(headway.train(run_file, tmp_path / "run", RARELY, resume=True).path), expected)


def test_a_checkpoint_that_could_not_be_written_is_tried_again_where_something_else_fails(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, report = Checkpoints.write, Said()

    def write(self: Checkpoints, snapshot: Snapshot, *given: Any) -> None:
        if snapshot.step == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(self, snapshot, *given)

    monkeypatch.setattr(Checkpoints, "write", write)
    monkeypatch.setattr(Writer, "check", lambda self: None)  # so late that the next step fails first
    monkeypatch.setattr(Writer, "wait", told_when_waiting)
    failing(monkeypatch, ValueError("a fault"), at=2)
    with pytest.raises(ValueError, match="a fault"):
        headway.train(run_file, tmp_path / "run", [*LOGGED, "training.checkpoint_every=2"], report=report)
    assert any("a checkpoint could not be written: [Errno 28]" in line for line in report.lines)


def told_when_waiting(self: Writer) -> None:
    if self.thread is not None:
        self.thread.join()
        self.thread = None
    error, self.error = self.error, None
    if error is not None:
        raise error


def test_a_damaged_checkpoint_of_the_same_number_hides_no_rescue(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        headway.train(run_file, out, LOGGED, watch=StopAt(9))
    (out / "checkpoints" / "step-00000009" / "state.json").write_text("{}")
    failing(monkeypatch, ValueError("a fault"))  # after step 9
    with pytest.raises(ValueError, match="a fault"):
        headway.train(run_file, out, LOGGED, resume=True)
    assert Checkpoints(out).latest(pytest.fail) == 9


def test_more_pieces_than_tokens_still_have_a_thread(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    sets = ["training.accumulate=300", "training.batch_size=1"]
    assert headway.train(run_file, run_file.parent / "run", sets).state.done


def test_what_cannot_be_saved_does_not_hide_what_went_wrong(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ValueError("a fault"))
    monkeypatch.setattr(Trainer, "save", lambda *given, **named: (_ for _ in ()).throw(OSError("no disk")))
    report = Said()
    with pytest.raises((ValueError, OSError)) as caught:
        headway.train(run_file, tmp_path / "run", ["pretraining.training.steps=0", *RARELY], report=report)
    assert str(caught.value) == "a fault"
    assert report.lines[-1] == "not saved (no disk), to be trained again: steps 1 to 3"


# ---- scores


def scored(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    remaining = iter(values)
    monkeypatch.setattr(
        QuestionAnswering, "evaluate", lambda self, *given, **options: {"questions": 4, "accuracy": next(remaining)}
    )


EVERY = [
    "training.evaluate_every=1",
    "training.checkpoint_every=1",
    "training.log_every=1",
    "training.keep=1",
    "training.steps=8",
]


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_best_checkpoint_that_is_damaged_is_forgotten_and_the_next_best_is_kept(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    out = tmp_path / "run"
    scored(monkeypatch, [0.1, 0.9, 0.2, 0.3, 0.5, 0.4, 0.3, 0.2])
    with pytest.raises(Interrupted):
        headway.train(run_file, out, EVERY, watch=StopAt(10))
    best = out / "checkpoints" / "step-00000008" / "model.safetensors"
    assert Checkpoints(out).steps() == [8, 10]
    if harm == "flip":
        content = bytearray(best.read_bytes())
        content[-1] ^= 1
        best.write_bytes(content)
    else:
        best.unlink()
    report = Said()
    run = headway.train(run_file, out, EVERY, resume=True, report=report)
    assert any("step-00000008: model.safetensors is" in line for line in report.lines)
    assert any("the best score so far, at step 8, has no weights any more" in line for line in report.lines)
    assert (run.state.best_step, run.state.best_value, run.step) == (11, 0.5, 11)


def test_patience_counts_on_when_a_run_is_resumed(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An equal score is no better one, though its checkpoint is the one to take: it has learned more."""
    values = [0.1, 0.3, 0.3, 0.2, 0.1, 0.9, 0.9, 0.9]
    for stop in (0, 8, 9, 10):
        scored(monkeypatch, values)
        out = tmp_path / f"run-{stop}"
        sets = [*EVERY, "training.patience=3"]
        if stop:
            with pytest.raises(Interrupted):
                headway.train(run_file, out, sets, watch=StopAt(stop))
        run = headway.train(run_file, out, sets, resume=True)
        assert (run.state.step, run.state.best_step, run.state.since_best) == (11, 9, 3), stop


def test_equal_scores_write_no_checkpoints_of_their_own(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, [0.0] * 9)
    written: list[int] = []
    write = Checkpoints.write

    def counted(self: Checkpoints, snapshot: Any, *given: Any) -> None:
        written.append(snapshot.step)
        write(self, snapshot, *given)

    monkeypatch.setattr(Checkpoints, "write", counted)
    run = headway.train(run_file, tmp_path / "run", [*EVERY, "training.checkpoint_every=4"])
    assert [step for step in written if step >= 6] == [
        6,
        7,
        10,
        14,
    ]  # a stage ends, the first score, one that is due, the end
    assert run.step == run.state.best_step == 14


def test_a_best_checkpoint_that_is_not_there_is_missed(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, [0.1, 0.9, 0.2, 0.3, 0.1, 0.2, 0.2, 0.2])
    run = headway.train(run_file, tmp_path / "run", EVERY)
    assert run.step == 8 and not run.notes
    shutil.rmtree(run.checkpoints.path(8))
    run = headway.load(tmp_path / "run")
    assert run.step == 14 and "step-00000008: the best checkpoint is not there" in run.notes[0]


def test_a_full_disk_is_no_matter_to_a_run_that_is_done(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headway.train(run_file, tmp_path / "run")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))  # type: ignore[attr-defined]
    assert headway.train(run_file, tmp_path / "run", resume=True).state.done


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_never_the_best_and_the_record_stays_json(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    scored(monkeypatch, [value, 0.25, value, 0.1, value, value, value, value])
    run = headway.train(run_file, tmp_path / "run", EVERY)
    assert (run.state.best_step, run.state.best_value) == (8, 0.25)

    def refuse(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line, parse_constant=refuse).get("evaluation") for line in lines]
    assert [each.get("accuracy") for each in found if each] == [None, 0.25, None, 0.1, None, None, None, None]
    scored(monkeypatch, [value] * 8)
    alone = headway.train(run_file, tmp_path / "alone", EVERY)
    assert alone.state.best_step is None and "step 14" in summary(alone) and "–" in comparison_table([alone])


# ---- going back


class SpoiltFrom:
    """From one step of the second stage on, every loss is no number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        plain = Plain.step

        def step(engine: Plain, step: int, rate: float) -> Outcome:
            done = plain(engine, step, rate)
            if engine.streams[0].name == "training" and step >= at:
                done.loss = torch.tensor(math.nan)
            return done

        monkeypatch.setattr(Plain, "step", step)


def test_a_run_that_was_given_up_keeps_earlier_checkpoints_and_goes_back_to_them(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is saved then may be spoilt already; only a regular checkpoint lets go of what was there before."""
    sets = [*LOGGED, "training.checkpoint_every=3", "training.keep=1", "training.steps=9"]
    expected = final_weights(headway.train(run_file, tmp_path / "whole", sets).path)
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        SpoiltFrom(patch, at=4)
        for _ in range(2):  # a second try does not throw it away either
            with pytest.raises(UserError, match=r"checkpoint is of step 10 \(go back .* --resume --back-to 9\)"):
                headway.train(run_file, out, sets, resume=out.exists())
            assert Checkpoints(out).steps() == [9, 10]
    command = ["train", str(out), "--resume", "--back-to"]
    assert run_command([*command, "7"]) == 2
    assert f"{out}: no checkpoint of step 7; there are: 9, 10" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        SpoiltFrom(patch, at=6)
        with pytest.raises(Interrupted):  # nor does a save that was asked for
            headway.train(run_file, out, sets, resume=True, watch=StopAt(11))
    assert Checkpoints(out).steps() == [9, 10, 11]
    with pytest.raises(Interrupted):
        headway.train(run_file, out, sets, resume=True, back_to=9, watch=StopAt(10))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    assert run_command([*command, "10"]) == 0
    assert same(final_weights(out), expected)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_checkpoints_among_bad_steps_let_go_of_no_good_one(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Weights may be spoilt before a loss is no number: what was saved in peace is kept, and named."""
    out, sets = tmp_path / "run", [*LOGGED, "training.steps=30", f"training.checkpoint_every={every}"]
    with monkeypatch.context() as patch:
        Spoilt(patch, set(range(10, 30)))
        with pytest.raises(UserError, match="10 such steps in a row") as caught:
            headway.train(run_file, out, [*sets, "training.bad_steps=skip"])
    good = [6 + step for step in range(every, 11, every)][-2:]
    there = Checkpoints(out).steps()
    assert set(good) <= set(there) and max(there) == 6 + 19
    assert f"--back-to {good[-1]}" in str(caught.value)
    run = headway.train(run_file, out, [*sets, "training.bad_steps=skip"], resume=True)
    assert run.state.done and len(Checkpoints(out).steps()) <= 3  # the last two and the best


def test_a_damaged_checkpoint_is_not_recommended(run_file: Path, tmp_path: Path) -> None:
    out = headway.train(run_file, tmp_path / "run", LOGGED).path
    checkpoints = Checkpoints(out)
    first, last = checkpoints.steps()
    assert checkpoints.is_steady(first) and checkpoints.is_steady(last)
    (checkpoints.path(first) / "state.json").write_text("{")
    assert not checkpoints.is_steady(first) and checkpoints.best_known_at(first) is None


def test_to_go_back_removes_what_comes_after(run_file: Path, tmp_path: Path) -> None:
    sets = [*LOGGED, "training.checkpoint_every=1", "training.keep=9"]
    run = headway.train(run_file, tmp_path / "run", sets)
    with pytest.raises(Interrupted):
        headway.train(run.path, run.path, resume=True, back_to=8, watch=StopAt(9))
    assert run.checkpoints.steps() == [4, 6, 7, 8, 9]
    assert headway.train(run.path, run.path, resume=True).state.step == 11


def test_going_back_is_for_runs_that_are_there(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--back-to 3 .* add --resume"):
        headway.train(run_file, tmp_path / "run", back_to=3)
    with pytest.raises(UserError, match=r"--back-to 3 .* there is no run in"):
        headway.train(run_file, tmp_path / "run", resume=True, back_to=3)
    assert not (tmp_path / "run").exists()


# ---- checkpoints that cannot be read, or not by this version


def test_a_checkpoint_that_cannot_be_read_stops_its_owner_and_is_not_thrown_away(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=StopAt(8))
    steps = Checkpoints(tmp_path / "run").steps()
    plain = checkpoint.damage

    def damage(folder: Path) -> str | None:
        if folder.name == f"step-{steps[-1]:08d}":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return plain(folder)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "damage", damage)
        with pytest.raises(RunError, match=r"cannot be read \(Input/output error\); nothing was changed; try again"):
            headway.train(run_file, tmp_path / "run", LOGGED, resume=True)
        assert any("cannot be read" in note for note in headway.load(tmp_path / "run").notes)
    assert Checkpoints(tmp_path / "run").steps() == steps
    assert headway.train(run_file, tmp_path / "run", LOGGED, resume=True).state.step == 11


@pytest.mark.parametrize("problem", [errno.EACCES, errno.ESTALE])
def test_a_folder_of_checkpoints_that_cannot_be_looked_into_is_not_taken_for_empty(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problem: int
) -> None:
    """The run would begin anew, and write over them."""
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=StopAt(8))
    before, listdir = contents(tmp_path / "run"), os.listdir

    def closed(path: Any = ".") -> list[str]:
        if Path(path).name == "checkpoints":
            raise OSError(problem, os.strerror(problem), str(path))
        return listdir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", closed)
        for command in (["train", str(tmp_path / "run"), "--resume"], ["evaluate", str(tmp_path / "run")]):
            assert run_command(command) == 2
            assert f"checkpoints: cannot be read ({os.strerror(problem)}); its" in capsys.readouterr().err
    assert contents(tmp_path / "run") == before
    assert headway.train(run_file, tmp_path / "run", LOGGED, resume=True).state.step == 11


def test_checkpoints_are_found_beyond_a_hundred_million_steps(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (99_999_999, 100_000_000, 7):
        checkpoints.path(step).mkdir(parents=True)
    (checkpoints.directory / "step-other").mkdir()
    assert checkpoints.steps() == [7, 99_999_999, 100_000_000]


def test_a_state_of_another_version_is_named(run_file: Path) -> None:
    run = headway.train(run_file, run_file.parent / "run")
    folder = run.checkpoints.path(11)
    state = json.loads((folder / "state.json").read_text()) | {"colour": "red"}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(RunError, match=r"another version of Headway \(state.json has colour\)"):
        run.checkpoints.state(11)


# ---- killed


class Killed(BaseException):
    """As a process that is killed leaves a run: nothing more is written."""


def test_a_checkpoint_that_was_killed_before_it_had_its_name_is_gone_on_from(run_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        headway.train(run_file, out, LOGGED, watch=StopAt(8))
    newest = out / "checkpoints" / "step-00000008"
    newest.rename(newest.with_name(".step-00000008.tmp"))
    report = Said()
    headway.train(run_file, out, LOGGED, resume=True, report=report)
    assert any("resuming after step 8" in line for line in report.lines)


def test_changes_are_judged_by_where_a_killed_run_stands(run_file: Path, tmp_path: Path) -> None:
    """At a step of its second stage, also where that checkpoint was whole and had no name yet."""
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        headway.train(run_file, out, [*RARELY, "training.optimizer=muon"], watch=StopAt(9))
    folder = out / "checkpoints"
    assert Checkpoints(out).steps() == [6, 9]
    (folder / "step-00000009").rename(folder / ".step-00000009.tmp")
    with pytest.raises(RunError, match="cannot change any more"):
        headway.train(run_file, out, [*RARELY, "training.optimizer=adamw"], resume=True, accept_changes=True)
    (folder / ".step-00000009.tmp" / "manifest.json").unlink()  # now it is no checkpoint, and the stage has not begun
    run = headway.train(run_file, out, [*RARELY, "training.optimizer=adamw"], resume=True, accept_changes=True)
    assert run.state.done


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_its_record_anew(
    run_file: Path, tmp_path: Path
) -> None:
    def watch(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            raise Killed

    sets = [*LOGGED, "pretraining.training.checkpoint_every=0"]
    with pytest.raises(Killed):
        headway.train(run_file, tmp_path / "run", sets, watch=watch)
    run = headway.train(run_file, tmp_path / "run", sets, resume=True)
    assert [record["step"] for record in run.metrics if "loss" in record] == list(range(1, 12))


def test_a_directory_that_is_removed_while_its_run_trains_stays_away(run_file: Path, tmp_path: Path) -> None:
    def watch(record: dict[str, Any]) -> None:
        while record["step"] == 9 and (tmp_path / "run").exists():
            shutil.rmtree(tmp_path / "run", ignore_errors=True)  # once more where a checkpoint was just being written

    with pytest.raises(
        RunError, match=r"No such file or directory; .*run is gone, and what the run had learned with it"
    ):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=watch)
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_too_large_for_memory_names_the_settings(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(self: GPTSettings, tokens: int) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(GPTSettings, "build", build)
    with pytest.raises(
        UserError,
        match=r"out of memory for the weights .* lower one of model.width \(16\), model.layers \(2\), model.block",
    ):
        headway.train(run_file, tmp_path / "run")
    assert not (tmp_path / "run").exists()
