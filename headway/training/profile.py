"""Where the time of a step goes: a window of steps under torch's profiler, as a table and as a trace.

    RUN/profile.txt       the table
    RUN/profile.json.gz   the trace, for ui.perfetto.dev or chrome://tracing

The first steps are left out: they compile, fill caches and find memory. A profile changes no number of the training,
and where it fails, training goes on without it.
"""

from __future__ import annotations

import gzip
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from headway.console import Reporter, uncounted
from headway.files import write_bytes, write_text
from headway.training import device as devices
from headway.training.parts import PREFIX, watching

SKIP = 10  # steps before the window
STEPS = 20  # steps in it
TOP = 20  # operators or kernels that are shown
HEAD = 20  # lines of the table that are said
BESIDE = ("checkpoints", "evaluation")  # parts that come between steps

KINDS = {  # of kernels, by their names; the first that fits
    "attention": r"flash|fmha|attention|attn|sdp",
    "optimizer": r"adam|lerp|(multi_tensor|foreach)(?!.*copyfunctor)",
    "matrix products": r"gemm|gemv|cublas|cutlass|nvjet|xmma|wgmma|matmul|split_?k|triton\w*_b?mm",
    "copies": r"memcpy|memset|cat(array|batched)|^(?!triton).*copy|triton_poi_fused__to_copy(_(cat|slice|t|view))*_\d",
    "norms and pointwise": r"triton|norm|gelu|elementwise|reduce|softmax|pointwise|fill|embedding|index|gather|scatter",
}


class Unprofiled:
    """Looks at nothing: training as usual."""

    def begin(self, stage: str, left: int, device: torch.device) -> None:
        """A stage with `left` steps begins."""

    def after(self, step: int) -> None:
        """The stage's step number `step`, counted from 0, is done."""

    def __enter__(self) -> None:
        """From here on steps come."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """No step of the stage comes any more, for whatever reason."""


class Profile(Unprofiled):
    """Watches a window of steps in the first stage that is long enough to have one behind its first steps, or where
    there is none in the first stage of all."""

    def __init__(self, directory: Path, report: Reporter, stages: Sequence[int]) -> None:
        """`stages`: how many steps each of the stages to come still has."""
        self.directory, self.report = directory, report
        long, any_at_all = ([n for n, left in enumerate(stages) if left > least] for least in (SKIP, 0))
        self.chosen = next(iter(long + any_at_all), None)
        self.number = -1  # of the stage
        self.window = range(0)  # steps since the stage was begun
        self.done = 0  # such steps
        self.profiler: Any = None
        self.open = ExitStack()
        if self.chosen is None:
            self.say("no step is left to look at; profile a new run (--out), or one with more training.steps")

    def say(self, text: str) -> None:
        self.report.say(f"profile: {text}")

    def begin(self, stage: str, left: int, device: torch.device) -> None:
        self.number += 1
        if self.number != self.chosen:
            return
        skip = SKIP if left > SKIP else left // 2
        self.stage, self.device, self.done = stage, device, 0
        self.window = range(skip, min(skip + STEPS, left))
        if skip < SKIP:
            self.say(f"steps left to train: {left}, so few that those looked at are still warming up")
        self.guarded(self.start_if_due)

    def after(self, step: int) -> None:
        self.done += 1
        self.last = step + 1
        self.guarded(self.finish if self.profiler is not None and self.done == self.window.stop else self.start_if_due)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):  # at once
            self.drop()
        elif self.profiler is not None:
            self.guarded(self.finish)
        elif self.done < self.window.start:
            self.say(f"stopped after {self.done} of {self.window.start} steps of warming up; nothing was written")
        self.window = range(0)

    def guarded(self, action: Callable[[], None]) -> None:
        """Training does not end because it was looked at."""
        try:
            action()
        except Exception as error:
            self.drop()
            self.say(f"failed ({type(error).__name__}: {error}); training goes on without it")

    def drop(self) -> None:
        with suppress(Exception):
            self.open.close()
        self.profiler, self.window = None, range(0)

    def start_if_due(self) -> None:
        if not self.window or self.done != self.window.start:
            return
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it writes its own lines between ours
        wait_for(self.device)
        self.open.enter_context(watching())
        self.profiler = self.open.enter_context(torch.profiler.profile(activities=activities))
        self.began = time.perf_counter()

    def finish(self) -> None:
        wait_for(self.device)
        seconds = time.perf_counter() - self.began
        profiler, self.profiler = self.profiler, None
        steps, self.window = self.done - self.window.start, range(0)
        if not steps:
            self.open.close()
            self.say("stopped before the first step to be looked at was done; nothing was written")
            return
        self.report.say("writing the profile …")
        with uncounted():
            self.open.close()
            self.write(profiler, steps, seconds)

    def write(self, profiler: Any, steps: int, seconds: float) -> None:
        """The table and the trace of so many steps, which took so many seconds."""
        first = f"{self.stage}, steps {self.last - steps + 1:,} to {self.last:,}, on {devices.describe(self.device)}"
        lines = [first, devices.describe_machine(), "", *table(profiler, steps, seconds)]
        text, trace = self.directory / "profile.txt", self.directory / "profile.json.gz"
        write_text(text, "\n".join(lines) + "\n")
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder, "profile.json")
            profiler.export_chrome_trace(str(exported))
            write_bytes(trace, gzip.compress(exported.read_bytes(), compresslevel=5))
        self.say(
            "\n  ".join([first, *lines[3:HEAD], "…"])
            + f"\nthe whole table: {text}\nthe trace: {trace}, for ui.perfetto.dev"
        )


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- the table


def table(profiler: Any, steps: int, seconds: float) -> list[str]:
    """What `seconds` of so many steps were spent on, in lines. What came between the steps is shown beside them."""
    parts: dict[str, list[tuple[float, float]]] = {}  # when each began and ended
    for each in profiler.events():
        if each.name.startswith(PREFIX) and each.device_type == DeviceType.CPU:
            parts.setdefault(each.name.removeprefix(PREFIX), []).append((each.time_range.start, each.time_range.end))
    beside = {name: parts.pop(name) for name in BESIDE if name in parts}
    between = [span for spans in beside.values() for span in spans]
    seconds -= covered(between) / 1e6
    events = [each for each in profiler.events() if not begins_in(each, between)]
    kernels = [each for each in events if is_kernel(each)]
    lines = [f"{1e3 * seconds / steps:.2f} ms a step, {steps} steps, {seconds:.2f} s (a profile itself takes time)"]
    lines += [f"not counted, between steps: {name} {covered(spans) / 1e6:.2f} s" for name, spans in beside.items()]
    took = {name: sum(end - begin for begin, end in spans) / 1e6 for name, spans in parts.items()}
    lines += ["", *parts_table(took, steps, seconds, bool(kernels)), ""]
    lines += kernels_table(kernels, steps, seconds) if kernels else operators_table(events, steps, seconds)
    return lines


def begins_in(event: Any, spans: Iterable[tuple[float, float]]) -> bool:
    return any(begin <= event.time_range.start < end for begin, end in spans)


def parts_table(found: dict[str, float], steps: int, seconds: float, on_device: bool) -> list[str]:
    """The seconds of each part, and what is left."""
    found["other: Python, logging, waiting"] = max(0.0, seconds - sum(found.values()))
    lines = [f"{'part of the step':40}{'ms a step':>12}{'share':>9}"]
    for name, time_in in sorted(found.items(), key=lambda pair: -pair[1]):
        lines.append(f"{name:40}{1e3 * time_in / steps:12.3f}{time_in / seconds:9.1%}")
    if on_device:
        lines.append("This is time of the host, which runs ahead of the device.")
    if "replay" in found:
        lines.append(
            "The step is a captured graph: its forward and backward passes and its update show as kernels only."
        )
    return lines


def operators_table(events: Iterable[Any], steps: int, seconds: float) -> list[str]:
    sums = summed((each.name, each.self_cpu_time_total / 1e6) for each in events if not is_range(each))
    return ["operators, each without those it calls:", *top(sums, steps, seconds)]


def kernels_table(kernels: Sequence[Any], steps: int, seconds: float) -> list[str]:
    """How busy the device was, with what kinds of kernels, and with which."""
    times = [(each.name, each.time_range.elapsed_us() / 1e6) for each in kernels]
    busy = covered((each.time_range.start, each.time_range.end) for each in kernels) / 1e6
    return [
        f"the device was busy for {1e3 * busy / steps:.2f} of {1e3 * seconds / steps:.2f} ms a step "
        f"({busy / seconds:.1%})",
        "",
        "kernels by kind:",
        *top(summed((kind_of(name), took) for name, took in times), steps, seconds),
        "",
        "kernels:",
        *top(summed(times), steps, seconds),
    ]


def summed(times: Iterable[tuple[str, float]]) -> list[tuple[str, int, float]]:
    """(name, how many, their sum) of (name, seconds)."""
    sums: dict[str, tuple[int, float]] = {}
    for name, took in times:
        count, total = sums.get(name, (0, 0.0))
        sums[name] = count + 1, total + took
    return [(name, *pair) for name, pair in sums.items()]


def top(rows: Iterable[tuple[str, int, float]], steps: int, seconds: float) -> list[str]:
    """The (name, calls, seconds) that took longest, the longest first."""
    lines = [f"{'name':60}{'calls a step':>13}{'ms a step':>11}{'share':>8}"]
    for name, calls, took in sorted(rows, key=lambda row: -row[2])[:TOP]:
        shown = name if len(name) < 60 else name[:58] + "…"
        lines.append(f"{shown:60}{calls / steps:13,.1f}{1e3 * took / steps:11.3f}{took / seconds:8.1%}")
    return lines


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasts; they may lie over one another."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def is_range(event: Any) -> bool:
    """Whether it is a name for a stretch of time, and no work of its own."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith((PREFIX, "Optimizer."))


def is_kernel(event: Any) -> bool:
    return event.device_type != DeviceType.CPU and not is_range(event)
