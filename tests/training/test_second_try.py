"""What the system refuses once is written when it lets us, and what lies elsewhere is waited for: nothing has a gap."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.errors import Interrupted, RunError
from headway.files import append_line, read_json_lines
from headway.tasks import QuestionAnswering
from headway.training import record
from headway.training.checkpoint import Abandoned, Checkpoints, Snapshot, Writer
from tests.training.faults import LOGGED, nobody_waits
from tests.training.test_checkpoint import Said
from tests.training.test_rescue import EVERY, scored
from tests.training.test_resume import StopAt, final_weights, same


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def steps(run: headway.Run) -> list[int]:
    return [record["step"] for record in run.metrics if "loss" in record]


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("line", [3, 8, 12])  # of the first stage, of the second, its evaluation
def test_a_line_that_could_not_be_written_leaves_no_gap(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: int, at_hand: bool
) -> None:
    """Nor does the one behind it, which was on its way already where nobody waits for a step."""
    if not at_hand:
        nobody_waits(monkeypatch)
    whole = headway.train(run_file, tmp_path / "whole", LOGGED)
    calls = [0]

    def refused(path: Path, text: str) -> None:
        calls[0] += 1
        if calls[0] == line:
            raise full()
        append_line(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(record, "append_line", refused)
        with pytest.raises(OSError, match="No space left"):
            headway.train(run_file, tmp_path / "run", LOGGED)
    run = headway.train(run_file, tmp_path / "run", LOGGED, resume=True)
    assert steps(run) == steps(whole) == list(range(1, 12))
    assert [record for record in run.metrics if "evaluation" in record] == [
        record for record in whole.metrics if "evaluation" in record
    ]
    assert same(final_weights(run.path), final_weights(whole.path))


def test_a_line_is_added_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    append_line(path, "first")
    before, plain = path.read_bytes(), open

    class Nearly:
        """A file on a disk with room for three more bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 3

        def __enter__(self) -> Nearly:
            return self

        def __exit__(self, *exception: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise full()
            self.room -= (written := self.file.write(data[: self.room]))
            return written

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", lambda *given, **options: Nearly(plain(*given, **options)))
        with pytest.raises(OSError, match="No space left") as caught:
            append_line(path, "second")
    assert caught.value.filename == str(path) and path.read_bytes() == before
    append_line(path, "third")
    assert path.read_text() == "first\nthird\n"


@pytest.mark.parametrize("refused", [8, 9])
def test_a_checkpoint_that_was_refused_once_is_written_after_all(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Also a best one, which the next would otherwise name in vain, having let go of the one before it."""
    values = [0.1, 0.5, 0.9, 0.2, 0.1, 0.3, 0.2, 0.1]
    scored(monkeypatch, values)
    whole = headway.train(run_file, tmp_path / "whole", [*EVERY, "training.keep=1"])
    plain, left = Checkpoints.write, [refused]

    def write(self: Checkpoints, snapshot: Snapshot, *given: Any) -> None:
        if snapshot.step in left:
            left.remove(snapshot.step)
            raise full()
        plain(self, snapshot, *given)

    monkeypatch.setattr(Checkpoints, "write", write)
    scored(monkeypatch, values)
    with pytest.raises(OSError, match="No space left"):
        headway.train(run_file, tmp_path / "run", [*EVERY, "training.keep=1"])
    assert refused in Checkpoints(tmp_path / "run").steps()
    report = Said()
    run = headway.train(run_file, tmp_path / "run", [*EVERY, "training.keep=1"], resume=True, report=report)
    assert not any("forgotten" in line for line in report.lines)
    assert (run.step, run.state.best_step) == (whole.step, whole.state.best_step) == (9, 9)
    assert same(final_weights(run.path), final_weights(whole.path))


def test_the_last_checkpoint_is_tried_again_too(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is refused when all steps are made."""
    whole = headway.train(run_file, tmp_path / "whole", LOGGED)
    plain, left = Checkpoints.write, [11]

    def write(self: Checkpoints, snapshot: Snapshot, *given: Any) -> None:
        if snapshot.step in left:
            time.sleep(0.2)
            left.remove(snapshot.step)
            raise full()
        plain(self, snapshot, *given)

    monkeypatch.setattr(Checkpoints, "write", write)
    with pytest.raises(OSError, match="No space left"):
        headway.train(run_file, tmp_path / "run", LOGGED)
    assert Checkpoints(tmp_path / "run").steps()[-1] == 11
    assert same(final_weights(tmp_path / "run"), final_weights(whole.path))


def test_what_was_written_is_not_written_again(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor kept in memory."""
    run = headway.train(run_file, tmp_path / "run", LOGGED)
    written: list[int] = []
    monkeypatch.setattr(Checkpoints, "write", lambda self, snapshot, *given: written.append(snapshot.step))
    with Writer(run.checkpoints) as writer:
        writer.save(run.model, None, run.state, keep=1)
        writer.wait()
        writer.again()
        assert written == [11] and writer.unwritten is None


def test_an_evaluation_that_is_made_again_chooses_the_same_best(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where scores are equal, one that was broken off does not become the best for having been saved."""
    sets = [*LOGGED, "training.evaluate_every=1", "training.checkpoint_every=0", "training.patience=3"]
    scored(monkeypatch, [0.5] * 9)
    whole = headway.train(run_file, tmp_path / "whole", sets)
    made = [0]

    def broken_off(*given: Any, **options: Any) -> dict[str, Any]:
        made[0] += 1
        if made[0] == 3:
            raise ValueError("broken off")
        return {"questions": 4, "accuracy": 0.5}

    monkeypatch.setattr(QuestionAnswering, "evaluate", broken_off)
    with pytest.raises(ValueError, match="broken off"):
        headway.train(run_file, tmp_path / "run", sets)
    run = headway.train(run_file, tmp_path / "run", sets, resume=True)
    assert (run.state.step, run.state.best_step, run.step) == (whole.state.step, whole.state.best_step, whole.step)


def test_checkpoints_on_a_disk_that_is_not_there_are_waited_for(run_file: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", LOGGED, watch=StopAt(9))
    record = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "disk")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "not mounted")
    with pytest.raises(RunError, match=r"checkpoints, a link to .*not mounted, is no folder; nothing was changed"):
        headway.train(run_file, tmp_path / "run", LOGGED, resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == record
    (tmp_path / "disk").rename(tmp_path / "not mounted")
    assert steps(headway.train(run_file, tmp_path / "run", LOGGED, resume=True)) == list(range(1, 12))


@pytest.mark.parametrize("every", [2, 0])
def test_the_record_of_a_run_without_its_checkpoints_is_kept(run_file: Path, tmp_path: Path, every: int) -> None:
    """Also where it had one only."""
    sets = [*LOGGED, *(f"{stage}.checkpoint_every={every}" for stage in ("training", "pretraining.training"))]
    expected = headway.train(run_file, tmp_path / "run", sets)
    record, weights = (expected.path / "metrics.jsonl").read_bytes(), final_weights(expected.path)
    shutil.rmtree(expected.path / "checkpoints")
    report = Said()
    run = headway.train(run_file, tmp_path / "run", sets, resume=True, report=report)
    assert any(line.endswith(f"the record so far is in {run.path / 'metrics.jsonl.1'}") for line in report.lines)
    assert (run.path / "metrics.jsonl.1").read_bytes() == record
    assert steps(run) == list(range(1, 12)) and same(final_weights(run.path), weights)


@pytest.mark.parametrize("every, second", [(2, 4), (4, 6), (0, 8)])  # the last two: at a stage's end, in the next stage
def test_a_run_that_is_killed_before_its_first_checkpoint_is_on_the_disk_begins_anew(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, second: int
) -> None:
    """Training goes on while it is written, as far as to the second one: no record of that is left behind. The same
    holds of a run that had lost its checkpoints before."""
    sets = [*LOGGED, f"pretraining.training.checkpoint_every={every}"]
    whole = headway.train(run_file, tmp_path / "whole", sets)

    def never(self: Checkpoints, snapshot: Snapshot, keep: int, wanted: Any) -> None:
        while wanted():
            time.sleep(0.001)
        raise Abandoned

    def quit_at(record: dict[str, Any]) -> None:
        if record["step"] == second:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "write", never)
        with pytest.raises(KeyboardInterrupt):
            headway.train(run_file, tmp_path / "run", sets, watch=quit_at)
    left = [record["step"] for record in read_json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert left == list(range(1, second + 1)) and not Checkpoints(tmp_path / "run").steps()
    report = Said()
    run = headway.train(run_file, tmp_path / "run", sets, resume=True, report=report)
    assert not any("the record so far" in line for line in report.lines)
    assert sorted(path.name for path in run.path.iterdir()) == sorted(path.name for path in whole.path.iterdir())
    assert steps(run) == steps(whole) and same(final_weights(run.path), final_weights(whole.path))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs a system that says which file is open")
def test_a_checkpoint_is_on_the_disk_before_and_after_it_has_its_name(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files, its folder, and the record up to it; then its name. Only a power cut would tell otherwise."""
    run = headway.train(run_file, tmp_path / "run", LOGGED)
    snapshot = Snapshot(12, b"{}", {}, {})
    fsync, replace, done = os.fsync, os.replace, []

    def place(path: str | Path) -> str:
        return str(Path(path).relative_to(run.path))

    def synced(handle: int) -> None:
        done.append(place(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(old: str | Path, new: str | Path) -> None:
        replace(old, new)
        done.append(f"{place(old)} > {place(new)}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    run.checkpoints.write(snapshot, keep=99)
    folder, manifest = "checkpoints/.step-00000012.tmp", f".manifest.json.{os.getpid()}.tmp"
    assert done == [
        f"{folder}/model.safetensors",
        f"{folder}/optimizer.safetensors",
        f"{folder}/state.json",
        f"{folder}/{manifest}",
        f"{folder}/{manifest} > {folder}/manifest.json",
        folder,
        "metrics.jsonl",
        f"{folder} > checkpoints/step-00000012",
        "checkpoints",
    ]


def test_to_go_back_is_for_good_before_anything_new_is_saved(run_file: Path, tmp_path: Path) -> None:
    """Else a run that is killed right after it would not have gone back."""

    class Killed(BaseException):
        pass

    def watch(record: dict[str, Any]) -> None:
        raise Killed

    sets = [*LOGGED, "training.checkpoint_every=1", "training.keep=9"]
    run = headway.train(run_file, tmp_path / "run", sets)
    with pytest.raises(Killed):
        headway.train(run.path, run.path, resume=True, back_to=8, watch=watch)
    assert run.checkpoints.steps() == [4, 6, 7, 8]
