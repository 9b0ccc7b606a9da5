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
SMALL = "headway scale shakespeare/char"
LARGE = (
    "headway scale shakespeare/char --set model.width=2048 --set model.layers=18 --set model.heads=16 "
    "--set model.block=1024 --set training.batch_size=4096 --set training.accumulate=8 --vocabulary 50304"
)


def tables() -> str:
    """For every machine the commands and what they print; a billion parameters are nothing for a CPU."""
    parts = []
    for name in machines():
        for command in (SMALL, LARGE) if name != "cpu" else (SMALL,):
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
