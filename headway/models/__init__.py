"""Whole models, each a composition of `headway.nn` that fits on a screen.

A model here is a module with `forward(tokens, cache=None) -> logits`, `empty_cache(rows, length)` and settings that
build it. `MODELS` is what `[model] kind` may say; a new model adds its settings class here.
"""

from headway.models.gpt import GPT, GPTSettings, parameter_count

MODELS = {"gpt": GPTSettings}

__all__ = ["GPT", "MODELS", "GPTSettings", "parameter_count"]
