"""Coordinates for the small pictures of the pages. Pure: the templates draw them as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.observe.flow import Edge, FlowNode, Layout

NODE_WIDTH = 210
NODE_HEIGHT = 46
COLUMN_WIDTH = 330
ROW_HEIGHT = 62
MARGIN = 12


@dataclass(frozen=True, slots=True)
class Box:
    """A node in the picture."""

    node: FlowNode
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Line:
    """An edge in the picture."""

    edge: Edge
    path: str
    label_x: float
    label_y: float


@dataclass(frozen=True, slots=True)
class Picture:
    width: int
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[Line, ...]


def picture(layout: Layout) -> Picture:
    """The flow as boxes and curves."""
    heights: dict[int, int] = {}
    for placed in layout.placed.values():
        heights[placed.column] = max(heights.get(placed.column, 0), placed.row + 1)
    boxes = {}
    for name, placed in layout.placed.items():
        top = (layout.rows - heights[placed.column]) * ROW_HEIGHT // 2  # columns are centred
        x, y = MARGIN + placed.column * COLUMN_WIDTH, MARGIN + top + placed.row * ROW_HEIGHT
        boxes[name] = Box(placed.node, x, y)
    lines = tuple(_line(edge, boxes[edge.source], boxes[edge.target]) for edge in layout.edges)
    columns = max((placed.column for placed in layout.placed.values()), default=0) + 1
    width = MARGIN * 2 + (columns - 1) * COLUMN_WIDTH + NODE_WIDTH
    return Picture(width, MARGIN * 2 + max(1, layout.rows) * ROW_HEIGHT, tuple(boxes.values()), lines)


def _line(edge: Edge, source: Box, target: Box) -> Line:
    y1, y2 = source.y + NODE_HEIGHT / 2, target.y + NODE_HEIGHT / 2
    x1 = source.x + NODE_WIDTH
    if source.x == target.x:  # a stream that copies another: around the right side
        bow = x1 + 46
        return Line(edge, f"M {x1} {y1:g} C {bow} {y1:g}, {bow} {y2:g}, {x1} {y2:g}", x1 + 38, (y1 + y2) / 2)
    x2 = target.x
    middle = (x1 + x2) / 2
    path = f"M {x1} {y1:g} C {middle:g} {y1:g}, {middle:g} {y2:g}, {x2} {y2:g}"
    return Line(edge, path, x2 - 6, y2 - 5)


def trend(values: Sequence[float], width: int = 240, height: int = 40) -> str:
    """The points of a polyline from left to right; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    top = max(values) or 1.0
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
