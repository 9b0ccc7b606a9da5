"""The parts of a step by their names, for a profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch.profiler import record_function

PREFIX = "headway: "
NOTHING = nullcontext()
watched = False  # whether somebody looks


def during(name: str) -> AbstractContextManager[object]:
    """What happens inside is this part of a step; where nobody looks, it costs a look at a name."""
    return record_function(PREFIX + name) if watched else NOTHING


@contextmanager
def watching() -> Iterator[None]:
    """Parts are noted inside."""
    global watched  # noqa: PLW0603 - one process trains one model
    watched = True
    try:
        yield
    finally:
        watched = False
