"""What is captured is what the model computed with."""

from __future__ import annotations

import pytest
import torch

from headway.errors import UserError
from headway.inspection import capture_attention
from headway.nn.attention import attend
from tests.conftest import tiny_gpt, tiny_recurrent


def test_captured_weights_are_those_the_layers_used() -> None:
    model = tiny_gpt("rotary")
    tokens = [3, 5, 7, 2, 9]
    maps = capture_attention(model, tokens).double()
    assert maps.shape == (2, 2, 5, 5)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64), atol=1e-6, rtol=0)
    assert (maps.triu(1) == 0).all()
    x, positions = model.embed(torch.tensor([tokens]))
    for layer, block in enumerate(model.stack()):
        q, k, v = block.attention.project(block.attention_norm(x), positions)
        torch.testing.assert_close(maps[layer] @ v[0], attend(q, k, v, causal=True)[0], atol=1e-6, rtol=0)
        x = block(x, positions)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_left_as_it_was(training: bool) -> None:
    model = tiny_gpt("rotary", dropout=0.5).train(training)
    torch.testing.assert_close(capture_attention(model, [3, 5, 7]), capture_attention(model, [3, 5, 7]))
    with pytest.raises(IndexError):
        capture_attention(model, [10**6])
    assert all(module.training is training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_perceiver_whose_layers_look_at_latents_is_refused() -> None:
    model = tiny_gpt("learned", layers=3, bottleneck=4)
    with pytest.raises(UserError, match="this perceiver looks at latents"):
        capture_attention(model, [3, 5])


def test_a_recurrent_model_which_looks_at_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="this rnn carries a state"):
        capture_attention(tiny_recurrent(), [3, 5])
