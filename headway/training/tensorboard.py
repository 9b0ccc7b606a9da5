"""The record of a run as TensorBoard's events, for those who have it.

    headway.train("world/demo", tensorboard=True)

Every number of a record becomes a scalar called stage/name: training/loss, training/evaluation/accuracy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.console import numbers
from headway.errors import UserError

FLUSH = 5  # seconds after which what was recorded is on disk at the latest


class TensorBoard:
    """A `watch` for training that writes events into `directory`; to be closed, or used by `with`.

    The directory is made with the first record, when the run has its own. In a run that is resumed at an earlier step,
    the events of an earlier attempt from there on no longer count.
    """

    def __init__(self, directory: Path) -> None:
        self.directory, self.make = directory, summary_writer()
        self.writer: Any = None

    def __call__(self, record: dict[str, Any]) -> None:
        step = record["step"]
        if self.writer is None:
            self.writer = self.make(str(self.directory), purge_step=step, flush_secs=FLUSH)
        for name, value in numbers(record).items():
            if name != "step":
                self.writer.add_scalar(f"{record['stage']}/{name}", value, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def summary_writer() -> Any:
    """TensorBoard's own writer, where it is installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError(
            "--tensorboard: TensorBoard is not installed; get it with: pip install tensorboard, "
            "or leave the option out: headway watch RUN shows the curves too"
        ) from None
    return SummaryWriter
