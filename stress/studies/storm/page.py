"""The page of a storm: figures and plots in one self-contained HTML file."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from pccl.stress.chaos.trouble import words
from pccl.stress.chaos.verdict.plots import PlotLine, blank, over_time, svg
from pccl.stress.chaos.verdict.report import STYLE, table
from pccl.stress.studies.storm.figures import (
    OneRound,
    Span,
    StormFigures,
    at_equal_steps,
    figures_of,
    loss_curve,
    rounds_of,
)
from pccl.stress.studies.storm.frames import (
    ReplicaState,
    StateSpan,
    began_at,
    joined,
    overlap,
    states_of,
)
from pccl.stress.studies.storm.storm import Storm
from pccl.stress.studies.storm.tape import TapeEvent

COLOURS = {
    ReplicaState.TRAINS: "#bbf7d0",
    ReplicaState.STARTS: "#dc2626",
    ReplicaState.CUT_OFF: "#f59e0b",
    ReplicaState.STOPPED: "#6b7280",
    ReplicaState.NAPS: "#a78bfa",
    ReplicaState.SLEEPS: "#3b82f6",
}
TOOK_PART = "#16a34a"
ROWS_MAX = 32
"""Largest number of rows of the grid that have a number each."""

TILES = """
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.2rem 0 }
.tiles div { flex: 1 1 6rem; padding: .5rem .8rem; border-radius: .4rem; background: #f3f4f6 }
.tiles b { display: block; font-size: 1.4rem; line-height: 1.3 }
.tiles span { color: #4b5563; font-size: .85rem; line-height: 1.2; display: block }
"""


def write_page(
    storm: Storm, events: Sequence[TapeEvent], quiet: Sequence[TapeEvent] | None, path: Path,
    title: str = "A storm",
) -> None:  # fmt: skip
    """Write the page of a tape.

    Args:
        storm: the storm.
        events: its tape.
        quiet: the tape of the same training without faults; None: there is none.
        path: the file.
        title: title of the page.

    Raises:
        OSError: the file cannot be written.
        ValueError: a tape has too few rounds for figures.
    """
    figures = figures_of(storm, events)
    quiet_figures = None if quiet is None else figures_of(storm.quiet, quiet)
    curves = {"this storm": loss_curve(storm, events)}
    if quiet is not None:
        curves["without faults"] = loss_curve(storm.quiet, quiet)
    began = began_at(events)
    rounds = rounds_of(storm, events)
    duration_s = storm.timeline.duration_s
    faults = sorted(storm.timeline.faults, key=lambda one: one.at_s)
    listed = "\n".join(f"{one.at_s:9.2f} s  {words(one)}" for one in faults)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{escape(title)}</title><style>{STYLE}{TILES}</style>",
        f"<h1>{escape(title)}</h1><p>{escape(summary(storm))}</p>",
        "<div class=tiles>",
        *(
            f"<div><b>{escape(value)}</b><span>{escape(label)}</span></div>"
            for label, value in key_figures(figures, loss_difference(curves)).items()
        ),
        "</div>",
        "<h2>Replicas in each round</h2><p>A replica is available if its process lives and can be "
        "reached; red lines are faults.</p>",
        _took_part(rounds, began, [one.at_s for one in faults], storm),
        "<h2>What each replica did</h2><p>One row for each replica.</p>",
        _grid(states_of(events, storm.timeline.peers, began + duration_s), rounds, began),
    ]
    if any(curves.values()):
        parts += ["<h2>Loss on held-out text</h2>", _losses(curves)]
    columns = {"storm": figures} | (
        {} if quiet_figures is None else {"without faults": quiet_figures}
    )
    parts += [
        "<h2>All figures</h2>",
        table("figure", list(columns), _rows(columns)),
        f"<details><summary>Faults</summary><pre>{escape(listed)}</pre></details>",
        f"<details><summary>The storm</summary><pre>{escape(repr(storm.training))}</pre></details>",
    ]
    path.write_text("\n".join(parts) + "</html>\n")


def summary(storm: Storm) -> str:
    """Return replicas, duration, faults and the source of the schedule in one line."""
    timeline = storm.timeline
    kinds = Counter(str(fault.kind) for fault in timeline.faults)
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "no faults"
    source = f" Schedule: {storm.training.source}." if storm.training.source else ""
    what = f"{timeline.peers} replicas, {timeline.duration_s:g} s, seed {timeline.seed}"
    return f"{what}: {faults}.{source}"


def loss_difference(curves: Mapping[str, Sequence[tuple[float, float]]]) -> float | None:
    """Return the last loss of the first curve that can be compared, less that of the second one."""
    own, *others = curves.values()
    for steps, loss in reversed(own if others else ()):
        other = at_equal_steps(others[0], steps)
        if other is not None:
            return loss - other
    return None


def key_figures(figures: StormFigures, difference: float | None) -> dict[str, str]:
    """Return label -> value of the figures that a reader looks for."""
    found = {
        "of possible steps are in the model": f"{figures.share_kept:.1%}",
        "of available replicas in a round, on average": f"{figures.took_part:.1%}",
        "from a kill to training (median)": _median(figures.training_again_s),
        "from a kill to work in a round (median)": _median(figures.in_commit_again_s),
        "longest delay of a round": f"{figures.longest_wait_s:.2f} s",
        "sent for averages": _size(figures.tx_bytes),
    }
    if difference is not None:
        found["loss against no faults, at equal steps"] = f"{difference:+.3f}"
    return found


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _median(spread: Sequence[float]) -> str:
    return f"{spread[0]:.1f} s" if spread else "-"


def _spread(spread: Sequence[float]) -> str:
    return " / ".join(f"{one:.2f}" for one in spread) + " s" if spread else "-"


def _rows(columns: Mapping[str, StormFigures]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for column, one in columns.items():
        lost_s = one.lost_s.values()
        values = {
            "replicas": str(one.replicas),
            "measured time": f"{one.seconds:.1f} s",
            **{f"faults: {kind}": str(count) for kind, count in one.faults.items()},
            "errors that ended a replica": str(one.failures),
            "rounds": str(one.rounds),
            "inner steps in the model": f"{one.steps:,.0f}",
            "inner steps possible": f"{one.steps_possible:,.0f}",
            "share kept": f"{one.share_kept:.2%}",
            "took part, mean": f"{one.took_part:.2%}",
            "took part, smallest": f"{one.took_part_min:.2%}",
            "kill to training (median / p90 / max)": _spread(one.training_again_s),
            "never trained again": str(one.never_again),
            "kill to a round (median / p90 / max)": _spread(one.in_commit_again_s),
            "longest delay of a round": f"{one.longest_wait_s:.2f} s",
            "lost time of a replica, median": f"{statistics.median(lost_s):.2f} s",
            "lost time of a replica, largest": f"{max(lost_s):.2f} s",
            "bytes sent for averages": f"{one.tx_bytes:,}",
            "loss of the final model": "-" if one.loss is None else f"{one.loss:.4f}",
            "models are equal": "yes" if one.is_equal else "no",
        }
        for name, value in values.items():
            rows.setdefault(name, {})[column] = value
    return rows


def _took_part(
    rounds: Sequence[OneRound], began: float, marks: Sequence[float], storm: Storm
) -> str:
    duration_s = storm.timeline.duration_s
    measured = [one for one in rounds if began <= one.at < began + duration_s]
    lines = {
        "available": [(one.at - began, float(len(one.available))) for one in measured],
        "took part": [(one.at - began, float(len(one.took_part))) for one in measured],
    }
    peers = storm.timeline.peers
    smallest = min(min(y for _, y in points) for points in lines.values())
    drawn = [PlotLine(name, points) for name, points in lines.items()]
    return over_time(drawn, marks, duration_s, max(0.0, smallest - peers / 4))


def kept_spans(rounds: Sequence[OneRound], index: int) -> list[Span]:
    """Return the times between two rounds of which the second contains the replica's work."""
    return joined((a.at, b.at) for a, b in itertools.pairwise(rounds) if index in b.took_part)


def _grid(states: Sequence[Sequence[StateSpan]], rounds: Sequence[OneRound], began: float) -> str:
    peers = len(states)
    figure, axes = blank(0.9 + min(0.19 * peers, 9.0))
    ends = max(spans[-1].end for spans in states)
    labels = {"work in the next round": TOOK_PART} | {
        ("training, not in the next round" if state is ReplicaState.TRAINS else state): colour
        for state, colour in COLOURS.items()
        if any(one.state is state and one.end > began for spans in states for one in spans)
    }
    for row, spans in enumerate(states):
        for state, colour in COLOURS.items():
            own = joined((one.begin, one.end) for one in spans if one.state is state)
            _bars(axes, row, own, colour, began)
            if state is ReplicaState.TRAINS:
                _bars(axes, row, overlap(own, kept_spans(rounds, row)), TOOK_PART, began)
    axes.set(xlabel="seconds", xlim=(0, ends - began), ylim=(peers - 0.4, -0.6), ylabel="replica")
    axes.set_yticks(range(0, peers, -(-peers // ROWS_MAX)))
    axes.tick_params(axis="y", labelsize=7, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    marks = [axes.scatter([], [], marker="s", s=60, color=colour) for colour in labels.values()]
    figure.legend(marks, list(labels), loc="outside upper left", ncols=len(labels), frameon=False)
    return svg(figure)


def _bars(axes: Any, row: int, spans: Sequence[Span], colour: str, began: float) -> None:
    bars = [(begin - began, end - begin) for begin, end in spans]
    axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)


def _losses(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    figure, axes = blank(3.0)
    for (name, points), style in zip(curves.items(), ("-o", "--o"), strict=False):
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, markersize=3)
    axes.set(xlabel="inner steps in the model", ylabel="nats per byte", xlim=(0, None))
    axes.legend(frameon=False)
    return svg(figure)
