"""What is in a user's own files, and what is wrong with them: text, tables, pairs of files, token shards."""

from __future__ import annotations

import math
import sys

from headway.errors import DataError, UserError
from headway.text import Pair, read_documents, read_pairs, read_parallel
from headway.text.plain import counted, refuse_pipe, silent
from headway.text.readers import TABLES, a_few, format_of, json_object, read_lines, table
from headway.text.shards import Shards, has_shards


def data_check_command(
    files: list[str], target: str | None, errors: str, strict: bool = False, column: str | None = None
) -> None:
    """Report every file, or one and its translation; then fail if one of them cannot be used."""
    if errors not in ("strict", "replace"):
        raise UserError(f"--errors {errors}: must be strict or replace")
    if target is not None:
        if len(files) != 1:
            raise UserError(f"--target {target}: belongs to one file of sources, and {len(files)} are given")
        print(f"{files[0]}, {target}: {describe_translation(files[0], target, errors, strict)}")
        return
    broken = []
    for file in files:
        try:
            print(f"{file}: {describe_file(file, errors, strict, column)}")
        except DataError as error:
            broken.append(str(error))
            print(error, file=sys.stderr)
    if broken:
        way = "it is" if len(files) == 1 else "they are"
        raise UserError(f"{len(broken)} of {counted(len(files), 'file')} cannot be used as {way}")


def say_aside(note: str) -> None:
    """To standard error: how a file was read."""
    print(note, file=sys.stderr)


def describe_file(file: str, errors: str, strict: bool = False, column: str | None = None) -> str:
    """What kind of file it is and how much is in it; of a table, how much text is in a `column` that is named."""
    if has_shards(file):
        return describe_shards(file)
    if column is not None:
        documents = read_documents(file, column=column, errors=errors, say=say_aside)
        return f"{counted(len(documents), 'row')} of column {column}, {describe_texts(documents)}"
    form, names = format_of(file), column_names(file, errors)
    if form != "tsv" and {"source", "target"} <= {*names}:
        return describe_translation(file, None, errors, strict)
    if "question" in names or (form == "tsv" and len(names) <= 2 and "text" not in names):
        pairs = read_pairs(file, errors=errors, say=say_aside)
        return f"{counted(len(pairs), 'question')} {'without' if pairs[0].target is None else 'with'} answers"
    if form == "tsv" and "text" not in names:
        say_aside(f"{file}: its first two columns are read as source and target; if one is the text, name it: --column")
        return describe_translation(file, None, errors, strict)
    documents = read_documents(file, errors=errors, say=say_aside)
    return f"{counted(len(documents), 'line')}, {describe_texts(documents)}"


def column_names(file: str, errors: str) -> list[str]:
    """What the first row of a .csv or .tsv holds, or the keys of the first whole object in a .jsonl; nothing of other
    files."""
    form = format_of(file)
    if form not in TABLES:
        return []
    refuse_pipe(file)  # the rows of a table are read when its columns are known
    if form == "jsonl":
        lines = (line for _, line in read_lines(file, errors=errors))
        return [*next((item for line in lines if (item := json_object(line)[0])), {})]
    return [cell.strip() for cell in table(file, errors, silent)[0][1]]


def describe_texts(texts: list[str]) -> str:
    characters, distinct = counted(sum(map(len, texts)), "character"), len(set().union(*texts))
    return f"{characters}, {distinct} distinct, {sorted(map(len, texts))[len(texts) // 2]} in the middle line"


def describe_translation(source: str, target: str | None, errors: str, strict: bool) -> str:
    """How much is on each side of two files that agree line by line, or of one table, and what looks odd."""
    pairs = read_parallel(source, target, strict=strict, errors=errors, say=say_aside)
    return "\n  ".join(
        [
            counted(len(pairs), "pair"),
            f"{source if target else 'source'}: {describe_texts([pair.source for pair in pairs])}",
            f"{target or 'target'}: {describe_texts([f'{pair.target}' for pair in pairs])}",
            *oddities(pairs),
        ]
    )


def oddities(pairs: list[Pair]) -> list[str]:
    """What hints at lines that are no translations, or at too little data."""
    found = []
    if same := [pair.line for pair in pairs if pair.source == pair.target]:
        found.append(f"the same text on both sides: {counted(len(same), 'pair')}, the first in line {same[0]:,}")
    if again := len(pairs) - len({(pair.source, pair.target) for pair in pairs}):
        found.append(f"there before: {counted(again, 'pair')}")
    ratios = [math.log(len(pair.source) / len(f"{pair.target}")) for pair in pairs]
    usual = sorted(ratios)[len(ratios) // 2]
    _, pair = max(zip(ratios, pairs, strict=True), key=lambda each: abs(each[0] - usual))
    sizes = f"{len(pair.source):,} characters and {len(f'{pair.target}'):,}"
    return [*found, f"most unequal in length: line {pair.line:,}, {sizes}"]


def describe_shards(folder: str) -> str:
    """What is in token shards, once every file was read and is what it should be."""
    shards = Shards(folder)
    shards.verify()
    size = sum(sum(shard.bytes.values()) for shard in shards.index.shards)
    files = counted(len(shards.index.sources), "file")
    others = shards.strangers()
    return "\n  ".join(
        [
            shards.contents(),
            f"made of {files}; all {size:,} bytes are as they were written (SHA-256)",
            *([f"not among them, and never read: {a_few(others)}"] if others else []),
        ]
    )
