"""Readers for a user's own files: plain text, TSV, CSV and JSON lines, each also as .gz.

A corpus comes out as a list of documents; a question set and a parallel corpus as a list of pairs. Every reader
takes `say`, which is called with one line for each thing it put right on the way (`wiki.txt: 3 empty lines
skipped`). Rows that are wrong are collected, so that one error shows the first few of them with file, line and value.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import DataError, SettingsError, nearest
from headway.text.plain import PACKINGS, Notes, counted, read_text, silent

__all__ = ["Notes", "Pair", "read_documents", "read_lines", "read_pairs", "read_parallel", "read_text"]

TABLES = ("tsv", "csv", "jsonl")
SHOWN_ROWS = 5
SHOWN_FILES = 5
FOR_SHARDS = (".parquet", *(ending for _, ending, _ in PACKINGS))  # what `headway data prepare` reads beyond these
SHOWN_CHARACTERS = 60

Row = tuple[int, list[str]]
"""The line a record begins on, counted from 1, and its cells."""


@dataclass(frozen=True)
class Pair:
    """A question and its answer, or None where the file has questions only; or a sentence and its translation.

    `line` is the line it stands on, counted from 1.
    """

    source: str
    target: str | None
    line: int


def read_lines(path: str | Path, *, errors: str = "strict", say: Notes = silent) -> list[tuple[int, str]]:
    """The lines of a file that are not blank, as they are, each with its number counted from 1.

    Only `\\n` ends a line. U+2028, vertical tabs and the like are text, so numbers agree with an editor's.
    """
    lines = list(_numbered_lines(read_text(path, errors=errors, say=say)))
    kept = [(number, line) for number, line in lines if line.strip()]
    _say_skipped(path, len(lines) - len(kept), "empty line", say)
    return kept


def read_documents(
    path: str | Path,
    *,
    documents: str = "lines",
    column: str | int | None = None,
    errors: str = "strict",
    say: Notes = silent,
) -> list[str]:
    """The documents of a corpus: a file, every text file in a folder, or every file that a pattern matches.

    Plain text gives a document a line, or a document a file with documents="file". A table (.tsv, .csv or
    .jsonl) gives one a row, from `column`: a name (the first row is then a header; in JSON lines a key) or an
    index from 0 (every row is then data). Without it the column "text" is taken, or the only one.
    """
    if documents not in ("lines", "file"):
        raise SettingsError([f'documents = {documents!r}: "lines" or "file" is wanted'])
    texts: list[str] = []
    for file in files_at(path, say):
        form = format_of(file)
        if form in TABLES:
            read = _json_column if form == "jsonl" else _table_column
            texts += _without_blanks(file, read(file, column, errors, say), say)
        elif documents == "file":
            say_json(file, say)
            texts.append(read_text(file, errors=errors, say=say))
        else:
            say_json(file, say)
            texts += [line for _, line in read_lines(file, errors=errors, say=say)]
    return texts


def say_json(file: str | Path, say: Notes) -> None:
    """Say that JSON is read as the text that it is where its name does not promise an object a line."""
    if format_of(file) == "json":
        say(f"{file}: read as plain text; of a .jsonl file, with an object a line, the texts alone are read")


def read_pairs(
    path: str | Path,
    *,
    answers: bool | None = None,
    columns: tuple[str | int, str | int] | None = None,
    errors: str = "strict",
    say: Notes = silent,
) -> list[Pair]:
    """Questions with their answers, or questions alone: every row of a file must have the same shape.

    A .tsv file (or one with an unknown ending) is `question<TAB>answer` or `question`, with no header. A .csv
    file has a header row and a .jsonl file has keys, `question` and `answer` unless `columns` names others.
    Given names as `columns` a .tsv file has a header too; indexes from 0 are for tables without one.

    answers=True demands answers, None takes them where they are, False leaves them out.
    """
    form = format_of(path)
    if form == "jsonl":
        rows = _json_pairs(path, answers, columns, errors, say)
    elif form == "csv" or columns:
        rows = _table_pairs(path, answers, columns or ("question", "answer"), errors, say)
    else:
        rows = _plain_pairs(path, answers, errors, say)
    _raise_listed(
        f"{path}:{line}: empty {name}" + (f" to {shown(cells[0])}" if name == "answer" else "")
        for line, cells in rows
        for name, cell in zip(("question", "answer"), cells, strict=False)
        if not cell.strip()
    )
    if answers is None and len(rows[0][1]) == 1:
        say(f"{path}: questions only, no answers")
    return [Pair(cells[0], cells[1] if len(cells) > 1 else None, line) for line, cells in rows]


def read_parallel(
    source: str | Path,
    target: str | Path | None = None,
    columns: Sequence[str | int] | None = None,
    strict: bool = False,
    errors: str = "strict",
    say: Notes = silent,
) -> list[Pair]:
    """Sentence pairs of a parallel corpus: from two files that agree line by line, or from one table.

    Two files are read as lines, whatever their names end in. In one file, a .tsv (or an unknown ending) has no header
    and its first two columns are the pair; a .csv has a header row and a .jsonl has keys, `source` and `target`.
    `columns` names two others: names (a .tsv then has a header too), or indexes from 0 (then no table has one).

    A pair with an empty side is dropped, and a note says how many were; with `strict` it is an error, and so is an
    empty line of a table.
    """
    if columns is not None and (isinstance(columns, str) or len(columns) != 2 or f"{columns[0]}" == f"{columns[1]}"):
        raise SettingsError([f"columns = {columns!r}: two different columns are wanted, the source's and the target's"])
    if target is None:
        rows = _parallel_table(source, columns, errors, say)
    elif columns is None:
        rows = _parallel_lines(source, target, errors, say)
    else:
        raise SettingsError([f"columns = {columns!r}: these are for one table; leave them out, or the target {target}"])
    empty = [(line, cells) for line, cells in rows if not all(cell.strip() for cell in cells)]
    if strict:
        gaps = [(line, source, "empty line") for line in _empty_rows(source, errors)] if target is None else []
        told = {line for line, _, _ in gaps}
        for line, (first, _) in empty:
            if line in told:
                continue
            if first.strip():
                gaps.append((line, target or source, f"empty target to {shown(first)}"))
            else:
                gaps.append((line, source, "empty source"))
        _raise_listed(
            (f"{path}:{line}: {what}" for line, path, what in sorted(gaps, key=lambda gap: gap[0])),
            "fill or delete these pairs, or read without strict, which drops them",
        )
    if len(empty) == len(rows):
        raise DataError(f"{source}: empty; no pair has text on both sides")
    if empty:
        numbers = [f"{line}" for line, _ in empty[:SHOWN_ROWS]] + ["…"] * (len(empty) > SHOWN_ROWS)
        lines = f"{'line' if len(empty) == 1 else 'lines'} {', '.join(numbers)}"
        say(f"{source}: {counted(len(empty), 'pair')} with an empty side dropped ({lines})")
    return [Pair(first, second, line) for line, (first, second) in rows if first.strip() and second.strip()]


def files_at(path: str | Path, say: Notes = silent) -> list[str | Path]:
    """The files that `path` stands for, sorted: itself, those in the folder, or those the pattern matches."""
    if os.path.isdir(path):
        endings = [f".{form}{packed}" for form in ("txt", *TABLES) for packed in ("", ".gz")]
        found = files_in(Path(path), endings, say)
        if not found:
            raise DataError(f"{path}: no .txt, .tsv, .csv or .jsonl file (or .gz of one) in this folder")
        return [*found]
    if any(sign in str(path) for sign in "*?[") and not os.path.exists(path):
        matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(name)]
        if not matches:
            raise DataError(f"{path}: no file matches this pattern")
        return [*without_empty(matches, path, say)]
    return [path]


def files_in(folder: Path, endings: Sequence[str], say: Notes = silent) -> list[Path]:
    """The files below a folder whose names have one of these endings, sorted; what is hidden is left out, what is
    passed over is said."""
    seen, links = [], []
    for place, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files = [Path(place, name) for name in names if not name.startswith(".")]
        seen += [file for file in files if file.is_file()]
        links += [file for file in files if not file.exists()]
        links += [Path(place, name) for name in folders if os.path.islink(os.path.join(place, name))]
    if links:
        leading = a_few([f"{link.relative_to(folder)} -> {os.readlink(link)}" for link in sorted(links)])
        say(f"{folder}: {counted(len(links), 'link')} to folders or to nothing passed over: {leading}")
    seen.sort()
    wanted = tuple(endings)
    found = [file for file in seen if file.name.lower().endswith(wanted)]
    if others := [str(file.relative_to(folder)) for file in seen if not file.name.lower().endswith(wanted)]:
        shards = any(name.lower().endswith(FOR_SHARDS) for name in others)
        way = "; headway data prepare reads some of these too" if shards else ""
        say(f"{folder}: {counted(len(others), 'file')} of other kinds passed over: {a_few(others)}{way}")
    return without_empty(found, folder, say)


def unreadable(error: OSError) -> None:
    """A folder that cannot be looked into is not passed over in silence."""
    raise DataError(f"{error.filename}: cannot be looked into ({error.strerror}); mend that, or move it away")


def without_empty(files: list[Path], where: str | Path, say: Notes) -> list[Path]:
    """Those of several files that have something in them."""
    filled = [file for file in files if os.path.getsize(file)]
    if filled and len(filled) < len(files):
        empty = [str(file) for file in files if not os.path.getsize(file)]
        say(f"{where}: {counted(len(empty), 'empty file')} passed over: {a_few(empty)}")
    return filled or files


def a_few(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return ", ".join(names[:SHOWN_FILES]) + more


def format_of(path: str | Path) -> str:
    """'tsv', 'csv', 'jsonl', or whatever else the name ends in, a final .gz aside."""
    return Path(Path(path).name.lower().removesuffix(".gz")).suffix.removeprefix(".")


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines counted from 1. A final line end closes the last line and begins no further one."""
    return enumerate(text.removesuffix("\n").split("\n"), start=1)


# ---- tables: .tsv and .csv


def table(path: str | Path, errors: str, say: Notes) -> list[Row]:
    """The rows of a .csv file, or of any other as TSV, in which quotation marks mean nothing."""
    text = read_text(path, errors=errors, say=say)
    if format_of(path) == "csv":
        rows = list(_csv_rows(path, text))
    else:
        rows = [(number, line.split("\t")) for number, line in _numbered_lines(text)]
    kept = [(line, cells) for line, cells in rows if filled(cells)]
    _say_skipped(path, len(rows) - len(kept), "empty line", say)
    if not kept:
        raise DataError(f"{path}: empty; there is no row with text in it")
    return kept


def _empty_rows(path: str | Path, errors: str) -> list[int]:
    """The lines of a table, or of JSON lines, that hold nothing."""
    text = read_text(path, errors=errors)
    lines = ((line, [content]) for line, content in _numbered_lines(text))
    return [line for line, cells in (_csv_rows(path, text) if format_of(path) == "csv" else lines) if not filled(cells)]


def filled(cells: list[str]) -> bool:
    """Whether a row is more than an empty line."""
    return len(cells) > 1 or bool("".join(cells).strip())


def _csv_rows(path: str | Path, text: str) -> Iterator[Row]:
    """CSV records with the line each begins on; a quoted cell may run over several lines."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a cell may be a long document
    reader = csv.reader(io.StringIO(text), strict=True)
    start = 1
    try:
        for cells in reader:
            yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        begins = shown(text.split("\n")[start - 1])
        if str(error) == "unexpected end of data":
            raise DataError(f"{path}:{start}: a quote opened in this row is never closed: {begins}") from None
        raise DataError(f"{path}:{start}: not CSV ({error}), in the row that begins {begins}") from None


def _table_column(path: str | Path, column: str | int | None, errors: str, say: Notes) -> list[str]:
    """The text column of a table, a cell a row."""
    rows = table(path, errors, say)
    if column is None:
        names = [cell.strip() for cell in rows[0][1]]
        if "text" in names:
            column = "text"
        elif len(names) == 1:
            column = 0
            if found := [sign for sign in ";\t|" if format_of(path) == "csv" and sign in names[0]]:
                say(f"{path}: read as one column; if {found[0]!r} stands between several, save it with commas")
        else:
            raise DataError(
                f"{path}: which column is the text? found: {listed(names)}; "
                f'name one, as in task.column = "{names[-1]}", or count from 0 in a table without a header '
                "(task.column = 1; of headway data check, --column)"
            )
    return [cells[0] for _, cells in _selected(path, rows, [column], say)]


def _selected(path: str | Path, rows: list[Row], columns: Sequence[str | int], say: Notes) -> list[Row]:
    """The rows cut down to `columns`. Names mean that the first row is a header; indexes, that none is."""
    line, header = rows[0]
    indexes = [column_index(f"{path}:{line}", header, column) for column in columns]
    if all(is_index(column) for column in columns):
        say(f"{path}: no header row expected, every row read")
    else:
        rows = rows[1:]
        if not rows:
            raise DataError(f"{path}:{line}: nothing after the header row ({listed(header)})")
    _check_widths(path, rows, len(header), "as in the first row")
    return [(line, [cells[index] for index in indexes]) for line, cells in rows]


def is_index(column: str | int) -> bool:
    return isinstance(column, int) or column.isdecimal()


def column_index(place: str, header: list[str], column: str | int) -> int:
    """Where `column`, a name or an index, stands in a table's first row."""
    if is_index(column):
        index = int(column)
        if not 0 <= index < len(header):
            raise DataError(f"{place}: no column {index}; there are {len(header)}, counted from 0")
        return index
    names = [cell.strip() for cell in header]
    if names.count(str(column)) != 1:
        trouble = f"{names.count(str(column))} columns named" if column in names else "no column"
        ways = "; give them names of their own, or number the columns of a table without a header row, from 0"
        offer = ways if column in names else offered(str(column), names)
        raise DataError(f"{place}: {trouble} '{column}' in the header row{offer}")
    return names.index(str(column))


def offered(column: str, names: Iterable[str]) -> str:
    """What there is instead of a column that is missing: all of them, and which of them may be meant."""
    there = [_shortened(name) for name in names]
    near = nearest(column, there)
    return f"{near} known: {', '.join(there)}" if near.endswith("?") else near


def _check_widths(path: str | Path, rows: list[Row], wanted: int, shape: str) -> None:
    """Every row must have `wanted` cells; `shape` says why."""
    _raise_listed(
        f"{path}:{line}: {width_problem(cells, wanted, shape)}" for line, cells in rows if len(cells) != wanted
    )


def width_problem(cells: list[str], wanted: int, shape: str = "as in the first row") -> str:
    """What is wrong with a row that has not `wanted` cells."""
    wish = f"{wanted} {'is' if wanted == 1 else 'are'} wanted ({shape})"
    return f"{counted(len(cells), 'column')} where {wish}: {shown(cells[0])}"


def _table_pairs(
    path: str | Path, answers: bool | None, columns: tuple[str | int, str | int], errors: str, say: Notes
) -> list[Row]:
    """Questions, and answers if wanted, from the named columns of a table."""
    rows = table(path, errors, say)
    header = [cell.strip() for cell in rows[0][1]]
    answer = columns[1]
    present = int(answer) < len(header) if is_index(answer) else answer in header
    return _selected(path, rows, columns if _with_answers(answers, present) else columns[:1], say)


def _plain_pairs(path: str | Path, answers: bool | None, errors: str, say: Notes) -> list[Row]:
    """`question<TAB>answer` or `question` rows. In a mixed file the rarer shape is the mistake."""
    rows = table(path, errors, say)
    _say_header(path, rows, ("question", "answer"), say)
    widths = [len(cells) for _, cells in rows]
    if answers or widths.count(2) >= widths.count(1):
        _check_widths(path, rows, 2, "question<TAB>answer")
    else:
        _check_widths(path, rows, 1, "a question, as in most rows")
    return [(line, cells[:1]) for line, cells in rows] if answers is False else rows


def _say_header(path: str | Path, rows: list[Row], names: Sequence[str | int], say: Notes) -> None:
    """Say where the first row of a table without header looks like one."""
    line, cells = rows[0]
    if [cell.strip().casefold() for cell in cells[:2]] == [*names[: len(cells)]]:
        say(f"{path}:{line}: read as any other row, though it looks like a header; delete it if it is one")


def _with_answers(answers: bool | None, present: bool) -> bool:
    """Whether to read answers, given what the caller asks for and whether the file has them."""
    return present if answers is None else answers


# ---- parallel corpora


def _parallel_lines(source: str | Path, target: str | Path, errors: str, say: Notes) -> list[Row]:
    """The lines of two files, side by side."""
    if os.path.isfile(source) and os.path.isfile(target) and os.path.samefile(source, target):
        raise DataError(f"{target}: given as source and as target; name the file that holds the other side")
    for path in (source, target):
        if format_of(path) in TABLES:
            say(f"{path}: read line by line, as one side; leave the other file out where this table holds both")
    sides = [list(_numbered_lines(read_text(path, errors=errors, say=say))) for path in (source, target)]
    counts = [len(lines) for lines in sides]
    if counts[0] != counts[1]:
        raise DataError(
            f"{source}: {counted(counts[0], 'line')}, but {target}: {counted(counts[1], 'line')}; line by line, "
            "one must translate the other: find where a line is missing or broken in two"
        )
    return [(line, [first, second]) for (line, first), (_, second) in zip(*sides, strict=True)]


def _parallel_table(path: str | Path, columns: Sequence[str | int] | None, errors: str, say: Notes) -> list[Row]:
    """Two columns of a table. Without names or indexes a TSV row may go on after the second, with what it likes."""
    form = format_of(path)
    named = columns or ("source", "target")
    way = "" if columns else "name its two columns: task.source_column, task.target_column"
    if form == "jsonl":
        if any(is_index(key) for key in named):
            raise DataError(f"{path}: a .jsonl file has keys, not columns with numbers; name two of them, not {named}")
        return _json_strings(path, _json_objects(path, errors, say), [str(key) for key in named], way)
    rows = table(path, errors, say)
    if form == "csv" or columns:
        line, header = rows[0]
        if form == "csv" and len(header) == 1 and (found := [sign for sign in ";\t|" if sign in header[0]]):
            raise DataError(
                f"{path}:{line}: the columns of a .csv have commas between them, and these seem to have {found[0]!r}: "
                f"{shown(header[0])}; save it with commas, or with tabs as a .tsv"
            )
        try:
            return _selected(path, rows, named, say)
        except DataError as error:
            raise DataError("\n".join(filter(None, (str(error), way)))) from None
    _say_header(path, rows, named, say)
    longer = [line for line, cells in rows if len(cells) > 2]
    if longer and len(longer) < len(rows):
        say(
            f"{path}: {counted(len(longer), 'row')} with more than two columns, the first in line {longer[0]}; all but "
            "the first two are left out"
        )
    _raise_listed(
        (f"{path}:{line}: {width_problem(cells, 2, 'source<TAB>target')}" for line, cells in rows if len(cells) < 2),
        ""
        if any(len(cells) > 1 for _, cells in rows)
        else "give the file with the other side too (task.target, task.dev_target, …, --target), if there is one",
    )
    return [(line, cells[:2]) for line, cells in rows]


# ---- JSON lines


def _json_column(path: str | Path, column: str | int | None, errors: str, say: Notes) -> list[str]:
    """The text of every object."""
    key = "text" if column is None else str(column)
    return [cells[0] for _, cells in _json_strings(path, _json_objects(path, errors, say), [key])]


def _json_pairs(
    path: str | Path,
    answers: bool | None,
    columns: tuple[str | int, str | int] | None,
    errors: str,
    say: Notes,
) -> list[Row]:
    """Questions, and answers if wanted, from every object. Where one has an answer, all must have one."""
    question, answer = (str(key) for key in columns or ("question", "answer"))
    objects = _json_objects(path, errors, say)
    present = any(answer in item for _, item, _ in objects)
    keys = [question, answer] if _with_answers(answers, present) else [question]
    return _json_strings(path, objects, keys)


def _json_objects(path: str | Path, errors: str, say: Notes) -> list[tuple[int, dict[str, Any], str]]:
    """(line number, the object in it, what is wrong with it) of each line, as `json_object` finds them."""
    return [(line, *json_object(text)) for line, text in read_lines(path, errors=errors, say=say)]


def json_object(text: str) -> tuple[dict[str, Any], str]:
    """(the object in a line, what is wrong with the line): one of them is empty."""
    try:
        item = json.loads(text)
    except json.JSONDecodeError as error:
        return {}, f"not JSON ({error.msg}) at column {error.colno}: {shown(text)}"
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        return {}, f"not JSON that can be read ({error}): {shown(text)}"
    if not isinstance(item, dict):
        return {}, f'not a JSON object (like {{"text": "..."}}): {shown(text)}'
    return item, ""


def _json_strings(
    path: str | Path, objects: list[tuple[int, dict[str, Any], str]], keys: list[str], way: str = ""
) -> list[Row]:
    """The strings under `keys` of every object, as rows of a table; `way` is the way out where one is missing."""
    lacking = False
    problems = []
    for line, item, unreadable in objects:
        wrong = [] if unreadable else [problem for key in keys if (problem := json_problem(item, key))]
        lacking = lacking or bool(wrong)
        if unreadable or wrong:
            problems.append(f"{path}:{line}: {unreadable or '; '.join(wrong)}")
    _raise_listed(problems, way if lacking else "")
    return [(line, [item[key] for key in keys]) for line, item, _ in objects]


def json_problem(item: dict[str, Any], key: str) -> str | None:
    """What is wrong with item[key], if anything."""
    if key not in item:
        return f"no key '{key}'{offered(key, item)}"
    value = item[key]
    if not isinstance(value, str):
        return f"'{key}' is {_shortened(json.dumps(value))}, where a string is wanted"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        return f"'{key}' holds half a surrogate pair ({half}), which is not a character"
    return None


# ---- what readers say


def _without_blanks(path: str | Path, texts: list[str], say: Notes) -> list[str]:
    """The texts that are not blank; an error where none is left."""
    kept = [text for text in texts if text.strip()]
    if not kept:
        raise DataError(f"{path}: empty; no row has text in the column that was asked for")
    _say_skipped(path, len(texts) - len(kept), "empty text", say)
    return kept


def _say_skipped(path: str | Path, number: int, noun: str, say: Notes) -> None:
    if number:
        say(f"{path}: {counted(number, noun)} skipped")


def _raise_listed(problems: Iterable[str], way: str = "") -> None:
    """One error for all the bad rows of a file: the first few in full, how many more there are, and the `way` out."""
    found = list(problems)
    if rest := found[SHOWN_ROWS:]:
        found[SHOWN_ROWS:] = [f"... and {counted(len(rest), 'more row')} like these"]
    if found:
        raise DataError("\n".join([*found, way] if way else found))


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def shown(text: str) -> str:
    """A value as it may stand in a message: quoted, invisible characters spelled out, not too long."""
    return repr(_shortened(text))


def listed(names: Iterable[str]) -> str:
    return ", ".join(shown(name) for name in names)
