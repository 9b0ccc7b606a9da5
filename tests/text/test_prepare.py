"""Preparing shards: the tokens of the plain way, whatever the blocks, the workers and the moments it is killed at."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import io
import json
import lzma
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.cli import run_command
from headway.console import Lines
from headway.errors import DataError, Interrupted, RunError, SettingsError, UserError
from headway.tasks.corpus import Corpus
from headway.text import BPE, KINDS, Bytes, Characters, Tokenizer, Words, plain, read_documents, shards
from headway.text.preparation import blocks, prepare, sources
from headway.text.preparation import pipeline as preparing
from headway.text.preparation.blocks import Reading
from headway.text.preparation.sources import Source
from headway.text.preparation.workers import Worker, workers
from headway.text.shards import Shards, Writer

STORY = [
    "It was the best of times, it was the worst of times.",
    "  Ærø isn't in Москва; 東京 has 13,960,236 people — or so they'd say…",
    "",
    "tab\there, a dash - and 'quotes', \"more\"",
    "We're 2½ hours\u3000late\xa0again!!!   ",
] * 3
FORMS = ("txt", "jsonl", "tsv", "csv")
PACKERS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names in messages are short; blocks are so small that a few lines make many."""
    monkeypatch.chdir(tmp_path)
    small_blocks(monkeypatch)


def small_blocks(monkeypatch: pytest.MonkeyPatch, size: int = 64) -> None:
    monkeypatch.setattr(blocks, "BLOCK", size)
    monkeypatch.setattr(blocks, "LONG_LINE", 4 * size)


def write(name: str, content: str | bytes) -> str:
    """A file with exactly these bytes, packed as its name says."""
    raw = content.encode() if isinstance(content, str) else content
    Path(name).write_bytes(PACKERS.get(Path(name).suffix, bytes)(raw))
    return name


def story(form: str, packed: str = "", name: str = "story") -> str:
    """The story as a file of this form."""
    if form == "csv":
        table = io.StringIO()
        csv.writer(table).writerows([["id", "text"], *([number, text] for number, text in enumerate(STORY))])
        content = table.getvalue()
    elif form == "tsv":
        content = "id\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(STORY)).replace("tab\t", "tab ")
    elif form == "jsonl":
        content = "".join(json.dumps({"id": n, "text": text}) + "\n\n" for n, text in enumerate(STORY))
    else:
        content = "\n".join(STORY)
    return write(f"{name}.{form}{packed}", content)


def tokenizer_of(kind: str) -> Tokenizer:
    return KINDS[kind].train([*STORY, "\t\n"])


def expected(texts: list[str], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """(tokens, starts) as a task makes them from texts in memory."""
    corpus = Corpus.encode(texts, tokenizer, "", closing=len(texts) > 1)
    return corpus.tokens.tolist(), corpus.starts[:-1].tolist()


def contents(found: Shards) -> tuple[list[int], list[int]]:
    return found.tokens[:].tolist(), found.starts[:].tolist()


def files_of(folder: str | Path) -> dict[str, bytes]:
    """Every file by its name; the lock aside."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != ".lock"}


def remembered(folder: str, shard: str) -> bool:
    """Whether a preparation that goes on will know that this shard is whole."""
    try:
        return shard in Path(folder, "unfinished.json").read_text()
    except FileNotFoundError:
        return False


def refusal(*arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as caught:
        prepare(*arguments, **options)
    return str(caught.value)


# ---- the same tokens as the plain way


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_shards_hold_the_tokens_of_the_file(form: str, kind: str) -> None:
    path, tokenizer = story(form), tokenizer_of(kind)
    made = prepare([path], "out", tokenizer, shard_tokens=100)
    assert contents(made) == expected(read_documents(path), tokenizer)
    assert len(made.index.shards) == -(-len(made.tokens) // 100) > 1
    made.verify()
    assert [tokenizer.decode(made.document(number)).removeprefix(tokenizer.lead) for number in range(len(made))] == [
        text.replace("tab\t", "tab ") if form == "tsv" else text for text in STORY if text
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_one_document_is_cut_where_no_token_is(kind: str) -> None:
    path, tokenizer = story("txt"), tokenizer_of(kind)
    made = prepare([path], "out", tokenizer, documents="file")
    assert contents(made) == expected(read_documents(path, documents="file"), tokenizer)
    assert tokenizer.mask not in made.tokens[:]  # one document has no mark to close it
    both = prepare([path, story("txt", name="other")], "both", tokenizer, documents="file")
    assert contents(both) == expected(read_documents("*.txt", documents="file"), tokenizer)


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("form", ["txt", "csv"])
def test_packed_files_are_unpacked(packed: str, form: str) -> None:
    tokenizer = Bytes()
    plain, other = story(form), story(form, packed, "packed")
    assert contents(prepare([other], "out", tokenizer)) == expected(read_documents(plain), tokenizer)


@pytest.mark.parametrize("padding", [b"", bytes(8)], ids=["", "padded"])
@pytest.mark.parametrize("packed", [".gz", ".bz2", ".xz"])
def test_every_stream_of_a_packed_file_is_read_or_refused(packed: str, padding: bytes) -> None:
    """As `cat a.xz b.xz` and `pbzip2` make them: text behind a stream that Python's own readers take for the last."""
    raw = Path(story("txt")).read_bytes()
    parts = [b"", raw[:100], b"", raw[100:], b""]
    streams = [PACKERS[packed](part) + padding for part in parts]
    Path(f"a.txt{packed}").write_bytes(b"".join(streams))
    assert contents(prepare([f"a.txt{packed}"], "a", "bytes")) == expected(read_documents("story.txt"), Bytes())
    last = bytearray(streams[3])
    last[len(last) // 2] ^= 1
    for name, ending in {"cut": streams[3][: -len(padding) - 5], "bits": bytes(last), "more": b"no stream"}.items():
        path = f"{name}.txt{packed}"
        Path(path).write_bytes(b"".join(streams[:3]) + ending)
        assert f"{path}: broken or cut-off" in refusal([path], name, "bytes", errors="replace")


def test_zstd_in_several_frames_and_cut_off() -> None:
    zstandard = pytest.importorskip("zstandard")
    raw = Path(story("txt")).read_bytes()
    frames = [zstandard.compress(part) for part in (raw[:100], raw[100:])]
    Path("a.txt.zst").write_bytes(b"".join(frames))
    assert contents(prepare(["a.txt.zst"], "out", "bytes")) == expected(read_documents("story.txt"), Bytes())
    Path("b.txt.zst").write_bytes(b"".join(frames)[:-5])
    assert "b.txt.zst: broken or cut-off zstd file" in refusal(["b.txt.zst"], "b", "bytes")


def test_zstd_frames_without_text_are_skipped_wherever_they_stand() -> None:
    zstandard = pytest.importorskip("zstandard")
    void = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"  # pzstd writes one in front of every frame
    raw = Path(story("txt")).read_bytes()
    Path("a.txt.zst").write_bytes(b"".join(void + zstandard.compress(part) for part in (raw[:100], raw[100:])) + void)
    assert contents(prepare(["a.txt.zst"], "out", "bytes")) == expected(read_documents("story.txt"), Bytes())


def test_zstd_of_what_repeats_itself_is_unpacked_bit_by_bit() -> None:
    zstandard = pytest.importorskip("zstandard")
    with open("a.txt.zst", "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        for _ in range(200):
            packed.write(b"the same line again\n" * 50_000)
    with sources.Unpacked("a.txt.zst") as stream:
        assert stream.read(20) == b"the same line again\n"
        assert len(stream.stream.waiting) < 128 << 20 < 200_000_000


def test_zstd_with_a_large_window_is_not_broken() -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(packed, closefd=False) as stream:
        stream.write(b"some words\n")
    for exponent, read in ((27, True), (28, False), (31, False)):  # of the window's size
        frame = bytearray(packed.getvalue())
        frame[5] = (exponent - 10) << 3
        Path("a b.txt.zst").write_bytes(frame)
        if read:
            prepare(["a b.txt.zst"], "out", "bytes")
        else:
            message = refusal(["a b.txt.zst"], "x", "bytes")
            assert message.startswith("a b.txt.zst: packed with a window of more than 128 MB")
            assert message.endswith("unpack it first: zstd -d --long=31 'a b.txt.zst'")


def test_parquet(monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"id": list(range(len(STORY))), "text": STORY, "title": [None, *STORY[1:]]})
    parquet.write_table(table, "a.parquet", row_group_size=4)
    texts = [text for text in STORY if text]
    made = prepare(["a.parquet"], "out", "characters", shard_tokens=50)
    assert contents(made) == expected(texts, Characters.train(texts))
    assert contents(prepare(["a.parquet"], "titles", Bytes(), column="title")) == expected(texts[1:], Bytes())
    with monkeypatch.context() as patch:  # killed after three shards
        fail_after(patch, 3)
        refusal(["a.parquet"], "stopped", "characters", shard_tokens=50)
    prepare(["a.parquet"], "stopped", "characters", shard_tokens=50, resume=True)
    assert files_of("stopped") == files_of("out")
    assert refusal(["a.parquet"], "x", Bytes(), column="txet").startswith(
        "a.parquet: no column 'txet'; did you mean 'text'? known: "
    )
    assert "column 'id' is int64, where text is wanted" in refusal(["a.parquet"], "x", Bytes(), column="id")
    Path("b.parquet").write_bytes(Path("a.parquet").read_bytes()[:-9])
    assert "b.parquet: broken or cut-off parquet file" in refusal(["b.parquet"], "x", Bytes())


def test_parquet_is_read_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group may hold any number of rows, and each may be a book."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["some words"] * 20_000}), "a.parquet")
    read: list[int] = []

    class Watched(parquet.ParquetFile):
        def iter_batches(self, *arguments: Any, **options: Any) -> Any:
            for batch in super().iter_batches(*arguments, **options):
                read.append(len(batch))
                yield batch

    monkeypatch.setattr(parquet, "ParquetFile", Watched)
    taken = 0
    for block in blocks.blocks([Source.at("a.parquet")], Reading()):
        taken += block.data.count if block.data is not None else 0
        assert sum(read) - taken <= 256
    assert taken == sum(read) == 20_000


def test_columns_of_parquet_that_are_no_text_or_share_a_name() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    nested = {"list": [["a", "b"], ["c"]], "struct": [{"a": "x"}, {"a": "y"}]}
    for name, cells in nested.items():
        parquet.write_table(pyarrow.table({"text": cells}), "a.parquet")
        assert f"column 'text' is {name}<" in refusal(["a.parquet"], "x", Bytes())
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())):
        parquet.write_table(pyarrow.table({"text": pyarrow.array(["one", "two"]).cast(kind)}), "a.parquet")
        assert contents(prepare(["a.parquet"], str(kind), Bytes())) == expected(["one", "two"], Bytes())
    columns = [pyarrow.array(each) for each in (["x", "y"], ["one", "two"])]
    parquet.write_table(pyarrow.table(columns, names=["text", "text"]), "a.parquet")
    assert contents(prepare(["a.parquet"], "second", Bytes(), column=1)) == expected(["one", "two"], Bytes())
    inside = {"text": [{"en": "uno"}] * 2, "text.en": ["one", "two"]}  # a name that also leads into a column
    parquet.write_table(pyarrow.table(inside), "a.parquet")
    assert contents(prepare(["a.parquet"], "dot", Bytes(), column="text.en")) == expected(["one", "two"], Bytes())


def test_folders_patterns_and_the_order_of_files() -> None:
    Path("in/deep").mkdir(parents=True)
    for name, text in {"in/b.txt": "b", "in/a.jsonl": '{"text": "a"}', "in/deep/c.csv": "text\nc\n"}.items():
        write(name, text)
    write("in/notes.md", "not read")
    write("z.txt", "z")
    made = prepare(["z.txt", "in", "in/*.txt"], "out", Bytes())
    assert made.tokenizer.decode(made.tokens[:], specials=True) == "z⁇a⁇b⁇c⁇b⁇"
    names = [Path(source["path"]).name for source in made.index.sources]
    assert names == ["z.txt", "a.jsonl", "b.txt", "c.csv", "b.txt"]


PIECES = [
    *"ab1-,.’½é東。_",
    '":"',
    "'s",
    "\u0301",
    "don't",
    "word",
    " ",
    " ",
    "  ",
    "\t",
    "\u3000",
    "\xa0",
    "\x85",
    "\u2028",
    "\x1c",
]
ENDS = ["\n", "\r", "\r\n", "\n\n"]
TEXT = st.lists(st.sampled_from([*PIECES, *PIECES, *ENDS]), max_size=150).map("".join)
LONE = [*"ab東\u0301😀", "x" * 30, "\u3000", "\t", "\r", "\n", "\r\n"]
PLACELESS = st.lists(st.sampled_from(LONE), max_size=60).map("".join)
"""Text that is mostly to be cut between two characters alone, if at all."""
RICH = ["".join(random.Random(number).choices([*PIECES, "\n"], k=60)) for number in range(300)]
"""Texts in which any two pieces stand together often, so that a cut at a wrong place shows in the tokens."""
LEARNED = {kind: KINDS[kind].train([*RICH, "x😀"], {"words": 2000, "bpe": 1500}.get(kind)) for kind in KINDS}


@settings(max_examples=300, deadline=None)
@given(
    text=TEXT | PLACELESS,
    size=st.integers(1, 60),
    kind=st.sampled_from(sorted(KINDS)),
    documents=st.sampled_from(["lines", "file"]),
)
def test_where_blocks_end_changes_no_token(text: str, size: int, kind: str, documents: str, tmp_path_factory) -> None:
    """Every block encoded alone, against the whole file at once."""
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(text.encode())
    if not text.strip():
        return
    whole = read_documents(path, documents=documents)
    assert in_blocks(path, size, kind, documents) == [
        token for each in whole for token in (1, *LEARNED[kind].encode(LEARNED[kind].lead + each))
    ]


def in_blocks(path: Path, size: int, kind: str, documents: str) -> list[int]:
    """The tokens of a file, block by block, each document with a mark in front."""
    reading = preparing.cut_for(Reading(documents), LEARNED[kind])
    worker = Worker(reading, LEARNED[kind])
    tokens: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, size)
        for block in blocks.blocks([Source.at(str(path))], reading):
            if block.data is not None:
                tokens += np.frombuffer(worker.encode(block).tokens, np.uint16).tolist()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_long_lines_and_short_ones_in_any_blocks(kind: str) -> None:
    texts = ["word " * 20, "a", "word", "’" * 30 + "  b" * 9, "東\u3000\u3000  東" * 9, "a"]
    Path("a.txt").write_text("\n".join(texts))
    wanted = [token for text in texts for token in (1, *LEARNED[kind].encode(LEARNED[kind].lead + text))]
    for size in range(2, 40):
        assert in_blocks(Path("a.txt"), size, kind, "lines") == wanted, size


@pytest.mark.parametrize("documents", ["lines", "file"])
@pytest.mark.parametrize("begin", ["\u3000", "x", "x\u3000", "\u3000\n"])
@pytest.mark.parametrize("end", ["x", "xx", "\r\n", "\r\n\r\n", "\ré", "\u3000"])
def test_text_without_a_place_in_any_blocks(begin: str, end: str, documents: str) -> None:
    """Blank beginnings, characters and line ends of two bytes come to lie wherever a block may end."""
    for number in range(1, 40):
        for text in (begin * number + end * 40, (begin * number + end) * 3):
            Path("a.txt").write_bytes(text.encode())
            if text.strip():
                whole = read_documents("a.txt", documents=documents)
                wanted = [token for each in whole for token in (1, *LEARNED["bytes"].encode(each))]
                assert in_blocks(Path("a.txt"), 4, "bytes", documents) == wanted


def with_steps(tokenizer: BPE, *steps: dict[str, Any]) -> BPE:
    """The same tokenizer, but for the steps in which it cuts a text into words."""
    described = json.loads(json.dumps(tokenizer.to_json()))
    cut = {"type": "Sequence", "pretokenizers": [*steps]} if len(steps) > 1 else steps[0]
    described["tokenizers"]["pre_tokenizer"] = cut
    return BPE(described["tokenizers"])


APART, WORDS = LEARNED["bpe"].to_json()["tokenizers"]["pre_tokenizer"]["pretokenizers"]
LOOKED_UP = BPE.train(STORY, 300)


def test_only_a_bpe_that_cuts_words_alike_is_looked_up() -> None:
    assert LEARNED["bpe"].by_words and with_steps(LEARNED["bpe"], WORDS).by_words
    joined = {**WORDS, "use_regex": False}
    pairs = {**APART, "pattern": {"Regex": APART["pattern"]["Regex"] + "{2}"}}
    for steps in ([joined], [APART, joined], [pairs, WORDS], [APART, APART, WORDS]):
        assert not with_steps(LEARNED["bpe"], *steps).by_words
    other = with_steps(LOOKED_UP, joined)
    made = prepare([story("txt")], "out", other, documents="file")  # a token may cross a space: the file stays whole
    assert contents(made) == expected(read_documents("story.txt", documents="file"), other)


def test_marks_and_foreign_line_ends_are_read_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    for form, line in (("txt", b"a b"), ("jsonl", b'{"text": "a b"}'), ("csv", b'text,n\r\n"a b",1'), ("tsv", b"text")):
        path = write(f"a.{form}", b"\xef\xbb\xbf" + line + b"\r\n\r\n" + line.split(b"\n")[-1] + b"\r")
        assert contents(prepare([path], form, "bytes")) == expected(read_documents(path), Bytes())
    write("b.txt", b"a\r\nb\r\nc\rd\r\n\r\ne")
    for size in range(1, 9):  # a line end is never cut in two
        small_blocks(monkeypatch, size)
        said = io.StringIO()
        assert contents(prepare(["b.txt"], f"b{size}", "bytes", report=Lines(said))) == expected([*"abcde"], Bytes())
        for note in ("4 CRLF line ends read as LF", "1 lone CR line end read as LF", "1 empty line skipped"):
            assert f"b.txt: {note}" in said.getvalue()


@pytest.mark.parametrize("number", [1, 2, 3, 7, 1000])
def test_any_size_of_shard_holds_the_same_tokens(number: int) -> None:
    write("a.txt", "ab\nc\n\ndef\n")
    tokens, starts = expected(["ab", "c", "def"], Bytes())
    made = prepare(["a.txt"], "out", Bytes(), shard_tokens=number)
    assert contents(made) == (tokens, starts) == ([99, 100, 1, 101, 1, 102, 103, 104, 1], [0, 3, 5])
    assert [shard.tokens for shard in made.index.shards] == [
        min(number, len(tokens) - begin) for begin in range(0, len(tokens), number)
    ]


def test_a_vocabulary_past_uint16_takes_uint32() -> None:
    tokenizer = Characters([chr(code) for code in range(0x10000, 0x10000 + 70_000)])
    text = chr(0x10000) + chr(0x10000 + 69_999)
    made = prepare([write("a.txt", text)], "out", tokenizer)
    assert (made.index.dtype, made.tokens[:].tolist()) == ("uint32", [2, 70_001])


# ---- tokenizers that are learned


@pytest.mark.parametrize(("kind", "size"), [("characters", None), ("bytes", None), ("words", 90), ("bpe", 280)])
@pytest.mark.parametrize("documents", ["lines", "file"])
def test_a_tokenizer_is_learned_as_a_run_would(kind: str, size: int | None, documents: str) -> None:
    path = story("txt")
    made = prepare([path], "out", kind, size=size, documents=documents)
    wanted = KINDS[kind].train(read_documents(path, documents=documents), size)
    assert made.tokenizer.fingerprint() == made.index.tokenizer == wanted.fingerprint()


def test_a_sample_is_bounded_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "SAMPLE", 200)
    path = story("txt")
    said = io.StringIO()
    made = prepare([path], "out", "words", report=Lines(said))
    size = os.path.getsize(path)
    assert f"tokenizer: words, learned from a sample, one block in 8 of {size} bytes" in said.getvalue()
    assert "characters are collected in one pass over all" in said.getvalue()
    assert contents(made) == expected(read_documents(path), made.tokenizer)  # rare characters are known all the same
    assert len(made.tokenizer) < len(Words.train(STORY))


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_is_bounded_in_bytes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters that take three bytes count three times."""
    monkeypatch.setattr(preparing, "SAMPLE", 2000)
    rows = {"csv": ["text"], "tsv": ["text"]}.get(form, [])
    texts = ["東京の夜" * 5] * 200
    path = write(f"a.{form}", "\n".join([*rows, *(json.dumps({"text": x}) if form == "jsonl" else x for x in texts)]))
    held = Counter()
    learn = BPE.train

    def weighed(found: Any, size: int | None = None) -> BPE:
        kept = list(found)
        held["bytes"] = sum(len(text.encode()) for text in kept)
        return learn(iter(kept), size)

    monkeypatch.setattr(BPE, "train", weighed)
    prepare([path], "out", "bpe", size=300)
    assert 600 <= held["bytes"] <= 2000


def test_a_tokenizer_is_taken_from_a_file_or_a_run() -> None:
    path = story("txt")
    Path("run").mkdir()
    LOOKED_UP.save("run/tokenizer.json")
    for number, given_as in enumerate(("run", "run/tokenizer.json", LOOKED_UP)):
        assert prepare([path], f"out{number}", given_as).index.tokenizer == LOOKED_UP.fingerprint()
    assert refusal([path], "x", "run", size=9) == "--size 9: run has the size it has; leave it out"
    assert "--tokenizer bpee: neither a kind nor a tokenizer.json or a run directory; did you mean 'bpe'?" in refusal(
        [path], "x", "bpee"
    )
    assert "--size 9: a bytes tokenizer has no size to choose" in refusal([path], "x", "bytes", size=9)
    assert "--size 9: must be at least 258" in refusal([path], "x", "bpe", size=9)


# ---- workers


def test_the_number_of_workers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "ALONE", 0)
    paths = [story("txt"), story("csv", ".gz")]
    for count in (1, 3):
        prepare(paths, f"out{count}", LOOKED_UP, workers=count, shard_tokens=100)
    assert files_of("out1") == files_of("out3")


IDLE = """
import os, signal
from pathlib import Path
from headway.text import Bytes
from headway.text.preparation import blocks
from headway.text.preparation.workers import Worker, workers
from headway.text.preparation.sources import Source
if __name__ == "__main__":
    reading = blocks.Reading()
    worker = Worker(reading, Bytes())
    with workers(2, worker) as submit:
        for batch in blocks.batches(blocks.blocks([Source.at("story.txt")], reading)):
            submit(worker.encode, batch).result()
        Path("children").write_text(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text())
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_workers_end_with_the_process_that_started_them() -> None:
    story("txt")
    done = subprocess.run([sys.executable, "-c", IDLE], stderr=subprocess.DEVNULL, check=False)
    children = Path("children").read_text().split()
    assert done.returncode == -signal.SIGKILL and len(children) >= 2
    wait_for(lambda: not any(alive(child) for child in children), 10)


def workers_of_this_process(number: int) -> list[str]:
    """The processes that work for it, once there are so many."""
    while True:
        tasks = Path("/proc/self/task").glob("*/children")
        found = [child for task in tasks for child in task.read_text().split()]
        children = [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]
        if len(children) >= number:
            return children
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_sigterm_ends_a_worker_and_what_a_terminal_sends_does_not() -> None:
    """Ctrl-C goes to the process that started it as well, which has work to finish."""
    reading = Reading()
    source = Source.at(story("txt"))
    block = next(block for block in blocks.blocks([source], reading) if block.data is not None)
    worker = Worker(reading, Bytes())
    with workers(2, worker) as give:
        wanted = give(worker.encode, [block]).result()[0].tokens
        children = workers_of_this_process(1)
        for child in children:
            for number in (signal.SIGINT, signal.SIGHUP):
                os.kill(int(child), number)
        assert [give(worker.encode, [block]).result()[0].tokens for _ in range(20)] == [wanted] * 20
        assert all(alive(child) for child in children)
        for child in workers_of_this_process(1):
            os.kill(int(child), signal.SIGTERM)
        wait_for(lambda: not any(alive(child) for child in children), 10)


class InterruptedWorker(Worker):
    def __reduce__(self) -> Any:
        return amid_ctrl_c, super().__reduce__()


def amid_ctrl_c(build: Any, arguments: Any) -> Worker:
    os.kill(os.getpid(), signal.SIGINT)
    return build(*arguments)


def test_ctrl_c_is_not_heard_by_a_worker_that_only_starts() -> None:
    reading = Reading()
    batch = [block for block in blocks.blocks([Source.at(story("txt"))], reading) if block.data is not None]
    with workers(2, InterruptedWorker(reading, Bytes())) as give:
        made = give(Worker.encode, batch).result()
    assert [part.tokens for part in made] == [Worker(reading, Bytes()).encode(block).tokens for block in batch]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])  # all are heard here again


def test_a_worker_that_is_killed_ends_the_others_and_is_told() -> None:
    """They are still at work, and must be ended for the pool to be cleared away."""
    write("big.txt", "so many words\n" * 100_000)
    reading = Reading()
    block = next(block for block in blocks.blocks([Source.at("big.txt")], reading) if block.data is not None)
    began = time.monotonic()
    worker = Worker(reading, Bytes())
    with pytest.raises(BrokenProcessPool), workers(3, worker) as give:
        futures = [give(worker.encode, [block]) for _ in range(200)]
        children = workers_of_this_process(3)
        os.kill(int(children[0]), signal.SIGKILL)
        for future in futures:
            future.result()
    assert time.monotonic() - began < 30 and not any(alive(child) for child in children)


def test_the_command_killed_while_its_workers_work(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 1 << 20)
    lines = [f"{number} {text}" for number in range(3500) for text in STORY if text]
    write("big.txt", "\n".join(lines))
    LOOKED_UP.save("tokenizer.json")
    options = ["--tokenizer", "tokenizer.json", "--shard-tokens", "200000", "--workers", "2", "--out", "out"]
    command = [sys.executable, "-m", "headway", "data", "prepare", "big.txt", *options]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(lambda: remembered("out", "shard-00000"))
    process.kill()
    assert process.wait() in (-signal.SIGKILL, 0)  # 0: on a busy machine it may have been quicker than this test
    whole = Path("out/shard-00000.bin").stat()
    assert subprocess.run([*command, "--resume"], check=False, capture_output=True).returncode == 0
    assert Path("out/shard-00000.bin").stat() == whole  # not written again
    prepare(["big.txt"], "other", "tokenizer.json", shard_tokens=200_000, workers=1)
    assert files_of("out") == files_of("other")


def alive(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds: float = 30) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)


# ---- stopped and resumed


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_shard_is_on_the_disk_under_its_name_before_it_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut leaves what was synced: of a rename, what the folder was synced after."""
    done: list[tuple[str, ...]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        fsync(handle)
        done.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"))))

    def renamed(old: Any, new: Any) -> None:
        replace(old, new)
        done.append(("rename", str(old), str(new)))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    made = prepare([story("txt")], "out", "bytes", shard_tokens=90)
    remembers = [at for at, each in enumerate(done) if each[-1] == "out/unfinished.json"]
    for number, shard in enumerate(made.index.shards):
        names = [f"{shard.name}.{ending}" for ending in ("bin", "idx")]
        whole = [done.index(("rename", f"out/.{name}.tmp", f"out/{name}")) for name in names]
        for name, at in zip(names, whole, strict=True):
            assert ("sync", f"out/.{name}.tmp") in done[:at]
        assert ("sync", "out") in done[max(whole) : remembers[number + 1]]
    index = next(at for at, each in enumerate(done) if each[-1] == "out/index.json")
    assert ("sync", "out") in done[index:]


KILLED = """
import os, signal, sys
from headway.text.preparation import blocks
from headway.text.preparation import prepare
blocks.BLOCK = 64
left = int(sys.argv[1])
def dies_at(call):
    def counted(*arguments):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return counted
os.fsync, os.replace = dies_at(os.fsync), dies_at(os.replace)
prepare(["story.txt", "story.csv.gz"], "out", "bpe", size=280, shard_tokens=150, resume=True)
print(left)
"""


def test_killed_at_any_write_and_resumed_it_ends_with_the_same_files() -> None:
    story("txt"), story("csv", ".gz")
    options = {"size": 280, "shard_tokens": 150}
    whole = files_of(prepare(["story.txt", "story.csv.gz"], "whole", "bpe", **options).folder)
    assert len(whole) > 2 * 5  # several shards
    seen = Counter()
    for moment in (0, 1, 3, 5, 8, 13, 21, 30):
        for path in Path().glob("out/*"):
            path.unlink()
        for again in (moment, moment + 7):  # killed, resumed, killed some writes later
            done = subprocess.run([sys.executable, "-c", KILLED, str(again)], capture_output=True, check=False)
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            seen[len(list(Path("out").glob("shard-*.idx")))] += 1
        prepare(["story.txt", "story.csv.gz"], "out", "bpe", resume=True, **options)
        assert files_of("out") == whole
    assert len(seen) > 3  # it was killed with different numbers of shards done


def fail_after(patch: pytest.MonkeyPatch, number: int, code: int = errno.ENOSPC) -> None:
    """From shard `number` on, the disk is full."""
    real = shards.Growing.write

    def failing(self: shards.Growing, data: np.ndarray) -> None:
        if self.path.name >= f"shard-{number:05d}":
            raise OSError(code, os.strerror(code))
        real(self, data)

    patch.setattr(shards.Growing, "write", failing)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [0, 1, 4])
def test_no_room_on_the_disk(form: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = story(form)
    prepare([path], "whole", LOOKED_UP, shard_tokens=90)
    with monkeypatch.context() as patch:
        fail_after(patch, number)
        message = refusal([path], "out", LOOKED_UP, shard_tokens=90)
    assert message.startswith("out: cannot be written (No space left on device); make room; ")
    if number == 0:
        assert message.endswith("nothing was written yet, begin anew") and not Path("out").exists()
    else:
        assert message.endswith(f"{number} whole shard{'s' * (number > 1)} kept, go on with --resume")
        assert not list(Path("out").glob(".*.tmp"))
        with pytest.raises(DataError, match=r"an unfinished preparation; finish it with .* --resume"):
            Shards("out")
    said = io.StringIO()
    prepare([path], "out", LOOKED_UP, shard_tokens=90, resume=True, report=Lines(said))
    assert files_of("out") == files_of("whole")
    empty = STORY.count("") * (1 if form != "jsonl" else len(STORY) + STORY.count(""))
    assert form == "jsonl" or f"{path}: {empty} empty" in said.getvalue()  # notes count the file, not the rest of it


@pytest.mark.parametrize("shard_tokens", [1, 4, 8, 9, 10, 1000])
@pytest.mark.parametrize("text", ["ab\nc\ndef\n", "just one"])
def test_stopped_when_only_the_index_was_missing(text: str, shard_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("a.txt", text)
    prepare([path], "whole", "bytes", shard_tokens=shard_tokens)
    with monkeypatch.context() as patch:
        patch.setattr(shards.Index, "write", lambda index, folder: os.mkdir("a.txt"))
        assert "out: cannot be written (File exists); mend that; " in refusal(
            [path], "out", "bytes", shard_tokens=shard_tokens
        )
    prepare([path], "out", "bytes", shard_tokens=shard_tokens, resume=True)
    assert files_of("out") == files_of("whole")


def test_a_file_that_changes_under_the_reader_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    path = story("txt")
    monkeypatch.setattr(preparing.Preparation, "end_file", lambda *arguments: os.utime(path, (1, 1)))
    assert "story.txt: changed while it was read" in refusal([path], "out", "bytes")


CHANGES = {
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "shorter": lambda path: os.truncate(path, 40),
    "empty": lambda path: os.truncate(path, 0),
    "deleted": Path.unlink,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("moment", ["tokenizer", "encode", "end_file"])
@pytest.mark.parametrize("name", ["story.txt", "story.txt.gz"])
def test_a_file_that_changes_is_told_so_whatever_came_of_it(
    name: str, moment: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    story("txt", Path(name).suffix.replace(".txt", ""))
    plain = getattr(preparing.Preparation, moment)

    def changed(*arguments: Any) -> Any:
        change(Path(name))
        return plain(*arguments)

    monkeypatch.setattr(preparing.Preparation, moment, changed)
    assert refusal([name], "out", "bytes") == f"{name}: changed while it was read; delete out and begin anew"


def test_a_shard_that_was_damaged_since_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path = story("txt")
    prepare([path], "whole", LOOKED_UP, shard_tokens=90)
    for number in (2, 4):
        with monkeypatch.context() as patch:
            fail_after(patch, number)
            refusal([path], "out", LOOKED_UP, shard_tokens=90, resume=True)
    Path("out/shard-00002.bin").write_bytes(b"short")
    prepare([path], "out", LOOKED_UP, shard_tokens=90, resume=True)
    assert files_of("out") == files_of("whole")


def test_what_is_there_is_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    path = story("txt")
    prepare([path], "out", "bytes")
    before = files_of("out")
    assert refusal([path], "out", "bytes") == (
        "out: holds a finished preparation; train on it, or choose another folder with --out"
    )
    prepare([path], "out", "bytes", resume=True)  # nothing left to do
    assert files_of("out") == before
    with monkeypatch.context() as patch:
        fail_after(patch, 1)
        refusal([path], "half", "bytes", shard_tokens=90)
    assert refusal([path], "half", "bytes", shard_tokens=90) == (
        "half: holds an unfinished preparation; go on with --resume, or choose another --out"
    )
    Path("mine").mkdir()
    write("mine/thesis.txt", "years of work")
    assert "mine: exists already and is no preparation" in refusal([path], "mine", "bytes", resume=True)
    assert files_of("mine") == {"thesis.txt": b"years of work"}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("others", [[".notes.123.tmp"], [".notes.123.tmp", "thesis.txt"], ["index.json", ".a.1.tmp"]])
def test_a_folder_that_is_refused_is_left_as_it_was(others: list[str], resume: bool) -> None:
    """Without a lock, and with files whose names are like those of half-written ones."""
    path = story("txt")
    Path("mine").mkdir()
    for name in others:
        write(f"mine/{name}", "{}")
    assert "mine: exists already and is no preparation" in refusal([path], "mine", "bytes", resume=resume)
    assert sorted(os.listdir("mine")) == sorted(others)


def test_other_files_in_the_folder_of_a_preparation_are_left_as_they_are() -> None:
    path = story("txt")
    prepare([path], "out", "bytes")
    write("out/.notes.123.tmp", "mine")
    refusal([path], "out", "bytes")
    prepare([path], "out", "bytes", resume=True)
    assert Path("out/.notes.123.tmp").read_text() == "mine"


@pytest.mark.parametrize("moment", ["the last write", "when it is found to be finished"])
def test_stopped_when_all_is_written_it_is_kept(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = story("txt")
    prepare([path], "whole", "bytes")

    class Stopped(Lines):
        def say(self, text: str) -> None:
            if "finished already" in text:
                signal.raise_signal(signal.SIGINT)

    unlink = Path.unlink

    def dies(self: Path, missing_ok: bool = False) -> None:
        if self.name == "unfinished.json":
            signal.raise_signal(signal.SIGTERM)
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        if moment == "the last write":
            patch.setattr(Path, "unlink", dies)
            with pytest.raises(Interrupted, match="all was written before"):
                prepare([path], "out", "bytes")
        else:
            prepare([path], "out", "bytes")
            with pytest.raises(KeyboardInterrupt):
                prepare([path], "out", "bytes", resume=True, report=Stopped(io.StringIO()))
    Shards("out").verify()
    prepare([path], "out", "bytes", resume=True)
    assert files_of("out") == files_of("whole")


def test_a_folder_that_is_tidied_up_is_known_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed meanwhile, it can be begun anew there."""
    path = story("txt")
    Path("out").mkdir()
    for moment in range(4):
        with monkeypatch.context() as patch:
            fail_after(patch, 0)
            left = iter(range(moment))
            unlink = Path.unlink

            def dies(self: Path, missing_ok: bool = False) -> None:
                if self.parent.name == "out" and not self.name.startswith("."):
                    next(left)  # noqa: B023
                unlink(self, missing_ok)  # noqa: B023

            patch.setattr(Path, "unlink", dies)
            with pytest.raises((StopIteration, RuntimeError, RunError)):
                prepare([path], "out", "bytes", resume=True)
    prepare([path], "out", "bytes", resume=True)
    assert contents(Shards("out")) == expected(read_documents(path), Bytes())


def test_resuming_needs_the_same_files_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    path = story("txt")
    with monkeypatch.context() as patch:
        fail_after(patch, 1)
        refusal([path], "half", "bytes", shard_tokens=90)
    shutil.copytree("half", "again")
    same = {"shard_tokens": 90, "resume": True}
    assert "shard_tokens: 90 there, 91 now" in refusal([path], "half", "bytes", shard_tokens=91, resume=True)
    assert "tokenizer: bytes of size None there, characters of size None now" in refusal(
        [path], "half", "characters", **same
    )
    assert "1 file there, 2 now" in refusal([path, path], "half", "bytes", **same)
    os.utime(path, ns=(1, 1))
    shown = refusal([path], "half", "bytes", **same)
    assert "story.txt: was written to since, " in shown
    subprocess.run(shown.partition("put its time back: ")[2].splitlines()[0].split(), check=True)
    prepare([path], "again", "bytes", **same)
    write("story.txt", "something else")
    assert "story.txt: changed since" in refusal([path], "half", "bytes", **same)


def test_a_finished_preparation_is_not_one_by_another_tokenizer() -> None:
    path = story("txt")
    prepare([path], "out", "bytes")
    before = files_of("out")
    words = "tokenizer: bytes of size None there, characters of size None now"
    assert words in refusal([path], "out", "characters", resume=True)
    assert "tokenizer: " in refusal([path], "out", LOOKED_UP, resume=True)
    prepare([path], "out", "bytes", resume=True)
    assert files_of("out") == before
    prepare([path], "sized", "words", size=60)
    words = "tokenizer: words of size 60 there, words of size 70 now"
    assert words in refusal([path], "sized", "words", size=70, resume=True)
    prepare([path], "given", LOOKED_UP)
    assert "tokenizer: bpe there, bytes now" in refusal([path], "given", "bytes", resume=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_command_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    path = story("txt")
    plain, calls = Writer.append, [0]

    def append(self: Writer, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), number)
        return plain(self, *given)

    small_blocks(monkeypatch)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "append", append)
        options = ["--tokenizer", "bytes", "--shard-tokens", "90", "--workers", "1", "--out", "out"]
        assert run_command(["data", "prepare", path, *options]) == code
    shown = capsys.readouterr().err
    assert "headway: stopped; " in shown and "--resume" in shown
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    prepare([path], "out", "bytes", shard_tokens=90, workers=1, resume=True)
    prepare([path], "other", "bytes", shard_tokens=90, workers=1)
    assert files_of("out") == files_of("other")


def test_a_new_preparation_that_fails_leaves_nothing_behind() -> None:
    write("bad.txt", b"good\n" * 50 + b"b\xe9d\n")
    for kind in KINDS:
        assert "bad.txt:51: not UTF-8 at byte 2 (0xe9)" in refusal(["bad.txt"], "out", kind)
        assert not Path("out").exists()


# ---- bad input


BAD = {
    "latin.txt": (b"fine\n" * 40 + b"caf\xe9\n", "latin.txt:41: not UTF-8 at byte 4 (0xe9); re-save it as UTF-8"),
    "nul.txt": (b"a\n" * 99 + b"b\0", "nul.txt:100: NUL byte at byte 2; this looks like a binary file"),
    "cr.txt": (b"one\rtwo\r\nthree\n\xff", "cr.txt:4: not UTF-8 at byte 1 (0xff)"),
    "wide.txt": ("wide".encode("utf-16"), "wide.txt: this is UTF-16"),
    "empty.txt": (b"", "empty.txt: empty; there is nothing in it"),
    "blank.txt": (b" \n\n\t\n" * 40, "blank.txt: empty; there is no text in it"),
    "cut.txt.gz": (gzip.compress(b"many words\n" * 999)[:-9], "cut.txt.gz: broken or cut-off gzip file"),
    "bits.txt.gz": (gzip.compress(b"many words\n" * 999)[:-8] + b"\0" * 8, "bits.txt.gz: broken or cut-off gzip file"),
    "plain.txt.gz": (b"not packed", "plain.txt.gz: not gzip, in spite of its name"),
    "cut.txt.xz": (lzma.compress(b"many words\n" * 999)[:-9], "cut.txt.xz: broken or cut-off xz file"),
    "list.jsonl": (b'{"text": "a"}\n' * 20 + b"[1]\n", "list.jsonl:21: not a JSON object"),
    "half.jsonl": (b'{"text": "a"}\n\n{"text": \n', "half.jsonl:3: not JSON"),
    "key.jsonl": (b'{"text": "a"}\n' * 20 + b'{"txet": "b"}\n', "key.jsonl:21: no key 'text'; did you mean 'txet'?"),
    "number.jsonl": (b'{"text": 5}\n', "number.jsonl:1: 'text' is 5, where a string is wanted"),
    "which.csv": (b"a,b\n1,2\n", "which.csv:1: which column is the text? found: 'a', 'b'; name one, as in --column b"),
    "ragged.csv": (b"text,b\n" + b"1,2\n" * 30 + b"3\n", "ragged.csv:32: 1 column where 2 are wanted"),
    "quote.csv": (b'text\na\n"b\n', "quote.csv:3: a quote opened in this row is never closed"),
    "ragged.tsv": (b"\n\ntext\tb\n" + b"1\t2\n" * 30 + b"3\n", "ragged.tsv:34: 1 column where 2 are wanted"),
    "header.tsv": (b"text\tb\n", "header.tsv: empty; there is no text in it"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_with_the_line_and_the_way_out(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content, message = BAD[name]
    Path(name).write_bytes(content)
    assert run_command(["data", "prepare", name, "--tokenizer", "bytes", "--out", "out/of/it"]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown
    assert not Path("out").exists()


def test_a_cell_that_is_too_long_need_not_be_an_open_quote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "LONGEST_CELL", 1000)
    before = csv.field_size_limit(1000)
    try:
        for cell in ("x" * 1001, '"' + "x\n" * 1000):
            write("long.csv", f"text\na\n{cell}\nb\n")
            assert refusal(["long.csv"], "x", "bytes") == (
                "long.csv:3: a cell of more than 1,000 characters; close the quote, if one that is opened in this row "
                "never is, or write the table as .jsonl, if the text is that long"
            )
        write("long.csv", f"text\n{'x' * 1000}\n")
        prepare(["long.csv"], "out", "bytes")
    finally:
        csv.field_size_limit(before)


def test_bytes_that_are_not_utf8_can_be_replaced() -> None:
    write("bad.txt", b"caf\xe9 au lait\n" * 9)
    said = io.StringIO()
    made = prepare(["bad.txt"], "out", "bytes", errors="replace", report=Lines(said))
    assert contents(made) == expected(read_documents("bad.txt", errors="replace"), Bytes())
    assert "bad.txt: 9 invalid byte sequences read as U+FFFD" in said.getvalue()


def test_characters_the_tokenizer_does_not_know_are_named_with_their_line() -> None:
    write("a.txt", "abc\n" * 40 + "abß\n")
    known = Characters("abc\n")
    assert "a.txt:41: never seen in training: 'ß' (U+00DF), first at character 3" in refusal(["a.txt"], "x", known)
    write("a.csv", 'text\n"a\nb"\nß\n')
    assert "a.csv:4: never seen in training: 'ß'" in refusal(["a.csv"], "x", known)
    write("b.txt", "fine\n□\n")
    assert "b.txt:2: '□' (U+25A1) at character 1 is reserved for padding" in refusal(["b.txt"], "x", "characters")
    assert contents(prepare(["b.txt"], "x", "words")) == expected(["fine", "□"], Words.train(["fine", "□"]))


def test_the_character_is_counted_in_its_line_whatever_is_a_document() -> None:
    lines = ["abc"] * 40 + ["ab, abß abc"] + ["abc"] * 40
    write("a.txt", "\n".join(lines))
    for known in (Characters("abc, \n"), Words(["a", "b", "c", ",", " ", "\n"])):
        for documents in ("lines", "file"):
            assert "a.txt:41: never seen in training: 'ß' (U+00DF), first at character 7" in refusal(
                ["a.txt"], "x", known, documents=documents
            )
    write("a.txt", "\n".join(lines).replace("ß", "□"))
    for documents in ("lines", "file"):
        assert "a.txt:41: '□' (U+25A1) at character 7 is reserved" in refusal(
            ["a.txt"], "x", "characters", documents=documents
        )


def test_the_character_of_a_line_without_end_is_counted_from_a_byte_that_is_named() -> None:
    text = "abc\n" * 40 + "abc " * 1000 + "ß"
    write("a.txt", text)
    said = refusal(["a.txt"], "x", Characters("abc \n"))
    found = re.search(r"a\.txt:41: .* first at character ([0-9]+); .* counted from byte ([0-9,]+) on\)", said)
    assert found and int(found[2].replace(",", "")) + int(found[1]) == len(text)


@pytest.mark.parametrize("form", ["txt", "csv", "jsonl"])
@pytest.mark.parametrize("kind", ["words", "bpe"])
@pytest.mark.parametrize(("each", "between"), [(5, " "), (5, ", "), (1, "")])
def test_where_hardly_a_word_comes_again_fewer_are_learned_from(
    kind: str, form: str, each: int, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the words are parted, and whatever else is in a file."""
    monkeypatch.setattr(preparing, "WORDS", 2000)
    words = ["".join(chr(ord("а") + int(digit, 16)) for digit in f"{number * number:x}") for number in range(20_000)]
    lines = [between.join(words[begin : begin + each]) for begin in range(0, 20_000, each)]
    for name, texts, least in (("rare", lines, 8), ("frequent", lines[:20] * (len(lines) // 20), 1)):
        numbered = ({"id": f"{number:x}", "text": text} for number, text in enumerate(texts))
        quoted = [f'"{text}"' for text in texts]
        rows = {"csv": ["text", *quoted], "jsonl": [json.dumps(row) for row in numbered]}.get(form, texts)
        said = io.StringIO()
        made = prepare([write(f"{name}.{form}", "\n".join(rows))], name, kind, report=Lines(said))
        assert len(made) == len(texts)
        stride = re.search(rf"{kind}, learned from (?:all|a sample, one block in (\d+) of) ", said.getvalue())
        assert stride and least <= int(stride[1] or 1) <= 2 * least


@pytest.mark.parametrize("workers", [1, 2])
def test_small_files_are_worked_on_together(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MOST_TOGETHER", 7)
    monkeypatch.setattr(preparing, "ALONE", 0)
    Path("many").mkdir()
    for number in range(60):
        write(f"many/{number:02d}.txt", "" if number in (7, 30) else f"line {number}\nb" * (number % 5) + "\n")
    said = io.StringIO()
    made = prepare(["many"], "out", "bytes", workers=workers, report=Lines(said))
    texts = [
        text for path in sorted(Path("many").iterdir()) if path.read_text().strip() for text in read_documents(path)
    ]
    assert contents(made) == expected(texts, Bytes())
    assert said.getvalue().count("there is no text in it; passed over") == 11
    write("many/33.txt", "fine\nwr\xf6ng\n".encode("latin-1"))
    assert "many/33.txt:2: not UTF-8 at byte 3" in refusal(["many"], "x", "bytes", workers=workers)


def test_a_file_may_have_a_name_that_is_no_utf8() -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    try:
        write(name, "some words\n")
    except OSError:
        pytest.skip("the file system wants UTF-8")
    made = prepare([name], "out", "bytes")
    said = io.StringIO()
    assert contents(prepare([name], "out", "bytes", resume=True, report=Lines(said))) == contents(made)
    assert "out: finished already" in said.getvalue()


def test_wrong_columns_files_and_folders(capsys: pytest.CaptureFixture[str]) -> None:
    path = story("csv")
    assert "story.csv:1: no column 'texte' in the header row; did you mean 'text'?" in refusal(
        [path], "x", "bytes", column="texte"
    )
    assert "no column 7; there are 2, counted from 0" in refusal([path], "x", "bytes", column="7")
    assert "nowhere.txt: no such file" in refusal(["nowhere.txt"], "x", "bytes")
    assert "*.log: no file matches this pattern" in refusal(["*.log"], "x", "bytes")
    Path("void").mkdir()
    assert "void: no .txt, .jsonl, .csv, .tsv or .parquet file" in refusal(["void"], "x", "bytes")
    assert '--documents (documents = \'pages\'): "lines" or "file" is wanted' in refusal(
        [path], "x", "bytes", documents="pages"
    )
    with pytest.raises(SettingsError, match="must be at least 1"):
        prepare([path], "x", "bytes", shard_tokens=0)
    with pytest.raises(RunError, match=r"cannot be made .*; choose another with --out"):
        prepare([path], "story.csv/out", "bytes")
    assert run_command(["data", "prepare", path, "--tokenizer", "bytes", "--out", "story.csv/out"]) == 2
    assert "choose another with --out" in capsys.readouterr().err


def test_what_can_be_read_only_once_is_refused_unread() -> None:
    """Its files are read several times. Whoever writes to a pipe is not cut off by somebody who only looks."""
    words = "a pipe or a device, which can be read only once; save what comes from it to a file first"
    assert refusal(["/dev/zero"], "x", "bytes") == f"/dev/zero: {words}"
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    assert words in refusal([story("txt"), f"/dev/fd/{reader}"], "x", "bytes")
    assert os.read(reader, 100) == b"one\ntwo\n"
    os.close(reader)
    assert not Path("x").exists()


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="needs /dev/fd")
def test_a_file_by_the_number_it_is_open_under_is_a_file() -> None:
    """As a shell gives it: headway data prepare /dev/stdin < story.txt."""
    with open(story("txt")) as file:
        made = prepare([f"/dev/fd/{file.fileno()}"], "out", "bytes")
    assert contents(made) == expected(read_documents("story.txt"), Bytes())


def test_a_column_is_taken_by_name_or_number() -> None:
    for path, tab in ((write("a.csv", "x,one\ny,two\n"), ","), (write("a.tsv", "x\tone\ny\ttwo\n"), "\t")):
        made = prepare([path], f"{path}.out", "bytes", column="1")
        assert contents(made) == expected(["one", "two"], Bytes())
        write(path, f"a{tab}b\nx{tab}one\ny{tab}two\n")
        assert contents(prepare([path], f"{path}.named", "bytes", column="b")) == expected(["one", "two"], Bytes())


def test_a_column_is_of_the_tables_among_the_files() -> None:
    plain = [write("a.txt", "plain one\nplain two\n"), write("b.log", "id,body\n")]
    tables = [
        write("c.jsonl", '\n{"id": 1, "body": "json one"}\n'),
        write("d.csv", "id,body\n1,csv one\n"),
        write("e.tsv", "body\tid\ntsv one\t1\n"),
    ]
    made = prepare([plain[0], *tables, plain[1]], "out", "bytes", column="body")
    texts = ["plain one", "plain two", "json one", "csv one", "tsv one", "id,body"]
    assert contents(made) == expected(texts, Bytes())
    assert "--column body: none of the files is a table (.tsv, .csv, .jsonl, .parquet)" in refusal(
        plain, "x", "bytes", column="body"
    )
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "z.csv",
            "id,bodies\n1,csv\n",
            "z.csv:1: no column 'body' in the header row; did you mean 'bodies'? known: id",
        ),
        ("z.tsv", "\nid\ttitle\n1\ttsv\n", "z.tsv:2: no column 'body' in the header row; known: id, title"),
        ("z.jsonl", '\r\n\n{"id": 1, "title": "json"}\n', "z.jsonl:3: no key 'body'; known: id, title"),
        (
            "z.jsonl",
            '{"id": 1, "bodies": "json"}',
            "z.jsonl:1: no key 'body'; did you mean 'bodies'? known: id, bodies",
        ),
    ],
)
def test_a_table_without_the_column_is_named_before_anything_is_encoded(
    name: str, content: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write("a.txt", "plain\n"), write("b.csv", "id,body\n1,csv one\n"), write(name, content)]
    monkeypatch.setattr("headway.text.preparation.pipeline.Preparation.run", None)
    assert message in refusal(files, "x", "bytes", column="body")
    assert not Path("x").exists()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    write("a.parquet", b"PAR1")
    write("a.txt.zst", b"\x28\xb5\x2f\xfd")
    for name, package in (("a.parquet", "pyarrow"), ("a.txt.zst", "zstandard")):
        monkeypatch.setitem(sys.modules, package, None)
        assert f"{name}: reading" in (message := refusal([name], "x", "bytes"))
        assert "pip install 'headway[" in message


def test_the_column_that_is_suggested_holds_text() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"body": ["some text"], "n": [1]})
    pytest.importorskip("pyarrow.parquet").write_table(table, "a.parquet")
    message = refusal(["a.parquet"], "out", "bytes")
    assert message.endswith("which column is the text? found: 'body', 'n'; name one, as in --column body")


# ---- bounded memory


@pytest.mark.parametrize("text", ["word " * 4000, '"word":"a",' * 2000, "東京は、東。" * 1000])
def test_an_endless_line_is_read_in_parts(text: str) -> None:
    write("line.txt", text)
    found = list(blocks.blocks([Source.at("line.txt")], Reading()))
    assert max(len(block.data or b"") for block in found) <= blocks.LONG_LINE + blocks.BLOCK
    assert len(found) > 50
    made = prepare(["line.txt"], "out", LOOKED_UP)
    assert contents(made) == expected([text], LOOKED_UP)


@pytest.mark.parametrize("documents", ["lines", "file"])
@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_text_without_a_place_is_cut_between_characters_where_these_are_tokens(
    kind: str, documents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "é😀東" * 3000
    write("a.txt", text + "\nnext\n")
    seen: list[int] = []
    encode = Worker.encode

    def watched(self: Worker, block: blocks.Block) -> Any:
        seen.append(len(block.data))
        return encode(self, block)

    monkeypatch.setattr(Worker, "encode", watched)
    made = prepare(["a.txt"], "out", kind, documents=documents)
    assert contents(made) == expected(read_documents("a.txt", documents=documents), made.tokenizer)
    assert max(seen) <= blocks.LONG_LINE + blocks.BLOCK
    assert "anywhere" not in made.index.reading


@pytest.mark.parametrize("mark", [b"\xe4", b"\xc3(", b"\xfd"])
def test_what_is_no_utf8_is_not_held_for_blank(mark: bytes) -> None:
    """Blank text is held until it is known whether the document has more."""
    write("a.txt", mark * 20_000)
    anywhere = Reading(errors="replace", anywhere=True)
    found = list(blocks.blocks([Source.at("a.txt")], anywhere))
    assert max(len(block.data or b"") for block in found) <= blocks.LONG_LINE + blocks.BLOCK
    for number, text in enumerate(("\u3000" * 2000, "\u3000" * 2000 + "東")):  # blanks of three bytes, which blocks cut
        write("a.txt", f"{text}\nnext\n")
        made = prepare(["a.txt"], f"out{number}", "bytes", errors="replace")
        assert contents(made) == expected(read_documents("a.txt"), Bytes())


def test_looking_at_the_beginning_of_files_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tokenizer is, which may have to read more at once."""
    write("a.txt", "x" * 100_000)
    sizes: list[int] = []
    read = sources.Unpacked.read
    monkeypatch.setattr(sources.Unpacked, "read", lambda self, size: sizes.append(size) or read(self, size))
    blocks.check_sources([Source.at("a.txt")], Reading())
    assert sum(sizes) < 1000


@pytest.mark.parametrize("mark", [b"\xff", b"\xe2\x82", b"\x80"])
def test_a_cut_between_characters_replaces_no_more_than_the_whole(mark: bytes) -> None:
    for number in range(1, 400, 7):
        write("a.txt", b"a" * (number % 5) + mark * number + b"a")
        said = io.StringIO()
        made = prepare(["a.txt"], f"out{number}", "bytes", errors="replace", report=Lines(said))
        assert contents(made) == expected(read_documents("a.txt", errors="replace"), Bytes())
        assert f"a.txt: {plain.counted(number, 'invalid byte sequence')} read as U+FFFD" in said.getvalue()


@pytest.mark.parametrize("name", ["a.txt", "a.tsv", "a.csv", "a.jsonl"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [bytes(100_000), b"\0" + b"x" * 100_000])
def test_nothing_is_read_beyond_a_nul_byte(name: str, kind: str, end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A binary file may be of any size, and have no line."""
    begin = {"a.tsv": b"text\n", "a.csv": b"text\n", "a.jsonl": b'{"text": "a"}\n'}.get(name, b"a\n")
    row = b'{"text": "b"}\n' if name == "a.jsonl" else b"b\n"
    write(name, begin + row * 51 + end)
    for documents in ("lines", "file"):
        position: list[int] = []
        read = sources.Unpacked.read

        def watched(self: sources.Unpacked, size: int) -> bytes:
            found = read(self, size)  # noqa: B023
            position.append(self.stored())  # noqa: B023
            return found

        with monkeypatch.context() as patch:
            patch.setattr(sources.Unpacked, "read", watched)
            message = refusal([name], "x", kind, documents=documents)
        assert f"{name}:53: NUL byte at byte 1;" in message
        assert max(position) < 1000


def test_a_nul_byte_is_named_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a place to cut stands before it, and a line end behind it."""
    small_blocks(monkeypatch, 1 << 10)
    for begin in (b"", b"a\n" * 500, b"a" * 700):
        for end in (b"", b"b" * 700, b"\n" + b"b" * 2000):
            write("a.txt", b"c\r\r\n" + begin + b"abc\0" + end)
            wanted = f"a.txt:{3 + begin.count(10)}: NUL byte at byte {4 + len(begin.split(bytes([10]))[-1])}; "
            assert refusal(["a.txt"], "x", "bytes").startswith(wanted)
            with pytest.raises(DataError, match=wanted):
                read_documents("a.txt")


def tiny_cells(path: str, cells: list[str]) -> str:
    """A table of many tiny cells, every other one blank."""
    if path.endswith("csv"):
        return write(path, "n,text\n" + "".join(f"1,{cell}\n2, \n" for cell in cells))
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": [text for cell in cells for text in (cell, None)]})
    pytest.importorskip("pyarrow.parquet").write_table(table, path)
    return path


@pytest.mark.parametrize("path", ["a.csv", "a.parquet"])
def test_tiny_and_empty_cells_take_little_more_memory_than_their_characters(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As strings in a list they take a hundred bytes each, with their lines."""
    cells = [f"{number % 10}" for number in range(50_000)]
    small_blocks(monkeypatch, 1 << 20)
    tiny_cells(path, cells)
    tracemalloc.start()
    try:
        found = list(blocks.blocks([Source.at(path)], Reading()))
        assert len(found) == 2 and tracemalloc.get_traced_memory()[0] < 12 * len(cells)
        del found
        held: list[int] = []
        texts = preparing.Preparation.texts

        def weighed(*arguments: Any) -> Any:
            held.append(tracemalloc.get_traced_memory()[0] - before)
            return texts(*arguments)

        monkeypatch.setattr(preparing.Preparation, "texts", weighed)
        said = io.StringIO()
        before = tracemalloc.get_traced_memory()[0]
        made = prepare([path], "out", "bpe", size=270, report=Lines(said))
    finally:
        tracemalloc.stop()
    assert held[0] < 4 * len(cells)
    assert contents(made) == expected(cells, made.tokenizer)
    assert f"{path}: 50,000 empty texts skipped" in said.getvalue()


@pytest.mark.parametrize("path", ["a.csv", "a.parquet"])
def test_blank_cells_count_as_rows(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the places that a preparation goes on from, and in the lines of errors."""
    cells = [*" " * 200, *"abc", *" " * 100, *"de", *" " * 9]
    tiny_cells(path, cells)
    prepare([path], "whole", "bytes", shard_tokens=3)
    for number in range(1, 4):
        with monkeypatch.context() as patch:
            fail_after(patch, number)
            refusal([path], f"out{number}", "bytes", shard_tokens=3)
        prepare([path], f"out{number}", "bytes", shard_tokens=3, resume=True)
        assert files_of(f"out{number}") == files_of("whole")
    place = "a.csv:610" if path == "a.csv" else "a.parquet: row 609"
    assert f"{place}: never seen in training: 'e'" in refusal([path], "x", Characters("abcd\n"))


def test_what_is_in_flight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the input, only a few blocks are read ahead of what is written."""
    path = write("long.txt", "some words in a line\n" * 2000)
    ahead: list[int] = []
    real = blocks.cut
    state = Counter()

    def watched(*arguments: object):
        for block in real(*arguments):
            state["read"] += 1
            ahead.append(state["read"] - state["written"])
            yield block

    def counted(self: shards.Writer, tokens: np.ndarray, starts: np.ndarray) -> None:
        state["written"] += 1
        append(self, tokens, starts)

    append = shards.Writer.append
    monkeypatch.setattr(blocks, "cut", watched)
    monkeypatch.setattr(shards.Writer, "append", counted)
    prepare([path], "out", "bytes", workers=1)
    assert len(ahead) > 500 and max(ahead) <= 6


ODD_PIECES = [*PIECES, *"東京。。、，：", "\r", "\r", "\n", "x" * 70]


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(ODD_PIECES), min_size=1, max_size=200).map("".join) | PLACELESS.filter(bool),
    size=st.integers(2, 60),
    documents=st.sampled_from(["lines", "file"]),
    anywhere=st.booleans(),
)
@example(text="title\n" + "line\r" * 40, size=20, documents="lines", anywhere=False)
@example(text="a " + "x" * 15 + "。東" + "x" * 70, size=20, documents="file", anywhere=False)
@example(text="word,aaaaaaa\ra", size=2, documents="lines", anywhere=False)
def test_blocks_are_the_same_read_on_or_begun_at(
    text: str, size: int, documents: str, anywhere: bool, tmp_path_factory
) -> None:
    """Whoever goes on with a preparation begins at a block that others came to from the beginning."""
    path = tmp_path_factory.getbasetemp() / "any.txt"
    path.write_bytes(text.encode())
    source, reading = [Source.at(str(path))], Reading(documents, anywhere=anywhere)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, size)
        found = [block for block in blocks.blocks(source, reading) if block.data is not None]
        for number, block in enumerate(found):
            again = [each for each in blocks.blocks(source, reading, block.place) if each.data is not None]
            assert [each.data for each in again] == [each.data for each in found[number:]]


def test_going_on_in_a_block_that_is_cut_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a version that cuts elsewhere: rather no shards than other ones."""
    path = write("a.txt", "some words in a line\n" * 40)
    real = preparing.Preparation.remember

    def killed(self: preparing.Preparation, shard: shards.Shard) -> None:
        real(self, shard)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparing.Preparation, "remember", killed)
        with pytest.raises(Interrupted):
            prepare([path], "out", "bytes", shard_tokens=60)
    small_blocks(monkeypatch, 22)
    assert "begun by another version" in refusal([path], "out", "bytes", shard_tokens=60, resume=True)


def test_the_command_prints_what_it_made(capsys: pytest.CaptureFixture[str]) -> None:
    write("a.txt", "one\r\ntwo\r\n\r\n")
    assert run_command(["data", "prepare", "a.txt", "--tokenizer", "characters", "--out", "my shards"]) == 0
    shown = capsys.readouterr()
    assert shown.out == (
        "my shards: 8 tokens of 2 documents in 1 shard, characters tokenizer of 8; "
        'train on them with corpus = "my shards"\n'
    )
    assert "a.txt: 3 CRLF line ends read as LF" in shown.err and "a.txt: 1 empty line skipped" in shown.err
    assert "encoding, MB: step 1/1" in shown.err


def test_a_shard_that_was_not_remembered_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C came when its files were there already; it is made again."""
    path = story("txt")
    prepare([path], "whole", "bytes", shard_tokens=60)
    real = preparing.Preparation.remember

    def interrupted(self: preparing.Preparation, shard: shards.Shard) -> None:
        if self.shards:
            raise KeyboardInterrupt
        real(self, shard)

    with monkeypatch.context() as patch:
        patch.setattr(preparing.Preparation, "remember", interrupted)
        with pytest.raises(Interrupted, match="stopped; 1 whole shard kept, go on with --resume"):
            prepare([path], "out", "bytes", shard_tokens=60)
    said = io.StringIO()
    prepare([path], "out", "bytes", shard_tokens=60, resume=True, report=Lines(said))
    assert "out: going on after 1 whole shard\n" in said.getvalue() and files_of("out") == files_of("whole")


def test_ctrl_c_keeps_whole_shards(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    story("txt")
    command = ["data", "prepare", "story.txt", "--tokenizer", "bytes", "--out", "out", "--shard-tokens", "90"]
    with monkeypatch.context() as patch:
        real = sources.Unpacked.read
        left = iter(range(9))

        def interrupted(self: sources.Unpacked, size: int) -> bytes:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return real(self, size)

        patch.setattr(sources.Unpacked, "read", interrupted)
        assert run_command(command) == 130
    assert "headway: stopped; 1 whole shard kept, go on with --resume" in capsys.readouterr().err
    assert run_command([*command, "--resume"]) == 0
    assert contents(Shards("out")) == expected(read_documents("story.txt"), Bytes())
