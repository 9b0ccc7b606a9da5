"""Which processes belong together, by what torchrun tells them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import headway
from headway import making, ranks
from headway.cli import run_command
from headway.errors import Interrupted, RunError, UserError

proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not tell when a process began")


def test_a_job_with_a_name_is_known_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert ranks.job() == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "notes-1")
    assert ranks.job() == "notes-1"


@proc
def test_a_job_without_a_name_is_another_when_its_process_number_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert ranks.job() == ranks.job()
    before = ranks.job()
    monkeypatch.setattr(ranks, "start_of", lambda process: "later")
    assert ranks.job() != before


@proc
def test_the_start_of_a_process_is_counted_in_ticks() -> None:
    tick = 1 / os.sysconf("SC_CLK_TCK")
    children = []
    for _ in range(2):
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        time.sleep(2 * tick)
    try:
        first, second = (int(ranks.start_of(child.pid)) for child in children)
        assert int(ranks.start_of(os.getpid())) <= first < second <= time.clock_gettime(time.CLOCK_BOOTTIME) / tick
    finally:
        for child in children:
            child.communicate(b"\n")
    assert ranks.start_of(children[0].pid) == ""  # it is no more


def test_a_finished_run_belongs_to_no_job(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun starts under the name of a job that is done does not take its run for its own."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "notes-1")
    sets = ["pretraining.training.steps=1", "training.steps=1", "model.layers=1"]
    signed = []
    run = headway.train(
        run_file, tmp_path / "run", sets, watch=lambda record: signed.append((tmp_path / "run" / ".job").read_text())
    )
    assert run.state.done and set(signed) == {"notes-1"}  # while it trained
    with pytest.raises(RunError, match="exists already"):
        headway.train(run_file, tmp_path / "run", sets)


@pytest.mark.parametrize("place", ["settle", "Tokenizer.save", "begin", "sign"])
@pytest.mark.parametrize("named", [True, False])
def test_a_job_whose_first_process_dies_as_its_run_begins_goes_on_with_it(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, place: str, named: bool
) -> None:
    """Wherever it dies: torchrun starts it again with the same command."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "notes-1")
    monkeypatch.chdir(run_file.parent)
    sets = ["pretraining.training.steps=1", "training.steps=1", "model.layers=1"]
    where = making if place in ("settle", "begin", "sign") else type(headway.text.Characters.train(["a"])).__mro__[1]
    name = place.rpartition(".")[2]
    plain = getattr(where, name)

    class Killed(BaseException):
        pass

    def killed(*given: object) -> None:
        if place != "sign":
            plain(*given)
        raise Killed

    out = "runs/tiny" if named else None
    with monkeypatch.context() as patch:
        patch.setattr(where, name, killed)
        with pytest.raises(Killed):
            headway.train("tiny.toml", out, sets)
    if place == "sign" and not named:
        return  # nothing says that it was this job: the next free place is taken
    run = headway.train("tiny.toml", out, sets)
    assert run.state.done and run.path == Path("runs/tiny") and not Path("runs/tiny-2").exists()


def test_the_group_outlives_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """To take it apart would wait for its threads, and these for what the error holds: processes hung so."""
    for key, value in WHOLE.items():
        monkeypatch.setenv(key, value)
    store, taken = torch.distributed.HashStore(), []
    monkeypatch.setattr(ranks.dist, "rendezvous", lambda url: iter([(store, 0, 2)]))
    monkeypatch.setattr(ranks, "fresh", lambda store, ranks: store)
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda *given, **options: None)
    monkeypatch.setattr(ranks.dist, "destroy_process_group", lambda: taken.append("apart"))
    with pytest.raises(UserError, match="the first to fail"), ranks.joined():
        raise UserError("the first to fail")
    with pytest.raises(SystemExit) as left, ranks.joined():
        raise UserError("the second")
    assert left.value.code == 2 and not taken
    with ranks.joined():
        pass
    assert taken == ["apart"]


WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"RANK": "a"}, "RANK=a: must be a whole number"),
        ({"RANK": "-1"}, "RANK=-1: must be a whole number"),
        ({"RANK": "2"}, "RANK=2: must be less than WORLD_SIZE (2)"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two: must be a whole number"),
        ({"LOCAL_RANK": "0.5"}, "LOCAL_RANK=0.5: must be a whole number"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT: is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http: must be a whole number"),
    ],
)
def test_a_variable_that_cannot_be_is_named(
    change: dict[str, str],
    shown: str,
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {**WHOLE, **change}.items():
        monkeypatch.setenv(name, value)
    assert run_command(["train", str(run_file), "--out", str(run_file.parent / "run")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"headway: {shown}") and "torchrun" in said


@pytest.mark.parametrize(
    ("error", "code"),
    [(UserError("no"), 2), (ValueError("no"), 1), (Interrupted("stopped"), 130), (KeyboardInterrupt(), 1)],
)
def test_all_leave_with_the_code_of_the_one_that_leads(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[object] = []

    def broadcast(told: list[object], src: int) -> None:
        sent.extend(told if not sent else [])
        told[:] = sent

    def fails() -> None:
        raise error

    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    with pytest.raises(type(error)):
        ranks.Ranks(0, 2).led(fails)
    with pytest.raises(SystemExit) as left:
        ranks.Ranks(1, 2).led(fails)
    assert left.value.code == code
    sent.clear()
    assert ranks.Ranks(0, 2).led(lambda: 7) == 7 == ranks.Ranks(1, 2).led(fails)  # a result is no code


def test_one_process_of_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with ranks.joined() as found:
        assert found == ranks.ALONE


def test_a_job_goes_back_once_for_each_step_it_is_told(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torchrun starts its processes again with the same command: what was trained since is not thrown away."""
    sets = ["training.checkpoint_every=1", "training.keep=9", "pretraining.training.keep=9"]
    out = headway.train(run_file, tmp_path / "run", sets).path
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "notes-1")

    class Killed(BaseException):
        pass

    def begun_with(back_to: int, stop: int) -> list[int]:
        seen: list[int] = []

        def watch(record: dict) -> None:
            seen.append(record["step"])
            if record["step"] == stop:
                raise Killed

        with pytest.raises(Killed):
            headway.train(out, out, resume=True, back_to=back_to, watch=watch)
        return seen

    assert begun_with(7, 9)[0] == 8
    assert begun_with(7, 11)[0] == 9  # started again, after the checkpoint of step 8
    assert begun_with(8, 10)[0] == 9  # another command of the same name


def test_what_another_process_puts_there_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    threading.Timer(0.2, store.set, ("life", "a name")).start()
    assert ranks.waited_for(store, "life") == "a name"
    monkeypatch.setattr(ranks, "PATIENCE", 0.1)
    with pytest.raises(RunError, match="not all processes"):
        ranks.waited_for(store, "never")
    monkeypatch.setattr(ranks, "PATIENCE", 60)
    alarm = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        alarm.start()
        ranks.waited_for(store, "never")
