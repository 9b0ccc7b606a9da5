"""What several processes do together in the tests, in one start of them: torchrun … -m tests.training.together WHAT.

Each function is run by every process, in the current folder, where the data and the run file are.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headway
from headway.configuration import RunSettings, load_settings
from headway.errors import Interrupted, RunError
from headway.ranks import Ranks, joined, leave
from headway.training import distributed
from headway.training.checkpoint import Checkpoints
from headway.training.engine import Plain
from headway.training.muon import BatchedMuon, ShardedMuon

SHORT = ["pretraining.training.steps=4", "training.steps=8", "training.evaluate_every=4", "training.accumulate=2"]
EXACT = [*SHORT, "model.dropout=0.0"]  # dropout is the one thing that differs by the number of processes
ADAMW = [*EXACT, "pretraining.training.optimizer=adamw"]
RUNS = {
    "ddp": [*ADAMW, "training.parallel=ddp"],
    "fsdp": [*ADAMW, "training.parallel=fsdp"],
    "ddp-muon": [*EXACT, "pretraining.training.optimizer=muon", "training.steps=0"],
    "fsdp-muon": [*EXACT, "pretraining.training.optimizer=muon", "training.steps=0", "training.parallel=fsdp"],
    "ddp-few": [*ADAMW, "training.batch_size=1", "training.steps=3"],
    "fsdp-few": [*ADAMW, "training.batch_size=1", "training.steps=3", "training.parallel=fsdp"],
}
STOP = 10  # in the second stage, in the middle of an epoch, while three streams take part


def settings(sets: list[str]) -> RunSettings:
    return load_settings("run.toml", sets)


def recurrent(parallel: str) -> RunSettings:
    """The same tasks, learned by a recurrent model."""
    tables = settings([*ADAMW, "training.steps=3", f"training.parallel={parallel}"]).tables()
    return load_settings({**tables, "model": {"kind": "rnn", "width": 16, "block": 48, "dropout": 0.0}})


def many(ranks: Ranks) -> None:
    """Everything that two processes can show in one start."""
    for name, sets in RUNS.items():
        headway.train(settings(sets), f"together-{name}")
    for parallel in ("ddp", "fsdp"):
        headway.train(recurrent(parallel), f"together-{parallel}-rnn")
        sets = [*SHORT, f"training.parallel={parallel}"]  # with dropout: as many processes as before drop the same
        headway.train(settings(sets), f"whole-{parallel}")
        stop(settings(sets), f"again-{parallel}", ranks)
        headway.train(settings(sets), f"again-{parallel}", resume=True)
        stop(settings(RUNS[parallel]), f"two-{parallel}", ranks)
        headway.train(settings(RUNS[parallel]), f"one-{parallel}", resume=True)
    found = {
        "unlike": unlike(ranks),
        "exchanges": {parallel: [exchanges(parallel, pieces) for pieces in (1, 4)] for parallel in ("ddp", "fsdp")},
        "scores": headway.load("together-ddp").evaluate("train", ranks),
        "muon": muon_differs(ranks),
    }
    if ranks.leads:
        Path("found.json").write_text(json.dumps(found))


def unlike(ranks: Ranks) -> list[str]:
    """What is said where every process was given another command: other settings, and other flags."""
    said = []
    for sets, options in (
        ([f"training.batch_size={4 + ranks.rank}"], {}),
        ([], {"resume": ranks.leads}),
        ([], {"resume": True, "back_to": ranks.rank}),
    ):
        try:
            headway.train(settings([*EXACT, *sets]), "unlike", **options)
        except RunError as error:
            said.append(str(error))
    return said


def stop(wanted: RunSettings, out: str, ranks: Ranks) -> None:
    """Train until a signal comes to the last process after step STOP; all of them stop."""
    original = Plain.step

    def step(self: Plain, number: int, rate: float) -> Any:
        if number + 4 + 1 == STOP and ranks.rank == ranks.size - 1 and len(self.streams) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, number, rate)

    Plain.step = step  # type: ignore[method-assign]
    try:
        headway.train(wanted, out)
        raise AssertionError("it was not stopped")
    except Interrupted as stopped:
        assert f"after step {STOP}," in str(stopped) and stopped.number == signal.SIGTERM
    finally:
        Plain.step = original  # type: ignore[method-assign]


class ReduceScatters(TorchDispatchMode):
    """Counts the sums of gradients of which every process keeps a part."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += "reduce_scatter" in str(function)
        return function(*arguments, **(options or {}))


def exchanges(parallel: str, pieces: int) -> int:
    """How often gradients are exchanged in a run of three steps, each cut into `pieces`."""
    sets = [*ADAMW, f"training.parallel={parallel}", f"training.accumulate={pieces}", "training.batch_size=8"]
    stages = ["training.steps=3", "pretraining.training.steps=0"]
    buckets = 0
    original = distributed.summed

    def counting(bucket: dist.GradBucket) -> Any:
        nonlocal buckets
        buckets += 1
        return original(bucket)

    distributed.summed = counting
    try:
        with ReduceScatters() as seen:
            headway.train(settings([*sets, *stages]), f"pieces-{parallel}-{pieces}")
    finally:
        distributed.summed = original
    return buckets + seen.count


def muon_differs(ranks: Ranks) -> float:
    """How far Muon on matrices in parts comes from Muon on whole ones in three steps, at most."""
    mesh = init_device_mesh("cpu", (ranks.size,))
    shapes = [(6, 9), (9, 6), (1, 5)]  # the last has fewer rows than there are processes
    torch.manual_seed(0)
    whole = [torch.randn(shape) for shape in shapes]
    parts = [distribute_tensor(matrix.clone(), mesh, [Shard(0)]) for matrix in whole]
    steppers = BatchedMuon(whole, 0.1, 0.2), ShardedMuon(parts, 0.1, 0.2)
    for _ in range(3):
        for matrix, part in zip(whole, parts, strict=True):
            matrix.grad = torch.randn_like(matrix)
            part.grad = distribute_tensor(matrix.grad.clone(), mesh, [Shard(0)])
        for stepper in steppers:
            stepper.step()
    return max(float((part.full_tensor() - matrix).abs().max()) for part, matrix in zip(parts, whole, strict=True))


def resume(ranks: Ranks) -> None:
    """Go on with what another number of processes began."""
    for parallel in ("ddp", "fsdp"):
        headway.train(settings(RUNS[parallel]), f"three-{parallel}", resume=True)


def killed(ranks: Ranks) -> None:
    """The process that leads is killed in its first life, when all have written their parts of the third checkpoint."""
    original, begun = Checkpoints.seal, []

    def seal(self: Checkpoints, temporary: Path, manifest: dict[str, Any]) -> None:
        begun.append(temporary)
        if len(begun) == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, temporary, manifest)

    Checkpoints.seal = seal  # type: ignore[method-assign]
    headway.train(settings([*SHORT, "training.parallel=fsdp"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined() as ranks:
        {"many": many, "resume": resume, "killed": killed}[sys.argv[1]](ranks)
    leave(0)
