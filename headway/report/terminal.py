"""Curves and coloured words for a terminal: what is drawn here is rows of text, each piece with its style.

A curve is made of braille dots, eight to a character, or of one mark a character where only ASCII can be shown.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

LEAST_WIDTH, LEAST_HEIGHT = 26, 5  # of a panel, in characters
LABELS = 8  # columns left of a plot
WIDE_RANGE = 100.0  # a curve that spans more than this factor is drawn over a logarithmic axis
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
MARKS = "*+ox#@"  # the same lines where there are no colours
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of the dots of a character, row by row

Span = tuple[str, str]  # some text and its style
Row = list[Span]  # a line of the picture
Points = list[tuple[int, float]]  # (step, value)


@dataclass
class Line:
    """A curve; `look` is the number of its colour and mark, the same in every panel."""

    name: str
    look: int
    points: Points


@dataclass
class Panel:
    """Curves over the steps, in one frame."""

    title: str
    lines: list[Line]
    from_zero: bool = False
    named: bool = False  # whether the names of the lines stand beside the title


def arrange(panels: Sequence[Panel], width: int, height: int, plain: bool) -> list[Row]:
    """As many panels as fit in `width` by `height` characters: the first one large, the others beside each other.

    Lines and panels without a point are left out; there are no rows where nothing is left or fits.
    """
    found = list(drawable(panels))
    while found and (1 + len(beside(found[1:], width))) * LEAST_HEIGHT > height:
        found.pop()
    if not found:
        return []
    ends = [line.points[end][0] for panel in found for line in panel.lines for end in (0, -1)]
    extent = min(ends), max(ends)
    below = beside(found[1:], width)
    each = max(LEAST_HEIGHT, height // (len(below) + 2))
    rows = draw(found[0], extent, width, height - each * len(below), plain)
    for group in below:
        drawn = [draw(panel, extent, width // len(group), each, plain) for panel in group]
        rows += [[span for part in parts for span in part] for parts in zip(*drawn, strict=True)]
    return rows


def drawable(panels: Iterable[Panel]) -> Iterator[Panel]:
    """The panels with those of their lines that have a point."""
    for panel in panels:
        lines = [line for line in panel.lines if any(can_be_drawn(y) for _, y in line.points)]
        if lines:
            yield replace(panel, lines=lines)


def beside(panels: Sequence[Panel], width: int) -> list[Sequence[Panel]]:
    """The panels in rows of like length."""
    rows = math.ceil(len(panels) / max(1, width // LEAST_WIDTH))
    columns = math.ceil(len(panels) / max(1, rows))
    return [panels[number * columns : (number + 1) * columns] for number in range(rows)]


class Canvas:
    """Curves as characters: eight braille dots to one, or a mark a character where only ASCII can be shown.

    Dots are counted from the top left. Where lines cross in a character, the later one gives it its colour.
    """

    def __init__(self, width: int, height: int, plain: bool) -> None:
        self.width, self.height, self.plain = width, height, plain
        self.across, self.down = (1, 1) if plain else (2, 4)
        self.bits = [[0] * width for _ in range(height)]
        self.looks = [[0] * width for _ in range(height)]

    def draw(self, dots: Iterable[tuple[int, int] | None], look: int) -> None:
        """Join the dots; None is a gap."""
        before = None
        for dot in dots:
            if dot is not None and dot != before:
                self.stroke(before or dot, dot, look)
            before = dot

    def stroke(self, start: tuple[int, int], end: tuple[int, int], look: int) -> None:
        (x, y), (right, bottom) = start, end
        count = max(abs(right - x), abs(bottom - y), 1)
        for number in range(count + 1):
            across, down = x + round((right - x) * number / count), y + round((bottom - y) * number / count)
            column, row = across // self.across, down // self.down
            self.bits[row][column] |= BRAILLE[down % self.down][across % self.across]
            self.looks[row][column] = look

    def row(self, number: int) -> Row:
        cells = zip(self.bits[number], self.looks[number], strict=True)
        if self.plain:
            return [(mark(look, plain=True)[0] if bits else " ", "") for bits, look in cells]
        return [(chr(0x2800 + bits), mark(look, plain=False)[1]) if bits else (" ", "") for bits, look in cells]


def mark(look: int, plain: bool) -> Span:
    """How a line is told from others: by a character or by a colour."""
    return (MARKS[look % len(MARKS)], "") if plain else ("━", COLOURS[look % len(COLOURS)])


def draw(panel: Panel, steps: tuple[int, int], width: int, height: int, plain: bool) -> list[Row]:
    """A panel as `height` rows of `width` characters: title and names, the curves, the steps."""
    canvas = Canvas(max(1, width - LABELS), max(1, height - 2), plain)
    right, bottom = canvas.width * canvas.across - 1, canvas.height * canvas.down - 1
    curves = [(line.look, by_column(line.points, steps, right)) for line in panel.lines]
    values = [y for _, curve in curves for _, y in curve if math.isfinite(y)]
    low, high = min(values), max(values)
    logarithmic = not panel.from_zero and low > 0 and high / low > WIDE_RANGE
    if panel.from_zero:
        low = min(0.0, low)

    def scale(y: float) -> float:
        return math.log(y) if logarithmic else y

    floor, span = scale(low), scale(high) - scale(low)

    def dot(column: int, y: float) -> tuple[int, int] | None:
        up = (scale(y) - floor) / span if span > 0 else 0.5
        return (column, bottom - round(up * bottom)) if math.isfinite(y) else None

    for look, curve in curves:
        canvas.draw((dot(column, y) for column, y in curve), look)
    labels = {0: high, canvas.height - 1: low} if span > 0 else {(canvas.height - 1) // 2: low}
    if span > 0 and canvas.height >= 5:
        middle = (scale(high) + scale(low)) / 2
        labels[(canvas.height - 1) // 2] = math.exp(middle) if logarithmic else middle
    wall = "|" if plain else "│"
    rows = [heading(panel, logarithmic, plain)]
    for number in range(canvas.height):
        label = short(labels[number]) if number in labels else ""
        rows.append([(f"{label:>{LABELS - 1}}{wall}", "dim"), *canvas.row(number)])
    begin, end = f"{steps[0]:,}" if steps[0] < steps[1] else "", f"{steps[1]:,}"
    rows.append([(" " * LABELS + begin + end.rjust(canvas.width - len(begin)), "dim")])
    return [cut(row, width, plain) for row in rows]


def by_column(points: Points, steps: tuple[int, int], right: int) -> Points:
    """(column, value) for the columns 0 to `right`: the mean of what is nearest to it, NaN where that has no number."""
    first, span = steps[0], max(1, steps[1] - steps[0])
    columns: dict[int, list[float]] = {}
    for step, y in points:
        columns.setdefault((2 * (step - first) * right + span) // (2 * span), []).append(y)
    found = []
    for column, values in columns.items():
        drawn = [y for y in values if can_be_drawn(y)]
        found.append((column, math.fsum(y / len(drawn) for y in drawn) if drawn else math.nan))
    return found


def can_be_drawn(value: float) -> bool:
    return abs(value) < 1e300  # NaN is not


def heading(panel: Panel, logarithmic: bool, plain: bool) -> Row:
    row: Row = [(" " * LABELS, ""), (panel.title + (", log" if logarithmic else ""), "bold")]
    for line in panel.lines if panel.named and len(panel.lines) > 1 else ():
        sign, colour = mark(line.look, plain)
        row.append((f"  {sign} {line.name}", colour))
    return row


def short(value: float) -> str:
    """A number with four digits, or with as many as go into the room for labels."""
    unit, sign = next((pair for pair in ((1e6, "M"), (1e3, "k")) if 10 * pair[0] <= abs(value) < 1e9), (1.0, ""))
    texts = [f"{value / unit:.{digits}g}{sign}" for digits in (4, 3, 2, 1)]
    return next((text for text in texts if len(text) < LABELS), texts[-1])


def cut(row: Row, width: int, plain: bool) -> Row:
    """The row in exactly `width` characters."""
    kept: Row = []
    room = width
    for text, style in row:
        if len(text) > room:
            kept.append((text[: max(0, room - 1)] + ("~" if plain else "…") if room else "", style))
            return kept
        kept.append((text, style))
        room -= len(text)
    return [*kept, (" " * room, "")]


def fold(spans: Iterable[Span], width: int, plain: bool) -> Iterator[Row]:
    """Facts one after the other, as many to a line as there is room for."""
    row: Row = []
    used = 0
    for text, style in spans:
        if row and used + 2 + len(text) > width:
            yield row
            row, used = [], 0
        gap = "  " if row else ""
        row += [(gap, ""), (text, style)]
        used += len(gap) + len(text)
        if used > width:
            row = cut(row, width, plain)
    yield row


def can_show(characters: str) -> bool:
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def plain_text(rows: Iterable[Row]) -> str:
    return "\n".join("".join(text for text, _ in row).rstrip() for row in rows)


def styled_text(rows: Sequence[Row]) -> Text:
    from rich.text import Text

    lines = (Text.assemble(*row, no_wrap=True, overflow="crop") for row in rows)
    return Text("\n", no_wrap=True, overflow="crop").join(lines)
