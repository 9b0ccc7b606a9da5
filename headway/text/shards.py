"""Token shards: a corpus as token ids on disk, read through memory maps, so that its size does not matter.

    DIR/  tokenizer.json      what the ids mean
          shard-00000.bin     token ids, little-endian uint16 or uint32
          shard-00000.idx     where documents begin, uint64, counted over all shards
          …
          index.json          counts, sizes and SHA-256 of every file; written last

Shards follow each other without a gap: all hold `shard_tokens` tokens, the last what is left, and a document may run
on into the next shard. The tokens are those of `Corpus.encode`; a mask mark closes each of several documents.
A folder without index.json is an unfinished preparation (see `preparation`). Nothing in it is a pickle.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.errors import DataError
from headway.files import files_at_most, sync_directory, write_json
from headway.text.plain import counted, note_digest
from headway.text.tokenizers import Tokenizer, load

FORMAT = "headway-shards"
VERSION = 1
INDEX = "index.json"
UNFINISHED = "unfinished.json"  # what a preparation that was stopped needs to go on
FIRST = "shard-00000.bin"  # of the shards, the first
STARTS = np.dtype("<u8")
OPEN_MAPS = 4096  # memory maps of one array that are open at once, at most
ENDINGS = ("bin", "idx")
SHOWN = 5


@dataclass(frozen=True)
class Shard:
    """A shard's two files as they were written; sizes and SHA-256 by ending."""

    name: str
    tokens: int
    documents: int
    bytes: dict[str, int]
    sha256: dict[str, str]

    def problems(self, folder: Path) -> list[str]:
        """What is wrong with its files, as far as their sizes tell."""
        found = []
        for ending in ENDINGS:
            name, wanted = f"{self.name}.{ending}", self.bytes[ending]
            try:
                size = os.stat(folder / name).st_size
            except OSError:
                found.append(f"{name}: missing")
                continue
            if size != wanted:
                found.append(f"{name}: {size:,} bytes where {wanted:,} are wanted")
        return found


@dataclass(frozen=True)
class Index:
    """index.json: everything about the shards that the shards do not say."""

    dtype: str
    vocabulary: int
    tokenizer: str  # its fingerprint
    tokens: int
    documents: int
    shard_tokens: int
    reading: dict[str, Any]
    sources: list[dict[str, Any]]
    shards: list[Shard]
    learned: str = ""  # what was asked for where the tokenizer was learned from the corpus: bpe of size 8000
    format: str = FORMAT
    version: int = VERSION

    def write(self, folder: Path) -> None:
        write_json(folder / INDEX, asdict(self))
        sync_directory(folder)

    @classmethod
    def read(cls, folder: Path) -> Index:
        path = folder / INDEX
        if not path.is_file():
            raise DataError(
                f"{folder}: an unfinished preparation; finish it with the same headway data prepare … and --resume"
                if (folder / UNFINISHED).is_file()
                else f"{folder}: no token shards (no {INDEX} in it); make some with: headway data prepare"
            )
        try:
            data = json.loads(path.read_text("utf-8"))
            found = data.get("format"), data.get("version")
            if found == (FORMAT, VERSION):
                index = cls(**data | {"shards": [Shard(**shard) for shard in data["shards"]]})
                index.check()
                return index
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: damaged ({error}); copy the folder again or prepare the corpus anew") from None
        raise DataError(f"{path}: {found[0]}, version {found[1]}; this Headway reads {FORMAT}, version {VERSION}")

    def check(self) -> None:
        """Raise ValueError where its numbers contradict each other."""
        width = token_dtype(self.vocabulary)
        if self.dtype != width.name:
            raise ValueError(f"{self.dtype} for a vocabulary of {self.vocabulary}")
        for number, shard in enumerate(self.shards):
            sizes = {"bin": shard.tokens * width.itemsize, "idx": shard.documents * STARTS.itemsize}
            if (shard.name, shard.bytes) != (shard_name(number), sizes):
                raise ValueError(f"shard {number} is not what its counts say")
        counts = sum(shard.tokens for shard in self.shards), sum(shard.documents for shard in self.shards)
        if counts != (self.tokens, self.documents):
            raise ValueError("the shards do not add up")


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def token_dtype(vocabulary: int) -> np.dtype:
    """The narrowest type that holds every id."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


def is_prepared(folder: str | Path) -> bool:
    """Whether a folder holds shards, or a preparation of some that is not finished."""
    path = Path(folder)
    if (path / UNFINISHED).is_file():
        return True
    if not (path / INDEX).is_file():
        return False
    return any((path / name).is_file() for name in ("tokenizer.json", FIRST)) or is_index(path / INDEX)


def is_index(path: Path) -> bool:
    """Whether an index.json is that of shards, which others may be lost of."""
    try:
        return json.loads(path.read_text("utf-8"))["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def has_shards(folder: str | Path) -> bool:
    """Whether a folder holds shards, or what is left of some."""
    return is_prepared(folder) or (Path(folder) / FIRST).is_file()


def maps_at_once() -> int:
    """How many maps of one array may be open: each is an open file, and others of the process need some, too."""
    return max(1, min(OPEN_MAPS, files_at_most() // 8))


class Joined:
    """The numbers in several files, one after the other, as one array that stays on disk; all must be `below` one."""

    def __init__(self, paths: Sequence[Path], lengths: Sequence[int], dtype: np.dtype, below: int = 1 << 64) -> None:
        self.paths, self.dtype, self.below = paths, dtype, below
        self.ends = np.cumsum(lengths, dtype=np.int64)
        self.open = functools.lru_cache(maps_at_once())(self.map)

    def map(self, number: int) -> np.ndarray:
        with open(self.paths[number], "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):  # rows lie anywhere: what stands beside them is not read with them
            mapped.madvise(mmap.MADV_RANDOM)
        return np.frombuffer(mapped, self.dtype)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, where: int | slice | np.ndarray) -> Any:
        """A number; the numbers of a slice without a step; or those at an array of places, in its shape."""
        if isinstance(where, slice):
            begin, end, step = where.indices(len(self))
            if step != 1:
                raise IndexError("a slice of shards has no step")
            return self.between(begin, max(begin, end))
        if isinstance(where, np.ndarray):
            return self.take(where)
        place = range(len(self))[where]
        return int(self.between(place, place + 1)[0])

    def between(self, begin: int, end: int) -> np.ndarray:
        """A view where one file holds them all, else a copy."""
        first, last = (int(number) for number in np.searchsorted(self.ends, [begin, end - 1], side="right"))
        if begin == end:
            return np.empty(0, self.dtype)
        parts = []
        for number in range(first, last + 1):
            base = int(self.ends[number - 1]) if number else 0
            parts.append(self.open(number)[max(0, begin - base) : end - base])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def take(self, places: np.ndarray) -> np.ndarray:
        """The last axis of `places` is a row, which mostly lies in one file."""
        if not places.size:
            return np.empty(places.shape, self.dtype)
        rows = places.reshape(-1, places.shape[-1] if places.ndim else 1)
        lowest, highest = rows.min(1), rows.max(1)
        if lowest.min() < 0 or highest.max() >= len(self):
            raise IndexError(f"places {lowest.min()} to {highest.max()} of {len(self)}")
        found = np.empty(rows.shape, self.dtype)
        files = (np.searchsorted(self.ends, edge, side="right").tolist() for edge in (lowest, highest))
        for row, into, first, last in zip(rows, found, *files, strict=True):
            for number in range(first, last + 1):
                base = self.ends[number - 1] if number else 0
                here = (base <= row) & (row < self.ends[number]) if first < last else slice(None)
                into[here] = self.open(number)[row[here] - base]
        if (highest_id := int(found.max())) >= self.below:  # bits that have changed since it was written
            place = int(rows.flat[found.argmax()])
            file = self.paths[int(np.searchsorted(self.ends, place, side="right"))]
            raise DataError(
                f"{file}: damaged (token {highest_id}, and the vocabulary has {self.below:,}); headway data check "
                f"{file.parent} names every file that has changed; copy the folder again or prepare the corpus anew"
            )
        return found.reshape(places.shape)


class Shards:
    """A prepared corpus. Opening checks that every file is there and as long as it should be; `verify` reads them.

    `tokens[a:b]` are the ids a … b − 1 of the whole corpus, `starts[i]` is where document i begins.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = Index.read(self.folder)
        missing = [] if (self.folder / "tokenizer.json").exists() else ["tokenizer.json: missing"]
        self.refuse([*missing, *(problem for shard in self.index.shards for problem in shard.problems(self.folder))])
        self.tokenizer: Tokenizer = load(self.folder / "tokenizer.json")
        if self.tokenizer.fingerprint() != self.index.tokenizer:
            raise DataError(
                f"{self.folder}: tokenizer.json is not the one that the shards were made with "
                f"({self.tokenizer.fingerprint()}, not {self.index.tokenizer}); prepare the corpus anew"
            )
        dtype, vocabulary = np.dtype(self.index.dtype).newbyteorder("<"), self.index.vocabulary
        self.tokens = self.joined("bin", "tokens", dtype, vocabulary)
        self.starts = self.joined("idx", "documents", STARTS)
        note_digest(self.folder, json.dumps([shard.sha256 for shard in self.index.shards], sort_keys=True).encode())

    def joined(self, ending: str, what: str, dtype: np.dtype, below: int = 1 << 64) -> Joined:
        filled = [shard for shard in self.index.shards if getattr(shard, what)]  # an empty file cannot be mapped
        paths = [self.folder / f"{shard.name}.{ending}" for shard in filled]
        return Joined(paths, [getattr(shard, what) for shard in filled], dtype, below)

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.starts)

    def document(self, number: int) -> np.ndarray:
        """The tokens of a document, with the mark that closes it."""
        begin = self.starts[number]
        return self.tokens[begin : self.starts[number + 1] if number + 1 < len(self) else len(self.tokens)]

    def contents(self) -> str:
        """How much there is, of what."""
        index, kind = self.index, self.tokenizer.kind
        return (
            f"{counted(index.tokens, 'token')} of {counted(index.documents, 'document')} in "
            f"{counted(len(index.shards), 'shard')}, {kind} tokenizer of {index.vocabulary:,}"
        )

    def strangers(self) -> list[str]:
        """Files that are named like shards, of which the index knows nothing."""
        known = {f"{shard.name}.{ending}" for shard in self.index.shards for ending in ENDINGS}
        return sorted({path.name for path in self.folder.glob("shard-*")} - known)

    def summary(self) -> str:
        """One line: what there is, and what to do with it."""
        corpus = json.dumps(str(self.folder), ensure_ascii=False)
        return f"{self.folder}: {self.contents()}; train on them with corpus = {corpus}"

    def verify(self) -> None:
        """Read every shard: it must be what its SHA-256 says, and its documents must be such as can be; all that is
        wrong is named."""
        damaged = []
        for shard in self.index.shards:
            for ending in ENDINGS:
                with open(self.folder / f"{shard.name}.{ending}", "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != shard.sha256[ending]:
                    damaged.append(f"{shard.name}.{ending}: not the bytes that were written (SHA-256 differs)")
        self.refuse(damaged or list(self.contradictions()))

    def contradictions(self) -> Iterator[str]:
        """What cannot be: tokens that the vocabulary lacks, documents that do not lie one after the other.

        The first begins at 0, and before each of the others stands the mark that closes the one before it.
        """
        tokens, documents, last = 0, 0, -1  # before the shard
        for shard in self.index.shards:
            ids = self.tokens[tokens : tokens + shard.tokens]
            starts = self.starts[documents : documents + shard.documents].astype(np.int64)
            if len(ids) and ids.max() >= self.index.vocabulary:
                yield f"{shard.name}.bin: token {ids.max()}, and the vocabulary has {self.index.vocabulary:,}"
            if (np.diff(starts, prepend=last) <= 0).any():
                yield f"{shard.name}.idx: documents out of order"
            elif len(starts) and not tokens <= starts[0] <= starts[-1] < tokens + shard.tokens:
                yield f"{shard.name}.idx: documents that begin outside the shard"
            elif (self.tokens[starts[starts > 0] - 1] != self.tokenizer.mask).any() or (last < 0 and starts[:1].any()):
                yield f"{shard.name}.idx: a document that begins where none before it has ended"
            tokens, documents = tokens + shard.tokens, documents + shard.documents
            last = int(starts[-1]) if len(starts) else last

    def refuse(self, problems: list[str]) -> None:
        if problems:
            shown = problems[:SHOWN] + [f"… and {len(problems) - SHOWN} more"] * (len(problems) > SHOWN)
            raise DataError(
                "\n  - ".join([f"{self.folder}: damaged; copy the folder again or prepare the corpus anew:", *shown])
            )


class Growing:
    """A file that is written bit by bit under another name, and gets its own when it is whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.tmp")
        self.file = open(self.temporary, "wb")  # noqa: SIM115 - closed by `finish`
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: np.ndarray) -> None:
        raw = np.ascontiguousarray(data).data
        self.file.write(raw)
        self.digest.update(raw)
        self.size += data.nbytes

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)


class Writer:
    """Writes tokens into shards of `shard_tokens`, after those that are there; each that is done goes to `whole`."""

    def __init__(
        self, folder: Path, dtype: np.dtype, shard_tokens: int, shards: Sequence[Shard], whole: Callable[[Shard], None]
    ) -> None:
        self.folder, self.dtype, self.shard_tokens, self.whole = folder, dtype, shard_tokens, whole
        self.number = len(shards)
        self.tokens = sum(shard.tokens for shard in shards)
        self.documents = sum(shard.documents for shard in shards)
        self.files: tuple[Growing, ...] = ()
        self.begin = (self.tokens, self.documents)  # of the shard that is being written

    @property
    def room(self) -> int:
        """How many tokens the shard still takes."""
        return self.shard_tokens - (self.tokens - self.begin[0])

    def append(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        """Write tokens, at most as many as there is room for, and where among them documents begin."""
        if not self.files:
            name = shard_name(self.number)
            self.files = tuple(Growing(self.folder / f"{name}.{ending}") for ending in ENDINGS)
        numbers, places = self.files
        numbers.write(tokens.astype(self.dtype, copy=False))
        places.write(starts.astype(STARTS) + STARTS.type(self.tokens))
        self.tokens, self.documents = self.tokens + len(tokens), self.documents + len(starts)
        if not self.room:
            self.finish()

    def finish(self) -> None:
        """Make the shard whole, if one was begun."""
        if not self.files:
            return
        for file in self.files:
            file.finish()
        sync_directory(self.folder)
        written = dict(zip(ENDINGS, self.files, strict=True))
        shard = Shard(
            shard_name(self.number),
            self.tokens - self.begin[0],
            self.documents - self.begin[1],
            {ending: file.size for ending, file in written.items()},
            {ending: file.digest.hexdigest() for ending, file in written.items()},
        )
        self.number, self.files, self.begin = self.number + 1, (), (self.tokens, self.documents)
        self.whole(shard)
