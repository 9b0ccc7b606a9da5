"""Whatever is wrong with pairs, or with what is to be translated: said with file, line and way out."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import headway
from headway.cli import run_command
from headway.commands import arriving
from tests.test_bad_input import Captured, refused

SOURCES = ["ein hund", "zwei kinder", "das gras", "ein kind", "der park", "im gras"]
TARGETS = ["a dog", "two children", "the grass", "a child", "the park", "in the grass"]


def tables(folder: Path, kind: str = "characters") -> dict:
    """A tiny run over the two files in a folder."""
    (folder / "de.txt").write_text("\n".join(SOURCES) + "\n")
    (folder / "en.txt").write_text("\n".join(TARGETS) + "\n")
    task = {"name": "sequence_to_sequence", "source": str(folder / "de.txt"), "target": str(folder / "en.txt")}
    return {
        "tokenizer": {"kind": kind},
        "model": {"kind": "rnn_seq2seq", "width": 8, "hidden": 8, "block": 16},
        "task": task | {"holdout": 0.0, "beam": 2},
        "training": {"steps": 1, "batch_size": 2},
    }


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    from headway.settings import to_toml

    (tmp_path / "run.toml").write_text(to_toml(tables(tmp_path)))
    return tmp_path / "run.toml"


@pytest.fixture(scope="module", params=["characters", "bpe"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return headway.train(tables(folder, request.param), folder / "run").path


@pytest.fixture(scope="module")
def spells_anything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("anything")
    return headway.train(tables(folder, "bpe"), folder / "run").path


def typed(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """Standard input, from a pipe."""
    data = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data, isatty=lambda: False))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task.target=nowhere.txt"], "nowhere.txt: no such file"),
        (["task.target=de.txt"], "de.txt: given as source and as target; name the file that holds the other side"),
        (["task.target=short.txt"], "de.txt: 6 lines, but {folder}/short.txt: 2 lines; line by line"),
        (["task.target=gap.txt", "task.strict=true"], "gap.txt:2: empty target to 'zwei kinder'"),
        (["task.dev=de.txt"], "de.txt:1: 1 column where 2 are wanted (source<TAB>target): 'ein hund'"),
        (["task.dev=new.txt", "task.dev_target=en.txt"], "new.txt:3: never seen in training: 'ñ' (U+00F1)"),
        (["task.dev_target=en.txt"], "task.dev_target: there are targets and no sources; name them as dev"),
        (["task.source_column=de"], "task.source_column: a table needs both columns: source_column and target_column"),
        (["task.longest=2"], "de.txt: none of its 6 pairs has at most 2 tokens in the source and 2 in the target"),
        (
            ["model.kind=gpt"],
            "model.kind = 'gpt': task, sequence_to_sequence, reads a source, which this model does not",
        ),
        (["task.beam=0"], "task.beam = 0: must be at least 1"),
        (["task.beam=1001"], "task.beam = 1001: must be at most 1000"),
        (["task.length_penalty=1000"], "task.length_penalty = 1000: must be at most 10"),
        (["task.length_penalty=-1000"], "task.length_penalty = -1000: must be at least -10"),
    ],
)
def test_pairs_that_cannot_be_learned_are_refused(
    run_file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, settings: list[str], message: str
) -> None:
    folder = run_file.parent
    monkeypatch.chdir(folder)
    (folder / "short.txt").write_text("a dog\ntwo children\n")
    (folder / "gap.txt").write_text("\n".join(["a dog", "", *TARGETS[2:]]) + "\n")
    (folder / "new.txt").write_text("\n".join(["ein", "ein", "ein ñ", *SOURCES[3:]]) + "\n")
    before = sorted(folder.iterdir())
    sets = [part for setting in settings for part in ("--set", setting)]
    shown = refused(capsys, "train", run_file, "--out", folder / "run", *sets)
    assert message.format(folder=folder) in shown
    assert sorted(folder.iterdir()) == before


def test_strict_makes_an_empty_line_an_error(run_file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_file.parent
    monkeypatch.chdir(folder)
    (folder / "gap.txt").write_text("\n".join(["a dog", "", *TARGETS[2:]]) + "\n")
    run = ["train", "run.toml", "--set", "task.target=gap.txt", "--out"]
    expected = "gap.txt:2: empty target to 'zwei kinder'"
    assert expected in refused(capsys, *run, "not-begun", "--strict") and not (folder / "not-begun").exists()
    assert run_command([*run, "run"]) == 0
    scored = ["evaluate", "run", "--split", "de.txt", "--target", "gap.txt"]
    assert run_command(scored) == 0
    assert expected in refused(capsys, *scored, "--strict")
    check = ["data", "check", "de.txt", "--target", "gap.txt"]
    assert run_command(check) == 0
    assert expected in refused(capsys, *check, "--strict")
    assert "--strict: is for pairs of lines, and the task is toy" in refused(capsys, "train", "toy/copy", "--strict")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("german", "english"), "table.tsv:1: no column 'german' in the header row"),
        (("de", "englisch"), "table.tsv:1: no column 'englisch' in the header row"),
        ((0, 2), "table.tsv:1: no column 2; there are 2, counted from 0"),
        (("1", 1), "task.target_column: 1 is the source's column too; name the other side's"),
    ],
)
def test_columns_that_do_not_exist_are_refused(
    tmp_path: Path, capsys: Captured, columns: tuple[str | int, str | int], message: str
) -> None:
    (tmp_path / "table.tsv").write_text("de\ten\nein hund\ta dog\n")
    lines = ['[model]\nkind = "encoder_decoder"\n[task]\nname = "sequence_to_sequence"\nsource = "table.tsv"']
    lines += [f"{side}_column = {name!r}" for side, name in zip(("source", "target"), columns, strict=True)]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    assert message in refused(capsys, "train", tmp_path / "run.toml", "--out", tmp_path / "run")


def test_what_is_dropped_and_what_is_too_long_is_said_once(run_file: Path, capsys: Captured) -> None:
    folder = run_file.parent
    (folder / "de.txt").write_text("\n".join([*SOURCES, "", "das gras und der park"]) + "\n")
    (folder / "en.txt").write_text("\n".join([*TARGETS, "a dog", "the grass"]) + "\n")
    assert run_command(["train", str(run_file), "--out", str(folder / "run")]) == 0
    shown = capsys.readouterr().err
    assert shown.count("de.txt: 1 pair with an empty side dropped (line 7)") == 1
    dropped = "de.txt: 1 of 7 pairs have more than 16 tokens in the source or 15 in the target and are not learned"
    assert shown.count(dropped) == 1
    assert run_command(["evaluate", str(folder / "run"), "--split", "train"]) == 0
    captured = capsys.readouterr()
    assert "1 pair with an empty side dropped (line 7)" in captured.err and "BLEU by sacrebleu, nrefs:1" in captured.out
    assert (
        "train: 1 of 7 sources have more than 16 tokens (model.block): the model reads no more of them" in captured.err
    )
    assert len((folder / "run" / "predictions" / "train.txt").read_text().splitlines()) == 7


# ---- what is asked of a trained model


def test_a_character_never_seen_is_named_with_its_line_or_spelled(
    trained: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed(monkeypatch, ["ein hund", "ein ñandú"])
    capsys.readouterr()
    if "characters" in str(trained):
        assert "standard input:2: never seen in training: 'ñ' (U+00F1)" in refused(capsys, "predict", trained)
    else:
        assert run_command(["predict", str(trained)]) == 0
        assert len(capsys.readouterr().out.split("\n")) == 3


@pytest.mark.parametrize("bad", ["ein ñandú".encode(), b"ein h\xfcnd"])
@pytest.mark.parametrize("before", [0, 3, 300])
def test_a_line_that_is_refused_loses_none_before_it(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, bad: bytes, before: int
) -> None:
    run = headway.train(tables(tmp_path), tmp_path / "run")
    lines = [SOURCES[number % 6].encode() for number in range(before)]
    data = io.BytesIO(b"\n".join([*lines, bad, b"ein hund"]))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=data, isatty=lambda: False))
    capsys.readouterr()
    assert run_command(["predict", str(run.path), "--beam", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("\n") == before
    assert captured.out.splitlines() == [each[0].text for each in run.translate(map(bytes.decode, lines), beam=1)]
    assert f"headway: standard input:{before + 1}: n" in captured.err  # never seen, not UTF-8


@pytest.mark.parametrize("most", [1, 3])
def test_lines_are_handed_on_as_they_come(most: int) -> None:
    """Whoever asks, waits for the answer and asks again gets it; what has come meanwhile comes together."""
    reader, writer = os.pipe()
    watchdog = threading.Timer(10, os.close, [writer])
    watchdog.start()
    with open(reader, "rb") as stream:
        groups = arriving(stream, most)
        for line in (b"a b", b"", b"c"):
            os.write(writer, line + b"\nhal")
            assert next(groups) == [line] and watchdog.is_alive()
            os.write(writer, b"f\n")
            assert next(groups) == [b"half"] and watchdog.is_alive()
        os.write(writer, b"1\n2\n3\n4\n5")
        watchdog.cancel()
        os.close(writer)
        found = list(groups)
    assert [line for group in found for line in group] == [b"1", b"2", b"3", b"4", b"5"]
    assert max(map(len, found)) == most


def test_predict_answers_a_line_before_the_next_is_there(
    spells_anything: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    watchdog = threading.Timer(20, os.close, [writer])
    watchdog.start()
    questions = iter([b"ein hund\n", b"\n", b"im gras\n"])

    class Asking(io.StringIO):
        """Whatever is written to it brings the next line."""

        def write(self, text: str) -> int:
            if text.endswith("\n") and watchdog.is_alive():
                os.write(writer, next(questions, b"das gras\n"))
                if self.getvalue().count("\n") == 2:
                    watchdog.cancel()
                    os.close(writer)
            return super().write(text)

    os.write(writer, next(questions))
    with open(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", out := Asking())
        assert run_command(["predict", str(spells_anything), "--beam", "1"]) == 0
    assert watchdog.finished.is_set() and out.getvalue().count("\n") == 4


def test_of_several_translations_each_names_its_source(
    spells_anything: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["ein hund", "", "im gras", "   "]
    typed(monkeypatch, lines)
    for arguments in ([], lines):
        capsys.readouterr()
        assert run_command(["predict", str(spells_anything), "--beam", "3", "--best", "3", *arguments]) == 0
        rows = [row.split("\t") for row in capsys.readouterr().out.split("\n")[:-1]]
        written = headway.load(spells_anything).translate(lines, beam=3, best=3)
        assert [(row[0], row[1]) for row in rows] == [
            (f"{number}", each.text) for number, best in enumerate(written, 1) for each in best
        ]
        assert all(len(row) == 4 for row in rows) and [row[0] for row in rows].count("2") == 1 < len(written[0])


def test_a_line_comes_out_for_every_line_in(
    spells_anything: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long, empty, unseen, repeated: each gives in the crowd what it gives by itself."""
    kinds = ["ein hund", "", "das gras " * 30, "ñ \u2028 \x85 ☃", "   ", "ein hund", "im gras\r", "\t"]
    lines = [kinds[number * 5 % len(kinds)] + "x" * (number % 4 == 3) for number in range(1000)]
    typed(monkeypatch, lines)
    capsys.readouterr()
    assert run_command(["predict", str(spells_anything), "--beam", "1"]) == 0
    captured = capsys.readouterr()
    out = captured.out.split("\n")
    assert len(out) == 1001 and out[-1] == ""
    run = headway.load(spells_anything)
    alone = {line: run.translate(line.rstrip("\r"), beam=1)[0][0].text for line in set(lines)}
    assert out[:-1] == [alone[line] for line in lines]
    assert all((text == "") for line, text in zip(lines, out, strict=False) if not line.strip())
    first = next(number for number, line in enumerate(lines, 1) if len(line) > 100)
    assert f"standard input:{first}: " in captured.err and "of which the model reads the first 16" in captured.err
    assert captured.err.count("standard input") == sum(len(line) > 100 for line in lines)


def test_standard_input_that_is_closed_is_said(
    spells_anything: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is closed; give what is to be read as arguments" in refused(
        capsys, "predict", spells_anything
    )


def test_an_argument_that_is_too_long_is_cut_and_said(spells_anything: Path, capsys: Captured) -> None:
    capsys.readouterr()
    assert run_command(["predict", str(spells_anything), "das gras " * 9, "ein hund"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 2 and "tokens, of which the model reads the first 16" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", "--beam", 0, "ein hund"), "--beam 0: at least 1 is needed, which is greedy decoding"),
        (("predict", "--beam", 2, "--best", 3, "ein hund"), "--best 3: a beam of 2 has no more than 2 to show"),
        (("predict", "--beam", 100_000, "ein hund"), "--beam 100000: must be at most"),
        (("evaluate", "--beam", 100_000), "tokens); leave it out for the run's own, 2 (task.beam)"),
        (("evaluate", "--beam", 0), "--beam 0: at least 1 is needed, which is greedy decoding"),
        (("evaluate", "--split", "dev"), "nothing was held out to measure on; name a file with --split"),
        (("evaluate", "--split", "test"), "no test split"),
        (("evaluate", "--split", "tset"), "did you mean 'test'?"),
        (("evaluate", "--split", "nowhere.tsv"), "nowhere.tsv: no such file"),
        (("evaluate", "--split", "{run}/../de.txt"), "too (task.target, task.dev_target"),
        (("evaluate", "--split", "{run}/../de.txt", "--target", "nowhere.en"), "nowhere.en: no such file"),
        (("evaluate", "--split", "nowhere.de", "--target", "{run}/../en.txt"), "nowhere.de: no such file"),
        (("evaluate", "--split", "{run}/../de.txt", "--target", "{run}/../de.txt"), "given as source and as target"),
        (("evaluate", "--split", "{run}/../de.txt", "--target", "{run}/run.toml"), "find where a line is missing"),
        (("evaluate", "--target", "{run}/../en.txt"), "the split dev has targets of its own"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    spells_anything: Path, capsys: Captured, arguments: tuple[object, ...], message: str
) -> None:
    command, *rest = (str(each).replace("{run}", str(spells_anything)) for each in arguments)
    assert message in refused(capsys, command, spells_anything, *rest)


@pytest.mark.parametrize("task", ["sequence_to_sequence", "toy"])
def test_two_files_are_scored_as_the_table_of_their_lines(task: str, tmp_path: Path, capsys: Captured) -> None:
    table = tables(tmp_path)
    if task == "toy":
        table["task"] = {"name": "toy", "rows": 9, "held_out": 3}
    else:  # columns are of tables, not of lines
        (tmp_path / "pairs.tsv").write_text("de\ten\nein hund\ta dog\nim gras\tin grass\n")
        table["task"] = {"name": task, "source": str(tmp_path / "pairs.tsv"), "holdout": 0.0}
        table["task"] |= {"source_column": "de", "target_column": "en"}
    run = headway.train(table, tmp_path / "run")
    pairs = [("d e", "e d"), ("g", "g"), ("e i n", "n i e")]
    header = "" if task == "toy" else "de\ten\n"
    (tmp_path / "more.tsv").write_text(header + "".join(f"{source}\t{target}\n" for source, target in pairs))
    for name, side in (("more.de.gz", 0), ("more.en.gz", 1)):
        (tmp_path / name).write_bytes(gzip.compress("".join(f"{pair[side]}\n" for pair in pairs).encode()))
    files = [tmp_path / "more.de.gz", tmp_path / "more.en.gz"]
    wanted = run.evaluate(str(tmp_path / "more.tsv"))
    assert wanted["sentences"] == 3 and run.evaluate(str(files[0]), target=files[1]) == wanted

    capsys.readouterr()
    assert run_command(["evaluate", str(run.path), "--split", str(files[0]), "--target", str(files[1])]) == 0
    assert f"chrF {wanted['chrf']:.1f}" in capsys.readouterr().out
    assert (run.path / "predictions/more.de.gz.txt").read_text().splitlines() == wanted["predictions"]


def test_a_bad_line_is_named_with_the_file_that_it_stands_in(trained: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "de").write_text("ein hund\ndas gras\n")
    (tmp_path / "en").write_text("a dog\nthe ☃\n")
    arguments = ["evaluate", str(trained), "--split", str(tmp_path / "de"), "--target", str(tmp_path / "en")]
    if "bpe" in str(trained):
        assert run_command(arguments) == 0
    else:
        assert f"{tmp_path / 'en'}:2: never seen in training: '☃'" in refused(capsys, *arguments)


def test_what_is_dropped_of_a_table_is_said(spells_anything: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "more.tsv").write_text("ein hund\ta dog\n\tnothing\ndas gras\tthe grass\n")
    copy = shutil.copytree(spells_anything, tmp_path / "run")
    capsys.readouterr()
    assert run_command(["evaluate", str(copy), "--split", str(tmp_path / "more.tsv")]) == 0
    assert "more.tsv: 1 pair with an empty side dropped (line 2)" in capsys.readouterr().err
    assert (copy / "predictions" / "more.tsv.txt").read_text().count("\n") == 2


def test_the_widest_beam_is_no_wider_than_the_vocabulary(spells_anything: Path, capsys: Captured) -> None:
    """What the refusal names can be had, and nothing above it."""
    widest = min(1000, len(headway.load(spells_anything).tokenizer))
    assert run_command(["predict", str(spells_anything), "--beam", str(widest), "ein hund"]) == 0
    message = refused(capsys, "predict", spells_anything, "--beam", widest + 1, "ein hund")
    assert f"--beam {widest + 1}: must be at most {widest:,}" in message
