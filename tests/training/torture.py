"""Kills a training run at random moments, again and again, and compares its end with that of a run left in peace.

    python -m tests.training.torture [--kills 60] [--seed 0] [--folder DIR]

A round is one run of two stages with accumulated pieces, two streams beside the task, dropout and evaluations. Its
process gets SIGKILL after a random time and the next one resumes it, until the end is reached. In every second life the
kill waits for a checkpoint that is being written, to a slow disk. Rounds follow each other until there were enough
kills. Equal means: weights, optimizer state, the run's state, the checkpoints that are kept and every number of
metrics.jsonl but the times, bit for bit.

Processes are forked from this one, which uses torch for nothing itself: a life costs no import.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers want it, and every life would import it anew

import headway
from headway.configuration import RunSettings, load_settings
from headway.files import read_json_lines

SLOW = 0.01  # seconds that an fsync takes at most on the slow disk
LIVES = 60  # a round that was killed so often is left in peace
TIMES = ("seconds", "tokens_per_second", "useful_tokens_per_second", "flops_utilisation", "memory")

RUN = """
[model]
width = 16
layers = 2
heads = 2
block = 48
dropout = 0.1
[pretraining.task]
name = "span_corruption"
corpus = "wiki.txt"
[pretraining.training]
steps = 14
batch_size = 4
log_every = 1
checkpoint_every = 3
accumulate = 2
optimizer = "muon"
[task]
name = "question_answering"
questions = "train.tsv"
dev = "dev.tsv"
corpus = "wiki.txt"
longest_answer = 4
[training]
steps = 20
batch_size = 5
device = "cpu"
log_every = 1
checkpoint_every = 2
evaluate_every = 5
accumulate = 3
[streams.text]
rows = 3
weight = 0.5
[streams.text.task]
name = "span_corruption"
corpus = "wiki.txt"
[streams.late]
rows = 2
start = 0.5
[streams.late.task]
name = "language_modelling"
corpus = "wiki.txt"
"""


def write_data(folder: Path) -> RunSettings:
    """Sixteen people, a run file over them; returns its settings."""
    names = [f"{first} {last}" for first in ("Ada", "Bo", "Cy", "Di") for last in ("Lund", "Moe", "Nye", "Orr")]
    facts = [(name, ("Oslo", "Rome", "Lima", "Kyiv")[number * 7 % 4]) for number, name in enumerate(names)]
    (folder / "wiki.txt").write_text("".join(f"{name}. {name} was born in {town} .\n" for name, town in facts))
    lines = [f"Where was {name} born?\t{town}\n" for name, town in facts]
    (folder / "train.tsv").write_text("".join(lines[:12]))
    (folder / "dev.tsv").write_text("".join(lines[12:]))
    (folder / "run.toml").write_text(RUN)
    return load_settings(folder / "run.toml")


# ---- one life


def begin_life(settings: RunSettings, out: Path, slow: bool) -> int:
    """A process that trains or resumes the run; returns its number."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        if slow:
            drag_fsync()
        headway.train(settings, out, resume=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def drag_fsync() -> None:
    original = os.fsync

    def slowly(handle: int) -> None:
        time.sleep(random.random() * SLOW)
        original(handle)

    os.fsync = slowly


def live(settings: RunSettings, out: Path, patience: float | None, aimed: bool = False) -> bool:
    """Whether the run reached its end before it was killed, after `patience` seconds; never without patience.

    An aimed kill also waits for a checkpoint that is being written, to a slow disk.
    """
    process = begin_life(settings, out, slow=aimed)
    deadline = None if patience is None else time.monotonic() + patience
    killed = False
    while True:
        ended, status = os.waitpid(process, 0 if killed else os.WNOHANG)
        if ended:
            break
        if deadline is not None and time.monotonic() > deadline and (not aimed or unfinished(out)):
            time.sleep(random.random() * SLOW if aimed else 0.0)  # somewhere in it
            os.kill(process, signal.SIGKILL)
            killed = True
        time.sleep(0.0005)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"{out}: a life ended with an error of its own (above)")
    return os.WIFEXITED(status)


def unfinished(out: Path) -> bool:
    """Whether a checkpoint is half written or half removed."""
    folders = (out / "checkpoints").glob("*step-*")
    return any(folder.name.startswith(".") or not (folder / "manifest.json").exists() for folder in folders)


# ---- a round of lives


@dataclass
class Round:
    kills: int = 0
    inside: int = 0  # while a checkpoint was written or removed
    redone: int = 0  # steps
    differs: list[str] = field(default_factory=list)  # in what its end is not that of the run left in peace


def play(settings: RunSettings, out: Path, whole: Path, longest: float, wanted: int) -> Round:
    """Kill a run until it ends, or until there were `wanted` kills and it is left in peace."""
    found = Round()
    while True:
        peace = found.kills >= min(wanted, LIVES)
        patience = None if peace else random.uniform(0.0, longest)
        if live(settings, out, patience, aimed=found.kills % 2 == 0):
            break
        found.kills += 1
        found.inside += unfinished(out)
        found.redone += reached(out) - saved(out)
    found.differs = differences(outcome(out), outcome(whole))
    return found


def reached(out: Path) -> int:
    return max((record["step"] for record in read_json_lines(out / "metrics.jsonl")), default=0)


def saved(out: Path) -> int:
    """The newest checkpoint, one included that lacks only its name."""
    manifests = (out / "checkpoints").glob("*step-*/manifest.json")
    return max((int(path.parent.name.removeprefix(".")[5:13]) for path in manifests), default=0)


def outcome(out: Path) -> dict[str, Any]:
    """Everything that a run ends with, but for the times."""
    files = {str(path.relative_to(out)): path for path in sorted(out.rglob("*")) if path.is_file()}
    found: dict[str, Any] = {"files": list(files)}
    for name, path in files.items():
        if path.suffix == ".safetensors":
            found[name] = path.read_bytes()
        elif path.name == "state.json":
            found[name] = without_times(json.loads(path.read_text()))
    found["metrics"] = [without_times(json.loads(line)) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Which parts of two outcomes are not the same; of lists, what is in only one of them."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        first, second = one.get(name), other.get(name)
        if first != second:
            both = isinstance(first, list) and isinstance(second, list)
            only = [each for each in [*first, *second] if each not in first or each not in second] if both else []
            found.append(f"{name}{': ' if only else ''}{', '.join(map(str, only))}")
    return found


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in TIMES}


def torture(folder: Path, kills: int, seed: int) -> bool:
    """Rounds until there were `kills`; prints a table and returns whether every end was equal."""
    random.seed(seed)
    torch.set_num_threads(1)
    settings = write_data(folder)
    began = time.monotonic()
    live(settings, folder / "whole", None)
    longest = (time.monotonic() - began) / 3
    rounds: list[Round] = []
    print("round   kills   inside a checkpoint   steps redone   equal")
    while (left := kills - sum(each.kills for each in rounds)) > 0:
        name = f"round-{len(rounds) + 1}"
        rounds.append(play(settings, folder / name, folder / "whole", longest, left))
        show(str(len(rounds)), rounds[-1])
    total = Round(*(sum(getattr(each, key) for each in rounds) for key in ("kills", "inside", "redone")))
    total.differs = [what for each in rounds for what in each.differs]
    show("all", total)
    print(f"seed {seed}, {time.monotonic() - began:.0f} s")
    for what in total.differs:
        print(f"not equal: {what}", file=sys.stderr)
    return not total.differs


def show(name: str, found: Round) -> None:
    equal = "NO" if found.differs else "yes"
    print(f"{name:>5}   {found.kills:5}   {found.inside:19}   {found.redone:12}   {equal:>5}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs go and stay; without it, they are removed")
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True)
        return 0 if torture(options.folder, options.kills, options.seed) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if torture(Path(folder), options.kills, options.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
