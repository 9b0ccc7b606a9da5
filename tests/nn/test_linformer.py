"""Linformer against its equation written out number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.nn import ALiBi, InAttention, Relative, Rotary, SelfAttention, T5Bias
from headway.nn.linformer import Linformer

WIDTH, HEADS, SIZE, LENGTH, K = 12, 3, 4, 11, 5


def make(shared: bool = True, position: InAttention | None = None, seed: int = 0) -> Linformer:
    torch.manual_seed(seed)
    layer = Linformer(WIDTH, HEADS, length=LENGTH, position=position, projected=K, shared=shared)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return layer.double().eval()


def some(rows: int = 2, count: int = 7, seed: int = 1) -> Tensor:
    return torch.randn(rows, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference(layer: Linformer, x: Tensor, places: list[list[int]], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, T, D) and weights (B, H, T, T): project key by key, then attend query by query."""
    rows, count, _ = x.shape
    keys_from, values_from = layer.projections[0], layer.projections[-1]  # E and F
    mixed = torch.zeros_like(x)
    weights = torch.zeros(rows, HEADS, count, count, dtype=x.dtype)
    for b in range(rows):
        counts = [s for s in range(count) if mask[b, s]]
        for h in range(HEADS):
            part = slice(h * SIZE, (h + 1) * SIZE)
            q, k, v = (linear(x[b])[:, part] for linear in (layer.query, layer.key, layer.value))
            if layer.position is not None:
                q, k = (layer.position.turn(z[None, None], torch.tensor(places[b]))[0, 0] for z in (q, k))
            nothing = torch.zeros(SIZE, dtype=x.dtype)
            keys = [sum((keys_from[j, places[b][s]] * k[s] for s in counts), nothing) for j in range(K)]
            values = [sum((values_from[j, places[b][s]] * v[s] for s in counts), nothing) for j in range(K)]
            for t in range(count):
                scores = [math.exp(float(q[t] @ keys[j]) / math.sqrt(SIZE)) for j in range(K)]
                for j in range(K):
                    mixed[b, t, part] += scores[j] / sum(scores) * values[j]
                    for s in counts:
                        weights[b, h, t, s] += scores[j] / sum(scores) * values_from[j, places[b][s]]
    return mixed @ layer.output.weight.T + layer.output.bias, weights


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rotary", [False, True])
@torch.no_grad()
def test_it_is_the_equation_written_out(shared: bool, rotary: bool) -> None:
    layer, x = make(shared, Rotary(SIZE) if rotary else None), some(count=4)
    mask = torch.tensor([[False, True, True, True], [True, True, False, False]])
    for positions in (torch.arange(4), torch.tensor([2, 5, 6, 10]), torch.tensor([[0, 1, 2, 3], [7, 8, 9, 10]])):
        places = positions.expand(2, 4).tolist()
        for which in (mask, None):
            counts = torch.ones_like(mask) if which is None else which
            expected, weights = reference(layer, x, places, counts)
            torch.testing.assert_close(layer(x, positions, mask=which), expected, atol=1e-10, rtol=0)
            torch.testing.assert_close(layer.weights(x, positions, which), weights, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_the_weights_times_the_values_are_the_output(shared: bool) -> None:
    layer, x = make(shared), some()
    mask = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
    values = layer.value(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)  # (B, H, T, K)
    mixed = layer.weights(x, torch.arange(7), mask) @ values
    out = layer.output(mixed.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, torch.arange(7), mask=mask), out, atol=1e-12, rtol=0)


@torch.no_grad()
def test_with_nothing_projected_away_it_is_self_attention() -> None:
    """E = F = the identity."""
    layer = Linformer(WIDTH, HEADS, length=7, projected=7).double()
    layer.projections.copy_(torch.eye(7))
    plain = SelfAttention(WIDTH, HEADS).double()
    plain.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if name != "projections"})
    x, positions = some(), torch.arange(7)
    torch.testing.assert_close(layer(x, positions), plain(x, positions), atol=1e-12, rtol=0)
    torch.testing.assert_close(layer.weights(x, positions), plain.weights(x, positions), atol=1e-12, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_padding_and_the_batch_change_nothing(shared: bool) -> None:
    layer, x = make(shared), some()
    mask = torch.tensor([[True] * 4 + [False] * 3, [True] * 7])
    both = layer(x, torch.arange(7), mask=mask)
    torch.testing.assert_close(both[:1, :4], layer(x[:1, :4], torch.arange(4)), atol=1e-12, rtol=0)
    torch.testing.assert_close(both[1:], layer(x[1:], torch.arange(7)), atol=1e-12, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_a_row_with_nothing_to_see_gives_zeros_and_finite_gradients(shared: bool) -> None:
    layer, x = make(shared), some().requires_grad_()
    out = layer(x, torch.arange(7), mask=torch.tensor([[False] * 7, [True] * 7]))
    assert (out[0] == 0).all()
    out.square().sum().backward()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all() and (parameter.grad != 0).any(), name


def test_gradients_are_those_of_finite_differences() -> None:
    layer, x = make(shared=False), some(rows=1, count=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: layer(x, torch.tensor([1, 2, 3])), (x,))
    assert torch.autograd.gradcheck(lambda x: layer(x, torch.tensor([[4, 5, 6]])), (x,))


def test_there_are_at_most_128_projections_shared_unless_told() -> None:
    assert Linformer(8, 2, length=300).projections.shape == (1, 128, 300)
    assert Linformer(8, 2, length=64, projected=3, shared=False).projections.shape == (2, 3, 64)
    assert Linformer(8, 2, length=2).projections.shape == (1, 2, 2)


@torch.no_grad()
def test_projected_keys_of_a_full_row_begin_as_large_as_keys() -> None:
    torch.manual_seed(0)
    layer = Linformer(8, 2, length=400)
    keys = torch.randn(1, 1, 400, 4)
    projected = layer.projection(0, torch.arange(400), None) @ keys
    assert 0.9 < float(projected.std()) < 1.1


def test_no_tensor_of_all_pairs_is_kept() -> None:
    """What a training step keeps grows with T, not with T²."""

    def kept(count: int) -> int:
        torch.manual_seed(0)
        layer, sizes = Linformer(8, 2, length=count, projected=4), {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            layer(torch.randn(1, count, 8), torch.arange(count))
        return sum(tensor.numel() for tensor in sizes.values())

    assert kept(1024) < 2.1 * kept(512)


@torch.no_grad()
def test_dropout_is_for_training() -> None:
    layer, x = make(), some()
    layer.dropout = 0.5
    plain = layer(x, torch.arange(7))
    assert torch.equal(plain, layer(x, torch.arange(7)))
    assert not torch.allclose(plain, layer.train()(x, torch.arange(7)))


def test_it_cannot_be_causal() -> None:
    why = "mixes the whole row, the future included.*Local"
    with pytest.raises(ValueError, match=why):
        Linformer(WIDTH, HEADS, causal=True, length=LENGTH)
    layer = make()
    with pytest.raises(ValueError, match=why):
        layer.empty_cache(2, 4)
    with pytest.raises(ValueError, match=why):
        layer(some(), torch.arange(7).expand(2, 7), SelfAttention(WIDTH, HEADS).empty_cache(2, 7))


class OnValues(InAttention):
    """A scheme that adds to the values alone."""

    on_values = True


@pytest.mark.parametrize("position", [ALiBi(HEADS), T5Bias(HEADS), Relative(SIZE), OnValues()])
def test_schemes_that_add_to_pairs_are_refused(position: InAttention) -> None:
    with pytest.raises(ValueError, match=f"no scores of pairs for {type(position).__name__} .* take Rotary"):
        Linformer(WIDTH, HEADS, length=LENGTH, position=position)


def test_values_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="give the longest row as length, not None"):
        Linformer(WIDTH, HEADS)
    with pytest.raises(ValueError, match=r"projected \(0\) must be at least 1"):
        Linformer(WIDTH, HEADS, length=LENGTH, projected=0)
    with pytest.raises(ValueError, match=r"heads \(5\) must divide width \(12\)"):
        Linformer(WIDTH, 5, length=LENGTH)
    for ask in (make(), make().weights):
        with pytest.raises(ValueError, match="a row of 12 tokens, and this Linformer was built for length 11"):
            ask(some(count=12), torch.arange(12))
        with pytest.raises(ValueError, match="position 11, and this Linformer was built for length 11"):
            ask(some(count=2), torch.tensor([3, 11]))
