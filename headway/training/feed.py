"""The batches of a captured step: made many steps at a time and ahead of them, in a thread and a CUDA stream apart.

They are made on the GPU where the data of the tasks fit there, else on the host; the rows are the same.

Shapes: B rows, N steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.memory import is_out_of_memory
from headway.tasks.base import IGNORE, Batch, Task
from headway.training.streams import Stream, by_length

CPU = torch.device("cpu")
AHEAD = 32  # steps whose batches are made at once
PLACES = ("auto", "device", "host")
ROOM = 4  # the data may take one part in so many of the GPU's free memory


def choose_place(streams: Sequence[Stream], device: torch.device, wanted: str) -> tuple[bool, str]:
    """(whether a captured step's rows are made on the device, and the same in words with the reason)."""
    if wanted != "auto":
        return wanted == "device", f"rows made on the {'GPU' if wanted == 'device' else 'host'}, as asked"
    if any(stream.task.on_disk for stream in streams):
        return False, "rows made on the host, as their data stay on disk"
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, and not given back
    size, free = sum(stream.task.nbytes for stream in streams), torch.cuda.mem_get_info(device)[0] + unused
    if size > free // ROOM:
        return False, f"rows made on the host, as their data ({size / 1e9:.1f} GB) are much for {free / 1e9:.1f} GB"
    return True, f"rows made on the GPU, where their data ({size / 1e6:.1f} MB) fit"


@dataclass
class Made:
    """The rows of one stream in N steps."""

    parts: list[Tensor]  # (N, B, …): the targets, and what the model is given
    tokens: list[int]  # (N,) inputs that are not padding
    ready: torch.cuda.Event


class Feed:
    """Has the rows of every step at hand when it comes. Where there is no memory to make them on the device, they are
    made on the host from then on, and that is said."""

    def __init__(self, device: torch.device, on_device: bool, say: Callable[[str], None]) -> None:
        self.device, self.say = device, say
        self.place = device if on_device else CPU
        self.tasks: dict[str, Task] = {}  # with their data where rows are made
        self.side = torch.cuda.Stream()
        self.worker = ThreadPoolExecutor(1, "batches")
        self.coming: dict[int, Future[list[Made]]] = {}  # by first step

    def forget(self) -> None:
        """Drop what was made ahead, when other streams take part from now on."""
        self.wait()
        self.coming.clear()

    def wait(self) -> None:
        """What is being made is ready when this returns."""
        for future in self.coming.values():
            future.result()

    def fill(self, step: int, active: Sequence[Stream], places: Sequence[list[Tensor]]) -> int:
        """Put each stream's rows of `step` into its places; returns how many of the inputs are not padding."""
        first = step - step % AHEAD
        for begin in (first, first + AHEAD):
            if begin not in self.coming:
                self.coming = {key: value for key, value in self.coming.items() if key >= first}
                self.coming[begin] = self.worker.submit(self.make, begin, active)
        main = torch.cuda.current_stream()
        tokens = 0
        for made, there in zip(self.coming[first].result(), places, strict=True):
            main.wait_event(made.ready)
            for place, part in zip(there, made.parts, strict=True):
                place[:, : part.shape[-1]].copy_(part[step - first])  # the columns behind stay padding
                part.record_stream(main)
            tokens += made.tokens[step - first]
        return tokens

    def make(self, first: int, active: Sequence[Stream]) -> list[Made]:
        """For each active stream, in the order of the buffers, its rows in the steps from `first` on."""
        with torch.cuda.stream(self.side):
            return [self.make_stream(stream, first) for group in by_length(active) for stream in group]

    def nothing(self, stream: Stream) -> Made:
        """Rows that teach nothing, for steps that will not come."""
        task = stream.task
        widths = [task.width, task.width, *([task.source_width] if task.source_width else [])]
        parts = [torch.zeros(AHEAD, stream.rows, each, dtype=torch.long, device=self.device) for each in widths]
        parts[0].fill_(IGNORE)
        ready = torch.cuda.Event()
        ready.record()
        return Made(parts, [0] * AHEAD, ready)

    def make_stream(self, stream: Stream, first: int) -> Made:
        steps = [step for step in range(first, first + AHEAD) if stream.takes_part(step)]
        if not steps:
            return self.nothing(stream)
        drawn = [stream.draw(step) for step in steps]
        sizes = [len(rows) for rows, _ in drawn]
        rows, noise = torch.cat([rows for rows, _ in drawn]), torch.cat([noise for _, noise in drawn], -1)
        batch = self.rows_of(stream, rows, noise)
        made = self.nothing(stream)
        counts = torch.zeros(AHEAD, dtype=torch.long, device=self.device)
        split = (part.split(sizes) for part in (batch.lengths, batch.targets, *batch.given))
        for step, lengths, *parts in zip(steps, *split, strict=True):
            for place, part in zip(made.parts, parts, strict=True):
                place[step - first, : len(part), : part.shape[1]] = part
            counts[step - first] = lengths.sum()
        made.tokens = counts.tolist()
        made.ready.record()
        return made

    def rows_of(self, stream: Stream, rows: Tensor, noise: Tensor) -> Batch:
        """The rows on the device, wherever they are made."""
        while True:
            try:
                if stream.name not in self.tasks:
                    self.tasks[stream.name] = stream.task.on(self.place)
                batch = self.tasks[stream.name].make(rows.to(self.place), noise.to(self.place))
                return batch.to(self.device)
            except (MemoryError, RuntimeError) as error:
                if self.place == CPU or not is_out_of_memory(error):
                    raise
            self.place, self.tasks = CPU, {}
            torch.cuda.empty_cache()  # out here, where nothing of the attempt is held any more
            self.say("the GPU has no memory to make rows in: they are made on the host instead (training.batches)")
