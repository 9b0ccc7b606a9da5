"""Words looked up: the ids of the library, whatever the text."""

from __future__ import annotations

import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import TextError
from headway.text import BPE, lookup

PIECES = [
    *"ab1-,.’½é東京はカーｶ々。、・한ไ\U00020000",
    *("'s", "don't", "word", " ", "  ", "\t", "\n", "\u3000", "\xa0", "\x85", "\u2028", "\x1c", "\u0301", "\u3099"),
]
RICH = ["".join(random.Random(number).choices(PIECES, k=60)) for number in range(300)]
RULES = {
    "unspaced scripts apart": BPE.train(RICH, 1500),
    "runs of letters": BPE.train(["word don't a1, b'l ab " * 9, "é½ ab’s word"], 300),
}
TEXT = st.one_of(
    st.text(),
    st.lists(st.sampled_from(PIECES), max_size=150).map("".join),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x24FF)),
)


def test_both_rules_are_tried() -> None:
    kinds = [rule.to_json()["tokenizers"]["pre_tokenizer"]["type"] for rule in RULES.values()]
    assert kinds == ["Sequence", "ByteLevel"] and all(rule.by_words for rule in RULES.values())


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=500, deadline=None)
@given(text=TEXT)
def test_looking_words_up_gives_the_ids_of_the_library(rule: str, text: str) -> None:
    tokenizer = RULES[rule]
    wanted = tokenizer.encode_whole(text).tolist()
    assert tokenizer.encode(text) == wanted and tokenizer.decode(wanted) == text


@pytest.mark.parametrize("rule", RULES)
def test_looking_words_up_needs_to_know_every_character(rule: str) -> None:
    """One that was not seen yet is asked for at once, in whatever text it comes."""
    for text in ("a東", "a  東 b東東", "½1½", "b\u0301", "\u3000\u3000 a", "word\U0001d400"):
        fresh = RULES[rule].lookup(np.dtype("<u2"))
        assert np.frombuffer(fresh.encode(text), np.uint16).tolist() == RULES[rule].encode_whole(text).tolist()


@pytest.mark.parametrize("rule", RULES)
def test_all_rows_are_learned_after_a_few(rule: str) -> None:
    """Text of many scripts would make the rules anew again and again; what is learned at once is what each would be."""
    tokenizer = RULES[rule]
    fresh = tokenizer.lookup(np.dtype("<u2"))
    chosen = random.Random(0)
    for _ in range(300):
        text = "".join(
            chr(chosen.choice((chosen.randrange(0x3000), chosen.randrange(0xE000, 0x110000)))) for _ in range(9)
        )
        assert np.frombuffer(fresh.encode(text), np.uint16).tolist() == tokenizer.encode_whole(text).tolist()
    assert fresh.lessons == max(lookup.LESSONS) and len(fresh.rows) == 0x1100 - 8
    for code in (chosen.choice((chosen.randrange(0x3000), chosen.randrange(0xE000, 0x110000))) for _ in range(5000)):
        for name, partner in lookup.PARTNERS.items():
            assert (code in fresh.classes[name]) == (len(fresh.cut(partner + chr(code))) == 1), hex(code)


def test_many_scripts_do_not_slow_the_others_down() -> None:
    """What is learned at once after some lessons has few ranges beyond the basic plane, which are tried one by one."""
    fresh = RULES["runs of letters"].lookup(np.dtype("<u2"))
    for row in range(2, 40):
        fresh.encode(chr(row * lookup.ROW + 65))
    assert fresh.lessons == min(lookup.LESSONS)
    beyond = [part for part in re.findall(r"\\U(\w+)-", fresh.rules[1].pattern) if int(part, 16) > 0xFFFF]
    assert 0 < len(beyond) < 50


@pytest.mark.parametrize("text", ["\ud800", "a word, \udc00", "東\ud800"])
def test_half_a_surrogate_pair_is_refused_by_both(text: str) -> None:
    for way in (RULES["runs of letters"].encode, RULES["runs of letters"].encode_whole):
        with pytest.raises(TextError, match="half a surrogate pair"):
            way(text)


def test_several_threads_may_meet_strangers_at_once() -> None:
    """What one of them is just learning, the others wait for, or find whole."""
    texts = ["".join(chr(row * 256 + column) for column in range(33, 80)) + " ab1" for row in range(3, 40)]
    wanted = [RULES["runs of letters"].encode_whole(text).tolist() for text in texts]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(5):
            fresh = BPE(RULES["runs of letters"].to_json()["tokenizers"])
            fresh.encode("")

            def all_of_them(tokenizer: BPE = fresh) -> list[list[int]]:
                return [tokenizer.encode(text) for text in texts]

            with ThreadPoolExecutor(8) as pool:
                for found in [pool.submit(all_of_them) for _ in range(8)]:
                    assert found.result() == wanted
    finally:
        sys.setswitchinterval(interval)
