"""Toys that show in seconds whether a sequence-to-sequence model works: copy a row of letters, or reverse it.

A model with a fixed context must pack the whole row into one vector; one with attention looks up each letter.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from headway.data.catalog import resolve
from headway.generation.beam import STRONGEST
from headway.settings import setting
from headway.tasks.sequence_to_sequence import SPLITS, WIDEST_BEAM, SequenceToSequence
from headway.text import Notes, Pair, Tokenizer
from headway.text.plain import silent
from headway.text.readers import read_parallel

KINDS = ("copy", "reverse")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class ToySettings:
    """`[task]` with name = "toy"."""

    reads_source = True

    name: str = setting("toy", "which task")
    kind: str = setting("reverse", "what is to be written", choices=KINDS)
    letters: int = setting(26, "different letters", least=2, most=26)
    shortest: int = setting(3, "letters of the shortest row", least=1)
    rows_up_to: int = setting(12, "letters of the longest row", least=1)
    rows: int = setting(20_000, "rows to learn from", least=1)
    held_out: int = setting(500, "rows of dev, and of test", least=1)
    label_smoothing: float = setting(0.0, "share of each target's probability spread evenly", least=0.0, below=1.0)
    beam: int = setting(1, "hypotheses a row when the run is scored", least=1, most=WIDEST_BEAM)
    length_penalty: float = setting(
        0.6, "how much longer rows are favoured in beam search", least=-STRONGEST, most=STRONGEST
    )
    seed: int = setting(0, "of the rows", least=0)

    source = "toy"  # where the rows come from, in messages
    longest = 0
    bleu = "none"  # letters have spaces between them

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.rows_up_to < self.shortest:
            yield "rows_up_to", f"the longest row ({self.rows_up_to}) is shorter than the shortest ({self.shortest})"

    def texts(self, say: Notes) -> list[str]:
        return [" ".join(LETTERS[: self.letters])]

    def read(self, split: str, say: Notes = silent, target: str | None = None) -> list[Pair]:
        """Rows of their own for each split; dev and test have none that train has."""
        if split not in SPLITS:
            return read_parallel(resolve(split), resolve(target) if target else None, say=say)
        counts = {"train": self.rows, "dev": self.held_out, "test": self.held_out}
        seen = {pair.source for pair in self.read("train")} if split != "train" else set()
        source = random.Random(f"{self.seed}/{split}")
        pairs: list[Pair] = []
        for _ in range(100 * counts[split]):  # few letters and short rows may not give as many new ones
            row = source.choices(LETTERS[: self.letters], k=source.randint(self.shortest, self.rows_up_to))
            written = row if self.kind == "copy" else row[::-1]
            if " ".join(row) not in seen:
                pairs.append(Pair(" ".join(row), " ".join(written), len(pairs) + 1))
            if len(pairs) == counts[split]:
                break
        return pairs

    def files(self, split: str, target: str | None = None) -> tuple[str, str | None]:
        return (self.source, None) if split in SPLITS else (split, target)

    def build(self, tokenizer: Tokenizer, block: int) -> SequenceToSequence:
        return SequenceToSequence(self, tokenizer, block)
