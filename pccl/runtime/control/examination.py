"""Examines the path between this machine and a run, without joining the run.

It asks the master for its status and its clock, lets the master dial a port of this process, and
dials some members. Master and members see a few connections, which end after their handshakes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pccl.machines.reachability import TryAddress
from pccl.protocol.errors import PCCLError
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import Timing
from pccl.protocol.messages import AddressQuery
from pccl.protocol.status_report import MemberStatus, StatusReport
from pccl.protocol.types import Member
from pccl.runtime.clock import Clock
from pccl.runtime.control.greeting import Credentials, Reception
from pccl.runtime.control.probe import probe
from pccl.runtime.control.question import ask_address, ask_status
from pccl.runtime.links.listening import listen
from pccl.runtime.links.port_mapping import PATIENT_WAIT_NS, PortMapping, RouterReport
from pccl.runtime.requests import PeerOptions
from pccl.transports.base import Address, Connection, Transport

CLOCK_READINGS = 3
"""The reading with the shortest exchange counts."""

MEMBERS_DIALLED_MAX = 8


@dataclass(frozen=True, slots=True)
class MemberDialled:
    """One member that this machine has dialled.

    Attributes:
        peer: id of the member.
        name: its name.
        host: the host that was dialled.
        port: the port that was dialled.
        reason: why the member did not answer; empty if it did.
    """

    peer: int
    name: str
    host: str
    port: int
    reason: str


@dataclass(frozen=True, slots=True)
class Examination:
    """What a machine has learnt about its path to a run.

    Attributes:
        status: the run, as its master sees it.
        seen: the host from which the master sees this machine; empty: the master did not say.
        clock_offset_s: the master's wall clock minus that of this machine, in seconds.
        clock_error_s: how far the offset may be wrong, in seconds.
        dialled_at: the address of this machine that the master was asked to dial.
        was_dialled: whether the master dialled it.
        reason: why nothing answered, or why the master did not dial; empty if it was answered.
        members: some members, and whether they answer this machine.
        member_count: number of members of the run.
        router: whether the router has forwarded that port; None: it was not asked.
    """

    status: StatusReport
    seen: str
    clock_offset_s: float
    clock_error_s: float
    dialled_at: str
    was_dialled: bool
    reason: str
    members: tuple[MemberDialled, ...]
    member_count: int
    router: RouterReport | None = None


async def examine(
    clock: Clock,
    transport: Transport,
    master: Address,
    credentials: Credentials,
    options: PeerOptions,
    timeout_s: float,
    port_mapping: PortMapping | None = None,
) -> Examination:
    """Examine the path to the run of a master.

    Args:
        clock: gives the time.
        transport: the network.
        master: address of the master.
        credentials: makes the handshakes of this process.
        options: where this process would listen as a peer, and what it would announce.
        timeout_s: time limit of each question.
        port_mapping: asks the router for a port; this function closes it.

    Raises:
        LinkError, NotAdmitted, RemoteProtocolError: as in ``ask_status``. What fails after that is
            part of the result.
    """
    status = await ask_status(clock, transport, master, credentials, timeout_s)
    examiner = _Examiner(clock, transport, master, credentials, timeout_s)
    seen, offset_s, error_s, reason = await examiner.read_clock()
    dialled_at, was_dialled, router = "", False, None
    if not reason:
        dialled_at, was_dialled, reason = await examiner.be_dialled(options, seen, port_mapping)
        router = None if port_mapping is None else port_mapping.report
    members = await examiner.dial(status.members[:MEMBERS_DIALLED_MAX], status)
    return Examination(
        status, seen, offset_s, error_s, dialled_at, was_dialled, reason, members,
        status.member_count, router,
    )  # fmt: skip


class _Examiner:
    """The steps of one examination; the arguments are those of ``examine``."""

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        master: Address,
        credentials: Credentials,
        timeout_s: float,
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._master = master
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._patience_ns = Timing().ns(Timing().dial_s)

    async def read_clock(self) -> tuple[str, float, float, str]:
        """Return the own host as the master sees it, the offset and its error, and any failure."""
        readings: list[tuple[int, int, str]] = []
        for _ in range(CLOCK_READINGS):
            try:
                answer, asked_ns, answered_ns = await ask_address(
                    self._clock, self._transport, self._master, self._credentials,
                    self._timeout_s, AddressQuery(),
                )  # fmt: skip
            except PCCLError as error:
                return "", 0.0, 0.0, error.reason
            age_ns = self._clock.now_ns() - (asked_ns + answered_ns) // 2
            offset_ns = answer.unix_us * 1000 - (time.time_ns() - age_ns)
            readings.append((answered_ns - asked_ns, offset_ns, answer.seen))
        took_ns, offset_ns, seen = min(readings)
        return seen, offset_ns / 1e9, took_ns / 2e9, ""

    async def be_dialled(
        self, options: PeerOptions, seen: str, port_mapping: PortMapping | None
    ) -> tuple[str, bool, str]:
        """Let the master dial a port of this process, opened and announced as a peer would.

        Returns the address, whether the master dialled it, and why nothing answered.
        """

        def leave(connection: Connection, remote: Opening, deadline_ns: int) -> None:
            connection.close()

        def identify() -> Opening:
            # As a peer that has no id yet: the handshake turns the channel into that of a probe.
            return Opening(Channel.LANE)

        unproven_max = self._transport.port_limits.unproven
        reception = Reception(
            self._clock, self._patience_ns, unproven_max, self._credentials, identify, leave
        )
        host = options.advertise_host
        try:
            listener = await listen(self._transport, options, reception.accept)
        except PCCLError as error:
            return host or seen, False, error.reason
        try:
            port = options.advertise_port or listener.address.port
            if port_mapping is not None:
                forwarded = await port_mapping.start(port, self._master, PATIENT_WAIT_NS)
                if forwarded is not None:
                    host, port = forwarded.public_host, forwarded.port
            answer, _, _ = await ask_address(
                self._clock, self._transport, self._master, self._credentials,
                self._timeout_s + Timing().dial_s, AddressQuery(host, port),
            )  # fmt: skip
        except PCCLError as error:
            return host or seen, False, error.reason
        finally:
            listener.close()
            reception.close()
            if port_mapping is not None:
                await port_mapping.close()
        return str(Address(host or answer.seen, port)), answer.dialled, answer.reason

    async def dial(
        self, members: Sequence[MemberStatus], status: StatusReport
    ) -> tuple[MemberDialled, ...]:
        """Dial members one after the other."""
        found: list[MemberDialled] = []
        for member in members:
            target = Member(member.peer, member.host, member.port)
            own = Opening(Channel.PROBE, status.run, status.term, target=member.peer)

            def greet(connection: Connection, own: Opening = own) -> Handshake:
                return self._credentials.dial(connection, own)

            test = TryAddress(target, (member.host,), member.host)
            patience_ns = round(min(self._timeout_s * 1e9, self._patience_ns))
            tried = await probe(
                self._transport, self._clock, test, greet, patience_ns, self._master.host
            )
            reason = "" if tried.host else tried.reason
            found.append(MemberDialled(member.peer, member.name, member.host, member.port, reason))
        return tuple(found)
