"""Pairs become rows and back, padding changes nothing, splits share no sentence, scores are those of a plain loop."""

from __future__ import annotations

import json
import math
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headway
from headway.configuration import load_settings
from headway.console import Reporter
from headway.errors import DataError, Interrupted, TextError, UserError
from headway.generation.beam import Hypothesis
from headway.making import build_tokenizer
from headway.models import Seq2SeqModel
from headway.ranks import Ranks
from headway.tasks import IGNORE, Batch, SequenceToSequence, SequenceToSequenceSettings
from headway.tasks.sequence_to_sequence import groups
from headway.text import KINDS, Pair
from headway.training.order import Shuffled
from headway.training.streams import Stream
from tests.conftest import tiny_encoder_decoder, tiny_rnn
from tests.training.test_resume import StopAt, final_weights, same

WORDS = ["ein", "Hund", "läuft", "über", "das", "Gras", "und", "zwei", "Kinder", "spielen", "im", "Park"]
MODELS = {"encoder_decoder": tiny_encoder_decoder, "rnn_seq2seq": tiny_rnn}


def sentences(count: int, seed: int = 0, most: int = 5) -> list[str]:
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(1, most))) for _ in range(count)]


def written(folder: Path, sources: list[str], targets: list[str]) -> dict[str, str]:
    """Two files, as settings of the task."""
    for name, lines in (("source", sources), ("target", targets)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return {"name": "sequence_to_sequence", "source": str(folder / "source"), "target": str(folder / "target")}


def loaded(table: dict[str, Any], kind: str = "words", block: int = 24, **more: Any) -> SequenceToSequence:
    tables = {"tokenizer": {"kind": kind}, "model": {"kind": "encoder_decoder"}, "task": table | more}
    settings = load_settings(tables)
    task = settings.task.build(build_tokenizer(settings, Reporter()), block)
    task.load()
    return task


def mirrored(texts: list[str]) -> list[str]:
    return [" ".join(reversed(text.split())) for text in texts]


@pytest.fixture
def table(tmp_path: Path) -> dict[str, str]:
    sources = sentences(40)
    return written(tmp_path, sources, mirrored(sources))


def whole(task: SequenceToSequence) -> Batch:
    return task.batch(torch.arange(task.examples), torch.Generator())


def stream(task: SequenceToSequence) -> Stream:
    return Stream("training", task, 4, Shuffled(task.examples, 4, 0), 0)


def padded(batch: Batch, more: int) -> Batch:
    def widened(part: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(part, (0, more), value=value)

    assert batch.source is not None
    return Batch(widened(batch.inputs, 0), widened(batch.targets, IGNORE), batch.lengths, widened(batch.source, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_pairs_with_a_mark_at_both_ends(table: dict[str, str], kind: str) -> None:
    task = loaded(table, kind, block=60, holdout=0.0)
    batch = whole(task)
    assert len(batch) == 40 and batch.source is not None
    lead, mark = task.tokenizer.lead, task.tokenizer.mask
    for row, pair in enumerate(task.pairs("train")):
        source = batch.source[row][batch.source[row] != 0]
        inputs = batch.inputs[row][: batch.lengths[row]]
        targets = batch.targets[row][batch.targets[row] != IGNORE]
        assert task.tokenizer.decode(source) == lead + pair.source
        assert inputs[0] == mark == targets[-1] and torch.equal(inputs[1:], targets[:-1])
        assert task.tokenizer.decode(targets[:-1]) == lead + f"{pair.target}"
        assert mark not in source and mark not in targets[:-1]


@pytest.mark.parametrize("kind", MODELS)
def test_padding_changes_no_loss(table: dict[str, str], kind: str) -> None:
    task = loaded(table, label_smoothing=0.1)
    model, batch = MODELS[kind](len(task.tokenizer)), whole(task)
    losses, more = (stream(task).losses(model, each) for each in (batch, padded(batch, 3)))
    torch.testing.assert_close(more[:, : losses.shape[1]], losses, atol=1e-5, rtol=1e-5)
    assert more[:, losses.shape[1] :].eq(0).all() and losses[batch.targets == IGNORE].eq(0).all()


@pytest.mark.parametrize("kind", MODELS)
def test_pieces_have_the_gradient_of_the_padded_batch(table: dict[str, str], kind: str) -> None:
    task = loaded(table)
    model, batch = MODELS[kind](len(task.tokenizer)), whole(task)
    found = []
    for count in (1, 5):
        model.zero_grad()
        pieces = batch.pieces(count)
        assert len(pieces) == count and sum(map(len, pieces)) == len(batch)
        sum(stream(task).losses(model, piece).sum() for piece in pieces).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(pieces[0].given[side].shape[1] < pieces[-1].given[side].shape[1] for side in (0, 1))
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(one, many, atol=1e-5, rtol=1e-5)


def test_label_smoothing_spreads_a_share_evenly_and_leaves_padding_out(table: dict[str, str]) -> None:
    task = loaded(table, label_smoothing=0.3)
    model, batch = tiny_encoder_decoder(len(task.tokenizer)), whole(task)
    losses = stream(task).losses(model, batch)
    logprobs = model(*batch.given).float().log_softmax(-1)
    for row, place in (batch.targets != IGNORE).nonzero().tolist():
        share = torch.full((len(task.tokenizer),), 0.3 / len(task.tokenizer))
        share[batch.targets[row, place]] += 0.7
        by_hand = -(share * logprobs[row, place]).sum()
        torch.testing.assert_close(losses[row, place], by_hand, atol=1e-4, rtol=1e-4)
    assert losses[batch.targets == IGNORE].eq(0).all()


# ---- splits


@pytest.mark.parametrize("together", ["none", "source", "target", "both"])
def test_splits_are_apart_whole_and_independent_of_the_order(tmp_path: Path, together: str) -> None:
    source = random.Random(1)
    many = 150 if together != "both" else 2000  # or links would leave one large group
    pairs = [Pair(f"s{source.randrange(many)}", f"t{source.randrange(many)}", line) for line in range(1, 801)]
    settings = SequenceToSequenceSettings(
        source=str(tmp_path / "pairs.tsv"), holdout=0.2, test_holdout=0.1, together=together
    )

    def split(ordered: list[Pair]) -> dict[str, list[tuple[str, str | None]]]:
        (tmp_path / "pairs.tsv").write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in ordered))
        names = ("train", "dev", "test")
        return {name: [(pair.source, pair.target) for pair in settings.read(name)] for name in names}

    found = split(pairs)
    assert sorted(pair for part in found.values() for pair in part) == sorted(
        (pair.source, pair.target) for pair in pairs
    )
    assert 0.08 < len(found["dev"]) / 800 < 0.32 and 0.03 < len(found["test"]) / 800 < 0.2
    keys = {
        "none": lambda pair: [pair],
        "source": lambda pair: [pair[0]],
        "target": lambda pair: [pair[1]],
        "both": lambda pair: pair,
    }
    sides = [{key for pair in part for key in keys[together](pair)} for part in found.values()]
    assert not sides[0] & sides[1] and not sides[0] & sides[2] and not sides[1] & sides[2]
    shuffled = split(source.sample(pairs, len(pairs)))
    assert {name: sorted(part) for name, part in found.items()} == {n: sorted(part) for n, part in shuffled.items()}


def test_groups_are_those_of_a_graph_search() -> None:
    """By both sides: pairs are neighbours where they share a side, but for case and spaces."""
    numbers = random.Random(2)
    words = [f"{'wW'[numbers.randrange(2)]}{' ' * numbers.randrange(3)} {numbers.randrange(60)}" for _ in range(200)]
    pairs = [Pair(words[line], words[line + 100], line) for line in range(100)]
    found = groups(pairs, "both")
    plain = [(f"s{' '.join(x.source.lower().split())}", f"t{' '.join(x.target.lower().split())}") for x in pairs]
    reached: list[set[int]] = []
    for begin in range(100):
        seen, edge = {begin}, [begin]
        while edge:
            here = plain[edge.pop()]
            new = {n for n, other in enumerate(plain) if n not in seen and (here[0] == other[0] or here[1] == other[1])}
            seen |= new
            edge += new
        reached.append(seen)
    assert 1 < len(set(found)) < 100
    for one in range(100):
        assert {other for other in range(100) if found[other] == found[one]} == reached[one]


def test_a_split_with_a_file_of_its_own_takes_nothing_from_the_others(tmp_path: Path, table: dict[str, str]) -> None:
    dev = written(tmp_path / "..", ["Hund", "Gras"], ["Gras", "Hund"])
    task = loaded(table, dev=dev["source"], dev_target=dev["target"], holdout=0.5)
    assert len(task.pairs("train")) == 40 and [pair.source for pair in task.pairs("dev")] == ["Hund", "Gras"]
    with pytest.raises(UserError, match="no test split"):
        task.pairs("test")


# ---- lengths, and texts that cannot be read


def test_long_pairs_are_not_learned_and_counted(table: dict[str, str]) -> None:
    task = loaded(table, block=4, holdout=0.0)
    long = sum(len(pair.source.split()) > 4 or len(f"{pair.target}".split()) + 1 > 4 for pair in task.pairs("train"))
    assert 0 < long < 40 and task.examples == 40 - long
    words = f"{long} of 40 pairs have more than 4 tokens in the source or 3 in the target and are not learned"
    assert [note for note in task.notes if words in note]
    shortest = r"none of its 40 pairs has at most 1 tokens in the source and 0 in the target \(task.longest"
    with pytest.raises(DataError, match=shortest):
        loaded(table, block=1, holdout=0.0)


@pytest.mark.parametrize(("longest", "block"), [(0, 6), (0, 7), (5, 6), (6, 6), (6, 7), (6, 24), (7, 24)])
def test_marks_count_against_the_block_alone(tmp_path: Path, longest: int, block: int) -> None:
    """A pair is learned where both sides have `longest` tokens at most, and the model holds the target with a mark."""
    sizes = [(source, target) for source in range(1, 9) for target in range(1, 9)]
    lines = [[" ".join(["Hund"] * pair[side]) for pair in sizes] for side in (0, 1)]
    task = loaded(written(tmp_path, *lines), block=block, longest=longest, holdout=0.0)
    fit = [(x, y) for x, y in sizes if max(x, y) <= (longest or block) and x <= block and 1 + y <= block]
    assert list(zip(task.sources.lengths.tolist(), (task.targets.lengths - 2).tolist(), strict=True)) == fit
    most = [max(side) for side in zip(*fit, strict=True)]
    assert (
        f"{64 - len(fit)} of 64 pairs have more than {most[0]} tokens in the source or {most[1]} in the"
        in task.notes[0]
    )


@pytest.mark.parametrize("side", ["source", "target"])
def test_what_cannot_be_spelled_shows_at_once(tmp_path: Path, table: dict[str, str], side: str) -> None:
    """Also where only the held-out pairs have it: not when the run is first scored."""
    (tmp_path / "dev").mkdir()
    sides = {"source": ["Hund", "Gras"], "target": ["Gras", "Hund"]}
    sides[side][1] = "Hund ñ"
    dev = written(tmp_path / "dev", **{f"{name}s": lines for name, lines in sides.items()})
    files = {"dev": dev["source"], "dev_target": dev["target"]}
    with pytest.raises(TextError, match=rf"dev/{side}:2: never seen in training: 'ñ'"):
        loaded(table, "characters", block=60, **files)
    assert loaded(table, "bpe", block=60, **files).pairs("dev")


def test_empty_sides_are_dropped_and_said_once(tmp_path: Path) -> None:
    sources = sentences(30)
    table = written(tmp_path, [*sources, "", "Hund"], [*sources, "Hund", " "])
    task = loaded(table, "bpe", block=60, holdout=0.3)
    held = len(task.pairs("dev"))
    assert task.notes == [
        f"{tmp_path / 'source'}: 2 pairs with an empty side dropped (lines 31, 32)",
        f"{tmp_path / 'source'}: {30 - held} pairs to learn from, {held} to measure on",
    ]
    with pytest.raises(DataError, match=r"source:31: empty source\n.*target:32: empty target to 'Hund'"):
        loaded(table, strict=True)


def test_a_file_of_which_everything_is_held_out_is_named(tmp_path: Path) -> None:
    table = written(tmp_path, ["ein Hund"], ["a dog"])
    with pytest.raises(DataError, match=r"source: none of its 1 pairs is left to learn from.*task.holdout = 0.999"):
        loaded(table, holdout=0.999)


# ---- scores


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_cut_is_said_and_ends_with_no_mark(tmp_path: Path, table: dict[str, str], kind: str) -> None:
    """A model that holds a target whole finds the same loss of its beginning."""
    (tmp_path / "dev").mkdir()
    long = ["Hund Gras im Park und zwei", "ein Hund", "zwei Kinder spielen im Park"]
    dev = written(tmp_path / "dev", long, ["Hund Gras im Park und", "ein Hund läuft", "Gras"])
    files = {"dev": dev["source"], "dev_target": dev["target"]}
    task = loaded(table, block=4, **files)
    said = [
        "dev: 2 of 3 sources have more than 4 tokens (model.block): the model reads no more of them",
        "dev: 1 of 3 targets have more than 3 tokens (model.block): loss and accuracy are of their beginnings",
    ]
    assert task.notes[1:-1] == said
    model = MODELS[kind](len(task.tokenizer))
    assert model.settings.block > 6
    found = task.evaluate(model)
    assert task.notes[1:-1] == said  # once
    losses, right = [], 0
    for pair in task.pairs("dev"):
        source = torch.tensor([task.encode(pair.source)[:4]])
        row = [1, *task.encode(f"{pair.target}"), 1]
        logits = model(torch.tensor([row[:-1]]), source)[0, :4].log_softmax(-1).detach()
        wanted = row[1:5]
        losses += [-float(logits[place, token]) for place, token in enumerate(wanted)]
        right += sum(int(logits[place].argmax()) == token for place, token in enumerate(wanted))
    assert found["tokens"] == len(losses) == 4 + 4 + 2
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["token_accuracy"] == pytest.approx(right / len(losses))


@pytest.mark.parametrize("kind", MODELS)
def test_looking_and_scoring_leave_the_model_as_it_was(
    table: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = loaded(table, holdout=0.3)
    model = MODELS[kind](len(task.tokenizer), dropout=0.5)
    quiet = task.alignment(model.eval(), "ein Hund", "Gras")
    assert quiet is not None and task.alignment(model.train(), "ein Hund", "Gras") == quiet and model.training
    nothing = task.alignment(model, "ein Hund", "")
    assert nothing is not None and nothing.target == [task.tokenizer.mask] and len(nothing.weights) == 1

    def broken(*given: Tensor) -> Tensor:
        raise ValueError("broken")

    for name, use in (
        ("forward", lambda: task.evaluate(model)),
        ("alignment", lambda: task.alignment(model, "Hund", "Gras")),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="broken"):
            patch.setattr(model, name, broken)
            use()
        assert model.training


@torch.no_grad()
def by_a_plain_loop(task: SequenceToSequence, model: Seq2SeqModel, split: str) -> tuple[float, float, int]:
    """(loss a token, share of right next tokens, tokens), sentence by sentence and token by token."""
    losses, right = [], 0
    for pair in task.pairs(split):
        source = torch.tensor([task.encode(pair.source)])
        row = [task.tokenizer.mask, *task.encode(f"{pair.target}"), task.tokenizer.mask]
        for place in range(1, len(row)):
            logits = model(torch.tensor([row[:place]]), source)[0, -1]
            losses.append(-float(logits.log_softmax(-1)[row[place]]))
            right += int(logits.argmax()) == row[place]
    return sum(losses) / len(losses), right / len(losses), len(losses)


@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_those_of_a_plain_loop(table: dict[str, str], kind: str) -> None:
    task = loaded(table, holdout=0.3, label_smoothing=0.2)
    model = MODELS[kind](len(task.tokenizer)).train()
    found = task.evaluate(model, "dev", beam=2)
    assert model.training
    loss, right, tokens = by_a_plain_loop(task, model.eval(), "dev")
    assert found["tokens"] == tokens and found["token_accuracy"] == pytest.approx(right)
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    pairs = task.pairs("dev")
    assert found["sentences"] == len(pairs) == sum(each["sentences"] for each in found["by_length"])
    alone = [task.translate(model, [pair.source], beam=2)[0][0].text for pair in pairs]
    assert found["predictions"] == alone


def test_a_reference_of_several_lines_is_met_by_its_words_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ["two\nchildren\tplay in-\nside", "a dog runs\r\nover the grass"]
    rows = [json.dumps({"source": f"source {number}", "target": each}) for number, each in enumerate(targets)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    table = {"name": "sequence_to_sequence", "source": str(tmp_path / "pairs.jsonl"), "holdout": 0.0}
    task = loaded(table, bleu="none")
    tokens = [task.encode(target) for target in targets]
    monkeypatch.setattr(task, "search", lambda *_: [[Hypothesis(row, 0.0, 0.0)] for row in tokens])
    found = task.evaluate(tiny_encoder_decoder(len(task.tokenizer)), "train")
    assert found["exact"] == 1.0 and found["bleu"] == pytest.approx(100) and "\n" not in "".join(found["predictions"])


@dataclass(frozen=True)
class Threads(Ranks):
    """Ranks that are threads of one process."""

    board: Any = None
    barrier: Any = None

    def everyone(self, value: Any) -> list[Any]:
        self.board[self.rank] = value
        self.barrier.wait()
        found = [self.board[rank] for rank in range(self.size)]
        self.barrier.wait()
        return found

    def gather(self, items: list[Any]) -> list[Any]:
        return [item for part in self.everyone(items) for item in part]

    def total(self, numbers: Tensor) -> Tensor:
        return torch.stack(self.everyone(numbers)).sum(0)


def test_several_ranks_find_what_one_finds(table: dict[str, str]) -> None:
    task = loaded(table, holdout=0.3)
    model = tiny_encoder_decoder(len(task.tokenizer))
    alone = task.evaluate(model)
    size, board, found = 3, {}, {}
    barrier = threading.Barrier(size, timeout=60)

    def evaluate(rank: int) -> None:
        found[rank] = task.evaluate(model, "dev", Threads(rank, size, 0, board, barrier))

    threads = [threading.Thread(target=evaluate, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(size):
        numbers = {key: pytest.approx(alone[key], rel=1e-5) for key in ("loss", "perplexity", "token_accuracy")}
        assert found[rank] == {**alone, **numbers}


def test_nothing_is_written_after_nothing(table: dict[str, str]) -> None:
    task = loaded(table)
    model = tiny_encoder_decoder(len(task.tokenizer))
    texts = ["Hund", "", "das Gras", " "]
    together = task.translate(model, texts, beam=3, best=2)
    assert [len(each) for each in together] == [2, 1, 2, 1] and together[1][0].text == together[3][0].text == ""
    for one, each in zip(task.translate(model, ["das Gras"], beam=3, best=2)[0], together[2], strict=True):
        assert one.text == each.text and one.logprob == pytest.approx(each.logprob)


# ---- training


@pytest.mark.parametrize(
    ("model", "accumulate"),
    [
        ({"kind": "encoder_decoder", "heads": 2, "layers": 1}, 1),
        ({"kind": "rnn_seq2seq", "hidden": 8, "sampling": 0.5}, 3),
    ],
)
def test_stopping_and_resuming_gives_the_same_weights(
    tmp_path: Path, table: dict[str, str], model: dict[str, Any], accumulate: int
) -> None:
    tables = {
        "tokenizer": {"kind": "words"},
        "model": {"width": 8, "block": 16, **model},
        "task": table | {"beam": 2, "label_smoothing": 0.1},
        "training": {"steps": 4, "batch_size": 6, "accumulate": accumulate, "evaluate_every": 2, "log_every": 1},
    }
    expected = final_weights(headway.train(tables, tmp_path / "whole").path)
    for stop in (1, 3):
        with pytest.raises(Interrupted):
            headway.train(tables, tmp_path / f"{stop}", watch=StopAt(stop))
        run = headway.train(tables, tmp_path / f"{stop}", resume=True)
        assert same(final_weights(run.path), expected)
    assert run.evaluation["sentences"] == len(run.task.pairs("dev"))
    if "sampling" in model:  # it takes part in training
        tables["model"]["sampling"] = 0.0
        assert not same(final_weights(headway.train(tables, tmp_path / "other").path), expected)
