"""Charts as SVG text, for pages that must work without a network.

Colours come from the page's CSS variables, so a chart follows its light or dark theme.
"""

from __future__ import annotations

import math
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
    cell = 24
    margin = 16 + 7 * max(len(label) for label in labels)
    size = cell * len(labels)
    side = margin + size
    parts = [f'<svg class="map" viewBox="0 0 {side + 4} {side + 24}" width="{side + 4}" role="img">']
    parts.append(text(margin + size / 2, 14, title, "middle", "name"))
    for row, label in enumerate(labels):
        y = 24 + row * cell
        parts.append(text(margin - 6, y + 16, label, "end"))
        parts.append(
            f'<text class="tick" transform="translate({margin + row * cell + 15},{24 + size + 8}) rotate(90)">'
            f"{escape(label)}</text>"
        )
        for column in range(row + 1):
            weight = weights[row][column]
            parts.append(
                f'<rect x="{margin + column * cell}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="var(--one)" '
                f'fill-opacity="{0.04 + 0.96 * weight:.3f}"><title>{escape(label)} looks at {escape(labels[column])}: '
                f"{weight:.0%}</title></rect>"
            )
    parts.append("</svg>")
    return "".join(parts)


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
