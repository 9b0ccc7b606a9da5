"""The step for one CUDA GPU: captured, and compiled where that pays.

The forward and backward passes are compiled, the whole step up to the optimizer's update is captured once as a CUDA
graph, and from then on a step is one replay. Batches are made ahead (`Feed`), so that no Python work and no waiting
stands between two steps. What changes from step to step lives on the device: the batch, the learning rate, the seed of
dropout.

It sees the same rows as `Plain`, corrupted in the same way.

Shapes: B rows, T tokens, S tokens of a source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call

from headway.files import one_line
from headway.memory import is_out_of_memory
from headway.models import Model
from headway.tasks.base import IGNORE
from headway.training.engine import Block, Engine, Outcome, clip_gradients
from headway.training.feed import Feed
from headway.training.optimizer import Optimizer
from headway.training.order import mix
from headway.training.parts import during
from headway.training.streams import Stream, by_length, token_losses

SHAPES = 128  # of rows that one step may be compiled for
WARM_UP = 3  # steps before a capture: compilation, workspaces, the optimizer's state


class CannotCapture(Exception):
    """Something in the model or on this machine does not let a step be compiled or captured."""


broken_off: list[torch.cuda.CUDAGraph] = []
"""Captures that CUDA could not end. torch's memory stays in their hands: they are kept, and there are no others in this
process."""


class Captured(Engine):
    def __init__(
        self,
        model: Model,
        streams: Sequence[Stream],
        optimizer: Optimizer,
        seed: int,
        precision: torch.dtype,
        clip: float,
        accumulate: int,
        compiled: bool,
        deterministic: bool,
        on_device: bool,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.optimizer, self.seed, self.clip, self.say = model, optimizer, seed, clip, say
        self.accumulate = max(1, accumulate)
        self.device = next(model.parameters()).device
        self.streams = streams
        self.copy = InLowPrecision(model, precision)
        self.losses: Callable[..., Tensor] = self.copy.losses
        if compiled:
            own = with_own_code(self.copy.losses)
            self.losses = torch.compile(own, fullgraph=True, dynamic=False, options=compiler_options(deterministic))
        self.feed = Feed(self.device, on_device, say)
        self.active: list[Stream] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, step: int, undisturbed: Block = nullcontext) -> None:
        active = [stream for stream in self.streams if stream.takes_part(step)]
        if active != self.active:
            self.capture(active, step, undisturbed)

    def step(self, step: int, rate: float) -> Outcome:
        with during("making batches"):
            tokens = self.feed.fill(step, self.active, self.places)
        torch.cuda.manual_seed(mix(self.seed, "dropout", step))
        self.optimizer.set_rate(rate)
        assert self.graph is not None
        self.optimizer.uncounted = True
        with during("replay"):
            self.graph.replay()
        means = dict(zip(self.names, self.means.clone().unbind(), strict=True))
        losses = {stream.name: means[stream.name] for stream in self.active}
        return Outcome(tokens, self.positions, self.loss.clone(), self.norm.clone(), losses)

    def capture(self, active: list[Stream], step: int, undisturbed: Block) -> None:
        """Record the step for these streams. It is tried out first; what that changes is put back."""
        self.active, self.graph = [], None
        self.feed.forget()
        self.buffers = [Buffer(group, self.device) for group in by_length(active)]
        self.names = [stream.name for buffer in self.buffers for stream in buffer.streams]
        self.places = [places for buffer in self.buffers for places in buffer.of_streams()]
        self.positions = sum(buffer.inputs.numel() for buffer in self.buffers)
        self.feed.fill(step, active, self.places)
        self.feed.wait()  # what is made meanwhile would take memory while the step is captured
        saved = self.optimizer.snapshot()
        while self.graph is None:
            try:
                self.graph = self.recorded(saved, undisturbed)
            except BaseException as error:
                with undisturbed():
                    torch.cuda.synchronize()  # nothing of the attempt is still at work
                    self.optimizer.restore(saved)
                    self.forget_gradients()
                if not isinstance(error, Exception):
                    raise
                if broken_off or not is_out_of_memory(error):
                    raise CannotCapture(reason(error)) from error
                if 2 * self.accumulate > max(len(buffer.inputs) for buffer in self.buffers):
                    raise
                self.accumulate *= 2
                self.say(f"out of memory: the same step is now taken in {self.accumulate} parts, training.accumulate")
            torch.cuda.empty_cache()  # out here, where nothing of a failed attempt is held any more
        self.optimizer.uncounted = False  # what is captured has not happened
        self.active = active

    def recorded(self, saved: list[tuple[Tensor, Tensor]], undisturbed: Block) -> torch.cuda.CUDAGraph:
        """The step as a graph, after it was taken a few times; `saved` is put back in between."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), compiling():
            for _ in range(WARM_UP):
                self.body()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.restore(saved)
        self.forget_gradients()
        graph = torch.cuda.CUDAGraph()
        with undisturbed(), recording(graph):
            self.loss, self.norm, self.means = self.body()
        return graph

    def body(self) -> tuple[Tensor, Tensor, Tensor]:
        """What is captured: from the buffers to the updated weights. Returns the loss, the norm of the gradient and
        every stream's mean loss a token, in the order of the buffers."""
        self.forget_gradients()
        self.copy.take_weights()
        total = torch.zeros((), device=self.device)
        means = []
        for buffer in self.buffers:
            learned = buffer.learned()
            shares = buffer.shares(learned)  # (B, 1)
            smoothing = buffer.streams[0].task.smoothing
            rows = []
            parts = (part.chunk(self.accumulate) for part in (shares, buffer.targets, *buffer.given))
            for share, targets, *given in zip(*parts, strict=True):
                losses = self.losses(targets, *given, smoothing=smoothing)
                loss = (losses * share).sum()
                self.optimizer.backward(loss)
                self.copy.give_gradients()
                total = total + loss.detach()
                rows.append(losses.detach().sum(1))
            means += buffer.means(torch.cat(rows), learned)
        self.optimizer.unscale()
        norm = clip_gradients(self.model, self.clip)
        self.optimizer.step_if_finite(total, norm)
        return total, norm, torch.stack(means)

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.copy.forget_gradients()


class InLowPrecision:
    """The model with a 16-bit copy of its weights, taken anew in every step; gradients are added to the float32 ones.

    Activations have 16 bits throughout, which halves what the element-wise kernels have to move; norms and softmax
    compute in float32 inside, and the loss is float32. All weights are copied by a few kernels, not by one for each.
    """

    def __init__(self, model: Model, precision: torch.dtype) -> None:
        self.model = model
        self.weights = dict(model.named_parameters())
        self.copies = {
            name: weight.detach().to(precision).requires_grad_(weight.requires_grad)
            for name, weight in self.weights.items()
            if precision != torch.float32
        }

    def losses(self, targets: Tensor, *given: Tensor, smoothing: float) -> Tensor:
        return token_losses(self, targets, *given, smoothing=smoothing)

    def __call__(self, *given: Tensor) -> Tensor:
        return functional_call(self.model, self.copies, given) if self.copies else self.model(*given)

    @torch.no_grad()
    def take_weights(self) -> None:
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), list(self.weights.values()))

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Add the copies' gradients to those of the weights; then the copies have none."""
        reached = [name for name, copy in self.copies.items() if copy.grad is not None]
        if not reached:
            return
        fresh = [torch.empty_like(self.weights[name]) for name in reached]
        torch._foreach_copy_(fresh, [cast(Tensor, self.copies[name].grad) for name in reached])
        self.forget_gradients()
        sums = []  # (what a weight has already, what comes to it)
        for name, gradient in zip(reached, fresh, strict=True):
            weight = self.weights[name]
            if weight.grad is None:
                weight.grad = gradient
            else:
                sums.append((weight.grad, gradient))
        if sums:
            torch._foreach_add_(*map(list, zip(*sums, strict=True)))

    def forget_gradients(self) -> None:
        for copy in self.copies.values():
            copy.grad = None


class Buffer:
    """Where the captured step finds the rows of the streams of one length."""

    def __init__(self, streams: Sequence[Stream], device: torch.device) -> None:
        self.streams = streams
        self.rows = [stream.rows for stream in streams]
        width = max(stream.task.width for stream in streams)
        self.targets = torch.full((sum(self.rows), width), IGNORE, device=device)
        widths = [width, *([streams[0].task.source_width] if streams[0].task.source_width else [])]
        self.given = [torch.zeros(sum(self.rows), each, dtype=torch.long, device=device) for each in widths]

    @property
    def inputs(self) -> Tensor:
        return self.given[0]

    def of_streams(self) -> Iterator[list[Tensor]]:
        """For each stream its rows of the targets and of what the model is given."""
        return map(list, zip(*(part.split(self.rows) for part in (self.targets, *self.given)), strict=True))

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


def reason(error: Exception) -> str:
    """What an error says, in a line, without what CUDA advises programmers."""
    what, *_ = str(error).split("\nSearch for `cuda")
    what, *_ = what.split("\nCUDA kernel errors might")
    return one_line(what)[:200] or type(error).__name__


@contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """`torch.cuda.graph`. What fails within it is told, also where CUDA cannot end the capture then."""
    wrong: BaseException | None = None
    begun = False
    here = torch.cuda.stream(torch.cuda.current_stream())  # a capture that fails does not come back by itself
    try:
        with here, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            begun = True
            try:
                yield
            except BaseException as error:
                wrong = error
                raise
    except BaseException as error:
        if not begun or error is wrong:
            raise
        broken_off.append(graph)
        renew_generator()
        raise wrong or error from None


def renew_generator() -> None:
    """Let the GPU's random numbers go on: their generator takes a capture that could not be ended for one that goes on,
    and refuses to draw outside it."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())  # the numbers are the same, and of no capture


def with_own_code(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The method with code of its own. The compiler counts how often it has compiled a piece of code, in the life of
    the process and whatever for, and soon refuses: a model must not pay for those that were trained before it."""
    plain = cast(MethodType, method)
    function = plain.__func__
    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, plain.__self__)


@contextmanager
def compiling() -> Iterator[None]:
    """Within it, code may be compiled for as many shapes of rows as streams and parts of them can have. The backward
    pass is compiled with the forward pass, and not later in a thread of autograd's, where no signal is heard."""
    wishes = (
        (torch._dynamo.config, "recompile_limit", SHAPES),
        (torch._functorch.config, "force_non_lazy_backward_lowering", True),
    )
    with ExitStack() as patches:
        for config, name, value in wishes:
            if hasattr(config, name):  # in this version of torch
                patches.enter_context(config.patch(**{name: value}))
        yield


def compiler_options(deterministic: bool) -> dict[str, Any]:
    """What this version of the compiler is told, of what it can be told."""
    wanted = {
        "triton.mix_order_reduction": False,  # the gradients of a norm's input and weights in one kernel: slower
        "deterministic": deterministic,
    }
    known = torch._inductor.list_options()
    return {name: value for name, value in wanted.items() if name in known}
