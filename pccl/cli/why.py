"""``pccl why`` asks the master and every peer, and names the member that holds up a run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import click

import pccl
from pccl.checks import shown
from pccl.cli.command_line import master_options, timeout_option
from pccl.cli.doctor.network import check_own, resolve
from pccl.cli.runs.run_file import Unusable, private_folder
from pccl.cli.runs.target import find_target
from pccl.cli.streams import writing
from pccl.errors import PCCLError, PeerSilent
from pccl.inquiry import EvidenceKind, MasterStatus, MemberStatus, peer_evidence
from pccl.observe import summary
from pccl.observe.blame import (
    BlameFinding,
    Cause,
    Clues,
    find_blame,
    printable_text,
    waits_in_words,
)
from pccl.observe.process import inspect_process
from pccl.progress import counted

LINKS_SHOWN_MAX = 8
"""Links whose paths the command explains."""

ASKED_AT_ONCE = 8

ASKED_MAX = 256
"""Members that one command asks."""

LOOK_UP_S_MAX = 1.0
"""Time to look up the host of a member that does not answer."""


@click.command()
@master_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@timeout_option(10.0)
def why(master: str | None, token: str | None, as_json: bool, timeout_s: float) -> None:
    """Say which member holds up the run of the master at HOST:PORT, and why.

    Without an address: PCCL_MASTER, else the run of this user's master here.

    Asks the master and, through it, every member: the calls that it has made, what its threads do,
    what the kernel knows of its connections and, if it does not answer, of its process. The last
    needs that the master runs in the `pccl launch` that started the peer, or that `pccl join` has
    started the peer on this machine, for the same user. For the stacks of such a
    process it sends a signal, which may interrupt a system call. Nothing in the run changes.

    The exit code is 0 if nothing waits and nothing is wrong, 3 if the command names a member or
    link, 4 if something waits and the evidence names none, 1 if no master answers.
    """
    target = find_target(master, token)
    try:
        status = pccl.master_status(target.masters, token=target.token, timeout_s=timeout_s)
    except PCCLError as error:
        raise click.ClickException(f"no status from {target.masters}: {error.reason}") from error
    clues = Asker(target.masters, target.token, timeout_s).clues(status)
    findings = find_blame(status, clues)
    waits, absent = list(waits_in_words(status)), list(without_evidence(status, clues))
    names = summary.names_of(status)
    with writing():
        if as_json:
            found = {
                "waits": [names.explain(line) for line in waits],
                "no_evidence": [names.explain(line) for line in absent],
                "links": [
                    {
                        "peers": [link.peer, link.other],
                        **summary.path(link, names)._asdict(),
                    }
                    for link in summary.indirect_links(status)
                ],
                "blame": [
                    {
                        "cause": one.cause.name,
                        "peers": one.peers,
                        "text": names.explain(one.text),
                        "remedy": one.remedy,
                    }
                    for one in findings
                ],
            }
            click.echo(json.dumps(found))
        else:
            for line in lines(status, waits, absent, findings):
                click.echo(names.explain(printable_text(line)))
    sys.exit(3 if any(map(_holds_up, findings)) else 4 if waits else 0)


def lines(
    status: MasterStatus,
    waits: Sequence[str],
    absent: Sequence[str],
    findings: Sequence[BlameFinding],
) -> Iterator[str]:
    """Yield the lines of the answer; peers are named by their ids only."""
    count = status.member_count
    yield f"run {status.run.hex()[:8]}, {counted(count, 'member')}"
    yield from (f"waiting: {line}" for line in waits)
    if not waits:
        may = ", but the next one may:" if any(map(_holds_up, findings)) else ""
        yield f"no call waits for a member{may}"
    yield from (f"no evidence from {line}" for line in absent)
    for number, one in enumerate(findings, 1):
        yield f"{number}. {one.cause.value}: {one.text}"
        yield f"   to do: {one.remedy}"
    if waits and count and not findings:
        yield f"the evidence names no member{': perhaps all compute' * (not absent)}"
    indirect = summary.indirect_links(status)
    for link in indirect[:LINKS_SHOWN_MAX]:
        yield f"link of peers {link.peer}, {link.other}: {summary.path_in_words(link)}"
    if len(indirect) > LINKS_SHOWN_MAX:
        yield f"... and {len(indirect) - LINKS_SHOWN_MAX} more such links"


def _holds_up(finding: BlameFinding) -> bool:
    """Whether a finding names what holds up the run, and not only what makes it slower."""
    return finding.cause is not Cause.LARGE_PACKETS_LOST


def without_evidence(status: MasterStatus, clues: Mapping[Any, Clues]) -> Iterator[str]:
    """Yield each member of which nothing is known, not even that it is silent, and why."""
    for peer, known in clues.items():
        if known.refusal and not known.silent:
            yield f"peer {peer}: {known.refusal}"
    if further := status.member_count - len(clues):
        yield f"{counted(further, 'further member')}: the command asks at most {ASKED_MAX}"


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
        """Return what is known of the members: first of those for which others wait."""
        members = sorted(status.members, key=lambda member: member.awaited_ms is None)[:ASKED_MAX]
        asked = [member.peer for member in members]
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            return dict(zip(asked, pool.map(self._clues_of, members), strict=True))

    def _clues_of(self, member: MemberStatus) -> Clues:
        silent, refusal = False, "its answer is no object of JSON"
        try:
            state = self._ask(member, EvidenceKind.STATE)
        except PCCLError as error:
            state, silent = None, isinstance(error, PeerSilent)
            refusal = error.reason or shown(error)
        if isinstance(state, dict):
            threads = self._ask_further(member, EvidenceKind.STACKS)
            return Clues(state=cast("dict[str, Any]", state), threads=_list(threads))
        if not silent and member.connected:
            return Clues(refusal=refusal)
        seen = _object(self._ask_further(member, EvidenceKind.PROCESS))
        path = _object(seen.get("path"))
        process = _object(seen.get("process")) or _seen_here(member)
        return Clues(silent, refusal, path=path, process=process)

    def _ask_further(self, member: MemberStatus, kind: EvidenceKind) -> Any:
        with suppress(PCCLError):
            return self._ask(member, kind)
        return None

    def _ask(self, member: MemberStatus, kind: EvidenceKind) -> Any:
        return peer_evidence(
            member.peer, kind, self._masters, token=self._secret, timeout_s=self._timeout_s
        )


def _seen_here(member: MemberStatus) -> dict[str, Any]:
    """Return what this machine knows of the process of a member that ``pccl join`` started here."""
    if _is_of_this_machine(member.host):
        with suppress(Unusable, OSError):
            return inspect_process(member.name, str(private_folder())) or {}
    return {}


def _is_of_this_machine(host: str) -> bool:
    try:
        for address in resolve(host, 0, LOOK_UP_S_MAX):
            check_own(address)
    except OSError:
        return False
    return True


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []  # pyright: ignore[reportUnknownArgumentType]
