"""Layer norm: what residuals and norms do to signal and gradient through a deep stack.

    nothing       x ← f(x)                     residual     x ← x + f(x)
    post-norm     x ← LN(x + f(x))             pre-norm     x ← x + f(LN(x))
    batch norm    x ← BN(x + f(x))             f alternates self-attention and a feed-forward layer, random weights

"On layer normalization in the Transformer architecture" (Xiong et al. 2020), section 3. With pre-norm every sublayer
adds about as much as the one before, so the signal grows like √layers and the gradient has a path past all of them;
with post-norm the signal stays at 1 and every step of the gradient goes through a norm. Cost O(layers·(T²·D + T·D²)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.inspection.experiments.base import (
    COLOURS,
    MARKERS,
    Experiment,
    Table,
    generator,
    normal,
    seeded,
    short,
)
from headway.nn import FeedForward, SelfAttention

Sublayer = Callable[[Tensor], Tensor]


@dataclass
class Depth:
    """By layer, the input being layer 0: root mean squares of the signal and of the gradient with respect to it."""

    signal: list[float] = field(default_factory=list)
    gradient: list[float] = field(default_factory=list)  # relative to that at the last layer
    coupling: float = 0.0  # change of a row's output when the other rows of the batch change, relative


@dataclass
class LayerNorms:
    layers: int
    designs: dict[str, Depth]


def layer_norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


def batch_norm(x: Tensor) -> Tensor:
    """Each feature over all tokens of the batch: (B, T, D)."""
    return F.batch_norm(x.flatten(0, 1), None, None, training=True).view_as(x)


DESIGNS: dict[str, Callable[[Tensor, Sublayer], Tensor]] = {
    "nothing": lambda x, f: f(x),
    "residual": lambda x, f: x + f(x),
    "post-norm": lambda x, f: layer_norm(x + f(x)),
    "pre-norm": lambda x, f: x + f(layer_norm(x)),
    "batch norm": lambda x, f: batch_norm(x + f(x)),
}


def run(
    layers: int = 32, width: int = 64, heads: int = 4, tokens: int = 16, batch: int = 8, seed: int = 0
) -> LayerNorms:
    """`layers` counts layers of two sublayers each."""
    source = generator(seed)
    with seeded(seed):
        sublayers = [
            module
            for _ in range(layers)
            for module in (SelfAttention(width, heads).double(), FeedForward(width, 4 * width).double())
        ]
        for sublayer in sublayers:
            for name, weight in sublayer.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(weight)
                else:
                    nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
                weight.requires_grad_(False)
    x = normal(batch, tokens, width, source=source)
    others = x.clone()
    others[1:] = normal(batch - 1, tokens, width, source=source)
    direction = normal(batch, tokens, width, source=source)
    return LayerNorms(layers, {name: measure(wrap, sublayers, x, others, direction) for name, wrap in DESIGNS.items()})


def measure(
    wrap: Callable[[Tensor, Sublayer], Tensor],
    sublayers: Sequence[nn.Module],
    x: Tensor,
    others: Tensor,
    direction: Tensor,
) -> Depth:
    """Signal and gradient of Σ direction·output through the stack, and how much the first row feels of the others."""
    states = stack(wrap, sublayers, x)
    gradients = torch.autograd.grad((states[-1] * direction).sum(), states)
    sizes = [size(gradient) for gradient in gradients]
    with torch.no_grad():
        changed = stack(wrap, sublayers, others)[-1][0]
    here = states[-1][0].detach()
    coupling = size(changed - here) / size(here) if size(here) else 0.0
    return Depth([size(state) for state in states], [value / sizes[-1] for value in sizes], coupling)


def stack(wrap: Callable[[Tensor, Sublayer], Tensor], sublayers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """The input and the state after each layer."""
    positions = torch.arange(x.shape[1])
    states = [x.clone().requires_grad_()]
    for attention, feed_forward in zip(sublayers[::2], sublayers[1::2], strict=True):
        x = wrap(states[-1], lambda x, attention=attention: attention(x, positions))  # type: ignore[misc]
        states.append(wrap(x, feed_forward))
    return states


def size(x: Tensor) -> float:
    """The root mean square."""
    return float(x.detach().square().mean().sqrt())


def table(result: LayerNorms) -> Table:
    middle = result.layers // 2
    rows = [
        (
            name,
            *(short(depth.signal[layer]) for layer in (1, middle, result.layers)),
            short(min(depth.gradient)),
            short(depth.gradient[0]),
            short(depth.coupling),
        )
        for name, depth in result.designs.items()
    ]
    header = (
        "",
        "signal, layer 1",
        f"layer {middle}",
        f"layer {result.layers}",
        "gradient, least",
        "at the input",
        "change by other rows",
    )
    return Table(header, rows)


def finding(result: LayerNorms) -> str:
    last = {name: depth.signal[-1] for name, depth in result.designs.items()}
    first = {name: depth.gradient[0] for name, depth in result.designs.items()}
    least = min(result.designs["post-norm"].gradient)
    return (
        f"Over {result.layers} layers the signal goes to {short(last['nothing'])} with nothing, "
        f"{short(last['residual'])} with residuals alone, {short(last['pre-norm'])} with pre-norm and "
        f"{short(last['post-norm'])} with post-norm. Of the last layer's gradient {short(first['pre-norm'])} times "
        f"arrives at the input with pre-norm, {short(first['post-norm'])} times with post-norm (as little as "
        f"{short(least)} on the way) and {short(first['batch norm'])} times with batch norm."
    )


def draw(result: LayerNorms, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for (name, depth), colour, marker in zip(result.designs.items(), COLOURS, MARKERS, strict=False):
        layers = range(len(depth.signal))
        every = (2 if name == "batch norm" else 0, 4)  # its signal lies on that of post-norm
        left.semilogy(layers, depth.signal, color=colour, marker=marker, markevery=every, label=name)
        right.semilogy(layers, depth.gradient, color=colour, marker=marker, markevery=every, label=name)
    left.set(title="Signal going up", xlabel="layer", ylabel="root mean square")
    right.set(title="Gradient coming down", xlabel="layer", ylabel="relative to the last layer's")
    left.legend()


EXPERIMENT = Experiment(
    name="layer-norm",
    summary="residuals, post-norm, pre-norm and batch norm: signal and gradient through 32 layers",
    question="Why does a deep Transformer need both residuals and norms, and does it matter where the norm stands?",
    look="Left, the signal layer by layer; right, the gradient, to be read from the last layer down. Nothing: both "
    "vanish. Residuals alone: both explode. Post-norm: the signal is held at 1, the gradient is uneven from "
    "layer to layer. Pre-norm: the signal grows slowly, and the gradient arrives no smaller than it left.",
    beware="The norm alone does not save the gradient; the path beside it does. In post-norm even that path runs "
    "through every norm, and the paper traces its need for a warm-up to gradients that differ between layers at the "
    "start. Batch norm holds the signal as layer norm does, but its gradient grows on the way down, and the last "
    "column of the table says what else it costs: a row's output depends on which other rows are in the batch. These "
    "are random weights of one seed; with others the numbers in between move, post-norm's most of all.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
