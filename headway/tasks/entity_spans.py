"""Entity spans: short rows that ask for a name, a place or a number out of a little context.

    document   Ada Moe. Ada Moe , a painter , was born in Oslo in 1921 .
    rows       Ada Moe. was born in⁇Oslo⁇                    the words before, cut and thinned
               painter born Ada Moe⁇Oslo⁇                    the name last
               Ada Moe. born⁇ in 1921⁇Oslo⁇                  words behind too
               Ada Moe.⁇Oslo⁇                                no context at all

Only the span and the mark that closes it are learned, so a short row is all exercise. Spans are mostly runs of
capitalised words, at most `longest` tokens, and of numbers and dates where `numbers` says so ("3 March 1822 Rome" is
one run with them, and two without: March, Rome); the name itself is never asked for.

Shapes: B rows, W words, P pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import DataError
from headway.settings import setting
from headway.tasks.base import Batch
from headway.tasks.corpus import CorpusSettings
from headway.tasks.retelling import LARGE, Retelling
from headway.tasks.span_corruption import pick
from headway.tasks.words import Words, check_form
from headway.text import Notes, Tokenizer


@dataclass
class EntitySpansSettings(CorpusSettings):
    """`[task]` with name = "entity_spans"."""

    name: str = setting("entity_spans", "which task")
    heading: str = setting(". ", 'what ends a document\'s name, as ". " in "Name. He was born …"')
    form: str = setting("{}.", "how the name is written in front; {} is the name")
    entities: float = setting(
        0.85, "share of the spans that are capitalised words, and numbers where asked for", least=0.0, most=1.0
    )
    numbers: bool = setting(True, "are numbers asked for too, alone or in a run with capitalised words?")
    longest: int = setting(24, "most tokens of a span", least=1)
    bare: float = setting(0.1, "share of the rows without words before the span", least=0.0, most=1.0)
    thinned: float = setting(0.5, "share of the rows that leave words out", least=0.0, most=1.0)
    thinning: float = setting(0.7, "most words that a row leaves out, as a share", least=0.0, most=1.0)
    behind: float = setting(0.25, "share of the rows with words from behind the span", least=0.0, most=1.0)
    name_last: float = setting(0.25, "share of the rows whose name stands just before the span", least=0.0, most=1.0)

    def texts(self, say: Notes) -> list[str]:
        return [*super().texts(say), *check_form(self.form, "task.form"), " "]

    def build(self, tokenizer: Tokenizer, block: int) -> EntitySpans:
        return EntitySpans(self, tokenizer, block)


class EntitySpans(Retelling):
    def __init__(self, settings: EntitySpansSettings, tokenizer: Tokenizer, block: int) -> None:
        super().__init__(settings, tokenizer, block)  # type: ignore[arg-type]

    def load(self) -> None:
        settings = self.settings
        documents = settings.read(settings.corpus)
        before, after = check_form(settings.form, "task.form")
        self.words = Words.of(documents, self.tokenizer, settings.corpus, settings.heading, [before, after, " "])
        self.examples = len(documents)
        longest = int(self.words.name_sizes.max() + self.words.extra_sizes.sum()) + settings.longest + 3
        if longest > self.block + 1:
            raise DataError(
                f"{settings.corpus}: the longest name and a span of {settings.longest} take {longest} tokens, and a "
                f"row has {self.block}; check task.heading ({settings.heading!r}), or make the rows longer"
            )
        asked = self.words.capitals | self.words.numbers if settings.numbers else self.words.capitals
        found = [entity_runs(self.words, asked, number, settings.longest) for number in range(len(documents))]
        self.run_counts = torch.tensor([len(runs) for runs in found])
        self.runs = torch.zeros(len(found), max(1, int(self.run_counts.max())), 2, dtype=torch.long)
        for number, runs in enumerate(found):
            if runs:
                self.runs[number, : len(runs)] = torch.tensor(runs)

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(11 + self.words.longest, count, generator=generator)

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        settings, words = self.settings, self.words
        index = torch.arange(words.longest, device=rows.device)  # (W,)
        u, left_out = noise[:11], noise[11:].T  # (11, B), (B, W)
        starts, sizes, blanks = words.starts[rows], words.sizes[rows], words.blanks[rows]
        count = (sizes > 0).sum(1)

        # The span: an entity, or some words.
        entity = (u[0] < settings.entities) & (self.run_counts[rows] > 0)
        runs = self.runs[rows, pick(u[1], 0, self.run_counts[rows] - 1)]  # (B, 2)
        begin = torch.where(entity, runs[:, 0], pick(u[1], 0, count - 1))[:, None]
        end = torch.where(entity, runs[:, 1], begin[:, 0] + pick(u[2], 1, torch.full_like(count, 3)))[:, None]
        span = (index >= begin) & (index < end)
        span = span & ((sizes * span).cumsum(1) <= settings.longest) & (sizes > 0)
        room = self.block + 1 - 3 - (words.name_sizes[rows] + words.extra_sizes.sum() + (sizes * span).sum(1))

        # The context: words before, the nearest ones first to be kept, and sometimes words behind.
        rate = torch.where(u[3] < settings.thinned, u[4] * settings.thinning, 0.0)
        kept = (left_out >= rate[:, None]) & (sizes > 0)
        near = torch.where(u[5] < settings.bare, 0, pick(u[6], 1, begin[:, 0]))[:, None]
        before = kept & (index < begin) & (index >= begin - near)
        before = before & ((sizes * before).flip(1).cumsum(1).flip(1) <= room[:, None])
        room = room - (sizes * before).sum(1)
        reach = pick(u[8], 1, count - end[:, 0])[:, None]
        behind = kept & (u[7] < settings.behind)[:, None] & (index >= end) & (index < end + reach)
        behind = behind & ((sizes * behind).cumsum(1) <= room[:, None])

        last = u[9] < settings.name_last  # the name's place: in front, or just before the span
        opening = before & (before.cumsum(1) == 1) & last[:, None]
        bare = blanks * ((span & (index == begin)) | opening)
        sizes = (sizes - bare) * (span | before | behind)
        keys = index + behind * LARGE + span * 3 * LARGE
        return self.lay_out(rows, starts + bare, sizes, keys.float(), span, last, behind.any(1), before.any(1), begin)

    def lay_out(
        self,
        rows: Tensor,
        starts: Tensor,
        sizes: Tensor,
        keys: Tensor,
        span: Tensor,
        last: Tensor,
        behind: Tensor,
        before: Tensor,
        begin: Tensor,
    ) -> Batch:
        """Words by their keys; the name in its form in front, or after a blank at the end; the marks."""
        words, count = self.words, len(rows)
        named = words.name_sizes[rows] > 0  # a document without a name has no form around it
        front, last = ~last & named, last & named

        def piece(start: Tensor | int, size: Tensor, key: float) -> tuple[Tensor, Tensor, Tensor]:
            start = torch.as_tensor(start, device=rows.device)
            return start.expand(count), size.expand(count), torch.full((count,), key, device=rows.device)

        extra, size = words.extra_starts, words.extra_sizes
        name, name_size = words.name_starts[rows], words.name_sizes[rows]
        ones = torch.ones_like(rows)
        pieces = [
            piece(extra[0], size[0] * front, -4.0),
            piece(name, name_size * front, -3.0),
            piece(extra[1], size[1] * front, -2.0),
            piece(extra[2], size[2] * (last & before), LARGE / 4),
            piece(name, name_size * last, LARGE / 3),
            piece(words.mark, ones, LARGE / 2),
            piece(words.mark, ones * behind, 2.5 * LARGE),
            piece(words.mark, ones, 9 * LARGE),
        ]
        starts = torch.cat([torch.stack([each[0] for each in pieces], 1), starts], 1)
        sizes = torch.cat([torch.stack([each[1] for each in pieces], 1), sizes], 1)
        order = torch.cat([torch.stack([each[2] for each in pieces], 1), keys], 1).argsort(dim=1, stable=True)
        learned = torch.cat(
            [torch.arange(8, device=rows.device).expand(count, -1) == 7, span], 1
        )  # the closing mark, the span
        return words.lay(starts.gather(1, order), sizes.gather(1, order), learned.gather(1, order))


def entity_runs(words: Words, asked: Tensor, document: int, longest: int) -> list[tuple[int, int]]:
    """Runs of the words that are `asked` (documents, W), as word ranges, of at most `longest` tokens; those inside the
    name left out."""
    begin, size = int(words.name_starts[document]), int(words.name_sizes[document])
    name = words.tokens[begin : begin + size].tolist()
    runs: list[tuple[int, int]] = []
    wanted, spaced, sizes, starts, blanks = (
        table[document].tolist() for table in (asked, words.spaced, words.sizes, words.starts, words.blanks)
    )
    column = 0
    while column < len(sizes) and sizes[column]:
        if not wanted[column]:
            column += 1
            continue
        end = column + 1
        while end < len(sizes) and sizes[end] and wanted[end] and spaced[end]:
            end += 1
        first = starts[column] + blanks[column]
        last = starts[end - 1] + sizes[end - 1]
        tokens = words.tokens[first:last].tolist()
        if len(tokens) <= longest and not contains(name, tokens):
            runs.append((column, end))
        column = end
    return runs


def contains(whole: list[int], part: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))
