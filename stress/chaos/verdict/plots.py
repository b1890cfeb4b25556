"""The pictures of a run as SVG, written by hand: they need no library, and a page can hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pccl.stress.chaos.verdict.record import RunRecord

WIDTH, HEIGHT = 960, 220
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 14, 30
COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#65a30d", "#be185d")
MARK = "#dc2626"
BINS_MAX = 300
MARKS_MAX = 1500
TICKS = 6


@dataclass(frozen=True, slots=True)
class PlotLine:
    """Points to be joined, ``x`` ascending."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line, with words to hover over."""

    x: float
    words: str


def over_time(title: str, lines: Sequence[PlotLine], marks: Sequence[Mark], x_max: float) -> str:
    """Steps over seconds, with marks."""
    y_max = max((y for line in lines for _, y in line.points), default=1.0) or 1.0
    parts = [_frame(title, x_max, y_max, "seconds")]
    for mark in marks[:MARKS_MAX]:
        x = _x(mark.x, x_max)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{MARK}" '
            f'stroke-opacity="0.35"><title>{escape(mark.words)}</title></line>'
        )
    for number, line in enumerate(lines):
        path: list[str] = []
        for x, y in line.points:
            path.append(f"{'H' if path else 'M'}{_x(x, x_max):.1f}")
            path[-1] += f" V{_y(y, y_max):.1f}" if len(path) > 1 else f",{_y(y, y_max):.1f}"
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{LEFT + 8 + 110 * number}" y="{TOP + 12}" fill="{colour}">'
            f"{escape(line.label)}</text>"
        )
    return "".join([*parts, "</svg>"])


def dots(title: str, values: Mapping[str, Sequence[float]]) -> str:
    """For each kind its values in seconds as dots in a row."""
    kinds = sorted(values)
    x_max = max((x for each in values.values() for x in each), default=1.0) or 1.0
    height = TOP + BOTTOM + 22 * max(len(kinds), 1)
    parts = [_begin(title, height)]
    for row, kind in enumerate(kinds):
        y = TOP + 22 * row + 11
        parts.append(f'<text x="4" y="{y + 4}">{escape(kind)}</text>')
        for x in values[kind]:
            at = 160 + x / x_max * (WIDTH - 160 - RIGHT)
            parts.append(
                f'<circle cx="{at:.1f}" cy="{y}" r="4" fill="{COLOURS[0]}" fill-opacity="0.45">'
                f"<title>{x:.3f} s</title></circle>"
            )
    for tick in range(TICKS + 1):
        at = 160 + tick / TICKS * (WIDTH - 160 - RIGHT)
        parts.append(
            f'<text x="{at:.1f}" y="{height - 8}" text-anchor="middle">{x_max * tick / TICKS:.2f} s'
            "</text>"
        )
    return "".join([*parts, "</svg>"])


def world_sizes(record: RunRecord, seconds: float) -> list[PlotLine]:
    """Contributors of the operations, in order; equal neighbours are one step."""
    points: dict[int, list[tuple[float, float]]] = {}
    ordered = sorted(record.operations.items(), key=lambda item: item[1].at_s)
    for (group, *_), operation in ordered:
        line = points.setdefault(group, [])
        size = float(len(operation.contributors))
        if not line or line[-1][1] != size:
            line.append((max(0.0, operation.at_s - record.began_s), size))
    return [
        PlotLine(f"group {group}", [*line, (seconds, line[-1][1])])
        for group, line in sorted(points.items())
    ]


def rates(record: RunRecord, seconds: float) -> PlotLine:
    """Operations per second, in bins."""
    width_s = max(1.0, seconds / BINS_MAX)
    counts = Counter(
        int((each.at_s - record.began_s) / width_s)
        for each in record.operations.values()
        if each.at_s >= record.began_s
    )
    bins = range(int(seconds / width_s) + 1)
    return PlotLine("operations per second", [(n * width_s, counts[n] / width_s) for n in bins])


def _x(x: float, x_max: float) -> float:
    return LEFT + min(1.0, x / x_max) * (WIDTH - LEFT - RIGHT)


def _y(y: float, y_max: float) -> float:
    return HEIGHT - BOTTOM - y / (1.1 * y_max) * (HEIGHT - TOP - BOTTOM)


def _begin(title: str, height: int) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def _frame(title: str, x_max: float, y_max: float, unit: str) -> str:
    parts = [_begin(title, HEIGHT)]
    base = HEIGHT - BOTTOM
    parts.append(f'<path d="M{LEFT},{TOP}V{base}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>')
    for tick in range(TICKS + 1):
        x = LEFT + tick / TICKS * (WIDTH - LEFT - RIGHT)
        value = x_max * tick / TICKS
        words = f"{value:.0f}" if x_max >= 10 else f"{value:.1f}"
        parts.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{words}</text>')
    for share in (0.5, 1.0):
        y = _y(y_max * share, y_max)
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_max * share:.3g}</text>'
        )
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{unit}</text>')
    return "".join(parts)
