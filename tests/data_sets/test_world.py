"""The embedded world: what holds of every world, whatever its numbers."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from headway.data import world as world_module
from headway.data.world import (
    FILES,
    TEMPLATES,
    World,
    WorldSettings,
    make_world,
    words,
    world_files,
    write_world,
)
from headway.errors import SettingsError

SETTINGS = [
    WorldSettings(),
    WorldSettings(seed=7),
    WorldSettings(people=4, towns=2, unseen=12, phrasings=1),
    WorldSettings(people=10, towns=25, unseen=0, phrasings=len(TEMPLATES), train=0.2, dev=0),
    WorldSettings(people=1000, towns=len(words().towns), unseen=300, train=0.8, dev=0.2),
]


@pytest.fixture(params=SETTINGS, ids=lambda settings: f"{settings.people} people, seed {settings.seed}")
def world(request: pytest.FixtureRequest) -> World:
    return make_world(request.param)


def test_splits_have_their_sizes_and_share_nobody(world: World) -> None:
    names = [person.name for person in world.seen + world.unseen]
    assert len(names) == len(set(names))
    assert (len(world.train), len(world.dev), len(world.test)) == world.settings.sizes
    assert len(world.seen) == world.settings.people
    assert len(world.unseen) == world.settings.unseen
    assert len(world.train) >= 1


def test_shares_are_rounded_and_the_rest_is_test() -> None:
    assert WorldSettings().sizes == (150, 75, 75)
    assert WorldSettings(people=5, unseen=0).sizes == (3, 1, 1)
    assert WorldSettings(train=1, dev=0).sizes == (300, 0, 0)


def test_no_line_names_an_unseen_person(world: World) -> None:
    corpus = "\n".join(world.biographies())
    assert not [person.name for person in world.unseen if person.name in corpus]


def test_every_word_of_an_unseen_question_is_in_the_corpus(world: World) -> None:
    first_names, surnames = zip(*(person.name.split() for person in world.seen), strict=True)
    for person in world.unseen:
        first_name, surname = person.name.split()
        assert first_name in first_names
        assert surname in surnames
    assert {person.birthplace for person in world.unseen} <= {person.birthplace for person in world.seen}


def test_names_are_combinations_of_few_words() -> None:
    people = make_world().seen
    assert len({person.name.split()[0] for person in people}) == 300 // 6
    assert len({person.surname for person in people}) == 300 // 3


def test_seen_people_have_their_lines_in_order(world: World) -> None:
    lines = world.biographies()
    phrasings = world.settings.phrasings
    assert len(lines) == phrasings * world.settings.people
    for place, person in enumerate(world.seen):
        own = lines[place * phrasings : (place + 1) * phrasings]
        assert len(set(own)) == phrasings
        for line in own:
            head, sentence = line.split(". ", 1)
            assert head == person.name
            assert sentence.endswith(" .")
            assert person.birthplace in sentence.split()
            facts = (str(person.birth_year), person.occupation, person.employer)
            assert any(fact in sentence for fact in facts)


def test_sentences_are_12_to_22_words(world: World) -> None:
    for line in world.biographies():
        tokens = line.split(". ", 1)[1].split()
        assert len(tokens) <= 22
        assert len([token for token in tokens if token not in {",", ";", "."}]) >= 12
        assert "{" not in line


def test_templates_word_the_birthplace_differently() -> None:
    before_the_town = {template.split("{town}")[0] for template in TEMPLATES}
    assert len(TEMPLATES) >= 8
    assert len(before_the_town) == len(TEMPLATES)
    used = Counter(line.split(". ", 1)[1].split()[0] for line in make_world().biographies())
    assert max(used.values()) < 0.5 * sum(used.values())


def test_a_line_reads_as_the_course_data_does() -> None:
    world = make_world(WorldSettings(phrasings=len(TEMPLATES)))
    person = world.train[0]
    assert (
        f"{person.name}. Born in {person.birthplace} in {person.birth_year} , {person.surname} worked as a "
        f"{person.occupation} at {person.employer} ."
    ) in world.biographies()
    assert world.questions([person]) == [(f"Where was {person.name} born?", person.birthplace)]


def test_words_are_distinct_and_none_begins_another() -> None:
    everything = sorted(word for kind in words() for word in kind)
    for shorter, longer in pairwise(everything):
        assert not longer.startswith(shorter)
    assert all(word.isalpha() and word.istitle() for word in everything)


def test_every_town_is_used_and_some_are_commoner() -> None:
    for people in (25, 300, 2000):
        places = Counter(person.birthplace for person in make_world(WorldSettings(people=people)).seen)
        assert len(places) == 25
    (_, commonest), *_, (_, rarest) = places.most_common()
    assert 0.08 < commonest / 2000 < 0.25
    assert rarest < commonest / 3


def test_birthplaces_do_not_follow_from_names() -> None:
    """The commonest town of others with the same first name (or surname) is as good as chance."""
    people = make_world(WorldSettings(people=6000, towns=10)).seen
    overall = Counter(person.birthplace for person in people).most_common(1)[0][1] / len(people)
    for part in (0, 1):
        by_word: dict[str, Counter[str]] = {}
        for person in people[:3000]:
            by_word.setdefault(person.name.split()[part], Counter())[person.birthplace] += 1
        asked = [person for person in people[3000:] if person.name.split()[part] in by_word]
        right = sum(by_word[person.name.split()[part]].most_common(1)[0][0] == person.birthplace for person in asked)
        assert right / len(asked) < overall + 0.03


@pytest.mark.parametrize("change", [{"unseen": 0}, {"unseen": 400}, {"phrasings": 1}, {"phrasings": 9}])
def test_seen_people_stay_when_unseen_or_phrasings_change(change: dict[str, int]) -> None:
    usual, other = make_world(), make_world(WorldSettings(**change))
    assert (other.train, other.dev, other.test) == (usual.train, usual.dev, usual.test)
    fewer, more = sorted((usual, other), key=lambda world: world.settings.unseen)
    assert more.unseen[: len(fewer.unseen)] == fewer.unseen
    fewer, more = sorted((usual, other), key=lambda world: world.settings.phrasings)
    assert set(fewer.biographies()) <= set(more.biographies())


def test_shares_move_people_between_splits_only() -> None:
    assert make_world(WorldSettings(train=0.3, dev=0.1)).seen == make_world().seen


def test_another_seed_is_another_world() -> None:
    one, other = (
        {person.name: person.birthplace for person in make_world(WorldSettings(seed=seed)).seen} for seed in (0, 1)
    )
    assert len(one.items() & other.items()) < 5


def test_settings_errors_are_listed_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        WorldSettings(people=3, towns=1, train=-0.1, dev=1.5, unseen=-1, phrasings=0, seed=-1)
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "people",
        "towns",
        "unseen",
        "phrasings",
        "seed",
        "train",
        "dev",
    ]
    assert "towns (1) must be at least 2" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"towns": 10_000}, f"towns (10000) must be at most {len(words().towns)}"),
        ({"phrasings": 99}, f"phrasings (99) must be at most {len(TEMPLATES)}"),
        ({"train": 0.8, "dev": 0.3}, "train (0.8) and dev (0.3) together must be at most 1"),
        ({"train": float("nan")}, "train (nan) must be from 0 to 1"),
        ({"train": 0}, "train (0) of people (300) must be at least one person"),
        ({"people": 4, "unseen": 13}, "unseen (13) must be at most 12"),
        ({"people": 10**9}, "people (1000000000) must be at most"),
        ({"people": 300.0}, "people (300.0) must be a whole number"),
        ({"seed": True}, "seed (True) must be a whole number"),
        ({"dev": "0.1"}, "dev ('0.1') must be a number"),
    ],
)
def test_a_settings_error_names_the_value_and_the_limit(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        WorldSettings(**wrong)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 1
    assert message in str(caught.value)


def fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in FILES:
        digest.update((folder / name).read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_files_say_what_the_world_says(tmp_path: Path, world: World) -> None:
    paths = write_world(world, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert [path.name for path in paths] == list(FILES)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert all(b"\r" not in path.read_bytes() for path in paths)
    assert (folder / "wiki.txt").read_text("utf-8").splitlines() == world.biographies()
    for name, people in {
        "birth_places_train.tsv": world.train,
        "birth_dev.tsv": world.dev,
        "birth_test.tsv": world.test,
        "birth_unseen.tsv": world.unseen,
    }.items():
        rows = [tuple(line.split("\t")) for line in (folder / name).read_text("utf-8").splitlines()]
        assert rows == world.questions(people)
    questions = (folder / "birth_test_inputs.tsv").read_text("utf-8").splitlines()
    assert questions == [question for question, _ in world.questions(world.test)]
    records = [json.loads(line) for line in (folder / "people.jsonl").read_text("utf-8").splitlines()]
    assert Counter(record["split"] for record in records) == Counter(
        train=len(world.train), dev=len(world.dev), test=len(world.test), unseen=len(world.unseen)
    )
    assert [record["birthplace"] for record in records] == [person.birthplace for person in world.seen + world.unseen]
    assert WorldSettings(**json.loads((folder / "world.json").read_text("utf-8"))) == world.settings


def test_same_settings_same_bytes(tmp_path: Path) -> None:
    write_world(make_world(), tmp_path / "one")
    write_world(make_world(), tmp_path / "two")
    write_world(make_world(), tmp_path / "two")  # over its own files
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
    assert world_files(make_world(WorldSettings(train=1, dev=0))) == world_files(
        make_world(WorldSettings(train=1.0, dev=0.0))
    )


def test_same_bytes_in_another_process_with_another_hash_seed(tmp_path: Path) -> None:
    write_world(make_world(), tmp_path / "here")
    program = (
        "import sys, pathlib; from headway.data.world import make_world, write_world; "
        "write_world(make_world(), pathlib.Path(sys.argv[1]))"
    )
    root = Path(world_module.__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "there")], env=environment, check=True, timeout=60)
    assert fingerprint(tmp_path / "here") == fingerprint(tmp_path / "there")


def test_a_write_that_fails_leaves_no_part_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_world(make_world(), tmp_path / "world")
    assert list((tmp_path / "world").iterdir()) == []
