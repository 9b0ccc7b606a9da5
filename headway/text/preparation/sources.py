"""The files of a corpus: which they are, and their bytes without packing.

Text, JSON lines, CSV, TSV and parquet; text and tables also packed by gzip, bzip2, xz or zstd.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from headway.errors import DataError, UserError
from headway.text import plain, readers

FORMS = ("txt", *readers.TABLES, "parquet")
PACKED = tuple(ending for _, ending, _ in plain.PACKINGS)
ENDINGS = tuple(f".{form}{packed}" for form in FORMS for packed in ("", *PACKED))
STEP = 1 << 20  # bytes that are unpacked at once to be passed over
ZSTD_PIECE = 1 << 12  # bytes of zstd that are unpacked at once: 4 of them may be 128 KiB of text


@dataclass(frozen=True)
class Source:
    """A file as it was found."""

    path: str
    size: int
    mtime: int  # nanoseconds

    def described(self) -> dict[str, Any]:
        return {"path": os.path.abspath(self.path), "size": self.size, "mtime_ns": self.mtime}

    @classmethod
    def at(cls, path: str) -> Source:
        plain.refuse_pipe(path)
        with opened(path) as file:
            found = os.fstat(file.fileno())
        if not found.st_size:
            raise DataError(f"{path}: empty; there is nothing in it: leave it out")
        return cls(path, found.st_size, found.st_mtime_ns)

    def is_unchanged(self) -> bool:
        """Whether the file is still what was found."""
        try:
            return Source.at(self.path) == self
        except DataError:  # gone, or there is nothing in it any more
            return False

    @cached_property
    def form(self) -> str:
        """'tsv', 'csv', 'jsonl' or 'parquet' by its name; anything else is text."""
        name = Path(self.path).name.lower()
        for ending in PACKED:
            name = name.removesuffix(ending)
        ending = Path(name).suffix.removeprefix(".")
        return ending if ending in FORMS else "txt"


def find_sources(files: Iterable[str], say: plain.Notes = plain.silent) -> list[Source]:
    """The files that names, folders and patterns stand for, in the order given, sorted within each."""
    found: list[str] = []
    for name in files:
        if os.path.isdir(name):
            inside = readers.files_in(Path(name), ENDINGS, say)
            if not inside:
                raise DataError(f"{name}: no .txt, .jsonl, .csv, .tsv or .parquet file (or packed one) in this folder")
            found += map(str, inside)
        else:
            found += [str(path) for path in readers.files_at(name, say)]
    if not found:
        raise UserError("no files to read; name a file, a folder or a pattern")
    for path, times in Counter(map(os.path.realpath, found)).items():
        if times > 1:
            say(f"{path}: named {times} times, and its text will be there as often")
    for path in found:
        readers.say_json(path, say)
    return [Source.at(path) for path in found]


def opened(path: str) -> BinaryIO:
    with plain.readable(path):
        return open(path, "rb")


class Unpacked:
    """A file's bytes without packing and byte-order mark. The first bytes decide how it is packed, not the name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = opened(path)
        first = self.file.read(8)
        self.file.seek(0)
        self.kind = plain.packed_by(first)
        wanted = next((kind for kind, ending, _ in plain.PACKINGS if path.lower().endswith(ending)), "")
        if wanted and self.kind != wanted:
            raise DataError(f"{path}: not {wanted}, in spite of its name; compress it, or rename it")
        openers: dict[str, Callable[[BinaryIO], Any]] = {
            "gzip": lambda file: gzip.GzipFile(fileobj=file),
            "bzip2": lambda file: Streams(file, bz2.BZ2Decompressor),
            "xz": lambda file: Streams(file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ)),
            "zstd": lambda file: Zstd(file, path),
        }
        self.stream = openers[self.kind](self.file) if self.kind else self.file
        self.ahead = b""
        self.ahead = self.read(4)
        plain.refuse_foreign(path, self.ahead)
        self.ahead = self.ahead.removeprefix(codecs.BOM_UTF8)

    def __enter__(self) -> Unpacked:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def read(self, size: int) -> bytes:
        ahead, self.ahead = self.ahead[:size], self.ahead[size:]
        try:
            return ahead + self.stream.read(size - len(ahead))
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if self.kind:
                way = f"broken or cut-off {self.kind} file ({error}); copy or compress it again"
                raise DataError(f"{self.path}: {way}") from None
            raise DataError(f"{self.path}: cannot be read ({error})") from None

    def skip(self, size: int) -> None:
        """Go on by `size` unpacked bytes."""
        while size > 0 and (passed := self.read(min(size, STEP if self.kind else 4))):
            size -= len(passed)
            if not self.kind and not self.ahead:
                self.file.seek(size, os.SEEK_CUR)
                return

    def stored(self) -> int:
        """How far it has been read, in bytes as they lie on disk."""
        return self.file.tell()


class Streams:
    """Unpacks bzip2 or xz, stream after stream. What Python has for that takes padding, or a stream that is broken, for
    the end of the file where it stands behind a whole one."""

    def __init__(self, file: BinaryIO, unpacker: Callable[[], Any]) -> None:
        self.file, self.unpacker = file, unpacker
        self.stream = unpacker()

    def read(self, size: int) -> bytes:
        made: list[bytes] = []
        while size > 0:
            packed = b""
            if self.stream.eof:
                packed = self.stream.unused_data.lstrip(b"\0")
                while not packed and (more := self.file.read(STEP)):
                    packed = more.lstrip(b"\0")
                if not packed:
                    break
                self.stream = self.unpacker()
            elif self.stream.needs_input:
                packed = self.file.read(STEP)
                if not packed:
                    raise EOFError("it ends within a stream")
            made.append(self.stream.decompress(packed, size))
            size -= len(made[-1])
        return b"".join(made)


class Zstd:
    """Unpacks zstd with the `zstandard` package, frame after frame, and notices a file that was cut off."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: reading zstd needs a package: pip install 'headway[zstd]'") from None
        self.file, self.path, self.package = file, path, zstandard
        self.frame: Any = None
        self.waiting = bytearray()

    def read(self, size: int) -> bytes:
        while len(self.waiting) < size:
            packed = self.file.read(ZSTD_PIECE)
            if not packed:
                if self.frame is not None:
                    raise EOFError("it ends within a frame")
                break
            while packed:
                self.frame = self.frame or self.package.ZstdDecompressor().decompressobj()
                try:
                    self.waiting += self.frame.decompress(packed)
                except self.package.ZstdError as error:
                    if "too much memory" in str(error):
                        raise DataError(
                            f"{self.path}: packed with a window of more than 128 MB, all of which would have to be in "
                            f"memory; unpack it first: zstd -d --long=31 {quote(self.path)}"
                        ) from None
                    raise EOFError(str(error)) from None
                packed = self.frame.unused_data
                if self.frame.eof:
                    self.frame = None
        made = bytes(self.waiting[:size])
        del self.waiting[:size]
        return made
