"""The learning rate of a step, as a share of its peak.

warm-up          (s + 1) / w                       for s < w
cosine, linear   from 1 at the end of the warm-up to `final_rate` at the last step
inverse-sqrt     √(w / (s + 1)): "Attention is all you need", section 5.3 (Noam), with the peak named outright
constant         1
course           cosine in tokens seen, never below 0.1, climbing again past `final_tokens`; padding counts as tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable

COURSE_WARMUP_TOKENS = 10_240
NAMES = ("cosine", "linear", "inverse-sqrt", "constant", "course")


def schedule(name: str, steps: int, warmup: float, final_rate: float) -> Callable[[int], float]:
    """The multiplier of step s = 0 … steps − 1. `warmup` below 1 is a share of all steps, else a number of steps."""
    rising = math.ceil(warmup * steps) if warmup < 1 else int(warmup)

    def rate(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        if name == "inverse-sqrt":
            return math.sqrt(max(1, rising) / (step + 1))
        done = (step - rising) / max(1, steps - 1 - rising)
        if name == "cosine":
            return final_rate + (1 - final_rate) * (1 + math.cos(math.pi * min(1.0, done))) / 2
        if name == "linear":
            return final_rate + (1 - final_rate) * max(0.0, 1 - done)
        return 1.0

    return rate


def course_schedule(tokens_through: Callable[[int], int], final_tokens: int) -> Callable[[int], float]:
    """The course's own: `tokens_through(s)` counts the tokens of steps 0 … s, padding included.

    The rate is set after each step for the next, so the first step runs at the peak.
    """

    def rate(step: int) -> float:
        if step == 0:
            return 1.0
        tokens = tokens_through(step - 1)
        if tokens < COURSE_WARMUP_TOKENS:
            return tokens / COURSE_WARMUP_TOKENS
        done = (tokens - COURSE_WARMUP_TOKENS) / max(1, final_tokens - COURSE_WARMUP_TOKENS)
        return max(0.1, (1 + math.cos(math.pi * done)) / 2)

    return rate
