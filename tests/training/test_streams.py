"""Streams: several tasks in one step add up as their weights say, and a run of them can be stopped anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import headway
from headway.configuration import load_settings
from headway.errors import SettingsError
from headway.models import GPT
from headway.tasks.base import IGNORE, Batch, next_token_loss
from headway.training.captured import Buffer, Captured, InLowPrecision, compiling, with_own_code
from headway.training.engine import Plain
from headway.training.optimizer import build_optimizer
from headway.training.order import Shuffled
from headway.training.stage import TrainingSettings, steps_at
from headway.training.streams import Stream, by_length, token_losses
from tests.conftest import tiny_gpt

STREAMS = """
[streams.text]
rows = 3
weight = 0.5
length = 32
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


@pytest.fixture
def mixed(run_file: Path) -> Path:
    path = run_file.with_name("mixed.toml")
    path.write_text(run_file.read_text() + STREAMS)
    return path


class Rows:
    """A task whose rows are given: what a stream needs of it."""

    source_width, smoothing = 0, 0.0

    def __init__(self, rows: torch.Tensor) -> None:
        self.table, self.examples, self.width = rows, len(rows), rows.shape[1] - 1

    def noise(self, count: int, generator: torch.Generator) -> torch.Tensor:
        return torch.empty(0, count)

    def make(self, rows: torch.Tensor, noise: torch.Tensor):
        from headway.tasks import Batch

        return Batch.next_token(self.table[rows], torch.full((len(rows),), self.width + 1))


def test_the_loss_is_the_weighted_sum_of_the_streams_means() -> None:
    torch.manual_seed(0)
    model = tiny_gpt("rotary")
    tasks = [Rows(torch.randint(1, 19, (5, width))) for width in (9, 17)]
    streams = [
        Stream(f"s{i}", task, 4, Shuffled(5, 4, i), i, weight)
        for i, (task, weight) in enumerate(zip(tasks, (1.0, 0.3), strict=True))
    ]
    expected = 0.0
    for stream in streams:
        batch = stream.batch(0)
        expected += stream.weight * float(next_token_loss(model, batch).detach()) / batch.learned()
    optimizer = build_optimizer(model, TrainingSettings())
    done = Plain(model, streams, optimizer, 0, torch.float32, 1.0).step(0, 1.0)
    assert float(done.loss) == pytest.approx(expected, rel=1e-6)
    assert done.tokens == 4 * 8 + 4 * 16


@pytest.mark.parametrize("pieces", [1, 3])
def test_every_streams_own_loss_is_its_mean_whatever_its_weight(pieces: int) -> None:
    torch.manual_seed(0)
    model = tiny_gpt("rotary")
    streams = [
        Stream(name, Rows(torch.randint(1, 19, (5, width))), 4, Shuffled(5, 4, 0), 0, weight)
        for name, width, weight in (("a", 9, 0.7), ("b", 17, 0.0), ("late", 12, 1.0))
    ]
    streams[-1].begin = 3
    expected = {}
    for stream in streams[:2]:
        batch = stream.batch(0)
        expected[stream.name] = float(next_token_loss(model, batch).detach()) / batch.learned()
    optimizer = build_optimizer(model, TrainingSettings())
    done = Plain(model, streams, optimizer, 0, torch.float32, 1.0, pieces).step(0, 1.0)
    assert {name: float(loss) for name, loss in done.losses.items()} == pytest.approx(expected, rel=1e-6)
    assert float(done.loss) == pytest.approx(0.7 * expected["a"], rel=1e-6)


def test_positions_are_those_computed_and_tokens_those_that_are_no_padding() -> None:
    class Ragged(Rows):
        def make(self, rows: torch.Tensor, noise: torch.Tensor):
            from headway.tasks import Batch

            return Batch.next_token(self.table[rows], torch.tensor([3, 9, 5, 9]))

    model = tiny_gpt("rotary")
    stream = Stream("s", Ragged(torch.randint(1, 19, (4, 17))), 4, Shuffled(4, 4, 0), 0)
    for pieces, positions in ((1, 4 * 8), (2, 2 * 4 + 2 * 8)):
        engine = Plain(model, [stream], build_optimizer(model, TrainingSettings()), 0, torch.float32, 1.0, pieces)
        done = engine.step(0, 1.0)
        assert (done.tokens, done.positions) == (2 + 8 + 4 + 8, positions)


def test_a_buffer_gives_every_row_its_share_and_every_stream_its_mean() -> None:
    torch.manual_seed(0)
    streams = [
        Stream(name, Rows(torch.ones(5, 9, dtype=torch.long)), rows, Shuffled(5, rows, 0), 0, weight)
        for name, rows, weight in (("a", 3, 2.0), ("b", 2, 0.0), ("c", 4, 0.5))
    ]
    buffer = Buffer(streams, torch.device("cpu"))
    learned = torch.rand(buffer.targets.shape) < 0.6
    learned[5:] = False  # the last stream teaches nothing in this step
    buffer.targets[learned] = 1
    losses = torch.rand(buffer.targets.shape) * learned
    counts = buffer.learned()
    means = [float(mean) for mean in buffer.means(losses.sum(1), counts)]
    expected = [float(losses[rows][learned[rows]].mean()) for rows in (slice(0, 3), slice(3, 5))]
    assert means == pytest.approx([*expected, 0.0])
    assert float((losses * buffer.shares(counts)).sum()) == pytest.approx(2.0 * expected[0])


def uncaptured(model: GPT, streams: list[Stream], accumulate: int, copy: InLowPrecision) -> Captured:
    """The engine on a CPU, with the batch of the first step in its buffers: all but the capture."""
    engine = Captured.__new__(Captured)
    engine.model, engine.optimizer = model, build_optimizer(model, TrainingSettings())
    engine.clip, engine.accumulate, engine.device = 1.0, accumulate, torch.device("cpu")
    engine.copy, engine.losses = copy, copy.losses
    engine.buffers = [Buffer(group, engine.device) for group in by_length(streams)]
    for buffer in engine.buffers:
        parts = zip(buffer.streams, buffer.inputs.split(buffer.rows), buffer.targets.split(buffer.rows), strict=True)
        for stream, inputs, targets in parts:
            batch = stream.batch(0)
            inputs[:, : batch.inputs.shape[1]] = batch.inputs
            targets[:, : batch.inputs.shape[1]] = batch.targets
    return engine


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_what_a_gpu_captures_says_and_does_the_same_as_a_plain_step(accumulate: int) -> None:
    """Its body is the same on a CPU; only capturing it needs a GPU."""
    plain, captured = tiny_gpt("rotary"), tiny_gpt("rotary")
    torch.manual_seed(0)
    streams = [
        Stream(name, Rows(torch.randint(1, 19, (5, width))), rows, Shuffled(5, rows, 0), 0, weight)
        for name, width, rows, weight in (("a", 9, 4, 0.7), ("b", 11, 5, 0.0), ("c", 21, 3, 1.3))
    ]
    done = Plain(plain, streams, build_optimizer(plain, TrainingSettings()), 0, torch.float32, 1.0).step(0, 1.0)

    engine = uncaptured(captured, streams, accumulate, InLowPrecision(captured, torch.float32))
    loss, norm, means = engine.body()
    names = [stream.name for buffer in engine.buffers for stream in buffer.streams]
    assert dict(zip(names, means.tolist(), strict=True)) == pytest.approx(
        {name: float(each) for name, each in done.losses.items()}, rel=1e-5
    )
    assert (float(loss), float(norm)) == pytest.approx((float(done.loss), float(done.norm)), rel=1e-5)
    for one, other in zip(plain.parameters(), captured.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_reach_the_weights_through_their_16_bit_copies(compiled: bool) -> None:
    """As through a cast inside of the pass, to the last bit: after one pass and, added up, after two."""
    cast, copied = tiny_gpt("rotary").float(), tiny_gpt("rotary").float()
    for model in (cast, copied):
        next(model.parameters()).requires_grad_(False)  # which none reach
    copy = InLowPrecision(copied, torch.bfloat16)
    losses = torch.compile(copy.losses, fullgraph=True, dynamic=False, backend="aot_eager") if compiled else copy.losses
    with torch.no_grad():
        for model in (cast, copied):
            model.head.weight.mul_(3.0)  # after the copies were made: they are taken anew
    copy.take_weights()
    for seed in (0, 1):
        torch.manual_seed(seed)
        rows, targets = torch.randint(1, 19, (2, 3, 9))
        in_pass = {name: weight.to(torch.bfloat16) for name, weight in cast.named_parameters()}
        model = partial(functional_call, cast, in_pass)
        token_losses(model, targets, (rows,), smoothing=0.0).sum().backward()
        losses(targets, rows, smoothing=0.0).sum().backward()
        copy.give_gradients()
        for one, other in zip(cast.parameters(), copied.parameters(), strict=True):
            assert one.grad is other.grad is None if not one.requires_grad else torch.equal(one.grad, other.grad)


class InPass(InLowPrecision):
    """The same with a copy that is made by a cast in every pass."""

    def __init__(self, model: GPT, precision: torch.dtype) -> None:
        super().__init__(model, torch.float32)
        self.precision = precision

    def __call__(self, *given: torch.Tensor) -> torch.Tensor:
        weights = {name: weight.to(self.precision) for name, weight in self.weights.items()}
        return functional_call(self.model, weights, given)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_with_16_bit_copies_are_those_with_a_cast_in_every_pass(accumulate: int, precision: torch.dtype) -> None:
    """To the last bit, also after a pass that broke off."""
    torch.manual_seed(0)
    tables = [torch.randint(1, 19, (5, width)) for width in (9, 21)]
    streams = [Stream(str(number), Rows(table), 4, Shuffled(5, 4, 0), 0) for number, table in enumerate(tables)]
    models = [tiny_gpt("rotary").float(), tiny_gpt("rotary").float()]
    engines = [
        uncaptured(model, streams, accumulate, kind(model, precision))
        for model, kind in zip(models, (InPass, InLowPrecision), strict=True)
    ]
    for _ in range(3):
        for engine in engines:
            buffer = engine.buffers[0]
            engine.losses(buffer.targets, *buffer.given, smoothing=0.0).sum().backward()
        (loss, norm, _), (other_loss, other_norm, _) = (engine.body() for engine in engines)
        assert torch.equal(loss, other_loss) and torch.equal(norm, other_norm)
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(one, other)


def test_a_stream_that_begins_late_sees_its_rows_from_the_first_on() -> None:
    """A whole epoch of its own, whatever the step of the stage is."""
    order = Shuffled(10, 2, 3)
    late = Stream("late", Rows(torch.randint(1, 19, (10, 9))), 2, order, 0, begin=7)
    seen = [late.draw(step)[0].tolist() for step in range(7, 12)]
    assert seen == [order.rows(step).tolist() for step in range(5)]
    assert sorted(row for rows in seen for row in rows) == list(range(10))


def test_a_process_may_compile_any_number_of_models_and_a_model_any_number_of_shapes() -> None:
    """The compiler refuses a piece of code after eight times, and counts over the life of a process."""
    options = {"fullgraph": True, "dynamic": False, "backend": "eager"}
    given = torch.randint(1, 19, (2, 16))
    kept = []  # as those of a notebook are, whose cells still name them
    for number in range(9):
        model = nn.Sequential(nn.Embedding(19, 8 + number), nn.Linear(8 + number, 19))
        copy = InLowPrecision(model, torch.bfloat16)  # type: ignore[arg-type]
        compiled = torch.compile(with_own_code(copy.losses), **options)
        assert torch.equal(compiled(given, given, smoothing=0.0), copy.losses(given, given, smoothing=0.0))
        kept.append(compiled)
    with compiling():
        for length in range(2, 12):
            kept[-1](given[:, :length], given[:, :length], smoothing=0.0)


def test_the_backward_pass_is_compiled_before_it_runs() -> None:
    """Where it is compiled as it runs, that is in a thread of autograd's on a GPU, and no signal is heard meanwhile."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    if not hasattr(torch._functorch.config, "force_non_lazy_backward_lowering"):
        pytest.skip("this version of torch cannot be told to")
    compiled: list[str] = []

    def compiler(name: str) -> Callable[..., Any]:
        return lambda graph, inputs: compiled.append(name) or make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    with compiling():
        y = torch.compile(lambda x: (x * x).sum(), backend=backend)(torch.ones(3, requires_grad=True))
        assert compiled == ["forward", "backward"]
        y.backward()
    assert compiled == ["forward", "backward"]


def test_a_step_without_a_finite_gradient_changes_no_weight() -> None:
    model = tiny_gpt("rotary")
    with torch.no_grad():
        model.head.weight[0, 0] = float("inf")
    before = [parameter.clone() for parameter in model.parameters()]
    stream = Stream("s", Rows(torch.randint(1, 19, (5, 9))), 4, Shuffled(5, 4, 0), 0)
    done = Plain(model, [stream], build_optimizer(model, TrainingSettings()), 0, torch.float32, 1.0).step(0, 1.0)
    assert not done.norm.isfinite()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_streams_of_like_length_run_together() -> None:
    streams = [
        Stream(str(width), Rows(torch.ones(2, width + 1, dtype=torch.long)), 1, Shuffled(2, 1, 0), 0)
        for width in (40, 128, 66, 72, 127)
    ]
    assert [[stream.name for stream in group] for group in by_length(streams)] == [["128", "127"], ["72", "66"], ["40"]]


def test_streams_that_are_learned_in_another_way_run_apart() -> None:
    streams = [
        Stream(str(number), Rows(torch.ones(2, 9, dtype=torch.long)), 1, Shuffled(2, 1, 0), 0) for number in range(3)
    ]
    streams[1].task.smoothing = 0.1
    assert [[stream.name for stream in group] for group in by_length(streams)] == [["0"], ["1"], ["2"]]
    streams[2].task.smoothing = 0.1
    assert [[stream.name for stream in group] for group in by_length(streams)] == [["0"], ["1", "2"]]


def test_a_stream_with_nothing_to_learn_in_a_step_adds_nothing() -> None:
    """Else 0 / 0 would make the whole step's loss no number."""
    model = tiny_gpt("rotary")
    torch.manual_seed(0)
    full, empty = (
        Stream(name, Rows(torch.randint(1, 19, (5, 9)) * wanted), 4, Shuffled(5, 4, 0), 0, weight)
        for name, wanted, weight in (("full", 1, 1.0), ("empty", 0, 0.5))
    )
    empty.task.make = lambda rows, noise: Batch(  # type: ignore[method-assign]
        torch.ones(len(rows), 8, dtype=torch.long), torch.full((len(rows), 8), IGNORE), torch.full((len(rows),), 8)
    )
    expected = float(next_token_loss(model, full.batch(0)).detach()) / full.batch(0).learned()
    done = Plain(model, [full, empty], build_optimizer(model, TrainingSettings()), 0, torch.float32, 1.0).step(0, 1.0)
    assert float(done.loss) == pytest.approx(expected, rel=1e-6)
    assert {name: float(loss) for name, loss in done.losses.items()} == {
        "full": pytest.approx(expected, rel=1e-6),
        "empty": 0.0,
    }


def test_random_numbers_are_of_a_streams_seed_and_step() -> None:
    """Two streams of the same rows, and two runs of another seed, are not corrupted alike; the same step always is."""

    class Noisy(Rows):
        def noise(self, count: int, generator: torch.Generator) -> torch.Tensor:
            return torch.rand(3, count, generator=generator)

    def noise(seed: int, step: int) -> tuple[float, ...]:
        task = Noisy(torch.ones(5, 9, dtype=torch.long))
        return tuple(Stream("s", task, 4, Shuffled(5, 4, 0), seed).draw(step)[1].flatten().tolist())

    assert noise(3, 7) == noise(3, 7)
    assert len({noise(seed, step) for seed in range(5) for step in range(5)}) == 25


def test_the_record_has_each_streams_loss_and_only_where_there_are_streams(mixed: Path, tmp_path: Path) -> None:
    run = headway.train(mixed, tmp_path / "run")
    weights = {"training": 1.0, "text": 0.5, "late": 1.0}
    names = []
    for record in run.metrics:
        if "losses" in record:
            names.append(set(record["losses"]))
            total = sum(weights[name] * loss for name, loss in record["losses"].items())
            assert record["loss"] == pytest.approx(total, rel=1e-5)
    assert names == [{"training", "text"}] * 2 + [{"training", "text", "late"}] * 3
    assert all("losses" not in record for record in run.metrics if record["stage"] == "pretraining")


def test_a_run_of_streams_can_be_stopped_after_any_step(mixed: Path, tmp_path: Path) -> None:
    whole = headway.train(mixed, tmp_path / "whole")
    for stop in (7, 8, 9):  # in the second stage, before and after the late stream begins
        directory = tmp_path / f"stopped-{stop}"

        class Enough(Exception):
            pass

        def watch(record, stop=stop) -> None:
            if record["step"] == stop:
                raise Enough

        with pytest.raises(Enough):
            headway.train(mixed, directory, watch=watch)
        again = headway.train(mixed, directory, resume=True)
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(tensor, again.model.state_dict()[name]), (stop, name)


def test_streams_survive_the_run_file(mixed: Path) -> None:
    settings = load_settings(mixed)
    again = load_settings(settings.tables())
    assert again == settings and list(again.streams) == ["text", "late"]
    assert Path(settings.streams["text"].task.corpus).is_absolute()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"streams": 3}, r"\[streams\] must hold a table a stream"),
        ({"streams": {"a": 3}}, r"\[streams.a\] must be a table"),
        ({"streams": {"a": {}}}, r"streams.a.task.name: missing"),
        ({"streams": {"a": {"row": 3}}}, r"streams.a.row: unknown key; did you mean 'rows'"),
        ({"streams": {"a": {"start": 0.5, "end": 0.5}}}, "streams.a: from step 500 up to 500 of 1000"),
        ({"streams": {"a": {"start": 500.0, "end": 200.0}}}, "it takes part in no step"),
    ],
)
def test_what_is_wrong_with_a_stream_is_named(tables, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings({"task": {"name": "language_modelling", "corpus": "x"}, **tables})


def test_a_share_of_the_steps_or_a_number() -> None:
    assert [steps_at(share, 200) for share in (0.0, 0.25, 1.0, 30.0)] == [0, 50, 200, 30]
