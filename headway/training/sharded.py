"""Checkpoints in parts: every process writes the rows of each tensor that it holds, any number of them can read.

    checkpoints/step-00012000/   shard-00001-….safetensors  shard-00002-….safetensors  …  state.json  manifest.json

Planning and resharding are those of `torch.distributed.checkpoint`; the parts are safetensors, whose headers say where
they belong, so that no pickle is needed. Whole files (`model.safetensors`) are read the same way, as one part.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from headway.files import named

MARK = "shard-"  # what the names of parts begin with


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether this process holds only a part of each of them (a DTensor)."""
    return any(hasattr(tensor, "full_tensor") for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; all of it where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that the processes hold in parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def has_parts(folder: Path) -> bool:
    return any(folder.glob(f"{MARK}*"))


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write what this process holds; all processes of the run call it together."""
    from torch.distributed import checkpoint

    try:
        checkpoint.save(tensors, storage_writer=checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except checkpoint.CheckpointException as error:  # the same in every process
        cause, _ = next(iter(error.failures.values()))
        with named(folder):
            raise cause from None


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The shape and type of every whole tensor in a checkpoint."""
    from torch.distributed import checkpoint

    stored = checkpoint.HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (each.size, each.properties.dtype) for name, each in stored.items()}  # type: ignore[union-attr]


def read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors, whole or sharded, by their names. A process reads what it needs and waits for no other."""
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        reader = checkpoint.HuggingFaceStorageReader(str(folder))
        checkpoint.load({**tensors}, storage_reader=reader, no_dist=True)
