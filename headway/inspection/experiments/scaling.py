"""Scaling: what the division by √d does to the softmax and to its gradient.

    q, k ~ N(0, I_d)   ⇒   qᵀk has variance d;   qᵀk/√d has variance 1 for every d

Without the division the largest score runs away from the others, the softmax saturates, and its Jacobian
diag(w) − wwᵀ goes to zero. "Attention is all you need", section 3.2.1. Cost O(n·d) a query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headway.inspection.experiments.base import BLUE, GREY, ORANGE, Experiment, Table, generator, normal, short


@dataclass
class Softmax:
    """Means over the queries, one entry a width."""

    largest: list[float] = field(default_factory=list)  # weight
    entropy: list[float] = field(default_factory=list)  # nats
    gradient: list[float] = field(default_factory=list)  # ‖∂w/∂scores‖, Frobenius
    median: list[float] = field(default_factory=list)  # of the same: what half of the queries stay below


@dataclass
class Scaling:
    keys: int
    queries: int
    widths: list[int]
    scaled: Softmax
    unscaled: Softmax


def run(
    widths: Sequence[int] = (4, 16, 64, 256, 1024, 4096),
    keys: int = 64,
    sets: int = 16,
    queries: int = 32,
    seed: int = 0,
) -> Scaling:
    source = generator(seed)
    result = Scaling(keys, sets * queries, list(widths), Softmax(), Softmax())
    for width in widths:
        k = normal(sets, keys, width, source=source)
        q = normal(sets, queries, width, source=source)
        scores = (q @ k.mT).flatten(0, 1)  # (N, S)
        record(result.unscaled, scores.softmax(-1))
        record(result.scaled, (scores / math.sqrt(width)).softmax(-1))
    return result


def record(into: Softmax, weights: Tensor) -> None:
    """Means, and a median, over the rows of weights (N, S)."""
    into.largest.append(float(weights.max(-1).values.mean()))
    into.entropy.append(float(torch.special.entr(weights).sum(-1).mean()))
    gradients = jacobian_norm(weights)
    into.gradient.append(float(gradients.mean()))
    into.median.append(float(gradients.median()))


def jacobian_norm(weights: Tensor) -> Tensor:
    """‖diag(w) − wwᵀ‖ = √(Σw² − 2Σw³ + (Σw²)²) for each row: (N, S) → (N,)."""
    squares, cubes = weights.square().sum(-1), weights.pow(3).sum(-1)
    return (squares - 2 * cubes + squares.square()).clamp(min=0).sqrt()


def table(result: Scaling) -> Table:
    s, u = result.scaled, result.unscaled
    columns = (result.widths, s.largest, u.largest, s.entropy, u.entropy, s.median, u.median)
    rows = [
        (str(width), f"{a:.3f}", f"{b:.3f}", f"{c:.2f}", f"{d:.2f}", short(e), short(f))
        for width, a, b, c, d, e, f in zip(*columns, strict=True)
    ]
    header = ("d", "max weight ÷√d", "without", "entropy ÷√d", "without", "median gradient ÷√d", "without")
    return Table(header, rows)


def finding(result: Scaling) -> str:
    s, u = result.scaled, result.unscaled
    return (
        f"From d = {result.widths[0]} to {result.widths[-1]} the largest of {result.keys} weights goes from "
        f"{u.largest[0]:.2f} to {u.largest[-1]:.2f} without √d and stays between {min(s.largest):.2f} and "
        f"{max(s.largest):.2f} with it; at the widest, half of the queries pass a gradient below "
        f"{short(u.median[-1])} without it and {short(s.median[-1])} with it."
    )


def draw(result: Scaling, figure: Any) -> None:
    panels = figure.subplots(1, 3)
    titles = ("Mean of the largest weight", "Mean entropy of the weights", "Median gradient")
    labels = ("weight", "nats", "‖∂w/∂scores‖")
    ticks = [f"{width // 1024}k" if width >= 1024 else str(width) for width in result.widths]
    for axes, name, title, label in zip(panels, ("largest", "entropy", "median"), titles, labels, strict=True):
        axes.plot(result.widths, getattr(result.scaled, name), "o-", color=BLUE, label="qᵀk/√d")
        axes.plot(result.widths, getattr(result.unscaled, name), "s-", color=ORANGE, label="qᵀk")
        axes.set_xscale("log")
        axes.set_xticks(result.widths, ticks)
        axes.minorticks_off()
        axes.set(title=title, xlabel="width d", ylabel=label)
    panels[0].set_ylim(0, 1.05)
    panels[0].legend()
    uniform = math.log(result.keys)
    panels[1].axhline(uniform, color=GREY, linestyle="--")
    panels[1].annotate(
        f"ln {result.keys}: all weights equal", (result.widths[0], uniform), (0, 4), textcoords="offset points"
    )
    panels[1].set_ylim(0, 1.15 * uniform)
    panels[2].plot(result.widths, result.unscaled.gradient, ":", color=ORANGE, label="qᵀk, mean")
    panels[2].set_yscale("log")
    panels[2].legend(loc="lower left")


EXPERIMENT = Experiment(
    name="scaling",
    summary="why scores are divided by √d: the softmax saturates and its gradient dies",
    question="Queries and keys have entries of variance 1. What becomes of the softmax as they get wider, with and "
    "without the division by √d?",
    look="With √d all three lines are flat: the width does not matter. Without it, one key takes all of the weight, "
    "the entropy goes to 0, and so does the gradient through the softmax.",
    beware="The reason is not that the softmax overflows; it subtracts its maximum (in float16 the product q·k itself "
    "can overflow, which dividing q first prevents). It is that a saturated "
    "softmax passes on almost no gradient. That is so for most queries, not for all: where two keys nearly tie, the "
    "gradient is large, and the mean (dotted) falls only as 1/√d. In narrow heads the unscaled softmax even has the "
    "larger gradient. And 1/√d fits independent q and k at the start of training; a trained model may grow its scores "
    "back.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
