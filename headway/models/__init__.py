"""Whole models, each a composition of `headway.nn` that fits on a screen.

A model that continues text is a `CausalModel`, one that reads a source and writes a target a `Seq2SeqModel`; its
settings build it. Settings of the latter say `reads_source = True`, and so do those of the tasks it can learn.
`MODELS` is what `[model] kind` may say; a new model adds its settings class here.
"""

from headway.models.base import CausalModel, DecoderState, Model, Seq2SeqModel, parameter_count
from headway.models.encoder_decoder import EncoderDecoder, EncoderDecoderSettings
from headway.models.gpt import GPT, GPTSettings
from headway.models.perceiver import PerceiverGPT, PerceiverGPTSettings
from headway.models.rnn import RNNLanguageModel, RNNLanguageModelSettings
from headway.models.rnn_seq2seq import RNNSeq2Seq, RNNSeq2SeqSettings

MODELS = {
    "gpt": GPTSettings,
    "perceiver": PerceiverGPTSettings,
    "rnn": RNNLanguageModelSettings,
    "encoder_decoder": EncoderDecoderSettings,
    "rnn_seq2seq": RNNSeq2SeqSettings,
}

__all__ = [
    "GPT",
    "MODELS",
    "CausalModel",
    "DecoderState",
    "EncoderDecoder",
    "EncoderDecoderSettings",
    "GPTSettings",
    "Model",
    "PerceiverGPT",
    "PerceiverGPTSettings",
    "RNNLanguageModel",
    "RNNLanguageModelSettings",
    "RNNSeq2Seq",
    "RNNSeq2SeqSettings",
    "Seq2SeqModel",
    "parameter_count",
]
