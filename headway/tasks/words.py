"""Documents as words, and rows laid out from pieces of them.

A word is a range of the corpus's tokens: letters or a run of punctuation, with the blanks before it. Tasks that
reorder, thin or move words choose pieces (where each begins, how many tokens it has) for every row of a batch at once,
and `lay` copies the tokens together. Nothing loops over rows, so batches can be made on a GPU.

Shapes: B rows, W words of the longest document, P pieces of a row, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from headway.errors import DataError
from headway.tasks.base import Batch
from headway.tasks.corpus import Corpus, heading_end
from headway.text import Tokenizer

WORD = re.compile(r"\s*(?:\w+(?:['’.-]\w+)*|[^\w\s]+)")
CLAUSE_ENDS = re.compile(r"[,;:.()\-–—]+$")


@dataclass
class Words:
    """Every document as words, the rows of the tables padded with words of no tokens."""

    tokens: Tensor  # (N,) of all documents and extra texts, flat
    starts: Tensor  # (documents, W) where a word begins
    sizes: Tensor  # (documents, W) how many tokens it has, 0 past the last
    blanks: Tensor  # (documents, W) 1 where the first of them is a blank alone
    spaced: Tensor  # (documents, W) does a blank stand before it in the text?
    capitals: Tensor  # (documents, W) does it begin with a capital letter?
    numbers: Tensor  # (documents, W) does it begin with a digit?
    clauses: Tensor  # (documents, W) the number of its clause
    name_starts: Tensor  # (documents,) the heading
    name_sizes: Tensor  # (documents,) 0 where there is none
    extra_starts: Tensor  # (extra texts,)
    extra_sizes: Tensor  # (extra texts,)

    def to(self, device: torch.device) -> Words:
        return Words(*(getattr(self, field.name).to(device) for field in fields(self)))

    @property
    def longest(self) -> int:
        return self.starts.shape[1]

    @classmethod
    def of(
        cls, documents: Sequence[str], tokenizer: Tokenizer, source: str, heading: str, extras: Sequence[str]
    ) -> Words:
        """Encode and cut the documents; `heading` ends a document's name, as ". " ends "Name. He was born …"."""
        corpus = Corpus.encode([*documents, *(extra for extra in extras if extra)], tokenizer, source)
        tokens = torch.cat([corpus.tokens, torch.tensor([tokenizer.mask], dtype=corpus.tokens.dtype)])
        ends_of = [np.empty(0)] * len(documents)
        sizes, lead = tokenizer.byte_lengths(), len(tokenizer.lead)
        for number in range(len(documents)):
            begin, end = int(corpus.starts[number]), int(corpus.starts[number + 1])
            ends_of[number] = sizes[corpus.tokens[begin:end].numpy()].cumsum() - lead
        cut = [cut_words(text, heading) for text in documents]
        longest = max(len(words) for _, words in cut)
        table = torch.zeros(7, len(documents), longest, dtype=torch.long)
        names = torch.zeros(2, len(documents), dtype=torch.long)
        for number, (text, (name, words)) in enumerate(zip(documents, cut, strict=True)):
            begin, ends = int(corpus.starts[number]), ends_of[number]

            def place(character: int, text: str = text, ends: np.ndarray = ends) -> int:
                return int(np.searchsorted(ends, len(text[:character].encode()), side="right"))

            names[:, number] = torch.tensor([begin, place(name)])
            clause = 0
            for column, (first, last) in enumerate(words):
                word = text[first:last]
                low, high = place(first), place(last)
                blank = word[0].isspace() and place(first + 1) > low
                bare = word.lstrip()
                table[:, number, column] = torch.tensor(
                    [begin + low, high - low, blank, word[0].isspace(), bare[0].isupper(), bare[0].isdigit(), clause]
                )
                clause += bool(CLAUSE_ENDS.search(bare))
        where = len(documents)
        extra_starts, extra_sizes = [], []
        for extra in extras:
            begin, end = (int(corpus.starts[where]), int(corpus.starts[where + 1])) if extra else (0, 0)
            where += bool(extra)
            extra_starts.append(begin)
            extra_sizes.append(end - begin)
        return cls(
            tokens,
            table[0],
            table[1],
            table[2],
            table[3].bool(),
            table[4].bool(),
            table[5].bool(),
            table[6],
            names[0],
            names[1],
            torch.tensor(extra_starts),
            torch.tensor(extra_sizes),
        )

    @property
    def mark(self) -> int:
        """Where a mask mark stands among the tokens."""
        return len(self.tokens) - 1

    def lay(self, starts: Tensor, sizes: Tensor, learned: Tensor) -> Batch:
        """Rows of pieces, each (B, P): the tokens of every piece one after the other, learned or not."""
        ends = sizes.cumsum(1)  # (B, P)
        lengths = ends[:, -1]
        place = torch.arange(int(lengths.max()), device=starts.device).expand(len(starts), -1).contiguous()  # (B, T)
        piece = torch.searchsorted(ends, place, right=True).clamp(max=starts.shape[1] - 1)
        source = starts.gather(1, piece) + place - (ends - sizes).gather(1, piece)
        rows = self.tokens[source.clamp(max=len(self.tokens) - 1)].long()
        rows = rows.masked_fill(place >= lengths[:, None], 0)
        return Batch.next_token(rows, lengths, learned.gather(1, piece))


def cut_words(text: str, heading: str) -> tuple[int, list[tuple[int, int]]]:
    """(where the name ends, the words after the heading), in characters. A text without a heading is all words."""
    found = heading_end(text, heading)
    body = found + len(heading.rstrip()) if found > 0 else 0
    return max(0, found), [match.span() for match in WORD.finditer(text, body)]


def choose(among: Tensor, u: Tensor) -> Tensor:
    """One of the true columns of each row (B, W), by u (B,) in [0, 1); 0 where there is none."""
    counts = among.sum(1)
    wanted = (u * counts).long() + 1
    return ((among.cumsum(1) == wanted[:, None]) & among).int().argmax(1)


def check_form(form: str, place: str) -> tuple[str, str]:
    """What stands before and after the name in a form such as "Who was {}?"."""
    before, name, after = form.partition("{}")
    if not name:
        raise DataError(f"{place} = {form!r}: must hold {{}} where the name stands")
    return before, after
