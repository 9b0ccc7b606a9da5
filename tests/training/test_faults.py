"""What can go wrong while a run trains: signals, losses that are no numbers, spikes, no memory, no disk, two owners,
a clock that is set back. Nothing is lost, and the message says what to do."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

import headway
from headway import a5
from headway.cli import run_command
from headway.configuration import load_settings
from headway.console import Lines
from headway.errors import Interrupted, Quit, RunError, UserError
from headway.files import Ownership, probe
from headway.training import engine
from headway.training.checkpoint import Checkpoints
from headway.training.distributed import Layout
from headway.training.engine import Outcome, Plain
from headway.training.engines import FirstThatWorks
from headway.training.guard import Spikes, Stopped, Stops, Unseen, interruptible, leave_closed_terminal
from headway.training.loop import Plan, Stage, Trainer
from headway.training.streams import Stream
from tests.training.test_checkpoint import OFTEN, Said, contents, in_writer
from tests.training.test_resume import StopAt, final_weights, same
from tests.training.torture import TIMES

CALL = [sys.executable, "-c", "import sys; from headway.cli import main; main()"]
LOGGED = ["training.log_every=1", "pretraining.training.log_every=1"]
NAN, INF = float("nan"), float("inf")
Captured = pytest.CaptureFixture[str]


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


# ---- signals


class SignalAt:
    """Sends this process a signal when a certain step is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int, step: int) -> None:
        plain = Trainer.record

        def record(self: Trainer, record: dict[str, Any]) -> None:
            plain(self, record)
            if record["step"] == step:
                os.kill(os.getpid(), number)

        monkeypatch.setattr(Trainer, "record", record)


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
    plain, began, record, at = Layout.evaluate, [], Trainer.record, at_step(monkeypatch)

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
    monkeypatch.setattr(Trainer, "record", tell)
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


# ---- losses and gradients that are no numbers


class Spoilt:
    """Makes the loss or the gradient of certain steps of the last stage something that is no number."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, steps: set[int], loss: float = NAN, gradient: float | None = None
    ) -> None:
        self.now, self.rows = False, []
        plain_step, plain_losses, plain_clip = Plain.step, Stream.losses, engine.clip_gradients

        def step(this: Plain, step: int, rate: float) -> Outcome:
            self.now = this.streams[0].name == "training" and step in steps
            return plain_step(this, step, rate)

        def losses(*arguments: Any) -> torch.Tensor:
            return plain_losses(*arguments) * (loss if self.now and gradient is None else 1.0)

        def clip(model: torch.nn.Module, most: float) -> torch.Tensor:
            if self.now and gradient is not None:
                next(model.parameters()).grad.view(-1)[0] = gradient
            return plain_clip(model, most)

        monkeypatch.setattr(Plain, "step", step)
        monkeypatch.setattr(Stream, "losses", losses)
        monkeypatch.setattr(engine, "clip_gradients", clip)


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
    import fcntl

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

    for name in ("headway.run.build_tokenizer", "headway.run.build_stages"):
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


def test_every_record_is_json_that_any_reader_takes(run_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """NaN and Infinity are no JSON; a bad step leaves no line."""
    Spoilt(monkeypatch, {0, 3, 4})
    run = headway.train(run_file, tmp_path / "run", [*OFTEN, "training.bad_steps=skip"])

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} in metrics.jsonl")

    for line in (run.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are carried out as on a GPU: nobody waits for one, a line is written while the next one is computed."""
    plan = Trainer.plan

    def made(self: Trainer, stage: Stage) -> Plan:
        made = plan(self, stage)
        made.at_hand = False
        return made

    monkeypatch.setattr(Trainer, "plan", made)


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
