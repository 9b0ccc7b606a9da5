"""Readers take what is harmless, say so, and refuse the rest with file, line, value and the way out."""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import DataError, SettingsError
from headway.text import Pair, read_documents, read_lines, read_pairs, read_parallel, read_text


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in its own folder, so that names in messages are short and exact."""
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str | bytes) -> str:
    """A file with exactly these bytes, packed if its name ends in .gz."""
    raw = content.encode() if isinstance(content, str) else content
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return name


def refusal(reader, *args, **options) -> str:
    """The message of the DataError that a reader must raise."""
    with pytest.raises(DataError) as caught:
        reader(*args, **options)
    return str(caught.value)


# ---- read_text


def test_plain_utf8_is_read_as_it_is_and_in_silence():
    notes: list[str] = []
    assert read_text(write("a.txt", "Ærø\n  日本 \n"), say=notes.append) == "Ærø\n  日本 \n"
    assert notes == []


def test_str_and_path_are_both_taken():
    write("a.txt", "x")
    assert read_text("a.txt") == read_text(Path("a.txt")) == "x"


def test_mark_and_foreign_line_ends_are_normalised_and_said():
    notes: list[str] = []
    write("wiki.txt", b"\xef\xbb\xbfone\r\ntwo\r\nthree\rfour\n")
    assert read_text("wiki.txt", say=notes.append) == "one\ntwo\nthree\nfour\n"
    assert notes == [
        "wiki.txt: byte-order mark removed",
        "wiki.txt: 2 CRLF line ends read as LF",
        "wiki.txt: 1 lone CR line end read as LF",
    ]


def test_large_counts_are_grouped():
    notes: list[str] = []
    read_text(write("wiki.txt", "x\r\n" * 2937), say=notes.append)
    assert notes == ["wiki.txt: 2,937 CRLF line ends read as LF"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_not_utf8_names_line_and_byte(line_end: bytes):
    write("wiki.txt", b"fine" + line_end + b"caf\xe9 au lait" + line_end)
    assert refusal(read_text, "wiki.txt") == (
        'wiki.txt:2: not UTF-8 at byte 4 (0xe9); re-save it as UTF-8 or read it with errors = "replace"'
    )


def test_bytes_are_counted_not_characters():
    write("wiki.txt", "Ærø".encode() + b"\xff")
    assert refusal(read_text, "wiki.txt").startswith("wiki.txt:1: not UTF-8 at byte 6 (0xff)")


def test_replace_counts_what_it_replaced():
    notes: list[str] = []
    write("wiki.txt", b"a\xe9b\n\xff \xef\xbf\xbd\n")  # the last U+FFFD is the file's own
    assert read_text("wiki.txt", errors="replace", say=notes.append) == "a\ufffdb\n\ufffd \ufffd\n"
    assert notes == ["wiki.txt: 2 invalid byte sequences read as U+FFFD"]


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_nul_bytes_look_binary(errors: str):
    write("wiki.txt", b"one\ntwo\nelevenbytes\0 more\n")
    assert refusal(read_text, "wiki.txt", errors=errors) == (
        "wiki.txt:3: NUL byte at byte 12; this looks like a binary file (or UTF-16): re-save it as UTF-8 text"
    )


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-16", "UTF-16"), ("utf-32", "UTF-32"), ("utf-16-be", "UTF-16"), ("utf-32-be", "UTF-32")],
)
def test_other_unicode_encodings_are_named(encoding: str, name: str):
    text = "text" if encoding in ("utf-16", "utf-32") else "\ufefftext"
    write("wiki.txt", text.encode(encoding))
    assert refusal(read_text, "wiki.txt") == (
        f"wiki.txt: this is {name} (it begins with a {name} byte-order mark); re-save it as UTF-8"
    )


def test_a_link_that_leads_nowhere_is_called_that():
    Path("gone.txt").symlink_to("elsewhere.txt")
    assert refusal(read_text, "gone.txt") == "gone.txt: a link to elsewhere.txt, which is not there"


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz", "zst"])
def test_a_name_that_promises_a_packed_file_is_no_plain_one(ending: str):
    Path(f"a.txt.{ending}").write_text("plain")
    kind = {"gz": "gzip", "bz2": "bzip2", "zst": "zstd"}.get(ending, ending)
    assert refusal(read_text, f"a.txt.{ending}") == (
        f"a.txt.{ending}: not {kind}, in spite of its name; compress it, or rename it without .{ending}"
    )


def test_what_a_folder_does_not_show_is_not_passed_over_in_silence(monkeypatch: pytest.MonkeyPatch):
    write("corpus/a.txt", "text")
    write("corpus/sub/b.txt", "more")
    write("elsewhere/c.txt", "further")
    Path("corpus/folder").symlink_to("../elsewhere")
    Path("corpus/c.txt").symlink_to("../elsewhere/c.txt")
    Path("corpus/none.txt").symlink_to("nowhere.txt")
    said: list[str] = []
    assert read_documents("corpus", say=said.append) == ["text", "further", "more"]
    links = "folder -> ../elsewhere, none.txt -> nowhere.txt"
    assert said == [f"corpus: 2 links to folders or to nothing passed over: {links}"]
    scandir = os.scandir

    def closed(path: str) -> Any:
        if Path(path).name == "sub":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert refusal(read_documents, "corpus") == (
        "corpus/sub: cannot be looked into (Permission denied); mend that, or move it away"
    )


def test_a_first_row_that_looks_like_a_header_is_told():
    write("train.tsv", "Question\tanswer\nWho?\tAda\n")
    write("pairs.tsv", "source\ttarget\nja\tyes\n")
    write("fine.tsv", "What is the question?\tanswer\nja\tyes\n")
    for read, name in ((read_pairs, "train.tsv"), (read_parallel, "pairs.tsv")):
        said: list[str] = []
        assert len(read(name, say=said.append)) == 2
        assert said == [f"{name}:1: read as any other row, though it looks like a header; delete it if it is one"]
        assert len(read("fine.tsv", say=pytest.fail)) == 2


def test_files_that_are_read_as_text_and_may_be_something_else_are_told():
    write("list.json", '["a", "b"]\n')
    write("table.csv", "id;text\n1;one\n")
    said: list[str] = []
    assert read_documents("list.json", say=said.append) == ['["a", "b"]']
    assert read_documents("table.csv", say=said.append) == ["id;text", "1;one"]
    assert said[0].startswith("list.json: read as plain text; of a .jsonl file")
    assert "table.csv: read as one column; if ';' stands between several, save it with commas" in said


def test_an_empty_line_of_a_strict_table_is_one_mistake():
    write("pairs.tsv", "ja\tyes\n\t\n\nnein\tno\n")
    shown = refusal(read_parallel, "pairs.tsv", strict=True)
    assert shown.count("pairs.tsv:2: ") == shown.count("pairs.tsv:3: ") == 1


def test_missing_file_offers_the_nearest_name():
    write("notes/wiki.txt", "x")
    assert refusal(read_text, "notes/wik.txt") == ("notes/wik.txt: no such file; did you mean 'notes/wiki.txt'?")
    assert refusal(read_text, "notes/zzz.csv") == "notes/zzz.csv: no such file"
    assert refusal(read_text, "nowhere/a.txt") == ("nowhere/a.txt: no such file; there is no folder nowhere either")
    assert refusal(read_text, "notes/wiki.txt/a.txt").startswith("notes/wiki.txt/a.txt: no such file")


def test_folder_where_a_file_is_wanted():
    Path("notes").mkdir()
    assert refusal(read_text, "notes") == "notes: this is a folder where a file is wanted"


def test_no_permission(monkeypatch: pytest.MonkeyPatch):
    def denied(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)  # a mode of 000 would not stop root
    assert refusal(read_text, "a.txt").startswith("a.txt: no permission to read it")


@pytest.mark.parametrize("name", ["a\0b.txt", "x" * 5000, "[" + "x" * 5000])
def test_impossible_names_are_errors_too(name: str):
    assert refusal(read_documents, name).startswith(name)


@pytest.mark.parametrize(
    ("content", "word"), [(b"", "nothing"), (b" \n\t\r\n", "only whitespace"), (b"\xef\xbb\xbf", "nothing")]
)
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_empty_files_are_refused(content: bytes, word: str, name: str):
    assert refusal(read_text, write(name, content)) == f"{name}: empty; there is {word} in it"


def test_zero_bytes_named_gz_are_empty():
    Path("a.gz").write_bytes(b"")
    assert refusal(read_text, "a.gz") == "a.gz: empty; there is nothing in it"


def test_gzip_is_known_by_its_bytes():
    notes: list[str] = []
    Path("wiki.txt").write_bytes(gzip.compress(b"text\n"))
    assert read_text("wiki.txt", say=notes.append) == "text\n"
    assert notes == ["wiki.txt: read as gzip, though its name does not end in .gz"]
    Path("plain.gz").write_bytes(b"text\n")
    assert refusal(read_text, "plain.gz") == (
        "plain.gz: not gzip, in spite of its name; compress it, or rename it without .gz"
    )


@given(st.data())
def test_damaged_gzip_is_refused_or_read_right(data: st.DataObject):
    packed = gzip.compress(b"a line of text\n" * 20, mtime=0)
    if data.draw(st.booleans(), label="cut off"):
        damaged = packed[: data.draw(st.integers(2, len(packed) - 1))]
    else:  # inside the data and its checksum; the header has bytes without meaning
        place = data.draw(st.integers(10, len(packed) - 1))
        damaged = packed[:place] + bytes([packed[place] ^ 0x55]) + packed[place + 1 :]
    Path("a.txt.gz").write_bytes(damaged)
    assert refusal(read_text, "a.txt.gz").startswith("a.txt.gz: broken or cut-off gzip file (")


@given(st.binary(max_size=60))
def test_any_bytes_give_text_or_a_data_error(raw: bytes):
    Path("any").write_bytes(raw)
    for errors in ("strict", "replace"):
        try:
            text = read_text("any", errors=errors)
        except DataError as error:
            assert str(error).startswith("any:")
        else:
            assert "\r" not in text and "\0" not in text and text.strip()


def test_unknown_choices_are_settings_errors():
    write("a.txt", "x")
    with pytest.raises(SettingsError, match="errors = 'ignore'"):
        read_text("a.txt", errors="ignore")
    with pytest.raises(SettingsError, match="documents = 'pages'"):
        read_documents("a.txt", documents="pages")


# ---- read_lines


def test_lines_keep_their_numbers_and_their_spaces():
    notes: list[str] = []
    write("a.txt", "\n  one \n\n \t\ntwo\n")
    assert read_lines("a.txt", say=notes.append) == [(2, "  one "), (5, "two")]
    assert notes == ["a.txt: 3 empty lines skipped"]


def test_only_line_feeds_end_lines():
    line = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g"
    assert read_lines(write("a.txt", f"{line}\nnext")) == [(1, line), (2, "next")]


@given(st.lists(st.text(st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]))))
def test_lines_come_back(lines: list[str]):
    wanted = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if wanted and not lines[0].startswith("\ufeff"):
        assert read_lines(write("a.txt", "\n".join(lines))) == wanted


# ---- read_documents


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.en", "a.en.gz", "README"])
def test_plain_text_by_line_or_by_file(name: str):
    write(name, "one\n\ntwo\n")
    assert read_documents(name) == ["one", "two"]
    assert read_documents(name, documents="file") == ["one\n\ntwo\n"]


def test_folder_is_read_recursively_in_order():
    write("notes/b.txt", "b")
    write("notes/a/z.csv", "id,text\n1,z")
    write("notes/c.jsonl.gz", '{"text": "c"}')
    write("notes/image.png", b"\0\0")
    write("notes/.hidden.txt", b"\0\0")
    assert read_documents("notes") == read_documents(Path("notes")) == ["z", "b", "c"]


def test_pattern_takes_every_match_in_order():
    for name in ("b", "a", "c"):
        write(f"notes/{name}.txt", name)
    write("notes/d.md", "d")
    Path("notes/folder.txt").mkdir()
    assert read_documents("notes/*.txt") == ["a", "b", "c"]
    write("odd[1].txt", "a file of that very name")
    assert read_documents("odd[1].txt") == ["a file of that very name"]


def test_nothing_to_read():
    Path("notes").mkdir()
    assert refusal(read_documents, "notes").startswith("notes: no .txt, .tsv, .csv or .jsonl file")
    assert refusal(read_documents, "notes/*.txt") == "notes/*.txt: no file matches this pattern"


def test_errors_in_a_folder_name_the_file():
    write("notes/good.txt", "x")
    write("notes/bad.txt", b"\xe9")
    assert refusal(read_documents, "notes").startswith("notes/bad.txt:1: not UTF-8 at byte 1 (0xe9)")


TABLE = {
    "a.tsv": 'id\ttext\ttitle\n1\t"one\tT1\n2\t two \tT2\n',
    "a.csv": 'id,text,title\n1,"""one",T1\n2, two ,T2\n',
    "a.jsonl": '{"id": "1", "text": "\\"one", "title": "T1"}\n{"id": "2", "text": " two ", "title": "T2"}\n',
}


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", TABLE)
def test_column_by_name(name: str, packed: str):
    write(name + packed, TABLE[name])
    assert read_documents(name + packed) == ['"one', " two "]
    assert read_documents(name + packed, column="title") == ["T1", "T2"]
    message = refusal(read_documents, name + packed, column="titel")
    assert message.startswith(f"{name + packed}:1: no ") and "did you mean 'title'?" in message


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_column_by_index_reads_every_row(name: str):
    notes: list[str] = []
    write(name, TABLE[name])
    assert read_documents(name, column=2, say=notes.append) == ["title", "T1", "T2"]
    assert read_documents(name, column="0") == ["id", "1", "2"]
    assert notes == [f"{name}: no header row expected, every row read"]
    assert refusal(read_documents, name, column=3) == f"{name}:1: no column 3; there are 3, counted from 0"
    assert refusal(read_documents, name, column=-1).startswith(f"{name}:1: no column -1")


def test_only_column_needs_no_name():
    assert read_documents(write("a.csv", 'one\n"two, three"\n')) == ["one", "two, three"]
    assert read_documents(write("b.csv", "text\none\n")) == ["one"]


def test_columns_are_listed_where_none_is_the_text():
    assert refusal(read_documents, write("a.csv", "id,title\n1,T\n")) == (
        "a.csv: which column is the text? found: 'id', 'title'; "
        'name one, as in task.column = "title", or count from 0 in a table without a header (task.column = 1; '
        "of headway data check, --column)"
    )


def test_ragged_tables_are_refused_with_their_lines():
    write("a.csv", "id,text\n1,one\n\n2,two,extra\n3\n")
    assert refusal(read_documents, "a.csv") == (
        "a.csv:4: 3 columns where 2 are wanted (as in the first row): '2'\n"
        "a.csv:5: 1 column where 2 are wanted (as in the first row): '3'"
    )


def test_header_troubles():
    assert refusal(read_documents, write("a.csv", "id,text\n")) == (
        "a.csv:1: nothing after the header row ('id', 'text')"
    )
    assert refusal(read_documents, write("b.csv", "text,text\n1,2\n")) == (
        "b.csv:1: 2 columns named 'text' in the header row; give them names of their own, or number the columns of a "
        "table without a header row, from 0"
    )


def test_blank_cells_are_skipped_and_said():
    notes: list[str] = []
    write("a.csv", "id,text\n1,one\n2, \n\n3,\n")
    assert read_documents("a.csv", say=notes.append) == ["one"]
    assert notes == ["a.csv: 1 empty line skipped", "a.csv: 2 empty texts skipped"]
    assert refusal(read_documents, write("b.csv", "id,text\n1,\n")).startswith("b.csv: empty; no row has text")
    assert refusal(read_documents, write("c.csv", '""\n')).startswith("c.csv: empty; there is no row")


def test_csv_cells_may_span_lines_and_be_long():
    long = "word " * 100_000
    write("a.csv", f'id,text\n1,"two\nlines"\n2,"{long}"\n3,x,y\n')
    assert refusal(read_documents, "a.csv").startswith("a.csv:5: 3 columns where 2 are wanted")
    write("a.csv", f'id,text\n1,"two\nlines"\n2,"{long}"\n')
    assert read_documents("a.csv") == ["two\nlines", long]


def test_csv_quotes_must_close():
    write("a.csv", 'id,text\n1,"two\nlines"\n2,"open\n3,three\n')
    assert refusal(read_documents, "a.csv") == ("a.csv:4: a quote opened in this row is never closed: '2,\"open'")
    write("a.csv", 'id,text\n1,one\n2,"a"b\n')
    message = refusal(read_documents, "a.csv")
    assert message.startswith("a.csv:3: not CSV (") and message.endswith("begins '2,\"a\"b'")


CELLS = st.text(st.characters(exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1)


@given(st.lists(CELLS.filter(str.strip), min_size=1))
def test_csv_written_by_python_comes_back(cells: list[str]):
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerows([["id", "text"], *([number, cell] for number, cell in enumerate(cells))])
    assert read_documents(write("a.csv", table.getvalue())) == cells


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=1))
def test_json_lines_written_by_python_come_back(texts: list[str]):
    write("a.jsonl", "\n".join(json.dumps({"text": text}) for text in texts))
    assert read_documents("a.jsonl") == texts


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": }', "not JSON (Expecting value) at column 10: '{\"text\": }'"),
        ('["text"]', 'not a JSON object (like {"text": "..."}): \'["text"]\''),
        ('{"texts": "a"}', "no key 'text'; did you mean 'texts'? known: texts"),
        ('{"body": "a", "id": 1}', "no key 'text'; known: body, id"),
        ('{"text": 12}', "'text' is 12, where a string is wanted"),
        ('{"text": null}', "'text' is null, where a string is wanted"),
        ('{"text": "a\\ud800"}', "'text' holds half a surrogate pair (\\ud800), which is not a character"),
    ],
)
def test_json_lines_that_are_wrong(line: str, problem: str):
    write("a.jsonl", f'{{"text": "fine"}}\n\n{line}\n')
    assert refusal(read_documents, "a.jsonl") == f"a.jsonl:3: {problem}"


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "9" * 5000 + "}"])
def test_json_lines_that_break_parsers(line: str):
    message = refusal(read_documents, write("a.jsonl", line))
    assert message.startswith("a.jsonl:1: not JSON that can be read (") and len(message) < 400


# ---- read_pairs


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_tsv_with_and_without_answers(packed: str):
    notes: list[str] = []
    both = write(f"dev.tsv{packed}", 'Where was "A" born?\tRome\n\nWhere was B born? \t Oslo\n')
    pairs = [Pair('Where was "A" born?', "Rome", 1), Pair("Where was B born? ", " Oslo", 3)]
    questions = [Pair(pair.source, None, pair.line) for pair in pairs]
    assert read_pairs(both) == read_pairs(both, answers=True) == pairs
    assert read_pairs(both, answers=False) == questions
    alone = write(f"test.tsv{packed}", 'Where was "A" born?\n\nWhere was B born? \n')
    assert read_pairs(alone, say=notes.append) == read_pairs(alone, answers=False) == questions
    assert notes == [f"{alone}: 1 empty line skipped", f"{alone}: questions only, no answers"]
    assert refusal(read_pairs, alone, answers=True) == (
        f"{alone}:1: 1 column where 2 are wanted (question<TAB>answer): 'Where was \"A\" born?'\n"
        f"{alone}:3: 1 column where 2 are wanted (question<TAB>answer): 'Where was B born? '"
    )


def test_mixed_shapes_list_the_first_five_rows():
    good = "Where?\tRome\n" * 10
    write("birth.tsv", good + "Where is it?\tRome\tItaly\n" * 4 + "Where?\n" * 3)
    assert refusal(read_pairs, "birth.tsv").split("\n") == [
        *(
            f"birth.tsv:{line}: 3 columns where 2 are wanted (question<TAB>answer): 'Where is it?'"
            for line in range(11, 15)
        ),
        "birth.tsv:15: 1 column where 2 are wanted (question<TAB>answer): 'Where?'",
        "... and 2 more rows like these",
    ]
    write("birth.tsv", "Where?\n" * 3 + "Who?\tMe\n")
    assert refusal(read_pairs, "birth.tsv") == (
        "birth.tsv:4: 2 columns where 1 is wanted (a question, as in most rows): 'Who?'"
    )


def test_empty_cells_are_refused():
    write("a.tsv", "Where?\tRome\n \tRome\nWho?\t \n\t\n")
    assert refusal(read_pairs, "a.tsv").split("\n") == [
        "a.tsv:2: empty question",
        "a.tsv:3: empty answer to 'Who?'",
        "a.tsv:4: empty question",
        "a.tsv:4: empty answer to ''",
    ]
    assert refusal(read_pairs, write("a.jsonl", '{"question": "Who?", "answer": ""}')) == (
        "a.jsonl:1: empty answer to 'Who?'"
    )


def test_long_values_are_shortened():
    message = refusal(read_pairs, write("a.tsv", "x" * 10_000 + "\t\t\n"))
    assert message == f"a.tsv:1: 3 columns where 2 are wanted (question<TAB>answer): '{'x' * 60}…'"


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_csv_pairs(packed: str):
    name = write(f"a.csv{packed}", 'id,answer, question\n1,Rome,"Where, then?"\n2,"Os\nlo",Who?\n3,Bonn,How?\n')
    pairs = [Pair("Where, then?", "Rome", 2), Pair("Who?", "Os\nlo", 3), Pair("How?", "Bonn", 5)]
    assert read_pairs(name) == pairs
    assert [pair.target for pair in read_pairs(name, answers=False)] == [None] * 3
    assert [pair.source for pair in read_pairs(name, columns=("id", "answer"))] == ["1", "2", "3"]
    assert refusal(read_pairs, name, columns=("quest", "answer")) == (
        f"{name}:1: no column 'quest' in the header row; did you mean 'question'? known: id, answer, question"
    )


def test_csv_without_answers():
    write("a.csv", "question,place\nWho?,Rome\n")
    assert read_pairs("a.csv") == [Pair("Who?", None, 2)]
    assert read_pairs("a.csv", columns=("question", "place"), answers=True) == [Pair("Who?", "Rome", 2)]
    assert refusal(read_pairs, "a.csv", answers=True).startswith("a.csv:1: no column 'answer'")


def test_tsv_columns_by_name_or_index():
    write("a.tsv", "en\tzh\tby\nHi.\t嗨。\tA\n")
    assert read_pairs("a.tsv", columns=("en", "zh")) == [Pair("Hi.", "嗨。", 2)]
    assert read_pairs("a.tsv", columns=(0, 1)) == [Pair("en", "zh", 1), Pair("Hi.", "嗨。", 2)]


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_json_pairs(packed: str):
    name = write(f"a.jsonl{packed}", '{"question": "Who?", "answer": "Me"}\n\n{"question": "Where?"}\n')
    assert refusal(read_pairs, name) == f"{name}:3: no key 'answer'; known: question"
    assert read_pairs(name, answers=False) == [Pair("Who?", None, 1), Pair("Where?", None, 3)]
    name = write(f"b.jsonl{packed}", '{"q": "Who?", "a": "Me"}\n')
    assert read_pairs(name, columns=("q", "a")) == [Pair("Who?", "Me", 1)]
    assert refusal(read_pairs, name).startswith(f"{name}:1: no key 'question'")
    assert read_pairs(write("c.jsonl", '{"question": "Who?"}')) == [Pair("Who?", None, 1)]


# ---- read_parallel

SENTENCES = st.text(st.characters(exclude_characters="\0\r\n\t\ufeff", exclude_categories=["Cs"])).filter(str.strip)
CORPORA = st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1)


def numbered(pairs: list[tuple[str, str]], first: int = 1) -> list[Pair]:
    return [Pair(source, target, line) for line, (source, target) in enumerate(pairs, start=first)]


@pytest.mark.parametrize("packed", ["", ".gz"])
@given(pairs=CORPORA, end=st.sampled_from(["", "\n"]))
def test_parallel_files_come_back_in_order(packed: str, pairs: list[tuple[str, str]], end: str):
    source = write(f"train.de{packed}", "\n".join(first for first, _ in pairs) + end)
    target = write(f"train.en{packed}", "\n".join(second for _, second in pairs) + "\n")
    notes: list[str] = []
    assert read_parallel(source, target, strict=True, say=notes.append) == numbered(pairs)
    assert notes == []


@pytest.mark.parametrize("packed", ["", ".gz"])
@given(pairs=CORPORA)
def test_parallel_tables_come_back_in_order(packed: str, pairs: list[tuple[str, str]]):
    tsv = write(f"a.tsv{packed}", "".join(f"{first}\t{second}\n" for first, second in pairs))
    assert read_parallel(tsv) == read_parallel(tsv, columns=(0, 1)) == numbered(pairs)
    assert [(pair.target, pair.source) for pair in read_parallel(tsv, columns=(1, 0))] == pairs
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([["target", "id", "source"], *((b, "7", a) for a, b in pairs)])
    assert read_parallel(write(f"a.csv{packed}", table.getvalue())) == numbered(pairs, 2)
    lines = "\n".join(json.dumps({"target": second, "source": first}) for first, second in pairs)
    assert read_parallel(write(f"a.jsonl{packed}", lines)) == numbered(pairs)


def test_parallel_columns_by_name():
    wanted = [Pair("Hi.", "嗨。", 2)]
    assert read_parallel(write("a.tsv", "zh\ten\n嗨。\tHi.\n"), columns=("en", "zh")) == wanted
    assert read_parallel(write("a.csv", "zh,en\n嗨。,Hi.\n"), columns=["en", "zh"]) == wanted
    assert read_parallel(write("a.jsonl", '\n{"en": "Hi.", "zh": "嗨。"}\n'), columns=("en", "zh")) == wanted
    way = "\nname its two columns: task.source_column, task.target_column"
    assert refusal(read_parallel, "a.csv") == f"a.csv:1: no column 'source' in the header row; known: zh, en{way}"
    missing = refusal(read_parallel, "a.jsonl")
    assert missing.startswith("a.jsonl:2: no key 'source'") and missing.count("\n") == 1 and missing.endswith(way)
    assert refusal(read_parallel, "a.jsonl", columns=(0, 1)).startswith("a.jsonl: a .jsonl file has keys, not columns")


def test_a_tsv_may_have_more_columns_but_not_fewer():
    write("cmn.txt", "Hi.\t嗨。\tCC-BY\nRun!\t跑!\n")
    notes: list[str] = []
    assert read_parallel("cmn.txt", say=notes.append) == [Pair("Hi.", "嗨。", 1), Pair("Run!", "跑!", 2)]
    assert notes == [
        "cmn.txt: 1 row with more than two columns, the first in line 1; all but the first two are left out"
    ]
    write("a.tsv", "Hi.\t嗨。\tCC-BY\nRun!\n")
    assert refusal(read_parallel, "a.tsv") == "a.tsv:2: 1 column where 2 are wanted (source<TAB>target): 'Run!'"


def test_one_side_alone_asks_for_the_other():
    message = refusal(read_parallel, write("train.en", "Hi.\nRun!\n"))
    assert message.startswith("train.en:1: 1 column where 2 are wanted (source<TAB>target): 'Hi.'\n")
    assert "\ngive the file with the other side too (task.target, task.dev_target, " in message


def test_a_table_that_is_read_as_lines_is_named():
    notes: list[str] = []
    read_parallel(write("a.tsv", "Hi.\t嗨。\n"), write("a.zh", "嗨。\n"), say=notes.append)
    assert notes == ["a.tsv: read line by line, as one side; leave the other file out where this table holds both"]


def test_unequal_files_are_refused_with_both_counts():
    write("train.de", "eins\nzwei\n")
    assert refusal(read_parallel, "train.de", write("train.en", "one\n")).startswith(
        "train.de: 2 lines, but train.en: 1 line; line by line, one must translate the other"
    )
    assert "train.en: 3 lines" in refusal(read_parallel, "train.de", write("train.en", "one\ntwo\n\n"))


def test_pairs_with_an_empty_side_are_dropped_and_said():
    notes: list[str] = []
    write("train.de", "eins\n\ndrei\n \nfünf\n")
    write("train.en", "one\ntwo\n\t\n\nfive\n")
    kept = [Pair("eins", "one", 1), Pair("fünf", "five", 5)]
    assert read_parallel("train.de", "train.en", say=notes.append) == kept
    assert notes == ["train.de: 3 pairs with an empty side dropped (lines 2, 3, 4)"]
    assert refusal(read_parallel, "train.de", "train.en", strict=True) == (
        "train.de:2: empty source\n"
        "train.en:3: empty target to 'drei'\n"
        "train.de:4: empty source\n"
        "fill or delete these pairs, or read without strict, which drops them"
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("a\t\nb\tc\n", "1 pair with an empty side dropped (line 1)"),
        ("b\tc\n" + "\td\n" * 7, "7 pairs with an empty side dropped (lines 2, 3, 4, 5, 6, …)"),
    ],
)
def test_the_note_shows_the_first_few_lines(rows: str, said: str):
    notes: list[str] = []
    assert [(pair.source, pair.target) for pair in read_parallel(write("a.tsv", rows), say=notes.append)] == [
        ("b", "c")
    ]
    assert notes == [f"a.tsv: {said}"]
    with pytest.raises(DataError, match=r"a\.tsv:\d: empty (source|target to 'a')"):
        read_parallel("a.tsv", strict=True)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.tsv", "a\tb\n\n\tc\n  \n", (2, 3, 4)),
        ("a.csv", 'source,target\na,"b\n\nb"\n\nc,\n', (5, 6)),
        ("a.jsonl", '\n{"source": "a", "target": "b"}\n{"source": "", "target": "b"}\n', (1, 3)),
    ],
)
def test_strict_refuses_the_empty_lines_of_a_table_too(name: str, text: str, lines: tuple[int, ...]):
    found = refusal(read_parallel, write(name, text), strict=True).splitlines()[:-1]
    assert [line.split(": ")[0] for line in found] == [f"{name}:{number}" for number in lines]
    assert all(": empty " in line for line in found) and len(read_parallel(name)) == 1


def test_nothing_left_is_an_error():
    assert refusal(read_parallel, write("a.tsv", "a\t\n\tb\n")) == "a.tsv: empty; no pair has text on both sides"


def test_parallel_files_are_cleaned_like_others():
    notes: list[str] = []
    write("train.de", b"\xef\xbb\xbfeins\r\nzwei\r\n")
    write("train.en", "one\u2028and\x0bmore\ntwo")
    assert read_parallel("train.de", "train.en", say=notes.append) == numbered(
        [("eins", "one\u2028and\x0bmore"), ("zwei", "two")]
    )
    assert notes == ["train.de: byte-order mark removed", "train.de: 2 CRLF line ends read as LF"]
    write("train.en", b"caf\xe9\ntwo\n")
    assert refusal(read_parallel, "train.de", "train.en").startswith("train.en:1: not UTF-8 at byte 4")
    assert read_parallel("train.de", "train.en", errors="replace")[0].target == "caf\ufffd"


def test_parallel_files_that_are_none():
    write("train.de", "eins\n")
    Path("link").symlink_to("train.de")
    for again in ("train.de", "./train.de", "link"):
        assert refusal(read_parallel, "train.de", again) == (
            f"{again}: given as source and as target; name the file that holds the other side"
        )
    Path("folder").mkdir()
    assert refusal(read_parallel, "train.de", "folder") == "folder: this is a folder where a file is wanted"
    assert refusal(read_parallel, "folder", "folder") == "folder: this is a folder where a file is wanted"
    assert refusal(read_parallel, "folder") == "folder: this is a folder where a file is wanted"
    assert refusal(read_parallel, "train.de", "train.dr") == "train.dr: no such file; did you mean 'train.de'?"
    assert refusal(read_parallel, "trains.de", "train.de").startswith("trains.de: no such file")


@pytest.mark.parametrize("sign", [";", "\t", "|"])
@pytest.mark.parametrize("columns", [None, ("source", "target"), (0, 1)])
def test_a_csv_without_commas_is_told_so(sign: str, columns):
    path = write("a.csv", f"source{sign}target\nein Hund, der läuft{sign}a dog\n")
    assert refusal(read_parallel, path, columns=columns) == (
        f"a.csv:1: the columns of a .csv have commas between them, and these seem to have {sign!r}: "
        f"{f'source{sign}target'!r}; save it with commas, or with tabs as a .tsv"
    )
    assert len(read_parallel(write("b.csv", f"source,target\nein{sign}Hund,a{sign}dog\n"))) == 1


@pytest.mark.parametrize("columns", [("en",), ("en", "en"), ("0", 0), ("en", "de", "fr"), "en", ()])
def test_parallel_columns_are_two(columns):
    with pytest.raises(SettingsError, match="two different columns are wanted"):
        read_parallel(write("a.tsv", "en\tde\na\tb\n"), columns=columns)


def test_columns_are_for_tables():
    with pytest.raises(SettingsError, match=r"these are for one table; leave them out, or the target b\.txt"):
        read_parallel(write("a.txt", "a\n"), write("b.txt", "b\n"), columns=(0, 1))
