"""``pccl record`` saves what peers did last; ``pccl trace`` merges it into one trace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click

import pccl
from pccl.addresses import parse_masters
from pccl.cli.command_line import F, check_file, master_options, timeout_option, token_option
from pccl.cli.runs.target import Target, find_target
from pccl.errors import PCCLError
from pccl.inquiry import EvidenceKind, MemberStatus, peer_evidence
from pccl.observe import summary
from pccl.observe.records import Record, check_record, merge, read_records, write_json

ASKED_AT_ONCE = 8


def _output(name: str, words: str) -> Callable[[F], F]:
    return click.option(
        *("-o", "--output"),
        metavar="FILE",
        type=click.Path(dir_okay=False, path_type=Path),
        default=Path(name),
        show_default=True,
        callback=check_file,
        help=words,
    )


class _Gathered(NamedTuple):
    """What peers have answered."""

    values: Sequence[Any]
    records: Sequence[Record]
    unanswered: Mapping[str, str]


@click.command()
@master_options
@click.option("--peer", metavar="N|NAME", help="Ask only this peer, by id or name.")
@_output("record.json", "Where to write the records.")
@timeout_option()
def record(
    master: str | None, token: str | None, peer: str | None, output: Path, timeout_s: float
) -> None:
    """Save what the peers of the run at HOST:PORT did last.

    The default is PCCL_MASTER, or else the run of this user's master on this machine.

    Asks each peer through its master. The request does not change the run. If the run has a token,
    the request needs it. `pccl trace FILE` turns the file into a trace.

    The exit code is 1 if no peer answers.
    """
    found = _gather(find_target(master, token), peer, timeout_s)
    _write(output, {"records": found.values, "unanswered": found.unanswered})
    click.echo(f"wrote {output}: records of {_count(found.records)}", err=True)


@click.command()
@click.argument("sources", metavar="[HOST:PORT | FILE...]", nargs=-1)
@token_option()
@_output("trace.json", "Where to write the trace.")
@timeout_option()
def trace(sources: Sequence[str], token: str | None, output: Path, timeout_s: float) -> None:
    """Show what all peers did last, on one clock: a trace for https://ui.perfetto.dev.

    Asks the peers of the run at HOST:PORT; the default is PCCL_MASTER, or else the run that `pccl
    launch` has started on this machine. Or reads files that `pccl record` or peers with PCCL_RECORD
    have written. Times are on the clock of the master. The trace states
    for each peer by how much they may be wrong.

    The exit code is 1 if no peer answers, or a file has no record.
    """
    records: Sequence[Record]
    if sources and (len(sources) > 1 or os.path.exists(sources[0])):
        try:
            records, unanswered = read_records(sources)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    else:
        address = next(iter(sources), None)
        try:
            if address is not None:
                parse_masters(address)
        except ValueError as error:
            message = f"{address!r} is neither a file nor an address, HOST:PORT"
            raise click.UsageError(message) from error
        found = _gather(find_target(address, token), None, timeout_s)
        records, unanswered = found.records, found.unanswered
    merged = merge(records, unanswered)
    _write(output, merged)
    error_us = merged["otherData"]["clock_error_us"]
    clocks = "unknown" if error_us is None else f"at most {error_us / 1000:.3f} ms"
    said = f"wrote {output}: {_count(records)}; error of their clocks: {clocks}"
    click.echo(f"{said}\nopen it at https://ui.perfetto.dev", err=True)


def _gather(target: Target, only: str | None, timeout_s: float) -> _Gathered:
    masters, secret = target.masters, target.token
    try:
        status = pccl.master_status(masters, token=secret, timeout_s=timeout_s)
    except PCCLError as error:
        raise click.ClickException(f"no status from {masters}: {error.reason}") from error
    members = status.members
    if only is not None:
        members = tuple(one for one in members if only in (str(one.peer), one.name))
        if not members:
            raise click.ClickException(f"the run has no peer {only!r}; see pccl status")
    elif not members:
        raise click.ClickException("the run has no members")

    def ask(member: MemberStatus) -> tuple[Any, Record] | str:
        kind = EvidenceKind.RECORD
        try:
            found = peer_evidence(member.peer, kind, masters, token=secret, timeout_s=timeout_s)
            return found, check_record(found)
        except PCCLError as error:
            return error.reason
        except ValueError as error:
            return f"its record is not valid: {error}"

    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        answers = list(threads.map(ask, members))
    names = summary.names_of(status)
    unanswered = {
        names.explain(f"peer {member.peer}"): answer
        for member, answer in zip(members, answers, strict=True)
        if isinstance(answer, str)
    }
    if only is None and (further := status.member_count - len(members)):
        unanswered[f"{further} further peers"] = "the status of the master does not list them"
    for name, why in unanswered.items():
        click.echo(f"no record of {name}: {why}", err=True)
    given = [answer for answer in answers if not isinstance(answer, str)]
    if not given:
        raise click.ClickException("no peer gave a record")
    return _Gathered([one for one, _ in given], [one for _, one in given], unanswered)


def _write(path: Path, value: Any) -> None:
    try:
        if path.exists() and not path.is_file():  # a device or a pipe: never replace it
            with path.open("w") as stream:
                json.dump(value, stream)
        else:
            write_json(os.path.realpath(path), value)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def _count(records: Sequence[Record]) -> str:
    return f"{len(records)} peer{'' if len(records) == 1 else 's'}"
