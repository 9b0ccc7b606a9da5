"""The laboratory: run experiments on attention, show what they found, write pictures and one page.

`headway lab` lists them, `headway lab NAME …` runs some, `headway lab --all` runs all and writes `index.html`.
"""

from __future__ import annotations

import io
import re
import tempfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from headway.console import Reporter, program
from headway.errors import RunError, UserError, nearest
from headway.files import write_output
from headway.inspection.experiments import EXPERIMENTS, Experiment
from headway.inspection.experiments.base import GREY, one_thread
from headway.report.page import page, table
from headway.training.device import describe_machine

PAGE = "index.html"
INK, PAPER = "#1d2330", "#fefefe"  # of the pictures; on the page they give way to the reader's theme
LOOK: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "legend.fontsize": 9,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.framealpha": 0.85,
    "legend.edgecolor": GREY,
    "grid.color": GREY,
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), PAPER),
}


@dataclass
class Outcome:
    """An experiment with what it found and its picture."""

    experiment: Experiment[Any]
    result: Any
    png: bytes
    svg: str
    seconds: float


def lab_command(names: Sequence[str], everything: bool, out: Path, seed: int, report: Reporter) -> None:
    """List, run some, or run all."""
    if everything and names:
        raise UserError(f"--all runs every experiment: leave out {' '.join(names)}, or leave out --all")
    for name in names:
        if name not in EXPERIMENTS:
            raise UserError(f"no experiment '{name}'{nearest(name, EXPERIMENTS)}")
    if everything:
        run_all(EXPERIMENTS.values(), out, seed, report)
    elif names:
        run_some([EXPERIMENTS[name] for name in dict.fromkeys(names)], out, seed)
    else:
        print(listing(EXPERIMENTS.values()))


def listing(experiments: Iterable[Experiment[Any]]) -> str:
    """Names with a line each."""
    lines = [f"{experiment.name:22} {experiment.summary}" for experiment in experiments]
    return "\n".join([*lines, "", f"run some: {program()} lab NAME …    run all, with a page: {program()} lab --all"])


def run_some(experiments: Sequence[Experiment[Any]], out: Path, seed: int) -> None:
    """Run these; print a table and a sentence for each, and where its picture is."""
    claim(out, picture_names(experiments))
    for number, experiment in enumerate(experiments):
        outcome = perform(experiment, seed)
        paths = write_pictures(outcome, out)
        print("\n" * (number > 0) + f"{experiment.name}: {experiment.summary}\n")
        print(experiment.table(outcome.result).text())
        print("\n" + textwrap.fill(experiment.finding(outcome.result), 118))
        print(f"picture: {' and '.join(map(str, paths))}", flush=True)


def run_all(experiments: Iterable[Experiment[Any]], out: Path, seed: int, report: Reporter) -> Path:
    """Run all, one line of progress each; write the pictures and the page, and return the page's path."""
    experiments = list(experiments)
    claim(out, [PAGE, *picture_names(experiments)])
    began = time.monotonic()
    outcomes = []
    for number, experiment in enumerate(experiments, 1):
        report.say(f"{number}/{len(experiments)} {experiment.name}")
        outcomes.append(perform(experiment, seed))
        write_pictures(outcomes[-1], out)
        print(textwrap.fill(f"{experiment.name}: {experiment.finding(outcomes[-1].result)}", 118), flush=True)
    path = out / PAGE
    write_output(path, lab_page(outcomes, seed))
    print(f"\n{len(outcomes)} experiments in {time.monotonic() - began:.0f} s; all of them on one page: {path}")
    return path


def claim(out: Path, names: Iterable[str]) -> None:
    """Make the directory and see that files of these names can be written, before any work is done."""
    try:
        if out.exists() and not out.is_dir():
            raise RunError(f"{out}: is a file; choose a directory with --out")
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        for name in names:
            if (out / name).is_dir():
                raise RunError(
                    f"{out / name}: is a directory, and a file is to go there; move it or choose another --out"
                )
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror}); choose another directory with --out") from None


def picture_names(experiments: Iterable[Experiment[Any]]) -> list[str]:
    return [f"{experiment.name}{suffix}" for experiment in experiments for suffix in (".png", ".svg")]


def perform(experiment: Experiment[Any], seed: int) -> Outcome:
    began = time.monotonic()
    with one_thread():
        result = experiment.run(seed=seed)
    seconds = time.monotonic() - began
    return Outcome(experiment, result, *pictures(experiment, result), seconds)


def pictures(experiment: Experiment[Any], result: Any) -> tuple[bytes, str]:
    """The experiment's picture as PNG and as SVG."""
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    png, svg = io.BytesIO(), io.StringIO()
    with style.context(["default", {**LOOK, "svg.hashsalt": experiment.name}]):
        figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        experiment.draw(result, figure)
        figure.savefig(png, format="png")
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    return in_256_colours(png), svg.getvalue()


def in_256_colours(picture: io.BytesIO) -> bytes:
    """A file a third of the size, and no difference that an eye could see."""
    from PIL import Image

    small = io.BytesIO()
    method, dither = Image.Quantize.MAXCOVERAGE, Image.Dither.NONE
    Image.open(picture).convert("RGB").quantize(256, method, dither=dither).save(small, "PNG", optimize=True)
    return small.getvalue()


def write_pictures(outcome: Outcome, out: Path) -> tuple[Path, Path]:
    png, svg = (out / name for name in picture_names([outcome.experiment]))
    write_output(png, outcome.png)
    write_output(svg, outcome.svg)
    return png, svg


def lab_page(outcomes: Sequence[Outcome], seed: int) -> str:
    """One page that holds every experiment: question, finding, picture, table and explanation, after the contents."""
    contents = "".join(
        f'<li><a href="#{outcome.experiment.name}">{outcome.experiment.name}</a> '
        f'<span class="soft">{escape(outcome.experiment.summary)}</span></li>'
        for outcome in outcomes
    )
    total = sum(outcome.seconds for outcome in outcomes)
    return page(
        "Headway: experiments on attention",
        [
            STYLE,
            "<h1>Experiments on attention</h1>",
            f"<p>{len(outcomes)} small computations, each with a question, a picture and the numbers behind it. "
            "Shapes: B batch, T queries, S keys, D or d width, H heads, K head width.</p>",
            f"<nav><ol>{contents}</ol></nav>",
            *map(section, outcomes),
            "<h2>How it was made</h2>",
            f'<p class="soft"><code>headway lab --all --seed {seed}</code> in {total:.0f} s on '
            f"{escape(describe_machine())}. Each picture lies beside this page as .png and .svg.</p>",
        ],
    )


STYLE = """<style>
a { color: var(--one); } nav li { margin: .15rem 0; }
section { border-top: 1px solid var(--line); margin-top: 2.4rem; } section h2 { margin-top: 1.2rem; }
section svg { width: 100%; height: auto; min-width: 38rem; max-width: 60rem; } section .scroll { margin: .8rem 0; }
@media (max-width: 40rem) { section svg { min-width: 0; } section td { white-space: normal; padding-right: .6rem; } }
section td { padding: .2rem 1.2rem .2rem 0; white-space: nowrap; }
section th { text-align: right; } section th:first-child { text-align: left; }
.finding { font-weight: 600; }
</style>"""


def section(outcome: Outcome) -> str:
    experiment = outcome.experiment
    shown = experiment.table(outcome.result)
    parts = [
        f'<section id="{experiment.name}"><h2>{experiment.name}</h2>',
        f"<p>{escape(experiment.question)}</p>",
        f'<p class="finding">{escape(experiment.finding(outcome.result))}</p>',
        f'<div class="scroll">{inline(outcome.svg, experiment.name)}</div>',
        f"<p><strong>What to see.</strong> {escape(experiment.look)}</p>",
        table(
            [escape(cell) for cell in shown.header],
            [[escape(cell) for cell in row] for row in shown.rows],
            numbers=range(1, len(shown.header)),
        ),
        f"<p><strong>Where explanations go wrong.</strong> {escape(experiment.beware)}</p>",
        f'<p class="soft">{outcome.seconds:.1f} s; <code>headway lab {experiment.name}</code></p></section>',
    ]
    return "\n".join(parts)


def inline(svg: str, name: str) -> str:
    """The picture as a part of the page: names of its own, and the page's colours for ink and paper."""
    drawing = svg[svg.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", drawing)
    drawing = drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(name)}" ', 1)
    return drawing.replace(INK, "currentColor").replace(PAPER, "var(--paper)")
