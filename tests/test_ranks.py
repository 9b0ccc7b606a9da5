"""Which processes belong together, by what torchrun tells them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headway
from headway import ranks
from headway.errors import RunError

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
