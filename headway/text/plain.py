"""Bytes on disk to clean text: one place that unpacks, decodes and normalises, and says what it did.

What is harmless (a byte-order mark, Windows line ends, a gzip file) is read and noted. What would silently
spoil a corpus (another encoding, a binary file, half a gzip file) is an error with the place and the way out.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import hashlib
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from shlex import quote

from headway.errors import DataError, SettingsError

Notes = Callable[[str], None]
"""Takes what a reader has to say, one line a fact; `print` and `list.append` both serve."""

# UTF-32 stands first: its little-endian mark begins with that of UTF-16.
FOREIGN_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
PARQUET = b"PAR1"  # what such a file begins with
PACKINGS = (  # by which a file may be packed: its name, the ending of file names, what it begins with
    ("gzip", ".gz", rb"\x1f\x8b"),
    ("bzip2", ".bz2", rb"BZh[1-9](1AY&|\x17\x72\x45\x38)"),  # a block, or the end where there is none
    ("xz", ".xz", rb"\xfd7zXZ\0"),
    ("zstd", ".zst", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # the second: as pzstd begins
)

# What the notes on decoding count, and what became of it.
DECODING = {
    "CRLF line end": "read as LF",
    "lone CR line end": "read as LF",
    "invalid byte sequence": "read as U+FFFD",
}


_digests: ContextVar[dict[str, str] | None] = ContextVar("digests", default=None)


class Misread(Exception):
    """What is wrong at a line: counted from 0 in the bytes at hand, or from 1 in its file where these are rows."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(line, message)
        self.line, self.message = line, message


def silent(note: str) -> None:
    """The default for `say`: nobody listens."""


def counted(number: int, noun: str) -> str:
    """'1 line', '2,937 lines'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


@contextmanager
def digests() -> Iterator[dict[str, str]]:
    """Within it, whatever is read is noted: the SHA-256 of what stood in each file, in the order of reading."""
    found: dict[str, str] = {}
    before = _digests.set(found)
    try:
        yield found
    finally:
        _digests.reset(before)


def note_digest(path: str | Path, content: bytes) -> None:
    """Tell what was read from a file, where somebody wants to know."""
    if (found := _digests.get()) is not None:
        found[str(path)] = hashlib.sha256(content).hexdigest()


def read_text(path: str | Path, *, errors: str = "strict", say: Notes = silent) -> str:
    """The whole of a UTF-8 file (plain or gzip) with `\\n` line ends and no byte-order mark.

    With errors="replace" bytes that are not UTF-8 become U+FFFD; otherwise they raise.

    Raises:
        DataError: the file is missing, unreadable, empty, damaged, binary or not UTF-8.
    """
    if errors not in ("strict", "replace"):
        raise SettingsError([f'errors = {errors!r}: "strict" or "replace" is wanted'])
    raw = _unmarked(path, _unpacked(path, _stored_bytes(path), say), say)
    note_digest(path, raw)
    notes: Counter[str] = Counter()
    try:
        text = decode(raw, errors, notes, 'read it with errors = "replace"')
    except Misread as problem:
        raise DataError(f"{path}:{problem.line + 1}: {problem.message}") from None
    finally:
        for noun, number in notes.items():
            say(f"{path}: {counted(number, noun)} {DECODING[noun]}")
    if not text.strip():
        raise DataError(f"{path}: empty; there is {'only whitespace' if text else 'nothing'} in it")
    return text


def _stored_bytes(path: str | Path) -> bytes:
    """The file as it lies on disk."""
    with readable(path):
        return Path(path).read_bytes()


@contextmanager
def readable(path: str | Path) -> Iterator[None]:
    """What keeps the file from being opened or read in here is told as an error of the user's data."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise DataError(f"{path}: a link to {os.readlink(path)}, which is not there") from None
        raise DataError(f"{path}: no such file{_lookalike(Path(path))}") from None
    except IsADirectoryError:
        raise DataError(f"{path}: this is a folder where a file is wanted") from None
    except PermissionError:
        raise DataError(f"{path}: no permission to read it; check its owner and mode (ls -l)") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise DataError(f"{path}: cannot be read ({error})") from None


def refuse_pipe(path: str | Path) -> None:
    """An error where a path leads to what can be read only once, for whoever reads it several times.

    It is not opened: whoever writes to a pipe would write for somebody who leaves again.
    """
    with readable(path):
        mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise DataError(
            f"{path}: a pipe or a device, which can be read only once; save what comes from it to a file first"
        )


def _lookalike(missing: Path) -> str:
    """What to add about a missing file: the nearest name beside it, or that its folder is missing too."""
    if not os.path.isdir(missing.parent):
        return f"; there is no folder {missing.parent} either"
    try:
        names = sorted(entry.name for entry in missing.parent.iterdir())
    except OSError:
        return ""
    names = [name for name in names if Path(name).suffix != ".toml"]  # a run file holds no text
    close = difflib.get_close_matches(missing.name, names, n=1)
    return f"; did you mean '{missing.with_name(close[0])}'?" if close else ""


def _unpacked(path: str | Path, raw: bytes, say: Notes) -> bytes:
    """`raw` without its gzip coat. The first bytes decide, not the name: names are often wrong."""
    named = next(((kind, ending) for kind, ending, _ in PACKINGS if Path(path).suffix.lower() == ending), None)
    packing = packed_by(raw)
    if packing != "gzip":
        if packing:
            raise DataError(f"{path}: packed by {packing}; unpack it, or {to_shards(path)}")
        if raw and named:
            kind, ending = named
            raise DataError(f"{path}: not {kind}, in spite of its name; compress it, or rename it without {ending}")
        return raw
    if named != ("gzip", ".gz"):
        say(f"{path}: read as gzip, though its name does not end in .gz")
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: broken or cut-off gzip file ({error}); copy or compress it again") from None


def _unmarked(path: str | Path, raw: bytes, say: Notes) -> bytes:
    """`raw` without a byte-order mark."""
    refuse_foreign(path, raw)
    if raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        say(f"{path}: byte-order mark removed")
    return raw


def refuse_foreign(path: str | Path, first: bytes) -> None:
    """An error where the first bytes of a file are the mark of an encoding that is not read."""
    for mark, name in FOREIGN_MARKS.items():
        if first.startswith(mark):
            raise DataError(f"{path}: this is {name} (it begins with a {name} byte-order mark); re-save it as UTF-8")
    if first.startswith(PARQUET):
        raise DataError(f"{path}: a Parquet file; {to_shards(path)}")


def packed_by(first: bytes) -> str:
    """What a file with these first bytes was packed by, if it was."""
    return next((kind for kind, _, mark in PACKINGS if re.match(mark, first)), "")


def to_shards(path: str | Path) -> str:
    """The way out for what only `headway data prepare` reads."""
    prepare = f"headway data prepare {quote(str(path))} --tokenizer bpe --out prepared"
    return f"make token shards of it and take these: {prepare} (for a run that is there, --tokenizer RUN)"


def decode(raw: bytes, errors: str, notes: Counter[str], way: str) -> str:
    """Bytes as text with `\\n` as its only line end; raises Misread. `notes` counts what was put right.

    A NUL byte is an error even with errors="replace": it never occurs in text. `way` is how to ask for that.
    """
    for ending, noun in ((b"\r\n", "CRLF line end"), (b"\r", "lone CR line end")):
        if found := raw.count(ending):
            notes[noun] += found
            raw = raw.replace(ending, b"\n")
    if (nul := raw.find(b"\0")) >= 0:
        line, byte = _place(raw, nul)
        binary = "this looks like a binary file (or UTF-16): re-save it as UTF-8 text"
        raise Misread(line, f"NUL byte at byte {byte}; {binary}")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "strict":
            line, byte = _place(raw, error.start)
            place = f"byte {byte} (0x{raw[error.start]:02x})"
            raise Misread(line, f"not UTF-8 at {place}; re-save it as UTF-8 or {way}") from None
    text = raw.decode("utf-8", errors="replace")
    notes["invalid byte sequence"] += text.count("\ufffd") - raw.count("\ufffd".encode())  # less those it spells itself
    return text


def _place(raw: bytes, offset: int) -> tuple[int, int]:
    """The line of a byte, counted from 0, and its place in that line, counted from 1."""
    return raw.count(b"\n", 0, offset), offset - raw.rfind(b"\n", 0, offset)
