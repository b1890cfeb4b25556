"""Examines the path between this machine and a run, without joining the run.

It asks the master for its status and its clock, lets the master dial a port of this process, dials
some members, and learns how they see one of its ports. Master and members see a few connections,
which end after their handshakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pccl.machines.reachability import TryAddress, may_be_dialled
from pccl.protocol.errors import LinkError, PCCLError
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import ASKS_ADDRESS, Channel, Opening
from pccl.protocol.limits import PADDING_BYTES_MAX, Timing
from pccl.protocol.messages import AddressQuery
from pccl.protocol.status_report import MemberStatus, StatusReport
from pccl.protocol.types import Member, PeerId
from pccl.runtime.clock import Clock
from pccl.runtime.control.greeting import Credentials, Reception, introduce
from pccl.runtime.control.probe import probe
from pccl.runtime.control.question import AddressAnswer, ask_address, ask_status
from pccl.runtime.links.listening import listen
from pccl.runtime.links.port_mapping import PATIENT_WAIT_NS, PortMapping, RouterReport
from pccl.runtime.requests import PeerOptions
from pccl.transports.base import Address, Connection, Transport
from pccl.transports.relay import Introduction

CLOCK_READINGS = 3
"""The reading with the shortest exchange counts."""

MEMBERS_DIALLED_MAX = 8

SIGHTINGS_MAX = 3
"""Members that are asked how they see a port of this machine."""


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
class Sighting:
    """From where another process sees the connections of one port of this machine.

    Attributes:
        by: "the master", or the name of a member.
        host: the address that it sees; empty: the master did not say.
        port: the port that it sees.
    """

    by: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Examination:
    """What a machine has learnt about its path to a run.

    Attributes:
        status: the run, as its master sees it.
        seen: the host from which the master sees this machine; empty: the master did not say.
        local: the address of this machine, from whose one port the sightings were made.
        local_port: this port.
        sightings: how the master and some members see it.
        clock_offset_s: the master's wall clock minus that of this machine, in seconds.
        clock_error_s: how far the offset may be wrong, in seconds.
        loses_long: why a packet of the usual length got no answer; empty: it got one.
        relays: whether the master forwards between peers that cannot dial each other.
        dialled_at: the address of this machine that the master was asked to dial.
        was_dialled: whether the master dialled it.
        was_here: whether this process has seen that dial; if not, another one has answered it.
        reason: why nothing answered, or why the master did not dial; empty if it was answered.
        members: some members, and whether they answer this machine.
        member_count: number of members of the run.
        router: whether the router has forwarded that port; None: it was not asked.
    """

    status: StatusReport
    seen: str
    local: str
    local_port: int
    sightings: tuple[Sighting, ...]
    clock_offset_s: float
    clock_error_s: float
    loses_long: str
    relays: bool
    dialled_at: str
    was_dialled: bool
    was_here: bool
    reason: str
    members: tuple[MemberDialled, ...]
    member_count: int
    router: RouterReport | None = None

    @property
    def is_reached(self) -> bool:
        """Whether the master has reached this machine."""
        return self.was_dialled and not self.reason and self.was_here


class LongPacketsLost(LinkError):
    """The master answers short questions only: long packets get lost on the way."""


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
        LongPacketsLost: the master answers, but its status does not arrive.
        LinkError, NotAdmitted, RemoteProtocolError: as in ``ask_status``. What fails after that is
            part of the result.
    """
    examiner = _Examiner(clock, transport, master, credentials, timeout_s)
    first = await examiner.ask(AddressQuery())
    loses_long = await examiner.try_long()
    try:
        status = await ask_status(clock, transport, master, credentials, timeout_s)
    except LinkError as error:
        if loses_long:
            raise LongPacketsLost(reason=loses_long) from error
        raise
    offset_s, error_s = await examiner.read_clock(first)
    seen = first.told.seen
    dialled_at, was_dialled, was_here, reason = await examiner.be_dialled(
        options, seen, port_mapping
    )
    members = await examiner.dial(status.members[:MEMBERS_DIALLED_MAX], status)
    sightings = await examiner.be_seen(first, members, status)
    return Examination(
        status=status,
        seen=seen,
        local=first.local.host,
        local_port=first.local.port,
        sightings=sightings,
        clock_offset_s=offset_s,
        clock_error_s=error_s,
        loses_long=loses_long,
        relays=first.told.relays,
        dialled_at=dialled_at,
        was_dialled=was_dialled,
        was_here=was_here,
        reason=reason,
        members=members,
        member_count=status.member_count,
        router=None if port_mapping is None else port_mapping.report,
    )


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

    async def ask(self, query: AddressQuery, more_s: float = 0.0) -> AddressAnswer:
        """Ask the master about the own address; a test dial takes more time."""
        return await ask_address(
            self._clock, self._transport, self._master, self._credentials,
            self._timeout_s + more_s, query,
        )  # fmt: skip

    async def try_long(self) -> str:
        """Return why a packet of the usual length, there or back, gets no answer; empty: it does.

        A short question is answered before and afterwards, so that only the length is the cause.
        """
        try:
            await self.ask(AddressQuery(padding=bytes(PADDING_BYTES_MAX)))
        except LinkError as error:
            with contextlib.suppress(PCCLError):
                await self.ask(AddressQuery())
                return error.reason
        return ""

    async def read_clock(self, first: AddressAnswer) -> tuple[float, float]:
        """Return the offset of the master's clock and its error; ``first`` is one reading."""
        answers = [first]
        with contextlib.suppress(PCCLError):
            while len(answers) < CLOCK_READINGS:
                answers.append(await self.ask(AddressQuery()))
        readings: list[tuple[int, int]] = []
        for answer in answers:
            age_ns = self._clock.now_ns() - (answer.asked_ns + answer.answered_ns) // 2
            offset_ns = answer.told.unix_us * 1000 - (time.time_ns() - age_ns)
            readings.append((answer.answered_ns - answer.asked_ns, offset_ns))
        took_ns, offset_ns = min(readings)
        return offset_ns / 1e9, took_ns / 2e9

    async def be_dialled(
        self, options: PeerOptions, seen: str, port_mapping: PortMapping | None
    ) -> tuple[str, bool, bool, str]:
        """Let the master dial a port of this process, opened and announced as a peer would.

        Returns the address, whether the master dialled it and this process saw that, and why
        nothing answered.
        """
        came: list[Address] = []

        def leave(connection: Connection, remote: Opening, deadline_ns: int) -> None:
            came.append(connection.remote)
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
            return host or seen, False, False, error.reason
        try:
            port = options.advertise_port or listener.address.port
            if port_mapping is not None:
                forwarded = await port_mapping.start(port, self._master, PATIENT_WAIT_NS)
                if forwarded is not None:
                    host, port = forwarded.public_host, forwarded.port
            answer = (await self.ask(AddressQuery(host, port), Timing().dial_s)).told
        except PCCLError as error:
            return host or seen, False, False, error.reason
        finally:
            listener.close()
            reception.close()
            if port_mapping is not None:
                await port_mapping.close()
        at = str(Address(host or answer.seen, port))
        return at, answer.dialled, bool(came), answer.reason

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

    async def be_seen(
        self, first: AddressAnswer, members: Sequence[MemberDialled], status: StatusReport
    ) -> tuple[Sighting, ...]:
        """Return how the master sees the port of ``first``, and how some members see the same."""
        seen = [Sighting("the master", first.told.seen, first.told.port)]
        for member in [one for one in members if not one.reason][:SIGHTINGS_MAX]:
            try:
                address = await self._seen_by(first.local, member, status)
            except PCCLError:
                continue  # it is in this machine, or was too slow
            seen.append(Sighting(member.name or f"peer {member.peer}", address.host, address.port))
        return tuple(seen)

    async def _seen_by(
        self, local: Address, member: MemberDialled, status: StatusReport
    ) -> Address:
        """Dial a member from an own port; return the address from which it sees this process."""
        told: asyncio.Future[Address] = asyncio.get_running_loop().create_future()

        def take(connection: Connection, remote: Opening) -> None:
            connection.pause_reading()
            Introduction(connection, told)

        def may_dial(found: str) -> bool:
            return may_be_dialled(found, seen=member.host, by=self._master.host)

        patience_ns = round(min(self._timeout_s * 1e9, self._patience_ns))
        there = Address(member.host, member.port)
        connection = await self._transport.punch(local, there, patience_ns / 1e9, may_dial)
        deadline_ns = self._clock.now_ns() + patience_ns
        own = Opening(
            Channel.PROBE, status.run, status.term, target=PeerId(member.peer), flags=ASKS_ADDRESS
        )
        handshake = self._credentials.dial(connection, own)
        timer = self._clock.call_at_ns(deadline_ns, connection.abort)  # which fails ``told``
        try:
            await introduce(connection, handshake, self._clock, deadline_ns, take)
            return await told
        finally:
            timer.cancel()
            connection.abort()
