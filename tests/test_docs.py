"""The documents tell the truth: the settings page is current, links lead somewhere, README's commands exist."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from headway.cli import app
from headway.configuration import recipe_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


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


def readme_commands() -> list[str]:
    blocks = (ROOT / "README.md").read_text("utf-8").split("```")[1::2]
    lines = [line for block in blocks if block.startswith("sh\n") for line in block.splitlines()]
    commands = [line.split("  #")[0].strip() for line in lines if line.startswith("headway ")]
    assert len(commands) > 5
    return commands


@pytest.mark.parametrize("line", readme_commands())
def test_readme_commands_are_ones_that_exist(line: str) -> None:
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

    blocks = (ROOT / "README.md").read_text("utf-8").split("```")[1::2]
    text = [block.removeprefix("toml\n") for block in blocks if block.startswith("toml\n")][number]
    (people / "biographies.txt").write_text((people / "wiki.txt").read_text())
    (people / "notes.txt").write_text("Once upon a time there was a small corpus. " * 20)
    (people / "example.toml").write_text(re.sub(r"steps = \d+", "steps = 2", text))
    assert headway.train(people / "example.toml", people / "run").evaluation


def test_no_figure_is_missing() -> None:
    assert not [page.name for page in PAGES if "@@" in page.read_text("utf-8")]


def test_the_python_example_in_the_readme_runs(monkeypatch: pytest.MonkeyPatch, run_file: Path) -> None:
    """With a tiny run file in place of the recipe."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert code is not None
    monkeypatch.chdir(run_file.parent)
    shortened = re.sub(r'headway\.train\("[^"]+"', f'headway.train("{run_file}"', code[1])
    shortened = re.sub(r'"Where was [^"?]+ born\?"', '"Where was Ada Lund born?"', shortened)
    exec(compile(shortened, "README.md", "exec"), {})
