"""`headway lab`: what is listed, printed and written, and what is refused before the work starts."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

from headway import lab
from headway.cli import run_command
from headway.inspection.experiments import EXPERIMENTS

Captured = pytest.CaptureFixture[str]
QUICK = ("copying", "sinusoids", "masks")
VOID = {"meta", "br", "img"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only experiments that take no time."""
    monkeypatch.setattr(lab, "EXPERIMENTS", {name: EXPERIMENTS[name] for name in QUICK})


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experiments that must not be run."""

    def refuse(**parameters: object) -> None:
        raise AssertionError("the work was started")

    experiments = {name: replace(experiment, run=refuse) for name, experiment in EXPERIMENTS.items()}
    monkeypatch.setattr(lab, "EXPERIMENTS", experiments)


class Reader(HTMLParser):
    """Collects what a page refers to, and checks that what is opened is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.inner: list[str] = []
        self.outer: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for key, value in ((key, value or "") for key, value in attrs):
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "xlink:href"):
                (self.inner if value.startswith("#") else self.outer).append(value)
            self.inner += [f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", value)]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def test_without_a_name_the_experiments_are_listed(capsys: Captured) -> None:
    assert run_command(["lab"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-2]] == list(EXPERIMENTS)
    assert all(len(line) <= 120 for line in lines) and "lab --all" in lines[-1]


def test_an_experiment_prints_a_table_and_writes_its_pictures(tmp_path: Path, capsys: Captured) -> None:
    assert run_command(["lab", "masks", "copying", "masks", "--out", str(tmp_path / "a" / "b")]) == 0
    captured = capsys.readouterr()
    shown = captured.out
    assert shown.count("masks: padding") == 1 and "multiplied after the softmax" in shown
    assert "still lets" in shown and "half of it takes β" in shown
    assert captured.err == ""
    names = ["copying.png", "copying.svg", "masks.png", "masks.svg"]
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == names
    assert all(str(tmp_path / "a" / "b" / name) in shown for name in names)


@pytest.mark.parametrize("name", QUICK)
def test_the_pictures_are_whole_and_small(tmp_path: Path, name: str) -> None:
    assert run_command(["lab", name, "--out", str(tmp_path)]) == 0
    data = (tmp_path / f"{name}.png").read_bytes()
    picture = Image.open(io.BytesIO(data))
    picture.load()
    assert picture.size == (960, 540) and len(data) < 120_000
    drawing = (tmp_path / f"{name}.svg").read_text("utf-8")
    assert ElementTree.fromstring(drawing).tag.endswith("svg")
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", drawing)]
    assert sizes and min(sizes) >= 0.7 * 9  # nothing below 9, and exponents at 7/10 of that


def test_the_seed_decides(tmp_path: Path) -> None:
    def files(folder: str, seed: str) -> dict[str, bytes]:
        assert run_command(["lab", "copying", "--out", str(tmp_path / folder), "--seed", seed]) == 0
        return {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()}

    assert files("a", "1") == files("b", "1")
    assert files("c", "2") != files("a", "1")


def test_the_default_folder_is_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["lab", "masks"]) == 0
    assert (tmp_path / "lab" / "masks.png").is_file()


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maskes"], "headway: no experiment 'maskes'; did you mean 'masks'?"),
        (["copying", "single-head-nosie"], "no experiment 'single-head-nosie'; did you mean 'single-head-noise'?"),
        (["zzz"], "no experiment 'zzz'; known: copying, averaging"),
        (["copying", "--all"], "--all runs every experiment: leave out copying"),
        (["copying", "--seed", "-1"], "see headway lab --help"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, tmp_path: Path, capsys: Captured) -> None:
    assert run_command(["lab", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("what", [["copying"], ["--all"]])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    what: list[str], tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "taken" / "copying.svg").mkdir(parents=True)
    for out, message in (
        ("file", "file: is a file; choose a directory with --out"),
        ("file/below", "cannot be written (Not a directory); choose another directory with --out"),
        ("taken", "copying.svg: is a directory, and a file is to go there"),
    ):
        assert run_command(["lab", *what, "--out", str(tmp_path / out)]) == 2
        assert message in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"
    assert not any((tmp_path / "taken" / "copying.svg").iterdir())


@pytest.mark.usefixtures("quick")
def test_all_writes_one_page_that_needs_nothing_else(tmp_path: Path, capsys: Captured) -> None:
    assert run_command(["lab", "--all", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == ["1/3 copying", "2/3 sinusoids", "3/3 masks"]
    assert re.search(r"3 experiments in \d+ s; all of them on one page: ", captured.out)
    assert captured.out.endswith(f"{tmp_path / 'index.html'}\n")
    assert len(list(tmp_path.iterdir())) == 2 * len(QUICK) + 1
    text = (tmp_path / "index.html").read_text("utf-8")
    page = Reader()
    page.feed(text)
    assert page.open == []
    assert all(link.startswith("data:image/png;base64,") for link in page.outer)
    assert set(page.inner) <= {f"#{name}" for name in page.ids}
    assert not [name for name, count in Counter(page.ids).items() if count > 1]
    assert "<script" not in text and "@import" not in text
    for name in QUICK:
        experiment = EXPERIMENTS[name]
        assert f'<a href="#{name}">' in text and f'<section id="{name}">' in text
        assert experiment.question.split("'")[0] in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == len(QUICK) == text.count("<table>")
    # A picture on the page has the page's ink and paper, light or dark; the picture in its file has its own.
    assert all("currentColor" in drawing and "var(--paper)" in drawing for drawing in drawings)
    assert not any(colour in drawing for drawing in drawings for colour in (lab.INK, lab.PAPER))
    assert lab.INK in (tmp_path / "copying.svg").read_text("utf-8")


def test_drawing_leaves_the_users_settings_of_matplotlib_alone(tmp_path: Path) -> None:
    import matplotlib

    before = dict(matplotlib.rcParams)
    assert run_command(["lab", "masks", "--out", str(tmp_path)]) == 0
    assert dict(matplotlib.rcParams) == before


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\n"
        "from headway.cli import run_command\n"
        "assert run_command(['lab', '--help']) == 0\n"
        "loaded = {'torch', 'numpy', 'matplotlib', 'headway.lab'} & sys.modules.keys()\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--all" in done.stdout and "--seed" in done.stdout
