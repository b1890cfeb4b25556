"""Checks of registrations and reports, on every path by which they arrive.

The codec has checked types and ranges. These checks find impossible host names, ids, numbers and
memberships, which no honest peer of any run sends. A message that passes causes no failing
assertion, and takes no more than its share of memory.
"""

from __future__ import annotations

from pccl.machines.key_value.server import TERM_SHIFT
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.handshake.opening import NO_RUN, RUN_BYTES
from pccl.protocol.limits import (
    INCUMBENT_BYTES,
    OPEN_VIEWS_MAX,
    PEERS_MAX,
    REPORTED_MAX,
    TERM_MAX,
)
from pccl.protocol.shared_state import Expected
from pccl.protocol.types import (
    ADDRESS_CHARACTERS_MAX,
    HOST_CHARACTERS_MAX,
    OperationId,
    PeerId,
    Roster,
    RoundKind,
)
from pccl.telemetry.names import name_flaw


def is_host(host: str) -> bool:
    """Whether ``host`` may be a host name; the empty string is valid."""
    replaced = "\N{REPLACEMENT CHARACTER}" in host  # the codec writes it for unprintable ones
    return len(host.encode()) <= HOST_CHARACTERS_MAX and host.isprintable() and not replaced


def registration_flaw(registration: msg.Register) -> str:
    """Return what is wrong with a registration; empty if it is valid."""
    if not all(map(is_host, (registration.host, *registration.hosts))):
        return "the advertised host is invalid or too long"
    return name_flaw(registration.name) if registration.name else ""


def check_return(header: msg.Return) -> None:
    """Check the first message of a returning peer.

    Raises:
        RemoteProtocolError: no peer of any run sends this message.
    """
    if len(header.run) != RUN_BYTES or header.run == NO_RUN:
        raise RemoteProtocolError(reason="the returning peer has no valid run id")
    flaw = registration_flaw(header.registration)
    if flaw:
        raise RemoteProtocolError(reason=flaw)
    lengths = len(header.incumbent) <= INCUMBENT_BYTES and len(header.rounds) <= len(RoundKind)
    if not lengths or not _has_credible_numbers(header):
        raise RemoteProtocolError(reason="the returning peer has impossible fields")


def _has_credible_numbers(header: msg.Return) -> bool:
    numbers = (header.peer, header.roster_version, header.ratified, *(c.n for c in header.rounds))
    if not _is_credible_state(header.expected, header.registration.group, header.term):
        return False
    return header.peer > 0 and header.term < TERM_MAX and max(numbers) < REPORTED_MAX


def _is_credible_state(expected: Expected, group: int, term: int) -> bool:
    """Whether a master of ``term`` may expect this shared state of ``group``."""
    synced = expected.lineage
    if synced is None:
        return True
    operation = synced.operation
    is_theirs = operation.group == group and operation.term <= term
    in_range = max(operation.view, operation.n) < REPORTED_MAX
    return is_theirs and in_range and len(synced.run) == RUN_BYTES


def check_roster(roster: Roster, peer: PeerId, key: bytes, group: int) -> None:
    """Check a roster that ``peer`` of ``group``, with this key, reports.

    Raises:
        RemoteProtocolError: no master sends this roster to that peer.
    """
    if roster.group != group or peer not in roster.ring:
        raise RemoteProtocolError(reason="the reported roster lacks the peer or its group")
    if any(member.peer == peer and member.key != key for member in roster.members):
        raise RemoteProtocolError(reason="the reported roster gives the peer another key")
    sizes = (roster.global_world_size, roster.peer_groups, roster.largest_group_size)
    numbers = (roster.version, roster.view, roster.updates, *roster.ring, *roster.open_views)
    possible = (
        roster.version > 0
        and roster.view in roster.open_views
        and len(roster.open_views) <= OPEN_VIEWS_MAX
        and roster.algorithms.is_sound_for(len(roster.members))
        and len(set(roster.ring)) == len(roster.ring) <= roster.global_world_size
        and max(sizes) <= PEERS_MAX
        and min(roster.ring) > 0
        and roster.term < TERM_MAX
        and max(numbers) < REPORTED_MAX
        and all(is_host(host) for one in roster.members for host in (one.host, *one.hosts))
        and all(not one.hosts or len(one.host) <= ADDRESS_CHARACTERS_MAX for one in roster.members)
    )
    if not possible:
        raise RemoteProtocolError(reason="the reported roster has impossible fields")


def check_known_outcome(known: msg.KnownOutcome, header: msg.Return) -> None:
    """Check an outcome or a proposal that a returning peer reports.

    A master sends outcomes to the members of a group, and proposals to all members of the run.

    Raises:
        RemoteProtocolError: no master sends this outcome to that peer.
    """
    outcome = known.outcome
    group = header.registration.group if known.told else outcome.operation.group
    _check_operation(outcome.operation, group)
    if not _is_credible_state(known.expected, group, header.term):
        raise RemoteProtocolError(reason="the reported outcome expects an impossible state")
    if len(outcome.contributors) > PEERS_MAX:
        raise RemoteProtocolError(reason="the reported outcome has too many contributors")
    _check_numbers(outcome.sequence, outcome.roster_version)


def check_answer(answer: msg.RoundClosed) -> None:
    """Check a round answer that a returning peer reports.

    Raises:
        RemoteProtocolError: no master gives this answer.
    """
    _check_numbers(answer.sequence, answer.round.n, answer.roster_version)


def check_entry(known: msg.KnownEntry, header: msg.Return) -> None:
    """Check a key of the store that a returning peer reports.

    Raises:
        RemoteProtocolError: no master up to the term of that peer has made this change.
    """
    change = known.change
    receipts = change.receipts
    _check_numbers(change.sequence, change.writer, *(one.sequence for one in receipts))
    _check_numbers(0, *(max(one.peer, one.number) for one in receipts))
    if change.sequence >> TERM_SHIFT > header.term:
        raise RemoteProtocolError(reason="the reported key of the store is of a later term")


def _check_operation(operation: OperationId, group: int) -> None:
    if operation.group != group or operation.term >= TERM_MAX:
        raise RemoteProtocolError(reason=f"{operation} is of another group or an impossible term")
    _check_numbers(operation.view, operation.n)


def _check_numbers(*numbers: int) -> None:
    if max(numbers) >= REPORTED_MAX:
        raise RemoteProtocolError(reason=f"a reported number is above {REPORTED_MAX - 1}")
