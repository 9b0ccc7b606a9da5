"""The course's own commands, on files of a few lines and, where they are at hand, on the real ones."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headway import a5
from headway.configuration import load_settings
from headway.files import Ownership
from headway.text import Characters
from headway.training.checkpoint import weights

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def course(people: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the course's files under the course's names, and a course's model that is small."""
    corpus = people / "wiki.txt"
    corpus.write_text(corpus.read_text() + "Where? What? Who?\n")  # the characters of questions
    (people / "train.tsv").rename(people / "birth_places_train.tsv")
    (people / "dev.tsv").rename(people / "birth_dev.tsv")
    questions = [line.split("\t")[0] for line in (people / "birth_dev.tsv").read_text().splitlines()]
    (people / "birth_test_inputs.tsv").write_text("\n".join(questions) + "\n")
    monkeypatch.setattr(
        a5, "load_settings", lambda name, sets=(): load_settings(name, ["model.width=16", "model.layers=2", *sets])
    )
    monkeypatch.chdir(people)
    return people


def run(*arguments: str, variant: str = "vanilla") -> int:
    function, *options = arguments
    return a5.main(["run", function, variant, "wiki.txt", *options])


PRETRAIN = ("pretrain", "--writing_params_path", "pre.params", "--epochs", "2")
FINETUNE = ("finetune", "--writing_params_path", "fine.params", "--finetune_corpus_path", "birth_places_train.tsv")
EVALUATE = ("evaluate", "--reading_params_path", "fine.params", "--outputs_path", "out/dev.predictions")


@pytest.mark.parametrize("variant", ["vanilla", "synthesizer", "perceiver", "rope"])
def test_pretrain_finetune_evaluate(course: Path, capsys: Captured, variant: str) -> None:
    text = (course / "wiki.txt").read_text()
    assert run(*PRETRAIN, variant=variant) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"data has {len(text)} characters, {len(set(text)) + 2} unique."
    assert re.fullmatch(r"number of parameters: \d+", shown[1])
    assert [re.sub(r"\d\.\d+", "#", line) for line in shown[2:]] == [
        f"epoch {epoch} iter 0: train loss #. lr #e-03" for epoch in (1, 2)
    ]
    assert run(*FINETUNE, "--reading_params_path", "pre.params", variant=variant) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in shown[2:]] == [f"epoch {epoch} iter 0" for epoch in range(1, 11)]

    assert run(*EVALUATE, "--eval_corpus_path", "birth_dev.tsv", variant=variant) == 0
    score = re.search(r"^Correct: (\d).0 out of 4.0: (\d+.0)%$", capsys.readouterr().out, re.MULTILINE)
    assert score is not None
    expected = [line.split("\t")[1] for line in (course / "birth_dev.tsv").read_text().splitlines()]
    predicted = (course / "out" / "dev.predictions").read_text().splitlines()
    right = sum(ours == theirs for ours, theirs in zip(predicted, expected, strict=True))
    assert (int(score[1]), float(score[2])) == (right, 25.0 * right)

    assert run(*EVALUATE, "--eval_corpus_path", "birth_test_inputs.tsv", variant=variant) == 0
    shown_test = capsys.readouterr().out
    assert "Correct" not in shown_test and "%" not in shown_test and "no targets provided" in shown_test
    assert not list(course.glob("*.run"))


def test_finetuning_without_pretraining_takes_75_epochs(course: Path, capsys: Captured) -> None:
    assert run(*FINETUNE) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("epoch 75 iter 0: ")


def test_the_models_have_the_courses_sizes(real_data: Path, capsys: Captured, tmp_path: Path) -> None:
    """Before a missing file ends the command, its first two lines are the course's."""
    wiki = str(real_data / "birthplaces" / "wiki.txt")
    for variant, count in (("vanilla", 3_323_392), ("rope", 3_290_624)):
        options = ["--finetune_corpus_path", str(tmp_path / "none.tsv"), "--writing_params_path", str(tmp_path / "x")]
        assert a5.main(["run", "finetune", variant, wiki, *options]) == 2
        captured = capsys.readouterr()
        assert captured.out == f"data has 418352 characters, 256 unique.\nnumber of parameters: {count}\n"
        assert "none.tsv: no such file" in captured.err
    assert not list(tmp_path.iterdir())


# ---- the course's other scripts, on its real files


def test_dataset_namedata_prints_the_courses_rows(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert a5.main(["dataset", "namedata"]) == 0
    lines = capsys.readouterr().out.splitlines()
    question = "Where was Khatchig Mouradian born?"
    assert lines[1] == "x: " + f"{question}⁇Lebanon⁇".ljust(127, "□")
    assert lines[2] == "y: " + ("□" * (len(question) - 1) + "⁇Lebanon⁇").ljust(127, "□")
    assert len(lines) == 9 and all(len(line) == 130 for line in lines[1:])


def test_dataset_charcorruption_prints_rows_that_give_the_lines_back(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert a5.main(["dataset", "charcorruption"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    corpus = (real_data / "birthplaces" / "wiki.txt").read_text("utf-8").split("\n")
    for x, y, line in zip(lines[::2], lines[1::2], corpus, strict=False):
        prefix, suffix, hidden = x.removeprefix("x: ").rstrip("□").split("⁇")
        assert line.startswith(prefix + hidden + suffix) and hidden
        assert 4 <= len(prefix + hidden + suffix) <= 112
        assert len(x) == len(y) == 130 and y.removeprefix("y: ") == x.removeprefix("x: ")[1:] + "□"


def test_london_is_right_in_one_of_twenty(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert a5.main(["london_baseline"]) == 0
    assert capsys.readouterr().out == "Correct: 25.0 out of 500.0: 5.0%\n"


# ---- .params files


PARTS = {
    "ln1": "attention_norm",
    "ln2": "feed_forward_norm",
    "attn.key": "attention.key",
    "attn.query": "attention.query",
    "attn.value": "attention.value",
    "attn.proj": "attention.output",
    "mlp.0": "feed_forward.inner",
    "mlp.2": "feed_forward.output",
}


def pickled_params(path: Path, variant: str, **save: Any) -> dict[str, torch.Tensor]:
    """A file as the course's own code writes it, with the weights of the model that --convert should make of it."""
    torch.manual_seed(5)
    tokenizer = Characters.train([Path("wiki.txt").read_text()])
    model = a5.load_settings(f"birthplaces/course-{variant}").model.build(len(tokenizer))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = weights(model)
    theirs = {"tok_emb.weight": ours["embedding.weight"], "head.weight": ours["head.weight"]}
    for kind in ("weight", "bias"):
        theirs[f"ln_f.{kind}"] = ours[f"norm.{kind}"]
        for layer in ("blocks.0", "blocks.1"):
            for their_name, our_name in PARTS.items():
                theirs[f"{layer}.{their_name}.{kind}"] = ours[f"{layer}.{our_name}.{kind}"]
    if variant == "vanilla":
        theirs["pos_emb"] = ours["positions.table"][None]
    assert len(theirs) == len(ours)
    theirs |= {f"blocks.{layer}.attn.mask": torch.tril(torch.ones(1, 1, 128, 128)) for layer in (0, 1)}
    torch.save(theirs, path, **save)
    return ours


@pytest.mark.parametrize("variant", ["vanilla", "rope"])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_file_is_read_only_with_convert(course: Path, capsys: Captured, variant: str, zipped: bool) -> None:
    ours = pickled_params(course / "fine.params", variant, _use_new_zipfile_serialization=zipped)
    command = (*EVALUATE, "--eval_corpus_path", "birth_dev.tsv")
    assert run(*command, variant=variant) == 2
    assert "fine.params: a pickled file" in (shown := capsys.readouterr().err) and "add --convert" in shown
    assert not (course / "out").exists()
    assert run(*command, "--convert", variant=variant) == 0
    converted = (course / "out" / "dev.predictions").read_text()

    save_file(ours, course / "fine.params")
    assert run(*command, variant=variant) == 0
    assert (course / "out" / "dev.predictions").read_text() == converted
    assert converted.strip()


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("flag", [[], ["--convert"]])
def test_code_in_a_pickle_never_runs(course: Path, capsys: Captured, flag: list[str]) -> None:
    torch.save({"tok_emb.weight": Harmful()}, course / "fine.params")
    assert run(*EVALUATE, "--eval_corpus_path", "birth_dev.tsv", *flag) == 2
    shown = capsys.readouterr().err
    assert ("holds more than tensors" if flag else "add --convert") in shown
    assert not (course / "harm").exists() and "Traceback" not in shown


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"", b"not weights at all", b"\x80\x04garbage", b"PK\x03\x04 no zip"])
def test_a_damaged_file_is_refused(course: Path, capsys: Captured, content: bytes) -> None:
    (course / "fine.params").write_bytes(content)
    assert run(*EVALUATE, "--eval_corpus_path", "birth_dev.tsv", "--convert") == 2
    shown = capsys.readouterr().err
    assert "fine.params: " in shown and "damaged" in shown and "Traceback" not in shown


def test_weights_of_another_vocabulary_or_variant_are_refused(course: Path, capsys: Captured) -> None:
    assert run(*PRETRAIN) == 0
    with safe_open(course / "pre.params", framework="pt") as file:
        assert file.metadata()["format"] == "headway-a5"
    read = ("--reading_params_path", "pre.params")
    assert run(*FINETUNE, *read, variant="rope") == 2
    assert "pre.params: weights of the variant 'vanilla', not 'rope'" in capsys.readouterr().err
    (course / "wiki.txt").write_text((course / "wiki.txt").read_text().replace("L", "Z"))  # as many, but others
    assert run(*FINETUNE, *read) == 2
    assert "pre.params: trained with other characters than this corpus has" in capsys.readouterr().err
    assert not (course / "fine.params").exists() and not list(course.glob("*.run"))


# ---- interruptions


def test_wherever_the_disk_is_full_the_command_goes_on_when_there_is_room(
    course: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("pretrain", "--writing_params_path", "new/pre.params", "--epochs", "2")
    plain, writes, room = os.fsync, [0], [10**9]

    def fsync(handle: int) -> None:
        writes[0] += 1
        if writes[0] > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        plain(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    assert run(*command) == 0
    whole, total = load_file(course / "new" / "pre.params"), writes[0]
    for enough in range(total):
        shutil.rmtree(course / "new")
        capsys.readouterr()
        writes[0], room[0] = 0, enough
        code, shown = run(*command), capsys.readouterr().err
        if enough == 0:
            way = "make room, or give --writing_params_path another file"
            assert f"new/pre.params.run: cannot be written (No space left on device); {way}\n" in shown
            assert not (course / "new").exists()
        if code != 0:  # 0: only directories were left to sync, which may fail
            assert code == 2 and re.search(r"^headway\.a5: .*No space left on device.*; make room", shown, re.MULTILINE)
            assert not (course / "new" / "pre.params").exists()
            room[0] = 10**9
            assert run(*command) == 0
        found = load_file(course / "new" / "pre.params")
        assert all(torch.equal(found[name], whole[name]) for name in whole)
        assert not list((course / "new").glob("*.run"))


def test_an_interrupted_command_goes_on_when_it_is_typed_again(
    course: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("pretrain", "--writing_params_path", "pre.params", "--epochs", "4")
    assert run(*command) == 0
    whole = load_file(course / "pre.params")
    lines = capsys.readouterr().out.splitlines()
    (course / "pre.params").unlink()

    plain = a5.epoch_lines

    def stopping(*arguments: Any) -> Any:
        show = plain(*arguments)

        def stop(record: dict[str, Any]) -> None:
            show(record)
            if record["step"] == 2:
                os.kill(os.getpid(), signal.SIGINT)

        return stop

    monkeypatch.setattr(a5, "epoch_lines", stopping)
    assert run(*command) == 130
    captured = capsys.readouterr()
    assert "stopped after step 2, state saved; type the command again to go on" in captured.err
    assert not (course / "pre.params").exists()
    monkeypatch.setattr(a5, "epoch_lines", plain)

    assert run(*command, "--pretrain_lr", "1e-3") == 2
    assert "pre.params.run: left by an interrupted command" in capsys.readouterr().err
    corpus = (course / "wiki.txt").read_text()
    (course / "wiki.txt").write_text(corpus.replace("Oslo", "Ools"))
    assert run(*command) == 2
    (course / "wiki.txt").write_text(corpus)
    with Ownership(course / "pre.params.run"):
        assert run(*command) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err

    assert run(*command) == 0
    assert captured.out.splitlines() + capsys.readouterr().out.splitlines()[2:] == lines
    again = load_file(course / "pre.params")
    assert whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole)
    assert not list(course.glob("*.run"))


def test_a_directory_that_others_use_is_left_as_it_is(course: Path, capsys: Captured) -> None:
    """But for what a command leaves that was killed before it had begun."""
    command = ("pretrain", "--writing_params_path", "pre.params", "--epochs", "1")
    used = course / "pre.params.run"
    used.mkdir()
    for name in (".notes.123.tmp", "thesis.txt"):
        (used / name).write_text("years of work")
    assert run(*command) == 2
    assert "pre.params.run: exists and was not left by this command; move it" in capsys.readouterr().err
    assert sorted(os.listdir(used)) == [".notes.123.tmp", "thesis.txt"]
    (used / "thesis.txt").unlink()
    (used / ".lock").touch()
    assert run(*command) == 0 and not used.exists()


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pretrain",), "pretrain needs --writing_params_path"),
        (("finetune",), "finetune needs --writing_params_path and --finetune_corpus_path"),
        (("evaluate",), "evaluate needs --reading_params_path and --eval_corpus_path and --outputs_path"),
        ((*PRETRAIN, "--pretrain_lr", "0"), "--pretrain_lr 0.0: must be above 0"),
        ((*FINETUNE, "--finetune_lr", "nan"), "--finetune_lr nan: must be above 0"),
        ((*PRETRAIN[:-1], "0"), "--epochs 0: must be at least 1"),
        ((*PRETRAIN, "--bottleneck_dim", "0"), "--bottleneck_dim 0: must be at least 1"),
        ((*PRETRAIN, "--seed", "-1"), "--seed -1: must be from 0"),
        ((*PRETRAIN, "--seed", str(2**64)), "must be from 0"),
        ((*FINETUNE, "--reading_params_path", "none.params"), "none.params: no such file"),
        ((*EVALUATE[:2], "none.params", *EVALUATE[3:], "--eval_corpus_path", "x.tsv"), "none.params: no such file"),
        (("pretrain", "--writing_params_path", "."), "is a directory"),
        (("pretrain", "--writing_params_path", "wiki.txt/x"), "wiki.txt/x.run: cannot be written (Not a directory)"),
        ((*PRETRAIN, "--device", "cuda"), "cuda"),
    ],
)
def test_wrong_options_are_named(course: Path, capsys: Captured, arguments: tuple[str, ...], message: str) -> None:
    before = sorted(course.iterdir())
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert sorted(course.iterdir()) == before


def test_bad_questions_leave_nothing_that_stands_in_the_way(course: Path, capsys: Captured) -> None:
    good = (course / "birth_places_train.tsv").read_text()
    for bad, message in (
        ("Where was Ada born?\n", ":1: 1 column where 2 are wanted"),
        (f"Where was {'Ada ' * 40}born?\tOslo\n", ":1: question and answer have"),
        ("Wo ist Ünal?\tOslo\n", ":1: never seen in training: 'Ü' (U+00DC)"),
    ):
        (course / "birth_places_train.tsv").write_text(bad)
        assert run(*FINETUNE, "--epochs", "1") == 2
        assert f"birth_places_train.tsv{message}" in capsys.readouterr().err
        assert not list(course.glob("fine.params*"))
    (course / "birth_places_train.tsv").write_text(good)
    assert run(*FINETUNE, "--epochs", "1") == 0


def test_unknown_words_of_the_command_leave_with_2(capsys: Captured) -> None:
    for arguments in (
        [],
        ["run"],
        ["run", "train", "vanilla", "x"],
        ["run", "pretrain", "bert", "x"],
        ["dataset", "x"],
    ):
        with pytest.raises(SystemExit) as left:
            a5.main(arguments)
        assert left.value.code == 2
    assert (
        "invalid choice: 'bert' (choose from 'vanilla', 'synthesizer', 'perceiver', 'rope')" in capsys.readouterr().err
    )


def test_a_folder_of_the_users_is_never_taken_over(people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(people)
    (people / "mine.params.run").mkdir()
    (people / "mine.params.run" / "notes.txt").write_text("precious")
    arguments = ["run", "finetune", "vanilla", "wiki.txt", "--finetune_corpus_path", "train.tsv", "--epochs", "1"]
    assert a5.main([*arguments, "--writing_params_path", "mine.params"]) == 2
    assert (people / "mine.params.run" / "notes.txt").read_text() == "precious"


def test_the_file_to_evaluate_may_have_any_name(people: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(people)
    with open("wiki.txt", "a") as corpus:
        corpus.write("What? Where? .\n")  # the corpus must have every character of the questions
    arguments = ["run", "finetune", "vanilla", "wiki.txt", "--finetune_corpus_path", "train.tsv", "--epochs", "1"]
    assert a5.main([*arguments, "--writing_params_path", "v.params"]) == 0
    (people / "dev").write_text("Where was Ada Lund born?\tOslo\n")
    asking = [
        "run",
        "evaluate",
        "vanilla",
        "wiki.txt",
        "--reading_params_path",
        "v.params",
        "--outputs_path",
        "out.txt",
    ]
    assert a5.main([*asking, "--eval_corpus_path", "dev"]) == 0
    assert "out of 1.0" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["dataset charcorruption", "london_baseline"])
def test_a_reader_that_has_seen_enough_is_no_error(real_data: Path, command: str) -> None:
    """As `| head -1` is; here nobody reads at all."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as unread:
        done = subprocess.run(
            [sys.executable, "-m", "headway.a5", *command.split()],
            stdout=unread,
            stderr=subprocess.PIPE,
            env=os.environ | {"HEADWAY_DATA": str(real_data)},
            check=False,
        )
    assert done.returncode == 0 and b"Traceback" not in done.stderr and b"Broken" not in done.stderr
