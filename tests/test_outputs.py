"""Where `--out` leads: files, links, pipes and standard output, and what it must never take the place of."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import threading
from pathlib import Path

import pytest

import headway
from headway.cli import run_command
from headway.console import Lines
from headway.errors import RunError
from headway.files import one_line, write_output
from tests.test_bad_input import refused
from tests.test_bad_pairs import SOURCES, TARGETS, tables

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that translates, beside its data: de.txt and en.txt."""
    folder = tmp_path_factory.mktemp("outputs")
    return headway.train(tables(folder, "bpe"), folder / "run").path


@pytest.fixture
def evaluate(trained: Path) -> list[str]:
    return ["evaluate", str(trained), "--split", "train"]


class Listener(threading.Thread):
    """Whoever reads the other end of a pipe."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.start()

    def run(self) -> None:
        self.heard = self.path.read_bytes()

    def all(self) -> bytes:
        self.join(10)
        return self.heard


@pytest.mark.parametrize("data", ["größer\n", b"\x89PNG\r\n"])
@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path, data: str | bytes, there: bool) -> None:
    place, link, chain = tmp_path / "real" / "file", tmp_path / "link", tmp_path / "chain"
    if there:
        place.parent.mkdir()
        place.write_text("before")
    link.symlink_to("real/file")
    chain.symlink_to(link)
    write_output(chain, data)
    assert chain.is_symlink() and link.is_symlink() and not place.is_symlink()
    assert place.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert [path.name for path in place.parent.iterdir()] == ["file"]


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(RunError, match="a: cannot be written"):
        write_output(tmp_path / "a", "text")
    assert (tmp_path / "a").is_symlink()


@pytest.mark.parametrize("linked", [True, False])
def test_a_pipe_takes_predictions_and_stays_a_pipe(
    evaluate: list[str], tmp_path: Path, capsys: Captured, linked: bool
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    out = tmp_path / "link" if linked else pipe
    if linked:
        out.symlink_to(pipe)
    before = set(tmp_path.iterdir())
    listener = Listener(pipe)
    assert run_command([*evaluate, "--out", str(out)]) == 0
    assert len(listener.all().splitlines()) == len(SOURCES)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and set(tmp_path.iterdir()) == before
    assert "BLEU" in capsys.readouterr().out


def test_a_picture_goes_down_a_pipe(trained: Path, tmp_path: Path) -> None:
    for name, begins in (("map.svg", b"<svg"), ("map.png", b"\x89PNG")):
        os.mkfifo(tmp_path / name)
        listener = Listener(tmp_path / name)
        assert run_command(["inspect", str(trained), "--text", "ein hund", "--out", str(tmp_path / name)]) == 0
        assert begins in listener.all()[:60] and stat.S_ISFIFO((tmp_path / name).stat().st_mode)


def test_a_dash_is_standard_output_and_has_predictions_alone(
    evaluate: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command([*evaluate, "--out", "file.txt"]) == 0
    assert "BLEU" in capsys.readouterr().out
    assert run_command([*evaluate, "--out", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.out == Path("file.txt").read_text() and "BLEU" in captured.err
    assert {path.name for path in Path().iterdir()} == {"file.txt", "file.json"}


def test_the_file_that_standard_output_goes_to_is_not_replaced(
    evaluate: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "shown.txt"
    with open(out, "w") as shown:
        monkeypatch.setattr(sys, "stdout", shown)
        print("before", flush=True)
        assert run_command([*evaluate, "--out", str(out)]) == 0
        print("after")
    lines = out.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after" and len(lines) == 2 + len(SOURCES)
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("x.json", "the scores are written to x.json, and would take the place of the predictions; choose another"),
        ("x.JSON", "such as x.txt"),
        ("round.out", "the scores are written to round.json, and would take the place of the predictions"),
        ("source.de", "the predictions would take the place of source.de, which is read"),
        ("target.en", "the predictions would take the place of target.en, which is read"),
        ("link", "the predictions would take the place of target.en, which is read"),
        ("{run}/../de.txt", "de.txt, which is read"),
        ("{run}/run.toml", "run/run.toml, which is read"),
        ("{run}/tokenizer.txt", "scores, which go to {run}/tokenizer.json, would take the place of"),
        ("{run}/checkpoints/{step}/manifest.x", "manifest.json, which is read"),
        ("package.txt", "would take the place of package.json, which headway evaluate did not write; move it away"),
        ("folder", "--out folder: is a directory; name a file in it"),
        ("notes.txt", "would take the place of notes.json, which headway evaluate did not write"),
    ],
)
def test_what_is_read_or_was_written_by_others_is_never_overwritten(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, out: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("source.de").write_text("ein hund\n")
    Path("target.en").write_text("a dog\n")
    Path("link").symlink_to("target.en")
    Path("round.out").symlink_to("round.json")
    Path("folder").mkdir()
    Path("package.json").write_text('{"name": "mine"}')
    Path("notes.json").write_text("not even JSON")
    step = next((trained / "checkpoints").iterdir()).name
    out, message = (each.replace("{run}", str(trained)).replace("{step}", step) for each in (out, message))

    def content() -> dict[Path, bytes]:
        files = (*tmp_path.rglob("*"), *trained.parent.rglob("*"))
        return {path: path.read_bytes() for path in files if path.is_file()}

    before = content()
    files = ("--split", "source.de", "--target", "target.en")
    monkeypatch.setattr(headway.run.Run, "evaluate", None)  # it is known before anything is scored
    assert message in refused(capsys, "evaluate", trained, *files, "--out", out)
    assert content() == before


def test_predictions_may_be_written_again(evaluate: list[str], tmp_path: Path) -> None:
    out = tmp_path / "x.txt"
    for _ in range(2):
        assert run_command([*evaluate, "--out", str(out)]) == 0
    assert json.loads((tmp_path / "x.json").read_text())["sentences"] == len(SOURCES)


@pytest.mark.parametrize("task", ["translation", "questions"])
def test_a_long_evaluation_says_how_far_it_is(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, task: str
) -> None:
    """Row after row on standard error, up to the last; what is found is the same as in silence."""
    monkeypatch.setattr("headway.commands.reporter", lambda: Lines(seconds=0))
    run, count = trained, 200
    (tmp_path / "rows.tsv").write_text("".join(f"{SOURCES[n % 6]}\t{TARGETS[n % 6]}\n" for n in range(count)))
    if task == "questions":
        model = {"width": 8, "layers": 1, "heads": 2, "block": 32}
        answers = {"name": "question_answering", "questions": str(tmp_path / "rows.tsv"), "longest_answer": 2}
        settings = {"task": answers, "model": model, "training": {"steps": 1, "batch_size": 2}}
        run = headway.train(settings, tmp_path / "run").path
    out = tmp_path / "out.txt"
    assert run_command(["evaluate", str(run), "--split", str(tmp_path / "rows.tsv"), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    done = [int(each) for each in re.findall(rf"^rows.tsv, rows: step (\d+)/{count}\b", captured.err, re.MULTILINE)]
    assert len(done) > 1 and done == sorted(set(done)) and done[-1] == count
    assert "step" not in captured.out
    silent = headway.load(run).evaluate(str(tmp_path / "rows.tsv"))
    assert out.read_text().splitlines() == [one_line(text) for text in silent["predictions"]]
