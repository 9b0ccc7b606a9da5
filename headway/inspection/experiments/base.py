"""What every experiment is made of, and the pieces several of them share.

An experiment is a question about attention that a small computation answers:

    result = EXPERIMENT.run(seed=0)          numbers: no printing, no files, the global random state untouched
    EXPERIMENT.table(result)                 the numbers that matter
    EXPERIMENT.finding(result)               what they show, in one sentence
    EXPERIMENT.draw(result, figure)          the picture, on a matplotlib figure
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

Result = TypeVar("Result")

# Colours that colour-blind readers can tell apart (Okabe and Ito 2008) and that show on a light and on a dark page.
BLUE, ORANGE, GREEN, PINK, SKY, GOLD, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7f8894"
COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, GOLD, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


@dataclass(frozen=True)
class Table:
    """Headers and rows of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """The table in columns: the first set to the left, the others to the right."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]

        def fit(line: Sequence[str]) -> str:
            cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            return "  ".join([line[0].ljust(widths[0]), *cells[1:]]).rstrip()

        return "\n".join([fit(self.header), "  ".join("-" * width for width in widths), *map(fit, self.rows)])


@dataclass(frozen=True)
class Experiment(Generic[Result]):
    """A question, the computation that answers it, and how the answer is shown."""

    name: str
    summary: str  # one line, for the list
    question: str
    look: str  # what to see in the picture
    beware: str  # where common explanations go wrong
    run: Callable[..., Result]  # run(*, seed=0, …): every parameter has a default
    table: Callable[[Result], Table]
    finding: Callable[[Result], str]
    draw: Callable[[Result, Any], None]


def generator(seed: int) -> Generator:
    return Generator().manual_seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Modules built inside get the weights of this seed; the global random state is as before afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread: in small work, threads waiting for each other cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normal(*shape: int, source: Generator) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def orthonormal(count: int, width: int, source: Generator) -> Tensor:
    """`count` random orthonormal rows: (count, width)."""
    if count > width:
        raise ValueError(f"{count} orthonormal vectors do not fit in {width} dimensions")
    return torch.linalg.qr(normal(width, count, source=source))[0].T


def look_up(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One query at a time: weights softmax(k q) and the output Σ_s w_s v_s; q (…, K), k and v (…, S, K)."""
    weights = (k @ q[..., None]).squeeze(-1).softmax(-1)  # (…, S)
    return weights, (weights[..., None, :] @ v).squeeze(-2)  # (…, S), (…, K)


def off_diagonals(scores: Tensor) -> float:
    """How far a square matrix is from having equal numbers along each diagonal: the largest spread on one of them."""
    size = len(scores)
    diagonals = [scores.diagonal(offset) for offset in range(1 - size, size)]
    return max(float(line.max() - line.min()) for line in diagonals)


def train(
    model: nn.Module,
    batch: Callable[[Generator], tuple[Tensor, Tensor]],
    steps: int,
    rate: float,
    source: Generator,
) -> list[float]:
    """Adam on the cross-entropy of fresh batches; returns the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        x, target = batch(source)
        loss = F.cross_entropy(model(x).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, target: Tensor) -> float:
    """The share of right answers."""
    return float((model(x).argmax(-1) == target).double().mean())


def draw_losses(axes: Any, losses: Mapping[str, Sequence[float]], level: int) -> None:
    """The training loss of each model, smoothed a little, beside ln(level): that of a guess among `level` answers."""
    for (name, values), colour, marker in zip(losses.items(), COLOURS, MARKERS, strict=False):
        window = max(1, len(values) // 25)
        means = torch.tensor(values).unfold(0, window, window).mean(-1).tolist()
        steps = [window * (index + 1) for index in range(len(means))]
        axes.plot(steps, means, marker=marker, markersize=3, color=colour, label=name)
    axes.axhline(math.log(level), color=GREY, linestyle="--", label=f"ln {level}")
    axes.set(title="Training loss", xlabel="step", ylabel="nats an answer", ylim=(0, None))
    axes.legend()


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of the straight line through the points, by least squares."""
    x, y = (torch.tensor(list(values), dtype=torch.float64) for values in (xs, ys))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def short(value: float) -> str:
    """Three digits, and powers of ten where they say more."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}"
