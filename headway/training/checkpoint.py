"""Checkpoints: whole or not there.

    checkpoints/step-00012000/   model.safetensors  optimizer.safetensors  state.json  manifest.json (written last)

A checkpoint is written into a temporary folder, synced, and renamed; its manifest holds the size and SHA-256 of every
file, and one without a manifest does not exist. Nothing in it is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from headway.errors import RunError
from headway.files import sync_directory, write_bytes, write_json
from headway.training.optimizer import Optimizer

MANIFEST = "manifest.json"
NUMBERED = f"step-{'[0-9]' * 8}"


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


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "checkpoints"

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The checkpoints that exist, oldest first."""
        found = self.directory.glob(f"{NUMBERED}/{MANIFEST}")
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def save(self, model: nn.Module, optimizer: Optimizer | None, state: State) -> None:
        """Write the checkpoint of `state.step`, then let go of all but it and the best one."""
        temporary = self.directory / f".{self.path(state.step).name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            files = {"model.safetensors": save(weights(model))}
            if optimizer is not None:
                files["optimizer.safetensors"] = save(contiguous(optimizer.state()))
            files["state.json"] = json.dumps(asdict(state), indent=1).encode()
            for name, data in files.items():
                write_bytes(temporary / name, data)
            write_json(temporary / MANIFEST, {name: fingerprint(data) for name, data in files.items()})
            sync_directory(temporary)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.install(temporary)
        self.prune({state.step, state.best_step})

    def install(self, temporary: Path) -> None:
        """Give a whole checkpoint its name. At any moment it or the one that had the name before is on disk."""
        final = self.directory / temporary.name.removeprefix(".").removesuffix(".tmp")
        self.remove(final)
        os.replace(temporary, final)
        sync_directory(self.directory)

    def remove(self, folder: Path) -> None:
        (folder / MANIFEST).unlink(missing_ok=True)  # from here on it does not exist
        shutil.rmtree(folder, ignore_errors=True)

    def prune(self, kept: set[int | None]) -> None:
        for step in self.steps():
            if step not in kept:
                self.remove(self.path(step))

    def clear_remains(self) -> None:
        """Finish or remove what a killed process left behind. Only the owner of the run may call this."""
        for folder in self.directory.glob(NUMBERED):
            if not (folder / MANIFEST).exists():
                self.remove(folder)
        for temporary in self.directory.glob(f".{NUMBERED}.tmp"):
            if (temporary / MANIFEST).exists():  # it was whole, only its name was missing
                self.install(temporary)
            else:
                self.remove(temporary)

    def latest(self, say: Callable[[str], None], among: Container[int | None] | None = None) -> int | None:
        """The newest checkpoint whose files are what its manifest says; others are named and passed over."""
        for step in reversed(self.steps()):
            if among is not None and step not in among:
                continue
            damage = self.damage(step)
            if damage is None:
                return step
            say(f"{self.path(step)}: {damage}; passed over")
        return None

    def damage(self, step: int) -> str | None:
        folder = self.path(step)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if not isinstance(manifest, dict) or not {"model.safetensors", "state.json"} <= manifest.keys():
                return f"{MANIFEST} is damaged"
            for name, wanted in manifest.items():
                if fingerprint((folder / name).read_bytes()) != wanted:
                    return f"{name} is damaged"
        except ValueError:
            return f"{MANIFEST} is damaged"
        except OSError as error:
            return f"cannot be read ({error})"
        return None

    def require_tokenizer(self, step: int | None, fingerprint: str) -> None:
        """The tokenizer beside the weights must be the one they were trained with; `step` is a whole checkpoint."""
        trained = self.state(step).tokenizer if step is not None else fingerprint
        if trained != fingerprint:
            raise RunError(
                f"{self.directory.parent}: tokenizer.json ({fingerprint}) is not the one these weights were "
                f"trained with ({trained}); put the right file back, or train again into another directory"
            )

    def state(self, step: int) -> State:
        return State(**json.loads((self.path(step) / "state.json").read_text()))

    def load_model(self, step: int, model: nn.Module) -> None:
        """Put the weights of `step` into `model`."""
        tensors = load_file(self.path(step) / "model.safetensors")
        mismatch = describe_mismatch(tensors, weights(model))
        if mismatch:
            raise RunError(f"{self.path(step)}: these weights are of another model: {mismatch}")
        model.load_state_dict(tensors, strict=False)

    def load_optimizer(self, step: int, optimizer: Optimizer) -> None:
        optimizer.load(load_file(self.path(step) / "optimizer.safetensors"))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the state dict once, under its first name: what `load_state_dict` needs for the same model."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return contiguous(dict(model.named_parameters()) | buffers)


def contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


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
