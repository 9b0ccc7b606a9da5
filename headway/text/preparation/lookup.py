"""Byte-pair encoding by looking words up: the ids of the `tokenizers` library, several times as fast.

Byte-level BPE first cuts a text into words (GPT-2, Radford et al. 2019, section 2.2; where a script has no spaces, a
character is a word) and then merges within each:

    ids(text) = ids(word 1) ids(word 2) …

so a word that was seen before need not be merged again. The cut is one regular expression, and which characters are
letters, numbers, spaces or words by themselves is asked of the library itself, once for each row of 256 code points,
so that both always agree. Cost: linear in the text; memory: at most `MOST` words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from headway.text.checks import utf8
from headway.text.tokenizers import BPE, UNSPACED, Tokenizer, _byte_alphabet

MOST = 1 << 18  # words that are remembered
LONGEST = 48  # characters of a word that is remembered
ROW = 256

# Two characters of the same class make one word: these are the partners that show a class.
PARTNERS = {"letter": "a", "number": "1", "space": "\n"}

# How the library describes that a character of an unspaced script is a word by itself.
APART = {"type": "Split", "pattern": {"Regex": f"[{UNSPACED}]"}, "behavior": "Isolated", "invert": False}


def can_look_up(tokenizer: Tokenizer) -> bool:
    """Whether it is a BPE that cuts words as GPT-2 does, with or without unspaced scripts, and changes nothing else."""
    if not isinstance(tokenizer, BPE):
        return False
    described: dict[str, Any] = tokenizer.to_json()["tokenizers"]
    cut = described.get("pre_tokenizer") or {}
    if cut.get("type") == "Sequence" and cut["pretokenizers"][:-1] == [APART]:
        cut = cut["pretokenizers"][-1]
    plain = cut.get("type") == "ByteLevel" and cut.get("use_regex", True) and not cut.get("add_prefix_space", True)
    changes = [described.get(key) for key in ("normalizer", "added_tokens", "truncation", "padding")]
    return plain and not any(changes) and not described["model"].get("dropout")


class Lookup(dict[str, bytes]):
    """The ids of each word as little-endian bytes, as `dtype` has them. A word that is missing is asked for."""

    def __init__(self, tokenizer: BPE, dtype: np.dtype) -> None:
        super().__init__()
        moved = range(len(tokenizer.specials), len(tokenizer))  # the library's ids, moved up by the special tokens
        self.numbers = [np.array(number, dtype).tobytes() for number in moved]
        self.model, self.cut = tokenizer._library.model, tokenizer._library.pre_tokenizer.pre_tokenize_str
        self.signs = {byte: sign for sign, byte in _byte_alphabet().items()}  # how the library writes bytes
        self.rows: set[int] = set()
        self.classes: dict[str, set[int]] = {name: set() for name in PARTNERS}
        self.apart: set[int] = set()
        self.learn([0])

    def encode(self, text: str) -> bytes:
        """The same ids as `tokenizer.encode(text)`."""
        if not text.isascii() and self.stranger.search(text):
            utf8(text)
            self.learn({ord(character) // ROW for character in text})
        return b"".join(map(self.__getitem__, self.words(text)))

    def __missing__(self, word: str) -> bytes:
        merged = self.model.tokenize(word.encode().decode("latin-1").translate(self.signs))
        ids = b"".join([self.numbers[token.id] for token in merged])
        if len(self) < MOST and len(word) <= LONGEST:
            self[word] = ids
        return ids

    def learn(self, rows: Iterable[int]) -> None:
        """Ask for the classes of whole rows of code points, and cut words by them from now on."""
        for row in set(rows) - self.rows:
            self.rows.add(row)
            for code in range(row * ROW, (row + 1) * ROW):
                if not 0xD800 <= code < 0xE000:  # half a surrogate pair is no character
                    for name, partner in PARTNERS.items():
                        if len(self.cut(partner + chr(code))) == 1:
                            self.classes[name].add(code)
                    if len(self.cut(2 * chr(code))) == 2:
                        self.apart.add(code)
        letter, number, space = (character_class(self.classes[name]) for name in PARTNERS)
        known = character_class({row * ROW + column for row in self.rows for column in range(ROW)})
        apart = character_class(self.apart)
        self.stranger = re.compile(f"[^{known}]")
        self.words = re.compile(
            (rf"[{apart}]|" if apart else "")
            + rf"'(?:s|t|re|ve|m|ll|d)| ?[{letter}]+| ?[{number}]+| ?[^{space}{letter}{number}{apart}]+"
            rf"|[{space}]+(?![^{space}{apart}])|[{space}]+"
        ).findall


def character_class(codes: set[int]) -> str:
    """Code points as what stands between the brackets of a regular expression: \\U00000041-\\U0000005a…"""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(codes)), lambda pair: pair[1] - pair[0]):
        numbers = [code for _, code in run]
        parts.append(f"\\U{numbers[0]:08x}-\\U{numbers[-1]:08x}")
    return "".join(parts)
