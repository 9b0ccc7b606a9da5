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

import headway
from headway.configuration import RunSettings, load_settings
from headway.errors import Interrupted
from headway.ranks import Ranks, joined, leave
from headway.training import distributed
from headway.training.distributed import Together

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


def many(ranks: Ranks) -> None:
    """Everything that two processes can show in one start."""
    for name, sets in RUNS.items():
        headway.train(settings(sets), f"together-{name}")
    for parallel in ("ddp", "fsdp"):
        sets = [*SHORT, f"training.parallel={parallel}"]  # with dropout: as many processes as before drop the same
        headway.train(settings(sets), f"whole-{parallel}")
        stop(settings(sets), f"again-{parallel}", ranks)
        headway.train(settings(sets), f"again-{parallel}", resume=True)
        stop(settings(RUNS[parallel]), f"two-{parallel}", ranks)
        headway.train(settings(RUNS[parallel]), f"one-{parallel}", resume=True)
    counts = {pieces: exchanges(pieces) for pieces in (1, 4)}
    scores = headway.load("together-ddp").evaluate("train", ranks)
    if ranks.leads:
        Path("found.json").write_text(json.dumps({"exchanges": counts, "scores": scores}))


def stop(wanted: RunSettings, out: str, ranks: Ranks) -> None:
    """Train until a signal comes to the last process after step STOP; all of them stop."""
    original = Together.step

    def step(self: Together, number: int, rate: float) -> Any:
        if number + 4 + 1 == STOP and ranks.rank == ranks.size - 1 and len(self.plain.streams) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, number, rate)

    Together.step = step  # type: ignore[method-assign]
    try:
        headway.train(wanted, out)
        raise AssertionError("it was not stopped")
    except Interrupted as stopped:
        assert f"after step {STOP}," in str(stopped) and stopped.number == signal.SIGTERM
    finally:
        Together.step = original  # type: ignore[method-assign]


def exchanges(pieces: int) -> int:
    """How many buckets of gradients are exchanged in a run of three steps, each cut into `pieces`."""
    seen = 0
    original = distributed.summed

    def counting(bucket: dist.GradBucket) -> Any:
        nonlocal seen
        seen += 1
        return original(bucket)

    distributed.summed = counting
    sets = [*ADAMW, f"training.accumulate={pieces}", "training.batch_size=8"]
    stages = ["training.steps=3", "pretraining.training.steps=0"]
    try:
        headway.train(settings([*sets, *stages]), f"pieces-{pieces}")
    finally:
        distributed.summed = original
    return seen


def resume(ranks: Ranks) -> None:
    """Go on with what another number of processes began."""
    for parallel in ("ddp", "fsdp"):
        headway.train(settings(RUNS[parallel]), f"three-{parallel}", resume=True)


def killed(ranks: Ranks) -> None:
    """The process that leads is killed in its first life, after a checkpoint."""
    original = Together.step

    def step(self: Together, number: int, rate: float) -> Any:
        if number == 5 and ranks.leads and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, number, rate)

    Together.step = step  # type: ignore[method-assign]
    headway.train(settings([*SHORT, "training.parallel=fsdp"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined() as ranks:
        {"many": many, "resume": resume, "killed": killed}[sys.argv[1]](ranks)
    leave(0)
