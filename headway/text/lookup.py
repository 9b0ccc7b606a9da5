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
import sys
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from headway.text.checks import utf8
from headway.text.cutting import parts

MOST = 1 << 18  # words that are remembered
LONGEST = 48  # characters of a word that is remembered
ROW = 256
ALL = {*range((sys.maxunicode + 1) // ROW)} - {*range(0xD8, 0xE0)}  # rows of Unicode; a surrogate is no character
SIGNS = {*range(0x100, 0x200)}  # the plane of signs and rare scripts, in many ranges, which `re` tries one by one
LESSONS = {16: ALL - {*range(0x400, 0x1100)} - SIGNS, 64: ALL}  # what is learned with so many, whatever is asked

LEARNING = threading.Lock()  # what is learned is of use as a whole only

# Two characters of the same class make one word: these are the partners that show a class.
PARTNERS = {"letter": "a", "number": "1", "space": "\n"}


class Lookup(dict[str, bytes]):
    """The ids of each word as little-endian bytes, as `dtype` has them. A word that is missing is asked for."""

    def __init__(self, library: Any, first: int, dtype: np.dtype) -> None:
        """`library` is the library's tokenizer; its ids are counted from `first` on."""
        super().__init__()
        self.numbers = [np.array(first + number, dtype).tobytes() for number in range(library.get_vocab_size())]
        self.model, self.cut = library.model, library.pre_tokenizer.pre_tokenize_str
        self.signs = {byte: sign for sign, byte in byte_alphabet().items()}  # how the library writes bytes
        self.rows: set[int] = set()
        self.classes: dict[str, set[int]] = {name: set() for name in PARTNERS}
        self.apart: set[int] = set()
        self.lessons = 0
        self.rules = self.learn([0])

    def encode(self, text: str) -> bytes:
        """The ids of a text, one after the other. Raises TextError for half a surrogate pair."""
        stranger, words = self.rules
        if not text.isascii() and stranger.search(text):
            utf8(text)
            with LEARNING:
                stranger, words = self.rules = self.learn({ord(character) // ROW for character in text})
        return b"".join([b"".join(map(self.__getitem__, words.findall(part))) for part in parts(text)])

    def __missing__(self, word: str) -> bytes:
        merged = self.model.tokenize(word.encode().decode("latin-1").translate(self.signs))
        ids = b"".join([self.numbers[token.id] for token in merged])
        if len(self) < MOST and len(word) <= LONGEST:
            self[word] = ids
        return ids

    def learn(self, rows: Iterable[int]) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Ask for the classes of whole rows of code points: what finds a character that is not known by now, and what
        cuts words. After a few lessons more is learned than is asked for, as each makes the rules anew."""
        self.lessons += 1
        for row in {*rows, *LESSONS.get(self.lessons, ())} - self.rows:
            self.rows.add(row)
            codes = range(row * ROW, (row + 1) * ROW)
            alike = len(self.cut("".join(map(chr, codes)))) == 1  # in one word: all of them are of one class
            if not alike and len(self.cut("".join(2 * chr(code) for code in codes))) == 2 * ROW:
                self.apart.update(codes)  # as in most rows of Han
                continue
            for code in codes[:1] if alike else codes:
                for name, partner in PARTNERS.items():
                    if len(self.cut(partner + chr(code))) == 1:
                        self.classes[name].update(codes if alike else [code])
                if not alike and len(self.cut(2 * chr(code))) == 2:
                    self.apart.add(code)
        letter, number, space = (character_class(self.classes[name]) for name in PARTNERS)
        known = character_class({row * ROW + column for row in self.rows for column in range(ROW)})
        apart = character_class(self.apart)
        return re.compile(f"[^{known}]"), re.compile(
            (rf"[{apart}]|" if apart else "")
            + rf"'(?:s|t|re|ve|m|ll|d)| ?[{letter}]+| ?[{number}]+| ?[^{space}{letter}{number}{apart}]+"
            rf"|[{space}]+(?![^{space}{apart}])|[{space}]+"
        )


def character_class(codes: set[int]) -> str:
    """Code points as what stands between the brackets of a regular expression: \\U00000041-\\U0000005a…"""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(codes)), lambda pair: pair[1] - pair[0]):
        numbers = [code for _, code in run]
        parts.append(f"\\U{numbers[0]:08x}-\\U{numbers[-1]:08x}")
    return "".join(parts)


def byte_alphabet() -> dict[str, int]:
    """The byte behind each sign of the byte-level alphabet (GPT-2, Radford et al. 2019).

    That alphabet shows every byte as a printable sign: printable Latin-1 stands for itself, and the other
    bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    signs = printable + [256 + rank for rank in range(len(others))]
    return {chr(sign): value for sign, value in zip(signs, printable + others, strict=True)}
