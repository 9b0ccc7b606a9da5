"""How well a state of a decoder fits each state of an encoder: the scores of attention between recurrent nets.

    dot        s_tᵀ h_j                        "Effective approaches to attention-based neural machine translation"
    general    s_tᵀ W h_j                      (Luong et al. 2015), section 3.1
    additive   vᵀ tanh(W s_t + U h_j)          "Neural machine translation by jointly learning to align and translate"
                                               (Bahdanau et al. 2015), section 3.1

One head, and no division by the root of the width, as published. What concerns the encoder alone is computed once, in
`keys`. Time O(T·S·D), and for `additive` with a tanh for each of the T·S·D numbers.

Shapes: B batch, T target length, S source length, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class DotScore(nn.Module):
    """s_tᵀ h_j."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def keys(self, states: Tensor) -> Tensor:
        """What the states of the encoder (B, S, D) are compared as: (B, S, D)."""
        return states

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """States of the decoder (B, T, D) and the encoder's keys (B, S, D) → (B, T, S)."""
        return queries @ keys.transpose(1, 2)


class GeneralScore(DotScore):
    """s_tᵀ W h_j."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.key = nn.Linear(width, width, bias=False)

    def keys(self, states: Tensor) -> Tensor:
        return self.key(states)


class AdditiveScore(GeneralScore):
    """vᵀ tanh(W s_t + U h_j)."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.query = nn.Linear(width, width)
        self.fit = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.fit(torch.tanh(self.query(queries)[:, :, None] + keys[:, None]))[..., 0]
