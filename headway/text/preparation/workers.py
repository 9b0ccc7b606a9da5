"""The work on a block of text: read it, cut it into tokens; in this process or in several others.

A worker needs nothing but the block, so that blocks may be done in any order by any process. Processes are spawned, not
forked: they hold a tokenizer and little else (no torch), and end when the one that started them does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
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
            except TextError as error:
                raise Misread(line, str(error)) from None
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
                try:
                    Characters.train([text, "\n"])
                except TextError as error:
                    raise Misread(line, str(error)) from None
        return "".join(seen)


def rebuilt(reading: Reading, tokenizer: dict[str, Any] | None, specials: bool) -> Worker:
    return Worker(reading, None if tokenizer is None else Tokenizer.from_json(tokenizer), specials)


@contextmanager
def workers(count: int, worker: Worker) -> Iterator[Callable[[Callable[[Block], Any], Block], Future[Any]]]:
    """A function that gives a block to the next free process, or does the work at once where there is one worker."""
    if count == 1:
        yield at_once
        return
    pool = ProcessPoolExecutor(count, get_context("spawn"), initializer=start, initargs=(worker,))
    try:
        yield lambda job, block: pool.submit(call, job.__name__, block)
    finally:
        pool.shutdown(cancel_futures=True)


def at_once(job: Callable[[Block], Any], block: Block) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(job(block))
    except Exception as error:
        future.set_exception(error)
    return future


HERE: list[Worker] = []  # in a worker process: what it works with


def start(worker: Worker) -> None:
    """A worker leaves Ctrl-C and a closed terminal to the process that started it, and ends when that one does, however
    it ended. SIGTERM ends it: so is a pool cleared away of which another worker was killed."""
    for number in STOPS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    HERE[:] = [worker]
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=leave_with, args=(parent,), daemon=True).start()


def leave_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def call(job: str, block: Block) -> Any:
    return getattr(HERE[0], job)(block)
