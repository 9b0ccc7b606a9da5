"""Charts as SVG text, for pages that must work without a network.

Colours come from the page's CSS variables, so a chart follows its light or dark theme.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 52, 28, 14, 40
COLOURS = ("var(--one)", "var(--two)", "var(--three)", "var(--four)")


@dataclass
class Series:
    """A named line: points in the order of x."""

    name: str
    points: Sequence[tuple[float, float]]


def line_chart(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Lines over common axes, with a legend."""
    drawn = [line for line in series if line.points]
    if not drawn:
        return "<p>Nothing was recorded.</p>"
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    x_ticks = ticks(min([0.0, *xs]), max(xs), 6)
    y_ticks = ticks(min([0.0, *ys]), max(ys), 5)

    def across(x: float) -> float:
        return LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)}">']
    for y in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}"/>')
        parts.append(text(LEFT - 8, down(y) + 4, short(y), "end"))
    parts += [text(across(x), HEIGHT - BOTTOM + 18, short(x), "middle") for x in x_ticks]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, "middle"))
    for number, line in enumerate(drawn):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
        middle = TOP + 8 + 18 * number
        parts.append(
            f'<line x1="{WIDTH - 190}" x2="{WIDTH - 170}" y1="{middle}" y2="{middle}" stroke="{colour}" '
            'stroke-width="3"/>'
        )
        parts.append(text(WIDTH - 164, middle + 4, line.name, "start"))
    parts.append(f"<title>{escape(y_label)} against {escape(x_label)}</title></svg>")
    return "".join(parts)


def heat_map(weights: Sequence[Sequence[float]], labels: Sequence[str], title: str) -> str:
    """A square map: row t shows how much token t takes from each token to its left and from itself."""
    return weight_map([row[: number + 1] for number, row in enumerate(weights)], labels, labels, title)


def weight_map(weights: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str], title: str) -> str:
    """A map of rows by columns: how much each row takes from each column, the more the darker; short rows end early."""
    cell = 24
    left, below = (16 + max(map(breadth, labels)) for labels in (rows, columns))
    width = max(left + cell * len(columns), breadth(title)) + 4
    height = 24 + cell * len(rows) + below
    parts = [f'<svg class="map" viewBox="0 0 {width} {height}" width="{width}" role="img">']
    parts.append(text(max(left + cell * len(columns) / 2, breadth(title) / 2), 14, title, "middle", "name"))
    for number, label in enumerate(columns):
        place = f"translate({left + number * cell + 8},{24 + cell * len(rows) + 8}) rotate(90)"
        parts.append(f'<text class="tick" transform="{place}">{escape(label)}</text>')
    for number, label in enumerate(rows):
        y = 24 + number * cell
        parts.append(text(left - 6, y + 16, label, "end"))
        for column, weight in enumerate(weights[number]):
            parts.append(
                f'<rect x="{left + column * cell}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="var(--one)" '
                f'fill-opacity="{0.04 + 0.96 * weight:.3f}"><title>{escape(label)} looks at {escape(columns[column])}: '
                f"{weight:.0%}</title></rect>"
            )
    parts.append("</svg>")
    return "".join(parts)


def breadth(words: str) -> int:
    """About how many pixels a label takes; characters of East Asian scripts are as broad as high."""
    return sum(13 if unicodedata.east_asian_width(character) in "WF" else 7 for character in words)


def bar(share: float) -> str:
    """A horizontal bar for a share of one."""
    return f'<span class="bar"><span style="width:{100 * min(1.0, max(0.0, share)):.1f}%"></span></span>'


def text(x: float, y: float, words: str, anchor: str, style: str = "tick") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round values from at or below `low` to at or above `high`, about `count` of them."""
    span = high - low
    if span < 1e-9 * max(1.0, abs(low), abs(high)):
        span = 1.0
    rough = span / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.10g}"
