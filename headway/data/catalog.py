"""Data sets by name: what they are, how to get them, and where they are on this machine.

A data set is a folder of files under `data_home()`. The checksum decides whether a file is the right one,
wherever it came from; a file that is there with other content is never overwritten. The data set `world` is
made on the spot.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import http.client
import os
import ssl
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headway.data.world import FILES as WORLD_FILES
from headway.data.world import WorldSettings, make_world, world_files, write_world
from headway.errors import DataError, UserError, nearest

Say = Callable[[str], object]
Progress = Callable[[int, int], object]
"""called with (bytes done, bytes to do) of all the files to be brought"""

_CHUNK = 1 << 16
_MOST_EXTRA = 1 << 26  # bytes after which a file that is too long is not read on
_TIMEOUT = 30.0  # seconds without an answer


@dataclass(frozen=True)
class DataFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class DataSet:
    """What a data set is. `sources` are addresses of folders, with a `/` at the end, tried in order; a data
    set without them is made on the spot."""

    name: str
    description: str
    licence: str
    repository: str = ""
    files: tuple[DataFile, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def embedded(self) -> bool:
        """Made on the spot rather than downloaded."""
        return not self.sources

    @property
    def file_names(self) -> tuple[str, ...]:
        return WORLD_FILES if self.embedded else tuple(file.name for file in self.files)


@dataclass(frozen=True)
class DataSetStatus:
    """What of a data set is on this machine."""

    name: str
    description: str
    licence: str
    embedded: bool
    where: Path
    missing: tuple[str, ...]
    differing: tuple[str, ...]
    """files that are there with other content than the catalogue knows"""
    bytes: int | None
    """of the whole data set; of the files there for one that is made; None where that is not made yet"""

    @property
    def present(self) -> bool:
        return not self.missing and not self.differing


def _github(repository: str, branch: str, folder: str) -> str:
    return f"https://raw.githubusercontent.com/{repository}/{branch}/{folder}/"


DATA_SETS: dict[str, DataSet] = {
    data_set.name: data_set
    for data_set in (
        DataSet(
            name="world",
            description="invented people and where they were born, made on this machine from a seed",
            licence="made by Headway, under its own licence",
        ),
        DataSet(
            name="birthplaces",
            description="CS224N assignment 5: a Wikipedia sentence a person, and where they were born",
            licence="not stated",
            repository="floriankark/cs224n-win2223: a5/",
            files=(
                DataFile("wiki.txt", 419_253, "823bb536fca77c8b5a15b34b0dead6355d0cf1f806e822464bca28806c2fd055"),
                DataFile(
                    "birth_places_train.tsv",
                    79_923,
                    "02364dfca78e23d2583a19f03a2d8cddd90ee3e1a3795ddec7f0addadea30b0d",
                ),
                DataFile(
                    "birth_dev.tsv",
                    20_041,
                    "101a56073eba0db9aad5e2aaf1aa9bf8bdae966ae3aaed8fc8cda5edfa7856da",
                ),
                DataFile(
                    "birth_test_inputs.tsv",
                    13_880,
                    "5ccd3b2a1682e0daf90d59488aef8805ef21b9d35795cc3bdabdea79d293aa1f",
                ),
            ),
            sources=(
                _github("floriankark/cs224n-win2223", "main", "a5"),
                _github(
                    "umask000/cs224n-winter-2022",
                    "main",
                    "cs224n-winter2022-solutions/assignment5/student-new",
                ),
            ),
        ),
        DataSet(
            name="shakespeare",
            description="tiny Shakespeare: a million characters of the plays, for language modelling",
            licence="repository MIT; not stated for the text itself",
            repository="karpathy/char-rnn: data/tinyshakespeare/",
            files=(
                DataFile("input.txt", 1_115_394, "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
            ),
            sources=(_github("karpathy/char-rnn", "master", "data/tinyshakespeare"),),
        ),
    )
}


def data_home() -> Path:
    """The folder that holds one folder a data set: $HEADWAY_DATA, or ~/.cache/headway/data."""
    return Path(os.environ.get("HEADWAY_DATA") or "~/.cache/headway/data").expanduser()


def get(
    name: str,
    out: str | Path | None = None,
    source: str | Path | None = None,
    *,
    say: Say | None = None,
    progress: Progress | None = None,
    settings: WorldSettings | None = None,
) -> Path:
    """Brings a data set to `out` (data_home()/name where not given) and returns that folder.

    Args:
        name: one of `DATA_SETS`.
        out: the folder for the files.
        source: a local folder with the files, or with a folder `name` that holds them, instead of a download.
        say: called with a line for each file.
        progress: called with (bytes done, bytes to do) as files are brought.
        settings: of the world to make; for `world` only.

    Raises:
        UserError: no such data set, or an argument that it does not take.
        DataError: a file cannot be brought, has the wrong checksum, or stands in the way with other content.
    """
    data_set = _data_set(name)
    folder = data_home() / name if out is None else Path(out).expanduser()
    say = say or (lambda line: None)
    try:
        if data_set.embedded:
            if source is not None:
                raise UserError(f"{name} is made on this machine, not copied; leave out --from {source}")
            _get_world(folder, settings, say)
        else:
            if settings is not None:
                raise UserError(f"{name} takes no world settings; only the data set 'world' does")
            _get_files(data_set, folder, None if source is None else Path(source).expanduser(), say, progress)
    except OSError as error:
        raise DataError(f"{folder}: cannot be used ({_reason(error)}); give another folder with --out") from error
    return folder


def resolve(reference: str, base: Path = Path()) -> Path:
    """The path that a run file's `reference` means.

    `data:NAME/FILE` is a file of a data set on this machine; the world is made where it is missing. Anything
    else is a path, relative to `base`; whether it exists, and what a pattern or a folder stands for, is for
    the reader to say.
    """
    if reference.startswith("data:"):
        return _resolve_data(reference)
    if not reference:
        raise DataError("an empty file name; give a path or data:NAME/FILE")
    try:
        return base / Path(reference).expanduser()
    except RuntimeError as error:
        raise DataError(f"{reference}: {error}; write the path in full") from error


def status() -> list[DataSetStatus]:
    """Every known data set and what of it is under `data_home()`."""
    return [_status(data_set) for data_set in DATA_SETS.values()]


def _data_set(name: str) -> DataSet:
    if name not in DATA_SETS:
        raise UserError(f"no data set '{name}'{nearest(name, DATA_SETS)}")
    return DATA_SETS[name]


def _resolve_data(reference: str) -> Path:
    name, _, file_name = reference.removeprefix("data:").partition("/")
    data_set = _data_set(name)
    if file_name not in data_set.file_names:
        raise DataError(f"{reference}: {name} has no file '{file_name}'{nearest(file_name, data_set.file_names)}")
    path = data_home() / name / file_name
    if os.path.isfile(path):
        return path
    if data_set.embedded:
        try:
            _refuse_read_only(path.parent)
            _get_world(path.parent, None, lambda line: None)
            return path
        except OSError:  # a data folder that cannot be written to: read-only, full, or not a folder
            return Path(_temporary_world().name, file_name)
    raise DataError(
        f"{reference} is not on this machine; get it with: headway data get {name} "
        f"(or set HEADWAY_DATA to the folder that holds {name}/)"
    )


def _refuse_read_only(folder: Path) -> None:
    """Nobody asked for a write here, so a folder marked read-only is left alone, even by root."""
    there = next(place for place in (folder, *folder.absolute().parents) if os.path.exists(place))
    if not there.stat().st_mode & 0o222:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(there))


@functools.cache
def _temporary_world() -> tempfile.TemporaryDirectory[str]:
    """The world of the default settings in a folder that lives as long as this process."""
    folder = tempfile.TemporaryDirectory(prefix="headway-world-")
    write_world(make_world(), Path(folder.name))
    return folder


def _status(data_set: DataSet) -> DataSetStatus:
    folder = data_home() / data_set.name
    missing = tuple(name for name in data_set.file_names if not os.path.exists(folder / name))
    size: int | None
    if data_set.embedded:
        differing: tuple[str, ...] = ()  # its settings may be any
        size = None if missing else sum((folder / name).stat().st_size for name in data_set.file_names)
    else:
        there = (file for file in data_set.files if file.name not in missing)
        differing = tuple(file.name for file in there if _sha256(folder / file.name) != file.sha256)
        size = sum(file.bytes for file in data_set.files)
    return DataSetStatus(
        name=data_set.name,
        description=data_set.description,
        licence=data_set.licence,
        embedded=data_set.embedded,
        where=folder,
        missing=missing,
        differing=differing,
        bytes=size,
    )


def _get_world(folder: Path, settings: WorldSettings | None, say: Say) -> None:
    world = make_world(settings)
    wanted = {name: hashlib.sha256(text.encode("utf-8")).hexdigest() for name, text in world_files(world).items()}
    missing, differing = _compare(folder, wanted)
    if differing:
        raise DataError(
            f"{folder}: holds another world (not the same: {', '.join(differing)}), "
            "which is not overwritten; give another folder with --out, or delete that one"
        )
    if missing:
        write_world(world, folder)
        say(f"{folder}: made a world of {world.settings.people} people")
    else:
        say(f"{folder}: already there")


def _get_files(data_set: DataSet, folder: Path, source: Path | None, say: Say, progress: Progress | None) -> None:
    if source is not None and not source.is_dir():
        raise DataError(f"{source}: no such folder; --from takes the folder that holds the files of {data_set.name}")
    missing, differing = _compare(folder, {file.name: file.sha256 for file in data_set.files})
    if differing:
        raise DataError(
            f"{', '.join(str(folder / name) for name in differing)}: there with other content than "
            f"{data_set.name} has, and not overwritten; give another folder with --out, or delete it"
        )
    done, total = 0, sum(file.bytes for file in data_set.files if file.name in missing)
    for file in data_set.files:
        if file.name not in missing:
            say(f"{folder / file.name}: already there")
            continue

        def report(bytes_of_file: int, before: int = done) -> None:
            if progress is not None:
                progress(before + bytes_of_file, total)

        folder.mkdir(parents=True, exist_ok=True)
        if source is None:
            origin = _download(data_set, file, folder / file.name, report)
        else:
            origin = _copy(data_set, file, source, folder / file.name, report)
        done += file.bytes
        say(f"{folder / file.name}: {file.bytes:,} bytes from {origin}")


def _compare(folder: Path, sha256: dict[str, str]) -> tuple[list[str], list[str]]:
    """(the files still to be brought, those that are there but are not the ones wanted)"""
    missing = [name for name in sha256 if not os.path.lexists(folder / name)]
    there = (name for name in sha256 if name not in missing)
    return missing, [name for name in there if _sha256(folder / name) != sha256[name]]


def _copy(data_set: DataSet, file: DataFile, source: Path, target: Path, report: Callable[[int], None]) -> str:
    places = (source / file.name, source / data_set.name / file.name)
    place = next((place for place in places if place.is_file()), None)
    if place is None:
        raise DataError(
            f"{source}: has neither {file.name} nor {data_set.name}/{file.name}; "
            "--from takes the folder that holds them"
        )
    with open(place, "rb") as stream, _temporary_beside(target) as temporary:
        found = _receive(stream, temporary, file, report)
        if found != file.sha256:
            raise DataError(
                f"{_wrong_checksum(file, str(place), found)}; it is another version or a damaged copy: "
                "find another, or leave out --from to download it"
            )
        os.replace(temporary, target)
    return str(place)


def _download(data_set: DataSet, file: DataFile, target: Path, report: Callable[[int], None]) -> str:
    failures: list[str] = []
    wrong: list[str] = []
    for address in data_set.sources:
        url = address + file.name
        with _temporary_beside(target) as temporary:
            try:
                request = urllib.request.Request(url, headers={"User-Agent": "headway"})
                with urllib.request.urlopen(request, timeout=_TIMEOUT) as stream:
                    found = _receive(stream, temporary, file, report)
            except (
                urllib.error.URLError,
                http.client.HTTPException,
                ssl.SSLError,
                TimeoutError,
                ConnectionError,
            ) as error:
                failures.append(f"{url} ({_reason(error)})")
                continue
            if found == file.sha256:
                os.replace(temporary, target)
                return url
            wrong.append(_wrong_checksum(file, url, found))
    local = f"headway data get {data_set.name} --from DIR"
    if wrong:
        raise DataError(
            "; ".join(wrong + failures) + f"; nothing was kept. Try again, or use a copy of your own: {local}"
        )
    raise DataError(
        f"{file.name}: cannot be downloaded from {' or '.join(failures)}; "
        f"where there is no network, bring the files of {data_set.name} in a folder DIR and use: {local}"
    )


def _receive(stream: IO[bytes], temporary: Path, file: DataFile, report: Callable[[int], None]) -> str:
    """Writes what `stream` holds and returns its checksum; stops where it is far longer than the file."""
    digest, size = hashlib.sha256(), 0
    with open(temporary, "wb") as out:
        while size <= file.bytes + _MOST_EXTRA and (chunk := stream.read(_CHUNK)):
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


def _sha256(path: Path) -> str | None:
    """The checksum of a file; None for what is not one."""
    if not os.path.isfile(path):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wrong_checksum(file: DataFile, origin: str, found: str) -> str:
    return f"{origin}: not the {file.name} known here: SHA-256 is {found}, should be {file.sha256}"


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, BaseException) else error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
