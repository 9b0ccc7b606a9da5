"""How a step is carried out: batches, gradients, clipping, update.

`Plain` runs it operation by operation, on any device. On a CPU it cuts a batch by length, and padding is not computed.

`Captured` is for one CUDA GPU. The forward and backward passes are compiled, the whole step up to the optimizer's
update is captured once as a CUDA graph, and from then on a step is one replay. Batches are made on the device, many
steps at a time and on a stream of their own, so that no Python work and no waiting stands between two steps. What
changes from step to step lives on the device: the batch, the learning rate, the seed of dropout.

Both see the same rows, corrupted in the same way. A step whose gradient is not finite changes no weight.

Shapes: B rows, T tokens, N steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headway.files import one_line
from headway.memory import is_out_of_memory
from headway.models import CausalModel
from headway.tasks.base import IGNORE, Batch
from headway.training import device as devices
from headway.training.optimizer import Optimizer
from headway.training.order import mix
from headway.training.parts import during
from headway.training.streams import Stream, by_length, token_losses

NAMES = ("auto", "plain", "graph", "compiled")
AHEAD = 32  # steps whose batches are made at once on a GPU
WARM_UP = 3  # steps before a capture: compilation, workspaces, the optimizer's state
PAYS_FROM = 1000  # steps from which compiling (about half a minute) is worth it


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
    model: CausalModel
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
                losses[stream.name] = self.gradients(pieces, batch.learned(), stream.weight, device)
                total += stream.weight * losses[stream.name]
        with during("clipping"):
            self.optimizer.unscale()
            norm = clip_gradients(self.model, self.clip)
        with during("optimizer"):
            self.optimizer.step_unless_infinite(norm)
            self.optimizer.zero_grad()
        return Outcome(sum(batch.tokens for _, batch in batches), positions, total, norm, losses)

    def gradients(self, pieces: Sequence[Batch], learned: int, weight: float, device: torch.device) -> Tensor:
        """Add the gradients of a stream's weighted mean loss a token, piece by piece; returns the mean, not weighted.

        Each piece's loss is a sum, divided by the token count of the whole batch: never a mean of means.
        """
        learned = max(1, learned)
        total = torch.zeros((), device=device)
        for piece in pieces:
            there = piece.to(device)
            with during("forward"):
                summed = token_losses(self.model, there.inputs, there.targets).sum()
            with during("backward"):
                self.optimizer.backward(summed * (weight / learned))
            total += summed.detach()
        return total / learned

    def pieces(self, tokens: int, device: torch.device) -> int:
        """On a CPU narrow pieces save padding; a GPU wants one large one."""
        if self.accumulate or device.type != "cpu":
            return max(1, self.accumulate)
        return max(1, min(8, tokens // 400))


class Captured(Engine):
    def __init__(
        self,
        model: CausalModel,
        streams: Sequence[Stream],
        optimizer: Optimizer,
        seed: int,
        precision: torch.dtype,
        clip: float,
        accumulate: int,
        compiled: bool,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.optimizer, self.seed, self.clip, self.say = model, optimizer, seed, clip, say
        self.accumulate = max(1, accumulate)
        self.device = next(model.parameters()).device
        self.streams = streams
        self.losses: Callable[..., Tensor] = InLowPrecision(model, precision).losses
        if compiled:
            self.losses = torch.compile(self.losses, fullgraph=True, dynamic=False, options=compiler_options())
        self.feed = Feed(streams, self.device)
        self.active: list[Stream] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def step(self, step: int, rate: float) -> Outcome:
        active = [stream for stream in self.streams if stream.takes_part(step)]
        if active != self.active:
            self.capture(active, step)
        with during("making batches"):
            tokens = self.feed.fill(step, self.active, self.buffers)
        torch.cuda.manual_seed(mix(self.seed, "dropout", step))
        self.optimizer.set_rate(rate)
        assert self.graph is not None
        with during("replay"):
            self.graph.replay()
        losses = dict(zip(self.names, self.means.clone().unbind(), strict=True))
        return Outcome(tokens, self.positions, self.loss.clone(), self.norm.clone(), losses)

    def capture(self, active: list[Stream], step: int) -> None:
        """Record the step for these streams. It is tried out first; what that changes is put back."""
        self.active = active
        self.graph = None
        self.feed.forget()
        self.buffers = [Buffer(group, self.device) for group in by_length(active)]
        self.names = [stream.name for buffer in self.buffers for stream in buffer.streams]
        self.positions = sum(buffer.inputs.numel() for buffer in self.buffers)
        self.feed.fill(step, active, self.buffers)
        saved = self.optimizer.snapshot()
        try:
            self.warm_up()
            self.optimizer.restore(saved)
            self.optimizer.zero_grad()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.loss, self.norm, self.means = self.body()
        except Exception as error:
            self.optimizer.restore(saved)
            self.optimizer.zero_grad()
            if is_out_of_memory(error):
                raise
            raise CannotCapture(one_line(str(error))[:200] or type(error).__name__) from error
        self.graph = graph

    def warm_up(self) -> None:
        """Take the step a few times, in as many parts as the memory makes necessary."""
        while True:
            try:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(WARM_UP):
                        self.body()
                torch.cuda.current_stream().wait_stream(side)
                return
            except torch.cuda.OutOfMemoryError:
                rows = max(len(buffer.inputs) for buffer in self.buffers)
                self.optimizer.zero_grad()
                torch.cuda.empty_cache()
                if 2 * self.accumulate > rows:
                    raise
                self.accumulate *= 2
                self.say(f"out of memory: the same step is now taken in {self.accumulate} parts, training.accumulate")

    def body(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is captured: from the buffers to the updated weights. Returns the loss, the norm of the gradient and
        every stream's mean loss a token, in the order of the buffers."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        means = []
        for buffer in self.buffers:
            learned = buffer.learned()
            shares = buffer.shares(learned)  # (B, 1)
            parts = (buffer.inputs, buffer.targets, shares)
            rows = []
            for inputs, targets, share in zip(*(part.chunk(self.accumulate) for part in parts), strict=True):
                losses = self.losses(inputs, targets)
                loss = (losses * share).sum()
                self.optimizer.backward(loss)
                total = total + loss.detach()
                rows.append(losses.detach().sum(1))
            means += buffer.means(torch.cat(rows), learned)
        self.optimizer.unscale()
        norm = clip_gradients(self.model, self.clip)
        self.optimizer.step_unless_infinite(norm)
        return total, norm, torch.stack(means)


class CannotCapture(Exception):
    """Something in the model or on this machine does not let a step be compiled or captured."""


class FirstThatWorks(Engine):
    """The first of several engines that can carry out a step; what is wrong with those before it is said."""

    def __init__(self, choices: Sequence[tuple[str, Callable[[], Engine]]], say: Callable[[str], None]) -> None:
        (_, make), *self.others = choices
        self.engine = make()
        self.say = say

    def step(self, step: int, rate: float) -> Outcome:
        while True:
            try:
                return self.engine.step(step, rate)
            except CannotCapture as error:
                if not self.others:
                    raise
                (how, make), *self.others = self.others
                self.say(f"the step could not be made faster as planned ({error}); {how} instead")
                self.engine = make()


class InLowPrecision:
    """The model with a 16-bit copy of its weights, made anew in every pass; gradients reach the float32 weights.

    Activations have 16 bits throughout, which halves what the element-wise kernels have to move; norms and softmax
    compute in float32 inside, and the loss is float32.
    """

    def __init__(self, model: CausalModel, precision: torch.dtype) -> None:
        self.model, self.precision = model, precision

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return token_losses(self, inputs, targets)  # type: ignore[arg-type]

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.precision == torch.float32:
            return self.model(inputs)
        weights = {name: parameter.to(self.precision) for name, parameter in self.model.named_parameters()}
        return functional_call(self.model, weights, (inputs,))


class Buffer:
    """Where the captured step finds the rows of the streams of one length."""

    def __init__(self, streams: Sequence[Stream], device: torch.device) -> None:
        self.streams = streams
        self.rows = [stream.rows for stream in streams]
        width = max(stream.task.width for stream in streams)
        self.inputs = torch.zeros(sum(self.rows), width, dtype=torch.long, device=device)
        self.targets = torch.full_like(self.inputs, IGNORE)

    def learned(self) -> list[Tensor]:
        """How many targets of each stream count, at least 1."""
        return [(targets != IGNORE).sum().clamp(min=1) for targets in self.targets.split(self.rows)]

    def shares(self, learned: Sequence[Tensor]) -> Tensor:
        """What each row's losses are multiplied by, (B, 1): its stream's weight over the stream's learned tokens."""
        parts = zip(self.streams, learned, strict=True)
        return torch.cat([(stream.weight / count).expand(stream.rows, 1) for stream, count in parts])

    def means(self, rows: Tensor, learned: Sequence[Tensor]) -> list[Tensor]:
        """Each stream's mean loss a token, from the summed losses of every row (B,)."""
        return [part.sum() / count for part, count in zip(rows.split(self.rows), learned, strict=True)]


@dataclass
class Made:
    """The rows of one stream in N steps."""

    inputs: Tensor  # (N, B, T)
    targets: Tensor  # (N, B, T)
    tokens: list[int]  # (N,) inputs that are not padding
    ready: torch.cuda.Event


class Feed:
    """Makes the batches of several steps at once on the device, ahead of them, in its own thread and CUDA stream."""

    def __init__(self, streams: Sequence[Stream], device: torch.device) -> None:
        self.device = device
        self.tasks = {stream.name: stream.task.on(device) for stream in streams}
        self.side = torch.cuda.Stream()
        self.worker = ThreadPoolExecutor(1, "batches")
        self.coming: dict[int, Future[list[Made]]] = {}  # by first step

    def forget(self) -> None:
        """Drop what was made ahead, when other streams take part from now on."""
        for future in self.coming.values():
            future.result()
        self.coming.clear()

    def fill(self, step: int, active: Sequence[Stream], buffers: Sequence[Buffer]) -> int:
        """Put the batch of `step` into the buffers; returns how many of its inputs are not padding."""
        first = step - step % AHEAD
        for begin in (first, first + AHEAD):
            if begin not in self.coming:
                self.coming = {key: value for key, value in self.coming.items() if key >= first}
                self.coming[begin] = self.worker.submit(self.make, begin, active)
        made = iter(self.coming[first].result())
        main = torch.cuda.current_stream()
        tokens = 0
        for buffer in buffers:
            for inputs, targets in zip(
                buffer.inputs.split(buffer.rows), buffer.targets.split(buffer.rows), strict=True
            ):
                each = next(made)
                main.wait_event(each.ready)
                width = each.inputs.shape[-1]  # the columns behind stay padding
                inputs[:, :width].copy_(each.inputs[step - first])
                targets[:, :width].copy_(each.targets[step - first])
                each.inputs.record_stream(main)
                each.targets.record_stream(main)
                tokens += each.tokens[step - first]
        return tokens

    def make(self, first: int, active: Sequence[Stream]) -> list[Made]:
        """For each active stream, in the order of the buffers, its rows in the steps from `first` on."""
        with torch.cuda.stream(self.side):
            return [self.make_stream(stream, first) for group in by_length(active) for stream in group]

    def nothing(self, stream: Stream) -> Made:
        """Rows that teach nothing, for steps that will not come."""
        inputs = torch.zeros(AHEAD, stream.rows, stream.task.width, dtype=torch.long, device=self.device)
        ready = torch.cuda.Event()
        ready.record()
        return Made(inputs, torch.full_like(inputs, IGNORE), [0] * AHEAD, ready)

    def make_stream(self, stream: Stream, first: int) -> Made:
        steps = [step for step in range(first, first + AHEAD) if stream.takes_part(step)]
        if not steps:
            return self.nothing(stream)
        drawn = [stream.draw(step) for step in steps]
        sizes = [len(rows) for rows, _ in drawn]
        rows, noise = torch.cat([rows for rows, _ in drawn]), torch.cat([noise for _, noise in drawn], -1)
        batch = self.tasks[stream.name].make(rows.to(self.device), noise.to(self.device))
        made = self.nothing(stream)
        counts = torch.zeros(AHEAD, dtype=torch.long, device=self.device)
        parts = (part.split(sizes) for part in (batch.inputs, batch.targets, batch.lengths))
        for step, x, y, lengths in zip(steps, *parts, strict=True):
            made.inputs[step - first, : len(x), : x.shape[1]] = x
            made.targets[step - first, : len(y), : y.shape[1]] = y
            counts[step - first] = lengths.sum()
        made.tokens = counts.tolist()
        made.ready.record()
        return made


def clip_gradients(model: nn.Module, most: float) -> Tensor:
    """Scale the gradient down to norm `most` (0: not at all); returns the norm it had."""
    return nn.utils.clip_grad_norm_(model.parameters(), most or math.inf)


def build(
    model: CausalModel,
    streams: Sequence[Stream],
    optimizer: Optimizer,
    seed: int,
    precision: torch.dtype,
    settings: Any,
    say: Callable[[str], None],
) -> Engine:
    """The engine that `[training] engine` asks for, or the fastest that works here."""

    def captured(compiled: bool) -> Engine:
        return Captured(model, streams, optimizer, seed, precision, settings.clip, settings.accumulate, compiled, say)

    def plain() -> Engine:
        return Plain(model, streams, optimizer, seed, precision, settings.clip, settings.accumulate)

    choices: list[tuple[str, Callable[[], Engine]]] = [
        ("compiled and captured", lambda: captured(True)),
        ("captured without compiling", lambda: captured(False)),
        ("operation by operation", plain),
    ]
    wanted = choose(settings, next(model.parameters()).device)
    return FirstThatWorks(choices[2 - wanted[0] - wanted[1] :], say)


def compiler_options() -> dict[str, Any]:
    """What this version of the compiler is told, of what it can be told."""
    wanted = {
        "triton.mix_order_reduction": False,  # the gradients of a norm's input and weights in one kernel: slower
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    known = torch._inductor.list_options()
    return {name: value for name, value in wanted.items() if name in known}


def choose(settings: Any, device: torch.device) -> tuple[bool, bool, str]:
    """(capture the step, compile it, why)."""
    if device.type != "cuda":
        return False, False, "operation by operation"
    if settings.engine == "plain":
        return False, False, "operation by operation, as asked"
    if settings.engine == "graph":
        return True, False, "captured without compiling, as asked"
    if settings.engine == "compiled":
        return True, True, "compiled and captured, as asked"
    if settings.steps < PAYS_FROM:
        return True, False, f"captured; fewer than {PAYS_FROM:,} steps do not pay for compiling"
    return True, True, f"compiled and captured, which pays from {PAYS_FROM:,} steps on"
