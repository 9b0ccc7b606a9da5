"""Bytes on disk to clean text: one place that unpacks, decodes and normalises, and says what it did.

What is harmless (a byte-order mark, Windows line ends, a gzip file) is read and noted. What would silently
spoil a corpus (another encoding, a binary file, half a gzip file) is an error with the place and the way out.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from headway.errors import DataError, SettingsError

Notes = Callable[[str], None]
"""Takes what a reader has to say, one line a fact; `print` and `list.append` both serve."""

GZIP_MAGIC = b"\x1f\x8b"
# UTF-32 stands first: its little-endian mark begins with that of UTF-16.
FOREIGN_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def silent(note: str) -> None:
    """The default for `say`: nobody listens."""


def counted(number: int, noun: str) -> str:
    """'1 line', '2,937 lines'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def read_text(path: str | Path, *, errors: str = "strict", say: Notes = silent) -> str:
    """The whole of a UTF-8 file (plain or gzip) with `\\n` line ends and no byte-order mark.

    With errors="replace" bytes that are not UTF-8 become U+FFFD; otherwise they raise.

    Raises:
        DataError: the file is missing, unreadable, empty, damaged, binary or not UTF-8.
    """
    if errors not in ("strict", "replace"):
        raise SettingsError([f'errors = {errors!r}: "strict" or "replace" is wanted'])
    raw = _unpacked(path, _stored_bytes(path), say)
    text = _decoded(path, _normalised(path, raw, say), errors, say)
    if not text.strip():
        raise DataError(f"{path}: empty; there is {'only whitespace' if text else 'nothing'} in it")
    return text


def _stored_bytes(path: str | Path) -> bytes:
    """The file as it lies on disk."""
    file = Path(path)
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path}: no such file{_lookalike(file)}") from None
    except IsADirectoryError:
        raise DataError(f"{path}: this is a folder where a file is wanted") from None
    except PermissionError:
        raise DataError(f"{path}: no permission to read it; check its owner and mode (ls -l)") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise DataError(f"{path}: cannot be read ({error})") from None


def _lookalike(missing: Path) -> str:
    """What to add about a missing file: the nearest name beside it, or that its folder is missing too."""
    if not os.path.isdir(missing.parent):
        return f"; there is no folder {missing.parent} either"
    try:
        names = sorted(entry.name for entry in missing.parent.iterdir())
    except OSError:
        return ""
    close = difflib.get_close_matches(missing.name, names, n=1)
    return f"; did you mean '{missing.with_name(close[0])}'?" if close else ""


def _unpacked(path: str | Path, raw: bytes, say: Notes) -> bytes:
    """`raw` without its gzip coat. The first bytes decide, not the name: names are often wrong."""
    named_gzip = Path(path).suffix.lower() == ".gz"
    if not raw.startswith(GZIP_MAGIC):
        if raw and named_gzip:
            raise DataError(f"{path}: not gzip, in spite of its name; compress it, or rename it without .gz")
        return raw
    if not named_gzip:
        say(f"{path}: read as gzip, though its name does not end in .gz")
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: broken or cut-off gzip file ({error}); copy or compress it again") from None


def _normalised(path: str | Path, raw: bytes, say: Notes) -> bytes:
    """`raw` without a byte-order mark and with `\\n` as its only line end, done before decoding."""
    for mark, name in FOREIGN_MARKS.items():
        if raw.startswith(mark):
            raise DataError(f"{path}: this is {name} (it begins with a {name} byte-order mark); re-save it as UTF-8")
    if raw.startswith(codecs.BOM_UTF8):
        raw = raw.removeprefix(codecs.BOM_UTF8)
        say(f"{path}: byte-order mark removed")
    for ending, name in ((b"\r\n", "CRLF"), (b"\r", "lone CR")):
        if found := raw.count(ending):
            raw = raw.replace(ending, b"\n")
            say(f"{path}: {counted(found, f'{name} line end')} read as LF")
    return raw


def _decoded(path: str | Path, raw: bytes, errors: str, say: Notes) -> str:
    """`raw` as text. A NUL byte is an error even in "replace" mode: it never occurs in text."""
    if (nul := raw.find(b"\0")) >= 0:
        line, byte = _place(raw, nul)
        raise DataError(
            f"{path}:{line}: NUL byte at byte {byte}; "
            "this looks like a binary file (or UTF-16): re-save it as UTF-8 text"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if errors == "strict":
            line, byte = _place(raw, error.start)
            raise DataError(
                f"{path}:{line}: not UTF-8 at byte {byte} (0x{raw[error.start]:02x}); "
                're-save it as UTF-8 or read it with errors = "replace"'
            ) from None
    text = raw.decode("utf-8", errors="replace")
    replaced = text.count("\ufffd") - raw.count("\ufffd".encode())  # less those the file spells itself
    say(f"{path}: {counted(replaced, 'invalid byte sequence')} read as U+FFFD")
    return text


def _place(raw: bytes, offset: int) -> tuple[int, int]:
    """The line of a byte and its place in that line, both counted from 1."""
    return raw.count(b"\n", 0, offset) + 1, offset - raw.rfind(b"\n", 0, offset)
