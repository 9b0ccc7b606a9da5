"""Building blocks: pure modules, one file a mechanism. They know tensors and nothing of text."""

from headway.nn.additive import Additive
from headway.nn.attention import (
    Attention,
    SelfAttention,
    Unscaled,
    attend,
    causal_mask,
    masked_softmax,
)
from headway.nn.bigbird import BigBird
from headway.nn.block import Block, FeedForward
from headway.nn.cache import Cache, LayerCache, LayerStates
from headway.nn.cells import GRUCell, LSTMCell, RNNCell
from headway.nn.cross import CrossAttention
from headway.nn.dropout import Dropout
from headway.nn.layers import TransformerDecoderLayer, TransformerEncoderLayer
from headway.nn.linformer import Linformer
from headway.nn.local import Local
from headway.nn.multihead import MultiheadAttention
from headway.nn.padded import run_padded
from headway.nn.perceiver import FirstPositions, Perceiver
from headway.nn.positions import ALiBi, InAttention, Learned, Relative, Rotary, Sinusoidal, T5Bias, make_position
from headway.nn.recording import record_attention
from headway.nn.recurrent import GRU, LSTM, RNN, Recurrent, written_out
from headway.nn.residual import PostNorm, PreNorm
from headway.nn.synthesizer import (
    DenseSynthesizer,
    FactorisedDense,
    FactorisedRandom,
    Mixture,
    RandomSynthesizer,
    TokenMixer,
)
from headway.nn.transformer import Transformer, TransformerDecoder, TransformerEncoder

ATTENTIONS: dict[str, type[Attention]] = {
    "dot-product": SelfAttention,
    "unscaled": Unscaled,
    "additive": Additive,
    "synthesizer-dense": DenseSynthesizer,
    "synthesizer-random": RandomSynthesizer,
    "synthesizer-factorised-dense": FactorisedDense,
    "synthesizer-factorised-random": FactorisedRandom,
    "synthesizer-mixture": Mixture,
    "token-mixer": TokenMixer,
    "linformer": Linformer,
    "local": Local,
    "bigbird": BigBird,
    "perceiver": Perceiver,
    "perceiver-first": FirstPositions,
}
"""Self-attention by name: what `[model] attention` and `attention=` of the Transformer layers may say."""

__all__ = [
    "ATTENTIONS",
    "GRU",
    "LSTM",
    "RNN",
    "ALiBi",
    "Additive",
    "Attention",
    "BigBird",
    "Block",
    "Cache",
    "CrossAttention",
    "DenseSynthesizer",
    "Dropout",
    "FactorisedDense",
    "FactorisedRandom",
    "FeedForward",
    "FirstPositions",
    "GRUCell",
    "InAttention",
    "LSTMCell",
    "LayerCache",
    "LayerStates",
    "Learned",
    "Linformer",
    "Local",
    "Mixture",
    "MultiheadAttention",
    "Perceiver",
    "PostNorm",
    "PreNorm",
    "RNNCell",
    "RandomSynthesizer",
    "Recurrent",
    "Relative",
    "Rotary",
    "SelfAttention",
    "Sinusoidal",
    "T5Bias",
    "TokenMixer",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "Unscaled",
    "attend",
    "causal_mask",
    "make_position",
    "masked_softmax",
    "record_attention",
    "run_padded",
    "written_out",
]
