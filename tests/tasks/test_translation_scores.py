"""BLEU and chrF are sacrebleu's, said with their signatures; buckets of lengths hold every sentence once."""

from __future__ import annotations

from pathlib import Path

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from headway.commands import details
from headway.console import scores
from headway.report.comparison import length_table, plot_comparison
from headway.tasks.translation_scores import by_length, corpus_scores, count_words, tokenizer_for, unit_of

ENGLISH = ["A dog runs over the grass.", "Two children play in a big park today.", "It rains, again."]
WRITTEN = ["A dog runs on the grass.", "Two children play in the big park.", "It rains, again."]
CHINESE = ["我们明天去学校。", "他喜欢在公园里跑步。"]
WRITTEN_CHINESE = ["我们明天去学习。", "他喜欢在公园跑步。"]


@pytest.mark.parametrize(
    ("written", "wanted", "tokenize"), [(WRITTEN, ENGLISH, "13a"), (WRITTEN_CHINESE, CHINESE, "zh")]
)
def test_scores_are_those_of_sacrebleu(written: list[str], wanted: list[str], tokenize: str) -> None:
    assert tokenizer_for(wanted) == tokenize
    found = corpus_scores(written, wanted, tokenize)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(written, [wanted], tokenize=tokenize).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(written, [wanted]).score)
    assert 10 < found["bleu"] < 100 and found["exact"] == pytest.approx(1 / 3 if tokenize == "13a" else 0)
    assert f"tok:{tokenize}|" in found["signature"] and "version:" in found["signature"]
    assert "nc:6|" in found["chrf_signature"]


def test_signatures_are_shown_with_the_scores() -> None:
    found = {**corpus_scores(WRITTEN, ENGLISH, "13a"), "sentences": 3, "token_accuracy": 0.75, "tokens": 1200}
    shown = "\n".join([*scores(found), *details(found)])
    assert f"BLEU {found['bleu']:.1f}" in shown and found["signature"] in shown and found["chrf_signature"] in shown
    assert "exactly the reference: 33.3% of 3 sentences" in shown and "token accuracy: 75.0% of 1,200, each" in shown


def test_chinese_is_told_by_most_of_its_letters() -> None:
    assert tokenizer_for(["他说 OK。", "我们用 Python 写程序，很开心。"]) == "zh"
    assert tokenizer_for(["He said 你好 and left.", "12,5 %"]) == tokenizer_for([]) == "13a"


def test_japanese_is_told_by_its_kana_and_cut_at_every_character() -> None:
    """A wrong ending costs a character, not the whole run of kana that it stands in."""
    japanese = ["私は昨日学校へ行きました。", "コーヒーを飲みませんか。"]
    assert tokenizer_for(japanese) == tokenizer_for(["ﾃﾚﾋﾞをみます"]) == "char"
    assert tokenizer_for(["我们在の字旁边等你，请明天早上来学校。"]) == "zh"  # one for show
    assert tokenizer_for(["나는 어제 학교에 갔습니다."]) == "13a"  # Hangul has spaces
    kana = ["わたしはきのうがっこうへいきました。", "コーヒーをのみませんか。"]
    near = [text.replace("ました", "ます").replace("ません", "ます") for text in kana]
    cut = corpus_scores(near, kana, tokenizer_for(kana))
    assert cut["bleu"] > 2 * corpus_scores(near, kana, "zh")["bleu"] and "tok:char|" in cut["signature"]


def test_words_are_counted_by_spaces_or_by_characters() -> None:
    assert [count_words(text) for text in ("a b  c", "我们去学校", "我用 Python 写", "", "。")] == [3, 5, 4, 1, 1]
    assert (unit_of(ENGLISH), unit_of(CHINESE), unit_of([])) == ("words", "characters", "words")


def test_lengths_are_shown_in_what_they_are_counted_in(tmp_path: Path) -> None:
    bucket = {"name": "1–8", "low": 1, "bleu": 30.0, "sentences": 5}
    chinese, english = ({"by_length": [bucket], "length_in": unit_of(texts)} for texts in (CHINESE, ENGLISH))
    assert list(details(chinese)) == ["BLEU by characters of the source (sentences): 1–8: 30.0 (5)"]
    for found, words in (([chinese], "characters"), ([english], "words"), ([chinese, english], "words or characters")):
        scored = {Path(str(number)): each for number, each in enumerate(found)}
        assert length_table("test", scored).startswith(f"test BLEU by {words} of the source  1–8")
        plot_comparison([], tmp_path / "plot.svg", "test", scored)
        assert f"{words} of the source" in (tmp_path / "plot.svg").read_text()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_every_sentence_is_in_one_bucket(lengths: list[int]) -> None:
    sources = [" ".join("x" * length) for length in lengths]
    found = by_length(sources, sources, sources, "none")
    assert sum(bucket.sentences for bucket in found) == len(sources)
    for bucket in found:
        inside = [n for n in lengths if bucket.low <= max(1, n) and (bucket.high is None or max(1, n) <= bucket.high)]
        assert bucket.sentences == len(inside) > 0 and bucket.exact == 1
    assert [bucket.low for bucket in found] == sorted(bucket.low for bucket in found)


def test_a_bucket_is_scored_by_its_own_sentences() -> None:
    sources = ["w " * 3, "w " * 10, "w " * 3]
    short, long = by_length(sources, WRITTEN, ENGLISH, "13a")
    rows = [0, 2]
    expected = sacrebleu.corpus_bleu([WRITTEN[row] for row in rows], [[ENGLISH[row] for row in rows]]).score
    assert short.bleu == pytest.approx(expected) and (short.name, short.exact) == ("1–8", 0.5)
    assert long.bleu == pytest.approx(sacrebleu.corpus_bleu(WRITTEN[1:2], [ENGLISH[1:2]]).score)
    assert (long.name, long.sentences) == ("9–12", 1)
