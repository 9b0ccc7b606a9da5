"""The documents tell the truth: the settings page is current, links lead somewhere, commands exist, snippets run."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from headway.cli import app
from headway.configuration import load_settings, recipe_names
from headway.console import Reporter
from headway.inspection.experiments import EXPERIMENTS
from headway.making import build_tokenizer
from headway.models import parameter_count
from headway.nn import ATTENTIONS, make_position
from headway.nn.positions import NAMES as POSITIONS

ROOT = Path(__file__).parents[1]
README, TOUR = ROOT / "README.md", ROOT / "docs" / "attention.md"
ROAD = ROOT / "docs" / "from-rnn-to-transformer.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page that are marked as this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


def table(page: Path, *header: str) -> dict[str, list[str]]:
    """The table of a page with this header: the cells of each row by its first cell, without backquotes."""
    for paragraph in page.read_text("utf-8").split("\n\n"):
        rows = [[cell.strip(" `") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in paragraph.splitlines()]
        if rows[:1] == [list(header)]:
            return {name: cells for name, *cells in rows[2:]}
    raise AssertionError(f"{page.name} has no table {header}")


def test_the_settings_page_is_what_the_classes_say() -> None:
    specification = importlib.util.spec_from_file_location("make_settings", ROOT / "docs" / "make_settings.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == module.settings_page()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", page.read_text("utf-8")):
        path = page.parent / (target[0] or target[1])
        assert path.exists(), f"{page.name} links to {path}"


def commands() -> list[str]:
    lines = [line for page in (README, TOUR, ROAD) for block in blocks(page, "sh") for line in block.splitlines()]
    found = [line.split("  #")[0].strip() for line in lines if line.startswith("headway ")]
    assert len(found) > 10
    return found


@pytest.mark.parametrize("line", commands())
def test_commands_are_ones_that_exist(line: str) -> None:
    """Each parses: the command, its options and, for train, the recipe or file."""
    words = shlex.split(line)[1:]
    command = get_command(app)
    context = command.make_context("headway", list(words), resilient_parsing=True)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, words)
        assert command is not None, name
        context = command.make_context(name, list(words))
    if words and not words[0].startswith("-") and context.info_name == "train":
        assert words[0] in recipe_names() or words[0].endswith(".toml") or words[0].startswith("runs/")


@pytest.mark.parametrize("number", [0, 1])
def test_the_run_files_in_the_readme_train(number: int, people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On files of the names they use, for two steps."""
    import headway

    text = blocks(README, "toml")[number]
    (people / "biographies.txt").write_text((people / "wiki.txt").read_text())
    (people / "notes.txt").write_text("Once upon a time there was a small corpus. " * 20)
    (people / "example.toml").write_text(re.sub(r"steps = \d+", "steps = 2", text))
    assert headway.train(people / "example.toml", people / "run").evaluation


def test_no_figure_is_missing() -> None:
    assert not [page.name for page in PAGES if "@@" in page.read_text("utf-8")]


def test_the_python_example_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch, run_file: Path) -> None:
    """With a tiny run file in place of the recipe."""
    code = blocks(README, "python")[0]
    monkeypatch.chdir(run_file.parent)
    shortened = re.sub(r'headway\.train\("[^"]+"', f'headway.train("{run_file}"', code)
    shortened = re.sub(r'"Where was [^"?]+ born\?"', '"Where was Ada Lund born?"', shortened)
    exec(compile(shortened, "README.md", "exec"), {})


@pytest.mark.parametrize(
    "page, number",
    [(README, 1), *((page, number) for page in (TOUR, ROAD) for number in range(len(blocks(page, "python"))))],
)
def test_snippets_run_as_they_stand(page: Path, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(page, "python")[number], f"{page.name}, snippet {number}", "exec"), {})


@pytest.mark.parametrize("text", blocks(TOUR, "toml"))
def test_the_run_files_of_the_tour_build_what_they_name(text: str) -> None:
    tables = {**tomllib.loads(text), "task": {"name": "language_modelling", "corpus": "notes.txt"}}
    asked = tables["model"]["attention"]
    kind = asked if isinstance(asked, str) else asked["kind"]
    model = load_settings(tables).model.build(10)
    assert all(type(block.attention) is ATTENTIONS[kind] for block in model.blocks)


def test_the_tour_has_every_experiment_and_no_other() -> None:
    assert set(re.findall(r"headway lab ([a-z][a-z-]+)", TOUR.read_text("utf-8"))) == set(EXPERIMENTS)


@pytest.mark.parametrize("page", [TOUR, ROAD], ids=lambda page: page.name)
def test_a_tour_shows_every_picture_it_has(page: Path) -> None:
    shown = re.findall(rf"\]\(({page.stem}/[^)]+\.png)\)", page.read_text("utf-8"))
    assert sorted(shown) == sorted(f"{page.stem}/{path.name}" for path in (page.parent / page.stem).iterdir())


def test_the_road_names_models_of_the_size_it_says() -> None:
    sizes = table(ROAD, "recipe", "parameters", "1–8", "9–12", "13–16", "17–20", "all", "exact")
    for name, (parameters, *_) in sizes.items():
        settings = load_settings(name)
        model = settings.model.build(len(build_tokenizer(settings, Reporter())))
        assert parameters == f"{parameter_count(model):,}"


def builds(name: str, **options: object) -> bool:
    try:
        ATTENTIONS[name](16, 2, **options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", ATTENTIONS)
def test_what_the_tour_says_of_a_mechanism_is_so(name: str) -> None:
    written, _, _, causal, fixed = table(TOUR, "name", "class", "time", "memory", "causal", "fixed length")[name]
    assert written == ATTENTIONS[name].__name__
    assert causal == ("yes" if builds(name, causal=True, length=32) else "no")
    if builds(name):
        assert fixed == ("no" if builds(name, causal=True) else "if causal")
    else:
        assert fixed == "yes"


def test_the_tour_lists_every_mechanism_and_every_position_scheme() -> None:
    assert list(table(TOUR, "name", "in one line", "paper")) == list(ATTENTIONS)
    measured = table(TOUR, "name", "formula", "T", "time: p", "at the longest", "memory: p", "at the longest")
    assert [name.split("`")[0] for name in measured] == [*ATTENTIONS, "causal perceiver (m = 32)"]
    schemes = table(TOUR, "name", "class", "acts on", "what it does", "past the trained length")
    assert list(schemes) == list(POSITIONS)
    for name, (written, *_) in schemes.items():
        assert written == ("" if name == "none" else type(make_position(name, 16, 2, 32)).__name__)
