"""What makes a step fast is a choice with a reason, and where it is not to be had, the step is taken another way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headway
from headway.configuration import load_settings
from headway.errors import SettingsError
from headway.tasks.base import Task
from headway.tasks.corpus import Corpus, Stored
from headway.training import engines
from headway.training.captured import CannotCapture
from headway.training.engines import FirstThatWorks
from headway.training.feed import choose_place
from headway.training.optimizer import build_optimizer, choose_fused
from headway.training.stage import TrainingSettings
from tests.conftest import tiny_gpt
from tests.training.test_checkpoint import Said

GPU = torch.device("cuda")


class Held(Task):
    """A task that has loaded something."""

    def __init__(self, **data: Any) -> None:
        vars(self).update(data)

    load = make = evaluate = None  # type: ignore[assignment]


def stream(**data: Any) -> Any:
    return SimpleNamespace(task=Held(**data))


def test_the_bytes_of_a_tasks_data_are_all_that_would_be_moved() -> None:
    tokens, starts = torch.zeros(1000, dtype=torch.int32), torch.zeros(11, dtype=torch.long)
    task = Held(corpus=Corpus(tokens, starts), data=torch.zeros(3), name="x", notes=[])
    assert task.nbytes == 4000 + 88 + 12 and not task.on_disk
    moved = task.on(torch.device("meta"))
    assert moved.corpus.tokens.is_meta and moved.data.is_meta and not task.data.is_meta
    assert Held(train=Stored([1, 2, 3])).on_disk  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "free", "on_device", "words"),
    [
        ("auto", 4 << 20, True, "on the GPU, where their data (1.0 MB) fit"),
        ("auto", (4 << 20) - 4, False, "on the host, as their data (0.0 GB) are much for 0.0 GB"),
        ("device", 0, True, "on the GPU, as asked"),
        ("host", 1 << 40, False, "on the host, as asked"),
    ],
)
def test_where_rows_are_made(
    wanted: str, free: int, on_device: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 10)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 10)
    streams = [stream(a=torch.zeros(1 << 16)), stream(b=torch.zeros(3 << 16))]
    assert choose_place(streams, GPU, wanted) == (on_device, f"rows made {words}")


def test_rows_of_data_on_disk_are_made_on_the_host() -> None:
    on_disk = stream(train=Stored([1]))  # type: ignore[arg-type]
    assert choose_place([stream(a=torch.zeros(1)), on_disk], GPU, "auto") == (
        False,
        "rows made on the host, as their data stay on disk",
    )


def test_a_fused_optimizer_is_the_choice_of_cpus_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_fused(cpu) == (True, "AdamW in one kernel (fused)")
    assert choose_fused(cpu, "on") == (True, "AdamW in one kernel, as asked")
    assert choose_fused(cpu, "off") == (False, "AdamW without fused kernels, as asked")
    assert not choose_fused(torch.device("mps"))[0]
    plain = torch.optim.AdamW.__init__

    def lacking(self: Any, *given: Any, fused: bool | None = None, **options: Any) -> None:
        if fused:
            raise RuntimeError("`fused=True` requires\nanother device")
        plain(self, *given, fused=fused, **options)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", lacking)
    assert choose_fused(cpu, "on") == (False, "AdamW without fused kernels (`fused=True` requires another device)")
    assert build_optimizer(tiny_gpt(), TrainingSettings()).parts[0].param_groups[0]["fused"] is None


def test_a_run_without_fused_kernels_learns_the_same(run_file: Path, tmp_path: Path) -> None:
    found = []
    for fused in ("on", "off"):
        said = Said()
        sets = [f"{stage}.fused={fused}" for stage in ("training", "pretraining.training")]
        run = headway.train(run_file, tmp_path / fused, sets, report=said)
        words = "AdamW in one kernel, as asked" if fused == "on" else "AdamW without fused kernels, as asked"
        assert any(words in line for line in said.lines), said.lines
        found.append([record["loss"] for record in run.metrics if "loss" in record])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_only_a_fused_optimizers_step_is_captured() -> None:
    model, settings = tiny_gpt(), TrainingSettings(steps=5000, engine="compiled")
    assert engines.choose(settings, GPU, model, capturable=True)[0] == 0
    assert engines.choose(settings, GPU, model, capturable=False) == (
        engines.OPERATIONS,
        "operation by operation, as only a fused optimizer's step can be captured",
    )


def test_what_a_cpu_cannot_do_is_said(run_file: Path, tmp_path: Path) -> None:
    said = Said()
    headway.train(run_file, tmp_path / "run", ["training.engine=graph", "training.batches=device"], report=said)
    assert any(
        "as graph is for CUDA GPUs; training.batches = device is for captured steps" in line for line in said.lines
    )
    with pytest.raises(SettingsError, match="did you mean 'device'"):
        load_settings(run_file, ["training.batches=devise"])


def test_rows_may_be_made_elsewhere_when_a_run_is_resumed(run_file: Path, tmp_path: Path) -> None:
    headway.train(run_file, tmp_path / "run", ["training.steps=3"])
    headway.train(run_file, tmp_path / "run", ["training.steps=3", "training.batches=host"], resume=True)


def test_the_first_engine_that_gets_ready_takes_the_steps() -> None:
    said: list[str] = []

    class Fake:
        def __init__(self, works: bool) -> None:
            self.works, self.ready = works, []

        def prepare(self, step: int, undisturbed: Any) -> None:
            if not self.works:
                raise CannotCapture("no such thing")
            self.ready.append(step)

        def step(self, step: int, rate: float) -> Any:
            assert step in self.ready
            return step, rate

    choices = [(name, lambda works=works: Fake(works)) for name, works in (("a", False), ("b", False), ("c", True))]
    engine = FirstThatWorks(choices, said.append)  # type: ignore[arg-type]
    engine.prepare(3)
    assert engine.step(3, 0.5) == (3, 0.5)
    assert [line.split("; ")[1] for line in said] == ["b instead", "c instead"] and "no such thing" in said[0]
    with pytest.raises(CannotCapture):
        FirstThatWorks(choices[:2], said.append).prepare(0)  # type: ignore[arg-type]
