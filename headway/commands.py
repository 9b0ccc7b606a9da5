"""What the commands print. The work itself is done by `Run`, `train`, the tasks and the data catalogue."""

from __future__ import annotations

import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from headway.changes import read_data
from headway.configuration import RunSettings, find, load_settings, recipe_names
from headway.console import Progress, Reporter, Terminal, clock, reporter, scores
from headway.data import catalog
from headway.data.world import WorldSettings
from headway.errors import DataError, Interrupted, Quit, TextError, UserError
from headway.files import as_json, expanded, is_kept, one_line, probe, stream_at, write_lines, write_output
from headway.generation import Sampling
from headway.making import prepared_tokenizer, train
from headway.places import way_to_resume
from headway.ranks import joined, of_environment
from headway.run import Run, load
from headway.tasks import LanguageModelling, QuestionAnswering, SequenceToSequence, Task
from headway.tasks.sequence_to_sequence import SPLITS, WIDEST_BEAM
from headway.text import load_tokenizer

TOGETHER = 256  # lines that are translated at once, at most
ASSUMED_TOKENS = 256  # where nothing says how many a vocabulary has
OPTIONS: dict[type[Task], tuple[str, ...]] = {  # of `predict`, those that mean something to one task alone
    SequenceToSequence: ("beam", "best"),
    QuestionAnswering: ("alternatives",),
    LanguageModelling: ("limit", "temperature", "top_k", "top_p", "seed"),
}
UNLIKE = {  # what scores that stand in one table should have in common, and what to say where they do not
    "signature": "these BLEU scores are not computed alike",
    "sentences": "these scores are of different numbers of sentences",
    "beam": "these scores are of different beams (task.beam)",
    "length_penalty": "these scores are of different length penalties (task.length_penalty)",
}


def list_recipes() -> None:
    """Every recipe with the comment it begins with."""
    for name in recipe_names():
        comment = takewhile(lambda line: line.startswith("#"), find(name).read_text("utf-8").split("\n"))
        words = " ".join(line.lstrip("# ") for line in comment)
        print(textwrap.fill(f"{name:28} {words}", 118, subsequent_indent=" " * 29))


def train_command(
    source: str,
    sets: list[str],
    out: Path | None,
    resume: bool,
    back_to: int | None = None,
    accept_changes: bool = False,
    tensorboard: bool = False,
    profile: bool = False,
    strict: bool = False,
) -> None:
    with joined() as ranks:
        if strict:
            be_strict(load_settings(source, sets).task)  # or an error
            sets = [*sets, "task.strict=true"]
        report = reporter() if ranks.leads else Reporter()
        try:
            run = train(
                source,
                out,
                sets,
                resume,
                report,
                accept_changes=accept_changes,
                profile=profile,
                back_to=back_to,
                tensorboard=tensorboard,
            )
        except (Interrupted, Quit) as stop:
            way = f"; go on with: {way_to_resume(stop.run)}" if stop.run else ""
            raise type(stop)(f"{stop}{way}", stop.number) from None
        if ranks.leads:
            print(f"{run.path}: {summary(run)}")


def opened(path: Path, device: str = "auto", sets: Iterable[str] = ()) -> Run:
    """The run; what is amiss with its checkpoints goes to standard error."""
    run = load(path, device, sets)
    if run.notes and of_environment().leads:
        print(*run.notes, f"{path}: the weights are those of step {run.step:,}", sep="\n", file=sys.stderr)
    return run


def summary(run: Run) -> str:
    """One line: how far it got and how good it is."""
    parts = [f"step {run.state.step:,}", f"{clock(run.state.seconds)} of training"]
    best = [f"the best checkpoint is of step {run.step:,}"] if run.step != run.state.step else []
    return ", ".join(parts + best + [f"dev {score}" for score in scores(run.evaluation)])


def be_strict(settings: Any) -> Any:
    """The settings of a task that reads pairs, to which an empty side of one is an error."""
    if not hasattr(settings, "strict"):
        raise UserError(f"--strict: is for pairs of lines, and the task is {settings.name}")
    return replace(settings, strict=True)


def evaluate_command(
    path: Path,
    split: str,
    target: str | None,
    out: Path | None,
    beam: int | None,
    device: str,
    strict: bool = False,
    sets: Iterable[str] = (),
) -> None:
    with joined() as ranks:
        run = opened(path, device, sets)
        if strict:
            run.task.settings = be_strict(run.settings.task)
        if isinstance(run.task, SequenceToSequence):
            check_beam(run.task, beam)
        elif beam is not None:
            raise UserError(f"--beam {beam}: a run whose task is {run.settings.task.name} is not scored by beam search")
        if out is not None and not isinstance(run.task, QuestionAnswering | SequenceToSequence):
            raise UserError(f"--out {out}: a run whose task is {run.settings.task.name} makes no predictions to write")
        if out is not None and (is_kept(out) or out.is_dir()):
            check_out(out, inputs(run, split, target))
        elif out is None and ranks.leads and isinstance(run.task, QuestionAnswering | SequenceToSequence):
            probe(run.path / "predictions", "name a file for them with --out")
        with bar_of_rows(reporter() if ranks.leads else Reporter(), Path(split).name) as progress:
            options: dict[str, Any] = {} if beam is None else {"beam": beam}
            if isinstance(run.task, SequenceToSequence | QuestionAnswering):
                options["progress"] = progress
            result = run.evaluate(split, ranks, target, **options)
        if ranks.leads:
            for note in run.task.notes:
                print(note, file=sys.stderr)
            tell_scores(run, split, result, out, conditions(run, split, target, beam))


def inputs(run: Run, split: str, target: str | None) -> Iterator[Path]:
    """The files that an evaluation reads, those that the run has learned from, and those that it consists of."""
    settings = run.settings.task
    named = [getattr(settings, each.name) for each in fields(settings) if each.metadata.get("path")]
    yield from (expanded(each) for each in (split, target, *named) if each is not None)
    yield from map(Path, chain.from_iterable(read_data(run.path).values()))
    yield from (run.path / name for name in ("run.toml", "tokenizer.json", "data.json", "metrics.jsonl"))
    yield from (run.path / "checkpoints").rglob("*")


def check_out(out: Path, read: Iterable[Path]) -> None:
    """Refuse to write predictions, or the scores beside them, over one another or over what somebody else wrote."""
    if out.is_dir():
        raise UserError(f"--out {out}: is a directory; name a file in it")
    beside = out.with_suffix(".json") if out.name else out
    if out.suffix.casefold() == ".json" or os.path.realpath(out) == os.path.realpath(beside):
        raise UserError(
            f"--out {out}: the scores are written to {beside}, and would take the place of the predictions; "
            f"choose another ending, such as {out.with_suffix('.txt')}"
        )
    for path in read:
        for file, what in ((out, "predictions"), (beside, f"scores, which go to {beside},")):
            if is_same(file, path):
                raise UserError(
                    f"--out {out}: the {what} would take the place of {path}, which is read; choose another file"
                )
    if beside.is_file() and not holds_scores(beside):
        raise UserError(
            f"--out {out}: the scores would take the place of {beside}, which headway evaluate did not write; "
            "move it away, or choose another name"
        )


def is_same(file: Path, other: Path) -> bool:
    """Whether both are there, and are one."""
    try:
        return os.path.samefile(file, other)
    except (OSError, ValueError):
        return False


def holds_scores(path: Path) -> bool:
    """Whether a file is one that `write_predictions` leaves beside predictions."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "step" in found and ("questions" in found or "sentences" in found)


def conditions(run: Run, split: str, target: str | None = None, beam: int | None = None) -> dict[str, Any]:
    """What the scores of a run depend on besides its weights: the sentences and, where it translates, the search."""
    given = {"split": split, **({"set": run.overrides} if run.overrides else {})}
    if not isinstance(run.task, SequenceToSequence):
        return given
    settings = run.task.settings
    return given | {
        "files": [name for name in settings.files(split, target) if name is not None],
        "beam": settings.beam if beam is None else beam,
        "length_penalty": settings.length_penalty,
    }


def tell_scores(run: Run, split: str, result: dict[str, Any], out: Path | None, given: dict[str, Any]) -> None:
    """Print what an evaluation under the `given` conditions found, and write the predictions.

    Where these go to standard output, they alone do.
    """
    if not (result.get("questions") or result.get("sentences") or result.get("tokens")):
        named = split not in SPLITS
        why = "too short to be measured" if named else "nothing was held out to measure on"
        raise UserError(f"{run.path}: {split}: {why}; name {'another' if named else 'a'} file with --split")
    said = sys.stderr if out is not None and stream_at(out) is sys.stdout else sys.stdout
    shown = scores(result) or [f"{result['questions']} questions without answers (one column), so no accuracy"]
    of = f" (the best checkpoint, of step {run.step:,})" if run.step != run.state.step else ""
    print(f"{run.path}{of}: {split}: {', '.join(shown)}", file=said)
    if not math.isfinite(result.get(run.task.metric) or 0.0):
        print(f"{run.path}: {run.task.metric} is no number: the weights are spoilt", file=sys.stderr)
    for line in details(result):
        print(f"  {line}", file=said)
    if "predictions" in result:
        target = out or run.path / "predictions" / f"{predictions_name(split)}.txt"
        write_predictions(run, result, target, given)
        if is_kept(target):
            print(f"predictions written to {target}, scores to {target.with_suffix('.json')}", file=said)


def predictions_name(split: str) -> str:
    """What predictions are filed under: the name of the split or of the file, which never takes that of a split."""
    name = Path(split).name
    return f"{name}.file" if split not in SPLITS and name.casefold() in SPLITS else name


def write_predictions(run: Run, result: dict[str, Any], target: Path, given: dict[str, Any]) -> None:
    """The predictions of an evaluation, one a line; beside them its scores, the conditions it was `given`, and the step
    of the weights. Beside a device or a pipe there is nothing."""
    write_lines(target, result["predictions"])
    if is_kept(target):
        kept = {key: each for key, each in result.items() if key != "predictions"}
        write_output(target.with_suffix(".json"), as_json({**kept, **given, "step": run.step}))


def details(result: dict[str, Any]) -> Iterator[str]:
    """What an evaluation of translations says beyond its scores: how they were computed, and where they fall off."""
    if "signature" in result:
        yield f"BLEU by sacrebleu, {result['signature']}"
        yield f"chrF by sacrebleu, {result['chrf_signature']}"
    if "exact" in result:
        yield f"exactly the reference: {result['exact']:.1%} of {result['sentences']:,} sentences"
    if "token_accuracy" in result:
        accuracy, tokens = result["token_accuracy"], result["tokens"]
        yield f"token accuracy: {accuracy:.1%} of {tokens:,}, each to follow the reference's own beginning"
    if "by_length" in result:
        parts = (f"{each['name']}: {each['bleu']:.1f} ({each['sentences']})" for each in result["by_length"])
        yield f"BLEU by {result['length_in']} of the source (sentences): {', '.join(parts)}"


class Line(NamedTuple):
    """A line of input: its number, counted from 1, where it stands (nothing for an argument), and what it says."""

    number: int
    place: str
    text: str


def translate_lines(run: Run, groups: Iterable[list[Line]], beam: int | None, best: int) -> None:
    """A line out for every line in, in the same order, group by group.

    With `best` above 1 there is a line for each translation: the number of its source, the text, and its scores. A line
    that is refused ends it all, after those before it.
    """
    task = run.task
    assert isinstance(task, SequenceToSequence)
    check_beam(task, beam, best)
    for group in groups:
        fit, refusal = up_to_refusal(task, group)
        for line, written in zip(fit, run.translate([line.text for line in fit], beam, best), strict=True):
            if best == 1:
                print(written[0].text, flush=True)
            for each in written if best > 1 else ():
                print(f"{line.number}\t{each.text}\t{each.score:.4f}\t{each.logprob:.4f}", flush=True)
        if refusal is not None:
            raise refusal


def up_to_refusal(task: SequenceToSequence, lines: list[Line]) -> tuple[list[Line], TextError | None]:
    """The lines before the first that the model cannot read, and what is wrong with it. Lines to cut are named."""
    for number, line in enumerate(lines):
        try:
            count = task.is_cut(line.text)
        except TextError as error:
            return lines[:number], TextError(f"{line.place}{error}")
        if count:
            print(f"{line.place}{count} tokens, of which the model reads the first {task.block}", file=sys.stderr)
    return lines, None


def check_beam(task: SequenceToSequence, beam: int | None, best: int = 1) -> None:
    """Refuse a beam that holds nothing, more than can be of use, or less than is to be shown."""
    if beam is not None and beam < 1:
        raise UserError(f"--beam {beam}: at least 1 is needed, which is greedy decoding")
    tokens = len(task.tokenizer)
    widest = min(WIDEST_BEAM, tokens)
    if beam is not None and beam > widest:
        why = f" (the vocabulary has {tokens:,} tokens)" if tokens < WIDEST_BEAM else ""
        own = f"leave it out for the run's own, {task.settings.beam} (task.beam)"
        raise UserError(f"--beam {beam}: must be at most {widest:,}{why}; {own}")
    width = task.settings.beam if beam is None else beam
    if best > width:
        raise UserError(f"--best {best}: a beam of {width} has no more than {width} to show; widen it with --beam")


def predict_command(
    path: Path,
    inputs: list[str] | None,
    limit: int,
    sampling: Sampling,
    alternatives: int,
    beam: int | None,
    best: int,
    device: str,
    given: Collection[str],
) -> None:
    """Print what the run makes of each input; `given` are the names of the options that somebody typed."""
    run = opened(path, device)
    check_options(run, given)
    groups = [[Line(number, "", text) for number, text in enumerate(inputs, 1)]] if inputs else standard_input()
    if isinstance(run.task, SequenceToSequence):
        translate_lines(run, groups, beam, best)
        return
    for _, place, text in chain.from_iterable(groups):
        try:
            if place and not text.strip():
                print(flush=True)
            elif isinstance(run.task, QuestionAnswering):
                print(describe_answer(run.answer(text, alternatives)[0]), flush=True)
            else:
                print_completion(text, run.complete(text, limit, sampling))
        except TextError as error:
            raise TextError(f"{place}{error}") from None


def check_options(run: Run, given: Collection[str]) -> None:
    """Refuse options that mean something to other tasks only."""
    task = run.settings.task.name
    own = next((names for kind, names in OPTIONS.items() if isinstance(run.task, kind)), None)
    if own is None:
        raise UserError(f"{run.path}: a run whose task is {task} makes no predictions")
    idle = [name for name in chain.from_iterable(OPTIONS.values()) if name in given and name not in own]
    if idle:
        raise UserError(f"{spelled(idle)}: no meaning for a run whose task is {task}; its own options: {spelled(own)}")


def spelled(options: Iterable[str]) -> str:
    """Options as they are typed."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in options)


def standard_input() -> Iterator[list[Line]]:
    """The lines of standard input, in groups as they come; one that is not UTF-8 is refused after those before it."""
    if sys.stdin is None:  # a shell's <&-
        raise UserError("standard input is closed; give what is to be read as arguments, or from a pipe or a file")
    if sys.stdin.isatty():
        print("one input a line; Ctrl-D ends", file=sys.stderr)
    numbers = count(1)
    for lines in arriving(sys.stdin.buffer):
        group: list[Line] = []
        refusal = None
        for line in lines:
            number = next(numbers)
            place = f"standard input:{number}: "
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1} (0x{line[error.start]:02x})"
                refusal = DataError(f"{place}not UTF-8 at {byte}; re-save it as UTF-8")
                break
            group.append(Line(number, place, text.rstrip("\r\n")))
        yield group
        if refusal is not None:
            raise refusal


def arriving(stream: BinaryIO, most: int = TOGETHER) -> Iterator[list[bytes]]:
    """The lines of a stream, as many together as have come, up to `most`: nobody waits for a line that is not there."""
    rest = b""
    while some := stream.read1(1 << 16):  # type: ignore[attr-defined]  # returns as soon as there is anything
        *lines, rest = (rest + some).split(b"\n")
        yield from (lines[begin : begin + most] for begin in range(0, len(lines), most))
    if rest:
        yield [rest]


def print_completion(prompt: str, pieces: Iterator[str]) -> None:
    first = next(pieces, "")  # a prompt that is refused is not shown as if it were continued
    print(prompt, end=first, flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


def describe_answer(answer: Any) -> str:
    others = ", ".join(f"{one_line(text)} {share:.0%}" for text, share in answer.alternatives)
    return f"{one_line(answer.text)}\t{answer.probability:.1%}" + (f"\t(else {others})" if others else "")


def compare_command(paths: list[Path], out: Path) -> None:
    from headway.report.comparison import comparison_table, length_table, plot_comparison, require_format

    require_format(out)
    runs = [opened(path) for path in paths]
    split, scored = common_scores([run for run in runs if isinstance(run.task, SequenceToSequence)])
    print(comparison_table(runs, split, scored))
    if scored:
        print(f"\n{length_table(split, scored)}")
    for note in unlike(scored):
        print(note, file=sys.stderr)
    plot_comparison(runs, out, split, scored)
    print(f"plot written to {out}")


def common_scores(runs: list[Run]) -> tuple[str, dict[Path, dict[str, Any]]]:
    """A split, and what was found on it of each run that translates, by its path.

    It is the test split where `headway evaluate` has scored the present weights of all runs on it, each with its own
    settings, else dev, on which those that were not scored so are scored now.
    """
    for split in ("test", "dev"):
        found = {run.path: kept_scores(run, split) for run in runs}
        if split == "dev" or all(found.values()):
            break
    for run in runs:
        if not found[run.path]:
            print(f"{run.path}: scoring {split}, which headway evaluate has not done", file=sys.stderr)
            result, given = run.evaluate(split), conditions(run, split)
            write_predictions(run, result, run.path / "predictions" / f"{split}.txt", given)
            found[run.path] = {**result, **given}
    return split, found


def kept_scores(run: Run, split: str) -> dict[str, Any]:
    """What `headway evaluate` wrote of the run's present weights; empty where it did not, or wrote of others.

    Scores of another search than the run's settings say, or of other sentences, are not taken, and that is said.
    """
    path = run.path / "predictions" / f"{split}.json"
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("step") != run.step or "by_length" not in found:
        return {}
    own = conditions(run, split)
    others = [key for key in own if found.get(key) != own[key]]
    if not others:
        return found
    there, wanted = (", ".join(f"{key} {each.get(key, 'unknown')}" for key in others) for each in (found, own))
    print(f"{path}: not used, these are scores of {there}; the run's own: {wanted}", file=sys.stderr)
    return {}


def unlike(scored: dict[Path, dict[str, Any]]) -> Iterator[str]:
    """What keeps scores from being compared with one another, a line each."""
    for key, words in UNLIKE.items():
        values = {path: each[key] for path, each in scored.items() if key in each}
        if len(set(values.values())) > 1:
            yield f"{words}: {'; '.join(f'{path}: {value}' for path, value in values.items())}"


def inspect_command(path: Path, text: str, target: str | None, out: Path, device: str) -> None:
    from headway.inspection.pictures import attention_map, require_picture, write_map

    require_picture(out)
    picture = attention_map(opened(path, device), text, target)
    for note in write_map(picture, out):
        print(note, file=sys.stderr)
    print(f"{picture.title}\npicture written to {out}")


def scale_command(
    source: str,
    sets: list[str],
    devices: str,
    machine: str,
    within: float,
    between: float,
    vocabulary: int,
    markdown: bool,
) -> None:
    """Print what the last stage of a run needs on each number of devices."""
    from headway.training import scaling

    try:
        sizes = [int(size) for size in devices.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UserError(f"--gpus {devices}: must be numbers of devices, such as 1,8,64")
    settings = load_settings(source, sets)
    known = scaling.machines()
    name = machine or max(known, key=lambda each: known[each].rate)
    name, measured = scaling.find_machine(name)
    known_tokens = vocabulary or tokens_of_run(Path(source)) or tokens_of_shards(settings) or settings.tokenizer.size
    tokens = known_tokens or ASSUMED_TOKENS
    model = scaling.blank(settings.model, tokens)
    training = settings.training
    block = settings.model.block
    sides = {name: side.stream for name, side in settings.streams.items()}
    beside = tuple((side.rows, min(side.length or block, block)) for side in sides.values())
    work = scaling.Work(training.batch_size, block, max(1, training.accumulate), training.optimizer, beside)
    shares = ", ".join(
        f"{rows:,} rows of {length:,} tokens{name}"
        for name, (rows, length) in zip(["", *(f" ({name})" for name in sides)], work.streams, strict=True)
    )
    unknown = "" if known_tokens else f", {tokens} tokens in the vocabulary (tokenizer.size is not set; --vocabulary)"
    no_gpu = "" if measured.ahead else "\nThis device is a CPU: these are not the figures of GPUs."
    count = sum(parameter.numel() for parameter in model.parameters())
    of_last = " of the last stage" if settings.pretraining is not None else ""
    print(
        f"{settings.name}: {count:,} parameters with {tokens:,} tokens in the vocabulary; a step{of_last} has "
        f"{shares}, shared by all devices\n"
        f"device: {name}, {measured.memory / 1e9:.0f} GB; measured by {measured.measured}\n"
        f"assumed: {within:g} GB/s between devices of a machine of 8, {between:g} GB/s between machines{unknown}"
        f"{no_gpu}\n"
    )
    rows = list(scaling.rows_of(model, work, measured, scaling.Network(1e9 * within, 1e9 * between), sizes))
    print(scaling.markdown(rows) if markdown else scaling.aligned(rows))


def tokens_of_run(path: Path) -> int:
    """How many tokens the tokenizer of a run knows; 0 where the path is no run directory, nor the run file in one."""
    file = (path.parent if path.name == "run.toml" else path) / "tokenizer.json"
    return len(load_tokenizer(file)) if file.is_file() else 0


def tokens_of_shards(settings: RunSettings) -> int:
    """How many tokens the shards are made of that a run file learns from; 0 where it learns from text, or they are
    elsewhere."""
    with suppress(UserError):
        prepared = prepared_tokenizer(settings)
        return len(prepared) if prepared is not None else 0
    return 0


def data_list_command() -> None:
    for status in catalog.status():
        where = f"in {status.where}" if status.present else "not on this machine"
        if status.embedded and not status.present:
            where = "generated when needed"
        print(f"{status.name:12} {status.description}\n{'':12} {where}; licence: {status.licence}")


def data_get_command(name: str, out: Path | None, source: Path | None, sizes: dict[str, int]) -> None:
    settings = WorldSettings(**sizes) if sizes else None
    report = reporter()
    with bar_of_bytes(report, name) as progress:
        live = progress if isinstance(report, Terminal) else None  # elsewhere, a line a file says enough
        folder = catalog.get(name, out, source, say=report.say, progress=live, settings=settings)
    print(f"{name}: {folder}")


@contextmanager
def bar_of_rows(report: Reporter, name: str) -> Iterator[Callable[[int, int], None]]:
    """A function of (rows done, rows to do) that shows progress, unless all is done at its first call."""
    with ExitStack() as stack:
        bars: list[Progress] = []

        def progress(done: int, total: int) -> None:
            if not bars and done < total:
                bars.append(stack.enter_context(report.progress(f"{name}, rows", total, done)))
            for bar in bars:
                bar.update(done, {})

        yield progress


@contextmanager
def bar_of_bytes(report: Reporter, name: str) -> Iterator[catalog.Progress]:
    """A function of (bytes done, bytes to do) that shows progress from its first call on."""
    with ExitStack() as stack:
        bars: list[Progress] = []

        def progress(done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(report.progress(f"{name}, kB", math.ceil(total / 1000))))
            bars[0].update(math.ceil(done / 1000), {})

        yield progress
