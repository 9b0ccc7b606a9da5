"""How a file of a data set gets here: from a page, out of a zip archive, or from a copy on this machine.

Whatever comes is written beside its place, and moved there only if its checksum is the one that is known. No name
in an archive becomes a path, and nothing that is far longer than it should be is read to its end.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import ssl
import struct
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from headway.errors import DataError

Report = Callable[[int], object]
"""called with the bytes of a file that have come"""

CHUNK = 1 << 16
MOST_EXTRA = 1 << 26  # bytes after which what is too long is not read on
TIMEOUT = 30.0  # seconds without an answer
UNREACHED = (urllib.error.URLError, http.client.HTTPException, ssl.SSLError, TimeoutError, ConnectionError)
DAMAGED = (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError)


@dataclass(frozen=True)
class DataFile:
    """A file as it is when unpacked. `member` is its name in an archive, where that is another one."""

    name: str
    bytes: int
    sha256: str
    member: str = ""

    @property
    def in_archive(self) -> str:
        return self.member or self.name


def copy(file: DataFile, place: Path, target: Path, report: Report) -> str:
    """Takes a file from a copy on this machine: as it is, NAME.gz, or a .zip archive. Returns where it came from."""
    way = "it is another version or a damaged copy: find another, or leave out --from to download it"
    with _temporary_beside(target) as temporary:
        try:
            with _opened(place, file) as stream:
                found = _receive(stream, temporary, file, report)
        except DAMAGED as error:
            raise DataError(f"{place}: {file.name} cannot be unpacked ({reason(error)}); {way}") from error
        if found != file.sha256:
            raise DataError(f"{_wrong_checksum(file, str(place), found)}; {way}")
        os.replace(temporary, target)
    return str(place)


class Downloads:
    """Takes files from the sources of a data set: folders, whose address ends in /, and .zip archives.

    An archive is downloaded once for all its files, to a file without a name in `folder` that ends with `stack`.
    """

    def __init__(self, name: str, sources: tuple[str, ...], folder: Path, total: int, stack: ExitStack) -> None:
        """`total` is how many bytes all the files have."""
        self.name, self.sources, self.folder, self.stack = name, sources, folder, stack
        self.most = total + MOST_EXTRA
        self.archives: dict[str, IO[bytes]] = {}

    def bring(self, file: DataFile, target: Path, report: Report) -> str:
        """Tries one source after the other. Returns the one that the file came from."""
        failures: list[str] = []
        wrong: list[str] = []
        for address in self.sources:
            archived = address.endswith(".zip")
            origin = f"{file.in_archive} in {address}" if archived else address + file.name
            with _temporary_beside(target) as temporary:
                try:
                    if archived:
                        found = self._unpack(address, file, temporary, report)
                    else:
                        with _page(origin) as stream:
                            found = _receive(stream, temporary, file, report)
                except (*UNREACHED, *DAMAGED) as error:
                    failures.append(f"{origin} ({reason(error)})")
                    continue
                if found == file.sha256:
                    os.replace(temporary, target)
                    return origin
                wrong.append(_wrong_checksum(file, origin, found))
        local = f"headway data get {self.name} --from DIR"
        if wrong:
            raise DataError(
                "; ".join(wrong + failures) + f"; nothing was kept. Try again, or use a copy of your own: {local}"
            )
        raise DataError(
            f"{file.name}: cannot be downloaded from {' or '.join(failures)}; "
            f"where there is no network, bring the files of {self.name} in a folder DIR and use: {local}"
        )

    def _unpack(self, url: str, file: DataFile, temporary: Path, report: Report) -> str:
        """As `_receive`, from an archive. What is reported is how much of the archive has come."""
        if url not in self.archives:
            self.archives[url] = self._archive(url, lambda share: report(int(share * file.bytes)))
        with _member(self.archives[url], file) as stream:
            found = _receive(stream, temporary, file, lambda size: None)
        report(file.bytes)
        return found

    def _archive(self, url: str, report: Callable[[float], object]) -> IO[bytes]:
        """Downloads an archive. `report` is called with the share that has come, where its length is told."""
        archive = self.stack.enter_context(tempfile.TemporaryFile(dir=self.folder))  # noqa: SIM115
        with _page(url) as stream:
            length = stream.headers.get("Content-Length", "")
            while chunk := stream.read(CHUNK):
                archive.write(chunk)
                if archive.tell() > self.most:
                    raise zipfile.BadZipFile(f"longer than {self.most:,} bytes")
                if length.isdecimal():
                    report(min(1.0, archive.tell() / max(1, int(length))))
        return archive


def checksum(path: Path, name: str) -> str | None:
    """The SHA-256 of a file, of what is in it where it is NAME.gz; None for what is no file or cannot be unpacked."""
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") if path.name == name else gzip.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except DAMAGED:
        return None


def reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, BaseException) else error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _page(url: str) -> Any:
    request = urllib.request.Request(url, headers={"User-Agent": "headway"})
    return urllib.request.urlopen(request, timeout=TIMEOUT)


def _opened(place: Path, file: DataFile) -> AbstractContextManager[IO[bytes]]:
    if place.name == f"{file.name}.gz":
        return cast(IO[bytes], gzip.open(place))
    return _member(place, file) if place.suffix == ".zip" else open(place, "rb")


@contextmanager
def _member(archive: Path | IO[bytes], file: DataFile) -> Iterator[IO[bytes]]:
    """The file as it stands in a zip archive. Whatever is wrong with the archive is a BadZipFile."""
    with ExitStack() as stack:
        try:
            packed = stack.enter_context(zipfile.ZipFile(archive))
            if file.in_archive not in packed.namelist():
                raise zipfile.BadZipFile(f"no {file.in_archive} in this archive")
            if packed.getinfo(file.in_archive).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise zipfile.BadZipFile(f"{file.in_archive} is packed in a way that is not read")
            stream = stack.enter_context(packed.open(file.in_archive))
        except (OSError, ValueError, RuntimeError, struct.error) as error:  # what zipfile makes of damaged headers
            raise zipfile.BadZipFile(f"damaged archive: {error}") from error
        yield stream


def _receive(stream: IO[bytes], temporary: Path, file: DataFile, report: Report) -> str:
    """Writes what `stream` holds and returns its checksum; stops where it is far longer than the file."""
    digest, size = hashlib.sha256(), 0
    with open(temporary, "wb") as out:
        while size <= file.bytes + MOST_EXTRA and (chunk := stream.read(CHUNK)):
            digest.update(chunk)
            size += len(chunk)
            out.write(chunk)
            report(min(size, file.bytes))
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


@contextmanager
def _temporary_beside(target: Path) -> Iterator[Path]:
    """A name in the target's folder for a file on its way; what is left of it afterwards is removed."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _wrong_checksum(file: DataFile, origin: str, found: str) -> str:
    return f"{origin}: not the {file.name} known here: SHA-256 is {found}, should be {file.sha256}"
