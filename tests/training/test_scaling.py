"""The memory and time model: what it says of shards is so in a simulated world of 1,024 processes."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import headway
from headway.cli import run_command
from headway.models import GPTSettings, parameter_count
from headway.ranks import Ranks
from headway.tasks import Batch
from headway.training import scaling
from headway.training.checkpoint import tensors_of
from headway.training.distributed import Sharded
from headway.training.engine import Plain
from headway.training.optimizer import build_optimizer
from headway.training.order import Shuffled
from headway.training.scaling import Machine, Network, Work
from headway.training.sharded import local
from headway.training.stage import TrainingSettings
from headway.training.streams import Stream
from tests.conftest import tiny_gpt

LARGE = GPTSettings(width=2048, layers=18, heads=16, block=1024)
DEVICE = Machine(
    memory=80e9,
    rate=1e14,
    layer=1e-4,
    update=1e-12,
    activation=34.0,
    logits=8.0,
    bytes=2,
    ahead=True,
    element=1e-10,
    entry=1e-11,
    base=5e7,
)
CPU = replace(DEVICE, bytes=4, ahead=False, element=0.0, entry=0.0)
SIZE = 1024
ROOT = Path(__file__).parents[2]


def script(path: Path) -> Any:
    """A file that is no part of the package, as a module."""
    name = f"script_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # where dataclasses look their names up
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> Any:
    return script(ROOT / "benchmarks" / "scaling.py")


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
        done = Plain(model, [stream], built, 0, torch.float32, 1.0, peers=layout).step(0, 1.0)
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


class Exchanged(TorchDispatchMode):
    """Counts the bytes of what is put together from all processes or added up among them."""

    bytes = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whole = {"c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}.get(operation.name())
        if whole is not None:
            self.bytes += args[whole].nbytes
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_what_sharded_processes_exchange_in_a_step(pieces: int) -> None:
    """Weights are gathered for every piece, gradients exchanged once: as many bytes as the model says."""
    model = tiny_gpt().float()
    machine, network = replace(DEVICE, bytes=4), Network()
    expected = scaling.duration(model, Work(8, 4, pieces), machine, network, 2, sharded=True).network
    with pretended(0, 2) as ranks:
        layout = Sharded(model, ranks, torch.device("cpu"), torch.float32)
        stream = Stream("rows", Rows(), 8, Shuffled(8, 8, 0), 0)  # type: ignore[arg-type]
        optimizer = build_optimizer(model, TrainingSettings())
        with Exchanged() as exchanged:
            Plain(model, [stream], optimizer, 0, torch.float32, 1.0, pieces, layout).step(0, 1.0)
    assert exchanged.bytes / 2 / network.within == pytest.approx(expected, rel=0.02)  # rows are filled up to halves


# ---- the model itself


def test_sharding_divides_what_it_should() -> None:
    model = scaling.blank(LARGE, 50_304)
    work = Work(8192, 1024)
    one, ddp, fsdp = (
        scaling.memory(model, work, DEVICE, size, sharded) for size, sharded in ((1, False), (64, False), (64, True))
    )
    assert (ddp.weights, ddp.gradients, ddp.optimizer) == (one.weights, one.gradients, one.optimizer)
    assert fsdp.weights == pytest.approx(one.weights / 64, rel=0.01)
    assert fsdp.activations == ddp.activations == pytest.approx((one.activations + one.gradients) / 64)
    assert fsdp.total < ddp.total < one.total
    pieces = scaling.memory(model, Work(8192, 1024, pieces=4), DEVICE, 64, True)
    assert pieces.activations == pytest.approx(fsdp.activations / 4)


@pytest.mark.parametrize("rows", [1, 2, 4, 64])  # the gradient of a billion parameters is that of three rows
def test_one_process_needs_room_for_the_gradient_or_for_activations(rows: int) -> None:
    model = scaling.blank(LARGE, 50_304)
    gradient = 4.0 * parameter_count(model)
    activations = rows * 1024 * (34.0 * 18 * 2048 + 8.0 * 50_304)
    fixed = 14.0 * parameter_count(model) + 5e7  # weights, AdamW, copies in bfloat16, libraries

    def need(size: int = 1, **changes: Any) -> float:
        return scaling.memory(model, replace(Work(rows * size, 1024), **changes), DEVICE, size, False).total

    assert need() == pytest.approx(fixed + max(gradient, activations))
    both = pytest.approx(fixed + gradient + activations)
    assert need(rows=4 * rows, pieces=4) == both  # a piece's gradient is there while the next is computed
    assert need(beside=((rows, 1024),)) == both  # so is a stream's
    assert need(size=8) == both  # buckets of gradients are there before and after
    assert need(pieces=4) <= need(pieces=2)


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as they live."""

    def __init__(self, old: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.old = {each.untyped_storage()._cdata for each in old}
        self.bytes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (key := tensor.untyped_storage()._cdata) not in self.old:
                storage = tensor.untyped_storage()
                if key not in self.bytes:
                    self.bytes[key] = storage.nbytes()
                    weakref.finalize(storage, self.bytes.pop, key)
        self.peak = max(self.peak, sum(self.bytes.values()))
        return made


@pytest.mark.parametrize("rows", [1, 2, 24])
def test_a_step_lets_go_of_activations_as_its_gradient_grows(rows: int, bench: Any) -> None:
    """Beside weights and state it never holds much more than the larger of both, as the model says."""
    model = GPTSettings(width=64, layers=8, heads=2, block=32, dropout=0.0).build(32)
    stream = Stream("rows", bench.RandomRows(32, 32), rows, Shuffled(64, rows, 0), 0)
    engine = Plain(model, [stream], build_optimizer(model, TrainingSettings()), 0, torch.float32, 1.0, accumulate=1)
    engine.step(0, 1.0)
    gradient, activations = 4 * parameter_count(model), bench.kept(model, stream.batch(1), torch.float32)
    assert (gradient > activations) == (rows == 1)
    with Alive([*model.parameters(), *engine.optimizer.state().values()]) as alive:
        engine.step(1, 1.0)
    assert max(gradient, activations) <= alive.peak < 1.2 * max(gradient, activations)


@pytest.mark.parametrize("machine", [DEVICE, CPU])
@pytest.mark.parametrize(("size", "sharded"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("pieces", [1, 4])
def test_more_work_never_needs_less(machine: Machine, size: int, sharded: bool, pieces: int) -> None:
    def needs(layers: int, rows: int) -> tuple[float, float]:
        model, work = scaling.blank(replace(LARGE, layers=layers), 1000), Work(rows, 64, pieces)
        time = scaling.duration(model, work, machine, Network(), size, sharded)
        return scaling.memory(model, work, machine, size, sharded).total, time.compute

    for found in (
        [needs(layers, 64) for layers in (1, 2, 8)],
        [needs(2, rows) for rows in (32, 256, 4096)],  # from four rows a device on, as many as there are pieces
    ):
        assert all(list(each) == sorted(each) for each in zip(*found, strict=True))
        assert all(each[0] < each[-1] for each in zip(*found, strict=True))


def test_launches_run_ahead_of_the_arithmetic_on_a_gpu_alone() -> None:
    model = scaling.blank(LARGE, 50_304)
    arithmetic = scaling.operations(model, 1024, 1024) / 1e14  # of a row
    update = 1e-12 * parameter_count(model)

    def seconds(machine: Machine, work: Work, size: int = 1) -> float:
        return scaling.duration(model, work, machine, Network(), size, False).compute

    for rows, pieces in ((1, 1), (64, 1), (64, 64)):
        for layer in (0.0, arithmetic / 18, 4 * arithmetic / 18):
            launches = pieces * 18 * layer
            for machine, both in ((DEVICE, max), (CPU, sum)):
                found = seconds(replace(machine, layer=layer), Work(rows, 1024, pieces))
                between = 1024 * (machine.element * 18 * 2048 + machine.entry * 50_304)
                assert found == pytest.approx(both((rows * (arithmetic + between), launches)) + update)
    slow = replace(DEVICE, layer=1.0, update=0.0)
    assert seconds(slow, Work(64, 1024, 8), 16) == 4 * 18.0  # four rows a process are no more than four pieces


def test_the_time_of_a_step() -> None:
    model, work, network = scaling.blank(LARGE, 50_304), Work(8192, 1024), Network()

    def times(size: int, sharded: bool) -> scaling.Duration:
        return scaling.duration(model, work, DEVICE, network, size, sharded)

    assert times(1, False).network == 0.0 and times(1, False).compute > 7 * times(8, False).compute
    ddp, fsdp = times(64, False), times(64, True)
    assert ddp.network == pytest.approx(2 * 4 * parameter_count(model) * 63 / 64 / network.between)
    root = 2 * 2048 * 50_304 + 2 * 2048  # embedding, head, last norm: gathered once
    saved = (ddp.network - fsdp.network) * network.between * 64 / 63
    assert saved == pytest.approx(2 * root)  # two bytes twice and four once, against four twice
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


def test_a_machine_is_found_by_part_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    whole = next(name for name in scaling.machines() if "H200" in name)
    assert run_command(["scale", "shakespeare/char", "--machine", "h200", "--gpus", "1"]) == 0
    assert f"device: {whole}, " in capsys.readouterr().out
    assert run_command(["scale", "shakespeare/char", "--machine", "h2oo", "--gpus", "1"]) == 2
    assert "--machine h2oo: not measured yet" in capsys.readouterr().err


def test_a_run_of_two_stages_is_described_by_its_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["scale", "birthplaces/course-rope", "--gpus", "1"]) == 0
    assert "a step of the last stage has" in capsys.readouterr().out


def test_every_machine_says_where_it_was_measured() -> None:
    for name, machine in scaling.machines().items():
        assert "benchmarks/scaling.py" in machine.measured, name


def test_the_tables_of_the_page_are_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    assert page == script(ROOT / "docs" / "make_scaling.py").page()
    assert page.count("headway scale shakespeare/char") >= len(scaling.machines())


# ---- the constants of a machine


def measured(bench: Any, machine: Machine, noise: float = 0.0) -> list[Any]:
    """What a machine with these constants would measure."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for name in bench.LARGE:
        width, layers, heads, length, vocabulary, batches = bench.SIZES[name]
        model = scaling.blank(GPTSettings(width=width, layers=layers, heads=heads, block=length), vocabulary)
        for rows in batches:
            work = Work(rows, length)
            memory = scaling.memory(model, work, machine, 1, False).total
            seconds = scaling.duration(model, work, machine, Network(), 1, False).compute
            off = 1 + noise * (2 * torch.rand(2, generator=generator, dtype=torch.float64) - 1)
            found.append(bench.Measured(name, model, work, memory * float(off[0]), seconds * float(off[1])))
    return found


def measurable(ahead: bool) -> Machine:
    machine = replace(DEVICE, rate=6e14, layer=4e-3, update=1e-11, activation=40.0, logits=12.0, base=7e7, ahead=ahead)
    return machine if ahead else replace(machine, element=0.0, entry=0.0)


UNKNOWN = Machine(1e11, 1.0, 0.0, 0.0, 0.0, 0.0, bytes=2, ahead=True)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("activation", [40.0, 10.0])  # with 10, those of three points are less than the gradient
def test_a_fit_finds_the_constants_of_a_machine(bench: Any, ahead: bool, activation: float) -> None:
    machine = replace(measurable(ahead), activation=activation, logits=activation / 4)
    found = measured(bench, machine)
    hidden = sum(scaling.memory(each.model, each.work, machine, 1, False).activations == 0 for each in found)
    assert hidden == (1 if activation == 40.0 else 3)
    without = replace(machine, layer=0.0, update=0.0)
    launched = sum(
        scaling.duration(each.model, each.work, without, Network(), 1, False).compute
        < machine.layer * scaling.layers(each.model)
        for each in found
    )
    assert 0 < launched < len(found)  # of either kind
    fitted = bench.fit(found, replace(UNKNOWN, ahead=ahead))
    for name in ("activation", "logits", "base", "rate", "element", "entry", "layer", "update"):
        assert getattr(fitted, name) == pytest.approx(getattr(machine, name), rel=1e-6), name


@pytest.mark.parametrize("ahead", [True, False])
def test_a_fit_to_what_is_not_exact_stays_near(bench: Any, ahead: bool) -> None:
    found = measured(bench, measurable(ahead), noise=0.1)
    fitted = bench.fit(found, replace(UNKNOWN, ahead=ahead))
    for each in found:
        memory = scaling.memory(each.model, each.work, fitted, 1, False).total
        seconds = scaling.duration(each.model, each.work, fitted, Network(), 1, False).compute
        assert memory == pytest.approx(each.memory, rel=0.2) and seconds == pytest.approx(each.seconds, rel=0.2)
    assert min(fitted.activation, fitted.logits, fitted.base, fitted.layer, fitted.update) >= 0


def test_on_a_cpu_arithmetic_takes_the_time_of_elements_and_entries(bench: Any) -> None:
    fitted = bench.fit(measured(bench, replace(measurable(True), ahead=False)), replace(UNKNOWN, ahead=False))
    assert fitted.element == fitted.entry == 0.0


@pytest.mark.parametrize("layer", [0.0, 1.0])
def test_a_fit_to_one_kind_of_point_is_finite(bench: Any, layer: float) -> None:
    """Where launches hide all arithmetic, the rate is the highest that was seen."""
    nothing = dict.fromkeys(("update", "activation", "logits", "element", "entry"), 0.0)
    found = measured(bench, replace(measurable(True), layer=layer, **nothing))
    fitted = bench.fit(found, UNKNOWN)
    assert fitted.layer == pytest.approx(layer, abs=1e-9) and fitted.activation == fitted.logits == 0.0
    seen = max(scaling.operations(each.model, each.work.tokens, each.work.length) / each.seconds for each in found)
    assert math.isfinite(fitted.rate) and fitted.rate == pytest.approx(seen)
