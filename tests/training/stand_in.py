"""A stand-in for a CUDA GPU, so that the captured step is tested where there is none.

Its memory is that of the CPU, and its graphs are lists of operations: within `torch.cuda.graph` every operation is
noted with the tensors that it read and made, and `replay` carries them out again, into the same memory. So what holds
of a real graph holds here: what Python decided while it was captured stays decided, and who asks for a number fails.
Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from headway.training import device as devices
from headway.training import engines, feed, loop
from headway.training import optimizer as optimizers
from headway.training.muon import BatchedMuon

ASKS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []  # operation, what it is given, what it makes

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():  # as they were noted
            for operation, given, options, made in self.calls:
                again = operation(*given, **options)
                for place, value in zip(made, tree_leaves(again), strict=bool(made)):
                    if isinstance(place, torch.Tensor):
                        place.copy_(value)


class Noting(TorchDispatchMode):
    """Notes operations for a graph; `undo` puts back what they changed."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.invalid = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ASKS:
            self.invalid = True
            raise RuntimeError(
                "CUDA error: operation not permitted when stream is capturing\n"
                "Search for `cudaErrorStreamCaptureUnsupported' in the documentation for more information."
            )
        written = (each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)
        for tensor in tree_leaves([given for given, changes in zip(args, written, strict=False) if changes]):
            storage = tensor.untyped_storage()
            self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        given = as_they_are((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if torch.Tag.inplace_view not in func.tags:  # which gives a tensor another shape, and was done once
            aliases = any(each.alias_info is not None for each in func._schema.returns)  # a view, or changed in place
            self.graph.calls.append((func, *given, [] if aliases else as_they_are(tree_leaves(result))))
        return result

    def undo(self) -> None:
        for storage, copy in self.before.values():
            storage.copy_(copy)


def as_they_are(tree: Any) -> Any:
    """The tensors in it under other names, which keep their shapes."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


class Stream:
    """`torch.cuda.Stream`, and what waits for it: everything is done in order here."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


class Generator:
    """`torch.cuda.default_generators[0]`: one that a broken capture left behind draws nothing."""

    def __init__(self) -> None:
        self.capturing = False

    def clone_state(self) -> Generator:
        return Generator()

    def graphsafe_set_state(self, other: Generator) -> None:
        self.capturing = other.capturing

    def manual_seed(self, seed: int) -> torch.Generator:
        if self.capturing:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return torch.default_generator.manual_seed(seed)


class Event:
    """`torch.cuda.Event`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


@contextmanager
def capturing(graph: Graph, **options: Any) -> Iterator[None]:
    """`torch.cuda.graph`: nothing happens before the graph is replayed. One that broke off cannot be ended."""
    assert options == {"capture_error_mode": "thread_local"}
    noting, generator = Noting(graph), torch.get_rng_state()
    try:
        with noting:
            yield
    finally:
        noting.undo()
        torch.set_rng_state(generator)
        if noting.invalid:
            torch.cuda.default_generators[0].capturing = True
            raise RuntimeError("operation failed due to a previous error during capture")


def on_the_device(optimizer: optimizers.Optimizer, settings: Any) -> optimizers.Optimizer:
    """As it is built for a GPU: rates are tensors, and nothing of its step is decided in Python."""
    if settings.fused != "off":
        for group in (group for part in optimizer.parts for group in part.param_groups):
            group["lr"] = torch.tensor(group["lr"])
        optimizer.capturable = True
    return optimizer


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let the CPU of this test pass for a GPU where steps are captured."""
    for name, instead in {
        "CUDAGraph": Graph,
        "graph": capturing,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": Stream,
        "Event": Event,
        "synchronize": lambda *device: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "default_generators": [generator := Generator()],
        "current_device": lambda: 0,
        "memory_reserved": lambda device: 0,
        "memory_allocated": lambda device: 0,
        "mem_get_info": lambda device: (1 << 30, 1 << 30),
    }.items():
        patch.setattr(torch.cuda, name, instead)
    patch.setattr(torch, "manual_seed", generator.manual_seed)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    patch.setattr(torch, "compile", lambda function, **options: function)
    gpu, choose, build, plan = torch.device("cuda"), engines.choose, optimizers.build_optimizer, loop.Trainer.plan
    patch.setattr(engines, "choose", lambda settings, device, *rest: choose(settings, gpu, *rest))
    patch.setattr(engines, "choose_place", lambda streams, device, place: feed.choose_place(streams, gpu, place))
    patch.setattr(devices, "choose_precision", lambda device, wanted, *rest: (precision(wanted), "as on a GPU"))
    patch.setattr(optimizers, "muon", BatchedMuon)
    patch.setattr(
        optimizers,
        "build_optimizer",
        lambda model, settings, *rest: on_the_device(build(model, settings, *rest), settings),
    )

    def without_looking(self: loop.Trainer, stage: Any) -> loop.Plan:
        made = plan(self, stage)
        made.at_hand = False
        return made

    patch.setattr(loop.Trainer, "plan", without_looking)


def precision(wanted: str) -> torch.dtype:
    return torch.bfloat16 if wanted == "auto" else getattr(torch, wanted)
