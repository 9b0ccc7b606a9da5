"""Complexity: what every attention costs as rows get longer, measured, beside what its formula says.

    time ≈ c·T^p,   memory ≈ c·T^p:    p is the slope of the line through (log T, log cost), by least squares

One forward pass in inference mode, float32, batch 1, on one thread. Time is processor time, the least of a few passes
after one to warm up, so that other work on the machine counts little. Memory is the peak of what torch's allocator
hands out during a pass beyond what was there before (torch.profiler): kernels' buffers included, weights and input not.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.inspection.experiments.base import (
    COLOURS,
    MARKERS,
    Experiment,
    Table,
    generator,
    one_thread,
    seeded,
    slope,
)
from headway.nn import ATTENTIONS, Attention, Perceiver

# Lengths: those that write the T×T weights down stop earlier, and additive attention has D tanh for each of them.
FUSED, WRITTEN, HEAVY = (512, 1024, 2048, 4096), (512, 1024, 2048), (256, 512, 1024)
LINEAR = (2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Cost:
    """What a mechanism says of its time and memory, the lengths to measure at, and options that keep it as it says."""

    time: str
    memory: str
    lengths: Sequence[int]
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """How its formula grows; mixed: as T at first, and as T² in the end."""
        return "quadratic" if "T²" in self.time else "mixed" if "T/" in self.time else "linear"


UNKNOWN = Cost("not listed", "not listed", WRITTEN)
COSTS = {
    "dot-product": Cost("T²·D", "T·D", FUSED),
    "unscaled": Cost("T²·D", "T·D", FUSED),
    "additive": Cost("T²·D", "T²·H + buffer", HEAVY),
    "synthesizer-dense": Cost("T·D² + T²·D", "T²·H", WRITTEN),
    "synthesizer-random": Cost("T²·D", "T²·H", WRITTEN),
    "synthesizer-factorised-dense": Cost("T²·D", "T²·H", WRITTEN),
    "synthesizer-factorised-random": Cost("T²·D", "T²·H", WRITTEN),
    "synthesizer-mixture": Cost("T²·D", "T²·H", WRITTEN),
    "token-mixer": Cost("T²·D", "T²·H", WRITTEN),
    "linformer": Cost("T·k·D", "T·(D + k·H)", LINEAR, {"projected": 128}),
    "local": Cost("T·r·D", "T·D", LINEAR),
    "bigbird": Cost("T·C·b·D", "T·C·D", LINEAR),
    "perceiver": Cost("T·m·D", "T·D", LINEAR),
    "perceiver-first": Cost("T·m·D", "T·D", LINEAR),
    "causal perceiver": Cost("T·(m + T/m)·D", "T·(D + m + T/m)", LINEAR, {"causal": True}),
}
# Whether the others are causal or not makes no difference to their formulas: they are measured without.
MEASURED: Mapping[str, Callable[..., Attention]] = {**ATTENTIONS, "causal perceiver": Perceiver}
LINES = {"quadratic": "-", "linear": "--", "mixed": ":"}


@dataclass
class Growth:
    """One mechanism: seconds and bytes at each length, and the fitted exponents."""

    cost: Cost
    lengths: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def time_exponent(self) -> float:
        return exponent(self.lengths, self.seconds)

    @property
    def memory_exponent(self) -> float:
        return exponent(self.lengths, self.memory)


@dataclass
class Complexity:
    width: int
    heads: int
    growths: dict[str, Growth]


def exponent(lengths: Sequence[int], costs: Sequence[float]) -> float:
    """p in cost ≈ c·T^p; nan for fewer than two lengths."""
    if len(lengths) < 2:
        return math.nan
    return slope([math.log(length) for length in lengths], [math.log(cost) for cost in costs])


@one_thread()
@torch.inference_mode()
def run(
    width: int = 256,
    heads: int = 4,
    seed: int = 0,
    attentions: Mapping[str, Callable[..., Attention]] = MEASURED,
    shorter: int = 1,
    repeats: int = 3,
    patience: float = 0.4,
) -> Complexity:
    """Every one of `attentions` at its lengths divided by `shorter`.

    A mechanism that takes more than `patience` seconds for a pass is not asked for longer rows.
    """
    result = Complexity(width, heads, {})
    for name, build in attentions.items():
        cost = COSTS.get(name, UNKNOWN)
        growth = result.growths[name] = Growth(cost)
        for length in cost.lengths:
            rows = length // shorter
            options = {"causal": False, "length": rows, **cost.options}
            with seeded(seed):
                attention = build(width, heads, 0.0, **options).eval()
            x = torch.randn(1, rows, width, generator=generator(seed))
            seconds = fastest(attention, x, repeats, patience)
            growth.lengths.append(rows)
            growth.seconds.append(seconds)
            growth.memory.append(peak_memory(attention, x))
            if seconds > patience:
                break
    return result


def fastest(attention: Attention, x: Tensor, repeats: int, patience: float) -> float:
    """Processor seconds of the fastest of a few passes, after one that is not counted unless it was slow already."""
    positions = torch.arange(x.shape[1])
    taken = []
    for _ in range(1 + repeats):
        began = time.process_time()
        attention(x, positions)
        taken.append(time.process_time() - began)
        if sum(taken) > 2 * patience:
            break
    return min(taken[1:] or taken)


def peak_memory(attention: Attention, x: Tensor) -> int:
    """The most bytes that one pass holds at a time, beyond what was there before it."""
    positions = torch.arange(x.shape[1])
    with unheard(), tempfile.TemporaryDirectory() as folder:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            attention(x, positions)
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    held = most = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        most = max(most, held)
    return most


@contextmanager
def unheard() -> Iterator[None]:
    """The profiler's native part writes lines to standard error that no setting stops: they go nowhere."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def table(result: Complexity) -> Table:
    rows = [
        (
            name,
            growth.cost.time,
            f"{growth.time_exponent:.2f}",
            growth.cost.memory,
            f"{growth.memory_exponent:.2f}",
            f"{growth.lengths[0]:,}–{growth.lengths[-1]:,}",
            f"{1e3 * growth.seconds[-1]:,.1f} ms",
            f"{growth.memory[-1] / 1e6:,.1f} MB",
        )
        for name, growth in result.growths.items()
    ]
    header = ("attention", "time", "T^", "memory", "T^", "T", "time at the longest", "memory (allocator peak)")
    return Table(header, rows)


def finding(result: Complexity) -> str:
    known = {name: growth for name, growth in result.growths.items() if growth.cost is not UNKNOWN}
    grown = []
    for kind in ("quadratic", "linear"):
        found = [growth.time_exponent for growth in known.values() if growth.cost.kind == kind]
        if found:
            grown.append(f"those with a {kind} formula grow as T^{min(found):.2f} to T^{max(found):.2f}")
    for name, growth in known.items():
        if growth.cost.kind == "mixed":
            grown.append(f"the {name}, which is both, as T^{growth.time_exponent:.2f}")
    return f"Time at width {result.width}: {'; '.join([*grown, race(result)])}."


def race(result: Complexity) -> str:
    """Who is fastest at the longest length that most of them share."""
    counts = Counter(length for growth in result.growths.values() for length in growth.lengths)
    length = max(counts, key=lambda length: (counts[length], length))
    times = {
        name: growth.seconds[growth.lengths.index(length)]
        for name, growth in result.growths.items()
        if length in growth.lengths
    }
    first, last = min(times, key=lambda name: times[name]), max(times, key=lambda name: times[name])
    return f"at T = {length:,} {first} takes {1e3 * times[first]:.0f} ms and {last} {1e3 * times[last]:.0f} ms"


def draw(result: Complexity, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    for index, (name, growth) in enumerate(result.growths.items()):
        line = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": LINES[growth.cost.kind],
            "markersize": 5,
        }
        left.loglog(growth.lengths, [1e3 * value for value in growth.seconds], label=name, **line)
        right.loglog(growth.lengths, [value / 1e6 for value in growth.memory], **line)
    left.set(title="Time of a pass (one thread)", ylabel="milliseconds")
    right.set(title="Memory of a pass", ylabel="megabytes (10⁶ bytes)")
    ticks = sorted({length for growth in result.growths.values() for length in growth.lengths})
    for axes in (left, right):
        axes.set_xlabel("row length T in tokens")
        axes.set_xticks(ticks, [f"{tick / 1024:g}k" if tick >= 1024 else str(tick) for tick in ticks])
        axes.minorticks_off()
    figure.legend(loc="outside right center", title="solid: quadratic formula\ndashed: linear formula\ndotted: both")


EXPERIMENT = Experiment(
    name="complexity",
    summary="time and memory of every attention against the length of the row",
    question="Which attention is quadratic and which is linear, and where does it begin to matter?",
    look="On logarithmic axes a power of T is a straight line and its exponent is the slope. The table has the fitted "
    "exponents beside the formulas: H heads, r neighbours, k projected keys, C blocks of b keys, m latents. A causal "
    "perceiver cuts the row into m segments, which grow with it. Time is processor time on one thread; memory is what "
    "torch's allocator holds at the peak of a pass, weights and input aside.",
    beware="An exponent is that of these lengths, not of the limit: every layer also has projections of T·D² "
    "operations, which pull quadratic ones below 2 while T is not far above D, and T×T weights that outgrow the "
    "processor's cache push others above it. Quadratic time is not quadratic memory: a fused kernel "
    "never writes the T×T weights down. And linear does not mean faster: a linear method has to pay its constant back "
    "first.",
    run=run,
    table=table,
    finding=finding,
    draw=draw,
)
