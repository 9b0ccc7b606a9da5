"""Span corruption: hide a span of a line, move it to the end, learn to write it.

    line      Name. He was born in Oslo in 1921 .
    kept      a part of it                                  (`shortest` … `longest`; `windows`)
    row       Name. He was born in ⁇ in 1921⁇Oslo           prefix ⁇ suffix ⁇ span

The defaults are the course's rules: the kept part is the line's beginning, of random length; the span lies anywhere and
averages a quarter of it; the loss counts every token. Beyond them:

    windows     "anywhere": the kept part may begin later, but the heading (the name) stays in front and whole, where
                it leaves room for more
    salient     share of the rows whose span is a run of capitalised words or a number
    no_suffix   share of the rows that end with the span: prefix ⁇ span
    closing     a mask mark after the span says that it ends there: prefix ⁇ suffix ⁇ span ⁇
    learn       "span": no loss on the context

Everything is computed for the whole batch at once with index arithmetic; nothing loops over rows.
Shapes: B rows, T positions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.errors import DataError, UserError
from headway.models import CausalModel
from headway.ranks import ALONE, Ranks
from headway.settings import setting
from headway.tasks.base import Batch, Sampled
from headway.tasks.corpus import Corpus, CorpusSettings, heading_end
from headway.text import Tokenizer


@dataclass
class SpanCorruptionSettings(CorpusSettings):
    """`[task]` with name = "span_corruption"."""

    name: str = setting("span_corruption", "which task")
    shortest: int = setting(4, "fewest tokens of a line that are kept", least=2)
    longest: float = setting(
        0.875, "most tokens of a line that are kept, as a share of model.block", above=0.0, most=1.0
    )
    span: float = setting(0.25, "mean length of the hidden span, as a share of what is kept", above=0.0, most=0.5)
    windows: str = setting("start", "where the kept part begins", choices=("start", "anywhere"))
    heading: str = setting("", 'text that ends a line\'s heading, as ". " ends "Name. "; the heading is never hidden')
    salient: float = setting(0.0, "share of the rows that hide capitalised words or a number", least=0.0, most=1.0)
    no_suffix: float = setting(0.0, "share of the rows that end with the hidden span", least=0.0, most=1.0)
    closing: bool = setting(False, "put a mask mark after the span")
    learn: str = setting("everything", "which tokens count in the loss", choices=("everything", "span"))

    def build(self, tokenizer: Tokenizer, block: int) -> SpanCorruption:
        return SpanCorruption(self, tokenizer, block)


class SpanCorruption(Sampled):
    def __init__(self, settings: SpanCorruptionSettings, tokenizer: Tokenizer, block: int) -> None:
        super().__init__(tokenizer, block)
        self.settings = settings
        self.marks = 2 + settings.closing
        self.longest = min(
            int(block * settings.longest), block + 1 - self.marks
        )  # a row has one token more than its inputs

    def load(self) -> None:
        documents = self.settings.read(self.settings.corpus)
        if self.longest < self.settings.shortest:
            raise DataError(
                f"task.shortest ({self.settings.shortest}) is more than fits a row of {self.limit} = {self.block} "
                f"({self.longest}); lower it or raise {self.limit}"
            )
        self.corpus = Corpus.encode(documents, self.tokenizer, self.settings.corpus)
        self.examples = len(self.corpus)
        sizes, lead = self.tokenizer.byte_lengths(), len(self.tokenizer.lead)
        spans = [token_spans(text, self.corpus, number, sizes, lead) for number, text in enumerate(documents)]
        self.headings = torch.tensor([count_heading(text, ends, self.settings.heading) for text, ends, _ in spans])
        salient = torch.tensor([span for _, _, found in spans for span in found], dtype=torch.long).reshape(-1, 2)
        self.salient_starts, self.salient_ends = salient.T.contiguous()  # over the flat corpus, sorted

    @property
    def width(self) -> int:
        return min(self.longest, int(self.corpus.lengths.max())) + self.marks - 1

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.rand(8, count, generator=generator, dtype=torch.float64)

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        """Cut, hide and assemble the lines `rows` (B,)."""
        settings, u = self.settings, noise
        lines = self.corpus.lengths[rows]

        # What is kept: `kept` tokens; past the heading they are taken `shift` tokens further on.
        heading = torch.minimum(self.headings[rows], lines)
        kept = pick(u[0], settings.shortest, torch.full_like(lines, self.longest))
        kept = torch.minimum(torch.maximum(kept, heading + settings.shortest), lines).clamp(max=self.longest)
        heading = torch.where(heading < kept, heading, 0)
        shift = pick(u[1], 0, lines - kept) if settings.windows == "anywhere" else torch.zeros_like(lines)

        # What is hidden: `hidden` tokens from `prefix` on, counted in what is kept.
        body = kept - heading
        most = (2 * settings.span * body).long() - 1
        hidden = pick(u[2], 1, most.clamp(min=1))
        prefix = heading + pick(u[3], 0, body - hidden)
        if settings.salient > 0 and len(self.salient_starts):
            begin = self.corpus.starts[rows] + shift
            first = torch.searchsorted(self.salient_starts, begin + heading)
            last = torch.searchsorted(self.salient_ends, begin + kept, right=True)  # spans that end inside
            chosen = pick(u[4], first, (last - 1).clamp(min=first)).clamp(max=len(self.salient_starts) - 1)
            use = (u[5] < settings.salient) & (last > first)
            prefix = torch.where(use, self.salient_starts[chosen] - begin, prefix)
            hidden = torch.where(use, self.salient_ends[chosen] - self.salient_starts[chosen], hidden)
        suffix = kept - prefix - hidden
        cut = u[6] < settings.no_suffix
        suffix = torch.where(cut, 0, suffix)

        return self.assemble(rows, heading, shift, prefix, suffix, hidden, cut)

    def assemble(
        self,
        rows: Tensor,
        heading: Tensor,
        shift: Tensor,
        prefix: Tensor,
        suffix: Tensor,
        hidden: Tensor,
        cut: Tensor,
    ) -> Batch:
        """prefix ⁇ suffix ⁇ span (⁇), or prefix ⁇ span (⁇) where `cut`; every argument is (B,)."""
        second = prefix + 1 + suffix  # where the second mark stands, if there is one
        answer = second + torch.where(cut, 0, 1)
        ends = answer + hidden
        lengths = ends + (1 if self.settings.closing else 0)
        place = torch.arange(int(lengths.max()), device=rows.device).expand(len(rows), -1)  # (B, T)

        prefix, suffix, hidden, second, answer, ends = (
            each[:, None] for each in (prefix, suffix, hidden, second, answer, ends)
        )
        kept = torch.where(place < prefix, place, place - 1 + hidden)  # position in what is kept: prefix, then suffix
        kept = torch.where(place >= answer, place - answer + prefix, kept)  # … then the hidden span
        source = self.corpus.starts[rows][:, None] + kept + torch.where(kept >= heading[:, None], shift[:, None], 0)
        tokens = self.corpus.tokens[source.clamp(max=len(self.corpus.tokens) - 1)].long()
        marks = (place == prefix) | ((place == second) & (place < answer)) | (place == ends)
        tokens = tokens.masked_fill(marks, self.tokenizer.mask)
        tokens = tokens.masked_fill(place >= lengths[:, None], self.tokenizer.pad)
        learned = place >= answer if self.settings.learn == "span" else None
        return Batch.next_token(tokens, lengths, learned)

    def evaluate(self, model: CausalModel, split: str = "dev", among: Ranks = ALONE, rows: int = 512) -> dict[str, Any]:
        """Loss a learned token on a fixed corruption of a file, or of a sample of the corpus (nothing is held out)."""
        if split == "test":
            raise UserError("span corruption has no test split; name a file instead")
        if split not in ("train", "dev"):
            there = replace(self.settings, corpus=split).build(self.tokenizer, self.block)
            return there.evaluate(model, "train", among, rows)
        return super().evaluate(model, split, among, rows)


def pick(u: Tensor, low: int | Tensor, high: Tensor) -> Tensor:
    """Uniform whole numbers in [low, high] from u in [0, 1); low where high < low."""
    return low + (u * (high - low + 1).clamp(min=1)).long()


def token_spans(
    text: str, corpus: Corpus, number: int, sizes: np.ndarray, lead: int
) -> tuple[str, np.ndarray, list[tuple[int, int]]]:
    """(text, last byte + 1 of each of its tokens, salient spans as token ranges of the flat corpus)."""
    begin, end = int(corpus.starts[number]), int(corpus.starts[number + 1])
    ends = sizes[corpus.tokens[begin:end].numpy()].cumsum() - lead
    spans: list[tuple[int, int]] = []
    for first, last in salient_spans(text):
        low, high = len(text[:first].encode()), len(text[:last].encode())
        span = (
            begin + int(np.searchsorted(ends, low, side="right")),
            begin + int(np.searchsorted(ends, high)) + 1,
        )
        if not spans or span[0] >= spans[-1][1]:
            spans.append(span)
    return text, ends, spans


def count_heading(text: str, ends: np.ndarray, mark: str) -> int:
    """How many tokens hold the text up to and with the first `mark`; none where it does not occur."""
    found = heading_end(text, mark)
    return int(np.searchsorted(ends, len(text[: found + len(mark)].encode()), side="right")) if found >= 0 else 0


def salient_spans(text: str) -> list[tuple[int, int]]:
    """Runs of capitalised words one space apart, and numbers, as character ranges."""
    spans: list[tuple[int, int]] = []
    for word in re.finditer(r"\w+(?:['’.-]\w+)*", text):
        capital, digit = word[0][0].isupper(), word[0][0].isdigit()
        if not (capital or digit):
            continue
        joins = bool(spans) and capital and text[spans[-1][1] : word.start()] == " " and text[spans[-1][0]].isupper()
        if joins:
            spans[-1] = (spans[-1][0], word.end())
        else:
            spans.append(word.span())
    return spans
