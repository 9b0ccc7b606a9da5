"""What is drawn for a terminal: dots where the points are, joined, and the mean where several share a column."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.report.terminal import Canvas, Line, Panel, Row, arrange, by_column


def decode(rows: list[Row]) -> set[tuple[int, int]]:
    """(x, y) of every dot in rows of braille characters, by the character's bits as Unicode numbers its dots."""
    places = {0: (0, 0), 1: (0, 1), 2: (0, 2), 3: (1, 0), 4: (1, 1), 5: (1, 2), 6: (0, 3), 7: (1, 3)}
    dots = set()
    for row, spans in enumerate(rows):
        for column, char in enumerate("".join(text for text, _ in spans)):
            bits = ord(char) - 0x2800 if char != " " else 0
            dots |= {(2 * column + x, 4 * row + y) for bit, (x, y) in places.items() if bits >> bit & 1}
    return dots


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 15)), min_size=1, max_size=6))
@settings(deadline=None)
def test_a_stroke_goes_from_dot_to_dot_without_a_break(corners: list[tuple[int, int]]) -> None:
    canvas = Canvas(10, 4, plain=False)
    canvas.draw(corners, 0)
    dots = decode([canvas.row(number) for number in range(4)])
    assert set(corners) <= dots
    reached, edge = {corners[0]}, [corners[0]]
    while edge:
        x, y = edge.pop()
        beside = {(x + dx, y + dy) for dx in (-1, 0, 1) for dy in (-1, 0, 1)} & dots - reached
        reached |= beside
        edge += beside
    assert reached == dots
    left, right = min(x for x, _ in corners), max(x for x, _ in corners)
    assert {x for x, _ in dots} == set(range(left, right + 1))


def test_a_gap_stays_empty() -> None:
    canvas = Canvas(10, 4, plain=False)
    canvas.draw([(0, 0), None, (19, 15)], 0)
    assert decode([canvas.row(number) for number in range(4)]) == {(0, 0), (19, 15)}


@given(
    steps=st.sets(st.integers(0, 5000), min_size=1, max_size=60),
    right=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_a_column_is_the_mean_of_its_steps(steps: set[int], right: int, seed: int) -> None:
    values = random.Random(seed)
    points = [(step, values.choice([values.random(), math.nan, 1e9])) for step in sorted(steps)]
    first, last = min(steps), max(steps)
    found = dict(by_column(points, (first, last), right))
    centres = [first + Fraction(column * (last - first), max(1, right)) for column in range(right + 1)]
    nearest = {step: min(range(right + 1), key=lambda each: (abs(centres[each] - step), -each)) for step in steps}
    for column in range(right + 1) if first < last else [0]:
        inside = [y for step, y in points if nearest[step] == column or first == last]
        good = [y for y in inside if not math.isnan(y)]
        if good:
            assert found[column] == pytest.approx(sum(good) / len(good))
        else:
            assert math.isnan(found.get(column, math.nan)) and (column in found) == bool(inside)


def test_lines_without_a_point_take_no_room() -> None:
    full, empty = Line("full", 0, [(1, 2.0), (9, 3.0)]), Line("empty", 1, [(1, math.nan)])
    alone = arrange([Panel("a", [full])], 40, 12, plain=True)
    assert len(alone) == 12
    assert arrange([Panel("a", [empty, full])], 40, 12, plain=True) == alone
    assert arrange([Panel("a", [full]), Panel("b", [empty])], 40, 12, plain=True) == alone
    assert arrange([Panel("b", [empty])], 40, 12, plain=True) == []
