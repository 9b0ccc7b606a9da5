"""Sequence to sequence: read one text, write another.

    source   x₁ … x_S
    target   ⁇ y₁ … y_T ⁇          the mark begins the target and ends it

The model learns every target token from those before it and from the source (teacher forcing). Scored by corpus BLEU
and chrF of what beam search writes, and by the loss and the share of right next tokens on the references.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headway.data.catalog import resolve
from headway.errors import DataError, TextError, UserError, nearest
from headway.files import one_line
from headway.generation.beam import STRONGEST, Hypothesis, beam_search
from headway.memory import Progress, Room, untold
from headway.models import Seq2SeqModel
from headway.ranks import ALONE, Ranks
from headway.settings import REQUIRED, setting
from headway.tasks.base import IGNORE, Batch, Task
from headway.tasks.corpus import Corpus
from headway.tasks.translation_scores import by_length, corpus_scores, tokenizer_for, unit_of
from headway.text import Notes, Pair, Tokenizer
from headway.text.plain import silent
from headway.text.readers import read_parallel

SPLITS = ("train", "dev", "test")
WIDEST_BEAM = 1000  # hypotheses; time and memory grow with them
SCORED_AT_ONCE = 64  # sentences whose loss is computed together


@dataclass
class SequenceToSequenceSettings:
    """`[task]` with name = "sequence_to_sequence"."""

    reads_source = True

    name: str = setting("sequence_to_sequence", "which task")
    source: str = setting(REQUIRED, "what is read: a file of lines, or a table that has both sides", path=True)
    target: str | None = setting(None, "what is written, line by line with the source; none for a table", path=True)
    dev: str | None = setting(None, "sources to measure on, or a table", path=True)
    dev_target: str | None = setting(None, "their targets", path=True)
    test: str | None = setting(None, "further sources, or a table", path=True)
    test_target: str | None = setting(None, "their targets", path=True)
    source_column: str | int | None = setting(
        None,
        "of a table, the column that is read: a name, or a number from 0 where there is no header row; none: `source` "
        "of a .csv or .jsonl, the first column of a .tsv without a header row",
    )
    target_column: str | int | None = setting(
        None, "of a table, the column that is written; none: `target`, or the second column"
    )
    holdout: float = setting(0.05, "share held out as dev where there is no dev file", least=0.0, below=1.0)
    test_holdout: float = setting(0.0, "share held out as test where there is no test file", least=0.0, below=1.0)
    together: str = setting(
        "none",
        "pairs that have this side in common are held out together; both: either side, also through other pairs",
        choices=("none", "source", "target", "both"),
    )
    longest: int = setting(0, "most tokens a side; longer pairs are not learned; 0: what model.block holds", least=0)
    strict: bool = setting(False, "an empty line is an error; false: its pair is dropped, and the number said")
    label_smoothing: float = setting(0.0, "share of each target's probability spread evenly", least=0.0, below=1.0)
    beam: int = setting(5, "hypotheses a sentence when the run is scored", least=1, most=WIDEST_BEAM)
    length_penalty: float = setting(
        0.6, "how much longer sentences are favoured in beam search", least=-STRONGEST, most=STRONGEST
    )
    bleu: str = setting("auto", "how BLEU cuts words", choices=("auto", "13a", "zh", "char", "intl", "none"))
    errors: str = setting("strict", "what to do with bytes that are not UTF-8", choices=("strict", "replace"))

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in ("dev", "test"):
            if getattr(self, f"{name}_target") and not getattr(self, name):
                yield f"{name}_target", f"there are targets and no sources; name them as {name}"
        if (self.source_column is None) != (self.target_column is None):
            yield "source_column", "a table needs both columns: source_column and target_column"
        if self.source_column is not None and f"{self.source_column}" == f"{self.target_column}":
            yield "target_column", f"{self.target_column!r} is the source's column too; name the other side's"
        if self.source_column is not None and self.target:
            yield (
                "target",
                "columns are of one table, and this is a second file; leave one of the two out (--set task.target=)",
            )
        if self.holdout + self.test_holdout >= 1:
            yield "holdout", f"holdout and test_holdout ({self.test_holdout:g}) leave nothing to learn from"

    def texts(self, say: Notes) -> list[str]:
        """Both sides of what is learned. What there is to say of the files is said when the task loads them."""
        return [text for pair in self.read("train") for text in (pair.source, f"{pair.target}")]

    def files(self, split: str, target: str | None = None) -> tuple[str, str | None]:
        """Where sources and targets of a split stand, or of a file and its `target`; None: in the same table."""
        if split not in SPLITS:
            return split, target
        if self.is_part(split):
            return self.source, self.target
        return getattr(self, split), getattr(self, f"{split}_target")

    def is_part(self, split: str) -> bool:
        """Whether this is a split that has no file of its own, but a part of the one to learn from."""
        return split == "train" or (split in SPLITS and getattr(self, split) is None)

    def read(self, split: str, say: Notes = silent, target: str | None = None) -> list[Pair]:
        """The pairs of a file, perhaps with its targets in another, or of a split: of its own file, or those that the
        file to learn from has for it."""
        source, target = self.files(split, target)
        columns = None
        if target is None and self.source_column is not None and self.target_column is not None:
            columns = (self.source_column, self.target_column)
        pairs = read_parallel(
            resolve(source),
            resolve(target) if target else None,
            columns=columns,
            strict=self.strict,
            errors=self.errors,
            say=say,
        )
        if not self.is_part(split):
            return pairs
        held_by = zip(pairs, groups(pairs, self.together), strict=True)
        found = [pair for pair, group in held_by if self.of(group) == split]
        if split == "train" and not found:
            raise DataError(
                f"{source}: none of its {len(pairs):,} pairs is left to learn from; the others are held out "
                f"(task.holdout = {self.holdout:g}, task.test_holdout = {self.test_holdout:g}, task.together = "
                f'"{self.together}")'
            )
        return found

    def of(self, group: str) -> str:
        """Which split a group of the file to learn from belongs to: a function of its text alone."""
        place = int.from_bytes(hashlib.sha256(group.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
        test = self.test_holdout if self.test is None else 0.0
        dev = self.holdout if self.dev is None else 0.0
        return "test" if place < test else "dev" if place < test + dev else "train"

    def build(self, tokenizer: Tokenizer, block: int) -> SequenceToSequence:
        return SequenceToSequence(self, tokenizer, block)


def groups(pairs: Sequence[Pair], together: str) -> list[str]:
    """For each pair a text that it shares with those that must stay on its side of a split; case and spaces are alike.

    By both sides, pairs that are linked by a source or a target, directly or through others, have the first of their
    texts in common.
    """
    sources = [f"{alike(pair.source)}\t" for pair in pairs]
    targets = [alike(f"{pair.target}") for pair in pairs]
    if together != "both":
        choices = {"source": sources, "target": targets}
        return choices.get(together, [source + target for source, target in zip(sources, targets, strict=True)])
    links: dict[str, str] = {}  # from a text to an earlier one of its group

    def first(text: str) -> str:
        while (above := links.setdefault(text, text)) != text:
            links[text] = links[above]
            text = above
        return text

    for source, target in zip(sources, targets, strict=True):
        one, other = sorted((first(source), first(target)))
        links[other] = one
    return [first(source) for source in sources]


def alike(text: str) -> str:
    return " ".join(text.casefold().split())


@dataclass(frozen=True)
class Translation:
    """What was written for a source, with its log-probability and the score that beam search ranks by."""

    text: str
    logprob: float
    score: float


@dataclass(frozen=True)
class Alignment:
    """How much each token of a target looked at each token of its source when it was written; rows of T by S."""

    source: list[int]  # S tokens
    target: list[int]  # T tokens, the end mark last
    weights: list[list[float]]


@contextmanager
def without_dropout(model: Seq2SeqModel) -> Iterator[None]:
    """The model as it is used, not trained; whatever happens, it is left as it was found."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class SequenceToSequence(Task):
    metric = "bleu"
    higher_is_better = True

    def __init__(self, settings: Any, tokenizer: Tokenizer, block: int) -> None:
        super().__init__(tokenizer, block)
        self.settings = settings
        self.smoothing = settings.label_smoothing
        self.longest = min(settings.longest or block, block)
        self.longest_target = min(self.longest, block - 1)  # a mark stands before it
        self.splits: dict[tuple[str, str | None], list[Pair]] = {}

    def load(self) -> None:
        pairs = self.pairs("train")
        sources, targets = self.rows(pairs, *self.settings.files("train"))
        marks = 2
        fit = [
            len(x) <= self.longest and len(y) - marks <= self.longest_target
            for x, y in zip(sources, targets, strict=True)
        ]
        if not any(fit):
            raise DataError(
                f"{self.settings.source}: none of its {len(pairs):,} pairs has at most {self.longest} tokens in the "
                f"source and {self.longest_target} in the target (task.longest, model.block)"
            )
        if not all(fit):
            self.notes.append(
                f"{self.settings.source}: {fit.count(False):,} of {len(pairs):,} pairs have more than {self.longest} "
                f"tokens in the source or {self.longest_target} in the target and are not learned (task.longest, "
                "model.block)"
            )
        self.sources = Corpus.of(row for row, fits in zip(sources, fit, strict=True) if fits)
        self.targets = Corpus.of(row for row, fits in zip(targets, fit, strict=True) if fits)
        self.examples = len(self.sources)
        self.source_width = int(self.sources.lengths.max())
        dev = self.rows(self.pairs("dev"), *self.settings.files("dev"))  # what is wrong with it shows now
        self.note_cut("dev", self.count_cut(*dev), len(dev[0]))
        scored = f"{len(dev[0]):,} to measure on" if dev[0] else "none to measure on (task.dev, task.holdout)"
        self.notes.append(f"{self.settings.source}: {self.examples:,} pairs to learn from, {scored}")

    def rows(
        self, pairs: Sequence[Pair], source: str, target: str | None = None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The sources and, between marks, the targets of pairs as tokens; they stand in these files."""
        mark = self.tokenizer.mask
        sources = [self.encode(pair.source, f"{source}:{pair.line}: ") for pair in pairs]
        written = [self.encode(f"{pair.target}", f"{target or source}:{pair.line}: ") for pair in pairs]
        return sources, [[mark, *tokens, mark] for tokens in written]

    def encode(self, text: str, place: str = "") -> list[int]:
        """The tokens of a text; `place` says where it stands, should it be refused."""
        try:
            return self.tokenizer.encode_alone(text)
        except TextError as error:
            raise TextError(f"{place}{error}") from None

    def count_cut(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Tensor:
        """How many sources, and how many targets between marks, have more tokens than the model holds; (2,)."""
        return torch.tensor(
            [sum(len(row) > self.block for row in sources), sum(len(row) - 1 > self.block for row in targets)]
        )

    def note_cut(self, split: str, counts: Tensor, pairs: int) -> None:
        """Say once how many of a split's pairs are scored by their beginnings alone, by the side that is too long."""
        sides = (
            ("sources", self.block, "the model reads no more of them"),
            ("targets", self.block - 1, "loss and accuracy are of their beginnings"),
        )
        for count, (side, most, words) in zip(counts.tolist(), sides, strict=True):
            note = f"{split}: {count:,} of {pairs:,} {side} have more than {most} tokens (model.block): {words}"
            if count:
                self.note(note)

    @property
    def width(self) -> int:
        return int(self.targets.lengths.max()) - 1

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        tokens, lengths = self.targets.padded(rows)
        batch = Batch.next_token(tokens, lengths)
        batch.source = self.sources.padded(rows)[0]
        return batch

    def pairs(self, split: str, target: str | None = None) -> list[Pair]:
        """The pairs of a split, of a table, or of a file of sources with its file of targets."""
        if (split, target) not in self.splits:
            self.splits[split, target] = self.read_split(split, target)
        return self.splits[split, target]

    def read_split(self, split: str, target: str | None) -> list[Pair]:
        if split in SPLITS and target is not None:
            raise UserError(
                f"target {target}: the split {split} has targets of its own; "
                "name the file of sources that these belong to as the split (--split FILE)"
            )
        if split not in SPLITS and not resolve(split).is_file() and "." not in split and "/" not in split:
            raise UserError(f"'{split}' is neither a split nor a file{nearest(split, SPLITS)}")
        pairs = self.settings.read(split, self.note, target)
        if split == "test" and not pairs:
            raise UserError("this run has no test split (task.test, task.test_holdout); name a file instead")
        return pairs

    def evaluate(
        self,
        model: Seq2SeqModel,
        split: str = "dev",
        among: Ranks = ALONE,
        beam: int | None = None,
        target: str | None = None,
        progress: Progress = untold,
    ) -> dict[str, Any]:
        """BLEU, chrF, perplexity and the share of right next tokens; every prediction in the order of the sources.

        `split` is a split, a table, or a file of sources whose targets stand line by line in the file `target`.
        `progress` is told how many of this process's sources are translated.
        """
        pairs = self.pairs(split, target)
        if not pairs:
            return {"sentences": 0, "predictions": []}
        mine = among.share(pairs)
        written = self.translate(model, [pair.source for pair in mine], beam, progress=progress)
        predictions = among.gather([each[0].text for each in written])
        references = [one_line(f"{pair.target}") for pair in pairs]  # as predictions are
        cut = tokenizer_for(references) if self.settings.bleu == "auto" else self.settings.bleu
        rows = self.rows(mine, *self.settings.files(split, target))
        loss, right, tokens = self.teacher_forced(model, *rows, among)
        self.note_cut(split, among.total(self.count_cut(*rows)), len(pairs))
        sources = [pair.source for pair in pairs]
        buckets = by_length(sources, predictions, references, cut)
        return {
            "sentences": len(pairs),
            **corpus_scores(predictions, references, cut),
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "token_accuracy": right,
            "tokens": tokens,
            "by_length": [{"name": bucket.name, **asdict(bucket)} for bucket in buckets],
            "length_in": unit_of(sources),
            "predictions": predictions,
        }

    @torch.inference_mode()
    def teacher_forced(
        self, model: Seq2SeqModel, sources: list[list[int]], targets: list[list[int]], among: Ranks = ALONE
    ) -> tuple[float, float, int]:
        """(loss a token, share of tokens that are the likeliest, number of tokens) of all ranks' targets between marks.

        Sides that the model cannot hold are cut. A target that was cut does not end there, so no end mark counts.
        """
        device = next(model.parameters()).device
        sources = [row[: self.block] for row in sources]
        targets = [row[: self.block + 1] for row in targets]  # `block` inputs, and what follows the last of them
        order = sorted(range(len(targets)), key=lambda row: len(targets[row]))
        sums = torch.zeros(3, dtype=torch.float64)  # loss, right, tokens

        def add(rows: list[int]) -> None:
            tokens, lengths = Corpus.of(targets[row] for row in rows).padded(torch.arange(len(rows)))
            batch = Batch.next_token(tokens, lengths)
            batch.source = Corpus.of(sources[row] for row in rows).padded(torch.arange(len(rows)))[0]
            batch = batch.to(device)
            logits = model(*batch.given).flatten(0, 1).float()
            wanted = batch.targets.flatten()
            there = wanted != IGNORE
            loss = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=IGNORE, reduction="sum")
            right = (logits.argmax(-1) == wanted)[there].sum()
            sums.add_(torch.stack([each.cpu().double() for each in (loss, right, there.sum())]))  # mps has no float64

        with without_dropout(model):
            for _ in Room(SCORED_AT_ONCE).each(add, order):
                pass
        loss, right, tokens = among.total(sums).tolist()
        return loss / max(1.0, tokens), right / max(1.0, tokens), int(tokens)

    def translate(
        self,
        model: Seq2SeqModel,
        texts: Sequence[str],
        beam: int | None = None,
        best: int = 1,
        progress: Progress = untold,
    ) -> list[list[Translation]]:
        """The `best` translations of each text, the best first, in the order of the texts; of nothing, nothing.

        A source that the model cannot hold is cut at `model.block` tokens.
        """
        sources = [self.encode(text)[: self.block] if text.strip() else [] for text in texts]
        rows = [row for row, source in enumerate(sources) if source]
        found = self.search(model, [sources[row] for row in rows], beam, best, progress)
        written = [[Translation("", 0.0, 0.0)] for _ in texts]
        for row, hypotheses in zip(rows, found, strict=True):
            written[row] = [self.translation(hypothesis) for hypothesis in hypotheses]
        return written

    def search(
        self,
        model: Seq2SeqModel,
        sources: Sequence[Sequence[int]],
        beam: int | None = None,
        best: int = 1,
        progress: Progress = untold,
    ) -> list[list[Hypothesis]]:
        """The `best` targets of each source, as tokens."""
        return beam_search(
            model,
            sources,
            self.settings.beam if beam is None else beam,
            self.block,
            begin=self.tokenizer.mask,
            end=self.tokenizer.mask,
            shortest=1,  # of something, something
            length_penalty=self.settings.length_penalty,
            best=best,
            progress=progress,
        )

    @torch.inference_mode()
    def alignment(self, model: Seq2SeqModel, text: str, target: str | None = None) -> Alignment | None:
        """Where the model looks while it writes `target`, or without one its own translation; None: it never looks."""
        if not text.strip():
            raise TextError("there is nothing to look at in an empty source; give it some text")
        source, written = self.encode(text), self.encode(target) if target else []
        for name, side, most in (("source", source, self.block), ("target", written, self.block - 1)):
            if len(side) > most:
                raise TextError(f"the {name} has {len(side)} tokens, the model holds {most} (model.block); shorten it")
        if target is None:
            written = self.search(model, [source])[0][0].tokens[: self.block - 1]
        mark, device = self.tokenizer.mask, next(model.parameters()).device
        given = (torch.tensor([row], device=device) for row in ([mark, *written], source))
        with without_dropout(model):
            weights = model.alignment(*given)
        return None if weights is None else Alignment(source, [*written, mark], weights[0].float().tolist())

    def translation(self, hypothesis: Hypothesis) -> Translation:
        text = self.tokenizer.decode(hypothesis.tokens).removeprefix(self.tokenizer.lead)
        return Translation(one_line(text), hypothesis.logprob, hypothesis.score)

    def is_cut(self, text: str) -> int:
        """How many tokens a source has, where that is more than the model reads; else 0."""
        count = len(self.encode(text)) if text.strip() else 0
        return count if count > self.block else 0
