"""Where memory runs out, less is done at a time: the result is the same, or the message says what to lower."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headway
from headway.cli import run_command
from headway.errors import UserError
from headway.generation import best_alternatives, generate
from headway.memory import Room
from headway.models import GPT
from tests.conftest import tiny_gpt

Captured = pytest.CaptureFixture[str]


def too_much() -> None:
    torch.empty(1 << 50)  # torch's own error on a CPU


def too_much_for_python() -> None:
    raise MemoryError


def too_much_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@given(st.integers(0, 70), st.integers(1, 80), st.none() | st.integers(1, 80))
def test_every_row_is_worked_on_once_and_in_order(count: int, fit: int, rows: int | None) -> None:
    tried: list[int] = []

    def work(part: list[int]) -> list[int]:
        tried.append(len(part))
        if len(part) > fit:
            too_much_for_python()
        return part

    room = Room(rows)
    assert [row for part in room.each(work, list(range(count))) for row in part] == list(range(count))
    assert max(tried, default=0) <= (rows or count)
    assert sum(size > fit for size in tried) <= 7  # what did not fit once is not tried again
    before = len(tried)
    list(room.each(work, list(range(count))))
    assert max(tried[before:], default=0) <= fit


@pytest.mark.parametrize("happens", [too_much, too_much_for_python, too_much_for_a_gpu])
def test_one_row_that_does_not_fit_is_an_error_with_a_way_out(happens: Callable[[], None]) -> None:
    tried: list[int] = []

    def work(part: list[int]) -> None:
        tried.append(len(part))
        happens()

    with pytest.raises(UserError, match=r"one row at a time; .* \(--device, training.device\), or lower model\.block"):
        list(Room(8).each(work, list(range(20))))
    assert tried == [8, 4, 2, 1]


def test_another_error_is_left_alone() -> None:
    def work(part: list[int]) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        list(Room().each(work, [1, 2]))


@pytest.fixture
def lack(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Evaluation has memory for this many rows at once from now on."""
    whole = GPT.hidden

    def limit(rows: int) -> None:
        def hidden(self: GPT, tokens: torch.Tensor, *more: Any) -> torch.Tensor:
            if len(tokens) > rows and not self.training:
                too_much()
            return whole(self, tokens, *more)

        monkeypatch.setattr(GPT, "hidden", hidden)

    return limit


def test_decoding_in_smaller_groups_says_the_same(lack: Callable[[int], None]) -> None:
    model = tiny_gpt()
    prompts = [[1 + (3 * row + place) % 18 for place in range(1 + row % 5)] for row in range(11)]
    wanted, others = generate(model, prompts, 9, [2]), best_alternatives(model, prompts, 3, 4, [2])
    lack(2)
    for found, expected in zip(generate(model, prompts, 9, [2]), wanted, strict=True):
        assert (found.tokens, found.stopped) == (expected.tokens, expected.stopped)
        assert found.logprobs == pytest.approx(expected.logprobs)
    for found, expected in zip(best_alternatives(model, prompts, 3, 4, [2]), others, strict=True):
        assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert not model.training


@pytest.mark.parametrize("kind", ["questions", "language"])
def test_evaluation_short_of_memory(
    run_file: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, lack: Callable[[int], None], kind: str
) -> None:
    monkeypatch.chdir(run_file.parent)
    if kind == "language":
        text = run_file.read_text().split("[task]")[0].replace("block = 48", "block = 8")
        run_file.write_text(
            f'{text}[task]\nname = "language_modelling"\ncorpus = "wiki.txt"\nholdout = 0.5\n[training]\nsteps = 2\n'
        )
    run = headway.train(run_file, "run")
    wanted = run.evaluate()
    lack(3)
    again = headway.train(run_file, "again")
    assert again.evaluation == pytest.approx(run.evaluation)
    found = again.evaluate()
    assert found.pop("predictions", None) == wanted.pop("predictions", None)
    assert found == pytest.approx(wanted)
    lack(0)
    assert run_command(["evaluate", "run"]) == 2
    shown = capsys.readouterr().err
    assert re.search(r"^headway: out of memory, even for one row at a time; .* lower model\.block", shown, re.MULTILINE)
    assert "Traceback" not in shown
    with pytest.raises(UserError, match="out of memory, even for one row at a time"):
        headway.train(run_file, "third")
