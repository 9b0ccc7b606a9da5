"""How fast text files become token shards, against the `tokenizers` library alone; and the memory that takes.

The library encodes lines that are in memory already, with `encode_batch` on all cores: no reading, no writing, no ids
taken out. Headway runs `headway data prepare` on the same text in files: reading, encoding, hashing, writing, fsync and
the start of its processes are all in its time. Both use the same BPE tokenizer, and the ids must be the same. The
library is measured before and after, and its better time counts. Prints both speeds, their ratio, the ratio of the
processor time that a megabyte takes (which other work on the machine changes less), and the greatest memory of all of
Headway's processes together (resident sizes summed).

    python benchmarks/prepare_speed.py [--gigabytes 0.25] [--vocabulary 8192] [--text FILE] [--folder DIR]

The text is made on the spot, words by Zipf's law; --text takes a file's lines instead, repeated as often as needed. It
needs about 1.6 times --gigabytes of disk, which are freed at the end.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headway.text import BPE
from headway.text.shards import Shards

MEASURED = 40_000_000  # bytes that the library encodes


def zipf_lines(size: int, seed: int = 0, words: int = 200_000) -> list[str]:
    """About `size` bytes of lines of made-up words, numbers and signs; rank r has probability ~ 1 / r."""
    rng = random.Random(seed)
    syllables = [
        c + v for c in ("b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "t", "v", "th", "st") for v in "aeiou"
    ]
    vocabulary = ["".join(rng.choices(syllables, k=1 + rank.bit_length() // 5)) for rank in range(1, words)]
    vocabulary = [word.capitalize() if number % 9 == 4 else word for number, word in enumerate(vocabulary)]
    vocabulary[500::40] = [str(rng.randrange(1, 2500)) for _ in vocabulary[500::40]]
    vocabulary[300::150] = [word + "é" for word in vocabulary[300::150]]
    weights = (1 / np.arange(1, words)).cumsum()
    numbers = np.random.default_rng(seed)
    lines, made = [], 0
    while made < size:
        chosen = np.searchsorted(weights, numbers.random(numbers.integers(8, 160)) * weights[-1])
        line = " ".join(vocabulary[number] for number in chosen)
        line = line.replace(" ba ", ", ").replace(" da ", " . ") + "."
        lines.append(line)
        made += len(line.encode()) + 1
    return lines


def write_corpus(path: Path, lines: list[str], size: int) -> int:
    """Write the lines, again and again in another order, until there are `size` bytes; returns how many there are."""
    rng = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < size:
            file.write("\n".join(lines) + "\n")
            rng.shuffle(lines)
    return path.stat().st_size


def family(process: int) -> Iterator[int]:
    """The process and all that it started."""
    yield process
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def resident(process: int) -> int:
    """Bytes of memory that the process and all that it started hold."""
    pages = 0
    for each in family(process):
        try:
            pages += int(Path(f"/proc/{each}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def prepare(corpus: Path, tokenizer: Path, out: Path) -> tuple[float, float, int]:
    """(seconds, seconds of processor time, greatest memory) of the command."""
    began, before = time.perf_counter(), used_by_children()
    arguments = ["data", "prepare", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "headway", *arguments])
    greatest = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal greatest
        while not ended.wait(0.1):
            greatest = max(greatest, resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    seconds = time.perf_counter() - began
    ended.set()
    watcher.join()
    if code:
        raise SystemExit("the preparation failed; its message is above")
    return seconds, used_by_children() - before, greatest


def used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def library_speed(tokenizer: BPE, lines: list[str]) -> tuple[float, float, list[list[int]]]:
    """(bytes a second, bytes a second of processor time, ids) of the library on lines in memory.

    A line end counts as one byte, as in the file.
    """
    size = sum(len(line.encode()) + 1 for line in lines)
    texts = [tokenizer.lead + line for line in lines]
    began, before = time.perf_counter(), time.process_time()
    encodings = tokenizer._library.encode_batch(texts, add_special_tokens=False)
    seconds, used = time.perf_counter() - began, time.process_time() - before
    return size / seconds, size / used, [encoding.ids for encoding in encodings[:1000]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.25)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--folder", type=Path, help="where the temporary files go")
    options = parser.parse_args()

    if options.text:
        lines = [line for line in options.text.read_text("utf-8").split("\n") if line.strip()]
    else:
        lines = zipf_lines(MEASURED)
    tokenizer = BPE.train(lines[:: max(1, len(lines) // 20_000)], options.vocabulary)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        tokenizer.save(folder / "tokenizer.json")
        first = lines[:1000]
        *before, ids = library_speed(tokenizer, lines)
        size = write_corpus(folder / "corpus.txt", lines, int(options.gigabytes * 1e9))
        seconds, used, memory = prepare(folder / "corpus.txt", folder / "tokenizer.json", folder / "shards")
        *after, _ = library_speed(tokenizer, lines)
        shards = Shards(folder / "shards")
        shift = len(tokenizer.specials)
        for number in range(len(first)):
            assert shards.document(number).tolist() == [token + shift for token in ids[number]] + [tokenizer.mask]
        library, headway = max(before[0], after[0]) / 1e6, size / seconds / 1e6
        by_processor = size / used / max(before[1], after[1])
        cores = len(os.sched_getaffinity(0))
        print(
            f"{size / 1e9:.2f} GB, {len(shards.tokens):,} tokens, {cores} cores\n"
            f"tokenizers.encode_batch, from memory   {library:6.2f} MB/s\n"
            f"headway data prepare, file to shards   {headway:6.2f} MB/s\n"
            f"ratio {headway / library:.2f}, by processor time {by_processor:.2f}; "
            f"memory of all processes at most {memory / 2**20:,.0f} MiB"
        )


if __name__ == "__main__":
    main()
