"""Recurrent layers: `RNN`, `GRU` and `LSTM` in the place of torch's, with their constructors, calls and weights.

    h_t = step(W_i x_t + b_i, h_{t−1})        t = 1 … T, or T … 1 for the backward direction

A step is an `Equation` (`headway.nn.cells`), `scan` carries it through time, a layer joins its directions, and a
stack feeds each layer with the one below. Where torch has a fused kernel for the equation the whole stack goes to it,
with the same result. Another equation, `torch.func` and forward-mode derivatives have no kernel and take the
written-out way, and so does everything inside

    with written_out():
        output, state = rnn(x)

which is there to follow what happens, to compare, and for second derivatives on a GPU, which cuDNN does not have.
`torch.compile` unrolls time on both ways: for long rows it takes long.

Shapes: B batch, T time, D input, H hidden (the P of a projected LSTM where it has one), L layers · directions, N all
tokens of a batch. Time O(N·G·H·(D + H)) for a layer and direction, T steps one after the other; memory O(N·G·H).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils.rnn import PackedSequence

from headway.nn.cells import (
    ELMAN_RELU,
    ELMAN_TANH,
    GATED_UNIT,
    LONG_SHORT_TERM,
    PROJECTED,
    Equation,
    State,
    Weights,
    check_positive,
    elman,
    start,
)
from headway.nn.dropout import dropout as drop

KERNELS: dict[Equation, Callable[..., tuple[Tensor, ...]]] = {
    ELMAN_TANH: torch.rnn_tanh,
    ELMAN_RELU: torch.rnn_relu,
    GATED_UNIT: torch.gru,
    LONG_SHORT_TERM: torch.lstm,
    PROJECTED: torch.lstm,
}
"""The equations that torch computes in one call, a whole stack at a time."""


@contextmanager
def written_out() -> Iterator[None]:
    """Inside the block there are no fused kernels: every recurrent layer follows its equation step by step."""
    kernels = dict(KERNELS)
    KERNELS.clear()
    try:
        yield
    finally:
        KERNELS.update(kernels)


def scan(
    equation: Equation, weights: Weights, data: Tensor, sizes: Sequence[int], state: State, reverse: bool = False
) -> tuple[Tensor, State]:
    """One layer in one direction: data (N, D) → outputs (N, H) and the state of every row after its last step.

    `sizes` says how many rows have a token at each time, and never grows: the longest rows stand first. The tokens of a
    time lie together in `data`. A row that is over, or backwards has not begun, keeps its state.
    """
    times = list(weights.from_input(data).split(list(sizes)))
    outputs = []
    for x in reversed(times) if reverse else times:
        rows = len(x)
        after = equation.step(x, tuple(part[:rows] for part in state), weights)
        outputs.append(after[0])
        state = after if rows == len(state[0]) else tuple(map(over_first_rows, after, state))
    return torch.cat(outputs[::-1] if reverse else outputs), state


def over_first_rows(new: Tensor, old: Tensor) -> Tensor:
    return torch.cat([new, old[len(new) :]])


def every_state(rnn: Recurrent, x: Tensor, state: State) -> State:
    """A net of one layer and direction over x (B, T, D): the state it began with and that after each token.

    The parts of the state are (B, H) each, those of all states (B, 1 + T, H). It is written out, since fused kernels
    tell the outputs of all times, but of an LSTM's cells the last.
    """
    weights = Weights(**dict(zip(rnn.kinds, rnn.all_weights[0], strict=True)))
    states = [state]
    for one in weights.from_input(x).unbind(1):
        states.append(rnn.equation.step(one, states[-1], weights))
    return tuple(torch.stack(parts, 1) for parts in zip(*states, strict=True))


class Recurrent(nn.Module):
    """A stack of layers that carry one equation through time, in one direction or in both.

    `RNN`, `GRU` and `LSTM` are this with their equations. Any other `Equation` will do: it has the same arguments,
    weights and calls, and is written out where it has no kernel.
    """

    def __init__(
        self,
        equation: Equation,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(input_size=input_size, hidden_size=hidden_size, num_layers=num_layers)
        if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout <= 1:
            raise ValueError(f"dropout is a probability between 0 and 1, not {dropout!r}")
        if not 0 <= proj_size < hidden_size:
            raise ValueError(f"proj_size ({proj_size}) must be smaller than hidden_size ({hidden_size}), or 0 for none")
        for name, flag in (("bias", bias), ("batch_first", batch_first)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is True or False, not {flag!r}")
        if dropout > 0 and num_layers == 1:
            warnings.warn(
                f"dropout ({dropout}) acts between layers, and with num_layers=1 there is nothing between: it has no "
                "effect; add a layer, or put a Dropout behind this one",
                stacklevel=3,
            )
        self.equation = equation
        self.mode = equation.name
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = proj_size

        rows, out = equation.gates * hidden_size, proj_size or hidden_size
        for layer in range(num_layers):
            width = out * self.directions if layer else input_size
            shapes = {
                "weight_ih": (rows, width),
                "weight_hh": (rows, out),
                "bias_ih": (rows,),
                "bias_hh": (rows,),
                "weight_hr": (proj_size, hidden_size),
            }
            for direction in range(self.directions):
                for kind in self.kinds:
                    weight = nn.Parameter(torch.empty(shapes[kind], device=device, dtype=dtype))
                    self.register_parameter(kind + place(layer, direction), weight)
        self.flatten_parameters()
        self.reset_parameters()

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def kinds(self) -> list[str]:
        """What each direction of each layer learns, in torch's order."""
        biases = ["bias_ih", "bias_hh"] if self.bias else []
        return ["weight_ih", "weight_hh", *biases, *(["weight_hr"] if self.proj_size else [])]

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, in the order of the states."""
        return [
            [getattr(self, kind + place(layer, direction)) for kind in self.kinds]
            for layer in range(self.num_layers)
            for direction in range(self.directions)
        ]

    def reset_parameters(self) -> None:
        start(self, self.hidden_size)

    def flatten_parameters(self) -> None:
        """On a GPU, lay the weights into one piece of memory, which cuDNN would else do in every call."""
        weights = [weight for group in self.all_weights for weight in group]
        first = weights[0]
        if self.equation not in KERNELS or any(
            not weight.is_cuda or weight.dtype != first.dtype or not torch.backends.cudnn.is_acceptable(weight)
            for weight in weights
        ):
            return
        if len({weight.data_ptr() for weight in weights}) < len(weights) or not torch._use_cudnn_rnn_flatten_weight():
            return  # shared weights stay shared
        from torch.backends.cudnn.rnn import get_cudnn_mode

        with torch.no_grad(), torch.cuda.device_of(first):
            torch._cudnn_rnn_flatten_weight(
                weights,
                len(self.kinds),
                self.input_size,
                get_cudnn_mode(self.mode),
                self.hidden_size,
                self.proj_size,
                self.num_layers,
                self.batch_first,
                self.bidirectional,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Recurrent:
        super()._apply(fn, recurse)
        self.flatten_parameters()
        return self

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Any]:
        """input (B, T, D) with `batch_first`, else (T, B, D); (T, D) for a row by itself; or packed → output, state.

        The output is H wide, 2·H with both directions. A state is (L, B, H), (L, H) for a row by itself: of an LSTM
        the tuple (h, c), else h; zeros where `hx` is left out. L counts layer by layer, forward then backward.
        """
        if isinstance(input, PackedSequence):
            data, sizes, order, back = input
            self.check(data)
            rows = int(sizes[0])
            state = self.zero_state(data, rows) if hx is None else self.read_state(hx, rows)
            data, state = self.compute(data, sizes, rearranged(state, order))
            return PackedSequence(data, sizes, order, back), self.equation.show(rearranged(state, back))

        if input.dim() not in (2, 3):
            raise ValueError(
                f"{type(self).__name__}: input has the shape {tuple(input.shape)}; 3 axes are wanted, or 2 for a row "
                "by itself"
            )
        self.check(input)
        if not input.shape[1 if self.batch_first and input.dim() == 3 else 0]:
            raise RuntimeError(
                f"{type(self).__name__}: input has the shape {tuple(input.shape)}, a time of 0 steps; one is needed "
                "(run_padded takes empty rows)"
            )
        if input.dim() == 3:
            rows = input.shape[0 if self.batch_first else 1]
            state = self.zero_state(input, rows) if hx is None else self.read_state(hx, rows)
            output, state = self.compute(input, None, state)
            return output, self.equation.show(state)
        alone = 0 if self.batch_first else 1
        state = self.zero_state(input, 1) if hx is None else self.read_state(hx, None)
        output, state = self.compute(input.unsqueeze(alone), None, state)
        return output.squeeze(alone), self.equation.show(tuple(part.squeeze(1) for part in state))

    def compute(self, data: Tensor, sizes: Tensor | None, state: State) -> tuple[Tensor, State]:
        """The stack over a batch, packed where there are `sizes`: by the fused kernel where it applies."""
        groups = self.all_weights
        weights = [weight for group in groups for weight in group]
        kernel = KERNELS.get(self.equation)
        if kernel is None or not ordinary(data, *state, *weights) or is_lacking(kernel, data):
            if sizes is not None:
                return self.follow(groups, data, sizes.tolist(), state)
            by_time = data.transpose(0, 1) if self.batch_first else data
            times, rows = by_time.shape[:2]
            flat, after = self.follow(groups, by_time.flatten(0, 1), [rows] * times, state)
            output = flat.unflatten(0, (times, rows))
            return output.transpose(0, 1) if self.batch_first else output, after

        p = self.dropout if self.training else 0.0
        train = self.training or torch.is_grad_enabled()  # without it cuDNN has no gradients, which evaluation may want
        options = (self.bias, self.num_layers, p, train, self.bidirectional)
        hx = self.equation.show(state)
        if sizes is None:
            output, *parts = kernel(data, hx, weights, *options, self.batch_first)
        else:
            output, *parts = kernel(data, sizes, hx, weights, *options)
        return output, tuple(parts)

    def follow(self, groups: list[list[Tensor]], data: Tensor, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """The stack written out, layer by layer and direction by direction: data (N, D) → (N, H or 2·H)."""
        finals: list[State] = []
        for layer in range(self.num_layers):
            if layer:
                data = drop(data, self.dropout, self.training)
            outputs = []
            for direction in range(self.directions):
                at = len(finals)
                weights = Weights(**dict(zip(self.kinds, groups[at], strict=True)))
                before = tuple(part[at] for part in state)
                output, after = scan(self.equation, weights, data, sizes, before, reverse=direction == 1)
                outputs.append(output)
                finals.append(after)
            data = torch.cat(outputs, -1)
        return data, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def state_shapes(self, rows: int) -> list[tuple[int, int, int]]:
        """The shapes of the parts of a state: only the first is projected."""
        widths = [self.proj_size or self.hidden_size] + [self.hidden_size] * (self.equation.parts - 1)
        return [(self.num_layers * self.directions, rows, width) for width in widths]

    def zero_state(self, x: Tensor, rows: int) -> State:
        return tuple(x.new_zeros(shape) for shape in self.state_shapes(rows))

    def read_state(self, hx: Any, rows: int | None) -> State:
        """A given state, its shapes checked, as (L, B, H); without `rows` it is that of a row by itself."""
        state = self.equation.read(hx)
        axes = (0, 1, 2) if rows is not None else (0, 2)
        for number, (part, shape) in enumerate(zip(state, self.state_shapes(1 if rows is None else rows), strict=True)):
            wanted = tuple(shape[axis] for axis in axes)
            if part.shape != wanted:
                name = "hx" if len(state) == 1 else f"hx[{number}]"
                meaning = ", ".join(("layers · directions", "B", "width")[axis] for axis in axes)
                raise RuntimeError(
                    f"{type(self).__name__}: {name} has the shape {tuple(part.shape)}; ({meaning}) = {wanted} is "
                    "wanted for this input"
                )
        return state if rows is not None else tuple(part.unsqueeze(1) for part in state)

    def check(self, data: Tensor) -> None:
        name, dtype = type(self).__name__, self.weight_ih_l0.dtype
        if data.dtype != dtype and not torch.is_autocast_enabled(data.device.type):
            raise ValueError(
                f"{name}: input is {data.dtype} and the weights are {dtype}; convert one of them: input.to({dtype}) or "
                f"model.to({data.dtype})"
            )
        if data.shape[-1] != self.input_size:
            raise RuntimeError(
                f"{name}: input has {data.shape[-1]} features and input_size is {self.input_size} "
                f"(input {tuple(data.shape)})"
            )

    def extra_repr(self) -> str:
        defaults = {
            "proj_size": 0,
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
        }
        told = [f"{name}={getattr(self, name)}" for name, usual in defaults.items() if getattr(self, name) != usual]
        return ", ".join([str(self.input_size), str(self.hidden_size), *told])


class RNN(Recurrent):
    """Elman's network, `tanh_step` or `relu_step`, as `torch.nn.RNN`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        equation = elman(nonlinearity)
        super().__init__(
            equation, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype
        )
        self.nonlinearity = nonlinearity


class GRU(Recurrent):
    """The gated recurrent unit, `gru_step`, as `torch.nn.GRU`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        equation = GATED_UNIT
        super().__init__(
            equation, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, 0, device, dtype
        )


class LSTM(Recurrent):
    """Long short-term memory, `lstm_step`, and with `proj_size` `projected_lstm_step`, as `torch.nn.LSTM`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            PROJECTED if proj_size else LONG_SHORT_TERM,
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device,
            dtype,
        )


def place(layer: int, direction: int) -> str:
    """The end of a weight's name, as torch has it."""
    return f"_l{layer}" + ("_reverse" if direction else "")


def rearranged(state: State, order: Tensor | None) -> State:
    """The rows of a state in another order."""
    return state if order is None else tuple(part.index_select(1, order) for part in state)


def ordinary(*tensors: Tensor) -> bool:
    """Whether fused kernels can take these: not inside `torch.func`, nor with forward-mode derivatives."""
    if torch.compiler.is_compiling():
        return True
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return forward_ad._current_level < 0 and not any(wrapped(x) for x in tensors)


def is_lacking(kernel: Callable[..., tuple[Tensor, ...]], data: Tensor) -> bool:
    """Whether the kernel does not know the type that autocast asks of it here: torch asks without looking."""
    if kernel is not torch.lstm or data.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return False
    return torch.get_autocast_dtype("cpu") in LACKING


def lacking() -> set[torch.dtype]:
    """The half precisions that this CPU has no LSTM kernel for: oneDNN's wants instructions that not all have."""
    if not torch.backends.mkldnn.is_available():
        return set()  # torch's own kernel takes all
    ops = torch.ops.mkldnn
    has = {torch.bfloat16: ops._is_mkldnn_bf16_supported(), torch.float16: ops._is_mkldnn_fp16_supported()}
    return {dtype for dtype, there in has.items() if not there}


LACKING = lacking()
