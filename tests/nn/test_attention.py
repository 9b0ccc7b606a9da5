"""Attention against a plain reference, and what must never happen to a fully masked row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from headway.nn import SelfAttention, Unscaled, attend, causal_mask


def reference(q, k, v, mask):
    """Softmax attention with loops: one query, one head at a time."""
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                seen = [s for s in range(k.shape[2]) if mask[b, h, t, s]]
                if not seen:
                    continue
                scores = [math.exp(float(q[b, h, t] @ k[b, h, s]) / math.sqrt(q.shape[-1])) for s in seen]
                for score, s in zip(scores, seen, strict=True):
                    out[b, h, t] += score / sum(scores) * v[b, h, s]
    return out


@pytest.mark.parametrize("causal", [False, True])
def test_attend_equals_the_loop(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 3, 5, 5) > 0.4
    mask[0, 0, 2] = False  # a query that may look at nothing
    allowed = mask & causal_mask(5, 5) if causal else mask
    expected = reference(q, k, v, allowed)
    torch.testing.assert_close(attend(q, k, v, mask, causal), expected, atol=1e-12, rtol=0)


def test_a_query_with_nothing_to_see_gives_zeros_and_zero_gradients() -> None:
    q, k, v = (torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    out = attend(q, k, v, mask)
    out.square().sum().backward()
    assert (out == 0).all()
    assert all((tensor.grad == 0).all() for tensor in (q, k, v))


def test_self_attention_equals_torch() -> None:
    """The same weights in `torch.nn.MultiheadAttention` give the same output."""
    torch.manual_seed(1)
    ours = SelfAttention(12, 3, causal=True).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        theirs.out_proj.bias.copy_(ours.output.bias)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    expected, weights = theirs(x, x, x, attn_mask=~causal_mask(7, 7), average_attn_weights=False)
    positions = torch.arange(7)
    torch.testing.assert_close(ours(x, positions), expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(ours.weights(x, positions), weights, atol=1e-12, rtol=0)


def test_the_future_changes_nothing() -> None:
    torch.manual_seed(2)
    attention = SelfAttention(8, 2, causal=True).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4:] += 1.0
    positions = torch.arange(6)
    assert torch.equal(attention(x, positions)[:, :4], attention(changed, positions)[:, :4])


def test_heads_must_divide_width() -> None:
    with pytest.raises(ValueError, match=r"heads \(3\) must divide width \(8\)"):
        SelfAttention(8, 3)


def test_unscaled_leaves_the_division_out() -> None:
    """The same weights otherwise: it loads what the scaled one saved, and with queries divided by √K it is that one."""
    torch.manual_seed(0)
    scaled, unscaled = SelfAttention(12, 3).double(), Unscaled(12, 3).double()
    unscaled.load_state_dict(scaled.state_dict())
    x, positions = torch.randn(2, 5, 12, dtype=torch.float64), torch.arange(5)
    q, k, _ = scaled.project(x, positions)
    torch.testing.assert_close(unscaled.weights(x, positions), (q @ k.mT).softmax(-1))
    with torch.no_grad():
        unscaled.query.weight /= 2.0  # √4
        unscaled.query.bias /= 2.0
    torch.testing.assert_close(unscaled(x, positions), scaled(x, positions))
