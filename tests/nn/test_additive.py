"""Additive attention against the sum written out, whole and in pieces."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.nn import ALiBi, InAttention, Relative, Rotary, T5Bias
from headway.nn import additive as module
from headway.nn.additive import Additive

WIDTH, HEADS, LONG = 12, 3, 7


def make(causal: bool = False, position: InAttention | None = None, seed: int = 0) -> Additive:
    torch.manual_seed(seed)
    attention = Additive(WIDTH, HEADS, causal=causal, position=position)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention.double().eval()


def some(rows: int = 2, count: int = LONG, seed: int = 1) -> Tensor:
    return torch.randn(rows, count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference(attention: Additive, x: Tensor, allowed: Tensor) -> Tensor:
    """One query, one key, one number at a time; `allowed` (B, T, T)."""
    size = WIDTH // HEADS
    q, k, v = (linear(x).unflatten(-1, (HEADS, size)) for linear in (attention.query, attention.key, attention.value))
    mixed = torch.zeros_like(v)  # (B, T, H, K)
    for b, t, h in torch.cartesian_prod(torch.arange(len(x)), torch.arange(x.shape[1]), torch.arange(HEADS)).tolist():
        seen = [s for s in range(x.shape[1]) if allowed[b, t, s]]
        scores = [
            sum(float(attention.u[h, i]) * math.tanh(q[b, t, h, i] + k[b, s, h, i]) for i in range(size)) for s in seen
        ]
        total = sum(math.exp(score) for score in scores)
        for s, score in zip(seen, scores, strict=True):
            mixed[b, t, h] += math.exp(score) / total * v[b, s, h]
    return attention.output(mixed.flatten(2)) * allowed.any(-1, keepdim=True)  # who sees nobody gets zeros


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("at_once", [1, 2**20])
@torch.no_grad()
def test_it_is_the_sum_written_out(causal: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    attention, x = make(causal), some()
    mask = torch.ones(2, LONG, dtype=torch.bool)
    mask[0, 0] = mask[1, 5:] = False  # when causal, the first token of row 0 sees nothing
    allowed = mask[:, None].expand(-1, LONG, -1)
    allowed = allowed & torch.ones(LONG, LONG, dtype=torch.bool).tril() if causal else allowed
    positions = torch.arange(LONG)
    out = attention(x, positions, mask=mask)
    torch.testing.assert_close(out, reference(attention, x, allowed), atol=1e-10, rtol=0)
    weights = attention.weights(x, positions, mask)
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, allowed.any(-1)[:, None].expand(-1, HEADS, -1).double(), atol=1e-12, rtol=0)
    v = attention.value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    again = attention.output((weights @ v).transpose(1, 2).flatten(2)) * allowed.any(-1, keepdim=True)
    torch.testing.assert_close(again, out, atol=1e-12, rtol=0)


def gradients(attention: Additive, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    attention(x, torch.arange(x.shape[1])).square().sum().backward()
    found = [x.grad, *(parameter.grad for parameter in attention.parameters())]
    assert all(grad is not None for grad in found)
    attention.zero_grad()
    return [grad for grad in found if grad is not None]


def test_pieces_give_the_gradients_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = make(causal=True), some()
    whole = gradients(attention, x)
    monkeypatch.setattr(module, "AT_ONCE", 2 * 2 * LONG * WIDTH)  # two queries at a time
    torch.testing.assert_close(gradients(attention, x), whole, atol=1e-10, rtol=0)


def test_training_does_not_keep_the_tanh_of_every_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, x = make(), some(rows=1, count=32)
    pairs = 32 * 32 * WIDTH

    def kept() -> int:
        """Numbers that the forward pass keeps for the backward pass."""
        sizes: dict[int, Tensor] = {}

        def note(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            attention(x, torch.arange(32)).sum().backward()
        return sum(tensor.numel() for tensor in sizes.values())

    assert kept() >= pairs  # one piece: nothing to save
    monkeypatch.setattr(module, "AT_ONCE", 32 * WIDTH)
    assert kept() < pairs


def test_a_row_with_nothing_to_see_gives_zeros_and_finite_gradients() -> None:
    attention, x = make(), some().requires_grad_()
    mask = torch.tensor([[False] * LONG, [True] * LONG])
    out = attention(x, torch.arange(LONG), mask=mask)
    assert (out[0] == 0).all()
    out.square().sum().backward()
    assert torch.equal(x.grad[0], torch.zeros_like(x.grad[0]))
    assert all(torch.isfinite(parameter.grad).all() for parameter in attention.parameters())


def schemes() -> list[InAttention | None]:
    size = WIDTH // HEADS
    return [None, Rotary(size), ALiBi(HEADS), T5Bias(HEADS, buckets=4, furthest=6, causal=True), Relative(size, 2)]


@pytest.mark.parametrize("position", schemes(), ids=lambda scheme: type(scheme).__name__)
@torch.no_grad()
def test_cached_steps_equal_the_full_pass(position: InAttention | None) -> None:
    """Rows of 3 and 5 tokens, padded on the right, then continued at their own places."""
    attention, x = make(causal=True, position=position), some(count=9)
    full = attention(x, torch.arange(9))
    lengths = torch.tensor([3, 5])
    cache = attention.empty_cache(2, 9)
    begin = attention(x[:, :5], torch.arange(5).expand(2, 5), cache)
    for row in range(2):
        torch.testing.assert_close(begin[row, : lengths[row]], full[row, : lengths[row]], atol=1e-12, rtol=0)
    for _ in range(2):
        places = lengths[:, None] + torch.arange(2)
        out = attention(x.gather(1, places[..., None].expand(-1, -1, WIDTH)), places, cache)
        expected = full.gather(1, places[..., None].expand(-1, -1, WIDTH))
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
        lengths += 2


@pytest.mark.parametrize("position", schemes()[2:], ids=lambda scheme: type(scheme).__name__)
@torch.no_grad()
def test_what_a_scheme_adds_to_the_scores_is_added(position: InAttention) -> None:
    attention, x = make(position=position), some(rows=1)
    t = torch.arange(LONG)
    q, k, _ = attention.project(x, t)
    plain = torch.tanh(q[..., :, None, :] + k[..., None, :, :]).mul(attention.u[:, None, None]).sum(-1)
    expected = (plain + position.bias(q * (WIDTH // HEADS) ** -0.5, t, t)).softmax(-1)
    torch.testing.assert_close(attention.weights(x, t), expected, atol=1e-12, rtol=0)
    assert not torch.allclose(expected, plain.softmax(-1), atol=1e-3)


@torch.no_grad()
def test_padding_the_batch_and_the_future_change_nothing() -> None:
    x, positions = some(), torch.arange(LONG)
    for causal in (False, True):
        attention = make(causal)
        mask = torch.tensor([[True] * 4 + [False] * 3, [True] * LONG])
        both = attention(x, positions, mask=mask)
        alone = attention(x[:1, :4], positions[:4])
        torch.testing.assert_close(both[:1, :4], alone, atol=1e-12, rtol=0)
        torch.testing.assert_close(both[1:], attention(x[1:], positions), atol=1e-12, rtol=0)
    changed = torch.cat([x[:, :4], x[:, 4:] + 1.0], dim=1)
    assert torch.equal(attention(x, positions)[:, :4], attention(changed, positions)[:, :4])


@torch.no_grad()
def test_dropout_is_for_training() -> None:
    attention, x = make(), some()
    attention.dropout = 0.5
    plain = attention(x, torch.arange(LONG))
    assert torch.equal(plain, attention(x, torch.arange(LONG)))
    assert not torch.allclose(plain, attention.train()(x, torch.arange(LONG)))
