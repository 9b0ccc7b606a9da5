"""A run file is read strictly: every problem is named at once, and what is written reads back the same."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import headway
from headway.configuration import load_settings
from headway.errors import DataError, Interrupted, RunError, SettingsError, UserError
from headway.models import MODELS
from headway.settings import REQUIRED, override, to_toml, toml_value
from headway.tasks import TASKS
from headway.training.stage import TrainingSettings
from tests.training.test_resume import StopAt

TASK = {"name": "language_modelling", "corpus": "notes.txt"}


def problems(tables: dict[str, Any], *sets: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings({"task": TASK, **tables}, sets)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"model": {"widht": 64}}, "model.widht: unknown key; did you mean 'width'?"),
        ({"model": {"width": "64"}}, "model.width = '64': must be a whole number"),
        ({"model": {"width": 64.5}}, "model.width = 64.5: must be a whole number"),
        ({"model": {"width": True}}, "model.width = True: must be a whole number"),
        ({"model": {"width": 0}}, "model.width = 0: must be at least 1"),
        ({"model": {"dropout": 1.0}}, "model.dropout = 1.0: must be below 1"),
        ({"model": {"tied": 1}}, "model.tied = 1: must be true or false"),
        (
            {"model": {"positions": "rotery"}},
            "must be one of learned, sinusoidal, relative, rotary, alibi, t5, none; did you mean 'rotary'?",
        ),
        ({"model": {"width": 64, "heads": 6}}, "model.heads: heads (6) must divide width (64)"),
        ({"model": {"kind": "gtp"}}, "model.kind = 'gtp': unknown; did you mean 'gpt'?"),
        ({"model": {"kind": ["gpt"]}}, "model.kind = ['gpt']: unknown; did you mean 'gpt'?"),
        ({"model": 5}, "[model] must be a table, not 5"),
        ({"modle": {}}, "[modle]: unknown section; did you mean 'model'?"),
        ({"steps": 5}, "steps: stands in no section; known: tokenizer, model, task, training, pretraining, streams"),
        (
            {"task": {"corpus": "x"}},
            "task.name: missing; known: language_modelling, span_corruption, retelling, entity_spans, recitation, "
            "question_answering",
        ),
        ({"task": {"name": "language_modeling"}}, "unknown; did you mean 'language_modelling'?"),
        ({"task": {"name": "language_modelling"}}, "task.corpus: missing; the text to learn"),
        ({"task": {**TASK, "corpus": ""}}, "task.corpus = '': must name a file"),
        ({"task": {**TASK, "corpus": "~\0"}}, "task.corpus = '~\\x00': holds a null character"),
        ({"task": {**TASK, "corpus": "\udcff"}}, "holds bytes that are not UTF-8"),
        ({"training": {"learning_rate": float("nan")}}, "must be a finite number"),
        ({"training": {"patience": 3}}, "training.patience: early stopping needs training.evaluate_every"),
        ({"tokenizer": {"size": 50}}, "tokenizer.size: a characters tokenizer has no size to choose"),
        ({"pretraining": 3}, "[pretraining] must hold [pretraining.task] and [pretraining.training], not 3"),
        ({"pretraining": {"tsak": {}}}, "pretraining.tsak: unknown section; did you mean 'task'?"),
        ({"pretraining": {"task": {"name": "span_corruption"}}}, "pretraining.task.corpus: missing"),
    ],
)
def test_a_problem_names_the_key_the_value_and_the_way_out(tables: dict[str, Any], expected: str) -> None:
    assert any(expected in problem for problem in problems(tables)), problems(tables)


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        {"model": {"widht": 1, "heads": 0}, "training": {"steps": -1}, "tokeniser": {}}, "nonsense", "model.layers=two"
    )
    assert len(found) == 6
    for part in ("widht", "heads = 0", "steps = -1", "[tokeniser]", "--set 'nonsense'", "layers = 'two'"):
        assert any(part in problem for problem in found)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b=3", 3),
        ("a.b = 3", 3),
        ("a.b=1_000", 1000),
        ("a.b=6e-3", 6e-3),
        ("a.b=true", True),
        ("a.b=words", "words"),
        ("a.b=two words", "two words"),
        ("a.b=. ", ". "),  # a trailing space may be what is meant
        ("a.b=x=y", "x=y"),
        ('a.b=""', ""),
        ('a.b="3"', "3"),
        ("a.b=/tmp/my notes #2.txt", "/tmp/my notes #2.txt"),
        ("a.b=C:\\new\\table.txt", "C:\\new\\table.txt"),
        ('a.b=["x", "y"]', ["x", "y"]),
        ("a.b=1\n[c]\nd = 2", "1\n[c]\nd = 2"),  # no way to smuggle other keys in
    ],
)
def test_set_takes_every_kind_of_value(assignment: str, expected: object) -> None:
    tables: dict[str, Any] = {"a": {"b": "before", "other": 1}}
    assert override(tables, assignment) == "a.b"
    assert tables == {"a": {"b": expected, "other": 1}}
    assert type(tables["a"]["b"]) is type(expected)


@pytest.mark.parametrize("assignment", ["width=3", "model.width", "model.=3", ".width=3", "=", "", "model..width=3"])
def test_set_needs_a_section_a_key_and_a_value(assignment: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"--set {assignment!r}: not section.key=value")):
        load_settings({"task": TASK}, [assignment])


def test_set_does_not_descend_into_a_value_or_change_the_callers_tables() -> None:
    tables = {"task": dict(TASK), "model": {"width": 32}}
    with pytest.raises(SettingsError, match="'width' is a value, not a section"):
        load_settings(tables, ["model.width.x=3"])
    assert load_settings(tables, ["model.width=64"]).model.width == 64
    assert tables == {"task": TASK, "model": {"width": 32}}


anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
names = anything.filter(lambda text: text.strip() and "\0" not in text)


@given(heading=anything, corpus=names, share=st.floats(0.0, 1.0), rate=st.floats(1e-300, 1e300))
def test_a_run_file_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, heading: str, corpus: str, share: float, rate: float
) -> None:
    task = {"name": "span_corruption", "corpus": corpus, "heading": heading, "salient": share, "closing": True}
    stage = {"task": task, "training": {"learning_rate": rate, "steps": 0}}
    settings = load_settings({"task": task, "training": {"learning_rate": rate, "seed": 7}, "pretraining": stage})
    path = tmp_path_factory.getbasetemp() / "run.toml"
    path.write_bytes(settings.to_toml().encode())
    assert load_settings(path) == settings


def test_tables_within_tables_are_written_as_sections() -> None:
    text = to_toml({"a": {"x": 1, "b": {"y": 'q"\\\n'}}, "c": {"d": {"z": [True, 1.5]}}})
    assert text.split() == [
        "[a]",
        "x",
        "=",
        "1",
        "[a.b]",
        "y",
        "=",
        '"q\\"\\\\\\u000a"',
        "[c.d]",
        "z",
        "=",
        "[true,",
        "1.5]",
    ]


def test_paths_are_relative_to_the_run_file_and_typed_ones_to_where_they_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "here").mkdir()
    path = tmp_path / "files" / "mine.toml"
    path.write_text(
        '[task]\nname = "language_modelling"\ncorpus = "notes.txt"\n'
        '[pretraining.task]\nname = "language_modelling"\ncorpus = "~/more.txt"\n[pretraining.training]\nsteps = 0\n'
    )
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", "/home/me")
    settings = load_settings("../files/mine.toml", ["task.validation=held out.txt"])
    assert Path(settings.task.corpus).resolve() == tmp_path / "files" / "notes.txt"
    assert settings.task.validation == str(tmp_path / "here" / "held out.txt")
    assert settings.pretraining is not None and settings.pretraining.task.corpus == "/home/me/more.txt"
    recipe = load_settings("shakespeare/char-laptop", ["task.corpus=mine.txt"])
    assert recipe.task.corpus == str(tmp_path / "here" / "mine.txt")
    assert load_settings("shakespeare/char-laptop").task.corpus == "data:shakespeare/input.txt"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[task\n", r"not TOML: .*\(at line 1, column 6\)"),
        (b"Once upon a time\n", "a run file holds key = value under"),
        (b"[task]\nname = '\xe9'", "not UTF-8 at byte 16"),
        (b"a = " + b"9" * 5000, "not TOML"),
    ],
)
def test_what_is_not_a_run_file_is_refused_with_its_place(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=expected) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)


def test_a_run_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b'\xef\xbb\xbf[task]\r\nname = "language_modelling"\r\ncorpus = "a"\r\n')
    assert load_settings(path).task.corpus == str(tmp_path / "a")


@pytest.mark.parametrize("source", ["nowhere.toml", "/nowhere", "x" * 5000, "nul\0.toml"])
def test_a_missing_run_file_is_named(source: str) -> None:
    with pytest.raises(UserError, match=r"no such run file|neither a recipe nor a run file"):
        load_settings(source)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not a run directory \(no run.toml in it\)"):
        load_settings(tmp_path)


def test_five_lines_train_on_your_own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file called run.toml gives its folder's name to the run."""
    (tmp_path / "poems").mkdir()
    monkeypatch.chdir(tmp_path / "poems")
    Path("notes.txt").write_text("the cat sat on the mat and the dog sat on the log\n" * 8)
    lines = ["[task]", 'name = "language_modelling"', 'corpus = "notes.txt"', "[training]", "steps = 1"]
    Path("run.toml").write_text("\n".join(lines))
    run = headway.train("run.toml", overrides=["model.width=16", "model.block=16", "training.batch_size=2"])
    assert run.path == Path("runs/poems")
    assert run.state.step == 1 and run.evaluation["loss"] > 0


def test_settings_that_would_do_nothing_are_refused(run_file: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(run_file, ["pretraining.training.device=cuda", "pretraining.training.patience=2"])
    assert "training.device; set that" in str(caught.value)
    assert "only the last stage is scored" in str(caught.value)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_refused_a_task_that_it_cannot_learn(kind: str, name: str) -> None:
    """Before any file is looked for: those named here do not exist."""
    needed = [item.name for item in fields(TASKS[name]) if item.default is REQUIRED]
    tables = {"model": {"kind": kind}, "task": {"name": name, **dict.fromkeys(needed, "nowhere.txt")}}
    if (kind in ("encoder_decoder", "rnn_seq2seq")) == (name in ("sequence_to_sequence", "toy")):
        assert load_settings(tables).model.kind == kind
        return
    with pytest.raises(SettingsError, match=f"model.kind = '{kind}': task, {name}, .* source") as refused:
        load_settings(tables)
    offered = str(refused.value).split("; use ")[1].split(", or another task")[0].split(" or ")
    for each in offered:
        assert load_settings({**tables, "model": {"kind": each}}).model.kind == each


@pytest.mark.parametrize("place", ["pretraining", "streams.side"])
def test_every_task_of_a_run_must_fit_its_model(place: str) -> None:
    tables = {"model": {"kind": "encoder_decoder"}, "task": {"name": "toy"}}
    other = {"task": {"name": "language_modelling", "corpus": "nowhere.txt"}}
    more = {"pretraining": other} if place == "pretraining" else {"streams": {"side": other}}
    with pytest.raises(SettingsError, match=rf"model.kind = 'encoder_decoder': {place}.task, language_modelling"):
        load_settings(tables | more)


NAMES = ("plain", "my stream", "größe", 'q"uote', "a.b", "back\\slash", "tab\there", "")


def test_any_name_of_a_table_can_be_written_and_read_again() -> None:
    tables = {"streams": {name: {"rows": number, "task": {"name": "x"}} for number, name in enumerate(NAMES)}}
    assert tomllib.loads(to_toml(tables)) == tables


def test_a_run_whose_streams_have_odd_names_goes_on(run_file: Path, tmp_path: Path) -> None:
    text = run_file.read_text()
    for name in NAMES[1:6]:
        key = toml_value(name)
        text += f'[streams.{key}]\nrows = 2\n[streams.{key}.task]\nname = "span_corruption"\ncorpus = "wiki.txt"\n'
    run_file.write_text(text)
    with pytest.raises(Interrupted):
        headway.train(run_file, tmp_path / "run", watch=StopAt(8))
    run = headway.train(tmp_path / "run", tmp_path / "run", resume=True)
    assert run.state.done and set(run.settings.streams) == set(NAMES[1:6])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("training.device=gpu", "did you mean 'cuda'"),
        ("training.schedule=cos", "did you mean 'cosine'"),
    ],
)
def test_what_is_meant_is_guessed(run_file: Path, change: str, words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        load_settings(run_file, [change])


STREAM = ["streams.more.task.name=span_corruption", "streams.more.task.corpus=wiki.txt"]


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["training.weight=0"], "training.weight: with a weight of 0 nothing is learned"),
        (["training.weight=0", *STREAM, "streams.more.weight=0"], "with a weight of 0 and of every stream nothing is"),
        (["pretraining.training.weight=0"], "pretraining.training.weight: with a weight of 0 that stage learns"),
        ([*STREAM, "streams.more.length=49"], r"streams.more.length (49) is more than model.block (48)"),
    ],
)
def test_what_would_do_nothing_is_not_begun_and_may_be_there_already(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: list[str], words: str
) -> None:
    monkeypatch.chdir(run_file.parent)
    with pytest.raises(SettingsError, match=re.escape(words)):
        headway.train(run_file, tmp_path / "run", sets)
    assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        patch.setattr("headway.making.in_vain", lambda settings: ())  # as it was once
        with pytest.raises(Interrupted):
            headway.train(run_file, tmp_path / "run", sets, watch=StopAt(8))
    assert headway.load(tmp_path / "run").state.step == 8
    assert headway.train(tmp_path / "run", tmp_path / "run", resume=True).state.done


@pytest.mark.parametrize("name", ["a.b", "my stream", "größe"])
def test_a_stream_of_any_name_can_be_set(run_file: Path, name: str) -> None:
    run_file.write_text(
        run_file.read_text()
        + f'[streams."{name}"]\nrows = 2\n[streams."{name}".task]\nname = "span_corruption"\ncorpus = "wiki.txt"\n'
    )
    assert load_settings(run_file, [f'streams."{name}".rows=3']).streams[name].stream.rows == 3


@pytest.mark.parametrize("key", ["", "a", "#", "a.#", "a\nb.c", "a..b", ".", "[a]\nb"])
def test_what_is_no_key_is_refused(run_file: Path, key: str) -> None:
    with pytest.raises(SettingsError):
        load_settings(run_file, [f"{key}=1"])


def test_a_stream_has_a_length_of_its_own_that_the_model_must_hold(run_file: Path, tmp_path: Path) -> None:
    stream = [
        "streams.more.task.name=question_answering",
        f"streams.more.task.questions={run_file.parent / 'train.tsv'}",
        f"streams.more.task.dev={run_file.parent / 'dev.tsv'}",
    ]
    with pytest.raises(DataError, match=r"a row of streams.more.length = 5 holds 6; .* raise streams.more.length"):
        headway.train(run_file, tmp_path / "run", [*stream, "streams.more.length=5"])


def test_a_key_is_taken_away_by_setting_it_to_nothing(run_file: Path) -> None:
    assert load_settings(run_file).task.dev is not None
    settings = load_settings(run_file, ["task.dev=", "task.test=", "training.steps= ", "tokenizer.size="])
    assert settings.task.dev is None and settings.training.steps == TrainingSettings().steps


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[task]\nname = language_modelling\n", "(at line 2, column 8): name = language_modelling; a run file holds"),
        ("[task]\nname = 'x'\n[task]\n", "line 3"),
    ],
)
def test_a_line_that_is_no_toml_is_shown(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(SettingsError, match=re.escape(told)):
        load_settings(tmp_path / "run.toml")


def test_several_files_are_no_value(run_file: Path) -> None:
    with pytest.raises(SettingsError, match="one text in quotes; a folder, or a pattern, stands for several files"):
        load_settings(run_file, ['task.corpus=["a.txt", "b.txt"]'])


def test_a_stream_that_was_meant_to_be_another_is_told(run_file: Path) -> None:
    run_file.write_text(
        run_file.read_text() + '[streams.reading.task]\nname = "span_corruption"\ncorpus = "wiki.txt"\n'
    )
    with pytest.raises(SettingsError, match=r"\[streams.readin\]: has no task; did you mean 'reading'\?"):
        load_settings(run_file, ["streams.readin.rows=4"])


def test_a_run_file_that_was_spoilt_by_hand_can_be_had_back(run_file: Path, tmp_path: Path) -> None:
    """Whether it says what no run can have, or what this one has not."""
    run = headway.train(run_file, tmp_path / "run", ["pretraining.training.steps=1", "training.steps=1"])
    file, way = run.path / "run.toml", f"get it back as the run last took it with cp {run.path / '.run.toml'}"
    text = file.read_text()
    file.write_text(text.replace("learning_rate", "learnin_rate"))
    with pytest.raises(SettingsError, match=f"(?s){file}: .*learnin_rate.*did you mean.*{way}") as caught:
        headway.train(run.path, resume=True)
    assert str(caught.value).count(way) == 1
    file.write_text(text.replace("width = 16", "width = 32"))
    with pytest.raises(RunError, match=f"(?s)these weights are of another model.*{way}"):
        headway.load(run.path).evaluate()
    file.write_text(text)
    headway.load(run.path).evaluate()
