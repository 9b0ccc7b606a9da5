"""What a user sees while something runs: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from headway.files import to_nowhere

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

BAR = range(8, 25)  # columns that a bar may have


class Progress:
    """Where a long piece of work stands. This one shows nothing."""

    def update(self, done: int, record: dict[str, Any]) -> None:
        pass


spent_aside = 0.0  # seconds that no progress counts
spent_between = 0.0  # seconds between steps, for something that comes now and then


def working_time() -> float:
    """A clock in seconds, which stands still inside `uncounted`."""
    return time.monotonic() - spent_aside


@contextmanager
def uncounted() -> Iterator[None]:
    """What happens inside is no part of the work whose progress is shown."""
    global spent_aside  # noqa: PLW0603 - one process shows one progress
    began = time.monotonic()
    try:
        yield
    finally:
        spent_aside += time.monotonic() - began


@contextmanager
def between_steps() -> Iterator[None]:
    """What happens inside comes now and then between the steps whose progress is shown: an evaluation."""
    global spent_between  # noqa: PLW0603 - one process shows one progress
    began = working_time()
    try:
        yield
    finally:
        spent_between += working_time() - began


class Estimate:
    """How long the rest of `total` will take: steps at the pace of the last half minute or of the last two updates, and
    with them as much between the steps as there was for each so far.

    Before the first update lies what is done once: reading, compiling. It counts only as long as nothing else is known,
    and not at all if the update says that less than a hundredth is done.
    """

    def __init__(self, total: int, done: int, window: float = 30.0) -> None:
        self.total, self.window = total, window
        self.began, self.between, self.first = working_time(), spent_between, done
        self.ended = self.began
        self.marks = deque([(self.began - spent_between, done)])
        self.updates = 0

    def update(self, done: int) -> None:
        self.ended = working_time()
        now = self.ended - spent_between
        if not self.updates:  # what came before it, such as an evaluation that was owed, says nothing of the rest
            self.between, self.first = spent_between, done
        if self.updates == 1:
            self.marks.popleft()
        self.updates += 1
        self.marks.append((now, done))
        while now - self.marks[1][0] >= self.window:
            self.marks.popleft()

    @property
    def done(self) -> int:
        return self.marks[-1][1]

    def words(self) -> str:
        """`2:03 left`, `in 4:06` when all is done, and nothing where no pace is known yet."""
        (before, first), (after, last) = self.marks[0], self.marks[-1]
        if last >= self.total:
            return f"in {clock(self.ended - self.began)}"
        if last <= first or (self.updates == 1 and 100 * (last - first) < self.total):
            return ""
        step, between = (after - before) / (last - first), (spent_between - self.between) / max(1, last - self.first)
        return f"{clock(max(0.0, step + between) * (self.total - last))} left"


class Reporter:
    """Says nothing: for use as a library."""

    def say(self, text: str) -> None:
        pass

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[Progress]:
        yield Progress()


class Lasting:
    """A stream that outlasts whoever reads it. Where its pipe or terminal is gone or its disk is full, what is written
    goes nowhere from then on, and the work goes on."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream: TextIO = stream or open(os.devnull, "w")  # noqa: SIM115 - where a program was started without any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except OSError:
            to_nowhere(self.stream.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError:
            to_nowhere(self.stream.fileno())


class Lines(Reporter):
    """One plain line for each thing said, and one every few seconds of progress."""

    def __init__(self, file: TextIO | None = None, seconds: float = 5.0) -> None:
        self.file = Lasting(file or sys.stderr or sys.stdout)
        self.seconds = seconds

    def say(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[Progress]:
        yield PlainProgress(self, name, total, done)


class PlainProgress(Progress):
    def __init__(self, lines: Lines, name: str, total: int, done: int) -> None:
        self.lines, self.name = lines, name
        self.estimate = Estimate(total, done)
        self.shown = -math.inf

    def update(self, done: int, record: dict[str, Any]) -> None:
        self.estimate.update(done)
        now, total = time.monotonic(), self.estimate.total
        if now - self.shown < self.lines.seconds and done < total:
            return
        self.shown = now
        parts = [f"{self.name}: step {done:,}/{total:,}", describe(record), self.estimate.words()]
        self.lines.say("  ".join(filter(None, parts)))


class Terminal(Reporter):
    """A live progress bar, by rich."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self.console = console or Console(file=cast(TextIO, Lasting(sys.stderr)), highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def progress(self, name: str, total: int, done: int = 0) -> Iterator[Progress]:
        from rich.live import Live

        shown = LiveProgress(name, total, done)
        with Live(shown, console=self.console, redirect_stdout=sys.stdout.isatty()):  # a pipe keeps what is its own
            yield shown


class LiveProgress(Progress):
    """Name, bar, steps, loss, rate, tokens a second and what is left: in one line, or in two where it is narrow."""

    def __init__(self, name: str, total: int, done: int) -> None:
        self.name = name
        self.estimate = Estimate(total, done)
        self.facts = ""

    def update(self, done: int, record: dict[str, Any]) -> None:
        self.estimate.update(done)
        self.facts = describe(record)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done, total = self.estimate.done, self.estimate.total
        steps, facts, left = f"{done:,}/{total:,}", self.facts, self.estimate.words()

        def room(*words: str) -> int:
            """Columns for a bar, between the name and these words."""
            return options.max_width - sum(len(word) + 1 for word in (self.name, *words) if word)

        one_line = room(steps, facts, left) >= BAR[0]
        words = (steps, facts, left) if one_line else (steps, left)
        bar = ProgressBar(max(1, total), done if total else 1, width=max(1, min(room(*words), BAR[-1])))
        row = Table.grid(padding=(0, 1))
        row.add_row(Text(self.name), bar, *(Text(word, no_wrap=True) for word in words if word))
        yield row
        if facts and not one_line:
            yield Text(f"  {facts}", no_wrap=True, overflow="ellipsis")


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
    return Terminal() if sys.stderr.isatty() and not is_dumb() else Lines()


def is_dumb() -> bool:
    """Whether the terminal can only go on, and not change what it has shown."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def numbers(record: dict[str, Any], group: str = "") -> dict[str, float]:
    """Every number in a record of metrics.jsonl by its name; one in a table is called table/name."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{group}{name}/")
        elif isinstance(value, float) or (type(value) is int and abs(value) < 10**300):
            found[f"{group}{name}"] = float(value)
    return found


def describe(record: dict[str, Any]) -> str:
    parts = []
    if "loss" in record:
        parts.append(f"loss {record['loss']:.4f}")
    if "learning_rate" in record:
        parts.append(f"rate {record['learning_rate']:.2e}")
    speed = record.get("useful_tokens_per_second", record.get("tokens_per_second"))
    if speed is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    return "  ".join(parts)


def scores(evaluation: dict[str, Any]) -> list[str]:
    """What an evaluation found, in words, the most telling first."""
    shown = []
    if "accuracy" in evaluation:
        counts = f" ({evaluation['correct']} of {evaluation['questions']})" if "correct" in evaluation else ""
        shown.append(f"accuracy {evaluation['accuracy']:.1%}{counts}")
    if "bleu" in evaluation:
        shown.append(f"BLEU {evaluation['bleu']:.1f}")
    if "chrf" in evaluation:
        shown.append(f"chrF {evaluation['chrf']:.1f}")
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
