"""One step of a recurrent network: `RNNCell`, `GRUCell` and `LSTMCell`, in the place of torch's.

A step is an `Equation`: from what the input brings and the state before it makes the state after it. A cell is an
equation with weights of its own; a layer (`headway.nn.recurrent`) is an equation carried through time.

Shapes: B batch, D input, H hidden, P projected, G gates. A state is a tuple: (h,), or (h, c) for an LSTM.
The gates of an equation are rows of one matrix, in torch's order. A step costs O(B·G·H·(D + H)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import nearest

State = tuple[Tensor, ...]


class Weights(NamedTuple):
    """What one direction of one layer learns, by torch's names."""

    weight_ih: Tensor  # W_i (G·H, D)
    weight_hh: Tensor  # W_h (G·H, H), or (G·H, P)
    bias_ih: Tensor | None = None  # b_i (G·H,)
    bias_hh: Tensor | None = None  # b_h (G·H,)
    weight_hr: Tensor | None = None  # W_r (P, H)

    def from_input(self, x: Tensor) -> Tensor:
        """W_i x + b_i: (…, D) → (…, G·H). It does not wait for the state, so a layer does it for all times at once."""
        return F.linear(x, self.weight_ih, self.bias_ih)

    def from_state(self, h: Tensor) -> Tensor:
        """W_h h + b_h: (B, H) → (B, G·H)."""
        return F.linear(h, self.weight_hh, self.bias_hh)


def tanh_step(x: Tensor, state: State, weights: Weights) -> State:
    """h' = tanh(W_i x + b_i + W_h h + b_h). "Finding structure in time" (Elman 1990)."""
    (h,) = state
    return ((x + weights.from_state(h)).tanh(),)


def relu_step(x: Tensor, state: State, weights: Weights) -> State:
    """h' = max(0, W_i x + b_i + W_h h + b_h)."""
    (h,) = state
    return ((x + weights.from_state(h)).relu(),)


def gru_step(x: Tensor, state: State, weights: Weights) -> State:
    """The gated recurrent unit.

        r  = σ(W_ir x + b_ir + W_hr h + b_hr)            reset
        z  = σ(W_iz x + b_iz + W_hz h + b_hz)            update
        n  = tanh(W_in x + b_in + r ⊙ (W_hn h + b_hn))   new
        h' = (1 − z) ⊙ n + z ⊙ h

    "Learning phrase representations using RNN encoder–decoder for statistical machine translation" (Cho et al. 2014).
    The paper resets h before the matrix; torch and cuDNN reset W_hn h + b_hn after it, and so does this.
    """
    (h,) = state
    x_reset, x_update, x_new = x.chunk(3, -1)
    h_reset, h_update, h_new = weights.from_state(h).chunk(3, -1)
    reset = (x_reset + h_reset).sigmoid()
    update = (x_update + h_update).sigmoid()
    new = (x_new + reset * h_new).tanh()
    return ((1 - update) * new + update * h,)


def lstm_step(x: Tensor, state: State, weights: Weights) -> State:
    """Long short-term memory.

        i  = σ(W_ii x + b_ii + W_hi h + b_hi)       input gate
        f  = σ(W_if x + b_if + W_hf h + b_hf)       forget gate
        g  = tanh(W_ig x + b_ig + W_hg h + b_hg)    candidate
        o  = σ(W_io x + b_io + W_ho h + b_ho)       output gate
        c' = f ⊙ c + i ⊙ g
        h' = o ⊙ tanh(c')

    "Long short-term memory" (Hochreiter and Schmidhuber 1997), with the forget gate of "Learning to forget" (Gers,
    Schmidhuber and Cummins 2000).
    """
    h, c = state
    input_gate, forget_gate, candidate, output_gate = (x + weights.from_state(h)).chunk(4, -1)
    c = forget_gate.sigmoid() * c + input_gate.sigmoid() * candidate.tanh()
    h = output_gate.sigmoid() * c.tanh()
    return h, c


def projected_lstm_step(x: Tensor, state: State, weights: Weights) -> State:
    """An LSTM whose h' is made smaller: h' = W_r (o ⊙ tanh(c')), (B, P).

    "Long short-term memory based recurrent neural network architectures" (Sak, Senior and Beaufays 2014).
    """
    assert weights.weight_hr is not None
    h, c = lstm_step(x, state, weights)
    return F.linear(h, weights.weight_hr), c


@dataclass(frozen=True)
class Equation:
    """A step and its sizes: `step(W_i x + b_i, state, weights)` is the next state, whose first part is the output."""

    name: str
    gates: int  # matrices of H rows in W_i and W_h
    parts: int  # tensors in a state
    step: Callable[[Tensor, State, Weights], State]

    def read(self, hx: Any) -> State:
        """A state as users give it, as a tuple: torch wants h by itself, and (h, c) for an LSTM."""
        if self.parts == 1 and isinstance(hx, Tensor):
            return (hx,)
        if self.parts > 1 and isinstance(hx, tuple | list) and len(hx) == self.parts:
            return tuple(hx)
        wanted = "one tensor" if self.parts == 1 else f"a tuple of {self.parts} tensors"
        given = f"a {type(hx).__name__}" + (f" of {len(hx)}" if isinstance(hx, tuple | list) else "")
        raise TypeError(f"the state of {self.name} is {wanted}, and hx is {given}")

    def show(self, state: State) -> Any:
        """The other way round: the state as users want it."""
        return state[0] if self.parts == 1 else state


ELMAN_TANH = Equation("RNN_TANH", 1, 1, tanh_step)
ELMAN_RELU = Equation("RNN_RELU", 1, 1, relu_step)
GATED_UNIT = Equation("GRU", 3, 1, gru_step)
LONG_SHORT_TERM = Equation("LSTM", 4, 2, lstm_step)
PROJECTED = Equation("LSTM", 4, 2, projected_lstm_step)
ELMAN = {"tanh": ELMAN_TANH, "relu": ELMAN_RELU}


def elman(nonlinearity: str) -> Equation:
    if nonlinearity not in ELMAN:
        raise ValueError(f"nonlinearity {nonlinearity!r} is unknown{nearest(nonlinearity, ELMAN)}")
    return ELMAN[nonlinearity]


def start(module: nn.Module, hidden_size: int) -> None:
    """Every weight uniform within ± 1/√H, drawn in torch's order."""
    bound = 1.0 / math.sqrt(hidden_size)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -bound, bound)


def check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise TypeError(f"{name} is a whole number, not {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be 1 or more, not {size}")


class Cell(nn.Module):
    """An equation with weights of its own, which takes one step a call."""

    def __init__(
        self,
        equation: Equation,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(input_size=input_size, hidden_size=hidden_size)
        self.equation = equation
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.bias = bias

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        rows = equation.gates * hidden_size
        self.weight_ih = parameter(rows, input_size)
        self.weight_hh = parameter(rows, hidden_size)
        self.bias_ih = parameter(rows) if bias else None
        self.bias_hh = parameter(rows) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        start(self, self.hidden_size)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """input (B, D) or (D,), state (B, H) or (H,), zeros where it is left out → the next state."""
        name = type(self).__name__
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            kind = ValueError if input.dim() not in (1, 2) else RuntimeError
            raise kind(
                f"{name}: input has the shape {tuple(input.shape)}; (B, {self.input_size}) or ({self.input_size},) "
                "is wanted"
            )
        shape = (*input.shape[:-1], self.hidden_size)
        if hx is None:
            state: State = (input.new_zeros(shape),) * self.equation.parts
        else:
            state = self.equation.read(hx)
        for part in state:
            if part.shape != shape:
                kind = ValueError if part.dim() not in (1, 2) else RuntimeError
                raise kind(
                    f"{name}: the state has the shape {tuple(part.shape)}; {shape} is wanted for an input of "
                    f"{tuple(input.shape)}"
                )
        weights = Weights(self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return self.equation.show(self.equation.step(weights.from_input(input), state, weights))

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias else ", bias=False")


class RNNCell(Cell):
    """`tanh_step`, or `relu_step` with nonlinearity="relu": (input, h) → h'. See `torch.nn.RNNCell`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(elman(nonlinearity), input_size, hidden_size, bias, device, dtype)
        self.nonlinearity = nonlinearity

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.nonlinearity == "tanh" else f", nonlinearity={self.nonlinearity}")


class GRUCell(Cell):
    """`gru_step`: (input, h) → h'. See `torch.nn.GRUCell`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(GATED_UNIT, input_size, hidden_size, bias, device, dtype)


class LSTMCell(Cell):
    """`lstm_step`: (input, (h, c)) → (h', c'). See `torch.nn.LSTMCell`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(LONG_SHORT_TERM, input_size, hidden_size, bias, device, dtype)
