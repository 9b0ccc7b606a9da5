"""Writing that never leaves half a file, and one owner a directory."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from headway.errors import RunError

try:
    import fcntl
    import resource
except ImportError:  # Windows has no flock: there, two processes on one directory are not told apart
    fcntl = resource = None  # type: ignore[assignment]

JOB = ".job"  # says which call of torchrun works on a run
TEMPORARY = re.compile(r"\..+\.[0-9]+\.tmp")  # a file that `write_bytes` had not finished
OPEN_FILES = 1 << 16  # that a command wants to be allowed
PATIENCE = 0.5  # seconds in which a lock that somebody only looks at becomes free


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file that is on the disk when this returns; an error has the name of the file."""
    with named(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def named(path: Path) -> Iterator[None]:
    """An error of the system within it has the name of the file or folder."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # else it is a message, which a name would hide
            error.filename = str(path)
        raise


def is_closed_terminal(handle: int) -> bool:
    """Whether an open file is a terminal that is not there any more: a device that says it is none."""
    found = os.fstat(handle)
    return stat.S_ISCHR(found.st_mode) and not os.isatty(handle) and found.st_rdev != os.stat(os.devnull).st_rdev


def content_of(path: Path) -> bytes:
    """All of a file; an error has its name."""
    with named(path):
        return path.read_bytes()


def is_unread(error: Exception) -> bool:
    """Whether nobody is there any more to read what is printed: a program that has seen enough, a closed terminal. A
    disk that fails has the same error as the latter."""
    if isinstance(error, OSError) and error.errno == errno.EIO and error.filename is None:
        return is_closed_terminal(sys.stdout.fileno())
    return isinstance(error, BrokenPipeError)


def to_nowhere(handle: int) -> None:
    """What is written to an open file from here on goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, handle)
    os.close(nowhere)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_output(path: Path, data: str | bytes) -> None:
    """Write what the user asked for to where `path` leads; what prevents it is the user's to mend.

    A link is followed, and what it leads to is written whole or not at all. A device or a pipe takes the data as it
    stands, and is never replaced by a file. `-` is standard output.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    if stream := stream_at(path):
        stream.flush()
        stream.buffer.write(content)
        stream.buffer.flush()
        return
    if path.is_dir() or not path.name:
        raise RunError(f"{path}: is a directory; name a file in it")
    try:
        if is_file_or_free(path):
            place = Path(os.path.realpath(path))
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, content)
        else:
            with open(path, "wb") as device:
                device.write(content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); choose another file") from None


def expanded(path: str | Path) -> Path:
    """A path with the home directory in place of ~; as it is where there is no such home."""
    return Path(os.path.expanduser(path))


def stream_at(path: Path) -> TextIO | None:
    """Standard output or standard error, where `path` is another name of it: `-`, or what it was sent to."""
    if str(path) == "-":
        return sys.stdout
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # no such file, or a stream that is none
            if os.path.samestat(os.stat(path), os.fstat(stream.fileno())):
                return stream
    return None


def is_file_or_free(path: Path) -> bool:
    """Whether a plain file stands where `path` leads, or nothing yet; not so for a device or a pipe."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return True


def is_kept(path: Path) -> bool:
    """Whether what is written to `path` becomes a file, which others may stand beside."""
    try:
        return stream_at(path) is None and is_file_or_free(path)
    except OSError:
        return True  # what is wrong with it is said when it is written


def write_lines(path: Path, texts: Iterable[str]) -> None:
    """Write a file the user asked for, one text a line."""
    write_output(path, "".join(f"{one_line(text)}\n" for text in texts))


def one_line(text: str) -> str:
    """What a model wrote, fit for a line of a table: line ends and tabs within it become spaces."""
    return text.translate(dict.fromkeys(map(ord, "\n\r\t"), " "))


def write_json(path: Path, value: Any) -> None:
    write_text(path, as_json(value))


def as_json(value: Any) -> str:
    """A value as it is kept. A file's name may be no UTF-8: what of it is not is spelled \\udce9, as JSON does."""
    text = json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a last line cut off by a crash is left out."""
    return [record for record in json_lines(path) if record is not None]


def unreadable_lines(path: Path) -> int:
    """How many lines of a JSONL file are no objects, but for the last one, which a crash may have cut off."""
    return sum(record is None for record in json_lines(path)[:-1])


def json_lines(path: Path) -> list[dict[str, Any] | None]:
    """The object in each line of a JSONL file, None where there is none; no lines where there is no file."""
    records: list[dict[str, Any] | None] = []
    with named(path):
        lines = path.read_text("utf-8", errors="replace").split("\n") if path.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        records.append(record if isinstance(record, dict) else None)
    return records


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, whole or not at all."""
    with named(path), open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        left = memoryview(f"{line}\n".encode())
        try:
            while left:
                left = left[file.write(left) :]  # a disk that is nearly full takes a part
        except OSError:
            file.truncate(end)
            raise


def files_at_most() -> int:
    """How many files this process may have open at once."""
    if resource is None:
        return OPEN_FILES
    now, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if now == resource.RLIM_INFINITY else now


def allow_many_files() -> None:
    """Let this process open many files, as far as the system allows it: a corpus may have thousands of shards."""
    if resource is not None and (now := files_at_most()) < OPEN_FILES:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))


def numbered(path: Path) -> Path:
    """path.1, or the next number that is free, for what stood in it before."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(1))
    return next(each for each in names if not os.path.lexists(each))


def write_json_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))


def sync_directory(path: Path) -> None:
    """Make renames in `path` survive a power cut, where the system can."""
    sync(path)


def sync(path: Path) -> None:
    """What was written to a file or directory is on the disk when this returns, where the system can."""
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


def probe(directory: Path, way: str = "choose another with --out") -> None:
    """Write, sync and remove a small file in `directory`, or in the folder in which it will be made.

    A disk that is full or cannot be written is known before any work is done; `way` is what else can be done.
    """
    try:
        place = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
        file = place / f".probe.{os.getpid()}.tmp"
        try:
            write_synced(file, bytes(1 << 16))
        finally:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(directory, error, way) from None


def cannot_write(directory: Path, error: OSError, way: str = "choose another directory") -> RunError:
    room = "make room, or " if is_full(error) else ""
    return RunError(f"{directory}: cannot be written ({error.strerror}); {room}{way}")


def is_full(error: OSError) -> bool:
    """Whether it says that the disk, or the user's part of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_temporary(name: str) -> bool:
    """Whether a file of this name is what a killed process left of a write."""
    return TEMPORARY.fullmatch(name) is not None


def is_empty(directory: Path) -> bool:
    """Whether nothing is in it but what is left of somebody who was killed before anything was there."""
    return all(path.name in (".lock", JOB) or is_temporary(path.name) for path in directory.iterdir())


def clear_temporaries(directory: Path) -> None:
    """Remove what killed processes have left of writes; for the owner of a directory that holds nobody else's files."""
    for path in directory.iterdir():
        if is_temporary(path.name):
            path.unlink(missing_ok=True)


class Ownership:
    """One process owns a directory: `with Ownership(path): …`. A second one is refused, and told who the owner is.

    The lock is the system's, so that it goes with the process: what a dead owner left in the file does not count. The
    file stays, so a directory that is somebody else's is to be refused before it is owned.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / ".lock"

    def __enter__(self) -> Ownership:
        try:
            self.handle = open(self.path, "a+", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.directory, error) from None
        try:
            self.require()
            self.sign()
        except BaseException:
            with suppress(OSError):
                self.handle.close()
            raise
        return self

    def require(self) -> None:
        """Take the lock, or say who has it."""
        deadline = time.monotonic() + PATIENCE
        while not self.take():
            if time.monotonic() > deadline:
                self.handle.seek(0)
                owner = self.handle.read().strip() or "another process"
                raise RunError(
                    f"{self.directory}: in use by {owner}; wait for it, stop it, or choose another directory"
                )
            time.sleep(PATIENCE / 10)

    def take(self) -> bool:
        if fcntl is None:
            return True
        try:
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: there, too, two processes are not told apart
            return True
        return True

    def sign(self) -> None:
        """Write who the owner is; where that cannot be written, nothing else can."""
        host = os.uname().nodename if hasattr(os, "uname") else "this machine"
        try:
            self.handle.seek(0)
            self.handle.truncate()
            self.handle.write(f"process {os.getpid()} on {host} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
            self.handle.flush()
            os.fsync(self.handle.fileno())
        except OSError as error:
            raise cannot_write(self.directory, error) from None

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # of a disk that fails, which whoever wrote something there has told
            self.handle.seek(0)
            self.handle.truncate()  # the file stays: removing it would let two later owners lock two different files
        with suppress(OSError):
            self.handle.close()
