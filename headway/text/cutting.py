"""Where a long text may be cut: at a place that no token crosses, of whatever kind.

    a word| and another       before a space, tab or line end, behind a character that is none
    {"key":"|value"}          behind a sign, before a letter or digit
    出発。|東京                the same

Words begin with their space, and signs end where letters begin (`tokenizers`): so the tokens of both sides are those of
the whole. What works on a text of any length takes it in parts; the `tokenizers` library alone needs eighty times the
memory of the text that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headway.text.checks import utf8

PART = 1 << 20  # bytes
NEAR = 1 << 16  # bytes before the end of a part, in which nearly every text has a place
LONG_WORD = 1000  # characters
SIGN = 3  # bytes that may stand before a place
LONGEST = 4  # bytes of a character

# What stands before a place, as UTF-8. Not among the signs: ' ’ - _, which may stand within a word.
PLACE = re.compile(
    rb"[\x21-\x7e\x80-\xff](?=[ \t\n\r])"
    rb"|[!\"#%&()*+,./:;<=>?@\[\]{|}~](?=[0-9A-Za-z])"
    rb"|(?:\xe3\x80[\x81\x82]|\xef\xbc[\x81\x8c\x9a\x9b\x9f])(?=[\xe5-\xe9])"  # 、。！，：；？ before most of Han
)

# Letters, digits, signs or spaces with nothing between them; what stands before keeps a run from being tried twice.
MANY = f"{{{LONG_WORD},}}"
ENDLESS = re.compile(
    rf"(?<![^\W\d_])[^\W\d_]{MANY}|(?<!\d)\d{MANY}|(?<!\s)\s{MANY}|(?<![^\w\s])(?<!_)(?:[^\w\s]|_){MANY}"
)


def last_place(data: bytes | bytearray, begin: int, end: int) -> int:
    """The last place between the bytes `begin` and `end` of a text; 0 where there is none."""
    for near in (max(begin, end - NEAR), begin):
        for match in reversed([*PLACE.finditer(data, max(0, near - SIGN), end)]):
            before = data[max(0, match.end() - 4) : match.end()].decode("utf-8", errors="ignore")
            if before and not before[-1].isspace():
                return match.end()
    return 0


def last_border(data: bytes | bytearray) -> int:
    """Where the last character of a text begins, or its last line end; of what is no UTF-8, a place where no more goes
    wrong on either side than in the whole."""
    last = len(data) - 1
    begin = next((place for place in range(last, last - LONGEST, -1) if data[place] & 0xC0 != 0x80), last)
    return begin - (data[begin - 1 : begin + 1] == b"\r\n")


def parts(text: str) -> Iterator[str]:
    """A text as parts of about a megabyte, or more where there is no place to cut it."""
    if len(text) <= PART:
        yield text
        return
    data, begin = utf8(text), 0
    for end in range(PART, len(data), PART):
        place = last_place(data, end - PART, end)
        if place > begin:
            yield data[begin:place].decode()
            begin = place
    yield data[begin:].decode()


def without_endless_words(text: str) -> Iterator[str]:
    """A text in parts again, for learning which pairs of characters are frequent: what stands without a space or sign
    for thousands of letters, such as DNA, is cut anywhere. A word takes the library time that grows as its square."""
    begin = 0
    for run in ENDLESS.finditer(text):
        for end in range(run.start() + LONG_WORD, run.end(), LONG_WORD):
            yield text[begin:end]
            begin = end
    yield text[begin:]
