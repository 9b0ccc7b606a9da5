"""From a run file to a trained run: `train` reads what there is to learn from, builds the model, and trains it in a
directory of its own, or goes on with one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from platform import node
from typing import Any

import torch

from headway.changes import (
    Change,
    Data,
    changed_since,
    check_changes,
    check_data,
    compare,
    compare_data,
    first_few,
    keep,
    learned_too,
    missing_file,
    paths_of,
    settle,
)
from headway.configuration import RunSettings, TokenizerSettings, in_vain, load_settings
from headway.console import Reporter
from headway.errors import DataError, RunError, SettingsError, TextError, UserError
from headway.files import clear_temporaries, is_empty, probe
from headway.finding import put_back
from headway.memory import is_out_of_memory
from headway.models import parameter_count
from headway.places import (
    claimed,
    directory_of,
    has_gone_back,
    make_directory,
    mendable,
    sign,
    sign_off,
    was_begun_by_this_job,
    way_to_resume,
)
from headway.ranks import Ranks, joined
from headway.run import Record, Run
from headway.settings import to_table
from headway.text import KINDS, Tokenizer, Words, load_tokenizer
from headway.text.plain import digests, refuse_pipe
from headway.training import device as devices
from headway.training.checkpoint import Checkpoints
from headway.training.distributed import arrange
from headway.training.loop import Trainer
from headway.training.stage import Side, Stage
from headway.training.tensorboard import TensorBoard, summary_writer

SIZES = ("width", "layers", "hidden", "block")  # of a model, what makes it large
ELSEWHERE = "copy the run elsewhere and resume the copy"  # for one that has no room where it is


def train(
    source: str | Path | dict[str, Any] | RunSettings,
    out: str | Path | None = None,
    overrides: Iterable[str] = (),
    resume: bool = False,
    report: Reporter | None = None,
    watch: Callable[[Record], None] = lambda record: None,
    accept_changes: bool = False,
    profile: bool = False,
    back_to: int | None = None,
    tensorboard: bool = False,
) -> Run:
    """Train what a recipe, a run file, tables or settings say, into the directory `out`.

    With `resume`, `out` is continued from its newest checkpoint; a finished run is left as it is. With `back_to` it is
    continued from the checkpoint of that step, and those after it are removed. With `accept_changes` it is continued
    under other settings than it had, or on other data; the old run file is kept as run.toml.1. With `profile`, a window
    of steps is looked at, and where their time went is written to profile.txt and profile.json.gz. With `tensorboard`,
    what `watch` sees goes to its events too, in the folder tensorboard.

    Without `out`, a run is resumed where `source` says (see `resumed_directory`), a new one is runs/NAME.

    Processes that torchrun started train one run together; those that it started again continue theirs.
    """
    if tensorboard:
        summary_writer()  # or an error, before anything is done
    with joined() as ranks:
        settings = source if isinstance(source, RunSettings) else load_settings(source, overrides)
        directory = ranks.led(lambda: directory_of(source, settings.name, out, resume))
        asked = Asked(resume, accept_changes, back_to, profile, tensorboard, named=out is not None)
        require_same_command(ranks, asked)
        if ranks.led(lambda: was_begun_by_this_job(directory)):
            gone_back = ranks.led(lambda: has_gone_back(directory, back_to))  # before it was started again
            asked = replace(asked, resume=True, back_to=None if gone_back else back_to)
        if not ranks.leads:
            report, watch = Reporter(), lambda record: None
        with ExitStack() as held:
            directory = train_in(held, directory, settings, asked, report or Reporter(), watch, ranks)
        ranks.wait()
        run = Run(directory, devices.choose_device(settings.training.device)[0].type)
        ranks.wait()  # until here, torchrun may start them again
        if ranks.leads:
            sign_off(directory)
        return run


@dataclass(frozen=True)
class Asked:
    """What is wanted of a training beside its settings."""

    resume: bool
    accept_changes: bool
    back_to: int | None
    profile: bool
    tensorboard: bool
    named: bool  # somebody said where a new run is to lie

    @property
    def anywhere(self) -> bool:
        """Whether a new run takes a place that is free."""
        return not (self.named or self.resume)


def train_in(
    held: ExitStack,
    directory: Path,
    settings: RunSettings,
    asked: Asked,
    report: Reporter,
    watch: Callable[[Record], None],
    ranks: Ranks,
) -> Path:
    """Train in a directory, as one of `ranks`. All of them read; the one that leads writes. Returns where it was: in
    the next directory that is free, where nobody has named one and another run has begun in this one meanwhile.

    What is `held` is let go of afterwards. A run that goes on is owned before anything in it is looked at.
    """
    resume, accept_changes, back_to = asked.resume, asked.accept_changes, asked.back_to
    owned = ranks.led(lambda: resume and take(held, directory))
    refuse_pipes(settings)
    prepared = prepared_tokenizer(settings)
    if prepared is not None:
        settings = replace(settings, tokenizer=agreed(settings.tokenizer, prepared))
    changes = ranks.led(lambda: check_directory(directory, settings, asked))
    if ranks.leads:
        probe(directory)
    device, why = devices.choose_device(settings.training.device)
    going_on = ranks.led(lambda: resume and (directory / "tokenizer.json").is_file())
    own = load_tokenizer(directory / "tokenizer.json") if going_on else prepared
    tokenizer = own if own is not None else build_tokenizer(settings, report)
    if resume:
        ranks.led(lambda: require_own_tokenizer(directory, tokenizer))
    stages = build_stages(settings, tokenizer)
    if any(stage.settings.deterministic for stage in stages):
        devices.fix_workspaces()
    data: Data = {}
    for stage in stages:  # whatever is wrong with the data shows now, before anything is written
        data |= load_data(stage, report, directory)
    require_alike(ranks, settings, tokenizer, data)
    other_data = ranks.led(lambda: check_data(directory, settings, data, accept_changes, back_to) if resume else [])
    torch.manual_seed(settings.training.seed)
    model = build_model(settings, len(tokenizer))
    parameters = parameter_count(model)
    layout, how = arrange(model, ranks, device, [stage.settings for stage in stages], settings.training.parallel)
    if asked.anywhere:
        directory = ranks.led(lambda: claim(directory, settings.name, report))
    if ranks.leads:
        if not owned:
            held.enter_context(make_directory(directory))
        clear_temporaries(directory)
        if asked.tensorboard:
            watch = both(watch, held.enter_context(TensorBoard(directory / "tensorboard")))
    held.enter_context(mendable(directory))
    if ranks.leads and not going_on:
        begin(directory, settings, tokenizer, owned)
    report.say(
        f"{directory}: {settings.model.kind} with {parameters:,} parameters, {len(tokenizer):,} tokens "
        f"({settings.tokenizer.kind}), on {devices.describe(device)} ({why}){how}"
    )
    profile = asked.profile and ranks.leads
    trainer = Trainer(model, stages, directory, tokenizer.fingerprint(), report, watch, profile=profile, layout=layout)
    if resume:
        trainer.resume(back_to)
    if ranks.leads:  # now that it has gone back, and taken them
        sign(directory, back_to)
        keep(directory, settings, changes, data, other_data, trainer.state.done, report)
    trainer.run()
    return directory


def claim(directory: Path, name: str, report: Reporter) -> Path:
    """A place for a new run; it is said where that is not the one of its name."""
    directory = claimed(directory, name)
    if directory.name != name:
        there = directory.with_name(name)
        way = f" ({way_to_resume(there)} continues it)" if (there / "run.toml").is_file() else ""
        report.say(f"{there} is there already{way}; this is {directory}")
    return directory


def both(first: Callable[[Record], None], second: Callable[[Record], None]) -> Callable[[Record], None]:
    """What tells a record to two that watch."""

    def watch(record: Record) -> None:
        first(record)
        second(record)

    return watch


def take(held: ExitStack, directory: Path) -> bool:
    """Own the run that goes on in a directory, if there is one."""
    if not (directory / "run.toml").is_file():
        return False
    probe(directory, ELSEWHERE)
    held.enter_context(make_directory(directory))
    return True


def begin(directory: Path, settings: RunSettings, tokenizer: Tokenizer, owned: bool) -> None:
    """Write what a run begins with. One that is owned has its run file already."""
    if not owned and (directory / "run.toml").exists():  # somebody was faster
        raise RunError(
            f"{directory}: another run has just begun there; choose another directory with --out, or go on with that "
            f"one: {way_to_resume(directory)}"
        )
    sign(directory, None)
    if not owned:
        settle(directory, settings)
    tokenizer.save(directory / "tokenizer.json")


def build_model(settings: RunSettings, tokens: int) -> Any:
    try:
        return settings.model.build(tokens)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    sizes = {f"model.{key}": value for key, value in to_table(settings.model).items() if key in SIZES}
    if settings.tokenizer.kind in ("words", "bpe"):
        sizes["tokenizer.size"] = tokens
    lower = ", ".join(f"{name} ({value})" for name, value in sizes.items() if value)
    raise UserError(f"out of memory for the weights of a model of {tokens:,} tokens; lower one of {lower}")


def require_own_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """The tokenizer of a run that goes on must be the one its weights were trained with."""
    checkpoints = Checkpoints(directory)
    step = checkpoints.latest(lambda note: None)
    if step is not None:
        checkpoints.require_tokenizer(checkpoints.state(step).tokenizer, tokenizer.fingerprint())


def load_data(stage: Stage, report: Reporter, directory: Path) -> Data:
    """Read what a stage learns from, and return what was in it; what should be known of it is said. What is wrong with
    a file may be that it is another one than the run in `directory` has read."""
    place = "pretraining.task" if stage.name == "pretraining" else "task"
    data: Data = {}
    for name, task in ((place, stage.task), *((f"streams.{side.name}.task", side.task) for side in stage.sides)):
        try:
            with digests() as data[name]:
                task.load()
        except (DataError, TextError) as error:
            changed = ", ".join(changed_since(directory, data[name]))
            if changed:
                way = f"; {changed} has changed since the run read it"
            elif (key := missing_file(task.settings, error)) and (directory / "run.toml").is_file():
                way = f"; where it has moved, name the new place with --set {name}.{key}=NEW --accept-changes"
            else:
                way = ""
            raise type(error)(f"{error}{way}") from None
        for note in task.notes:
            report.say(note)
        for file in learned_too(task.settings, data[name]):
            report.say(f"{file}: is learned from as well, so scores on it say nothing of what the run has not seen")
    return data


def require_alike(ranks: Ranks, settings: RunSettings, tokenizer: Tokenizer, data: Data) -> None:
    """All processes of a run must have read the same, on whichever machine: each makes its own share of the rows that
    all of them draw. Where the files lie does not matter."""
    mine = settings.tables(), tokenizer.fingerprint(), data
    tables, fingerprint, read = ranks.led(lambda: mine)
    changes = [change for change in compare(tables, mine[0]) if "task" not in change.place.split(".")]
    changes += compare_data(read, data)
    if not changes and fingerprint != mine[1]:
        changes = [Change("tokenizer.json", fingerprint, mine[1])]
    here = f"process {ranks.rank} ({node()})"
    found = ranks.gather([f"{each.place}: {each.old} in process 0, {each.new} in {here}" for each in changes])
    if found:
        raise RunError(
            "\n  - ".join(["the processes of this run do not have the same settings and data:", *first_few(found)])
            + "\ngive all of them the same files and the same command"
        )


def require_same_command(ranks: Ranks, asked: Asked) -> None:
    """All processes of a run must have been asked for the same: what one of them does, the others wait for."""
    mine = {key: getattr(asked, key) for key in ("resume", "accept_changes", "back_to")}
    first = ranks.led(lambda: mine)
    here = f"process {ranks.rank} ({node()})"
    found = ranks.gather(
        [f"{key}: {first[key]} in process 0, {value} in {here}" for key, value in mine.items() if first[key] != value]
    )
    if found:
        raise RunError(
            "\n  - ".join(["the processes of this run were not asked for the same:", *first_few(found)])
            + "\ngive all of them the same command"
        )


def build_tokenizer(settings: RunSettings, report: Reporter) -> Tokenizer:
    """A tokenizer that knows every text of every stage."""
    kind = KINDS[settings.tokenizer.kind]
    tasks = [stage.task for _, stage in settings.stages()] + [side.task for side in settings.streams.values()]
    texts = [text for task in tasks for text in task.texts(report.say)]
    try:
        tokenizer = kind.train(texts, size=settings.tokenizer.size)
    except TextError as error:
        for number, text in enumerate(texts, 1):  # which one was it?
            try:
                kind.train([text])
            except TextError as here:
                raise DataError(f"text {number} of the corpus, {text[:60]!r}: {here}") from None
        raise error
    if isinstance(tokenizer, Words) and (unspaced := tokenizer.unspaced()):
        report.say(
            f"tokenizer: {unspaced:,} of {len(tokenizer):,} words are runs of Chinese or Japanese characters, without "
            'spaces: whole sentences may be one word; tokenizer.kind = "characters" or "bpe" cuts them'
        )
    return tokenizer


def refuse_pipes(settings: RunSettings) -> None:
    """What a run learns from is read for its tokenizer, then for its task, and again when the run goes on."""
    for _, task in settings.tasks():
        for _, path in paths_of(task):
            if os.path.exists(path):
                refuse_pipe(path)


def prepared_tokenizer(settings: RunSettings) -> Tokenizer | None:
    """The tokenizer of the token shards that the run learns from; None where it learns from text alone."""
    corpora = [
        shards for _, task in settings.tasks() if (shards := getattr(task, "shards", lambda: None)()) is not None
    ]
    for shards in corpora[1:]:
        if shards.index.tokenizer != corpora[0].index.tokenizer:
            raise DataError(
                f"{corpora[0].folder} and {shards.folder} were made with different tokenizers; "
                f"prepare one of them again with --tokenizer {corpora[0].folder / 'tokenizer.json'}"
            )
    return corpora[0].tokenizer if corpora else None


def agreed(asked: TokenizerSettings, prepared: Tokenizer) -> TokenizerSettings:
    """The settings of the tokenizer that shards were made with; others than these, where given, are an error."""
    settings = TokenizerSettings(prepared.kind, len(prepared) if prepared.kind in ("words", "bpe") else None)
    if asked not in (TokenizerSettings(), TokenizerSettings(prepared.kind), settings):
        wish = f"{asked.kind} of {asked.size:,}" if asked.size else asked.kind
        raise SettingsError(
            [
                f"[tokenizer]: {wish}, but the shards hold {prepared.kind} of {len(prepared):,}; leave [tokenizer] "
                "out, or, where a run is to go on, put its own shards back"
            ]
        )
    return settings


def build_stages(settings: RunSettings, tokenizer: Tokenizer) -> list[Stage]:
    stages: list[Stage] = []
    begin = 0
    for name, stage in settings.stages():
        task = stage.task.build(tokenizer, settings.model.block)
        stages.append(Stage(name, task, stage.training, begin, final=name == "training"))
        begin += stage.training.steps
    for name, side in settings.streams.items():
        task = side.task.build(tokenizer, min(side.stream.length or settings.model.block, settings.model.block))
        task.limit = f"streams.{name}.length" if side.stream.length else "model.block"
        stages[-1].sides.append(Side(name, task, side.stream))
    return stages


def check_directory(directory: Path, settings: RunSettings, asked: Asked) -> list[Change]:
    """A new run needs a new or empty directory, if one is named; returns what is to change in one that is resumed."""
    resume, accept_changes, back_to = asked.resume, asked.accept_changes, asked.back_to
    run_file, checkpoints = directory / "run.toml", Checkpoints(directory)
    if resume:
        checkpoints.require_folder()
    if resume and back_to is not None and run_file.is_file():
        checkpoints.require(back_to)
    if resume and run_file.is_file():
        return check_changes(directory, settings, accept_changes, back_to)
    if back_to is not None:
        way = f"there is no run in {directory}" if resume else "add --resume"
        raise UserError(f"--back-to {back_to} (back_to={back_to}) is for a run that is resumed; {way}")
    if accept_changes and not resume:
        raise UserError("--accept-changes (accept_changes=True) is for a run that is resumed; add --resume")
    if not asked.anywhere and directory.exists() and (not directory.is_dir() or not is_empty(directory)):
        way = "continue it with --resume (resume=True), or choose" if run_file.is_file() else "choose"
        if not run_file.is_file() and (command := put_back(directory)):
            way = f"its run.toml is gone, get it back with {command}, or choose"
        raise RunError(f"{directory}: exists already; {way} another directory with --out")
    if problems := list(in_vain(settings)):
        raise SettingsError(problems)
    return []
