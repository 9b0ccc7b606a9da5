"""What a user sees while something runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


class Progress:
    """Where a long piece of work stands. This one shows nothing."""

    def update(self, done: int, record: dict[str, Any]) -> None:
        pass


class Reporter:
    """Says nothing: for use as a library."""

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[Progress]:
        yield Progress()


class Lines(Reporter):
    """One plain line for each thing said, and one every few seconds of progress."""

    def __init__(self, file: TextIO | None = None, seconds: float = 5.0) -> None:
        self.file = file or sys.stderr
        self.seconds = seconds

    def say(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[Progress]:
        yield PlainProgress(self, name, total, done)


class PlainProgress(Progress):
    def __init__(self, lines: Lines, name: str, total: int, done: int) -> None:
        self.lines, self.name, self.total, self.first = lines, name, total, done
        self.began = time.monotonic()
        self.shown = -float("inf")

    def update(self, done: int, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self.shown < self.lines.seconds and done < self.total:
            return
        self.shown = now
        left = (now - self.began) / max(1, done - self.first) * (self.total - done)
        self.lines.say(f"{self.name}: step {done:,}/{self.total:,}  {describe(record)}  {clock(left)} left")


class Terminal(Reporter):
    """A live progress bar, by rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[Progress]:
        from rich import progress as bars

        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[facts]}"),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=self.console) as bar:
            task = bar.add_task(name, total=total, completed=done, facts="")
            yield LiveProgress(bar, task)


class LiveProgress(Progress):
    def __init__(self, bar: Any, task: Any) -> None:
        self.bar, self.task = bar, task

    def update(self, done: int, record: dict[str, Any]) -> None:
        self.bar.update(self.task, completed=done, facts=describe(record))


def program() -> str:
    """How to call this program again from here: by its name, or by its path where it is not on the shell's."""
    called = sys.argv[0]
    return called if Path(called).name == "headway" and shutil.which("headway") is None else "headway"


def show_anything() -> None:
    """A character that this terminal cannot show becomes an escape instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def reporter() -> Reporter:
    """The one that fits where the program runs."""
    return Terminal() if sys.stderr.isatty() else Lines()


def describe(record: dict[str, Any]) -> str:
    parts = []
    if "loss" in record:
        parts.append(f"loss {record['loss']:.4f}")
    if "learning_rate" in record:
        parts.append(f"rate {record['learning_rate']:.2e}")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


def scores(evaluation: dict[str, Any]) -> list[str]:
    """What an evaluation found, in words, the most telling first."""
    shown = []
    if "accuracy" in evaluation:
        counts = f" ({evaluation['correct']} of {evaluation['questions']})" if "correct" in evaluation else ""
        shown.append(f"accuracy {evaluation['accuracy']:.1%}{counts}")
    if "loss" in evaluation:
        shown.append(f"loss {evaluation['loss']:.4f}")
    if "perplexity" in evaluation:
        shown.append(f"perplexity {evaluation['perplexity']:.2f}")
    if "bits_per_byte" in evaluation:
        shown.append(f"{evaluation['bits_per_byte']:.3f} bits a byte")
    return shown


def clock(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
