"""Checkpoints: whole or not there.

    checkpoints/step-00012000/   model.safetensors  optimizer.safetensors  state.json  manifest.json (written last)

A checkpoint is written into a temporary folder, synced, and renamed, and loses its name again before it is deleted.
Its manifest holds the size and SHA-256 of every file. Nothing in it is a pickle. While one is written, training goes
on: the tensors are copied at once, and a thread does the rest. Processes that hold a part of the weights each write
that part (`headway.training.sharded`); either kind is read by any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from headway.errors import RunError
from headway.files import named, sync, sync_directory, write_json, write_synced
from headway.training import sharded
from headway.training.optimizer import Optimizer

MANIFEST = "manifest.json"
NUMBER = re.compile(r"step-(\d{8,})")
DAMAGED = re.compile(r"step-(\d{8,})\.damaged")
GRACE = 1.0  # seconds that a write is given to stop when the program quits


@dataclass
class State:
    """Where a run stands. `step` counts over all stages."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    best_step: int | None = None
    best_value: float | None = None
    since_best: int = 0  # evaluations since the best one
    done: bool = False
    tokenizer: str = ""  # fingerprint of the tokenizer these weights were trained with
    skipped: int = 0  # steps that changed nothing because their loss or gradient was no number
    skipped_in_a_row: int = 0
    given_up: bool = False  # a step around here was no number, and no regular checkpoint since: weights may be spoilt
    unscored: bool = False  # an evaluation is due at this step, and still to be made


@dataclass
class Snapshot:
    """A run at one step. Its tensors are copies on the CPU: what training does next does not reach them."""

    step: int
    state: bytes
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor] | None

    @classmethod
    def take(cls, model: nn.Module, optimizer: Optimizer | None, state: State) -> Snapshot:
        return cls(
            state.step,
            json.dumps(asdict(state), indent=1).encode(),
            copied(tensors_of(model)),
            copied(optimizer.state()) if optimizer is not None else None,
        )

    def files(self) -> Iterator[tuple[str, bytes]]:
        """(name, content) of each file, one at a time in memory."""
        yield "model.safetensors", save(self.model)
        if self.optimizer is not None:
            yield "optimizer.safetensors", save(self.optimizer)
        yield "state.json", self.state


class Abandoned(Exception):
    """A checkpoint is not wanted any more."""


class Checkpoints:
    """The checkpoints of one run directory. Its `mark` tells a run that has lost them from one that had none yet."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "checkpoints"
        self.metrics = directory / "metrics.jsonl"
        self.mark = directory / ".saved"

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The checkpoints that exist, oldest first."""
        names = map(NUMBER.fullmatch, self.names())
        return sorted(int(name[1]) for name in names if name)

    def names(self) -> list[str]:
        """What is in the folder. One that cannot be looked into is not taken for empty."""
        try:
            return os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(
                f"{self.directory}: cannot be read ({error.strerror}); its checkpoints may be whole: mend that first"
            ) from None

    def unnamed(self, ending: str = "tmp") -> list[Path]:
        """What is being written, or was when a process was killed; with "gone", what is being deleted."""
        names = (name for name in self.names() if name.startswith(".step-") and name.endswith(f".{ending}"))
        return [self.directory / name for name in names]

    def require_room(self, model: nn.Module, numbers: int = 3) -> None:
        """An error where the disk has no room for one checkpoint: so many numbers for each weight, at least."""
        needed = numbers * sum(tensor.nbytes for tensor in tensors_of(model).values())
        place = self.directory if self.directory.exists() else self.directory.parent
        free = shutil.disk_usage(place).free
        if free < needed:
            raise RunError(
                f"{place}: {free / 1e6:,.1f} MB are free on its disk, and a checkpoint of this model "
                f"takes more than {needed / 1e6:,.1f} MB; make room, or train on another disk"
            )

    def write(self, snapshot: Snapshot, keep: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """Write a checkpoint, give it its name, and let go of older ones; stop where it is not `wanted` any more."""
        temporary = self.begin(snapshot.step)
        with or_nothing(temporary):
            manifest = {}
            for name, data in snapshot.files():
                if not wanted():
                    raise Abandoned
                write_synced(temporary / name, data)
                manifest[name] = fingerprint(data)
            self.seal(temporary, manifest)
        self.publish(temporary, snapshot.step, keep)

    def begin(self, step: int) -> Path:
        """A temporary folder for the checkpoint of `step`."""
        temporary = self.directory / f".{self.path(step).name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        first = not self.directory.exists()
        self.directory.mkdir(exist_ok=True)  # not where the run directory itself is gone
        temporary.mkdir()
        if first:
            sync_directory(self.directory.parent)
        return temporary

    def seal(self, temporary: Path, manifest: dict[str, Any]) -> None:
        """With its manifest, the checkpoint is whole."""
        write_json(temporary / MANIFEST, manifest)
        sync_directory(temporary)

    def publish(self, temporary: Path, step: int, keep: int) -> None:
        """Give the checkpoint its name, and let go of older ones."""
        sync(self.metrics)  # what was recorded up to this step is not lost to a power cut either
        self.mark.touch()
        self.install(temporary)
        self.prune(step, keep)

    def install(self, temporary: Path) -> None:
        """Give a whole checkpoint its name. At any moment it or the one that had the name before is on disk."""
        final = self.directory / temporary.name.removeprefix(".").removesuffix(".tmp")
        self.remove(final)
        os.replace(temporary, final)
        sync_directory(self.directory)

    def remove(self, folder: Path) -> None:
        """Delete a checkpoint if it is there. What is left of one when a process is killed here has no name of one."""
        gone = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(FileNotFoundError):
            os.replace(folder, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def prune(self, newest: int, keep: int) -> None:
        """Let go of all but the last `keep` checkpoints up to `newest`, and the best one that each of these knows; of
        those that were set aside up to there, too. Where one cannot be read, nothing is let go."""
        last = [step for step in self.steps() if step <= newest][-keep:]
        try:
            kept = {*last, *map(self.best_known_at, last)}
        except OSError:
            return
        for step in self.steps():
            if step not in kept:
                self.remove(self.path(step))
        for name in self.names():
            if (damaged := DAMAGED.fullmatch(name)) and int(damaged[1]) <= newest:
                self.remove(self.directory / name)

    def set_aside(self, step: int) -> None:
        """Take a damaged checkpoint out of the row, in which it would count as one to go back to."""
        aside = self.path(step).with_suffix(".damaged")
        self.remove(aside)
        os.replace(self.path(step), aside)

    def best_known_at(self, step: int) -> int | None:
        state = self.readable_state(step)
        return state.best_step if state is not None else None

    def is_steady(self, step: int) -> bool:
        """Whether it was saved with nothing wrong."""
        try:
            state = self.readable_state(step)
        except OSError:
            return False
        return state is not None and not state.given_up

    def readable_state(self, step: int) -> State | None:
        """None where it is damaged or missing."""
        try:
            return self.state(step)
        except (FileNotFoundError, ValueError, TypeError, AttributeError, RunError):
            return None

    def require_folder(self) -> None:
        """An error where the checkpoints lie elsewhere, and that place is not there."""
        if os.path.lexists(self.directory) and not self.directory.is_dir():
            where = f", a link to {os.readlink(self.directory)}," if self.directory.is_symlink() else ""
            raise RunError(f"{self.directory}{where} is no folder; nothing was changed; put back what it was")

    def standing(self) -> int:
        """The step that whoever resumes goes on from, as `finish` and `latest` will find it; 0 before the first."""
        unnamed = [
            int(number[1])
            for path in self.unnamed()
            if (number := NUMBER.fullmatch(path.name[1:-4])) and is_whole(path)
        ]
        return max([self.latest(lambda note: None) or 0, *unnamed])

    def finish(self) -> None:
        """Give its name to a checkpoint that was whole when its process was killed. For the owner of the run."""
        for temporary in self.unnamed():
            try:
                whole = damage(temporary) is None
            except OSError as error:
                raise RunError(
                    f"{temporary}: cannot be read ({error.strerror}); nothing was changed; try again, or move it away"
                ) from None
            if whole:
                self.install(temporary)

    def clear_remains(self) -> None:
        """Remove what a killed process left unfinished. For the owner of the run."""
        for ending in ("tmp", "gone"):
            for folder in self.unnamed(ending):
                shutil.rmtree(folder, ignore_errors=True)

    def latest(
        self, say: Callable[[str], None], among: Container[int | None] | None = None, owned: bool = False
    ) -> int | None:
        """The newest checkpoint whose files are what its manifest says; others are named and passed over. One that
        cannot be read stops the owner of the run."""
        for step in reversed(self.steps()):
            if among is not None and step not in among:
                continue
            wrong = self.wrong_with(step, owned)
            if wrong is None:
                return step
            say(f"{self.path(step)}: {wrong}; passed over")
        return None

    def require(self, step: int) -> int:
        """The checkpoint of `step`, which must be there and whole."""
        if step not in self.steps():
            there = ", ".join(f"{each:,}" for each in self.steps()) or "none"
            raise RunError(f"{self.directory.parent}: no checkpoint of step {step:,}; there are: {there}")
        wrong = self.wrong_with(step, owned=True)
        if wrong is not None:
            raise RunError(f"{self.path(step)}: {wrong}; put it back from a copy, or choose another")
        return step

    def wrong_with(self, step: int, owned: bool) -> str | None:
        """What is wrong with a checkpoint, None where it is whole. Who owns the run stops at one that cannot be read:
        it may be whole, and must not be thrown away for those that come after the one before it."""
        try:
            wrong = damage(self.path(step))
            state = self.readable_state(step) if wrong is None else None
            return wrong if state is None or state.step == step else f"is of step {state.step:,}, under another's name"
        except OSError as error:
            wrong = f"cannot be read ({error.strerror})"
            if owned:
                way = "nothing was changed; try again, or move it away to go on from the one before"
                raise RunError(f"{self.path(step)}: {wrong}; {way}") from None
            return wrong

    def require_whole(self, say: Callable[[str], None]) -> int | None:
        """The newest whole checkpoint, None where there is none at all; an error where all of them are damaged."""
        notes: list[str] = []
        step = self.latest(notes.append, owned=True)
        if step is None and notes:
            listed = "".join(f"\n  - {note}" for note in notes)
            raise RunError(
                f"{self.directory.parent}: none of its checkpoints is whole; nothing was deleted{listed}\n"
                "put one of them back from a copy, or start anew with another --out"
            )
        for note in notes:
            say(note)
        return step

    def require_tokenizer(self, trained: str, fingerprint: str) -> None:
        """The tokenizer beside the weights must be the one they were trained with."""
        if trained != fingerprint:
            raise RunError(
                f"{self.directory.parent}: tokenizer.json ({fingerprint}) is not the one these weights were "
                f"trained with ({trained}); put the right file back, or train again into another directory"
            )

    def state(self, step: int) -> State:
        file = self.path(step) / "state.json"
        with named(file):
            found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise RunError(f"{self.path(step)}: state.json is no object; move it away to go on from the one before")
        unknown = ", ".join(found.keys() - {field.name for field in fields(State)})
        if unknown:
            raise RunError(f"{self.path(step)}: written by another version of Headway (state.json has {unknown})")
        return State(**found)

    def load_model(self, step: int, model: nn.Module) -> None:
        """Put the weights of `step` into `model`."""
        folder, wanted = self.path(step), tensors_of(model)
        whole = not sharded.has_parts(folder) and not sharded.is_sharded(wanted.values())
        found = load_file(folder / "model.safetensors") if whole else {}
        there = found or {name: torch.empty(size, device="meta") for name, (size, _) in model_shapes(folder).items()}
        mismatch = describe_mismatch(there, wanted)
        if mismatch:
            raise RunError(f"{folder}: these weights are of another model: {mismatch}")
        if whole:
            model.load_state_dict(found, strict=False)
        else:
            sharded.read(folder, {name: tensor.detach() for name, tensor in wanted.items()})

    def load_optimizer(self, step: int, optimizer: Optimizer) -> None:
        folder = self.path(step)
        if not sharded.has_parts(folder) and not sharded.is_sharded(optimizer.names):
            optimizer.load(load_file(folder / "optimizer.safetensors"))
            return
        stored = sharded.shapes(folder)
        state = {name: optimizer.room_for(name, *stored[name]) for name in stored.keys() - model_shapes(folder).keys()}
        sharded.read(folder, state)
        optimizer.load(state)


def model_shapes(folder: Path) -> dict[str, Any]:
    """Shape and type of every weight in a checkpoint; the optimizer's tensors have a stroke in their names."""
    return {name: facts for name, facts in sharded.shapes(folder).items() if "/" not in name}


class Writer:
    """Writes checkpoints in a thread, one at a time, while training goes on.

        with Writer(checkpoints) as writer:
            writer.save(model, optimizer, state, keep=2)

    An error of the thread is raised by the next `check`, `wait` or `save`. Leaving the block waits for what is being
    written, unless the program quits: then the write is given up, and the checkpoint before it stays.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.thread: threading.Thread | None = None
        self.unwritten: tuple[Snapshot, int] | None = None  # or not yet: what is to be written, and how many to keep
        self.error: BaseException | None = None
        self.wanted = True

    def save(self, model: nn.Module, optimizer: Optimizer | None, state: State, keep: int) -> None:
        """Copy the run as it is, and begin to write it."""
        self.wait()
        self.unwritten = Snapshot.take(model, optimizer, state), keep
        self.thread = threading.Thread(target=self.write, name="checkpoint", daemon=True)
        self.thread.start()

    def write(self) -> None:
        try:
            self.again()
        except BaseException as error:
            self.error = error

    def again(self) -> None:
        """Write what is not written, as the system may have refused it."""
        if self.unwritten is not None:
            self.checkpoints.write(*self.unwritten, lambda: self.wanted)
            self.unwritten = None

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        error, self.error = self.error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """What was saved is on the disk when this returns."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.check()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self.thread is not None:  # the error that ended the block is the one to be told
            self.wanted = not isinstance(error, KeyboardInterrupt)
            with suppress(RuntimeError):  # it was stopped before it began
                self.thread.join(None if self.wanted else GRACE)


@contextmanager
def or_nothing(folder: Path) -> Iterator[None]:
    """Within it the folder is filled; where that fails, it is not there any more."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the state dict once, under its first name: what `load_state_dict` needs for the same model."""
    return contiguous(tensors_of(model))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return dict(model.named_parameters()) | buffers


def contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, in memory of their own."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


@torch.no_grad()
def all_finite(model: nn.Module) -> bool:
    """Whether every weight that this process holds is a number; a device is waited for once."""
    return bool(torch.stack([sharded.local(parameter).isfinite().all() for parameter in model.parameters()]).all())


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files, in words; None where they are what the manifest says. Files that are
    there and cannot be read are an OSError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if not isinstance(manifest, dict) or "state.json" not in manifest or not any(map(holds_weights, manifest)):
            return f"{MANIFEST} is damaged"
        for name, wanted in manifest.items():
            if fingerprint_of(folder / name) != wanted:
                return f"{name} is damaged"
    except (ValueError, RecursionError):
        return f"{MANIFEST} is damaged"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    return None


def is_whole(folder: Path) -> bool:
    try:
        return damage(folder) is None
    except OSError:
        return False


def holds_weights(name: str) -> bool:
    return name == "model.safetensors" or name.startswith(sharded.MARK)


def describe_mismatch(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> str:
    """The first difference between two sets of tensors, in words; empty where there is none."""
    for name in sorted(found.keys() | wanted.keys()):
        if name not in found:
            return f"'{name}' is missing"
        if name not in wanted:
            return f"'{name}' is not part of it"
        if found[name].shape != wanted[name].shape:
            return f"'{name}' is {tuple(found[name].shape)} where the model has {tuple(wanted[name].shape)}"
    return ""


def fingerprint(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def fingerprint_of(path: Path) -> dict[str, Any]:
    """The same of what is in a file, which may be larger than memory."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}
