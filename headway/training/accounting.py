"""What training costs: time, tokens, arithmetic, memory.

The arithmetic is counted from the model itself. One row goes through it, and every matrix product is counted as it is
computed: 2 FLOPs for each weight and token. Attention's two products count over the pairs of positions that see each
other, and not over those that a mask hides. Learning takes the same products twice more, for the gradients of their two
factors: so 6 FLOPs for each weight and token in all. Looking up an embedding is no product, nor is what works number by
number (norms, activations, softmax, dropout, the optimizer). What a kernel computes twice to save memory counts once.

    utilisation = FLOPs of the tokens that are not padding ÷ seconds ÷ the device's peak

Shapes: B batch, T queries, S keys, H heads, K head width.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headway.console import clock
from headway.memory import is_out_of_memory
from headway.models import Model
from headway.nn import written_out
from headway.training.checkpoint import State
from headway.training.engine import Outcome
from headway.training.streams import Stream

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CPU = torch.device("cpu")
aten = torch.ops.aten
PRODUCTS = {  # where each of them has its left factor
    aten.mm.default: 0,
    aten.bmm.default: 0,
    aten.mv.default: 0,
    aten.addmm.default: 1,
    aten.baddbmm.default: 1,
    aten.addmv.default: 1,
}

# Peaks of matrix products without sparsity in FLOP/s, (16 bits, float32), from NVIDIA's data sheets of these cards.
# The first name that is found in the device's own counts. TF32 has half the peak of 16 bits on each of them.
PEAKS: Sequence[tuple[str, float, float]] = (
    (r"H200 NVL", 835e12, 60e12),
    (r"H200", 989e12, 67e12),
    (r"H100 PCIe", 756e12, 51e12),
    (r"H100 NVL", 835e12, 60e12),
    (r"H100|GH200", 989e12, 67e12),
    (r"A100", 312e12, 19.5e12),
    (r"A10", 125e12, 31.2e12),
    (r"L40S", 362e12, 91.6e12),
    (r"L4", 121e12, 30.3e12),
    (r"RTX 4090(?! D| Laptop)", 165e12, 82.6e12),
    (r"RTX 3090(?! Ti)", 71e12, 35.6e12),
)


# ---- arithmetic


class Products(TorchDispatchMode):
    """Adds up the FLOPs of the matrix products inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in PRODUCTS:
            self.flops += 2 * result.numel() * args[PRODUCTS[func]].shape[-1]
        return result


class SeenPairs(TorchFunctionMode):
    """Adds up the FLOPs of fused attention over the pairs that see each other, and leaves out computing it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, _, v = args
        self.flops += 2 * pairs(*args, **(kwargs or {})) * (q.shape[-1] + v.shape[-1])
        return q.new_zeros(*q.shape[:-1], v.shape[-1])


def pairs(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **rest: Any
) -> int:
    """How many queries see how many keys, over all rows and heads."""
    shape = (*q.shape[:-1], k.shape[-2])  # (…, T, S)
    if is_causal:
        attn_mask = torch.ones(shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is None:
        return q.shape[:-1].numel() * k.shape[-2]
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
    return int(seen.expand(shape).sum())


@torch.no_grad()
def row_flops(model: nn.Module, *lengths: int) -> int:
    """FLOPs of learning from one row: those of the forward pass, three times. `lengths` are those of the tokens and,
    where it has one, of its source."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    with SeenPairs() as attention, written_out(), Products() as products:  # fused recurrences hide their products
        model(*(torch.ones(1, length, dtype=torch.long, device=device) for length in lengths))
    model.train(training)
    return 3 * (products.flops + attention.flops)


class Costs:
    """FLOPs a token that is not padding, by the streams that take part.

    Every row of a stream counts as long as its rows are on average, in the first step that it takes part in.
    """

    def __init__(self, model: Model, streams: Sequence[Stream]) -> None:
        self.flops, self.tokens = {}, {}
        for stream in streams:
            batch = stream.batch(stream.begin)
            counts = [batch.lengths, *((part != 0).sum(1) for part in batch.given[1:])]
            lengths = [max(1, round(float(count.float().mean()))) for count in counts]
            self.tokens[stream.name] = batch.tokens
            self.flops[stream.name] = self.of_row(model, lengths) * batch.tokens / lengths[0]

    def of_row(self, model: nn.Module, lengths: Sequence[int]) -> int:
        """0, which is unknown, where there is no memory to count: that is for the steps themselves to find."""
        try:
            return row_flops(model, *lengths)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return 0

    def __call__(self, names: Collection[str]) -> float:
        tokens = sum(self.tokens[name] for name in names)
        return sum(self.flops[name] for name in names) / max(1, tokens)


# ---- the machine


def peak_flops(device: torch.device, precision: torch.dtype, tf32: bool = False) -> float | None:
    """The most FLOP/s that the device does in matrix products: of a GPU what its data sheet says, of a CPU what is
    measured now; None where it is not known."""
    if device.type == "cuda":
        return listed_peak(torch.cuda.get_device_name(device), precision, tf32)
    return measured_peak(precision, torch.get_num_threads()) if device.type == "cpu" else None


def listed_peak(name: str, precision: torch.dtype, tf32: bool = False) -> float | None:
    """By the name of a GPU; of a part of one (MIG) nothing is known."""
    if "MIG" in name:
        return None
    found = (peaks for pattern, *peaks in PEAKS if re.search(rf"\b({pattern})\b", name))
    low, full = next(found, (None, None))
    if tf32 and low is not None:
        return low / 2
    return full if precision == torch.float32 else low


@cache
def measured_peak(precision: torch.dtype, threads: int, size: int = 768) -> float | None:
    """FLOP/s of the fastest of some products of two square matrices, on this CPU and with so many threads."""
    matrix = torch.ones(size, size, dtype=precision)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        matrix @ matrix
        times.append(time.perf_counter() - began)
    best = min((seconds for seconds in times[1:] if seconds > 0), default=None)  # a clock may be set back
    return None if best is None else 2 * size**3 / best


def peak_memory(device: torch.device) -> int | None:
    """Bytes: on a GPU the most that tensors took there, else the most that the process had in memory; None where the
    system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if resource is None:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ---- the meter


@dataclass
class Work:
    """What was done in some time."""

    steps: int = 0
    tokens: int = 0  # inputs that were not padding
    positions: int = 0  # inputs that were computed
    flops: float = 0.0  # for the tokens
    seconds: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def speed(self) -> Work | None:
        """The same for one second; None where no time has passed."""
        return Work(*(each / self.seconds for each in astuple(self))) if self.seconds > 0 else None


class Meter:
    """Time spent training and what was done in it; evaluations and checkpoints are left out.

    A clock that is set back adds nothing, and the speed stays what it was.
    """

    def __init__(
        self,
        state: State,
        costs: Callable[[Collection[str]], float] = lambda names: 0.0,
        peak: float | None = None,
        device: torch.device = CPU,
    ) -> None:
        self.state, self.costs, self.peak, self.device = state, costs, peak, device
        self.mark = time.perf_counter()
        self.first, self.rest, self.lately = Work(), Work(), Work()  # the first step, those after it, those since a log
        self.speed = Work()  # of the last log

    def add(self, done: Outcome) -> None:
        self.count(Work(1, done.tokens, done.positions, done.tokens * self.costs(done.losses)))

    def lap(self) -> None:
        """What has passed since the last mark was training."""
        now = time.perf_counter()
        passed = max(0.0, now - self.mark)
        self.state.seconds += passed
        self.count(Work(seconds=passed))
        self.mark = now

    def count(self, work: Work) -> None:
        self.lately += work
        if self.first.steps + self.rest.steps + work.steps > 1:
            self.rest += work
        else:
            self.first += work

    def skip(self) -> None:
        """What has passed since the last mark was something else."""
        self.mark = time.perf_counter()

    def read(self) -> dict[str, float]:
        """What a line of metrics.jsonl says of the steps since the one before."""
        self.lap()
        self.speed = self.lately.speed() or self.speed
        self.lately = Work()
        share, memory = self.utilisation(self.speed), peak_memory(self.device)
        return {
            "seconds": round(self.state.seconds, 3),
            "tokens_per_second": round(self.speed.positions, 1),
            "useful_tokens_per_second": round(self.speed.tokens, 1),
            **({} if share is None else {"flops_utilisation": round(share, 4)}),
            **({} if memory is None else {"memory": memory}),
        }

    def utilisation(self, speed: Work) -> float | None:
        """The share of the device's peak; None where it is not known."""
        return speed.flops / self.peak if self.peak and speed.flops else None

    def summary(self) -> str:
        """The whole stage in one line. The rates leave out the first step, which compiles and makes things ready."""
        both = self.first + self.rest
        parts = [f"{both.steps:,} step{'' if both.steps == 1 else 's'} in {clock(both.seconds)}"]
        speed = self.rest.speed() or self.first.speed()
        if speed is not None:
            parts += [f"{speed.steps:.3g} it/s", f"{speed.tokens:,.0f} useful tokens/s"]
        if both.positions:
            parts.append(f"{1 - both.tokens / both.positions:.0%} padding")
        share = None if speed is None else self.utilisation(speed)
        if share is not None:
            parts.append(f"{share:.1%} of the {'measured ' if self.device.type == 'cpu' else ''}peak")
        memory = peak_memory(self.device)
        if memory is not None:
            parts.append(f"{size(memory)} of memory at most")
        return ", ".join(parts)


def size(count: int) -> str:
    """Bytes in words: 512 MiB, 3.1 GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
