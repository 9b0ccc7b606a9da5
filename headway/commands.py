"""What the commands print. The work itself is done by `Run`, `train`, the tasks and the data catalogue."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from headway.configuration import find, load_settings, name_of, recipe_names
from headway.console import clock, reporter
from headway.data import catalog
from headway.data.world import WorldSettings
from headway.errors import DataError, UserError
from headway.files import write_output
from headway.generation import Sampling
from headway.run import Run, load, train
from headway.tasks import LanguageModelling, QuestionAnswering
from headway.text import read_documents, read_pairs, read_text


def list_recipes() -> None:
    for name in recipe_names():
        first = find(name).read_text("utf-8").split("\n", 1)[0].lstrip("# ")
        print(f"{name:28} {first}")


def train_command(source: str, sets: list[str], out: Path | None, resume: bool) -> None:
    report = reporter()
    settings = load_settings(source, sets)
    if resume and out is None:
        path = Path(source)
        out = path if path.is_dir() else path.parent if path.name == "run.toml" else Path("runs", name_of(find(source)))
    run = train(settings, out, resume=resume, report=report)
    print(f"{run.path}: {summary(run)}")


def summary(run: Run) -> str:
    """One line: how far it got and how good it is."""
    parts = [f"step {run.state.step:,}", f"{clock(run.state.seconds)} of training"]
    return ", ".join(parts + [f"dev {score}" for score in scores(run.evaluation)])


def scores(evaluation: dict[str, Any]) -> list[str]:
    shown = []
    if "accuracy" in evaluation:
        shown.append(f"accuracy {evaluation['accuracy']:.1%} ({evaluation['correct']} of {evaluation['questions']})")
    if "loss" in evaluation:
        shown.append(f"loss {evaluation['loss']:.4f}")
    if "perplexity" in evaluation:
        shown.append(f"perplexity {evaluation['perplexity']:.2f}")
    if "bits_per_byte" in evaluation:
        shown.append(f"{evaluation['bits_per_byte']:.3f} bits a byte")
    return shown


def evaluate_command(path: Path, split: str, out: Path | None, device: str) -> None:
    run = load(path, device)
    result = run.evaluate(split)
    shown = scores(result) or [f"{result['questions']} questions without answers, so no accuracy"]
    print(f"{run.path}: {split}: {', '.join(shown)}")
    if "predictions" in result:
        name = split if split in ("train", "dev", "test") else Path(split).name
        target = out or run.path / "predictions" / f"{name}.txt"
        write_output(target, "".join(f"{prediction}\n" for prediction in result["predictions"]))
        print(f"predictions written to {target}")
    elif out is not None:
        raise UserError(f"--out {out}: this run's task makes no predictions to write")


def predict_command(
    path: Path, inputs: list[str] | None, limit: int, sampling: Sampling, alternatives: int, device: str
) -> None:
    run = load(path, device)
    lines = inputs if inputs else (line.rstrip("\r\n") for line in sys.stdin)
    for text in lines:
        if isinstance(run.task, QuestionAnswering):
            print(describe_answer(run.answer(text, alternatives)[0]) if text.strip() else "", flush=True)
        elif isinstance(run.task, LanguageModelling):
            print(text, end="", flush=True)
            for piece in run.complete(text, limit, sampling):
                print(piece, end="", flush=True)
            print(flush=True)
        else:
            raise UserError(f"{run.path}: a run whose task is {run.settings.task.name} makes no predictions")


def describe_answer(answer: Any) -> str:
    others = ", ".join(f"{text} {share:.0%}" for text, share in answer.alternatives)
    return f"{answer.text}\t{answer.probability:.1%}" + (f"\t(else {others})" if others else "")


def compare_command(paths: list[Path], out: Path) -> None:
    from headway.report.comparison import comparison_table, plot_comparison

    runs = [load(path) for path in paths]
    print(comparison_table(runs))
    plot_comparison(runs, out)
    print(f"plot written to {out}")


def data_list_command() -> None:
    for status in catalog.status():
        where = f"in {status.where}" if status.present else "not on this machine"
        if status.embedded and not status.present:
            where = "generated when needed"
        print(f"{status.name:12} {status.description}\n{'':12} {where}; licence: {status.licence}")


def data_get_command(name: str, out: Path | None, source: Path | None, sizes: dict[str, int]) -> None:
    report = reporter()
    settings = WorldSettings(**sizes) if sizes else None
    with report.progress(name, 1) as progress:
        folder = catalog.get(
            name,
            out,
            source,
            say=report.say,
            progress=lambda done, total: progress.update(done, {}),
            settings=settings,
        )
    print(f"{name}: {folder}")


def data_check_command(files: list[str], errors: str) -> None:
    """Report every file, then fail if one of them cannot be used."""
    if errors not in ("strict", "replace"):
        raise UserError(f"--errors {errors}: must be strict or replace")
    broken = []
    for file in files:
        try:
            print(f"{file}: {describe_file(file, errors)}")
        except DataError as error:
            broken.append(str(error))
            print(error, file=sys.stderr)
    if broken:
        raise UserError(f"{len(broken)} of {len(files)} files cannot be used as they are")


def describe_file(file: str, errors: str) -> str:
    """What kind of file it is and how much is in it; notes on how it was read go to standard error."""

    def say(note: str) -> None:
        print(note, file=sys.stderr)

    suffix = Path(file.removesuffix(".gz")).suffix
    if suffix == ".tsv":
        pairs = read_pairs(file, errors=errors, say=say)
        answered = "with answers" if pairs and pairs[0].target is not None else "without answers"
        return f"{len(pairs):,} questions {answered}"
    if suffix in (".csv", ".jsonl"):
        documents = read_documents(file, errors=errors, say=say)
    else:
        text = read_text(file, errors=errors, say=say)
        documents = [line for line in text.split("\n") if line.strip()]
    characters = sum(map(len, documents))
    distinct = len(set().union(*documents))
    middle = sorted(map(len, documents))[len(documents) // 2]
    return f"{len(documents):,} lines, {characters:,} characters, {distinct} distinct, {middle} in the middle line"
