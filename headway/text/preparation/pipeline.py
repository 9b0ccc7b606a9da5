"""Corpora larger than memory: text files into token shards, on all cores, in bounded memory.

    files ──► blocks ──► workers: texts ──► tokens ──► shards, in the order of the files

What comes out is a pure function of the files and the tokenizer, whatever the number of workers. After every whole
shard `unfinished.json` says where to go on, so that a preparation that was killed is continued there, and ends with the
same files, byte for byte, as one that was not. `shards` describes the folder.
"""

from __future__ import annotations

import errno
import json
import signal
import string
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any
from zlib import crc32

import numpy as np

from headway.console import Reporter
from headway.cores import available_cores
from headway.errors import STOPS, Interrupted, Quit, RunError, SettingsError, UserError, nearest
from headway.files import Ownership, write_json
from headway.text.plain import counted
from headway.text.preparation.blocks import (
    NOTES,
    Block,
    Misread,
    Place,
    Reading,
    Rows,
    Texts,
    batches,
    blocks,
    check_sources,
    length,
    located,
    texts_of,
)
from headway.text.preparation.sources import Source, find_sources
from headway.text.preparation.workers import Worker, workers
from headway.text.shards import INDEX, UNFINISHED, Index, Shard, Shards, Writer, is_prepared, token_dtype
from headway.text.tokenizers import BPE, KINDS, SPECIALS, Bytes, Characters, Tokenizer, load

SHARD_TOKENS = 1 << 26  # 128 MiB of uint16
SAMPLE = 1 << 26  # bytes from which words and byte pairs are learned
WORDS = 1 << 21  # about how many different ones there may be in them: each takes up to 250 bytes while it is learned
ALONE = 1 << 21  # bytes for which starting workers does not pay
ONE_IN = 64  # words that are counted
APART = bytes.maketrans(string.punctuation.encode(), b" " * len(string.punctuation))
MB = 1_000_000
SHOWN = 5  # differences in a message


def prepare(
    files: Iterable[str | Path],
    out: str | Path,
    tokenizer: str | Path | Tokenizer,
    *,
    size: int | None = None,
    workers: int | None = None,
    documents: str = "lines",
    column: str | int | None = None,
    errors: str = "strict",
    shard_tokens: int = SHARD_TOKENS,
    resume: bool = False,
    report: Reporter | None = None,
) -> Shards:
    """Encode files into the folder `out`.

    Args:
        files: text, JSON lines, CSV, TSV or parquet, plain or packed; folders and patterns stand for what is in them.
        tokenizer: a kind, to be learned from the files; a tokenizer.json or a run directory; or a tokenizer.
        size: most tokens of a words or bpe vocabulary that is to be learned.
        workers: processes that encode; all cores without it.
        documents, column, errors: as in `read_documents`; where text and tables are mixed, `column` is of the tables.
        resume: go on with what was begun in `out`; what is finished there is left as it is.
    """
    report = report or Reporter()
    reading = Reading(documents, column, errors)
    reading.check()
    if shard_tokens < 1 or (workers is not None and workers < 1):
        raise SettingsError([f"shard_tokens ({shard_tokens}) and workers ({workers}) must be at least 1"], "prepare")
    given = wanted_tokenizer(tokenizer, size)
    sources = find_sources(map(str, files), report.say)
    check_sources(sources, reading)
    reading = cut_for(reading, given)
    plan = Plan(sources, reading, shard_tokens, given, size)
    with owned(Path(out), plan, resume) as folder:
        finished = (folder / INDEX).is_file()
        if finished:
            (folder / UNFINISHED).unlink(missing_ok=True)  # killed between the last two writes
        else:
            Preparation(folder, plan, workers or available_cores(), report).run()
    if finished:
        report.say(f"{folder}: finished already")
    return Shards(out)


def cut_for(reading: Reading, tokenizer: Tokenizer | str) -> Reading:
    """The reading that cuts long documents where this tokenizer, or one of this kind, cuts no token."""
    if isinstance(tokenizer, BPE) and not tokenizer.by_words:
        return replace(reading, whole=True)  # it may join words across a space
    kind = tokenizer if isinstance(tokenizer, str) else tokenizer.kind
    return replace(reading, anywhere=kind in (Bytes.kind, Characters.kind))


# ---- what is to be done, and where it stands


@dataclass(frozen=True)
class Plan:
    """What is asked for. Two preparations with the same plan make the same files."""

    sources: list[Source]
    reading: Reading
    shard_tokens: int
    tokenizer: Tokenizer | str  # or the kind that is to be learned
    size: int | None

    def described(self) -> dict[str, Any]:
        given = self.tokenizer
        return {
            "tokenizer": f"{given} of size {self.size}" if isinstance(given, str) else given.fingerprint(),
            "shard_tokens": self.shard_tokens,
            "reading": self.reading.described(),
            "sources": [source.described() for source in self.sources],
        }

    @property
    def bytes(self) -> int:
        return sum(source.size for source in self.sources)


@dataclass
class Position:
    """Where to go on: with which block, after how many of its tokens, and what was found in its file before."""

    place: Place = field(default_factory=Place)
    skip: int = 0
    documents: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    ended: bool = False  # everything is written

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Position:
        return cls(**data | {"place": Place(**data["place"])})


@contextmanager
def owned(folder: Path, plan: Plan, resume: bool) -> Iterator[Path]:
    """The folder, made if it is not there, for this process alone; left as it was where nothing came of it."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        refuse_foreign(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror}); choose another with --out") from None
    with Ownership(folder):
        check_folder(folder, plan, resume)
        try:
            with ended_by_signals():
                yield folder
        except KeyboardInterrupt as stop:
            number = stop.number if isinstance(stop, Quit) else signal.SIGINT
            raise Interrupted(f"stopped; {tidy(folder, made)}", number) from None
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            way = "make room" if full else "mend that"
            raise RunError(
                f"{folder}: cannot be written ({error.strerror or error}); {way}; {tidy(folder, made)}"
            ) from None
        except BrokenProcessPool:
            raise RunError(
                f"{folder}: a worker process was killed, perhaps for want of memory; "
                f"try fewer --workers (a script that starts workers needs if __name__ == '__main__'); "
                f"{tidy(folder, made)}"
            ) from None
        except UserError:
            tidy(folder, made)
            raise


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, SIGTERM and a closed terminal end the work as Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        raise Quit("stopped", number)

    before = {}
    for number in STOPS:
        if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
            with suppress(ValueError):  # not the main thread
                before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # None: not set from Python


def refuse_foreign(folder: Path) -> None:
    """A new preparation needs a new or empty folder. One with other things in it is left as it is: no lock is made."""
    if not folder.is_dir() or is_prepared(folder):
        return
    if set(folder.iterdir()) - {folder / ".lock"} - set(remains(folder)):
        raise RunError(f"{folder}: exists already and is no preparation; choose another folder with --out")


def check_folder(folder: Path, plan: Plan, resume: bool) -> None:
    """What was begun or finished in a folder is not begun anew; if it is continued, it must have the same plan."""
    if (folder / INDEX).is_file():
        if not resume:
            raise RunError(f"{folder}: holds a finished preparation; train on it, or choose another folder with --out")
        known = Index.read(folder)
        before = {"shard_tokens": known.shard_tokens, "reading": known.reading, "sources": known.sources}
        now = {key: plan.described()[key] for key in (*before, "tokenizer")}
        if isinstance(plan.tokenizer, Tokenizer):
            before["tokenizer"] = known.tokenizer
        elif known.learned:
            before["tokenizer"] = known.learned
        else:  # it was given, and may be another of the same kind
            before["tokenizer"], now["tokenizer"] = load(folder / "tokenizer.json").kind, plan.tokenizer
        refuse_other(folder, before, now)
    elif (folder / UNFINISHED).is_file():
        if not resume:
            raise RunError(f"{folder}: holds an unfinished preparation; go on with --resume, or choose another --out")
        refuse_other(folder, read_unfinished(folder)["plan"], plan.described())


def refuse_other(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Say what differs between the plan of a folder and the one given."""
    pairs = [(key, before[key], now[key]) for key in now if key not in ("sources", "reading")]
    pairs += [(key, before["reading"].get(key), value) for key, value in now["reading"].items()]
    found = [f"{key}: {there} there, {value} now" for key, there, value in pairs if there != value]
    old, new = before["sources"], now["sources"]
    if len(old) != len(new):
        found.append(f"{counted(len(old), 'file')} there, {len(new)} now")
    for one, other in zip(old, new, strict=False):
        if one["path"] != other["path"]:
            found.append(f"{one['path']} there, {other['path']} now")
        elif one["size"] != other["size"]:
            found.append(f"{one['path']}: changed since ({one['size']:,} bytes then, {other['size']:,} now)")
        elif one != other:
            seconds, rest = divmod(one["mtime_ns"], 10**9)
            found.append(
                f"{one['path']}: was written to since, {one['size']:,} bytes as before; if they are the same, put its "
                f"time back: touch -d @{seconds}.{rest:09d} {quote(one['path'])}"
            )
    if found:
        raise RunError(
            "\n  - ".join([f"{folder}: was begun otherwise:", *found[:SHOWN]])
            + "\ngo on with the same files and options, or begin anew with another --out"
        )


def read_unfinished(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / UNFINISHED).read_text("utf-8"))
        shards, positions = [Shard(**each) for each in state["shards"]], state["positions"]
        after = [Position.from_json(each) for each in positions]
        return {"plan": state["plan"], "shards": shards[: len(after)], "positions": after[: len(shards)]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder / UNFINISHED}: damaged ({error}); delete {folder} and begin anew") from None


def remains(folder: Path) -> list[Path]:
    """Files that were being written when a preparation was killed."""
    names = ("shard-*", UNFINISHED, "tokenizer.json", INDEX)
    return [path for name in names for path in folder.glob(f".{name}.*tmp")]


def tidy(folder: Path, made: list[Path]) -> str:
    """After a failure: keep whole shards, else leave nothing behind, nor the folders that were made. Says which."""
    for path in remains(folder):
        path.unlink(missing_ok=True)
    if (folder / INDEX).is_file():
        return "all was written before"
    shards = len(read_unfinished(folder)["shards"]) if (folder / UNFINISHED).is_file() else 0
    if shards:
        return f"{counted(shards, 'whole shard')} kept, go on with --resume"
    for path in [*folder.glob("shard-*"), folder / "tokenizer.json", folder / UNFINISHED]:  # by the last, it is ours
        path.unlink(missing_ok=True)
    if made:
        (folder / ".lock").unlink(missing_ok=True)
        with suppress(OSError):  # somebody else put something there
            for each in made:
                each.rmdir()
    return "nothing was written yet, begin anew"


class Preparation:
    """One run of it, from wherever it stands to the end."""

    def __init__(self, folder: Path, plan: Plan, workers: int, report: Reporter) -> None:
        self.folder, self.plan, self.report = folder, plan, report
        self.workers = workers if plan.bytes > ALONE else 1
        self.shards: list[Shard] = []
        self.after: list[Position] = []  # where to go on after each shard
        self.position = Position()

    def run(self) -> None:
        self.pick_up()
        try:
            tokenizer = self.tokenizer()
            self.writer = Writer(
                self.folder, token_dtype(len(tokenizer)), self.plan.shard_tokens, self.shards, self.remember
            )
            if not self.position.ended:
                self.encode(tokenizer)
        except UserError:
            self.refuse_changed()  # a file that is gone or cut off now has been whole
            raise
        self.refuse_changed()
        described = self.plan.described()
        Index(
            self.writer.dtype.name,
            len(tokenizer),
            tokenizer.fingerprint(),
            self.writer.tokens,
            self.writer.documents,
            self.plan.shard_tokens,
            described["reading"],
            described["sources"],
            self.shards,
            described["tokenizer"] if isinstance(self.plan.tokenizer, str) else "",
        ).write(self.folder)
        (self.folder / UNFINISHED).unlink()

    def refuse_changed(self) -> None:
        for source in self.plan.sources:
            if not source.is_unchanged():
                raise RunError(f"{source.path}: changed while it was read; delete {self.folder} and begin anew")

    def pick_up(self) -> None:
        """Go on after the last whole shard of a preparation that was stopped; what follows it is cleared away."""
        if (self.folder / UNFINISHED).is_file():
            state = read_unfinished(self.folder)
            for shard, position in zip(state["shards"], state["positions"], strict=True):
                if shard.problems(self.folder):
                    break
                self.shards.append(shard)
                self.after.append(position)
            self.position = replace(self.after[-1]) if self.after else Position()
            self.report.say(f"{self.folder}: going on after {counted(len(self.shards), 'whole shard')}")
        whole = {f"{shard.name}.{ending}" for shard in self.shards for ending in shard.bytes}
        for path in [*remains(self.folder), *self.folder.glob("shard-*")]:
            if path.name not in whole:
                path.unlink()
        self.save()

    def remember(self, shard: Shard) -> None:
        self.shards.append(shard)
        self.after.append(replace(self.position))
        self.save()

    def save(self) -> None:
        state = {
            "plan": self.plan.described(),
            "shards": [asdict(shard) for shard in self.shards],
            "positions": [asdict(position) for position in self.after],
        }
        write_json(self.folder / UNFINISHED, state)

    def tokenizer(self) -> Tokenizer:
        """The one given, or the one learned, now or before the preparation was stopped."""
        path = self.folder / "tokenizer.json"
        if path.is_file():
            return load(path)
        given = self.plan.tokenizer
        tokenizer = given if isinstance(given, Tokenizer) else self.learn(given)
        tokenizer.save(path)
        return tokenizer

    @property
    def written(self) -> int:
        """How many tokens."""
        return self.writer.tokens if hasattr(self, "writer") else 0

    # ---- encoding

    def encode(self, tokenizer: Tokenizer) -> None:
        """Write everything from `position` on. The mark in front of the very first document is left out."""
        position, writer = self.position, self.writer
        dtype, mark = writer.dtype, np.array([tokenizer.mask])
        worker = Worker(self.plan.reading, tokenizer)
        with closing(self.work("encoding", worker.encode, worker, position.place)) as done:
            for block, part in done:
                if part is None:
                    self.end_file(position, self.plan.sources[block.place.source])
                    continue
                position.place = block.place
                tokens, starts = np.frombuffer(part.tokens, dtype), part.starts
                if position.skip > len(tokens):
                    raise RunError(f"{self.folder}: begun by another version of Headway; delete it and begin anew")
                begin = position.skip or int(not writer.tokens)
                while begin < len(tokens):
                    end = position.skip = min(len(tokens), begin + writer.room)
                    writer.append(tokens[begin:end], starts[(begin <= starts) & (starts < end)] - begin)
                    begin = end
                position.skip = 0
                position.documents += len(starts)
                position.notes = dict(Counter(position.notes) + part.notes)
        position.ended = True
        if not writer.documents:
            raise UserError(f"{self.plan.sources[0].path}: empty, as are all the others; there is no text in them")
        if writer.documents > 1:
            writer.append(mark, np.empty(0))
        writer.finish()

    def end_file(self, position: Position, source: Source) -> None:
        if not position.documents:
            if len(self.plan.sources) == 1:
                raise UserError(f"{source.path}: empty; there is no text in it")
            self.report.say(f"{source.path}: there is no text in it; passed over")
        for noun, number in position.notes.items():
            self.report.say(f"{source.path}: {counted(number, noun)} {NOTES[noun]}")
        position.documents, position.notes = 0, {}

    def work(
        self, name: str, job: Callable[[Block], Any], worker: Worker, begin: Place | None = None
    ) -> Generator[tuple[Block, Any], None, None]:
        """Each block from `begin` on, with what `job` makes of it, in order; None at the end of a file."""
        sources, reading = self.plan.sources, self.plan.reading
        sizes = np.cumsum([0] + [source.size for source in sources])
        total, done = -(-self.plan.bytes // MB), 0
        if begin is not None:
            done = int(sizes[begin.source]) + min(begin.begin, sources[begin.source].size)
        began, first = time.monotonic(), self.written
        with (
            workers(self.workers, worker) as submit,
            self.report.progress(f"{name}, MB", total, done // MB) as progress,
        ):
            waiting: deque[tuple[list[Block], Future[list[Any]]]] = deque()
            found = batches(blocks(sources, reading, begin))
            while True:
                while len(waiting) <= 2 * self.workers and (batch := next(found, None)) is not None:
                    future = submit(job, batch)
                    waiting.append(([replace(block, data=None) for block in batch], future))
                if not waiting:
                    break
                batch, future = waiting.popleft()
                for block, made in zip(batch, future.result(), strict=False):
                    if isinstance(made, Misread):
                        raise located(made, block, sources[block.place.source], reading)
                    yield block, made
                done = int(sizes[batch[-1].place.source]) + batch[-1].stored
                speed = (self.written - first) / (time.monotonic() - began)
                progress.update(min(done // MB, total - 1), {"tokens_per_second": speed} if speed else {})
            progress.update(total, {"tokens_per_second": speed} if speed else {})

    # ---- learning a tokenizer

    def learn(self, kind: str) -> Tokenizer:
        """A tokenizer of this kind for the files, in bounded memory."""
        everything = amount(self.plan.bytes)
        if kind == Bytes.kind:
            return Bytes()
        characters = ""
        if kind != BPE.kind:
            self.report.say(f"tokenizer: characters are collected in one pass over all {everything}")
            worker = Worker(self.plan.reading, None, specials=kind != Characters.kind)
            seen: set[str] = set()
            for _, part in self.work("characters", worker.characters, worker):
                seen.update(part or ())
            characters = "".join(sorted(seen))
        if kind == Characters.kind:
            return Characters.train([characters])
        sample, stride = self.sample()
        part = f"a sample, one block in {stride} of {everything}" if stride > 1 else f"all {everything}"
        self.report.say(f"tokenizer: {kind}, learned from {part} of files, which may take a minute …")
        every_one = "".join(f"\n{character}" for character in characters)  # each alone, so that it makes no word
        texts = self.texts(sample)
        try:
            return KINDS[kind].train((text for part in (texts, [every_one]) for text in part if text), self.plan.size)
        except SettingsError as error:
            raise UserError("; ".join(error.problems).replace("tokenizer.size", "--size")) from None

    def sample(self) -> tuple[list[tuple[int, Block]], int]:
        """(number, block) of every stride-th block, as many as fit SAMPLE and WORDS, and the stride: a power of two."""
        kept: list[tuple[int, Block, int]] = []
        stride, size = 1, 0
        found = (block for block in blocks(self.plan.sources, self.plan.reading) if block.data is not None)
        total = -(-self.plan.bytes // MB)
        before = np.cumsum([0] + [source.size for source in self.plan.sources])
        with self.report.progress("sampling, MB", total) as progress:
            for number, block in enumerate(found):
                if number % stride == 0:
                    kept.append((number, without_lines(block), length(block)))
                    size += length(block)
                while len(kept) > 1 and size > SAMPLE:
                    stride *= 2
                    kept = [each for each in kept if each[0] % stride == 0]
                    size = sum(length for *_, length in kept)
                progress.update(int(before[block.place.source] + block.stored) // MB, {})
        words = {number: some_words(self.read(block).texts) for number, block, _ in kept}
        while len(words) > 1 and ONE_IN * len(set().union(*words.values())) > WORDS:
            stride *= 2
            words = {number: found for number, found in words.items() if number % stride == 0}
        return [(number, block) for number, block, _ in kept if number in words], stride

    def texts(self, sample: list[tuple[int, Block]]) -> Iterator[str]:
        """The documents in a sample; one that was cut is put together again where all its parts are there."""
        held, last = "", -1
        for number, block in sample:
            found = self.read(block)
            for place, text in enumerate(found.texts):
                if place == 0 and found.continues and number == last + 1:
                    held += text
                else:
                    yield held
                    held = text
            last = number
        yield held

    def read(self, block: Block) -> Texts:
        try:
            return texts_of(block, self.plan.reading)
        except Misread as problem:
            raise located(problem, block, self.plan.sources[block.place.source], self.plan.reading) from None


def amount(size: int) -> str:
    """5.0 GB, 12.3 MB or 780 bytes."""
    for unit, name in ((1000 * MB, "GB"), (MB, "MB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return counted(size, "byte")


def some_words(texts: Iterable[str]) -> set[int]:
    """Checksums of about one in `ONE_IN` of the different words in texts: the same words wherever they stand."""
    words = (word for text in texts for word in text.encode("utf-8", "replace").translate(APART).split())
    return {check for check in map(crc32, words) if check % ONE_IN == 0}


def without_lines(block: Block) -> Block:
    """The same without the numbers of its lines, which may take more memory than its texts."""
    return replace(block, data=replace(block.data, lines=array("q"))) if isinstance(block.data, Rows) else block


def wanted_tokenizer(tokenizer: str | Path | Tokenizer, size: int | None) -> Tokenizer | str:
    """The tokenizer that was named, or the kind that is to be learned."""
    if isinstance(tokenizer, str) and tokenizer in KINDS:
        if size is not None and tokenizer in ("characters", "bytes"):
            raise UserError(f"--size {size}: a {tokenizer} tokenizer has no size to choose; leave it out")
        if size is not None and tokenizer == "bpe" and size < len(SPECIALS) + 256:
            raise UserError(f"--size {size}: must be at least {len(SPECIALS) + 256}, for special tokens and 256 bytes")
        if size is not None and tokenizer == "words" and size < len(SPECIALS) + 2:
            raise UserError(f"--size {size}: must hold special tokens, every character, and words")
        return tokenizer
    if size is not None:
        raise UserError(f"--size {size}: {tokenizer} has the size it has; leave it out")
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    path = Path(tokenizer)
    if not path.exists():
        kinds = nearest(str(tokenizer), KINDS)
        raise UserError(f"--tokenizer {tokenizer}: neither a kind nor a tokenizer.json or a run directory{kinds}")
    return load(path / "tokenizer.json" if path.is_dir() else path)
