"""The errors a user may see.

An error names the value, the place and the way out. `UserError` is for what the user can mend: the command
line prints it without a traceback and leaves with exit code 2. Everything else is a fault of the program (exit code 1).
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from pathlib import Path


class UserError(Exception):
    """Something in the user's files, settings or arguments is wrong, and the message says what to do."""


class DataError(UserError):
    """A file could not be read as what it should be. The message begins with `file:line:`."""


class SettingsError(UserError):
    """One or more settings are wrong; all of them are listed at once."""

    def __init__(self, problems: list[str], source: str = "settings") -> None:
        self.problems = problems
        many = f"{len(problems)} problems" if len(problems) > 1 else "a problem"
        super().__init__(f"{source}: {many}\n" + "\n".join(f"  - {problem}" for problem in problems))


class TextError(UserError):
    """A text cannot be given to this model: characters it never saw, or too many tokens."""


class RunError(UserError):
    """A run directory cannot be used as asked."""


STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask a program to end: Ctrl-C, the system, a terminal that was closed."""


def hear_no_more() -> None:
    """A program that is about to leave with everything saved is not told so again."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


class Interrupted(Exception):
    """One of `STOPS` came while training; the state is saved. `code` is the exit code: 128 and the signal."""

    run: Path | None = None  # that was stopped

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number, self.code = number, 128 + number


class Quit(KeyboardInterrupt):
    """A second signal came: the program ends at once and saves nothing more."""

    run: Path | None = None  # that was stopped

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number, self.code = number, 128 + number


SHOWN = 40  # names that a message lists
ALSO = {"gpu": "cuda"}  # what is meant by a word that looks more like another one


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' where one of `known` is close to `name`, else what is known, or the first of it."""
    names = list(known)
    meant = [each for each in names if each == ALSO.get(str(name)) or (name and each.startswith(str(name)))]
    close = meant or difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"; known: {', '.join(names[:SHOWN])}{more}" if names else ""
