"""Headway: train small sequence models on your own text, look inside them, ask them questions."""

__version__ = "0.1.0"
