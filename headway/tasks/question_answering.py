"""Closed-book question answering: the answer must come out of the weights.

    row      question ⁇ answer ⁇          the loss counts from the first mark on
    asking   question ⁇  →  what the model writes before the next mark

Scored by exact, case-sensitive match.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.data.catalog import resolve
from headway.errors import DataError, TextError, UserError, nearest
from headway.generation import best_alternatives, generate
from headway.generation.decode import check_prompts
from headway.memory import Progress, untold
from headway.models import CausalModel
from headway.ranks import ALONE, Ranks
from headway.settings import REQUIRED, setting
from headway.tasks.base import Batch, Task
from headway.text import Notes, Pair, Tokenizer, read_documents, read_pairs
from headway.text.plain import counted

SPLITS = ("train", "dev", "test")


@dataclass
class QuestionAnsweringSettings:
    """`[task]` with name = "question_answering"."""

    name: str = setting("question_answering", "which task")
    questions: str = setting(REQUIRED, "questions and answers to learn: question<TAB>answer a line", path=True)
    dev: str | None = setting(None, "questions and answers to measure on", path=True)
    test: str | None = setting(None, "further questions, with or without answers", path=True)
    corpus: str | None = setting(None, "text whose words the tokenizer should know too", path=True)
    holdout: float = setting(0.1, "share of the questions held out where there is no dev file", least=0.0, below=1.0)
    longest_answer: int = setting(32, "most tokens an answer may have", least=1)
    errors: str = setting("strict", "what to do with bytes that are not UTF-8", choices=("strict", "replace"))

    def texts(self, say: Notes) -> list[str]:
        corpus = read_documents(resolve(self.corpus), errors=self.errors, say=say) if self.corpus else []
        pairs = self.read(self.questions, answers=True, say=say)
        return corpus + [text for pair in pairs for text in (pair.source, f"{pair.target}")]

    def read(self, path: str, answers: bool | None = None, say: Notes = lambda note: None) -> list[Pair]:
        return read_pairs(resolve(path), answers=answers, errors=self.errors, say=say)

    def build(self, tokenizer: Tokenizer, block: int) -> QuestionAnswering:
        return QuestionAnswering(self, tokenizer, block)


@dataclass(frozen=True)
class Answer:
    """An answer, the probability the model gives to writing exactly it, and what else it might have written."""

    question: str
    text: str
    probability: float
    alternatives: tuple[tuple[str, float], ...] = ()


class QuestionAnswering(Task):
    metric = "accuracy"
    higher_is_better = True

    def __init__(self, settings: QuestionAnsweringSettings, tokenizer: Tokenizer, block: int) -> None:
        super().__init__(tokenizer, block)
        self.settings = settings
        self.splits: dict[str, list[Pair]] = {}

    def load(self) -> None:
        pairs = self.pairs("train")
        rows = [self.row(pair) for pair in pairs]
        longest = max(len(row) for row, _ in rows)
        self.rows = torch.full((len(rows), longest), self.tokenizer.pad)
        for number, (row, _) in enumerate(rows):
            self.rows[number, : len(row)] = torch.tensor(row)
        self.lengths = torch.tensor([len(row) for row, _ in rows])
        self.marks = torch.tensor([mark for _, mark in rows])  # where the first mark stands
        self.examples = len(rows)
        self.note_long("train", pairs)
        self.check("dev", self.pairs("dev"))
        if not self.pairs("dev"):
            self.note(
                f"{self.settings.questions}: no question is held out (task.dev, task.holdout), so no score, best "
                "checkpoint or early stopping"
            )

    @property
    def width(self) -> int:
        return self.rows.shape[1] - 1

    def row(self, pair: Pair) -> tuple[list[int], int]:
        """The tokens of question ⁇ answer ⁇, and the place of the first mark."""
        place = f"{self.path_of('train')}:{pair.line}"
        try:
            prompt = self.prompt(pair.source)
            answer = self.tokenizer.encode_alone(pair.target or "")
        except TextError as error:
            raise DataError(f"{place}: {error}") from None
        row = [*prompt, *answer, self.tokenizer.mask]
        if len(row) > self.block + 1:
            raise DataError(
                f"{place}: question and answer have {len(row)} tokens, and a row of {self.limit} = {self.block} holds "
                f"{self.block + 1}; shorten it or raise {self.limit}: {pair.source!r}"
            )
        return row, len(prompt) - 1

    def path_of(self, split: str) -> str:
        """The file that a split's questions stand in."""
        settings = self.settings
        files = {"train": settings.questions, "dev": settings.dev or settings.questions, "test": settings.test}
        return files.get(split) or split

    def check(self, split: str, pairs: Sequence[Pair]) -> None:
        """Every question of a split must be one that the model can be asked."""
        for pair in pairs:
            try:
                check_prompts([self.prompt(pair.source)], self.block)
            except TextError as error:
                raise DataError(f"{self.path_of(split)}:{pair.line}: {error}: {pair.source!r}") from None
        self.note_long(split, pairs)

    def note_long(self, split: str, pairs: Sequence[Pair]) -> None:
        """Say how many answers are longer than any that is written."""
        most = self.settings.longest_answer
        long = sum(self.length(pair.target) > most for pair in pairs if pair.target is not None)
        if long:
            self.note(
                f"{self.path_of(split)}: {long:,} of {counted(len(pairs), 'answer')} of more than {most} tokens, after "
                "which the model is cut off: never right (task.longest_answer)"
            )

    def length(self, answer: str) -> int:
        """How many tokens an answer has; none where the tokenizer cannot spell it."""
        try:
            return len(self.tokenizer.encode_alone(answer))
        except TextError:
            return 0

    def prompt(self, question: str) -> list[int]:
        if not question.strip():
            raise TextError("the question is empty")
        return [*self.tokenizer.encode_alone(question), self.tokenizer.mask]

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        lengths = self.lengths[rows]
        tokens = self.rows[rows, : int(lengths.max())]
        learned = torch.arange(tokens.shape[1], device=rows.device) >= self.marks[rows][:, None]
        return Batch.next_token(tokens, lengths, learned)

    def pairs(self, split: str) -> list[Pair]:
        """The questions of a split, or of a file."""
        if split not in self.splits:
            self.splits.update(self.read_split(split))
        return self.splits[split]

    def read_split(self, split: str) -> Iterator[tuple[str, list[Pair]]]:
        settings = self.settings
        if split == "train" or (split == "dev" and settings.dev is None):
            pairs = settings.read(settings.questions, answers=True)
            cut = len(pairs) if settings.dev else len(pairs) - int(len(pairs) * settings.holdout)
            yield "train", pairs[:cut]
            if settings.dev is None:
                yield "dev", pairs[cut:]
        elif split == "dev" and settings.dev:
            yield split, settings.read(settings.dev, answers=True, say=self.note)
        elif split == "test":
            if settings.test is None:
                raise UserError("this run has no test split (task.test); name a file instead")
            yield split, settings.read(settings.test, say=self.note)
        elif not resolve(split).is_file() and "." not in split and "/" not in split:
            raise UserError(f"'{split}' is neither a split nor a file{nearest(split, SPLITS)}")
        else:
            yield split, settings.read(split, say=self.note)

    def evaluate(
        self, model: CausalModel, split: str = "dev", among: Ranks = ALONE, progress: Progress = untold
    ) -> dict[str, Any]:
        """Accuracy where the answers are known, and every prediction in the order of the questions.

        `progress` is told how many of this process's questions are answered.
        """
        pairs = self.pairs(split)
        self.check(split, pairs)
        mine = among.share([pair.source for pair in pairs])
        answers = among.gather(self.answer(model, mine, progress=progress))
        result: dict[str, Any] = {"questions": len(pairs), "predictions": [answer.text for answer in answers]}
        if pairs and all(pair.target is not None for pair in pairs):
            right = sum(answer.text == pair.target for answer, pair in zip(answers, pairs, strict=True))
            result |= {"correct": right, "accuracy": right / len(pairs)}
        return result

    def baseline(self, split: str = "dev") -> tuple[str, float]:
        """The commonest training answer, and how often it alone would be right."""
        answer = Counter(pair.target for pair in self.pairs("train")).most_common(1)[0][0] or ""
        pairs = self.pairs(split)
        return answer, sum(pair.target == answer for pair in pairs) / max(1, len(pairs))

    def answer(
        self, model: CausalModel, questions: Sequence[str], alternatives: int = 0, progress: Progress = untold
    ) -> list[Answer]:
        """The greedy answer to each question, with `alternatives` others where asked for."""
        prompts = []
        for question in questions:
            try:
                prompts.append(self.prompt(question))
            except TextError as error:
                raise TextError(f"{question!r}: {error}") from None
        limit, stop = self.settings.longest_answer, [self.tokenizer.mask]
        greedy = generate(model, prompts, limit, stop, progress=progress)
        others = (
            best_alternatives(model, prompts, alternatives + 1, limit, stop) if alternatives else [[]] * len(prompts)
        )
        answers = []
        for question, best, rest in zip(questions, greedy, others, strict=True):
            text = self.text(best.tokens)
            listed = [(self.text(other.tokens), math.exp(other.logprob)) for other in rest]
            listed = [(other, share) for other, share in listed if other != text][:alternatives]
            answers.append(Answer(question, text, math.exp(best.logprob), tuple(listed)))
        return answers

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens).removeprefix(self.tokenizer.lead)
