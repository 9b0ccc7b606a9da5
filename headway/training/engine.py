"""How a step is carried out: batches, gradients, clipping, update.

`Plain` runs it operation by operation, on any device. On a CPU it cuts a batch by length, and padding is not computed.
A step whose loss or gradient is not finite changes no weight.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.models import Model
from headway.tasks.base import Batch
from headway.training import device as devices
from headway.training.optimizer import Optimizer
from headway.training.order import mix
from headway.training.parts import during
from headway.training.streams import Stream


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

    @abstractmethod
    def step(self, step: int, rate: float) -> Outcome:
        """Step number `step` of the stage, at `rate` times the peak learning rate."""


@dataclass
class Plain(Engine):
    model: Model
    streams: Sequence[Stream]
    optimizer: Optimizer
    seed: int
    precision: torch.dtype
    clip: float
    accumulate: int = 0  # pieces a stream's rows are cut into; 0: chosen by the device

    def step(self, step: int, rate: float) -> Outcome:
        device = next(self.model.parameters()).device
        with during("making batches"):
            batches = [(stream, stream.batch(step)) for stream in self.streams if stream.takes_part(step)]
        torch.manual_seed(mix(self.seed, "dropout", step))
        self.optimizer.set_rate(rate)
        total, positions = torch.zeros((), device=device), 0
        losses = {}
        with devices.autocast(device, self.precision):
            for stream, batch in batches:
                with during("making batches"):
                    pieces = batch.pieces(self.pieces(batch.tokens, device))
                positions += sum(piece.inputs.numel() for piece in pieces)
                losses[stream.name] = self.gradients(pieces, batch.learned(), stream, device)
                total += stream.weight * losses[stream.name]
        with during("clipping"):
            self.optimizer.unscale()
            norm = clip_gradients(self.model, self.clip)
        with during("optimizer"):
            self.optimizer.step_if_finite(total, norm)
            self.optimizer.zero_grad()
        return Outcome(sum(batch.tokens for _, batch in batches), positions, total, norm, losses)

    def gradients(self, pieces: Sequence[Batch], learned: int, stream: Stream, device: torch.device) -> Tensor:
        """Add the gradients of a stream's weighted mean loss a token, piece by piece; returns the mean, not weighted.

        Each piece's loss is a sum, divided by the token count of the whole batch: never a mean of means.
        """
        learned = max(1, learned)
        total = torch.zeros((), device=device)
        for piece in pieces:
            there = piece.to(device)
            with during("forward"):
                summed = stream.losses(self.model, there).sum()
            with during("backward"):
                self.optimizer.backward(summed * (stream.weight / learned))
            total += summed.detach()
        return total / learned

    def pieces(self, tokens: int, device: torch.device) -> int:
        return pieces_of(tokens, self.accumulate, device)


def pieces_of(tokens: int, accumulate: int, device: torch.device) -> int:
    """Into how many pieces a stream's rows are cut: on a CPU narrow ones save padding, a GPU wants one large one."""
    if accumulate or device.type != "cpu":
        return max(1, accumulate)
    return max(1, min(8, tokens // 400))


def clip_gradients(model: nn.Module, most: float) -> Tensor:
    """Scale the gradient down to norm `most` (0: not at all); returns the norm it had."""
    return nn.utils.clip_grad_norm_(model.parameters(), most or math.inf)
