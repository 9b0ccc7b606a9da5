"""Every recipe that ships loads, builds its model, and is offered by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.cli import run_command
from headway.configuration import RECIPES, load_settings, recipe_names
from headway.data.catalog import resolve
from headway.models import parameter_count
from headway.tasks.translation_scores import tokenizer_for


def test_every_file_of_the_folder_is_a_recipe() -> None:
    files = [path for path in RECIPES.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(RECIPES)) for path in files) == sorted(f"{name}.toml" for name in recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_loads_builds_its_model_and_says_what_it_is(name: str, tmp_path: Path) -> None:
    settings = load_settings(name)
    assert parameter_count(settings.model.build(256)) > 0
    assert settings.name == name.replace("/", "-")
    for _, stage in settings.stages():
        assert stage.training.steps > 0
        assert not any(value == str(RECIPES) for value in vars(stage.task).values())
    (tmp_path / "run.toml").write_text(settings.to_toml(), encoding="utf-8")
    assert load_settings(tmp_path) == settings
    assert (RECIPES / f"{name}.toml").read_text("utf-8").startswith("# ")


@pytest.mark.parametrize(
    ("name", "vocabulary", "least", "most"),
    [
        ("birthplaces/course-vanilla", 256, 3_323_392, 3_323_392),
        ("birthplaces/course-rope", 256, 3_290_624, 3_290_624),
        ("shakespeare/char", 67, 10_600_000, 10_700_000),
        ("shakespeare/char-25m", 67, 25_300_000, 25_400_000),
    ],
)
def test_models_have_the_size_they_are_known_for(name: str, vocabulary: int, least: int, most: int) -> None:
    assert least <= parameter_count(load_settings(name).model.build(vocabulary)) <= most


def test_recipes_are_listed_with_what_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "--recipes"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if not line.startswith(" ")] == recipe_names()
    assert all(len(line) < 120 for line in shown.splitlines())
    assert "The course's task by the course's own rules" in shown


def test_an_unknown_recipe_brings_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "birthplaces/defalt"]) == 2
    assert "did you mean 'birthplaces/default'?" in capsys.readouterr().err
    assert run_command(["train"]) == 2
    captured = capsys.readouterr()
    assert "world/demo" in captured.out and "name one of these recipes, or a run file" in captured.err


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.startswith(("multi30k/", "tatoeba/"))])
def test_a_recipe_for_translation_finds_its_pairs(name: str, real_data: Path) -> None:
    """Every split has pairs, none of the held-out ones is learned, and sources and targets are not swapped."""
    task = load_settings(name).task
    if not resolve(task.source).is_file():
        pytest.skip(f"{task.source} is not in {real_data}")
    train, dev, test = (task.read(split) for split in ("train", "dev", "test"))
    assert len(train) > 25_000 and len(dev) > 800 and len(test) > 800
    learned = {(pair.source, pair.target) for pair in train}
    assert sum((pair.source, pair.target) in learned for pair in dev + test) == 0
    written = tokenizer_for([f"{pair.target}" for pair in dev])
    assert written == ("zh" if name.endswith("-zh") else "13a")
    articles = sum(f" {pair.target} ".lower().count(" the ") for pair in dev)
    assert (articles > 100) == name.endswith("-en")
