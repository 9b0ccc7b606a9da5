"""Whatever is wrong with what a user gives: exit code 2, the file, the line, the value and the way out, no traceback,
and nothing left behind that stands in the way of a second try."""

from __future__ import annotations

import bz2
import lzma
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.cli import run_command
from headway.commands import summary
from headway.configuration import load_settings
from headway.files import Ownership
from headway.report.comparison import comparison_table
from headway.tasks import QuestionAnswering
from headway.text import Characters
from headway.training.checkpoint import Checkpoints, State

Captured = pytest.CaptureFixture[str]
QUESTION = "Where was Ada Lund born?"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints; `run` copies it."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "train.tsv").write_text(f"{QUESTION}\tOslo\nWhere was Bo Moe born?\tRome\n")
    task = {"name": "question_answering", "questions": str(folder / "train.tsv"), "dev": str(folder / "train.tsv")}
    tables = {
        "task": task | {"longest_answer": 4},
        "model": {"width": 16, "layers": 1, "heads": 2, "block": 48},
        "training": {"steps": 6, "batch_size": 2, "evaluate_every": 3, "learning_rate": 1e-6},
    }
    plain, accuracies = QuestionAnswering.evaluate, iter((0.5, 0.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            QuestionAnswering, "evaluate", lambda *given, **more: plain(*given, **more) | {"accuracy": next(accuracies)}
        )
        run = headway.train(tables, folder / "run")
    assert run.checkpoints.steps() == [3, 6] and run.step == 3
    return run.path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_a_pipe_is_no_corpus(run_file: Path, capsys: Captured) -> None:
    """It was waited for without end, or called empty, where it was read the second time."""
    reader, writer = os.pipe()
    os.write(writer, (run_file.parent / "wiki.txt").read_bytes())
    os.close(writer)
    (run_file.parent / "wiki.txt").unlink()
    (run_file.parent / "wiki.txt").symlink_to(f"/dev/fd/{reader}")
    message = refused(capsys, "train", run_file, "--out", run_file.parent / "run")
    assert "wiki.txt: a pipe or a device, which can be read only once; save what comes from it to a file" in message
    assert not (run_file.parent / "run").exists()
    os.close(reader)


def refused(capsys: Captured, *arguments: object) -> str:
    """What the command says when it is refused."""
    capsys.readouterr()
    assert run_command([str(argument) for argument in arguments]) == 2
    shown = capsys.readouterr().err
    assert "headway: " in shown and "Traceback" not in shown
    return shown.split("headway: ", 1)[1]


# ---- data: a file that is wrong is named, nothing is left, and the same command works when it is mended


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("wiki.txt", None, "wiki.txt: no such file"),
        ("wiki.txt", b"", "wiki.txt: empty"),
        ("wiki.txt", b" \n\n", "wiki.txt: empty"),
        ("wiki.txt", b"Ada.\nCaf\xe9 .\n", "wiki.txt:2: not UTF-8 at byte 4 (0xe9); re-save it as UTF-8"),
        ("wiki.txt", b"Ada\nB\0o\n", "wiki.txt:2: NUL byte at byte 2"),
        ("wiki.txt", "Ada".encode("utf-16"), "wiki.txt: this is UTF-16"),
        ("train.tsv", None, "train.tsv: no such file"),
        (
            "train.tsv",
            b"Where?\tOslo\nWhere now?\n",
            "train.tsv:2: 1 column where 2 are wanted (question<TAB>answer): 'Where now?'",
        ),
        ("train.tsv", b"Where?\tOslo\tRome\n", "train.tsv:1: 3 columns where 2 are wanted"),
        ("train.tsv", b"Where?\t \n", "train.tsv:1: empty answer to 'Where?'"),
        ("train.tsv", b"Where was " + b"A" * 50 + b" born?\tOslo\n", "train.tsv:1: question and answer have 72 tokens"),
        ("dev.tsv", None, "dev.tsv: no such file"),
        ("dev.tsv", "Where was Ünal born?\tOslo\n".encode(), "dev.tsv:1: never seen in training: 'Ü' (U+00DC)"),
        ("dev.tsv", b"Where was " + b"A" * 50 + b" born?\tOslo\n", "dev.tsv:1: the prompt has 67 tokens"),
    ],
)
def test_bad_data_is_named_and_the_mended_command_works(
    run_file: Path, capsys: Captured, file: str, content: bytes | None, message: str
) -> None:
    path = run_file.parent / file
    good = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    command = ("train", run_file, "--out", run_file.parent / "new" / "run", "--set", "training.steps=1")
    shown = refused(capsys, *command)
    assert message in shown and str(path) in shown
    assert not (run_file.parent / "new").exists()
    path.write_bytes(good)
    assert run_command([str(part) for part in command]) == 0


def test_a_byte_order_mark_and_windows_line_ends_are_read_and_said(run_file: Path, capsys: Captured) -> None:
    command = ["train", str(run_file), "--out"]
    assert run_command([*command, str(run_file.parent / "plain")]) == 0
    wiki = run_file.parent / "wiki.txt"
    wiki.write_bytes(b"\xef\xbb\xbf" + wiki.read_bytes().replace(b"\n", b"\r\n"))
    capsys.readouterr()
    assert run_command([*command, str(run_file.parent / "marked")]) == 0
    shown = capsys.readouterr().err
    assert f"{wiki}: byte-order mark removed" in shown and f"{wiki}: 16 CRLF line ends read as LF" in shown
    first, second = (headway.load(run_file.parent / name).model.state_dict() for name in ("plain", "marked"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_corpus_shorter_than_a_row_is_refused(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.txt").write_text("too short")
    (tmp_path / "mine.toml").write_text('[task]\nname = "language_modelling"\ncorpus = "notes.txt"\n')
    command = ("train", tmp_path / "mine.toml", "--out", tmp_path / "run")
    shown = refused(capsys, *command)
    assert "notes.txt: 9 tokens to train on, and a row of model.block = 128 takes 129; give a longer text" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.toml", "notes.txt"]


def test_a_language_model_may_hold_nothing_out(tmp_path: Path, capsys: Captured) -> None:
    """It trains to its end; only evaluating it asks for a file."""
    (tmp_path / "notes.txt").write_text("the cat sat on the mat " * 4)
    tables = {
        "task": {"name": "language_modelling", "corpus": str(tmp_path / "notes.txt"), "holdout": 0.0},
        "model": {"width": 16, "layers": 1, "heads": 2, "block": 16},
        "training": {"steps": 1, "batch_size": 2},
    }
    path = headway.train(tables, tmp_path / "run").path
    assert "nothing was held out to measure on; name a file" in refused(capsys, "evaluate", path)
    assert "no test split" in refused(capsys, "evaluate", path, "--split", "test")


def test_the_column_of_a_table_may_be_counted() -> None:
    """As the message about a table without a header says."""
    task = {"name": "language_modelling", "corpus": "table.tsv", "column": 1}
    assert load_settings({"task": task}).task.column == 1


def test_an_unknown_key_is_refused_before_anything_is_written(run_file: Path, capsys: Captured) -> None:
    shown = refused(capsys, "train", run_file, "--set", "model.widht=3", "--out", run_file.parent / "run")
    assert shown == f"{run_file} with --set: a problem\n  - model.widht: unknown key; did you mean 'width'?\n"
    assert not (run_file.parent / "run").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("training.seed=99999999999999999999999", "training.seed = 99999999999999999999999: must be at most"),
        ("training.device=cuda", "'cuda': not on this machine; here: cpu"),
        ("training.device=gpu", "training.device = 'gpu': must be one of auto, cpu, cuda, mps"),
        ("tokenizer.kind=word", "did you mean 'words'?"),
        ("pretraining.task.shortest=60", "task.shortest (60) is more than fits a row of model.block = 48"),
    ],
)
def test_impossible_settings_leave_nothing_behind(run_file: Path, capsys: Captured, setting: str, message: str) -> None:
    assert message in refused(capsys, "train", run_file, "--set", setting, "--out", run_file.parent / "run")
    assert not (run_file.parent / "run").exists()


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "tf32"])
def test_a_precision_that_the_machine_lacks_is_another_with_a_message(
    run_file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr("headway.training.device.has_bfloat16", lambda device: (False, "no such units here"))
    sets = ["--set", f"training.precision={precision}", "--set", "training.device=cpu"]
    assert run_command(["train", str(run_file), *sets, "--out", str(run_file.parent / "run")]) == 0
    assert f"float32 ({precision} was asked for, " in capsys.readouterr().err


# ---- what is asked of a trained model


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("Where was Ünal born?", "'Where was Ünal born?': never seen in training: 'Ü' (U+00DC), first at character 11"),
        ("A" * 60, "the prompt has 61 tokens, and the model's context is 48 (model.block); shorten it"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(
    trained: Path, tmp_path: Path, capsys: Captured, question: str, message: str
) -> None:
    assert message in refused(capsys, "predict", trained, question)
    file = tmp_path / "more.tsv"
    file.write_text(f"{QUESTION}\tOslo\n{question}\tRome\n", encoding="utf-8")
    shown = refused(capsys, "evaluate", trained, "--split", file, "--out", tmp_path / "out.txt")
    assert shown.startswith(f"{file}:2: ")
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--split", "dve"), "'dve' is neither a split nor a file; did you mean 'dev'?"),
        (("--split", "test"), "this run has no test split"),
        (("--split", "nowhere.tsv"), "nowhere.tsv: no such file"),
        (("--split", "dev", "--target", "x.en"), "target x.en: a run whose task is question_answering is scored"),
        (("--device", "gpu"), "'gpu': unknown"),
        (("--device", "cuda"), "'cuda': not on this machine"),
        (("--out", "/proc/nowhere/x.txt"), "/proc/nowhere/x.txt: cannot be written"),
        (("--out", "/proc"), "/proc: is a directory; name a file in it"),
    ],
)
def test_an_evaluation_that_cannot_be_made_is_refused(
    trained: Path, capsys: Captured, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(capsys, "evaluate", trained, *arguments)


# ---- directories


def test_an_output_directory_that_cannot_be_used_is_refused(run_file: Path, capsys: Captured) -> None:
    folder = run_file.parent
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("keep me")
    train = ("train", run_file, "--out")
    assert "full: exists already; choose another directory with --out" in refused(capsys, *train, folder / "full")
    assert "wiki.txt: exists already" in refused(capsys, *train, folder / "wiki.txt")
    assert "(Not a directory); choose another with --out" in refused(capsys, *train, folder / "wiki.txt" / "run")
    assert "choose another with --out" in refused(capsys, *train, "/proc/nowhere/run")
    assert (folder / "full" / "mine.txt").read_text() == "keep me"
    (folder / "empty").mkdir()
    assert run_command(["train", str(run_file), "--out", str(folder / "empty")]) == 0
    assert "empty: exists already; continue it with --resume" in refused(capsys, *train, folder / "empty")


def test_a_directory_that_another_process_works_in_is_refused(run: Path, capsys: Captured) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    with Ownership(run):
        shown = refused(capsys, "train", run, "--resume")
    assert f"{run}: in use by process {os.getpid()} on " in shown
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert run_command(["train", str(run), "--resume"]) == 0


@pytest.mark.parametrize("command", ["evaluate", "predict", "compare"])
def test_what_is_not_a_run_is_refused(command: str, tmp_path: Path, capsys: Captured) -> None:
    assert "not a run directory (no run.toml in it)" in refused(capsys, command, tmp_path)
    assert "nowhere: no such directory; name a run directory" in refused(capsys, command, tmp_path / "nowhere")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "run.toml").write_text("")
    assert f"no such directory; did you mean '{tmp_path / 'notes'}'?" in refused(capsys, command, tmp_path / "note")
    assert f"runs in it: {tmp_path / 'notes'}" in refused(capsys, command, tmp_path)
    (tmp_path / "notes" / "run.toml").rename(tmp_path / "notes" / ".run.toml")
    assert f"get it back with cp {tmp_path / 'notes' / '.run.toml'}" in refused(capsys, command, tmp_path / "notes")


@pytest.mark.parametrize("name", ["notes.txt", "Notes.JSONL", "my notes.txt.gz"])
def test_a_text_in_place_of_a_run_file_is_told_how_to_be_learned(name: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / name).write_bytes(b"abc")
    shown = refused(capsys, "train", tmp_path / name)
    run_file, way = shown.split("\n\n")[1:]
    assert tomllib.loads(run_file) == {"task": {"name": "language_modelling", "corpus": name}}
    assert str(tmp_path / (name.split(".", maxsplit=1)[0] + ".toml")) in way


# ---- runs that were tampered with


def test_a_run_without_checkpoints_says_how_to_go_on(run: Path, capsys: Captured) -> None:
    shutil.rmtree(run / "checkpoints")
    assert f"go on with: headway train {run} --resume" in refused(capsys, "evaluate", run)
    assert run_command(["train", str(run), "--resume"]) == 0
    assert headway.load(run).state.step == 6


def test_another_tokenizer_is_refused(run: Path, capsys: Captured) -> None:
    Characters.train(["other letters"]).save(run / "tokenizer.json")
    for command in (("evaluate", run), ("train", run, "--resume")):
        assert "is not the one these weights were trained with" in refused(capsys, *command)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b"\xff"])
def test_a_tokenizer_that_is_missing_or_damaged_is_refused(run: Path, capsys: Captured, content: bytes | None) -> None:
    (run / "tokenizer.json").unlink()
    if content is not None:
        (run / "tokenizer.json").write_bytes(content)
    assert f"{run / 'tokenizer.json'}:" in refused(capsys, "evaluate", run)


def test_a_tokenizer_that_cannot_be_made_again_is_not_written(run_file: Path, tmp_path: Path, capsys: Captured) -> None:
    """The one of the run is gone, and the corpus is another by now."""
    out = headway.train(run_file, tmp_path / "run").path
    (out / "tokenizer.json").unlink()
    corpus = run_file.parent / "wiki.txt"
    text = corpus.read_text()
    corpus.write_text(text + "Zoë Quip. Zoë Quip was born in Rome .\n", encoding="utf-8")
    shown = refused(capsys, "train", out, "--resume", "--accept-changes")
    assert "is not the one these weights were trained with" in shown and not (out / "tokenizer.json").exists()
    corpus.write_text(text)
    assert run_command(["train", str(out), "--resume"]) == 0 and (out / "tokenizer.json").exists()


def test_a_parquet_file_is_for_shards(run_file: Path, capsys: Captured) -> None:
    path = run_file.parent / "wiki.parquet"
    path.write_bytes(b"PAR1\0\0")
    shown = refused(capsys, "train", run_file, "--set", f"pretraining.task.corpus={path}")
    assert "wiki.parquet: a Parquet file; make token shards of it and take these: headway data prepare " in shown


def test_a_stream_has_no_name_of_a_stage(run_file: Path, capsys: Captured) -> None:
    sets = ["--set", "streams.training.task.name=language_modelling", "--set", "streams.training.task.corpus=wiki.txt"]
    assert "[streams.training]: 'training' is the name of a stage" in refused(capsys, "train", run_file, *sets)


def test_a_run_that_lets_go_of_a_checkpoint_while_it_is_opened_has_a_newer_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, gone = Checkpoints.state, []

    def state(self: Checkpoints, step: int) -> State:
        if not gone:
            gone.append(step)
            for newer in (7, 8):
                shutil.copytree(self.path(6), self.path(newer))
            shutil.rmtree(self.path(6))
        return plain(self, step)

    monkeypatch.setattr(Checkpoints, "state", state)
    opened = headway.load(run)
    assert gone == [6] and opened.checkpoints.steps() == [3, 7, 8]
    opened.step = 6  # it was let go after the run was opened
    assert opened.parameters > 0 and opened.step in (3, 8)


def test_the_summary_says_which_checkpoint_its_score_is_of(run: Path) -> None:
    opened = headway.load(run)
    assert opened.step == 3 and opened.state.step == 6
    assert "step 6, " in summary(opened) and "the best checkpoint is of step 3, dev " in summary(opened)
    assert " (step 3)" in comparison_table([opened])


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}"])
def test_damaged_checkpoints_are_named(run: Path, capsys: Captured, file: str, content: bytes) -> None:
    """The newest one is passed over for the one before; where none is whole, the message says which and why."""
    newest, older = (run / "checkpoints" / f"step-0000000{step}" for step in (6, 3))
    (newest / file).write_bytes(content)
    assert run_command(["evaluate", str(run)]) == 0
    assert f"{newest.name}: {file} is damaged; passed over" in capsys.readouterr().err
    assert headway.load(run).state.step == 3
    (older / file).write_bytes(content)
    shown = refused(capsys, "evaluate", run)
    assert newest.name in shown and older.name in shown and "--resume" in shown


def test_a_damaged_best_checkpoint_is_not_used(run: Path, capsys: Captured) -> None:
    best = run / "checkpoints" / "step-00000003" / "model.safetensors"
    content = bytearray(best.read_bytes())
    content[-1] ^= 1
    best.write_bytes(content)
    assert run_command(["evaluate", str(run)]) == 0
    assert "step-00000003: model.safetensors is damaged; passed over" in capsys.readouterr().err
    assert headway.load(run).step == 6


def test_stray_files_in_a_run_do_no_harm(run: Path, capsys: Captured) -> None:
    stray = run / "checkpoints" / "step-backup"
    stray.mkdir()
    (stray / "manifest.json").write_text("{}")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'5\n"text"\n\xff\xfe\n{"step": 6, "lo')
    assert run_command(["evaluate", str(run)]) == 0
    assert run_command(["compare", str(run), "--out", str(run / "plot.png")]) == 0
    assert run_command(["train", str(run), "--resume"]) == 0


def test_a_run_file_that_was_changed_is_read_as_strictly_as_any(run: Path, capsys: Captured) -> None:
    file = run / "run.toml"
    file.write_text(file.read_text().replace("width = 16", "widht = 16"))
    assert "model.widht: unknown key; did you mean 'width'?" in refused(capsys, "evaluate", run)
    file.write_text(file.read_text().replace("widht = 16", "width = 32"))
    assert "these weights are of another model: 'blocks.0" in refused(capsys, "evaluate", run)


def test_what_a_folder_holds_beside_text_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And not learned from without a word; an empty file among others stops nothing."""
    folder = tmp_path / "mixed"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("some text\n" * 20)
    (folder / "sub" / "b.txt").write_text("more text\n" * 20)
    (folder / "empty.txt").touch()
    (folder / "c.txt.bz2").write_bytes(bz2.compress(b"packed text\n" * 20))
    (folder / "notes.md").write_text("# notes")
    assert run_command(["data", "check", str(folder)]) == 0
    said = capsys.readouterr().err
    assert f"{folder}: 2 files of other kinds passed over: c.txt.bz2, notes.md; headway data prepare reads" in said
    assert f"{folder}: 1 empty file passed over: {folder / 'empty.txt'}" in said
    prepare = ["data", "prepare", str(folder), "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert run_command([*prepare, str(folder / "a.txt")]) == 0
    told = capsys.readouterr()
    assert "80 documents" in told.out
    assert "1 file of other kinds passed over: notes.md\n" in told.err
    assert f"{folder / 'a.txt'}: named 2 times" in told.err


@pytest.mark.parametrize(
    ("name", "pack", "kind"), [("a.txt.bz2", bz2.compress, "bzip2"), ("a.jsonl.xz", lzma.compress, "xz")]
)
def test_a_packed_file_is_told_what_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, pack: Any, kind: str
) -> None:
    (tmp_path / name).write_bytes(pack(b'{"text": "words"}\n'))
    assert run_command(["data", "check", str(tmp_path / name)]) == 2
    assert f"packed by {kind}; unpack it, or make token shards of it" in capsys.readouterr().err


def test_files_without_text_are_passed_over_where_others_have_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("text\n")
    for name in ("b.txt", "c.txt"):
        (tmp_path / name).write_text(" \n\n")
    files = [str(tmp_path / name) for name in ("b.txt", "a.txt", "c.txt")]
    command = ["data", "prepare", "--tokenizer", "bytes", "--out", str(tmp_path / "out")]
    assert run_command([*command, *files]) == 0
    told = capsys.readouterr()
    assert "1 document" in told.out and told.err.count("there is no text in it; passed over") == 2
    assert run_command([*command[:-1], str(tmp_path / "none"), files[0], files[2]]) == 2
    assert "there is no text in them" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_a_run_file_with_nothing_in_it_is_told_from_one_with_mistakes(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_file.parent / "run"
    assert run_command(["train", str(run_file), "--out", str(out), "--set", "training.steps=1"]) == 0
    (out / "run.toml").write_text("")
    assert run_command(["train", str(out), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "there is nothing in it" in said and f"cp {out / '.run.toml'} {out / 'run.toml'}" in said


@pytest.mark.parametrize("held", ["0", "0.00001"])
def test_a_run_that_cannot_be_scored_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], held: str) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    (tmp_path / "run.toml").write_text(f"""
[task]
name = "language_modelling"
corpus = "a.txt"
holdout = {held}
[model]
width = 16
layers = 1
heads = 1
block = 16
[training]
steps = 2
evaluate_every = 1
patience = 1
""")
    assert run_command(["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]) == 0
    assert "there is nothing to measure, so no score, best checkpoint or early stopping" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["-5", "0", "3", "12"])
def test_too_few_words_are_refused_by_the_name_that_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str
) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox\n")
    command = ["data", "prepare", str(tmp_path / "a.txt"), "--tokenizer", "words", "--out", str(tmp_path / "out")]
    assert run_command([*command, "--size", size]) == 2
    assert "headway: --size" in capsys.readouterr().err and not (tmp_path / "out").exists()
