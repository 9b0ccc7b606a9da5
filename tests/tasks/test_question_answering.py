"""Question answering: what is learned, what is asked, how it is scored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headway.errors import DataError, TextError, UserError
from headway.models import GPTSettings
from headway.tasks import QuestionAnsweringSettings
from headway.tasks.base import IGNORE, next_token_loss
from headway.text import Characters, Words
from headway.training.order import generator


def make(folder: Path, kind: type = Characters, block: int = 48, **options: object):
    settings = QuestionAnsweringSettings(
        questions=str(folder / "train.tsv"), dev=str(folder / "dev.tsv"), corpus=str(folder / "wiki.txt"), **options
    )
    tokenizer = kind.train(settings.texts(lambda note: None))
    return settings.build(tokenizer, block), tokenizer


@pytest.mark.parametrize("kind", [Characters, Words])
def test_the_loss_counts_from_the_first_mark_on(people: Path, kind: type) -> None:
    task, tokenizer = make(people, kind)
    task.load()
    batch = task.batch(torch.arange(3), generator(0))
    for pair, inputs, targets in zip(task.pairs("train"), batch.inputs.tolist(), batch.targets.tolist(), strict=False):
        shown = tokenizer.decode([token for token in targets if token != IGNORE], specials=True)
        assert shown.replace(" ", "") == f"⁇{pair.target}⁇"
        assert tokenizer.decode(inputs, specials=True).lstrip().startswith(f"{pair.source}⁇")


def test_a_model_that_has_learned_the_questions_answers_them(people: Path) -> None:
    """Overfitting the twelve training questions gives twelve right answers, with high probability."""
    torch.manual_seed(0)
    task, tokenizer = make(people, Words)
    task.load()
    model = GPTSettings(width=32, layers=2, heads=2, block=48, dropout=0.0).build(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch = task.batch(torch.arange(12), generator(0))
    for _ in range(150):
        optimizer.zero_grad()
        (next_token_loss(model, batch) / batch.learned()).backward()
        optimizer.step()
    result = task.evaluate(model, "train")
    assert result["accuracy"] == 1.0
    assert result["predictions"] == [pair.target for pair in task.pairs("train")]
    answers = task.answer(model, [pair.source for pair in task.pairs("train")], alternatives=2)
    for answer in answers:
        assert answer.probability > 0.9
        assert answer.text not in [text for text, _ in answer.alternatives]
        assert len(answer.alternatives) == 2
        assert answer.probability + sum(share for _, share in answer.alternatives) <= 1.0 + 1e-4


def test_answers_do_not_depend_on_the_batch(people: Path) -> None:
    task, tokenizer = make(people)
    torch.manual_seed(3)
    model = GPTSettings(width=16, heads=2, layers=1, block=48).build(len(tokenizer)).double()
    questions = [pair.source for pair in task.pairs("train")]
    together = task.answer(model, questions, alternatives=2)
    apart = [task.answer(model, [question], alternatives=2)[0] for question in questions]
    assert [answer.text for answer in together] == [answer.text for answer in apart]
    assert [answer.probability for answer in together] == pytest.approx([answer.probability for answer in apart])


def test_splits_and_baseline(people: Path) -> None:
    task, _ = make(people)
    assert (len(task.pairs("train")), len(task.pairs("dev"))) == (12, 4)
    answer, share = task.baseline("train")
    assert share == pytest.approx(sum(pair.target == answer for pair in task.pairs("train")) / 12)
    with pytest.raises(UserError, match="no test split"):
        task.pairs("test")
    with pytest.raises(UserError, match="'dve' is neither a split nor a file; did you mean 'dev'"):
        task.pairs("dve")


def test_without_a_dev_file_questions_are_held_out(people: Path) -> None:
    settings = QuestionAnsweringSettings(questions=str(people / "train.tsv"), holdout=0.25)
    task = settings.build(Characters.train(settings.texts(lambda note: None)), 48)
    train, dev = task.pairs("train"), task.pairs("dev")
    assert (len(train), len(dev)) == (9, 3)
    assert not {pair.source for pair in train} & {pair.source for pair in dev}


def test_a_file_without_answers_has_no_accuracy(people: Path) -> None:
    task, tokenizer = make(people)
    (people / "inputs.tsv").write_text("Where was Ada Lund born?\n")
    model = GPTSettings(width=16, heads=2, layers=1, block=48).build(len(tokenizer))
    result = task.evaluate(model, str(people / "inputs.tsv"))
    assert len(result["predictions"]) == result["questions"] == 1
    assert "accuracy" not in result


def test_bad_questions_are_named(people: Path) -> None:
    task, tokenizer = make(people)
    model = GPTSettings(width=16, heads=2, layers=1, block=48).build(len(tokenizer))
    with pytest.raises(TextError, match=r"'Where was Ødegård born\?': .*'Ø' \(U\+00D8\)"):
        task.answer(model, ["Where was Ødegård born?"])
    with pytest.raises(TextError, match="the model's context is 48"):
        task.answer(model, ["Where was " + "Ada " * 20 + "born?"])
    (people / "train.tsv").write_text("Where was Ada Lund born?\tOslo\nWhere was " + "Bo " * 20 + "born?\tRome\n")
    with pytest.raises(DataError, match=r"train.tsv:2: .* tokens, and a row of model.block = 48"):
        make(people)[0].load()


def test_answers_that_are_never_written_whole_are_counted(people: Path) -> None:
    """In the file to learn from, the one to measure on, and one that is named later; once each."""
    long = "Where was Ada Lund born?\tOslo Oslo Oslo\n"
    for name in ("train.tsv", "dev.tsv"):
        (people / name).write_text((people / name).read_text() + long)
    (people / "more.tsv").write_text(long)
    task, tokenizer = make(people, longest_answer=8)
    task.load()
    model = GPTSettings(width=16, heads=2, layers=1, block=48).build(len(tokenizer))
    for _ in range(2):
        task.evaluate(model, "dev")
        task.evaluate(model, str(people / "more.tsv"))
    said = [note.removeprefix(f"{people}/") for note in task.notes]
    cut = "of more than 8 tokens, after which the model is cut off: never right (task.longest_answer)"
    assert said == [
        f"train.tsv: 1 of 13 answers {cut}",
        f"dev.tsv: 1 of 5 answers {cut}",
        f"more.tsv: 1 of 1 answer {cut}",
    ]


def test_it_is_said_where_no_question_is_held_out(people: Path) -> None:
    settings = QuestionAnsweringSettings(questions=str(people / "train.tsv"), holdout=0.0)
    task = settings.build(Characters.train(settings.texts(lambda note: None)), 48)
    task.load()
    assert [note.partition(": ")[2] for note in task.notes] == [
        "no question is held out (task.dev, task.holdout), so no score, best checkpoint or early stopping"
    ]
