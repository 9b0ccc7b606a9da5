"""What a model did: looking inside a trained model without changing it."""

from headway.inspection.attention import capture_attention

__all__ = ["capture_attention"]
