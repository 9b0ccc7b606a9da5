"""The demonstration at a small size: it trains, compares, asks, and writes a page that needs no network."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from headway.console import Reporter
from headway.demo import run_demo
from headway.errors import Interrupted, RunError
from headway.files import Ownership
from headway.training.loop import Trainer

SMALL = [
    "model.width=16",
    "model.heads=2",
    "model.layers=1",
    "pretraining.training.steps=4",
    "training.steps=4",
    "pretraining.training.batch_size=8",
    "training.batch_size=8",
]


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    report = run_demo(out, 0, SMALL, Reporter())
    printed = capsys.readouterr().out
    for words in ("the commonest answer", "without pretraining", "with pretraining"):
        assert words in printed
    assert len(re.findall(r"^Where was .* born\?$", printed, re.M)) == 5
    page = report.read_text("utf-8")
    assert not re.search(r"(?:src|href)=|https?://|@import|<script", page)  # nothing is loaded from anywhere
    assert page.count("<polyline") == 3  # pretraining, and finetuning with and without it
    assert page.count('class="map"') == 2  # one layer of two heads
    assert (out / "world" / "wiki.txt").is_file()
    assert (out / "pretrained" / "run.toml").is_file()

    with pytest.raises(RunError, match="a finished demonstration stands there"):
        run_demo(out, 0, SMALL, Reporter())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("do not touch")
    with pytest.raises(RunError, match="exists and is no demonstration"):
        run_demo(tmp_path / "other", 0, SMALL, Reporter())
    assert (tmp_path / "other" / "mine.txt").read_text() == "do not touch"


def test_a_demo_that_another_process_runs_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    run_demo(out, 0, SMALL, Reporter()).unlink()
    with Ownership(out), pytest.raises(RunError, match="in use by process"):
        run_demo(out, 0, SMALL, Reporter())
    assert (out / "pretrained" / "run.toml").is_file()


def test_without_a_directory_a_finished_demo_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_demo(None, 0, SMALL, Reporter()) == Path("runs/demo/report.html")
    assert run_demo(None, 0, SMALL, Reporter()) == Path("runs/demo-2/report.html")


def stop_at_step(monkeypatch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    """Send a SIGINT when a run records this step."""
    plain = Trainer.write

    def record(self: Trainer, record: dict[str, Any]) -> None:
        plain(self, record)
        if (record["stage"], record["step"]) == (stage, step) and "loss" in record:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "write", record)


EVERY = ["pretraining.training.log_every=1", "training.log_every=1", *SMALL]


def weights_of(out: Path) -> dict[str, bytes]:
    """The last weights of both runs."""
    return {
        part: sorted((out / part / "checkpoints").glob("*/model.safetensors"))[-1].read_bytes()
        for part in ("from-scratch", "pretrained")
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a demonstration that nobody stopped."""
    out = tmp_path_factory.mktemp("undisturbed") / "demo"
    run_demo(out, 0, EVERY, Reporter())
    return weights_of(out)


def test_an_interrupted_demo_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, bytes]
) -> None:
    out = tmp_path / "demo"
    for stage, step in (("training", 2), ("pretraining", 3), ("training", 6)):
        with monkeypatch.context() as patch, pytest.raises(Interrupted, match=f"stopped after step {step}"):
            stop_at_step(patch, stage, step)
            run_demo(out, 0, EVERY, Reporter())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("headway.demo.report_page", lambda *all: signal.raise_signal(signal.SIGINT))
        run_demo(out, 0, EVERY, Reporter())
    (out / ".report.html.123.tmp").touch()  # as a process leaves it that is killed
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", lambda *all: pytest.fail("a step was made again"))
        assert run_demo(out, 0, EVERY, Reporter()).is_file()
    assert not list(out.glob(".*.tmp"))
    steps = [json.loads(line)["step"] for line in (out / "pretrained" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 8]  # the last one is the evaluation
    assert weights_of(out) == undisturbed


@pytest.mark.parametrize("other", ["seed", "settings", "mark", "cleared in part"])
def test_a_demo_of_other_settings_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, bytes], other: str
) -> None:
    out = tmp_path / "demo"
    sets = [*EVERY, "training.learning_rate=0.5"] if other == "settings" else EVERY
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        stop_at_step(patch, "pretraining", 2)
        run_demo(out, 1 if other == "seed" else 0, sets, Reporter())
    if other == "mark":  # of a version that told less
        (out / "demo.json").write_text('{"recipe": "world/demo"}')
        (out / "pretrained" / "tokenizer.json").write_text("of that version")
    elif other == "cleared in part":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("headway.demo.shutil.rmtree", lambda *all, **more: signal.raise_signal(signal.SIGINT))
            run_demo(out, 5, EVERY, Reporter())
        (out / "from-scratch" / "run.toml").unlink()
    run_demo(out, 0, EVERY, Reporter())
    assert weights_of(out) == undisturbed


def test_a_demo_that_is_finished_while_another_waits_for_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo"
    plain = Ownership.take

    def take(self: Ownership) -> bool:
        (out / "report.html").write_text("by the one who had it")
        return plain(self)

    monkeypatch.setattr(Ownership, "take", take)
    with pytest.raises(RunError, match="a finished demonstration stands there"):
        run_demo(out, 0, SMALL, Reporter())
    assert {path.name for path in out.iterdir()} == {".lock", "report.html"}
