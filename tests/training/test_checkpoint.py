"""Checkpoints: which are kept, what happens to damaged ones, and that they are written while training goes on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.cli import run_command
from headway.configuration import RunSettings, load_settings
from headway.console import Reporter
from headway.errors import Interrupted, RunError, UserError
from headway.ranks import ALONE
from headway.training import checkpoint
from headway.training.checkpoint import Checkpoints, Snapshot, State, Writer, all_finite
from headway.training.distributed import PartsWriter
from headway.training.loop import Trainer
from headway.training.optimizer import Optimizer, build_optimizer
from headway.training.stage import TrainingSettings
from tests.conftest import tiny_gpt
from tests.training.test_resume import StopAt, final_weights, same

OFTEN = [
    "pretraining.training.checkpoint_every=1",
    "training.checkpoint_every=1",
    "pretraining.training.log_every=1",
    "training.log_every=1",
]


class Said(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def in_writer() -> bool:
    return threading.current_thread().name == "checkpoint"


@pytest.fixture
def often(run_file: Path) -> RunSettings:
    """Eleven steps, each with a line of metrics and a checkpoint."""
    return load_settings(run_file, OFTEN)


@pytest.fixture
def parts() -> tuple[torch.nn.Module, Optimizer]:
    """A model and its optimizer after one step."""
    model = tiny_gpt()
    optimizer = build_optimizer(model, TrainingSettings())
    change(model, optimizer)
    return model, optimizer


def change(model: torch.nn.Module, optimizer: Optimizer) -> None:
    model(torch.randint(1, 19, (2, 8))).square().sum().backward()
    for part in optimizer.parts:
        part.step()
    optimizer.zero_grad()


# ---- which are kept


@pytest.mark.parametrize("keep", [1, 2, 3, 20])
def test_the_newest_are_kept(often: RunSettings, tmp_path: Path, keep: int) -> None:
    often.training.keep = often.pretraining.training.keep = keep
    run = headway.train(often, tmp_path / "run")
    expected = set(range(max(1, 12 - keep), 12)) | {run.state.best_step}
    assert set(run.checkpoints.steps()) == expected


def test_what_a_kept_checkpoint_calls_the_best_is_kept(tmp_path: Path) -> None:
    """Else a run that falls back to it would have lost its best weights."""
    checkpoints, model = Checkpoints(tmp_path), tiny_gpt()
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 5)):
        checkpoints.write(Snapshot.take(model, None, State(step, best_step=best)), keep=2)
        last = [step - 1, step] if step > 1 else [step]
        bests = {checkpoints.state(each).best_step for each in last}
        assert checkpoints.steps() == sorted({*last, *bests})


def test_steps_that_are_trained_again_do_not_push_out_those_before(tmp_path: Path) -> None:
    """Damaged checkpoints ahead of the run are not counted among the newest."""
    checkpoints, model = Checkpoints(tmp_path), tiny_gpt()
    for step in (4, 6, 8):
        checkpoints.write(Snapshot.take(model, None, State(step)), keep=5)
    checkpoints.write(Snapshot.take(model, None, State(5)), keep=2)  # 6 and 8 were passed over
    assert checkpoints.steps() == [4, 5]


# ---- damage


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    place = len(data) // 2
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


@pytest.mark.parametrize("harm", [cut, flip, None], ids=["truncated", "bit-flipped", "missing"])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_gives_the_same_end(
    run_file: Path, tmp_path: Path, file: str, harm: Callable[[bytes], bytes] | None
) -> None:
    settings = load_settings(run_file, ["training.log_every=1"])
    expected = final_weights(headway.train(settings, tmp_path / "whole").path)
    with pytest.raises(Interrupted):
        headway.train(settings, tmp_path / "run", watch=StopAt(9))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000008", "step-00000009"]
    path = checkpoints / "step-00000009" / file
    if harm is None:
        path.unlink()
    else:
        path.write_bytes(harm(path.read_bytes()))
    report = Said()
    run = headway.train(settings, tmp_path / "run", resume=True, report=report)
    said = "\n".join(report.lines)
    assert "step-00000009: " in said and f"{'missing' if harm is None else 'damaged'}; passed over" in said
    assert "resuming after step 8; to be trained again: step 9" in said
    assert same(final_weights(run.path), expected)
    assert [record["step"] for record in run.metrics if "loss" in record][-5:] == [7, 8, 9, 10, 11]


def test_a_checkpoint_under_the_name_of_another_step_is_passed_over(run_file: Path, tmp_path: Path) -> None:
    expected = final_weights(headway.train(run_file, tmp_path / "whole").path)
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", watch=StopAt(9))
    checkpoints = Checkpoints(tmp_path / "run")
    shutil.copytree(checkpoints.path(8), checkpoints.path(10))
    with pytest.raises(RunError, match=r"step-00000010: is of step 8, under another's name; put it back"):
        headway.train(run_file, tmp_path / "run", resume=True, back_to=10)
    assert headway.load(tmp_path / "run").step == 9
    report = Said()
    run = headway.train(run_file, tmp_path / "run", resume=True, report=report)
    assert f"{checkpoints.path(10)}: is of step 8, under another's name; passed over" in report.lines
    assert same(final_weights(run.path), expected)


def test_a_damaged_checkpoint_takes_the_place_of_no_whole_one(run_file: Path, tmp_path: Path) -> None:
    """One that a signal left is written by no later step again; it would count among those to go back to."""
    sets = ["training.checkpoint_every=4", "pretraining.training.checkpoint_every=4", "training.log_every=1"]
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", sets, watch=StopAt(8))
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.steps() == [6, 8]
    weights = checkpoints.path(8) / "model.safetensors"
    weights.write_bytes(flip(weights.read_bytes()))
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", sets, resume=True, watch=StopAt(7))
    assert sorted(os.listdir(checkpoints.directory)) == ["step-00000006", "step-00000007", "step-00000008.damaged"]
    headway.train(run_file, tmp_path / "run", sets, resume=True)
    assert sorted(os.listdir(checkpoints.directory)) == ["step-00000010", "step-00000011"]


def test_where_a_checkpoint_cannot_be_read_none_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best one would be, as nobody would know which it is."""
    checkpoints, model = Checkpoints(tmp_path), tiny_gpt()
    for step in (2, 4, 6):
        checkpoints.write(Snapshot.take(model, None, State(step, best_step=2)), keep=1)
    assert checkpoints.steps() == [2, 6]
    read = Path.read_text

    def failing(path: Path, *given: Any, **options: Any) -> str:
        if path.name == "state.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", failing)
        checkpoints.prune(6, 1)
        assert not checkpoints.is_steady(6)
        with pytest.raises(OSError, match=r"Input/output error: '.*step-00000006/state.json'"):
            checkpoints.state(6)
    assert checkpoints.steps() == [2, 6]
    (checkpoints.path(6) / "state.json").unlink()  # which is damage, and says nothing of the disk
    checkpoints.prune(6, 1)
    assert checkpoints.steps() == [6]


def test_where_all_are_damaged_nothing_is_deleted(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", watch=StopAt(9))
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for folder in folders:
        (folder / "model.safetensors").write_bytes(b"nothing")
    (tmp_path / "run" / "checkpoints" / ".step-00000010.tmp").mkdir()
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match="none of its checkpoints is whole; nothing was deleted") as caught:
        headway.train(run_file, tmp_path / "run", resume=True)
    assert len(folders) == 2
    assert all(f"{folder}: model.safetensors is damaged" in str(caught.value) for folder in folders)
    assert (tmp_path / "run" / "checkpoints" / ".step-00000010.tmp").exists()
    assert contents(tmp_path / "run") == before
    assert run_command(["train", str(tmp_path / "run"), "--resume"]) == 2


def test_a_checkpoint_that_lacks_only_its_name_is_used(run_file: Path, tmp_path: Path) -> None:
    """Killed between the manifest and the rename; but not where its files are not what the manifest says."""
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", watch=StopAt(9))
    checkpoints = Checkpoints(tmp_path / "run")
    unnamed = checkpoints.directory / ".step-00000009.tmp"
    checkpoints.path(9).rename(unnamed)
    checkpoints.finish()
    assert checkpoints.steps() == [8, 9]
    checkpoints.path(9).rename(unnamed)
    (unnamed / "model.safetensors").write_bytes(b"half")
    checkpoints.finish()
    assert checkpoints.steps() == [8]
    checkpoints.clear_remains()
    assert not unnamed.exists()


# ---- in the background


def test_a_snapshot_is_taken_before_the_weights_change(
    parts: tuple[torch.nn.Module, Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = parts
    changed = threading.Event()
    plain = Snapshot.files

    def late(self: Snapshot) -> Any:
        assert changed.wait(20)
        yield from plain(self)

    monkeypatch.setattr(Snapshot, "files", late)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    memory = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    state = State(3)
    checkpoints = Checkpoints(tmp_path)
    with Writer(checkpoints) as writer:
        writer.save(model, optimizer, state, keep=2)
        change(model, optimizer)
        state.step = 4
        assert not same(weights, dict(model.named_parameters()))
        changed.set()
    from safetensors.torch import load_file

    assert checkpoints.steps() == [3] and checkpoints.state(3).step == 3
    assert same(load_file(checkpoints.path(3) / "model.safetensors"), weights)
    assert same(load_file(checkpoints.path(3) / "optimizer.safetensors"), memory)


def test_training_goes_on_while_a_checkpoint_is_written(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write ends only when a later step is recorded: a loop that waits for it would never get there."""
    later = threading.Event()
    seen: list[bool] = []
    plain = Snapshot.files

    def patient(self: Snapshot) -> Any:
        if not seen:
            seen.append(later.wait(20))
        yield from plain(self)

    def watch(record: dict[str, Any]) -> None:
        if record["step"] == 4:
            later.set()

    monkeypatch.setattr(Snapshot, "files", patient)
    sets = ["pretraining.training.log_every=1", "pretraining.training.checkpoint_every=3"]
    run = headway.train(run_file, tmp_path / "run", sets, watch=watch)
    assert seen == [True]
    monkeypatch.undo()
    assert same(final_weights(run.path), final_weights(headway.train(run_file, tmp_path / "plain", sets).path))


def test_checkpoints_are_written_one_at_a_time_and_all_of_them(
    often: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk slower than training: never two at once, none left out, all there when the run ends."""
    busy, written = [0], []
    plain = Checkpoints.write

    def slow(self: Checkpoints, snapshot: Snapshot, *arguments: Any) -> None:
        busy[0] += 1
        assert busy[0] == 1
        time.sleep(0.02)
        plain(self, snapshot, *arguments)
        written.append(snapshot.step)
        busy[0] -= 1

    monkeypatch.setattr(Checkpoints, "write", slow)
    run = headway.train(often, tmp_path / "run")
    assert written == list(range(1, 12)) and run.checkpoints.steps()[-2:] == [10, 11]


@pytest.mark.parametrize("stop", [0, 9])
def test_a_write_that_fails_is_told_and_the_checkpoint_before_it_stays(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop: int
) -> None:
    """The disk is full from the checkpoint of step 9 on: also where that is the one for which the run was stopped."""
    settings = load_settings(run_file, OFTEN)
    expected = final_weights(headway.train(settings, tmp_path / "whole").path)
    plain, full = os.fsync, [False]
    plain_take = Snapshot.take

    def take(model: Any, optimizer: Any, state: State) -> Snapshot:
        full[0] = full[0] or state.step >= 9
        return plain_take(model, optimizer, state)

    def fsync(handle: int) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(handle)

    monkeypatch.setattr(Snapshot, "take", take)
    monkeypatch.setattr(os, "fsync", fsync)
    if stop:
        with pytest.raises(OSError, match="No space left"):
            headway.train(settings, tmp_path / "run", watch=StopAt(stop))
    else:
        command = ["train", str(run_file), "--out", str(tmp_path / "run")]
        assert run_command([*command, *(part for pair in OFTEN for part in ("--set", pair))]) == 2
        shown = capsys.readouterr().err
        assert "No space left on device; make room and go on with --resume" in shown
        assert f"headway: {tmp_path / 'run' / 'checkpoints'}" in shown
        assert "Traceback" not in shown
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "run").latest(pytest.fail) == 8
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert same(final_weights(headway.train(settings, tmp_path / "run", resume=True).path), expected)


@pytest.mark.parametrize("fails", ["headway.training.sharded.write", "headway.training.distributed.write_synced"])
def test_a_checkpoint_in_parts_that_cannot_be_written_leaves_nothing(
    parts: tuple[torch.nn.Module, Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    checkpoints, (model, optimizer) = Checkpoints(tmp_path), parts
    writer = PartsWriter(checkpoints, ALONE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        writer.save(model, optimizer, State(step=1), keep=2)

        def full(folder: Path, *given: Any) -> None:
            (folder if folder.is_dir() else folder.parent).joinpath("shard-00001-of-00001").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(fails, full)
        with pytest.raises(OSError, match="No space left"):
            writer.save(model, optimizer, State(step=2), keep=2)
    assert checkpoints.latest(pytest.fail) == 1
    assert [path.name for path in checkpoints.directory.iterdir()] == ["step-00000001"]


def test_a_failed_write_ends_the_run_at_the_next_step(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only when the next checkpoint is due, 900 steps later."""

    def fail(self: Checkpoints, *arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.directory / "step-00000100"))

    monkeypatch.setattr(Checkpoints, "write", fail)
    last: list[int] = []
    sets = ["pretraining.training.steps=1000", "pretraining.training.checkpoint_every=100", *OFTEN[2:]]
    with pytest.raises(
        RunError, match=r"step-00000100: Input/output error; mend that and go on with: headway train .* --resume"
    ):
        headway.train(run_file, tmp_path / "run", sets, watch=lambda record: last.append(record["step"]))
    assert 100 <= last[-1] < 200


def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_first_step(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = headway.train(run_file, tmp_path / "run")
    size = sum(path.stat().st_size for path in run.checkpoints.path(11).iterdir())
    assert 3 * run.parameters * 4 < size  # what is asked for is less than what it takes

    def usage(path: Path) -> Any:
        return shutil._ntuple_diskusage(10**9, 10**9, free)  # type: ignore[attr-defined]

    class Begun(Exception):
        pass

    def begin(*arguments: Any) -> None:
        raise Begun

    monkeypatch.setattr(shutil, "disk_usage", usage)
    monkeypatch.setattr(Trainer, "fit", begin)
    free = 3 * run.parameters * 4 - 1
    with pytest.raises(RunError, match=r"other: 0.1 MB are free on its disk, .* more than 0.1 MB; make room"):
        headway.train(run_file, tmp_path / "other")
    free += 1
    with pytest.raises(Begun):
        headway.train(run_file, tmp_path / "another")


def test_the_disk_that_counts_is_the_one_of_the_checkpoints(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", watch=StopAt(9))
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or shutil._ntuple_diskusage(9, 9, 10**9))
    headway.train(run_file, tmp_path / "run", resume=True)
    assert asked == [tmp_path / "run" / "checkpoints"]


def test_a_checkpoint_that_the_memory_cannot_hold_twice_names_the_way_out(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*given: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9000000000000 bytes")

    monkeypatch.setattr(checkpoint, "copied", copied)
    with pytest.raises(UserError, match=r"out of memory for the checkpoint of step 2, .* lower model.layers"):
        headway.train(run_file, tmp_path / "run")


def test_whoever_quits_while_the_thread_begins_is_not_told_of_threads(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quits(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", quits)
        with pytest.raises(KeyboardInterrupt):
            headway.train(run_file, tmp_path / "run")
    assert headway.train(run_file, tmp_path / "run", resume=True).state.done


def test_an_error_of_the_caller_waits_for_what_is_being_written(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Checkpoints.write

    def slow(self: Checkpoints, *arguments: Any) -> None:
        time.sleep(0.3)
        plain(self, *arguments)

    def watch(record: dict[str, Any]) -> None:
        if record["step"] == 7:
            raise ZeroDivisionError

    monkeypatch.setattr(Checkpoints, "write", slow)
    with pytest.raises(ZeroDivisionError):
        headway.train(run_file, tmp_path / "run", watch=watch)
    assert Checkpoints(tmp_path / "run").steps() == [6, 7] and Checkpoints(tmp_path / "run").latest(pytest.fail) == 7
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())


def test_weights_that_are_not_numbers_are_never_saved(
    often: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the step that made them had a finite loss and gradient."""
    from headway.training.engine import Plain

    plain = Plain.step

    def spoil(self: Plain, step: int, rate: float) -> Any:
        done = plain(self, step, rate)
        if self.streams[0].name == "training" and step == 2:
            with torch.no_grad():
                next(self.model.parameters()).view(-1)[0] = float("inf")
        return done

    monkeypatch.setattr(Plain, "step", spoil)
    with pytest.raises(UserError, match=r"not finite after step 9; the last checkpoint is from before \(step 8\)"):
        headway.train(often, tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run")
    assert checkpoints.latest(pytest.fail) == 8
    model = often.model.build(len(headway.load(tmp_path / "run").tokenizer))
    checkpoints.load_model(8, model)
    assert all_finite(model)


def test_metrics_that_a_kill_tore_are_mended(run_file: Path, tmp_path: Path) -> None:
    """Half a line at the end, lines of no step and lines of steps that are trained again: all as if never killed."""
    settings = load_settings(run_file, ["training.log_every=1", "training.evaluate_every=2"])
    whole = headway.train(settings, tmp_path / "whole")

    class Enough(Exception):
        pass

    def watch(record: dict[str, Any]) -> None:
        if record["step"] == 9:
            raise Enough

    with pytest.raises(Enough):
        headway.train(settings, tmp_path / "run", watch=watch)
    path = tmp_path / "run" / "metrics.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"note": 1}\n{"step": "nine"}\n[3]\n\xff\n{"stage": "training", "step": 10, "los')
    headway.train(settings, tmp_path / "run", resume=True)
    lines = path.read_text("utf-8").splitlines()
    kept = [(record["step"], record.get("loss"), record.get("evaluation")) for record in map(json.loads, lines)]
    assert kept == [(record["step"], record.get("loss"), record.get("evaluation")) for record in whole.metrics]


def test_a_record_that_was_damaged_is_kept_and_told(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", OFTEN, watch=StopAt(9))
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    spoilt = "\n".join([*lines[:3], lines[3].replace("{", "["), *lines[4:], '{"torn'])
    metrics.write_text(spoilt)
    report = Said()
    run = headway.train(run_file, tmp_path / "run", OFTEN, resume=True, report=report)
    assert f"{metrics}: lines that cannot be read: 1, left out; all of it is in {metrics}.1" in report.lines
    assert (tmp_path / "run" / "metrics.jsonl.1").read_text() == spoilt
    assert [record["step"] for record in run.metrics if "loss" in record] == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    metrics.unlink()
    report = Said()
    headway.train(run_file, tmp_path / "run", OFTEN, resume=True, report=report)
    assert f"{metrics}: is gone; the record begins anew" in report.lines


def test_what_a_killed_run_had_not_let_go_is_let_go_when_it_is_resumed(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it has nothing left to train; but never the ones that a damaged newest leaves it with."""
    monkeypatch.setattr(Checkpoints, "prune", lambda *arguments: None)
    run = headway.train(run_file, tmp_path / "run")
    monkeypatch.undo()
    assert run.checkpoints.steps() == [2, 4, 6, 8, 10, 11]
    shutil.copytree(run.path, tmp_path / "damaged")
    headway.train(run_file, run.path, resume=True)
    assert run.checkpoints.steps() == [10, 11]

    checkpoints = Checkpoints(tmp_path / "damaged")
    weights = checkpoints.path(11) / "model.safetensors"
    weights.write_bytes(cut(weights.read_bytes()))
    seen: list[list[int]] = []
    headway.train(run_file, tmp_path / "damaged", resume=True, watch=lambda record: seen.append(checkpoints.steps()))
    assert seen[0] == [2, 4, 6, 8, 10]  # nothing new was saved yet
    assert checkpoints.steps() == [10, 11]
