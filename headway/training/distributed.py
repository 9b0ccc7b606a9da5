"""Training on many devices: the step of one process, shared among several.

    every process draws the same rows and makes its own run of them
    loss      Σ_streams weight · (sum over its own tokens ÷ the learned tokens of all processes)
    gradient  the sum over all processes, exchanged once a step, whatever the number of pieces

So a step of N processes is the step of one with the same rows, but for the order of additions and for what dropout
drops. How the model lies on the processes is a `Layout`:

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.errors import SettingsError, UserError
from headway.files import write_synced
from headway.models import CausalModel, Model
from headway.ranks import ALONE, Ranks
from headway.tasks.base import IGNORE, Batch, Task
from headway.training import device as devices
from headway.training import engines, sharded
from headway.training.checkpoint import Checkpoints, State, Writer, fingerprint, or_nothing, tensors_of
from headway.training.engine import Engine, Outcome, Plain, clip_gradients
from headway.training.optimizer import Optimizer
from headway.training.order import mix
from headway.training.parts import during
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
    ) -> Engine:
        """What carries out the steps of a stage."""
        return engines.build(self.model, streams, optimizer, seed, precision, settings, say)

    def describe_engine(self, settings: Any, device: torch.device) -> str:
        return engines.choose(settings, device, self.model)[1]

    def evaluate(self, task: Task) -> dict[str, Any]:
        """The model's scores; every process gets all of them."""
        return task.evaluate(self.model)

    def writer(self, checkpoints: Checkpoints) -> Writer:
        return Writer(checkpoints)

    def at_hand(self) -> Model:
        """A whole model of this kind in this process, to count what a row costs."""
        return self.model


class Several(Layout, ABC):
    """The model on several processes."""

    forward: nn.Module  # what a batch goes through

    def engine(
        self,
        streams: Sequence[Stream],
        optimizer: Optimizer,
        seed: int,
        precision: torch.dtype,
        settings: Any,
        say: Callable[[str], None],
    ) -> Engine:
        plain = Plain(self.model, streams, optimizer, seed, precision, settings.clip, settings.accumulate)
        return Together(plain, self)

    def describe_engine(self, settings: Any, device: torch.device) -> str:
        return "operation by operation, as one process cannot capture what it exchanges with others"

    @abstractmethod
    def exchanging(self, now: bool) -> AbstractContextManager[None]:
        """Within it, gradients are exchanged if it is time, else only added up."""


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
        yield

    def evaluate(self, task: Task) -> dict[str, Any]:
        """On a whole copy in every process: what generates makes as many passes as it needs, and waits for nobody."""
        whole = self.whole()
        scores = task.evaluate(whole, among=self.ranks)
        whole.cpu()
        return scores

    @torch.no_grad()
    def whole(self) -> Model:
        """The weights, put together in every process."""
        targets = tensors_of(self.blank.to(self.device))
        for name, tensor in tensors_of(self.model).items():
            targets[name].copy_(full(tensor))
        return self.blank

    def writer(self, checkpoints: Checkpoints) -> Writer:
        return PartsWriter(checkpoints, self.ranks)

    def at_hand(self) -> Model:
        return self.blank


@dataclass
class Together(Engine):
    """A step that several processes take together, each with its own rows."""

    plain: Plain  # what a process needs for a step by itself
    layout: Several

    def step(self, step: int, rate: float) -> Outcome:
        plain, ranks, optimizer = self.plain, self.layout.ranks, self.plain.optimizer
        device = next(plain.model.parameters()).device
        with during("making batches"):
            streams = [stream for stream in plain.streams if stream.takes_part(step)]
            batches, own = zip(*(self.own(stream, step) for stream in streams), strict=True)
            counted = [[tokens, batch.learned()] for tokens, batch in zip(own, batches, strict=True)]
            counts = ranks.total(torch.tensor(counted))  # (streams, 2): of all processes
            learned = counts[:, 1].clamp(min=1).tolist()
            pieces = [
                (place, piece)
                for place, (stream, batch) in enumerate(zip(streams, batches, strict=True))
                for piece in batch.pieces(self.pieces(stream, step, int(counts[place, 0]), device))
            ]
        torch.manual_seed(mix(plain.seed, "dropout", step, *([] if ranks.leads else [ranks.rank])))
        optimizer.set_rate(rate)
        sums = torch.zeros(len(streams), device=device)  # of the losses of each stream's tokens
        with devices.autocast(device, plain.precision):
            for number, (place, piece) in enumerate(pieces, 1):
                with self.layout.exchanging(number == len(pieces)):
                    share = streams[place].weight / learned[place]
                    sums[place] += self.gradients(streams[place], piece.to(device), share)
        means = [total / count for total, count in zip(ranks.total(sums).unbind(), learned, strict=True)]
        loss = torch.stack([stream.weight * mean for stream, mean in zip(streams, means, strict=True)]).sum()
        with during("clipping"):
            optimizer.unscale()
            norm = full(clip_gradients(plain.model, plain.clip))
        with during("optimizer"):
            optimizer.step_if_finite(loss, norm)
            optimizer.zero_grad()
        losses = {stream.name: mean for stream, mean in zip(streams, means, strict=True)}
        positions = int(ranks.total(torch.tensor(sum(piece.inputs.numel() for _, piece in pieces))))
        return Outcome(int(counts[:, 0].sum()), positions, loss, norm, losses)

    def gradients(self, stream: Stream, piece: Batch, share: float) -> Tensor:
        """Add the gradients of the piece's summed loss times `share`; returns the sum."""
        with during("forward"):
            summed = stream.losses(self.layout.forward, piece).sum()
        with during("backward"):
            self.plain.optimizer.backward(summed * share)
        return summed.detach()

    def own(self, stream: Stream, step: int) -> tuple[Batch, int]:
        """(this process's rows of a stream, their tokens). Where there are fewer rows than processes, it may have none:
        then it takes part with a row that teaches nothing."""
        rows, noise = stream.draw(step)
        part = self.layout.ranks.part(len(rows))
        if part.start < part.stop:
            batch = stream.task.make(rows[part], noise[..., part])
            return batch, batch.tokens
        batch = stream.task.make(rows[:1], noise[..., :1])
        return replace(batch, targets=torch.full_like(batch.targets, IGNORE)), 0

    def pieces(self, stream: Stream, step: int, tokens: int, device: torch.device) -> int:
        """Into how many pieces the rows are cut: as many in every process, and none without a row."""
        ranks = self.layout.ranks
        fewest = max(1, len(stream.order.rows(step - stream.begin)) // ranks.size)
        return min(fewest, self.plain.pieces(tokens // ranks.size, device))


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
            manifest = dict(ranks.gather([(path.name, fingerprint(path.read_bytes())) for path in mine]))
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


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that the processes hold in parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
