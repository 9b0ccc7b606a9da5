"""How good sentences are beside references: corpus BLEU and chrF by `sacrebleu`, and BLEU by the source's length.

BLEU: Papineni et al. 2002; chrF: Popović 2015; how to report them: "A call for clarity in reporting BLEU scores" (Post
2018). A score says nothing without its signature, so both come together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BUCKETS = (8, 12, 16, 20, 30)  # the longest source of each, in words; what is longer comes last
HAN, KANA = r"\u3400-\u9fff\uf900-\ufaff", r"\u3040-\u30ff\u31f0-\u31ff\uff66-\uff9f"
WITHOUT_SPACES = re.compile(f"[{HAN}{KANA}]")
SOME_KANA = 0.1  # of Han and kana: Japanese has several times as many, Chinese hardly any


@dataclass(frozen=True)
class Bucket:
    """Sentences whose sources have `low` to `high` words (None: any number from `low` on)."""

    low: int
    high: int | None
    sentences: int
    bleu: float
    exact: float

    @property
    def name(self) -> str:
        return f"{self.low}–{self.high}" if self.high is not None else f"{self.low}+"


def corpus_scores(predictions: Sequence[str], references: Sequence[str], tokenize: str) -> dict[str, Any]:
    """BLEU and chrF of the whole, each with its signature, and the share of sentences that are their references."""
    from sacrebleu.metrics import BLEU, CHRF

    bleu, chrf = BLEU(tokenize=tokenize, force=True), CHRF()
    return {
        "bleu": bleu.corpus_score(list(predictions), [list(references)]).score,
        "chrf": chrf.corpus_score(list(predictions), [list(references)]).score,
        "exact": exact(predictions, references),
        "signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def by_length(
    sources: Sequence[str], predictions: Sequence[str], references: Sequence[str], tokenize: str
) -> list[Bucket]:
    """Corpus BLEU of the sentences of like source lengths, the shortest first; buckets without sentences are left
    out."""
    from sacrebleu.metrics import BLEU

    bleu = BLEU(tokenize=tokenize, force=True)
    lengths = [count_words(source) for source in sources]
    found = []
    for low, high in zip((1, *(most + 1 for most in BUCKETS)), (*BUCKETS, None), strict=True):
        rows = [row for row, length in enumerate(lengths) if low <= length and (high is None or length <= high)]
        if rows:
            written, wanted = ([side[row] for row in rows] for side in (predictions, references))
            score = bleu.corpus_score(written, [wanted]).score
            found.append(Bucket(low, high, len(rows), score, exact(written, wanted)))
    return found


def exact(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The share of predictions that are their references."""
    return sum(map(str.__eq__, predictions, references)) / max(1, len(references))


def count_words(text: str) -> int:
    """Words between spaces; of scripts that have none, every character is one."""
    return max(1, len(WITHOUT_SPACES.sub(" x ", text).split()))


def unit_of(sources: Sequence[str]) -> str:
    """What `count_words` counts in these texts for the most part."""
    return "characters" if without_spaces("".join(sources[:1000])) else "words"


def tokenizer_for(references: Sequence[str]) -> str:
    """How BLEU cuts these texts: 13a unless most letters are Han or kana; then `zh`, which parts Han alone, or `char`
    where there is kana to part too."""
    text = "".join(references[:1000])
    if not without_spaces(text):
        return "13a"
    kana, unspaced = len(re.findall(f"[{KANA}]", text)), len(WITHOUT_SPACES.findall(text))
    return "char" if kana > SOME_KANA * unspaced else "zh"


def without_spaces(text: str) -> bool:
    """Whether most letters are Han or kana."""
    return 2 * len(WITHOUT_SPACES.findall(text)) > len(re.findall(r"[^\W\d_]", text))
