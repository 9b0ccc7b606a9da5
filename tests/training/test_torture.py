"""A run that is killed again and again ends as one that is not; `make torture` does it for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not() -> None:
    command = [sys.executable, "-m", "tests.training.torture", "--kills", "8"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    name, kills, inside, _, equal = done.stdout.splitlines()[-2].split()
    assert (name, int(kills), equal) == ("all", 8, "yes") and int(inside) > 0, done.stdout
