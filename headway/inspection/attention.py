"""Attention capture: which positions each head of each layer looked at.

Shapes: L layers, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.models import GPT


@torch.inference_mode()
def capture_attention(model: GPT, tokens: Sequence[int]) -> Tensor:
    """The attention weights (L, H, T, T) of one row of tokens; row t of a map says where token t looks."""
    training = model.training
    model.eval()
    row = torch.tensor([list(tokens)], device=model.head.weight.device)
    x, positions = model.embed(row)
    maps = []
    for block in model.blocks:
        maps.append(block.attention.weights(block.attention_norm(x), positions)[0])
        x = block(x, positions)
    model.train(training)
    return torch.stack(maps).float().cpu()
