"""Pictures of attention are written whatever the script, and say so where a font is missing."""

from __future__ import annotations

import struct
import unicodedata
import warnings
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import font_manager

from headway.inspection.pictures import EAST_ASIAN, Map, names, write_map
from headway.text import KINDS

CHINESE = Map([[0.9, 0.1], [0.2, 0.8]], ["孩子", "⁇"], ["two", "children"], "target", "source")
ENGLISH = Map([[0.9, 0.1], [0.2, 0.8]], ["child", "?"], ["two", "children"], "target", "source")


@pytest.mark.parametrize("installed", [True, False])
def test_a_missing_font_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    plain = [font for font in font_manager.fontManager.ttflist if font.name.startswith("DejaVu")]
    east_asian = [replace(font, name=EAST_ASIAN[0]) for font in plain] if installed else []
    monkeypatch.setattr(font_manager.fontManager, "ttflist", plain + east_asian)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        notes = write_map(CHINESE, tmp_path / "map.png")
        assert write_map(ENGLISH, tmp_path / "english.png") == write_map(CHINESE, tmp_path / "map.svg") == []
    assert [f"{tmp_path / 'map.png'}: no font on this machine" in note for note in notes] == [True] * (not installed)
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert "孩子 looks at two: 90%" in (tmp_path / "map.svg").read_text("utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_has_a_name_that_can_be_seen(kind: str) -> None:
    tokenizer = KINDS[kind].train(["ein Hund  läuft"])
    tokens = [*tokenizer.encode(tokenizer.lead + "ein Hund  läuft"), tokenizer.mask]
    found = names(tokenizer, tokens)
    assert len(found) == len(tokens) and found[-1] == "⁇" and all(name.strip() == name != "" for name in found)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_picture_of_any_token_is_well_formed(tmp_path: Path, kind: str) -> None:
    tokenizer = KINDS[kind].train(["ein Hund läuft"])
    labels = names(tokenizer, range(258))  # special tokens, and every byte
    write_map(Map([[0.5] * 258], ["end"], labels, "target", "source"), tmp_path / "map.svg")
    tree = ElementTree.fromstring((tmp_path / "map.svg").read_text("utf-8"))
    assert sum(element.tag.endswith("rect") for element in tree.iter()) == 258
    assert not any(unicodedata.category(each) == "Cc" for label in labels for each in label)


def test_dollars_are_signs_and_no_formulas(tmp_path: Path) -> None:
    write_map(Map([[0.9, 0.1]], ["$$"], [r"$\wrong$", "$x$"], "target", "source"), tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_sentence_is_drawn_smaller(tmp_path: Path) -> None:
    labels = [f"{number}" for number in range(300)]
    (note,) = write_map(Map([[0.5] * 300], ["one"], labels, "target", "source"), tmp_path / "map.png")
    width, height = struct.unpack(">II", (tmp_path / "map.png").read_bytes()[16:24])
    assert 4000 < width < 7000 and height < 1000
    assert note == f"{tmp_path / 'map.png'}: 1 by 300 tokens are drawn small; write an .svg instead"
