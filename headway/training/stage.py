"""A stage of a run: its settings, the streams of rows that its steps see, and its rates.

RUN.toml   [training]  [streams.NAME]     or [pretraining.training]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headway.settings import setting
from headway.tasks import Task
from headway.training import device as devices
from headway.training import distributed, engines, feed, schedules
from headway.training import optimizer as optimizers
from headway.training.guard import BAD_STEPS
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
    batches: str = setting("auto", "where the rows of a captured step are made", choices=feed.PLACES)
    fused: str = setting("auto", "one kernel for AdamW's update of all weights", choices=optimizers.FUSED)
    parallel: str = setting("auto", "how several processes share the model: auto is ddp", choices=distributed.NAMES)
    accumulate: int = setting(0, "pieces a step's rows are cut into, by length; 0: chosen by the device", least=0)
    shuffle: bool = setting(True, "a new random order every epoch; false: the order of the file")
    log_every: int = setting(10, "steps between two lines of metrics.jsonl", least=1)
    evaluate_every: int = setting(0, "steps between two evaluations; 0: at the end only", least=0)
    checkpoint_every: int = setting(
        500, "steps between two checkpoints, beside those of the best scores; 0: at the end", least=0
    )
    keep: int = setting(2, "newest checkpoints that are kept, beside the best one", least=1)
    patience: int = setting(0, "evaluations without a better score before stopping early; 0: never", least=0)
    bad_steps: str = setting("stop", "what to do when a loss or gradient is no number", choices=BAD_STEPS)
    spike_warning: float = setting(
        8.0, "say so when a logged loss is this many spreads above the median of the last 20; 0: never", least=0.0
    )
    weight: float = setting(1.0, "of the task's mean loss a token, beside streams", least=0.0)
    seed: int = setting(0, "all randomness comes from it", least=0, most=2**63 - 1)
    precision: str = setting("auto", "of the matrix products", choices=devices.PRECISIONS)
    deterministic: bool = setting(
        False, "on a GPU, add up in the same order every time: resuming is exact there too, and slower"
    )
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
    start: float = setting(0.0, "steps before it begins; up to 1, as a share of training.steps", least=0.0)
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

    def at(self, step: int) -> str:
        """A step of the run, in words; where the stage's own are counted from another one, that is said."""
        return f"step {step:,} of the run" if self.begin else f"step {step:,}"

    @property
    def place(self) -> str:
        """The section of a run file that its settings stand in."""
        return "pretraining.training" if self.name == "pretraining" else "training"


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
