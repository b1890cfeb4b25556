"""Plots of a run, drawn by matplotlib as SVG for a page."""

from __future__ import annotations

import importlib
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pccl.stress.chaos.verdict.record import RunRecord

MARK = "#dc2626"
BINS_MAX = 300
MARKS_MAX = 1500


class PlotLine(NamedTuple):
    """The points of one line, in the order of ``x``."""

    label: str
    points: Sequence[tuple[float, float]]


def over_time(
    lines: Sequence[PlotLine], marks: Sequence[float], x_max: float, y_min: float = 0.0
) -> str:
    """Return step lines over seconds, with vertical lines at ``marks``, as SVG."""
    figure, axes = blank(2.4)
    for line in lines:
        axes.step(*zip(*line.points, strict=True), where="post", label=line.label)
    axes.vlines(marks[:MARKS_MAX], 0, 1, MARK, alpha=0.35, transform=axes.get_xaxis_transform())
    axes.update_datalim([(0, y_min)])  # so that there is room above the largest value
    axes.set(xlabel="seconds", xlim=(0, x_max), ylim=(y_min, None))
    if lines:
        figure.legend(loc="outside upper left", ncols=len(lines), frameon=False)
    return svg(figure)


def dots(values: Mapping[str, Sequence[float]]) -> str:
    """Return the values of each kind, in seconds, as a row of dots, as SVG."""
    kinds = sorted(values, reverse=True)
    figure, axes = blank(0.6 + 0.25 * max(len(kinds), 1))
    for row, kind in enumerate(kinds):
        axes.plot(values[kind], [row] * len(values[kind]), "o", color="tab:blue", alpha=0.45)
    axes.set(xlabel="seconds", yticks=range(len(kinds)), yticklabels=kinds, xlim=(0, None))
    return svg(figure)


def world_sizes(record: RunRecord, seconds: float) -> list[PlotLine]:
    """Return the contributor counts of each group over time; equal neighbours are one step."""
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
    """Return the operations per second, in bins."""
    width_s = max(1.0, seconds / BINS_MAX)
    counts = Counter(
        int((each.at_s - record.began_s) / width_s)
        for each in record.operations.values()
        if each.at_s >= record.began_s
    )
    bins = range(int(seconds / width_s) + 1)
    return PlotLine("operations per second", [(n * width_s, counts[n] / width_s) for n in bins])


def blank(height: float) -> tuple[Any, Any]:
    """Return an empty figure and its axes, without a display; matplotlib is only partly typed."""
    # Imported here, because only a page needs matplotlib, which may not be installed.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(10, height), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Any) -> str:
    """Return only the SVG element of a figure, as HTML needs it; text stays text."""
    matplotlib: Any = importlib.import_module("matplotlib")  # typed in part only
    found, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(found, format="svg", metadata=nothing)
    return found.getvalue()[found.getvalue().index("<svg") :]
