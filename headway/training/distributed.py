"""Training on many devices: the step of one process, shared among several.

Every process draws the same rows and makes its own run of them; losses are divided by the learned tokens of all, and
gradients are summed (`headway.training.engine`). So a step of N processes is the step of one with the same rows, but
for the order of additions and for what dropout drops. How the model lies on the processes is a `Layout`:

    Layout       one process has it all
    Replicated   each has all of it, and gradients are summed (DistributedDataParallel)
    Sharded      each has 1/N of every weight, gradient and optimizer state; a block's weights are put together when
                 its turn comes (FSDP2, `fully_shard`; Zhao et al. 2023, after ZeRO, Rajbhandari et al. 2020)

Shapes: B rows, T tokens, N processes.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.errors import SettingsError, UserError
from headway.files import write_synced
from headway.models import CausalModel, Model
from headway.ranks import ALONE, Ranks
from headway.tasks.base import Task
from headway.training import device as devices
from headway.training import engines, sharded
from headway.training.checkpoint import Checkpoints, State, Writer, fingerprint, fingerprint_of, or_nothing, tensors_of
from headway.training.engine import Engine, Peers, Plain
from headway.training.optimizer import Optimizer
from headway.training.streams import Stream

NAMES = ("auto", "ddp", "fsdp")


class Layout:
    """The whole model in one process."""

    def __init__(self, model: Model, ranks: Ranks = ALONE) -> None:
        self.model, self.ranks = model, ranks

    def engine(
        self,
        streams: Sequence[Stream],
        optimizer: Optimizer,
        seed: int,
        precision: torch.dtype,
        settings: Any,
        say: Callable[[str], None],
    ) -> tuple[Engine, list[str]]:
        """(what carries out the steps of a stage; how it works and why, in words)."""
        return engines.build(self.model, streams, optimizer, seed, precision, settings, say)

    def evaluate(self, task: Task) -> dict[str, Any]:
        """The model's scores; every process gets all of them."""
        return task.evaluate(self.model)

    def writer(self, checkpoints: Checkpoints) -> Writer:
        return Writer(checkpoints)

    def at_hand(self) -> Model:
        """A whole model of this kind in this process, to count what a row costs."""
        return self.model


class Several(Layout, Peers):
    """The model on several processes, which take every step together."""

    def engine(
        self,
        streams: Sequence[Stream],
        optimizer: Optimizer,
        seed: int,
        precision: torch.dtype,
        settings: Any,
        say: Callable[[str], None],
    ) -> tuple[Engine, list[str]]:
        words = ["operation by operation, as one process cannot capture what it exchanges with others"]
        words += [
            f"training.{name} = {asked} is for one process"
            for name, asked in (("engine", settings.engine), ("batches", settings.batches))
            if asked not in ("auto", "plain")
        ]
        return Plain(self.model, streams, optimizer, seed, precision, settings.clip, settings.accumulate, self), words


class Replicated(Several):
    """Every process has the whole model, and the same one."""

    def __init__(self, model: Model, ranks: Ranks) -> None:
        super().__init__(model, ranks)
        device = next(model.parameters()).device
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # torch 2.11 has no other
            self.forward = nn.parallel.DistributedDataParallel(
                model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # they never change
            )
        self.forward.register_comm_hook(None, lambda state, bucket: summed(bucket))

    def exchanging(self, now: bool) -> AbstractContextManager[None]:
        return nullcontext() if now else self.forward.no_sync()  # type: ignore[operator]

    def evaluate(self, task: Task) -> dict[str, Any]:
        return task.evaluate(self.model, among=self.ranks)

    def writer(self, checkpoints: Checkpoints) -> Writer:
        return Writer(checkpoints) if self.ranks.leads else Bystander(checkpoints)


class Sharded(Several):
    """Every process has its rows of every weight."""

    def __init__(self, model: Model, ranks: Ranks, device: torch.device, precision: torch.dtype) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.device = device
        self.blank = copy.deepcopy(model)  # for evaluations
        mesh = init_device_mesh(device.type, (ranks.size,))
        low = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
        policy = low if precision != torch.float32 else MixedPrecisionPolicy()
        blocks = model.blocks if isinstance(model, CausalModel) else ()  # others reach into their layers
        for module in (*blocks, model):  # type: ignore[misc]
            part = fully_shard(module, mesh=mesh, mp_policy=policy)  # moves it to the device
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        super().__init__(model, ranks)
        self.forward = model

    @contextmanager
    def exchanging(self, now: bool) -> Iterator[None]:
        self.model.set_requires_gradient_sync(now)  # type: ignore[operator]
        self.model.set_is_last_backward(now)  # type: ignore[operator]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # a view, which nobody changes in place
            yield

    def evaluate(self, task: Task) -> dict[str, Any]:
        """On a whole copy in every process: what generates makes as many passes as it needs, and waits for nobody."""
        whole = self.whole()
        try:
            return task.evaluate(whole, among=self.ranks)
        finally:
            whole.cpu()

    @torch.no_grad()
    def whole(self) -> Model:
        """The weights, put together in every process."""
        targets = tensors_of(self.blank.to(self.device))
        for name, tensor in tensors_of(self.model).items():
            targets[name].copy_(sharded.full(tensor))
        return self.blank

    def writer(self, checkpoints: Checkpoints) -> Writer:
        return PartsWriter(checkpoints, self.ranks)

    def at_hand(self) -> Model:
        return self.blank


class Bystander(Writer):
    """The writer of a process whose weights another one saves."""

    def save(self, model: nn.Module, optimizer: Optimizer | None, state: State, keep: int) -> None:
        pass


class PartsWriter(Writer):
    """Every process writes what it holds; the first one seals the checkpoint. Training waits for it."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks) -> None:
        super().__init__(checkpoints)
        self.ranks = ranks

    def save(self, model: nn.Module, optimizer: Optimizer | None, state: State, keep: int) -> None:
        ranks, checkpoints = self.ranks, self.checkpoints
        folder = ranks.led(lambda: checkpoints.begin(state.step))

        def seal() -> None:
            data = json.dumps(asdict(state), indent=1).encode()
            write_synced(folder / "state.json", data)
            checkpoints.seal(folder, manifest | {"state.json": fingerprint(data)})

        with or_nothing(folder) if ranks.leads else nullcontext():
            sharded.write(folder, tensors_of(model) | (optimizer.state() if optimizer is not None else {}))
            mine = folder.glob(f"{sharded.MARK}{ranks.rank + 1:05d}-*")
            manifest = dict(ranks.gather([(path.name, fingerprint_of(path)) for path in mine]))
            ranks.led(seal)
        ranks.led(lambda: checkpoints.publish(folder, state.step, keep))


def arrange(
    model: Model, ranks: Ranks, device: torch.device, stages: Sequence[Any], parallel: str
) -> tuple[Layout, str]:
    """(how the model lies on the processes; the same in words, to be added to a line). `stages` are their settings."""
    if ranks.size == 1:
        return Layout(model.to(device)), f"; one process needs no {parallel}" if parallel != "auto" else ""
    if device.type == "cuda" and ranks.local >= torch.cuda.device_count():
        raise UserError(
            f"process {ranks.local} of this machine has no GPU: there are {torch.cuda.device_count()}; "
            f"start as many with torchrun --nproc-per-node, or train on the CPU with training.device=cpu"
        )
    if device.type == "mps":
        raise UserError("several processes cannot share this machine's GPU; set training.device=cpu, or start one")
    if parallel != "fsdp":
        why = "as asked" if parallel == "ddp" else "the default; training.parallel = fsdp shards it"
        return Replicated(model.to(device), ranks), f"; {ranks.size} processes, each with the whole model (ddp, {why})"
    width = model.settings.width
    precisions = {devices.choose_precision(device, stage.precision, width)[0] for stage in stages}
    if len(precisions) > 1:
        raise SettingsError(["pretraining.training.precision: with fsdp, the whole run has one training.precision"])
    precision = precisions.pop()
    if precision == torch.float16:
        raise SettingsError(["training.precision = 'float16': fsdp has no loss scale; use 'bfloat16', or ddp"])
    layout = Sharded(model, ranks, device, precision)
    return layout, f"; {ranks.size} processes, each with 1/{ranks.size} of the model (fsdp, as asked)"


def summed(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Exchange a bucket of gradients: their sum, where DDP by itself takes the mean."""
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])
