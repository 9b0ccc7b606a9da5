"""The speed of a training step against the steps of nanoGPT and minGPT, on the same model, rows and device, in one run.

The peers lie outside this repository; give the folders they are in:

    python benchmarks/train_speed.py --nanogpt ../nanoGPT --mingpt ../minGPT

On a GPU: 3.3M parameters at 128 × 128 and 25.3M at 512 × 128, random characters, everybody in bfloat16 where they can.
nanoGPT is compiled and fetches its batches from memory while it computes, as in its own loop; Headway runs its compiled
and captured step.
On a CPU: 3.3M parameters on the corrupted lines of the birthplace corpus, in useful tokens a second: padding does not
count. nanoGPT and minGPT pad every row to the block; nanoGPT is tried eager and compiled, in float32 and, where the CPU
has it, in bfloat16, and the best of these counts.
Compilation is left out of all times. Everybody is measured three times, in turns, and the middle one counts: the clock
of a card falls as it grows warm.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.configuration import load_settings
from headway.console import Lines
from headway.making import build_tokenizer
from headway.models import GPTSettings
from headway.ranks import ALONE, Ranks
from headway.tasks import Batch, Task
from headway.tasks.base import IGNORE
from headway.training import device as devices
from headway.training import engines
from headway.training.optimizer import build_optimizer
from headway.training.order import Shuffled
from headway.training.stage import TrainingSettings
from headway.training.streams import Stream

TURNS = 3
Step = Callable[[int], int]  # takes its number, returns the tokens that were not padding


@dataclass
class Size:
    name: str
    width: int
    layers: int
    heads: int
    block: int
    rows: int
    vocabulary: int


class RandomRows(Task):
    """Rows of random characters: what the peers' loops see too."""

    def __init__(self, block: int, vocabulary: int) -> None:
        self.block, self.examples = block, 1_000_000 - block - 1
        self.data = torch.randint(vocabulary, (1_000_000,), generator=torch.Generator().manual_seed(0))

    def load(self) -> None:
        pass

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        tokens = self.data[rows[:, None] + torch.arange(self.block + 1, device=rows.device)]
        return Batch.next_token(tokens, torch.full((len(rows),), self.block + 1, device=rows.device))

    def evaluate(self, model: Any, split: str = "dev", among: Ranks = ALONE) -> dict[str, Any]:
        return {}


def headway_step(size: Size, task: Task, device: torch.device, precision: torch.dtype) -> Step:
    torch.manual_seed(0)
    settings = GPTSettings(
        width=size.width, layers=size.layers, heads=size.heads, block=size.block, positions="learned", dropout=0.1
    )
    model = settings.build(size.vocabulary).to(device).train()
    training = TrainingSettings(steps=10_000, batch_size=size.rows, learning_rate=6e-4)
    stream = Stream("rows", task, size.rows, Shuffled(task.examples, size.rows, 0), 0)
    engine, _ = engines.build(model, [stream], build_optimizer(model, training), 0, precision, training, print)

    def take(step: int) -> int:
        engine.prepare(step)
        return engine.step(step, 1.0).tokens

    return take


def peer(folder: Path, file: str, name: str) -> Any:
    """A module of another project, from its folder."""
    sys.path.insert(0, str(folder))
    specification = importlib.util.spec_from_file_location(name, folder / file)
    if specification is None or specification.loader is None or not (folder / file).is_file():
        raise SystemExit(f"{folder / file}: no such file; give the folder of the peer's repository")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


def nanogpt_step(
    folder: Path, size: Size, task: Task, device: torch.device, precision: torch.dtype, compiled: bool = True
) -> Step:
    """Its model, optimizer, clipping and order of work, as in its train.py."""
    module = peer(folder, "model.py", "nanogpt_model")
    torch.manual_seed(0)
    config = module.GPTConfig(
        block_size=size.block,
        vocab_size=size.vocabulary,
        n_layer=size.layers,
        n_head=size.heads,
        n_embd=size.width,
        dropout=0.1,
        bias=True,
    )
    model = module.GPT(config).to(device).train()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    run = torch.compile(model) if compiled else model
    fetch = fetcher(size, task, device, ignore=-1)
    coming = [fetch(0)]

    def step(number: int) -> int:
        x, y, tokens = coming.pop()
        with devices.autocast(device, precision):
            _, loss = run(x, y)
        coming.append(fetch(number + 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return tokens

    return step


def mingpt_step(folder: Path, size: Size, task: Task, device: torch.device) -> Step:
    """Its model, optimizer, clipping and order of work, as in its trainer.py: float32, eager."""
    peer(folder, "mingpt/utils.py", "mingpt.utils")
    module = peer(folder, "mingpt/model.py", "mingpt.model")
    torch.manual_seed(0)
    config = module.GPT.get_default_config()
    config.model_type = None
    config.n_layer, config.n_head, config.n_embd = size.layers, size.heads, size.width
    config.vocab_size, config.block_size = size.vocabulary, size.block
    model = module.GPT(config).to(device).train()
    training = type("Training", (), {"learning_rate": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1})
    optimizer = model.configure_optimizers(training)
    fetch = fetcher(size, task, device, ignore=-1)

    def step(number: int) -> int:
        x, y, tokens = fetch(number)
        _, loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return tokens

    return step


def fetcher(size: Size, task: Task, device: torch.device, ignore: int) -> Callable[[int], tuple[Tensor, Tensor, int]]:
    """The batch of a step, padded to the block, on the device (through pinned memory on a GPU)."""
    stream = Stream("rows", task, size.rows, Shuffled(task.examples, size.rows, 0), 0)

    def fetch(step: int) -> tuple[Tensor, Tensor, int]:
        batch = stream.batch(step)
        more = (0, size.block - batch.inputs.shape[1])
        x = nn.functional.pad(batch.inputs, more)
        y = nn.functional.pad(batch.targets, more, value=IGNORE).masked_fill_(
            nn.functional.pad(batch.targets, more, value=IGNORE) == IGNORE, ignore
        )
        if device.type == "cuda":
            x, y = x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x, y, batch.tokens

    return fetch


def speed(step: Step, device: torch.device, numbers: range, warm: int) -> tuple[float, float]:
    """(steps a second, useful tokens a second) of these steps, after the first `warm` of them, which do not count."""
    for number in numbers[:warm]:
        step(number)
    synchronize(device)
    began = time.perf_counter()
    tokens = sum(step(number) for number in numbers[warm:])
    synchronize(device)
    seconds = time.perf_counter() - began
    return len(numbers[warm:]) / seconds, tokens / seconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def flops(size: Size) -> float:
    """Of a step: 6 for each weight and token, and attention's two products over the half of the pairs that it sees."""
    token = 6 * (12 * size.layers * size.width**2 + size.width * size.vocabulary)
    token += 6 * size.layers * size.block * size.width
    return float(token * size.rows * size.block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True, help="folder of the nanoGPT repository")
    parser.add_argument("--mingpt", type=Path, help="folder of the minGPT repository")
    parser.add_argument("--steps", type=int, default=0, help="steps measured a turn; 0: 100 on a GPU, 2 on a CPU")
    parser.add_argument("--device", default="auto", choices=devices.DEVICES)
    options = parser.parse_args()
    device, _ = devices.choose_device(options.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as nanoGPT allows TF32
        compare_gpu(options, device)
    else:
        compare_cpu(options, device)


def compare_gpu(options: argparse.Namespace, device: torch.device) -> None:
    print(f"{torch.cuda.get_device_name(device)}, {devices.describe_machine()}")
    for size in (Size("3.3M", 256, 4, 8, 128, 128, 256), Size("25.3M", 512, 8, 8, 128, 512, 256)):
        task, steps = RandomRows(size.block, size.vocabulary), options.steps or 100
        rows = {"nanoGPT, compiled": nanogpt_step(options.nanogpt, size, task, device, torch.bfloat16)}
        if options.mingpt:
            rows["minGPT"] = mingpt_step(options.mingpt, size, task, device)
        rows["Headway"] = headway_step(size, task, device, torch.bfloat16)
        show(f"{size.name}, {size.rows} × {size.block}", size, rows, device, steps, warm=20)


def compare_cpu(options: argparse.Namespace, device: torch.device) -> None:
    settings = load_settings("birthplaces/course-vanilla")
    assert settings.pretraining is not None
    tokenizer = build_tokenizer(settings, Lines())
    task = settings.pretraining.task.build(tokenizer, settings.model.block)
    task.load()
    size = Size("3.3M", 256, 4, 8, 128, 128, len(tokenizer))
    precision, _ = devices.choose_precision(device, "auto", size.width)
    print(devices.describe_machine())
    rows = {}
    for each, compiled in product({torch.float32, precision}, (False, True)):
        name = f"nanoGPT, {str(each).removeprefix('torch.')}{', compiled' if compiled else ''}"
        rows[name] = nanogpt_step(options.nanogpt, size, task, device, each, compiled)
    if options.mingpt:
        rows["minGPT"] = mingpt_step(options.mingpt, size, task, device)
    rows["Headway"] = headway_step(size, task, device, precision)
    show("3.3M on the birthplace corpus, 128 rows", size, rows, device, options.steps or 2, warm=1)


def show(title: str, size: Size, rows: dict[str, Step], device: torch.device, steps: int, warm: int) -> None:
    print(f"\n{title} ({TURNS} turns of {steps} steps each after {warm})")
    print(f"{'':30}{'it/s':>9}{'useful tokens/s':>18}{'TFLOP/s':>9}{'ratio':>8}")
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for turn in range(TURNS):
        for name, step in rows.items():
            numbers = range(turn * (warm + steps), (turn + 1) * (warm + steps))
            turns[name].append(speed(step, device, numbers, warm))
    middle = {name: sorted(each, key=itemgetter(1))[TURNS // 2] for name, each in turns.items()}
    best = max(tokens for name, (_, tokens) in middle.items() if name.startswith("nanoGPT"))
    for name, (rate, tokens) in middle.items():
        print(f"{name:30}{rate:9.2f}{tokens:18,.0f}{rate * flops(size) / 1e12:9.1f}{tokens / best:8.2f} ×")


if __name__ == "__main__":
    main()
