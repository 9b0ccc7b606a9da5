"""Causal language modelling: the next token of running text.

    loss = − Σ_t log p(x_t | x_<t)

An epoch sees one window of `block` tokens around each block of the corpus, moved by up to half a block at random, in
random order. Documents are separated by a mask mark. What is held out for validation is never trained on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.errors import DataError, UserError
from headway.generation import Sampling, stream
from headway.models import CausalModel
from headway.ranks import ALONE, Ranks
from headway.settings import REQUIRED, setting
from headway.tasks.base import IGNORE, Batch, Task, mean_loss
from headway.tasks.corpus import Corpus, CorpusSettings, Stored, open_shards
from headway.text import Tokenizer
from headway.text.plain import counted


@dataclass
class LanguageModellingSettings(CorpusSettings):
    """`[task]` with name = "language_modelling"."""

    name: str = setting("language_modelling", "which task")
    corpus: str = setting(REQUIRED, "the text to learn: a file, a folder, a pattern, or token shards", path=True)
    validation: str | None = setting(None, "a file to validate on; without one the corpus's end is held out", path=True)
    holdout: float = setting(
        0.1, "share of the corpus held out where there is no validation file", least=0.0, below=1.0
    )

    dev_tokens: int = setting(
        1_000_000, "most tokens measured of what is held out, or of validation, spread over it; 0: all", least=0
    )

    def build(self, tokenizer: Tokenizer, block: int) -> LanguageModelling:
        return LanguageModelling(self, tokenizer, block)


class LanguageModelling(Task):
    train: Tensor | Stored
    validation: Tensor | Stored

    def __init__(self, settings: LanguageModellingSettings, tokenizer: Tokenizer, block: int) -> None:
        super().__init__(tokenizer, block)
        self.settings = settings

    def load(self) -> None:
        tokens = self.encode(self.settings.corpus)
        if self.settings.validation is None:
            cut = len(tokens) - int(len(tokens) * self.settings.holdout)
            self.train, self.validation = tokens[:cut], tokens[cut:]
        else:
            self.train, self.validation = tokens, self.encode(self.settings.validation)
        if len(self.train) <= self.block:
            way = f", or set {self.limit} below {len(self.train)}" if len(self.train) > 2 else ""
            raise DataError(
                f"{self.settings.corpus}: {counted(len(self.train), 'token')} to train on, and a row of "
                f"{self.limit} = {self.block} takes {self.block + 1}; give a longer text{way}"
            )
        self.examples = -(-(len(self.train) - 1) // self.block)
        if len(self.validation) < 2:
            held = f"{counted(len(self.validation), 'token')} held out (task.holdout = {self.settings.holdout:g})"
            self.notes.append(f"{held}: there is nothing to measure, so no score, best checkpoint or early stopping")
        if len(self.starts(self.validation, "dev")) < len(self.starts(self.validation)):
            self.notes.append(
                f"of {len(self.validation):,} tokens held out, {self.settings.dev_tokens:,} are measured, spread over "
                "them (task.dev_tokens)"
            )

    def encode(self, path: str) -> Tensor | Stored:
        """The tokens of a file, or of a folder of shards, which stay on disk."""
        if (shards := open_shards(path)) is not None:
            if shards.index.tokenizer != self.tokenizer.fingerprint():
                raise DataError(
                    f"{path}: made with another tokenizer ({shards.tokenizer.kind} of {len(shards.tokenizer):,}) than "
                    f"this run's ({self.tokenizer.kind} of {len(self.tokenizer):,}); prepare it again with the run's"
                )
            return Stored(shards.tokens)
        documents = self.settings.read(path)
        return Corpus.encode(documents, self.tokenizer, path, closing=len(documents) > 1).tokens

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(self.block, (count,), generator=generator)

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        starts = (rows * self.block + noise - self.block // 2).clamp(0, len(self.train) - self.block - 1)
        return self.windows(self.train, starts)

    def windows(self, tokens: Tensor | Stored, starts: Tensor) -> Batch:
        width = min(self.block, len(tokens) - 1)
        rows = tokens[starts[:, None] + torch.arange(width + 1, device=starts.device)].long()  # (B, T + 1)
        return Batch.next_token(rows, torch.full((len(rows),), width + 1, device=rows.device))

    def evaluate(
        self, model: CausalModel, split: str = "dev", among: Ranks = ALONE, batch_size: int = 64
    ) -> dict[str, Any]:
        """Loss a token, perplexity, and bits a byte, over every whole window of the split, none overlapping, and over
        the rest of a file that is named; of what is held out, over `dev_tokens`."""
        if split in ("train", "dev"):
            if not hasattr(self, "train"):
                self.load()
            tokens = self.train if split == "train" else self.validation
        elif split == "test":
            raise UserError("language modelling has no test split; name a file instead")
        else:
            tokens = self.encode(split)
        if len(tokens) < 2:  # nothing was held out: there is no score
            return {"tokens": 0}
        batches = Windows(self, tokens, among.share(self.starts(tokens, split).split(batch_size)))
        loss, count = mean_loss(model, batches, among)
        lengths = torch.from_numpy(self.tokenizer.byte_lengths())
        lengths[self.tokenizer.mask] = 1 - len(self.tokenizer.lead)  # a line end, which a leading space stands for too
        read = sum(int(lengths[batch.targets[batch.targets != IGNORE]].sum()) for batch in batches)
        size = int(among.total(torch.tensor(read)))
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss * count / math.log(2) / max(1, size),
            "tokens": count,
        }

    def starts(self, tokens: Tensor | Stored, split: str = "train") -> Tensor:
        """Where the windows of a split begin that are measured. What is left at the end of a file that is named stands
        in a last one, with what comes before it."""
        starts = torch.arange(0, max(1, len(tokens) - self.block), self.block)
        most = -(-self.settings.dev_tokens // self.block) if split == "dev" else 0
        if 0 < most < len(starts):
            return starts[torch.arange(most) * len(starts) // most]
        named = split not in ("train", "dev") or (split == "dev" and self.settings.validation)
        if named and len(starts) * self.block < len(tokens) - 1:
            return torch.cat([starts, torch.tensor([len(tokens) - 1 - self.block])])
        return starts

    def stream(self, model: CausalModel, prompt: str, limit: int, sampling: Sampling) -> Iterator[str]:
        """The continuation of `prompt` as pieces of text, as they are made."""
        ids = self.tokenizer.encode_alone(prompt)
        pieces = self.tokenizer.stream()
        for _, token, _ in stream(model, [ids], limit, [self.tokenizer.mask], sampling):
            if token != self.tokenizer.mask:
                yield pieces.feed(token)
        yield pieces.flush()


class Windows(Sequence[Batch]):
    """Batches that are made when they are looked at: a large split does not fit memory."""

    def __init__(self, task: LanguageModelling, tokens: Tensor | Stored, starts: Sequence[Tensor]) -> None:
        self.task, self.tokens, self.starts = task, tokens, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: Any) -> Any:
        starts, block = self.starts[number], self.task.block
        batch = self.task.windows(self.tokens, starts)
        measured = torch.where(starts % block == 0, starts, starts // block * block + block)  # by the window before
        places = starts[:, None] + 1 + torch.arange(batch.targets.shape[1])
        return replace(batch, targets=batch.targets.masked_fill(places <= measured[:, None], IGNORE))
