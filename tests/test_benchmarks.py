"""Every benchmark runs to its end, as small as it can be: what it stands on may have changed since it was measured."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SCRIPTS = {path.stem: path for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py")}
ON_REAL_DATA = {"decode_speed", "padding_speed", "train_speed"}
SHORT_RUN = ["pretraining.training.steps=1", "pretraining.training.warmup=0", "training.steps=1", "training.warmup=0"]
SMALLEST = {
    "beam_speed": "--sentences 2 --limit 4 --words 50 --beam 2",
    "course_recipes": " ".join(["--recipes world/demo --out {folder}/runs", *(f"--set {each}" for each in SHORT_RUN)]),
    "decode_speed": "--questions 2 --train-steps 1 --repeat 1",
    "overhead": "--steps 4 --turns 1 --every 2",
    "padding_speed": "--steps 1 --rows 8",
    "prepare_speed": "--gigabytes 0.0003 --vocabulary 300 --text {folder}/lines.txt --folder {folder}",
    "recurrent_speed": "--quick --threads 1",
    "scaling": "--sizes 0.1M --steps 1",
    "threads": "world/demo --steps 1 --counts 1",
    "train_speed": "--nanogpt {folder}/peer --steps 1 --device cpu",
    "transformer_parity": "--quick --threads 1",
}
TOLD = {  # what stands in the last lines, and in none before the work is done
    "course_recipes": "ratio",
    "overhead": "writing thread",
    "recurrent_speed": "fused networks",
    "scaling": '"measured"',
    "threads": "of the fastest",
    "train_speed": "Headway",
    "transformer_parity": "encoder, evaluation, padded",
}
PEER = '''
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    """A stand-in with nanoGPT's interface."""

    def __init__(self, config):
        super().__init__()
        self.table, self.head = nn.Embedding(config.vocab_size, 8), nn.Linear(8, config.vocab_size)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)

    def forward(self, tokens, targets):
        logits = self.head(self.table(tokens))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
'''


@pytest.fixture
def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, str], str]:
    """Starts a script with arguments, and gives what it printed."""
    (tmp_path / "lines.txt").write_text(
        "".join(f"line {number} of a short text, and then {number}\n" for number in range(2000))
    )
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "model.py").write_text(PEER)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # the flow counts here, not the time
    monkeypatch.setattr(sys, "path", [*sys.path])

    def start(name: str, arguments: str) -> str:
        threads = torch.get_num_threads()
        monkeypatch.setattr(sys, "argv", [str(SCRIPTS[name]), *arguments.format(folder=tmp_path).split()])
        try:
            runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out

    return start


def test_every_benchmark_is_tried() -> None:
    assert SMALLEST.keys() == SCRIPTS.keys()


@pytest.mark.parametrize("name", SMALLEST)
def test_it_runs_to_its_end(
    name: str, started: Callable[[str, str], str], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in ON_REAL_DATA:
        request.getfixturevalue("real_data")
    failed: list[object] = []
    monkeypatch.setattr("threading.excepthook", failed.append)
    said = started(name, SMALLEST[name])
    assert not failed, failed
    assert TOLD.get(name, "ratio") in said, said


@pytest.mark.parametrize("name", SCRIPTS)
def test_its_help_names_the_command(
    name: str, started: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        started(name, "--help")
    assert left.value.code == 0
    assert f"python benchmarks/{name}.py" in capsys.readouterr().out
