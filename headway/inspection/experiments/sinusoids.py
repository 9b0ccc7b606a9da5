"""Sinusoids: what the dot products of sinusoidal positions know.

    p_t[2i] = sin(t θ_i),  p_t[2i+1] = cos(t θ_i),  θ_i = 10000^(−2i/D)     ⇒     p_tᵀ p_s = Σ_i cos((t − s) θ_i)

A function of t − s alone, largest at t = s. With the misprint that has a sine in both places,

    p_tᵀ p_s = 2 Σ_i sin(t θ_i) sin(s θ_i) = Σ_i cos((t − s) θ_i) − cos((t + s) θ_i),

which depends on t + s too. "Attention is all you need", section 3.5. Cost O(T²·D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.inspection.experiments.base import BLUE, ORANGE, Experiment, Table, off_diagonals, short
from headway.nn import Sinusoidal


@dataclass
class Sinusoids:
    """Dot products p_tᵀp_s / (D/2), so that the right ones are 1 on the diagonal, and what they say."""

    length: int
    width: int
    products: Tensor  # (T, T)
    misprinted: Tensor
    spread: float  # largest difference between two products of the same t − s
    misprinted_spread: float
    by_distance: list[float]  # mean product at distance 0, 1, …
    neighbours: float  # share of positions that fit the ones beside them best
    misprinted_neighbours: float


def run(length: int = 128, width: int = 128, base: float = 10_000.0, seed: int = 0) -> Sinusoids:
    """Nothing here is random: `seed` is taken and not used."""
    nothing = torch.zeros(length, width, dtype=torch.float64)
    right = Sinusoidal(width, base).double()(nothing, torch.arange(length))  # (T, D)
    sine = right[:, 0::2]
    wrong = torch.stack([sine, sine], -1).flatten(-2)
    products, misprinted = (p @ p.T / (width / 2) for p in (right, wrong))
    by_distance = [float(products.diagonal(distance).mean()) for distance in range(length)]
    return Sinusoids(
        length,
        width,
        products,
        misprinted,
        off_diagonals(products),
        off_diagonals(misprinted),
        by_distance,
        beside(products),
        beside(misprinted),
    )


def beside(products: Tensor) -> float:
    """The share of inner positions t whose two largest products with others are those with t − 1 and t + 1."""
    others = products.clone().fill_diagonal_(-torch.inf)
    nearest = others.topk(2).indices[1:-1].sort(-1).values  # (T − 2, 2)
    t = torch.arange(1, len(products) - 1)
    return float((nearest == torch.stack([t - 1, t + 1], -1)).all(-1).double().mean())


def table(result: Sinusoids) -> Table:
    first, last = 0, result.length - 1
    rows = [
        ("largest spread along a diagonal", short(result.spread), short(result.misprinted_spread)),
        (
            "p_tᵀp_t at the first and the last position",
            f"{result.products[first, first]:.2f}, {result.products[last, last]:.2f}",
            f"{result.misprinted[first, first]:.2f}, {result.misprinted[last, last]:.2f}",
        ),
        ("best fit, other than t: t ± 1", f"{result.neighbours:.0%}", f"{result.misprinted_neighbours:.0%}"),
        *(
            (
                f"mean p_tᵀp_s at distance {distance}",
                f"{result.by_distance[distance]:.3f}",
                f"{result.misprinted.diagonal(distance).mean():.3f}",
            )
            for distance in (0, 1, 4, 16, 64)
            if distance < result.length
        ),
    ]
    return Table(("divided by D/2", "sin, cos", "sin, sin (misprint)"), rows)


def finding(result: Sinusoids) -> str:
    return (
        f"With sine and cosine p_tᵀp_s is the same wherever the pair stands (to {short(result.spread)}) and falls "
        f"from 1 to {result.by_distance[-1]:.2f} over {result.length - 1} positions; with two sines equal distances "
        f"differ by up to {result.misprinted_spread:.2f}."
    )


def draw(result: Sinusoids, figure: Any) -> None:
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1.2, 1))
    for axes, products, title in (
        (left, result.products, "sin, cos"),
        (middle, result.misprinted, "sin, sin (misprint)"),
    ):
        image = axes.imshow(products.numpy(), cmap="cividis", vmin=0, vmax=1, interpolation="none")
        axes.set(title=title, xlabel="position s", ylabel="position t")
        axes.grid(visible=False)
    figure.colorbar(
        image, ax=(left, middle), location="bottom", label="$p_t^⊤p_s$ / (D/2)", shrink=0.8, aspect=35, extend="both"
    )
    right.plot(result.by_distance, color=BLUE, label="sin, cos")
    size = result.length
    for start, style in ((0, "-"), (size // 3, "--")):
        line = result.misprinted[start, start:]
        right.plot(line.tolist(), style, color=ORANGE, linewidth=1.2, label=f"sin, sin, from t = {start}")
    right.set(title="By distance", xlabel="distance s − t", ylabel="$p_t^⊤p_s$ / (D/2)", ylim=(-0.1, 1.5))
    right.legend()


EXPERIMENT = Experiment(
    name="sinusoids",
    summary="sinusoidal positions: dot products depend on the distance alone, unless both parts are sines",
    question="Why pairs of a sine and a cosine? Because their dot product is a cosine of the difference.",
    look="Left: equal colours along every diagonal, brightest in the middle. Middle: the same with the cosine "
    "misprinted as a sine, as some texts have it. Right: the fall with distance, the same from every position with "
    "sine and cosine and different from each with two sines.",
    beware="The fall with distance is no rule for every pair: the curve has bumps, and attention sees these products "
    "only through W_Qᵀ W_K. With two sines position 0 is the zero vector, and equal distances look different at "
    "different places.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
