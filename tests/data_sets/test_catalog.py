"""Data sets by name: what is kept, copied, downloaded and refused."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.data import DATA_SETS, DataFile, DataSet, WorldSettings, data_home, get, resolve, status
from headway.data.world import FILES, make_world, world_files
from headway.errors import DataError, UserError
from headway.text import read_parallel

CONTENTS = {"a.txt": b"one line\n" * 20_000, "b.tsv": "Wo?\tKöln\n".encode()}
SMALL = WorldSettings(people=8, towns=3, unseen=4)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def log_request(self, *args: object) -> None:
        self.asked.append(self.path)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "home"


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A folder with the files of the data set `tiny` as they should be."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name, content in CONTENTS.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of `tmp_path` on this machine."""
    QuietHandler.asked.clear()
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}/"
        httpd.shutdown()
        thread.join()


MEMBERS = {"a.txt": "a.txt", "b.tsv": "inner/b"}


def tiny(monkeypatch: pytest.MonkeyPatch, *sources: str, folders: tuple[str, ...] = ()) -> None:
    """Puts a data set `tiny` with the files of CONTENTS into the catalogue."""
    files = tuple(
        DataFile(name, len(content), hashlib.sha256(content).hexdigest(), MEMBERS[name])
        for name, content in CONTENTS.items()
    )
    data_set = DataSet("tiny", "for the tests", "none", files=files, sources=sources, folders=folders)
    monkeypatch.setitem(DATA_SETS, "tiny", data_set)


def archive(path: Path, changes: dict[str, bytes | None] | None = None, packing: int = zipfile.ZIP_DEFLATED) -> bytes:
    """Writes a zip of CONTENTS with some members changed, added, or left out where None. Returns its bytes."""
    members = {MEMBERS[name]: content for name, content in CONTENTS.items()} | (changes or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", packing) as packed:
        for name, content in members.items():
            if content is not None:
                packed.writestr(zipfile.ZipInfo(name), content, packing)
    return path.read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_data_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert data_home() == tmp_path / "home"
    monkeypatch.setenv("HEADWAY_DATA", "~/mine")
    assert data_home() == Path.home() / "mine"
    for unset in ("", None):
        monkeypatch.delenv("HEADWAY_DATA") if unset is None else monkeypatch.setenv("HEADWAY_DATA", unset)
        assert data_home() == Path.home() / ".cache" / "headway" / "data"


def test_the_catalogue_is_well_formed() -> None:
    assert {"world", "birthplaces", "shakespeare", "multi30k", "tatoeba"} <= set(DATA_SETS)
    for name, data_set in DATA_SETS.items():
        assert data_set.name == name
        assert data_set.description
        assert "\n" not in data_set.description
        assert data_set.licence
        assert data_set.embedded == (name == "world")
        assert all(address.startswith("https://") and address.endswith(("/", ".zip")) for address in data_set.sources)
        assert all(len(file.sha256) == 64 and file.bytes > 0 for file in data_set.files)


# download


def test_download_brings_every_file(server: str, served: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, server + "served/")
    lines: list[str] = []
    steps: list[tuple[int, int]] = []
    folder = get("tiny", say=lines.append, progress=lambda done, total: steps.append((done, total)))
    assert folder == home / "tiny"
    assert contents(folder) == CONTENTS
    assert len(lines) == 2
    assert server in lines[0]
    total = sum(map(len, CONTENTS.values()))
    assert steps[-1] == (total, total)
    assert steps == sorted(steps)
    assert len(steps) > 2


def test_files_that_are_there_are_kept(server: str, served: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, server + "served/")
    get("tiny")
    (home / "tiny" / "b.tsv").unlink()
    before = (home / "tiny" / "a.txt").stat().st_mtime_ns
    lines: list[str] = []
    steps: list[tuple[int, int]] = []
    get("tiny", say=lines.append, progress=lambda done, total: steps.append((done, total)))
    assert contents(home / "tiny") == CONTENTS
    assert (home / "tiny" / "a.txt").stat().st_mtime_ns == before
    assert "already there" in lines[0]
    assert steps == [(len(CONTENTS["b.tsv"]), len(CONTENTS["b.tsv"]))]


def test_a_wrong_checksum_is_refused_and_nothing_kept(
    server: str, served: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(monkeypatch, server + "served/")
    (served / "a.txt").write_bytes(b"something else")
    with pytest.raises(DataError) as caught:
        get("tiny")
    message = str(caught.value)
    assert f"{server}served/a.txt" in message
    assert hashlib.sha256(b"something else").hexdigest() in message
    assert hashlib.sha256(CONTENTS["a.txt"]).hexdigest() in message
    assert "headway data get tiny --from DIR" in message
    assert list((home / "tiny").iterdir()) == []


@pytest.mark.parametrize("first", ["absent/", "changed/"])
def test_sources_are_tried_in_order_and_the_checksum_decides(
    first: str, server: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed").mkdir()
    for name in CONTENTS:
        (tmp_path / "changed" / name).write_bytes(b"another version")
    tiny(monkeypatch, server + first, server + "served/")
    assert contents(get("tiny")) == CONTENTS


def test_a_download_cut_short_is_refused(
    served: Path, home: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(monkeypatch, server + "served/")
    (served / "a.txt").write_bytes(CONTENTS["a.txt"][:1000])
    with pytest.raises(DataError, match="SHA-256"):
        get("tiny")


def test_a_file_address_works(served: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, served.as_uri() + "/")
    assert contents(get("tiny")) == CONTENTS


def test_without_a_network_the_way_out_is_a_local_copy(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/", "http://127.0.0.1:9/second/")
    with pytest.raises(DataError, match=r"a\.txt: cannot be downloaded.*refused") as caught:
        get("tiny")
    assert "http://127.0.0.1:9/second/a.txt" in str(caught.value)
    assert "headway data get tiny --from DIR" in str(caught.value)
    assert list((home / "tiny").iterdir()) == []


def test_a_missing_page_is_named(server: str, served: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, server + "served/")
    (served / "b.tsv").unlink()
    with pytest.raises(DataError, match=r"served/b\.tsv \(HTTP 404"):
        get("tiny")
    assert contents(home / "tiny") == {"a.txt": CONTENTS["a.txt"]}


# archives


def test_an_archive_is_downloaded_once_for_all_its_files(
    server: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(monkeypatch, server + "tiny.zip")
    archive(tmp_path / "tiny.zip", packing=zipfile.ZIP_STORED)
    lines: list[str] = []
    steps: list[tuple[int, int]] = []
    folder = get("tiny", say=lines.append, progress=lambda done, total: steps.append((done, total)))
    assert contents(folder) == CONTENTS
    assert QuietHandler.asked == ["/tiny.zip"]
    assert lines[1] == f"{home / 'tiny' / 'b.tsv'}: 10 bytes from inner/b in {server}tiny.zip"
    total = sum(map(len, CONTENTS.values()))
    assert steps == sorted(steps) and steps[-1] == (total, total) and len(steps) > 3


def test_only_what_was_asked_for_leaves_an_archive(
    server: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(monkeypatch, server + "tiny.zip")
    archive(tmp_path / "tiny.zip", {"../../escaped": b"x", str(tmp_path / "absolute"): b"x", "more.txt": b"x"})
    get("tiny")
    assert contents(home / "tiny") == CONTENTS
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.zip", "home"}
    assert {path.name for path in home.iterdir()} == {"tiny"}


@pytest.mark.parametrize(
    ("changes", "packing", "problem"),
    [
        ({"a.txt": b"another"}, zipfile.ZIP_DEFLATED, hashlib.sha256(b"another").hexdigest()),
        ({"a.txt": None}, zipfile.ZIP_DEFLATED, "no a.txt in this archive"),
        ({"a.txt": None, "../a.txt": CONTENTS["a.txt"]}, zipfile.ZIP_DEFLATED, "no a.txt in this archive"),
        ({"a.txt": b"0" * 1_000_000}, zipfile.ZIP_DEFLATED, hashlib.sha256(b"0" * (3 << 16)).hexdigest()),
        ({"more": b"0" * 1_000_000}, zipfile.ZIP_STORED, "longer than 181,010 bytes"),
        ({}, zipfile.ZIP_LZMA, "a.txt is packed in a way that is not read"),
    ],
)
def test_a_wrong_archive_is_refused_and_nothing_kept(
    changes: dict[str, bytes | None],
    packing: int,
    problem: str,
    server: str,
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny(monkeypatch, server + "tiny.zip")
    monkeypatch.setattr("headway.data.bringing.MOST_EXTRA", 1000)
    archive(tmp_path / "tiny.zip", changes, packing)
    with pytest.raises(DataError) as caught:
        get("tiny")
    assert f"a.txt in {server}tiny.zip" in str(caught.value) and problem in str(caught.value)
    assert "headway data get tiny --from DIR" in str(caught.value)
    assert list((home / "tiny").iterdir()) == []


def test_a_folder_may_stand_in_for_an_archive_that_fails(
    server: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.zip").write_bytes(b"<html>not here any more</html>")
    tiny(monkeypatch, server + "absent.zip", server + "page.zip", server + "served/")
    assert contents(get("tiny")) == CONTENTS
    tiny(monkeypatch, server + "absent.zip", server + "page.zip")
    with pytest.raises(DataError, match=r"absent\.zip \(HTTP 404.*page\.zip \(File is not a zip file\)"):
        get("tiny", tmp_path / "other")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_archive_is_refused_or_read_right(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    raw = bytearray(archive(folder / "copy" / "tiny.zip"))
    if data.draw(st.booleans(), label="cut"):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=3)):
            raw[place] = data.draw(st.integers(0, 255))
    (folder / "copy" / "tiny.zip").write_bytes(raw)
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny(monkeypatch, (folder / "copy" / "tiny.zip").as_uri())
        for source in (None, folder / "copy"):
            out = folder / f"out-{source is None}"
            try:
                assert contents(get("tiny", out, source)) == CONTENTS
            except DataError:
                assert all(CONTENTS[name] == content for name, content in contents(out).items())


# a local copy


@pytest.mark.parametrize("inside", ["", "tiny"])
def test_a_local_copy_is_taken(inside: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/")
    source = tmp_path / "copy"
    (source / inside).mkdir(parents=True)
    for name, content in CONTENTS.items():
        (source / inside / name).write_bytes(content)
    out = tmp_path / "out" / "here"
    steps: list[tuple[int, int]] = []
    assert get("tiny", out, source, progress=lambda done, total: steps.append((done, total))) == out
    assert contents(out) == CONTENTS
    assert steps[-1][0] == steps[-1][1]
    assert not home.exists()


def test_a_local_copy_is_verified(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/")
    (served / "b.tsv").write_bytes(b"Wo?\tBonn\n")
    with pytest.raises(DataError) as caught:
        get("tiny", tmp_path / "out", served)
    assert str(served / "b.tsv") in str(caught.value)
    assert hashlib.sha256(b"Wo?\tBonn\n").hexdigest() in str(caught.value)
    assert hashlib.sha256(CONTENTS["b.tsv"]).hexdigest() in str(caught.value)
    assert list(contents(tmp_path / "out")) == ["a.txt"]


@pytest.mark.parametrize("inside", ["", "tiny", "elsewhere"])
@pytest.mark.parametrize("form", ["gz", "zip", "member"])
def test_a_local_copy_may_be_packed(inside: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/tiny.zip", folders=("elsewhere",))
    source = tmp_path / "copy"
    (source / inside / "inner").mkdir(parents=True)
    if form == "zip":
        archive(source / inside / "tiny.zip")
    for name, content in CONTENTS.items():
        if form == "gz":
            (source / inside / f"{name}.gz").write_bytes(gzip.compress(content))
        elif form == "member":
            (source / inside / MEMBERS[name]).write_bytes(content)
    assert contents(get("tiny", tmp_path / "out", source)) == CONTENTS


def test_a_packed_copy_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/")
    packed = gzip.compress(CONTENTS["a.txt"])
    (tmp_path / "a.txt.gz").write_bytes(packed[:-9])
    with pytest.raises(DataError, match=r"a\.txt\.gz: a\.txt cannot be unpacked \(.*leave out --from to download"):
        get("tiny", tmp_path / "out", tmp_path)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"another"))
    with pytest.raises(DataError, match=hashlib.sha256(b"another").hexdigest()):
        get("tiny", tmp_path / "out", tmp_path)
    assert contents(tmp_path / "out") == {}


def test_a_local_copy_that_is_not_there(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/")
    with pytest.raises(DataError, match="nowhere: no such folder"):
        get("tiny", source=tmp_path / "nowhere")
    (served / "b.tsv").unlink()
    with pytest.raises(DataError, match=r"served: has neither b\.tsv nor tiny/b\.tsv"):
        get("tiny", source=served)


def test_a_different_file_is_never_overwritten(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, served.as_uri() + "/")
    out = tmp_path / "out"
    out.mkdir()
    (out / "b.tsv").write_bytes(b"my own work")
    for source in (None, served):
        with pytest.raises(DataError, match=r"out/b\.tsv: there with other content.*--out, or delete it"):
            get("tiny", out, source)
    assert contents(out) == {"b.tsv": b"my own work"}


def test_a_folder_that_cannot_be_used(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, served.as_uri() + "/")
    (tmp_path / "file").write_text("in the way")
    for name in ("tiny", "world"):
        with pytest.raises(DataError, match=r"file/out: cannot be used .*--out"):
            get(name, tmp_path / "file" / "out")


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UserError, match="no data set 'birthplace'; did you mean 'birthplaces'"):
        get("birthplace")
    with pytest.raises(UserError, match="known: world, birthplaces, shakespeare, multi30k, tatoeba"):
        get("xyz")


# the world


def test_the_world_is_made_in_place(home: Path) -> None:
    lines: list[str] = []
    folder = get("world", say=lines.append, settings=SMALL)
    assert folder == home / "world"
    assert contents(folder) == {name: text.encode() for name, text in world_files(make_world(SMALL)).items()}
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    get("world", say=lines.append, settings=SMALL)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "made a world of 8 people" in lines[0]
    assert "already there" in lines[1]


def test_another_world_is_not_overwritten(home: Path) -> None:
    get("world", settings=SMALL)
    before = contents(home / "world")
    with pytest.raises(DataError, match=r"world: holds another world .*world\.json.*--out"):
        get("world")
    assert contents(home / "world") == before


def test_a_world_that_lost_a_file_gets_it_back(home: Path) -> None:
    get("world", settings=SMALL)
    before = contents(home / "world")
    (home / "world" / "birth_dev.tsv").unlink()
    get("world", settings=SMALL)
    assert contents(home / "world") == before


def test_arguments_that_do_not_belong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="world is made on this machine"):
        get("world", source=tmp_path)
    with pytest.raises(UserError, match="shakespeare takes no world settings"):
        get("shakespeare", settings=SMALL)


# references


def test_a_plain_reference_is_relative_to_its_run_file(tmp_path: Path) -> None:
    assert resolve("corpus/a.txt", tmp_path) == tmp_path / "corpus" / "a.txt"
    assert resolve("corpus/*.txt", tmp_path) == tmp_path / "corpus" / "*.txt"
    assert resolve("/data/a.txt", tmp_path) == Path("/data/a.txt")
    assert resolve("~/a.txt", tmp_path) == Path.home() / "a.txt"
    with pytest.raises(DataError, match="empty file name"):
        resolve("", tmp_path)
    with pytest.raises(DataError, match=r"~nobody-of-that-name/a\.txt"):
        resolve("~nobody-of-that-name/a.txt", tmp_path)


def test_a_data_reference_is_a_file_of_the_data_set(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        resolve("data:birthplaces/wiki.txt", tmp_path)
    assert str(caught.value) == (
        "data:birthplaces/wiki.txt is not on this machine; get it with: headway data get birthplaces "
        "(or set HEADWAY_DATA to the folder that holds birthplaces/)"
    )
    (home / "birthplaces").mkdir(parents=True)
    (home / "birthplaces" / "wiki.txt").write_text("A B. A B was born in C .\n")
    assert resolve("data:birthplaces/wiki.txt", tmp_path) == home / "birthplaces" / "wiki.txt"


@pytest.mark.parametrize("folder", ["tatoeba", "zh_en"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_data_reference_finds_packed_files_and_other_folders(folder: str, packed: str, home: Path) -> None:
    (home / folder).mkdir(parents=True)
    text = "Hi.\t嗨。\tCC-BY 2.0\n".encode()
    path = home / folder / f"cmn.txt{packed}"
    path.write_bytes(gzip.compress(text) if packed else text)
    assert resolve("data:tatoeba/cmn.txt") == path
    assert [(pair.source, pair.target) for pair in read_parallel(path)] == [("Hi.", "嗨。")]


def test_what_lies_in_the_own_folder_unpacked_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/", folders=("elsewhere",))
    order = [home / folder / name for folder in ("tiny", "elsewhere") for name in ("a.txt", "a.txt.gz")]
    for path in order:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    for path in order:
        assert resolve("data:tiny/a.txt") == path
        path.unlink()
    with pytest.raises(DataError, match=r"data:tiny/a\.txt is not on this machine"):
        resolve("data:tiny/a.txt")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("data:birthplace/wiki.txt", "did you mean 'birthplaces'"),
        ("data:", "no data set ''"),
        ("data:birthplaces/wki.txt", "birthplaces has no file 'wki.txt'; did you mean 'wiki.txt'"),
        ("data:world", "world has no file ''; known: wiki.txt"),
        ("data:world/../secret", "world has no file '../secret'"),
    ],
)
def test_a_wrong_data_reference_gets_the_nearest(reference: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        resolve(reference, tmp_path)
    assert message in str(caught.value)


def test_the_world_is_made_where_a_reference_needs_it(home: Path, tmp_path: Path) -> None:
    path = resolve("data:world/wiki.txt", tmp_path)
    assert path == home / "world" / "wiki.txt"
    assert path.read_text("utf-8") == world_files(make_world())["wiki.txt"]
    assert set(contents(home / "world")) == set(FILES)


def test_a_world_with_other_settings_is_used_as_it_is(home: Path, tmp_path: Path) -> None:
    get("world", settings=SMALL)
    path = resolve("data:world/wiki.txt", tmp_path)
    assert path.read_text("utf-8") == world_files(make_world(SMALL))["wiki.txt"]


def test_the_world_needs_no_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path / "file"))
    wiki, dev = (resolve(f"data:world/{name}", tmp_path) for name in ("wiki.txt", "birth_dev.tsv"))
    assert wiki.read_text("utf-8") == world_files(make_world())["wiki.txt"]
    assert dev.parent == wiki.parent


def test_a_folder_marked_read_only_is_left_alone_even_by_root(home: Path, tmp_path: Path) -> None:
    home.mkdir()
    home.chmod(0o555)
    path = resolve("data:world/wiki.txt", tmp_path)
    assert path.read_text("utf-8") == world_files(make_world())["wiki.txt"]
    assert list(home.iterdir()) == []


# what is there


def test_status_says_what_is_there(served: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, served.as_uri() + "/")
    rows = {row.name: row for row in status()}
    assert list(rows) == list(DATA_SETS)
    assert not any(row.present for row in rows.values())
    assert rows["world"].bytes is None
    assert rows["tiny"].missing == ("a.txt", "b.tsv")
    assert not home.exists()

    get("tiny")
    get("world", settings=SMALL)
    rows = {row.name: row for row in status()}
    assert rows["tiny"].present
    assert rows["world"].present
    assert rows["tiny"].where == home / "tiny"
    assert rows["tiny"].bytes == sum(map(len, CONTENTS.values()))
    assert rows["world"].bytes == sum(map(len, contents(home / "world").values()))

    (home / "tiny" / "b.tsv").write_bytes(b"changed")
    row = next(row for row in status() if row.name == "tiny")
    assert not row.present
    assert row.differing == ("b.tsv",)


def test_packed_files_in_another_folder_are_the_data_set(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, "http://127.0.0.1:9/", folders=("elsewhere",))
    (home / "elsewhere").mkdir(parents=True)
    for name, content in CONTENTS.items():
        (home / "elsewhere" / f"{name}.gz").write_bytes(gzip.compress(content))
    lines: list[str] = []
    assert get("tiny", say=lines.append) == home / "elsewhere"
    assert lines == [f"{home / 'elsewhere' / name}.gz: already there" for name in CONTENTS]
    row = next(row for row in status() if row.name == "tiny")
    assert row.present and row.where == home / "elsewhere"
    for damaged in (gzip.compress(b"changed"), b"not gzip"):
        (home / "elsewhere" / "b.tsv.gz").write_bytes(damaged)
        row = next(row for row in status() if row.name == "tiny")
        assert row.differing == ("b.tsv",) and not row.missing
        with pytest.raises(DataError, match=r"elsewhere/b\.tsv\.gz: there with other content"):
            get("tiny")
    (home / "elsewhere" / "b.tsv.gz").unlink()
    row = next(row for row in status() if row.name == "tiny")
    assert row.where == home / "tiny" and row.missing == ("a.txt", "b.tsv")


def skip_without(name: str, real_data: Path) -> None:
    if not any(folder.is_dir() for folder in DATA_SETS[name].folders_in(real_data)):
        pytest.skip(f"{name} is not in {real_data}")


@pytest.mark.parametrize("name", ["birthplaces", "shakespeare", "multi30k", "tatoeba"])
def test_the_real_data_sets_are_what_the_catalogue_says(name: str, real_data: Path, tmp_path: Path) -> None:
    skip_without(name, real_data)
    folder = get(name, tmp_path / "out", real_data)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == {
        file.name: file.bytes for file in DATA_SETS[name].files
    }
    assert all(resolve(f"data:{name}/{file.name}").is_file() for file in DATA_SETS[name].files)
    assert next(row for row in status() if row.name == name).present


def test_the_real_translation_sets_have_their_pairs(real_data: Path) -> None:
    skip_without("multi30k", real_data)
    skip_without("tatoeba", real_data)
    captions = read_parallel(resolve("data:multi30k/val.en.gz"), resolve("data:multi30k/val.de.gz"), strict=True)
    assert len(captions) == 1014
    assert len(read_parallel(resolve("data:tatoeba/cmn.txt"), strict=True)) == 32_028
