"""The work on a block of text: read it, cut it into tokens; in this process or in several others.

A worker needs nothing but the block, so that blocks may be done in any order by any process. Processes are spawned, not
forked: they hold a tokenizer and little else (no torch), and end when the one that started them does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import ensure_running
from typing import Any

import numpy as np

from headway.errors import STOPS, TextError
from headway.text.preparation.blocks import Block, Misread, Reading, texts_of
from headway.text.shards import token_dtype
from headway.text.tokenizers import BPE, MASK, PAD, Characters, Tokenizer


@dataclass
class Encoded:
    """A block's tokens as bytes, each document with a mask mark in front; `starts` says where they begin, after it."""

    tokens: bytes
    starts: np.ndarray
    notes: Counter[str]


class Worker:
    def __init__(self, reading: Reading, tokenizer: Tokenizer | None, specials: bool = True) -> None:
        """`specials` says whether the signs of special tokens may stand in a text."""
        self.reading, self.specials, self.given = reading, specials, tokenizer
        if tokenizer is None:
            return
        self.lead = tokenizer.lead
        dtype = token_dtype(len(tokenizer))
        self.width, self.mark = dtype.itemsize, np.array([tokenizer.mask], dtype).tobytes()
        if isinstance(tokenizer, BPE) and tokenizer.by_words:
            self.ids = tokenizer.lookup(dtype).encode
        else:
            self.ids = lambda text: tokenizer.encode_array(text).astype(dtype).tobytes()

    def __reduce__(self) -> Any:
        """How it gets to another process: as its settings, from which it is built anew."""
        given = None if self.given is None else self.given.to_json()
        return rebuilt, (self.reading, given, self.specials)

    def encode(self, block: Block) -> Encoded:
        found = texts_of(block, self.reading)
        parts: list[bytes] = []
        starts: list[int] = []
        size = 0
        for line, text in zip(found.lines, found.texts, strict=True):
            goes_on = found.continues and not parts
            try:
                ids = self.ids(text if goes_on else self.lead + text)
            except TextError:
                refuse(text, line, block, self.ids)  # which it is without the lead, too, that would be counted
                raise
            if not goes_on:
                parts.append(self.mark)
                size += 1
                starts.append(size)
            parts.append(ids)
            size += len(ids) // self.width
        return Encoded(b"".join(parts), np.array(starts, dtype=np.int64), found.notes)

    def characters(self, block: Block) -> str:
        """Every character of the block once."""
        found = texts_of(block, self.reading)
        seen = set().union(*found.texts)
        if not self.specials and seen & {PAD, MASK}:
            for line, text in zip(found.lines, found.texts, strict=True):
                refuse(text, line, block, lambda text: Characters.train([text, "\n"]))
        return "".join(seen)


def refuse(text: str, line: int, block: Block, use: Callable[[str], Any]) -> None:
    """Raise Misread with the line and character where `use` refuses a text of a block."""
    for number, part in enumerate(text.split("\n") if block.form == "file" else [text], line):
        try:
            use(part)
        except TextError as error:
            inside = block.place.continues and not number
            begin = f" (characters are counted from byte {block.place.begin:,} on)" if inside else ""
            raise Misread(number, f"{error}{begin}") from None


def rebuilt(reading: Reading, tokenizer: dict[str, Any] | None, specials: bool) -> Worker:
    return Worker(reading, None if tokenizer is None else Tokenizer.from_json(tokenizer), specials)


Job = Callable[[Block], Any]
Batch = list[Block]


@contextmanager
def workers(count: int, worker: Worker) -> Iterator[Callable[[Job, Batch], Future[list[Any]]]]:
    """A function that gives a batch to the next free process, or does the work at once where there is one worker."""
    if count == 1:
        yield at_once
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=start, initargs=(worker,))
    ensure_running()  # which would let signals through in the middle of `held`

    def submit(job: Job, batch: Batch) -> Future[list[Any]]:
        with held(LEFT_TO_PARENT):  # it may start a process
            return pool.submit(call, job.__name__, batch)

    try:
        yield submit
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def held(numbers: Collection[int]) -> Iterator[None]:
    """Signals wait until this is left; to a process that is started within it they wait until it is ready for them."""
    if hasattr(signal, "pthread_sigmask"):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    else:
        yield


def at_once(job: Job, batch: Batch) -> Future[list[Any]]:
    future: Future[list[Any]] = Future()
    try:
        future.set_result(each(job, batch))
    except Exception as error:
        future.set_exception(error)
    return future


def each(job: Job, batch: Batch) -> list[Any]:
    """What `job` makes of every block, None of the end of a file; the last one is a Misread where it was refused."""
    made: list[Any] = []
    for block in batch:
        try:
            made.append(None if block.data is None else job(block))
        except Misread as problem:
            return [*made, problem]
    return made


LEFT_TO_PARENT = [number for number in STOPS if number != signal.SIGTERM]
HERE: list[Worker] = []  # in a worker process: what it works with


def start(worker: Worker) -> None:
    """A worker leaves Ctrl-C and a closed terminal to the process that started it, and ends when that one does, however
    it ended. SIGTERM ends it: so is a pool cleared away of which another worker was killed."""
    for number in LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEFT_TO_PARENT)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    HERE[:] = [worker]
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=leave_with, args=(parent,), daemon=True).start()


def leave_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def call(job: str, batch: Batch) -> list[Any]:
    return each(getattr(HERE[0], job), batch)
