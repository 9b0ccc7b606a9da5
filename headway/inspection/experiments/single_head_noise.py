"""Single-head noise: an average of two values by one head hangs on the lengths of two keys.

    k_s ~ N(μ_s, αI),   but   k_a ~ N(μ_a, αI + ½ μ_a μ_aᵀ),   μ's orthonormal, α small;   q = β (μ_a + μ_b)

Then k_a ≈ ξ μ_a with ξ ~ N(1, ½), the scores are βξ, β and 0, and for α → 0

    w_a = 1 / (1 + e^(β(1−ξ)) + (n−2) e^(−βξ)):

near 1 where ξ > 1, near 0 where ξ < 1. Its standard deviation goes to ½ as β grows. Cost O(n·d) a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from headway.inspection.experiments.base import (
    COLOURS,
    GREY,
    Experiment,
    Table,
    generator,
    look_up,
    normal,
    orthonormal,
)


@dataclass
class SingleHeadNoise:
    """One entry a β: the weight on a in every sample, and its standard deviation beside that of the formula."""

    keys: int
    width: int
    alpha: float
    samples: int
    betas: list[float]
    weights: Tensor  # (betas, samples)
    deviations: list[float]
    formula: list[float]


def run(
    betas: Sequence[float] = (1, 2, 5, 10, 20, 50, 100),
    keys: int = 8,
    width: int = 16,
    alpha: float = 1e-6,
    samples: int = 20_000,
    seed: int = 0,
) -> SingleHeadNoise:
    source = generator(seed)
    means = orthonormal(keys, width, source)  # (S, K)
    k = noisy_keys(means, alpha, samples, source)  # (N, S, K)
    weights = torch.stack([look_up(beta * (means[0] + means[1]), k, means)[0][:, 0] for beta in betas])
    deviations = weights.std(-1).tolist()
    formula = [expected(beta, keys) for beta in betas]
    return SingleHeadNoise(keys, width, alpha, samples, list(betas), weights, deviations, formula)


def noisy_keys(means: Tensor, alpha: float, samples: int, source: Generator) -> Tensor:
    """Keys around their means (S, K), the first one also longer or shorter: (N, S, K)."""
    noise = alpha**0.5 * normal(samples, *means.shape, source=source)
    length = torch.zeros(samples, len(means), 1, dtype=means.dtype)
    length[:, 0] = 0.5**0.5 * normal(samples, 1, source=source)
    return means + noise + length * means


def expected(beta: float, keys: int) -> float:
    """The standard deviation of w_a for α → 0, by the midpoint rule over ξ."""
    z = torch.linspace(-8, 8, 40_001, dtype=torch.float64)
    density = torch.exp(-(z**2) / 2)
    density = density / density.sum()
    xi = 1 + z * math.sqrt(0.5)
    weight = torch.stack([beta * xi, torch.full_like(xi, beta), *[torch.zeros_like(xi)] * (keys - 2)]).softmax(0)[0]
    mean = density @ weight
    return float((density @ (weight - mean) ** 2).sqrt())


def table(result: SingleHeadNoise) -> Table:
    rows = [
        (f"{beta:g}", f"{weights.mean():.3f}", f"{deviation:.3f}", f"{formula:.3f}", f"{between(weights):.0%}")
        for beta, weights, deviation, formula in zip(
            result.betas, result.weights, result.deviations, result.formula, strict=True
        )
    ]
    return Table(("β", "mean weight on a", "std", "std, formula", "between 0.1 and 0.9"), rows)


def between(weights: Tensor) -> float:
    """The share of samples in which the head does average."""
    return float(((weights > 0.1) & (weights < 0.9)).double().mean())


def finding(result: SingleHeadNoise) -> str:
    pairs = zip(result.betas, result.deviations, strict=True)
    shown = [f"{deviation:.2f} at β = {beta:g}" for beta, deviation in pairs if beta in (5, 20, 100)]
    listed = ", ".join(shown) or f"{result.deviations[-1]:.2f} at β = {result.betas[-1]:g}"
    return (
        f"Over {result.samples:,} samples ({result.keys} keys in {result.width} dimensions, α = {result.alpha:g}) the "
        f"weight on a has the standard deviation {listed}: the head takes one value or the other, hardly ever the mean."
    )


def draw(result: SingleHeadNoise, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    shown = [index for index, beta in enumerate(result.betas) if beta in (2, 5, 20)] or [len(result.betas) - 1]
    for colour, index in zip(COLOURS, shown, strict=False):
        shares = torch.histc(result.weights[index], 25, 0, 1) / result.samples
        left.stairs(shares.tolist(), torch.linspace(0, 1, 26).tolist(), color=colour, linewidth=1.8)
        left.plot([], [], color=colour, label=f"β = {result.betas[index]:g}")
    left.set(title="Weight on a, over samples of the keys", xlabel="weight on a", ylabel="share of samples")
    left.legend(loc="upper center")
    right.semilogx(result.betas, result.formula, "--", color=GREY, label="formula, α → 0")
    right.semilogx(result.betas, result.deviations, "o", color=COLOURS[0], label="measured")
    right.axhline(0.5, color=GREY, linewidth=0.8)
    right.set(title="The swing of the weight", xlabel="query scale β", ylabel="standard deviation", ylim=(0, 0.55))
    right.legend(loc="lower right")


EXPERIMENT = Experiment(
    name="single-head-noise",
    summary="one head that should average two values swings between them when a key varies in length",
    question="Averaging with one query needs two equal scores. What if one of the keys is sometimes longer and "
    "sometimes shorter, as keys of real text are?",
    look="The weight on a should stand at ½. The histogram shows where it is: at both ends. The sharper the query, the "
    "stronger the swing; the standard deviation climbs to ½, that of a coin.",
    beware="The mean weight over samples is close to ½, so looking at averages alone hides the failure. And the noise "
    "that matters is along μ_a: isotropic noise of the same small α does nothing visible.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
