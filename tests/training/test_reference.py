"""A whole run against the same written out in plain torch, with no setting at its default."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headway
from headway.making import build_stages
from headway.run import Run
from headway.tasks import Batch
from headway.tasks.base import IGNORE
from headway.training.engine import Plain
from headway.training.optimizer import build_optimizer
from headway.training.order import Shuffled, mix
from headway.training.stage import TrainingSettings, streams_of
from headway.training.streams import Stream
from tests.conftest import tiny_gpt
from tests.training.test_resume import final_weights
from tests.training.test_streams import Rows

RUN = """
[model]
width = 16
layers = 2
heads = 2
block = 40
dropout = 0.0
[task]
name = "language_modelling"
corpus = "wiki.txt"
[streams.facts]
rows = 3
weight = 0.25
length = 30
start = 2
end = 5
[streams.facts.task]
name = "span_corruption"
corpus = "wiki.txt"
[training]
steps = 7
batch_size = 4
learning_rate = 0.02
warmup = 2
final_rate = 0.3
beta1 = 0.8
beta2 = 0.9
weight_decay = 0.5
clip = 0.4
weight = 0.75
seed = 11
log_every = 1
precision = "float32"
"""
# a line up to the peak in two steps, half a cosine down to three tenths of it in the other five
RATES = [0.5, 1.0, *(0.3 + 0.7 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(5))]


@pytest.fixture
def path(people: Path) -> Path:
    (people / "run.toml").write_text(RUN)
    return people / "run.toml"


def first_weights(run: Run, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return run.settings.model.build(len(run.tokenizer))


def streams_in(run: Run) -> list[Stream]:
    """For the rows that the steps of a run see."""
    (stage,) = build_stages(run.settings, run.tokenizer)
    for task in (stage.task, *(side.task for side in stage.sides)):
        task.load()
    return streams_of(stage, mix(stage.settings.seed, "training"))


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)


def test_a_run_is_what_its_settings_say(path: Path) -> None:
    run = headway.train(path, path.parent / "run")
    text, facts = streams_in(run)
    model = first_weights(run, seed=11)
    matrices = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    others = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    record = [line for line in run.metrics if "loss" in line]
    assert len(record) == len(RATES) == 7
    for step, (rate, line) in enumerate(zip(RATES, record, strict=True)):
        losses = {"training": mean_loss(model, text.batch(step))}
        loss = 0.75 * losses["training"]
        if 2 <= step < 5:
            losses["facts"] = mean_loss(model, facts.batch(step))
            loss = loss + 0.25 * losses["facts"]
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        assert norm > 0.4  # so that clipping counts
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * rate
        optimizer.step()
        assert line["learning_rate"] == pytest.approx(0.02 * rate)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert line["losses"] == pytest.approx({name: each.item() for name, each in losses.items()}, rel=1e-4)
        assert line["gradient_norm"] == pytest.approx(norm.item(), rel=1e-3)
    for name, weight in final_weights(run.path).items():
        torch.testing.assert_close(weight, model.state_dict()[name], atol=2e-5, rtol=1e-3)


def test_muon_takes_its_own_rate_and_decay(path: Path) -> None:
    """With torch's Muon on the matrices inside the blocks, and AdamW on the rest."""
    own = {"optimizer": "muon", "muon_learning_rate": 0.05, "muon_weight_decay": 7.0, "steps": 1, "warmup": 0}
    beside = ["streams.facts.start=0", "streams.facts.end=1"]
    run = headway.train(
        path, path.parent / "run", [*(f"training.{key}={value}" for key, value in own.items()), *beside]
    )
    model = first_weights(run, seed=11)
    hidden = model.hidden_matrices()
    matrices = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    text, facts = streams_in(run)
    (0.75 * mean_loss(model, text.batch(0)) + 0.25 * mean_loss(model, facts.batch(0))).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.4)
    torch.optim.Muon(hidden, lr=0.05, weight_decay=7.0, momentum=0.95).step()
    outside = [matrix for matrix in matrices if not any(matrix is each for each in hidden)]
    rest = [weight for weight in model.parameters() if not any(weight is each for each in matrices)]
    groups = [{"params": outside, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=0.02, betas=(0.8, 0.9)).step()
    for name, weight in final_weights(run.path).items():
        torch.testing.assert_close(weight, model.state_dict()[name], atol=1e-3, rtol=1e-3)  # its bfloat16


def test_a_step_is_taken_in_as_many_pieces_as_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    real = Plain.gradients

    def counted(self: Plain, model: nn.Module, stream: Stream, piece: Batch, share: float) -> Tensor:
        rows.append(len(piece))
        return real(self, model, stream, piece, share)

    monkeypatch.setattr(Plain, "gradients", counted)
    headway.train(path, path.parent / "run", ["training.accumulate=2"])
    text, facts = [2, 2], [2, 1]
    assert [sorted(rows[:2]), sorted(rows[4:6]), sorted(rows[6:8], reverse=True)] == [text, text, facts]
    assert len(rows) == 7 * 2 + 3 * 2


def test_a_seed_decides_over_weights_rows_and_their_corruption(path: Path) -> None:
    runs = [headway.train(path, path.parent / str(seed), [f"training.seed={seed}"]) for seed in (11, 12)]
    models = [first_weights(run, seed) for run, seed in zip(runs, (11, 12), strict=True)]
    assert not torch.equal(models[0].head.weight, models[1].head.weight)
    one, other = map(streams_in, runs)
    assert not torch.equal(one[0].draw(0)[0], other[0].draw(0)[0])
    assert runs[0].metrics[0]["loss"] != runs[1].metrics[0]["loss"]


def test_steps_and_streams_are_corrupted_each_in_its_own_way(path: Path) -> None:
    """Also where they see the same example."""
    text, facts = streams_in(headway.train(path, path.parent / "run"))
    rows = torch.zeros(3, dtype=torch.long)
    noises = [facts.draw(step)[1] for step in (2, 3)]
    assert not torch.equal(*noises)
    assert not torch.equal(facts.task.make(rows, noises[0]).inputs, facts.task.make(rows, noises[1]).inputs)
    assert text.seed != facts.seed
    assert not torch.equal(text.order.rows(0)[:3], facts.order.rows(0)) or text.order.seed != facts.order.seed


class Dropped(Plain):
    """A step whose loss shows what dropout dropped, and changes nothing."""

    def gradients(self, model: nn.Module, stream: Stream, piece: Batch, share: float) -> Tensor:
        seen.append(F.dropout(torch.ones(64), 0.5))
        return super().gradients(model, stream, piece, share)


seen: list[Tensor] = []


def test_every_step_and_every_piece_drops_others() -> None:
    """And a step that is taken again the same ones."""
    torch.manual_seed(0)
    model = tiny_gpt()
    stream = Stream("s", Rows(torch.randint(1, 19, (5, 9))), 4, Shuffled(5, 4, 0), 0)
    optimizer = build_optimizer(model, TrainingSettings())
    engine = Dropped(model, [stream], optimizer, 3, torch.float32, 1.0, accumulate=2)
    seen.clear()
    for step in (0, 1, 0):
        engine.step(step, 0.0)
    first, second, third, fourth, *again = seen
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    for one, other in ((first, second), (first, third), (second, fourth), (third, fourth)):
        assert not torch.equal(one, other)


@pytest.mark.parametrize("clip", [0.01, 0.0])
def test_a_step_with_a_loss_scale_is_the_one_without_it(clip: float) -> None:
    """Gradients are clipped as they are, and not as they were scaled."""
    torch.manual_seed(0)
    rows, outcomes = Rows(torch.randint(1, 19, (5, 9))), []
    for precision in (torch.float32, torch.float16):
        model = tiny_gpt()
        optimizer = build_optimizer(model, TrainingSettings(), precision)
        assert (optimizer.scale is not None) == (precision == torch.float16)
        stream = Stream("s", rows, 4, Shuffled(5, 4, 0), 0)
        done = Plain(model, [stream], optimizer, 0, torch.float32, clip).step(0, 1.0)
        outcomes.append((done.norm, [weight.detach().clone() for weight in model.parameters()]))
    torch.testing.assert_close(*outcomes, atol=1e-9, rtol=1e-6)
