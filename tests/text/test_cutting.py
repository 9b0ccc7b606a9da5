"""A text in parts: their tokens are those of the whole, whatever it is made of and whatever cuts it into tokens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.text import BPE, KINDS, cutting
from headway.text.cutting import last_place, parts

PIECES = [
    *"ab1_-.,:\"'’)½é東京は。，・々한ไ",
    *("'s", "don't", "word", " ", "  ", "\t", "\n", "\r\n", "\u3000", "\xa0", "\x85", "\u2028", "\u0301", "\u3099"),
]
TEXT = st.lists(st.sampled_from(PIECES), max_size=150).map("".join)
RICH = ["".join(random.Random(number).choices(PIECES, k=60)) for number in range(300)]
LEARNED = {kind: KINDS[kind].train(RICH, {"words": 2000, "bpe": 1500}.get(kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(text=TEXT, size=st.integers(1, 60))
def test_the_parts_have_the_tokens_of_the_whole(kind: str, text: str, size: int) -> None:
    tokenizer = LEARNED[kind]
    whole = tokenizer.encode(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "PART", size)
        cut = list(parts(text))
        assert "".join(cut) == text
        found = tokenizer.encode(text)  # which takes it in parts by itself
    assert [token for part in cut for token in tokenizer.encode(part)] == whole == found


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_learns_the_same_from_one_long_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(RICH)
    size = {"words": 500, "bpe": 600}.get(kind)
    whole = KINDS[kind].train([text], size).to_json()
    monkeypatch.setattr(cutting, "PART", 100)
    assert KINDS[kind].train([text], size).to_json() == whole


@pytest.mark.parametrize("text", ["some words ", '{"key":["value",12],', "東京は日本。東にある、", "line\r\n"])
def test_the_library_never_sees_a_long_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PART", 200)
    cut = list(parts(text * 1000))
    assert max(len(part.encode()) for part in cut) <= 400 and len(cut) > 10


def test_what_another_tokenizer_cuts_otherwise_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose words hold spaces would give other tokens."""
    described = LEARNED["bpe"].to_json()["tokenizers"] | {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    }
    joined = BPE(described)
    assert not joined.by_words
    text = "word word, word " * 20
    whole = joined.encode(text)
    monkeypatch.setattr(cutting, "PART", 10)
    assert joined.encode(text) == whole


def test_there_may_be_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_place(b"x" * 100, 0, 100) == 0
    monkeypatch.setattr(cutting, "PART", 10)
    assert list(parts("x" * 100)) == ["x" * 100]
    assert list(parts("x" * 100 + " " + "y" * 15)) == ["x" * 100, " " + "y" * 15]
