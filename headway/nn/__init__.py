"""Building blocks: pure modules, one file a mechanism. They know tensors and nothing of text."""

from headway.nn.attention import Attention, SelfAttention, attend, attention_weights, causal_mask
from headway.nn.cache import Cache, LayerCache
from headway.nn.positions import Learned, Rotary, Sinusoidal
from headway.nn.transformer import Block, FeedForward

__all__ = [
    "Attention",
    "Block",
    "Cache",
    "FeedForward",
    "LayerCache",
    "Learned",
    "Rotary",
    "SelfAttention",
    "Sinusoidal",
    "attend",
    "attention_weights",
    "causal_mask",
]
