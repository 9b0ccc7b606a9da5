"""Writes the tables of docs/scaling.md from the machines that were measured: python docs/make_scaling.py"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from headway.cli import run_command
from headway.training.scaling import machines

PAGE = Path(__file__).with_name("scaling.md")
TABLES = re.compile(r"(?<=<!-- tables -->\n).*(?=<!-- end of tables -->)", re.S)
ON_CPU = ["headway scale shakespeare/char-laptop --gpus 1,2 --set training.accumulate=1"]
ON_GPU = [
    "headway scale shakespeare/char-25m",
    "headway scale shakespeare/char-25m --set model.width=2048 --set model.layers=18 --set model.heads=16 "
    "--set model.block=1024 --set training.batch_size=1024 --set training.accumulate=8 --vocabulary 50304",
    "headway scale shakespeare/char-25m --set model.width=5120 --set model.layers=32 --set model.heads=40 "
    "--set model.block=1024 --set training.batch_size=1024 --set training.accumulate=16 --vocabulary 50304",
]


def tables() -> str:
    """For every machine the commands and what they print."""
    parts = []
    for name, machine in machines().items():
        for command in ON_GPU if machine.ahead else ON_CPU:
            full = f"{command} --machine {shlex.quote(name)}"
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                run_command([*shlex.split(full)[1:], "--markdown"])
            facts, rows = printed.getvalue().split("\n\n")
            lines = "\n".join(f"{line}  " for line in facts.splitlines())
            parts.append(f"```sh\n{full}\n```\n{lines.rstrip()}\n\n{rows}")
    return "\n".join(parts)


def page() -> str:
    return TABLES.sub(lambda _: tables(), PAGE.read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
