"""The demo's picture: loss and world size over time, with kill and join marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pccl.cli.demo.record import DemoRecord


def blank() -> tuple[Any, Any]:
    """An empty figure and its axes, drawn without a display.

    Typed Any on purpose: matplotlib types half of its keywords, and nothing else of it is used.
    """
    # Imported here: half a second that only the end of a demo needs.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def draw(record: DemoRecord, path: Path) -> None:
    """Draw a record into a PNG file.

    Args:
        record: what happened; at least one step.
        path: overwritten if it exists.
    """
    figure, loss_axes = blank()
    size_axes = loss_axes.twinx()
    times = [point.at_s for point in record.points]
    losses = [point.loss for point in record.points]
    sizes = [point.world_size for point in record.points]
    (loss_line,) = loss_axes.semilogy(times, losses, color="tab:blue", label="training loss")
    (size_line,) = size_axes.step(
        times, sizes, where="post", color="tab:orange", linewidth=2, label="world size"
    )
    lines = [loss_line, size_line]
    title = "pccl demo: the peers train one network together"
    if record.killed_at is not None:
        at_s, step = record.killed_at
        label = f"SIGKILL, step {step}"
        title = "pccl demo: one peer is killed, the others carry on"
        lines.append(loss_axes.axvline(at_s, color="tab:red", linestyle="--", label=label))
    if record.grown_at is not None:
        at_s, step = record.grown_at
        label = f"one joins, step {step}"
        title += ", one joins"
        lines.append(loss_axes.axvline(at_s, color="tab:green", linestyle="--", label=label))
    loss_axes.set_xlabel("seconds since the start")
    loss_axes.set_ylabel("training loss, mean over the peers")
    size_axes.set_ylabel("world size")
    size_axes.set_ylim(0, len(record.peers) + 1)
    size_axes.set_yticks(range(len(record.peers) + 2))
    loss_axes.legend(handles=lines, loc="lower left")
    loss_axes.set_title(title)
    figure.savefig(path, dpi=120, format="png")
