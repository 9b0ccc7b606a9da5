"""Text files of any size, read as blocks of about a megabyte that can each be worked on alone.

    file ──► unpacked bytes ──► blocks, cut where no document or word is harmed ──► texts

Finding blocks is quick and done in order by one process; `texts_of` (decoding, splitting, parsing) is the work, and may
be done anywhere. What a document is, and what is refused, is as in `readers`. Memory: a block, or what is longer and
cannot be cut: a cell of a table, a JSON string, and, where tokens may hold several characters, text without a place.
"""

from __future__ import annotations

import codecs
import csv
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from shlex import quote
from typing import Any

from headway.errors import DataError, SettingsError, UserError
from headway.text import plain, readers
from headway.text.cutting import last_border, last_place
from headway.text.plain import Misread
from headway.text.preparation.sources import FORMS, Source, Unpacked

BLOCK = 1 << 20  # bytes
LONG_LINE = 4 * BLOCK  # a longer one is cut within
LONGEST_CELL = 1 << 26  # of a .csv file: beyond it, a quote was probably not closed
MOST_TOGETHER = 1000  # blocks in a batch
BETWEEN = b"\xff"  # texts that are packed

FIRST_LINE = re.compile(rb"\s*[^\r\n]*")  # that is not blank

NOTES = {"empty line": "skipped", "empty text": "skipped", **plain.DECODING}  # what they count, and what became of it


@dataclass(frozen=True)
class Reading:
    """How files are read: what a document is, where it stands, what to do with bytes that are not UTF-8."""

    documents: str = "lines"
    column: str | int | None = None
    errors: str = "strict"
    whole: bool = False  # never cut a long document
    anywhere: bool = False  # cut one between any two characters, where there is no other place

    def check(self) -> None:
        problems = []
        if self.documents not in ("lines", "file"):
            problems.append(f'--documents (documents = {self.documents!r}): "lines" or "file" is wanted')
        if self.errors not in ("strict", "replace"):
            problems.append(f'errors = {self.errors!r}: "strict" or "replace" is wanted')
        if problems:
            raise SettingsError(problems, "reading")

    def described(self) -> dict[str, Any]:
        """As it is kept beside shards: `anywhere` follows from the tokenizer, and changes none of them."""
        return {key: value for key, value in asdict(self).items() if key != "anywhere"}


@dataclass(frozen=True)
class Place:
    """Where a block begins: in which file, after how many unpacked bytes (rows, in .csv and .parquet)."""

    source: int = 0
    begin: int = 0
    continues: bool = False  # inside a document


@dataclass(frozen=True)
class Rows:
    """The text column of some rows of a table. As a list of strings short texts would take twenty times their size.

    Blank texts are only counted. The others are UTF-8 one after the other, a byte that no UTF-8 has before each.
    """

    count: int  # blank ones too
    lines: array[int]  # of those that are not blank
    packed: bytes

    def texts(self) -> list[str]:
        return [text.decode() for text in self.packed.split(BETWEEN)[1:]]


@dataclass(frozen=True)
class Block:
    """A part of a file. `data` are bytes, or rows of a table; None says that the file ends."""

    place: Place
    form: str
    data: bytes | Rows | None
    stored: int  # bytes of the file, as it lies on disk, up to here
    skip: int = 0  # lines of a table up to and with its header
    column: int = 0
    width: int = 0


@dataclass
class Texts:
    """What is in a block: texts, each with its line; the first may continue the document of the block before."""

    texts: list[str]
    lines: list[int]
    continues: bool = False
    notes: Counter[str] = field(default_factory=Counter)


# ---- blocks


def blocks(sources: list[Source], reading: Reading, begin: Place | None = None) -> Iterator[Block]:
    """The blocks of all files from `begin` on, in order; after those of a file comes one without data."""
    begin = begin or Place()
    for number in range(begin.source, len(sources)):
        source = sources[number]
        place = begin if number == begin.source else Place(number)
        find = {"csv": csv_blocks, "parquet": parquet_blocks}.get(source.form, byte_blocks)
        yield from find(source, reading, place)
        yield Block(Place(number), source.form, None, source.size)


def batches(found: Iterator[Block]) -> Iterator[list[Block]]:
    """Blocks in the order found, several small ones together: what is worth sending to another process."""
    batch: list[Block] = []
    size = 0
    for block in found:
        batch.append(block)
        size += length(block)
        if size >= BLOCK // 2 or len(batch) == MOST_TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def length(block: Block) -> int:
    """In bytes that are held."""
    return len(block.data.packed if isinstance(block.data, Rows) else block.data or b"")


def check_sources(sources: list[Source], reading: Reading) -> None:
    """Look at the beginning of every file, so that what is wrong with the last one shows at once.

    A column is of the tables among them; text has none and is read as it is.
    """
    if reading.column is not None and all(source.form == "txt" for source in sources):
        tables = ", ".join(f".{form}" for form in FORMS[1:])
        raise UserError(f"--column {reading.column}: none of the files is a table ({tables}) by its name; leave it out")
    anywhere = replace(reading, anywhere=True)  # nothing is made of what is looked at
    for source in sources:
        first = next(blocks([source], anywhere))
        if first.form == "jsonl" and isinstance(first.data, bytes):
            line = FIRST_LINE.match(first.data)
            try:
                texts_of(replace(first, data=line[0] if line else b""), reading)
            except Misread as problem:
                raise located(problem, first, source, reading) from None


def byte_blocks(source: Source, reading: Reading, begin: Place) -> Iterator[Block]:
    """Blocks of text, JSON lines or TSV, as bytes."""
    form = "file" if source.form == "txt" and reading.documents == "file" else source.form
    table = table_header(source, reading) if form == "tsv" else Table()
    with Unpacked(source.path) as stream:
        stream.skip(begin.begin)
        for place, data in cut(stream, begin, form, reading):
            skip = table.skip if place.begin == table.place else 0
            yield Block(place, form, data, stream.stored(), skip, table.column, table.width)


def cut(stream: Unpacked, place: Place, form: str, reading: Reading) -> Iterator[tuple[Place, bytes]]:
    """(where it begins, bytes) of each block from `place` on.

    A block ends after a line, or, in a text that is one document and in an endless line, where no token is cut. A NUL
    byte, which whoever decodes the block will refuse, ends the last one: nothing more is read for it.
    """
    buffer = bytearray()
    binary = False
    while True:
        old = len(buffer)
        more = stream.read(BLOCK - old % BLOCK)  # where blocks end depends on where they begin alone
        buffer += more
        binary = binary or b"\0" in more
        end, inside = block_end(buffer, old, place.continues, form, reading) if more else (old, False)
        if not end and binary:
            end, more = buffer.find(b"\0") + 1, b""
        if end:
            yield place, bytes(buffer[:end])
            place = replace(place, begin=place.begin + end, continues=inside)
            del buffer[:end]
        if not more:
            return


def block_end(buffer: bytearray, old: int, continues: bool, form: str, reading: Reading) -> tuple[int, bool]:
    """(where the buffer may be cut, whether that is inside a document); 0 where it must grow.

    Its first `old` bytes were looked at before.
    """
    if form != "file" and (end := after_line(buffer, old)):
        return end, False
    long = len(buffer) >= LONG_LINE
    if reading.whole or not (form == "file" or (form == "txt" and long)):
        return 0, False
    end = last_place(buffer, old, len(buffer))
    if not end and reading.anywhere and long:
        border = last_border(buffer)
        end = border if continues or has_text(buffer[: min(border, LONG_LINE)], buffer[old:border]) else 0
    return end, True


def has_text(first: bytearray, further: bytearray) -> bool:
    """Whether the beginning of a document, or what may begin within a character, is more than blank. A document that is
    blank so far may be so to its end: it is left out."""
    beginning = codecs.getincrementaldecoder("utf-8")("replace").decode(first)  # what is no UTF-8 is not blank either
    return bool(beginning.strip() or further.decode("utf-8", errors="ignore").strip())


def after_line(buffer: bytearray, old: int) -> int:
    """Where the last line of the buffer ends, if it does so after the first `old` bytes; else 0. One that ends with CR
    ends here only where no LF follows, which the next byte tells."""
    return max(buffer.rfind(b"\n", old), buffer.rfind(b"\r", max(0, old - 1), len(buffer) - 1)) + 1


# ---- tables


@dataclass(frozen=True)
class Table:
    """What the first row of a TSV file says: the text's column, how many there are, and where the header ends."""

    column: int = 0
    width: int = 0
    place: int = -1  # of the block that the header is in
    skip: int = 0  # lines of that block


def table_header(source: Source, reading: Reading) -> Table:
    line = 1
    with Unpacked(source.path) as stream:
        for place, data in cut(stream, Place(), "tsv", reading):
            text = decoded_in(source.path, line, data, reading.errors)
            for number, row in enumerate(text.split("\n")):
                if readers.filled(cells := row.split("\t")):
                    column, header = choose_column(f"{source.path}:{line + number}", cells, reading.column)
                    return Table(column, len(cells), place.begin, number + 1 if header else 0)
            line += text.count("\n")
    raise DataError(f"{source.path}: empty; there is no row with text in it")


def choose_column(place: str, header: list[str], column: str | int | None) -> tuple[int, bool]:
    """(which column holds the text, whether the first row is a header)."""
    names = [cell.strip() for cell in header]
    if column is None:
        if "text" not in names and len(names) > 1:
            raise DataError(
                f"{place}: which column is the text? found: {readers.listed(names)}; name one, as in "
                f"--column {quote(names[-1])}, or count from 0 in a table without a header (--column 1)"
            )
        column = "text" if "text" in names else 0
    return readers.column_index(place, header, column), not readers.is_index(column)


def csv_blocks(source: Source, reading: Reading, begin: Place) -> Iterator[Block]:
    """A .csv file as blocks of rows. Which quotes are open can only be told by reading it from its beginning."""
    with Unpacked(source.path) as stream:
        rows = (row for row in csv_rows(source, reading, stream) if readers.filled(row[1]))
        first = next(rows, None)
        if first is None:
            raise DataError(f"{source.path}: empty; there is no row with text in it")
        column, header = choose_column(f"{source.path}:{first[0]}", first[1], reading.column)

        def texts() -> Iterator[tuple[int, str]]:
            for line, cells in rows if header else chain([first], rows):
                if len(cells) != len(first[1]):
                    raise DataError(f"{source.path}:{line}: {readers.width_problem(cells, len(first[1]))}")
                yield line, cells[column]

        for row, data in grouped(islice(texts(), begin.begin, None), begin.begin):
            yield Block(replace(begin, begin=row), "csv", data, stream.stored())


def csv_rows(source: Source, reading: Reading, stream: Unpacked) -> Iterator[tuple[int, list[str]]]:
    """(the line it begins on, cells) of each record; a quoted cell may run over several lines."""

    def lines() -> Iterator[str]:
        line = 1
        for _, data in cut(stream, Place(), "csv", reading):
            text = decoded_in(source.path, line, data, reading.errors)
            line += text.count("\n")
            yield from (row + "\n" for row in text.removesuffix("\n").split("\n"))

    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_CELL))
    reader = csv.reader(lines(), strict=True)
    begins = 1
    try:
        for cells in reader:
            yield begins, cells
            begins = reader.line_num + 1
    except csv.Error as error:
        if "field limit" in str(error):
            raise DataError(
                f"{source.path}:{begins}: a cell of more than {csv.field_size_limit():,} characters; close the quote, "
                "if one that is opened in this row never is, or write the table as .jsonl, if the text is that long"
            ) from None
        if "end of data" in str(error):
            raise DataError(f"{source.path}:{begins}: a quote opened in this row is never closed") from None
        raise DataError(f"{source.path}:{begins}: not CSV ({error})") from None


def parquet_blocks(source: Source, reading: Reading, begin: Place) -> Iterator[Block]:
    """A .parquet file as blocks of rows; only the text column is read, one row group after another."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise UserError(f"{source.path}: reading parquet needs a package: pip install 'headway[parquet]'") from None
    try:
        with parquet.ParquetFile(source.path, buffer_size=BLOCK, pre_buffer=False) as file:
            names, kinds = file.schema_arrow.names, file.schema_arrow.types
            column = parquet_column(source.path, names, kinds, reading.column)
            if not is_text(kinds[column]):
                raise DataError(f"{source.path}: column '{names[column]}' is {kinds[column]}, where text is wanted")
            groups = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
            first = passed = 0
            while first < len(groups) and passed + groups[first] <= begin.begin:
                first, passed = first + 1, passed + groups[first]
            name = names[column]
            parts = file.iter_batches(256, row_groups=range(first, len(groups)), columns=[name])
            alike = names[:column].count(name)  # columns of the same name before it, which are read too
            found = ([part.column(at) for at, each in enumerate(part.schema.names) if each == name] for part in parts)
            cells = (cell or "" for columns in found for cell in columns[alike].to_pylist())
            texts = islice(enumerate(cells, passed + 1), begin.begin - passed, None)
            for row, data in grouped(texts, begin.begin):
                stored = source.size * (row + data.count) // sum(groups)
                yield Block(replace(begin, begin=row), "parquet", data, stored)
    except UnicodeDecodeError:
        raise DataError(f"{source.path}: not UTF-8 in column '{names[column]}'; write it again as UTF-8") from None
    except (ArrowException, OSError) as error:
        raise DataError(f"{source.path}: broken or cut-off parquet file ({error}); copy or write it again") from None


def is_text(kind: Any) -> bool:
    """Whether a column of this arrow type holds strings, perhaps each of them once; not so for lists of strings."""
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    return str(kind) in ("string", "large_string", "string_view")


def parquet_column(path: str, names: list[str], kinds: list[Any], column: str | int | None) -> int:
    if column is None and "text" not in names:
        texts = [name for name, kind in zip(names, kinds, strict=True) if is_text(kind)]
        if len(names) > 1 and texts:
            raise DataError(
                f"{path}: which column is the text? found: {readers.listed(names)}; name one, as in "
                f"--column {quote(texts[-1])}"
            )
    if column is None or readers.is_index(column):
        return choose_column(path, names, column)[0]
    if column not in names:
        raise DataError(f"{path}: no column '{column}'{readers.offered(str(column), names)}")
    return names.index(str(column))


def grouped(texts: Iterator[tuple[int, str]], row: int) -> Iterator[tuple[int, Rows]]:
    """(number of the first, rows) of the rows from `row` on, about BLOCK characters together."""
    while True:
        lines = array("q")
        packed = bytearray()
        count = characters = 0
        for line, text in texts:
            count, characters = count + 1, characters + len(text)
            if text.strip():
                lines.append(line)
                packed += BETWEEN + text.encode()
            if characters + count >= BLOCK:
                break
        if not count:
            return
        yield row, Rows(count, lines, bytes(packed))
        row += count


# ---- from a block to its texts


def texts_of(block: Block, reading: Reading) -> Texts:
    """The documents in a block. Raises Misread."""
    if isinstance(block.data, Rows):
        rows = block.data
        return Texts(rows.texts(), rows.lines.tolist(), notes=Counter({"empty text": rows.count - len(rows.lines)}))
    found = Texts([], [], block.place.continues)
    text = decoded(block.data or b"", reading.errors, found.notes)
    if block.form == "file":
        found.texts, found.lines = [text], [0]
        return without_blanks(found, "empty text")
    found.texts = text.removesuffix("\n").split("\n")[block.skip :]
    found.lines = list(range(block.skip, block.skip + len(found.texts)))
    if block.form == "tsv":
        found.texts = [text_cell(line, number, block) for number, line in enumerate(found.texts, block.skip)]
    else:
        without_blanks(found, "empty line")
    if block.form == "jsonl":
        key = "text" if reading.column is None else str(reading.column)
        found.texts = [json_text(line, number, key) for number, line in zip(found.lines, found.texts, strict=True)]
    return without_blanks(found, "empty text")


def without_blanks(found: Texts, noun: str) -> Texts:
    """Leave out the texts that are blank, except one that continues a document."""
    keep = [place for place, text in enumerate(found.texts) if (found.continues and not place) or text.strip()]
    if len(keep) < len(found.texts):
        found.notes[noun] += len(found.texts) - len(keep)
        found.texts, found.lines = [found.texts[place] for place in keep], [found.lines[place] for place in keep]
    return found


def text_cell(line: str, number: int, block: Block) -> str:
    """The text in a line of TSV; an empty line has an empty one."""
    cells = line.split("\t")
    if len(cells) != block.width:
        if readers.filled(cells):
            raise Misread(number, readers.width_problem(cells, block.width))
        return ""
    return cells[block.column]


def json_text(line: str, number: int, key: str) -> str:
    item, unreadable = readers.json_object(line)
    if problem := unreadable or readers.json_problem(item, key):
        raise Misread(number, problem)
    return item[key]


def decoded(raw: bytes, errors: str, notes: Counter[str]) -> str:
    return plain.decode(raw, errors, notes, "pass --errors replace")


def decoded_in(path: str, line: int, raw: bytes, errors: str) -> str:
    """The same for whoever knows that `raw` begins at `line` of a file."""
    try:
        return decoded(raw, errors, Counter())
    except Misread as problem:
        raise DataError(f"{path}:{line + problem.line}: {problem.message}") from None


def located(problem: Misread, block: Block, source: Source, reading: Reading) -> DataError:
    """The error for what is wrong in a block, with its file and line; the lines before it are counted now."""
    if block.form == "parquet":
        return DataError(f"{source.path}: row {problem.line}: {problem.message}")
    if block.form == "csv":
        return DataError(f"{source.path}:{problem.line}: {problem.message}")
    line = problem.line + 1
    for before in blocks([source], reading):
        if not isinstance(before.data, bytes) or before.place.begin >= block.place.begin:
            break
        line += before.data.count(b"\n") + before.data.count(b"\r") - before.data.count(b"\r\n")
    return DataError(f"{source.path}:{line}: {problem.message}")
