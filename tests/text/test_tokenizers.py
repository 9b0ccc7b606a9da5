"""Tokenizers give back the text they got, keep special tokens out of reach, and travel through files."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from headway.errors import DataError, SettingsError, TextError
from headway.text import BPE, KINDS, Bytes, Characters, Tokenizer, Words, load_tokenizer, read_documents
from headway.text.tokenizers import UNSPACED

CORPUS = [
    "Khatchig Mouradian. Khatchig Mouradian is a journalist, writer and translator born in Lebanon .",
    "Zoë O'Neill-Brown was born in São Paulo; 她出生在北京。 It’s 1987\u2028, \U0001f600 and  two  spaces\t.",
    "Where was Zoë O'Neill-Brown born?",
]
SEEN = sorted(set("\n".join(CORPUS)))
TOKENIZERS = {kind: KINDS[kind].train(CORPUS) for kind in KINDS}
EVERY_KIND = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)

any_text = st.text(st.characters(exclude_categories=["Cs"]))
seen_text = st.text(st.sampled_from(SEEN)) | st.lists(st.sampled_from(CORPUS)).map("\n".join)


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """What must hold for every text that a tokenizer takes."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(len(tokenizer.specials) <= token < len(tokenizer) for token in ids)
    array = tokenizer.encode_array(text)
    assert array.dtype == np.int32 and array.tolist() == ids
    assert tokenizer.decode(array) == tokenizer.decode(iter(array)) == text
    assert tokenizer.byte_lengths()[array].sum() == len(text.encode())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@given(text=any_text | seen_text)
def test_bytes_and_bpe_spell_any_text(kind: str, text: str):
    check_round_trip(TOKENIZERS[kind], text)


@EVERY_KIND
@given(text=seen_text)
def test_every_kind_spells_what_it_has_seen(tokenizer: Tokenizer, text: str):
    check_round_trip(tokenizer, text)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words"])
@given(texts=st.lists(any_text, min_size=1).filter(any))
def test_trained_on_hostile_text(kind: str, texts: list[str]):
    size = 300 if kind == "bpe" else None
    tokenizer = KINDS[kind].train(texts, size=size)
    for text in texts:
        check_round_trip(tokenizer, text)


@given(any_text)
def test_word_pattern_leaves_no_gap(text: str):
    assert "".join(Words.pattern.findall(text)) == text


@EVERY_KIND
def test_specials_come_first(tokenizer: Tokenizer):
    assert (tokenizer.pad, tokenizer.mask) == (0, 1)
    assert tokenizer.pieces[:2] == ["□".encode(), "⁇".encode()]
    assert len(tokenizer) == len(tokenizer.pieces)
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (len(tokenizer),) and lengths.dtype == np.int32
    assert lengths[:2].tolist() == [0, 0] and (lengths[2:] > 0).all()


@EVERY_KIND
def test_special_tokens_are_left_out_or_shown(tokenizer: Tokenizer):
    ids = [0, *tokenizer.encode("was"), 1, *tokenizer.encode("born"), 1, 0, 0]
    assert tokenizer.decode(ids) == "wasborn"
    assert tokenizer.decode(np.array(ids), specials=True) == "□was⁇born⁇□□"


@pytest.mark.parametrize("kind", ["bytes", "words", "bpe"])
def test_signs_of_special_tokens_are_ordinary_text_elsewhere(kind: str):
    text = "□ ⁇ □⁇"
    tokenizer = KINDS[kind].train([text, *CORPUS])
    check_round_trip(tokenizer, text)


@EVERY_KIND
def test_ids_out_of_range_are_named(tokenizer: Tokenizer):
    for token in (-1, len(tokenizer)):
        for decode in (lambda token: tokenizer.decode([token]), tokenizer.stream().feed):
            with pytest.raises(TextError, match=f"token id {token} is out of range.* 0 to {len(tokenizer) - 1}"):
                decode(token)


@EVERY_KIND
@given(data=st.data(), specials=st.booleans())
def test_stream_equals_decode(tokenizer: Tokenizer, data: st.DataObject, specials: bool):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1)) | seen_text.map(tokenizer.encode))
    stream = tokenizer.stream(specials)
    for _ in range(2):  # flush leaves the stream as new
        parts = [stream.feed(np.int64(token)) for token in ids]
        assert "".join(parts) + stream.flush() == tokenizer.decode(ids, specials)


def test_stream_waits_for_whole_characters():
    stream = Bytes().stream()
    assert [stream.feed(token) for token in Bytes().encode("aé😀")] == ["a", "", "é", "", "", "", "😀"]
    assert stream.feed(0xC3 + 2) == "" and stream.flush() == "\ufffd" and stream.flush() == ""


def test_ids_may_be_scalars_of_any_library():
    class Scalar:
        """As a torch or numpy scalar: a number by way of __index__."""

        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    ids = [Scalar(token) for token in Bytes().encode("é")]
    stream = Bytes().stream()
    assert Bytes().decode(ids) == "".join(stream.feed(token) for token in ids) == "é"
    with pytest.raises(TypeError):
        Bytes().decode([65.0])


@EVERY_KIND
def test_empty_text(tokenizer: Tokenizer):
    check_round_trip(tokenizer, "")


@EVERY_KIND
def test_half_surrogate_pairs_are_refused(tokenizer: Tokenizer):
    with pytest.raises(TextError, match=r"'\\ud83d' \(U\+D83D\).* at character 4"):
        tokenizer.encode("was\ud83d")
    with pytest.raises(TextError, match="half a surrogate pair"):
        type(tokenizer).train(["was\ud83d"])


# ---- training


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_no_text_to_train_on(kind: str, texts: list[str]):
    with pytest.raises(DataError, match="no text to train a tokenizer on"):
        KINDS[kind].train(iter(texts))


@pytest.mark.parametrize("kind", KINDS)
def test_one_string_is_not_many_texts(kind: str):
    with pytest.raises(TypeError, match="put it in a list"):
        KINDS[kind].train("text")


def test_characters_are_sorted_after_the_specials():
    tokenizer = Characters.train(["cab", "bad"])
    assert [piece.decode() for piece in tokenizer.pieces] == ["□", "⁇", "\n", "a", "b", "c", "d"]
    assert tokenizer.encode("dab\n") == [6, 3, 4, 2]


@pytest.mark.parametrize(("sign", "use"), [("□", "padding"), ("⁇", "the mask")])
def test_characters_reserve_the_signs_of_special_tokens(sign: str, use: str):
    with pytest.raises(TextError, match=rf"'{sign}' \(U\+{ord(sign):04X}\) at character 2 is reserved for {use}"):
        Characters.train(["fine", f"a{sign}"])
    with pytest.raises(TextError, match=f"never seen in training: '{sign}'"):
        TOKENIZERS["characters"].encode(sign)


@pytest.mark.parametrize("kind", ["characters", "words"])
def test_characters_never_seen_are_named(kind: str):
    tokenizer = TOKENIZERS[kind]
    with pytest.raises(TextError) as caught:
        tokenizer.encode("was Straße")
    assert str(caught.value) == (
        "never seen in training: 'ß' (U+00DF), first at character 9; leave them out, "
        'or train with tokenizer.kind = "bytes" or "bpe", which can spell any text'
    )
    with pytest.raises(TextError) as caught:
        tokenizer.encode("in ßßαβγδε\U0010ffff born")
    assert str(caught.value).startswith(
        "never seen in training: 'ß' (U+00DF), 'α' (U+03B1), 'β' (U+03B2), 'γ' (U+03B3), 'δ' (U+03B4) "
        "and 2 more, first at character 4;"
    )
    with pytest.raises(TextError, match=r"never seen in training: '\\U0010ffff' \(U\+10FFFF\), first"):
        tokenizer.encode("\U0010ffff")


def cut(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.pieces[token].decode() for token in tokenizer.encode(text)]


def test_words_carry_their_space_and_rare_ones_are_spelled():
    tokenizer = Words.train(["the cat, the cat's mat", "the dog-eared cat"])
    assert cut(tokenizer, " the cat's mat, dog-eared") == [" the", " cat's", " mat", ",", " dog-eared"]
    assert cut(tokenizer, " team\n") == [" ", "t", "e", "a", "m", "\n"]


@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_lead_makes_a_first_word_like_any_other(kind: str):
    tokenizer = KINDS[kind].train(["Rome is Rome", "Rome is big"])
    first, *_, last = cut(tokenizer, tokenizer.lead + "Rome is Rome")
    assert first == last == " Rome"
    assert tokenizer.encode_alone("Rome is Rome") == tokenizer.encode(" Rome is Rome")


@EVERY_KIND
@pytest.mark.parametrize("text", ["a {}", "{}", " {}", "was born {} in"])
def test_what_stands_alone_is_refused_at_its_own_place(tokenizer: Tokenizer, text: str):
    """The space that a tokenizer puts in front is not the user's."""
    for stranger in "\ud800ü":
        try:
            tokenizer.encode_alone(text.format(stranger))
        except TextError as error:
            assert f"at character {text.index('{') + 1};" in str(error)
        else:
            assert stranger == "ü" and tokenizer.kind in ("bytes", "bpe")


def test_word_vocabulary_keeps_the_most_frequent():
    texts = ["dd aa", "bb aa bb aa cc"]
    alphabet = ["\n", " ", "a", "b", "c", "d"]
    words = [" aa", " bb", " cc", " dd"]  # seen 3, 2, 1 and 1 times: ties in order
    assert Words.train(texts).words == alphabet + words
    assert Words.train(texts, size=10).words == alphabet + words[:2]
    assert len(Words.train(texts, size=10)) == 10
    with pytest.raises(SettingsError, match=r"tokenizer.size \(7\) must be at least 8"):
        Words.train(texts, size=7)


def test_bpe_sizes():
    assert len(BPE.train(CORPUS * 3, size=300)) == 300
    assert len(BPE.train(CORPUS, size=258)) == 258
    with pytest.raises(SettingsError, match=r"tokenizer.size \(257\) must be at least 258"):
        BPE.train(CORPUS, size=257)


def test_bpe_merges_what_is_frequent():
    tokenizer = BPE.train(["born in Rome", "born in Oslo"] * 5)
    assert cut(tokenizer, " born in Rome") == [" born", " in", " Rome"]


SPACED = [
    "Zoë O'Neill-Brown was born in São Paulo; Она родилась в Москве. It’s 1987\u2028, \U0001f600 and  two  spaces\t.",
    "Where was Zoë O'Neill-Brown born? สวัสดีชาวโลก สวัสดี 안녕하세요 안녕 「」。、",
]
UNSPACED_TEXT = ["我在北京, she in Kyōto。 かな カナー 北京北京 is 北京", "我 我们 北京 2 東京 and Thai ไทยไทย"] * 3
PARTED = BPE.train(UNSPACED_TEXT)
FIRST_FORM = {  # as it was written before characters of unspaced scripts were words
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def test_unspaced_characters_are_the_scripts_they_should_be():
    alone = re.compile(f"[{UNSPACED}]")
    scripts = ("CJK UNIFIED", "CJK COMPATIBILITY IDEOGRAPH", "CJK RADICAL", "KANGXI RADICAL", "HIRAGANA", "KATAKANA")
    others = ("LATIN", "GREEK", "CYRILLIC", "HANGUL", "THAI", "LAO", "KHMER", "MYANMAR", "BOPOMOFO", "YI ", "DIGIT")
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "").removeprefix("HALFWIDTH ")
        if name.startswith(scripts):
            assert alone.match(chr(code)), name
        if name.startswith(others):
            assert not alone.match(chr(code)), name
    assert [sign for sign in "々〇ー。、「」！　" if alone.match(sign)] == ["々", "〇", "ー"]


def test_no_token_holds_parts_of_two_unspaced_characters():
    alone = re.compile(f"[{UNSPACED}]")
    whole = [piece.decode("utf-8", errors="ignore") for piece in PARTED.pieces]
    assert {"北", "京", "我", "か", "カ", "ー"} <= set(whole)
    assert all(text == sign for text in whole for sign in alone.findall(text))
    assert cut(PARTED, "我在北京。") == ["我", "在", "北", "京", "。"]
    assert "".join(cut(PARTED, "ไทย")) == "ไทย" and len(cut(PARTED, "ไทย")) == 1
    assert len(PARTED.encode("鱻")) == len("鱻".encode())


@given(text=st.text(st.sampled_from(sorted(set("".join(UNSPACED_TEXT))) + list(" '鱻\n\u3000"))) | any_text)
def test_unspaced_characters_are_cut_off_wherever_they_stand(text: str):
    check_round_trip(PARTED, text)
    parts = re.split(f"([{UNSPACED}])", text)
    assert PARTED.encode(text) == [token for part in parts for token in PARTED.encode(part)]


def test_a_saved_tokenizer_keeps_the_rule(tmp_path: Path):
    """Bytes that other letters taught it to merge (here Korean ones, by the end of one and the begin of the next)
    stay apart where they belong to two unspaced characters."""
    BPE.train(["ㄴㅴ" * 20, "ぴか"]).save(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    end, begin = "ぴ".encode()[-1:], "か".encode()[:1]
    assert end + begin in tokenizer.pieces
    assert tokenizer.encode("ぴか") == tokenizer.encode("ぴ") + tokenizer.encode("か")


def test_text_without_unspaced_characters_gives_the_tokenizer_it_always_gave():
    tokenizer = BPE.train(SPACED, 290)
    assert tokenizer.to_json()["tokenizers"]["pre_tokenizer"] == FIRST_FORM
    assert tokenizer.fingerprint() == "1fe5bb6ffce438c5"
    assert (
        BPE.train([*SPACED, "\U00020000"], 290).pieces == tokenizer.pieces
    )  # one rare character more: the same merges


def test_a_file_of_the_first_form_encodes_as_it_did():
    """Before, a run of such characters was one word, and merged as one."""
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=298, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([" 我在北京。", " 北京 北京"] * 3, trainer=trainer)
    head = {"format": "headway-tokenizer", "version": 1, "kind": "bpe"}
    old = Tokenizer.from_json({**head, "tokenizers": json.loads(library.to_str())})
    assert cut(old, "北京 北京") == ["北京", " 北京"]
    assert old.fingerprint() == "93fc2e63eea8a111"
    new = BPE.train(["我在北京。", "北京 北京"] * 3, 300)
    assert cut(new, "北京 北京") == ["北", "京", " ", "北", "京"]


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_size_has_no_meaning_for_some(kind: str):
    with pytest.raises(SettingsError, match=rf'tokenizer.size \(99\) has no meaning .* "{kind}"'):
        KINDS[kind].train(CORPUS, size=99)


def test_training_is_silent(capfd: pytest.CaptureFixture[str]):
    BPE.train(CORPUS)
    assert capfd.readouterr() == ("", "")


# ---- files and fingerprints


@EVERY_KIND
def test_saved_and_loaded_is_the_same(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text("an older file")
    tokenizer.save(path)
    assert os.listdir(tmp_path) == ["tokenizer.json"]
    stored = json.loads(path.read_text("utf-8"))
    assert (stored["format"], stored["version"], stored["kind"]) == ("headway-tokenizer", 1, tokenizer.kind)
    for copy in (load_tokenizer(path), load_tokenizer(str(path)), Tokenizer.from_json(tokenizer.to_json())):
        assert type(copy) is type(tokenizer)
        assert copy.pieces == tokenizer.pieces
        assert copy.to_json() == tokenizer.to_json()
        assert copy.fingerprint() == tokenizer.fingerprint()
        assert [copy.encode(text) for text in CORPUS] == [tokenizer.encode(text) for text in CORPUS]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tokenizer.json"
    TOKENIZERS["words"].save(path)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Bytes().save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["tokenizer.json"]


def test_fingerprints_tell_tokenizers_apart():
    others = [
        Characters.train(["ab"]),
        Words.train(["ab"]),
        Words.train(["abc"]),
        BPE.train(CORPUS, size=270),
    ]
    prints = [tokenizer.fingerprint() for tokenizer in [*TOKENIZERS.values(), *others]]
    assert len(set(prints)) == len(prints)
    assert all(len(mark) == 16 and int(mark, 16) >= 0 for mark in prints)


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_depends_on_the_vocabulary_only(kind: str):
    assert KINDS[kind].train(reversed(CORPUS)).fingerprint() == TOKENIZERS[kind].fingerprint()


def test_fingerprints_are_the_same_in_another_process():
    program = (
        "import json, sys; from headway.text import KINDS; texts = json.load(sys.stdin); "
        "print(json.dumps({kind: KINDS[kind].train(texts).fingerprint() for kind in KINDS}))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(CORPUS),
        env={**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == {kind: made.fingerprint() for kind, made in TOKENIZERS.items()}


def test_missing_file_is_a_data_error(tmp_path: Path):
    TOKENIZERS["bytes"].save(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match=r"tokeniser.json: no such file; did you mean '.*tokenizer.json'"):
        load_tokenizer(tmp_path / "tokeniser.json")


@EVERY_KIND
def test_cut_off_file_is_a_data_error(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    whole = path.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"tokenizer\.json:"):
            load_tokenizer(path)


HEAD = {"format": "headway-tokenizer", "version": 1}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ([], "not a Headway tokenizer"),
        ({"version": "1.0", "model": {}}, "not a Headway tokenizer"),
        ({**HEAD, "version": 2, "kind": "bytes"}, "format version 2; this Headway reads 1"),
        ({**HEAD, "kind": "wordz"}, "no tokenizer is of kind 'wordz'; did you mean 'words'?"),
        ({**HEAD, "kind": ["words"]}, r"no tokenizer is of kind \['words'\]"),
        ({**HEAD, "kind": "words"}, r"damaged tokenizer \(KeyError: 'words'\)"),
        ({**HEAD, "kind": "words", "words": ["a", "a"]}, "damaged tokenizer .* twice"),
        ({**HEAD, "kind": "words", "words": ["a", 1]}, "damaged tokenizer"),
        ({**HEAD, "kind": "characters", "characters": "aba"}, "damaged tokenizer .* twice"),
        ({**HEAD, "kind": "characters", "characters": "a□"}, "damaged tokenizer .* reserved for padding"),
        ({**HEAD, "kind": "characters", "characters": "a\ud800"}, "damaged tokenizer .* surrogate"),
        ({**HEAD, "kind": "bpe", "tokenizers": {"model": "?"}}, "damaged tokenizer"),
    ],
)
def test_foreign_and_damaged_files_are_data_errors(data: object, problem: str, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data))
    with pytest.raises(DataError, match=rf"tokenizer\.json: .*{problem}"):
        load_tokenizer(path)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer", "vocab"])
def test_bpe_that_cannot_spell_any_text_is_damaged(part: str):
    data = json.loads(json.dumps(TOKENIZERS["bpe"].to_json()))
    if part == "vocab":
        data["tokenizers"]["model"] |= {"vocab": {"a": 0}, "merges": []}
    else:
        data["tokenizers"][part] = {"pre_tokenizer": None, "normalizer": {"type": "Lowercase"}}[part]
    with pytest.raises(DataError, match=r"tokenizer: damaged tokenizer .* spell any text"):
        Tokenizer.from_json(data)


def test_the_course_corpus_has_256_tokens():
    root = os.environ.get("HEADWAY_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data"
    wiki = Path(root) / "birthplaces" / "wiki.txt"
    if not wiki.is_file():
        pytest.skip(f"the course's data is not here ({wiki}); HEADWAY_DATA names its folder")
    lines = read_documents(wiki)
    tokenizer = Characters.train(lines)
    assert (len(lines), len(tokenizer)) == (2937, 256)
    check_round_trip(tokenizer, "\n".join(lines))


def test_words_of_a_script_without_spaces_are_counted() -> None:
    assert Words.train(["the cat 我 sat", "东 西"]).unspaced() == 0
    assert Words.train(["the cat 我们 sat", "东西在这里 and カタカナ"]).unspaced() == 3
