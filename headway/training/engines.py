"""Which engine carries out the steps of a stage, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.models import Model
from headway.training.captured import CannotCapture, Captured
from headway.training.engine import Engine, Outcome, Plain
from headway.training.optimizer import Optimizer
from headway.training.streams import Stream

NAMES = ("auto", "plain", "graph", "compiled")
PAYS_FROM = 1000  # steps from which compiling (about half a minute) is worth it


class FirstThatWorks(Engine):
    """The first of several engines that can carry out a step; what is wrong with those before it is said."""

    def __init__(self, choices: Sequence[tuple[str, Callable[[], Engine]]], say: Callable[[str], None]) -> None:
        (_, make), *self.others = choices
        self.engine = make()
        self.say = say

    def step(self, step: int, rate: float) -> Outcome:
        while True:
            try:
                return self.engine.step(step, rate)
            except CannotCapture as error:
                if not self.others:
                    raise
                (how, make), *self.others = self.others
                self.say(f"the step could not be made faster as planned ({error}); {how} instead")
                self.engine = make()


def build(
    model: Model,
    streams: Sequence[Stream],
    optimizer: Optimizer,
    seed: int,
    precision: torch.dtype,
    settings: Any,
    say: Callable[[str], None],
) -> Engine:
    """The engine that `[training] engine` asks for, or the fastest that works here."""

    def captured(compiled: bool) -> Engine:
        return Captured(model, streams, optimizer, seed, precision, settings.clip, settings.accumulate, compiled, say)

    def plain() -> Engine:
        return Plain(model, streams, optimizer, seed, precision, settings.clip, settings.accumulate)

    choices: list[tuple[str, Callable[[], Engine]]] = [
        ("compiled and captured", lambda: captured(True)),
        ("captured without compiling", lambda: captured(False)),
        ("operation by operation", plain),
    ]
    wanted = choose(settings, next(model.parameters()).device)
    return FirstThatWorks(choices[2 - wanted[0] - wanted[1] :], say)


def choose(settings: Any, device: torch.device) -> tuple[bool, bool, str]:
    """(capture the step, compile it, why)."""
    if device.type != "cuda":
        return False, False, "operation by operation"
    if settings.engine == "plain":
        return False, False, "operation by operation, as asked"
    if settings.engine == "graph":
        return True, False, "captured without compiling, as asked"
    if settings.engine == "compiled":
        return True, True, "compiled and captured, as asked"
    if settings.steps < PAYS_FROM:
        return True, False, f"captured; fewer than {PAYS_FROM:,} steps do not pay for compiling"
    return True, True, f"compiled and captured, which pays from {PAYS_FROM:,} steps on"
