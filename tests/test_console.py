"""The progress of a long piece of work: what stands in it, on a terminal of any width and where there is none."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import headway
from headway import console
from headway.console import (
    Estimate,
    Lasting,
    Lines,
    LiveProgress,
    Terminal,
    between_steps,
    describe,
    numbers,
    reporter,
    uncounted,
)

RECORD = {"stage": "training", "step": 1240, "loss": 2.34567, "learning_rate": 6e-4, "tokens_per_second": 1234567.8}
FACTS = ("loss 2.3457", "rate 6.00e-04", "1,234,568 tokens/s")


class Clock:
    """A monotonic clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(console.time, "monotonic", clock.monotonic)
    yield clock


def fake_terminal(width: int) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    return Terminal(Console(file=file, force_terminal=True, width=width, color_system=None, highlight=False)), file


def frames(shown: str) -> list[list[str]]:
    """The lines of each picture that was drawn over the one before."""
    shown = re.sub(r"\x1b\[\?25[lh]", "", shown)
    drawn = re.split(r"\r(?:\x1b\[2K(?:\x1b\[1A)?)+", shown)
    return [[line.rstrip() for line in frame.split("\n") if line.strip()] for frame in drawn]


# ---- how long it will take


@pytest.mark.parametrize("seconds", [0.01, 2.0, 45.0])  # also where updates are further apart than the window
def test_the_rest_takes_as_long_as_the_pace_says(clock: Clock, seconds: float) -> None:
    estimate = Estimate(total=500, done=100)  # resumed: the first hundred took no time here
    assert estimate.words() == ""
    for done in range(110, 210, 10):
        clock.now += 10 * seconds
        estimate.update(done)
    assert estimate.words() == f"{console.clock(300 * seconds)} left"


def test_what_is_done_once_at_the_start_is_not_taken_for_the_pace(clock: Clock) -> None:
    estimate = Estimate(total=6000, done=0)
    clock.now += 30  # compiling, and ten steps
    estimate.update(10)
    assert estimate.words() == ""  # not five hours
    clock.now += 5
    estimate.update(110)
    assert estimate.words() == f"{console.clock(5890 * 0.05)} left"


@pytest.mark.parametrize("before", [0, 5000])  # of a run that is resumed, what was done before says nothing
def test_the_first_update_says_how_long_if_it_says_of_enough(clock: Clock, before: int) -> None:
    for step, words in ((99, ""), (100, f"{console.clock((9900 - before) * 0.5)} left")):
        estimate = Estimate(total=10_000, done=before)
        clock.now += 50.0
        estimate.update(before + step)
        assert estimate.words() == words


def test_a_change_of_pace_counts_after_the_window(clock: Clock) -> None:
    estimate = Estimate(total=100_000, done=0, window=30.0)
    for done in (10, 20):
        clock.now += 600
        estimate.update(done)
    for done in range(30, 1020, 10):
        clock.now += 1.0
        estimate.update(done)
    assert estimate.words() == f"{console.clock((100_000 - 1010) / 10)} left"


def test_what_is_uncounted_changes_no_estimate(clock: Clock) -> None:
    estimate = Estimate(total=30, done=0)
    for done in (10, 20, 30):
        clock.now += 5
        with uncounted():
            clock.now += 1000
        estimate.update(done)
        assert estimate.words() == ("in 0:15" if done == 30 else f"0:{(30 - done) // 2:02d} left")


def test_what_comes_now_and_then_counts_for_all_steps_that_are_left(clock: Clock) -> None:
    """Steps of a second, and after every twentieth an evaluation of 50, which no half a minute shows as it is."""
    estimate, wrong = Estimate(total=200, done=0), []
    for done in range(1, 201):
        clock.now += 1.0
        if done % 10 == 0:
            estimate.update(done)
            if 20 < done < 200:
                minutes, seconds = estimate.words().removesuffix(" left").split(":")
                wrong.append((60 * int(minutes) + int(seconds)) / (200 - done + 50 * len(range(done // 20, 10))))
        if done % 20 == 0:
            with between_steps():
                clock.now += 50.0
    assert all(0.5 < share < 1.5 for share in wrong), wrong
    assert estimate.words() == f"in {console.clock(200 + 9 * 50)}"  # the last one follows


def test_what_comes_before_the_first_step_says_nothing_of_the_rest(clock: Clock) -> None:
    """An evaluation that was broken off, and is made when a run is resumed."""
    estimate = Estimate(total=10_000, done=5000)
    with between_steps():
        clock.now += 60
    for done in range(5010, 5060, 10):
        clock.now += 1.0
        estimate.update(done)
    assert estimate.words() == f"{console.clock(4950 * 0.1)} left"


def test_what_is_done_says_how_long_it_took_and_a_clock_that_goes_back_does_no_harm(clock: Clock) -> None:
    estimate = Estimate(total=10, done=0)
    clock.now -= 50
    estimate.update(5)
    assert estimate.words() == "0:00 left"
    clock.now += 125
    estimate.update(10)
    assert estimate.words() == "in 1:15"


# ---- plain lines


def test_a_plain_line_has_step_loss_rate_speed_and_time_left(clock: Clock) -> None:
    file = io.StringIO()
    with Lines(file, seconds=5.0).progress("training", 300, 100) as progress:
        for done in range(110, 310, 10):
            clock.now += 2.0
            progress.update(done, RECORD)
    lines = file.getvalue().splitlines()
    assert [int(re.search(r"step (\d+)/300", line)[1]) for line in lines] == [110, 140, 170, 200, 230, 260, 290, 300]
    assert lines[0] == "training: step 110/300  loss 2.3457  rate 6.00e-04  1,234,568 tokens/s  0:38 left"
    assert lines[-1].endswith("tokens/s  in 0:40")


@pytest.mark.parametrize("kind", ["lines", "live"])
def test_a_terminal_that_goes_away_stops_no_work(kind: str) -> None:
    """As for a program in the background, which is not told when its terminal is closed."""
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="utf-8") as file:
        stream = Lasting(file)
        shown: Any = Lines(file) if kind == "lines" else Terminal(Console(file=stream, force_terminal=True, width=80))
        with shown.progress("training", 10) as progress:
            shown.say("before")
            os.close(ours)
            for done in range(1, 11):
                shown.say(f"step {done}")
                progress.update(done, RECORD)


def test_a_full_disk_for_words_stops_no_work() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        lines = Lines(full)
        for _ in range(3):
            lines.say("x" * 10_000)


def test_a_record_without_numbers_leaves_no_holes(clock: Clock) -> None:
    file = io.StringIO()
    with Lines(file).progress("sampling, MB", 4) as progress:
        progress.update(0, {})
        clock.now += 8
        progress.update(2, {"tokens_per_second": 10.0})
    assert file.getvalue().splitlines() == [
        "sampling, MB: step 0/4",
        "sampling, MB: step 2/4  10 tokens/s  0:08 left",
    ]


# ---- a terminal


@pytest.mark.parametrize("width", [*range(50, 130, 5), 200])
def test_the_live_line_shows_everything_at_any_width(clock: Clock, width: int) -> None:
    terminal, file = fake_terminal(width)
    with terminal.progress("pretraining", 15_000, 1_200) as progress:
        for done in (1_220, 1_240):
            clock.now += 2.0
            progress.update(done, RECORD)
    last = frames(file.getvalue())[-1]
    for fact in ("pretraining", "1,240/15,000", *FACTS, "22:56 left"):
        assert sum(fact in line for line in last) == 1, (fact, last)
    assert all(len(line) <= width for line in last)
    assert any("━" in line or "╸" in line for line in last)
    assert len(last) <= 2


def test_the_bar_grows_with_the_work() -> None:
    def bar(done: int) -> int:
        """Half characters of the bar in its first colour."""
        shown = LiveProgress("training", 100, 0)
        shown.update(done, RECORD)
        console = Console(file=io.StringIO(), width=120, color_system="truecolor")
        drawn = [part for line in console.render_lines(shown) for part in line if set(part.text) & set("━╸")]
        return sum(2 * part.text.count("━") + part.text.count("╸") for part in drawn if part.style == drawn[0].style)

    assert bar(25) < bar(50) < bar(75) < bar(100) == 48


def test_what_is_said_meanwhile_stands_above_the_bar() -> None:
    terminal, file = fake_terminal(100)
    with terminal.progress("training", 10) as progress:
        progress.update(5, RECORD)
        terminal.say("training: step 5: dev accuracy [bold]50%")
        progress.update(10, RECORD)
    shown = file.getvalue()
    assert shown.index("dev accuracy [bold]50%") < shown.rindex("10/10")
    assert frames(shown)[-1][0].startswith("training") and len(frames(shown)[-1]) == 1


def test_standard_output_that_is_no_terminal_stays_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, file = fake_terminal(100)
    with terminal.progress("training", 10):
        print("for the pipe")
    assert capsys.readouterr().out == "for the pipe\n" and "pipe" not in file.getvalue()


@pytest.mark.parametrize("total", [0, 1])
def test_little_or_nothing_to_do_is_shown_too(total: int) -> None:
    terminal, file = fake_terminal(100)
    with terminal.progress("sampling, MB", total) as progress:
        progress.update(total, {})
    assert f"{total}/{total} in 0:00" in frames(file.getvalue())[-1][0]


@pytest.mark.parametrize("width", [60, 120])
def test_training_shows_its_loss_rate_speed_and_time(run_file: Path, width: int) -> None:
    terminal, file = fake_terminal(width)
    headway.train(run_file, run_file.parent / "run", ["training.steps=8"], report=terminal)
    number, time = r"[\d.]+", r"\d+:\d\d"
    for stage, steps in (("pretraining", 6), ("training", 8)):
        facts = rf"loss {number} +rate {number}e-\d\d +[\d,]+ tokens/s"
        count = f"{steps}/{steps}"
        wide, narrow = rf"{stage} ━+ {count} +{facts} in {time}", rf"{stage} ━+ {count} +in {time}\n  {facts}"
        assert re.search(wide if width > 100 else narrow, file.getvalue().replace("\r", "")), file.getvalue()


@pytest.mark.parametrize(
    ("is_terminal", "kind", "expected"),
    [(True, "xterm-256color", Terminal), (True, "dumb", Lines), (False, "xterm-256color", Lines)],
)
def test_the_reporter_fits_where_the_program_runs(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, kind: str, expected: type
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", kind)
    assert type(reporter()) is expected


# ---- records


def test_every_number_of_a_record_has_a_name() -> None:
    record: dict[str, Any] = {
        "stage": "training",
        "step": 3,
        "loss": math.nan,
        "done": True,
        "nothing": None,
        "losses": {"facts": 1, "deep": {"er": 2.5}},
        "evaluation": {"accuracy": 0.5, "predictions": ["a"]},
        "huge": 10**400,
    }
    found = numbers(record)
    assert math.isnan(found.pop("loss"))
    assert found == {"step": 3.0, "losses/facts": 1.0, "losses/deep/er": 2.5, "evaluation/accuracy": 0.5}


def test_a_record_is_described_by_what_it_has() -> None:
    assert describe(RECORD) == "  ".join(FACTS)
    assert describe({"loss": math.nan}) == "loss nan"
    assert describe({}) == ""
