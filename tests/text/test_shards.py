"""Shards: one array over many files, damage that is noticed, training as on the text, an order without memory."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.models import GPTSettings
from headway.tasks import LanguageModelling, LanguageModellingSettings, SpanCorruptionSettings
from headway.tasks.base import next_token_loss
from headway.tasks.corpus import Stored
from headway.text import BPE, Bytes, Characters, Tokenizer
from headway.text.preparation import prepare
from headway.text.shards import Index, Joined, Shard, Shards, is_prepared, token_dtype
from headway.training.order import Shuffled, generator
from headway.training.permutation import permuted

LINES = [f"Line {number} says that {number * 7} is seven times {number}." for number in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Token shards of corpus.txt beside it: BPE, five shards and a rest."""
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    prepare([tmp_path / "corpus.txt"], tmp_path / "shards", "bpe", size=300, shard_tokens=250)
    return tmp_path / "shards"


# ---- one array over many files


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), data=st.data())
def test_joined_files_are_one_array(lengths: list[int], data: st.DataObject, tmp_path_factory) -> None:
    whole = np.random.default_rng(sum(lengths)).integers(0, 60_000, sum(lengths)).astype("<u2")
    paths = [tmp_path_factory.getbasetemp() / f"part-{number}" for number in range(len(lengths))]
    for path, part in zip(paths, np.split(whole, np.cumsum(lengths)[:-1]), strict=True):
        path.write_bytes(part.tobytes())
    joined = Joined(paths, lengths, np.dtype("<u2"))
    assert len(joined) == len(whole)
    places = st.integers(-len(whole) - 2, len(whole) + 2)
    begin, end = data.draw(st.none() | places), data.draw(st.none() | places)
    assert joined[begin:end].tolist() == whole[begin:end].tolist()
    chosen = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=4, max_size=4))).reshape(2, 2)
    assert joined[chosen].tolist() == whole[chosen].tolist()
    assert [joined[number] for number in range(-len(whole), len(whole))] == [*whole, *whole]
    for outside in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError):
            joined[outside]
    with pytest.raises(IndexError):
        joined[np.array([0, len(whole)])]
    tensor = torch.from_numpy(whole.astype(np.int64))
    part = Stored(joined)[begin:end]
    assert len(part) == len(tensor[begin:end])
    if len(part):
        index = torch.tensor([[0, len(part) - 1]])
        assert part[index].tolist() == tensor[begin:end][index].tolist()
        assert part[1:][:1] is not part and len(part[1:][:1]) == len(tensor[begin:end][1:][:1])


READ_ALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 90))
from headway.text.shards import Shards
shards = Shards(sys.argv[1])
assert len(shards.index.shards) > 90
for _ in range(2):
    print(*(shards.tokenizer.decode(shards.document(number).tolist()) for number in range(len(shards))), sep="")
from headway.files import allow_many_files
allow_many_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (90, 90)
"""


def test_there_may_be_more_shards_than_files_that_may_be_open(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("\n".join(LINES))
    prepare([tmp_path / "corpus.txt"], tmp_path / "many", "bytes", shard_tokens=20)
    command = [sys.executable, "-c", READ_ALL, tmp_path / "many"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stderr, done.stdout) == ("", ("".join(LINES) + "\n") * 2)


def test_documents_are_found_by_number(folder: Path) -> None:
    shards = Shards(folder)
    assert len(shards) == len(LINES) and shards.starts[0] == 0
    for number, line in enumerate(LINES):
        tokens = shards.document(number)
        assert tokens[-1] == 1 and shards.tokenizer.decode(tokens) == " " + line


# ---- damage


def change(path: Path, at: int = 5) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_changed_bytes_are_found_by_verify_and_all_named(folder: Path) -> None:
    Shards(folder).verify()
    change(folder / "shard-00001.bin")
    change(folder / "shard-00003.idx")
    with pytest.raises(DataError) as caught:
        Shards(folder).verify()
    assert "shard-00001.bin: not the bytes that were written" in str(caught.value)
    assert "shard-00003.idx" in str(caught.value) and "shard-00000" not in str(caught.value)


@pytest.mark.parametrize(
    ("ending", "shard", "place", "number", "message"),
    [
        ("bin", 2, 9, 300, "shard-00002.bin: token 300, and the vocabulary has 300"),
        ("idx", 0, 0, 1, "shard-00000.idx: a document that begins where none before it has ended"),
        ("idx", 1, 1, 0, "shard-00001.idx: documents out of order"),
        ("idx", 1, -1, 1 << 40, "shard-00001.idx: documents that begin outside the shard"),
        ("idx", 1, 0, 251, "shard-00001.idx: a document that begins where none before it has ended"),
    ],
)
def test_shards_that_cannot_be_are_found_though_their_hashes_are_right(
    folder: Path, ending: str, shard: int, place: int, number: int, message: str
) -> None:
    """As a program might write them that has a fault."""
    path = folder / f"shard-{shard:05d}.{ending}"
    numbers = np.fromfile(path, "<u2" if ending == "bin" else "<u8")
    numbers[place] = number
    numbers.tofile(path)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][shard]["sha256"][ending] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=re.escape(message)):
        Shards(folder).verify()


@pytest.mark.parametrize("shard", [0, 2])
def test_a_token_that_the_vocabulary_lacks_is_refused_where_it_is_read(folder: Path, shard: int) -> None:
    """Ids go to 299: 300 would be looked up beyond the embeddings' end."""
    path = folder / f"shard-{shard:05d}.bin"
    ids = np.fromfile(path, "<u2")
    for number in (299, 300):
        ids[9] = number
        ids.tofile(path)
        row = np.arange(250 * shard, 250 * shard + 20)
        if number < 300:
            assert Shards(folder).tokens[row].max() == 299
        else:
            with pytest.raises(DataError, match=rf"{path.name}: damaged \(token 300, and the vocabulary has 300\)"):
                Shards(folder).tokens[row]


def test_missing_and_short_files_are_found_at_opening(folder: Path) -> None:
    (folder / "shard-00000.idx").unlink()
    os.truncate(folder / "shard-00001.bin", 100)
    with pytest.raises(DataError) as caught:
        Shards(folder)
    assert f"{folder}: damaged; copy the folder again or prepare the corpus anew:" in str(caught.value)
    assert "shard-00000.idx: missing" in str(caught.value)
    assert "shard-00001.bin: 100 bytes where 500 are wanted" in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda index: index.update(version=9), "version 9; this Headway reads headway-shards, version 1"),
        (lambda index: index.update(format="other"), "other, version 1; this Headway reads"),
        (lambda index: index.update(tokens=7), r"damaged \(the shards do not add up\)"),
        (lambda index: index.update(dtype="uint32"), r"damaged \(uint32 for a vocabulary of 300\)"),
        (lambda index: index["shards"].pop(2), "damaged .shard 2 is not what its counts say"),
        (lambda index: index["shards"][0].update(name="../../etc/passwd"), "damaged .shard 0"),
        (lambda index: index["shards"][0].update(tokens="many"), "damaged"),
        (lambda index: index.pop("shards"), "damaged .'shards'"),
        (
            lambda index: index.update(tokenizer="0" * 16),
            "tokenizer.json is not the one that the shards were made with",
        ),
    ],
)
def test_an_index_that_cannot_be_true_is_refused(folder: Path, edit, message: str) -> None:
    index = json.loads((folder / "index.json").read_text())
    edit(index)
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=message):
        Shards(folder)


def test_folders_without_shards_say_so(tmp_path: Path, folder: Path) -> None:
    assert is_prepared(folder) and not is_prepared(tmp_path)
    for other in ("{}", "[]", "not JSON", '{"format": "other"}'):
        (tmp_path / "index.json").write_text(other)
        assert not is_prepared(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(DataError, match="no token shards"):
        Shards(tmp_path)
    (folder / "index.json").write_text('{"format": "headw')
    with pytest.raises(DataError, match=r"index\.json: damaged"):
        Shards(folder)


# ---- training


def tasks(folder: Path, **options: object) -> tuple[LanguageModelling, LanguageModelling]:
    """Language modelling of the text, and of its shards, by the same tokenizer."""
    tokenizer = Shards(folder).tokenizer
    made = []
    for corpus in (folder.parent / "corpus.txt", folder):
        task = LanguageModellingSettings(corpus=str(corpus), **options).build(tokenizer, 16)
        task.load()
        made.append(task)
    return made[0], made[1]


def test_training_on_shards_is_training_on_the_text(folder: Path) -> None:
    """The same batches, the same losses at every step, the same score, bit for bit."""
    losses = []
    scores = []
    for task in tasks(folder, holdout=0.2):
        torch.manual_seed(0)
        model = GPTSettings(width=16, heads=2, layers=1, block=16).build(300)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        order = Shuffled(task.examples, 8, seed=3)
        for step in range(5):
            batch = task.batch(order.rows(step), generator(0, step))
            loss = next_token_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((loss.item(), batch.inputs.tolist(), batch.targets.tolist(), batch.lengths.tolist()))
        scores.append(task.evaluate(model, batch_size=3))
    assert losses[:5] == losses[5:]
    assert scores[0] == scores[1] and scores[0]["tokens"] > 100


def test_shards_serve_for_validation_and_evaluation(folder: Path) -> None:
    corpus = str(folder.parent / "corpus.txt")
    tokenizer = Shards(folder).tokenizer
    task = LanguageModellingSettings(corpus=corpus, validation=str(folder)).build(tokenizer, 16)
    model = GPTSettings(width=16, heads=2, layers=1, block=16).build(300)
    assert task.evaluate(model) == task.evaluate(model, corpus) == task.evaluate(model, str(folder))


def test_another_tokenizer_is_refused(folder: Path) -> None:
    task = LanguageModellingSettings(corpus=str(folder)).build(Bytes(), 16)
    with pytest.raises(DataError, match=r"made with another tokenizer \(bpe of 300\) than this run's \(bytes of 258\)"):
        task.load()


def test_tasks_that_need_text_say_so(folder: Path) -> None:
    settings = SpanCorruptionSettings(corpus=str(folder))
    with pytest.raises(DataError, match="token shards, and this needs the text itself; name the files"):
        settings.texts(lambda note: None)


def test_an_unfinished_folder_is_no_corpus(folder: Path) -> None:
    (folder / "index.json").rename(folder / "unfinished.json")
    task = LanguageModellingSettings(corpus=str(folder)).build(Bytes(), 16)
    with pytest.raises(DataError, match=r"an unfinished preparation; finish it with .* --resume"):
        task.load()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_a_corpus_of_gigabytes_stays_on_disk(tmp_path: Path) -> None:
    """Two shards of a gigabyte each, with holes instead of text; what training looks at is all that is read."""
    tokenizer: Tokenizer = Bytes()
    tokens = 1 << 29
    made = []
    for number in range(2):
        for ending, size in (("bin", 2 * tokens), ("idx", 8)):
            with open(tmp_path / f"shard-{number:05d}.{ending}", "wb") as file:
                file.truncate(size)
        made.append(Shard(f"shard-{number:05d}", tokens, 1, {"bin": 2 * tokens, "idx": 8}, {"bin": "", "idx": ""}))
    with open(tmp_path / "shard-00001.bin", "r+b") as file:
        file.write(np.full(100, 77, "<u2").tobytes())
    tokenizer.save(tmp_path / "tokenizer.json")
    fingerprint = tokenizer.fingerprint()
    Index("uint16", len(tokenizer), fingerprint, 2 * tokens, 2, tokens, {}, [], made).write(tmp_path)
    before = resident()
    task = LanguageModellingSettings(corpus=str(tmp_path), holdout=0.0).build(tokenizer, 64)
    task.load()
    assert task.examples == 2**24
    for row in (tokens // 64, *range(2)):  # the border of the shards, then the first rows
        batch = task.make(torch.tensor([row]), torch.tensor([32]))
        assert bool((batch.inputs == 77).all()) == (row > 1)
    for step in range(3):
        rows = permuted(torch.arange(256) + step * 256, task.examples, 5)
        task.batch(rows, generator(0, step))
    assert resident() - before < 100 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- an order without memory


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 255, 1000, 65_537])
def test_a_computed_order_is_a_permutation(count: int) -> None:
    for key in (0, 1, 2**63 - 1):
        order = permuted(torch.arange(count), count, key)
        assert order.sort().values.equal(torch.arange(count))


def test_a_computed_order_is_the_same_in_parts(count: int = 20_000_003) -> None:
    places = torch.tensor([0, 1, 2, 7_000_000, count - 1])
    whole = permuted(places, count, 9)
    assert torch.cat([permuted(part, count, 9) for part in places.split(2)]).equal(whole)
    assert len(set(whole.tolist())) == 5 and whole.min() >= 0 and whole.max() < count


def test_computed_orders_look_random() -> None:
    """Neighbours, places and keys tell nothing: correlations as small as chance leaves them, every place alike."""
    count = 200_000
    one, other = (permuted(torch.arange(count), count, key).double() for key in (4, 5))
    for pair in ((one[1:], one[:-1]), (one, torch.arange(count).double()), (one, other)):
        assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < 5 / count**0.5
    assert int((one == other).sum()) < 12  # one is expected
    seen = torch.zeros(10, 10)
    for key in range(2000):
        seen[torch.arange(10), permuted(torch.arange(10), 10, key * 7919)] += 1
    assert float(((seen - 200) ** 2 / 200).sum()) < 140  # chi-squared of 81 degrees: above 140 once in ten thousand


def test_the_narrowest_type_that_holds_every_id() -> None:
    assert token_dtype(65_536).name == "uint16" and token_dtype(65_537).name == "uint32"
    index = Index("uint16", 65_537, "", 0, 0, 1, {}, [], [])
    with pytest.raises(ValueError, match="uint16 for a vocabulary of 65537"):
        index.check()
    replace(index, dtype="uint32").check()


def test_bpe_and_characters_are_read_back(tmp_path: Path) -> None:
    """The tokenizer travels with the shards."""
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    for kind in (BPE, Characters):
        made = prepare([tmp_path / "a.txt"], tmp_path / kind.kind, kind.train(LINES))
        again = Shards(tmp_path / kind.kind)
        assert again.tokenizer.to_json() == made.tokenizer.to_json() == kind.train(LINES).to_json()
