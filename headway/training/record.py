"""The record of a run: metrics.jsonl, a line for each step that is logged and each evaluation.

A line is there whole or not at all. What the system refuses is kept, and tried again before the next one.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from headway.files import append_line, numbered, read_json_lines, unreadable_lines, write_bytes, write_json_lines

Line = dict[str, Any]


class Record:
    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self.say = path, say
        self.refused: deque[Line] = deque()

    def lines(self) -> list[Line]:
        return read_json_lines(self.path)

    def add(self, line: Line) -> None:
        self.refused.append(line)
        self.again()

    def again(self) -> None:
        """Write the lines that are not there yet."""
        while self.refused:
            append_line(self.path, json.dumps(self.refused[0]))
            self.refused.popleft()

    def begin(self) -> None:
        write_json_lines(self.path, [])

    def set_aside(self, why: str) -> None:
        """Keep what there is under another name."""
        if self.path.exists():
            kept = numbered(self.path)
            os.replace(self.path, kept)
            self.say(f"{why}; the record so far is in {kept}")

    def go_back(self, step: int, owed: Collection[str]) -> None:
        """Nothing is left of steps after this one, nor of its evaluation in the stages where it is still `owed`. What
        cannot be read is left out, and all of it kept under another name."""
        if not self.path.exists():
            self.say(f"{self.path}: is gone; the record begins anew")
        elif damaged := unreadable_lines(self.path):
            kept = numbered(self.path)
            write_bytes(kept, self.path.read_bytes())
            self.say(f"{self.path}: lines that cannot be read: {damaged:,}, left out; all of it is in {kept}")
        write_json_lines(
            self.path,
            [
                each
                for each in self.lines()
                if (at := step_of(each)) is not None
                and at <= step
                and not (at == step and "evaluation" in each and each.get("stage") in owed)
            ],
        )


def step_of(line: Line) -> int | None:
    step = line.get("step")
    return step if isinstance(step, int) else None
