"""Several runs side by side: a table for the terminal, a plot for the eye.

Of runs that translate there is more to see: BLEU and chrF on a split, and BLEU by the length of the source.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.console import clock, scores
from headway.errors import UserError
from headway.files import write_output
from headway.run import Run

FORMATS = (".png", ".svg", ".pdf")
TITLES = {"bleu": "BLEU"}
Scores = Mapping[Path, dict[str, Any]]  # of the runs that translate, by their paths


def comparison_table(runs: Sequence[Run], split: str = "dev", scored: Scores | None = None) -> str:
    """One row a run: what it is, how long it trained, how good it is; where runs translate, how good on `split`."""
    scored = scored or {}
    header = ["run", "task", "parameters", "steps", "time", "tokens", "dev"]
    header += [f"{split} BLEU", f"{split} chrF"] if scored else []
    rows = []
    for run in runs:
        shown = [score for score in scores(run.evaluation) if run.path not in scored or score.startswith("loss")]
        best = f" (step {run.step:,})" if run.step != run.state.step else ""
        row = [
            str(run.path),
            run.settings.task.name,
            f"{run.parameters:,}",
            f"{run.state.step:,}",
            clock(run.state.seconds),
            f"{run.state.tokens:,}",
            shown[0] + best if shown else "–",
        ]
        found = scored.get(run.path, {})
        rows.append(row + [f"{found[name]:.1f}" if name in found else "–" for name in ("bleu", "chrf") if scored])
    return text_table(header, rows)


def length_table(split: str, scored: Scores) -> str:
    """BLEU by the length of the source, one row a run."""
    names = length_names(scored)
    rows = []
    for path, found in scored.items():
        bleu = {each["name"]: f"{each['bleu']:.1f}" for each in found.get("by_length", ())}
        rows.append([str(path), *(bleu.get(name, "–") for name in names)])
    return text_table([f"{split} BLEU by {units(scored)} of the source", *names], rows)


def units(scored: Scores) -> str:
    """What lengths are counted in; in all runs the same, unless they read different languages."""
    return " or ".join(sorted({found.get("length_in", "words") for found in scored.values()}, reverse=True))


def length_names(scored: Scores) -> list[str]:
    """The lengths that any run was scored on, the shortest first."""
    lows = {each["name"]: each["low"] for found in scored.values() for each in found.get("by_length", ())}
    return sorted(lows, key=lambda name: lows[name])


def text_table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def require_format(out: Path) -> None:
    if out.suffix not in FORMATS:
        raise UserError(f"--out {out}: a plot ends in {', '.join(FORMATS)}")


def plot_comparison(runs: Sequence[Run], out: Path, split: str = "dev", scored: Scores | None = None) -> None:
    """Training loss and dev score against steps, one line a run, with a panel for each kind of score.

    Of runs that translate there is BLEU by the length of the source besides.
    """
    scored = scored or {}
    require_format(out)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    metrics = list(dict.fromkeys(run.task.metric for run in runs))
    count = 1 + len(metrics) + bool(scored)
    picture, (losses, *panels) = pyplot.subplots(1, count, figsize=(5 * count, 4), layout="constrained")
    for run in runs:
        points = [(record["step"], record["loss"]) for record in run.metrics if "loss" in record]
        draw(losses, run, points, linewidth=1.2)
    losses.set(xlabel="step", ylabel="training loss a token", yscale="log")
    losses.yaxis.set_major_formatter("{x:g}")  # 0.1 and 6, not 10⁻¹ and 6 × 10⁰
    low, high = losses.get_ylim()
    losses.yaxis.set_minor_locator(ticker.LogLocator(subs=(2, 3, 5)))
    losses.yaxis.set_minor_formatter("{x:g}" if high < 100 * low else ticker.NullFormatter())  # else they crowd
    for metric, axes in zip(metrics, panels, strict=False):
        for run in runs:
            draw(axes, run, score_curve(run) if run.task.metric == metric else [], marker="o")
        axes.set(xlabel="step", ylabel=f"dev {TITLES.get(metric, metric)}")
    if scored:
        names = length_names(scored)
        for run in runs:
            buckets = scored.get(run.path, {}).get("by_length", ())
            draw(panels[-1], run, [(names.index(each["name"]), each["bleu"]) for each in buckets], marker="o")
        panels[-1].set(xlabel=f"{units(scored)} of the source", ylabel=f"{split} BLEU", ylim=(0, None))
        panels[-1].set_xticks(range(len(names)), names)
    for axes in (losses, *panels):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    buffer = io.BytesIO()
    picture.savefig(buffer, format=out.suffix.removeprefix("."), dpi=150)
    pyplot.close(picture)
    write_output(out, buffer.getvalue())


def score_curve(run: Run) -> list[tuple[int, float]]:
    """(step, dev score) of each evaluation."""
    metric = run.task.metric
    return [
        (record["step"], record["evaluation"][metric])
        for record in run.metrics
        if record.get("stage") == "training" and metric in record.get("evaluation", {})
    ]


def draw(axes: Any, run: Run, points: Sequence[tuple[int, float]], **style: Any) -> None:
    """A line in the run's own colour, which is the same in every panel."""
    axes.plot(*(zip(*points, strict=True) if points else ([], [])), label=legend_name(run) if points else None, **style)


def legend_name(run: Run) -> str:
    """The path of a run as a legend shows it: a dollar begins no formula there, and a leading _ does not hide it."""
    name = str(run.path).replace("$", r"\$")
    return f"./{name}" if name.startswith("_") else name
