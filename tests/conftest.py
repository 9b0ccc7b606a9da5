"""Small things that many tests share. Real data lie in $HEADWAY_DATA or beside the repository; else tests skip."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from headway.models import (
    GPT,
    EncoderDecoder,
    EncoderDecoderSettings,
    GPTSettings,
    PerceiverGPTSettings,
    RNNLanguageModel,
    RNNLanguageModelSettings,
    RNNSeq2Seq,
    RNNSeq2SeqSettings,
)
from headway.text import Characters

REAL_DATA = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[1] / "../shared/data").resolve()
HAS_GPU = torch.cuda.is_available()
torch.set_num_threads(1)  # the models here are tiny: threads that wait for one another cost more than they save
os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
settings.load_profile("patient")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background is started without it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what nohup starts without this
TOWNS = ("Oslo", "Rome", "Lima", "Kyiv")
LONG = ("test_distributed.py",)  # begun first, so that processes that share the tests end together


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)
    if not HAS_GPU:
        for item in (item for item in items if item.get_closest_marker("gpu")):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True, scope="session")
def without_gpu() -> Iterator[None]:
    """Tests and the processes they start see no GPU, and do the same wherever they run."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_GPU:
            torch.cuda.init()
            torch.cuda.device_count()  # which this process remembers
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(autouse=True)
def with_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, without_gpu: None) -> None:
    """Those marked `gpu` have it."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the real data sets, which the program under test then uses too."""
    if not (REAL_DATA / "birthplaces" / "wiki.txt").is_file():
        pytest.skip(f"the birthplace data are not in {REAL_DATA}")
    monkeypatch.setenv("HEADWAY_DATA", str(REAL_DATA))
    return REAL_DATA


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """A folder with a tiny corpus and questions about it: wiki.txt, train.tsv, dev.tsv."""
    names = [f"{first} {last}" for first in ("Ada", "Bo", "Cy", "Di") for last in ("Lund", "Moe", "Nye", "Orr")]
    facts = [(name, TOWNS[number * 7 % 4]) for number, name in enumerate(names)]
    (tmp_path / "wiki.txt").write_text("".join(f"{name}. {name} was born in {town} .\n" for name, town in facts))
    lines = [f"Where was {name} born?\t{town}\n" for name, town in facts]
    (tmp_path / "train.tsv").write_text("".join(lines[:12]))
    (tmp_path / "dev.tsv").write_text("".join(lines[12:]))
    return tmp_path


@pytest.fixture
def run_file(people: Path) -> Path:
    """A run file over `people` with two short stages of a tiny model."""
    path = people / "tiny.toml"
    path.write_text(
        """
[model]
width = 16
layers = 2
heads = 2
block = 48
[pretraining.task]
name = "span_corruption"
corpus = "wiki.txt"
[pretraining.training]
steps = 6
batch_size = 4
checkpoint_every = 2
[task]
name = "question_answering"
questions = "train.tsv"
dev = "dev.tsv"
corpus = "wiki.txt"
longest_answer = 6
[training]
steps = 5
batch_size = 5
log_every = 1
checkpoint_every = 2
"""
    )
    return path


def tiny_gpt(
    positions: str = "rotary", block: int = 24, vocabulary: int = 19, seed: int = 0, **settings: object
) -> GPT:
    """A small model in float64 with weights large enough that its choices differ."""
    torch.manual_seed(seed)
    defaults = {"width": 16, "layers": 2, "heads": 2, "block": block, "dropout": 0.0, "positions": positions}
    kind = PerceiverGPTSettings if "bottleneck" in settings else GPTSettings
    model = kind(**defaults | settings).build(vocabulary)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def tiny_encoder_decoder(vocabulary: int = 19, seed: int = 0, **settings: object) -> EncoderDecoder:
    """A small model in float64 with weights large enough that its choices differ."""
    torch.manual_seed(seed)
    defaults = {"width": 16, "layers": 2, "heads": 2, "block": 24, "dropout": 0.0}
    model = EncoderDecoderSettings(**defaults | settings).build(vocabulary)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def tiny_rnn(vocabulary: int = 19, seed: int = 0, **settings: object) -> RNNSeq2Seq:
    """The same with recurrent nets."""
    torch.manual_seed(seed)
    defaults = {"width": 12, "hidden": 16, "layers": 2, "block": 24, "dropout": 0.0}
    model = RNNSeq2SeqSettings(**defaults | settings).build(vocabulary)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def tiny_recurrent(vocabulary: int = 19, seed: int = 0, **settings: object) -> RNNLanguageModel:
    """The same for one that continues text."""
    torch.manual_seed(seed)
    defaults = {"width": 12, "hidden": 16, "layers": 2, "block": 24, "dropout": 0.0}
    model = RNNLanguageModelSettings(**defaults | settings).build(vocabulary)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def letters() -> Characters:
    return Characters.train(["abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ.,?0123456789"])
