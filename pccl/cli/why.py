"""``pccl why`` asks the master and every peer, and names the member that holds up a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import click

import pccl
from pccl.checks import shown
from pccl.cli.command_line import master_options, timeout_option
from pccl.cli.runs.target import find_target
from pccl.cli.streams import writing
from pccl.errors import PCCLError
from pccl.inquiry import EvidenceKind, MasterStatus, peer_evidence
from pccl.observe import summary
from pccl.observe.blame import (
    BlameFinding,
    Clues,
    find_blame,
    printable_text,
    waits_in_words,
)

ASKED_AT_ONCE = 8

ASKED_MAX = 256
"""Members that one command asks."""


@click.command()
@master_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@timeout_option(10.0)
def why(master: str | None, token: str | None, as_json: bool, timeout_s: float) -> None:
    """Say which member holds up the run of the master at HOST:PORT, and why.

    Without an address: PCCL_MASTER, else the run that `pccl launch` has started here.

    Asks the master and, through it, every member: the calls that it has made, what its threads do,
    what the kernel knows of its connections and, if it does not answer, of its process. The last
    needs that the master runs in the `pccl launch` that started the peer. For the stacks of such a
    process it sends a signal, which may interrupt a system call. Nothing in the run changes.

    The exit code is 0 if nothing waits and nothing is wrong, 3 if the command names a member or
    link, 4 if something waits and the evidence names none, 1 if no master answers.
    """
    target = find_target(master, token)
    try:
        status = pccl.master_status(target.masters, token=target.token, timeout_s=timeout_s)
    except PCCLError as error:
        raise click.ClickException(f"no status from {target.masters}: {error.reason}") from error
    asker = Asker(target.masters, target.token, timeout_s)
    findings = find_blame(status, asker.clues(status))
    waits = list(waits_in_words(status))
    names = summary.names_of(status)
    with writing():
        if as_json:
            found = [
                {
                    "cause": one.cause.name,
                    "peers": one.peers,
                    "text": names.explain(one.text),
                    "remedy": one.remedy,
                }
                for one in findings
            ]
            click.echo(json.dumps({"waits": [names.explain(w) for w in waits], "blame": found}))
        else:
            for line in lines(status, waits, findings):
                click.echo(names.explain(printable_text(line)))
    sys.exit(3 if findings else 4 if waits else 0)


def lines(
    status: MasterStatus, waits: Sequence[str], findings: Sequence[BlameFinding]
) -> Iterator[str]:
    """Yield the lines of the answer; peers are named by their ids only."""
    count = status.member_count
    yield f"run {status.run.hex()[:8]}, {count} member{'' if count == 1 else 's'}"
    if status.waits_for:
        yield f"the master {status.waits_for}"
    yield from (f"waiting: {line}" for line in waits)
    if not waits:
        yield "no call waits for a member"
    for number, one in enumerate(findings, 1):
        yield f"{number}. {one.cause.value}: {one.text}"
        yield f"   to do: {one.remedy}"
    if waits and not findings:
        yield "the evidence names no member: perhaps all compute"


class Asker:
    """Asks the members of a run, several at a time.

    Args:
        masters: addresses of the master and its standbys, separated by commas.
        secret: the secret of the run.
        timeout_s: limit for each answer.
    """

    def __init__(self, masters: str, secret: bytes | None, timeout_s: float) -> None:
        self._masters, self._secret, self._timeout_s = masters, secret, timeout_s

    def clues(self, status: MasterStatus) -> dict[Any, Clues]:
        """Return what is known of each member."""
        asked = [member.peer for member in status.members[:ASKED_MAX]]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(asked, pool.map(self._clues_of, asked), strict=True))

    def _clues_of(self, peer: int) -> Clues:
        state, refusal = self._ask(peer, EvidenceKind.STATE)
        if not refusal:
            threads, _ = self._ask(peer, EvidenceKind.STACKS)
            return Clues(state=_object(state), threads=_list(threads))
        seen = _object(self._ask(peer, EvidenceKind.PROCESS)[0])
        return Clues(refusal, path=_object(seen.get("path")), process=_object(seen.get("process")))

    def _ask(self, peer: int, kind: EvidenceKind) -> tuple[Any, str]:
        try:
            return peer_evidence(
                peer, kind, self._masters, token=self._secret, timeout_s=self._timeout_s
            ), ""
        except PCCLError as error:
            return None, error.reason or shown(error)


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []  # pyright: ignore[reportUnknownArgumentType]
