"""What the tests of faults share: a program in a process of its own, losses that are no numbers."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest
import torch

from headway.training import engine
from headway.training.engine import Outcome, Plain
from headway.training.loop import Plan, Trainer
from headway.training.stage import Stage
from headway.training.streams import Stream

CALL = [sys.executable, "-c", "import sys; from headway.cli import main; main()"]
LOGGED = ["training.log_every=1", "pretraining.training.log_every=1"]
NAN, INF = float("nan"), float("inf")
Captured = pytest.CaptureFixture[str]


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are carried out as on a GPU: nobody waits for one, a line is written while the next one is computed."""
    plan = Trainer.plan

    def made(self: Trainer, stage: Stage) -> Plan:
        made = plan(self, stage)
        made.at_hand = False
        return made

    monkeypatch.setattr(Trainer, "plan", made)


class Spoilt:
    """Makes the loss or the gradient of certain steps of the last stage something that is no number."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, steps: set[int], loss: float = NAN, gradient: float | None = None
    ) -> None:
        self.now, self.rows = False, []
        plain_step, plain_losses, plain_clip = Plain.step, Stream.losses, engine.clip_gradients

        def step(this: Plain, step: int, rate: float) -> Outcome:
            self.now = this.streams[0].name == "training" and step in steps
            return plain_step(this, step, rate)

        def losses(*arguments: Any) -> torch.Tensor:
            return plain_losses(*arguments) * (loss if self.now and gradient is None else 1.0)

        def clip(model: torch.nn.Module, most: float) -> torch.Tensor:
            if self.now and gradient is not None:
                next(model.parameters()).grad.view(-1)[0] = gradient
            return plain_clip(model, most)

        monkeypatch.setattr(Plain, "step", step)
        monkeypatch.setattr(Stream, "losses", losses)
        monkeypatch.setattr(engine, "clip_gradients", clip)
