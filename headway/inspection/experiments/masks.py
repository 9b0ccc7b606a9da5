"""Masks: what a position may see, and ways of masking that do not mask.

    right      w = softmax over the allowed keys alone            forbidden weight 0, sum 1
    after      w = softmax(scores) · M                            forbidden weight 0, sum below 1
    before     w = softmax(scores · M)                            a forbidden key keeps exp(0) = 1 in the sum
    added      w = softmax(scores + (1 − M)·(−10⁹))               right, until a row may see nothing: then it sees
                                                                  everything

M is 1 (True) where a query may attend. "Attention is all you need", section 3.2.3. Cost O(T²).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headway.inspection.experiments.base import BLUE, GREY, ORANGE, Experiment, Table, generator, normal, short
from headway.nn import causal_mask, masked_softmax

WAYS = ("excluded (right)", "multiplied after the softmax", "multiplied before the softmax", "−10⁹ added")


@dataclass
class Masks:
    """Maps (T, T) of who may see whom, and what each way of masking makes of random scores under both masks."""

    tokens: int
    real: int
    draws: int
    allowed: dict[str, Tensor]
    leaked: dict[str, float]  # mean weight on forbidden keys, rows that may see something
    total: dict[str, float]  # mean sum of the weights on allowed keys, same rows
    empty: dict[str, float]  # weight on forbidden keys in a row that may see nothing


def run(tokens: int = 8, real: int = 5, draws: int = 2000, seed: int = 0) -> Masks:
    """`real` tokens, then padding. The row that may see nothing is one more query whose keys are all forbidden."""
    padding = (torch.arange(tokens) < real).expand(tokens, tokens)  # (T, S)
    order = causal_mask(tokens, tokens)
    allowed = {"padding": padding, "causal": order, "both": padding & order}
    scores = normal(draws, tokens, tokens, source=generator(seed))
    result = Masks(tokens, real, draws, allowed, {}, {}, {})
    nothing = torch.zeros(1, tokens, dtype=torch.bool)
    for way in WAYS:
        weights = mask_by(way, scores, allowed["both"])
        kept = weights * allowed["both"]
        result.leaked[way] = float((weights - kept).sum(-1).mean())
        result.total[way] = float(kept.sum(-1).mean())
        result.empty[way] = float(mask_by(way, scores[:, :1], nothing).sum(-1).mean())
    return result


def mask_by(way: str, scores: Tensor, allowed: Tensor) -> Tensor:
    """The weights (…, T, S) that this way of masking gives."""
    if way == WAYS[1]:
        return scores.softmax(-1) * allowed
    if way == WAYS[2]:
        return (scores * allowed).softmax(-1)
    if way == WAYS[3]:
        return (scores - 1e9 * (~allowed)).softmax(-1)
    return masked_softmax(scores, allowed)


def table(result: Masks) -> Table:
    rows = [(way, f"{result.leaked[way]:.3f}", f"{result.total[way]:.3f}", f"{result.empty[way]:.3f}") for way in WAYS]
    return Table(("mask", "weight leaked", "weight on allowed keys", "leaked, nothing to see"), rows)


def finding(result: Masks) -> str:
    before, after = result.leaked[WAYS[2]], result.total[WAYS[1]]
    return (
        f"Over {result.draws:,} draws of scores, a mask multiplied into the scores still lets {before:.0%} of the "
        f"weight through to forbidden keys, one multiplied into the weights leaves a sum of {short(after)} instead of "
        f"1, and −10⁹ lets a row that may see nothing see everything ({result.empty[WAYS[3]]:.2f})."
    )


def draw(result: Masks, figure: Any) -> None:
    above, below = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    for axes, (name, allowed) in zip(above.subplots(1, len(result.allowed)), result.allowed.items(), strict=True):
        axes.pcolormesh(allowed.double().numpy(), cmap="cividis", vmin=-0.15, vmax=1.1, edgecolors=GREY, linewidth=0.4)
        axes.set(title=name, xlabel="key s", ylabel="query t", aspect="equal")
        axes.invert_yaxis()
        labels: Sequence[str] = [str(t) if t < result.real else "p" for t in range(result.tokens)]
        axes.set_xticks([t + 0.5 for t in range(result.tokens)], labels)
        axes.set_yticks([t + 0.5 for t in range(result.tokens)], labels)
        axes.grid(visible=False)
    above.suptitle("Who may see whom: yellow yes, blue no; p is padding", fontsize=10)
    axes = below.subplots()
    ways = list(WAYS)[::-1]
    kept = [result.total[way] for way in ways]
    axes.barh(ways, kept, color=BLUE, height=0.6, label="on allowed keys")
    leaked = axes.barh(ways, [result.leaked[way] for way in ways], left=kept, color=ORANGE, height=0.6, label="leaked")
    axes.bar_label(leaked, [f"{a:.2f} + {b:.2f}" for a, b in zip(kept, leaked.datavalues, strict=True)], padding=4)
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle="--")
    axes.grid(visible=False, axis="y")
    axes.set(title="Weight under both masks, mean of the rows", xlabel="weight", xlim=(0, 1.9))
    axes.legend(loc="center right")


EXPERIMENT = Experiment(
    name="masks",
    summary="padding and causal masks, and how much leaks when a mask is multiplied instead of excluding",
    question="Which keys may each query see, and what goes wrong when a mask is applied at the wrong place?",
    look="Above: who may see whom (yellow: allowed; p: padding). Below: a right mask leaves all the weight on "
    "allowed keys. Multiplied after the softmax, weight is lost; multiplied before it, weight leaks, since a score of "
    "0 is as good as any.",
    beware="'Set the masked scores to zero' is wrong: zero is an ordinary score. −10⁹ is right only while each row has "
    "something to see; a row of nothing but padding then attends to the padding, and in float16 −10⁹ is −∞ and that "
    "row NaN. Headway excludes keys, and a row with nothing to see gives zeros.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
