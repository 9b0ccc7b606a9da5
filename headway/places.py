"""Where runs lie: the directory that a run is trained in or goes on in, and whose it is."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, takewhile
from pathlib import Path
from shlex import quote
from typing import Any

from headway.errors import Interrupted, Quit, RunError, UserError
from headway.files import JOB, Ownership, is_full, sync_directory, write_text
from headway.ranks import job


def directory_of(source: Any, name: str, out: str | Path | None, resume: bool) -> Path:
    """Where a run is trained, or goes on. A run goes on in its own directory: another one would begin it anew."""
    run = run_of(source)
    if out is None:
        return resumed_directory(source, name) if resume else own_directory(name)
    if resume and run is not None and not (Path(out) / "run.toml").is_file():
        raise UserError(
            f"--out {out}: there is no run in it to go on with; {run} goes on where it is, without --out, or as a "
            f"copy: cp -r {quote(str(run))}/. {quote(str(out))}"
        )
    return Path(out)


def run_of(source: Any) -> Path | None:
    """The run directory that is named, by itself or by its run.toml."""
    path = Path(source) if isinstance(source, str | Path) else None
    if path is not None and (path / "run.toml").is_file():
        return path
    if path is not None and path.name == "run.toml" and (path.parent / "tokenizer.json").is_file():
        return path.parent
    return None


def resumed_directory(source: Any, name: str) -> Path:
    """The run that is named, else the last in the row of runs/NAME, runs/NAME-2 and so on."""
    numbered = (Path("runs", f"{name}-{number}") for number in count(2))
    return run_of(source) or [Path("runs", name), *takewhile(Path.exists, numbered)][-1]


def own_directory(name: str) -> Path:
    """Where this job has begun runs/NAME or runs/NAME-2 and so on already; else the first that is free."""
    begun = (path.parent for path in Path("runs").glob(f"{glob.escape(name)}*/{JOB}"))
    return next(filter(was_begun_by_this_job, begun), None) or free_directory(name)


def free_directory(name: str) -> Path:
    """runs/NAME, or runs/NAME-2 and so on where that is taken."""
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 10_000))
    return next(Path("runs", each) for each in names if not os.path.lexists(Path("runs", each)))


def claimed(directory: Path, name: str) -> Path:
    """The directory of a new run whose place nobody has named; the next that is free, where another run has begun
    there meanwhile."""
    while True:
        try:
            directory.mkdir(parents=True)
        except OSError:
            if os.path.lexists(directory):
                directory = free_directory(name)
                continue
            # something else is wrong, which whoever makes it will tell
        return directory


def make_directory(directory: Path) -> Ownership:
    """The run directory, made if it is not there; to be entered as its owner."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{directory}: cannot be made ({error.strerror}); choose another with --out") from None
    sync_directory(directory.parent)
    return Ownership(directory)


@contextmanager
def mendable(directory: Path) -> Iterator[None]:
    """Where the system refuses a file of the run, that is told with the way to go on; a full disk is the command's to
    tell, and what is wrong with other files their owner's. What stops the run knows which it is."""
    try:
        yield
    except (Interrupted, Quit) as stop:
        stop.run = directory
        raise
    except OSError as error:
        name = error.filename2 or error.filename  # of a rename, what was to be replaced
        file = Path(os.fsdecode(name)) if isinstance(name, str | bytes) else None
        if is_full(error) or file is None or directory not in (file, *file.parents):
            raise
        if directory.is_dir():
            way = f"mend that and go on with: {way_to_resume(directory)}"
        else:
            way = f"{directory} is gone, and what the run had learned with it"
        raise RunError(f"{file}: {error.strerror}; {way}") from error


def way_to_resume(directory: Path, back_to: int | None = None) -> str:
    """The command that goes on with a run, as it can be pasted into a shell."""
    back = "" if back_to is None else f" --back-to {back_to}"
    return f"headway train {quote(str(directory))} --resume{back}"


def sign(directory: Path, back_to: int | None) -> None:
    """Leave the name of the job in the directory, where torchrun started this process, and the step it went back to."""
    if job() and (back_to is not None or not was_begun_by_this_job(directory)):
        write_text(directory / JOB, job() if back_to is None else f"{job()}\n{back_to}")


def sign_off(directory: Path) -> None:
    """The job has done its work there."""
    with suppress(OSError):  # a disk that fails now spoils nothing
        (directory / JOB).unlink(missing_ok=True)


def was_begun_by_this_job(directory: Path) -> bool:
    """Whether the run in `directory` is the one that this call of torchrun was working on before it restarted."""
    mark = directory / JOB
    return bool(job()) and mark.is_file() and mark.read_text("utf-8").split("\n")[0] == job()


def has_gone_back(directory: Path, step: int | None) -> bool:
    """Whether this job went back to that step already."""
    return (directory / JOB).read_text("utf-8").split("\n")[1:] == [str(step)]
