"""What stands between a run and lost work: signals, steps that are no numbers, spikes of the loss."""

from __future__ import annotations

import os
import select
import signal
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median

import torch
from torch import Tensor

from headway.errors import STOPS, Quit
from headway.files import is_closed_terminal, to_nowhere
from headway.training.engine import Outcome
from headway.training.streams import Stream

BAD_STEPS = ("stop", "skip")
IN_A_ROW = 10  # steps without a number after which there is no point in going on
SHOWN = 5  # rows of a stream that a message names


class Stopped(BaseException):
    """A signal asks a run to end while it does something that may be left at any moment."""


class Stops:
    """The signals that ask a run to end. The first one is noted, for the run to end after its step; a second Ctrl-C or
    SIGTERM quits at once.

    What comes within `SAME` seconds of the first is the same wish, said twice: `timeout` tells a program and then its
    whole group, torchrun tells processes that the terminal has told already. It is waited for, or else it could be
    heard only after a long computation, and be taken for another one. A terminal that is closed sends SIGHUP more than
    once: by the shell, and by the system when the shell has gone.
    """

    SAME = 0.3

    def __init__(self) -> None:
        self.number = 0  # of the signal that came, 0 while there was none
        self.waits = False
        self.raises = False

    def hear(self, number: int, frame: object = None) -> None:
        leave_closed_terminal()
        if not self.number:
            self.number, self.waits = number, True
            time.sleep(self.SAME)  # what comes meanwhile is heard in between
            self.waits = False
            if self.raises:
                raise Stopped
        elif number in (signal.SIGINT, signal.SIGTERM) and not self.waits:
            raise Quit("stopped at once, nothing more was saved; checkpoints from before are whole", number)

    @contextmanager
    def at_once(self, wanted: bool = True) -> Iterator[None]:
        """Within it a signal is raised as `Stopped`, also one that came before: for what takes long and changes
        nothing."""
        self.raises = wanted
        try:
            if wanted and self.number:
                raise Stopped
            yield
        finally:
            self.raises = False

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Within it nothing is raised, also inside `at_once`; what comes is heard at its end."""
        before, self.raises = self.raises, False
        try:
            yield
        finally:
            self.raises = before
        if before and self.number:
            raise Stopped


@contextmanager
def interruptible() -> Iterator[Stops]:
    """Within it, the signals that ask a program to end are heard by what it gives."""
    stops = Stops()
    before = {}
    for number in STOPS:
        if number not in (signal.SIGINT, signal.SIGTERM) and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started by nohup
        try:
            before[number] = signal.signal(number, stops.hear)
        except ValueError:  # not the main thread: the caller's signals are the caller's
            break
    try:
        yield stops
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set from Python


def leave_closed_terminal() -> None:
    """What is said from here on goes nowhere where it would go to a terminal that is not there any more, or to a
    program that has ended with it."""
    for handle in (1, 2):
        with suppress(OSError):
            if is_closed_terminal(handle) or (stat.S_ISFIFO(os.fstat(handle).st_mode) and is_unread(handle)):
                to_nowhere(handle)


def is_unread(handle: int) -> bool:
    """Whether nobody is left at the other end of a pipe."""
    poll = select.poll()
    poll.register(handle, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def describe_rows(streams: Sequence[Stream], step: int) -> str:
    """Which examples a step sees, stream by stream, counted from 0: `training 3, 0, 5, 9, 2 and 27 more; facts 7`."""
    parts = []
    for stream in streams:
        if stream.takes_part(step):
            rows = stream.draw(step)[0].tolist()
            more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
            parts.append(f"{stream.name} {', '.join(map(str, rows[:SHOWN]))}{more}")
    return "; ".join(parts)


class Unseen:
    """Loss and norm of the gradient of the steps since somebody looked at them, as they are on the device."""

    MOST = 1000  # steps after which somebody should look

    def __init__(self) -> None:
        self.first = 0  # of these steps
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def see(self, step: int, done: Outcome) -> None:
        if not self.losses:
            self.first = step
        self.losses.append(done.loss)
        self.norms.append(done.norm)

    def take(self) -> Unseen:
        """These steps, which count as looked at from here on."""
        taken = Unseen()
        taken.first, taken.losses, taken.norms = self.first, self.losses, self.norms
        self.losses, self.norms = [], []
        return taken


class OnTheWay:
    """Numbers that leave the device when they are computed. To read them is to wait for them, and for nothing that the
    device was given to do since."""

    def __init__(self, numbers: Sequence[Tensor]) -> None:
        self.there: torch.cuda.Event | None = None
        if numbers and numbers[0].is_cuda:
            together = torch.stack([number.detach().float() for number in numbers])
            self.values = torch.empty(len(numbers), pin_memory=True).copy_(together, non_blocking=True)
            self.there = torch.cuda.Event()
            self.there.record()
        else:
            self.values = torch.tensor([float(number) for number in numbers], dtype=torch.double)

    def arrived(self) -> bool:
        return self.there is None or self.there.query()

    def read(self) -> list[float]:
        if self.there is not None:
            self.there.synchronize()
        return self.values.tolist()


class Spikes:
    """Finds losses that stand far above those before them.

        loss − m > max(times · s, 0.1),   m = median,   s = 1.4826 · median |loss − m|

    over the last 20 losses seen; for normally distributed losses, s is their standard deviation. Median and spread
    hardly move when a spike is among the 20. After one was found, the next 99 losses are not looked at.
    """

    WINDOW = 20
    PAUSE = 100
    LEAST = 0.1  # of a rise: a loss near 0 varies by large factors

    def __init__(self, times: float) -> None:
        self.times = times
        self.last: deque[float] = deque(maxlen=self.WINDOW)
        self.quiet = 0  # losses that are not looked at

    def see(self, loss: float) -> float | None:
        """The median of the losses before, where this one is a spike; else None."""
        before = list(self.last)
        self.last.append(loss)
        self.quiet = max(0, self.quiet - 1)
        if not self.times or self.quiet or len(before) < self.WINDOW:
            return None
        middle = median(before)
        spread = 1.4826 * median(abs(each - middle) for each in before)
        if loss - middle <= max(self.times * spread, self.LEAST):
            return None
        self.quiet = self.PAUSE
        return middle
