"""What may change when a run is resumed, settings and data, and what that means for it."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from headway.configuration import RunSettings, load_settings
from headway.console import Reporter
from headway.data.catalog import resolve
from headway.errors import RunError, UserError
from headway.files import content_of, named, numbered, write_bytes, write_json, write_text
from headway.finding import COPY, put_back
from headway.places import way_to_resume
from headway.training.checkpoint import Checkpoints

Data = dict[str, dict[str, str]]
"""Of each task, by the place of its table, the files that it read, in their order, and the SHA-256 of their content."""

DATA = "data.json"  # where a run keeps it
SHOWN = 5  # files that have changed
HARMLESS = (
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep",
    "bad_steps",
    "spike_warning",
    "device",
    "batches",
    "parallel",
)
SECTIONS = ("training", "pretraining.training")
MEASURED = ("dev", "dev_target", "test", "test_target", "validation")  # of a task, what names files to measure on
LEARNED = ("source", "target", "questions", "corpus")  # and files to learn from
SAME_WEIGHTS = (  # of a model, what the shapes of its weights do not depend on
    "model.dropout",
    "model.inner_dropout",
    "model.sampling",
    "model.heads",
    "model.rotary_base",
    "model.small_residuals",
)


@dataclass(frozen=True)
class Change:
    """A setting that differs between the run as it is and the run that is asked for."""

    place: str  # such as training.batch_size
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.place}: {self.old!r} there, {self.new!r} now"

    @property
    def harmless(self) -> bool:
        """Whether it concerns only what is written and shown, and not what is learned."""
        section, _, key = self.place.rpartition(".")
        return section in SECTIONS and key in HARMLESS

    @property
    def names_a_file(self) -> bool:
        """Whether it is only another place for data."""
        return ", " not in self.place and self.place.rpartition(".")[2] in (*LEARNED, *MEASURED)


def compare(old: dict[str, Any], new: dict[str, Any], place: str = "") -> list[Change]:
    """Every setting that differs."""
    found = []
    for key in old | new:
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += compare(before, after, f"{place}{key}.")
        elif before != after:
            found.append(Change(f"{place}{key}", before, after))
    return found


def compare_data(old: Data, new: Data) -> list[Change]:
    """Every file whose content differs, of the tasks that both have. Where the files lie does not matter."""
    found = []
    for task in (task for task in old if task in new):
        before, after = old[task], new[task]
        if [*before.values()] == [*after.values()]:
            continue
        here = [
            Change(f"{task}, {file}", shortened(before.get(file)), shortened(after.get(file)))
            for file in before | after
            if (file in before and file in after and before[file] != after[file])
            or (file not in after and before[file] not in after.values())
            or (file not in before and after[file] not in before.values())
        ]
        found += here or [Change(f"{task}, {next(iter(after), '')}", "one order of its files", "another")]
    return found


def shortened(digest: str | None) -> str:
    return "not read" if digest is None else f"SHA-256 {digest[:12]}…"


def read_data(directory: Path) -> Data:
    """What the run in `directory` has learned from; empty where it did not say so."""
    path = directory / DATA
    if not path.is_file():
        return {}
    try:
        with named(path):
            found = json.loads(path.read_text("utf-8"))
        return {task: {each["file"]: each["sha256"] for each in files} for task, files in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{path}: damaged ({error}); put it back from a copy, or remove it to resume without comparing the data"
        ) from None


def changed_since(directory: Path, read: dict[str, str]) -> list[str]:
    """Of files that were read now, with the SHA-256 of each, those that were others when the run read them."""
    try:
        known = read_data(directory).values()
    except RunError:  # which matters to a run that is resumed
        return []
    before = {file: {files[file] for files in known if file in files} for file in read}
    return [file for file, content in read.items() if before[file] and content not in before[file]]


def write_data(directory: Path, data: Data) -> None:
    kept = {task: [{"file": file, "sha256": digest} for file, digest in files.items()] for task, files in data.items()}
    write_json(directory / DATA, kept)


def refusal(change: Change, old: RunSettings, new: RunSettings, step: int) -> str | None:
    """Why a run that has made `step` steps cannot take the change, one of those from `old` to `new`; None where it
    can."""
    place, earlier, from_now_on = change.place, steps_before(old), steps_before(new)
    only_scored = new.training.steps == 0 and step == from_now_on  # then the state of pretraining is saved again
    stage = "pretraining.training" if step < from_now_on or only_scored else "training"  # that it would go on with
    inside = step != 0 and (step != from_now_on or only_scored)
    reasons = (
        (place.startswith("tokenizer"), "the run has its tokenizer.json already"),
        (place.startswith("model.") and place not in SAME_WEIGHTS and step > 0, "its weights are of the old model"),
        (place == "pretraining" and step > 0, "a stage can neither come nor go once steps are made"),
        (place == "pretraining.training.steps" and step > earlier, "that stage is over"),
        (place == "pretraining.training.steps" and change.new < step, f"{step:,} of them are made"),
        (place == "training.steps" and change.new < step - earlier, f"{step - earlier:,} of them are made"),
        (place == f"{stage}.optimizer" and inside, "its state in the middle of a stage is that of the other one"),
    )
    return next((words for applies, words in reasons if applies), None)


def measured_only(settings: RunSettings) -> set[str]:
    """The files that a run is measured on and learns nothing from, as they stand in the place of a change."""
    found = set()
    for place, task in settings.tasks():
        measured, learned = files_of(task, MEASURED), files_of(task, LEARNED)
        found |= {f"{place}, {file}" for file in measured if not any(holds(each, file) for each in learned)}
    return found


def learned_too(task: Any, read: dict[str, str]) -> list[Path]:
    """The files that a task is measured on though it learns the same from them, or from others, of all that it has
    `read`, with the SHA-256 of each."""
    learned = files_of(task, LEARNED)
    contents = {content for file, content in read.items() if any(holds(each, Path(file)) for each in learned)}
    return [file for file in files_of(task, MEASURED) if read.get(str(file)) in contents]


def files_of(task: Any, keys: Collection[str]) -> list[Path]:
    """What these settings of a task name."""
    return [Path(resolve(name)) for key in keys if (name := getattr(task, key, None))]


def holds(corpus: Path, file: Path) -> bool:
    """Whether the file is the corpus, lies in its folder, or fits its pattern."""
    return file == corpus or corpus in file.parents or file.match(str(corpus))


def consequence(change: Change, settings: RunSettings, step: int, measured: Collection[str] = ()) -> str:
    """What the change does to a run that has made `step` steps, in words. Nothing is learned from `measured` files."""
    earlier, place = steps_before(settings), change.place
    if change.harmless or step == 0:
        return ""
    last_stage = place.startswith(("training.", "task", "streams")) and place != "training.seed"
    scores = "the best score and the patience so far were" if place.startswith("task,") else "its scores were"
    meanings = (
        (last_stage and step <= earlier, "that stage has not begun, so resuming stays exact"),
        (place.startswith("pretraining.") and step > earlier, "that stage is over, so nothing but the record changes"),
        (
            place.endswith(".holdout"),
            "what is held out now may have been learned, and scores so far were of other text",
        ),
        (place.endswith(".dev_tokens"), "every step stays exact, but scores so far were of other tokens"),
        (place.endswith((".test", ".test_target")), "training does not read it, so every step stays exact"),
        (change.names_a_file, "resuming stays exact where the same stands in it"),  # which is looked at too
        (
            place in measured,
            f"nothing was learned from it, so every step stays exact, but {scores} measured on the old one",
        ),
        (True, f"exact resuming is impossible: the {step:,} steps so far had the old value"),
    )
    return "; " + next(words for applies, words in meanings if applies)


def steps_before(settings: RunSettings) -> int:
    """Steps of the stage before the last one, 0 where there is none."""
    return settings.pretraining.training.steps if settings.pretraining is not None else 0


def missing_file(settings: Any, error: Exception) -> str | None:
    """The key of a task's settings that names what an error is about, and what is not there."""
    named = ((key, path) for key, path in paths_of(settings) if path in str(error))
    return next((key for key, path in named if not glob.glob(path) and not os.path.exists(path)), None)


def paths_of(settings: Any) -> Iterator[tuple[str, str]]:
    """Each setting of a task that names files of the user's, and what it names."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.metadata.get("path") and value and not value.startswith("data:"):
            yield each.name, str(resolve(value))


# ---- the run file and its copy


def accepted_settings(directory: Path) -> RunSettings:
    """The settings that a run has, whatever was written into its run file by hand since."""
    return settings_in(directory / COPY) or load_settings(directory / "run.toml")


def settings_in(file: Path) -> RunSettings | None:
    """What a run file says; None where it is not there or says nothing that can be understood."""
    try:
        content_of(file)
        return load_settings(file)
    except (FileNotFoundError, IsADirectoryError):
        return None
    except UserError:
        return None


def says(file: Path, settings: RunSettings) -> bool:
    found = settings_in(file)
    return found is not None and not compare(found.tables(), settings.tables())


def settle(directory: Path, settings: RunSettings) -> list[Path]:
    """Let the run file say what the run has from now on, and its copy the same. What they said instead is kept in
    run.toml.1 or the next free ones, which are returned; a run file that says it already stays as somebody wrote it."""
    run_file, copy = directory / "run.toml", directory / COPY
    others = [copy] if settings_in(copy) and not says(copy, settings) else []
    if run_file.is_file() and not says(run_file, settings):
        others.append(run_file)
    kept = []
    for content in dict.fromkeys(map(content_of, others)):
        kept.append(numbered(run_file))
        write_bytes(kept[-1], content)
    if not says(run_file, settings):
        write_text(run_file, settings.to_toml())
    content = content_of(run_file)
    if not copy.is_file() or content_of(copy) != content:
        write_bytes(copy, content)
    return kept


# ---- a run that is resumed


def check_changes(directory: Path, settings: RunSettings, accept_changes: bool, back_to: int | None) -> list[Change]:
    """What differs from the settings of the run in `directory`; harmless, or accepted, or an error."""
    old = accepted_settings(directory)
    changes = compare(old.tables(), settings.tables())
    if not changes:
        return []
    step = standing(directory, back_to)
    own = way_to_resume(directory, back_to)
    if not says(directory / "run.toml", old):  # somebody has written other values into it
        own = f"{put_back(directory)} && {own}"
    impossible = [f"{change}; {why}" for change in changes if (why := refusal(change, old, settings, step)) is not None]
    serious = [f"{change}{consequence(change, old, step)}" for change in changes if not change.harmless]
    patience = old.training.patience or settings.training.patience
    serious += [
        f"{change}; every step stays exact, but with training.patience ({patience}) it decides when the run ends"
        for change in changes
        if patience and change.place == "training.evaluate_every"
    ]
    anew = "start anew with another --out"
    if impossible:
        raise RunError(
            "\n  - ".join([f"{directory}: what cannot change any more:", *impossible])
            + f"\nresume with what it has ({own}), or {anew}"
        )
    if serious and not accept_changes:
        raise RunError(
            "\n  - ".join([f"{directory}: its settings are not the ones given:", *serious])
            + f"\nresume with its own ({own}), take the new ones with --accept-changes (accept_changes=True), or {anew}"
        )
    return changes


def check_data(
    directory: Path, settings: RunSettings, data: Data, accept_changes: bool, back_to: int | None
) -> list[str]:
    """What differs from the data of the run in `directory`, and what that means; accepted, or an error."""
    changes = compare_data(read_data(directory), data)
    if not changes:
        return []
    old, step = accepted_settings(directory), standing(directory, back_to)
    measured = measured_only(settings)
    shown = first_few([f"{change}{consequence(change, old, step, measured)}" for change in changes])
    if not accept_changes:
        only = all(change.place in measured for change in changes)
        words = "it was measured on other data so far" if only else "its data are not what it has learned from"
        raise RunError(
            "\n  - ".join([f"{directory}: {words}:", *shown])
            + "\nput the old files back, go on with the new ones with --accept-changes (accept_changes=True), or start "
            "anew with another --out"
        )
    return shown


def standing(directory: Path, back_to: int | None) -> int:
    """The step that a run which is resumed goes on from."""
    return Checkpoints(directory).standing() if back_to is None else back_to


def keep(
    directory: Path,
    settings: RunSettings,
    changes: list[Change],
    data: Data,
    other_data: list[str],
    done: bool,
    report: Reporter,
) -> None:
    """The settings and data that a run has from now on. One that is done keeps those that it was trained with, whatever
    is asked for now, but for the place of data that are the same."""
    if done and not have_moved(directory, changes, other_data):
        if changes or other_data:
            report.say("nothing is left to train: it keeps the settings and data that it was trained with")
        keep_settings(directory, accepted_settings(directory), [], report)
        return
    keep_settings(directory, settings, changes, report)
    keep_data(directory, data, other_data, report)


def have_moved(directory: Path, changes: list[Change], other_data: list[str]) -> bool:
    """Whether nothing but the places of its data is new, and the same stands in them."""
    return bool(read_data(directory)) and not other_data and all(change.names_a_file for change in changes)


def keep_settings(directory: Path, settings: RunSettings, changes: list[Change], report: Reporter) -> None:
    """The settings that the run has from now on."""
    kept = " and ".join(map(str, settle(directory, settings)))
    if changes:
        report.say("\n  - ".join([f"settings changed (those before are in {kept}):", *map(str, changes)]))
    elif kept:
        report.say(f"{directory / 'run.toml'}: says again what the run was trained with; what stood there is in {kept}")


def keep_data(directory: Path, data: Data, changes: list[str], report: Reporter) -> None:
    """What the run learns from now on."""
    if changes:
        report.say("\n  - ".join(["data changed:", *changes]))
    if read_data(directory) != data:
        write_data(directory, data)


def first_few(changes: list[str]) -> list[str]:
    """The first of them in full, and how many more there are."""
    more = [f"… and {len(changes) - SHOWN:,} more files"] if len(changes) > SHOWN else []
    return changes[:SHOWN] + more
