"""The synthesizer's limit: weights made from the query alone cannot look anything up by content.

A row holds m pairs (key, value) in random order and then a question that names one key; the answer is its value.

    dot-product   w_t = softmax(q_tᵀ k_s / √K)           compares the question with every pair
    synthesizer   w_t = softmax(W₂ ReLU(W₁ x_t))_s       sees the question and the places, not what stands in them

The order is random, so the place of a key cannot be known from the question. Read out by a linear map, the score of a
value then depends on its place alone, and the best that can be done is to answer with one of the m values of the row.
"Synthesizer: rethinking self-attention for transformer models" (Tay et al. 2020), section 3. Cost O(T²·D).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from headway.nn import Attention, DenseSynthesizer, SelfAttention


@dataclass
class SynthesizerLimit:
    """One entry a mechanism."""

    pairs: int
    values: int
    steps: int
    accuracies: dict[str, float]
    losses: dict[str, list[float]]
    chance: float  # any value
    guess: float  # any value of the row


class Reader(nn.Module):
    """Embed, attend once, read the answer at the last position."""

    def __init__(self, features: int, width: int, attention: Attention, answers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.attention = attention
        self.readout = nn.Linear(width, answers)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.attention(self.embed(x), torch.arange(x.shape[1]))
        return self.readout(mixed[:, -1])  # (B, V)


MECHANISMS: dict[str, Callable[..., Attention]] = {"dot-product": SelfAttention, "dense synthesizer": DenseSynthesizer}


def run(
    pairs: int = 6,
    values: int = 12,
    width: int = 32,
    heads: int = 2,
    steps: int = 500,
    batch: int = 64,
    seed: int = 0,
    attentions: Mapping[str, Callable[..., Attention]] = MECHANISMS,
) -> SynthesizerLimit:
    """`attentions` are built as `Mechanism(width, heads, dropout, causal=…, length=…)`."""

    def rows(source: Generator, count: int = batch) -> tuple[Tensor, Tensor]:
        return questions(count, pairs, values, source)

    x, answers = rows(generator(seed + 1), 2000)
    result = SynthesizerLimit(pairs, values, steps, {}, {}, 1 / values, 1 / pairs)
    for name, build in attentions.items():
        with seeded(seed):
            attention = build(width, heads, 0.0, causal=False, length=pairs + 1)
            model = Reader(x.shape[-1], width, attention, values)
        result.losses[name] = train(model, rows, steps, 0.01, generator(seed + 2))
        result.accuracies[name] = accuracy(model.eval(), x, answers)
    return result


def questions(count: int, pairs: int, values: int, source: Generator) -> tuple[Tensor, Tensor]:
    """Rows of m pairs [key; value; 0] and a question [key; 0; 1], and the answers: (B, m + 1, D), (B,).

    Every row has all m keys in random order, with m different values.
    """
    key = torch.rand(count, pairs, generator=source).argsort(-1)  # (B, m)
    value = torch.rand(count, values, generator=source).argsort(-1)[:, :pairs]
    place = torch.randint(pairs, (count, 1), generator=source)
    pair = torch.cat([F.one_hot(key, pairs), F.one_hot(value, values), torch.zeros(count, pairs, 1)], -1)
    asked = F.one_hot(key.gather(-1, place), pairs)
    question = torch.cat([asked, torch.zeros(count, 1, values), torch.ones(count, 1, 1)], -1)
    return torch.cat([pair, question], 1).float(), value.gather(-1, place)[:, 0]


def table(result: SynthesizerLimit) -> Table:
    rows = [(name, f"{share:.1%}") for name, share in result.accuracies.items()]
    rows += [(f"one of the row's {result.pairs} values", f"{result.guess:.1%}")]
    rows += [(f"chance, one of {result.values} values", f"{result.chance:.1%}")]
    return Table(("one layer of", "accuracy"), rows)


def finding(result: SynthesizerLimit) -> str:
    shown = ", ".join(f"{share:.1%} with {name}" for name, share in result.accuracies.items())
    return (
        f"After {result.steps} steps each: {shown}; guessing among the row's own values gives {result.guess:.1%}, "
        f"among all values {result.chance:.1%}."
    )


def draw(result: SynthesizerLimit, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    names = list(result.accuracies)
    bars = left.bar(names, [result.accuracies[name] for name in names], color=COLOURS[: len(names)], width=0.5)
    left.bar_label(bars, fmt="{:.0%}", padding=2)
    left.axhline(result.guess, color=GREY, linestyle="--", label=f"one of the row's values, {result.guess:.0%}")
    left.axhline(result.chance, color=GREY, linestyle=":", label=f"any value, {result.chance:.0%}")
    left.grid(visible=False, axis="x")
    left.set(title="Right answers to fresh questions", ylabel="accuracy", xlabel="one layer of", ylim=(0, 1.35))
    left.legend(loc="upper right")
    draw_losses(right, result.losses, result.pairs)


EXPERIMENT = Experiment(
    name="synthesizer-limit",
    summary="looking up a value by its key: dot-product attention learns it, the dense synthesizer cannot",
    question="The synthesizer makes its attention weights from each token alone, without comparing tokens. What is "
    "lost?",
    look="Dot-product attention answers every question. The synthesizer's loss never gets below ln m: it "
    "can know that the answer is one of the m values in the row, and not which one.",
    beware="This says nothing against synthesizers where order carries the meaning; there, fixed or token-made weights "
    "do well, and several layers can pass content along. It says that one layer of them cannot look up by content, "
    "however long it is trained: the weights have not seen what they would have to compare.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
