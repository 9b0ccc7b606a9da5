"""The demonstration at a small size: it trains, compares, asks, and writes a page that needs no network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headway.console import Reporter
from headway.demo import run_demo
from headway.errors import RunError

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
    report.unlink()
    run_demo(out, 0, SMALL, Reporter())  # takes the place of one that was not finished
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("do not touch")
    with pytest.raises(RunError, match="exists and is no demonstration"):
        run_demo(tmp_path / "other", 0, SMALL, Reporter())
    assert (tmp_path / "other" / "mine.txt").read_text() == "do not touch"


def test_a_demo_that_another_process_runs_is_left_alone(tmp_path: Path) -> None:
    from headway.files import Ownership

    out = tmp_path / "demo"
    run_demo(out, 0, SMALL, Reporter()).unlink()
    with Ownership(out), pytest.raises(RunError, match="in use by process"):
        run_demo(out, 0, SMALL, Reporter())
    assert (out / "pretrained" / "run.toml").is_file()


def test_without_a_directory_a_finished_demo_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_demo(None, 0, SMALL, Reporter()) == Path("runs/demo/report.html")
    assert run_demo(None, 0, SMALL, Reporter()) == Path("runs/demo-2/report.html")
