"""A run that is resumed under other settings: what differs is shown, what matters needs a flag, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.changes import Change, compare, compare_data, consequence, measured_only, refusal
from headway.cli import run_command
from headway.configuration import load_settings
from headway.errors import Interrupted, RunError
from tests.training.test_checkpoint import Said, contents
from tests.training.test_resume import StopAt, final_weights, same

Captured = pytest.CaptureFixture[str]
LOGGED = ["training.log_every=1", "pretraining.training.log_every=1"]


@pytest.fixture
def stopped(run_file: Path, tmp_path: Path) -> Path:
    """A run that was stopped after step 8, two steps into its second stage."""
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=StopAt(8))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "change",
    [
        "log_every=3",
        "checkpoint_every=1",
        "keep=5",
        "evaluate_every=2",
        "device=cpu",
        "bad_steps=skip",
        "spike_warning=0",
    ],
)
def test_what_changes_nothing_of_what_is_learned_needs_no_flag(run_file: Path, stopped: Path, change: str) -> None:
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", LOGGED).path)
    old = (stopped / "run.toml").read_bytes()
    report = Said()
    run = headway.train(stopped, stopped, [f"training.{change}"], resume=True, report=report)
    key, value = change.split("=")
    assert any(line.startswith("settings changed") and f"training.{key}: " in line for line in report.lines)
    assert str(getattr(run.settings.training, key)).removesuffix(".0") == value
    assert (stopped / "run.toml.1").read_bytes() == old
    assert same(final_weights(run.path), expected)


def test_when_a_run_is_scored_decides_when_it_ends_where_it_has_patience(run_file: Path, tmp_path: Path) -> None:
    sets = [*LOGGED, "training.patience=2", "training.evaluate_every=2"]
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", sets, watch=StopAt(7))
    more = [*sets, "training.evaluate_every=1"]
    with pytest.raises(RunError, match=r"evaluate_every: 2 there, 1 now; every step stays exact, but with .*patience"):
        headway.train(run_file, tmp_path / "run", more, resume=True)
    run = headway.train(run_file, tmp_path / "run", more, resume=True, accept_changes=True)
    assert run.settings.training.evaluate_every == 1


def test_a_run_that_is_done_is_told_where_its_data_are_now(run_file: Path, tmp_path: Path, capsys: Captured) -> None:
    """Nothing is left to train, and yet it is to be scored; data that are others stay what it was not trained with."""
    run = headway.train(run_file, tmp_path / "run")
    questions = run_file.parent / "dev.tsv"
    moved, score = questions.rename(run_file.parent / "moved.tsv"), run.evaluation
    assert run_command(["evaluate", str(run.path)]) == 2
    assert "where the run's own data have moved, add --set task.dev=NEW" in capsys.readouterr().err
    assert run_command(["evaluate", str(run.path), "--set", f"task.dev={moved}"]) == 0
    command = ["train", str(run.path), "--resume", "--accept-changes", "--set", f"task.dev={moved}"]
    lines = moved.read_text()
    moved.write_text(lines.replace("Oslo", "Rome"))
    assert run_command(command) == 0
    assert "it keeps the settings and data that it was trained with" in capsys.readouterr().err
    assert run_command(["evaluate", str(run.path)]) == 2
    moved.write_text(lines)
    assert run_command(command) == 0
    assert run_command(["evaluate", str(run.path)]) == 0
    assert headway.load(run.path).evaluate()["accuracy"] == score["accuracy"]


def test_data_are_compared_where_the_tokenizer_is_made_again(run_file: Path, stopped: Path) -> None:
    (stopped / "tokenizer.json").unlink()
    shutil.rmtree(stopped / "checkpoints")
    corpus = run_file.parent / "wiki.txt"
    corpus.write_text(corpus.read_text().replace("Ada", "Eva"))
    known = (stopped / "data.json").read_bytes()
    with pytest.raises(RunError, match="its data are not what it has learned from"):
        headway.train(stopped, resume=True)
    assert (stopped / "data.json").read_bytes() == known


def test_other_changes_are_shown_and_need_the_flag(stopped: Path, capsys: Captured) -> None:
    before = contents(stopped)
    command = ["train", str(stopped), "--resume", "--set", "training.learning_rate=0.02", "--set", "training.keep=3"]
    assert run_command(command) == 2
    shown = capsys.readouterr().err
    assert "its settings are not the ones given:\n  - training.learning_rate: 0.001 there, 0.02 now; exact" in shown
    assert "exact resuming is impossible: the 8 steps so far had the old value" in shown
    assert "training.keep" not in shown and "with --accept-changes" in shown
    assert contents(stopped) == before
    assert run_command([*command, "--accept-changes"]) == 0
    run = headway.load(stopped)
    assert (run.settings.training.learning_rate, run.settings.training.keep) == (0.02, 3)
    assert load_settings(stopped / "run.toml").training.learning_rate == 0.02
    assert (stopped / "run.toml.1").read_bytes() == before[stopped / "run.toml"]
    rates = [record["learning_rate"] for record in run.metrics if "loss" in record]
    assert max(rates[:8]) <= 0.001 < max(rates[8:])


def test_a_finished_run_goes_on_with_more_steps_and_every_old_run_file_is_kept(run_file: Path) -> None:
    run = headway.train(run_file, run_file.parent / "run")
    files = [(run.path / "run.toml").read_bytes()]
    for number, steps in ((1, 8), (2, 9)):
        run = headway.train(run.path, run.path, [f"training.steps={steps}"], resume=True, accept_changes=True)
        assert run.state.step == 6 + steps and run.state.done
        assert (run.path / f"run.toml.{number}").read_bytes() == files[-1]
        files.append((run.path / "run.toml").read_bytes())
    assert len(set(files)) == 3
    again = headway.train(run.path, run.path, ["training.log_every=7"], resume=True)
    assert again.state.step == 15


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("tokenizer.kind=bytes", "tokenizer.kind: 'characters' there, 'bytes' now; the run has its tokenizer.json"),
        (
            "training.optimizer=muon",
            "training.optimizer: 'adamw' there, 'muon' now; its state in the middle of a stage",
        ),
        ("training.steps=1", "training.steps: 5 there, 1 now; 2 of them are made"),
        ("pretraining.training.steps=9", "pretraining.training.steps: 6 there, 9 now; that stage is over"),
        ("model.width=32", "its weights are of the old model"),
    ],
)
def test_what_cannot_change_any_more_is_refused_with_the_flag_too(stopped: Path, change: str, words: str) -> None:
    before = contents(stopped)
    with pytest.raises(RunError, match=re.escape(words)):
        headway.train(stopped, stopped, [change], resume=True, accept_changes=True)
    after = contents(stopped)
    assert after.keys() == before.keys() and all(after[path] == before[path] for path in before)


def test_a_change_of_a_stage_that_has_not_begun_is_exact(run_file: Path, tmp_path: Path) -> None:
    """And so is what the message says of it."""
    sets = [*LOGGED, "training.batch_size=3", "training.optimizer=muon"]
    expected = final_weights(headway.train(run_file, tmp_path / "whole", sets).path)
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=StopAt(4))
    with pytest.raises(RunError, match="batch_size: 5 there, 3 now; that stage has not begun, so resuming stays exact"):
        headway.train(run_file, tmp_path / "run", sets, resume=True)
    run = headway.train(run_file, tmp_path / "run", sets, resume=True, accept_changes=True)
    assert same(final_weights(run.path), expected)


@pytest.mark.parametrize(
    ("place", "step", "refused", "exact"),
    [
        ("training.seed=1", 4, False, False),  # the first weights come from it
        ("training.clip=0.5", 6, False, True),
        ("training.clip=0.5", 7, False, False),
        ("pretraining.training.clip=0.5", 3, False, False),
        ("pretraining.training.clip=0.5", 7, False, True),
        ("pretraining.training.optimizer=muon", 3, True, False),
        ("pretraining.training.optimizer=muon", 6, False, False),
        ("training.optimizer=muon", 6, False, True),
        ("pretraining.training.steps=5", 5, False, False),
        ("pretraining.training.steps=4", 5, True, False),
        ("pretraining.training.steps=9", 6, False, False),
        ("model.dropout=0.3", 1, False, False),
    ],
)
def test_what_a_change_means_depends_on_where_the_run_stands(
    run_file: Path, place: str, step: int, refused: bool, exact: bool
) -> None:
    old, new = load_settings(run_file), load_settings(run_file, [place])
    (change,) = compare(old.tables(), new.tables())
    assert (refusal(change, old, new, step) is not None) == refused
    assert ("impossible" not in consequence(change, old, step)) == exact
    assert consequence(change, old, 0) == "" and not change.harmless


@pytest.mark.parametrize(("before", "after"), [("muon", "adamw"), ("adamw", "muon")])
def test_a_stage_that_is_over_and_grows_keeps_its_optimizer(
    run_file: Path, tmp_path: Path, before: str, after: str
) -> None:
    sets = [*LOGGED, f"pretraining.training.optimizer={before}"]
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", sets, watch=StopAt(6))
    longer = [*LOGGED, "pretraining.training.steps=9"]
    with pytest.raises(RunError, match=r"pretraining.training.optimizer: .* in the middle of a stage"):
        other = [*longer, f"pretraining.training.optimizer={after}"]
        headway.train(run_file, tmp_path / "run", other, resume=True, accept_changes=True)
    kept = [*longer, f"pretraining.training.optimizer={before}"]
    assert headway.train(run_file, tmp_path / "run", kept, resume=True, accept_changes=True).state.step == 14


class Killed(BaseException):
    """As a process that is killed leaves a run: nothing more is written."""


def killed_at(step: int) -> Callable[[dict[str, Any]], None]:
    def watch(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise Killed

    return watch


@pytest.mark.parametrize(
    ("first", "more", "end"),
    [
        ([], "training.steps=20", 26),
        (["training.steps=0"], "pretraining.training.steps=20", 20),
        (["training.steps=30", "training.evaluate_every=1", "training.patience=1"], "training.patience=0", 36),
    ],
)
def test_a_finished_run_that_was_given_more_and_was_killed_still_goes_on(
    run_file: Path, tmp_path: Path, first: list[str], more: str, end: int
) -> None:
    """Though its run file says by then what is asked for."""
    out = tmp_path / "run"
    done = headway.train(run_file, out, [*LOGGED, *first]).state
    assert done.done and done.step < end
    with pytest.raises(Killed):
        headway.train(out, out, [more], resume=True, accept_changes=True, watch=killed_at(done.step + 1))
    assert headway.train(out, out, resume=True).state.step == end
    report = Said()
    headway.train(out, out, resume=True, report=report)
    assert any(f"finished at step {end} already" in line for line in report.lines)


def test_a_finished_run_takes_nothing_that_it_was_not_trained_with(run_file: Path, tmp_path: Path) -> None:
    run = headway.train(run_file, tmp_path / "run")
    before = contents(run.path)
    with open(run_file.parent / "wiki.txt", "a") as file:
        file.write("Di Nye. Di Nye was born in Rome .\n")
    report = Said()
    sets = ["training.learning_rate=0.5", "training.keep=7"]
    headway.train(run.path, run.path, sets, resume=True, accept_changes=True, report=report)
    assert contents(run.path) == before
    assert any("nothing is left to train" in line for line in report.lines)


def test_the_flag_is_for_runs_that_are_resumed(run_file: Path, capsys: Captured) -> None:
    assert run_command(["train", str(run_file), "--out", str(run_file.parent / "run"), "--accept-changes"]) == 2
    assert (
        "--accept-changes (accept_changes=True) is for a run that is resumed; add --resume" in capsys.readouterr().err
    )
    assert not (run_file.parent / "run").exists()


def test_a_run_that_was_killed_while_its_run_file_was_rewritten_has_one(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off at every rename: the run file is the old or the new one, and the old one is never lost."""
    old = (stopped / "run.toml").read_text()
    plain = os.replace
    for cut in (1, 2, 3):  # the old one kept, the new one, its copy
        calls = 0

        def replace_file(source: Any, target: Any, cut: int = cut) -> None:
            nonlocal calls
            calls += "run.toml" in str(target)
            if calls == cut:
                raise KeyboardInterrupt
            plain(source, target)

        monkeypatch.setattr(os, "replace", replace_file)
        with pytest.raises(KeyboardInterrupt):
            headway.train(stopped, stopped, ["training.keep=4"], resume=True)
        monkeypatch.setattr(os, "replace", plain)
        assert ((stopped / "run.toml").read_text() == old) == (cut < 3)
    headway.train(stopped, stopped, ["training.keep=4"], resume=True)
    assert load_settings(stopped).training.keep == load_settings(stopped / ".run.toml").training.keep == 4
    assert {path.read_text() for path in stopped.glob("run.toml.*")} == {old}


def test_a_run_file_that_was_changed_by_hand_needs_the_flag_too(stopped: Path, capsys: Captured) -> None:
    """What stands in run.toml is what is asked for; what the run has had so far is known beside it."""
    old = (stopped / "run.toml").read_text()
    mine = old.replace("learning_rate = 0.001", "learning_rate = 0.02  # my own")
    (stopped / "run.toml").write_text(mine)
    before = contents(stopped)
    for more in ([], ["--set", "training.batch_size=3"]):
        assert run_command(["train", str(stopped), "--resume", *more]) == 2
        shown = capsys.readouterr().err
        assert "training.learning_rate: 0.001 there, 0.02 now" in shown and "--accept-changes" in shown
        assert contents(stopped) == before
    way = re.search(r"resume with its own \((cp .*?) && headway (.*?)\)", shown)
    copied = stopped.with_name("copied")
    shutil.copytree(stopped, copied)
    with pytest.raises(Interrupted):
        headway.train(stopped, stopped, resume=True, accept_changes=True, watch=StopAt(10))
    assert (stopped / "run.toml.1").read_text() == old  # the settings before, though nobody else kept them
    run = headway.train(stopped, stopped, resume=True)  # once is enough
    assert run.settings.training.learning_rate == 0.02 and not (stopped / "run.toml.2").exists()
    assert (stopped / "run.toml").read_text() == mine  # with what else is written there

    assert way is not None
    copy, resume = (part.replace(str(stopped), str(copied)).split() for part in way.groups())
    subprocess.run(copy, check=True)
    assert run_command(resume) == 0
    assert headway.load(copied).settings.training.learning_rate == 0.001 and not (copied / "run.toml.1").exists()


@pytest.mark.parametrize("edit", ["width = 32", "garbage = = "])
def test_a_run_that_is_resumed_by_another_run_file_says_again_what_it_has(
    run_file: Path, stopped: Path, capsys: Captured, edit: str
) -> None:
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", LOGGED).path)
    old = (stopped / "run.toml").read_text()
    spoilt = old.replace("width = 16", edit)
    (stopped / "run.toml").write_text(spoilt)
    assert run_command(["evaluate", str(stopped)]) == 2
    capsys.readouterr()
    report = Said()
    run = headway.train(run_file, stopped, LOGGED, resume=True, report=report)
    assert any("says again what the run was trained with" in line for line in report.lines)
    assert same(final_weights(run.path), expected) and run.settings.model.width == 16
    assert (stopped / "run.toml").read_text() == old and (stopped / "run.toml.1").read_text() == spoilt


def test_a_run_that_is_done_keeps_the_settings_that_it_had(run_file: Path, tmp_path: Path, capsys: Captured) -> None:
    run = headway.train(run_file, tmp_path / "run")
    file = run.path / "run.toml"
    old = file.read_text()
    file.write_text(old.replace("learning_rate = 0.001", "learning_rate = 0.02"))
    assert run_command(["train", str(run.path), "--resume"]) == 2
    assert run_command(["train", str(run.path), "--resume", "--accept-changes"]) == 0
    assert "nothing is left to train" in capsys.readouterr().err
    assert file.read_text() == old and "0.02" in (run.path / "run.toml.1").read_text()
    assert run_command(["train", str(run.path), "--resume"]) == 0


def test_a_run_file_that_is_gone_or_spoilt_can_be_had_back(stopped: Path, capsys: Captured) -> None:
    way = f"cp {stopped / '.run.toml'} {stopped / 'run.toml'}"
    (stopped / "run.toml").write_text("garbage = = ")
    assert run_command(["evaluate", str(stopped)]) == 2
    assert "not TOML" in (shown := capsys.readouterr().err) and way in shown
    (stopped / "run.toml").unlink()
    for command in (["evaluate", str(stopped)], ["train", str(stopped), "--resume"]):
        assert run_command(command) == 2
        assert way in capsys.readouterr().err
    subprocess.run(way.split(), check=True)
    assert run_command(["train", str(stopped), "--resume"]) == 0


@pytest.mark.parametrize("content", [None, "= ="])
def test_a_run_without_a_whole_copy_of_its_run_file_gets_one(stopped: Path, content: str | None) -> None:
    (stopped / ".run.toml").unlink()
    if content is not None:
        (stopped / ".run.toml").write_text(content)
    assert headway.train(stopped, stopped, resume=True).state.done
    assert (stopped / ".run.toml").read_bytes() == (stopped / "run.toml").read_bytes()
    assert not (stopped / "run.toml.1").exists()


def test_what_is_wrong_with_a_file_may_be_that_it_has_changed(run_file: Path, stopped: Path, capsys: Captured) -> None:
    corpus = run_file.parent / "wiki.txt"
    corpus.write_text(corpus.read_text() + "Zoë Ωmega. A sign that was never read .\n")
    assert run_command(["train", str(stopped), "--resume"]) == 2
    shown = capsys.readouterr().err
    assert "never seen in training" in shown and f"{corpus} has changed since the run read it" in shown


def test_a_corpus_that_has_moved_leaves_every_step_exact(run_file: Path, stopped: Path, capsys: Captured) -> None:
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", LOGGED).path)
    questions = run_file.parent / "train.tsv"
    moved = questions.rename(run_file.parent / "moved.tsv")
    shutil.copy(run_file, run_file.parent / "train.toml")
    assert run_command(["train", str(stopped), "--resume"]) == 2
    assert "did you mean" not in capsys.readouterr().err  # a run file holds no text
    assert run_command(["train", str(stopped), "--resume"]) == 2
    assert "where it has moved, name the new place with --set task.questions=NEW" in capsys.readouterr().err
    command = ["train", str(stopped), "--resume", "--set", f"task.questions={moved}"]
    assert run_command(command) == 2
    assert "resuming stays exact where the same stands in it" in capsys.readouterr().err
    assert run_command([*command, "--accept-changes"]) == 0
    assert same(final_weights(stopped), expected)


# ---- data


def test_a_file_that_has_changed_is_named_and_needs_the_flag(run_file: Path, stopped: Path, capsys: Captured) -> None:
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", LOGGED).path)
    before, corpus, questions = contents(stopped), run_file.parent / "wiki.txt", run_file.parent / "train.tsv"
    old = [file.read_bytes() for file in (corpus, questions)]
    for file in (corpus, questions):
        file.write_bytes(file.read_bytes().replace(b"Oslo", b"Rome"))
    assert run_command(["train", str(stopped), "--resume"]) == 2
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if line.startswith("  - ")]
    assert len(lines) == 2  # dev.tsv is what it was
    assert lines[0].startswith(f"  - pretraining.task, {corpus}: 'SHA-256 ") and lines[0].endswith("the record changes")
    assert lines[1].startswith(f"  - task, {questions}: 'SHA-256 ") and "exact resuming is impossible" in lines[1]
    assert "with --accept-changes" in shown and contents(stopped) == before

    accepted = shutil.copytree(stopped, stopped.with_name("accepted"))
    report = Said()
    run = headway.train(accepted, accepted, resume=True, accept_changes=True, report=report)
    assert any(line.startswith("data changed:") and str(questions) in line for line in report.lines)
    assert not same(final_weights(run.path), expected) and not (accepted / "run.toml.1").exists()
    assert headway.train(accepted, accepted, resume=True).state.done  # these are its data now

    for file, content in zip((corpus, questions), old, strict=True):
        file.write_bytes(content)
    assert same(final_weights(headway.train(stopped, stopped, resume=True).path), expected)


def test_a_file_that_is_only_measured_on_leaves_every_step_exact(
    run_file: Path, stopped: Path, capsys: Captured
) -> None:
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", LOGGED).path)
    dev = run_file.parent / "dev.tsv"
    dev.write_bytes(dev.read_bytes().replace(b"Oslo", b"Rome").replace(b"Where", b"When"))
    assert run_command(["train", str(stopped), "--resume"]) == 2
    shown = capsys.readouterr().err
    means = "the best score and the patience so far were measured on the old one"
    assert f"task, {dev}: 'SHA-256" in shown and means in shown and "--accept-changes" in shown
    assert "impossible" not in shown and "not what it has learned from" not in shown

    report = Said()
    run = headway.train(stopped, stopped, resume=True, accept_changes=True, report=report)
    assert same(final_weights(run.path), expected)
    assert any(line.startswith("data changed:") and means in line for line in report.lines)


def test_what_is_learned_too_is_not_only_measured(tmp_path: Path) -> None:
    def only(task: dict[str, str]) -> set[str]:
        return measured_only(load_settings({"task": {key: value.format(tmp_path) for key, value in task.items()}}))

    reading = {"name": "language_modelling", "validation": "{}/a/dev.txt"}
    for corpus in ("{}/a", "{}/a/*.txt", "{}/a/dev.txt"):
        assert only(reading | {"corpus": corpus}) == set()
    assert only(reading | {"corpus": "{}/b"}) == {f"task, {tmp_path}/a/dev.txt"}
    assert only({"name": "question_answering", "questions": "{0}/q", "dev": "{0}/d"}) == {f"task, {tmp_path}/d"}


def test_a_run_that_did_not_say_what_it_learned_from_goes_on_as_before(run_file: Path, stopped: Path) -> None:
    (stopped / "data.json").unlink()
    (run_file.parent / "dev.tsv").write_text("Where was Bo Lund born?\tOslo\n")
    assert headway.train(stopped, stopped, resume=True).state.done
    (run_file.parent / "dev.tsv").write_text("Where was Bo Lund born?\tRome\n")
    with pytest.raises(RunError, match=r"task, .*dev\.tsv"):
        headway.train(stopped, stopped, resume=True)


def test_scores_on_a_file_that_has_changed_say_so(run_file: Path) -> None:
    run = headway.train(run_file, run_file.parent / "run")
    dev = run_file.parent / "dev.tsv"
    again = headway.load(run.path)
    again.evaluate("dev")
    assert not [note for note in again.task.notes if "has changed" in note]
    dev.write_text(dev.read_text().replace("Oslo", "Rome"))
    again = headway.load(run.path)
    again.evaluate("dev")
    again.evaluate("dev")
    assert [note for note in again.task.notes if "has changed" in note] == [
        f"{dev}: has changed since the run read it; what is held out of it now may have been learned"
    ]


def test_data_may_move(run_file: Path, stopped: Path) -> None:
    """The same text from another place is the same data; only the settings have changed."""
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", LOGGED).path)
    moved = run_file.parent / "moved"
    moved.mkdir()
    for name in ("wiki.txt", "train.tsv", "dev.tsv"):
        shutil.move(run_file.parent / name, moved / name)
    paths = {"task.questions": "train.tsv", "task.dev": "dev.tsv", "task.corpus": "wiki.txt"}
    sets = [f"{key}={moved / name}" for key, name in (paths | {"pretraining.task.corpus": "wiki.txt"}).items()]
    report = Said()
    run = headway.train(stopped, stopped, sets, resume=True, accept_changes=True, report=report)
    assert not any(line.startswith("data changed") for line in report.lines)
    assert same(final_weights(run.path), expected)


@pytest.mark.parametrize("content", ["{", "[]", '{"task": [{}]}', '{"task": 3}'])
def test_a_damaged_record_of_the_data_is_named(stopped: Path, content: str) -> None:
    (stopped / "data.json").write_text(content)
    with pytest.raises(RunError, match=r"data\.json: damaged .* remove it to resume"):
        headway.train(stopped, stopped, resume=True)


def test_the_files_of_a_folder_are_told_apart() -> None:
    old = {"task": {"a/1": "x", "a/2": "y"}, "gone": {"f": "z"}}

    def names(**files: str) -> list[str]:
        return [
            change.place for change in compare_data(old, {"task": {f"a/{name[1:]}": files[name] for name in files}})
        ]

    assert names(_1="x", _2="y") == []
    assert names(_1="x", _2="Y") == ["task, a/2"]
    assert names(_1="x") == ["task, a/2"]
    assert names(_1="x", _2="y", _3="z") == ["task, a/3"]
    assert names(_1="y", _2="x") == ["task, a/1", "task, a/2"]
    assert compare_data(old, {"task": {"b/1": "x", "b/2": "y"}, "new": {"f": "q"}}) == []
    assert [change.place for change in compare_data(old, {"task": {"b/1": "x", "b/2": "Y"}})] == [
        "task, a/2",
        "task, b/2",
    ]
    assert compare_data(old, {"task": {"b/1": "y", "b/2": "x"}}) == [
        Change("task, b/1", "one order of its files", "another")
    ]


def test_data_of_a_stage_that_has_not_begun_leave_resuming_exact(run_file: Path, tmp_path: Path) -> None:
    old = load_settings(run_file)
    for place, step, exact in (("task, x", 6, True), ("task, x", 7, False), ("streams.a.task, x", 3, True)):
        assert ("impossible" not in consequence(Change(place, "", "now"), old, step)) == exact
    for step, exact in ((3, False), (7, True)):
        assert ("impossible" not in consequence(Change("pretraining.task, x", "", "now"), old, step)) == exact


def test_every_run_says_what_it_has_learned_from(run_file: Path, tmp_path: Path) -> None:
    run = headway.train(run_file, tmp_path / "run")
    data = json.loads((run.path / "data.json").read_text())
    names = {task: [Path(each["file"]).name for each in files] for task, files in data.items()}
    assert names == {"pretraining.task": ["wiki.txt"], "task": ["train.tsv", "dev.tsv"]}


@pytest.mark.parametrize("how", ["itself", "copy"])
def test_a_run_that_is_measured_on_what_it_learns_is_told_so(run_file: Path, tmp_path: Path, how: str) -> None:
    questions = run_file.parent / "train.tsv"
    dev = questions if how == "itself" else Path(shutil.copy(questions, run_file.parent / "copy.tsv"))
    report = Said()
    headway.train(run_file, tmp_path / "run", f"task.dev={dev}", report=report)
    assert any(line.startswith(f"{dev}: is learned from as well") for line in report.lines)
    report = Said()
    headway.train(run_file, tmp_path / "other", report=report)
    assert not any("learned from as well" in line for line in report.lines)


def test_a_file_that_is_only_scored_may_be_elsewhere(stopped: Path, run_file: Path, capsys: Captured) -> None:
    """Training does not read it, so a run that goes on stays exact, and one that is done takes it."""
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", LOGGED).path)
    tests = shutil.copy(run_file.parent / "dev.tsv", run_file.parent / "tests.tsv")
    command = ["train", str(stopped), "--resume", "--set", f"task.test={tests}"]
    assert run_command(command) == 2
    assert "training does not read it, so every step stays exact" in capsys.readouterr().err
    assert run_command([*command, "--accept-changes"]) == 0
    assert same(final_weights(stopped), expected)
    moved = Path(tests).rename(run_file.parent / "moved.tsv")
    command = ["train", str(stopped), "--resume", "--accept-changes", "--set", f"task.test={moved}"]
    assert run_command(command) == 0
    assert "it keeps the settings" not in capsys.readouterr().err
    assert headway.load(stopped).evaluate("test")["questions"] == 4


def test_without_a_record_of_its_data_a_run_that_is_done_takes_no_others(run_file: Path, tmp_path: Path) -> None:
    run = headway.train(run_file, tmp_path / "run")
    (run.path / "data.json").unlink()
    moved = shutil.copy(run_file.parent / "dev.tsv", run_file.parent / "moved.tsv")
    report = Said()
    headway.train(run.path, run.path, [f"task.dev={moved}"], resume=True, accept_changes=True, report=report)
    assert any("it keeps the settings and data that it was trained with" in line for line in report.lines)


@pytest.mark.parametrize("before, after", [(2, 0), (0, 2)])
def test_when_a_run_is_scored_matters_with_patience_before_or_after(
    run_file: Path, tmp_path: Path, before: int, after: int
) -> None:
    sets = [*LOGGED, "training.evaluate_every=2"]
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", [*sets, f"training.patience={before}"], watch=StopAt(7))
    with pytest.raises(RunError, match=r"evaluate_every: 2 there, 1 now; every step stays exact, but with .*patience"):
        headway.train(
            run_file,
            tmp_path / "run",
            [*sets, f"training.patience={after}", "training.evaluate_every=1"],
            resume=True,
        )


def test_moved_data_are_asked_for_by_the_file_that_is_missing(run_file: Path, tmp_path: Path, capsys: Captured) -> None:
    """And by no other, and not where something else is wrong."""
    run = headway.train(run_file, tmp_path / "run")
    for name in ("train.tsv", "dev.tsv", "wiki.txt"):
        (run_file.parent / name).rename(run_file.parent / f"moved-{name}")
    assert run_command(["evaluate", str(run.path)]) == 2
    assert "dev.tsv: no such file; did you mean" in (shown := capsys.readouterr().err)
    assert "add --set task.dev=NEW" in shown
    dev = run_file.parent / "moved-dev.tsv"
    assert run_command(["evaluate", str(run.path), "--set", f"task.dev={dev}"]) == 0
    (run_file.parent / "odd.tsv").write_text("Where was Ødegård born?\tOslo\n")
    for split in (run_file.parent / "odd.tsv", run_file.parent / "od.tsv"):
        capsys.readouterr()
        assert run_command(["evaluate", str(run.path), "--split", str(split)]) == 2
        assert "have moved" not in capsys.readouterr().err


def test_checkpoints_that_are_elsewhere_are_waited_for_whatever_else_is_missing(stopped: Path) -> None:
    (stopped / "checkpoints").rename(stopped.parent / "disk")
    (stopped / "checkpoints").symlink_to("not mounted")
    (stopped / "tokenizer.json").unlink()
    for back_to in (None, 8):
        with pytest.raises(RunError, match="checkpoints, a link to not mounted, is no folder; nothing was changed"):
            headway.train(stopped, resume=True, back_to=back_to)
    assert not (stopped / "tokenizer.json").exists()
