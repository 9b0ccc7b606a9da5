"""Subspaces: two values added together can be told apart when they lie in different subspaces.

    v_a ∈ span{a_1 … a_m},  v_b ∈ span{b_1 … b_m},  M (v_a + v_b) = v_a

    M = Σ a aᵀ                    orthonormal a's, orthogonal to the b's
    M = Σ a aᵀ / (aᵀa)            orthogonal a's of any length
    M = A (AᵀA)⁻¹ Aᵀ              any basis A of the subspace
    M = A (AᵀRA)⁻¹ AᵀR            any two subspaces that share no direction, R = I − B (BᵀB)⁻¹ Bᵀ

This is why heads may be added up: the layers after them can read each from its own subspace (Elhage et al. 2021, "A
mathematical framework for Transformer circuits", on the residual stream). Cost O(d²·m) for M, O(d²) to apply it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.inspection.experiments.base import (
    COLOURS,
    Experiment,
    Table,
    generator,
    normal,
    orthonormal,
    short,
)

BASES = ("orthonormal", "orthogonal, other lengths", "slanted within A", "A slanted towards B")
MAPS = ("Σ a aᵀ", "Σ a aᵀ/(aᵀa)", "A(AᵀA)⁻¹Aᵀ", "A(AᵀRA)⁻¹AᵀR")


@dataclass
class Subspaces:
    """errors[basis][map]: mean of ‖M(v_a + v_b) − v_a‖ / ‖v_a‖ over draws of the values."""

    width: int
    size: int
    draws: int
    errors: dict[str, dict[str, float]]


def run(width: int = 16, size: int = 4, draws: int = 200, seed: int = 0) -> Subspaces:
    source = generator(seed)
    both = orthonormal(2 * size, width, source).T  # (d, 2m)
    a, b = both[:, :size], both[:, size:]
    lengths = torch.linspace(0.5, 2.0, size, dtype=torch.float64)
    mixing = normal(size, size, source=source) / size**0.5 + torch.eye(size, dtype=torch.float64)
    bases = dict(zip(BASES, ((a, b), (a * lengths, b), (a @ mixing, b), (a + 0.5 * b, b)), strict=True))
    maps: dict[str, Callable[[Tensor, Tensor], Tensor]] = dict(
        zip(MAPS, (outer_products, divided, projection, oblique), strict=True)
    )
    result = Subspaces(width, size, draws, {})
    for name, (first, second) in bases.items():
        v_a = first @ normal(size, draws, source=source)  # (d, draws)
        v_b = second @ normal(size, draws, source=source)
        result.errors[name] = {
            form: float(((make(first, second) @ (v_a + v_b) - v_a).norm(dim=0) / v_a.norm(dim=0)).mean())
            for form, make in maps.items()
        }
    return result


def outer_products(a: Tensor, b: Tensor) -> Tensor:
    """Σ a aᵀ."""
    return a @ a.T


def divided(a: Tensor, b: Tensor) -> Tensor:
    """Σ a aᵀ / (aᵀa)."""
    return (a / a.square().sum(0)) @ a.T


def projection(a: Tensor, b: Tensor) -> Tensor:
    """A (AᵀA)⁻¹ Aᵀ."""
    return a @ torch.linalg.solve(a.T @ a, a.T)


def oblique(a: Tensor, b: Tensor) -> Tensor:
    """A (AᵀRA)⁻¹ AᵀR, R = I − B (BᵀB)⁻¹ Bᵀ: keeps A and removes B, whatever the angle between them."""
    away = torch.eye(len(b), dtype=b.dtype) - projection(b, a)
    return a @ torch.linalg.solve(a.T @ away @ a, a.T @ away)


def table(result: Subspaces) -> Table:
    rows = [(basis, *(short(error) for error in errors.values())) for basis, errors in result.errors.items()]
    return Table(("basis", *MAPS), rows)


def finding(result: Subspaces) -> str:
    unit, other = result.errors[BASES[0]], result.errors[BASES[1]]
    return (
        f"With orthonormal vectors Σ a aᵀ gives v_a back to {short(unit[MAPS[0]])}; with vectors of other lengths it "
        f"is off by {other[MAPS[0]]:.0%} and Σ a aᵀ/(aᵀa) by {short(other[MAPS[1]])}."
    )


def draw(result: Subspaces, figure: Any) -> None:
    axes = figure.subplots()
    for index, form in enumerate(MAPS):
        places = [basis + 0.2 * (index - 1.5) for basis in range(len(BASES))]
        heights = [max(result.errors[basis][form], 1e-17) for basis in BASES]
        axes.bar(places, heights, width=0.18, bottom=1e-18, color=COLOURS[index], label=form)
    axes.set_yscale("log")
    axes.axhline(1, color=COLOURS[-1], linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(BASES)), BASES)
    axes.grid(visible=False, axis="x")
    axes.set(
        title="How far $M(v_a + v_b)$ is from $v_a$",
        xlabel="the basis vectors of A",
        ylabel="mean error, relative to $v_a$",
        ylim=(1e-17, 1e6),
    )
    axes.legend(ncols=4, loc="upper center")


EXPERIMENT = Experiment(
    name="subspaces",
    summary="a sum of two values can be taken apart when they live in different subspaces",
    question="A head that averages returns v_a + v_b (times ½). Is v_a lost in the sum? Not if a matrix M exists that "
    "keeps one subspace and removes the other.",
    look="Each group of bars is a kind of basis, each colour a formula for M. Bars at 1e-16 are exact up to rounding, "
    "bars near 1 are wrong. Each formula works for its own case and those to the left of it.",
    beware="M = Σ a aᵀ is often given for 'orthogonal' vectors. It needs orthonormal ones: the length of each a enters "
    "squared. For orthogonal vectors divide by aᵀa; for a slanted basis (AᵀA)⁻¹ is needed; and if the two subspaces "
    "are not orthogonal to each other, M must know both.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
