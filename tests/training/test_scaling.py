"""The memory and time model: what it says of shards is so in a simulated world of 1,024 processes."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import headway
from headway.cli import run_command
from headway.models import GPTSettings, parameter_count
from headway.ranks import Ranks
from headway.tasks import Batch
from headway.training import scaling
from headway.training.checkpoint import tensors_of
from headway.training.distributed import Sharded, Together
from headway.training.engine import Plain
from headway.training.loop import TrainingSettings
from headway.training.optimizer import build_optimizer
from headway.training.order import Shuffled
from headway.training.scaling import Machine, Network, Work
from headway.training.sharded import local
from headway.training.streams import Stream
from tests.conftest import tiny_gpt

LARGE = GPTSettings(width=2048, layers=18, heads=16, block=1024)
DEVICE = Machine(80e9, rate=1e14, layer=1e-4, update=1e-12, activation=34.0, logits=8.0, bytes=2)
SIZE = 1024


@contextmanager
def pretended(rank: int, size: int = SIZE) -> Iterator[Ranks]:
    """One process of a world whose others do not exist: what they would send is never written."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Ranks(rank, size)
    finally:
        dist.destroy_process_group()


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


@pytest.mark.parametrize("rank", [0, 517, SIZE - 1])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_billion_parameters_on_1024_processes(rank: int, optimizer: str) -> None:
    """No process holds more than its share of weights and state, and the first one exactly what is predicted."""
    model = scaling.blank(LARGE, 50_304)
    count = parameter_count(model)
    assert count > 1e9
    expected = scaling.memory(model, Work(8192, 1024, optimizer=optimizer), DEVICE, SIZE, sharded=True)
    with pretended(rank) as ranks:
        Sharded(model, ranks, torch.device("cpu"), torch.bfloat16)
        weights = held_bytes(tensors_of(model).values())
        built = build_optimizer(model, TrainingSettings(optimizer=optimizer))
        state = 0
        for part in built.parts:
            memories = 2 if isinstance(part, torch.optim.AdamW) else 1
            parameters = [each for group in part.param_groups for each in group["params"]]
            state += memories * held_bytes(parameters) + 4 * (memories - 1) * len(parameters)
    assert weights <= expected.weights and state <= expected.optimizer
    if rank == 0:
        assert (weights, state) == (expected.weights, expected.optimizer)
    share = 4 * count / SIZE
    assert share <= expected.weights < 1.02 * share  # what rounding up to whole rows costs


def test_all_parts_together_are_the_model() -> None:
    model, total = scaling.blank(GPTSettings(width=24, layers=1, heads=2, block=16), 37), 0
    count = parameter_count(model)
    for rank in range(5):
        with pretended(rank, 5) as ranks:
            part = scaling.blank(GPTSettings(width=24, layers=1, heads=2, block=16), 37)
            Sharded(part, ranks, torch.device("cpu"), torch.float32)
            total += held_bytes(tensors_of(part).values())
    assert total == 4 * count


class Rows:
    """Eight rows of five tokens."""

    source_width, smoothing = 0, 0.0

    width = 4

    def noise(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.empty(0, count)

    def make(self, rows: torch.Tensor, noise: torch.Tensor) -> Batch:
        return Batch.next_token(rows[:, None] + torch.arange(5) + 1, torch.full((len(rows),), 5))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("rank", [0, SIZE - 1])  # with eight rows for 1,024 processes, one has a row and one has none
def test_a_step_of_one_among_1024(rank: int, optimizer: str) -> None:
    """Every operation of a sharded step can be carried out, and the state it leaves has the size that is predicted."""
    model = tiny_gpt().float()
    expected = scaling.memory(model, Work(8, 4, optimizer=optimizer), DEVICE, SIZE, sharded=True)
    with pretended(rank) as ranks:
        layout = Sharded(model, ranks, torch.device("cpu"), torch.float32)
        built = build_optimizer(model, TrainingSettings(optimizer=optimizer))
        stream = Stream("rows", Rows(), 8, Shuffled(8, 8, 0), 0)  # type: ignore[arg-type]
        done = Together(Plain(model, [stream], built, 0, torch.float32, 1.0), layout).step(0, 1.0)
        assert done.tokens == (4 if rank == SIZE - 1 else 0)
        for parameter in model.parameters():  # what others would have sent is no number, perhaps, and was passed over
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)
        for part in built.parts:
            part.step()
        weights, state = held_bytes(model.parameters()), held_bytes(built.state().values())
    assert weights <= expected.weights and state <= expected.optimizer
    if rank == 0:
        assert (weights, state) == (expected.weights, expected.optimizer)


# ---- the model itself


def test_sharding_divides_what_it_should() -> None:
    model = scaling.blank(LARGE, 50_304)
    work = Work(8192, 1024)
    one, ddp, fsdp = (
        scaling.memory(model, work, DEVICE, size, sharded) for size, sharded in ((1, False), (64, False), (64, True))
    )
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (one.weights, one.gradients, one.optimizer)
    assert fsdp.weights == pytest.approx(one.weights / 64, rel=0.01)
    assert fsdp.activations == ddp.activations == pytest.approx(one.activations / 64)
    assert fsdp.total < ddp.total < one.total
    pieces = scaling.memory(model, Work(8192, 1024, pieces=4), DEVICE, 64, True)
    assert pieces.activations == pytest.approx(fsdp.activations / 4)


def test_the_time_of_a_step() -> None:
    model, work, network = scaling.blank(LARGE, 50_304), Work(8192, 1024), Network()

    def times(size: int, sharded: bool) -> scaling.Duration:
        return scaling.duration(model, work, DEVICE, network, size, sharded)

    assert times(1, False).network == 0.0 and times(1, False).compute > 7 * times(8, False).compute
    ddp, fsdp = times(64, False), times(64, True)
    assert ddp.network == pytest.approx(2 * 4 * parameter_count(model) * 63 / 64 / network.between)
    assert fsdp.network == pytest.approx(ddp.network)  # two bytes twice and four once, against four twice
    assert ddp.overlapped == max(ddp.compute, ddp.network) < ddp.apart
    assert times(8, False).network < ddp.network  # within a machine


def test_the_operations_of_a_step_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = GPTSettings(width=64, layers=3, heads=4, block=32, positions="learned", attention="unscaled").build(50)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(4, 32, dtype=torch.long)).sum().backward()
    attention = 2 * 6.0 * 4 * 32 * 3 * 64 * 32  # the whole row, where the causal kernels compute half of it
    counted = counter.get_total_flops() - attention
    predicted = scaling.operations(model, 4 * 32, 32) - attention / 2
    assert predicted == pytest.approx(counted, rel=0.05)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["scale", "shakespeare/char", "--gpus", "1,4", "--machine", "cpu"]
    assert run_command([*call, "--markdown"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row[1] for row in rows[2:]] == ["one", "ddp", "fsdp"]
    assert run_command(call) == 0
    facts, *tables = capsys.readouterr().out.rstrip().split("\n\n")
    assert "256 tokens in the vocabulary (tokenizer.size is not set; --vocabulary)" in facts
    assert "This device is a CPU" in facts
    for text in tables:
        lines = text.splitlines()
        assert len(lines) == 2 + 3 and len({len(line) for line in lines}) == 1  # aligned
    cells = {cell for text in tables for line in text.splitlines() for cell in re.split("  +", line.strip())}
    assert {cell.strip("| ") for row in rows if "---:" not in row for cell in row} <= cells
    assert run_command(["scale", "shakespeare/char", "--gpus", "1,x"]) == 2
    assert run_command(["scale", "shakespeare/char", "--machine", "abacus"]) == 2
    said = capsys.readouterr().err
    assert "--gpus 1,x: must be numbers" in said and "--machine abacus: not measured yet" in said


@pytest.mark.parametrize("recipe", ["toy/copy", "multi30k/rnn-de-en", "shakespeare/rnn-laptop"])
def test_models_that_are_not_covered_are_named(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["scale", recipe]) == 2
    assert capsys.readouterr().err.startswith("headway: model.kind = ")


def test_every_stream_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["scale", "birthplaces/best", "--gpus", "1"]) == 0
    shown = capsys.readouterr().out
    assert "10 rows of 128 tokens, 154 rows of 128 tokens (retold)" in shown
    assert "502 rows of 72 tokens (asked)" in shown


@pytest.mark.parametrize("size", [1, 8])
def test_streams_take_the_time_of_all_and_the_memory_of_the_largest(size: int) -> None:
    model, plain = scaling.blank(LARGE, 50_304), replace(DEVICE, update=0.0)
    streams = [(64, 128), (512, 72), (8, 1024)]
    (rows, length), *beside = streams
    together = Work(rows, length, 2, beside=tuple(beside))
    apart = [Work(*stream, 2) for stream in streams]
    assert together.tokens == sum(each.tokens for each in apart)
    times = [scaling.duration(model, each, plain, Network(), size, False).compute for each in (together, *apart)]
    assert times[0] == pytest.approx(sum(times[1:]))
    needs = [scaling.memory(model, each, plain, size, False) for each in (together, *apart)]
    assert needs[0].total == max(each.total for each in needs[1:])
    network = [scaling.duration(model, each, plain, Network(), size, False).network for each in (together, *apart)]
    assert len(set(network)) == 1  # gradients are exchanged once


def test_the_vocabulary_of_a_run_is_its_tokenizers(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run_file.parent / "run"
    run = headway.train(run_file, out, ["pretraining.training.steps=0", "training.steps=0"])
    for source in (out, out / "run.toml"):
        assert run_command(["scale", str(source), "--gpus", "1"]) == 0
        shown = capsys.readouterr().out
        assert f"{run.parameters:,} parameters with {len(run.tokenizer):,} tokens in the vocabulary" in shown
        assert "is not set" not in shown
    assert run_command(["scale", str(out), "--gpus", "1", "--vocabulary", "999"]) == 0
    assert "999 tokens in the vocabulary" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0"), (512, "0.5 kB"), (40_000, "40.0 kB"), (1.022e8, "102.2 MB"), (1.234e9, "1.23 GB")]
)
def test_an_amount_of_memory_is_never_shown_as_nothing(count: float, shown: str) -> None:
    assert scaling.amount(count) == shown


def test_every_machine_says_where_it_was_measured() -> None:
    for name, machine in scaling.machines().items():
        assert "benchmarks/scaling.py" in machine.measured, name


def test_the_tables_of_the_page_are_what_the_command_prints() -> None:
    path = Path(__file__).parents[2] / "docs" / "make_scaling.py"
    specification = importlib.util.spec_from_file_location("make_scaling", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    page = path.with_name("scaling.md").read_text("utf-8")
    assert page == module.page() and page.count("headway scale shakespeare/char") >= len(scaling.machines())
