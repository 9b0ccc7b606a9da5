"""Retelling: documents about somebody, told again in other words' order.

    document   Ada Moe. Ada Moe , a painter , was born in Oslo in 1921 .
    rows       Ada Moe. Ada Moe , a painter , was born in Oslo in 1921 .          verbatim
               Ada Moe. was born in Oslo in 1921 . Ada Moe , a painter ,          clauses shuffled
               Ada Moe. Ada Moe painter was born Oslo in .                        words left out
               Ada Moe. Ada Moe , a painter , was born in⁇ in 1921 .⁇Oslo⁇        a span moved to the end

A model that has read a fact in one wording only can repeat that wording and not answer a question about it; a model
that has read it in many knows the fact ("Physics of language models", part 3.1, Allen-Zhu and Li 2023). Nothing is
learned on the name. `form` says how a row begins: "{}." or "Who was {}?\\n".

Shapes: B rows, W words, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.errors import DataError
from headway.settings import setting
from headway.tasks.base import Batch, Sampled
from headway.tasks.corpus import CorpusSettings
from headway.tasks.span_corruption import pick
from headway.tasks.words import Words, check_form, choose
from headway.text import Notes, Tokenizer

LARGE = 1e6  # a sorting key behind all words


@dataclass
class RetellingSettings(CorpusSettings):
    """`[task]` with name = "retelling"."""

    name: str = setting("retelling", "which task")
    heading: str = setting(". ", 'what ends a document\'s name, as ". " in "Name. He was born …"')
    form: str = setting("{}.", "how a row begins; {} is the name")
    verbatim: float = setting(0.3, "share of the rows that keep every word in order", least=0.0, most=1.0)
    shuffled: float = setting(0.35, "share of the rows whose clauses are shuffled", least=0.0, most=1.0)
    thinned: float = setting(0.5, "share of the other rows that leave words out", least=0.0, most=1.0)
    thinning: float = setting(0.5, "most words that a row leaves out, as a share", least=0.0, most=1.0)
    windows: float = setting(
        0.7, "share of the rows too long for a row that begin at a random word", least=0.0, most=1.0
    )
    moved: float = setting(0.5, "share of the rows whose span of words is moved to the end", least=0.0, most=1.0)
    longest_span: int = setting(8, "most words in that span", least=1)
    capitals: float = setting(0.6, "share of the spans that begin at a capital or a digit", least=0.0, most=1.0)

    def texts(self, say: Notes) -> list[str]:
        return [*super().texts(say), *check_form(self.form, "task.form")]

    def build(self, tokenizer: Tokenizer, block: int) -> Retelling:
        return Retelling(self, tokenizer, block)


class Retelling(Sampled):
    settings: Any

    def __init__(self, settings: RetellingSettings, tokenizer: Tokenizer, block: int) -> None:
        super().__init__(tokenizer, block)
        self.settings = settings

    def load(self) -> None:
        settings = self.settings
        documents = settings.read(settings.corpus)
        before, after = check_form(settings.form, "task.form")
        self.words = Words.of(documents, self.tokenizer, settings.corpus, settings.heading, [before, after])
        self.examples = len(documents)
        longest = int(self.words.name_sizes.max() + self.words.extra_sizes.sum()) + 8
        if longest > self.block:
            raise DataError(
                f"{settings.corpus}: the longest name with task.form takes {longest - 8} tokens, and a row has "
                f"{self.block}; check task.heading ({settings.heading!r}), or raise {self.limit}"
            )

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(9 + 2 * self.words.longest, count, generator=generator)

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        settings, words = self.settings, self.words
        index = torch.arange(words.longest, device=rows.device)  # (W,)
        u, left_out, keys = noise[:9], noise[9 : 9 + len(index)].T, noise[9 + len(index) :].T  # (9, B), (B, W), (B, W)

        # Which words, in which order.
        verbatim = u[0] < settings.verbatim
        shuffled = ~verbatim & (u[0] < settings.verbatim + settings.shuffled)
        rate = torch.where(~verbatim & (u[1] < settings.thinned), u[2] * settings.thinning, 0.0)
        kept = (words.sizes[rows] > 0) & (left_out >= rate[:, None])
        key = index + shuffled[:, None] * (LARGE * keys.gather(1, words.clauses[rows])).floor()
        order = key.masked_fill(~kept, float("inf")).argsort(dim=1, stable=True)
        starts, sizes, blanks, capitals, numbers = (
            table[rows].gather(1, order)
            for table in (words.starts, words.sizes, words.blanks, words.capitals, words.numbers)
        )
        count = kept.sum(1)
        sizes = sizes.masked_fill(index >= count[:, None], 0)

        # The part of them that fits a row.
        before, after = words.extra_sizes
        name = words.name_sizes[rows]
        room = self.block + 1 - 3 - (before + name + after)  # three marks
        first = pick(u[3] / settings.windows if settings.windows else u[3], 0, count - 1)
        begins = (sizes.sum(1) > room) & (u[3] < settings.windows)
        sizes = sizes.masked_fill(index < torch.where(begins, first, 0)[:, None], 0)
        sizes = sizes.masked_fill(sizes.cumsum(1) > room[:, None], 0)
        there = sizes > 0

        # A span of them moves to the end, between marks.
        wanted = there & (capitals | numbers) & (u[5] < settings.capitals)[:, None]
        among = torch.where(wanted.any(1, keepdim=True), wanted, there)
        begin = choose(among, u[6])[:, None]
        length = pick(u[7], 1, torch.full_like(count, settings.longest_span))[:, None]
        moved = (u[4] < settings.moved) & (there.sum(1) > 1)
        span = there & moved[:, None] & (index >= begin) & (index < begin + length)
        bare = blanks * ((index == begin) & moved[:, None])  # a span stands without the blank before it
        opening = there & (there.cumsum(1) == 1)
        bare = bare + blanks * (opening & ~span) * (after > 0) * self.after_blank()

        return self.arrange(rows, starts + bare, sizes - bare, index + span * 2 * LARGE, begin, moved)

    def after_blank(self) -> int:
        """1 where the form ends in a blank or a line end, so that the first word needs none."""
        return int(self.settings.form[-1].isspace())

    def arrange(self, rows: Tensor, starts: Tensor, sizes: Tensor, keys: Tensor, begin: Tensor, moved: Tensor) -> Batch:
        """The name in its form, the words by their keys, and the marks of a moved span: before, between, after."""
        words = self.words
        count = len(rows)
        before, after = (
            (words.extra_starts[i].expand(count, 1), words.extra_sizes[i].expand(count, 1)) for i in (0, 1)
        )
        name = words.name_starts[rows, None], words.name_sizes[rows, None]
        mark = torch.full((count, 1), words.mark, device=rows.device), moved[:, None].long()
        parts = [
            (*before, -3.0),
            (*name, -2.0),
            (*after, -1.0),
            (*mark, begin - 0.5),
            (*mark, LARGE),
            (*mark, 9 * LARGE),
        ]
        starts = torch.cat([*(part[0] for part in parts), starts], 1)
        sizes = torch.cat([*(part[1] for part in parts), sizes], 1)
        order = torch.cat(
            [
                *(torch.as_tensor(part[2], device=rows.device, dtype=torch.float32).expand(count, 1) for part in parts),
                keys.float(),
            ],
            1,
        ).argsort(dim=1, stable=True)
        learned = torch.ones_like(sizes, dtype=torch.bool)
        learned[:, :5] = False  # nothing on the name, nor on where a span was taken out
        return words.lay(starts.gather(1, order), sizes.gather(1, order), learned.gather(1, order))
