"""What `headway watch` does: the curves of runs in the terminal, live while they train.

Only files are read, and without torch: metrics.jsonl, run.toml, the newest checkpoint's state.json, and the lock that
says whether somebody trains there. A run may go on, be resumed or be removed meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from headway.console import clock, describe, is_dumb, numbers, program, scores
from headway.errors import RunError
from headway.files import fcntl
from headway.finding import not_a_run
from headway.report.terminal import (
    LEAST_HEIGHT,
    Line,
    Panel,
    Points,
    Row,
    Span,
    arrange,
    can_show,
    fold,
    mark,
    plain_text,
    styled_text,
)
from headway.settings import read_toml

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PIECE = 1 << 20  # bytes of records read at once
INTERVAL = 1.0  # seconds between two pictures
SILENT = 60.0  # seconds without a record after which a live run is called silent, where its records come faster
LONG = 1e9  # seconds that no run trains
UNKNOWN_SIZE = (100, 40)  # columns and lines of a picture for no terminal
STYLES = {"running": "bold green", "finished": "bold", "stopped": "bold yellow", "dead": "bold red"}


# ---- reading


@dataclass(slots=True)
class Entry:
    """A line of metrics.jsonl: its numbers by name, such as loss, losses/facts or evaluation/accuracy."""

    stage: str
    step: int
    values: dict[str, float]

    @property
    def scores(self) -> dict[str, float]:
        """What an evaluation found."""
        prefix = "evaluation/"
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}

    @property
    def place(self) -> tuple[int, bool]:
        """A step's evaluation comes after its losses."""
        return self.step, "loss" not in self.values


def entry(line: bytes) -> Entry | None:
    """The record in a line; None where it is cut off, damaged or of no step."""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is not int or not 0 <= step < 1 << 53:
            return None
        values = {printable(name): value for name, value in numbers(record).items()}
        return Entry(printable(str(record.get("stage", ""))), step, values)
    except (ValueError, RecursionError):
        return None


@lru_cache
def printable(text: str) -> str:
    """Without what would move a terminal's cursor. The same text is one object, however many records it is in."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


class Tail:
    """The entries of a growing metrics.jsonl, read piece by piece.

    A last line that is not whole yet is left for the next time. A file that was written anew is read anew. A run that
    was resumed at an earlier step overwrites what it had after it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[Entry] = []
        self.names: set[str] = set()  # of the numbers in the entries
        self.file = self.offset = 0
        self.changed = 0.0  # when something was last written

    def read(self) -> None:
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self.file or status.st_size < self.offset:
                    self.file, self.offset, self.entries = status.st_ino, 0, []
                self.changed = status.st_mtime
                file.seek(self.offset)
                begun: list[bytes] = []  # of a line
                while piece := file.read(PIECE):
                    end, *others = piece.split(b"\n")
                    begun.append(end)
                    if others:
                        *whole, rest = others
                        for line in (b"".join(begun), *whole):
                            self.take(line)
                        begun = [rest]
                self.take_last(b"".join(begun))
        except FileNotFoundError:
            self.file, self.offset, self.entries = 0, 0, []
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({error.strerror}); ask its owner for leave") from None

    def take(self, line: bytes) -> None:
        self.add(entry(line))
        self.offset += len(line) + 1

    def take_last(self, line: bytes) -> None:
        last = entry(line)  # a piece of a record is no JSON, so what can be read is whole
        self.add(last)
        self.offset += len(line) if last else 0

    def add(self, new: Entry | None) -> None:
        if new is None:
            return
        while self.entries and self.entries[-1].place >= new.place:
            self.entries.pop()
        self.entries.append(new)
        self.names |= new.values.keys()


class Lock:
    """Who holds a run directory, asked without getting into the way of whoever wants to.

    A shared lock is tried where the file names an owner, and given back at once. One found dead is not asked again
    until the file changes, so that a run that is resumed meanwhile does not find the lock taken.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / ".lock"
        self.found_free = 0

    def look(self) -> tuple[str, bool]:
        """(the owner that the file names, empty after one that left in order; whether it holds the lock)."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                owner, changed = printable(file.read(200).strip()), os.fstat(file.fileno()).st_mtime_ns
                if owner and changed != self.found_free and fcntl is not None:
                    with suppress(OSError):  # somebody has it; or there are no locks here, and the file is believed
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        self.found_free = changed
                return owner, bool(owner) and changed != self.found_free
        except OSError:
            return "", False


@dataclass
class Stage:
    """Its steps are those after `begin` up to `end`."""

    name: str
    begin: int
    end: int


def read_stages(path: Path) -> list[Stage]:
    """The stages that a run file plans; none where there is no run file."""
    if not path.is_file():
        return []
    tables = read_toml(path)
    stages: list[Stage] = []
    begin = 0
    for name, place in (("pretraining", ("pretraining", "training")), ("training", ("training",))):
        table: Any = tables
        for key in place:
            table = table.get(key) if isinstance(table, dict) else None
        steps = table.get("steps") if isinstance(table, dict) else None
        if type(steps) is int and steps > 0:
            stages.append(Stage(name, begin, begin + steps))
            begin += steps
    return stages


def read_state(directory: Path) -> tuple[dict[str, Any], float]:
    """What the newest checkpoint says of the run, and when it was written; nothing where there is none."""
    there = (directory / "checkpoints").glob("step-*/manifest.json")
    steps = {int(number[1]): path for path in there if (number := re.fullmatch(r"step-(\d{8,})", path.parent.name))}
    for _, manifest in sorted(steps.items(), reverse=True):
        try:
            state = json.loads((manifest.parent / "state.json").read_text("utf-8"))
            if isinstance(state, dict):
                return state, manifest.stat().st_mtime
        except (OSError, ValueError):  # damaged, or let go of at this moment
            continue
    return {}, 0.0


@dataclass
class Watched:
    """A run directory as it stands on disk; `look` brings it up to date."""

    path: Path
    stages: list[Stage] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    saved: float = 0.0  # when the newest checkpoint was written
    owner: str = ""
    held: bool = False

    def __post_init__(self) -> None:
        self.tail = Tail(self.path / "metrics.jsonl")
        self.lock = Lock(self.path)
        if not self.path.is_dir():
            raise not_a_run(self.path)
        self.look()

    def look(self) -> None:
        if not (self.path / "run.toml").is_file() and not self.tail.path.is_file():
            raise not_a_run(self.path)
        self.owner, self.held = self.lock.look()  # first: what a run writes last is then read after it has left
        self.stages = read_stages(self.path / "run.toml")
        self.state, self.saved = read_state(self.path)
        self.tail.read()

    @property
    def entries(self) -> list[Entry]:
        return self.tail.entries

    @property
    def status(self) -> str:
        if self.held:
            return "running"
        if self.state.get("done"):
            return "finished"
        return "dead" if self.owner else "stopped"

    @property
    def last(self) -> Entry | None:
        """The last entry of training."""
        return next((each for each in reversed(self.entries) if "loss" in each.values), None)

    def curve(self, name: str, stage: str | None = None, latest: int = 0) -> Points:
        """The values of a number by step, in all entries or among the latest."""
        return [
            (each.step, each.values[name])
            for each in self.entries[-latest:]
            if name in each.values and (stage is None or each.stage == stage)
        ]

    def metric(self) -> str:
        """The score that evaluations go by: the one that the checkpoint calls the best, else the most telling."""
        step, value = self.state.get("best_step"), self.state.get("best_value")
        scored = [each for each in self.entries if "loss" not in each.values and each.scores]
        found = next((each.scores for each in scored if each.step == step), scored[-1].scores if scored else {})
        names = [name for name, score in found.items() if score == value] or list(found)
        return next((name for name in ("accuracy", "loss", *names) if name in names), "")

    @property
    def stage(self) -> Stage | None:
        """The stage that the last entry belongs to, where the run file tells."""
        step = self.last.step if self.last else 0
        return next((each for each in self.stages if each.begin < step <= each.end), None)

    def pace(self) -> float | None:
        """Seconds of training a step, lately and in this stage; None where too little is known."""
        begin = self.stage.begin if self.stage else 0
        marks = [(0, 0.0), *(each for each in self.curve("seconds", latest=40) if each[0] > 0)]
        marks = [(step, seconds) for step, seconds in marks if step >= begin and 0 <= seconds < LONG]
        if len(marks) < 2:
            return None
        (first, before), (last, after) = marks[max(0, len(marks) - 20)], marks[-1]
        return max(0.0, after - before) / (last - first)


# ---- words


def facts(run: Watched, brief: bool) -> Iterator[Span]:
    """What to know of a run, the most important first."""
    status, last, now = run.status, run.last, time.time()
    who = f" ({run.owner})" if run.owner and status in ("running", "dead") and not brief else ""
    yield f"{status}{who}", STYLES[status]
    if last is None:
        yield "nothing recorded yet", ""
    else:
        yield progress(run, last), ""
        yield from time_facts(run, last, now)
        yield from loss_facts(run, last, brief)
    step, value = run.state.get("best_step"), run.state.get("best_value")
    metric = run.metric()
    if type(step) is int and isinstance(value, int | float) and metric:
        of = " of the run" if run.stage is not None and run.stage.begin else ""
        yield f"best dev {score(metric, value)} at step {step:,}{of}", ""
    if type(run.state.get("step")) is int and not brief:
        age = f" {clock(max(0.0, now - run.saved))} ago" if status == "running" else ""
        yield f"last checkpoint: step {run.state['step']:,}{age}", ""
    if status in ("stopped", "dead") and not brief:
        yield f"go on with: {program()} train {quote(str(run.path))} --resume", ""


def progress(run: Watched, last: Entry) -> str:
    stage = run.stage
    if stage is None:
        return f"{last.stage or 'training'}: step {last.step:,}"
    done, total = last.step - stage.begin, stage.end - stage.begin
    return f"{stage.name}: step {done:,} of {total:,} ({done / total:.0%})"


def time_facts(run: Watched, last: Entry, now: float) -> Iterator[Span]:
    stage, pace = run.stage, run.pace()
    trained = last.values.get("seconds", math.nan)
    if 0 <= trained < LONG:
        yield f"trained {clock(trained)}", ""
    if run.status != "running":
        return
    if stage is not None and pace is not None:
        later = [each for each in run.stages if each.begin >= stage.end]
        after = "".join(f", then {each.end - each.begin:,} steps of {each.name}" for each in later)
        yield f"{clock(pace * (stage.end - last.step))} left{after}", ""
    silence = now - run.tail.changed
    if silence > SILENT and silence > 20 * usual_gap(run):
        yield f"silent for {clock(silence)}", STYLES["stopped"]


def usual_gap(run: Watched) -> float:
    """Seconds of training between two entries."""
    steps = [step for step, _ in run.curve("loss", latest=9)[-2:]]
    return (run.pace() or 0.0) * (steps[-1] - steps[0]) if steps else 0.0


def loss_facts(run: Watched, last: Entry, brief: bool) -> Iterator[Span]:
    sound = math.isfinite(last.values["loss"])
    if brief:
        yield f"loss {last.values['loss']:.4f}", "" if sound else STYLES["dead"]
    else:
        for number, fact in enumerate(describe(last.values).split("  ")):
            yield fact, "" if sound or number else STYLES["dead"]
        if "gradient_norm" in last.values:
            yield f"gradient {last.values['gradient_norm']:.3g}", ""
    wrong = [step for step, loss in run.curve("loss") if not math.isfinite(loss)]
    if wrong:
        many = f"{len(wrong)} losses are" if len(wrong) > 1 else "a loss is"
        yield f"{many} not finite, last at step {wrong[-1]:,}", STYLES["dead"]
    if last.values.get("skipped"):
        yield f"steps passed over: {last.values['skipped']:,.0f}", STYLES["stopped"]


def score(metric: str, value: float) -> str:
    return (scores({metric: value}) or [f"{metric} {value:.4g}"])[0]


# ---- curves


def panels(runs: Sequence[Watched]) -> list[Panel]:
    """The curves of the runs, the most telling first."""
    return own_panels(runs[0]) if len(runs) == 1 else common_panels(runs)


def own_panels(run: Watched) -> list[Panel]:
    """One run: a line a stage, and one a stream where the run records them."""
    stages = list(dict.fromkeys(each.stage for each in run.entries))
    streams = sorted(name for name in run.tail.names if name.startswith("losses/"))

    def by_stage(name: str) -> list[Line]:
        return [Line(stage, look, run.curve(name, stage)) for look, stage in enumerate(stages)]

    losses = by_stage("loss")
    for name in (*streams, "evaluation/loss"):
        stream = name.removeprefix("losses/")
        shown = "dev" if name == "evaluation/loss" else f"{stream} alone" if stream in stages else stream
        losses.append(Line(shown, len(losses), run.curve(name)))
    metric = run.metric()
    scored = [] if metric in ("", "loss") else [Panel(f"dev {metric}", by_stage(f"evaluation/{metric}"))]
    return [
        Panel("loss", losses, named=True),
        *scored,
        Panel("gradient norm", by_stage("gradient_norm")),
        Panel("tokens a second", by_stage(speed_of(run)), from_zero=True),
        Panel("learning rate", by_stage("learning_rate"), from_zero=True),
    ]


def common_panels(runs: Sequence[Watched]) -> list[Panel]:
    """Several runs: a line a run."""

    def by_run(name: str) -> list[Line]:
        return [Line(str(run.path), look, run.curve(name)) for look, run in enumerate(runs)]

    metrics = list(dict.fromkeys(run.metric() for run in runs))
    speeds = [Line(str(run.path), look, run.curve(speed_of(run))) for look, run in enumerate(runs)]
    return [
        Panel("loss", by_run("loss")),
        *(Panel(f"dev {metric}", by_run(f"evaluation/{metric}")) for metric in metrics if metric),
        Panel("gradient norm", by_run("gradient_norm")),
        Panel("tokens a second", speeds, from_zero=True),
        Panel("learning rate", by_run("learning_rate"), from_zero=True),
    ]


def speed_of(run: Watched) -> str:
    """What tells how fast the run learns: tokens without padding, or all where it records no other."""
    useful = "useful_tokens_per_second"
    return useful if useful in run.tail.names else "tokens_per_second"


def picture(runs: Sequence[Watched], width: int, height: int, plain: bool) -> list[Row]:
    """What is known of the runs, and below it their curves: as many as fit in `width` by `height` characters."""
    rows = words(runs, width, height - LEAST_HEIGHT - 1, plain)
    curves = arrange(panels(runs), width, height - len(rows) - 1, plain)
    return [*rows, *([[], *curves] if curves else [])][: max(1, height)]


def words(runs: Sequence[Watched], width: int, height: int, plain: bool) -> list[Row]:
    """The facts of each run; of many runs the first line each, where all would leave no room for curves."""
    several = len(runs) > 1
    found = []
    for look, run in enumerate(runs):
        sign, colour = mark(look, plain) if several else ("", "bold")
        name = (f"{sign} {run.path}:".lstrip(), colour)
        found.append(list(fold([name, *facts(run, brief=several)], width, plain)))
    if several and sum(map(len, found)) > height // 2:
        found = [rows[:1] for rows in found]
    return [row for rows in found for row in rows][: max(1, height)]


# ---- the command


def watch_command(paths: Sequence[Path], once: bool = False, plain: bool = False) -> None:
    """Show the runs: again and again on a terminal while one of them trains, else once."""
    with suppress(KeyboardInterrupt):  # seen enough
        runs = [Watched(path) for path in paths]
        if sys.stdout.isatty() and not is_dumb():
            watch_terminal(runs, once, plain or not can_show("⣿…│━"))
        else:
            size = shutil.get_terminal_size(UNKNOWN_SIZE)
            print(plain_text(picture(runs, size.columns, size.lines, plain=True)))


def watch_terminal(runs: Sequence[Watched], once: bool, plain: bool, console: Console | None = None) -> None:
    from rich.console import Console
    from rich.live import Live

    console = console or Console(highlight=False)
    plain = plain or console.no_color or console.color_system is None

    def drawn(height: int) -> Text:
        return styled_text(picture(runs, console.width, height, plain))

    def training() -> bool:
        return any(run.held for run in runs)

    try:
        if training() and not once:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while training():
                    began = time.monotonic()
                    live.update(drawn(console.height), refresh=True)
                    time.sleep(max(INTERVAL, 9 * (time.monotonic() - began)))  # never more than a tenth of a core
                    for run in runs:
                        run.look()
    finally:
        console.print(drawn(console.height - 1))  # it stays when the screen is given back
