"""Permutation: self-attention without positions does not know the order of its input.

    Z(PX) = P Z(X)   for every permutation P, if nothing in Z depends on where a token stands

Measured as ‖Z(PX) − P Z(X)‖ / ‖Z(X)‖ in float64, for every position scheme. "Attention is all you need", section 3.5.
Cost O(T²·D) a scheme.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.inspection.experiments.base import (
    BLUE,
    GREY,
    ORANGE,
    Experiment,
    Table,
    generator,
    normal,
    seeded,
    short,
)
from headway.nn import InAttention, SelfAttention, make_position
from headway.nn.positions import NAMES


@dataclass
class Permutation:
    """deviations[scheme]: ‖Z(PX) − P Z(X)‖ / ‖Z(X)‖, the mean over permutations."""

    tokens: int
    permutations: int
    deviations: dict[str, float]


class WithPositions(nn.Module):
    """Self-attention with a position scheme at the place where it acts."""

    def __init__(self, scheme: nn.Module | None, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        inside = scheme if isinstance(scheme, InAttention) else None
        self.before = None if isinstance(scheme, InAttention) else scheme
        self.attention = SelfAttention(width, heads, causal=causal, position=inside)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        return self.attention(x if self.before is None else self.before(x, positions), positions)


@torch.no_grad()
def run(tokens: int = 24, width: int = 32, heads: int = 4, permutations: int = 20, seed: int = 0) -> Permutation:
    source = generator(seed)
    x = normal(1, tokens, width, source=source)
    orders = [torch.randperm(tokens, generator=source) for _ in range(permutations)]
    result = Permutation(tokens, permutations, {})
    for name, causal in [("none", False), ("none, causal", True), *((name, False) for name in NAMES if name != "none")]:
        with seeded(seed):
            scheme = make_position(name.split(",")[0], width, heads, tokens)
            model = WithPositions(scheme, width, heads, causal)
            for table in model.parameters():
                nn.init.normal_(table, std=table.shape[-1] ** -0.5)  # as after training: learned tables begin at zero
        z = model.double()(x)
        deviations = [(model(x[:, order]) - z[:, order]).norm() / z.norm() for order in orders]
        result.deviations[name] = float(torch.stack(deviations).mean())
    return result


def table(result: Permutation) -> Table:
    return Table(("positions", "‖Z(PX) − PZ(X)‖ / ‖Z(X)‖"), [(n, short(d)) for n, d in result.deviations.items()])


def finding(result: Permutation) -> str:
    ordered = {name: deviation for name, deviation in result.deviations.items() if name != "none"}
    least = min(ordered, key=lambda name: ordered[name])
    return (
        f"Without positions a permuted input gives the permuted output to {short(result.deviations['none'])}; every "
        f"scheme breaks that, the least of them ({least}) by {ordered[least]:.0%}, and so does a causal mask alone "
        f"({result.deviations['none, causal']:.0%})."
    )


def draw(result: Permutation, figure: Any) -> None:
    axes = figure.subplots()
    names = list(result.deviations)[::-1]
    values = [result.deviations[name] for name in names]
    colours = [BLUE if name == "none" else GREY if "causal" in name else ORANGE for name in names]
    floor = min(values) / 10
    bars = axes.barh(names, [value - floor for value in values], left=floor, color=colours, height=0.65)
    axes.set_xscale("log")
    axes.bar_label(bars, [short(value) for value in values], padding=4)
    axes.grid(visible=False, axis="y")
    axes.set(
        title="How far the output of a permuted input is from the permuted output",
        xlabel="‖Z(PX) − PZ(X)‖ / ‖Z(X)‖",
        ylabel="positions",
        xlim=(floor, 100),
    )


EXPERIMENT = Experiment(
    name="permutation",
    summary="without positions attention does not know the order of its input; each scheme tells it",
    question="Shuffle the tokens: is the output anything but shuffled?",
    look="Without positions the two agree to rounding. Every position scheme makes a difference of order one, whether "
    "it acts on the embeddings, on queries and keys, or on the scores.",
    beware="'Attention without positions knows no order' holds for attention that sees the whole row. A causal mask is "
    "already a position scheme of a kind: token t averages over t tokens, and models without any other positions can "
    "be trained on it.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
