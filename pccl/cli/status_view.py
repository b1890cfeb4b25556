"""What ``pccl status`` shows: tables on a terminal, one line for each thing when piped.

Words come from the run, so whatever is not printable in them is replaced: nobody who joins a run
can write to the terminals of those who watch it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pccl.inquiry import (
    GroupStatus,
    MasterStatus,
    MemberStatus,
    NewcomerStatus,
    OperationStatus,
    RemovalStatus,
    RoundStatus,
)

MIB = 1 << 20

Rows = Sequence[Sequence[str]]


class StatusView(Protocol):
    """Somebody to show a status to."""

    def show(self, status: MasterStatus) -> None:
        """This is how the run stands."""
        ...

    def trouble(self, text: str) -> None:
        """This is why nobody knows at the moment."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was found."""
        ...


class LineView:
    """For pipes and logs: every line says what it is about."""

    def show(self, status: MasterStatus) -> None:
        """Print all lines."""
        for line in lines(status):
            click.echo(line)

    def trouble(self, text: str) -> None:
        """Print one line."""
        click.echo(f"trouble: {text}")

    def close(self) -> None:
        """Nothing is open."""


class TableView:
    """For a terminal; a second status takes the place of the first one."""

    def __init__(self) -> None:
        self._console = Console()
        self._live: Live | None = None
        self._shown: RenderableType | None = None

    def show(self, status: MasterStatus) -> None:
        """Print the tables, or exchange them."""
        self._put(Group(Text(headline(status), style="bold"), *_tables(status)))

    def trouble(self, text: str) -> None:
        """Keep what is known, and say that it is old."""
        old = [] if self._shown is None else [self._shown]
        self._put(Group(Text(f"{text}; below, what it said last", style="red"), *old), old)

    def close(self) -> None:
        """Stop to exchange, and leave the last status on the terminal."""
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
    """The run in one line."""
    if status.waits_for:
        return f"this master coordinates nothing: {status.waits_for}"
    return (
        f"run {status.run.hex()}, term {status.term}, up {_seconds(status.uptime_ms)}: "
        f"{_count(status.member_count, 'member')}, {_count(status.newcomer_count, 'newcomer')}, "
        f"{_count(len(status.rounds), 'open round')}, "
        f"{_count(status.operation_count, 'operation')} in flight, "
        f"{status.removal_count} removed"
    )


def lines(status: MasterStatus) -> Iterator[str]:
    """Everything, line by line."""
    yield headline(status)
    for member in status.members:
        where, state, calls = _member(member)
        yield f"member {member.peer}: {where}, {state}, in {calls or 'no call'}"
    yield from _left_out("members", status.member_count, len(status.members))
    for newcomer in status.newcomers:
        where, state, waits_for = _newcomer(newcomer)
        yield f"newcomer {newcomer.peer}: {where}, {state}, waits for {waits_for}"
    yield from _left_out("newcomers", status.newcomer_count, len(status.newcomers))
    for group in status.groups:
        members, views = _group(group)
        yield f"group {group.group}: {members}, {views}"
    yield from _left_out("groups", status.group_count, len(status.groups))
    for opened in status.rounds:
        name, made, waits_for = _round(opened)
        yield f"round {name}: {made}, {waits_for}"
    for operation in status.operations:
        view, what, phase, waits_for, data = _operation(operation)
        yield f"operation {what} of {view}: {phase}, {waits_for}, {data}"
    yield from _left_out("operations", status.operation_count, len(status.operations))
    for removal in status.removals:
        who, when, cause, reason = _removal(removal)
        yield f"removed {who} {when}: {cause}, {reason}"
    yield from _left_out("removals", status.removal_count, len(status.removals))


def _tables(status: MasterStatus) -> Iterator[RenderableType]:
    """The same as tables; what is empty has none."""
    members = [(str(member.peer), *_member(member)) for member in status.members]
    yield from _table(("member", "where", "connection", "in"), members, status.member_count)
    newcomers = [(str(newcomer.peer), *_newcomer(newcomer)) for newcomer in status.newcomers]
    yield from _table(
        ("newcomer", "where", "connection", "waits for"), newcomers, status.newcomer_count
    )
    groups = [(str(group.group), *_group(group)) for group in status.groups]
    yield from _table(("group", "size", "views"), groups, status.group_count)
    rounds = [_round(opened) for opened in status.rounds]
    yield from _table(("round", "calls", "waits"), rounds, len(rounds))
    operations = [_operation(operation) for operation in status.operations]
    headings = ("view", "operation", "phase", "waits for", "data")
    yield from _table(headings, operations, status.operation_count)
    removals = [_removal(removal) for removal in status.removals]
    yield from _table(("removed", "when", "cause", "reason"), removals, status.removal_count)


def _table(headings: Sequence[str], rows: Rows, count: int) -> Iterator[RenderableType]:
    if not rows:
        return
    table = Table(*headings, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    yield table
    if count > len(rows):
        yield Text(f"... and {count - len(rows)} more", style="dim")


# -- words -----------------------------------------------------------------------------------------


def _member(member: MemberStatus) -> tuple[str, str, str]:
    where = f"group {member.group}, rank {member.rank}, {_address(member.host, member.port)}"
    state = _connection(member.connected, member.silent_ms)
    if member.awaited_ms is not None:
        state += f", awaited for {_seconds(member.awaited_ms)}"
    return where, state, member.calls


def _newcomer(newcomer: NewcomerStatus) -> tuple[str, str, str]:
    where = f"group {newcomer.group}, {_address(newcomer.host, newcomer.port)}"
    state = _connection(newcomer.connected, newcomer.silent_ms)
    state += f", here for {_seconds(newcomer.waiting_ms)}"
    return where, state, newcomer.waits_for


def _group(group: GroupStatus) -> tuple[str, str]:
    opened = ", ".join(map(str, group.open_views))
    return _count(group.members, "member"), f"view {group.view} (open: {opened})"


def _round(opened: RoundStatus) -> tuple[str, str, str]:
    size = opened.requested_count + opened.missing_count
    return (
        f"{opened.round.kind.call_name} #{opened.round.n}",
        f"{opened.requested_count} of {size} have called",
        f"{_peers(opened.missing, opened.missing_count)} missing for {_seconds(opened.waiting_ms)}",
    )


def _operation(operation: OperationStatus) -> tuple[str, str, str, str, str]:
    there = operation.member_count - operation.missing_count
    made = "are done" if operation.started else "have called"
    phase = "started" if operation.started else "requested"
    missing = _peers(operation.missing, operation.missing_count)
    data = f"nothing new for {_seconds(operation.still_ms)}"
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


def _removal(removal: RemovalStatus) -> tuple[str, str, str, str]:
    return (
        f"peer {removal.peer} of group {removal.group}",
        f"{_seconds(removal.ago_ms)} ago",
        removal.cause.name,
        removal.reason,
    )


def _connection(connected: bool, silent_ms: int) -> str:
    state = "connected" if connected else "NOT CONNECTED"
    return f"{state}, heard {_seconds(silent_ms)} ago"


def _address(host: str, port: int) -> str:
    host = host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _peers(peers: Sequence[int], count: int) -> str:
    if not peers:
        return "nobody"
    more = f" and {count - len(peers)} more" if count > len(peers) else ""
    return f"peer{'s' if count > 1 else ''} {', '.join(map(str, peers))}{more}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _seconds(duration_ms: int) -> str:
    return f"{duration_ms / 1000:.1f} s"


def _left_out(what: str, count: int, shown: int) -> Iterable[str]:
    return [f"... and {count - shown} more {what}"] if count > shown else []
