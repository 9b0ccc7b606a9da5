"""Span corruption: every row can be put back together, lengths follow the rules, salient spans are salient."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.tasks.base import IGNORE
from headway.tasks.span_corruption import SpanCorruptionSettings, salient_spans
from headway.text import BPE, Bytes, Characters, Words
from headway.training.order import generator

LINES = [
    "Ada Lund. Ada Lund was born in Oslo in 1921 and worked as a baker at Halden Mill .",
    "Bo Moe. Moe , a clerk , came from Rio Grande .",
    "Cy. Ab",
    "Zoë Ångström. Zoë Ångström wurde in Köln geboren und lebte dort bis 1999 , als sie nach Rom zog .",
]


def make(folder: Path, kind: type = Characters, block: int = 64, lines: list[str] = LINES, **options: object):
    """A loaded task over `lines`, and its tokenizer."""
    path = folder / "corpus.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    tokenizer = kind.train(lines)
    task = SpanCorruptionSettings(corpus=str(path), **options).build(tokenizer, block)
    task.load()
    return task, tokenizer


def rows_of(batch) -> list[list[int]]:
    """The rows as they were before inputs and targets were cut from them."""
    return [
        [*batch.inputs[row, :length].tolist(), int(full[length - 1])]
        for row, (length, full) in enumerate(zip(batch.lengths.tolist(), batch.targets, strict=True))
    ]


def undo(row: list[int], mask: int, closing: bool) -> tuple[list[int], list[int], list[int]]:
    """(prefix, hidden, suffix) of a row with a suffix."""
    if closing:
        assert row.pop() == mask
    marks = [place for place, token in enumerate(row) if token == mask]
    assert len(marks) == 2
    return row[: marks[0]], row[marks[1] + 1 :], row[marks[0] + 1 : marks[1]]


@pytest.mark.parametrize("kind", [Characters, Bytes, Words, BPE])
@pytest.mark.parametrize("closing", [False, True])
def test_a_row_put_back_together_is_a_beginning_of_its_line(tmp_path: Path, kind: type, closing: bool) -> None:
    task, tokenizer = make(tmp_path, kind, closing=closing, shortest=2)
    for seed in range(20):
        batch = task.batch(torch.arange(len(LINES)), generator(seed))
        for line, row in zip(LINES, rows_of(batch), strict=True):
            prefix, hidden, suffix = undo(row, tokenizer.mask, closing)
            whole = tokenizer.encode(tokenizer.lead + line)
            assert hidden
            assert [*prefix, *hidden, *suffix] == whole[: len(prefix) + len(hidden) + len(suffix)]
        assert ((batch.targets != IGNORE).sum(1) == batch.lengths).all()  # everything is learned but padding
        past = torch.arange(batch.inputs.shape[1]) > batch.lengths[:, None]
        assert (batch.inputs[past] == tokenizer.pad).all()
        assert batch.inputs.shape[1] <= 64


def test_lengths_follow_the_course(tmp_path: Path) -> None:
    """Kept part uniform in [4, 112], hidden part a quarter of it on average, anywhere in it."""
    task, tokenizer = make(tmp_path, block=128, lines=["x" * 300, "y" * 300])
    kept, hidden, front = [], [], []
    for seed in range(40):
        for row in rows_of(task.batch(torch.arange(2).repeat(50), generator(seed))):
            prefix, span, suffix = undo(row, tokenizer.mask, False)
            kept.append(len(prefix) + len(span) + len(suffix))
            hidden.append(len(span))
            front.append(len(prefix) / max(1, kept[-1] - hidden[-1]))
    assert (min(kept), max(kept)) == (4, 112)
    assert sum(kept) / len(kept) == pytest.approx(58, abs=1.5)
    assert sum(hidden) / sum(kept) == pytest.approx(0.25, abs=0.01)
    assert sum(front) / len(front) == pytest.approx(0.5, abs=0.02)
    assert (min(front), max(front)) == (0.0, 1.0)


def test_windows_keep_the_heading_in_front_and_whole(tmp_path: Path) -> None:
    task, tokenizer = make(tmp_path, block=32, heading=". ", windows="anywhere", shortest=8)
    begins = set()
    for seed in range(60):
        row = rows_of(task.batch(torch.tensor([0]), generator(seed)))[0]
        prefix, hidden, suffix = (tokenizer.decode(part) for part in undo(row, tokenizer.mask, False))
        assert prefix.startswith("Ada Lund. ")
        body = (prefix + hidden + suffix).removeprefix("Ada Lund. ")
        assert body in LINES[0].removeprefix("Ada Lund. ")
        begins.add(LINES[0].removeprefix("Ada Lund. ").find(body))
    assert len(begins) > 10


@pytest.mark.parametrize("kind", [Characters, Words, BPE])
def test_salient_spans_are_names_and_numbers(tmp_path: Path, kind: type) -> None:
    task, tokenizer = make(tmp_path, kind, block=128, salient=1.0, heading=". ", longest=1.0, shortest=90)
    found = set()
    for seed in range(60):
        row = rows_of(task.batch(torch.tensor([0]), generator(seed)))[0]
        _, hidden, _ = undo(row, tokenizer.mask, False)
        found.add(tokenizer.decode(hidden).strip())
    assert found == {"Ada Lund", "Oslo", "1921", "Halden Mill"}


def test_without_suffix_a_row_has_the_form_of_a_question(tmp_path: Path) -> None:
    task, tokenizer = make(tmp_path, no_suffix=1.0, closing=True, learn="span")
    batch = task.batch(torch.tensor([0, 1]), generator(3))
    for row, targets in zip(rows_of(batch), batch.targets.tolist(), strict=True):
        marks = [place for place, token in enumerate(row) if token == tokenizer.mask]
        assert len(marks) == 2
        assert marks[1] == len(row) - 1
        learned = [place for place, target in enumerate(targets) if target != IGNORE]
        assert learned == list(range(marks[0], len(row) - 1))  # the span and its closing mark


@settings(max_examples=30, deadline=None)
@given(
    lines=st.lists(st.text("aB c.1é", min_size=1, max_size=40).filter(str.strip), min_size=1, max_size=6),
    seed=st.integers(0, 9),
    options=st.fixed_dictionaries(
        {
            "windows": st.sampled_from(["start", "anywhere"]),
            "heading": st.sampled_from(["", ". "]),
            "salient": st.sampled_from([0.0, 0.5, 1.0]),
            "no_suffix": st.sampled_from([0.0, 0.5, 1.0]),
            "closing": st.booleans(),
            "learn": st.sampled_from(["everything", "span"]),
            "span": st.sampled_from([0.1, 0.25, 0.5]),
        }
    ),
)
def test_any_corpus_makes_rows_that_fit(tmp_path_factory, lines, seed, options) -> None:
    task, tokenizer = make(tmp_path_factory.mktemp("corpus"), lines=lines, block=16, **options)
    batch = task.batch(torch.arange(task.examples), generator(seed))
    assert batch.inputs.shape[1] <= 16
    assert batch.learned() >= len(batch.lengths)
    assert (batch.inputs == tokenizer.mask).sum(1).ge(1).all()
    known = {token for line in lines for token in tokenizer.encode(line)} | {tokenizer.mask, tokenizer.pad}
    assert set(batch.inputs.flatten().tolist()) <= known


def test_same_generator_same_batch(tmp_path: Path) -> None:
    task, _ = make(tmp_path)
    first, again, other = (task.batch(torch.arange(4), generator(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.inputs, again.inputs)
    assert first.inputs.shape != other.inputs.shape or not torch.equal(first.inputs, other.inputs)


def test_a_block_too_small_for_the_rules_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task.shortest \(40\) .* model.block = 16"):
        make(tmp_path, block=16, shortest=40)


def test_making_a_batch_is_cheap(real_data: Path) -> None:
    """Under 5% of a training step of the course's model on this machine's CPU."""
    from headway.models import GPTSettings
    from headway.tasks.base import next_token_loss

    corpus = real_data / "birthplaces" / "wiki.txt"
    tokenizer = Characters.train([corpus.read_text("utf-8")])
    task = SpanCorruptionSettings(corpus=str(corpus)).build(tokenizer, 128)
    task.load()
    model = GPTSettings(width=256, heads=8).build(256)
    began = time.perf_counter()
    batches = [task.batch(torch.arange(16), generator(seed)) for seed in range(20)]
    making = (time.perf_counter() - began) / 20
    began = time.perf_counter()
    next_token_loss(model, batches[0].trimmed()).backward()
    step = time.perf_counter() - began  # of 16 rows; the course's 128 take eight times as long
    assert making < 0.05 * step


def test_what_is_salient() -> None:
    text = "Mr. van der Berg met Anna-Maria O'Neill in New York , 1921 ."
    assert [text[a:b] for a, b in salient_spans(text)] == ["Mr", "Berg", "Anna-Maria O'Neill", "New York", "1921"]


def test_a_file_is_scored_and_not_mistaken_for_the_corpus(tmp_path: Path) -> None:
    from headway.errors import UserError
    from headway.models import GPTSettings

    task, tokenizer = make(tmp_path)
    model = GPTSettings(width=16, heads=2, layers=1, block=64).build(len(tokenizer))
    (tmp_path / "other.txt").write_text("Bo Moe was born in Oslo .\n" * 3)
    assert task.evaluate(model, str(tmp_path / "other.txt")) != task.evaluate(model, "train")
    with pytest.raises(UserError, match="no test split"):
        task.evaluate(model, "test")
    with pytest.raises(DataError, match="no such file"):
        task.evaluate(model, str(tmp_path / "nowhere.txt"))
