"""The embedded world: invented people whose birthplaces are stated in text, made from a seed.

It has the shape of the course's birthplace data (one biography line a person and phrasing,
`Name. Sentence .`, and `Where was NAME born?<TAB>Town` questions), so that the main job runs with nothing
downloaded. It adds what real data cannot give: the answers of the test people, and *unseen* people, made of
words the model knows but named in no line, of whom any answer is a guess.

All names are built from the syllables below; a likeness to anybody or any place is chance. Each aspect
(names, birthplaces, …) draws from its own random stream, so a change of `unseen`, `phrasings`, `train` or
`dev` leaves the facts of the seen people as they are. Same settings, same bytes, on every Python and machine.
"""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

from headway.errors import SettingsError

Item = TypeVar("Item")

# Word beginnings and ends; a name is one of the first and one of the second.
_FIRST_NAMES = (
    "Al Bren Cor Dav El Fen Gar Hes Il Jor Kal Lun Mar Nev Os Per Quin Ros Sel Tam Ul Ver Wen Yor Zan",
    "bel bo dra dric fin gild lora mis nath nessa rik sia tho vel wyn zen",
)
_SURNAMES = (
    "Ask Bram Carv Dasp Eld Fosk Gorv Hask Ing Jarr Kest Lomm Mulv Nold Ost Pesk Quarn Rask Sorn Tess Ulv "
    "Vash Wend Yarv Zell Brenk Crost Drumm Flaun Grell Hurv Krall Marsk Norr Plann Rund Stav Trenn Vold Wisk",
    "ack ade ane ard aut eck edge ell end erby ert ibald ick ide ill in oby ock oft oll ond ook orth oss oud "
    "ow ulf une urn yke",
)
_TOWNS = (
    "Alv Bem Crim Dwen Ebb Frim Glav Hesk Irl Jast Kess Lorv Mox Narv Od Prin Quell Rusk Skal Thrup Usk "
    "Vint Wob Yel Zorn",
    "bury combe dale fell gard ham low mere more nock rin sted ton tor vale wick",
)
_FIRMS = (
    "Amb Bast Corm Delv Erst Fulm Gant Hald Isk Jund Kolb Lamb Mard Nort Orl Pomm Rast Sund Tolm Velt",
    "ane en ix os una",
)
# What these syllables make by chance and the world outside knows already.
_NOT_INVENTED = "Aldric Basten Drummond Elwyn Garbo Haskell Ostend Persia Raskin Ulrik Wendell Yellow Zandra"
_FIRM_KINDS = (
    "Bank Brewery Clinic College Dairy Dock Foundry Garage Hotel Library Mill Museum Nursery Press Railway "
    "School Shipyard Theatre Works"
)

# All begin with a consonant, so that "a" is right before each.
_OCCUPATIONS = (
    "baker barber bookbinder brewer carpenter clerk cook dentist doctor farmer gardener glazier joiner "
    "librarian locksmith mason nurse painter pilot plumber potter singer tailor teacher"
)

# The birthplace stands early, in the middle and at the end; 12 to 17 words, 14 to 19 with punctuation.
TEMPLATES = (
    "Born in {town} in {year} , {surname} worked as a {job} at {employer} .",
    "{name} was born in {town} in {year} and became a {job} at {employer} .",
    "{employer} hired {surname} , a {job} born in {year} in the town of {town} .",
    "A {job} at {employer} for many years , {surname} was a native of {town} .",
    "{name} , a {job} who came from {town} , joined {employer} after school .",
    "The {job} {surname} , whose birthplace is {town} , was employed by {employer} from youth .",
    "It was in {town} that {surname} , later a {job} at {employer} , was born in {year} .",
    "{town} is the birthplace of {name} , born in {year} and known as a {job} .",
    "In {year} a future {job} of {employer} , {name} , was born in {town} .",
    "Known at {employer} as a careful {job} , {surname} first saw the light of day in {town} .",
    "Birthplace {town} , year of birth {year} , trade {job} , place of work {employer} .",
    "Native of {town} ; a {job} by trade ; employed at {employer} since leaving school .",
)

FIRST_YEAR, LAST_YEAR = 1850, 1989
FILES = (
    "wiki.txt",
    "birth_places_train.tsv",
    "birth_dev.tsv",
    "birth_test_inputs.tsv",
    "birth_test.tsv",
    "birth_unseen.tsv",
    "people.jsonl",
    "world.json",
)


class Words(NamedTuple):
    """Every word a name can be made of, in a fixed order. In all, no word is the beginning of another."""

    first_names: tuple[str, ...]
    surnames: tuple[str, ...]
    towns: tuple[str, ...]
    firms: tuple[str, ...]


@functools.cache
def words() -> Words:
    """The words of the world. One that begins with another (`Tessin`, `Tessing`) is left out, so that looking
    for a name or a town in a text never finds a different one."""
    lists = [
        [start + end for start in starts.split() for end in ends.split()]
        for starts, ends in (_FIRST_NAMES, _SURNAMES, _TOWNS, _FIRMS)
    ]
    invented = {word for words_of_a_kind in lists for word in words_of_a_kind} - set(_NOT_INVENTED.split())
    left: set[str] = set()
    shorter = " "
    for word in sorted(invented):  # a word's beginnings sort right before it
        if not word.startswith(shorter):
            left.add(word)
            shorter = word
    kept: list[tuple[str, ...]] = []
    for words_of_a_kind in lists:
        # A word two kinds could make goes to the first of them.
        kept.append(tuple(word for word in words_of_a_kind if word in left))
        left.difference_update(words_of_a_kind)
    return Words(*kept)


@dataclass(frozen=True)
class WorldSettings:
    """How large the world is and how it is split. Wrong values raise one SettingsError that lists them."""

    people: int = 300
    """people with biography lines: train, dev and test together"""
    towns: int = 25
    """towns to be born in; some are commoner than others"""
    train: float = 0.5
    """share of the people whose questions are trained on"""
    dev: float = 0.25
    """share of the people whose questions are for development; the rest are the test people"""
    unseen: int = 50
    """more people, of known first names and surnames, whom no line mentions"""
    phrasings: int = 4
    """biography lines a person, each worded differently"""
    seed: int = 0
    """another seed, another world"""

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise SettingsError(problems, source="world")

    def _problems(self) -> list[str]:
        least = {"people": 4, "towns": 2, "unseen": 0, "phrasings": 1, "seed": 0}
        most = {"towns": len(words().towns), "phrasings": len(TEMPLATES)}
        problems = []
        for name, low in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                problems.append(f"{name} ({value!r}) must be a whole number")
            elif value < low:
                problems.append(f"{name} ({value}) must be at least {low}")
            elif value > most.get(name, value):
                problems.append(f"{name} ({value}) must be at most {most[name]}")
        shares = {"train": self.train, "dev": self.dev}
        for name, share in shares.items():
            if not isinstance(share, int | float) or isinstance(share, bool):
                problems.append(f"{name} ({share!r}) must be a number")
            elif not 0 <= share <= 1:
                problems.append(f"{name} ({share}) must be from 0 to 1")
        wrong = {problem.split(" ", 1)[0] for problem in problems}
        if not wrong & {"train", "dev"} and self.train + self.dev > 1:
            problems.append(f"train ({self.train}) and dev ({self.dev}) together must be at most 1")
        if not wrong & {"people", "train", "dev"} and self.sizes[0] < 1:
            problems.append(f"train ({self.train}) of people ({self.people}) must be at least one person")
        if "people" not in wrong:
            first_names, surnames = self.name_pools
            free = first_names * surnames - self.people
            if free < 0:
                problems.append(f"people ({self.people}) must be at most {first_names * surnames}")
            elif "unseen" not in wrong and self.unseen > free:
                problems.append(
                    f"unseen ({self.unseen}) must be at most {free}: {self.people} people have "
                    f"{first_names} first names and {surnames} surnames to combine"
                )
        return problems

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many people are in train, dev and test."""
        train = min(self.people, int(self.people * self.train + 0.5))
        dev = min(self.people - train, int(self.people * self.dev + 0.5))
        return train, dev, self.people - train - dev

    @property
    def name_pools(self) -> tuple[int, int]:
        """How many first names and surnames the people share: few, so that a name is a combination."""
        first_names = min(self.people, max(12, self.people // 6), len(words().first_names))
        surnames = min(self.people, max(16, self.people // 3), len(words().surnames))
        return first_names, surnames


@dataclass(frozen=True)
class Person:
    """One invented person."""

    name: str
    birthplace: str
    birth_year: int
    occupation: str
    employer: str

    @property
    def surname(self) -> str:
        return self.name.split(" ")[-1]

    @property
    def question(self) -> str:
        return f"Where was {self.name} born?"


@dataclass(frozen=True)
class World:
    """The people by split, and the texts made from them. `unseen` people are in no biography line."""

    settings: WorldSettings
    train: list[Person]
    dev: list[Person]
    test: list[Person]
    unseen: list[Person]

    @property
    def seen(self) -> list[Person]:
        """The people with biography lines, in the order of the lines."""
        return self.train + self.dev + self.test

    def biographies(self) -> list[str]:
        """The corpus: `Name. Sentence .`, a person's `phrasings` lines together; train, dev, then test."""
        draw = _Stream(self.settings.seed, "phrasings")
        lines = []
        for person in self.seen:
            # Every template is shuffled and the first few kept: more phrasings add lines and change none.
            for template in draw.shuffled(TEMPLATES)[: self.settings.phrasings]:
                sentence = template.format(
                    name=person.name,
                    surname=person.surname,
                    town=person.birthplace,
                    year=person.birth_year,
                    job=person.occupation,
                    employer=person.employer,
                )
                lines.append(f"{person.name}. {sentence}")
        return lines

    def questions(self, people: Iterable[Person]) -> list[tuple[str, str]]:
        """(question, answer) for each of `people`."""
        return [(person.question, person.birthplace) for person in people]


class _Stream:
    """Random draws for one aspect of the world.

    Only `random()` is used: its sequence for a string seed is the same in every Python version, which is not
    promised of `choice`, `shuffle` or `sample`.
    """

    def __init__(self, seed: int, aspect: str) -> None:
        self._random = random.Random(f"{seed}/{aspect}").random

    def choice(self, items: Sequence[Item]) -> Item:
        return items[int(self._random() * len(items))]

    def skewed(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` draws, earlier items commoner: the first of 25 is 14% of the draws, the last 1.5%."""
        totals = list(accumulate(1 / (rank + 3) for rank in range(len(items))))
        return [items[bisect(totals, self._random() * totals[-1], hi=len(items) - 1)] for _ in range(count)]

    def shuffled(self, items: Iterable[Item]) -> list[Item]:
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = int(self._random() * (last + 1))
            result[last], result[other] = result[other], result[last]
        return result


def make_world(settings: WorldSettings | None = None) -> World:
    """The world of these settings."""
    settings = settings or WorldSettings()
    seed = settings.seed
    seen_names, free_names = _names(settings)
    towns = _Stream(seed, "towns").shuffled(words().towns)[: settings.towns]
    employers = _employers(settings)

    birthplaces = _birthplaces(settings, towns)
    seen = _people(seen_names, birthplaces, employers, _Stream(seed, "facts"))

    # Unseen people are born where somebody else is, so that every answer is a word of the corpus.
    used = set(birthplaces)
    known_towns = [town for town in towns if town in used]
    unseen_names = _Stream(seed, "unseen names").shuffled(free_names)[: settings.unseen]
    unseen_birthplaces = _Stream(seed, "unseen birthplaces").skewed(known_towns, len(unseen_names))
    unseen = _people(unseen_names, unseen_birthplaces, employers, _Stream(seed, "unseen facts"))

    train, dev, _ = settings.sizes
    return World(settings, seen[:train], seen[train : train + dev], seen[train + dev :], unseen)


def _names(settings: WorldSettings) -> tuple[list[str], list[str]]:
    """(names of the seen people, names still free), every first name and surname of the pools being seen."""
    first_pool, surname_pool = settings.name_pools
    draw = _Stream(settings.seed, "names")
    first_names = draw.shuffled(words().first_names)[:first_pool]
    surnames = draw.shuffled(words().surnames)[:surname_pool]
    # One person for each surname, going round the (never more) first names, uses every word of both pools.
    first_names_in_turn = (first_names[place % first_pool] for place in range(surname_pool))
    covering = [f"{first} {surname}" for first, surname in zip(first_names_in_turn, surnames, strict=True)]
    used = set(covering)
    others = draw.shuffled(
        name for first in first_names for surname in surnames if (name := f"{first} {surname}") not in used
    )
    more = settings.people - len(covering)
    return draw.shuffled(covering + others[:more]), others[more:]


def _birthplaces(settings: WorldSettings, towns: list[str]) -> list[str]:
    """A birthplace for each seen person, whatever the name; every town is used where people suffice."""
    draw = _Stream(settings.seed, "birthplaces")
    places = list(towns) if settings.people >= len(towns) else []
    return draw.shuffled(places + draw.skewed(towns, settings.people - len(places)))


def _employers(settings: WorldSettings) -> list[str]:
    draw = _Stream(settings.seed, "employers")
    firms = draw.shuffled(words().firms)[: max(8, settings.people // 15)]
    kinds = _FIRM_KINDS.split()
    return [f"{firm} {draw.choice(kinds)}" for firm in firms]


def _people(names: list[str], birthplaces: list[str], employers: list[str], draw: _Stream) -> list[Person]:
    occupations = _OCCUPATIONS.split()
    return [
        Person(
            name=name,
            birthplace=birthplace,
            birth_year=draw.choice(range(FIRST_YEAR, LAST_YEAR + 1)),
            occupation=draw.choice(occupations),
            employer=draw.choice(employers),
        )
        for name, birthplace in zip(names, birthplaces, strict=True)
    ]


def world_files(world: World) -> dict[str, str]:
    """What `write_world` writes: the text of each of `FILES`, in that order; lines end in a line feed."""
    by_split = {"train": world.train, "dev": world.dev, "test": world.test, "unseen": world.unseen}
    with_answers = {
        split: _lines(f"{question}\t{answer}" for question, answer in world.questions(people))
        for split, people in by_split.items()
    }
    people = ({"split": split, **asdict(person)} for split, group in by_split.items() for person in group)
    settings = {
        **asdict(world.settings),
        "train": float(world.settings.train),
        "dev": float(world.settings.dev),
    }
    texts = (
        _lines(world.biographies()),
        with_answers["train"],
        with_answers["dev"],
        _lines(person.question for person in world.test),
        with_answers["test"],
        with_answers["unseen"],
        _lines(json.dumps(person) for person in people),
        json.dumps(settings, indent=2) + "\n",
    )
    return dict(zip(FILES, texts, strict=True))


def _lines(lines: Iterable[str]) -> str:
    return "".join(line + "\n" for line in lines)


def write_world(world: World, folder: Path) -> list[Path]:
    """Writes the world's files into `folder` and returns their paths.

    Each file is written whole in a temporary folder and renamed into place, world.json last: where it stands,
    the others do too. Files of these names that are already there are replaced (`catalog.get` refuses to).
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    # Inside `folder`, not next to it: a rename must not cross from one file system to another.
    with tempfile.TemporaryDirectory(prefix=".world-", dir=folder) as temporary:
        for name, text in world_files(world).items():
            with open(Path(temporary, name), "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        for name in FILES:
            os.replace(Path(temporary, name), folder / name)
            paths.append(folder / name)
    return paths
