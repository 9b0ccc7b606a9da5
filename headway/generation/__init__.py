"""Continuing text and writing targets: cached decoding of batches, greedy, sampled or by beam, whole or as a stream."""

from headway.generation.beam import Hypothesis, beam_continue, beam_search
from headway.generation.decode import Continuation, Step, best_alternatives, generate, stream
from headway.generation.sampling import GREEDY, Sampling

__all__ = [
    "GREEDY",
    "Continuation",
    "Hypothesis",
    "Sampling",
    "Step",
    "beam_continue",
    "beam_search",
    "best_alternatives",
    "generate",
    "stream",
]
