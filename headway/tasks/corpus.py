"""A corpus as a task holds it: every document's tokens in one flat array, with an index.

Flat arrays keep batch making vectorised, and are the shape that memory-mapped shards have too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headway.data.catalog import resolve
from headway.errors import DataError, TextError
from headway.settings import REQUIRED, setting
from headway.text import Notes, Tokenizer, read_documents
from headway.text.plain import silent


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
        return read_documents(resolve(path), documents=self.documents, column=self.column, errors=self.errors, say=say)


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
