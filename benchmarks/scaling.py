"""Memory and time of training steps of several sizes, against what `headway.training.scaling` predicts.

Every size is trained for a few steps, operation by operation as processes of a larger run do, with several batch sizes.
The constants of the machine are fitted to all of them. Each size is then predicted by those fitted to the others: the
error is that of a size which was not measured. On a GPU the memory is the allocator's peak; on a CPU it is
weights and state, and what the forward pass keeps or the gradient, whichever is larger. A size that does not fit is
named and left out.

    python benchmarks/scaling.py [--sizes 3M,25M,124M] [--steps 5] [--write NAME]

With --write, the constants go to headway/training/machines.json under that name, for `headway scale --machine NAME`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from statistics import median

import numpy as np
import torch
from torch import Tensor

from headway.memory import is_out_of_memory
from headway.models import CausalModel, GPTSettings, parameter_count
from headway.tasks import Batch, Task
from headway.training import device as devices
from headway.training import scaling
from headway.training.engine import Plain
from headway.training.optimizer import build_optimizer
from headway.training.order import Shuffled
from headway.training.stage import TrainingSettings
from headway.training.streams import Stream, token_losses

# name: width, layers, heads, length, vocabulary, rows of the batches
SIZES = {
    "0.1M": (64, 2, 2, 64, 256, (8, 32)),
    "0.8M": (128, 4, 4, 64, 256, (8, 32)),
    "3M": (256, 4, 8, 128, 256, (16, 64)),
    "25M": (512, 8, 8, 128, 256, (32, 128, 512)),
    "124M": (768, 12, 12, 512, 50_304, (8, 24, 96)),
    "350M": (1024, 24, 16, 512, 50_304, (8, 24, 64)),
    "1B": (2048, 18, 16, 512, 50_304, (4, 16, 48)),
}
SMALL, LARGE = ("0.1M", "0.8M", "3M"), ("3M", "25M", "124M", "350M", "1B")


@dataclass
class Measured:
    name: str
    model: CausalModel  # without weights
    work: scaling.Work
    memory: float  # bytes
    seconds: float  # a step


class RandomRows(Task):
    """Rows of random tokens."""

    def __init__(self, block: int, vocabulary: int) -> None:
        self.block, self.vocabulary, self.examples = block, vocabulary, 1 << 20

    def load(self) -> None:
        pass

    def noise(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(1, self.vocabulary, (self.block + 1, count), generator=generator)

    def make(self, rows: Tensor, noise: Tensor) -> Batch:
        return Batch.next_token(noise.T, torch.full((len(rows),), self.block + 1))

    def evaluate(self, *arguments: object, **options: object) -> dict[str, object]:
        return {}


def measure(name: str, rows: int, device: torch.device, precision: torch.dtype, steps: int) -> Measured:
    """Train a size for a few steps."""
    width, layers, heads, length, vocabulary, _ = SIZES[name]
    settings = GPTSettings(width=width, layers=layers, heads=heads, block=length, dropout=0.0)
    torch.manual_seed(0)
    model = settings.build(vocabulary).to(device)
    stream = Stream("rows", RandomRows(length, vocabulary), rows, Shuffled(1 << 20, rows, 0), 0)
    engine = Plain(model, [stream], build_optimizer(model, TrainingSettings()), 0, precision, 1.0, accumulate=1)
    engine.step(0, 1.0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        done = engine.step(step, 1.0)
        float(done.loss)  # waits for the device
        times.append(time.perf_counter() - begin)
    if device.type == "cuda":
        peak = float(torch.cuda.max_memory_allocated())
    else:
        count = parameter_count(model)
        gradient = 4 * count + (precision.itemsize * count if precision != torch.float32 else 0)  # beside its copies
        peak = 12.0 * count + max(gradient, kept(model, stream.batch(0), precision))
    work = scaling.Work(rows, length)
    return Measured(name, scaling.blank(settings, vocabulary), work, peak, median(times))


def kept(model: CausalModel, batch: Batch, precision: torch.dtype) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights left out."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(model.parameters()).device
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), devices.autocast(device, precision):
        loss = token_losses(model, batch.targets, batch.inputs).sum()
    del loss
    return sum(seen.values())


def fit(found: list[Measured], start: scaling.Machine) -> scaling.Machine:
    """The constants that come nearest to what was measured, by relative squares; none is negative."""
    activation, logits, base = fit_memory(found, start)
    operations = [scaling.operations(each.model, each.work.tokens, each.work.length) for each in found]
    operation, element, entry, layer, update = fit_time(found, operations, start.ahead)
    fastest = max(count / each.seconds for count, each in zip(operations, found, strict=True))
    return replace(
        start,
        activation=activation,
        logits=logits,
        base=base,
        rate=1 / operation if operation else fastest,  # where nothing was limited by it, it is no less than was seen
        element=element,
        entry=entry,
        layer=layer,
        update=update,
    )


def fit_memory(found: list[Measured], start: scaling.Machine) -> np.ndarray:
    """(activation, logits, base). Of activations that are smaller than the gradient nothing is seen."""
    fixed = replace(start, activation=0.0, logits=0.0, base=0.0)
    without = [scaling.memory(each.model, each.work, fixed, 1, False) for each in found]
    gradient = np.array([need.gradients for need in without])
    hidden = np.array([need.total for need in without])
    rows = np.array([[*numbers(each), 1.0] for each in found])
    measured = np.array([each.memory for each in found])
    seen, unseen = Side(rows, hidden - gradient), Side(rows * [0.0, 0.0, 1.0], hidden)
    return solve_larger(seen, unseen, measured, order=measured / hidden)


def fit_time(found: list[Measured], operations: list[float], ahead: bool) -> np.ndarray:
    """(seconds an operation, an element, an entry, a layer, and of the update for a parameter).

    On a CPU elements and entries are not told from operations: arithmetic takes the time there.
    """
    rows = [
        [count, *numbers(each), scaling.layers(each.model), parameter_count(each.model)]
        for count, each in zip(operations, found, strict=True)
    ]
    table, measured = np.array(rows, dtype=float), np.array([each.seconds for each in found])
    if not ahead:
        return solve(table * [1.0, 0.0, 0.0, 1.0, 1.0], measured, measured)
    computing, launching = table * [1.0, 1.0, 1.0, 0.0, 1.0], table * [0.0, 0.0, 0.0, 1.0, 1.0]
    none = 0 * measured
    return solve_larger(Side(computing, none), Side(launching, none), measured, order=table[:, 0] / table[:, 3])


def numbers(each: Measured) -> tuple[float, float]:
    """How many numbers the layers hand on from one to the next, and how many logits there are."""
    tokens, model = each.work.tokens, each.model
    return tokens * scaling.layers(model) * scaling.width(model), tokens * scaling.vocabulary(model)


@dataclass
class Side:
    """One of two amounts of which the larger is measured: rows · x + known."""

    rows: np.ndarray
    known: np.ndarray

    def of(self, x: np.ndarray) -> np.ndarray:
        return self.rows @ x + self.known


def solve_larger(first: Side, second: Side, measured: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The x ≥ 0 for which the larger of both sides is nearest to what was measured.

    The first side is the larger one for those points whose `order` is high; every bound is tried.
    """
    best, least = np.zeros(first.rows.shape[1]), np.inf
    for bound in [*np.sort(order), np.inf]:
        is_first = order >= bound
        rows = np.where(is_first[:, None], first.rows, second.rows)
        x = solve(rows, measured - np.where(is_first, first.known, second.known), measured)
        error = float(((np.maximum(first.of(x), second.of(x)) / measured - 1) ** 2).sum())
        if error < least:
            best, least = x, error
    return best


def solve(rows: np.ndarray, values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The x ≥ 0 with rows · x nearest to `values`, each difference divided by its `scale`."""
    matrix, wanted = rows / scale[:, None], values / scale
    units = matrix.max(axis=0)  # columns of like size are solved more exactly
    units[units == 0] = 1.0
    matrix = matrix / units
    best, least = np.zeros(matrix.shape[1]), float((wanted**2).sum())
    for count in range(1, len(best) + 1):
        for chosen in map(list, combinations(range(len(best)), count)):
            part, *_ = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)
            error = float(((matrix[:, chosen] @ part - wanted) ** 2).sum())
            if (part >= 0).all() and error < least:
                best, least = np.zeros(len(best)), error
                best[chosen] = part
    return best / units


def attempts(names: list[str], device: torch.device, precision: torch.dtype, steps: int) -> Iterator[Measured]:
    for name in names:
        for rows in SIZES[name][-1]:
            try:
                yield measure(name, rows, device, precision, steps)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                print(f"{name} with {rows} rows does not fit: {str(error).splitlines()[0]}")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", help=f"of {', '.join(SIZES)}; without it, what the device is fit for")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--write", metavar="NAME", help="put the constants into machines.json")
    options = parser.parse_args()
    device, _ = devices.choose_device("auto")
    names = options.sizes.split(",") if options.sizes else list(LARGE if device.type == "cuda" else SMALL)
    if unknown := [name for name in names if name not in SIZES]:
        parser.error(f"--sizes {','.join(unknown)}: must be of {', '.join(SIZES)}")
    precision, _ = devices.choose_precision(device, width=min(SIZES[name][0] for name in names))
    where = f"{devices.describe(device)}, {devices.describe_machine()}"
    print(f"{where}, {str(precision).removeprefix('torch.')}")
    found = list(attempts(names, device, precision, options.steps))
    start = scaling.Machine(
        memory=total_memory(device),
        rate=1.0,
        layer=0.0,
        update=0.0,
        activation=0.0,
        logits=0.0,
        bytes=precision.itemsize,
        ahead=device.type != "cpu",
        measured=f"python benchmarks/scaling.py --sizes {','.join(names)} --steps {options.steps}, seed 0, {where}",
    )
    machine = fit(found, start)
    print_errors(found, start, machine)
    print(json.dumps(asdict(machine), indent=1))
    if options.write:
        known_machines = json.loads(scaling.MACHINES.read_text()) if scaling.MACHINES.exists() else {}
        known_machines[options.write] = asdict(machine)
        scaling.MACHINES.write_text(json.dumps(known_machines, indent=1, sort_keys=True) + "\n")
        print(f"written to {scaling.MACHINES}")


def print_errors(found: list[Measured], start: scaling.Machine, machine: scaling.Machine) -> None:
    """Each size against what the constants fitted to the other sizes say of it, where they are two or more."""
    print("\n  size  rows  memory, MB  predicted   error   step, ms  predicted   error")
    for each in found:
        others = [other for other in found if other.name != each.name]
        known = fit(others, start) if len({other.name for other in others}) > 1 else machine
        memory = scaling.memory(each.model, each.work, known, 1, False).total
        seconds = scaling.duration(each.model, each.work, known, scaling.Network(), 1, False).compute
        print(
            f"{each.name:>6} {each.work.rows:>5} {each.memory / 1e6:>11,.1f} {memory / 1e6:>10,.1f} "
            f"{memory / each.memory - 1:>+7.1%} {1e3 * each.seconds:>10,.2f} {1e3 * seconds:>10,.2f} "
            f"{seconds / each.seconds - 1:>+7.1%}"
        )


def total_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else 8e9


if __name__ == "__main__":
    main()
