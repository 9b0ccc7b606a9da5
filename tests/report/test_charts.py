"""Charts: axes hold the data, labels are escaped, nothing divides by zero."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.report.charts import Series, heat_map, line_chart, ticks, weight_map
from headway.report.page import svg_file


@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6), count=st.integers(2, 9))
def test_ticks_hold_the_range_and_are_even(low: float, span: float, count: int) -> None:
    marks = ticks(low, low + span, count)
    assert marks[0] <= low + 1e-6 * max(1, abs(low))
    assert marks[-1] >= low + span - 1e-6 * max(1, abs(low + span))
    assert 2 <= len(marks) <= 2 * count + 2
    steps = [b - a for a, b in itertools.pairwise(marks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


@pytest.mark.parametrize("points", [[(0, 0)], [(5, 2.5)], [(0, 1), (10, 1)], [(0, -3), (1, 4)]])
def test_a_chart_is_well_formed_and_inside_its_box(points: list[tuple[float, float]]) -> None:
    tree = ElementTree.fromstring(line_chart([Series("a < b & c", points)], "step", "loss"))
    line = next(element for element in tree.iter() if element.tag.endswith("polyline"))
    for pair in line.attrib["points"].split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= 560
        assert 0 <= y <= 260


def test_a_map_has_a_cell_for_each_weight_inside_its_box() -> None:
    rows, columns = ["two", "<children>", "⁇"], ["zwei", "Kinder", "und", "孩子"]
    weights = [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0, 0, 0, 1.0]]
    tree = ElementTree.fromstring(svg_file(weight_map(weights, rows, columns, "target against source")))
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    _, _, width, height = map(float, tree.attrib["viewBox"].split())
    cells = [element for element in tree.iter() if element.tag.endswith("rect")]
    titles = [cell[0].text for cell in cells]
    assert titles[4] == "<children> looks at zwei: 70%" and titles[-1] == "⁇ looks at 孩子: 100%" and len(titles) == 12
    assert all(float(cell.attrib["x"]) + 24 <= width and float(cell.attrib["y"]) + 24 <= height for cell in cells)
    shades = [float(cell.attrib["fill-opacity"]) for cell in cells]
    assert sorted(range(12), key=shades.__getitem__)[-1] == 11 and max(shades) <= 1
    style = "".join(element.text or "" for element in tree.iter() if element.tag.endswith("style"))
    assert "prefers-color-scheme: dark" in style and "http" not in style


def test_a_heat_map_shows_only_what_may_be_seen() -> None:
    tree = ElementTree.fromstring(heat_map([[1.0, 0.0], [0.25, 0.75]], ["<a>", "b"], "layer 1"))
    cells = [element for element in tree.iter() if element.tag.endswith("rect")]
    assert len(cells) == 3
    assert cells[2].find("title").text == "b looks at b: 75%"
    assert line_chart([], "x", "y").startswith("<p>")
