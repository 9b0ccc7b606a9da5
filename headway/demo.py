"""The demonstration: the whole road on the embedded world, in a few minutes on two cores.

Two models are trained on the same questions, one from scratch and one after reading the world's biographies. Both are
asked about people whose questions neither has seen.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from headway.configuration import RunSettings, load_settings
from headway.console import Reporter, clock, program
from headway.data.world import World, make_world, world_files, write_world
from headway.errors import RunError
from headway.files import Ownership, clear_temporaries, write_json, write_output
from headway.inspection import capture_attention
from headway.making import train
from headway.report.charts import Series, bar, heat_map, line_chart
from headway.report.page import figure, page, table
from headway.run import Run
from headway.tasks import Answer
from headway.training.device import describe_machine

RECIPE = "world/demo"
MARK = "demo.json"
WITHOUT, WITH = "without pretraining", "with pretraining"
NAMES = {"from-scratch": WITHOUT, "pretrained": WITH}  # of the runs, by their folders


@dataclass
class Score:
    """One row of the comparison."""

    name: str
    dev: float
    test: float
    seconds: float


def run_demo(out: Path | None, seed: int, sets: list[str], report: Reporter) -> Path:
    """Train, compare, ask, report; returns the report's path. One that was interrupted goes on where it stopped."""
    directory = choose_directory(out)
    with claim(directory):
        clear_temporaries(directory)
        require_unfinished(directory)  # the one who had it until now may have come to its end
        return demonstrate(directory, seed, sets, report)


def demonstrate(out: Path, seed: int, sets: list[str], report: Reporter) -> Path:
    world = make_world()
    plans = {
        "from-scratch": plan(out, seed, [*sets, "pretraining.training.steps=0"]),
        "pretrained": plan(out, seed, sets),
    }
    make_room(out, world, plans)
    runs = {
        NAMES[part]: train(settings, out / part, resume=(out / part / "run.toml").exists(), report=report)
        for part, settings in plans.items()
    }
    pretrained = runs[WITH]
    scores = score_all(runs)
    print(f"\n{score_table(scores)}\n")
    answers = ask(pretrained, world)
    for answer, truth in answers:
        print(describe(answer, truth))
    path = out / "report.html"
    write_output(path, report_page(world, runs, scores, answers, seed))
    again = f'{program()} predict {pretrained.path} "{world.test[-1].question}"'
    print(f"\nreport: {path}\nask it yourself: {again}")
    return path


def choose_directory(out: Path | None) -> Path:
    """The directory that was asked for, else runs/demo, or runs/demo-2 and so on where a finished one stands."""
    if out is not None:
        return out
    names = ("demo" if number == 1 else f"demo-{number}" for number in range(1, 10_000))
    return next(Path("runs", name) for name in names if not (Path("runs", name) / "report.html").exists())


def claim(out: Path) -> Ownership:
    """The directory, made if it is not there; to be entered as its owner."""
    try:
        if out.exists() and not out.is_dir():
            raise RunError(f"{out}: is a file; choose a directory with --out")
        require_unfinished(out)
        if out.is_dir() and not {path.name for path in out.iterdir()} <= {".lock"} and not (out / MARK).exists():
            raise RunError(f"{out}: exists and is no demonstration; choose another directory with --out")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{out}: cannot be written ({error.strerror}); choose another directory with --out") from None
    return Ownership(out)


def require_unfinished(out: Path) -> None:
    if (out / "report.html").exists():
        raise RunError(f"{out}: a finished demonstration stands there; choose another directory with --out")


def plan(out: Path, seed: int, sets: list[str]) -> RunSettings:
    """The settings of one of the two runs."""
    world = (out / "world").absolute()
    files = {
        "pretraining.task.corpus": "wiki.txt",
        "task.corpus": "wiki.txt",
        "task.questions": "birth_places_train.tsv",
        "task.dev": "birth_dev.tsv",
        "task.test": "birth_test.tsv",
    }
    seeds = [f"{stage}.seed={seed}" for stage in ("pretraining.training", "training")]
    return load_settings(RECIPE, [*(f"{key}={world / file}" for key, file in files.items()), *seeds, *sets])


def make_room(out: Path, world: World, plans: dict[str, RunSettings]) -> None:
    """Write the world. What an earlier demonstration left stays if it had the same world and the same settings."""
    texts = "".join(world_files(world).values())
    mark = {
        "world": hashlib.sha256(texts.encode("utf-8")).hexdigest(),
        "runs": {part: settings.to_toml() for part, settings in plans.items()},
    }
    if read_mark(out) != mark:
        write_json(out / MARK, {})  # what is left if this is interrupted is no demonstration to go on with
        for part in (*plans, "world"):
            shutil.rmtree(out / part, ignore_errors=True)
        write_json(out / MARK, mark)
    write_world(world, out / "world")


def read_mark(out: Path) -> Any:
    """What the demonstration in `out` was made of; None where that cannot be told."""
    try:
        return json.loads((out / MARK).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def score_all(runs: dict[str, Run]) -> list[Score]:
    first = next(iter(runs.values()))
    answer, dev = first.task.baseline("dev")
    scores = [Score(f"always “{answer}”, the commonest answer", dev, first.task.baseline("test")[1], 0.0)]
    for name, run in runs.items():
        dev, test = (run.evaluate(split)["accuracy"] for split in ("dev", "test"))
        scores.append(Score(name, dev, test, run.state.seconds))
    return scores


def score_table(scores: list[Score]) -> str:
    width = max(len(score.name) for score in scores)
    lines = [f"{'':{width}}  {'dev':>6}  {'test':>6}  trained"]
    for score in scores:
        lines.append(f"{score.name:{width}}  {score.dev:6.1%}  {score.test:6.1%}  {clock(score.seconds):>7}")
    return "\n".join(lines)


def ask(run: Run, world: World) -> list[tuple[Answer, str | None]]:
    """Four people with a biography and no training question, and one without either: (answer, truth or None)."""
    people = [*world.test[:4], world.unseen[0]] if world.unseen else world.test[:5]
    answers = run.answer([person.question for person in people])
    truths = [person.birthplace if person not in world.unseen else None for person in people]
    return list(zip(answers, truths, strict=True))


def describe(answer: Answer, truth: str | None) -> str:
    if truth is None:
        verdict = "a guess: no text mentions this person"
    else:
        verdict = "right" if answer.text == truth else f"wrong, it is {truth}"
    others = ", ".join(f"{text} {percent(share)}" for text, share in answer.alternatives)
    return f"{answer.question}\n    {answer.text}  {answer.probability:.0%}  ({verdict}; else {others})"


def report_page(
    world: World,
    runs: dict[str, Run],
    scores: list[Score],
    answers: list[tuple[Answer, str | None]],
    seed: int,
) -> str:
    run = runs[WITH]
    settings = world.settings
    sizes = [len(part) for part in (world.train, world.dev, world.test)]
    return page(
        "Headway: the demonstration",
        [
            "<h1>Reading makes the difference</h1>",
            f"<p>An invented world of {sum(sizes)} people: each has {settings.phrasings} short biographies, and "
            f"{sizes[0]} of them come with a training question. Two models of {run.parameters:,} parameters were "
            f"trained on those questions, one of them after reading the biographies, and then asked where the "
            f"other {sizes[1]} (dev) and {sizes[2]} (test) people were born.</p>",
            "<h2>Right answers</h2>",
            table(
                ["", "dev", "", "test", "training time"],
                [
                    [
                        escape(score.name),
                        f"{score.dev:.1%}",
                        bar(score.dev),
                        f"{score.test:.1%}",
                        clock(score.seconds),
                    ]
                    for score in scores
                ],
                numbers=(1, 3, 4),
            ),
            "<h2>Five questions</h2>",
            table(
                ["question", "answer", "probability", "", "truth", "it might have said"],
                [answer_row(answer, truth) for answer, truth in answers],
                numbers=(2,),
            ),
            f"<p class='soft'>{sureness(run, world)} "
            "A probability says how sure the model is, not whether it is right.</p>",
            "<h2>Loss</h2>",
            f'<div class="row">{loss_figures(runs)}</div>',
            "<h2>Where the model looks</h2>",
            f"<p>The pretrained model on <em>{escape(answers[0][0].question)}</em> and its own answer. Each row is a "
            "token, each column a token it may look at; the darker, the more it takes from there.</p>",
            f'<div class="maps">{attention_maps(run, answers[0][0])}</div>',
            "<h2>How it was made</h2>",
            f"<p class='soft'><code>headway demo --seed {seed}</code> on {escape(describe_machine())}. "
            f"The world's files are in <code>world/</code> beside this page, the two runs in "
            "<code>from-scratch/</code> and <code>pretrained/</code>; <code>run.toml</code> has every setting.</p>",
        ],
    )


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def answer_row(answer: Answer, truth: str | None) -> list[str]:
    others = ", ".join(f"{escape(text)} {escape(percent(share))}" for text, share in answer.alternatives)
    if truth is None:
        verdict = '<span class="soft">no text says it: a guess</span>'
    else:
        style, mark = ("good", "✓") if answer.text == truth else ("bad", "✗")
        verdict = f'<span class="{style}">{mark} {escape(truth)}</span>'
    return [
        escape(answer.question),
        escape(answer.text),
        f"{answer.probability:.0%}",
        bar(answer.probability),
        verdict,
        f'<span class="soft">{others}</span>',
    ]


def sureness(run: Run, world: World) -> str:
    """How sure the model is of people it has read about, and of people it has not."""
    groups = {"people it has read about": world.test, f"{len(world.unseen)} people it has not": world.unseen}
    shown = []
    for name, people in groups.items():
        if people:
            answers = run.answer([person.question for person in people], alternatives=0)
            shown.append(f"{sum(answer.probability for answer in answers) / len(answers):.0%} for {name}")
    return f"Mean probability of its answers: {' and '.join(shown)}."


def loss_figures(runs: dict[str, Run]) -> str:
    figures = []
    pretraining = losses(runs[WITH], "pretraining")
    if pretraining:
        chart = line_chart([Series("reading biographies", pretraining)], "step", "loss a token")
        figures.append(figure("Pretraining: hidden spans of the biographies", chart))
    lines = [Series(name, losses(run, "training")) for name, run in runs.items()]
    figures.append(figure("Finetuning: the training questions", line_chart(lines, "step", "loss a token")))
    return "".join(figures)


def losses(run: Run, stage: str) -> list[tuple[float, float]]:
    """(step counted from the stage's beginning, loss)."""
    records = [record for record in run.metrics if record["stage"] == stage and "loss" in record]
    begin = run.state.step - run.settings.training.steps if stage == "training" else 0
    return [(record["step"] - begin, record["loss"]) for record in records]


def attention_maps(run: Run, answer: Answer) -> str:
    """One map a head, with the tokens as labels."""
    tokenizer = run.tokenizer
    tokens = [*run.task.prompt(answer.question), *tokenizer.encode(tokenizer.lead + answer.text)]
    labels = [tokenizer.decode([token], specials=True).strip() for token in tokens]
    maps = capture_attention(run.model, tokens)
    return "".join(
        heat_map(maps[layer, head].tolist(), labels, f"layer {layer + 1}, head {head + 1}")
        for layer in range(maps.shape[0])
        for head in range(maps.shape[1])
    )
