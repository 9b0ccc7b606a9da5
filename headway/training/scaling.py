"""What a run needs on N devices: memory a device, time a step. A model with few constants, each measured or assumed.

    memory   weights 4P, gradient 4P, AdamW 8P (Muon: 4 a matrix's entry)            bytes; sharded: each process's rows
             + working copies      ddp: 2P in bfloat16;   fsdp: the root and two blocks put together, one's gradient,
                                   and with several pieces the whole gradient, 4P, which is exchanged after the last
             + base                what the libraries take
             + tokens · (activation · layers · width + logits · vocabulary)          tokens of the largest piece
             one process, one piece: the larger of gradient and activations, not both; one grows as the other is let go
    compute  Σ both(tokens · ((6 P' + 6 · layers · width · T) / rate + element · layers · width + entry · vocabulary),
                    layer · layers · pieces) + update · P
             Σ over streams; both: the larger where the device computes while the next operations are launched (a GPU),
             the sum where one waits for the other (a CPU); products take the time of their arithmetic, what stands
             between them (norms, GELU, softmax) the time in which its numbers are moved
    network  ddp:  2 · 4P · (N − 1)/N                      an all-reduce of float32 gradients
             fsdp: (b · (2P − root) · pieces + 4P) · (N − 1)/N
                                                           weights of b bytes are gathered for each piece, a block's
                                                           twice, the root's once; one reduce-scatter of the gradient
    step     overlapped: the larger of both;  not overlapped: their sum

P parameters, P' those that multiply (without the embedding table), T the length of a row, N processes. The constants of
a machine (`Machine`) are fitted by `benchmarks/scaling.py` to steps that it measures, and stand in `machines.json` with
where they are from. What one device cannot measure (`Network`) is assumed, and can be given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.errors import UserError, nearest
from headway.models import GPT, CausalModel

MACHINES = Path(__file__).with_name("machines.json")
FLOAT = 4  # bytes of a weight


@dataclass(frozen=True)
class Machine:
    """One device, as measured."""

    memory: float  # bytes it has
    rate: float  # floating-point operations a second in large products
    layer: float  # seconds that a layer costs in each piece whatever its size; on a GPU, to launch its operations
    update: float  # seconds that the optimizer takes for a parameter
    activation: float  # bytes that a token keeps for the backward pass in a layer, a unit of width
    logits: float  # bytes that a token keeps for an entry of the vocabulary
    bytes: int  # of a number in the matrix products: 2 for bfloat16, 4 for float32
    ahead: bool  # operations are launched ahead of the arithmetic, as on a GPU; a CPU does one after the other
    element: float = 0.0  # seconds for what is not a product, of a token in a layer, a unit of width
    entry: float = 0.0  # the same of a token for an entry of the vocabulary
    base: float = 0.0  # bytes that the libraries take, whatever the model
    measured: str = ""  # by which command, where


@dataclass(frozen=True)
class Network:
    """How fast devices talk, in bytes a second each way. These are assumptions, not measurements."""

    within: float = 450e9  # inside a machine
    between: float = 50e9  # from machine to machine
    devices: int = 8  # of a machine

    def speed(self, size: int) -> float:
        return self.within if size <= self.devices else self.between


@dataclass(frozen=True)
class Work:
    """What a step has to do, whatever the number of devices."""

    rows: int
    length: int  # tokens a row
    pieces: int = 1  # that a device's rows of each stream are cut into
    optimizer: str = "adamw"
    beside: tuple[tuple[int, int], ...] = ()  # (rows, length) of the streams beside the task

    @property
    def streams(self) -> tuple[tuple[int, int], ...]:
        """(rows, length) of the task and of each stream; their gradients are computed one after the other."""
        return ((self.rows, self.length), *self.beside)

    def shares(self, size: int) -> Iterator[tuple[int, int, int]]:
        """(rows, length, pieces) that the first of `size` devices has of each stream; no piece is without a row."""
        for rows, length in self.streams:
            yield -(-rows // size), length, min(self.pieces, max(1, rows // size))

    @property
    def tokens(self) -> int:
        return sum(rows * length for rows, length in self.streams)


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that holds most, at the moment when it holds most."""

    weights: float
    gradients: float
    optimizer: float
    working: float
    activations: float  # beyond the gradient, where they make room for it

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Duration:
    """Seconds of a step."""

    compute: float
    network: float

    @property
    def overlapped(self) -> float:
        return max(self.compute, self.network)

    @property
    def apart(self) -> float:
        return self.compute + self.network


def blank(settings: Any, vocabulary: int) -> CausalModel:
    """The model without memory for its weights; it must be a GPT, whose layers are all computed at once."""
    with torch.device("meta"):
        model = settings.build(vocabulary)
    if not isinstance(model, GPT):
        raise UserError(
            f"model.kind = {settings.kind!r}: memory and time are modelled for gpt and perceiver, not for models that "
            "read a source or are recurrent; train it for some steps, and the summary says its speed and memory on one "
            "device"
        )
    return model


def held(parameters: Iterable[nn.Parameter], size: int) -> int:
    """Numbers that the first of `size` processes holds: its rows of each parameter, rounded up."""
    return sum(-(-len(each) // size) * (each.numel() // len(each)) for each in parameters)


def memory(model: CausalModel, work: Work, machine: Machine, size: int, sharded: bool) -> Memory:
    """What one of `size` devices needs."""
    parameters = list(model.parameters())
    matrices = {id(each) for each in model.hidden_matrices()} if work.optimizer == "muon" else set()
    by_muon = [each for each in parameters if id(each) in matrices]
    by_adamw = [each for each in parameters if id(each) not in matrices]
    share = size if sharded else 1
    weights = FLOAT * held(parameters, share)
    state = FLOAT * (held(by_muon, share) + 2 * held(by_adamw, share) + len(by_adamw))  # AdamW also counts its steps
    shares = list(work.shares(size))
    one_piece = sum(pieces for *_, pieces in shares) == 1
    low = machine.bytes if machine.bytes < FLOAT else 0  # float32 needs no copies
    working: float = low * held(parameters, 1)
    if sharded:
        block, root = block_and_root(model)
        gradient = max(root, block) if one_piece else held(parameters, 1)
        working = machine.bytes * (root + 2 * block) + FLOAT * gradient
    tokens = max(-(-rows // pieces) * length for rows, length, pieces in shares)
    activations = tokens * (machine.activation * layers(model) * width(model) + machine.logits * vocabulary(model))
    if size == 1 and one_piece:  # no gradient is there before the backward pass, which lets go of activations
        activations = max(0.0, activations - weights)
    return Memory(weights, weights, state, working + machine.base, activations)


def duration(model: CausalModel, work: Work, machine: Machine, network: Network, size: int, sharded: bool) -> Duration:
    """How long one of `size` devices takes for a step."""
    count = held(model.parameters(), 1)
    both = max if machine.ahead else sum
    between = machine.element * layers(model) * width(model) + machine.entry * vocabulary(model)
    compute = 0.0
    for rows, length, pieces in work.shares(size):
        arithmetic = operations(model, rows * length, length) / machine.rate + rows * length * between
        compute += both((arithmetic, machine.layer * layers(model) * pieces))
    compute += machine.update * (held(model.parameters(), size) if sharded else count)
    moved = 2 * FLOAT * count
    if sharded:
        _, root = block_and_root(model)
        moved = machine.bytes * (2 * count - root) * sum(pieces for *_, pieces in work.shares(size)) + FLOAT * count
    return Duration(compute, moved * (size - 1) / size / network.speed(size))


def operations(model: CausalModel, tokens: int, length: int) -> float:
    """Floating-point operations of a step, forward and backward; attention looks at half of the row on average."""
    table = vocabulary(model) * width(model) if model.head.weight is not model.embedding.weight else 0  # type: ignore[union-attr]
    multiplied = held(model.parameters(), 1) - table
    return tokens * (6.0 * multiplied + 6.0 * layers(model) * width(model) * length)


def block_and_root(model: CausalModel) -> tuple[int, int]:
    """(numbers in a block, numbers outside the blocks)."""
    blocks = [held(block.parameters(), 1) for block in model.blocks]  # type: ignore[union-attr]
    return max(blocks, default=0), held(model.parameters(), 1) - sum(blocks)


def layers(model: CausalModel) -> int:
    return int(model.settings.layers)


def width(model: CausalModel) -> int:
    return int(model.settings.width)


def vocabulary(model: CausalModel) -> int:
    return len(model.head.weight)  # type: ignore[arg-type]


def machines() -> dict[str, Machine]:
    """The machines that were measured, by name."""
    return {name: Machine(**constants) for name, constants in json.loads(MACHINES.read_text("utf-8")).items()}


def find_machine(name: str) -> tuple[str, Machine]:
    """The machine of that name, or the only one in whose name it stands: h200 for NVIDIA H200."""
    known = machines()
    meant = [each for each in known if name.casefold() in each.casefold()]
    if name not in known and name and len(meant) == 1:
        name = meant[0]
    if name not in known:
        way = "measure it with benchmarks/scaling.py"
        raise UserError(f"--machine {name}: not measured yet{nearest(name, known)}; {way}")
    return name, known[name]


MEMORY = ("weights", "gradient", "optimizer", "working", "activations", "all", "fits")
TIME = ("compute, ms", "network, ms", "step, ms", "not overlapped", "tokens/s")


def rows_of(
    model: CausalModel, work: Work, machine: Machine, network: Network, sizes: Iterable[int]
) -> Iterator[dict[str, str]]:
    """The cells of a table by their columns, for ddp and fsdp on each number of devices."""
    for size in sizes:
        for parallel in ("ddp", "fsdp") if size > 1 else ("one",):
            need = memory(model, work, machine, size, parallel == "fsdp")
            time = duration(model, work, machine, network, size, parallel == "fsdp")
            parts = [amount(each) for each in (*asdict(need).values(), need.total)]
            fits = "yes" if need.total < machine.memory else "no"
            shown = [f"{1e3 * each:,.1f}" for each in (time.compute, time.network, time.overlapped, time.apart)]
            speed = f"{work.tokens / time.overlapped:,.0f}"
            yield {
                "devices": f"{size:,}",
                "parallel": parallel,
                **dict(zip(MEMORY, [*parts, fits], strict=True)),
                **dict(zip(TIME, [*shown, speed], strict=True)),
            }


def amount(count: float) -> str:
    """Bytes in the largest unit that is not too coarse: 1.25 GB, 102.2 MB, 0.5 kB."""
    unit, size = next(((name, size) for name, size in (("GB", 1e9), ("MB", 1e6)) if count >= size), ("kB", 1e3))
    return f"{count / size:.{2 if unit == 'GB' else 1}f} {unit}" if count else "0"


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """One table for a page."""
    lines = [[*rows[0]], ["---:"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def aligned(rows: Sequence[dict[str, str]]) -> str:
    """Two tables for a terminal, memory and time."""
    return "\n\n".join(columns(rows, ("devices", "parallel", *group)) for group in (MEMORY, TIME))


def columns(rows: Sequence[dict[str, str]], names: Sequence[str]) -> str:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    lines = [{name: name for name in names}, {name: "-" * widths[name] for name in names}, *rows]
    return "\n".join("  ".join(line[name].rjust(widths[name]) for name in names) for line in lines)
