"""The commands, one function each. What they do lives elsewhere and is imported when needed, so that help is instant.

Exit codes: 0 done, 2 something in the user's input, 1 a fault of the program, 130 interrupted by Ctrl-C and 143 by
SIGTERM (training state saved).
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from headway import __version__
from headway.console import Lines, show_anything
from headway.cores import share_cores
from headway.errors import Interrupted, Quit, UserError, hear_no_more
from headway.files import allow_many_files, expanded, is_full, is_unread, to_nowhere

app = typer.Typer(
    help="Train small sequence models on your own text, look inside them, ask them questions.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Data sets, and checks of your own files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data_app, name="data")

path_option = partial(typer.Option, parser=expanded, metavar="PATH")  # of --out=~/here the shell leaves the ~ as it is
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, such as runs/demo/pretrained.")]
Sets = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads it
    typer.Option("--set", metavar="A.B=C", help="Override a setting, such as model.width=128; may be repeated."),
]
DISK = "look at the disk that it is on, and try again"
NOT_OURS = {  # what the system may say of a file, and the way out
    errno.EACCES: "check its owner and mode, and its folder's (ls -ld)",
    errno.EPERM: "check its owner and mode, and its folder's (ls -ld)",
    errno.EROFS: "its disk can only be read; name a place on another one",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine; end what else is running",
    errno.EIO: DISK,
    errno.ESTALE: DISK,
    errno.ENODEV: DISK,
    errno.ETIMEDOUT: DISK,
}
SEEDS = 2**62  # torch takes no seed of more than 63 bits
Beam = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Hypotheses side by side, 1 is greedy; task.beam without it (sequence to sequence)."),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="An empty line in a pair is an error; without it the pair is dropped, and counted."),
]


@contextmanager
def loading() -> Iterator[None]:
    """Within it Ctrl-C waits: a module whose import is broken off may be half there, and fail much later. A second one
    quits at once."""
    before = signal.getsignal(signal.SIGINT)
    came: list[int] = []
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield  # whoever set another handler knows why
        return

    def wait(number: int, frame: object) -> None:
        if came:
            os._exit(128 + number)
        came.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"headway {__version__}")
        raise typer.Exit()


@app.command()
def demo(
    out: Annotated[Optional[Path], path_option(help="Where the runs and the report go; runs/demo.")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of the models; the world stays the same.")] = 0,
    sets: Sets = None,
) -> None:
    """Train with and without pretraining on the embedded world, compare, ask, and write a report."""
    with loading():
        from headway.console import reporter
        from headway.demo import run_demo

    try:
        run_demo(out, seed, sets or [], reporter())
    except (Interrupted, Quit) as stop:
        raise type(stop)(f"{stop}; type the command again to go on", stop.number) from None


@app.command()
def train(
    source: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="RECIPE|run.toml", help="A recipe, a run file, or a run directory to repeat or resume."),
    ] = None,
    sets: Sets = None,
    out: Annotated[Optional[Path], path_option(help="The run directory; runs/NAME without it.")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    back_to: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="STEP", min=0, help="With --resume: from the checkpoint of this step; those after it are removed."
        ),
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="With --resume: go on under other settings, or on other data.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard's events, into RUN/tensorboard.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also say where the time of a step goes, in RUN/profile.txt.")
    ] = False,
    strict: Strict = False,
    recipes: Annotated[bool, typer.Option("--recipes", help="List the recipes and leave.")] = False,
) -> None:
    """Train what a recipe or a run file says."""
    with loading():
        from headway.commands import list_recipes, train_command

    if recipes or source is None:
        list_recipes()
        if source is None and not recipes:
            raise UserError("name one of these recipes, or a run file")
        return
    train_command(source, sets or [], out, resume, back_to, accept_changes, tensorboard, profile, strict)


@app.command()
def evaluate(
    run: RunPath,
    split: Annotated[str, typer.Option(metavar="dev|FILE", help="train, dev, test, or a file.")] = "dev",
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE", help="What the lines of --split should become, line by line (sequence to sequence)."
        ),
    ] = None,
    out: Annotated[Optional[Path], path_option(help="Where predictions go, one a line; - is standard output.")] = None,  # noqa: UP045
    beam: Beam = None,
    strict: Strict = False,
    sets: Sets = None,
    device: Device = "auto",
) -> None:
    """Score a run on a split of its data or on a file; --set changes how that is read, such as task.column=body."""
    with loading():
        from headway.commands import evaluate_command

    evaluate_command(run, split, target, out, beam, device, strict, sets or [])


@app.command()
def predict(
    context: typer.Context,
    run: RunPath,
    inputs: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="[INPUT …]", help="Questions or prompts; read from standard input where there are none."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most tokens to write (language models).")] = 300,
    temperature: Annotated[float, typer.Option(help="0 is greedy (language models).")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0: all (language models).")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest tokens that hold this probability (language models).")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of the sampling (language models).")] = 0,
    alternatives: Annotated[int, typer.Option(min=0, help="Other answers to show (questions).")] = 3,
    beam: Beam = None,
    best: Annotated[
        int,
        typer.Option(
            min=1,
            help="Show up to this many, each on a line: the number of its input, from 1, text, score and "
            "log-probability, with tabs between; an empty input has one, empty (sequence to sequence).",
        ),
    ] = 1,
    device: Device = "auto",
) -> None:
    """Answer questions, translate or continue text, as the run's task says."""
    with loading():
        from headway.commands import predict_command
        from headway.generation import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    given = [name for name in context.params if is_given(context, name)]
    predict_command(run, inputs, limit, sampling, alternatives, beam, best, device, given)


def is_given(context: typer.Context, name: str) -> bool:
    """Whether somebody typed an option, even if only to say what counts without it."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN …", help="Run directories.")],
    out: Annotated[Path, path_option(help="The plot: .png, .svg or .pdf.")] = Path("comparison.png"),
) -> None:
    """A table and a plot of several runs."""
    with loading():
        from headway.commands import compare_command

    compare_command(runs, out)


@app.command()
def inspect(
    run: RunPath,
    text: Annotated[str, typer.Option(help="What the model reads.")],
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What it is to write; without it, its own translation (sequence to sequence)."),
    ] = None,
    out: Annotated[Path, path_option(help="The picture: .svg or .png.")] = Path("attention.svg"),
    device: Device = "auto",
) -> None:
    """A picture of where a model looks: target against source, or each token against those before it."""
    with loading():
        from headway.commands import inspect_command

    inspect_command(run, text, target, out, device)


@app.command()
def scale(
    source: Annotated[str, typer.Argument(metavar="RECIPE|run.toml", help="A recipe, a run file, or a run directory.")],
    sets: Sets = None,
    gpus: Annotated[str, typer.Option(help="Numbers of devices.")] = "1,8,64,1024",
    machine: Annotated[str, typer.Option(help="A machine that was measured; without it, the fastest of them.")] = "",
    within: Annotated[float, typer.Option(min=1e-3, help="GB/s between devices of a machine (assumed).")] = 450.0,
    interconnect: Annotated[float, typer.Option(min=1e-3, help="GB/s between machines (assumed).")] = 50.0,
    vocabulary: Annotated[
        int, typer.Option(min=0, help="Tokens; 0: those of the run's tokenizer, else tokenizer.size, else 256.")
    ] = 0,
    markdown: Annotated[bool, typer.Option("--markdown", help="One table in Markdown.")] = False,
) -> None:
    """The memory and time that a training step would take on many devices."""
    with loading():
        from headway.commands import scale_command

    scale_command(source, sets or [], gpus, machine, within, interconnect, vocabulary, markdown)


@app.command()
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN …", help="Run directories.")],
    once: Annotated[bool, typer.Option("--once", help="One picture, also of a run that is being trained.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="ASCII characters only, and no colours.")] = False,
) -> None:
    """The curves of a run, live in the terminal while it trains; several runs share their charts."""
    with loading():
        from headway.watching import watch_command

    watch_command(runs, once, plain)


@app.command()
def lab(
    names: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[NAME …]", help="Experiments to run; without any, they are listed."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Run every experiment and write one page.")] = False,
    out: Annotated[Path, path_option(help="Where the pictures and the page go.")] = Path("lab"),
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of the random numbers.")] = 0,
) -> None:
    """Run experiments on attention: numbers, a picture, and what they show."""
    with loading():
        from headway.console import reporter
        from headway.lab import lab_command

    lab_command(names or [], everything, out, seed, reporter())


@data_app.command("list")
def data_list() -> None:
    """The data sets Headway knows, and which are on this machine."""
    with loading():
        from headway.commands import data_list_command

    data_list_command()


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="world, birthplaces, shakespeare, multi30k, tatoeba")],
    out: Annotated[Optional[Path], path_option(help="Another folder than the usual one.")] = None,  # noqa: UP045
    source: Annotated[Path | None, path_option("--from", help="Copy from this folder instead of the network.")] = None,
    people: Annotated[Optional[int], typer.Option(help="world: people who have a biography.")] = None,  # noqa: UP045
    unseen: Annotated[Optional[int], typer.Option(help="world: people who have none.")] = None,  # noqa: UP045
    towns: Annotated[Optional[int], typer.Option(help="world: towns.")] = None,  # noqa: UP045
    phrasings: Annotated[Optional[int], typer.Option(help="world: biographies a person.")] = None,  # noqa: UP045
    seed: Annotated[Optional[int], typer.Option(help="world: same seed, same bytes.")] = None,  # noqa: UP045
) -> None:
    """Bring a data set to this machine, checked against its known checksum; `world` is generated on the spot."""
    with loading():
        from headway.commands import data_get_command

    sizes = {"people": people, "unseen": unseen, "towns": towns, "phrasings": phrasings, "seed": seed}
    data_get_command(name, out, source, {key: value for key, value in sizes.items() if value is not None})


@data_app.command("check")
def data_check(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE …", help="Your own .txt, .tsv, .csv, .jsonl, also .gz; or folders of token shards."
        ),
    ],
    target: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE", help="Translations of the lines of FILE, line by line: both are checked together."
        ),
    ] = None,
    column: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Of a table, the text: its name, or its number from 0."),
    ] = None,
    errors: Annotated[str, typer.Option(help="strict, or replace for bytes that are not UTF-8.")] = "strict",
    strict: Strict = False,
) -> None:
    """Say what is in a file, and what is wrong with it."""
    with loading():
        from headway.checking import data_check_command

    data_check_command(files, target, errors, strict, column)


@data_app.command("prepare")
def data_prepare(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE …", help=".txt, .jsonl, .csv, .tsv, .parquet; also .gz, .bz2, .xz, .zst."),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="KIND|FILE", help="characters, bytes, words or bpe, to be learned; or a tokenizer.json, or a run."
        ),
    ],
    out: Annotated[Path, path_option(help="The folder for the shards.")],
    size: Annotated[Optional[int], typer.Option(help="Most tokens of a words or bpe vocabulary.")] = None,  # noqa: UP045
    workers: Annotated[Optional[int], typer.Option(min=1, help="Processes; all cores without it.")] = None,  # noqa: UP045
    column: Annotated[Optional[str], typer.Option(help="Of the tables: its name, or its number from 0.")] = None,  # noqa: UP045
    documents: Annotated[str, typer.Option(help="What a document is in a .txt file: lines or file.")] = "lines",
    errors: Annotated[str, typer.Option(help="strict, or replace for bytes that are not UTF-8.")] = "strict",
    shard_tokens: Annotated[int, typer.Option(min=1, help="Tokens a shard.")] = 1 << 26,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last whole shard.")] = False,
) -> None:
    """Encode files of any size into token shards, to train on with corpus = "FOLDER"."""
    with loading():
        from headway.console import reporter
        from headway.text.preparation import prepare

    shards = prepare(
        files,
        out,
        tokenizer,
        size=size,
        workers=workers,
        documents=documents,
        column=column,
        errors=errors,
        shard_tokens=shard_tokens,
        resume=resume,
        report=reporter(),
    )
    print(shards.summary())


def main() -> None:
    """What the shell calls."""
    show_anything()
    share_cores()
    allow_many_files()
    code = run_command(sys.argv[1:])
    if code > 128:
        hear_no_more()
    if "WORLD_SIZE" in os.environ:  # one of several processes
        from headway.ranks import leave

        leave(code)
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run a command; turn what went wrong into a message and an exit code. A fault is raised with its traceback."""
    code = 0
    try:
        with typer.main.get_command(app).make_context("headway", arguments) as context:
            context.command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as leaving:
        code = leaving.exit_code
    except UserError as error:
        code = fail(str(error), 2)
    except (Interrupted, Quit) as error:
        code = fail(str(error), error.code)
    except KeyboardInterrupt:
        code = fail("interrupted", 130)
    except Exception as error:
        if is_unread(error):
            to_nowhere(sys.stdout.fileno())
        elif hasattr(error, "format_message"):
            code = wrong_arguments(error)
        elif isinstance(error, OSError) and is_full(error):
            way = "make room and go on with --resume: what was saved before is whole"
            words = f"{error.filename}: {error.strerror}; {way}" if error.filename else f"the output: {error.strerror}"
            code = fail(words, 2)
        elif isinstance(error, OSError) and error.filename and error.errno in NOT_OURS:
            code = fail(f"{error.filename}: {error.strerror}; {NOT_OURS[error.errno]}", 2)
        else:
            raise
    return code


def wrong_arguments(error: Exception) -> int:
    """Say what is wrong with the options or arguments, or print the help where there are none."""
    message, context = error.format_message(), getattr(error, "ctx", None)  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return 2
    place = context.command_path if context is not None else "headway"
    return fail(f"{message.rstrip('.')}; see {place} --help", 2)


def fail(message: str, code: int) -> int:
    Lines().say(f"headway: {message}")
    return code
