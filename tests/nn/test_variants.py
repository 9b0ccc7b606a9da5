"""What every attention mechanism promises, whichever it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headway.nn import ATTENTIONS, Attention, SelfAttention, make_position

LENGTH = 24
OPTIONS = {
    "local": {"reach": 3},
    "bigbird": {"block": 4},
    "perceiver": {"bottleneck": 5},
    "perceiver-first": {"bottleneck": 5},
    "linformer": {"projected": 6},
}
CAUSAL = [name for name in ATTENTIONS if name != "linformer"]
KEYED = [name for name in CAUSAL if issubclass(ATTENTIONS[name], SelfAttention)]


def make(name: str, causal: bool, seed: int = 0, **more: object) -> Attention:
    torch.manual_seed(seed)
    layer = ATTENTIONS[name](8, 2, causal=causal, length=LENGTH, **OPTIONS.get(name, {}), **more).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_changes_nothing(name: str) -> None:
    layer, x, positions = make(name, causal=True), rows(2, 20, 8), torch.arange(20)
    before = layer(x, positions)
    for cut in (1, 7, 13, 19):
        changed = x.clone()
        changed[:, cut:] += 1.0
        torch.testing.assert_close(layer(changed, positions)[:, :cut], before[:, :cut], atol=1e-12, rtol=0)
        torch.testing.assert_close(layer(x[:, :cut], positions[:cut]), before[:, :cut], atol=1e-12, rtol=0)
    assert (layer.weights(x, positions).triu(1) == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_padding_changes_nothing(name: str, causal: bool) -> None:
    """Each row of a padded batch equals the row alone, whatever stands in the padding."""
    if causal and name not in CAUSAL:
        pytest.skip(f"{name} cannot be causal")
    layer, x = make(name, causal), rows(3, 20, 8)
    lengths = torch.tensor([20, 13, 5])
    mask = torch.arange(20) < lengths[:, None]
    out = layer(x, torch.arange(20), mask=mask)
    for row, length in enumerate(lengths.tolist()):
        alone = layer(x[row : row + 1, :length], torch.arange(length))
        torch.testing.assert_close(out[row, :length], alone[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_row_of_padding_alone_gives_zeros_and_finite_gradients(name: str, causal: bool) -> None:
    if causal and name not in CAUSAL:
        pytest.skip(f"{name} cannot be causal")
    layer, x = make(name, causal), rows(2, 20, 8).requires_grad_()
    mask = torch.tensor([[True] * 20, [False] * 20])
    out = layer(x, torch.arange(20), mask=mask)
    out.square().sum().backward()
    assert (out[1] == 0).all() and (out[0] != 0).any()
    assert out.isfinite().all() and x.grad.isfinite().all() and (x.grad[1] == 0).all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", CAUSAL)
def test_the_cache_equals_the_full_pass(name: str) -> None:
    """Rows of unequal beginnings, continued one and several tokens at a time at their own places."""
    layer, x = make(name, causal=True), rows(3, 20, 8)
    full = layer(x, torch.arange(20))
    starts = torch.tensor([4, 1, 9])
    cache = layer.empty_cache(3, LENGTH)
    first = int(starts.max())
    began = layer(x[:, :first], torch.arange(first).expand(3, -1), cache)  # what a row has no use for is overwritten
    for row, start in enumerate(starts.tolist()):
        torch.testing.assert_close(began[row, :start], full[row, :start], atol=1e-12, rtol=0)
    at = starts.clone()
    for count in (1, 1, 3, 2, 1):
        places = at[:, None] + torch.arange(count)  # (B, T)
        new = x[torch.arange(3)[:, None], places]
        out = layer(new, places, cache)
        torch.testing.assert_close(out, full[torch.arange(3)[:, None], places], atol=1e-12, rtol=0)
        at += count


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", ["rotary", "alibi", "t5", "relative"])
@pytest.mark.parametrize("name", KEYED)
def test_positions_in_attention_act_alike_everywhere(name: str, position: str, causal: bool) -> None:
    """Full pass = weights · values (but for what a scheme adds to values), and = cached steps."""
    scheme = make_position(position, 8, 2, causal=causal)
    layer, x, positions = make(name, causal, position=scheme), rows(2, 20, 8), torch.arange(20)
    full, weights = layer(x, positions), layer.weights(x, positions)
    mixed = weights @ layer.project(x, positions)[2] + scheme.values(weights, positions, positions)
    torch.testing.assert_close(full, layer.output(mixed.transpose(1, 2).flatten(2)), atol=1e-12, rtol=0)
    if causal:
        cache = layer.empty_cache(2, LENGTH)
        for t in range(20):
            out = layer(x[:, t : t + 1], torch.full((2, 1), t), cache)
            torch.testing.assert_close(out[:, 0], full[:, t], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_position_behind_nothing_but_padding_gets_zeros(name: str) -> None:
    layer, x = make(name, causal=True), rows(1, 20, 8)
    mask = (torch.arange(20) >= 4)[None]
    out = layer(x, torch.arange(20), mask=mask)
    assert (out[:, :4] == 0).all()
    assert name == "perceiver-first" or (out[:, 4:] != 0).any(-1).all()


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_empty_row_gives_an_empty_row(name: str) -> None:
    assert make(name, causal=False)(rows(2, 0, 8), torch.arange(0)).shape == (2, 0, 8)
    if name in CAUSAL:
        assert make(name, causal=True)(rows(2, 0, 8), torch.arange(0)).shape == (2, 0, 8)


@pytest.mark.parametrize("name", ["local", "bigbird"])
def test_one_more_token_costs_the_same_after_any_number_of_them(name: str) -> None:
    """A cached step of a sparse mechanism looks at its blocks alone, and the first pass at no T × T pairs."""
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for length in (128, 1024):
        layer = ATTENTIONS[name](
            8, 2, causal=True, length=length + 1, **({"block": 4} if name == "bigbird" else {"reach": 3})
        )
        cache = layer.empty_cache(1, length + 1)
        with FlopCounterMode(display=False) as prefill:
            layer(torch.randn(1, length, 8), torch.arange(length)[None], cache)
        with FlopCounterMode(display=False) as step:
            layer(torch.randn(1, 1, 8), torch.tensor([[length]]), cache)
        counts.append((prefill.get_total_flops(), step.get_total_flops()))
    assert counts[1][0] < 9 * counts[0][0]
    assert counts[1][1] == counts[0][1]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_everything_learned_gets_a_gradient(name: str) -> None:
    layer = make(name, causal=False).train()
    layer(rows(2, LENGTH, 8), torch.arange(LENGTH)).square().sum().backward()
    still = [label for label, parameter in layer.named_parameters() if parameter.grad is None]
    assert not still
    flat = [label for label, parameter in layer.named_parameters() if (parameter.grad == 0).all()]
    assert not [label for label in flat if not label.endswith("key.bias")]  # a constant that softmax takes away


@pytest.mark.parametrize("name", ATTENTIONS)
def test_dropout_acts_in_training_alone(name: str) -> None:
    torch.manual_seed(0)
    layer = ATTENTIONS[name](8, 2, 0.5, length=LENGTH, **OPTIONS.get(name, {}))
    x, positions = torch.randn(2, 20, 8), torch.arange(20)
    assert not torch.equal(layer(x, positions), layer(x, positions))
    layer.eval()
    assert torch.equal(layer(x, positions), layer(x, positions))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_heads_must_divide_width(name: str) -> None:
    with pytest.raises(ValueError, match=r"heads \(3\) must divide width \(8\)"):
        ATTENTIONS[name](8, 3, length=LENGTH)
