"""Which engine carries out the steps of a stage, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from headway.models import Model
from headway.nn import short
from headway.training.captured import CannotCapture, Captured
from headway.training.engine import Engine, Outcome, Plain
from headway.training.optimizer import Optimizer
from headway.training.streams import Stream

NAMES = ("auto", "plain", "graph", "compiled")
PAYS_FROM = 1000  # steps from which compiling (about half a minute) is worth it


class FirstThatWorks(Engine):
    """The first of several engines that can carry out the steps; what is wrong with those before it is said."""

    def __init__(self, choices: Sequence[tuple[str, Callable[[], Engine]]], say: Callable[[str], None]) -> None:
        (_, make), *self.others = choices
        self.engine: Engine | None = make()
        self.say = say

    def prepare(self, step: int) -> None:
        """The first that can be got ready for the step."""
        while True:
            try:
                assert self.engine is not None
                return self.engine.prepare(step)
            except CannotCapture as error:
                if not self.others:
                    raise
                wrong = str(error)
            self.engine = None  # what it holds is free before the next one is made
            (how, make), *self.others = self.others
            self.say(f"the step could not be made faster as planned ({wrong}); {how} instead")
            self.engine = make()

    def step(self, step: int, rate: float) -> Outcome:
        assert self.engine is not None
        return self.engine.step(step, rate)


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

    device = next(model.parameters()).device
    if device.type == "cuda":
        short.try_out(device, say)
    choices: list[tuple[str, Callable[[], Engine]]] = [
        ("compiled and captured", lambda: captured(True)),
        ("captured without compiling", lambda: captured(False)),
        ("operation by operation", plain),
    ]
    return FirstThatWorks(choices[choose(settings, device, model)[0] :], say)


def choose(settings: Any, device: torch.device, model: Model) -> tuple[int, str]:
    """(0: compile and capture the step, 1: capture it, 2: neither; and why)."""
    if device.type != "cuda":
        asked = settings.engine in ("graph", "compiled")
        return 2, "operation by operation" + (f"; {settings.engine} is for CUDA GPUs" if asked else "")
    asked_for = {
        "plain": (2, "operation by operation, as asked"),
        "graph": (1, "captured without compiling, as asked"),
        "compiled": (0, "compiled and captured, as asked"),
    }
    if settings.engine in asked_for:
        return asked_for[settings.engine]
    if not model.compiles:
        return 1, "captured; compiling would write out every step of a row"
    if settings.steps < PAYS_FROM:
        return 1, f"captured; fewer than {PAYS_FROM:,} steps do not pay for compiling"
    return 0, f"compiled and captured, which pays from {PAYS_FROM:,} steps on"
