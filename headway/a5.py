"""The course's own commands, as its students type them, on Headway's code.

    python -m headway.a5 run pretrain vanilla wiki.txt --writing_params_path vanilla.pretrain.params
    python -m headway.a5 run finetune vanilla wiki.txt --reading_params_path vanilla.pretrain.params \\
        --writing_params_path vanilla.finetune.params --finetune_corpus_path birth_places_train.tsv
    python -m headway.a5 run evaluate vanilla wiki.txt --reading_params_path vanilla.finetune.params \\
        --eval_corpus_path birth_dev.tsv --outputs_path vanilla.pretrain.dev.predictions
    python -m headway.a5 dataset {namedata|charcorruption}
    python -m headway.a5 london_baseline

A `.params` file is safetensors. While a model trains, its state lies in `NAME.params.run/`; an interrupted command
goes on where it stopped when it is typed again.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from headway.configuration import RunSettings, load_settings
from headway.console import Reporter, show_anything
from headway.data.catalog import resolve
from headway.errors import DataError, Interrupted, RunError, UserError, hear_no_more
from headway.files import (
    Ownership,
    cannot_write,
    clear_temporaries,
    is_empty,
    is_full,
    is_unread,
    probe,
    to_nowhere,
    write_bytes,
    write_json,
    write_lines,
)
from headway.models import CausalModel, parameter_count
from headway.tasks import Batch, QuestionAnsweringSettings, SpanCorruptionSettings, Task
from headway.tasks.base import IGNORE
from headway.text import Characters, Tokenizer, read_text
from headway.training import device as devices
from headway.training.checkpoint import describe_mismatch, weights
from headway.training.loop import Trainer
from headway.training.order import Sequential, generator
from headway.training.stage import Stage, TrainingSettings, rate_of

VARIANTS = ("vanilla", "synthesizer", "perceiver", "rope")
FORMAT = "headway-a5"
MARK = "command.json"  # by which a command knows the directory that it was interrupted in
ELSEWHERE = "give --writing_params_path another file"


class Notes(Reporter):
    """Prints what is said, and no progress: the lines of the epochs are progress enough."""

    def say(self, text: str) -> None:
        warn(text)


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="python -m headway.a5", description=__doc__.split("\n", maxsplit=1)[0])
    commands = main.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="pretrain, finetune or evaluate a model")
    run.add_argument("function", choices=["pretrain", "finetune", "evaluate"])
    run.add_argument("variant", choices=VARIANTS)
    run.add_argument("pretrain_corpus_path", metavar="CORPUS", help="wiki.txt; always needed, for its characters")
    run.add_argument("--reading_params_path", metavar="F")
    run.add_argument("--writing_params_path", metavar="F")
    run.add_argument("--finetune_corpus_path", metavar="F")
    run.add_argument("--eval_corpus_path", metavar="F")
    run.add_argument("--outputs_path", metavar="F")
    run.add_argument("--bottleneck_dim", type=int, default=32, metavar="M", help="of the perceiver")
    run.add_argument("--pretrain_lr", type=float, default=6e-3)
    run.add_argument("--finetune_lr", type=float, default=6e-4)
    run.add_argument("--tb_expt_name", metavar="NAME", help="log to TensorBoard under expt/ by this name")
    run.add_argument("--epochs", type=int, help="instead of the course's 650 / 75 / 10")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--device", default="auto", choices=devices.DEVICES)
    run.add_argument("--convert", action="store_true", help="read a .params file pickled by the course's code")
    data = commands.add_parser("dataset", help="print four examples")
    data.add_argument("dataset_type", choices=["namedata", "charcorruption"])
    commands.add_parser("london_baseline", help="score the answer London on the dev questions")
    return main


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit codes are those of `headway`."""
    show_anything()
    options = parser().parse_args(arguments)
    try:
        {"run": run_command, "dataset": dataset_command, "london_baseline": london_command}[options.command](options)
        sys.stdout.flush()
    except UserError as error:
        print(f"headway.a5: {error}", file=sys.stderr)
        return 2
    except (Interrupted, KeyboardInterrupt) as error:
        print(f"headway.a5: {str(error) or 'interrupted'}; type the command again to go on", file=sys.stderr)
        return getattr(error, "code", 130)
    except OSError as error:
        if is_unread(error):
            to_nowhere(sys.stdout.fileno())
            return 0
        if not is_full(error):
            raise
        print(f"headway.a5: {error.strerror}; make room and type the command again to go on", file=sys.stderr)
        return 2
    return 0


def run_command(options: argparse.Namespace) -> None:
    needed = {
        "pretrain": ("writing_params_path",),
        "finetune": ("writing_params_path", "finetune_corpus_path"),
        "evaluate": ("reading_params_path", "eval_corpus_path", "outputs_path"),
    }[options.function]
    missing = [f"--{name}" for name in needed if getattr(options, name) is None]
    if missing:
        raise UserError(f"{options.function} needs {' and '.join(missing)}")
    for name in ("pretrain_lr", "finetune_lr"):
        if not 0 < getattr(options, name) < float("inf"):
            raise UserError(f"--{name} {getattr(options, name)}: must be above 0")
    if options.epochs is not None and options.epochs < 1:
        raise UserError(f"--epochs {options.epochs}: must be at least 1")
    if options.bottleneck_dim < 1:
        raise UserError(f"--bottleneck_dim {options.bottleneck_dim}: must be at least 1")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed {options.seed}: must be from 0 to {2**63 - 1}")

    sets = [f"model.bottleneck={options.bottleneck_dim}"] if options.variant == "perceiver" else []
    settings = load_settings(f"birthplaces/course-{options.variant}", sets)
    tokenizer = corpus_tokenizer(options.pretrain_corpus_path)
    device, _ = devices.choose_device(options.device)
    torch.manual_seed(options.seed)
    model = settings.model.build(len(tokenizer)).to(device)
    if options.reading_params_path is not None:
        read_params(Path(options.reading_params_path), model, tokenizer, options)
    print(f"number of parameters: {parameter_count(model)}", flush=True)
    {"pretrain": pretrain, "finetune": finetune, "evaluate": evaluate}[options.function](
        options, settings, model, tokenizer
    )


def corpus_tokenizer(path: str) -> Tokenizer:
    """The vocabulary of the corpus, announced as the course announces it."""
    text = read_text(path, say=warn)
    tokenizer = Characters.train([text])
    print(f"data has {len(text)} characters, {len(tokenizer)} unique.", flush=True)
    return tokenizer


def pretrain(options: argparse.Namespace, settings: RunSettings, model: CausalModel, tokenizer: Tokenizer) -> None:
    assert settings.pretraining is not None
    task = replace(settings.pretraining.task, corpus=options.pretrain_corpus_path)
    training = replace(settings.pretraining.training, learning_rate=options.pretrain_lr)
    train_params(
        options, model, tokenizer, task.build(tokenizer, model.settings.block), training, options.epochs or 650
    )


def finetune(options: argparse.Namespace, settings: RunSettings, model: CausalModel, tokenizer: Tokenizer) -> None:
    task = replace(settings.task, questions=options.finetune_corpus_path, dev=None, test=None, corpus=None, holdout=0.0)
    training = replace(settings.training, learning_rate=options.finetune_lr)
    epochs = options.epochs or (75 if options.reading_params_path is None else 10)
    train_params(options, model, tokenizer, task.build(tokenizer, model.settings.block), training, epochs)


def train_params(
    options: argparse.Namespace,
    model: CausalModel,
    tokenizer: Tokenizer,
    task: Task,
    training: TrainingSettings,
    epochs: int,
) -> None:
    """Train for `epochs` passes over the task's rows and write the weights to --writing_params_path."""
    target = Path(options.writing_params_path)
    if target.is_dir():
        raise RunError(f"{target}: is a directory; give --writing_params_path a file")
    directory = target.with_name(target.name + ".run")
    probe(directory, ELSEWHERE)
    task.load()
    an_epoch = Sequential(task.examples, training.batch_size).steps
    settings = replace(
        training,
        steps=epochs * an_epoch,
        log_every=an_epoch,
        checkpoint_every=100 * an_epoch,
        seed=options.seed,
        final_tokens=200 * course_lines(options.pretrain_corpus_path) * task.block,
    )
    stage = Stage(options.function, task, settings, 0, final=False)
    log = epoch_lines(settings, task.examples, task.block, an_epoch, tensorboard(options))
    refuse_foreign(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(directory, error, ELSEWHERE) from None
    with Ownership(directory):
        clear_temporaries(directory)
        resume = claim(directory, options)
        trainer = Trainer(model, [stage], directory, tokenizer.fingerprint(), Notes(), log)
        if resume:
            trainer.resume()
        trainer.run()
        metadata = {"format": FORMAT, "variant": options.variant, "tokenizer": tokenizer.fingerprint()}
        write_bytes(target, save(weights(model), metadata))
        shutil.rmtree(directory)


def course_lines(path: str) -> int:
    """How many lines the course counts in its corpus: the empty one after the last line end is one of them."""
    return read_text(path).count("\n") + 1


def refuse_foreign(directory: Path) -> None:
    """A directory with other things in it is left as it is."""
    if directory.is_dir() and not (directory / MARK).is_file() and not is_empty(directory):
        raise RunError(f"{directory}: exists and was not left by this command; move it, or write to another file")


def claim(directory: Path, options: argparse.Namespace) -> bool:
    """Mark the directory in which training keeps its state; True where the same command was interrupted in it."""
    command = {key: value for key, value in vars(options).items() if key not in ("device", "convert", "tb_expt_name")}
    read = (options.pretrain_corpus_path, options.finetune_corpus_path, options.reading_params_path)
    command["sha256"] = [hashlib.sha256(resolve(path).read_bytes()).hexdigest() for path in read if path is not None]
    mark = directory / MARK
    if mark.is_file():
        if json.loads(mark.read_text()) != command:
            raise RunError(
                f"{directory}: left by an interrupted command that was another one or read other files; "
                "delete it to start anew"
            )
        return True
    write_json(mark, command)
    return False


def epoch_lines(
    settings: TrainingSettings, examples: int, block: int, an_epoch: int, log: Callable[[str, float, int], None]
) -> Callable[[dict[str, Any]], None]:
    """Print the course's line at the end of every epoch: the rate is the one that the next step will use."""
    rate = rate_of(settings, Sequential(examples, settings.batch_size), block)

    def show(record: dict[str, Any]) -> None:
        step = record["step"]
        next_rate = settings.learning_rate * rate(step)
        print(
            f"epoch {step // an_epoch} iter {an_epoch - 1}: train loss {record['loss']:.5f}. lr {next_rate:e}",
            flush=True,
        )
        log("train/loss", record["loss"], step)
        log("train/lr", record["learning_rate"], step)

    return show


def tensorboard(options: argparse.Namespace) -> Callable[[str, float, int], None]:
    """A function that logs one number, to TensorBoard where that was asked for and is installed."""
    if options.tb_expt_name is None:
        return lambda name, value, step: None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("--tb_expt_name needs TensorBoard: pip install 'headway[tensorboard]'") from None
    writer = SummaryWriter(f"expt/{options.function}/{options.tb_expt_name}_{options.variant}")
    atexit.register(writer.close)
    return writer.add_scalar


def evaluate(options: argparse.Namespace, settings: RunSettings, model: CausalModel, tokenizer: Tokenizer) -> None:
    task = settings.task.build(tokenizer, settings.model.block)
    result = task.evaluate(model, str(Path(options.eval_corpus_path).absolute()))  # a file, whatever it is called
    write_lines(Path(options.outputs_path), result["predictions"])
    if "correct" in result:
        print_correct(result["correct"], result["questions"])
    else:
        print(f"Predictions written to {options.outputs_path}; no targets provided")


def print_correct(correct: int, total: int) -> None:
    print(f"Correct: {float(correct)} out of {float(total)}: {correct / total * 100}%")


def read_params(path: Path, model: CausalModel, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Put the weights of a .params file into `model`."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; give --reading_params_path what pretrain or finetune wrote")
    tensors = open_params(path, tokenizer, options)
    mismatch = describe_mismatch(tensors, weights(model))
    if mismatch:
        raise RunError(f"{path}: these weights are not of the {options.variant} model: {mismatch}")
    model.load_state_dict(tensors, strict=False)


def open_params(path: Path, tokenizer: Tokenizer, options: argparse.Namespace) -> dict[str, Tensor]:
    """The tensors of a .params file, whose characters and variant must be those of this command."""
    variant = options.variant
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        if is_pickled(path):
            if variant == "perceiver":  # what students put between down and up projection differs from one to the next
                raise DataError(
                    f"{path}: a pickled perceiver cannot be converted; pretrain it with this command"
                ) from None
            return convert(path, options.convert)
        raise DataError(f"{path}: not a .params file, or a damaged one ({error}); make it again") from None
    if facts.get("tokenizer", tokenizer.fingerprint()) != tokenizer.fingerprint():
        raise RunError(
            f"{path}: trained with other characters than this corpus has; give the corpus it was trained with"
        )
    if facts.get("variant", variant) != variant:
        raise RunError(f"{path}: weights of the variant '{facts['variant']}', not '{variant}'")
    return tensors


def is_pickled(path: Path) -> bool:
    """Whether it begins as torch.save's files do: a zip archive, or in old versions a bare pickle."""
    with open(path, "rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def convert(path: Path, allowed: bool) -> dict[str, Tensor]:
    """The tensors of a file that the course's own code pickled, under Headway's names."""
    if not allowed:
        raise DataError(
            f"{path}: a pickled file, which could run code when it is opened; if you trust where it is from, "
            "add --convert (only tensors are read from it)"
        )
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(f"{path}: holds more than tensors, or is damaged ({type(error).__name__}: {error})") from None
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise DataError(f"{path}: not the weights of a model")
    parts = {
        "tok_emb": "embedding",
        "ln1": "attention_norm",
        "ln2": "feed_forward_norm",
        "attn": "attention",
        "proj": "output",
        "ln_f": "norm",
        "w1": "inner",
        "w2": "columns",
        "b2": "offsets",
    }
    tensors = {}
    for label, tensor in found.items():
        name = label.removeprefix("module.")
        if name.endswith(("attn.mask", "attn.rope_cache")):
            continue
        name = ".".join(parts.get(part, part) for part in name.split("."))
        name = name.replace("mlp.0", "feed_forward.inner").replace("mlp.2", "feed_forward.output")
        tensors["positions.table" if name == "pos_emb" else name] = tensor[0] if name == "pos_emb" else tensor
    return tensors


def dataset_command(options: argparse.Namespace) -> None:
    """Four examples, padded as the course shows them."""
    corpus = str(course_file("wiki.txt"))
    tokenizer = corpus_tokenizer(corpus)
    if options.dataset_type == "charcorruption":
        task: Task = SpanCorruptionSettings(corpus=corpus).build(tokenizer, 128)
    else:
        questions = str(course_file("birth_places_train.tsv"))
        task = QuestionAnsweringSettings(questions=questions, holdout=0.0).build(tokenizer, 128)
    task.load()
    batch = task.batch(torch.arange(4), generator(0))
    for row in range(4):
        for name, tokens in zip("xy", padded(batch, row, 127, tokenizer.pad), strict=True):
            print(f"{name}:", tokenizer.decode(tokens, specials=True))


def padded(batch: Batch, row: int, width: int, pad: int) -> tuple[list[int], list[int]]:
    """One row's x and y at full width: what is not learned shows as padding in y, the last token stands in x too."""
    length = int(batch.lengths[row])
    targets = [pad if token == IGNORE else token for token in batch.targets[row, :length].tolist()]
    x = [*batch.inputs[row, :length].tolist(), targets[-1]]
    return [line + [pad] * (width - len(line)) for line in (x, targets)]  # type: ignore[return-value]


def london_command(options: argparse.Namespace) -> None:
    pairs = QuestionAnsweringSettings(questions="").read(str(course_file("birth_dev.tsv")), answers=True)
    print_correct(sum(pair.target == "London" for pair in pairs), len(pairs))


def course_file(name: str) -> Path:
    """A file of the course in this folder, else in the birthplaces data set."""
    return Path(name) if Path(name).is_file() else resolve(f"data:birthplaces/{name}")


def warn(note: str) -> None:
    print(note, file=sys.stderr)


if __name__ == "__main__":
    code = main()
    if code > 128:
        hear_no_more()
    sys.exit(code)
