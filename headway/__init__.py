"""Headway: train small sequence models on your own text, look inside them, ask them questions.

run = headway.train("world/demo", out="runs/world")     # or headway.load("runs/world")
run.answer("Where was Ada Lund born?")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway import nn
    from headway.making import train
    from headway.run import Run, load

__version__ = "0.1.0"
__all__ = ["Run", "load", "nn", "train"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for, so that help is instant."""
    if name in ("Run", "load"):
        return getattr(importlib.import_module("headway.run"), name)
    if name == "train":
        return importlib.import_module("headway.making").train
    if name == "nn":
        return importlib.import_module("headway.nn")
    raise AttributeError(f"module 'headway' has no attribute '{name}'")
