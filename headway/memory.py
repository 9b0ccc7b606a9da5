"""Doing with the memory that is there: what runs out of it is done again in smaller parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from headway.errors import UserError

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # in torch's messages


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or the device had no memory left: torch says so of a CPU in words alone."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY)


class Rows(Protocol):
    """What can be cut into parts."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


Some = TypeVar("Some", bound=Rows)
Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # of what is done, and of all there is


def untold(done: int, total: int) -> None:
    """Progress that nobody wants to hear of."""


@dataclass
class Room:
    """How many rows are worked on at once: `rows` (None: all), and half as many each time memory runs out.

    `progress` is told how many rows are done, of how many, after each part.
    """

    rows: int | None = None
    progress: Progress = untold

    def each(self, work: Callable[[Some], Result], rows: Some) -> Iterator[Result]:
        """What `work` makes of the rows, part after part; what it makes of a row may not depend on those beside it."""
        begin = 0
        while begin < len(rows):
            part = rows[begin : begin + (self.rows or len(rows))]
            try:
                result = work(part)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                if len(part) == 1:
                    raise UserError(
                        "out of memory, even for one row at a time; end what else is running there, choose another "
                        "device (--device, training.device), or lower model.block, model.layers or model.width"
                    ) from None
                self.rows = len(part) // 2
                continue  # only now, outside of the failed attempt, is what it held free
            yield result
            begin += len(part)
            self.progress(begin, len(rows))
