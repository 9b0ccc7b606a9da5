"""A run directory, and everything one can do with it.

`train` makes one; `load` opens one. Whatever reads a run goes through `Run`.

    runs/NAME/   run.toml  tokenizer.json  data.json  metrics.jsonl  checkpoints/  predictions/
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, replace
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from platform import node
from shlex import quote
from typing import Any

import torch

from headway.changes import (
    Change,
    Data,
    accepted_settings,
    changed_since,
    compare,
    compare_data,
    consequence,
    measured_only,
    read_data,
    refusal,
    says,
    settle,
    write_data,
)
from headway.configuration import RunSettings, TokenizerSettings, in_vain, load_settings
from headway.console import Reporter
from headway.data.catalog import resolve
from headway.errors import DataError, RunError, SettingsError, TextError, UserError
from headway.files import Ownership, is_full, is_temporary, probe, read_json_lines, write_text
from headway.finding import not_a_run, put_back
from headway.generation import GREEDY, Sampling
from headway.memory import is_out_of_memory
from headway.models import parameter_count
from headway.ranks import ALONE, Ranks, job, joined
from headway.settings import to_table
from headway.tasks import Answer, LanguageModelling, QuestionAnswering, SequenceToSequence, Translation
from headway.text import KINDS, Tokenizer, load_tokenizer
from headway.text.plain import digests
from headway.training import device as devices
from headway.training.checkpoint import Checkpoints, State
from headway.training.distributed import arrange
from headway.training.loop import Trainer
from headway.training.stage import Side, Stage

Record = dict[str, Any]
SHOWN = 5  # files that have changed
SIZES = ("width", "layers", "hidden", "block")  # of a model, what makes it large
ELSEWHERE = "copy the run elsewhere and resume the copy"  # for one that has no room where it is
JOB = ".job"  # the file that says which call of torchrun works on a run


class Run:
    """A trained model with its tokenizer, its task and its record."""

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        self.path = Path(path)
        if not (self.path / "run.toml").is_file():
            raise not_a_run(self.path)
        self.device, _ = devices.choose_device(device)
        self.settings = load_settings(self.path / "run.toml")
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
            result = self.task.evaluate(self.model, split, among, **options)
        notes = [
            f"{file}: has changed since the run read it; what is held out of it now may have been learned"
            for file in changed_since(self.path, read)
        ]
        self.task.notes += [note for note in notes if note not in self.task.notes]
        return result

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
    accept_changes: bool = False,
    profile: bool = False,
    back_to: int | None = None,
) -> Run:
    """Train what a recipe, a run file, tables or settings say, into the directory `out`.

    With `resume`, `out` is continued from its newest checkpoint; a finished run is left as it is. With `back_to` it is
    continued from the checkpoint of that step, and those after it are removed. With `accept_changes` it is continued
    under other settings than it had, or on other data; the old run file is kept as run.toml.1. With `profile`, a window
    of steps is looked at, and where their time went is written to profile.txt and profile.json.gz.

    Without `out`, a run is resumed where `source` says (see `resumed_directory`), a new one is runs/NAME.

    Processes that torchrun started train one run together; those that it started again continue theirs.
    """
    with joined() as ranks:
        settings = source if isinstance(source, RunSettings) else load_settings(source, overrides)
        directory = ranks.led(lambda: directory_of(source, settings.name, out, resume))
        require_same_command(ranks, {"resume": resume, "accept_changes": accept_changes, "back_to": back_to})
        if ranks.led(lambda: was_begun_by_this_job(directory)):
            resume = True
            if ranks.led(lambda: has_gone_back(directory, back_to)):
                back_to = None  # before it was started again
        if not ranks.leads:
            report, watch = Reporter(), lambda record: None
        train_in(directory, settings, resume, report or Reporter(), watch, accept_changes, profile, back_to, ranks)
        ranks.wait()
        run = Run(directory, devices.choose_device(settings.training.device)[0].type)
        ranks.wait()  # until here, torchrun may start them again
        if ranks.leads:
            (directory / JOB).unlink(missing_ok=True)
        return run


def train_in(
    directory: Path,
    settings: RunSettings,
    resume: bool,
    report: Reporter,
    watch: Callable[[Record], None],
    accept_changes: bool,
    profile: bool,
    back_to: int | None,
    ranks: Ranks,
) -> None:
    """Train in a directory, as one of `ranks`. All of them read; the one that leads writes."""
    prepared = prepared_tokenizer(settings)
    if prepared is not None:
        settings = replace(settings, tokenizer=agreed(settings.tokenizer, prepared))
    changes = ranks.led(lambda: check_directory(directory, settings, resume, accept_changes, back_to))
    if ranks.leads:
        probe(directory, ELSEWHERE if resume else "choose another with --out")
    device, why = devices.choose_device(settings.training.device)
    going_on = ranks.led(lambda: resume and (directory / "tokenizer.json").is_file())
    if going_on:
        tokenizer = load_tokenizer(directory / "tokenizer.json")
    else:
        tokenizer = prepared if prepared is not None else build_tokenizer(settings, report)
    if resume:
        ranks.led(lambda: require_own_tokenizer(directory, tokenizer))
    stages = build_stages(settings, tokenizer)
    data: Data = {}
    for stage in stages:  # whatever is wrong with the data or the machine shows now, before anything is written
        devices.choose_precision(device, stage.settings.precision)
        data |= load_data(stage, report, directory)
    require_alike(ranks, settings, tokenizer, data)
    other_data = ranks.led(lambda: check_data(directory, settings, data, accept_changes, back_to) if going_on else [])
    torch.manual_seed(settings.training.seed)
    model = build_model(settings, len(tokenizer))
    parameters = parameter_count(model)
    layout, how = arrange(model, ranks, device, [stage.settings for stage in stages], settings.training.parallel)
    with make_directory(directory) if ranks.leads else nullcontext():
        if ranks.leads and not going_on:
            begin(directory, settings, tokenizer, resume)
        report.say(
            f"{directory}: {settings.model.kind} with {parameters:,} parameters, {len(tokenizer):,} tokens "
            f"({settings.tokenizer.kind}), on {devices.describe(device)} ({why}){how}"
        )
        trainer = Trainer(
            model,
            stages,
            directory,
            tokenizer.fingerprint(),
            report,
            watch,
            profile=profile and ranks.leads,
            layout=layout,
        )
        with mendable(directory):
            if resume:
                trainer.resume(back_to)
            if ranks.leads:
                sign(directory, back_to)
                if trainer.state.done:
                    leave_settled(directory, changes or other_data, report)
                else:  # only now that the run has taken them
                    keep_settings(directory, settings, changes, report)
                    keep_data(directory, data, other_data, report)
            trainer.run()


@contextmanager
def mendable(directory: Path) -> Iterator[None]:
    """Where the system refuses a file of the run, that is told with the way to go on; a full disk is the command's to
    tell, and what is wrong with other files their owner's."""
    try:
        yield
    except OSError as error:
        file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        if is_full(error) or file is None or directory not in (file, *file.parents):
            raise
        if directory.is_dir():
            way = f"mend that and go on with: {way_to_resume(directory)}"
        else:
            way = f"{directory} is gone, and what the run had learned with it"
        raise RunError(f"{file}: {error.strerror}; {way}") from error


def begin(directory: Path, settings: RunSettings, tokenizer: Tokenizer, resume: bool) -> None:
    """Write what a run begins with. Its run file may be there already."""
    run_file = directory / "run.toml"
    if run_file.exists() and not resume:  # somebody was faster
        raise RunError(f"{directory}: another run has just begun there; choose another directory with --out")
    if not run_file.exists():
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
            way = f"; {changed} has changed since the run read it" if changed else moved(directory, name, task.settings)
            raise type(error)(f"{error}{way}") from None
        for note in task.notes:
            report.say(note)
    return data


def moved(directory: Path, place: str, settings: Any) -> str:
    """The way out where a run that goes on does not find a file of its data any more."""
    if not (directory / "run.toml").is_file():
        return ""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.metadata.get("path") and value and not glob.glob(str(resolve(value))) and not resolve(value).exists():
            return f"; where it has moved, name the new place with --set {place}.{each.name}=NEW --accept-changes"
    return ""


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


def require_same_command(ranks: Ranks, mine: dict[str, Any]) -> None:
    """All processes of a run must have been asked for the same: what one of them does, the others wait for."""
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
        return kind.train(texts, size=settings.tokenizer.size)
    except TextError as error:
        for number, text in enumerate(texts, 1):  # which one was it?
            try:
                kind.train([text])
            except TextError as here:
                raise DataError(f"text {number} of the corpus, {text[:60]!r}: {here}") from None
        raise error


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


def check_directory(
    directory: Path, settings: RunSettings, resume: bool, accept_changes: bool, back_to: int | None
) -> list[Change]:
    """A new run needs a new or empty directory; returns what is to change in one that is resumed."""
    run_file = directory / "run.toml"
    if resume and back_to is not None and run_file.is_file():
        Checkpoints(directory).require(back_to)
    if resume and run_file.is_file():
        return check_changes(directory, settings, accept_changes, back_to)
    if back_to is not None:
        way = f"there is no run in {directory}" if resume else "add --resume"
        raise UserError(f"--back-to {back_to} (back_to={back_to}) is for a run that is resumed; {way}")
    if accept_changes and not resume:
        raise UserError("--accept-changes (accept_changes=True) is for a run that is resumed; add --resume")
    if directory.exists() and (not directory.is_dir() or not is_empty(directory)):
        way = "continue it with --resume (resume=True), or choose" if run_file.is_file() else "choose"
        if not run_file.is_file() and (command := put_back(directory)):
            way = f"its run.toml is gone, get it back with {command}, or choose"
        raise RunError(f"{directory}: exists already; {way} another directory with --out")
    if problems := list(in_vain(settings)):
        raise SettingsError(problems)
    return []


def way_to_resume(directory: Path, back_to: int | None = None) -> str:
    """The command that goes on with a run, as it can be pasted into a shell."""
    back = "" if back_to is None else f" --back-to {back_to}"
    return f"headway train {quote(str(directory))} --resume{back}"


def is_empty(directory: Path) -> bool:
    """Whether nothing is in it but what a run leaves that was killed before it began."""
    return all(path.name == ".lock" or is_temporary(path.name) for path in directory.iterdir())


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


def standing(directory: Path, back_to: int | None) -> int:
    """The step that a run which is resumed goes on from."""
    return Checkpoints(directory).standing() if back_to is None else back_to


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


def leave_settled(directory: Path, changes: Sequence[object], report: Reporter) -> None:
    """A run that is done keeps the settings and data that it was trained with, whatever is asked for now."""
    if changes:
        report.say("nothing is left to train: it keeps the settings and data that it was trained with")
    keep_settings(directory, accepted_settings(directory), [], report)


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


def make_directory(directory: Path) -> Ownership:
    """The run directory, made if it is not there; to be entered as its owner."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{directory}: cannot be made ({error.strerror}); choose another with --out") from None
    return Ownership(directory)


def sign(directory: Path, back_to: int | None) -> None:
    """Leave the name of the job in the directory, where torchrun started this process, and the step it went back to."""
    if job() and (back_to is not None or not was_begun_by_this_job(directory)):
        write_text(directory / JOB, job() if back_to is None else f"{job()}\n{back_to}")


def was_begun_by_this_job(directory: Path) -> bool:
    """Whether the run in `directory` is the one that this call of torchrun was working on before it restarted."""
    mark = directory / JOB
    return bool(job()) and mark.is_file() and mark.read_text("utf-8").split("\n")[0] == job()


def has_gone_back(directory: Path, step: int | None) -> bool:
    """Whether this job went back to that step already."""
    return (directory / JOB).read_text("utf-8").split("\n")[1:] == [str(step)]


def directory_of(source: Any, name: str, out: str | Path | None, resume: bool) -> Path:
    """Where a run is trained, or goes on. A run goes on in its own directory: another one would begin it anew."""
    run = run_of(source)
    if out is None:
        return resumed_directory(source, name) if resume else own_directory(name)
    if resume and run is not None and not (Path(out) / "run.toml").is_file():
        raise UserError(
            f"--out {out}: there is no run in it to go on with; {run} goes on where it is, without --out, or as a "
            f"copy: cp -r {quote(str(run))}/. {quote(str(out))}"
        )
    return Path(out)


def run_of(source: Any) -> Path | None:
    """The run directory that is named, by itself or by its run.toml."""
    path = Path(source) if isinstance(source, str | Path) else None
    if path is not None and (path / "run.toml").is_file():
        return path
    if path is not None and path.name == "run.toml" and (path.parent / "tokenizer.json").is_file():
        return path.parent
    return None


def resumed_directory(source: Any, name: str) -> Path:
    """The run that is named, else the last in the row of runs/NAME, runs/NAME-2 and so on."""
    numbered = (Path("runs", f"{name}-{number}") for number in count(2))
    return run_of(source) or [Path("runs", name), *takewhile(Path.exists, numbered)][-1]


def own_directory(name: str) -> Path:
    """Where this job has begun runs/NAME or runs/NAME-2 and so on already; else the first that is free."""
    begun = (path.parent for path in Path("runs").glob(f"{glob.escape(name)}*/{JOB}"))
    return next(filter(was_begun_by_this_job, begun), None) or free_directory(name)


def free_directory(name: str) -> Path:
    """runs/NAME, or runs/NAME-2 and so on where that is taken."""
    names = (name if number == 1 else f"{name}-{number}" for number in range(1, 10_000))
    return next(Path("runs", each) for each in names if not Path("runs", each).exists())
