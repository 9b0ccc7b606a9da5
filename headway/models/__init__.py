"""Whole models, each a composition of `headway.nn` that fits on a screen.

A model that continues text is a `CausalModel`; its settings build it.
`MODELS` is what `[model] kind` may say; a new model adds its settings class here.
"""

from headway.models.base import CausalModel, DecoderState, Model, Seq2SeqModel, parameter_count
from headway.models.gpt import GPT, GPTSettings
from headway.models.perceiver import PerceiverGPT, PerceiverGPTSettings

MODELS = {"gpt": GPTSettings, "perceiver": PerceiverGPTSettings}

__all__ = [
    "GPT",
    "MODELS",
    "CausalModel",
    "DecoderState",
    "GPTSettings",
    "Model",
    "PerceiverGPT",
    "PerceiverGPTSettings",
    "Seq2SeqModel",
    "parameter_count",
]
