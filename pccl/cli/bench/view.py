"""What ``pccl bench`` shows: a table that grows on a terminal, lines when piped, or JSON objects.

Each view is told the same things in the same order; none decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol, Self

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pccl.cli.bench.arguments import format_size
from pccl.cli.bench.conditions import Conditions
from pccl.cli.bench.floor import Bandwidths, Costs, Floor
from pccl.cli.bench.statistics import MIB, BenchResult
from pccl.cli.streams import writing

GIGA = 1e9

HEADINGS = ("size", "peers", "lanes", "time", "alg\nGB/s", "bus\nGB/s", "CPU\ns/GiB", "extra\nMiB")
THEIR_HEADINGS = ("{}\ntime", "{}\ns/GiB", "times\nfaster")
COST_HEADINGS = (
    *("size", "peers", "lanes", "floor", "times\nfloor", "transfer", "adds"),
    *("digest", "commit", "backup"),
)

NAMING_COLUMNS = 3
"""Of either table, the first ones say which case a row is about."""

VARIANT_HEADINGS = ("by", "format", "tensors")
"""These name a case too, if there are several ways to reduce."""

ERROR_HEADINGS = ("error", "wire B\n/value")

TABLE_WIDTH_MIN = 40
"""Less has no room for the naming columns of any size and one more."""

VARIANT_WIDTH = 26
"""And what the columns take that name a variant."""

LEGEND = """\
time: from call to return, mean over the peers, median over the rounds
alg: size by time; bus: that times 2(N-1)/N, as each link of a ring carries
CPU: user and system time of all peers, by GiB of tensor
extra: peak memory of the worst peer beyond a connected process and tensors"""

COST_LEGEND = """\
floor: transfer and adds of a ring at the speeds above, in turns if there are
more peers than cores; digest: the tensor at the speed of the hash in the cache
commit: the median barrier; backup: one copy of the tensor, if it is in place"""

ERROR_LEGEND = """\
error: relative L2 error of the sum, and so of the mean; 0: every bit was right
wire: bytes that peers sent for each value that they sent; *: chosen by auto"""


class BenchView(Protocol):
    """Somebody to tell what happens."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(self, *exc: object) -> None:
        """Leave the terminal as it was found."""
        ...

    def begin(self, conditions: Conditions) -> None:
        """Under which conditions everything is measured."""
        ...

    def doing(self, text: str) -> None:
        """What is being measured."""
        ...

    def add(self, result: BenchResult) -> None:
        """A case is done."""
        ...

    def conclude(self, floor: Floor | None) -> None:
        """All is done; the floor, if it was measured."""
        ...


class BenchJsonView:
    """One object per line: results, then what belongs to the floor."""

    def __init__(self) -> None:
        self._conditions: Conditions | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def begin(self, conditions: Conditions) -> None:
        """Come with every result."""
        self._conditions = conditions

    def doing(self, text: str) -> None:
        """Not for programs."""

    @writing()
    def add(self, result: BenchResult) -> None:
        """Print the object."""
        assert self._conditions is not None
        found = {**result.to_dict(), "conditions": self._conditions.to_dict()}
        print(json.dumps(found), flush=True)

    @writing()
    def conclude(self, floor: Floor | None) -> None:
        """Print the objects."""
        for found in floor.to_dicts() if floor is not None else []:
            print(json.dumps(found), flush=True)


class BenchPlainView:
    """Lines of fixed width, each as soon as it is known."""

    def __init__(self, against: str, *, by_variant: bool = False) -> None:
        self._against = against
        self._by_variant = by_variant
        self._congestion: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    @writing()
    def begin(self, conditions: Conditions) -> None:
        """The conditions and the head of the table."""
        print(*conditions.to_lines(), "", *_head(self._headings()), sep="\n", flush=True)

    def doing(self, text: str) -> None:
        """Not in a file."""

    @writing()
    def add(self, result: BenchResult) -> None:
        """One line."""
        self._congestion.add(result.congestion)
        found = cells(result, by_variant=self._by_variant, against=self._against)
        print(_line(found), flush=True)

    @writing()
    def conclude(self, floor: Floor | None) -> None:
        """The legend and the floor."""
        print("", congestion_line(self._congestion), legend(self._by_variant), sep="\n", flush=True)
        if floor is not None:
            print("", *floor_lines(floor.speeds), "", *_head(COST_HEADINGS), sep="\n")
            rows = [_line(cost_cells(cost)) for cost in floor.costs]
            print(*rows, "", COST_LEGEND, sep="\n", flush=True)

    def _headings(self) -> tuple[str, ...]:
        return headings(self._against, by_variant=self._by_variant)


class BenchLiveView:
    """A table that gets a row when a case is done, and under it what is being measured.

    On a narrow terminal it is several tables, one under the other; see :func:`tables`.

    In between it is drawn again when a peer says how far it is, once a second, for drawing takes
    time away from what is measured. Lines and objects take none.
    """

    def __init__(self, console: Console, against: str, *, by_variant: bool = False) -> None:
        self._by_variant = by_variant
        self._against = against
        self._console = console
        self._live = Live(console=console, auto_refresh=False)
        self._headings = headings(against, by_variant=by_variant)
        self._results: list[BenchResult] = []

    @writing()
    def __enter__(self) -> Self:
        self._live.start()
        return self

    @writing()
    def __exit__(self, *exc: object) -> None:
        self._live.update(self._table(), refresh=True)
        self._live.stop()

    @writing()
    def begin(self, conditions: Conditions) -> None:
        """Above the table."""
        for line in conditions.to_lines():
            self._console.print(Text(line, style="dim"))

    @writing()
    def doing(self, text: str) -> None:
        """Under the table."""
        self._live.update(Group(self._table(), Text(text, style="cyan")), refresh=True)

    @writing()
    def add(self, result: BenchResult) -> None:
        """One more row."""
        self._results.append(result)
        self._live.update(self._table(), refresh=True)

    @writing()
    def conclude(self, floor: Floor | None) -> None:
        """The legend and the floor."""
        self._live.update(self._table(), refresh=True)
        self._live.stop()
        congestion = {result.congestion for result in self._results}
        self._console.print(
            Text(f"{congestion_line(congestion)}\n{legend(self._by_variant)}", style="dim")
        )
        if floor is not None:
            self._console.print()
            for line in floor_lines(floor.speeds):
                self._console.print(Text(line))
            rows = [cost_cells(cost) for cost in floor.costs]
            styles = [""] * len(rows)
            for table in tables(
                "beside the floor", COST_HEADINGS, rows, styles, self._console.width
            ):
                self._console.print(table)
            self._console.print(Text(COST_LEGEND, style="dim"))

    def _table(self) -> Group:
        rows = [
            cells(result, by_variant=self._by_variant, against=self._against)
            for result in self._results
        ]
        styles = ["" if result.values_ok else "bold red" for result in self._results]
        width = self._console.width
        naming = NAMING_COLUMNS + (len(VARIANT_HEADINGS) if self._by_variant else 0)
        title = "pccl bench allreduce"
        return Group(*tables(title, self._headings, rows, styles, width, naming))


def choose_view(against: str, *, by_variant: bool = False) -> BenchPlainView | BenchLiveView:
    """The table if somebody can watch it and it is wide enough for one, lines otherwise."""
    console = Console()
    needed = TABLE_WIDTH_MIN + (VARIANT_WIDTH if by_variant else 0)
    if console.is_terminal and console.width >= needed:
        return BenchLiveView(console, against, by_variant=by_variant)
    return BenchPlainView(against, by_variant=by_variant)


def tables(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str],
    width: int,
    naming: int = NAMING_COLUMNS,
) -> list[Table]:
    """A table as one if it fits, otherwise as several, so that no figure is cut off.

    Args:
        title: above the first.
        names: heading of each column; some have two lines.
        rows: cells, as many as names.
        styles: of each row.
        width: columns of the terminal.
        naming: columns that say which case a row is about.
    """
    columns = [[*name.split("\n"), *cell] for name, *cell in zip(names, *rows, strict=True)]
    widths = [max(map(cell_len, column)) for column in columns]
    found: list[Table] = []
    for number, chosen in enumerate(arrange(widths, width, naming)):
        table = _empty_table("" if number else title, [names[column] for column in chosen])
        for row, style in zip(rows, styles, strict=True):
            table.add_row(*(row[column] for column in chosen), style=style)
        found.append(table)
    return found


def arrange(widths: Sequence[int], width: int, naming: int = NAMING_COLUMNS) -> list[list[int]]:
    """Which columns go into which table: those that name a case into each, the others in turn.

    Args:
        widths: of the columns.
        width: of a table; each has at least one column that names no case, even if it is too wide.
        naming: how many name a case.
    """
    found: list[list[int]] = []
    for column in range(naming, len(widths)):
        wanted = [*(found[-1] if found else range(naming)), column]
        # One space between two columns, and one at each edge.
        if found and sum(widths[each] + 1 for each in wanted) + 1 > width:
            found.append([*range(naming), column])
        else:
            found[-1:] = [wanted]
    return found


def legend(by_variant: bool) -> str:
    """What the columns mean."""
    return f"{LEGEND}\n{ERROR_LEGEND}" if by_variant else LEGEND


def headings(against: str, *, by_variant: bool = False) -> tuple[str, ...]:
    """Of all columns; some have two lines."""
    theirs = tuple(heading.format(against) for heading in THEIR_HEADINGS) if against else ()
    if not by_variant:
        return (*HEADINGS, *theirs)
    named, figures = HEADINGS[:NAMING_COLUMNS], HEADINGS[NAMING_COLUMNS:]
    return (*named, *VARIANT_HEADINGS, *figures, *ERROR_HEADINGS, *theirs)


def cells(result: BenchResult, *, by_variant: bool = False, against: str = "") -> list[str]:
    """One row of the table."""
    found = [
        format_size(result.bytes),
        str(result.peers),
        str(result.lanes),
        duration(result.ours.median),
        gigabytes(result.algorithm_bandwidth),
        gigabytes(result.bus_bandwidth),
        f"{result.cpu_s_per_gib(result.ours.cpu_s):.2f}",
        f"{result.extra_bytes / MIB:.2f}",
    ]
    if by_variant:
        variant = result.variant
        found[NAMING_COLUMNS:NAMING_COLUMNS] = [
            result.algorithm + ("*" if variant.algorithm == "auto" else ""),
            variant.quantize,
            f"{variant.tensors} in one" if variant.many else str(variant.tensors),
        ]
        error = percent(result.error)
        found += [error, f"{result.wire_bytes_per_value:.3f}"]
    if result.theirs is not None:
        found += [
            duration(result.theirs.median),
            f"{result.cpu_s_per_gib(result.theirs.cpu_s):.2f}",
            f"{result.ratio:.2f}",
        ]
    elif against:
        found += ["-"] * len(THEIR_HEADINGS)
    return found


def cost_cells(costs: Costs) -> list[str]:
    """One row of the table of costs."""
    parts = (costs.transfer, costs.adds, costs.digest)
    return [
        format_size(costs.bytes),
        str(costs.peers),
        str(costs.lanes),
        duration(costs.floor),
        f"{costs.seconds / costs.floor:.2f}",
        *(duration(part * costs.turns) for part in parts),
        duration(costs.commit),
        duration(costs.backup * costs.turns) if costs.backup else "-",
    ]


def floor_lines(speeds: Bandwidths) -> list[str]:
    """What the machine gives to plain programs."""
    congestion = f" ({speeds.congestion})" if speeds.congestion else ""
    return [
        "floor: what plain programs get on this machine, one thread each, in GB/s",
        f"  raw loopback   {speeds.loopback / GIGA:6.2f} each way, both at a time{congestion}",
        f"  copy           {_pair(speeds.copy_cache, speeds.copy_memory)}",
        f"  add            {_pair(speeds.add_cache, speeds.add_memory)}",
        f"  hash           {_pair(speeds.hash_cache, speeds.hash_memory)}",
    ]


def congestion_line(names: set[str]) -> str:
    """The congestion controls that the peers' connections had."""
    known = ", ".join(sorted(filter(None, names))) or "not told by this system"
    return f"congestion control of the peers' connections: {known}"


def duration(seconds: float) -> str:
    """A time with three digits that count."""
    if seconds < 1e-3:
        return f"{_three(seconds * 1e6)} µs"
    return f"{_three(seconds * 1e3)} ms" if seconds < 1 else f"{_three(seconds)} s"


def percent(share: float) -> str:
    """A relative error with three digits that count."""
    return "0" if share == 0 else f"{share:.3%}" if share >= 1e-3 else f"{share:.1e}"


def gigabytes(count: float) -> str:
    """A bandwidth in GB/s; what would be rounded to nothing has an exponent."""
    speed = count / GIGA
    return f"{speed:.3f}" if speed >= 1e-3 else f"{speed:.0e}"


def _three(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _pair(cache: float, memory: float) -> str:
    return f"{cache / GIGA:6.2f} in the cache, {memory / GIGA:.2f} in memory"


def _empty_table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _head(names: Sequence[str]) -> list[str]:
    """Two lines over a plain table."""
    upper, lower = zip(*(_two_lines(name) for name in names), strict=True)
    return [_line(upper), _line(lower)] if any(upper) else [_line(lower)]


def _two_lines(name: str) -> tuple[str, str]:
    upper, newline, lower = name.partition("\n")
    return (upper, lower) if newline else ("", upper)


def _line(parts: Sequence[str]) -> str:
    return " ".join(f"{part:>8}" for part in parts).rstrip()
