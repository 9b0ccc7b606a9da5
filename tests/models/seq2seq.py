"""What holds of every `Seq2SeqModel`, in float64."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from headway.models import Seq2SeqModel

row = st.lists(st.integers(1, 18), min_size=1, max_size=9)
rows_strategy = st.lists(row, min_size=3, max_size=3)
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def padded(rows: list[list[int]], more: int = 0) -> Tensor:
    """The rows with zeros on their right, and `more` columns of them."""
    width = max(map(len, rows)) + more
    return torch.tensor([[*each, *[0] * (width - len(each))] for each in rows])


@torch.no_grad()
def same_by_steps(model: Seq2SeqModel, sources: list[list[int]], targets: list[list[int]]) -> None:
    """Step by step gives what the full pass gives."""
    source, target = padded(sources), padded(targets)
    state = model.start(source, target.shape[1])
    steps = [model.step(target[:, place], state) for place in range(target.shape[1])]
    torch.testing.assert_close(torch.stack(steps, 1), model(target, source), **CLOSE)


@torch.no_grad()
def same_alone(model: Seq2SeqModel, sources: list[list[int]], targets: list[list[int]]) -> None:
    """A row in a batch gives what it gives by itself."""
    together = model(padded(targets), padded(sources))
    for place, (source, target) in enumerate(zip(sources, targets, strict=True)):
        alone = model(torch.tensor([target]), torch.tensor([source]))
        torch.testing.assert_close(together[place : place + 1, : len(target)], alone, **CLOSE)


def same_with_padding(model: Seq2SeqModel, sources: list[list[int]], targets: list[list[int]]) -> None:
    """More padding changes neither outputs nor gradients."""
    counted = padded(targets) != 0
    found = []
    for more in (0, 3):
        model.zero_grad()
        out = model(padded(targets, more), padded(sources, more))[:, : counted.shape[1]][counted]
        out.square().sum().backward()
        found.append([out, *(each.grad for each in model.parameters())])
    for less, more in zip(*found, strict=True):
        torch.testing.assert_close(more, less, atol=1e-8, rtol=1e-8)


@torch.no_grad()
def same_with_rows_selected(model: Seq2SeqModel, sources: list[list[int]]) -> None:
    """Rows that are dropped, repeated and change places in the middle of decoding go on as they would have."""
    rows = torch.tensor([2, 0, 2, 1])
    for order in ([0, 1, 2, 3], [3, 0, 1, 2], [2, 1, 0, 3]):  # the last one moves rows of one source only
        first, second = torch.tensor([1, 4, 5]), torch.tensor([3, 9, 4, 1])
        state = model.start(padded(sources), 4)
        model.step(first, state)
        state = state.select(rows)
        middle = torch.tensor([7, 8, 9, 6])
        model.step(middle, state)
        state = state.select(torch.tensor(order))
        found = model.step(second, state)
        written = torch.stack([first[rows], middle], 1)[order]
        whole = model(torch.cat([written, second[:, None]], 1), padded([sources[rows[place]] for place in order]))
        torch.testing.assert_close(found, whole[:, -1], **CLOSE)
