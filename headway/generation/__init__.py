"""Continuing text: cached decoding of batches, greedy or sampled, whole or as a stream."""

from headway.generation.decode import Continuation, Step, best_alternatives, generate, stream
from headway.generation.sampling import GREEDY, Sampling

__all__ = ["GREEDY", "Continuation", "Sampling", "Step", "best_alternatives", "generate", "stream"]
