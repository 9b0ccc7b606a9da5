"""Signals: whatever is heard, wherever a run is, its state is saved and the exit code says which."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway import a5
from headway.cli import run_command
from headway.configuration import load_settings
from headway.errors import Interrupted, Quit, UserError
from headway.training.checkpoint import Checkpoints
from headway.training.distributed import Layout
from headway.training.engine import Plain
from headway.training.engines import FirstThatWorks
from headway.training.guard import Stopped, Stops, interruptible, leave_closed_terminal
from headway.training.loop import Trainer
from headway.training.stage import Stage
from tests.training.faults import LOGGED, Captured, Spoilt, until
from tests.training.test_checkpoint import Said, in_writer
from tests.training.test_resume import StopAt, final_weights, same


class SignalAt:
    """Sends this process a signal when a certain step is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, step: int) -> None:
        plain = Trainer.write

        def record(self: Trainer, record: dict[str, Any]) -> None:
            plain(self, record)
            if record["step"] == step:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(Trainer, "write", record)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_saves_the_run_and_gives_its_exit_code(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, number: int, code: int
) -> None:
    monkeypatch.chdir(run_file.parent)
    expected = final_weights(headway.train(run_file, "whole", LOGGED).path)
    SignalAt(monkeypatch, number, 9)
    sets = [part for pair in LOGGED for part in ("--set", pair)]
    assert run_command(["train", str(run_file), "--out", "stopped", *sets]) == code
    words = "headway: stopped after step 9, state saved; go on with: headway train stopped --resume\n"
    assert capsys.readouterr().err.endswith(words)
    monkeypatch.undo()
    monkeypatch.chdir(run_file.parent)
    assert Checkpoints(Path("stopped")).latest(pytest.fail) == 9
    assert run_command(["train", "stopped", "--resume"]) == 0
    assert same(final_weights(Path("stopped")), expected)


def test_the_demonstration_and_the_course_give_the_same_exit_codes(
    people: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from tests.test_demo import SMALL

    monkeypatch.chdir(people)
    SignalAt(monkeypatch, signal.SIGTERM, 2)
    sets = [part for pair in [*SMALL, "training.log_every=2"] for part in ("--set", pair)]
    assert run_command(["demo", "--out", "demo", *sets]) == 143
    assert "stopped after step 2, state saved; type the command again to go on" in capsys.readouterr().err
    Path("long.txt").write_text("".join(f"Ada Lund. Ada Lund was born in Oslo, year {n} .\n" for n in range(300)))
    course = ["run", "pretrain", "vanilla", "long.txt", "--writing_params_path", "x.params", "--epochs", "2"]
    monkeypatch.undo()
    monkeypatch.chdir(people)
    model = load_settings("birthplaces/course-vanilla").model
    small = replace(model, width=16, heads=2, layers=1)
    plain = a5.load_settings
    monkeypatch.setattr(a5, "load_settings", lambda *given: replace(plain(*given), model=small))
    SignalAt(monkeypatch, signal.SIGTERM, 3)
    assert a5.main(course) == 143
    assert "stopped after step 3, state saved; type the command again to go on" in capsys.readouterr().err


def test_a_second_signal_quits_at_once_and_the_checkpoint_before_stays(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The first one has begun to save, on a disk that hangs."""
    settings = load_settings(run_file, LOGGED)
    expected = final_weights(headway.train(settings, tmp_path / "whole").path)
    hangs, released, plain = threading.Event(), threading.Event(), os.fsync

    def fsync(handle: int) -> None:
        if in_writer() and stopping.is_set():
            hangs.set()
            released.wait(20)
        plain(handle)

    stopping = threading.Event()

    def watch(record: dict[str, Any]) -> None:
        if record["step"] == 9:
            until(lambda: 8 in Checkpoints(tmp_path / "run").steps())
            stopping.set()
            os.kill(os.getpid(), signal.SIGTERM)
            again = threading.Thread(target=lambda: (hangs.wait(20), later(), os.kill(os.getpid(), signal.SIGTERM)))
            again.start()

    monkeypatch.setattr(os, "fsync", fsync)
    began = time.monotonic()
    with pytest.raises(
        Quit, match="stopped at once, nothing more was saved; checkpoints from before are whole"
    ) as caught:
        headway.train(settings, tmp_path / "run", watch=watch)
    assert caught.value.code == 143 and time.monotonic() - began < 10
    released.set()
    until(lambda: not any(thread.name == "checkpoint" for thread in threading.enumerate()))
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "run").latest(pytest.fail) == 8  # the hanging write was given up
    assert same(final_weights(headway.train(settings, tmp_path / "run", resume=True).path), expected)


def test_signals_of_a_real_process(run_file: Path) -> None:
    """SIGTERM, then again while its checkpoint is written on a slow disk: 143, and the run can be resumed."""
    script = (
        "import os, sys, threading, time\n"
        "from headway.cli import main\n"
        "plain = os.fsync\n"
        "def fsync(handle):\n"
        "    if threading.current_thread().name == 'checkpoint' and os.path.exists('slow'): time.sleep(30)\n"
        "    plain(handle)\n"
        "os.fsync = fsync\n"
        "main()\n"
    )
    folder = run_file.parent
    sets = ["--set", "training.steps=100000", "--set", "training.checkpoint_every=0", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, "train", str(run_file), *sets], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    metrics = folder / "run" / "metrics.jsonl"
    checkpoints = folder / "run" / "checkpoints"
    until(lambda: metrics.exists() and '"training"' in metrics.read_text() and not list(checkpoints.glob(".*")))
    (folder / "slow").touch()
    process.send_signal(signal.SIGTERM)
    until(lambda: list(checkpoints.glob(".*")))
    later()
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    shown = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and time.monotonic() - began < 20
    assert shown.endswith("; checkpoints from before are whole; go on with: headway train run --resume\n")
    assert Checkpoints(folder / "run").latest(pytest.fail) == 6  # the end of pretraining
    with pytest.raises(Interrupted):
        headway.train(folder / "run", folder / "run", resume=True, watch=StopAt(8))


def later() -> None:
    """Wait until another signal is another wish."""
    time.sleep(Stops.SAME + 0.2)


def send(number: int, *after: float) -> None:
    """Send this process a signal now, and again so many seconds later each."""

    def again() -> None:
        for seconds in after:
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=again)
    thread.start()
    os.kill(os.getpid(), number)
    thread.join()


def test_only_ctrl_c_and_sigterm_are_said_twice() -> None:
    """A closed terminal sends SIGHUP by its shell and by the system."""
    with interruptible() as stops:
        try:
            send(signal.SIGHUP, 0.1, Stops.SAME + 0.1)
        except Quit:
            pytest.fail("SIGHUP counts once")
        assert stops.number == signal.SIGHUP
        with pytest.raises(Quit):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_doubled_counts_once(number: int) -> None:
    with interruptible() as stops:
        try:
            send(number, 0.05, 0.05, 0.1)
        except Quit:
            pytest.fail("that was one wish")
        assert stops.number == number
        with pytest.raises(Quit) as caught:
            os.kill(os.getpid(), number)
            time.sleep(1)
        assert caught.value.number == number


def test_a_doubled_signal_is_not_taken_for_another_after_a_long_computation() -> None:
    """Python hears nothing while a kernel computes: what came before it began is heard before it begins."""
    with interruptible() as stops:
        thread = threading.Thread(target=lambda: (time.sleep(0.1), os.kill(os.getpid(), signal.SIGTERM)))
        thread.start()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            torch.linalg.svd(torch.randn(1200, 1200))  # about a second
        except Quit:
            pytest.fail("that was one wish")
        thread.join()
        assert stops.number == signal.SIGTERM


def test_what_may_be_left_is_left_at_once() -> None:
    with interruptible() as stops:
        with stops.at_once():
            pass
        with stops.at_once(False):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stops.number == signal.SIGTERM  # noted
        with pytest.raises(Stopped), stops.at_once():  # also where it came before
            pytest.fail("nothing that takes long is begun any more")
    with interruptible() as stops:
        with pytest.raises(Stopped), stops.at_once():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
            pytest.fail("it did not stop")
        assert not stops.raises
    with interruptible() as stops:
        done = []
        with pytest.raises(Stopped), stops.at_once():
            with stops.undisturbed():
                os.kill(os.getpid(), signal.SIGINT)
                done.append("to its end")
            pytest.fail("it was heard, and then forgotten")
        assert done and not stops.raises
        with stops.undisturbed():  # out here nothing is raised, also at its end
            pass


def test_a_program_that_leaves_is_not_told_so_again(run_file: Path) -> None:
    """It has saved and said so: a third Ctrl-C does not change its exit code, nor end in a traceback."""
    script = (
        "import atexit, time\n"
        "from headway.cli import main\n"
        "from headway.training.distributed import Layout\n"
        "Layout.evaluate = lambda *given: time.sleep(60)\n"
        "atexit.register(time.sleep, 1)\n"  # as torch may take its time
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "train", str(run_file), "--out", "run"],
        cwd=run_file.parent,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: '"step": 11' in text_of(run_file.parent / "run" / "metrics.jsonl"))
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    said = ""
    while "state saved" not in said:
        said = process.stderr.readline()
        assert said, "it said nothing"
    for _ in range(10):
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
    assert process.stderr.read() == "" and process.wait(60) == 130


def test_timeout_saves_the_run(run_file: Path) -> None:
    """`timeout` tells the program, and then the program's group: it hears of it twice."""
    if shutil.which("timeout") is None:
        pytest.skip("there is no timeout here")
    out = run_file.parent / "run"
    sets = ["--set", "training.steps=1000000", "--set", "training.checkpoint_every=0", "--out", str(out)]
    process = subprocess.Popen(  # 0 seconds: it waits for ever, and passes on what it is told itself
        ["timeout", "0", sys.executable, "-m", "headway", "train", str(run_file), *sets],
        cwd=run_file.parent,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    until(lambda: '"training"' in text_of(out / "metrics.jsonl"))
    process.send_signal(signal.SIGTERM)
    assert "state saved; go on with" in process.communicate(timeout=60)[1]
    assert (Checkpoints(out).latest(pytest.fail) or 0) > 6


def at_step(patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Where the run stands that is trained."""
    plain, trainers = Trainer.fit, []

    def fit(self: Trainer, *given: Any) -> None:
        trainers.append(self)
        plain(self, *given)

    patch.setattr(Trainer, "fit", fit)
    return lambda: trainers[-1].state.step


@pytest.mark.parametrize("when", ["during", "before"])
@pytest.mark.parametrize("step", [3, 6, 8, 11])  # of which pretraining has the first two; the last step of all is 11
def test_an_evaluation_is_left_at_once_and_made_when_the_run_is_resumed(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, when: str
) -> None:
    settings = load_settings(run_file, [*LOGGED, "training.evaluate_every=2", "pretraining.training.evaluate_every=3"])
    whole = headway.train(settings, tmp_path / "whole")
    plain, began, record, at = Layout.evaluate, [], Trainer.write, at_step(monkeypatch)

    def evaluate(self: Layout, task: Any) -> dict[str, Any]:
        if at() == step and not began:
            began.append(time.monotonic())
            assert when == "during", "an evaluation was begun after the signal"
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        return plain(self, task)

    def tell(self: Trainer, line: dict[str, Any]) -> None:
        record(self, line)
        if when == "before" and line["step"] == step and "loss" in line and not began:
            began.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Layout, "evaluate", evaluate)
    monkeypatch.setattr(Trainer, "write", tell)
    with pytest.raises(Interrupted, match=f"after step {step}, state saved, its evaluation is still to be made"):
        headway.train(settings, tmp_path / "run")
    assert time.monotonic() - began[0] < 10
    state = Checkpoints(tmp_path / "run").state(step)
    assert state.unscored and not state.done and Checkpoints(tmp_path / "run").latest(pytest.fail) == step
    run = headway.train(settings, tmp_path / "run", resume=True)
    assert run.state.done and not run.state.unscored
    scores = [[each for each in one.metrics if "evaluation" in each] for one in (whole, run)]
    assert scores[0] == scores[1] and len(scores[0]) == 5
    assert same(final_weights(run.path), final_weights(whole.path))
    assert (run.state.best_step, run.state.best_value) == (whole.state.best_step, whole.state.best_value)


def evaluations(run: headway.Run) -> list[dict[str, Any]]:
    return [record for record in run.metrics if "evaluation" in record]


def stop_in_evaluation(self: Layout, task: Any) -> None:
    """In the place of `Layout.evaluate`."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


@pytest.mark.parametrize("every", [0, 3])
def test_the_evaluation_of_a_stage_without_steps_is_its_own(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """It stands at the last step of the stage before, which may have had its own evaluation there."""
    settings = load_settings(run_file, ["training.steps=0", f"pretraining.training.evaluate_every={every}"])
    whole = headway.train(settings, tmp_path / "whole")
    plain = Trainer.evaluate

    def evaluate(self: Trainer, stage: Stage, saved: bool) -> tuple[bool, bool]:
        with monkeypatch.context() as inner:
            if stage.final:
                inner.setattr(Layout, "evaluate", stop_in_evaluation)
            return plain(self, stage, saved)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", evaluate)
        for resume in (False, True):
            with pytest.raises(Interrupted, match="after step 6, state saved, its evaluation is still to be made"):
                headway.train(settings, tmp_path / "run", resume=resume)
    run = headway.train(settings, tmp_path / "run", resume=True)
    assert evaluations(run) == evaluations(whole) and len(evaluations(run)) == (3 if every else 1)


def test_an_owed_evaluation_that_is_left_again_spoils_nothing(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run was given up, and keeps its earlier checkpoints until it has a good one."""
    with monkeypatch.context() as patch:
        Spoilt(patch, {3})
        with pytest.raises(UserError, match="such a step changes no weight"):
            headway.train(run_file, tmp_path / "run")
    before = Checkpoints(tmp_path / "run").steps()
    fewer = ["training.steps=3"]
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "evaluate", stop_in_evaluation)
        with pytest.raises(Interrupted):
            headway.train(run_file, tmp_path / "run", fewer, resume=True, accept_changes=True)
    assert Checkpoints(tmp_path / "run").steps() == before and Checkpoints(tmp_path / "run").state(before[-1]).given_up
    assert headway.train(run_file, tmp_path / "run", fewer, resume=True).state.done


@pytest.mark.parametrize("owed", [False, True])
@pytest.mark.parametrize("step", [8, 11])
def test_who_watches_an_evaluation_may_fail_and_it_counts_once(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, owed: bool
) -> None:
    settings = load_settings(run_file, ["training.evaluate_every=2"])
    whole = headway.train(settings, tmp_path / "whole")

    def watch(record: dict[str, Any]) -> None:
        if "evaluation" in record and record["step"] == step:
            raise RuntimeError("seen enough")

    if owed:  # it was left before, and whoever watches fails again and again
        plain = Layout.evaluate
        with monkeypatch.context() as patch:
            at = at_step(patch)

            def evaluate(self: Layout, task: Any) -> Any:
                return (stop_in_evaluation if at() == step else plain)(self, task)

            patch.setattr(Layout, "evaluate", evaluate)
            with pytest.raises(Interrupted):
                headway.train(settings, tmp_path / "run")
    for attempt in range(3 if owed else 1):
        with pytest.raises(RuntimeError, match="seen enough"):
            headway.train(settings, tmp_path / "run", resume=owed or attempt > 0, watch=watch)
    run = headway.train(settings, tmp_path / "run", resume=True)
    assert evaluations(run) == evaluations(whole)
    seen = [(each.state.best_step, each.state.since_best, each.state.done) for each in (run, whole)]
    assert seen[0] == seen[1]


def test_a_profile_looks_at_steps_and_not_at_an_evaluation_that_was_owed(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {4: Said(), 5: Said()}
    for every, report in said.items():
        sets, out = [f"training.evaluate_every={every}"], tmp_path / f"run-{every}"
        with monkeypatch.context() as patch:
            patch.setattr(Layout, "evaluate", stop_in_evaluation)
            with pytest.raises(Interrupted):
                headway.train(run_file, out, sets)
        headway.train(run_file, out, sets, resume=True, profile=True, report=report)
    assert any("training, steps 5 to 5" in line for line in said[4].lines), said[4].lines
    assert any("no step is left to look at" in line for line in said[5].lines), said[5].lines


@pytest.mark.parametrize("step", [0, 3, 6, 9])
def test_getting_ready_is_left_at_once(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A step that is being compiled has changed nothing: what was there before it is saved."""
    settings = load_settings(run_file, [*LOGGED, "training.checkpoint_every=0"])
    whole = headway.train(settings, tmp_path / "whole")
    stage, begin = ("training", 6) if step >= 6 else ("pretraining", 0)

    def prepare(self: FirstThatWorks, number: int, undisturbed: Any) -> None:
        assert isinstance(self.engine, Plain)
        if self.engine.streams[0].name == stage and begin + number == step:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    with monkeypatch.context() as patch:
        patch.setattr(FirstThatWorks, "prepare", prepare)
        began = time.monotonic()
        words = f"after step {step}, state saved" if step else "before the first step"
        with pytest.raises(Interrupted, match=f"stopped {words}"):
            headway.train(settings, tmp_path / "run")
        assert time.monotonic() - began < 15
    assert Checkpoints(tmp_path / "run").latest(pytest.fail) == (step or None)
    run = headway.train(settings, tmp_path / "run", resume=True)
    assert same(final_weights(run.path), final_weights(whole.path))


@pytest.mark.parametrize("stream", ["terminal", "pipe"])
def test_what_is_said_to_nobody_goes_nowhere(stream: str) -> None:
    reading, writing = os.openpty() if stream == "terminal" else os.pipe()
    saved = os.dup(2)
    try:
        os.dup2(writing, 2)
        leave_closed_terminal()
        assert os.path.samestat(os.fstat(2), os.fstat(writing))  # somebody listens
        os.close(reading)
        handles = len(os.listdir("/proc/self/fd"))
        leave_closed_terminal()
        os.write(2, b"stopped\n")
        assert len(os.listdir("/proc/self/fd")) == handles
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(writing)


@pytest.mark.parametrize("live", [True, False])
def test_a_terminal_that_is_closed_saves_the_run(run_file: Path, live: bool) -> None:
    """The one that the command writes to is gone, and nothing can be said any more."""
    folder = run_file.parent
    ours, theirs = os.openpty()
    sets = ["--set", "training.steps=100000", "--set", "training.checkpoint_every=0", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "headway", "train", str(run_file), *sets],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        env={**os.environ, "TERM": "xterm" if live else "dumb", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    os.close(theirs)
    metrics = folder / "run" / "metrics.jsonl"
    shown: list[bytes] = []
    reader = threading.Thread(target=lambda: shown.append(read_until(ours, lambda: '"training"' in text_of(metrics))))
    reader.start()
    reader.join(60)
    os.close(ours)
    assert process.wait(60) == 129
    step = Checkpoints(folder / "run").latest(pytest.fail)
    assert step is not None and step > 6
    last = [json.loads(line)["step"] for line in metrics.read_text().splitlines()][-1]
    assert step >= last


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def read_until(handle: int, seen: Callable[[], bool]) -> bytes:
    """What is written to a terminal until something is seen elsewhere."""
    found = b""
    while not seen():
        if select.select([handle], [], [], 0.05)[0]:
            found += os.read(handle, 4096)
    return found


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[Any] = []

    def body() -> None:
        with interruptible() as stops:
            seen.append((stops.number, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [(0, before)]
