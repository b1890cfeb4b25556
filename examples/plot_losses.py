"""Draw the losses of several runs of ``train_gpt.py`` as one picture.

    pccl launch -n 4 -- python examples/train_gpt.py --mode sync --log sync-{peer}.jsonl
    pccl launch -n 4 -- python examples/train_gpt.py --mode streaming --log streaming-{peer}.jsonl
    python examples/plot_losses.py sync-0.jsonl streaming-0.jsonl --out losses.png

Each log gives one curve: the held-out loss over bytes, steps or time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

LABELS = {
    "tokens": "bytes that each peer has trained on",
    "step": "inner steps",
    "seconds": "seconds since the log began",
}


def read_curve(path: Path, over: str) -> tuple[list[float], list[float]]:
    """Return the held-out losses of a log.

    Args:
        path: file that ``train_gpt.py --log`` wrote. Incomplete lines, which a killed process
            leaves, are skipped.
        over: ``tokens``, ``step`` or ``seconds``.

    Returns:
        The positions of the losses on the x axis, and the losses.

    Raises:
        ValueError: the log holds no held-out loss.
        OSError: the file cannot be read.
    """
    places: list[float] = []
    losses: list[float] = []
    began: datetime | None = None
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError:
            continue
        now = datetime.fromisoformat(line["time"])
        began = began or now
        if line["event"] == "Evaluated" and line["loss"] is not None:
            line["seconds"] = (now - began).total_seconds()
            places.append(float(line[over]))
            losses.append(float(line["loss"]))
    if not losses:
        raise ValueError(f"{path} holds no held-out loss; give a file of train_gpt.py --log")
    return places, losses


def draw(curves: dict[str, tuple[list[float], list[float]]], over: str, out: Path) -> None:
    """Draw each curve with its name, and save the picture. The suffix of ``out`` is its format."""
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")  # matplotlib is typed in part only
    axes = figure.add_subplot()
    for name, (places, losses) in curves.items():
        axes.plot(places, losses, marker=".", label=f"{name}: {losses[-1]:.3f}")
    axes.set_xlabel(LABELS[over])
    axes.set_ylabel("held-out loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the logs, and draw the picture."""
    parser = argparse.ArgumentParser(description="Draw the held-out losses of several logs.")
    parser.add_argument("logs", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--over", choices=sorted(LABELS), default="tokens", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("losses.png"), help="(%(default)s)")
    given = parser.parse_args(arguments)
    try:
        curves = {path.stem: read_curve(path, given.over) for path in given.logs}
        draw(curves, given.over, given.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name, (_, losses) in curves.items():
        print(f"{name}: {losses[-1]:.4f}")
    print(f"picture: {given.out}")


if __name__ == "__main__":
    main()
