"""How a step is carried out: batches, gradients, clipping, update.

    loss      Σ_streams weight · (sum over its own tokens ÷ the learned tokens of all processes)
    gradient  the sum over all processes, exchanged once a step, whatever the number of pieces

`Plain` runs it operation by operation, on any device, alone or among several processes that each take their share of
the rows. On a CPU it cuts a batch by length, and padding is not computed. A step whose loss or gradient is not finite
changes no weight.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.models import Model
from headway.ranks import ALONE, Ranks
from headway.tasks.base import IGNORE, Batch
from headway.training import device as devices
from headway.training.optimizer import Optimizer
from headway.training.order import mix
from headway.training.parts import during
from headway.training.sharded import full
from headway.training.streams import Stream

Block = Callable[[], AbstractContextManager[object]]


@dataclass
class Outcome:
    """What a step did. The tensors are still on the device, and perhaps still being computed."""

    tokens: int  # inputs that were not padding
    positions: int  # inputs that were computed, padding included
    loss: Tensor
    norm: Tensor
    losses: dict[str, Tensor]  # of each stream that took part, its mean loss a token, not weighted


class Engine(ABC):
    """Carries out the steps of one stage."""

    def prepare(self, step: int, undisturbed: Block = nullcontext) -> None:  # noqa: B027 - most have nothing to do
        """Get ready for step number `step` of the stage. It may take long, changes nothing, and may be broken off by an
        exception at any moment but inside `undisturbed`."""

    @abstractmethod
    def step(self, step: int, rate: float) -> Outcome:
        """Step number `step` of the stage, at `rate` times the peak learning rate."""


class Peers:
    """The processes that take a step together, seen by one of them. This one has none beside it."""

    ranks: Ranks = ALONE
    forward: nn.Module  # what a batch goes through

    def __init__(self, model: nn.Module) -> None:
        self.forward = model

    def exchanging(self, now: bool) -> AbstractContextManager[None]:
        """Within it, gradients are exchanged if it is time, else only added up."""
        return nullcontext()


@dataclass
class Plain(Engine):
    model: Model
    streams: Sequence[Stream]
    optimizer: Optimizer
    seed: int
    precision: torch.dtype
    clip: float
    accumulate: int = 0  # pieces a stream's rows are cut into; 0: chosen by the device
    peers: Peers = None  # type: ignore[assignment]  # none beside this process

    def __post_init__(self) -> None:
        self.peers = self.peers or Peers(self.model)

    def step(self, step: int, rate: float) -> Outcome:
        peers = self.peers
        ranks, device = peers.ranks, next(self.model.parameters()).device
        with during("making batches"):
            streams = [stream for stream in self.streams if stream.takes_part(step)]
            own = [Own.of(stream, step, ranks) for stream in streams]
            counted = torch.tensor([[each.tokens, each.batch.learned()] for each in own])
            tokens, learned = ranks.total(counted).unbind(1)  # (streams,) each: of all processes
            learned = learned.clamp(min=1)
            pieces = [
                (place, piece)
                for place, each in enumerate(own)
                for piece in each.batch.pieces(self.pieces(each.fewest, int(tokens[place]) // ranks.size, device))
            ]
        torch.manual_seed(mix(self.seed, "dropout", step, *([] if ranks.leads else [ranks.rank])))
        self.optimizer.set_rate(rate)
        sums = torch.zeros(len(streams), device=device)  # of the losses of each stream's tokens
        with devices.autocast(device, self.precision):
            for number, (place, piece) in enumerate(pieces, 1):
                with peers.exchanging(number == len(pieces)):
                    share = streams[place].weight / int(learned[place])
                    sums[place] += self.gradients(peers.forward, streams[place], piece.to(device), share)
        summed = zip(ranks.total(sums).unbind(), learned.tolist(), strict=True)
        means = [each / count for each, count in summed]  # by numbers at hand: nothing waits for a device
        loss = sum(
            (stream.weight * mean for stream, mean in zip(streams, means, strict=True)), torch.zeros((), device=device)
        )
        with during("clipping"):
            self.optimizer.unscale()
            norm = clip_gradients(self.model, self.clip)
        with during("optimizer"):
            self.optimizer.step_if_finite(loss, norm)
            self.optimizer.zero_grad()
        positions = int(ranks.total(torch.tensor(sum(piece.inputs.numel() for _, piece in pieces))))
        losses = dict(zip((stream.name for stream in streams), means, strict=True))
        return Outcome(int(tokens.sum()), positions, loss, norm, losses)

    def gradients(self, model: nn.Module, stream: Stream, piece: Batch, share: float) -> Tensor:
        """Add the gradients of the piece's summed loss times `share`; returns the sum.

        The share is the stream's weight over the token count of its whole batch: never a mean of means.
        """
        with during("forward"):
            summed = stream.losses(model, piece).sum()
        with during("backward"):
            self.optimizer.backward(summed * share)
        return summed.detach()

    def pieces(self, rows: int, tokens: int, device: torch.device) -> int:
        """Into how many pieces a stream's rows are cut: as many in every process, and none without a row."""
        return min(rows, pieces_of(tokens, self.accumulate, device))


class Own(NamedTuple):
    """A process's share of a stream's rows in a step."""

    batch: Batch
    tokens: int
    fewest: int  # rows that any of the processes has

    @classmethod
    def of(cls, stream: Stream, step: int, ranks: Ranks) -> Own:
        """Where there are fewer rows than processes, it may have none: then it takes part with a row that teaches
        nothing."""
        rows, noise = stream.draw(step)
        part, fewest = ranks.part(len(rows)), max(1, len(rows) // ranks.size)
        if part.start < part.stop:
            batch = stream.task.make(rows[part], noise[..., part])
            return cls(batch, batch.tokens, fewest)
        batch = stream.task.make(rows[:1], noise[..., :1])
        return cls(replace(batch, targets=torch.full_like(batch.targets, IGNORE)), 0, fewest)


def pieces_of(tokens: int, accumulate: int, device: torch.device) -> int:
    """Into how many pieces a stream's rows are cut: on a CPU narrow ones save padding, a GPU wants one large one."""
    if accumulate or device.type != "cpu":
        return max(1, accumulate)
    return max(1, min(8, tokens // 400))


def clip_gradients(model: nn.Module, most: float) -> Tensor:
    """Scale the gradient down to norm `most` (0: not at all); returns the norm it had."""
    return full(nn.utils.clip_grad_norm_(model.parameters(), most or math.inf))
