"""A text in parts: their tokens are those of the whole, whatever it is made of and whatever cuts it into tokens."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.text import BPE, KINDS, Words, cutting, tokenizers
from headway.text.cutting import last_place, parts, without_endless_words
from headway.text.tokenizers import heard_meanwhile

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


@pytest.mark.parametrize(
    "text", ["some words ", "some\twords\t", '{"key":["value",12],', "東京は日本。東にある、", "line\r\n"]
)
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


def test_endless_words_are_learned_from_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a word, " + "x" * 2500 + " and 1" + "0" * 1500 + "." * 1001 + "東" * 1100 + " end"
    found = list(without_endless_words(text))
    assert "".join(found) == text and max(len(longest) for part in found for longest in part.split()) <= 1100 + 1001
    assert list(without_endless_words("words " * 5000)) == ["words " * 5000]


def test_a_byte_pair_tokenizer_learns_from_an_endless_word_in_seconds() -> None:
    """By the word it would take the square of its length: hours."""
    text = "".join(random.Random(0).choices("ACGT", k=2_000_000))
    began = time.monotonic()
    tokenizer = BPE.train([text], 400)
    assert time.monotonic() - began < 60 and len(tokenizer) == 400
    assert tokenizer.decode(tokenizer.encode(text[:5000])) == text[:5000]


def test_a_word_of_thousands_of_letters_is_no_token() -> None:
    words = Words.train(["some words " + "x" * 5000])
    assert max(map(len, words.words)) == len(" words")
    assert words.decode(words.encode(" " + "x" * 70)) == " " + "x" * 70


@pytest.mark.parametrize("reads", [True, False])
def test_ctrl_c_is_heard_while_the_library_works(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes seconds here, and minutes for a large corpus. Where it still reads, it is not left behind."""
    monkeypatch.setattr(tokenizers, "LEAVES", 1.0)
    ended = threading.Event()

    def work(texts: Iterator[str]) -> None:
        try:
            for _ in texts if reads else ():
                time.sleep(0.01)
            time.sleep(5)
        finally:
            ended.set()

    alarm = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        alarm.start()
        heard_meanwhile(work, itertools.repeat("text"))
    assert time.monotonic() - began < 4 and ended.is_set() == reads


def test_what_fails_while_the_library_works_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        heard_meanwhile(lambda texts: [1 / 0 for _ in texts], ["text"])


@pytest.mark.parametrize("sign", ["x", "1", "=", "_", " ", "\n", "東"])
def test_a_long_run_of_anything_is_learned_from_in_pieces(sign: str) -> None:
    text = "some words " + sign * 5000 + "\tend"
    found = list(without_endless_words(text))
    assert "".join(found) == text and max(map(len, found)) <= 1100


def test_runs_that_are_just_short_enough_are_looked_at_once() -> None:
    text = "".join(("x" * 999, "-" * 999, "1" * 999, " ")) * 300  # a megabyte
    began = time.monotonic()
    assert list(without_endless_words(text)) == [text]
    assert time.monotonic() - began < 1.0
