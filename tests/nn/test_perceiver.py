"""The perceiver against loops that follow its definition latent by latent and position by position."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.nn.perceiver import CrossAttention, FirstPositions, Perceiver


def look(attention: CrossAttention, queries: Tensor, source: Tensor) -> Tensor:
    """One query (D,) looks at a source (n, D), head by head, with everything written out."""
    width = len(queries) // attention.heads
    q = attention.query(queries)
    k, v = attention.key(source), attention.value(source)
    heads = []
    for h in range(attention.heads):
        part = slice(h * width, (h + 1) * width)
        weights = (k[:, part] @ q[part] / width**0.5).softmax(0)
        heads.append(weights @ v[:, part])
    return attention.output(torch.cat(heads))


def by_segments(layer: Perceiver, x: Tensor) -> Tensor:
    """One row (T, D)."""
    latents = []
    for j, start in enumerate(layer.latents):
        latents.append(look(layer.down, start, x[: (j + 1) * layer.segment]))
    rows = []
    for t in range(len(x)):
        segment = t // layer.segment
        seen = [*latents[:segment], *x[segment * layer.segment : t + 1]]
        rows.append(look(layer.up, x[t], torch.stack(seen)))
    return torch.stack(rows)


def by_first_positions(layer: FirstPositions, x: Tensor) -> Tensor:
    latents = [look(layer.down, start, x[: j + 1]) for j, start in enumerate(layer.latents)]
    return torch.stack([look(layer.up, x[t], torch.stack(latents[: t + 1])) for t in range(len(x))])


def both_ways(layer: Perceiver, x: Tensor) -> Tensor:
    latents = torch.stack([look(layer.down, start, x) for start in layer.latents])
    return torch.stack([look(layer.up, row, latents) for row in x])


@pytest.mark.parametrize("count", [1, 3, 4, 5, 13, 20])
@pytest.mark.parametrize(
    ("kind", "causal", "reference"),
    [(Perceiver, True, by_segments), (FirstPositions, True, by_first_positions), (Perceiver, False, both_ways)],
)
def test_equals_the_loop(kind: type[Perceiver], causal: bool, reference, count: int) -> None:
    torch.manual_seed(count)
    layer = kind(8, 2, causal=causal, length=20, bottleneck=6).double()
    x = torch.randn(2, count, 8, dtype=torch.float64)
    expected = torch.stack([reference(layer, row) for row in x])
    torch.testing.assert_close(layer(x, torch.arange(count)), expected, atol=1e-12, rtol=0)


def influence(layer: Perceiver, count: int) -> Tensor:
    """(T, T): does position s change what is written at t?"""
    x = torch.randn(1, count, 8, dtype=torch.float64)
    derivative = torch.autograd.functional.jacobian(lambda rows: layer(rows, torch.arange(count)), x)
    return derivative[0, :, :, 0].abs().amax((1, 3)) > 0


def test_every_earlier_position_reaches_every_later_one() -> None:
    torch.manual_seed(0)
    layer = Perceiver(8, 2, causal=True, length=20, bottleneck=6).double()
    assert torch.equal(influence(layer, 20), torch.ones(20, 20).tril().bool())


def test_in_the_course_form_only_the_first_positions_enter() -> None:
    torch.manual_seed(0)
    layer = FirstPositions(8, 2, causal=True, length=20, bottleneck=6).double()
    expected = torch.ones(20, 20).tril().bool()
    expected[:, 6:] = torch.eye(20)[:, 6:].bool()
    assert torch.equal(influence(layer, 20), expected)


@pytest.mark.parametrize("kind", [Perceiver, FirstPositions])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_say_what_is_taken_from_whom(kind: type[Perceiver], causal: bool) -> None:
    """Rows of the map sum to one, and it is lower-triangular where the perceiver is causal."""
    torch.manual_seed(1)
    layer = kind(8, 2, causal=causal, length=20, bottleneck=6).double()
    weights = layer.weights(torch.randn(2, 17, 8, dtype=torch.float64), torch.arange(17))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 17, dtype=torch.float64))
    assert not causal or (weights.triu(1) == 0).all()


def test_errors_name_the_values() -> None:
    with pytest.raises(ValueError, match=r"21 positions.*built for 20"):
        Perceiver(8, 2, causal=True, length=20)(torch.zeros(1, 21, 8), torch.arange(21))
    with pytest.raises(ValueError, match=r"bottleneck \(0\)"):
        Perceiver(8, 2, bottleneck=0)
    with pytest.raises(ValueError, match="give the longest as length"):
        Perceiver(8, 2, causal=True)
