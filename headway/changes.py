"""What may change when a run is resumed, and what that means for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.configuration import RunSettings
from headway.files import write_bytes, write_text

HARMLESS = (
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep",
    "bad_steps",
    "spike_warning",
    "device",
    "parallel",
)
SECTIONS = ("training", "pretraining.training")
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
    def reopens(self) -> bool:
        """Whether a run that was finished may have something left to do."""
        return self.place in ("training.steps", "training.patience")


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


def refusal(change: Change, settings: RunSettings, step: int) -> str | None:
    """Why a run with these settings that has made `step` steps cannot take the change; None where it can."""
    place, earlier = change.place, steps_before(settings)
    stage = "pretraining.training" if step < earlier else "training"
    inside = step not in (0, earlier)
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


def consequence(change: Change, settings: RunSettings, step: int) -> str:
    """What the change does to a run that has made `step` steps, in words."""
    earlier = steps_before(settings)
    if change.harmless or step == 0:
        return ""
    if change.place.startswith("training.") and change.place != "training.seed" and step <= earlier:
        return "; that stage has not begun, so resuming stays exact"
    if change.place.startswith("pretraining.") and step > earlier:
        return "; that stage is over, so nothing but the record changes"
    return f"; exact resuming is impossible: the {step:,} steps so far had the old value"


def steps_before(settings: RunSettings) -> int:
    """Steps of the stage before the last one, 0 where there is none."""
    return settings.pretraining.training.steps if settings.pretraining is not None else 0


def rewrite(run_file: Path, settings: RunSettings) -> Path:
    """Put the new settings into the run file; returns where the old ones are kept, run.toml.1 or the next free one."""
    number = 1
    while (kept := run_file.with_name(f"{run_file.name}.{number}")).exists():
        number += 1
    write_bytes(kept, run_file.read_bytes())
    write_text(run_file, settings.to_toml())
    return kept
