"""Rotary positions: a score that knows only the distance.

    (R(t) q)ᵀ (R(s) k) = qᵀ R(s − t) k,    R(t) turns pair i by the angle t θ_i,  θ_i = 10000^(−2i/K)

The map of a fixed q and k placed at all (t, s) has equal numbers along its diagonals. If k = q, the score is
Σ_i (q_{2i}² + q_{2i+1}²) cos((s − t) θ_i), on average Σ_i 2cos((s − t) θ_i), which falls with distance; for independent
q and k the mean is zero at every distance. RoFormer (Su et al. 2021), sections 3.2 and 3.3. Cost O(T²·K).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.inspection.experiments.base import (
    BLUE,
    GREY,
    ORANGE,
    Experiment,
    Table,
    generator,
    normal,
    off_diagonals,
    short,
)
from headway.nn import Rotary


@dataclass
class RotaryMap:
    """Scores are divided by √K. `spreads[(dtype, first position)]` is the largest difference along a diagonal."""

    length: int
    head_width: int
    draws: int
    scores: Tensor  # (T, T) of one q and k
    spreads: dict[tuple[str, int], float]
    same_mean: list[float]  # by distance, over draws of q = k
    formula: list[float]
    other_mean: list[float]  # over draws of independent q and k
    other_deviation: list[float]


def run(
    length: int = 64,
    head_width: int = 64,
    draws: int = 500,
    far: int = 100_000,
    distances: int = 256,
    base: float = 10_000.0,
    seed: int = 0,
) -> RotaryMap:
    source = generator(seed)
    q, k = normal(head_width, source=source), normal(head_width, source=source)
    rotary = Rotary(head_width, base)
    spreads = {
        (str(dtype).removeprefix("torch."), first): off_diagonals(
            score_map(rotary, q.to(dtype), k.to(dtype), length, first)
        )
        for dtype in (torch.float64, torch.float32)
        for first in (0, far)
    }
    q_all, k_all = normal(draws, head_width, source=source), normal(draws, head_width, source=source)
    same, other = (by_distance(rotary, q_all, keys, distances) for keys in (q_all, k_all))  # (N, distances)
    theta = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.arange(distances)[:, None] * theta  # (distances, K/2)
    return RotaryMap(
        length,
        head_width,
        draws,
        score_map(rotary, q, k, length, 0),
        spreads,
        same.mean(0).tolist(),
        (2 * angles.cos().sum(-1) / head_width**0.5).tolist(),
        other.mean(0).tolist(),
        other.std(0).tolist(),
    )


def score_map(rotary: Rotary, q: Tensor, k: Tensor, length: int, first: int) -> Tensor:
    """The score of the pair q, k with q at each t and k at each s, from position `first` on: (T, T)."""
    places = torch.arange(first, first + length)
    queries, keys = (rotary.turn(x.expand(1, 1, length, -1), places)[0, 0] for x in (q, k))
    return queries @ keys.T / len(q) ** 0.5


def by_distance(rotary: Rotary, q: Tensor, k: Tensor, distances: int) -> Tensor:
    """Scores of many pairs, q at 0 and k at 0, 1, …: (N, K), (N, K) → (N, distances)."""
    places = torch.arange(distances)
    turned = rotary.turn(k[:, None, None].expand(-1, 1, distances, -1), places)[:, 0]  # (N, distances, K)
    return (turned @ q[..., None]).squeeze(-1) / q.shape[-1] ** 0.5


def table(result: RotaryMap) -> Table:
    rows = [
        (f"largest spread along a diagonal, {dtype}, from position {first:,}", short(spread))
        for (dtype, first), spread in result.spreads.items()
    ]
    for distance in (0, 1, 4, 16, 64, 255):
        if distance < len(result.same_mean):
            mean, other = result.same_mean[distance], round(result.other_mean[distance], 2) + 0.0  # no −0.00
            rows.append((f"mean score at distance {distance}: k = q; independent k", f"{mean:.2f}; {other:.2f}"))
    return Table((f"head width {result.head_width}, {result.draws:,} pairs", "value"), rows)


def finding(result: RotaryMap) -> str:
    spread = result.spreads["float64", 0]
    return (
        f"One q and k give the same score at every place of the same distance (to {short(spread)} in float64); with k "
        f"= q the mean score falls from {result.same_mean[0]:.2f} to {result.same_mean[-1]:.2f} over "
        f"{len(result.same_mean) - 1} positions, with independent q and k it is {result.other_mean[0]:.2f} and "
        f"{result.other_mean[-1]:.2f}."
    )


def draw(result: RotaryMap, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    size = float(result.scores.abs().max())
    image = left.imshow(result.scores.numpy(), cmap="cividis", vmin=-size, vmax=size, interpolation="none")
    figure.colorbar(image, ax=left, label="score (R(t)q)ᵀ(R(s)k) / √K", shrink=0.9)
    left.set(title="One q and one k at all places", xlabel="position s of the key", ylabel="position t of the query")
    left.grid(visible=False)
    places = range(len(result.same_mean))
    low, high = (
        [mean + sign * deviation for mean, deviation in zip(result.other_mean, result.other_deviation, strict=True)]
        for sign in (-1, 1)
    )
    right.fill_between(places, low, high, color=ORANGE, alpha=0.2, linewidth=0, label="independent: mean ± std")
    right.plot(places, result.other_mean, color=ORANGE, label="independent q and k: mean")
    right.plot(places, result.same_mean, color=BLUE, linewidth=2.5, label="k = q: mean")
    right.plot(places, result.formula, "--", color=GREY, label="2 Σ cos(Δθ) / √K")
    right.set(title="Mean score by distance", xlabel="distance Δ in positions", ylabel="score qᵀR(Δ)k / √K")
    right.legend()


EXPERIMENT = Experiment(
    name="rotary",
    summary="rotary positions: the score of a pair depends on its distance alone",
    question="A query and a key are turned by angles that grow with their positions. What does their score still know?",
    look="Left: one pair at all places; every diagonal has one colour. Right: over many pairs, the mean score of a key "
    "equal to its query falls with distance.",
    beware="'Rotary makes scores fall with distance' holds for keys that resemble their queries. For unrelated pairs "
    "the mean is zero and the spread the same at every distance: nothing far away is shut out. And the angles are "
    "products of a position and a frequency: in float32, far from the origin, they lose digits (fourth line of the "
    "table).",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
