"""Coordinates for the small pictures of the pages. Pure: the templates draw them as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from penstock.observe.flow import BADNESS, Edge, FlowNode, Layout, per_second
from penstock.units import approximate_duration

NODE_WIDTH = 220
NODE_HEIGHT = 46
COLUMN_WIDTH = 350
ROW_HEIGHT = 62
MARGIN = 12
HEAD = 26
"""Pixels above the boxes, for the names of the columns."""
COLUMN_NAMES = ("Publishers", "Streams", "Readers", "What they write")
TEXT_MARGIN = 14
NAME_SIZE = 13
DETAIL_SIZE = 11
"""Sizes of type in pixels, as in the style sheet."""
LABEL_LINE = 13


@dataclass(frozen=True, slots=True)
class Box:
    """A node in the picture."""

    node: FlowNode
    x: int
    y: int
    name: str
    """The name, as much of it as fits."""
    detail: str


Point = tuple[float, float]
Curve = tuple[Point, Point, Point, Point]
"""The points of a cubic curve."""


@dataclass(frozen=True, slots=True)
class Line:
    """An edge in the picture."""

    edge: Edge
    path: str
    curve: Curve
    label: tuple[str, ...] = ()
    """Lines of text."""
    label_x: float = 0.0
    """Where they end."""
    label_y: float = 0.0
    """The base of the first."""
    width: float = 2.0
    """Wider where more flows."""


@dataclass(frozen=True, slots=True)
class Picture:
    width: int
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]
    heads: tuple[tuple[int, str], ...] = ()
    """Names of the columns that have something in them, and where they begin."""


def picture(layout: Layout) -> Picture:
    """The flow as boxes and curves."""
    heights: dict[int, int] = {}
    for placed in layout.placed.values():
        heights[placed.column] = max(heights.get(placed.column, 0), placed.row + 1)
    boxes = {}
    for name, placed in layout.placed.items():
        top = (layout.rows - heights[placed.column]) * ROW_HEIGHT // 2  # columns are centred
        x, y = MARGIN + placed.column * COLUMN_WIDTH, MARGIN + HEAD + top + placed.row * ROW_HEIGHT
        boxes[name] = _box(placed.node, x, y)
    lines = _labelled([_line(edge, boxes[edge.source], boxes[edge.target]) for edge in layout.edges])
    columns = max((placed.column for placed in layout.placed.values()), default=0) + 1
    width = MARGIN * 2 + (columns - 1) * COLUMN_WIDTH + NODE_WIDTH
    height = MARGIN + HEAD + max(1, layout.rows) * ROW_HEIGHT
    heads = tuple((MARGIN + column * COLUMN_WIDTH, COLUMN_NAMES[column]) for column in sorted(heights))
    return Picture(width, height, tuple(boxes.values()), lines, heads)


def _box(node: FlowNode, x: int, y: int) -> Box:
    """A box whose text stays inside; the page has the whole text as its title."""
    room = NODE_WIDTH - 2 * TEXT_MARGIN
    first = node.kind if node.declared else "not declared"
    detail = f"{first}, {node.detail}" if node.detail else first if node.declared else f"{first}, {node.kind}"
    return Box(node, x, y, fitted(node.name, room - NAME_SIZE, NAME_SIZE), fitted(detail, room, DETAIL_SIZE))


def text_width(text: str, size: float) -> float:
    """About how wide a text is, in a wide typeface without serifs."""
    return size * sum(
        1.0
        if one in "mwMW@%" or ord(one) > 0x2E7F
        else 0.38
        if one in " .,:;'|!ijl()/-ft"
        else 0.74
        if one.isupper()
        else 0.62
        for one in text
    )


def fitted(text: str, width: float, size: float) -> str:
    """The text, or as much of its beginning as fits."""
    if text_width(text, size) <= width:
        return text
    while text and text_width(text + "…", size) > width:
        text = text[:-1]
    return text + "…"


def _line(edge: Edge, source: Box, target: Box) -> Line:
    """A curve between the sides of two boxes that face each other."""
    y1, y2 = source.y + NODE_HEIGHT / 2, target.y + NODE_HEIGHT / 2
    x1, x2 = source.x + NODE_WIDTH, target.x
    if source.x == target.x:  # a stream that copies another: around the right side
        x2, middle = x1, x1 + 46.0
    elif source.x > target.x:  # back to the left, below the edges that come from there
        x1, x2 = source.x, target.x + NODE_WIDTH
        y1, y2 = y1 + NODE_HEIGHT / 4, y2 + NODE_HEIGHT / 4
        middle = (x1 + x2) / 2
    else:
        middle = (x1 + x2) / 2
    path = f"M {x1} {y1:g} C {middle:g} {y1:g}, {middle:g} {y2:g}, {x2} {y2:g}"
    wide = min(7.0, 2.5 + math.log10(1 + edge.rate)) if edge.rate else 2.0
    return Line(edge, path, ((x1, y1), (middle, y1), (middle, y2), (x2, y2)), width=round(wide, 1))


def label_of(edge: Edge) -> tuple[str, ...]:
    """What an edge says: its rate, and what waits."""
    age = f" {approximate_duration(timedelta(seconds=edge.seconds))}" if edge.seconds else ""
    rate = (per_second(edge.rate),) if edge.rate else ()
    return (*rate, f"{edge.lag:,} waiting{age}") if edge.lag else rate


def _labelled(lines: Sequence[Line]) -> tuple[Line, ...]:
    """The lines with their labels, each near its end where no other label is. The worst choose first."""
    order = sorted(range(len(lines)), key=lambda at: -BADNESS[lines[at].edge.state])
    taken: list[tuple[float, float, float, float]] = []
    found = list(lines)
    for at in order:
        line = lines[at]
        if label := label_of(line.edge):
            width, height = max(text_width(one, DETAIL_SIZE) for one in label), LABEL_LINE * len(label)
            for x, y in _label_places(line.curve, width, height):
                area = (x - width, y - height, x, y)
                if not any(_overlap(area, other) for other in taken):
                    break
            taken.append(area)
            found[at] = replace(line, label=label, label_x=x, label_y=y - height + LABEL_LINE - 3)
    return tuple(found)


def _label_places(curve: Curve, width: float, height: float) -> Iterator[Point]:
    """Right lower corners for a label: along the curve from its end, then further and further below it."""
    left, right = sorted((curve[0][0], curve[3][0]))
    if left == right:
        right = left + COLUMN_WIDTH - NODE_WIDTH
    for part in (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1):
        x, y = _at(curve, part)
        yield max(min(x + width / 2, right - 6), min(left + width + 6, right - 6)), y
    for below in range(1, 100):
        yield right - 6, curve[3][1] + below * height


def _at(curve: Curve, part: float) -> Point:
    """The point of a curve at a part of its way."""
    rest = 1 - part
    weights = (rest**3, 3 * rest**2 * part, 3 * rest * part**2, part**3)
    x, y = (sum(weight * point[axis] for weight, point in zip(weights, curve, strict=True)) for axis in (0, 1))
    return x, y


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def trend(values: Sequence[float], width: int = 240, height: int = 40) -> str:
    """The points of a polyline from left to right; empty for fewer than two values, and when all are 0."""
    top = max(values, default=0)
    if len(values) < 2 or not top:
        return ""
    step = width / (len(values) - 1)
    return " ".join(
        f"{place * step:.1f},{height - value / top * (height - 2) - 1:.1f}" for place, value in enumerate(values)
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a histogram."""

    x: float
    y: float
    width: float
    height: float
    count: int
    label: str
    first: int
    """The sequence of its first message."""
    last: int


def bars(counts: Sequence[tuple[str, int, int, int]], width: int = 720, height: int = 120) -> list[Bar]:
    """Bars for label, count, first and last sequence of each part."""
    top = max((count for _, count, _, _ in counts), default=0) or 1
    step = width / max(1, len(counts))
    found = []
    for place, (label, count, first, last) in enumerate(counts):
        size = count / top * (height - 4)
        found.append(Bar(place * step + 0.5, height - size, max(step - 1, 1), size, count, label, first, last))
    return found


HEAT = 6


def heat(value: int, most: int) -> int:
    """How dark a field of a heat map is, from 0 for nothing to 5 for the most."""
    if value <= 0 or most <= 0:
        return 0
    return min(HEAT - 1, 1 + value * (HEAT - 2) // most)
