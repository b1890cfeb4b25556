"""The output of ``pccl status``: tables on a terminal, one line per row when piped.

Some texts come from peers of the run. The message decoder has replaced unprintable characters in
them, so no peer can send control sequences to the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pccl.inquiry import (
    EndedStatus,
    GroupStatus,
    LinkSpeed,
    MasterStatus,
    MemberStatus,
    NewcomerStatus,
    OperationStatus,
    RemovalStatus,
    RoundStatus,
    to_json,
)
from pccl.observe import summary
from pccl.observe.summary import Names, duration, who
from pccl.progress import counted

MIB = 1 << 20

Row: TypeAlias = tuple[str, ...]


class PlainView:
    """Prints to pipes and programs: a line for each row, or a JSON object for each status."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def show(self, status: MasterStatus) -> None:
        """Print ``status``."""
        for line in [json.dumps(to_json(status))] if self._as_json else lines(status):
            click.echo(line)

    def trouble(self, text: str) -> None:
        """Print why there is no status."""
        click.echo(json.dumps({"error": text}) if self._as_json else f"error: {text}")

    def close(self) -> None:
        """Do nothing: this view has nothing to close."""


class TableView:
    """Prints to a terminal; a second status replaces the first one."""

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._shown: RenderableType | None = None

    def show(self, status: MasterStatus) -> None:
        """Print the tables of ``status``, or replace those on the screen."""
        self._put(Group(Text(headline(status), style="bold"), *_tables(status)))

    def trouble(self, text: str) -> None:
        """Show why there is no new status, above the last status."""
        old = [] if self._shown is None else [self._shown]
        self._put(Group(Text(f"{text}; the last status is below", style="red"), *old), old)

    def close(self) -> None:
        """End the live display, and leave the last status on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._shown is not None:
                self._console.print(self._shown)

    def _put(self, what: RenderableType, old: list[RenderableType] | None = None) -> None:
        if self._shown is None:
            self._console.print(what)
        elif self._live is None:
            self._live = Live(what, console=self._console, auto_refresh=False, screen=True)
            self._live.start(refresh=True)
        else:
            self._live.update(what, refresh=True)
        self._shown = old[0] if old else what


def headline(status: MasterStatus) -> str:
    """Return a summary of the run in one line."""
    if status.waits_for:
        return f"this master coordinates no run: {status.waits_for}"
    return (
        f"run {status.run.hex()}, term {status.term}, up {_seconds(status.uptime_ms)}: "
        f"{counted(status.member_count, 'member')}, {counted(status.newcomer_count, 'newcomer')}, "
        f"{counted(len(status.rounds), 'open round')}, "
        f"{counted(status.operation_count, 'operation')} in flight, "
        f"{status.removal_count} removed"
    )


def pace(status: MasterStatus) -> Iterator[str]:
    """Yield how fast the run is, and its slowest member, if calls have ended."""
    if status.ended:
        speed = summary.throughput(status)
        yield (
            f"speed: {speed.calls_per_s:.1f} calls/s, {summary.size(speed.bytes_per_s)}/s, "
            f"{counted(status.ended_count, 'call')} ended"
        )
    if slow := summary.slowest(status):
        yield (
            f"slowest: peer {who(summary.names_of(status), slow.peer)}, last in {slow.calls} of "
            f"the {slow.of} last calls, {duration(slow.late_us)} after the first on average"
        )


def lines(status: MasterStatus) -> Iterator[str]:
    """Yield the whole status as lines. Each line names its subject."""
    yield headline(status)
    yield from pace(status)
    for kind in KINDS:
        for row in kind.rows(status):
            yield kind.line.format(*row)
        if left_out := kind.left_out(status):
            yield f"... and {left_out} more {kind.name}s"


def _tables(status: MasterStatus) -> Iterator[RenderableType]:
    """Yield the speed, and a table for each kind of row that ``status`` has."""
    yield from map(Text, pace(status))
    for kind in KINDS:
        if not (rows := kind.rows(status)):
            continue
        table = Table(*kind.headings, box=SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        yield table
        if left_out := kind.left_out(status):
            yield Text(f"... and {left_out} more", style="dim")


# -- texts -----------------------------------------------------------------------------------------


def _member(member: MemberStatus, names: Names) -> Row:
    where = f"group {member.group}, rank {member.rank}, {_address(member.host, member.port)}"
    state = _connection(member.connected, member.silent_ms)
    if member.awaited_ms is not None:
        state += f", awaited for {_seconds(member.awaited_ms)}"
    step = summary.progress(member)
    return who(names, member.peer), where, state, step, f"in {member.calls or 'no call'}"


def _newcomer(newcomer: NewcomerStatus, names: Names) -> Row:
    where = f"group {newcomer.group}, {_address(newcomer.host, newcomer.port)}"
    state = _connection(newcomer.connected, newcomer.silent_ms)
    state += f", waiting for {_seconds(newcomer.waiting_ms)}"
    return who(names, newcomer.peer), where, state, names.explain(newcomer.waits_for)


def _group(group: GroupStatus, names: Names) -> Row:
    views = f"view {group.view} (open: {', '.join(map(str, group.open_views))})"
    return str(group.group), counted(group.members, "member"), views


def _round(opened: RoundStatus, names: Names) -> Row:
    size = opened.requested_count + opened.missing_count
    missing = _peers(opened.missing, opened.missing_count, names)
    return (
        f"{opened.round.kind.call_name} #{opened.round.n}",
        f"{opened.requested_count} of {size} have called",
        f"{missing} missing for {_seconds(opened.waiting_ms)}",
    )


def _operation(operation: OperationStatus, names: Names) -> Row:
    there = operation.member_count - operation.missing_count
    made = "are done" if operation.started else "have called"
    phase = "started" if operation.started else "requested"
    missing = _peers(operation.missing, operation.missing_count, names)
    data = f"no progress for {_seconds(operation.still_ms)}"
    if operation.started:
        least, most = operation.least_bytes / MIB, operation.most_bytes / MIB
        data = f"{least:.1f} to {most:.1f} MiB received, {data}"
    return (
        f"group {operation.operation.group}, view {operation.operation.view}",
        operation.what,
        f"{phase}, open for {_seconds(operation.open_ms)}",
        f"{there} of {operation.member_count} {made}, {missing} missing",
        data,
    )


def _ended(call: EndedStatus, names: Names) -> Row:
    group = "all groups" if call.group is None else f"group {call.group}"
    last = f"{who(names, call.last)} came last, {duration(call.late_us)} after the first"
    when = f"{_seconds(call.ago_ms)} ago"
    return call.what, group, when, summary.outcome(call), f"took {duration(call.took_us)}", last


def _link(link: LinkSpeed, names: Names) -> Row:
    rtt = f"round trip {duration(link.rtt_us)}" if link.rtt_us else "round trip unknown"
    speed = f"{summary.size(link.bytes_per_s)}/s" if link.bytes_per_s else "speed unknown"
    return summary.pair(link, names), rtt, speed, str(summary.path(link, names))


def _known_speed(link: LinkSpeed) -> float:
    return link.bytes_per_s or math.inf


def _removal(removal: RemovalStatus, names: Names) -> Row:
    whom = f"peer {who(names, removal.peer)} of group {removal.group}"
    when, reason = f"{_seconds(removal.ago_ms)} ago", names.explain(removal.reason)
    return whom, when, removal.cause.name, reason


def _connection(connected: bool, silent_ms: int) -> str:
    state = "connected" if connected else "NOT CONNECTED"
    return f"{state}, heard {_seconds(silent_ms)} ago"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _peers(peers: Sequence[int], count: int, names: Names) -> str:
    if not peers:
        return "no peer"
    more = f" and {count - len(peers)} more" if count > len(peers) else ""
    named = ", ".join(who(names, peer) for peer in peers)
    return f"peer{'s' if count > 1 else ''} {named}{more}"


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1000:.1f} s"


class Kind(NamedTuple):
    """A kind of item that a status lists.

    Attributes:
        name: its name; an ``s`` makes the plural.
        field: the list in the status.
        headings: headings of its table.
        line: format of its lines.
        row: returns the texts of an item.
        order: order of the items; None: as the status has them.
        shown_max: how many items are shown; JSON has all.
    """

    name: str
    field: str
    headings: tuple[str, ...]
    line: str
    row: Callable[[Any, Names], Row]
    order: Callable[[Any], Any] | None = None
    shown_max: int | None = None

    def rows(self, status: MasterStatus) -> list[Row]:
        """Return a row for each item of this kind in ``status``."""
        names, items = summary.names_of(status), getattr(status, self.field)
        chosen = items if self.order is None else sorted(items, key=self.order)
        return [self.row(each, names) for each in chosen[: self.shown_max]]

    def left_out(self, status: MasterStatus) -> int:
        """Return how many items of this kind ``status`` counts, but are not shown."""
        listed = len(getattr(status, self.field))
        count = getattr(status, f"{self.name}_count", listed)
        return max(0, count - min(listed, self.shown_max or listed))


KINDS = (
    Kind(
        "member",
        "members",
        ("member", "where", "connection", "step", "in"),
        "member {}: {}, {}, {}, {}",
        _member,
    ),
    Kind(
        "newcomer",
        "newcomers",
        ("newcomer", "where", "connection", "waits for"),
        "newcomer {}: {}, {}, waits for {}",
        _newcomer,
    ),
    Kind("group", "groups", ("group", "size", "views"), "group {}: {}, {}", _group),
    Kind("round", "rounds", ("round", "calls", "waits"), "round {}: {}, {}", _round),
    Kind(
        "operation",
        "operations",
        ("view", "operation", "phase", "waits for", "data"),
        "operation {1} of {0}: {2}, {3}, {4}",
        _operation,
    ),
    Kind(
        "ended call",
        "ended",
        ("ended", "of", "when", "outcome", "time", "last"),
        "ended {} of {}: {}, {}, {}, {}",
        _ended,
        shown_max=5,
    ),
    Kind(
        "link",
        "links",
        ("link", "round trip", "speed", "path"),
        "link {}: {}, {}, {}",
        _link,
        order=_known_speed,
        shown_max=8,
    ),
    Kind(
        "removal",
        "removals",
        ("removed", "when", "cause", "reason"),
        "removed {} {}: {}, {}",
        _removal,
    ),
)
"""All kinds, in the order of the output."""
