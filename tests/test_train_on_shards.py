"""A run on token shards: the run that their text would give, with the tokenizer they were made with."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.errors import DataError, RunError, SettingsError
from headway.text.preparation import prepare
from headway.training import order
from headway.training.order import Shuffled

LINES = [f"Line {number} says that {number * 7} is seven times {number}." for number in range(60)]
MODEL = {"width": 16, "layers": 1, "heads": 2, "block": 16}
TRAINING = {"steps": 6, "batch_size": 4, "log_every": 1, "checkpoint_every": 2, "evaluate_every": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    (tmp_path / "questions.tsv").write_text("".join(f"Seven {n}?\t{n * 7}\n" for n in range(20)))
    prepare([tmp_path / "corpus.txt"], tmp_path / "shards", "bpe", size=300, shard_tokens=250)
    return tmp_path


def tables(corpus: Path, **tokenizer: Any) -> dict[str, Any]:
    task = {"name": "language_modelling", "corpus": str(corpus)}
    return {"task": task, "model": MODEL, "training": TRAINING, **({"tokenizer": tokenizer} if tokenizer else {})}


def test_the_same_run_as_on_the_text(folder: Path) -> None:
    runs = [
        headway.train(tables(folder / "corpus.txt", kind="bpe", size=300), folder / "text"),
        headway.train(tables(folder / "shards"), folder / "run"),  # [tokenizer] may be left out
    ]
    seen = [[(record["step"], record.get("loss"), record.get("evaluation")) for record in run.metrics] for run in runs]
    assert seen[0] == seen[1] and len(seen[0]) > 6
    weights = [run.model.state_dict() for run in runs]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert runs[0].tokenizer.fingerprint() == runs[1].tokenizer.fingerprint()
    assert 'kind = "bpe"\nsize = 300' in (folder / "run" / "run.toml").read_text()
    again = headway.train(folder / "run" / "run.toml", folder / "run", resume=True)
    assert again.state.done and headway.train(folder / "run" / "run.toml", folder / "again").metrics


def test_a_token_that_cannot_be_ends_training_with_the_name_of_its_shard(folder: Path) -> None:
    """Bits that change on the disk keep the size of the file."""
    file = folder / "shards" / "shard-00001.bin"
    file.write_bytes(file.read_bytes()[:-40] + b"\xff" * 40)
    with pytest.raises(DataError, match=r"shard-00001.bin: damaged \(token 65535, and the vocabulary has 300\)"):
        headway.train(tables(folder / "shards") | {"training": TRAINING | {"steps": 100}}, folder / "run")
    assert headway.load(folder / "run").state.step % TRAINING["checkpoint_every"] == 0  # whole


def test_shards_that_are_gone_are_not_needed_to_use_the_run(folder: Path) -> None:
    headway.train(tables(folder / "shards"), folder / "run")
    (folder / "shards").rename(folder / "elsewhere")
    run = headway.load(folder / "run")
    assert "".join(run.complete("Line 7", 5)) and run.evaluate(str(folder / "elsewhere"))["tokens"] > 100


def test_shards_of_another_text_are_noticed_when_a_run_is_resumed(folder: Path) -> None:
    """By what their index says of them: prepared anew from the same text they are the same."""
    run = headway.train(tables(folder / "shards"), folder / "run")
    tokenizer = str(folder / "run" / "tokenizer.json")
    for lines, same in ((LINES, True), ([*LINES[1:], "Seven."], False)):
        (folder / "corpus.txt").write_text("\n".join(lines))
        shutil.rmtree(folder / "shards")
        prepare([folder / "corpus.txt"], folder / "shards", tokenizer, shard_tokens=250)
        if same:
            headway.train(run.path, run.path, resume=True)
        else:
            with pytest.raises(RunError, match=rf"task, {re.escape(str(folder / 'shards'))}: 'SHA-256 \w+…' there"):
                headway.train(run.path, run.path, resume=True)
    headway.train(run.path, run.path, resume=True, accept_changes=True)


def test_pretraining_on_shards_and_finetuning_on_text(folder: Path) -> None:
    task = {"name": "question_answering", "questions": str(folder / "questions.tsv")}
    pretraining = {"task": tables(folder / "shards")["task"], "training": TRAINING}
    run = headway.train(
        {"task": task, "training": TRAINING, "pretraining": pretraining, "model": MODEL}, folder / "run"
    )
    assert run.tokenizer.kind == "bpe" and run.answer("Seven 3?")


def test_a_tokenizer_that_contradicts_the_shards_is_refused(folder: Path) -> None:
    for wrong in ({"kind": "bytes"}, {"kind": "bpe", "size": 400}):
        with pytest.raises(SettingsError, match="but the shards hold bpe of 300; leave"):
            headway.train(tables(folder / "shards", **wrong), folder / "run")
    assert not (folder / "run").exists()
    prepare([folder / "corpus.txt"], folder / "other", "bytes")
    both = tables(folder / "shards") | {"pretraining": {"task": tables(folder / "other")["task"], "training": TRAINING}}
    with pytest.raises(DataError, match="were made with different tokenizers; prepare one of them again"):
        headway.train(both, folder / "run")


def test_a_large_order_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Shuffled(50_000_000_000, 4, seed=0).rows(10**9)
    assert len(set(rows.tolist())) == 4 and rows.max() < 50_000_000_000
    monkeypatch.setattr(order, "LARGE", 5)
    seen = torch.cat([Shuffled(10, 4, seed=1).rows(step) for step in range(5)])
    epochs = seen.split(10)
    assert all(epoch.sort().values.equal(torch.arange(10)) for epoch in epochs) and not epochs[0].equal(epochs[1])
