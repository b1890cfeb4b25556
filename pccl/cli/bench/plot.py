"""The picture of a benchmark: bandwidth over size, ours and theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pccl.cli.bench.arguments import format_size
from pccl.cli.bench.statistics import BenchResult
from pccl.cli.bench.variants import PLAIN
from pccl.cli.demo.plot import blank

GIGA = 1e9


def draw(results: Sequence[BenchResult], path: Path) -> None:
    """Draw results into a PNG file.

    Args:
        results: at least one.
        path: overwritten if it exists.
    """
    figure, axes = blank()
    for number, (label, line) in enumerate(lines(results).items()):
        sizes = [result.bytes for result in line]
        speeds = [result.algorithm_bandwidth / GIGA for result in line]
        axes.plot(sizes, speeds, marker="o", color=f"C{number}", label=f"pccl, {label}")
        compared = [result for result in line if result.theirs is not None]
        if compared:
            axes.plot(
                [result.bytes for result in compared],
                [
                    result.bytes / result.theirs.median / GIGA
                    for result in compared
                    if result.theirs
                ],
                marker="x",
                linestyle="--",
                color=f"C{number}",
                label=f"{compared[0].against}, {compared[0].peers} peers",
            )
    sizes = sorted({result.bytes for result in results})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("algorithm bandwidth, GB/s")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"pccl bench allreduce: {results[0].dtype} on one machine")
    figure.savefig(path, dpi=120, format="png")


def lines(results: Sequence[BenchResult]) -> dict[str, list[BenchResult]]:
    """What belongs on one line: the same peers, lanes and variant, by size."""
    found: dict[str, list[BenchResult]] = {}
    for result in sorted(results, key=lambda result: (result.peers, result.bytes)):
        label = f"{result.peers} peers, {result.lanes} lane{'s' if result.lanes != 1 else ''}"
        if result.variant != PLAIN:
            label += f", {result.variant}"
        found.setdefault(label, []).append(result)
    return found
