"""Several processes train as one: the same losses and weights, whatever their number, whoever is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import chdir, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.configuration import load_settings
from headway.console import Reporter
from headway.errors import Interrupted, RunError
from headway.making import require_alike
from headway.ranks import ALONE, Ranks
from headway.text import Characters
from headway.training.loop import Trainer
from headway.training.stage import Stage, TrainingSettings
from tests.conftest import tiny_gpt
from tests.training.together import ADAMW, RUNS, SHORT, STOP, recurrent
from tests.training.torture import write_data

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="processes talk by gloo")


def launch(folder: Path, processes: int, *command: str, restarts: int = 0) -> subprocess.Popen[str]:
    """Processes that torchrun starts in `folder`."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [*torchrun, f"--max-restarts={restarts}", "-m", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(started: subprocess.Popen[str], code: int = 0) -> str:
    said, _ = started.communicate(timeout=240)
    assert started.returncode == code, said
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, runs of one process, and the same runs and others by two."""
    folder = tmp_path_factory.mktemp("together")
    write_data(folder)
    for kind, sets in (("adamw", RUNS["ddp"]), ("muon", RUNS["ddp-muon"]), ("few", RUNS["ddp-few"])):
        headway.train(folder / "run.toml", folder / f"alone-{kind}", sets)
    with chdir(folder):
        headway.train(recurrent("ddp"), folder / "alone-rnn")
    for parallel in ("ddp", "fsdp"):
        with pytest.raises(Interrupted):
            headway.train(folder / "run.toml", folder / f"one-{parallel}", ADAMW, watch=interrupt)
    (folder / "said").write_text(finish(launch(folder, 2, "tests.training.together", "many")))
    return folder


def interrupt(record: dict) -> None:
    if record["step"] == STOP and "loss" in record:
        os.kill(os.getpid(), signal.SIGINT)


def losses(path: Path) -> list[tuple[int, float, float]]:
    return [
        (each["step"], each["loss"], each["gradient_norm"]) for each in headway.load(path).metrics if "loss" in each
    ]


def check_equal(one: Path, other: Path, tolerance: float) -> None:
    first, second = headway.load(one, "cpu"), headway.load(other, "cpu")
    assert first.state.tokens == second.state.tokens and first.state.step == second.state.step
    torch.testing.assert_close(losses(one), losses(other), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("kind", "tolerance"), [("adamw", 2e-6), ("few", 2e-5), ("muon", 2e-3), ("rnn", 2e-6)])
def test_two_processes_learn_what_one_learns(folder: Path, parallel: str, kind: str, tolerance: float) -> None:
    """With streams, accumulated pieces, more rows than processes and fewer. Muon computes in bfloat16."""
    name = parallel if kind == "adamw" else f"{parallel}-{kind}"
    check_equal(folder / f"alone-{kind}", folder / f"together-{name}", tolerance)


def test_nobody_is_warned_of_what_is_in_order(folder: Path) -> None:
    """torch tells its callers of what they should not do; no run does it."""
    assert "Warning" not in (folder / "said").read_text()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_as_many_processes_resume_bit_for_bit(folder: Path, parallel: str) -> None:
    check_equal(folder / f"whole-{parallel}", folder / f"again-{parallel}", 0.0)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_resume_what_one_began(folder: Path, parallel: str) -> None:
    check_equal(folder / "alone-adamw", folder / f"one-{parallel}", 2e-6)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_resumes_what_two_began(folder: Path, parallel: str) -> None:
    shutil.copytree(folder / f"two-{parallel}", folder / f"back-{parallel}")
    headway.train(folder / "run.toml", folder / f"back-{parallel}", RUNS[parallel], resume=True)
    check_equal(folder / "alone-adamw", folder / f"back-{parallel}", 2e-6)


def test_three_processes_resume_what_two_began_in_the_other_way(folder: Path) -> None:
    """What was whole is now in three parts, and what was in two parts is whole."""
    shutil.copytree(folder / "two-ddp", folder / "three-fsdp")
    shutil.copytree(folder / "two-fsdp", folder / "three-ddp")
    finish(launch(folder, 3, "tests.training.together", "resume"))
    for parallel in ("ddp", "fsdp"):
        check_equal(folder / "alone-adamw", folder / f"three-{parallel}", 2e-6)
    newest = headway.load(folder / "three-fsdp").checkpoints.path(12)
    assert len(list(newest.glob("shard-*"))) == 3 and not (newest / "model.safetensors").exists()


def test_a_part_that_is_damaged_or_missing_is_noticed(folder: Path) -> None:
    shutil.copytree(folder / "two-fsdp", folder / "damaged")
    parts = sorted(headway.load(folder / "damaged").checkpoints.path(STOP).iterdir())
    assert {part.suffix for part in parts} <= {".safetensors", ".json"}  # nothing is a pickle
    next(part for part in parts if part.name.startswith("shard-00002")).unlink()
    run = headway.load(folder / "damaged")
    assert run.step < STOP and "shard-00002" in run.notes[0]


def test_gradients_are_exchanged_once_a_step_however_many_pieces_it_has(folder: Path) -> None:
    counts = json.loads((folder / "found.json").read_text())["exchanges"]
    assert counts["ddp"] == [3, 3]  # three steps, and one bucket holds the whole model
    assert counts["fsdp"] == [9, 9]  # two blocks and what is outside them


def test_muon_on_matrices_in_parts_is_muon_on_whole_ones(folder: Path) -> None:
    assert json.loads((folder / "found.json").read_text())["muon"] < 1e-6


def test_sharing_an_evaluation_changes_nothing(folder: Path) -> None:
    shared = json.loads((folder / "found.json").read_text())["scores"]
    assert shared == headway.load(folder / "together-ddp").evaluate("train") and len(shared["predictions"]) == 12
    alone, together = (headway.load(folder / name).evaluation for name in ("alone-adamw", "together-fsdp"))
    assert alone == together


def test_after_a_kill_all_start_again_and_end_as_if_nothing_had_happened(folder: Path) -> None:
    """The process that leads is killed in the middle of a checkpoint; the directory is the one that it had chosen."""
    name = folder.name
    (folder / "runs" / name).mkdir(parents=True)  # taken, so that theirs is another
    finish(launch(folder, 2, "tests.training.together", "killed", restarts=1))
    assert sorted(path.name for path in (folder / "runs").iterdir()) == [name, f"{name}-2"]
    check_equal(folder / "whole-fsdp", folder / "runs" / f"{name}-2", 0.0)


def test_a_signal_to_torchrun_saves_and_ends_all(folder: Path) -> None:
    sets = [f"--set={each}" for each in [*SHORT, "training.steps=100000", "training.evaluate_every=0"]]
    started = launch(folder, 2, "headway", "train", "run.toml", "--out", "signalled", *sets)
    metrics = folder / "signalled" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") > 8) and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    said, _ = started.communicate(timeout=60)
    assert started.returncode != 0
    assert said.count("state saved; go on with: headway train signalled --resume") == 1
    assert "Warning: `" not in said  # nothing of torch's that is not for whoever trains
    reached = headway.load(folder / "signalled").state.step
    assert reached > 4 and f"stopped after step {reached:,}" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("dev.tsv", "missing.tsv"), "missing.tsv: no such file"),
        (("batch_size", "batchsize"), "batchsize: unknown key; did you mean 'batch_size'?"),
    ],
)
def test_what_is_wrong_is_said_once(folder: Path, change: tuple[str, str], message: str) -> None:
    (folder / "bad.toml").write_text((folder / "run.toml").read_text().replace(*change, 1))
    said = finish(launch(folder, 2, "headway", "train", "bad.toml", "--out", "bad"), code=1)
    assert said.count("headway: ") == 1 and message in said and "headway FAILED" in said
    assert not (folder / "bad").exists()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("count", [0, 1, 5, 12])
def test_shares_put_together_are_the_whole(size: int, count: int) -> None:
    items = list(range(count))
    shares = [Ranks(rank, size).share(items) for rank in range(size)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Second(Ranks):
    """The second of two processes; what the first one has is given."""

    def led(self, work: Any) -> Any:
        return FIRST

    def gather(self, items: list[Any]) -> list[Any]:
        return items


TOKENIZERS = Characters.train(["abc\n"]), Characters.train(["abd\n"])
RUN = load_settings({"model": {"width": 16}, "task": {"name": "language_modelling", "corpus": "/a/notes.txt"}})
FIRST = RUN.tables(), TOKENIZERS[0].fingerprint(), {"task": {"/a/notes.txt": "12" * 32}}


@pytest.mark.parametrize(
    ("sets", "tokenizer", "digest", "message"),
    [
        ([], 0, "12", None),
        (["training.batch_size=7"], 0, "12", "training.batch_size: 32 in process 0, 7 in process 1"),
        ([], 1, "12", "tokenizer.json: "),
        ([], 0, "34", "task, /a/notes.txt: SHA-256 121212121212… in process 0, SHA-256 343434343434…"),
    ],
)
def test_a_process_that_has_read_something_else_is_named(
    sets: list[str], tokenizer: int, digest: str, message: str | None
) -> None:
    """It would draw the same rows, and find others there."""
    mine = load_settings(RUN.tables(), [*sets, "task.corpus=/b/notes.txt"])
    place = "/a/notes.txt" if digest == "34" else "/b/notes.txt"
    with pytest.raises(RunError, match=re.escape(message)) if message else nullcontext():
        require_alike(Second(1, 2), mine, TOKENIZERS[tokenizer], {"task": {place: digest * 32}})


def test_processes_that_were_told_different_things_do_not_begin(folder: Path) -> None:
    said = json.loads((folder / "found.json").read_text())["unlike"]
    for words, each in zip(("training.batch_size: 4", "resume: True", "back_to: 0"), said, strict=True):
        assert f"{words} in process 0, " in each and "in process 1" in each
    assert not (folder / "unlike").exists()


def test_one_process_needs_no_others() -> None:
    assert ALONE.share([1, 2]) == [1, 2] == ALONE.gather([1, 2])
    assert ALONE.highest(3) == 3 == int(ALONE.total(torch.tensor(3))) == ALONE.led(lambda: 3)


@pytest.mark.parametrize("missing", [True, False])
def test_whether_a_run_of_no_steps_is_saved_is_for_the_leading_process_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    """Whatever this process sees on its own disk: all of them must save, or none."""
    run = Stage("training", None, TrainingSettings(steps=0), 0, True)  # type: ignore[arg-type]
    monkeypatch.setattr(Ranks, "led", lambda self, work: missing)
    trainer = Trainer(tiny_gpt(), [run], tmp_path, "", Reporter())
    trainer.state.done = True
    trainer.run()
    assert bool(trainer.checkpoints.steps()) == missing
