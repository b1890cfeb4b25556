"""Asks a master for the status of its run, from a process outside the run."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Sequence
from typing import Any

from pccl._api.listening import reachable_at, why_unmapped
from pccl.addresses import parse_address
from pccl.checks import check_timeout
from pccl.config import (
    resolve_advertise,
    resolve_interface,
    resolve_listen,
    resolve_map_port,
    resolve_masters,
    resolve_token,
)
from pccl.errors import (
    LinkError,
    NotAdmitted,
    PCCLError,
    PeerSilent,
    RemoteProtocolError,
    named,
)
from pccl.machines.router_path import ForwardedPort
from pccl.protocol.limits import SECONDS_MAX
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.run_messages import EvidenceKind, EvidenceRequest
from pccl.protocol.status_report import (
    EndedStatus,
    GroupStatus,
    LinkSpeed,
    MemberStatus,
    NewcomerStatus,
    OperationStatus,
    RemovalStatus,
    RoundStatus,
)
from pccl.protocol.status_report import StatusReport as MasterStatus
from pccl.protocol.types import PeerId, RemovalCause, RoundId
from pccl.runtime.clock import LoopClock
from pccl.runtime.control.examination import (
    Examination,
    LongPacketsLost,
    MemberDialled,
    Sighting,
    examine,
)
from pccl.runtime.control.greeting import Credentials
from pccl.runtime.control.question import ask_peer, ask_status
from pccl.runtime.io_thread import IOThread
from pccl.runtime.links.port_mapping import (
    PATIENT_WAIT_NS,
    PortMapping,
    RouterReport,
    router_access,
)
from pccl.telemetry.evidence import unpack_evidence
from pccl.transports.base import Address
from pccl.transports.datagrams import interface_hosts as interface_hosts
from pccl.transports.datagrams import interface_of as interface_of

__all__ = [
    "EndedStatus",
    "EvidenceKind",
    "Examination",
    "ForwardedPort",
    "GroupStatus",
    "LinkPath",
    "LinkSpeed",
    "LongPacketsLost",
    "MasterStatus",
    "MemberDialled",
    "MemberStatus",
    "NewcomerStatus",
    "OperationStatus",
    "RemovalCause",
    "RemovalStatus",
    "RoundStatus",
    "RouterReport",
    "Sighting",
    "examine_master",
    "examine_router",
    "master_status",
    "peer_evidence",
    "to_json",
]

TIMEOUT_S = 5.0


def master_status(
    address: str | None = None,
    *,
    token: str | bytes | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> MasterStatus:
    """Ask a master for the status of its run. Blocks; changes nothing in the run.

    Args:
        address: address of the master, ``"host:port"``. For several, separated by commas, the
            result is that of the first with members, else of the first. None: ``PCCL_MASTER``.
        token: the secret of the run; None: ``PCCL_TOKEN`` or ``PCCL_TOKEN_FILE``.
        timeout_s: limit for each master, in seconds; None: no limit.

    Raises:
        LinkError: no master listens there, or none answered in time.
        NotAdmitted: the master refuses the request; the reason says why.
        RemoteProtocolError: no master of this version listens there, or its token differs.
        TypeError, ValueError: the address is malformed, or the token is not good.
    """
    masters, secret = resolve_masters(address), resolve_token(token)
    limit_s = check_timeout(timeout_s) or SECONDS_MAX
    user = object()
    try:
        io = IOThread.acquire(user)
        return io.submit(lambda: _ask_in_turn(io, masters, secret, limit_s)).wait()
    except PCCLError as error:
        raise named(error, "master_status") from None
    finally:
        IOThread.give_up(user)


def peer_evidence(
    peer_id: int,
    kind: EvidenceKind,
    address: str | None = None,
    *,
    token: str | bytes | None = None,
    timeout_s: float | None = TIMEOUT_S,
) -> Any:
    """Ask one peer, through its master, what it does or has done. Blocks; changes nothing.

    Args:
        peer_id: id of the peer.
        kind: what to ask for.
        address: address of the master, as for ``master_status``. With several, the first with an
            answer of the peer counts: a standby does not know the peer.
        token: the secret of the run, as for ``master_status``.
        timeout_s: limit for each master, in seconds; None: no limit.

    Returns:
        The answer, as :func:`json.loads` returns it. It comes from the peer: check what you use.

    Raises:
        PeerSilent: the master asked the peer, and the peer did not answer in time.
        NotAdmitted: the master or the peer refused to answer; the reason says why.
        RemoteProtocolError: as for ``master_status``, or the answer is not valid.
        LinkError, TypeError, ValueError: as for ``master_status``.
    """
    masters, secret = resolve_masters(address), resolve_token(token)
    limit_s = check_timeout(timeout_s) or SECONDS_MAX
    request = EvidenceRequest(PeerId(peer_id), kind)
    user = object()

    async def ask() -> bytes:
        credentials = Credentials(secret, os.urandom)
        failure: PCCLError = LinkError(reason="no master")
        for master in masters:
            try:
                report = await ask_peer(
                    LoopClock(io.loop), io.transport, master, credentials, limit_s, request
                )
            except (LinkError, RemoteProtocolError) as error:
                if not isinstance(failure, NotAdmitted):
                    failure = error
                continue
            if report.silent:
                raise PeerSilent(reason=report.refusal)
            if not report.refusal:
                return report.data
            if not isinstance(failure, NotAdmitted):
                failure = NotAdmitted(reason=report.refusal)
        raise failure

    try:
        io = IOThread.acquire(user)
        data = io.submit(ask).wait()
    except PCCLError as error:
        raise named(error, "peer_evidence") from None
    finally:
        IOThread.give_up(user)
    return unpack_evidence(data)


def examine_master(
    address: str, *, token: str | bytes | None = None, timeout_s: float | None = TIMEOUT_S
) -> Examination:
    """Examine the path between this machine and the run of a master. Blocks; changes nothing there.

    The master dials a port of this process for a moment, and this process dials some members.
    ``PCCL_LISTEN``, ``PCCL_INTERFACE`` and ``PCCL_ADVERTISE`` count as for a peer.

    Args:
        address: address of one master, ``"host:port"``.
        token: the secret of the run; None: ``PCCL_TOKEN`` or ``PCCL_TOKEN_FILE``.
        timeout_s: limit for each answer of the master, in seconds; None: no limit.

    Raises:
        LinkError, NotAdmitted, RemoteProtocolError: as in ``master_status``.
        TypeError, ValueError: an address is malformed, or the token is not good.
    """
    master, secret = parse_address(address), resolve_token(token)
    advertised, bound = resolve_advertise(None), resolve_listen(None)
    interface = resolve_interface()
    options = reachable_at(master, advertised, bound, interface)
    unmapped = why_unmapped(advertised, bound, switched_on=resolve_map_port())
    limit_s = check_timeout(timeout_s) or SECONDS_MAX
    user = object()
    try:
        io = IOThread.acquire(user)

        async def work() -> Examination:
            credentials = Credentials(secret, os.urandom)
            clock = LoopClock(io.loop)
            mapping = None if unmapped else _port_mapping(io, interface)
            transport = io.transport.through(interface)
            made = await examine(clock, transport, master, credentials, options, limit_s, mapping)
            router = made.router or RouterReport(reason=unmapped)
            return dataclasses.replace(made, router=router)

        return io.submit(work).wait()
    except PCCLError as error:
        raise named(error, "examine_master") from None
    finally:
        IOThread.give_up(user)


def examine_router() -> RouterReport:
    """Ask the router of this machine for a port, and give the port back. Blocks for some seconds.

    ``PCCL_MAP_PORT``, ``PCCL_LISTEN``, ``PCCL_ADVERTISE`` and ``PCCL_INTERFACE`` count as they do
    for a peer.

    Raises:
        LinkError: this process cannot open a port.
        TypeError, ValueError: a variable is malformed.
    """
    advertised, bound = resolve_advertise(None), resolve_listen(None)
    interface = resolve_interface()
    if unmapped := why_unmapped(advertised, bound, switched_on=resolve_map_port()):
        return RouterReport(reason=unmapped)
    user = object()

    async def work() -> RouterReport:
        # Others cannot connect to it, even while the router forwards it.
        listener = await io.transport.listen(Address("127.0.0.1", 0), lambda one: one.abort())
        mapping = _port_mapping(io, interface)
        try:
            await mapping.start(listener.address.port, None, PATIENT_WAIT_NS)
        finally:
            await mapping.close()
            listener.close()
        return mapping.report

    try:
        io = IOThread.acquire(user)
        return io.submit(work).wait()
    except PCCLError as error:
        raise named(error, "examine_router") from None
    finally:
        IOThread.give_up(user)


def knock(address: str, interface: str, timeout_s: float) -> None:
    """Connect to a master through a network interface, and send nothing. Blocks.

    Raises:
        LinkError: no process listens there, or none answered within ``timeout_s``.
        TypeError, ValueError: the address is malformed.
    """
    master, user = parse_address(address), object()

    async def work() -> None:
        (await io.transport.through(interface).dial(master, timeout_s)).close()

    try:
        io = IOThread.acquire(user)
        io.submit(work).wait()
    finally:
        IOThread.give_up(user)


def _port_mapping(io: IOThread, interface: str) -> PortMapping:
    return PortMapping(io.loop, LoopClock(io.loop), router_access(io.loop, interface), os.urandom)


async def _ask_in_turn(
    io: IOThread, masters: Sequence[Address], secret: bytes | None, limit_s: float
) -> MasterStatus:
    """Return the first status with members, else the first; a standby without a run has none."""
    idle: MasterStatus | None = None
    failure: PCCLError | None = None
    for master in masters:
        try:
            status = await ask_status(
                LoopClock(io.loop), io.transport, master, Credentials(secret, os.urandom), limit_s
            )
        except PCCLError as error:
            failure = error
            continue
        if status.member_count:
            return status
        idle = idle or status
    if idle is None:
        assert failure is not None
        raise failure
    return idle


def to_json(status: MasterStatus) -> dict[str, Any]:
    """Convert a status for ``json.dumps``: enums to names, ids to numbers, bytes to hex."""
    return {field.name: _plain(getattr(status, field.name)) for field in dataclasses.fields(status)}


def _plain(value: Any) -> Any:
    match value:
        case bytes():
            return value.hex()
        case enum.Enum():
            return value.name
        case RoundId(kind, n):
            return {"call": kind.call_name, "n": n}
        case tuple():
            return [_plain(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case _ if dataclasses.is_dataclass(value):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: _plain(getattr(value, name)) for name in names}
        case _:
            return value
