"""A run directory, and everything one can do with it. Whatever reads a run goes through `Run`.

    runs/NAME/   run.toml  tokenizer.json  data.json  metrics.jsonl  checkpoints/  predictions/

`headway.making` makes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from headway.changes import changed_since, missing_file
from headway.configuration import assignments, load_settings, way_back
from headway.errors import DataError, RunError, TextError, UserError
from headway.files import read_json_lines
from headway.finding import not_a_run
from headway.generation import GREEDY, Sampling
from headway.models import parameter_count
from headway.places import way_to_resume
from headway.ranks import ALONE, Ranks
from headway.tasks import Answer, LanguageModelling, QuestionAnswering, SequenceToSequence, Translation
from headway.text import Tokenizer, load_tokenizer
from headway.text.plain import digests
from headway.training import device as devices
from headway.training.checkpoint import Checkpoints, State

Record = dict[str, Any]


class Run:
    """A trained model with its tokenizer, its task and its record."""

    def __init__(self, path: str | Path, device: str = "auto", overrides: Iterable[str] = ()) -> None:
        self.path, self.overrides = Path(path), assignments(overrides)
        if not (self.path / "run.toml").is_file():
            raise not_a_run(self.path)
        self.device, _ = devices.choose_device(device)
        if others := [each for each in self.overrides if not each.strip().startswith("task.")]:
            raise UserError(f"--set {others[0]}: a run that is there is opened with other settings of [task] alone")
        self.settings = load_settings(self.path / "run.toml", self.overrides)
        self.checkpoints = Checkpoints(self.path)
        self.notes: list[str] = []  # checkpoints that were passed over, and why
        self.state = State()  # where training stands
        self.step = 0  # of the weights that `model` has
        self.look()
        if not (self.path / "tokenizer.json").is_file():
            raise RunError(
                f"{self.path / 'tokenizer.json'}: no such file; put it back from a copy, or let it be made again from "
                f"the same data with: {way_to_resume(self.path)}"
            )
        self.tokenizer: Tokenizer = load_tokenizer(self.path / "tokenizer.json")
        self.checkpoints.require_tokenizer(self.state.tokenizer, self.tokenizer.fingerprint())
        self.task = self.settings.task.build(self.tokenizer, self.settings.model.block)

    def look(self) -> None:
        """Find the newest whole checkpoint, and the best one that it knows. A run that is training may let go of what
        is just looked at: then it has a newer one."""
        before: list[int] | None = None
        while before != (before := self.checkpoints.steps()):
            notes: list[str] = []
            with suppress(FileNotFoundError):
                latest = self.checkpoints.latest(notes.append)
                if latest is not None:
                    state = self.checkpoints.state(latest)
                    self.step = self.best_of(state, notes) or latest
                    self.state, self.notes = state, notes
                    return
        why = "".join(f"\n  - {note}" for note in notes)
        way = "put one back from a copy, then " if notes else ""
        raise RunError(f"{self.path}: no whole checkpoint in it; {way}go on with: {way_to_resume(self.path)}{why}")

    def best_of(self, state: State, notes: list[str]) -> int | None:
        """The best checkpoint that a state knows, where it is another one and whole."""
        best = state.best_step
        if best in (None, state.step):
            return None
        if best not in self.checkpoints.steps():
            notes.append(f"{self.checkpoints.path(best)}: the best checkpoint is not there; the newest is taken")
        return self.checkpoints.latest(notes.append, {best})

    @cached_property
    def model(self) -> Any:
        """The weights: the best checkpoint where the run was scored on the way, else the newest."""
        model = self.settings.model.build(len(self.tokenizer))
        while True:
            try:
                self.checkpoints.load_model(self.step, model)
                return model.to(self.device).eval()
            except FileNotFoundError:  # it was let go since
                self.look()
            except RunError as error:
                raise RunError(f"{error}{way_back(self.path / 'run.toml')}") from None

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

    def evaluate(
        self, split: str = "dev", among: Ranks = ALONE, target: str | Path | None = None, **options: Any
    ) -> Record:
        """Score the model on a split or a file; see the task's `evaluate`, which may take more `options`.

        For a run that writes one text after reading another, `split` may be a file of sources and `target` the file
        that has what they should become, line by line.
        """
        if target is not None:
            if not isinstance(self.task, SequenceToSequence):
                raise UserError(
                    f"target {target}: a run whose task is {self.settings.task.name} is scored on one file, without "
                    "targets beside it; leave --target (target) out"
                )
            options["target"] = str(target)
        with digests() as read:
            try:
                result = self.task.evaluate(self.model, split, among, **options)
            except (DataError, TextError) as error:
                key = missing_file(self.task.settings, error)
                way = f"; where the run's own data have moved, add --set task.{key}=NEW" if key else ""
                raise type(error)(f"{error}{way}") from None
        notes = [
            f"{file}: has changed since the run read it; what is held out of it now may have been learned"
            for file in changed_since(self.path, read)
        ]
        notes += self.learned_meanwhile()
        for note in notes:
            self.task.note(note)
        return result

    def learned_meanwhile(self) -> list[str]:
        """What there is to say where other settings hold out text that the run has learned from."""
        own = load_settings(self.path / "run.toml").task if self.overrides else self.settings.task
        learned, held = (getattr(task, "holdout", 0) for task in (own, self.settings.task))
        return (
            [f"task.holdout: {held:g} here, {learned:g} in training: what lies between was learned"]
            if held > learned
            else []
        )

    def answer(self, questions: str | Sequence[str], alternatives: int = 3) -> list[Answer]:
        """Answers with their probabilities, for a run that answers questions."""
        if not isinstance(self.task, QuestionAnswering):
            raise UserError(f"{self.path}: this run's task is {self.settings.task.name}, it does not answer questions")
        return self.task.answer(self.model, [questions] if isinstance(questions, str) else questions, alternatives)

    def translate(self, texts: str | Iterable[str], beam: int | None = None, best: int = 1) -> list[list[Translation]]:
        """For each text its `best` translations, the best first, for a run that writes one text after reading another.

        `beam` hypotheses are followed side by side; 1 is greedy, and without it `task.beam` counts.
        """
        if not isinstance(self.task, SequenceToSequence):
            raise UserError(f"{self.path}: this run's task is {self.settings.task.name}, it does not translate")
        return self.task.translate(self.model, [texts] if isinstance(texts, str) else list(texts), beam, best)

    def complete(self, prompt: str, limit: int = 200, sampling: Sampling = GREEDY) -> Iterator[str]:
        """The continuation of `prompt`, piece by piece."""
        if not isinstance(self.task, LanguageModelling):
            raise UserError(f"{self.path}: this run's task is {self.settings.task.name}, it does not continue text")
        return self.task.stream(self.model, prompt, limit, sampling)


def load(path: str | Path, device: str = "auto", overrides: Iterable[str] = ()) -> Run:
    """Open a run directory. With `overrides` it is asked and scored under other settings of its task, such as
    task.column=text or task.corpus=FILE; what it was trained with stays as it is."""
    return Run(path, device, overrides)
