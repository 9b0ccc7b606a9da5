"""The training loop.

A run has one or two stages (pretraining, training), each a task with its own schedule and optimizer. Steps are counted
over both. Which rows a step sees, how they are corrupted and what dropout drops are functions of (seed, stage, step): a
run that is stopped anywhere and resumed ends with the same weights, bit for bit on a CPU.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.console import Reporter, scores
from headway.errors import Interrupted, UserError
from headway.files import read_json_lines, write_json_lines
from headway.models import CausalModel
from headway.settings import setting
from headway.tasks import Task
from headway.training import device as devices
from headway.training import engine as engines
from headway.training import optimizer as optimizers
from headway.training import schedules
from headway.training.checkpoint import Checkpoints, State
from headway.training.order import Sequential, Shuffled, mix
from headway.training.streams import Stream


@dataclass
class TrainingSettings:
    """`[training]`, and `[pretraining.training]`."""

    steps: int = setting(1000, "updates of the weights", least=0)
    batch_size: int = setting(32, "rows a step", least=1)
    learning_rate: float = setting(1e-3, "peak learning rate of AdamW", above=0.0)
    schedule: str = setting("cosine", "how the rate changes", choices=schedules.NAMES)
    warmup: float = setting(0.02, "steps of rising rate; below 1, a share of all steps", least=0.0)
    final_rate: float = setting(0.1, "where cosine and linear end, as a share of the peak", least=0.0, most=1.0)
    final_tokens: int = setting(0, "where the course's schedule reaches its lowest rate, in tokens", least=0)
    optimizer: str = setting("adamw", "adamw, or muon for the matrices inside the blocks", choices=optimizers.NAMES)
    muon_learning_rate: float = setting(0.015, "peak learning rate of Muon", above=0.0)
    muon_weight_decay: float = setting(0.02, "weight decay of Muon", least=0.0)
    weight_decay: float = setting(0.1, "weight decay of AdamW on the matrices", least=0.0)
    decay: str = setting("matrices", "what weight decay pulls on", choices=optimizers.DECAYS)
    beta1: float = setting(0.9, "AdamW's memory of the gradient", least=0.0, below=1.0)
    beta2: float = setting(0.95, "AdamW's memory of its square", least=0.0, below=1.0)
    clip: float = setting(1.0, "largest norm of the gradient; 0: no clipping", least=0.0)
    engine: str = setting("auto", "how a step is carried out", choices=engines.NAMES)
    accumulate: int = setting(0, "pieces a step's rows are cut into, by length; 0: chosen by the device", least=0)
    shuffle: bool = setting(True, "a new random order every epoch; false: the order of the file")
    log_every: int = setting(10, "steps between two lines of metrics.jsonl", least=1)
    evaluate_every: int = setting(0, "steps between two evaluations; 0: at the end only", least=0)
    checkpoint_every: int = setting(500, "steps between two checkpoints; 0: at the end only", least=0)
    patience: int = setting(0, "evaluations without a better score before stopping early; 0: never", least=0)
    weight: float = setting(1.0, "of the task's mean loss a token, beside streams", least=0.0)
    seed: int = setting(0, "all randomness comes from it", least=0, most=2**63 - 1)
    precision: str = setting("auto", "of the matrix products", choices=devices.PRECISIONS)
    device: str = setting("auto", "where to train", choices=devices.DEVICES)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.schedule == "course" and not self.final_tokens:
            yield "final_tokens", "the course's schedule needs it (200 × lines × block there)"
        if self.warmup > max(1, self.steps):
            yield "warmup", f"warmup ({self.warmup:g}) is more than steps ({self.steps})"
        if self.patience and not self.evaluate_every:
            yield "patience", "early stopping needs training.evaluate_every"


@dataclass
class StreamSettings:
    """`[streams.NAME]`: what is learned beside the task, in the same steps. Its task is `[streams.NAME.task]`."""

    rows: int = setting(32, "rows a step", least=1)
    weight: float = setting(1.0, "of the stream's mean loss a token", least=0.0)
    length: int = setting(0, "longest row, in tokens; 0: model.block", least=0)
    start: float = setting(0.0, "first step; up to 1, as a share of training.steps", least=0.0)
    end: float = setting(1.0, "step before which it ends; up to 1, as a share of training.steps", above=0.0)


@dataclass
class Side:
    """A stream beside a stage's own task."""

    name: str
    task: Task
    settings: StreamSettings


@dataclass
class Stage:
    """One task, perhaps with others beside it, trained for `settings.steps` steps from the run's step `begin` on."""

    name: str
    task: Task
    settings: TrainingSettings
    begin: int
    final: bool  # the last stage is the one that is scored
    sides: list[Side] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.begin + self.settings.steps


@dataclass
class Plan:
    """What a stage needs at every step: what carries it out, how fast to learn, what to save with the weights."""

    engine: engines.Engine
    rate: Callable[[int], float]  # of a step, as a share of the peak
    optimizer: optimizers.Optimizer


@dataclass
class Trainer:
    """Trains `model` through `stages` and keeps the record in `directory`."""

    model: CausalModel
    stages: list[Stage]
    directory: Path
    fingerprint: str
    report: Reporter
    watch: Callable[[dict[str, Any]], None] = lambda record: None  # sees every record of metrics.jsonl
    state: State = field(default_factory=State)

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.directory)
        self.metrics = self.directory / "metrics.jsonl"
        self.resumed_at: int | None = None
        self.state.tokenizer = self.fingerprint

    def resume(self) -> None:
        """Go back to the newest whole checkpoint."""
        self.checkpoints.clear_remains()
        step = self.checkpoints.latest(self.report.say)
        self.checkpoints.require_tokenizer(step, self.fingerprint)
        if step is None:
            self.report.say("no checkpoint yet: beginning at step 0")
            write_json_lines(self.metrics, [])
            return
        self.state = self.checkpoints.state(step)
        self.checkpoints.load_model(step, self.model)
        self.resumed_at = step
        kept = [record for record in read_json_lines(self.metrics) if record["step"] <= step]
        write_json_lines(self.metrics, kept)
        self.report.say(f"finished at step {step:,} already" if self.state.done else f"resuming after step {step:,}")

    def run(self) -> State:
        with interruptible() as interrupted:
            for stage in self.stages:
                if self.state.step < stage.end and not self.state.done:
                    self.fit(stage, interrupted)
        if self.state.step not in self.checkpoints.steps():  # a run of no steps
            self.state.done = True
            self.checkpoints.save(self.model, None, self.state)
        return self.state

    def fit(self, stage: Stage, interrupted: Callable[[], bool]) -> None:
        """Train one stage to its end."""
        settings, state = stage.settings, self.state
        plan = self.plan(stage)
        meter = Meter(state)
        self.model.train()
        with self.report.progress(stage.name, settings.steps, state.step - stage.begin) as progress:
            while state.step < stage.end:
                step = state.step - stage.begin
                share = plan.rate(step)
                done = plan.engine.step(step, share)
                state.step += 1
                state.tokens += done.tokens
                meter.add(done.tokens)

                last = state.step == stage.end
                rate = share * settings.learning_rate
                if due(settings.log_every, step + 1) or last:
                    record = {
                        "stage": stage.name,
                        "step": state.step,
                        "loss": finite(done, state.step, rate),
                        "learning_rate": rate,
                        "gradient_norm": float(done.norm),
                        "tokens": state.tokens,
                        **meter.read(),
                    }
                    self.record(record)
                    progress.update(step + 1, record)
                meter.lap()
                scored = due(settings.evaluate_every, step + 1) or (last and stage.final)
                better, enough = self.evaluate(stage) if scored else (False, False)
                state.done = stage.final and (last or enough)
                stop = interrupted()
                if due(settings.checkpoint_every, step + 1) or last or better or enough or stop:
                    finite(done, state.step, rate)  # weights that are not numbers are never saved
                    self.checkpoints.save(self.model, plan.optimizer, state)
                if enough:
                    break
                if stop and not state.done:
                    raise Interrupted(f"stopped after step {state.step:,}, state saved")
                meter.skip()

    def plan(self, stage: Stage) -> Plan:
        """Get a stage's data, optimizer and schedule ready, at the step where the run stands."""
        settings, task = stage.settings, stage.task
        device = next(self.model.parameters()).device
        precision, why = devices.choose_precision(device, settings.precision, self.model.settings.width)
        how = f", {engines.choose(settings, device)[2]}" if device.type == "cuda" else ""
        self.report.say(
            f"{stage.name}: {settings.steps:,} steps of {settings.batch_size} rows, {dtype(precision)} ({why}){how}"
        )
        seed = mix(settings.seed, stage.name)
        streams = streams_of(stage, seed)
        optimizer = optimizers.build_optimizer(self.model, settings)
        if self.resumed_at is not None and stage.begin < self.state.step:
            self.checkpoints.load_optimizer(self.state.step, optimizer)
        engine = engines.build(self.model, streams, optimizer, seed, precision, settings, self.report.say)
        return Plan(engine, rate_of(settings, streams[0].order, task.block), optimizer)

    def evaluate(self, stage: Stage) -> tuple[bool, bool]:
        """Score the model and remember the best: (is this the best so far, is it time to stop early)."""
        task, state = stage.task, self.state
        result = task.evaluate(self.model)  # in float32, as whoever loads the run will see it
        numbers = {key: value for key, value in result.items() if isinstance(value, int | float)}
        self.record({"stage": stage.name, "step": state.step, "evaluation": numbers})
        value = numbers.get(task.metric)
        if value is None or not stage.final:
            return False, False
        self.report.say(f"{stage.name}: step {state.step:,}: dev {scores({task.metric: value})[0]}")
        better = state.best_value is None or (
            value > state.best_value if task.higher_is_better else value < state.best_value
        )
        if better:
            state.best_value, state.best_step = value, state.step
        state.since_best = 0 if better else state.since_best + 1
        enough = 0 < stage.settings.patience <= state.since_best
        if enough:
            self.report.say(f"{stage.name}: no better score in {state.since_best} evaluations, stopping early")
        return better, enough

    def record(self, record: dict[str, Any]) -> None:
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.watch(record)


def streams_of(stage: Stage, seed: int) -> list[Stream]:
    """The stage's own task first, then what is learned beside it."""
    settings, examples = stage.settings, stage.task.examples
    order: Shuffled | Sequential
    if settings.shuffle:
        order = Shuffled(examples, settings.batch_size, seed)
    else:
        order = Sequential(examples, settings.batch_size)
    streams = [Stream(stage.name, stage.task, settings.batch_size, order, seed, settings.weight)]
    for side in stage.sides:
        rows, own = side.settings.rows, mix(seed, side.name)
        begin, end = (steps_at(share, settings.steps) for share in (side.settings.start, side.settings.end))
        shuffled = Shuffled(side.task.examples, rows, own)
        streams.append(Stream(side.name, side.task, rows, shuffled, own, side.settings.weight, begin, end))
    return streams


def steps_at(share: float, steps: int) -> int:
    """A number of steps, or a share of them where it is at most 1."""
    return round(share * steps) if share <= 1 else int(share)


def rate_of(settings: TrainingSettings, order: Shuffled | Sequential, block: int) -> Callable[[int], float]:
    if settings.schedule == "course":
        return schedules.course_schedule(lambda step: order.rows_through(step) * (block - 1), settings.final_tokens)
    return schedules.schedule(settings.schedule, settings.steps, settings.warmup, settings.final_rate)


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def finite(done: engines.Outcome, step: int, rate: float) -> float:
    """The loss as a number; a run whose loss or gradient is not finite ends before it is saved."""
    value, norm = float(done.loss), float(done.norm)
    if not (math.isfinite(value) and math.isfinite(norm)):
        raise UserError(
            f"the loss is {value} and the gradient's norm {norm} at step {step:,} (learning rate {rate:.2g}); "
            "the last checkpoint is from before. Lower training.learning_rate or lengthen training.warmup"
        )
    return value


def dtype(precision: torch.dtype) -> str:
    return str(precision).removeprefix("torch.")


class Meter:
    """Time spent training, and tokens a second; evaluations and checkpoints are left out of both."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.mark = time.perf_counter()
        self.tokens, self.seconds = 0, 0.0

    def add(self, tokens: int) -> None:
        self.tokens += tokens

    def lap(self) -> None:
        """What has passed since the last mark was training."""
        now = time.perf_counter()
        self.seconds += now - self.mark
        self.state.seconds += now - self.mark
        self.mark = now

    def skip(self) -> None:
        """What has passed since the last mark was something else."""
        self.mark = time.perf_counter()

    def read(self) -> dict[str, float]:
        self.lap()
        speed = self.tokens / max(1e-9, self.seconds)
        self.tokens, self.seconds = 0, 0.0
        return {"seconds": round(self.state.seconds, 3), "tokens_per_second": round(speed, 1)}


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C or SIGTERM only raises a flag; the second ends the program at once."""
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        if len(seen) > 1:
            raise KeyboardInterrupt

    before = {}
    for name in (signal.SIGINT, signal.SIGTERM):
        try:
            before[name] = signal.signal(name, note)
        except ValueError:  # not the main thread: the caller's signals are the caller's
            break
    try:
        yield lambda: bool(seen)
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
