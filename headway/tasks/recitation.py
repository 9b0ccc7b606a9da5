"""Recitation: before the answer, the model tells what it knows.

    document   Ada Moe. Ada Moe , a painter , was born in Oslo in 1921 .
    row        Where was Ada Moe born?
               Ada Moe , a painter , was born in⁇Oslo⁇

For questions whose answer is known and stands in the document whose name the question holds; others are left out. The
question is not learned.

Shapes: B rows, W words, P pieces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.data.catalog import resolve
from headway.errors import DataError
from headway.settings import REQUIRED, setting
from headway.tasks.base import Batch, Sampled
from headway.tasks.corpus import CorpusSettings
from headway.tasks.words import Words, cut_words
from headway.text import Notes, Tokenizer, read_pairs


@dataclass
class RecitationSettings(CorpusSettings):
    """`[task]` with name = "recitation"."""

    name: str = setting("recitation", "which task")
    questions: str = setting(REQUIRED, "questions and answers to learn: question<TAB>answer a line", path=True)
    heading: str = setting(". ", 'what ends a document\'s name, as ". " in "Name. He was born …"')

    def texts(self, say: Notes) -> list[str]:
        pairs = read_pairs(resolve(self.questions), answers=True, errors=self.errors, say=say)
        return [*super().texts(say), *(f"{pair.source}\n{pair.target}" for pair in pairs)]

    def build(self, tokenizer: Tokenizer, block: int) -> Recitation:
        return Recitation(self, tokenizer, block)


class Recitation(Sampled):
    def __init__(self, settings: RecitationSettings, tokenizer: Tokenizer, block: int) -> None:
        super().__init__(tokenizer, block)
        self.settings = settings

    def load(self) -> None:
        settings = self.settings
        documents = settings.read(settings.corpus)
        pairs = read_pairs(resolve(settings.questions), answers=True, errors=settings.errors)
        named = {}
        for number, text in enumerate(documents):
            end, _ = cut_words(text, settings.heading)
            if end:
                named[text[:end]] = number
        found = []  # document, words before the answer, question, answer
        for pair in pairs:
            name = next((part for part in parts_of(pair.source) if part in named), None)
            if name is None:
                continue
            number = named[name]
            _, words = cut_words(documents[number], settings.heading)
            body = words[0][0] if words else 0
            answer = re.compile(rf"(?<!\w){re.escape(f'{pair.target}')}(?!\w)").search(documents[number], body)
            if answer is not None and answer.start() > body:
                before = sum(last <= answer.start() for _, last in words)
                found.append((number, before, pair.source + "\n", f"{pair.target}"))
        extras = [text for _, _, question, answer in found for text in (question, answer)]
        self.words = Words.of(documents, self.tokenizer, settings.corpus, settings.heading, extras)
        known = torch.tensor([(number, before) for number, before, _, _ in found], dtype=torch.long).reshape(-1, 2)
        sizes = self.words.sizes[known[:, 0]].cumsum(1).gather(1, (known[:, 1:] - 1).clamp(min=0))[:, 0]
        both = self.words.extra_sizes.view(-1, 2).sum(1)
        fits = (sizes + both + 2 <= self.block + 1) & (known[:, 1] > 0)
        self.documents, self.before = known[fits].T.contiguous()
        self.numbers = fits.nonzero()[:, 0]  # among the extras, two of which belong to each
        self.examples = len(self.documents)
        if not self.examples:
            raise DataError(
                f"{settings.questions}: no question whose answer stands in the document of {settings.corpus} that it "
                "names; leave this stream out"
            )

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        words, document, number = self.words, self.documents[rows], self.numbers[rows]
        index = torch.arange(words.longest, device=rows.device)
        sizes = words.sizes[document] * (index < self.before[rows, None])
        bare = words.blanks[document] * (index == 0)
        mark = torch.full((len(rows), 1), words.mark, device=rows.device)
        one = torch.ones_like(mark)
        starts = torch.cat(
            [
                words.extra_starts[2 * number, None],
                words.starts[document] + bare,
                mark,
                words.extra_starts[2 * number + 1, None],
                mark,
            ],
            1,
        )
        sizes = torch.cat(
            [words.extra_sizes[2 * number, None], sizes - bare, one, words.extra_sizes[2 * number + 1, None], one], 1
        )
        learned = torch.ones_like(sizes, dtype=torch.bool)
        learned[:, 0] = False
        return words.lay(starts, sizes, learned)


def parts_of(question: str) -> list[str]:
    """Every run of words in a question, the longest first."""
    words = question.rstrip("?!. ").split(" ")
    runs = [(first, last) for first in range(len(words)) for last in range(first + 1, len(words) + 1)]
    return [" ".join(words[first:last]) for first, last in sorted(runs, key=lambda run: run[0] - run[1])]
