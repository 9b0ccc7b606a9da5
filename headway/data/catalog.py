"""Data sets by name: what they are, how to get them, and where they are on this machine.

A data set is a folder of files under `data_home()`. The checksum decides whether a file is the right one,
wherever it came from; a file that is there with other content is never overwritten. A file may also lie there
packed, as NAME.gz: the checksum is that of what is in it. The data set `world` is made on the spot.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from headway.data.bringing import DataFile, Downloads, checksum, copy, reason
from headway.data.world import FILES as WORLD_FILES
from headway.data.world import WorldSettings, make_world, world_files, write_world
from headway.errors import DataError, UserError, nearest
from headway.files import expanded

Say = Callable[[str], object]
Progress = Callable[[int, int], object]
"""called with (bytes done, bytes to do) of all the files to be brought"""


@dataclass(frozen=True)
class DataSet:
    """What a data set is. `sources` are addresses of folders, with a `/` at the end, or of .zip archives, tried in
    order; a data set without them is made on the spot. `folders` are other names that its folder may have."""

    name: str
    description: str
    licence: str
    repository: str = ""
    files: tuple[DataFile, ...] = ()
    sources: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def embedded(self) -> bool:
        """Made on the spot rather than downloaded."""
        return not self.sources

    @property
    def file_names(self) -> tuple[str, ...]:
        return WORLD_FILES if self.embedded else tuple(file.name for file in self.files)

    def folders_in(self, root: Path) -> list[Path]:
        """Where its files may lie below `root`, its own folder first."""
        return [root / folder for folder in (self.name, *self.folders)]


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
        DataSet(
            name="multi30k",
            description="Multi30k, task 1: 29,000 image captions in English and German, line by line, for translation",
            licence="not stated",
            repository="multi30k/dataset: data/task1/raw/",
            files=(
                DataFile("train.en.gz", 568_929, "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f"),
                DataFile("train.de.gz", 637_044, "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6"),
                DataFile("val.en.gz", 21_650, "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28"),
                DataFile("val.de.gz", 24_681, "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a"),
                DataFile(
                    "test_2016_flickr.en.gz",
                    21_077,
                    "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
                ),
                DataFile(
                    "test_2016_flickr.de.gz",
                    22_890,
                    "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
                ),
            ),
            sources=(_github("multi30k/dataset", "master", "data/task1/raw"),),
        ),
        DataSet(
            name="tatoeba",
            description="Tatoeba: 32,028 pairs of short English and Mandarin Chinese sentences, for translation",
            licence="CC BY 2.0 (France); attribution in the third column and in cmn.about.txt",
            repository="wuyuhanwyh777-max/CET4Focus: data/cmn-eng.zip",
            files=(
                DataFile("cmn.txt", 4_565_695, "d766002332a8f21099afd7427138d44f06bed7486a18f7f0f26f217092667d73"),
                DataFile(
                    "cmn.about.txt",
                    1_441,
                    "262eaba34251ebb2e7c5d514c5a2b856fe6eec058cee957d22a6c6129947a228",
                    member="_about.txt",
                ),
            ),
            sources=(_github("wuyuhanwyh777-max/CET4Focus", "master", "data") + "cmn-eng.zip",),
            folders=("zh_en",),
        ),
    )
}


def data_home() -> Path:
    """The folder that holds one folder a data set: $HEADWAY_DATA, or ~/.cache/headway/data."""
    return expanded(os.environ.get("HEADWAY_DATA") or "~/.cache/headway/data")


def get(
    name: str,
    out: str | Path | None = None,
    source: str | Path | None = None,
    *,
    say: Say | None = None,
    progress: Progress | None = None,
    settings: WorldSettings | None = None,
) -> Path:
    """Brings a data set to `out` and returns that folder: data_home()/name where not given, or the other folder
    there that has every file already.

    Args:
        name: one of `DATA_SETS`.
        out: the folder for the files.
        source: a local folder with the files (also as NAME.gz, or in their .zip), or with a folder `name` that holds
            them, instead of a download.
        say: called with a line for each file.
        progress: called with (bytes done, bytes to do) as files are brought.
        settings: of the world to make; for `world` only.

    Raises:
        UserError: no such data set, or an argument that it does not take.
        DataError: a file cannot be brought, has the wrong checksum, or stands in the way with other content.
    """
    data_set = _data_set(name)
    folder = _home(data_set) if out is None else expanded(out)
    say = say or (lambda line: None)
    try:
        if data_set.embedded:
            if source is not None:
                raise UserError(f"{name} is made on this machine, not copied; leave out --from {source}")
            _get_world(folder, settings, say)
        else:
            if settings is not None:
                raise UserError(f"{name} takes no world settings; only the data set 'world' does")
            _get_files(data_set, folder, None if source is None else expanded(source), say, progress)
    except OSError as error:
        raise DataError(f"{folder}: cannot be used ({reason(error)}); give another folder with --out") from error
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
    for folder in data_set.folders_in(data_home()):
        if os.path.isfile(path := _stored(folder, file_name)):
            return path
    path = data_home() / name / file_name
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


def _stored(folder: Path, name: str) -> Path:
    """Where a file lies in a folder: under its name, or packed as NAME.gz; its name where neither is there."""
    path, packed = folder / name, folder / f"{name}.gz"
    return packed if os.path.isfile(packed) and not os.path.lexists(path) else path


def _home(data_set: DataSet) -> Path:
    """The folder under `data_home()` that has every file of the data set, or the one where they belong."""
    folders = data_set.folders_in(data_home())
    whole = (
        folder
        for folder in folders
        if all(os.path.lexists(_stored(folder, file_name)) for file_name in data_set.file_names)
    )
    return next(whole, folders[0])


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
    folder = _home(data_set)
    size: int | None
    if data_set.embedded:
        missing, differing = _compare(folder, dict.fromkeys(data_set.file_names))  # its settings may be any
        size = None if missing else sum(_stored(folder, name).stat().st_size for name in data_set.file_names)
    else:
        missing, differing = _compare(folder, {file.name: file.sha256 for file in data_set.files})
        size = sum(file.bytes for file in data_set.files)
    return DataSetStatus(
        name=data_set.name,
        description=data_set.description,
        licence=data_set.licence,
        embedded=data_set.embedded,
        where=folder,
        missing=tuple(missing),
        differing=tuple(differing),
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
            f"{', '.join(str(_stored(folder, name)) for name in differing)}: there with other content than "
            f"{data_set.name} has, and not overwritten; give another folder with --out, or delete it"
        )
    done, total = 0, sum(file.bytes for file in data_set.files if file.name in missing)
    with ExitStack() as stack:
        downloads = Downloads(data_set.name, data_set.sources, folder, total, stack)
        for file in data_set.files:
            if file.name not in missing:
                say(f"{_stored(folder, file.name)}: already there")
                continue

            def report(bytes_of_file: int, before: int = done) -> None:
                if progress is not None:
                    progress(before + bytes_of_file, total)

            folder.mkdir(parents=True, exist_ok=True)
            if source is None:
                origin = downloads.bring(file, folder / file.name, report)
            else:
                origin = copy(file, _local_copy(data_set, file, source), folder / file.name, report)
            done += file.bytes
            say(f"{folder / file.name}: {file.bytes:,} bytes from {origin}")


def _local_copy(data_set: DataSet, file: DataFile, source: Path) -> Path:
    """Where a folder of the user's has a file: under one of its names, packed, or in the archive it is public in."""
    archives = [address.rpartition("/")[2] for address in data_set.sources if address.endswith(".zip")]
    names = (file.name, f"{file.name}.gz", file.in_archive, *archives)
    for folder in (source, *data_set.folders_in(source)):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise DataError(
        f"{source}: has neither {file.name} nor {data_set.name}/{file.name}; --from takes the folder that holds them"
    )


def _compare(folder: Path, sha256: Mapping[str, str | None]) -> tuple[list[str], list[str]]:
    """(the files still to be brought, those that are there but are not the ones wanted); None: any will do"""
    missing = [name for name in sha256 if not os.path.lexists(_stored(folder, name))]
    known = ((name, wanted) for name, wanted in sha256.items() if wanted and name not in missing)
    return missing, [name for name, wanted in known if checksum(_stored(folder, name), name) != wanted]
