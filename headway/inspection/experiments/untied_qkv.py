"""Untied Q, K, V: why a token needs one vector to ask with and another to be found by.

Each token has a name, a pointer (the name of another token) and a value; its answer is the value of the token it points
to. The pointers of a row form one cycle, in an order that differs from row to row. One layer, one head:

    logits = softmax(Q Kᵀ / √K) V W_O,   Q = X W_Q, K = X W_K, V = X W_V

With W_Q = W_K the scores are symmetric, S = Sᵀ, and cannot do it. If every token t scored its target π(t) above the
token π⁻¹(t) that points to it, then S[t, π(t)] > S[t, π⁻¹(t)] = S[π⁻¹(t), t] for every t, and the scores would rise all
the way round the cycle and arrive where they began. (Each diagonal score is also a squared length, ‖W x_t‖², so that no
two tokens can score each other above both of their own.) Cost O(T²·D) a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from headway.inspection.experiments.base import (
    COLOURS,
    GREY,
    Experiment,
    Table,
    accuracy,
    draw_losses,
    generator,
    seeded,
    train,
)


@dataclass
class Untied:
    """One entry a way of sharing the projections."""

    tokens: int
    values: int
    steps: int
    accuracies: dict[str, float]
    parameters: dict[str, int]
    losses: dict[str, list[float]]
    asymmetry: dict[str, float]  # max |S − Sᵀ| / max |S| of the trained scores
    chance: float


class OneLayer(nn.Module):
    """softmax(Q Kᵀ/√K) V, read out by a linear map. Give the same module twice to tie two projections."""

    def __init__(self, query: nn.Linear, key: nn.Linear, value: nn.Linear, answers: int) -> None:
        super().__init__()
        self.query, self.key, self.value = query, key, value
        self.readout = nn.Linear(value.out_features, answers)

    def scores(self, x: Tensor) -> Tensor:
        q, k = self.query(x), self.key(x)  # (B, T, K)
        return q @ k.mT / math.sqrt(q.shape[-1])  # (B, T, T)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.scores(x).softmax(-1) @ self.value(x))


def run(tokens: int = 8, values: int = 8, width: int = 64, steps: int = 500, batch: int = 64, seed: int = 0) -> Untied:
    def rows(source: Generator, count: int = batch) -> tuple[Tensor, Tensor]:
        return pointers(count, tokens, values, source)

    features = 2 * tokens + values
    with seeded(seed):
        q, k, v, both, tied, beside = (nn.Linear(features, width) for _ in range(6))
        models = {
            "Q, K, V": OneLayer(q, k, v, values),
            "Q = K, V": OneLayer(both, both, beside, values),
            "Q = K = V": OneLayer(tied, tied, tied, values),
        }
    x, target = rows(generator(seed + 1), 1000)
    result = Untied(tokens, values, steps, {}, {}, {}, {}, 1 / values)
    for name, model in models.items():
        result.losses[name] = train(model, rows, steps, 0.01, generator(seed + 2))
        result.accuracies[name] = accuracy(model, x, target)
        result.parameters[name] = sum(weight.numel() for weight in model.parameters())
        with torch.no_grad():
            scores = model.scores(x)
        result.asymmetry[name] = float((scores - scores.mT).abs().max() / scores.abs().max())
    return result


def pointers(count: int, tokens: int, values: int, source: Generator) -> tuple[Tensor, Tensor]:
    """Rows of tokens [name; pointer; value], one-hot, and the value each token points to: (B, T, D), (B, T)."""
    cycle = torch.rand(count, tokens, generator=source).argsort(-1)  # the names in the order of the cycle
    pointer = torch.empty_like(cycle).scatter_(-1, cycle, cycle.roll(-1, -1))  # token `name` points to the next one
    value = torch.randint(values, (count, tokens), generator=source)
    name = torch.arange(tokens).expand(count, -1)
    parts = [F.one_hot(name, tokens), F.one_hot(pointer, tokens), F.one_hot(value, values)]
    return torch.cat(parts, -1).float(), value.gather(-1, pointer)


def table(result: Untied) -> Table:
    rows = [
        (name, f"{result.accuracies[name]:.1%}", f"{result.parameters[name]:,}", f"{result.asymmetry[name]:.2f}")
        for name in result.accuracies
    ]
    return Table(("projections", "accuracy", "parameters", "asymmetry of the scores"), [*rows, chance_row(result)])


def chance_row(result: Untied) -> tuple[str, ...]:
    return ("chance", f"{result.chance:.1%}", "–", "–")


def finding(result: Untied) -> str:
    found = result.accuracies
    return (
        f"Following a pointer takes Q ≠ K: {found['Q, K, V']:.1%} right with three projections, "
        f"{found['Q = K, V']:.1%} with Q = K, {found['Q = K = V']:.1%} with one for all (chance {result.chance:.1%}), "
        f"after {result.steps} steps each."
    )


def draw(result: Untied, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    names = list(result.accuracies)
    bars = left.bar(names, [result.accuracies[name] for name in names], color=COLOURS[: len(names)], width=0.6)
    left.bar_label(bars, fmt="{:.0%}", padding=2)
    left.axhline(result.chance, color=GREY, linestyle="--", label=f"chance, 1 in {result.values}")
    left.legend(loc="upper right")
    left.grid(visible=False, axis="x")
    left.set(title="The value of the token pointed to", ylabel="accuracy", xlabel="projections", ylim=(0, 1.1))
    draw_losses(right, result.losses, result.values)


EXPERIMENT = Experiment(
    name="untied-qkv",
    summary="a layer with Q = K cannot follow pointers; with separate Q and K it can",
    question="Why three projections? A token points to another one and must fetch its value: it asks by its pointer "
    "and is found by its name.",
    look="Separate queries and keys learn it completely. With Q = K the scores are symmetric: what makes a token "
    "look at its target makes the target look back, so the values of both neighbours get mixed.",
    beware="More training or more width does not help the tied layers: no symmetric score matrix can rank every target "
    "first on a cycle (the scores would have to rise all the way round). Q = K is fine where the relation is itself "
    "symmetric, such as 'find the tokens like me'.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
