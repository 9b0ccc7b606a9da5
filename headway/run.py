"""A run directory, and everything one can do with it.

`train` makes one; `load` opens one. Whatever reads a run goes through `Run`.

    runs/NAME/   run.toml  tokenizer.json  metrics.jsonl  checkpoints/  predictions/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headway.configuration import RunSettings, load_settings
from headway.console import Reporter
from headway.errors import DataError, RunError, TextError, UserError
from headway.files import Ownership, read_json_lines, write_text
from headway.generation import GREEDY, Sampling
from headway.models import CausalModel, parameter_count
from headway.tasks import Answer, LanguageModelling, QuestionAnswering
from headway.text import KINDS, Tokenizer, load_tokenizer
from headway.training import device as devices
from headway.training.checkpoint import Checkpoints, State
from headway.training.loop import Side, Stage, Trainer

Record = dict[str, Any]


class Run:
    """A trained model with its tokenizer, its task and its record."""

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        self.path = Path(path)
        if not (self.path / "run.toml").is_file():
            raise RunError(f"{self.path}: not a run directory (no run.toml in it); train one with: headway train …")
        self.device, _ = devices.choose_device(device)
        self.settings = load_settings(self.path / "run.toml")
        self.checkpoints = Checkpoints(self.path)
        self.notes: list[str] = []  # checkpoints that were passed over, and why
        latest = self.checkpoints.latest(self.notes.append)
        if latest is None:
            why = "".join(f"\n  - {note}" for note in self.notes)
            raise RunError(
                f"{self.path}: no whole checkpoint in it; go on with: headway train {self.path} --resume{why}"
            )
        self.state: State = self.checkpoints.state(latest)  # where training stands
        best = self.state.best_step if self.state.done else None
        self.step = self.checkpoints.latest(self.notes.append, {best}) or latest
        self.tokenizer: Tokenizer = load_tokenizer(self.path / "tokenizer.json")
        self.checkpoints.require_tokenizer(latest, self.tokenizer.fingerprint())
        self.task = self.settings.task.build(self.tokenizer, self.settings.model.block)

    @cached_property
    def model(self) -> CausalModel:
        """The weights: the best checkpoint of a finished run, else the newest."""
        model = self.settings.model.build(len(self.tokenizer))
        self.checkpoints.load_model(self.step, model)
        return model.to(self.device).eval()

    @property
    def metrics(self) -> list[Record]:
        return read_json_lines(self.path / "metrics.jsonl")

    @property
    def evaluation(self) -> Record:
        """The evaluation of the weights that `model` has; empty where these were not scored."""
        scored = (record for record in self.metrics if "evaluation" in record and record["stage"] == "training")
        return next((record["evaluation"] for record in scored if record["step"] == self.step), {})

    @property
    def parameters(self) -> int:
        return parameter_count(self.model)

    def evaluate(self, split: str = "dev") -> Record:
        """Score the model on a split or a file; see the task's `evaluate`."""
        return self.task.evaluate(self.model, split)

    def answer(self, questions: str | Sequence[str], alternatives: int = 3) -> list[Answer]:
        """Answers with their probabilities, for a run that answers questions."""
        if not isinstance(self.task, QuestionAnswering):
            raise UserError(f"{self.path}: this run's task is {self.settings.task.name}, it does not answer questions")
        return self.task.answer(self.model, [questions] if isinstance(questions, str) else questions, alternatives)

    def complete(self, prompt: str, limit: int = 200, sampling: Sampling = GREEDY) -> Iterator[str]:
        """The continuation of `prompt`, piece by piece."""
        if not isinstance(self.task, LanguageModelling):
            raise UserError(f"{self.path}: this run's task is {self.settings.task.name}, it does not continue text")
        return self.task.stream(self.model, prompt, limit, sampling)


def load(path: str | Path, device: str = "auto") -> Run:
    """Open a run directory."""
    return Run(path, device)


def train(
    source: str | Path | dict[str, Any] | RunSettings,
    out: str | Path | None = None,
    overrides: Iterable[str] = (),
    resume: bool = False,
    report: Reporter | None = None,
    watch: Callable[[Record], None] = lambda record: None,
) -> Run:
    """Train what a recipe, a run file, tables or settings say, into the directory `out`.

    With `resume`, `out` is continued from its newest checkpoint; a finished run is left as it is.
    """
    report = report or Reporter()
    settings = source if isinstance(source, RunSettings) else load_settings(source, overrides)
    directory = Path(out) if out is not None else free_directory(settings.name)
    check_directory(directory, settings, resume)
    device, why = devices.choose_device(settings.training.device)
    going_on = resume and (directory / "tokenizer.json").is_file()
    if going_on:
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        checkpoints = Checkpoints(directory)
        checkpoints.require_tokenizer(checkpoints.latest(lambda note: None), tokenizer.fingerprint())
    else:
        tokenizer = build_tokenizer(settings, report)
    stages = build_stages(settings, tokenizer)
    for stage in stages:  # whatever is wrong with the data or the machine shows now, before anything is written
        devices.choose_precision(device, stage.settings.precision)
        stage.task.load()
        for side in stage.sides:
            side.task.load()
    torch.manual_seed(settings.training.seed)
    model = settings.model.build(len(tokenizer)).to(device)
    with make_directory(directory):
        if not going_on:
            if (directory / "run.toml").exists() and not resume:  # somebody was faster
                raise RunError(f"{directory}: another run has just begun there; choose another directory with --out")
            write_text(directory / "run.toml", settings.to_toml())
            tokenizer.save(directory / "tokenizer.json")
        report.say(
            f"{directory}: {settings.model.kind} with {parameter_count(model):,} parameters, {len(tokenizer):,} "
            f"{settings.tokenizer.kind} in the vocabulary, on {devices.describe(device)} ({why})"
        )
        trainer = Trainer(model, stages, directory, tokenizer.fingerprint(), report, watch)
        if resume:
            trainer.resume()
        trainer.run()
    return Run(directory, device.type)


def build_tokenizer(settings: RunSettings, report: Reporter) -> Tokenizer:
    """A tokenizer that knows every text of every stage."""
    kind = KINDS[settings.tokenizer.kind]
    tasks = [stage.task for _, stage in settings.stages()] + [side.task for side in settings.streams.values()]
    texts = [text for task in tasks for text in task.texts(report.say)]
    try:
        return kind.train(texts, size=settings.tokenizer.size)
    except TextError as error:
        for number, text in enumerate(texts, 1):  # which one was it?
            try:
                kind.train([text])
            except TextError as here:
                raise DataError(f"text {number} of the corpus, {text[:60]!r}: {here}") from None
        raise error


def build_stages(settings: RunSettings, tokenizer: Tokenizer) -> list[Stage]:
    stages: list[Stage] = []
    begin = 0
    for name, stage in settings.stages():
        task = stage.task.build(tokenizer, settings.model.block)
        stages.append(Stage(name, task, stage.training, begin, final=name == "training"))
        begin += stage.training.steps
    for name, side in settings.streams.items():
        task = side.task.build(tokenizer, min(side.stream.length or settings.model.block, settings.model.block))
        stages[-1].sides.append(Side(name, task, side.stream))
    return stages


def check_directory(directory: Path, settings: RunSettings, resume: bool) -> None:
    """A new run needs a new or empty directory; one that is resumed must have the same settings."""
    run_file = directory / "run.toml"
    if resume and run_file.is_file():
        differences = compare(load_settings(run_file).tables(), settings.tables())
        if differences:
            raise RunError(
                "\n  - ".join([f"{directory}: its settings are not the ones given:", *differences])
                + f"\nresume with its own (headway train {directory} --resume), or start anew with another --out"
            )
    elif directory.exists() and (not directory.is_dir() or {path.name for path in directory.iterdir()} - {".lock"}):
        way = "continue it with --resume (resume=True), or choose" if run_file.is_file() else "choose"
        raise RunError(f"{directory}: exists already; {way} another directory with --out")


def make_directory(directory: Path) -> Ownership:
    """The run directory, made if it is not there; to be entered as its owner."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{directory}: cannot be made ({error.strerror}); choose another with --out") from None
    return Ownership(directory)


def compare(old: Record, new: Record, place: str = "") -> list[str]:
    """Every setting that differs, as `place: old, now new`."""
    found = []
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += compare(before, after, f"{place}{key}.")
        elif before != after:
            found.append(f"{place}{key}: {before!r} there, {after!r} now")
    return found


def free_directory(name: str) -> Path:
    """runs/NAME, or runs/NAME-2 and so on where that is taken."""
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 10_000))
    return next(Path("runs", each) for each in names if not Path("runs", each).exists())
