"""How many cores this process may use, and how its threads share them with others.

It may use those it is bound to, and no more of them than its container's share.

A container that may use two cores of a machine of 64 sees all 64. What limits it stands in its control group: at most
`quota` microseconds of processor time in every `period`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

OURS = "HEADWAY_THREADS"  # the variable that says which number of threads is our own choice
ROOT = Path("/")  # of the file system that the kernel tells its facts in


def share_cores() -> None:
    """Tell OpenMP, before torch loads it, how many threads to start and how they wait, unless somebody has chosen.

    By itself it starts one for every core that a container sees, and lets threads that wait for one another spin so
    long that two programs on one machine nearly stand still (docs/training.md).
    """
    cores = available_cores()
    if cores < bound_cores() and not was_chosen():
        os.environ["OMP_NUM_THREADS"] = os.environ[OURS] = str(cores)
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def was_chosen() -> bool:
    """Whether somebody has said how many threads there should be, in a way that torch listens to."""
    number = os.environ.get("OMP_NUM_THREADS")
    others = {"OMP_THREAD_LIMIT", "MKL_NUM_THREADS"} & os.environ.keys()
    return bool(others) or (number is not None and number != os.environ.get(OURS))


def available_cores() -> int:
    """At least 1."""
    return max(1, min([bound_cores(), *map(math.ceil, shares())]))


def bound_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shares() -> Iterator[float]:
    """The cores' worth of time that each control group above this process gives it, where one says so."""
    for folder in control_groups():
        for read in (quota_and_period, old_quota_and_period):
            with suppress(OSError, ValueError):
                quota, period = read(folder)
                if quota > 0 and period > 0:
                    yield quota / period


def quota_and_period(folder: Path) -> tuple[int, int]:
    """Of cgroup v2, which writes `max` where there is no limit."""
    quota, period = (folder / "cpu.max").read_text().split()
    return int(quota), int(period)


def old_quota_and_period(folder: Path) -> tuple[int, int]:
    """Of cgroup v1, which writes -1 where there is no limit."""
    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return int(quota), int(period)


def control_groups() -> Iterator[Path]:
    """The folders of the groups that this process is in, and of those above them.

    Seen from inside a container, the file system of the groups may begin at its own: then only the root is there.
    """
    mounts = ROOT / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        for line in (ROOT / "proc/self/cgroup").read_text("utf-8", errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            group = PurePosixPath(path.lstrip("/"))
            for mount in {mounts / controllers, mounts / "cpu"} if controllers else {mounts}:
                yield from (mount / each for each in (group, *group.parents))
