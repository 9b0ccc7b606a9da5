"""Writing that never leaves half a file, and one owner a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headway.errors import RunError

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two processes on one directory are not told apart
    fcntl = None  # type: ignore[assignment]


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_output(path: Path, text: str) -> None:
    """Write a file the user asked for; what prevents it is the user's to mend."""
    if path.is_dir() or not path.name:
        raise RunError(f"{path}: is a directory; name a file in it")
    try:
        if path.parent != Path():
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def write_lines(path: Path, texts: Iterable[str]) -> None:
    """Write a file the user asked for, one text a line."""
    write_output(path, "".join(f"{one_line(text)}\n" for text in texts))


def one_line(text: str) -> str:
    """What a model wrote, fit for a line of a table: line ends and tabs within it become spaces."""
    return text.translate(dict.fromkeys(map(ord, "\n\r\t"), " "))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line cut off by a crash is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text("utf-8", errors="replace").split("\n"):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut, where the system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


class Ownership:
    """One process owns a directory: `with Ownership(path): …`. A second one is refused, and told who the owner is."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / ".lock"

    def __enter__(self) -> Ownership:
        try:
            self.handle = open(self.path, "a+", encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"{self.directory}: cannot be written ({error.strerror}); choose another directory"
            ) from None
        if not self.take():
            self.handle.seek(0)
            owner = self.handle.read().strip() or "another process"
            self.handle.close()
            raise RunError(f"{self.directory}: in use by {owner}; wait for it, stop it, or choose another directory")
        self.handle.seek(0)
        self.handle.truncate()
        self.handle.write(f"process {os.getpid()} on {os.uname().nodename if hasattr(os, 'uname') else 'this machine'}")
        self.handle.flush()
        return self

    def take(self) -> bool:
        if fcntl is None:
            return True
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *exception: object) -> None:
        self.handle.seek(0)
        self.handle.truncate()  # the file stays: removing it would let two later owners lock two different files
        self.handle.close()
