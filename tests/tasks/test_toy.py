"""Toys: what is written is the row, or the row turned round; no held-out row is learned."""

from __future__ import annotations

import pytest

from headway.configuration import load_settings
from headway.errors import SettingsError
from headway.tasks import ToySettings


@pytest.mark.parametrize("kind", ["copy", "reverse"])
def test_targets_are_made_of_the_sources(kind: str) -> None:
    settings = ToySettings(kind=kind, rows=300, held_out=50, shortest=2, rows_up_to=5, letters=4)
    known = set()
    for split in ("train", "dev", "test"):
        pairs = settings.read(split)
        assert pairs == settings.read(split)
        for pair in pairs:
            letters = pair.source.split(" ")
            assert 2 <= len(letters) <= 5 and set(letters) <= set("abcd")
            assert f"{pair.target}".split(" ") == (letters if kind == "copy" else letters[::-1])
        known |= {pair.source for pair in pairs} if split == "train" else set()
        assert split == "train" or not known & {pair.source for pair in pairs}
        assert len(pairs) == (300 if split == "train" else 50)


def test_other_seeds_have_other_rows() -> None:
    assert ToySettings(seed=1, rows=20).read("train") != ToySettings(rows=20).read("train")


def test_a_longest_row_below_the_shortest_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"task.rows_up_to: the longest row \(2\) is shorter than the sh.* \(3\)"):
        load_settings({"model": {"kind": "encoder_decoder"}, "task": {"name": "toy", "rows_up_to": 2}})
