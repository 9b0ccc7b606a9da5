"""Attention capture: which positions each head of each layer looked at.

Shapes: L layers, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.errors import UserError
from headway.models import GPT, CausalModel, PerceiverGPT, RNNLanguageModel
from headway.nn import record_attention


@torch.inference_mode()
def capture_attention(model: CausalModel, tokens: Sequence[int]) -> Tensor:
    """The attention weights (L, H, T, T) of one row of tokens; row t of a map says where token t looks."""
    if not isinstance(model, GPT) or isinstance(model, PerceiverGPT):  # whose layers look at latents, not at tokens
        why = "carries a state" if isinstance(model, RNNLanguageModel) else "looks at latents"
        raise UserError(
            f"this {model.settings.kind} {why}, and no token looks at another; for such a picture train a model of "
            'kind "gpt", or one that translates'
        )
    training = model.training
    model.eval()
    try:
        with record_attention(model) as seen:
            model.hidden(torch.tensor([list(tokens)], device=model.norm.weight.device))
    finally:
        model.train(training)
    return torch.cat([weights for calls in seen.values() for weights in calls]).float().cpu()
