"""Copying: a query that fits one key much better than the others brings back that key's value.

    q = β k_c,   w_s = exp(q·k_s) / Σ_r exp(q·k_r),   z = Σ_s w_s v_s  →  v_c   as β grows

For n orthonormal keys w_c = e^β / (e^β + n − 1). Scores are not divided by √K here: β stands for the whole scale.
Attention: Vaswani et al. 2017, section 3.2.1. Cost O(n·d) a query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.inspection.experiments.base import (
    BLUE,
    GREY,
    ORANGE,
    Experiment,
    Table,
    generator,
    look_up,
    normal,
    orthonormal,
    short,
)


@dataclass
class Copying:
    """One entry a β: the weight on the wanted key and the distance of the output from its value, relative to it."""

    keys: int
    width: int
    betas: list[float]
    formula: list[float]
    weights: list[float]  # orthonormal keys
    errors: list[float]
    random_weights: list[float]  # random unit keys
    random_errors: list[float]


def run(
    betas: Sequence[float] = (0, 1, 2, 3, 4, 6, 8, 10, 12, 14, 16), keys: int = 16, width: int = 64, seed: int = 0
) -> Copying:
    source = generator(seed)
    exact = orthonormal(keys, width, source)  # (S, K)
    random = normal(keys, width, source=source)
    random = random / random.norm(dim=-1, keepdim=True)
    values = normal(keys, width, source=source)
    result = Copying(keys, width, list(betas), [], [], [], [], [])
    for beta in betas:
        result.formula.append(1 / (1 + (keys - 1) * math.exp(-beta)))
        for k, weights, errors in (
            (exact, result.weights, result.errors),
            (random, result.random_weights, result.random_errors),
        ):
            w, z = look_up(beta * k[0], k, values)
            weights.append(float(w[0]))
            errors.append(float((z - values[0]).norm() / values[0].norm()))
    return result


def table(result: Copying) -> Table:
    columns = (result.betas, result.formula, result.weights, result.errors, result.random_weights, result.random_errors)
    rows = [
        (f"{beta:g}", f"{formula:.4f}", f"{weight:.4f}", short(error), f"{random:.4f}", short(off))
        for beta, formula, weight, error, random, off in zip(*columns, strict=True)
    ]
    return Table(("β", "formula", "weight", "error", "random keys: weight", "error"), rows)


def finding(result: Copying) -> str:
    half, rest = math.log(result.keys - 1), short(1 - result.weights[-1])
    return (
        f"At β = {result.betas[-1]:g} the query takes all but {rest} of its output from one of {result.keys} values; "
        f"half of it takes β = ln({result.keys - 1}) = {half:.2f}."
    )


def draw(result: Copying, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    left.plot(result.betas, result.formula, color=GREY, linestyle="--", label="$e^β/(e^β+n-1)$")
    left.plot(result.betas, result.weights, "o", color=BLUE, label="orthonormal keys")
    left.plot(result.betas, result.random_weights, "s", color=ORANGE, markerfacecolor="none", label="random unit keys")
    left.set(title="Weight on the wanted key", ylabel="weight", ylim=(-0.03, 1.05))
    left.legend(loc="lower right")
    right.semilogy(result.betas, result.errors, "o-", color=BLUE, label="orthonormal keys")
    right.semilogy(result.betas, result.random_errors, "s-", color=ORANGE, markerfacecolor="none", label="random keys")
    right.set(title="Distance from the wanted value", ylabel="‖z − v‖ / ‖v‖")
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("query scale β")
        axes.locator_params(axis="x", integer=True)


EXPERIMENT = Experiment(
    name="copying",
    summary="a query that fits one key brings back its value; how sharp must it be?",
    question="Attention is an average. When does it copy one value instead? The query is β times one of the keys.",
    look="The weight rises as e^β/(e^β + n − 1): half of it is reached at β = ln(n − 1), and from there on the error "
    "falls by e for every unit of β. Random unit vectors are nearly orthogonal and behave nearly the same.",
    beware="A softmax over finite scores never gives a weight of exactly 1, so attention copies as nearly as you like "
    "and never exactly. How large a score is 'large' depends on how many keys there are: it is compared with ln n.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
