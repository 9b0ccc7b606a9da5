"""A run file: what to build, what to learn and how, in one TOML.

    [tokenizer]  [model]  [task]  [training]        every run
    [pretraining.task]  [pretraining.training]      an earlier stage on the same model, where there is one
    [streams.NAME]  [streams.NAME.task]             something learned beside the task, in the same steps

What is left out has a default. Recipes are run files that come with Headway (`headway/recipes`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headway.errors import SettingsError, UserError, nearest
from headway.files import content_of
from headway.finding import COPY, found, not_a_run, put_back
from headway.models import MODELS
from headway.settings import override, read, read_kind, read_toml, setting, to_table, to_toml, toml_value
from headway.tasks import TASKS
from headway.text import KINDS
from headway.text.preparation.sources import ENDINGS
from headway.training.stage import StreamSettings, TrainingSettings, steps_at

RECIPES = Path(__file__).parent / "recipes"


@dataclass
class TokenizerSettings:
    """`[tokenizer]`."""

    kind: str = setting("characters", "how text is cut into tokens", choices=tuple(KINDS))
    size: int | None = setting(
        None, "most tokens of a words or bpe vocabulary; left out: every word, or 4,096 of bpe", least=2
    )

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.size is not None and self.kind not in ("words", "bpe"):
            yield "size", f"a {self.kind} tokenizer has no size to choose; leave it out, or use words or bpe"


@dataclass
class StageSettings:
    """A task and how it is trained."""

    task: Any
    training: TrainingSettings


@dataclass
class SideSettings:
    """A task that is learned beside the main one, and how much of it."""

    task: Any
    stream: StreamSettings


@dataclass
class RunSettings:
    """A whole run file."""

    tokenizer: TokenizerSettings
    model: Any
    task: Any
    training: TrainingSettings
    pretraining: StageSettings | None = None
    streams: dict[str, SideSettings] = field(default_factory=dict)
    name: str = field(default="run", compare=False)

    def stages(self) -> list[tuple[str, StageSettings]]:
        """(name, settings) of each stage in order; a stage of no steps is none."""
        stages = [("training", StageSettings(self.task, self.training))]
        if self.pretraining is not None and self.pretraining.training.steps > 0:
            stages.insert(0, ("pretraining", self.pretraining))
        return stages

    def tables(self) -> dict[str, Any]:
        tables = {name: to_table(getattr(self, name)) for name in ("tokenizer", "model", "task", "training")}
        if self.pretraining is not None:
            stage = self.pretraining
            tables["pretraining"] = {"task": to_table(stage.task), "training": to_table(stage.training)}
        for name, side in self.streams.items():
            tables.setdefault("streams", {})[name] = {**to_table(side.stream), "task": to_table(side.task)}
        return tables

    def tasks(self) -> list[tuple[str, Any]]:
        """Every task with the place of its table."""
        tasks = [("task", self.task), *((f"streams.{name}.task", side.task) for name, side in self.streams.items())]
        return tasks if self.pretraining is None else [*tasks, ("pretraining.task", self.pretraining.task)]

    def to_toml(self) -> str:
        return to_toml(self.tables()).lstrip()


def assignments(overrides: Iterable[str]) -> list[str]:
    """What --set gives; a single assignment may stand alone."""
    return [overrides] if isinstance(overrides, str) else list(overrides)


def load_settings(source: str | Path | dict[str, Any], overrides: Iterable[str] = ()) -> RunSettings:
    """Settings from a recipe's name, a run file, a run directory, or tables; every problem is reported at once."""
    if isinstance(source, dict):
        tables, base, name, shown, way = copy.deepcopy(source), Path.cwd(), "run", "settings", ""
    else:
        path = find(source)
        tables, base, name, way = read_tables(path), path.parent, name_of(path), way_back(path)
        shown = str(path if path.name == "run.toml" else source)
    overrides = assignments(overrides)
    if overrides:
        shown, way = f"{shown} with --set", ""
    problems: list[str] = []
    typed: set[str] = set()  # the keys that --set gave
    for assignment in overrides:
        try:
            typed.add(override(tables, assignment))
        except SettingsError as error:
            problems += error.problems
    known = ("tokenizer", "model", "task", "training", "pretraining", "streams")
    for key, value in tables.items():
        if key not in known:
            if isinstance(value, dict):
                problems.append(f"[{key}]: unknown section{nearest(key, known)}")
            else:
                problems.append(f"{key}: stands in no section; known: {', '.join(known)}")
    settings = RunSettings(
        read(TokenizerSettings, tables.get("tokenizer", {}), "tokenizer", problems),
        read_kind(MODELS, "kind", "gpt", tables.get("model", {}), "model", problems),
        read_kind(TASKS, "name", None, tables.get("task", {}), "task", problems),
        read(TrainingSettings, tables.get("training", {}), "training", problems),
        read_stage(tables["pretraining"], problems) if "pretraining" in tables else None,
        read_streams(tables.get("streams", {}), problems),
        name,
    )
    problems += never_on(settings)
    problems += unfit(settings)
    if settings.pretraining is not None and settings.pretraining.training is not None:
        problems += idle_settings(settings.pretraining.training)
    if problems:
        raise SettingsError([*problems[:-1], f"{problems[-1]}{way}"], shown)
    for place, task in settings.tasks():
        make_absolute(task, place, base, typed)
    return settings


def idle_settings(pretraining: TrainingSettings) -> Iterator[str]:
    """What would be read for the earlier stage and then do nothing."""
    if pretraining.device != "auto":
        yield "pretraining.training.device: the whole run trains on training.device; set that"
    if pretraining.parallel != "auto":
        yield "pretraining.training.parallel: the whole run is shared out as training.parallel says; set that"
    if pretraining.patience:
        yield "pretraining.training.patience: only the last stage is scored, so only it can stop early"


def read_stage(table: Any, problems: list[str]) -> StageSettings:
    if not isinstance(table, dict):
        problems.append(f"[pretraining] must hold [pretraining.task] and [pretraining.training], not {table!r}")
        table = {}
    known = ("task", "training")
    problems += [f"pretraining.{key}: unknown section{nearest(key, known)}" for key in table if key not in known]
    return StageSettings(
        read_kind(TASKS, "name", None, table.get("task", {}), "pretraining.task", problems),
        read(TrainingSettings, table.get("training", {}), "pretraining.training", problems),
    )


def never_on(settings: RunSettings) -> Iterator[str]:
    """Streams that would be read and take part in no step."""
    for name, side in settings.streams.items():
        if side.stream is None or settings.training is None or settings.training.steps == 0:
            continue
        first, end = (steps_at(share, settings.training.steps) for share in (side.stream.start, side.stream.end))
        if first >= min(end, settings.training.steps):
            yield f"streams.{name}: from step {first} up to {end} of {settings.training.steps} it takes part in no step"


def in_vain(settings: RunSettings) -> Iterator[str]:
    """What a new run should not begin with, and an old one may have: rows that the model cannot hold, and stages that
    learn nothing."""
    block = settings.model.block
    for name, side in settings.streams.items():
        if side.stream.length > block:
            yield f"streams.{name}.length ({side.stream.length}) is more than model.block ({block})"
    if not any((settings.training.weight, *(side.stream.weight for side in settings.streams.values()))):
        streams = " and of every stream" if settings.streams else ""
        yield f"training.weight: with a weight of 0{streams} nothing is learned"
    if settings.pretraining is not None and settings.pretraining.training.weight == 0:
        yield "pretraining.training.weight: with a weight of 0 that stage learns nothing"


def unfit(settings: RunSettings) -> Iterator[str]:
    """Tasks the model cannot learn: one with sources needs a model that reads them, any other one that reads none."""
    if settings.model is None:
        return
    kind = settings.model.kind
    for place, task in settings.tasks():
        wanted = reads_source(task)
        if task is not None and wanted != reads_source(settings.model):
            others = " or ".join(name for name, each in MODELS.items() if reads_source(each) == wanted)
            why = "reads a source, which this model does not" if wanted else "has no source for this model to read"
            yield f"model.kind = '{kind}': {place}, {task.name}, {why}; use {others}, or another task"


def reads_source(settings: Any) -> bool:
    return getattr(settings, "reads_source", False)


def read_streams(tables: Any, problems: list[str]) -> dict[str, SideSettings]:
    if not isinstance(tables, dict):
        problems.append(f"[streams] must hold a table a stream, as [streams.facts], not {tables!r}")
        return {}
    streams = {}
    for name, table in tables.items():
        place = f"streams.{name}"
        if not isinstance(table, dict):
            problems.append(f"[{place}] must be a table, not {table!r}")
            continue
        if name in ("training", "pretraining"):
            problems.append(f"[{place}]: '{name}' is the name of a stage in the record; choose another")
        own = {key: value for key, value in table.items() if key != "task"}
        if "task" not in table and "did you mean" in (near := nearest(name, tables.keys() - {name})):
            problems.append(f"[{place}]: has no task{near}")
            continue
        task = read_kind(TASKS, "name", None, table.get("task", {}), f"{place}.task", problems)
        stream = read(StreamSettings, own, place, problems)
        streams[name] = SideSettings(task, stream)
    return streams


def make_absolute(task: Any, place: str, base: Path, typed: set[str]) -> None:
    """Paths in a run file are relative to the file, typed ones to where they are typed; data sets keep their names."""
    for item in fields(task):
        value = getattr(task, item.name)
        if item.metadata.get("path") and value is not None and not value.startswith("data:"):
            start = Path.cwd() if f"{place}.{item.name}" in typed else base
            setattr(task, item.name, str((start / os.path.expanduser(value)).absolute()))


def find(source: str | Path) -> Path:
    """The file behind a recipe's name, a run file or a run directory."""
    path, recipe = Path(source), RECIPES / f"{source}.toml"
    if os.path.isfile(path) and path.name.lower().endswith(ENDINGS):
        raise UserError(
            f"{source}: this is something to learn from, not a run file; write one that names it, such as\n\n"
            f'  [task]\n  name = "language_modelling"\n  corpus = {toml_value(path.name)}\n\n'
            f"into {path.with_name(path.name.split('.')[0] + '.toml')}, and give that to headway train"
        )
    for each in (path / "run.toml", path, recipe):
        if os.path.isfile(each):
            return each
    if os.path.isdir(path):
        raise not_a_run(path)
    if path.suffix == ".toml":
        raise UserError(f"{source}: no such run file{nearest(path.name, found(path.parent, '*.toml'))}")
    around = [str(path.parent / name) for pattern in ("*/run.toml", "*.toml") for name in found(path.parent, pattern)]
    near = nearest(str(source), [*around, *recipe_names()])
    raise UserError(f"'{source}' is neither a recipe nor a run file or directory{near}")


def read_tables(run_file: Path) -> dict[str, Any]:
    try:
        if tables := read_toml(run_file):
            return tables
        raise SettingsError(["there is nothing in it"], str(run_file))
    except SettingsError as error:
        raise SettingsError([f"{problem}{way_back(run_file)}" for problem in error.problems], str(run_file)) from None


def way_back(run_file: Path) -> str:
    """The way out where the run file of a run was changed by hand."""
    copied = run_file.with_name(COPY)
    if run_file.name != "run.toml" or not copied.is_file() or content_of(copied) == content_of(run_file):
        return ""
    return f"; get it back as the run last took it with {put_back(run_file.parent)}"


def recipe_names() -> list[str]:
    """The recipes that come with Headway."""
    return sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.glob("*/*.toml"))


def name_of(path: Path) -> str:
    """What a run from this file is called: birthplaces-default, my-notes, or the run that it repeats."""
    if path.is_relative_to(RECIPES):
        return "-".join(path.relative_to(RECIPES).with_suffix("").parts)
    return (path.absolute().parent.name or "run") if path.name == "run.toml" else path.stem
