"""What the machine may do to a run: no memory, no disk, two owners, a clock that is set back. Nothing is lost, and
the message says what to do."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway import files, making
from headway.cli import run_command
from headway.console import Lines
from headway.errors import Interrupted, RunError, UserError
from headway.files import Ownership, probe
from headway.training import checkpoint
from headway.training.engine import Outcome, Plain
from tests.training.faults import CALL, LOGGED, Captured, until
from tests.training.test_checkpoint import contents
from tests.training.test_resume import StopAt, final_weights, same

# ---- memory


def too_much() -> None:
    torch.empty(1 << 50)  # torch's own error on a CPU


def too_much_for_python() -> None:
    raise MemoryError


def too_much_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("happens", [too_much, too_much_for_python, too_much_for_a_gpu])
def test_a_lack_of_memory_names_the_settings_to_change(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, happens: Any
) -> None:
    plain, at = Plain.step, ["training", 3]

    def step(self: Plain, step: int, rate: float) -> Outcome:
        if [self.streams[0].name, step] == at:
            happens()
        return plain(self, step, rate)

    monkeypatch.setattr(Plain, "step", step)
    out = run_file.parent / "run"
    assert run_command(["train", str(run_file), "--out", str(out), "--set", "training.accumulate=2"]) == 2
    shown = capsys.readouterr().err
    assert (
        "headway: out of memory at step 10; take it in more pieces with training.accumulate (now 2), or lower "
        "training.batch_size (5); the last checkpoint is of step 9\n"
    ) in shown and "Traceback" not in shown
    at[:] = ["pretraining", 0]
    with pytest.raises(UserError, match=r"pretraining.training.batch_size \(4\); there is no checkpoint yet"):
        headway.train(run_file, run_file.parent / "other")


def test_another_error_of_the_engine_stays_what_it_is(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: Plain, step: int, rate: float) -> Outcome:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Plain, "step", step)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        headway.train(run_file, tmp_path / "run")


# ---- two owners


HOLD = """
import sys, time
from pathlib import Path
from headway.files import Ownership
with Ownership(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(120)
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns tmp_path / "run"."""
    (tmp_path / "run").mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "mine\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_a_dead_owner_is_not_one(
    owner: subprocess.Popen[str], run_file: Path, tmp_path: Path, capsys: Captured
) -> None:
    command = ["train", str(run_file), "--out", str(tmp_path / "run")]
    assert run_command(command) == 2
    found = re.search(
        rf"run: in use by process {owner.pid} on (\S+) since (\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d); wait for it, stop it",
        capsys.readouterr().err,
    )
    assert found is not None and found[1] == os.uname().nodename
    assert abs(time.mktime(time.strptime(found[2], "%Y-%m-%d %H:%M:%S")) - time.time()) < 300
    assert not (tmp_path / "run" / "run.toml").exists()
    owner.kill()
    owner.wait()
    assert f"process {owner.pid}" in (tmp_path / "run" / ".lock").read_text()  # it had no time to clear it
    with Ownership(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert run_command(command) == 0
    assert "in use" not in capsys.readouterr().err
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_a_run_that_begins_while_another_waits_to_go_on_is_not_taken_over(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was none when its settings would have been compared."""
    build, others = making.build_model, []

    def meanwhile(*given: Any) -> Any:
        if not others:
            others.append(None)
            headway.train(run_file, tmp_path / "run", LOGGED)
        return build(*given)

    monkeypatch.setattr(making, "build_model", meanwhile)
    with pytest.raises(RunError, match=r"another run has just begun there; .*or go on with that one: headway train"):
        headway.train(run_file, tmp_path / "run", [*LOGGED, "training.learning_rate=0.5"], resume=True)
    assert headway.load(tmp_path / "run").settings.training.learning_rate == 1e-3
    assert not (tmp_path / "run" / "run.toml.1").exists()


def test_what_a_run_is_compared_with_is_owned_already(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headway.train(run_file, tmp_path / "run", LOGGED)
    check = making.check_directory

    def owned(directory: Path, *given: Any) -> Any:
        with pytest.raises(RunError, match="in use by process"), Ownership(directory):
            pass
        return check(directory, *given)

    monkeypatch.setattr(files, "PATIENCE", 0.0)
    monkeypatch.setattr(making, "check_directory", owned)
    headway.train(run_file, tmp_path / "run", LOGGED, resume=True)


@pytest.mark.skipif(files.fcntl is None, reason="there are no locks")
def test_a_file_system_without_locks_is_one_to_train_on(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", none)
    assert headway.train(run_file, tmp_path / "run").state.done


def test_a_disk_that_fails_is_told_by_what_was_being_written(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """And not by the lock that is let go of then, on the same disk."""
    readonly = OSError(errno.EROFS, os.strerror(errno.EROFS))

    class Failing:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __getattr__(self, name: str) -> Any:
            if broken:
                self.file.close()
                raise readonly
            return getattr(self.file, name)

        def fileno(self) -> int:
            return self.file.fileno()

    broken: list[bool] = []
    enter, write = Ownership.__enter__, files.write_synced

    def entered(self: Ownership) -> Ownership:
        enter(self)
        self.handle = Failing(self.handle)  # type: ignore[assignment]
        return self

    def refused(path: Path, data: bytes) -> None:
        if "step-00000008" in str(path) or broken:
            broken.append(True)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Ownership, "__enter__", entered)
        patch.setattr(checkpoint, "write_synced", refused)
        assert run_command(["train", str(run_file), "--out", str(tmp_path / "run")]) == 2
        assert "Read-only file system; mend that and go on with: headway train" in capsys.readouterr().err
    assert run_command(["train", str(run_file), "--out", str(tmp_path / "run"), "--resume"]) == 0


@pytest.mark.parametrize("name", ["run.toml", ".run.toml", "data.json", "metrics.jsonl", "state.json"])
@pytest.mark.parametrize("problem", [errno.EIO, errno.EMFILE])
def test_a_file_that_cannot_be_read_once_is_named_and_nothing_changes(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, name: str, problem: int
) -> None:
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=StopAt(8))
    before = contents(tmp_path / "run")
    for read in ("read_text", "read_bytes"):
        plain, left = getattr(Path, read), [1]

        def failing(path: Path, *given: Any, plain: Any = plain, left: list[int] = left, **options: Any) -> Any:
            if path.name == name and left:
                left.clear()
                raise OSError(problem, os.strerror(problem))
            return plain(path, *given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Path, read, failing)
            assert run_command(["train", str(tmp_path / "run"), "--resume", "--set", "training.weight=0.5"]) == 2
            shown = capsys.readouterr().err
            named = f"/{name}: " in shown and os.strerror(problem) in shown
            assert named or "training.weight: 1.0 there" in shown, shown
        assert contents(tmp_path / "run") == before
    assert headway.train(run_file, tmp_path / "run", LOGGED, resume=True).state.done
    assert not (tmp_path / "run" / "run.toml.1").exists()


def test_two_real_runs_on_one_directory(run_file: Path) -> None:
    """The second is refused while the first trains, and the first does not notice."""
    folder = run_file.parent
    command = [*CALL, "train", str(run_file), "--out", "run", "--set", "training.steps=100000"]
    first = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    metrics = folder / "run" / "metrics.jsonl"
    until(lambda: metrics.exists() and '"training"' in metrics.read_text())
    with pytest.raises(RunError, match=f"in use by process {first.pid} on .* since"):
        headway.train(folder / "run", folder / "run", resume=True)
    lines = len(metrics.read_text().splitlines())
    until(lambda: len(metrics.read_text().splitlines()) > lines + 3)
    first.kill()
    first.communicate()
    with pytest.raises(Interrupted):  # taken over without a word
        headway.train(folder / "run", folder / "run", resume=True, watch=Soon())


class Soon:
    """Ctrl-C at the first step that is recorded."""

    def __call__(self, record: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.__class__ = Never  # once


class Never(Soon):
    def __call__(self, record: dict[str, Any]) -> None:
        pass


def test_somebody_who_only_looks_at_the_lock_is_no_owner(tmp_path: Path) -> None:

    with Ownership(tmp_path):
        pass
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.1, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        with Ownership(tmp_path):
            pass


def test_what_a_killed_process_left_of_a_write_is_removed(run_file: Path, tmp_path: Path) -> None:
    """Killed before anything was there but a temporary file: the directory counts as empty."""
    out = tmp_path / "run"
    out.mkdir()
    (out / ".run.toml.4711.tmp").write_text("half")
    (out / ".lock").write_text("process 4711 on nowhere")
    headway.train(run_file, out, resume=True)
    assert not list(out.glob(".*tmp"))


# ---- the disk


def fails(number: int) -> Any:
    def fsync(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "cannot be written (No space left on device); make room, or "),
        (errno.EROFS, "cannot be written (Read-only file system); "),
    ],
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_disk_that_cannot_be_written_is_known_before_data_are_read(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, number: int, words: str, resume: bool
) -> None:
    out = run_file.parent / "new" / "run"
    if resume:
        with pytest.raises(Interrupted):
            headway.train(run_file, out, watch=StopAt(9))
    before = contents(run_file.parent)

    def too_late(*arguments: Any) -> None:
        pytest.fail("data were read")

    for name in ("headway.making.build_tokenizer", "headway.making.build_stages"):
        monkeypatch.setattr(name, too_late)
    monkeypatch.setattr(os, "fsync", fails(number))
    assert run_command(["train", str(run_file), "--out", str(out), *(["--resume"] if resume else [])]) == 2
    way = "copy the run elsewhere and resume the copy" if resume else "choose another with --out"
    assert f"{out}: {words}{way}" in capsys.readouterr().err
    assert contents(run_file.parent) == before and out.exists() == resume


def test_a_real_write_that_fails_is_found_by_the_probe(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, hard))  # the system writes no larger files
    try:
        with pytest.raises(RunError, match=r"not/yet: cannot be written \(File too large\)"):
            probe(tmp_path / "not" / "yet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    probe(tmp_path / "not" / "yet")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_leave_to_write_is_refused(run_file: Path, capsys: Captured) -> None:
    closed = run_file.parent / "closed"
    closed.mkdir(mode=0o500)
    assert run_command(["train", str(run_file), "--out", str(closed / "run")]) == 2
    assert "cannot be written (Permission denied); choose another with --out" in capsys.readouterr().err


# ---- the clock


class Clock:
    """A clock that goes back an hour at every third look, and stands still at every second."""

    def __init__(self) -> None:
        self.now, self.looks = 50_000.0, 0

    def __call__(self) -> float:
        self.looks += 1
        self.now += -3600.0 if self.looks % 3 == 0 else 0.01 * (self.looks % 2)
        return self.now


def test_a_clock_that_is_set_back_does_no_harm(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    expected = final_weights(headway.train(run_file, tmp_path / "whole", LOGGED).path)
    for name in ("time", "perf_counter"):
        monkeypatch.setattr(time, name, Clock())
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=StopAt(8))
    run = headway.train(run_file, tmp_path / "run", LOGGED, resume=True, report=Lines(seconds=0.0))
    monkeypatch.undo()
    assert same(final_weights(run.path), expected)
    records = [record for record in run.metrics if "loss" in record]
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds) and 0 <= seconds[-1] < 60
    for record in records:
        assert 0 <= record["useful_tokens_per_second"] <= record["tokens_per_second"] < 1e7
    left = re.findall(r"(\S+) left$", capsys.readouterr().err, re.M)
    assert all(re.fullmatch(r"\d+:\d\d", each) for each in left)
