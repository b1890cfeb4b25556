"""The output of ``pccl bench``: a line for each case, or JSON objects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import click

from pccl.cli.bench.machine import conditions_of, to_lines
from pccl.cli.bench.plan import PLAIN, BenchPlan
from pccl.cli.bench.statistics import Figures
from pccl.cli.sizes import format_size
from pccl.cli.streams import writing

GIGA = 1e9

LEGEND = """\
time: from call to return, mean over the peers, median over the rounds
span: from the first call to the last return of all peers, median over the rounds
bus: size divided by time, times 2(N-1)/N, the load of a link in a ring
CPU: user and system time of all peers, per GiB of tensor
extra: peak memory of the worst peer beyond a connected process and tensors"""

ERROR_LEGEND = """\
error: relative L2 error of the sum (the mean has the same); 0: every bit was right
wire: bytes on the network for each sent value"""

RATIO_LEGEND = "ratio: time of the other side divided by ours: above 1, ours is faster"

NO_NAMESPACE = "no Gloo under our congestion control, since this system forbids namespaces: {}"


class Screen:
    """Prints figures on stdout as lines or JSON, and shows the progress on a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._shows_doing = sys.stderr.isatty() and not as_json

    def doing(self, text: str) -> None:
        """Show the current work on a terminal, in place of the previous text."""
        if self._shows_doing:
            click.echo(f"\r\x1b[K{text}\r", err=True, nl=False)

    @writing()
    def lines(self, *lines: str) -> None:
        """Print lines, unless the output is JSON."""
        if not self._as_json:
            self.doing("")
            print(*lines, sep="\n", flush=True)

    @writing()
    def figure(self, line: str, found: Figures) -> None:
        """Print ``line``, or ``found`` if the output is JSON."""
        self.doing("")
        print(json.dumps(found) if self._as_json else line, flush=True)


def end_with(faults: Sequence[str]) -> NoReturn:
    """Print the wrong values on stderr, and exit with 1 if there are any, else with 0."""
    for fault in faults:
        print(f"WRONG VALUES: {fault}", file=sys.stderr)
    raise SystemExit(1 if faults else 0)


class BenchView:
    """The output of ``pccl bench allreduce``."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._conditions: Figures = {}
        self._columns: list[Column] = []
        self._congestion: dict[str, set[str]] = {}
        self._no_namespace = ""
        self.doing = screen.doing

    def begin(self, plan: BenchPlan, *, master: str = "", no_namespace: str = "") -> None:
        """Print the conditions of the benchmark and the headings.

        Args:
            plan: what is measured.
            master: address of the master of several hosts; empty: one machine.
            no_namespace: why the system forbids network namespaces; empty: not asked, or allowed.
        """
        machine = conditions_of("numpy", *(["torch"] if "gloo" in plan.against else []))
        self._no_namespace = no_namespace
        how = {"rounds": plan.rounds, "warmup": plan.warmup, "emulate": plan.emulate}
        self._conditions = {**machine, **how, "master": master, "no_namespace": no_namespace}
        self._columns = columns_of(plan)
        where = "in place" if plan.in_place else "into a second buffer"
        link = f"links emulated ({plan.emulate})" if plan.emulate else "loopback"
        link = f"between hosts, master at {master}" if master else link
        turns = f" in turn with {' and '.join(plan.against)}" if plan.against else ""
        headings = [each.heading.rpartition("\n") for each in self._columns]
        self._screen.lines(
            *to_lines(machine),
            f"sum of {plan.dtype} {where}, {link}; one process, one numeric thread per peer",
            f"{plan.rounds} rounds{turns} after {plan.warmup} to warm up, every value checked",
            "",
            *(self._row(heading[at] for heading in headings) for at in (0, 2)),
        )

    def add(self, result: Figures) -> None:
        """Print the figures of a case."""
        self._congestion.setdefault(result["side"], set()).add(result["congestion"])
        line = self._row(column.cell(result) for column in self._columns)
        self._screen.figure(line, {**result, "conditions": self._conditions})

    def conclude(self) -> None:
        """Print the congestion control and the legend of the columns."""
        controls = ", ".join(
            f"{side} {'/'.join(sorted(names - {''})) or 'unknown'}"
            for side, names in self._congestion.items()
        )
        notes = [
            f"congestion control of the peers' connections: {controls}",
            *([NO_NAMESPACE.format(self._no_namespace)] if self._no_namespace else []),
            LEGEND,
            *([ERROR_LEGEND] if set(ERRORS) & set(self._columns) else []),
            *([RATIO_LEGEND] if RATIO in self._columns else []),
        ]
        if self._columns:
            self._screen.lines("", *notes)

    def _row(self, texts: Iterable[str]) -> str:
        found = zip(texts, self._columns, strict=True)
        return " ".join(f"{text:>{column.width}}" for text, column in found)


def columns_of(plan: BenchPlan) -> list[Column]:
    """Return the columns of the table; variants and other sides add columns."""
    variant, errors = (VARIANT, ERRORS) if plan.variants != (PLAIN,) else ((), ())
    side, ratio = ((SIDE,), (RATIO,)) if plan.against else ((), ())
    return [*CASE, *side, *variant, *COSTS, *errors, *ratio]


def duration(seconds: float) -> str:
    """Return a time as text with three significant digits."""
    if seconds < 1e-3:
        return f"{_three(seconds * 1e6)} µs"
    return f"{_three(seconds * 1e3)} ms" if seconds < 1 else f"{_three(seconds)} s"


def percent(share: float) -> str:
    """Return a relative error as text: 0, in percent, or with an exponent if it is small."""
    return "0" if share == 0 else f"{share:.3%}" if share >= 1e-3 else f"{share:.1e}"


def gigabytes(count: float) -> str:
    """Return a bandwidth in GB/s as text, with an exponent if it is small."""
    speed = count / GIGA
    return f"{speed:.3f}" if speed >= 1e-3 else f"{speed:.0e}"


def _three(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


class Column(NamedTuple):
    """A column of the table. Its heading has one or two lines."""

    heading: str
    width: int
    field: str
    write: Callable[[Any], str]

    def cell(self, result: Figures) -> str:
        """Return this column's text for a result; a dash if the result lacks the field."""
        return self.write(result[self.field]) if self.field in result else "-"


CASE = (
    Column("size", 8, "bytes", format_size),
    Column("peers", 5, "peers", str),
    Column("lanes", 5, "lanes", str),
)
VARIANT = (
    Column("asked", 5, "algorithm_asked", str),
    Column("by", 5, "algorithm", str),
    Column("format", 10, "quantize", str),
)
COSTS = (
    Column("time", 7, "seconds_median", duration),
    Column("time\np95", 7, "seconds_p95", duration),
    Column("time\np99", 7, "seconds_p99", duration),
    Column("span", 7, "span_median", duration),
    Column("bus\nGB/s", 6, "bus_bandwidth", gigabytes),
    Column("CPU\ns/GiB", 6, "cpu_s_per_gib", "{:.2f}".format),
    Column("extra\nMiB", 6, "extra_mib", "{:.2f}".format),
)
ERRORS = (
    Column("error", 7, "error", percent),
    Column("wire B\n/value", 6, "wire_bytes_per_value", "{:.3f}".format),
)
SIDE = Column("side", 10, "side", str)
RATIO = Column("ratio", 5, "ratio", "{:.2f}".format)
