"""The engine for GPUs: captured and compiled steps are the plain ones, stopped anywhere too. Where there is no GPU, and
also where there is one, a stand-in on the CPU shows the same of what is captured."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.configuration import load_settings
from headway.console import Reporter
from headway.errors import Interrupted, UserError
from headway.nn import ATTENTIONS
from headway.nn.dropout import dropout
from headway.tasks.base import Task
from headway.training.captured import Buffer, Captured, broken_off
from headway.training.distributed import Layout
from headway.training.engine import Outcome
from headway.training.feed import Feed
from tests.training.stand_in import stand_in
from tests.training.test_resume import final_weights, same
from tests.training.test_streams import STREAMS

PLAIN = ("model.dropout=0", "model.positions=learned")  # which every attention takes
STAGES = ("pretraining.training", "training")


class Heard(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True, params=[pytest.param("gpu", marks=pytest.mark.gpu), "stand-in"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "stand-in":
        if request.node.get_closest_marker("gpu"):
            pytest.skip("of a real GPU")
        stand_in(monkeypatch)
    yield request.param
    broken_off.clear()


@pytest.fixture
def mixed(run_file: Path) -> Path:
    path = run_file.with_name("mixed.toml")
    path.write_text(run_file.read_text() + STREAMS)
    return path


def every_stage(*sets: str) -> list[str]:
    return [f"{stage}.{each}" for stage in STAGES for each in (*sets, "log_every=1")]


def losses(run: headway.Run) -> list[float]:
    return [record["loss"] for record in run.metrics if "loss" in record]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_all_engines_train_alike(mixed: Path, optimizer: str, accumulate: int) -> None:
    found, taking_part = {}, {}
    for engine in ("plain", "graph", "compiled"):
        sets = every_stage(
            f"engine={engine}", f"optimizer={optimizer}", f"accumulate={accumulate}", "precision=float32"
        )
        run = headway.train(mixed, mixed.parent / engine, [*sets, "model.dropout=0"])
        found[engine] = losses(run)
        taking_part[engine] = [[*record["losses"]] for record in run.metrics if "losses" in record]
    tolerance = 1e-4 if optimizer == "adamw" else 2e-3  # Muon's products are bfloat16
    assert found["graph"] == pytest.approx(found["plain"], rel=tolerance)
    assert found["compiled"] == pytest.approx(found["plain"], rel=tolerance)
    assert taking_part["graph"] == taking_part["compiled"] == taking_part["plain"]
    assert taking_part["plain"][0] == ["training", "text"] and "late" in taking_part["plain"][-1]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_gradients_in_16_bits_are_those_of_float32(mixed: Path, precision: str) -> None:
    """In parts too, and whatever they were multiplied by."""
    found = []
    for engine, how in (("plain", "float32"), ("graph", precision)):
        sets = every_stage(f"engine={engine}", f"precision={how}", "accumulate=2", "learning_rate=1e-6")
        run = headway.train(mixed, mixed.parent / engine, [*sets, "model.dropout=0"])
        found.append([record["gradient_norm"] for record in run.metrics if "loss" in record])
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_what_a_step_found_stays_what_it_was(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps write where those before them wrote; nobody has to look at once."""
    step, done = Captured.step, []
    monkeypatch.setattr(Captured, "step", lambda self, *given: done.append(step(self, *given)) or done[-1])
    run = headway.train(mixed, mixed.parent / "out", every_stage("engine=graph", "precision=float32"))
    records = [record for record in run.metrics if "loss" in record]
    for outcome, record in zip(done, records, strict=True):
        assert float(outcome.loss) == record["loss"] and float(outcome.norm) == record["gradient_norm"]
        if "losses" in record:
            assert {name: float(mean) for name, mean in outcome.losses.items()} == record["losses"]


def test_a_stream_without_anything_to_learn_divides_by_one(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 0 / 0 would make the whole step's loss no number."""
    learned = []
    init = Buffer.__init__

    def with_nothing_in_it(self: Buffer, *given: object) -> None:
        init(self, *given)
        learned.extend(map(int, self.learned()))

    monkeypatch.setattr(Buffer, "__init__", with_nothing_in_it)
    headway.train(mixed, mixed.parent / "out", every_stage("engine=graph", "precision=float32", "steps=2"))
    assert learned and set(learned) == {1}


def test_a_step_without_numbers_between_two_lines_is_named(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waited for it; its loss is kept until somebody looks."""
    step = Captured.step

    def poisoned(self: Captured, number: int, rate: float) -> Outcome:
        done = step(self, number, rate)
        if number == 2:
            done.loss.fill_(float("nan"))
        return done

    monkeypatch.setattr(Captured, "step", poisoned)
    sets = ["training.log_every=100", "pretraining.training.steps=0", "training.engine=graph"]
    with pytest.raises(UserError, match=r"step 3 had a loss or gradient that is no number"):
        headway.train(run_file, run_file.parent / "out", [*sets, "pretraining.training.warmup=0"])


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["plain", "graph", "compiled"])
def test_tf32_is_for_the_products_of_a_step_alone(run_file: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are those of float32 but for rounding, and evaluation has full products."""
    found, seen = {}, []
    evaluate = Layout.evaluate
    monkeypatch.setattr(
        Layout, "evaluate", lambda *given: seen.append(torch.get_float32_matmul_precision()) or evaluate(*given)
    )
    for precision in ("float32", "tf32"):
        sets = [*every_stage(f"engine={engine}", f"precision={precision}"), "model.dropout=0", "model.width=64"]
        found[precision] = losses(headway.train(run_file, run_file.parent / precision, sets))
    assert found["tf32"] == pytest.approx(found["float32"], rel=1e-2)
    assert found["tf32"] != pytest.approx(found["float32"], rel=1e-7)
    assert seen and set(seen) == {"highest"} and torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("kind", sorted(ATTENTIONS.keys() - {"linformer"}))  # which is not causal
def test_every_attention_can_be_captured(run_file: Path, kind: str) -> None:
    found = [
        losses(
            headway.train(
                run_file,
                run_file.parent / engine,
                [*every_stage(f"engine={engine}", "precision=float32"), f"model.attention={kind}", *PLAIN],
            )
        )
        for engine in ("plain", "graph")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-4)


TRANSLATORS = {
    "transformer": 'kind = "encoder_decoder"\nlayers = 2\nheads = 2',
    "fixed context": 'kind = "rnn_seq2seq"\nhidden = 16\nattention = "none"',
    "additive": 'kind = "rnn_seq2seq"\nhidden = 16\nattention = "additive"',
    "general": 'kind = "rnn_seq2seq"\ncell = "lstm"\nhidden = 16\nlayers = 2\nattention = "general"',
}


@pytest.mark.parametrize("shuffle", ["true", "false"])
@pytest.mark.parametrize("translator", TRANSLATORS)
def test_what_reads_a_source_is_captured_too(tmp_path: Path, translator: str, shuffle: str) -> None:
    """Ten pairs in batches of four: in the order of the file every third batch has two rows."""
    pairs = [("ab " * (1 + number % 4), "ba" * (1 + number % 3)) for number in range(10)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{x.strip()}\t{y}\n" for x, y in pairs))
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
[model]
{TRANSLATORS[translator]}
width = 16
block = 24
dropout = 0.0
[task]
name = "sequence_to_sequence"
source = "pairs.tsv"
dev = "pairs.tsv"
source_column = 0
target_column = 1
label_smoothing = 0.1
[training]
steps = 12
batch_size = 4
log_every = 1
shuffle = {shuffle}
precision = "float32"
"""
    )
    engines = ("plain", "graph", "compiled") if translator == "transformer" else ("plain", "graph")
    found = []
    for engine in engines:
        heard = Heard()
        run = headway.train(path, tmp_path / engine, [f"training.engine={engine}"], report=heard)
        assert not any("could not" in line for line in heard.lines), heard.lines
        found.append(losses(run))
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("engine", ["plain", "graph", "compiled"])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_resuming_is_exact_in_deterministic_mode(mixed: Path, engine: str, precision: str) -> None:
    sets = every_stage(f"engine={engine}", f"precision={precision}", "deterministic=true", "keep=20")
    settings = load_settings(mixed, [*sets, "training.optimizer=muon"])
    whole = headway.train(settings, mixed.parent / "whole")
    for step in (2, 6, 8, 10):
        out = mixed.parent / f"again-{step}"
        shutil.copytree(whole.path, out)
        for folder in (out / "checkpoints").glob("step-*"):
            if int(folder.name.removeprefix("step-")) > step:
                shutil.rmtree(folder)
        headway.train(settings, out, resume=True)
        assert same(final_weights(out), final_weights(whole.path)), f"from step {step}"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_step_that_overflows_float16_is_passed_over(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.training.loss_scale.FIRST", 2.0**40)
    sets = every_stage("precision=float16", "engine=graph", "steps=60", "learning_rate=0.01")
    run = headway.train(run_file, run_file.parent / "out", sets)
    norms = [record["gradient_norm"] for record in run.metrics if "loss" in record]
    assert norms[0] is None and norms[-1] is not None
    assert losses(run)[-1] < 0.7 * losses(run)[60]


def broken(*arguments: object, **options: object) -> None:
    raise RuntimeError("no such\nthing")


@pytest.mark.parametrize("part, instead", [("compile", "captured without"), ("cuda.graph", "operation by operation")])
def test_what_does_not_work_is_done_another_way(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, part: str, instead: str
) -> None:
    sets = [*every_stage("engine=compiled", "precision=float32"), "model.dropout=0"]
    expected = losses(headway.train(run_file, run_file.parent / "whole", sets))
    monkeypatch.setattr(f"torch.{part}", broken if part == "cuda.graph" else lambda *_, **__: broken)
    heard = Heard()
    run = headway.train(run_file, run_file.parent / "out", sets, report=heard)
    assert any("no such thing" in line and instead in line for line in heard.lines)
    assert losses(run) == pytest.approx(expected, rel=1e-4)


def test_after_a_capture_that_broke_off_there_is_no_other(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's memory is not fit for one then, in this process. What dropout drops is drawn as ever."""
    sets = every_stage("precision=float32")
    expected = losses(headway.train(run_file, run_file.parent / "plain", [*sets, *every_stage("engine=plain")]))
    body = Captured.body

    def asks(self: Captured) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        done = body(self)
        float(done[0])  # which a capture does not survive
        return done

    heard = Heard()
    with monkeypatch.context() as patch:
        patch.setattr(Captured, "body", asks)
        out = run_file.parent / "out"
        run = headway.train(run_file, out, [*sets, *every_stage("engine=compiled")], report=heard)
    said = "\n".join(heard.lines)
    assert said.count("not permitted when stream is capturing); operation by operation instead") == 1, said
    assert "captured without" not in said and "do not work here" not in said, said
    assert said.count("operation by operation, as CUDA could not end an earlier capture") == 1, said
    assert losses(run) == pytest.approx(expected, rel=1e-4)


def test_a_capture_that_did_not_begin_breaks_nothing(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured after it may be captured."""
    monkeypatch.setattr("torch.cuda.graph", broken)
    headway.train(run_file, run_file.parent / "out", every_stage("engine=graph", "precision=float32"))
    assert not broken_off


@pytest.mark.parametrize("wanted", [True, False])
def test_the_compiler_is_told_to_be_deterministic_where_that_is_wanted(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    told = []
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **named: told.append(named["options"]) or plain(*given))
    sets = every_stage("engine=compiled", "precision=float32", f"deterministic={str(wanted).lower()}")
    headway.train(run_file, run_file.parent / "out", sets)
    assert [options["deterministic"] for options in told] == [wanted, wanted]  # of each stage


def test_no_rows_are_made_while_a_step_is_captured(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take memory, and where there is none, all that is free is given back: neither is for a capture."""
    make, at_work, seen = Feed.make, [0], []

    def slow(self: Feed, *given: Any) -> Any:
        at_work[0] += 1
        time.sleep(0.1)
        made = make(self, *given)
        at_work[0] -= 1
        return made

    recorded = Captured.recorded
    monkeypatch.setattr(Feed, "make", slow)
    monkeypatch.setattr(Captured, "recorded", lambda *given: seen.append(at_work[0]) or recorded(*given))
    headway.train(mixed, mixed.parent / "out", every_stage("engine=graph", "precision=float32"))
    assert seen == [0, 0, 0]  # both stages, and when a stream begins


def test_out_of_memory_takes_the_step_in_parts(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [*every_stage("engine=graph", "precision=float32"), "model.dropout=0"]
    expected = losses(headway.train(run_file, run_file.parent / "whole", sets))
    body = Captured.body

    def small(self: Captured) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        done = body(self)  # which has changed the weights
        if self.accumulate < 4:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return done

    monkeypatch.setattr(Captured, "body", small)
    heard = Heard()
    run = headway.train(run_file, run_file.parent / "out", sets, report=heard)
    parts = [line.split(", training")[0][-7:] for line in heard.lines if "out of memory" in line]
    assert parts == 2 * ["2 parts", "4 parts"]  # of each stage
    assert losses(run) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("engine", ["graph", "compiled"])
def test_rows_are_the_same_wherever_they_are_made(mixed: Path, engine: str) -> None:
    found = []
    for place in ("device", "host"):
        heard = Heard()
        sets = every_stage(f"engine={engine}", f"batches={place}", "deterministic=true")
        run = headway.train(mixed, mixed.parent / place, sets, report=heard)
        words = "rows made on the GPU, as asked" if place == "device" else "rows made on the host, as asked"
        assert any(words in line for line in heard.lines), heard.lines
        found.append((losses(run), final_weights(run.path)))
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


@pytest.mark.gpu
def test_rows_are_made_on_the_host_where_the_gpu_has_no_memory_for_it(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = every_stage("engine=graph", "precision=float32", "batches=device")
    expected = losses(headway.train(mixed, mixed.parent / "whole", sets))
    plain = Task.on

    def on(self: Task, device: torch.device) -> Task:
        if device.type == "cuda":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return plain(self, device)

    monkeypatch.setattr(Task, "on", on)
    heard = Heard()
    run = headway.train(mixed, mixed.parent / "out", sets, report=heard)
    assert any("they are made on the host instead" in line for line in heard.lines)
    assert losses(run) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_without_a_fused_optimizer_steps_are_plain(run_file: Path, optimizer: str, precision: str) -> None:
    found = []
    for fused in ("on", "off"):
        heard = Heard()
        engine = "plain" if fused == "on" else "graph"  # which cannot be had then
        sets = every_stage(f"fused={fused}", f"optimizer={optimizer}", f"precision={precision}", f"engine={engine}")
        found.append(losses(headway.train(run_file, run_file.parent / fused, [*sets, "model.dropout=0"], report=heard)))
    assert any("operation by operation" in line and "without fused kernels" in line for line in heard.lines)
    assert found[0] == pytest.approx(found[1], rel=1e-3 if optimizer == "adamw" else 1e-2)


@pytest.mark.parametrize("engine", ["graph", "compiled"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])  # the last one is captured
def test_a_capture_that_is_left_has_changed_nothing(
    mixed: Path, monkeypatch: pytest.MonkeyPatch, engine: str, call: int
) -> None:
    """A signal comes while the steps of later streams are got ready; what was trained before is saved."""
    sets = every_stage(f"engine={engine}", "deterministic=true", "checkpoint_every=0", "keep=20")
    settings = load_settings(mixed, sets)
    whole = headway.train(settings, mixed.parent / "whole")
    body, calls = Captured.body, [0]

    def stopped(self: Captured) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        done = body(self)
        if "late" in self.names:  # which no checkpoint stands before
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGTERM)
        return done

    with monkeypatch.context() as patch:
        patch.setattr(Captured, "body", stopped)
        with pytest.raises(Interrupted, match="state saved"):
            headway.train(settings, mixed.parent / "run")
    run = headway.train(settings, mixed.parent / "run", resume=True)
    assert same(final_weights(run.path), final_weights(whole.path))


@pytest.mark.gpu
def test_dropout_in_compiled_code() -> None:
    x = torch.randn(1000, 256, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: dropout(x, 0.3))
    torch.manual_seed(0)
    y = compiled(x)
    y.sum().backward()
    assert x.grad is not None
    assert float((y == 0).double().mean()) == pytest.approx(0.3, abs=0.005)
    torch.testing.assert_close(y, x.detach() * x.grad)  # backward uses the same mask
    assert float(x.grad.max()) == pytest.approx(1 / 0.7)
    assert not torch.equal(compiled(x) == 0, y == 0)
    torch.manual_seed(0)
    assert torch.equal(compiled(x), y)
