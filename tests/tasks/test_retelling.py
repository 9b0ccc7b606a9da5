"""Rows laid out from words: nothing is invented, nothing is lost that should be there, names are not learned."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from headway.errors import DataError
from headway.tasks import EntitySpansSettings, RecitationSettings, RetellingSettings
from headway.tasks.base import IGNORE
from headway.tasks.corpus import heading_end
from headway.tasks.recitation import parts_of
from headway.tasks.words import cut_words
from headway.text import BPE, Bytes, Characters, Words

LINES = [
    "Ada Moe. Ada Moe, a painter from New York, was born in Oslo, Norway in 1921 .",
    "Edwin E. Wagner. Born at Rome, Edwin E. Wagner moved to Lima when he was 3 ; later he wrote books there .",
    "Bo. He was born in Kyiv .",
    "Cy Nye. " + "Cy Nye wrote long books about Lund, and then others about Orr " * 4 + ".",
]
TOKENIZERS = [Characters, Bytes, Words, BPE]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "people.txt"
    path.write_text("\n".join(LINES) + "\n")
    return str(path)


def texts_of(task, batch) -> list[tuple[str, str]]:
    """(the whole row, what of it is learned, · for the rest) of each row."""
    found = []
    for row, length in enumerate(batch.lengths.tolist()):
        inputs, targets = batch.inputs[row, :length].tolist(), batch.targets[row, :length].tolist()
        show = [task.tokenizer.decode([token], specials=True) if token != IGNORE else "·" for token in targets]
        found.append((task.tokenizer.decode(inputs, specials=True), "".join(show)))
    return found


def make(settings, kind=Characters, block: int = 100, rows: int = 200, seed: int = 0):
    tokenizer = kind.train(settings.texts(lambda note: None))
    task = settings.build(tokenizer, block)
    task.load()
    source = torch.Generator().manual_seed(seed)
    which = torch.randint(task.examples, (rows,), generator=source)
    return task, which, task.batch(which, source)


def letters(text: str) -> Counter[str]:
    return Counter("".join(text.split()))


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("form", ["{}.", "Who was {}?\n"])
def test_a_retold_row_is_made_of_its_documents_words(corpus: str, kind, form: str) -> None:
    task, which, batch = make(RetellingSettings(corpus=corpus, form=form), kind)
    lead = task.tokenizer.lead
    for number, (row, learned) in zip(which.tolist(), texts_of(task, batch), strict=True):
        name, body = LINES[number][: heading_end(LINES[number], ". ")], cut_words(LINES[number], ". ")[1]
        start = lead + form.format(name) if kind in (Characters, Bytes) else None
        if start is not None:
            assert row.startswith(start)
            assert learned.startswith("·" * (len(start) - 1))
            assert learned[len(start) - 1] != "·" or row[len(start)] == "⁇"
        assert not letters(row) - letters(form.format(name) + LINES[number][body[0][0] :] + "⁇⁇")
    assert int(batch.lengths.max()) <= task.block


def test_verbatim_rows_repeat_the_document_and_a_moved_span_is_the_only_change(corpus: str) -> None:
    settings = RetellingSettings(corpus=corpus, verbatim=1.0, moved=0.5)
    task, which, batch = make(settings, block=120)
    moved = 0
    for number, (row, _) in zip(which.tolist(), texts_of(task, batch), strict=True):
        if number == 3:  # too long for a row
            continue
        parts = row.split("⁇")
        if len(parts) == 1:
            assert LINES[number].startswith(row)  # the last token is only a target
        else:
            moved += 1
            before, after, span = parts[0], parts[1], parts[2]
            assert f"{before} {span}{after}" == LINES[number] or f"{before}{span}{after}" == LINES[number]
    assert moved > 20


def test_shuffled_rows_keep_their_clauses_whole(corpus: str) -> None:
    settings = RetellingSettings(corpus=corpus, verbatim=0.0, shuffled=1.0, thinned=0.0, moved=0.0)
    task, which, batch = make(settings, block=120)
    orders = set()
    for number, (row, _) in zip(which.tolist(), texts_of(task, batch), strict=True):
        if number == 0:
            assert "a painter from New York," in row + "," and "was born in Oslo," in row + ","
            orders.add(row)
    assert len(orders) > 3


def test_thinned_rows_leave_words_out_but_never_the_name(corpus: str) -> None:
    settings = RetellingSettings(corpus=corpus, verbatim=0.0, shuffled=0.0, thinned=1.0, thinning=1.0, moved=0.0)
    task, which, batch = make(settings)
    lengths = [int(length) for number, length in zip(which, batch.lengths, strict=True) if number == 0]
    assert min(lengths) < 0.5 * max(lengths)
    for number, (row, _) in zip(which.tolist(), texts_of(task, batch), strict=True):
        assert row.startswith(LINES[number][: heading_end(LINES[number], ". ")])


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_an_entity_row_asks_for_a_span_of_its_document(corpus: str, kind) -> None:
    settings = EntitySpansSettings(corpus=corpus, entities=1.0)
    task, which, batch = make(settings, kind, block=60, rows=300)
    asked: dict[int, set[str]] = {number: set() for number in range(4)}
    for number, (row, learned) in zip(which.tolist(), texts_of(task, batch), strict=True):
        assert row.count("⁇") in (1, 2)
        span = row.rsplit("⁇", 1)[1].strip()
        assert learned.strip("·").replace("⁇", "").strip() == span
        assert learned.endswith("⁇")  # the mark that closes the span is learned too
        assert span and span in LINES[number]
        name = LINES[number][: heading_end(LINES[number], ". ")]
        assert name in row
        assert name == "Bo" or span not in name
        asked[number].add(span)
    assert {"New York", "Oslo", "Norway", "1921"} <= asked[0]
    assert {"Rome", "Lima"} <= asked[1] and {"Kyiv"} <= asked[2]


def test_numbers_are_asked_for_with_the_words_beside_them_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "people.txt"
    path.write_text("Al Ow. Al Ow (3 March 1822 Rome, 18th Street) sang .\n")
    for numbers, expected in {True: {"3 March 1822 Rome", "18th Street"}, False: {"March", "Rome", "Street"}}.items():
        task, _, batch = make(EntitySpansSettings(corpus=str(path), entities=1.0, numbers=numbers), block=60)
        assert {row.rsplit("⁇", 1)[1] for row, _ in texts_of(task, batch)} == expected


def test_entity_rows_come_bare_with_words_before_and_behind_and_with_the_name_last(corpus: str) -> None:
    task, which, batch = make(EntitySpansSettings(corpus=corpus), block=60, rows=600)
    rows = {row for number, (row, _) in zip(which.tolist(), texts_of(task, batch), strict=True) if number == 0}
    assert "Ada Moe.⁇Oslo" in rows
    assert any(row.endswith("was born in⁇Oslo") and row.startswith("Ada Moe.") for row in rows)
    assert any(row.endswith("Ada Moe⁇Oslo") and not row.startswith("Ada Moe") for row in rows)
    assert any(row.count("⁇") == 2 and "in 1921" in row.split("⁇")[1] for row in rows if row.endswith("⁇Norway"))


def test_a_recited_row_ends_with_the_answer(corpus: str, tmp_path: Path) -> None:
    questions = tmp_path / "questions.tsv"
    questions.write_text(
        "Where was Ada Moe born?\tOslo\nWhere was Edwin E. Wagner born?\tRome\nWhere was Nobody born?\tRome\n"
        "Where was Bo born?\tParis\n"
    )
    task, _, batch = make(RecitationSettings(corpus=corpus, questions=str(questions)), block=120, rows=20)
    assert task.examples == 2  # one person is unknown, one answer stands nowhere
    expected = {
        "Where was Ada Moe born?\nAda Moe, a painter from New York, was born in⁇Oslo",
        "Where was Edwin E. Wagner born?\nBorn at⁇Rome",
    }
    found = texts_of(task, batch)
    assert {row for row, _ in found} == expected
    for row, learned in found:
        question = row.index("\n")
        assert learned == "·" * question + row[question + 1 :] + "⁇"


def test_a_recitation_without_any_answer_in_the_corpus_is_refused(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "q.tsv").write_text("Where was Bo born?\tParis\n")
    with pytest.raises(DataError, match="no question whose answer stands in the document"):
        make(RecitationSettings(corpus=corpus, questions=str(tmp_path / "q.tsv")))


def test_rows_too_short_for_the_names_are_refused(corpus: str) -> None:
    with pytest.raises(DataError, match=r"check task.heading \('. '\)"):
        make(RetellingSettings(corpus=corpus), block=12)
    with pytest.raises(DataError, match="a span of 24 take"):
        make(EntitySpansSettings(corpus=corpus), block=30)
    with pytest.raises(DataError, match=r"must hold \{\}"):
        make(RetellingSettings(corpus=corpus, form="Who?"))


def test_a_batch_is_a_pure_function_of_rows_and_noise(corpus: str) -> None:
    for settings in (RetellingSettings(corpus=corpus), EntitySpansSettings(corpus=corpus)):
        task, which, batch = make(settings, block=60)
        _, _, again = make(settings, block=60)
        assert torch.equal(batch.inputs, again.inputs) and torch.equal(batch.targets, again.targets)
        noise = task.noise(len(which), torch.Generator().manual_seed(9))
        together = task.make(which, noise)
        for row in range(5):
            alone = task.make(which[row : row + 1], noise[:, row : row + 1])
            length = int(alone.lengths[0])
            assert torch.equal(alone.inputs[0], together.inputs[row, :length])
            assert torch.equal(alone.targets[0], together.targets[row, :length])


def test_headings_end_where_a_reader_would_end_them() -> None:
    for text, name in {
        "Ada Moe. She": "Ada Moe",
        "Edwin E. Wagner. He": "Edwin E. Wagner",
        "A. G. E. Blake. He": "A. G. E. Blake",
        "Dr. No. He": "Dr. No",
        "No mark": None,
        "Plan B. ": "Plan B",
    }.items():
        end = heading_end(text, ". ")
        assert (text[:end] if end >= 0 else None) == name


def test_the_longest_part_of_a_question_comes_first() -> None:
    assert parts_of("Who is Bo?")[:3] == ["Who is Bo", "Who is", "is Bo"]
