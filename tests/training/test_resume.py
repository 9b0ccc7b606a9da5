"""N steps = k steps + resume + (N − k) steps, bit for bit; a run directory has one owner and no half checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import headway
from headway.configuration import load_settings
from headway.console import Reporter
from headway.errors import Interrupted, RunError
from headway.training.guard import Spikes


def final_weights(directory: Path) -> dict[str, torch.Tensor]:
    newest = max((directory / "checkpoints").glob("step-*/manifest.json")).parent
    return load_file(newest / "model.safetensors")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


class StopAt:
    """Raises a signal, as Ctrl-C does, when a certain step has been recorded."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __call__(self, record: dict) -> None:
        if record["step"] == self.step and "loss" in record:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopping_anywhere_and_resuming_gives_the_same_weights(run_file: Path, optimizer: str) -> None:
    sets = [
        f"{stage}.{key}"
        for stage in ("pretraining.training", "training")
        for key in (f"optimizer={optimizer}", "log_every=1", "accumulate=2", "evaluate_every=2")
    ]
    settings = load_settings(run_file, sets)
    folder = run_file.parent
    whole = headway.train(settings, folder / "whole")
    expected = final_weights(whole.path)
    for stop in range(1, 11):
        out = folder / f"stopped-{stop}"
        with pytest.raises(Interrupted, match=f"after step {stop}"):
            headway.train(settings, out, watch=StopAt(stop))
        headway.train(settings, out, resume=True)
        assert same(final_weights(out), expected), f"stopped after step {stop}"
        clean = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        kept = [(record["step"], record.get("loss"), record.get("evaluation")) for record in clean]
        full = [(record["step"], record.get("loss"), record.get("evaluation")) for record in whole.metrics]
        assert kept == full


@pytest.mark.parametrize("loss", ["null", '"low"', "[1.0]"])
def test_a_record_that_makes_no_sense_stops_no_run(run_file: Path, loss: str) -> None:
    settings, out = load_settings(run_file, ["training.log_every=1"]), run_file.parent / "run"
    with pytest.raises(Interrupted):
        headway.train(settings, out, watch=StopAt(9))
    with open(out / "metrics.jsonl", "a") as file:
        file.write(f'{{"stage": "training", "step": 9, "loss": {loss}}}\n' * Spikes.WINDOW)
    assert headway.train(settings, out, resume=True).state.done


def test_a_last_stage_of_no_steps_is_scored_also_after_a_stop(run_file: Path) -> None:
    settings, folder = (
        load_settings(run_file, ["training.steps=0", "pretraining.training.log_every=1"]),
        run_file.parent,
    )
    assert settings.pretraining is not None
    whole = headway.train(settings, folder / "whole")
    with pytest.raises(Interrupted):
        headway.train(settings, folder / "stopped", watch=StopAt(settings.pretraining.training.steps))
    again = headway.train(settings, folder / "stopped", resume=True)
    assert again.state.done and again.evaluation == whole.evaluation != {}
    assert same(final_weights(again.path), final_weights(whole.path))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_pretraining_goes_on_where_nothing_is_trained_after_it(run_file: Path, optimizer: str) -> None:
    """More steps of it, given to a finished run, are those of a run that had them from the start."""
    constant = [
        "pretraining.training.schedule=constant",
        "pretraining.training.warmup=0",
        f"pretraining.training.optimizer={optimizer}",
        "training.steps=0",
        "training.warmup=0",
    ]
    expected = final_weights(headway.train(run_file, run_file.parent / "whole", constant).path)
    out = run_file.parent / "run"
    short = headway.train(run_file, out, [*constant, "pretraining.training.steps=3"])
    assert short.state.done and short.state.step == 3
    longer = headway.train(run_file, out, constant, resume=True, accept_changes=True)
    assert longer.state.done and same(final_weights(out), expected)


def test_a_killed_process_resumes_from_its_last_checkpoint(run_file: Path) -> None:
    """SIGKILL in the middle: no goodbye, no half files that count."""
    folder = run_file.parent
    expected = final_weights(headway.train(run_file, folder / "whole").path)
    script = (
        "import os, signal, sys, headway\n"
        "def watch(record):\n"
        "    if record['step'] == 9: os.kill(os.getpid(), signal.SIGKILL)\n"
        "headway.train(sys.argv[1], sys.argv[2], watch=watch)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, run_file, folder / "killed"], check=False)
    assert killed.returncode == -signal.SIGKILL
    headway.train(run_file, folder / "killed", resume=True)
    assert same(final_weights(folder / "killed"), expected)


class Killed(BaseException):
    """The process is gone: nothing after this runs but what the next process does."""


@pytest.mark.parametrize("function", ["os.replace", "shutil.rmtree", "os.fsync"])
def test_killed_at_any_moment_of_any_checkpoint(run_file: Path, monkeypatch, function: str) -> None:
    """Cut the run off at the n-th rename, removal or sync, for every n, and resume: the same weights."""
    settings = load_settings(
        run_file, ["training.evaluate_every=1", "pretraining.training.steps=2", "training.steps=3"]
    )
    folder = run_file.parent
    expected = final_weights(headway.train(settings, folder / "whole").path)
    module, name = {"os": os, "shutil": shutil}[function.split(".", maxsplit=1)[0]], function.split(".")[1]
    original, seen = getattr(module, name), 0
    for cut in range(1, 200, 3 if name == "fsync" else 1):
        calls = 0

        def counting(*arguments, _cut=cut, **options):
            nonlocal calls
            calls += "checkpoints" in str(arguments[0]) or name == "fsync"
            if calls >= _cut:
                raise Killed
            return original(*arguments, **options)

        out = folder / f"cut-{cut}"
        monkeypatch.setattr(module, name, counting)
        try:
            headway.train(settings, out)
            break
        except Killed:
            seen += 1
        finally:
            monkeypatch.setattr(module, name, original)
        if (out / "run.toml").exists():
            headway.train(settings, out, resume=True)
            assert same(final_weights(out), expected), f"cut at call {cut} of {function}"
    assert seen >= 5


def test_no_checkpoint_is_saved_of_weights_that_are_not_numbers(run_file: Path) -> None:
    from headway.errors import UserError

    sets = ["training.learning_rate=1e30", "training.steps=50", "training.warmup=0", "training.clip=0"]
    with pytest.raises(UserError, match="the last checkpoint is of step"):
        headway.train(
            run_file, run_file.parent / "run", [*sets, "training.log_every=50", "training.checkpoint_every=1"]
        )
    assert all(torch.isfinite(tensor).all() for tensor in final_weights(run_file.parent / "run").values())


def test_a_damaged_or_unfinished_checkpoint_is_passed_over(run_file: Path) -> None:
    folder = run_file.parent
    settings = load_settings(run_file, ["training.evaluate_every=2", "training.steps=5"])
    expected = final_weights(headway.train(settings, folder / "whole").path)
    with pytest.raises(Interrupted):
        headway.train(settings, folder / "run", watch=StopAt(9))
    checkpoints = folder / "run" / "checkpoints"
    newest = max(checkpoints.glob("step-*"))
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8] + b"\0" * 8)
    (checkpoints / "step-00000099").mkdir()
    (checkpoints / ".step-00000004.gone").mkdir()  # of one that was about to be deleted
    said: list[str] = []
    report = Reporter()
    report.say = said.append  # type: ignore[method-assign]
    headway.train(settings, folder / "run", resume=True, report=report)
    assert any(f"{newest.name}: model.safetensors is damaged; passed over" in line for line in said)
    assert same(final_weights(folder / "run"), expected)
    assert any("step-00000099: manifest.json is missing; passed over" in line for line in said)
    assert not any((checkpoints / name).exists() for name in ("step-00000099", ".step-00000004.gone"))


def test_nothing_in_a_run_is_a_pickle_and_every_checkpoint_has_its_manifest(run_file: Path) -> None:
    run = headway.train(run_file, run_file.parent / "run")
    names = {path.suffix for path in run.path.rglob("*") if path.is_file()}
    assert names <= {".toml", ".json", ".jsonl", ".safetensors", ""}
    for folder in (run.path / "checkpoints").iterdir():
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest.keys() == {path.name for path in folder.iterdir()} - {"manifest.json"}
        assert all((folder / name).stat().st_size == facts["bytes"] for name, facts in manifest.items())


def test_the_run_file_of_a_run_repeats_it(run_file: Path, tmp_path: Path) -> None:
    first = headway.train(run_file, tmp_path / "first")
    again = headway.train(first.path / "run.toml", tmp_path / "again")
    assert same(final_weights(first.path), final_weights(again.path))
    assert first.settings == again.settings


def test_accumulating_pieces_gives_the_same_run_but_for_rounding(run_file: Path, tmp_path: Path) -> None:
    settings = ["model.dropout=0.0"]
    runs = [
        headway.train(
            run_file,
            tmp_path / f"pieces-{count}",
            [*settings, f"training.accumulate={count}", f"pretraining.training.accumulate={count}"],
        )
        for count in (1, 4)
    ]
    first, second = (final_weights(run.path) for run in runs)
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=2e-4, rtol=0)


def test_another_owner_is_named(run_file: Path) -> None:
    from headway.files import Ownership

    run = headway.train(run_file, run_file.parent / "run")
    with Ownership(run.path), pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        headway.train(run_file, run.path, resume=True)


def test_existing_directories_are_not_touched(run_file: Path) -> None:
    run = headway.train(run_file, run_file.parent / "run")
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != ".lock"}
    with pytest.raises(RunError, match=r"exists already; continue it with --resume"):
        headway.train(run_file, run.path)
    with pytest.raises(RunError, match=r"training.batch_size: 5 there, 7 now"):
        headway.train(run_file, run.path, ["training.batch_size=7"], resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.name != ".lock"}


def test_resuming_a_finished_run_changes_nothing(run_file: Path) -> None:
    run = headway.train(run_file, run_file.parent / "run")
    expected = final_weights(run.path)
    metrics = (run.path / "metrics.jsonl").read_bytes()
    headway.train(run_file, run.path, resume=True)
    assert same(final_weights(run.path), expected)
    assert (run.path / "metrics.jsonl").read_bytes() == metrics


def test_a_tokenizer_that_does_not_match_the_weights_is_refused(run_file: Path) -> None:
    from headway.text import Characters

    run = headway.train(run_file, run_file.parent / "run")
    Characters.train(["other letters"]).save(run.path / "tokenizer.json")
    with pytest.raises(RunError, match=r"tokenizer.json \(.*\) is not the one"):
        headway.load(run.path)
    with pytest.raises(RunError, match=r"tokenizer.json \(.*\) is not the one"):
        headway.train(run_file, run.path, resume=True)


def test_the_best_checkpoint_is_kept_and_loaded(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores 0.1, 0.9, 0.5, …: the second evaluation's weights are the run's, and training stops early."""
    scores = iter([0.1, 0.9, 0.5, 0.4, 0.3])
    from headway.tasks import QuestionAnswering

    monkeypatch.setattr(QuestionAnswering, "evaluate", lambda self, model, split="dev": {"accuracy": next(scores)})
    run = headway.train(
        run_file, run_file.parent / "run", ["training.evaluate_every=1", "training.patience=2", "training.steps=20"]
    )
    assert (run.step, run.state.step, run.state.best_value) == (8, 10, 0.9)
    assert run.evaluation == {"accuracy": 0.9}  # of the weights that are loaded
    assert sorted(run.checkpoints.steps()) == [8, 10]


def test_a_loss_that_is_not_finite_stops_the_run(run_file: Path) -> None:
    from headway.errors import UserError

    with pytest.raises(UserError, match=r"the loss is \S+ and .* at step .* Lower training.learning_rate"):
        headway.train(
            run_file,
            run_file.parent / "run",
            ["training.learning_rate=1e30", "training.steps=50", "training.warmup=0", "training.clip=0"],
        )
