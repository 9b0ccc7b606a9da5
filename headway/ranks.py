"""The processes that work on one run together, as `torchrun` starts them.

    with joined() as ranks:
        mine = ranks.share(questions)
        answers = ranks.gather(answer(mine))        # all of them, in order, in every process

A process knows its rank among `size`. One process alone is rank 0 of 1: then every method gives back what it is given,
and no process group exists.
"""

from __future__ import annotations

import os
import platform
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import RunError, UserError

T = TypeVar("T")
PATIENCE = 1800.0  # seconds in which all processes of a run must have been started
WAY = "torchrun sets it: start with torchrun, or unset RANK and WORLD_SIZE to train in one process"
GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "remote process")


@dataclass(frozen=True)
class Ranks:
    """One process among `size`. Every method is called by all of them at the same place."""

    rank: int = 0
    size: int = 1
    local: int = 0  # which process of its machine it is

    @property
    def leads(self) -> bool:
        """Whether this process is the one that writes and speaks."""
        return self.rank == 0

    def part(self, count: int) -> slice:
        """Which of `count` things are this process's: a run of them, of the same length everywhere or one more."""
        return slice(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of them; `gather` puts the parts together again."""
        return items[self.part(len(items))]

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, in the order of the ranks."""
        if self.size == 1:
            return items
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, items)
        return [item for part in parts for item in part]

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def highest(self, number: int) -> int:
        """The highest of all processes' numbers."""
        if self.size == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def led(self, work: Callable[[], T]) -> T:
        """What `work` gives in the process that leads; an error there ends all of them."""
        if self.size == 1:
            return work()
        told: list[Any] = [1]  # the exit code, where there is no result
        try:
            if self.leads:
                told = [(work(),)]
        except BaseException as error:
            told = [code_of(error)]
            raise
        finally:
            dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], int):
            raise SystemExit(told[0])
        return told[0][0]

    def wait(self) -> None:
        """Go on when all processes have come here."""
        self.total(torch.zeros(1))


ALONE = Ranks()


def of_environment() -> Ranks:
    """This process by the variables that torchrun sets; alone where there are none."""
    if not os.environ.get("RANK") or not os.environ.get("WORLD_SIZE"):
        return ALONE
    rank, size = number_in("RANK"), number_in("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK={rank}: must be less than WORLD_SIZE ({size}); {WAY}")
    return Ranks(rank, size, number_in("LOCAL_RANK") if os.environ.get("LOCAL_RANK") else rank)


def number_in(name: str) -> int:
    """The number in a variable of the environment."""
    text = os.environ.get(name, "")
    if not text:
        raise UserError(f"{name}: is not set, although WORLD_SIZE says that there are several processes; {WAY}")
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name}={text}: must be a whole number, 0 or more; {WAY}")
    return int(text)


def job() -> str:
    """What names the call of torchrun that started this process, and stays the same when it restarts; else empty."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if name != "none":
        return name
    parent = os.getppid()  # torchrun itself, which was given no name
    return f"{platform.node()}-{parent}-{start_of(parent)}"


def start_of(process: int) -> str:
    """When it started, in ticks since the machine did; empty where the system does not tell.

    Containers use the same numbers of processes again and again, but never start one of them twice at the same tick.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text("utf-8", errors="replace")
        return fields.rpartition(")")[2].split()[19]  # the 22nd; the second, a name in brackets, may have blanks in it
    return ""


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes of this run, connected: by gloo on CPUs, by NCCL between GPUs. Within another `joined`, the same.

    Where something goes wrong, the first process that fails tells it; the others leave in silence.
    """
    ranks = of_environment()
    if ranks.size == 1 or dist.is_initialized():
        yield ranks
        return
    if not os.environ.get("MASTER_ADDR"):
        raise UserError(f"MASTER_ADDR: is not set, although WORLD_SIZE is {ranks.size}; {WAY}")
    number_in("MASTER_PORT")
    if torch.cuda.is_available() and ranks.local < torch.cuda.device_count():
        torch.cuda.set_device(ranks.local)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    store = fresh(next(dist.rendezvous("env://"))[0], ranks)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)
    try:
        yield ranks
    except Exception as error:
        # the group stays: it would wait for its threads, and these for what the error still holds
        if not is_first(store):
            raise SystemExit(code_of(error)) from None
        if has_lost_another(error):
            raise RunError(
                "another process of this run has ended, and this one cannot go on without it; torchrun names it below. "
                "Go on from the last checkpoint with --resume, or let torchrun do so with --max-restarts"
            ) from error
        raise
    dist.destroy_process_group()


def fresh(store: dist.Store, ranks: Ranks) -> dist.Store:
    """The store, without what earlier lives of the job left in it: torchrun may keep one store for all of them.

    The process that leads names this life, the others answer under that name, and it lists their answers. Whoever took
    the name of an earlier life does not find its answer in the list, and asks again.
    """
    answer = uuid.uuid4().hex
    if ranks.leads:
        store.set("life", answer)
        others = [waited_for(store, f"{answer}/{rank}") for rank in range(1, ranks.size)]
        store.set(f"{answer}/all", " ".join(others))
        return dist.PrefixStore(answer, store)
    while True:
        life = waited_for(store, "life")
        store.set(f"{life}/{ranks.rank}", answer)
        with suppress(RuntimeError):  # not listed in time
            store.wait([f"{life}/all"], timedelta(seconds=1))
            if answer in store.get(f"{life}/all").decode().split():
                return dist.PrefixStore(life, store)
            time.sleep(0.05)


def waited_for(store: dist.Store, key: str) -> str:
    """What another process has put there, once it has. It is looked for now and then: in a wait no signal is heard."""
    deadline = time.monotonic() + PATIENCE
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RunError(f"not all processes of this run have come in {PATIENCE / 60:.0f} minutes; start all of them")
        time.sleep(0.05)
    return store.get(key).decode()


def is_first(store: dist.Store) -> bool:
    """Whether no other process has failed before."""
    try:
        return store.add("failed", 1) == 1
    except RuntimeError:  # whoever kept the store is gone
        return True


def code_of(error: BaseException) -> int:
    """The exit code of a process that ends by this error."""
    return int(getattr(error, "code", 2 if isinstance(error, UserError) else 1))


def has_lost_another(error: BaseException) -> bool:
    """Whether the error says that another process is no longer there."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in GONE)


def leave(code: int) -> NoReturn:
    """End the process. One of several ends at once: threads of torch's that are still there could abort it."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
