"""Language modelling: windows over the corpus, what is held out, continuing text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from headway.errors import DataError, TextError
from headway.generation import Sampling
from headway.models import GPTSettings
from headway.tasks import LanguageModellingSettings
from headway.text import BPE, KINDS, Bytes, Characters
from headway.training.order import generator

TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def make(folder: Path, kind: type = Characters, block: int = 16, text: str = TEXT, **options: object):
    path = folder / "text.txt"
    path.write_text(text, encoding="utf-8")
    settings = LanguageModellingSettings(corpus=str(path), documents="file", **options)
    tokenizer = kind.train(settings.texts(lambda note: None))
    task = settings.build(tokenizer, block)
    task.load()
    return task, tokenizer


def test_rows_are_windows_of_the_text_and_never_of_what_is_held_out(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + number) for number in range(500))  # every character once: a window tells where it is
    task, tokenizer = make(tmp_path, text=text, holdout=0.2)
    seen = set()
    for seed in range(30):
        batch = task.batch(torch.arange(task.examples), generator(seed))
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            row = tokenizer.decode([*inputs.tolist(), int(targets[-1])])
            assert row in text
            seen |= set(row)
    assert seen == set(text[:400])  # all of the first four fifths, none of the last
    assert len(task.validation) == 100


def test_documents_are_separated_by_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one two three\nfour five six\n" * 20)
    settings = LanguageModellingSettings(corpus=str(path))
    task = settings.build(Characters.train(settings.texts(lambda note: None)), 8)
    task.load()
    assert (task.train == 1).sum() + (task.validation == 1).sum() == 40


def test_an_untrained_model_is_as_good_as_chance(tmp_path: Path) -> None:
    task, tokenizer = make(tmp_path, Bytes)
    model = GPTSettings(width=16, heads=2, layers=1, block=16).build(len(tokenizer))
    result = task.evaluate(model)
    assert result["loss"] == pytest.approx(math.log(len(tokenizer)), abs=0.05)
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2), rel=1e-6)  # a token is a byte


@pytest.mark.parametrize("length", [2, 9, 16, 17, 18, 31, 32, 33, 34, 50])
def test_a_file_is_measured_to_its_end(tmp_path: Path, length: int) -> None:
    """Every token but the first counts once, whatever the block; those at the end with as much before them as fits."""
    task, tokenizer = make(tmp_path)
    torch.manual_seed(0)
    model = GPTSettings(width=16, heads=2, layers=1, block=16, dropout=0.0).build(len(tokenizer)).eval()
    path = tmp_path / "other.txt"
    path.write_text(TEXT[:length])
    ids = torch.tensor(tokenizer.encode(TEXT[:length]))
    assert task.evaluate(model, str(path))["tokens"] == length - 1
    losses = []
    for place in range(1, length):
        first = (place - 1) // 16 * 16  # of its window
        first = first if first + 16 < length else max(0, length - 17)
        scores = model(ids[None, first:place])[0, -1]
        losses.append(float(torch.nn.functional.cross_entropy(scores, ids[place]).detach()))
    assert task.evaluate(model, str(path))["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_a_file_to_validate_on_is_measured_to_its_end_too(tmp_path: Path) -> None:
    (tmp_path / "validation.txt").write_text(TEXT[:44])
    task, tokenizer = make(tmp_path, validation=str(tmp_path / "validation.txt"))
    model = GPTSettings(width=16, heads=2, layers=1, block=16, dropout=0.0).build(len(tokenizer)).eval()
    assert task.evaluate(model)["tokens"] == 43
    assert task.evaluate(model, "train")["tokens"] == (len(task.train) - 1) // 16 * 16  # whole windows


@pytest.mark.parametrize("kind", ["characters", "bytes", "words", "bpe"])
def test_the_end_of_a_line_is_a_byte_whatever_the_tokenizer(tmp_path: Path, kind: str) -> None:
    """Else short lines would have more bits a byte than the same text in one document."""
    path = tmp_path / "lines.txt"
    path.write_text("one two three\nfour five six\n" * 20)
    settings = LanguageModellingSettings(corpus=str(path))
    tokenizer = KINDS[kind].train(settings.texts(lambda note: None))
    task = settings.build(tokenizer, 600)
    model = GPTSettings(width=16, heads=2, layers=1, block=600).build(len(tokenizer))
    result = task.evaluate(model, str(path))
    bits = result["loss"] * result["tokens"] / math.log(2)
    first = tokenizer.piece(tokenizer.encode_alone("one two three")[0])  # which is given, not asked for
    assert bits / result["bits_per_byte"] == pytest.approx(path.stat().st_size - len(first))


def test_of_a_large_part_held_out_some_is_measured_all_over_it(tmp_path: Path) -> None:
    text = "".join(chr(0x4E00 + number) for number in range(2000))
    whole, tokenizer = make(tmp_path, text=text, holdout=0.5, dev_tokens=0)
    some, _ = make(tmp_path, text=text, holdout=0.5, dev_tokens=160)
    assert not whole.notes and "of 1,000 tokens held out, 160 are measured" in some.notes[0]
    starts = some.starts(some.validation, "dev")
    assert len(starts) == 10 and set(starts.tolist()) <= set(whole.starts(whole.validation, "dev").tolist())
    assert int(starts[0]) == 0 and int(starts[-1]) > 850 and int(starts.diff().max() - starts.diff().min()) <= 16
    torch.manual_seed(0)
    model = GPTSettings(width=16, layers=1, heads=2, block=16).build(len(tokenizer)).eval()
    assert some.evaluate(model)["tokens"] == 160
    assert whole.evaluate(model)["tokens"] == 62 * 16
    assert some.evaluate(model, "train") == whole.evaluate(model, "train")
    file = tmp_path / "other.txt"
    file.write_text(text[:900], encoding="utf-8")
    assert some.evaluate(model, str(file)) == whole.evaluate(model, str(file))


def test_continuing_streams_text_in_pieces(tmp_path: Path) -> None:
    task, tokenizer = make(tmp_path, BPE)
    torch.manual_seed(0)
    model = GPTSettings(width=16, heads=2, layers=1, block=16).build(len(tokenizer))
    pieces = list(task.stream(model, "The quick", 60, Sampling(1.0, seed=1)))
    assert len(pieces) > 10
    assert "".join(pieces) == "".join(task.stream(model, "The quick", 60, Sampling(1.0, seed=1)))
    with pytest.raises(TextError, match="the model's context is 16"):
        list(task.stream(model, "x" * 200, 5, Sampling()))


def test_a_corpus_shorter_than_the_block_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"text.txt: 18 tokens to train on, .* a row of model.block = 64"):
        make(tmp_path, block=64, text="only twenty letters!")
