"""What a user types: help at once, exit codes, and each command from its arguments to what it prints."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import headway
from headway import making
from headway.cli import loading, run_command
from headway.console import Terminal
from headway.data import DATA_SETS, DataFile, DataSet
from headway.errors import Interrupted, UserError
from headway.files import is_unread
from headway.tasks import QuestionAnswering
from headway.text.preparation import prepare
from headway.training.loop import Trainer
from tests.training.test_checkpoint import Said
from tests.training.test_resume import StopAt

COMMANDS = ["", "demo", "train", "evaluate", "predict", "compare", "inspect", "lab", "watch", "scale"]
COMMANDS += ["data", "data list", "data get", "data check", "data prepare"]
CALL = [sys.executable, "-m", "headway"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that answers questions, beside its data."""
    folder = tmp_path_factory.mktemp("answers")
    lines = [f"Where was {name} born?\t{town}\n" for name in ("Ada", "Bo", "Cy", "Di") for town in ("Oslo", "Rome")]
    (folder / "train.tsv").write_text("".join(lines))
    (folder / "dev.tsv").write_text("".join(lines[:4]))
    files = {"questions": str(folder / "train.tsv"), "dev": str(folder / "dev.tsv")}
    return train(folder, {"name": "question_answering", "longest_answer": 4, **files})


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that continues text."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "notes.txt").write_text("the cat sat on the mat\n" * 20)
    return train(folder, {"name": "language_modelling", "corpus": str(folder / "notes.txt")})


def train(folder: Path, task: dict[str, object]) -> Path:
    model = {"width": 16, "layers": 1, "heads": 2, "block": 32}
    training = {"steps": 3, "batch_size": 4, "log_every": 1, "evaluate_every": 2}
    return headway.train({"task": task, "model": model, "training": training}, folder / "run").path


def type_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


# ---- help and exit codes


def test_help_is_instant_and_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from headway.cli import run_command\n"
        f"for command in {COMMANDS}:\n"
        "    assert run_command([*command.split(), '--help']) == 0, command\n"
        "loaded = {'torch', 'numpy', 'matplotlib', 'headway.run'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: headway") == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_comes_in_under_a_second(command: str) -> None:
    def seconds() -> float:
        """Of the processor, which do not depend on what else the machine does."""
        before = os.times()
        subprocess.run([*CALL, *command.split(), "--help"], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert seconds() < 1 or seconds() < 1


def test_the_version_is_printed(capsys: Captured) -> None:
    assert run_command(["--version"]) == 0
    assert capsys.readouterr().out == f"headway {headway.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "headway: No such command 'bogus'; see headway --help"),
        (["evaluate"], "headway: Missing argument 'RUN'; see headway evaluate --help"),
        (["train", "--bogus"], "see headway train --help"),
        (["predict", "x", "--limit", "0"], "see headway predict --help"),
        (["predict", "x", "--seed", str(2**64)], "see headway predict --help"),
        (["predict", "nowhere", "--temperature", "nan"], "headway: temperature (nan) must be 0 (greedy) or above"),
        (["data", "get", "wolrd"], "headway: no data set 'wolrd'; did you mean 'world'?"),
        (["data", "get", "world", "--people", "0"], "people (0) must be at least 4"),
        (["data", "get", "shakespeare", "--people", "9"], "takes no world settings"),
        (["data", "check", "--errors", "ignore", "x"], "--errors ignore: must be strict or replace"),
        (["train", "world/demo", "--set", "model.width"], "--set 'model.width': not section.key=value"),
    ],
)
def test_wrong_arguments_leave_with_2_and_one_message(arguments: list[str], message: str, capsys: Captured) -> None:
    assert run_command(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.startswith("headway: ") and ".;" not in shown and "Traceback" not in shown


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_no_arguments_bring_the_help(arguments: list[str], capsys: Captured) -> None:
    assert run_command(arguments) == 2
    assert capsys.readouterr().err.startswith("Usage: headway")


def test_a_fault_of_the_program_shows_its_traceback_and_leaves_with_1() -> None:
    script = (
        "import headway.cli, headway.commands\n"
        "headway.commands.data_list_command = lambda: 1 / 0\n"
        "import sys; sys.argv = ['headway', 'data', 'list']; headway.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_ctrl_c_leaves_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headway.commands.data_list_command", interrupted)
    assert run_command(["data", "list"]) == 130
    assert capsys.readouterr().err == "headway: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*CALL, "train", "--recipes"], stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("stream", ["stderr", "both"])
def test_a_reader_that_leaves_does_not_end_the_training(run_file: Path, stream: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    streams = {"stdout": writing if stream == "both" else subprocess.PIPE, "stderr": writing}
    done = subprocess.run([*CALL, "train", run_file, "--out", "run"], **streams, cwd=run_file.parent, check=False)
    os.close(writing)
    run = headway.load(run_file.parent / "run")
    assert done.returncode == 0 and run.state.done


def test_a_terminal_that_cannot_show_a_character_is_no_error() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*CALL, "train", "Zürich"], capture_output=True, env=environment, check=False)
    assert done.returncode == 2
    assert b"Z\\xfcrich" in done.stderr and b"Traceback" not in done.stderr


# ---- train


def test_training_prints_plain_lines_where_there_is_no_terminal(run_file: Path, capsys: Captured) -> None:
    out = run_file.parent / "out"
    assert run_command(["train", str(run_file), "--out", str(out), "--set", "training.steps=2"]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(rf"{out}: step 8, 0:\d\d of training, dev accuracy \d+.\d% \(\d of 4\)\n", captured.out)
    assert "\x1b" not in captured.err and "\r" not in captured.err
    assert re.search(r"^pretraining: step 6/6  loss \d", captured.err, re.MULTILINE)
    assert headway.load(out).settings.training.steps == 2


def test_without_out_every_run_gets_a_directory_of_its_own(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(run_file.parent)
    sets = ["--set", "training.steps=1", "--set", "pretraining.training.steps=1"]
    for name in ("tiny", "tiny-2"):
        assert run_command(["train", "tiny.toml", *sets]) == 0
        assert capsys.readouterr().out.startswith(f"runs/{name}: step 2")


def test_an_interrupted_run_is_resumed_as_its_message_says(run_file: Path) -> None:
    """Ctrl-C in a process of its own; the command that the message names finishes the run."""
    command = [*CALL, "train", "tiny.toml", "--set", "training.steps=100000", "--set", "training.evaluate_every=5"]
    process = subprocess.Popen(command, cwd=run_file.parent, stderr=subprocess.PIPE, text=True)
    metrics = run_file.parent / "runs" / "tiny" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while (
        time.monotonic() < deadline
        and process.poll() is None
        and not (metrics.exists() and '"training"' in metrics.read_text())
    ):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    stopped = re.search(
        r"stopped after step ([\d,]+), state saved.*; go on with: headway (train runs/tiny --resume)", shown
    )
    assert stopped is not None, shown
    step = int(stopped[1].replace(",", ""))
    assert headway.load(run_file.parent / "runs/tiny").state.step == step

    saved = run_file.parent / "runs" / "tiny" / "run.toml"
    saved.write_text(saved.read_text().replace("steps = 100000", f"steps = {step - 3}"))  # 6 of it were pretraining
    done = subprocess.run(
        [*CALL, *stopped[2].split(), "--accept-changes"],
        cwd=run_file.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"runs/tiny: step {step + 3:,}, ")


def test_runs_that_begin_in_the_same_moment_have_a_directory_each(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first name was free when the run looked for one, and taken when its data were read."""
    monkeypatch.chdir(run_file.parent)
    build, others = making.build_model, []

    def slow(*given: Any) -> Any:
        if not others:
            others.append(None)
            others.append(headway.train("tiny.toml"))
        return build(*given)

    monkeypatch.setattr(making, "build_model", slow)
    assert headway.train("tiny.toml").path == Path("runs/tiny-2")
    assert others[1].path == Path("runs/tiny") and others[1].state.done


def test_runs_that_lie_on_a_disk_that_is_not_there_are_refused(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(run_file.parent)
    Path("runs").symlink_to("not-mounted")
    assert run_command(["train", "tiny.toml"]) == 2
    assert "headway: runs/tiny: cannot be made (File exists); choose another with --out" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_not_one_to_go_on_with(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was killed before anything was written has left it."""
    monkeypatch.chdir(run_file.parent)
    Path("runs/tiny").mkdir(parents=True)
    report = Said()
    assert headway.train("tiny.toml", report=report).path == Path("runs/tiny-2")
    assert "runs/tiny is there already; this is runs/tiny-2" in report.lines


def test_a_folder_in_place_of_a_file_of_the_run_is_named(run_file: Path) -> None:
    run = headway.train(run_file, run_file.parent / "run")
    (run.path / "tokenizer.json").unlink()
    (run.path / "tokenizer.json" / "more").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"run/tokenizer\.json: Is a directory; mend that and go on with: headway train"
    ):
        headway.train(run.path, resume=True)


def test_a_file_is_scored_as_it_is_to_be_read(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.txt").write_text("the cat sat on the mat\n" * 40)
    (tmp_path / "table.csv").write_text("id,body\n1,the cat sat\n2,on the mat\n")
    out = train(tmp_path, {"name": "language_modelling", "corpus": str(tmp_path / "notes.txt")})
    command = ["evaluate", str(out), "--split", str(tmp_path / "table.csv")]
    assert run_command(command) == 2
    assert "task.column" in capsys.readouterr().err
    assert run_command([*command, "--set", "task.column=body"]) == 0
    assert run_command([*command, "--set", "model.width=8"]) == 2
    assert "--set model.width=8: a run that is there is opened with other settings of [task] alone" in (
        capsys.readouterr().err
    )
    (tmp_path / "short.txt").write_text("a\n")
    assert run_command(["evaluate", str(out), "--split", str(tmp_path / "short.txt")]) == 2
    assert "short.txt: too short to be measured; name another file with --split" in capsys.readouterr().err


def test_the_checkpoint_that_is_taken_is_named(answers: Path, tmp_path: Path, capsys: Captured) -> None:
    run = shutil.copytree(answers, tmp_path / "run")
    (max((run / "checkpoints").iterdir()) / "model.safetensors").write_bytes(b"damaged")
    assert run_command(["evaluate", str(run)]) == 0
    assert f"{run}: the weights are those of step 2\n" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_an_output_that_is_full_is_not_a_run_to_go_on_with(answers: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*CALL, "predict", str(answers), "Where was Ada born?"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2 and "the output: No space left on device" in done.stderr
    assert "--resume" not in done.stderr and "Traceback" not in done.stderr


def test_what_the_package_offers_is_listed() -> None:
    assert {"train", "load", "Run", "nn"} <= set(dir(headway))


def test_a_run_goes_on_in_its_own_directory(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Elsewhere it would begin anew, and its steps would be lost to whoever took that for going on."""
    monkeypatch.chdir(run_file.parent)
    assert run_command(["train", "tiny.toml", "--out", "my run"]) == 0
    capsys.readouterr()
    assert run_command(["train", "my run", "--resume", "--out", "other"]) == 2
    shown = capsys.readouterr().err
    assert "--out other: there is no run in it to go on with" in shown and "cp -r 'my run'/. other" in shown
    assert run_command(["train", "my run/run.toml", "--resume", "--out", "other"]) == 2
    with pytest.raises(UserError, match="there is no run in it to go on with"):
        headway.train("my run", "other", resume=True)
    assert not Path("other").exists()
    assert run_command(["train", "my run", "--resume", "--out", "my run"]) == 0
    assert headway.train("my run", resume=True).path == Path("my run")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("bithplaces/best", "did you mean 'birthplaces/best'?"),
        ("runs/tinny", "did you mean 'runs/tiny'?"),
        ("runs/another", "'runs/another' is neither a recipe nor a run file or directory; known: runs/tiny, "),
        (f"{'a' * 300}/x", "is neither a recipe nor a run file"),
        ("/nowhere/run", "'/nowhere/run' is neither"),
        ("tiny.tml", "did you mean 'tiny.toml'?"),
        ("tinny.toml", "tinny.toml: no such run file; did you mean 'tiny.toml'?"),
    ],
)
def test_a_source_that_is_not_there_gets_a_suggestion(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, source: str, words: str
) -> None:
    monkeypatch.chdir(run_file.parent)
    (run_file.parent / "runs" / "tiny").mkdir(parents=True)
    (run_file.parent / "runs" / "tiny" / "run.toml").write_text(run_file.read_text())
    assert run_command(["train", source]) == 2
    assert words in capsys.readouterr().err


def test_a_score_that_is_no_number_is_told(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    headway.train(run_file, run_file.parent / "run")
    plain = QuestionAnswering.evaluate
    spoilt = {"accuracy": float("nan")}
    monkeypatch.setattr(QuestionAnswering, "evaluate", lambda *given, **more: plain(*given, **more) | spoilt)
    assert run_command(["evaluate", str(run_file.parent / "run")]) == 0
    assert "accuracy is no number: the weights are spoilt" in capsys.readouterr().err


def test_what_somebody_elses_file_says_is_not_ours_to_mend(run_file: Path, tmp_path: Path) -> None:
    def watch(record: dict[str, Any]) -> None:
        Path("/nowhere/at/all").read_text()

    with pytest.raises(FileNotFoundError):
        headway.train(run_file, tmp_path / "run", watch=watch)


def test_what_the_system_does_not_permit_is_no_fault(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def refused(*given: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "closed/notes.txt")

    monkeypatch.setattr("headway.making.refuse_pipes", refused)
    assert run_command(["train", str(run_file)]) == 2
    assert "closed/notes.txt: Permission denied; check its owner and mode" in capsys.readouterr().err


def test_the_way_to_go_on_can_be_pasted(run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.chdir(run_file.parent)
    with monkeypatch.context() as patch:
        record = Trainer.write

        def stop(self: Trainer, line: dict[str, Any]) -> None:
            record(self, line)
            if line["step"] == 8:
                os.kill(os.getpid(), signal.SIGINT)

        patch.setattr(Trainer, "write", stop)
        assert run_command(["train", "tiny.toml", "--out", "my notes"]) == 130
    way = capsys.readouterr().err.rsplit("go on with: headway ", 1)[1]
    assert way == "train 'my notes' --resume\n"
    assert run_command(shlex.split(way)) == 0


def test_ctrl_c_waits_while_modules_are_loaded() -> None:
    """An import that is broken off leaves half a module behind."""
    before, seen = signal.getsignal(signal.SIGINT), []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), loading():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            seen.append("loaded")
        assert seen and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with loading():
            pass
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's job in the background has it
        with loading():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_does_not_wait_for_modules() -> None:
    code = (
        "import os, signal, time\n"
        "from headway.cli import loading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with loading():\n"
        "    for _ in range(2):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.05)\n"
        "    print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_stopped_run_is_scored_by_its_best_checkpoint_too(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(run_file.parent)
    plain, values = QuestionAnswering.evaluate, iter([0.1, 0.9, 0.2, 0.3])
    with monkeypatch.context() as patch:
        patch.setattr(
            QuestionAnswering, "evaluate", lambda *given, **more: plain(*given, **more) | {"accuracy": next(values)}
        )
        with pytest.raises(Interrupted):
            headway.train(run_file, "run", ["training.evaluate_every=1"], watch=StopAt(9))
    run = headway.load("run")
    assert (run.step, run.state.step, run.state.done) == (8, 9, False)
    assert run_command(["evaluate", "run"]) == 0
    assert capsys.readouterr().out.startswith("run (the best checkpoint, of step 8): dev: accuracy ")


def test_resume_finds_the_run_that_a_run_file_was_trained_in(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Also where the user's own file is called run.toml: that does not make its folder a run directory."""
    monkeypatch.chdir(run_file.parent)
    own = run_file.rename("run.toml")
    name = run_file.parent.name
    assert run_command(["train", "run.toml"]) == 0
    assert run_command(["train", "run.toml"]) == 0
    before = set(Path().iterdir())
    capsys.readouterr()
    for source, found in (("run.toml", f"{name}-2"), (f"runs/{name}", name), (f"runs/{name}/run.toml", name)):
        assert run_command(["train", source, "--resume"]) == 0
        assert capsys.readouterr().out.startswith(f"runs/{found}: step 11")
    assert set(Path().iterdir()) == before and own.exists()


# ---- evaluate


def test_evaluate_scores_a_split_and_writes_predictions(answers: Path, capsys: Captured) -> None:
    assert run_command(["evaluate", str(answers)]) == 0
    shown = capsys.readouterr().out
    assert re.match(rf"{answers}: dev: accuracy \d+.\d% \(\d of 4\)\n", shown)
    assert len((answers / "predictions" / "dev.txt").read_text().splitlines()) == 4


def test_where_predictions_cannot_be_kept_nothing_is_scored(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    run = shutil.copytree(answers, tmp_path / "run")
    shutil.rmtree(run / "predictions", ignore_errors=True)
    (run / "predictions").write_text("in the way")
    with monkeypatch.context() as patch:
        patch.setattr(headway.Run, "evaluate", lambda *all, **options: pytest.fail("it was scored"))
        assert run_command(["evaluate", str(run)]) == 2
    assert "name a file for them with --out" in capsys.readouterr().err
    assert run_command(["evaluate", str(run), "--out", str(tmp_path / "mine.txt")]) == 0


def test_words_that_are_sentences_are_told(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "a.txt").write_text("今天天气很好。\n我们去公园。\n" * 20)
    (tmp_path / "run.toml").write_text('[task]\nname = "language_modelling"\ncorpus = "a.txt"\n[training]\nsteps = 0\n')
    command = ["train", str(tmp_path / "run.toml"), "--set", "model.width=16", "--set", "model.block=16", "--out"]
    for kind, told in (("words", True), ("characters", False)):
        assert run_command([*command, str(tmp_path / kind), "--set", f"tokenizer.kind={kind}"]) == 0
        assert ("tokenizer: 2 of " in capsys.readouterr().err) == told


def test_scores_under_other_settings_say_so(answers: Path, capsys: Captured) -> None:
    whole = headway.load(answers).evaluate("dev")
    few = answers.parent / "few.tsv"
    few.write_text("".join((answers.parent / "dev.tsv").read_text().splitlines(keepends=True)[:2]))
    setting = f"task.dev={few}"
    assert headway.load(answers, overrides=setting).evaluate("dev")["questions"] == 2 != whole["questions"]
    assert run_command(["evaluate", str(answers), "--set", setting, "--out", str(answers.parent / "few.txt")]) == 0
    assert json.loads((answers.parent / "few.json").read_text())["set"] == [setting]
    assert run_command(["evaluate", str(answers)]) == 0
    assert "set" not in json.loads((answers / "predictions" / "dev.json").read_text())


def test_what_is_held_out_later_was_learned(text: Path, capsys: Captured) -> None:
    for share, told in (("0.5", True), ("0.01", False)):
        assert run_command(["evaluate", str(text), "--set", f"task.holdout={share}"]) == 0
        said = f"task.holdout: {share} here, 0.1 in training: what lies between was learned"
        assert (said in capsys.readouterr().err) == told


@pytest.mark.parametrize("with_answers", [True, False])
def test_evaluate_scores_a_file(answers: Path, tmp_path: Path, capsys: Captured, with_answers: bool) -> None:
    answer = "\tOslo" if with_answers else ""
    (tmp_path / "more.tsv").write_text(f"Where was Ada born?{answer}\nWhere was Bo born?{answer}\n")
    out = tmp_path / "new" / "predictions.txt"
    assert run_command(["evaluate", str(answers), "--split", str(tmp_path / "more.tsv"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert (
        ("accuracy" in shown and " of 2)" in shown)
        if with_answers
        else "2 questions without answers (one column), so no accuracy" in shown
    )
    assert len(out.read_text().splitlines()) == 2


def test_evaluate_measures_a_language_model(text: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run_command(["evaluate", str(text), "--device", "cpu"]) == 0
    assert re.search(r"dev: loss \d.\d+, perplexity \d+.\d+, \d.\d+ bits a byte", capsys.readouterr().out)
    (tmp_path / "other.txt").write_text("the mat sat on the cat")
    assert run_command(["evaluate", str(text), "--split", str(tmp_path / "other.txt")]) == 0
    assert run_command(["evaluate", str(text), "--out", str(tmp_path / "x")]) == 2
    assert "makes no predictions to write" in capsys.readouterr().err


# ---- predict


def test_predict_answers_arguments_in_their_order(answers: Path, capsys: Captured) -> None:
    questions = ["Where was Ada born?", "Where was Bo born?"]
    assert run_command(["predict", str(answers), *questions, "--alternatives", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(r".*\t\d+.\d%\t\(else .+ \d+%, .+ \d+%\)", line) for line in lines)
    assert run_command(["predict", str(answers), questions[0], "--alternatives", "0"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == lines[0].rsplit("\t", 1)[0]


def test_an_answer_with_line_ends_stays_on_its_line(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("headway.tasks.QuestionAnswering.text", lambda self, tokens: "Os\nlo\t")
    assert run_command(["evaluate", str(answers)]) == 0
    assert (answers / "predictions" / "dev.txt").read_text() == "Os lo \n" * 4
    capsys.readouterr()
    assert run_command(["predict", str(answers), "Where was Ada born?"]) == 0
    assert capsys.readouterr().out.startswith("Os lo \t")


def test_predict_answers_standard_input_line_by_line(
    answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    type_in(monkeypatch, b"\xef\xbb\xbfWhere was Ada born?\r\n\nWhere was Bo born?")
    assert run_command(["predict", str(answers)]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == 4 and lines[0] and lines[1] == "" and lines[2] and lines[3] == ""


def test_predict_continues_text(text: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    command = ["predict", str(text), "--limit", "9", "--temperature", "0.9", "--top-k", "5", "--top-p", "0.9"]
    assert run_command([*command, "the cat", "--seed", "3"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("the cat")
    assert run_command([*command, "the cat", "--seed", "3"]) == 0
    assert capsys.readouterr().out == first
    type_in(monkeypatch, b"\nthe\n")
    assert run_command(command) == 0
    assert capsys.readouterr().out.startswith("\nthe")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"the\ncaf\xe9\n", "standard input:2: not UTF-8 at byte 4 (0xe9)"),
        ("the\ncafé\n".encode(), "standard input:2: never seen in training: 'f' (U+0066), 'é' (U+00E9)"),
    ],
)
def test_a_bad_line_of_standard_input_is_named(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, data: bytes, message: str
) -> None:
    type_in(monkeypatch, data)
    assert run_command(["predict", str(text), "--limit", "2"]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out.startswith("the") and "caf" not in captured.out


VALUES = {
    "beam": 2,
    "best": 2,
    "alternatives": 3,
    "limit": 300,
    "temperature": 2.0,
    "top-k": 3,
    "top-p": 0.5,
    "seed": 0,
}


@pytest.mark.parametrize("option", VALUES)
def test_an_option_of_predict_means_something_to_one_task_and_is_refused_by_the_others(
    answers: Path, text: Path, translations: list[Path], capsys: Captured, option: str
) -> None:
    """Also where its value is the one that counts without it."""
    inputs = {answers: "Where was Ada born?", text: "the cat", translations[0]: "a b c"}
    codes = []
    for run, given in inputs.items():
        extra = ["--beam", "2"] if option == "best" and run == translations[0] else []
        codes.append(run_command(["predict", str(run), given, f"--{option}", str(VALUES[option]), *extra]))
        captured = capsys.readouterr()
        message = f"headway: --{option}: no meaning for a run whose task is {headway.load(run).settings.task.name}; its"
        assert (message in captured.err and not captured.out) if codes[-1] else captured.out
    assert sorted(codes) == [0, 2, 2]


def test_every_option_without_a_meaning_is_named(translations: list[Path], capsys: Captured) -> None:
    options = ["--limit", "5", "--top-k", "3", "--alternatives", "2", "--seed", "4", "--temperature", "2"]
    assert run_command(["predict", str(translations[0]), "a b", *options]) == 2
    message = capsys.readouterr().err
    assert all(option in message.split(": no meaning")[0] for option in options[::2])
    assert message.endswith("its own options: --beam, --best\n")


def test_a_run_without_predictions_says_so(people: Path, capsys: Captured) -> None:
    run = train(people, {"name": "span_corruption", "corpus": str(people / "wiki.txt")})
    assert run_command(["predict", str(run), "Ada"]) == 2
    assert "a run whose task is span_corruption makes no predictions" in capsys.readouterr().err


# ---- compare


@pytest.mark.parametrize(("name", "begins"), [("plot.png", b"\x89PNG"), ("new/plot.svg", b"<?xml")])
def test_compare_shows_a_table_and_writes_a_plot(
    answers: Path, text: Path, tmp_path: Path, capsys: Captured, name: str, begins: bytes
) -> None:
    assert run_command(["compare", str(answers), str(text), "--out", str(tmp_path / name)]) == 0
    captured = capsys.readouterr()
    rows = captured.out.splitlines()
    assert rows[0].split() == ["run", "task", "parameters", "steps", "time", "tokens", "dev"]
    assert (
        rows[2].startswith(str(answers))
        and "accuracy" in rows[2]
        and rows[3].startswith(str(text))
        and "loss" in rows[3]
    )
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert "Warning" not in captured.err


@pytest.mark.parametrize(("name", "shown"), [("_run", "./_run"), (r"$\wrong$", r"$\wrong$"), ("a<b", "a&lt;b")])
def test_a_run_is_in_the_legend_whatever_its_name(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(text, name)
    assert run_command(["compare", name, "--out", "plot.svg"]) == 0
    assert f"<!-- {shown} -->" in Path("plot.svg").read_text("utf-8")


@pytest.fixture(scope="module")
def translations(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that translate."""
    folder = tmp_path_factory.mktemp("translations")
    task = {"name": "toy", "rows": 30, "held_out": 30, "shortest": 4, "rows_up_to": 14}
    models = [{"kind": "rnn_seq2seq", "hidden": 8}, {"kind": "encoder_decoder", "layers": 1, "heads": 2}]
    tables = [
        {
            "tokenizer": {"kind": "words"},
            "model": {"width": 8, "block": 16, **model},
            "task": task,
            "training": {"steps": 3, "log_every": 1, "batch_size": 4},
        }
        for model in models
    ]
    return [headway.train(each, folder / each["model"]["kind"]).path for each in tables]


def test_translations_are_compared_on_a_split_that_all_have(
    translations: list[Path], text: Path, tmp_path: Path, capsys: Captured
) -> None:
    """Those that were scored are not scored again, unless their weights are others now."""
    command = ["compare", *map(str, translations), str(text), "--out", str(tmp_path / "plot.svg")]
    assert run_command(["evaluate", str(translations[0])]) == 0
    capsys.readouterr()
    assert run_command(command) == 0
    captured = capsys.readouterr()
    assert captured.err == f"{translations[1]}: scoring dev, which headway evaluate has not done\n"
    rows = captured.out.splitlines()
    header = "run task parameters steps time tokens dev dev_BLEU dev_chrF"
    assert rows[0].split() == header.replace("_", " ").split(" ")
    found = [json.loads((path / "predictions" / "dev.json").read_text()) for path in translations]
    for row, each in zip(rows[2:4], found, strict=True):
        assert row.split()[-2:] == [f"{each['bleu']:.1f}", f"{each['chrf']:.1f}"] and "loss" in row
    assert rows[4].startswith(str(text)) and rows[4].split()[-2:] == ["–", "–"]
    assert rows[6].split() == ["dev", "BLEU", "by", "words", "of", "the", "source", "1–8", "9–12", "13–16"]
    for row, each in zip(rows[8:10], found, strict=True):
        assert row.split()[1:] == [f"{bucket['bleu']:.1f}" for bucket in each["by_length"]]
    drawn = (tmp_path / "plot.svg").read_text()
    assert all(label in drawn for label in ("dev BLEU", "words of the source", "dev loss"))
    assert "10^{" not in drawn  # losses are plain numbers

    for path in translations:
        assert run_command(["evaluate", str(path), "--split", "test"]) == 0
    capsys.readouterr()
    assert run_command(command) == 0
    captured = capsys.readouterr()
    assert "test BLEU by words of the source" in captured.out and not captured.err
    for path in translations:
        for file in (path / "predictions").glob("*.json"):
            file.write_text(file.read_text().replace('"step": 3', '"step": 2'))
    assert run_command(command) == 0
    assert capsys.readouterr().err.count("scoring dev") == 2


def test_scores_of_another_search_are_not_compared(translations: list[Path], tmp_path: Path, capsys: Captured) -> None:
    """What `evaluate --beam` wrote is named and left out; where settings differ, the table says so."""
    runs = [shutil.copytree(path, tmp_path / path.name) for path in translations]
    command = ["compare", *map(str, runs), "--out", str(tmp_path / "plot.svg")]
    for path in runs:
        assert run_command(["evaluate", str(path), "--split", "test"]) == 0
    assert run_command(["evaluate", str(runs[1]), "--split", "test", "--beam", "8"]) == 0
    kept = json.loads((runs[1] / "predictions" / "test.json").read_text())
    given = {"split": "test", "files": ["toy"], "sentences": 30, "beam": 8, "length_penalty": 0.6}
    assert {key: kept[key] for key in given} == given
    capsys.readouterr()
    assert run_command(command) == 0
    captured = capsys.readouterr()
    assert (
        f"{runs[1]}/predictions/test.json: not used, these are scores of beam 8; the run's own: beam 1" in captured.err
    )
    assert "dev BLEU" in captured.out and "test BLEU" not in captured.out

    settings = (runs[1] / "run.toml").read_text()
    (runs[1] / "run.toml").write_text(settings.replace("beam = 1", "beam = 8"))  # now it is its own
    assert run_command(command) == 0
    captured = capsys.readouterr()
    assert "test BLEU" in captured.out
    assert captured.err == f"these scores are of different beams (task.beam): {runs[0]}: 1; {runs[1]}: 8\n"


@pytest.mark.parametrize("name", ["test", "TEST", "dev"])
def test_predictions_of_a_file_never_take_the_name_of_a_split(
    translations: list[Path], tmp_path: Path, capsys: Captured, name: str
) -> None:
    run = shutil.copytree(translations[0], tmp_path / "run")
    assert run_command(["evaluate", str(run), "--split", name.lower()]) == 0
    before = {path: path.read_bytes() for path in (run / "predictions").iterdir()}
    (tmp_path / name).write_text("a b\tb a\nc d e\te d c\n")
    assert run_command(["evaluate", str(run), "--split", str(tmp_path / name)]) == 0
    assert len((run / "predictions" / f"{name}.file.txt").read_text().splitlines()) == 2
    assert json.loads((run / "predictions" / f"{name}.file.json").read_text())["files"] == [str(tmp_path / name)]
    assert before and all(path.read_bytes() == content for path, content in before.items())
    # Not even where somebody writes them there.
    out = run / "predictions" / f"{name.lower()}.txt"
    assert run_command(["evaluate", str(run), "--split", str(tmp_path / name), "--out", str(out)]) == 0
    capsys.readouterr()
    assert run_command(["compare", str(run), "--out", str(tmp_path / "plot.svg")]) == 0
    assert f"{name.lower()}.json: not used, these are scores of split {tmp_path / name}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plot.jpg", "plot"])
def test_compare_refuses_other_formats(answers: Path, tmp_path: Path, capsys: Captured, name: str) -> None:
    assert run_command(["compare", str(answers), "--out", str(tmp_path / name)]) == 2
    assert "a plot ends in .png, .svg, .pdf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ---- inspect


def cells(path: Path) -> list[str]:
    """What the titles of a map's cells say."""
    return [element[0].text for element in ElementTree.parse(path).iter() if element.tag.endswith("rect")]


@pytest.mark.parametrize("number", [0, 1])
def test_a_picture_shows_where_a_target_looked(
    translations: list[Path], tmp_path: Path, capsys: Captured, number: int
) -> None:
    command = ["inspect", str(translations[number]), "--text", "a b c d"]
    out = tmp_path / "map.svg"
    assert run_command([*command, "--target", "d c", "--out", str(out)]) == 0
    run = headway.load(translations[number])
    source, target = (torch.tensor([run.tokenizer.encode(text)]) for text in (" a b c d", " d c"))
    weights = run.model.alignment(torch.nn.functional.pad(target, (1, 0), value=1), source)[0]
    assert weights.shape == (3, 4)
    names = [(row, column) for row in ("d", "c", "end") for column in "abcd"]
    shares = [f"{share:.0%}" for share in weights.flatten().tolist()]
    expected = [f"{row} looks at {column}: {share}" for (row, column), share in zip(names, shares, strict=True)]
    assert cells(out) == expected
    assert run_command([*command, "--out", str(out)]) == 0  # the model's own translation
    *rows, last = [cell.split(" looks at ")[0] for cell in cells(out)[::4]]
    own = run.translate("a b c d")[0][0].text.replace(" ", "")
    assert own.startswith("".join(rows).replace("␣", "")) and last == "end" and len(rows) > 1
    assert run_command([*command, "--out", str(tmp_path / "map.png")]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_a_language_model_shows_how_a_text_looks_at_itself(text: Path, tmp_path: Path) -> None:
    assert run_command(["inspect", str(text), "--text", "the cat", "--out", str(tmp_path / "map.svg")]) == 0
    found = cells(tmp_path / "map.svg")
    assert len(found) == 7 * 8 // 2 and found[0] == "t looks at t: 100%"


@pytest.mark.parametrize(
    ("which", "arguments", "message"),
    [
        (0, ["--text", " "], "nothing to look at in an empty source"),
        (0, ["--text", "a" + " a" * 16], "the source has 17 tokens, the model holds 16 (model.block); shorten it"),
        (0, ["--text", "a", "--target", "a" + " a" * 15], "the target has 16 tokens, the model holds 15 (model.block)"),
        (0, ["--text", "a", "--out", "map.jpg"], "--out map.jpg: a picture ends in .svg or .png"),
        (0, ["--text", "a", "--out", "/proc/nowhere/map.svg"], "/proc/nowhere/map.svg: cannot be written"),
        (None, ["--text", "the", "--target", "cat"], "--target: a run whose task is language_modelling has no source"),
        (None, ["--text", ""], "nothing to look at in an empty text"),
        (None, ["--text", "cat" * 20], "the text has 60 tokens, and the model holds 32 (model.block)"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(
    translations: list[Path], text: Path, capsys: Captured, which: int | None, arguments: list[str], message: str
) -> None:
    assert run_command(["inspect", str(text if which is None else translations[which]), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_never_looks_says_so(tmp_path: Path, capsys: Captured) -> None:
    model = {"kind": "rnn_seq2seq", "width": 8, "hidden": 8, "block": 16, "attention": "none"}
    tables = {
        "model": model,
        "task": {"name": "toy", "rows": 9, "held_out": 2, "rows_up_to": 4},
        "training": {"steps": 1},
    }
    run = headway.train(tables, tmp_path / "run")
    assert run_command(["inspect", str(run.path), "--text", "a b"]) == 2
    assert "looks at no token of the source; it has one vector for the whole of it" in capsys.readouterr().err


# ---- data


def test_data_list_says_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("HEADWAY_DATA", str(tmp_path))
    assert run_command(["data", "list"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[::2]] == list(DATA_SETS)
    assert shown.count("not on this machine") == len(DATA_SETS) - 1 and "generated when needed" in shown
    assert run_command(["data", "get", "world"]) == 0
    assert run_command(["data", "list"]) == 0
    assert f"in {tmp_path / 'world'}" in capsys.readouterr().out


def test_the_same_seed_makes_the_same_world(tmp_path: Path, capsys: Captured) -> None:
    def world(name: str, seed: int) -> dict[str, bytes]:
        out = tmp_path / name
        options = ["--people", "20", "--unseen", "4", "--towns", "3", "--phrasings", "2", "--seed", str(seed)]
        assert run_command(["data", "get", "world", "--out", str(out), *options]) == 0
        return {path.name: path.read_bytes() for path in out.iterdir()}

    assert world("a", 1) == world("b", 1)
    assert world("c", 2)["wiki.txt"] != world("a", 1)["wiki.txt"]
    captured = capsys.readouterr()
    assert f"world: {tmp_path / 'a'}" in captured.out and "already there" in captured.err
    assert run_command(["data", "get", "world", "--out", str(tmp_path / "a"), "--seed", "2"]) == 2
    assert "holds another world" in capsys.readouterr().err


def test_data_get_copies_from_a_folder_and_says_one_line_a_file(
    real_data: Path, tmp_path: Path, capsys: Captured
) -> None:
    command = ["data", "get", "shakespeare", "--from", str(real_data), "--out", str(tmp_path / "s")]
    assert run_command(command) == 0
    captured = capsys.readouterr()
    assert captured.out == f"shakespeare: {tmp_path / 's'}\n"
    assert len(captured.err.splitlines()) == 1 and "1,115,394 bytes" in captured.err


def test_data_get_shows_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    content = b"one line\n" * 20_000
    (tmp_path / "a.txt").write_bytes(content)
    file = DataFile("a.txt", len(content), hashlib.sha256(content).hexdigest())
    address = tmp_path.as_uri() + "/"
    monkeypatch.setitem(DATA_SETS, "tiny", DataSet("tiny", "for the test", "none", files=(file,), sources=(address,)))
    screen = io.StringIO()
    monkeypatch.setattr(
        "headway.commands.reporter",
        lambda: Terminal(Console(file=screen, force_terminal=True, highlight=False, width=400)),
    )
    for _ in range(2):  # the second time nothing is brought, and no bar shown
        assert run_command(["data", "get", "tiny", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"tiny: {tmp_path / 'out'}\n" * 2
    bars = re.findall(r"tiny, kB.* ([\d,]+)/([\d,]+)", screen.getvalue())
    assert bars and bars[-1] == ("180", "180")
    assert "180,000 bytes from file:" in screen.getvalue()
    assert screen.getvalue().rindex("tiny, kB") < screen.getvalue().index("already there")


def test_data_check_reports_every_file(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "good.txt").write_bytes("\ufeffone\r\ntwo ü\r\n".encode())
    (tmp_path / "good.tsv").write_text("q?\ta\n")
    (tmp_path / "questions.tsv").write_text("q?\n")
    (tmp_path / "good.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "bad.tsv").write_text("q?\ta\nr?\n")
    names = ["good.txt", "good.tsv", "questions.tsv", "good.jsonl"]
    assert run_command(["data", "check", *(str(tmp_path / name) for name in names)]) == 0
    captured = capsys.readouterr()
    assert "2 lines, 8 characters, 7 distinct, 5 in the middle line" in captured.out
    assert "1 question with answers" in captured.out and "1 question without answers" in captured.out
    assert "byte-order mark removed" in captured.err and "2 CRLF line ends read as LF" in captured.err
    assert run_command(["data", "check", str(tmp_path / "bad.tsv"), str(tmp_path / "good.tsv")]) == 2
    captured = capsys.readouterr()
    assert f"{tmp_path / 'bad.tsv'}:2: 1 column where 2 are wanted" in captured.err
    assert "1 of 2 files cannot be used as they are" in captured.err
    assert "good.tsv: 1 question with answers" in captured.out


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (
            '{"text": 3}\r\n{bad\n{"text": "fine"}\n{"x": "y"}\n[1]\n',
            {1: "'text' is 3", 2: "not JSON", 4: "no key", 5: "not a"},
        ),
        ('{bad\r\n{"question": "a", "answer": "b"}\n{"question": "c"}\n', {1: "not JSON", 3: "no key 'answer'"}),
    ],
)
def test_data_check_names_everything_wrong_with_json_lines_at_once(
    tmp_path: Path, capsys: Captured, content: str, wrong: dict[int, str]
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(content)
    assert run_command(["data", "check", str(file)]) == 2
    shown = capsys.readouterr().err
    assert {int(line) for line in re.findall(rf"^{file}:(\d+):", shown, re.MULTILINE)} == wrong.keys()
    assert all(f"{file}:{line}: {problem}" in shown for line, problem in wrong.items())
    assert shown.count("1 CRLF line end") == 1


def test_the_home_directory_is_meant_where_the_shell_leaves_its_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("some words\n" * 9)
    command = ["data", "prepare", str(tmp_path / "a.txt"), "--tokenizer", "bytes"]
    assert run_command([*command, "--out=~/in/it"]) == 0 and (tmp_path / "in" / "it").is_dir()
    monkeypatch.chdir(tmp_path)
    assert run_command([*command, "--out=~nobody-of-that-name"]) == 0  # a name like any other
    assert (tmp_path / "~nobody-of-that-name").is_dir() and not (tmp_path / "~").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tsv", "id\ttext\n1\tone\n2\ttwo\n", "2 lines, 6 characters"),
        ("a.tsv", "one\nthree\n", "2 questions without answers"),
        ("a.TSV", "q?\ta\n", "1 question with answers"),
        ("a.CSV", "question,answer\nq?,a\n", "1 question with answers"),
        ("a.csv", 'n,"source ",target\n1,eins,one\n', "1 pair\n"),
        ("a.csv", '"source,target",text\n1,eins\n', "1 line, 4 characters"),
        ("a.csv", '\n"question\nof all",text\n1,eins\n', "1 line, 4 characters"),
    ],
)
def test_data_check_goes_by_the_columns(tmp_path: Path, capsys: Captured, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    assert run_command(["data", "check", str(tmp_path / name)]) == 0
    assert f"{name}: {said}" in capsys.readouterr().out


def test_data_check_reads_pairs_where_a_table_has_more_columns_and_says_so(tmp_path: Path, capsys: Captured) -> None:
    """As a task with sources reads it; one that learns from a column needs its name."""
    (tmp_path / "a.tsv").write_text("Hi.\tHallo.\tby somebody\nGo.\tGeh.\tby another\n")
    assert run_command(["data", "check", str(tmp_path / "a.tsv")]) == 0
    captured = capsys.readouterr()
    assert "a.tsv: 2 pairs\n" in captured.out and "name it: --column" in captured.err
    assert run_command(["data", "check", str(tmp_path / "a.tsv"), "--column", "2"]) == 0
    (tmp_path / "a.csv").write_text("id,year,note\n1,1999,one\n")
    assert run_command(["data", "check", str(tmp_path / "a.csv")]) == 2
    assert "which column is the text? found: 'id', 'year', 'note'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("pairs.csv", 'target, source\n"a dog, running",ein Hund\ngrass,das Gras\n,leer\n', 4),
        ("pairs.jsonl", "".join(json.dumps({"source": s, "target": t}) + "\n" for s, t in (("ä", "b"), ("ç", ""))), 2),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_data_check_knows_a_table_of_translations(
    tmp_path: Path, capsys: Captured, name: str, content: str, line: int, packed: str
) -> None:
    file = tmp_path / f"{name}{packed}"
    file.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    assert run_command(["data", "check", str(file)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"{file}: 1 pair with an empty side dropped (line {line})\n"
    told, source, target, *_ = captured.out.splitlines()
    assert told == f"{file}: {line - 2 or 1} pair{'s' * (line > 3)}" and source.startswith("  source: ")
    assert target.startswith("  target: ")


def test_a_row_that_is_no_translation_is_named(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"source": "ein Hund", "target": "a dog"}\n{"source": "das Gras", "target": null}\n')
    assert run_command(["data", "check", str(file)]) == 2
    assert "pairs.jsonl:2: 'target' is null, where a string is wanted" in capsys.readouterr().err


def test_data_check_reports_two_files_together(tmp_path: Path, capsys: Captured) -> None:
    source, target = tmp_path / "text.de", tmp_path / "text.en.gz"
    german = ["ein Hund", "der Park", "das", "Berlin", "ein Hund", ""]
    english = ["a dog", "the park", "that " * 9, "Berlin", "a dog", "nothing"]
    source.write_text("".join(f"{line}\n" for line in german))
    target.write_bytes(gzip.compress("".join(f"{line}\n" for line in english).encode()))
    command = ["data", "check", str(source), "--target", str(target)]
    assert run_command(command) == 0
    captured = capsys.readouterr()
    assert "1 pair with an empty side dropped (line 6)" in captured.err
    assert captured.out.splitlines() == [
        f"{source}, {target}: 5 pairs",
        f"  {source}: 33 characters, {len(set(''.join(german)))} distinct, 8 in the middle line",
        f"  {target}: 69 characters, {len(set(''.join(english[:5])))} distinct, 6 in the middle line",
        "  the same text on both sides: 1 pair, the first in line 4",
        "  there before: 1 pair",
        "  most unequal in length: line 3, 3 characters and 45",
    ]
    source.write_text("ein Hund\n")
    for wrong, message in (
        (command, f"{source}: 1 line, but {target}: 6 lines"),
        ([*command[:3], str(source), *command[3:]], "belongs to one file of sources, and 2 are given"),
        ([*command[:3], "--target", str(tmp_path / "text.fr")], "text.fr: no such file"),
        (["data", "check", str(source), "--target", str(source)], "given as source and as target"),
    ):
        assert run_command(wrong) == 2
        captured = capsys.readouterr()
        assert message in captured.err and not captured.out


def test_data_check_reads_a_pipe_once_or_refuses_it(tmp_path: Path, capsys: Captured) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    (tmp_path / "table.csv").symlink_to(f"/dev/fd/{reader}")
    assert run_command(["data", "check", str(tmp_path / "table.csv")]) == 2
    assert "table.csv: a pipe or a device, which can be read only once" in capsys.readouterr().err
    assert run_command(["data", "check", f"/dev/fd/{reader}"]) == 0
    assert capsys.readouterr().out.startswith(f"/dev/fd/{reader}: 2 lines, 6 characters")
    os.close(reader)


def test_data_check_reads_all_of_token_shards(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(50)))
    folder = tmp_path / "shards"
    prepare([tmp_path / "text.txt"], folder, "bytes", shard_tokens=150)
    assert run_command(["data", "check", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{folder}: 390 tokens of 50 documents in 3 shards, bytes tokenizer of 258\n")
    assert "made of 1 file; all 1,180 bytes are as they were written" in shown  # 390 tokens of 2, 50 places of 8

    whole = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    for name, content, message in (
        (
            "shard-00001.bin",
            whole[folder / "shard-00001.bin"][::-1],
            "shard-00001.bin: not the bytes that were written",
        ),
        ("shard-00002.idx", b"", "shard-00002.idx: 0 bytes where "),
        ("tokenizer.json", None, "tokenizer.json: missing"),
        ("index.json", None, "no token shards (no index.json in it)"),
        ("index.json", b"{}", "index.json: "),
    ):
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        assert run_command(["data", "check", str(tmp_path / "text.txt"), str(folder)]) == 2
        captured = capsys.readouterr()
        assert message in captured.err and "1 of 2 files cannot be used" in captured.err
        (folder / name).write_bytes(whole[folder / name])
    assert run_command(["data", "check", str(folder)]) == 0
    assert "never read" not in capsys.readouterr().out

    for name in ("shard-00099.bin", "shard-00003.idx", "notes.txt"):
        (folder / name).touch()
    assert run_command(["data", "check", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("\n  not among them, and never read: shard-00003.idx, shard-00099.bin\n")
    for name in ("tokenizer.json", "shard-00000.bin", "shard-00099.bin"):
        (folder / name).unlink()
    assert run_command(["data", "check", str(folder)]) == 2
    shown = capsys.readouterr().err
    assert "shards: damaged; copy the folder again or prepare the corpus anew:" in shown
    assert "  - tokenizer.json: missing\n  - shard-00000.bin: missing\n" in shown


def test_a_disk_that_fails_is_not_taken_for_a_closed_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are the same error of the system."""
    failing = OSError(errno.EIO, os.strerror(errno.EIO))

    def fails(*given: Any, **options: Any) -> None:
        raise failing

    monkeypatch.setattr("headway.commands.recipe_names", fails)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        assert not is_unread(failing) and is_unread(BrokenPipeError())
        with pytest.raises(OSError, match="Input/output error"):
            run_command(["train", "--recipes"])
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert not is_unread(failing)
        os.close(ours)
        assert is_unread(failing)
