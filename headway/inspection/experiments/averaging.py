"""Averaging: one query that fits two keys equally brings back the mean of their values.

    q = β (k_a + k_b),   z  →  ½ (v_a + v_b)

For n orthonormal keys w_a = w_b = e^β / (2e^β + n − 2), every other weight is u = 1 / (2e^β + n − 2), and the error is
u ‖Σ_{s≠a,b} v_s − ½ (n−2)(v_a + v_b)‖: it falls by e for every unit of β. Cost O(n·d) a query.
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
    slope,
)


@dataclass
class Averaging:
    """One entry a β. Errors are distances from ½ (v_a + v_b), relative to its length."""

    keys: int
    length: float  # of the shorter key in the uneven pair
    betas: list[float]
    weights: list[float]  # w_a, orthonormal keys
    errors: list[float]
    formula: list[float]  # of the error
    uneven: list[float]  # errors where k_b is shorter than k_a
    rate: float  # fall of ln(error) for each unit of β


def run(
    betas: Sequence[float] = (0, 2, 4, 6, 8, 10, 15, 20, 25, 30),
    keys: int = 16,
    width: int = 64,
    length: float = 0.95,
    seed: int = 0,
) -> Averaging:
    source = generator(seed)
    even = orthonormal(keys, width, source)  # (S, K)
    uneven = even.clone()
    uneven[1] *= length
    values = normal(keys, width, source=source)
    wanted = (values[0] + values[1]) / 2
    rest = (values[2:].sum(0) - (keys - 2) * wanted).norm() / wanted.norm()
    result = Averaging(keys, length, list(betas), [], [], [], [], 0.0)
    for beta in betas:
        weights, z = look_up(beta * (even[0] + even[1]), even, values)
        result.weights.append(float(weights[0]))
        result.errors.append(float((z - wanted).norm() / wanted.norm()))
        result.formula.append(float(rest) / (2 * math.exp(beta) + keys - 2))
        z = look_up(beta * (uneven[0] + uneven[1]), uneven, values)[1]
        result.uneven.append(float((z - wanted).norm() / wanted.norm()))
    steep = [(beta, math.log(error)) for beta, error in zip(betas, result.errors, strict=True) if error > 1e-13]
    tail = steep[len(steep) // 2 :]
    result.rate = -slope([beta for beta, _ in tail], [error for _, error in tail])
    return result


def table(result: Averaging) -> Table:
    columns = (result.betas, result.weights, result.errors, result.formula, result.uneven)
    rows = [
        (f"{beta:g}", f"{weight:.5f}", short(error), short(formula), short(uneven))
        for beta, weight, error, formula, uneven in zip(*columns, strict=True)
    ]
    return Table(("β", "weight on a", "error", "formula", f"error, k_b of length {result.length:g}"), rows)


def finding(result: Averaging) -> str:
    best = min(range(len(result.betas)), key=lambda index: result.uneven[index])
    return (
        f"The error falls as e^(−{result.rate:.2f}·β), down to {short(result.errors[-1])} at β = {result.betas[-1]:g}; "
        f"with keys of length 1 and {result.length:g} it is smallest ({short(result.uneven[best])}) at "
        f"β = {result.betas[best]:g} and grows to {short(result.uneven[-1])} as the longer key wins."
    )


def draw(result: Averaging, figure: Any) -> None:
    axes = figure.subplots()
    axes.semilogy(result.betas, result.formula, "--", color=GREY, label="formula for orthonormal keys")
    axes.semilogy(result.betas, result.errors, "o", color=BLUE, label="orthonormal keys")
    axes.semilogy(
        result.betas, result.uneven, "s-", color=ORANGE, label=f"the same, one key of length {result.length:g}"
    )
    axes.set(
        title="How far one query on two keys is from the mean of their values",
        xlabel="query scale β",
        ylabel="distance from ½ ($v_a + v_b$), relative to it",
    )
    axes.legend()


EXPERIMENT = Experiment(
    name="averaging",
    summary="one query on two keys brings back the mean of two values",
    question="Can one head take half of its output from one position and half from another? The query is β times the "
    "sum of two keys.",
    look="For orthonormal keys the error falls by e for every unit of β, as the formula says. The second line has the "
    "same keys, one of them a little shorter: there the error first falls and then rises.",
    beware="A sharper query is not always a better one. The two weights stand in the ratio exp(β·(difference of the "
    "two scores)), so any difference between the keys is blown up by β. The tidy result needs keys of exactly equal "
    "length.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
