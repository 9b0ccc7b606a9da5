"""How many cores a process may use, by what the kernel says of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway import cores


def told(root: Path, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, bound: int = 64) -> int:
    """What is found where the kernel's files are these and the process is bound to so many cores."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(cores, "ROOT", root)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(bound)), raising=False)
    return cores.available_cores()


GROUPS = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "150000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "9900000 100000\n"}, 64),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{GROUPS}/a/cpu.max": "300000 100000\n",
                f"{GROUPS}/a/b/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/x\n1:name=systemd:/\n0::/\n",
                f"{GROUPS}/cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n",
                f"{GROUPS}/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/host/path/of/the/container\n",  # of which only the root is to be seen
                f"{GROUPS}/cpu/cpu.cfs_quota_us": "500000\n",
                f"{GROUPS}/cpu/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                f"{GROUPS}/cpu/cpu.cfs_quota_us": "-1\n",
                f"{GROUPS}/cpu/cpu.cfs_period_us": "100000\n",
            },
            64,
        ),
        ({"proc/self/cgroup": "what is this\n", f"{GROUPS}/cpu.max": "x"}, 64),
        ({"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "0 0\n"}, 64),
    ],
)
def test_a_container_has_no_more_cores_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    assert told(tmp_path, files, monkeypatch) == expected


def test_a_process_has_no_more_cores_than_it_is_bound_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "400000 100000\n"}
    assert told(tmp_path, files, monkeypatch, bound=3) == 3


def test_here_there_is_at_least_one_and_no_more_than_the_machine_has() -> None:
    assert 1 <= cores.available_cores() <= (os.cpu_count() or 1)


def test_threads_give_up_a_core_soon_unless_somebody_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    cores.share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    cores.share_cores()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    cores.share_cores()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, "2"), ({"OMP_NUM_THREADS": "5"}, "5"), ({"OMP_THREAD_LIMIT": "4"}, None)]
)
def test_threads_are_no_more_than_a_containers_share_unless_somebody_has_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str], expected: str | None
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "GOMP_SPINCOUNT", cores.OURS):
        monkeypatch.setenv(name, "")  # put back afterwards, whatever happens to it in between
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    told(tmp_path, {"proc/self/cgroup": "0::/\n", f"{GROUPS}/cpu.max": "max 100000"}, monkeypatch)
    cores.share_cores()
    assert os.environ.get("OMP_NUM_THREADS") == chosen.get("OMP_NUM_THREADS")
    told(tmp_path, {f"{GROUPS}/cpu.max": "200000 100000"}, monkeypatch)
    cores.share_cores()
    assert os.environ.get("OMP_NUM_THREADS") == expected
    assert cores.was_chosen() == bool(chosen)
