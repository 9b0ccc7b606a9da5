"""Several runs side by side: a table for the terminal, a plot for the eye."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headway.console import clock, scores
from headway.errors import UserError
from headway.files import write_bytes
from headway.run import Run

FORMATS = (".png", ".svg", ".pdf")


def comparison_table(runs: Sequence[Run]) -> str:
    """One row a run: what it is, how long it trained, how good it is."""
    header = ["run", "task", "parameters", "steps", "time", "tokens", "dev"]
    rows = [
        [
            str(run.path),
            run.settings.task.name,
            f"{run.parameters:,}",
            f"{run.state.step:,}",
            clock(run.state.seconds),
            f"{run.state.tokens:,}",
            (scores(run.evaluation) or ["–"])[0],
        ]
        for run in runs
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def plot_comparison(runs: Sequence[Run], out: Path) -> None:
    """Training loss against steps, and the dev score against steps, one line a run."""
    if out.suffix not in FORMATS:
        raise UserError(f"--out {out}: a plot ends in {', '.join(FORMATS)}")
    import io

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for run in runs:
        metrics = run.metrics
        losses = [(record["step"], record["loss"]) for record in metrics if "loss" in record]
        if losses:
            left.plot(*zip(*losses, strict=True), label=str(run.path), linewidth=1.2)
        metric = run.task.metric
        points = [
            (record["step"], record["evaluation"][metric])
            for record in metrics
            if record.get("stage") == "training" and metric in record.get("evaluation", {})
        ]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=f"{run.path}: {metric}")
    left.set(xlabel="step", ylabel="training loss a token", yscale="log")
    right.set(xlabel="step", ylabel="dev score")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend(fontsize=8)
    buffer = io.BytesIO()
    picture.savefig(buffer, format=out.suffix.removeprefix("."), dpi=150)
    pyplot.close(picture)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(out, buffer.getvalue())
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
