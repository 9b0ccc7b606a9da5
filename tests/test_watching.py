"""`headway watch`: what is read of a run, whatever state it is in, what is drawn of it, and when it ends."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import headway
from headway import watching
from headway.cli import run_command
from headway.errors import RunError, UserError
from headway.files import Ownership, write_json_lines
from headway.report.terminal import plain_text
from headway.training.tensorboard import TensorBoard
from headway.watching import Lock, Tail, Watched, picture, read_state

Captured = pytest.CaptureFixture[str]
Record = dict[str, Any]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def logged(step: int, loss: float, stage: str = "training", **more: Any) -> Record:
    return {
        "stage": stage,
        "step": step,
        "loss": loss,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "tokens": 100 * step,
        "seconds": 2.0 * step,
        "tokens_per_second": 50.0,
        **more,
    }


def evaluated(step: int, stage: str = "training", **numbers: float) -> Record:
    return {"stage": stage, "step": step, "evaluation": numbers}


def make_run(
    name: str, records: list[Record], steps: int = 100, pretraining: int = 0, state: Record | None = None
) -> Path:
    """A run directory as training leaves it, without weights."""
    path = Path(name)
    path.mkdir(parents=True)
    (path / "run.toml").write_text(
        f"[training]\nsteps = {steps}\n" + (f"[pretraining.training]\nsteps = {pretraining}\n" if pretraining else "")
    )
    write_json_lines(path / "metrics.jsonl", records)
    if state is not None:
        save(path, state)
    return path


def save(path: Path, state: Record) -> None:
    folder = path / "checkpoints" / f"step-{state['step']:08d}"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text("{}")


def shown(*paths: Path, width: int = 100, height: int = 40, plain: bool = True) -> str:
    return plain_text(picture([Watched(path) for path in paths], width, height, plain))


def words(*paths: Path) -> str:
    """What is said above the curves, in one line."""
    return " ".join(shown(*paths, width=4000).split("\n\n")[0].split("\n"))


# ---- metrics.jsonl


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_file_read_while_it_grows_is_what_it_is_in_the_end(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Cut anywhere, also within a character: what is whole is known, and nothing is lost or read twice."""
    path = tmp_path_factory.mktemp("grows") / "metrics.jsonl"
    records = [logged(step, 1 / step, stage="größe") for step in range(1, 6)]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    tail = Tail(path)
    for place in [*places, len(text)]:
        path.write_bytes(text[:place])
        with mock.patch.object(watching, "PIECE", data.draw(st.sampled_from([1, 7, 100, 1 << 20]))):
            tail.read()
        whole = [line for line in text[:place].split(b"\n") if line.endswith(b"}")]
        assert [each.step for each in tail.entries] == list(range(1, len(whole) + 1))
    assert [each.values["loss"] for each in tail.entries] == [record["loss"] for record in records]
    assert {each.stage for each in tail.entries} == {"größe"}


@given(order=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=30))
@settings(max_examples=100, deadline=None)
def test_a_run_resumed_at_an_earlier_step_overwrites_what_came_after(order: list[tuple[int, bool]]) -> None:
    tail = Tail(Path("unused"))
    kept: list[tuple[int, bool, int]] = []
    for number, (step, is_evaluation) in enumerate(order):
        record = evaluated(step, loss=number) if is_evaluation else logged(step, number)
        tail.take(json.dumps(record).encode())
        kept = [each for each in kept if each[:2] < (step, is_evaluation)] + [(step, is_evaluation, number)]
    found = [(each.step, "loss" not in each.values, each.values) for each in tail.entries]
    assert [(step, later, values["evaluation/loss" if later else "loss"]) for step, later, values in found] == kept


def test_a_file_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    write_json_lines(path, [logged(step, 1.0) for step in (1, 2, 3)])
    tail.read()
    write_json_lines(path, [logged(4, 5.0)])  # shorter, and of later steps
    tail.read()
    assert [(each.step, each.values["loss"]) for each in tail.entries] == [(4, 5.0)]
    write_json_lines(path, [logged(step, 7.0) for step in range(1, 9)])  # and longer
    tail.read()
    assert [each.values["loss"] for each in tail.entries] == [7.0] * 8
    path.unlink()
    tail.read()
    assert tail.entries == []


JUNK = [
    b"",
    b"\xff\xfe\x00",
    b"[1, 2]",
    b"null",
    b'{"loss": 1.0}',
    b'{"step": true, "loss": 1.0}',
    b'{"step": -1, "loss": 1.0}',
    b'{"step": "7", "loss": 1.0}',
    b'{"step": 1e99, "loss": 1.0}',
    b'{"step": 7, "loss": 1.0',
    b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}",
]


def test_a_record_of_step_0_has_no_pace() -> None:
    run = make_run("a", [logged(0, 3.0, seconds=1.0)])
    assert Watched(run).pace() is None and "step 0" in shown(run)


@pytest.mark.parametrize("line", JUNK, ids=lambda line: repr(line[:20]))
def test_a_line_that_is_no_record_is_passed_over(line: bytes) -> None:
    run = make_run("run", [])
    good = [json.dumps(logged(step, 1.0 / step)).encode() for step in (1, 2)]
    (run / "metrics.jsonl").write_bytes(b"\n".join([good[0], line, good[1], line]))
    assert [each.step for each in Watched(run).entries] == [1, 2]


def test_a_record_of_any_depth_is_no_error() -> None:
    for depth in range(100, 3000, 50):
        found = watching.entry(b'{"step": 7, "a": ' * depth + b"1" + b"}" * depth)
        assert found is None or found.step == 7


def test_names_cannot_move_the_cursor() -> None:
    stage = "\x1b[2Jevil\n\r"
    records = [
        logged(1, 2.0, stage),
        logged(2, 1.0, stage, losses={"\x1b]0;a\x07": 3.0}),
        evaluated(2, **{"\x1b": 1.0}),
    ]
    run = make_run("run", records)
    (run / ".lock").write_text("\x1b[31mprocess")
    text = shown(run, plain=False)
    assert "evil" in text and set(text) - set("\n") == {char for char in text if char.isprintable()}


# ---- alive, finished, stopped, dead


def test_the_lock_says_whether_a_run_is_alive() -> None:
    run = make_run("run", [logged(10, 1.0)])
    assert Watched(run).status == "stopped"
    with Ownership(run):
        assert Watched(run).status == "running"
        assert f"running (process {os.getpid()} on " in words(run)
    assert Watched(run).status == "stopped"
    assert f"go on with: headway train {run} --resume" in words(run)
    assert "headway train 'my run' --resume" in words(run.rename("my run"))
    Path("my run").rename(run)
    save(run, {"step": 10, "done": True})
    assert Watched(run).status == "finished"
    assert "go on" not in words(run)


def test_a_finished_run_that_is_trained_on_is_alive() -> None:
    run = make_run("run", [logged(10, 1.0)], state={"step": 10, "done": True})
    with Ownership(run):
        assert Watched(run).status == "running"


def test_a_killed_run_is_dead_and_can_be_resumed_while_it_is_watched() -> None:
    run = make_run("run", [logged(10, 1.0)])
    script = (
        "import sys, time; from pathlib import Path; from headway.files import Ownership\n"
        "with Ownership(Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(run)], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner.stdout:
        owner.stdout.readline()
        watched = Watched(run)
        assert watched.status == "running" and f"process {owner.pid} on " in watched.owner
        owner.kill()
        owner.wait()
    watched.look()
    assert watched.status == "dead" and f"dead (process {owner.pid} on " in words(run)
    with Ownership(run):
        watched.look()
        assert watched.status == "running" and f"process {os.getpid()} on " in watched.owner


def test_looking_at_a_dead_run_takes_its_lock_once_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").write_text("process 1 on nowhere")
    tries = []
    true_flock = watching.fcntl.flock
    monkeypatch.setattr(watching.fcntl, "flock", lambda *all: (tries.append(all), true_flock(*all)))
    lock = Lock(tmp_path)
    assert [lock.look() for _ in range(3)] == [("process 1 on nowhere", False)] * 3
    assert len(tries) == 1
    (tmp_path / ".lock").write_text("")  # left in order: nothing to ask
    assert lock.look() == ("", False) and len(tries) == 1


def test_where_there_are_no_locks_the_file_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".lock").write_text("process 1 on nowhere")
    monkeypatch.setattr(watching, "fcntl", None)
    assert Lock(tmp_path).look() == ("process 1 on nowhere", True)


def test_a_live_run_that_records_nothing_for_long_is_called_silent() -> None:
    run = make_run("run", [logged(step, 1.0, seconds=0.1 * step) for step in (10, 20)])
    with Ownership(run):
        assert "silent" not in words(run)
        before = time.time() - 300
        os.utime(run / "metrics.jsonl", (before, before))
        assert "silent for 5:0" in words(run)
    assert "silent" not in words(run)


# ---- what is said


def test_progress_and_time_left_are_those_of_the_stage() -> None:
    records = [logged(step, 3.0, "pretraining") for step in range(10, 101, 10)]
    run = make_run("run", records[:5], steps=30, pretraining=100)
    with Ownership(run):
        said = words(run)
        assert "pretraining: step 50 of 100 (50%)  trained 1:40  1:40 left, then 30 steps of training" in said
        more = [logged(step, 2.0, seconds=200 + 7.0 * (step - 100)) for step in (105, 110)]  # slower steps
        write_json_lines(run / "metrics.jsonl", records + more)
        said = words(run)
        assert "training: step 10 of 30 (33%)  trained 4:30  2:20 left  loss 2.0000" in said
    assert "left" not in words(run)


def test_the_first_record_gives_a_time_already() -> None:
    run = make_run("run", [logged(10, 3.0)])
    with Ownership(run):
        assert "3:00 left" in words(run)


def test_what_was_last_recorded_and_saved_is_said() -> None:
    records = [logged(10, 3.0), evaluated(10, accuracy=0.25, correct=1), logged(20, 2.5), evaluated(20, accuracy=0.125)]
    state = {"step": 20, "best_step": 10, "best_value": 0.25, "done": False}
    run = make_run("run", records, state=state)
    said = words(run)
    assert "loss 2.5000  rate 1.00e-03  50 tokens/s  gradient 0.5" in said
    assert "best dev accuracy 25.0% at step 10  last checkpoint: step 20" in said
    with Ownership(run):
        assert re.search(r"last checkpoint: step 20 0:0\d ago", words(run))


def test_a_score_of_another_name_is_the_one_that_was_the_best() -> None:
    records = [logged(10, 3.0), evaluated(10, tokens=7, rouge=31.25, loss=2.0)]
    run = make_run("run", records, state={"step": 10, "best_step": 10, "best_value": 31.25})
    assert "best dev rouge 31.25 at step 10" in words(run)
    assert re.search("^ +dev rouge  ", shown(run), re.MULTILINE)


def test_losses_that_are_not_finite_are_gaps_and_are_said() -> None:
    losses = [4.0, 3.0, math.nan, math.inf, 1.0, -math.inf]
    run = make_run("run", [logged(step, loss) for step, loss in enumerate(losses, 1)])
    assert "loss -inf" in words(run) and "3 losses are not finite, last at step 6" in words(run)
    rows = plot(shown(run, width=8 + 6, height=11))
    columns = ["".join(row[column] for row in rows) for column in range(6)]
    assert [bool(column.strip()) for column in columns] == [True, True, False, False, True, False]


def test_a_run_with_nothing_but_nan_is_no_error() -> None:
    run = make_run("run", [logged(1, math.nan, gradient_norm=math.nan, tokens_per_second=math.inf)])
    assert "a loss is not finite, last at step 1" in words(run)
    assert "learning rate" in shown(run)


def test_steps_that_were_passed_over_are_said() -> None:
    assert "steps passed over: 3" in words(make_run("run", [logged(1, 1.0, skipped=3)]))


# ---- what is drawn


def plot(text: str) -> list[str]:
    """The rows of the first panel, right of its wall."""
    rows = text.split("\n\n")[1].split("\n")
    found = []
    for row in rows[1:]:
        if row[7:8] != "|":
            break
        found.append(row[8:])
    width = max(len(row) for row in text.split("\n")) - 8
    return [row.ljust(width) for row in found]


def test_a_falling_loss_falls_from_the_first_label_to_the_last() -> None:
    run = make_run("run", [logged(step, 5.0 - step / 25) for step in range(1, 101)])
    text = shown(run, width=60, height=12)
    rows = plot(text)
    heights = [next(row for row in range(len(rows)) if rows[row][column] == "*") for column in range(52)]
    assert heights == sorted(heights) and heights[0] == 0 and heights[-1] == len(rows) - 1
    panel = text.split("\n\n")[1].split("\n")
    assert float(panel[1][:7]) == pytest.approx(4.96, abs=0.04)  # a column is a mean of two steps or one
    assert float(panel[len(rows)][:7]) == pytest.approx(1.0, abs=0.04)
    assert panel[len(rows) + 1].split() == ["1", "100"]


def test_a_wide_range_is_drawn_on_a_logarithmic_axis() -> None:
    run = make_run("run", [logged(step, 10.0**-step) for step in range(1, 6)])
    text = shown(run, width=8 + 50, height=20)
    assert "loss, log\n" in text
    rows = plot(text)
    found = [next(row for row in range(len(rows)) if rows[row][column] == "*") for column in (0, 12, 25, 37, 49)]
    assert all(abs(row - number * (len(rows) - 1) / 4) <= 0.5 for number, row in enumerate(found))


def test_each_stage_stream_and_evaluation_has_a_line_with_its_name() -> None:
    records = [logged(step, 4.0, "pretraining") for step in (1, 2, 3)]
    losses = {"facts": 3.0, "names": 1.0, "training": 1.5}
    records += [logged(step, 2.0, losses=losses) for step in (4, 5, 6)]
    records += [evaluated(6, loss=2.5, tokens=9)]
    text = shown(make_run("run", records, pretraining=3))
    for mark, name in zip(
        "*+ox#@", ("pretraining", "training", "facts", "names", "training alone", "dev"), strict=True
    ):
        assert f"  {mark} {name}" in text
    rows = plot(text)
    assert [next(mark for mark in row if mark != " ") for row in (rows[0], rows[-1])] == ["*", "x"]
    assert all(any(mark in row for row in rows) for mark in "*+ox#@")
    assert all(title in text for title in ("gradient norm", "tokens a second", "learning rate"))
    assert text.count("      0|") == 2  # speed and rate are drawn from zero on


def test_the_speed_that_is_shown_is_that_of_tokens_without_padding() -> None:
    run = make_run("run", [logged(step, 4.0, useful_tokens_per_second=30.0) for step in (1, 2)])
    assert "30 tokens/s" in words(run) and "50" not in words(run)
    old = make_run("old", [logged(step, 4.0) for step in (1, 2)])  # records no other
    for each, speed in ((run, "30"), (old, "50")):
        for text in (shown(each), shown(each, each)):
            assert f" {speed}|" in text


def test_several_runs_share_a_chart() -> None:
    high = make_run("high", [logged(step, 4.0) for step in range(1, 11)])
    low = make_run("low", [logged(step, 1.0) for step in range(1, 6)])
    text = shown(high, low)
    assert re.search(rf"^\* {high}: +stopped +training: step 10 of 100", text, re.MULTILINE)
    assert re.search(rf"^\+ {low}: +stopped +training: step 5 of 100", text, re.MULTILINE)
    rows = plot(text)
    assert rows[0].strip() == "*" * 92 and rows[-1].strip() == "+" * rows[-1].count("+")
    assert rows[-1].count("+") == 1 + round(91 * 4 / 9)  # half as many steps


ODD: dict[str, list[Record]] = {
    "nothing": [],
    "one": [logged(1, 2.0)],
    "flat": [logged(step, 0.0) for step in (1, 2, 3)],
    "huge": [logged(1, 1e308), logged(2, -1e308), logged(3, 9e299), logged(4, -9e299)],
    "tiny": [logged(1, 5e-324), logged(2, 1.0)],
    "late": [logged(10**15, 1.0), logged(10**15 + 1, 2.0)],
    "many": [logged(step, 1 / step, losses={f"stream {n}": n for n in range(9)}) for step in range(1, 50)],
    "words": [{"step": 1, "loss": "low"}, {"step": 2, "stage": ["x"], "evaluation": 3, "loss": 1.0}],
    "time": [logged(1, 1.0, seconds=1e300), logged(2, 1.0, seconds=-5), logged(3, 1.0, seconds=math.nan)],
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("plain", [True, False])
def test_a_picture_fits_wherever_it_is_shown(name: str, plain: bool) -> None:
    run = make_run(name, ODD[name])
    other = make_run("a-run-with-a-long-name", [logged(step, 3.0) for step in range(1, 9)])
    with Ownership(run):
        for paths in ([run], [run, other], [run, *[other] * 9]):
            runs = [Watched(path) for path in paths]
            for width, height in ((1, 1), (7, 3), (9, 30), (26, 7), (40, 12), (80, 24), (133, 50), (300, 9)):
                rows = picture(runs, width, height, plain)
                assert 1 <= len(rows) <= height
                lines = ["".join(text for text, _ in row) for row in rows]
                assert all(len(line) <= width for line in lines)
                assert not plain or all(line.isascii() for line in lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12), (20, 12)])
def test_there_is_room_for_the_loss_on_any_terminal(size: tuple[int, int]) -> None:
    run = make_run("run", [logged(step, 1 / step) for step in range(1, 50)], state={"step": 40})
    text = shown(run, width=size[0], height=size[1])
    assert re.search(r"^ +loss", text, re.MULTILINE) and "*" in text
    assert len(text.split("\n")) == size[1]


# ---- the command


def test_without_a_terminal_there_is_one_plain_picture(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    run = make_run("run", [logged(step, 5.0 / step) for step in range(1, 9)])
    monkeypatch.setenv("COLUMNS", "70")
    monkeypatch.setenv("LINES", "30")
    with Ownership(run):  # also of a run that goes on
        assert run_command(["watch", str(run)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == "" and captured.out.isascii() and "\x1b" not in captured.out
    assert len(lines) == 30 and max(map(len, lines)) <= 70
    assert "running" in captured.out and "8 of 100 (8%)" in captured.out


def test_a_run_that_has_not_recorded_anything_is_shown(capsys: Captured) -> None:
    run = make_run("run", [])
    (run / "metrics.jsonl").unlink()
    assert run_command(["watch", str(run)]) == 0
    assert "stopped  nothing recorded yet" in capsys.readouterr().out


def test_curves_without_a_run_file_are_shown(capsys: Captured) -> None:
    run = make_run("run", [logged(7, 1.0)])
    (run / "run.toml").unlink()
    assert run_command(["watch", str(run)]) == 0
    assert "training: step 7  trained" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["manifest.json", "state.json"])
def test_a_checkpoint_that_is_not_whole_does_not_count(damage: str) -> None:
    run = make_run("run", [logged(20, 1.0)], state={"step": 10})
    save(run, {"step": 20, "done": True})
    broken = run / "checkpoints" / "step-00000020" / damage
    broken.unlink() if damage == "manifest.json" else broken.write_text('{"step": 2')
    assert "stopped" in words(run) and "last checkpoint: step 10" in words(run)


def test_wrong_directories_leave_with_2(tmp_path: Path, capsys: Captured) -> None:
    run = make_run("runs/good", [logged(1, 1.0)])
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    broken = make_run("broken", [])
    (broken / "run.toml").write_text("[training\n")
    for path, message in (
        ("nowhere", "nowhere: no such directory; known: broken"),
        ("runs/god", f"runs/god: no such directory; did you mean '{run}'?"),
        ("elsewhere/run", "elsewhere/run: no such directory; name a run directory"),
        ("file", "file: is a file; known: broken"),
        ("empty", "empty: not a run directory (no run.toml in it); train one with"),
        ("runs", f"runs: not a run directory (no run.toml in it); runs in it: {run}"),
        (broken, "run.toml: a problem\n  - not TOML"),
    ):
        assert run_command(["watch", str(run), str(path)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and captured.out == ""
    assert run_command(["watch"]) == 2


def test_watching_needs_no_torch_and_no_rich_without_a_terminal() -> None:
    run = make_run("run", [logged(1, 1.0)])
    script = (
        "import sys\n"
        "from headway.cli import run_command\n"
        f"assert run_command(['watch', {str(run)!r}]) == 0 and run_command(['watch', '--help']) == 0\n"
        "loaded = {'torch', 'numpy', 'rich.live', 'headway.run'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- a terminal


def fake_terminal(**options: Any) -> Console:
    settings = {"width": 100, "height": 30, "color_system": "standard", "highlight": False, "_environ": {}}
    return Console(file=io.StringIO(), force_terminal=True, **(settings | options))


def watch_with(
    run: Path, console: Console, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[int], None]
) -> list[str]:
    """What was shown, before each wait and at the end; `meanwhile` is what happens to the run in a wait."""
    pictures, place = [], 0

    def sleep(seconds: float) -> None:
        nonlocal place
        assert seconds >= watching.INTERVAL
        pictures.append(console.file.getvalue()[place:])
        place = len(console.file.getvalue())
        meanwhile(len(pictures))

    monkeypatch.setattr(watching.time, "sleep", sleep)
    try:
        watching.watch_terminal([Watched(run)], False, False, console)
    finally:
        pictures.append(console.file.getvalue()[place:])
        monkeypatch.undo()
    return pictures


def test_a_live_run_is_shown_again_and_again_until_it_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [logged(step, 5.0 - step / 2) for step in range(1, 5)]
    run = make_run("run", records[:1], steps=4)
    console = fake_terminal()
    owner = Ownership(run)

    def meanwhile(number: int) -> None:
        write_json_lines(run / "metrics.jsonl", records[: number + 1])
        if number == 3:
            save(run, {"step": 4, "done": True})
            owner.__exit__()

    owner.__enter__()
    pictures = watch_with(run, console, monkeypatch, meanwhile)
    assert len(pictures) == 4
    for number, text in enumerate(pictures, 1):
        assert f"step {number} of 4 ({number / 4:.0%})" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert "running" in pictures[2] and "finished" in pictures[3] and "\x1b[36m" in pictures[3]
    end = pictures[3]
    assert console.file.getvalue().count("\x1b[?1049h") == 1
    assert end.index("\x1b[?1049l") < end.index("finished")  # the last one stays when the screen is given back


def test_a_run_that_dies_ends_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("run", [logged(1, 1.0)])
    owner = Ownership(run).__enter__()

    def meanwhile(number: int) -> None:
        owner.handle.close()  # what is left of a killed process: its name in the file

    pictures = watch_with(run, fake_terminal(), monkeypatch, meanwhile)
    assert len(pictures) == 2 and "dead" in pictures[-1]


def test_a_run_directory_that_vanishes_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run("run", [logged(1, 1.0)])
    with Ownership(run), pytest.raises(RunError, match="no such directory"):
        watch_with(run, fake_terminal(), monkeypatch, lambda number: run.rename(tmp_path / "elsewhere") and None)


@pytest.mark.parametrize(
    "options", [{"color_system": None}, {"no_color": True}, {}], ids=["no colours", "NO_COLOR", "plain"]
)
def test_lines_are_told_apart_by_marks_where_there_are_no_colours(options: dict[str, Any]) -> None:
    run = make_run("run", [logged(1, 4.0, "pretraining"), logged(2, 3.0)])
    console = fake_terminal(**options)
    watching.watch_terminal([Watched(run)], False, plain=not options, console=console)
    assert "* pretraining  + training" in console.file.getvalue()
    assert console.file.getvalue().count("\n") <= 30


def test_ctrl_c_leaves_quietly_and_gives_the_screen_back() -> None:
    """In a real terminal: the curves appear, Ctrl-C is typed, the exit code is 0."""
    pty = pytest.importorskip("pty")
    run = make_run("run", [logged(step, 5.0 / step) for step in range(1, 9)])
    here, there = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    with Ownership(run):
        command = [sys.executable, "-m", "headway", "watch", str(run)]
        process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True
        )
        os.close(there)
        seen = b""
        while b"learning rate" not in seen and process.poll() is None:
            seen += os.read(here, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while data := os.read(here, 65536):
                seen += data
        except OSError:  # how a terminal says that nobody is there any more
            pass
        assert process.wait(20) == 0
    os.close(here)
    text = seen.decode()
    assert "⣀" in text or "⠤" in text or "⠒" in text
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
    assert "Traceback" not in text and "interrupted" not in text


def test_the_picture_of_a_real_run(run_file: Path, capsys: Captured) -> None:
    """What training writes is what watching reads."""
    run = headway.train(run_file, run_file.parent / "run").path
    assert run_command(["watch", str(run.relative_to(Path.cwd()))]) == 0
    text = capsys.readouterr().out
    assert "finished  training: step 5 of 5 (100%)  trained 0:0" in text
    assert re.search(
        r"best dev accuracy \d+.\d% at step 11 of the run +last checkpoint: step 11", " ".join(text.split("\n"))
    )
    assert "* pretraining  + training" in text
    for title in ("dev accuracy", "gradient norm", "tokens a second", "learning rate"):
        assert title in text


# ---- TensorBoard


class Writer:
    """Stands in for TensorBoard's writer and remembers what it is given."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, directory: str, purge_step: int, flush_secs: float) -> None:
        self.directory, self.purge_step = directory, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.open = True
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def close(self) -> None:
        self.open = False


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    return Writer.made


def expected_scalars(records: list[Record]) -> list[tuple[str, float, int]]:
    """Written out: each number under its stage and name, an evaluation's under one more."""
    found = []
    for record in records:
        stage, step = record["stage"], record["step"]
        for name, value in record.items():
            if name == "evaluation":
                found += [(f"{stage}/evaluation/{key}", float(number), step) for key, number in value.items()]
            elif name not in ("stage", "step"):
                found.append((f"{stage}/{name}", float(value), step))
    return found


def test_every_number_of_a_run_goes_to_tensorboard(run_file: Path, writers: list[Writer], capsys: Captured) -> None:
    out = run_file.parent / "run"
    assert run_command(["train", str(run_file), "--out", str(out), "--tensorboard"]) == 0
    (writer,) = writers
    assert writer.directory == str(out / "tensorboard") and not writer.open
    assert writer.scalars == expected_scalars(headway.load(out).metrics)
    names = {name for name, _, _ in writer.scalars}
    assert {"pretraining/loss", "training/learning_rate", "training/evaluation/accuracy"} <= names


def test_a_run_that_fails_closes_its_events_and_a_resumed_one_drops_what_came_after(
    tmp_path: Path, writers: list[Writer]
) -> None:
    with pytest.raises(ZeroDivisionError), TensorBoard(tmp_path) as events:
        assert not writers  # nothing is made before there is something to write
        events(logged(10, 1.0))
        events(logged(20, 1.0))
        raise ZeroDivisionError
    with TensorBoard(tmp_path) as events:
        events(logged(20, 2.0))
    assert [(each.purge_step, each.open) for each in writers] == [(10, False), (20, False)]


def test_without_tensorboard_the_option_is_refused_before_anything_is_made(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    out = run_file.parent / "run"
    assert run_command(["train", str(run_file), "--out", str(out), "--tensorboard"]) == 2
    assert "TensorBoard is not installed; get it with: pip install tensorboard" in capsys.readouterr().err
    assert not out.exists()
    with pytest.raises(UserError, match="not installed"):
        TensorBoard(out)


def test_tensorboard_itself_reads_what_was_written(tmp_path: Path) -> None:
    """Also after a resume at an earlier step: what the first attempt had after it is gone."""
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not installed"
    )
    with TensorBoard(tmp_path) as events:
        for step in range(1, 11):
            events(logged(step, 1.0, "pretraining" if step < 3 else "training"))
        events(evaluated(10, accuracy=0.25))
    time.sleep(1.1)  # event files are read in the order of their seconds
    again = [logged(step, 2.0) for step in (6, 7, 8)] + [evaluated(8, accuracy=0.5)]
    with TensorBoard(tmp_path) as events:
        for record in again:
            events(record)
    read = reading.EventAccumulator(str(tmp_path))
    read.Reload()
    found = [(name, event.value, event.step) for name in read.Tags()["scalars"] for event in read.Scalars(name)]
    kept = [logged(step, 1.0, "pretraining" if step < 3 else "training") for step in range(1, 6)]
    wanted = sorted(expected_scalars(kept + again))
    assert [(name, step) for name, _, step in sorted(found)] == [(name, step) for name, _, step in wanted]
    assert [value for _, value, _ in sorted(found)] == pytest.approx([value for _, value, _ in wanted], rel=1e-6)


def test_the_newest_checkpoint_is_found_by_its_number(tmp_path: Path) -> None:
    """Beyond eight digits too; a copy that somebody made is none."""
    for name in ("step-00000006", "step-00000006.backup", "step-00000012", "step-100000000"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
        (folder / "state.json").write_text(f'{{"name": "{name}"}}')
        if "backup" not in name:
            assert read_state(tmp_path)[0] == {"name": name}
