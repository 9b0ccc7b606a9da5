"""What is said where a run directory is named and none is there, and which one may be meant."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from headway.errors import RunError, nearest

COPY = ".run.toml"  # beside a run's run.toml: the run file as the run last took it
SHOWN = 5  # runs in a message


def not_a_run(path: Path) -> RunError:
    """The error for a path that is no run directory."""
    if command := put_back(path):
        return RunError(f"{path}: not a run directory (no run.toml in it); get it back with {command}")
    if path.is_dir():
        inside = [str(path / name) for name in found(path, "*/run.toml")]
        more = " …" if len(inside) > SHOWN else ""
        way = f"runs in it: {', '.join(inside[:SHOWN])}{more}" if inside else "train one with: headway train …"
        return RunError(f"{path}: not a run directory (no run.toml in it); {way}")
    if (own := Path("runs") / path) != path and (own / "run.toml").is_file():
        return RunError(f"{path}: no such directory; did you mean '{own}'?")
    around = [str(path.parent / name) for name in found(path.parent, "*/run.toml")]
    what = "is a file" if path.exists() else "no such directory"
    way = nearest(str(path), around) or "; name a run directory, or train one with: headway train …"
    return RunError(f"{path}: {what}{way}")


def found(folder: Path, pattern: str) -> list[str]:
    """Names in a folder, of files or of the folders that hold them; none where it cannot be read."""
    try:
        return [each.relative_to(folder).parts[0] for each in sorted(folder.glob(pattern))]
    except OSError:
        return []


def put_back(directory: Path) -> str:
    """The command that gets back the run file as the run last took it; none where there is no copy of it."""
    kept, run_file = directory / COPY, directory / "run.toml"
    return f"cp {quote(str(kept))} {quote(str(run_file))}" if kept.is_file() else ""
