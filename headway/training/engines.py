"""Which engine carries out the steps of a stage, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from headway.models import Model
from headway.nn import gelu, kernels, norm, short
from headway.training.captured import CannotCapture, Captured, broken_off
from headway.training.engine import Block, Engine, Outcome, Plain
from headway.training.feed import choose_place
from headway.training.optimizer import Optimizer
from headway.training.streams import Stream

NAMES = ("auto", "plain", "graph", "compiled")
OPERATIONS = 2  # the way that works everywhere
PAYS_FROM = 1000  # steps from which compiling (about half a minute) is worth it


class FirstThatWorks(Engine):
    """The first of several engines that can carry out the steps; what is wrong with those before it is said."""

    def __init__(self, choices: Sequence[tuple[str, Callable[[], Engine]]], say: Callable[[str], None]) -> None:
        (_, make), *self.others = choices
        self.engine: Engine | None = make()
        self.say = say

    def prepare(self, step: int, undisturbed: Block = nullcontext) -> None:
        """The first that can be got ready for the step."""
        while True:
            try:
                assert self.engine is not None
                return self.engine.prepare(step, undisturbed)
            except CannotCapture as error:
                if not self.others:
                    raise
                wrong = str(error)
                if broken_off:
                    self.others = self.others[-1:]
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
) -> tuple[Engine, list[str]]:
    """(the engine that is asked for, or the fastest that works here; how it works and why, in words)."""
    device = next(model.parameters()).device
    way, *words = choose(settings, device, model, optimizer.capturable)
    on_device = False
    if way < OPERATIONS:
        on_device, why = choose_place(streams, device, settings.batches)
        words.append(why)
    elif settings.batches != "auto":
        words.append(f"training.batches = {settings.batches} is for captured steps")

    def captured(compiled: bool) -> Engine:
        return Captured(
            model,
            streams,
            optimizer,
            seed,
            precision,
            settings.clip,
            settings.accumulate,
            compiled,
            settings.deterministic,
            on_device,
            say,
        )

    def plain() -> Engine:
        return Plain(model, streams, optimizer, seed, precision, settings.clip, settings.accumulate)

    if device.type == "cuda":
        for part in (short, gelu, norm):
            kernels.try_out(part.KERNEL, part.trial, device, say)
    choices: list[tuple[str, Callable[[], Engine]]] = [
        ("compiled and captured", lambda: captured(True)),
        ("captured without compiling", lambda: captured(False)),
        ("operation by operation", plain),
    ]
    return FirstThatWorks(choices[way:], say), words


def choose(settings: Any, device: torch.device, model: Model, capturable: bool) -> tuple[int, str]:
    """(0: compile and capture the step, 1: capture it, 2: neither; and why)."""
    asked = settings.engine in ("graph", "compiled")
    if device.type != "cuda":
        return OPERATIONS, "operation by operation" + (f", as {settings.engine} is for CUDA GPUs" if asked else "")
    if broken_off or not capturable:
        after = "as CUDA could not end an earlier capture of this process"
        why = after if broken_off else "as only a fused optimizer's step can be captured"
        return OPERATIONS, f"operation by operation, {why}"
    asked_for = {
        "plain": (OPERATIONS, "operation by operation, as asked"),
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
