"""Building blocks: pure modules, one file a mechanism. They know tensors and nothing of text."""

from headway.nn.attention import (
    Attention,
    SelfAttention,
    Unscaled,
    attend,
    causal_mask,
    masked_softmax,
)
from headway.nn.block import Block, FeedForward
from headway.nn.cache import Cache, LayerCache
from headway.nn.positions import ALiBi, InAttention, Learned, Relative, Rotary, Sinusoidal, T5Bias, make_position

__all__ = [
    "ALiBi",
    "Attention",
    "Block",
    "Cache",
    "FeedForward",
    "InAttention",
    "LayerCache",
    "Learned",
    "Relative",
    "Rotary",
    "SelfAttention",
    "Sinusoidal",
    "T5Bias",
    "Unscaled",
    "attend",
    "causal_mask",
    "make_position",
    "masked_softmax",
]
