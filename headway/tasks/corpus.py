"""A corpus as a task holds it: every document's tokens in one flat array, with an index.

Flat arrays keep batch making vectorised, and are the shape that memory-mapped shards have too (`Stored`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.data.catalog import resolve
from headway.errors import DataError, TextError
from headway.settings import REQUIRED, setting
from headway.text import Notes, Tokenizer, read_documents
from headway.text.plain import silent
from headway.text.shards import Joined, Shards, is_prepared

NO_END = re.compile(r"\b(?:\w|[JS]r|St|[DM]r|Mrs|Ms)$")  # what a full stop belongs to


@dataclass
class CorpusSettings:
    """The keys of every `[task]` that learns from a corpus."""

    name: str = setting("", "which task")
    corpus: str = setting(REQUIRED, "the text to learn: a file, a folder or a pattern", path=True)
    documents: str = setting("lines", "what a document is in a .txt file", choices=("lines", "file"))
    column: str | int | None = setting(None, "which column of a .tsv, .csv or .jsonl file holds the text")
    errors: str = setting("strict", "what to do with bytes that are not UTF-8", choices=("strict", "replace"))

    def texts(self, say: Notes) -> list[str]:
        return self.read(self.corpus, say)

    def read(self, path: str, say: Notes = silent) -> list[str]:
        if is_prepared(resolve(path)):
            raise DataError(
                f"{path}: token shards, and this needs the text itself; name the files that they were made of, "
                "or learn from them by language_modelling"
            )
        return read_documents(resolve(path), documents=self.documents, column=self.column, errors=self.errors, say=say)

    def shards(self) -> Shards | None:
        """The corpus where it is a folder that `headway data prepare` made; its tokenizer must be the run's."""
        return open_shards(self.corpus)


def open_shards(path: str) -> Shards | None:
    """The token shards at `path`, or None where something else is there."""
    folder = resolve(path)
    return Shards(folder) if is_prepared(folder) else None


@dataclass
class Corpus:
    """`tokens[starts[i] : starts[i + 1]]` is document i."""

    tokens: Tensor  # (N,) int32
    starts: Tensor  # (documents + 1,) int64

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def to(self, device: torch.device) -> Corpus:
        return Corpus(self.tokens.to(device), self.starts.to(device))

    def padded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The documents `rows` (B,) side by side, (B, T), padded with 0; and their lengths (B,)."""
        lengths = self.lengths[rows]
        place = torch.arange(int(lengths.max()), device=rows.device)
        where = self.starts[rows][:, None] + place
        tokens = self.tokens[where.clamp(max=len(self.tokens) - 1)].long()
        return tokens.masked_fill(place >= lengths[:, None], 0), lengths

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]]) -> Corpus:
        """Documents that are tokens already."""
        arrays = [np.asarray(row, dtype=np.int32) for row in rows]
        starts = np.concatenate([[0], np.cumsum([len(array) for array in arrays])])
        return cls(torch.from_numpy(np.concatenate(arrays)), torch.from_numpy(starts.astype(np.int64)))

    @classmethod
    def encode(cls, documents: Sequence[str], tokenizer: Tokenizer, source: str, closing: bool = False) -> Corpus:
        """Encode `documents`; with `closing`, a mask mark after each says that it ends there."""
        end = np.array([tokenizer.mask] if closing else [], dtype=np.int32)
        arrays = []
        for number, document in enumerate(documents, 1):
            try:
                arrays += [tokenizer.encode_array(tokenizer.lead + document), end]
            except TextError as error:
                raise DataError(f"{source}: document {number}: {error}") from None
        tokens = np.concatenate(arrays).astype(np.int32)
        lengths = np.array([len(text) + len(mark) for text, mark in zip(arrays[::2], arrays[1::2], strict=True)])
        starts = np.concatenate([[0], lengths.cumsum()])
        return cls(torch.from_numpy(tokens), torch.from_numpy(starts.astype(np.int64)))


class Stored:
    """Token ids that stay on disk: a part of prepared shards, of which only what is looked at is read.

    Slices and indexes as a one-dimensional tensor does; the ids at an index come as a tensor on the index's device.
    """

    on_disk = True

    def __init__(self, tokens: Joined, begin: int = 0, end: int | None = None) -> None:
        self.tokens, self.begin, self.end = tokens, begin, len(tokens) if end is None else end

    def __len__(self) -> int:
        return self.end - self.begin

    def __getitem__(self, where: slice | Tensor) -> Any:
        if isinstance(where, Tensor):
            ids = self.tokens[where.cpu().numpy() + self.begin]
            return torch.from_numpy(ids.astype(np.int64)).to(where.device)
        begin, end, step = where.indices(len(self))
        if step != 1:
            raise IndexError("stored tokens have no step")
        return Stored(self.tokens, self.begin + begin, self.begin + max(begin, end))


def heading_end(text: str, mark: str) -> int:
    """Where a document's heading ends: at the first `mark`, or −1 where there is none.

    A full stop after an initial or a title ("Edwin E. Wagner. He was born …") ends nothing.
    """
    found = text.find(mark) if mark else -1
    while found >= 0 and mark.startswith(".") and NO_END.search(text[:found]):
        found = text.find(mark, found + 1)
    return found if found >= 0 or not mark else text.find(mark)
