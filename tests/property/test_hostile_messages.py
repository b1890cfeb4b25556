"""Any messages to a master, and from one to a peer: none ends more than its connection.

And what crowds of those who were let in may cost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Coroutine
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.master.events import (
    CloseConnection,
    ConnectionClosed,
    ConnectionMessage,
    ConnectionOpened,
    MasterAnswered,
    MasterEffect,
    MasterEvent,
    MasterTick,
    MasterUnanswered,
    SendTo,
)
from pccl.machines.master.lockstep import LockstepWatch, LongWait, Wait
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.peer.events import ReduceCall
from pccl.protocol import messages as msg
from pccl.protocol.codec import StreamDecoder, encode
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import PCCLError
from pccl.protocol.guards.allowance import PEERS_BYTES_MAX, REPORTS
from pccl.protocol.guards.source_shares import PortLimits
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import (
    DEPARTURE_BYTES_MAX,
    DEPARTURES_MAX,
    PEERS_MAX,
    PENDING_MAX,
    Timing,
)
from pccl.protocol.run_messages import EvidenceKind
from pccl.protocol.types import (
    ADDRESS_CHARACTERS_MAX,
    HOSTS_MAX,
    KEY_BYTES,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    RemovalCause,
    Roster,
    RoundKind,
)
from pccl.runtime.collective.operand import borrow
from pccl.runtime.control.stream import UNSENT_BYTES_MAX
from pccl.runtime.engine import PeerEngine
from pccl.runtime.master_server import MasterServer
from pccl.runtime.master_store import Remembered
from pccl.runtime.requests import JoinRequest, PeerOptions, ReduceRequest, RunRequest
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.sim.network import SimNetwork
from tests.support.master_stage import MasterStage
from tests.support.scenarios import key
from tests.support.secrets import MASTER_SIGNER
from tests.support.wires import FakeClock, Wire

SEEDS = st.integers(0, (1 << 32) - 1)
RUN = b"the run of these"
ME, OTHER = PeerId(1), PeerId(2)
ELSEWHERE = Address("elsewhere", 1)


# -- messages to a master, and from one ------------------------------------------------------


def draw(rng: Random, hint: Any) -> Any:
    """A value of an annotated type; small numbers, so that they often mean something."""
    if isinstance(hint, typing.NewType):
        return draw(rng, hint.__supertype__)
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        base, annotation = typing.get_args(hint)
        if base is float:
            return rng.choice((0.0, 1.0, 2.5, annotation.largest))
        if base is not int:
            return draw(rng, base)
        return rng.choice((0, 1, 2, 3, annotation.bound - 1))
    if origin is tuple:
        return tuple(draw(rng, typing.get_args(hint)[0]) for _ in range(rng.randrange(4)))
    if origin in (types.UnionType, typing.Union):
        return draw(rng, typing.get_args(hint)[0]) if rng.random() < 0.5 else None
    if hint is int:
        return rng.choice((0, 0, 1, 1, 1, 2, 3, (1 << 64) - 1))
    if hint is bool:
        return rng.random() < 0.5
    if hint is bytes:
        return rng.choice((b"", bytes(16), RUN, rng.randbytes(32)))
    if hint is str:
        return rng.choice(("", "a", "\0\n", "\U0001f600" * 300))
    if issubclass(hint, enum.IntEnum):
        return rng.choice(list(hint))
    return hint(*[draw(rng, each) for each in field_types(hint)])


@functools.cache
def field_types(kind: Any) -> list[Any]:
    """The annotated types of the fields of a dataclass, in their order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [hints[field.name] for field in dataclasses.fields(kind)]


FROM_PEERS = typing.get_args(msg.PeerMessage)
FROM_MEMBERS = tuple(kind for kind in FROM_PEERS if kind not in REPORTS)
"""Reports that are sent at another time cost the connection: most examples do without."""
OPENERS = (msg.Register, msg.Resume, msg.Return, msg.StatusRequest, msg.RunQuery)
LATER = tuple(kind for kind in FROM_MEMBERS if kind not in (*OPENERS, msg.Goodbye))
"""What does not end a membership or a connection by itself."""
FROM_MASTERS = typing.get_args(msg.MasterMessage)


def spoil_some(rng: Random, data: bytes) -> bytes:
    spoilt = bytearray(data)
    if spoilt and rng.random() < 0.1:
        spoilt[rng.randrange(len(spoilt))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


class FakeNetwork:
    """Where a master listens."""

    def __init__(self) -> None:
        self.accept: Callable[[Connection], None] = lambda connection: None
        self.address = Address("here", 1)
        self.port_limits = PortLimits()

    async def listen(self, address: Address, on_connection: Callable[[Connection], None]) -> Any:
        self.accept = on_connection
        return self

    def close(self) -> None:
        pass


class FakeStore:
    """What a master has kept of the run."""

    def load(self) -> Remembered:
        return Remembered(RUN, 1, b"master A")

    def save(self, remembered: Remembered) -> None:
        pass

    def clear(self) -> None:
        pass


class FakeTasks:
    """A standby that asks reaches nobody; the test answers in the name of its master."""

    def create(self, work: Coroutine[Any, Any, None]) -> None:
        work.close()

    def abandon(self) -> None:
        pass


OURS = b"the run begun here"[:16]
NUMBERS = (1, 1, 2, 3, 20, (1 << 62) - 1, 1 << 62, (1 << 64) - 1)
HOSTS = ("there", "there", "", "x" * 253, "x" * 4000, "\0\n")


def newcomer(rng: Random) -> list[msg.Message]:
    """One that registers; names like the first ones are allowed."""
    bad = ("n" * 65, "\u202e", " alice", "\0")
    name = rng.choice(bad) if rng.random() < 0.2 else rng.choice(("", "alice", "n" * 64))
    return [msg.Register(rng.randrange(2), "", 1, name=name)]


def question(rng: Random) -> list[msg.Message]:
    """A stranger asks one of the peers, or everything at once."""
    return [draw(rng, msg.EvidenceRequest) for _ in range(rng.choice((1, 1, 1, 100)))]


def report(rng: Random) -> list[msg.Message]:
    """A peer returns; some of what it tells is true of some run, but for what is absurd."""
    peer, view = PeerId(rng.choice((1, 1, 2, 3, 20, (1 << 62) - 1))), rng.choice(NUMBERS)
    host = rng.choice(HOSTS) if rng.random() < 0.2 else ""
    registration = msg.Register(rng.randrange(2), host, 1, masters=rng.choice((1, 1, 2)))
    run = rng.choice((RUN, RUN, RUN, OURS, bytes(16), b"invented by him!"))
    term = rng.choice((1, 1, 2, (1 << 31) - 1, (1 << 32) - 1))
    rounds = tuple(draw(rng, msg.RoundCount) for _ in range(rng.randrange(3)))
    header = msg.Return(peer, run, term, registration, 1, rounds, b"", rng.choice(NUMBERS))
    words: list[msg.Message] = [header]
    for _ in range(rng.randrange(4)):
        ring = {peer, *(PeerId(rng.choice(NUMBERS)) for _ in range(rng.randrange(3)))}
        members = tuple(Member(other, rng.choice(HOSTS), 1) for other in sorted(ring))
        views = rng.choice(((view,), (view, 1), (1, 2, view), ()))
        version, size = rng.choice(NUMBERS), rng.choice((0, 1, 2, len(ring), 3840, (1 << 32) - 1))
        group = rng.choice((registration.group, registration.group, registration.group, 7))
        words.append(msg.KnownRoster(Roster(version, group, view, members, views, size, 1, size)))
    kinds = (msg.KnownOutcome, msg.KnownAnswer, msg.LinkReport, *FROM_PEERS)
    words += [draw(rng, kind) for kind in rng.choices(kinds, k=rng.randrange(3))]
    return [*words, msg.Reported()] if rng.random() < 0.9 else words


@settings(max_examples=150)
@given(SEEDS)
def test_any_messages_to_a_master(seed: int) -> None:
    """One that has just begun, waits for its members, coordinates them, or stands by."""
    rng, network, clock = Random(seed), FakeNetwork(), FakeClock()
    others = rng.choice(((), (), (), (Address("first", 1),), (Address("first", 1), ELSEWHERE)))
    server = MasterServer(
        clock, typing.cast("Any", network), Timing(), lambda n: OURS if n == 16 else bytes(n),
        store=None if others else rng.choice((None, FakeStore())), standby_of=others,
    )  # fmt: skip
    asyncio.run(server.start(network.address))
    server._tasks = typing.cast("Any", FakeTasks())  # pyright: ignore[reportPrivateUsage]
    wires: list[Wire] = []
    for _ in range(rng.randrange(1, 40)):
        if not wires or rng.random() < 0.2:
            wire = Wire(lambda data: None)
            network.accept(typing.cast("Connection", wire))
            wire.feed(Opening(Channel.CONTROL).encode(), rng)
            if rng.random() < 0.3:
                wire.on_sent = None  # it reads no more
            first = rng.choice((newcomer(rng), report(rng), report(rng), question(rng)))
            wire.feed(b"".join(map(encode, first)), rng)
            wires.append(wire)
        wire = rng.choice(wires)
        kinds = FROM_PEERS if rng.random() < 0.1 else FROM_MEMBERS
        words = [encode(draw(rng, rng.choice(kinds))) for _ in range(rng.randrange(1, 4))]
        wire.feed(spoil_some(rng, b"".join(words)), rng)
        if others and rng.random() < 0.2:
            run = rng.choice((RUN, RUN, OURS, bytes(16)))
            proofs = tuple(msg.MemberProof(PeerId(n), rng.randbytes(16)) for n in range(3))
            members = rng.choice((None, (), proofs))
            said = msg.RunIs(run, 1, rng.random() < 0.7, rng.randrange(9), members)
            answer = rng.choice((MasterAnswered(0, said), MasterUnanswered(0, "gone")))
            server._feed(answer)  # pyright: ignore[reportPrivateUsage]
        if rng.random() < 0.2:
            for _ in range(rng.choice((1, 1, 25))):
                clock.time_ns += 240_000_000
                server._tick(rng.choice((0, 240_000_000)))  # pyright: ignore[reportPrivateUsage]
        server.machine.check()
        for stream in server._streams.values():  # pyright: ignore[reportPrivateUsage]
            assert len(stream._unsent) <= UNSENT_BYTES_MAX  # pyright: ignore[reportPrivateUsage]
        for gone in [wire for wire in wires if not wire.open]:
            wires.remove(gone)
            gone.end()
        server.machine.check()
    server.close()


@settings(max_examples=150)
@given(SEEDS)
def test_any_messages_to_a_master_with_members(seed: int) -> None:
    """Of strangers, newcomers and members; it answers only on connections that are open."""
    rng, master, last = Random(seed), MasterStage().new(3), 100
    callers = master.machine.connections.callers
    for _ in range(rng.randrange(1, 60)):
        if not callers or rng.random() < 0.2:
            connection = last = last + 1
            master.do(ConnectionOpened(connection, "10.0.0.9", key(rng.choice((1, 2, 3, 9)))))
            asked = msg.EvidenceRequest(PeerId(rng.randrange(5)), EvidenceKind.STATE)
            choices = (newcomer(rng), question(rng), [asked], [asked] * 2)
            words: list[msg.Message] = list(rng.choice(choices))
        else:
            connection = rng.choice(list(callers))
            chosen = FROM_MEMBERS if rng.random() < 0.05 else LATER
            kinds = [kind for kind in chosen if allows(master, connection, kind)]
            words = [draw(rng, rng.choice(kinds or [msg.Register]))]
        for word in words:
            if not allows(master, connection, type(word)):
                master.do(ConnectionClosed(connection, "the sender may send none now"))
                break
            effects = answers(master, ConnectionMessage(connection, word))
            if CloseConnection in map(type, effects) and connection not in callers:
                break
        if rng.random() < 0.3:
            master.sleep(rng.choice((0.25, 0.25, 3.0)))
            answers(master, MasterTick())


def allows(master: MasterStage, connection: int, kind: type[msg.Message]) -> bool:
    """Whether the master reads such messages of this connection at all."""
    return PEERS_BYTES_MAX[master.machine.trust_in(connection)].get(kind, 0) > 0


def answers(master: MasterStage, event: MasterEvent) -> list[MasterEffect]:
    """What the master does; what it sends can be sent, on connections that were open."""
    opened = set(master.machine.connections.callers)
    effects = master.do(event)
    for effect in effects:
        if isinstance(effect, SendTo):
            assert effect.connection in opened
            encode(effect.message)
    return effects


class FalseMaster:
    """Admits a peer, with another one that is not there, and then says anything."""

    def __init__(self, connection: Connection, rng: Random) -> None:
        self._memory = memoryview(bytearray(4096))
        self._connection = connection
        self._rng = rng
        connection.start(self)
        me, other = Member(PeerId(1), "peer", 1), Member(PeerId(2), "nobody", 1)
        roster = Roster(1, 0, 1, (me, other), (1,), 2, 1, 2)
        words: list[msg.Message] = [
            msg.Registered(PeerId(1), 1, RUN, b"token"),
            msg.Admitted(roster, tuple(msg.RoundCount(kind, 0) for kind in RoundKind)),
        ]
        opening = Opening(Channel.CONTROL, RUN, 1).encode()
        connection.send([opening + b"".join(encode(word) for word in words)])

    def get_buffer(self) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        words = [encode(draw(self._rng, self._rng.choice(FROM_MASTERS))) for _ in range(3)]
        self._connection.send([spoil_some(self._rng, b"".join(words))])

    def writable(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        pass


@settings(max_examples=100)
@given(SEEDS)
def test_any_messages_from_a_master(seed: int) -> None:
    rng, loop = Random(seed), VirtualLoop(limit_ns=3600 * 10**9)
    network = SimNetwork(loop, Random(seed))
    bugs: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: bugs.append(context))

    async def main() -> None:
        await network.host("master").listen(
            Address("master", 1),
            lambda connection: typing.cast("None", FalseMaster(connection, rng)),
        )
        timing = Timing(master_lost_s=5.0)
        options = PeerOptions(timing, Address("", 1), random_bytes=rng.randbytes)
        engine = PeerEngine(loop, loop, network.host("peer"), Address("master", 1), 0, options)
        memory = np.arange(10, dtype=np.int32)
        descriptor = Descriptor(DataType.INT32, ReduceOp.SUM, 10)
        for tag in range(3):
            try:
                await engine.connect(JoinRequest(2, timeout_s=60.0))
                asks = ReduceCall(0, tag, descriptor)
                await engine.reduce(ReduceRequest(borrow(memory), asks, timeout_s=60.0))
                await engine.round(RunRequest(RoundKind.UPDATE_TOPOLOGY, 60.0))
            except PCCLError:
                pass  # if it is an internal one, the loop has been told, too
        await engine.close()
        assert memory.tolist() == list(range(10))

    loop.run_until_complete(main())
    loop.close()
    assert bugs == []


# -- what crowds may cost -----------------------------------------------------------------


def test_the_fullest_roster_fits_a_message() -> None:
    last = (1 << 32) - 1
    members = tuple(
        Member(PeerId(last - n), "x" * 253, 65535, 65535, "n" * 64, bytes(KEY_BYTES))
        for n in range(PEERS_MAX)
    )
    seen = "x" * ADDRESS_CHARACTERS_MAX  # a peer that declares no host may have further ones
    found = dataclasses.replace(members[0], host=seen, hosts=(seen,) * HOSTS_MAX)
    assert len(encode(msg.LinkPlan((found,)))) < len(encode(msg.LinkPlan(members[:1])))
    roster = Roster(last, last, last, members, (last,) * 16, PEERS_MAX, 1, PEERS_MAX)
    message = msg.Admitted(roster, tuple(msg.RoundCount(kind, last) for kind in RoundKind))
    assert list(StreamDecoder().feed(encode(message))) == [message]
    why = "x" * DEPARTURE_BYTES_MAX
    gone = [msg.Departure(member.peer, RemovalCause.SILENT, why) for member in members]
    changed = msg.RosterChanged(roster, tuple(gone[:DEPARTURES_MAX]))
    (heard,) = StreamDecoder().feed(encode(changed))
    assert isinstance(heard, msg.RosterChanged)
    assert (heard.roster, heard.departures) == (changed.roster, changed.departures)


def crowd(size: int) -> MasterMachine:
    machine = MasterMachine(Timing(), RUN, 1, lambda count: bytes(count), 0, signer=MASTER_SIGNER)
    for number in range(size):
        machine.handle(ConnectionOpened(number, "there", key(number)), 0)
        machine.handle(ConnectionMessage(number, msg.Register(0, "", 1)), 0)
    return machine


def messages(effects: list[Any]) -> list[msg.Message]:
    return [effect.message for effect in effects if isinstance(effect, SendTo)]


def test_newcomers_who_leave_one_by_one_cost_a_word_for_each_who_stays() -> None:
    machine, quarter_ns = crowd(100), 250_000_000
    for number in range(50, 80):
        assert messages(machine.handle(ConnectionMessage(number, msg.Goodbye()), 0)) == []
    said = [
        m for tick in range(1, 9) for m in messages(machine.handle(MasterTick(), tick * quarter_ns))
    ]
    gone = tuple(PeerId(number + 1) for number in range(50, 80))
    plans = [m for m in said if isinstance(m, msg.LinkPlan)]
    assert plans == [msg.LinkPlan((), gone)] * 20  # the younger ones


def test_of_a_crowd_that_waits_the_oldest_from_where_most_come_goes() -> None:
    machine, last = crowd(1 + PENDING_MAX), 1 + PENDING_MAX  # the first one is a member
    machine.handle(ConnectionOpened(last, "elsewhere", key(last)), 0)
    effects = machine.handle(ConnectionMessage(last, msg.Register(0, "", 1)), 0)
    refused = [m for m in messages(effects) if isinstance(m, msg.Refused)]
    assert [m.cause for m in refused] == [RemovalCause.CROWDED_OUT]
    peers = list(machine.membership.peers)
    assert (peers[:2], peers[-1], len(peers)) == ([1, 3], PENDING_MAX + 2, PENDING_MAX + 1)


def test_a_run_may_begin_with_more_than_may_wait_for_one_that_goes_on() -> None:
    machine, size = (
        MasterMachine(Timing(), RUN, 1, lambda count: bytes(count), 0, signer=MASTER_SIGNER),
        PENDING_MAX + 9,
    )
    for number in range(size):
        machine.handle(ConnectionOpened(number, "there", key(number)), 0)
        machine.handle(ConnectionMessage(number, msg.Register(0, "", 1, size)), 0)
    assert len(machine.membership.pending()) == size


def test_of_a_crowd_that_nobody_can_reach_some_are_looked_at() -> None:
    """Each look goes round the ring."""
    membership = pending(*[1] * 2000)
    members = [membership.peers[PeerId(number)] for number in range(1, 1001)]
    for one, other in pairwise([*members, members[0]]):
        membership.report_link(other.id, one.id, None, 0)
    membership.admit(members[:1], {}, set())
    for member in members[1:]:
        membership.admit([member], {}, set())
    first, last = membership.order(0)[0], membership.order(0)[-1]
    for number in range(1001, 2001):
        membership.report_link(PeerId(number), first, "refused", 0)
        membership.report_link(first, PeerId(number), "refused", 0)
        membership.report_link(PeerId(number), last, "refused", 0)
    looked = membership.links.are_linked
    with patch.object(membership.links, "are_linked", wraps=looked) as looks:
        assert len(membership.unlinked()) <= 64
    assert looks.call_count < 300_000  # 1,000 newcomers, 1,000 members


def pending(*min_peers: int) -> Membership:
    membership = Membership(1)
    for number, wanted in enumerate(min_peers, start=1):
        member = Member(PeerId(number), "h", 1)
        peer = RegisteredPeer(PeerId(number), 0, member, wanted, connection=number)
        membership.peers[peer.id] = peer
    return membership


def test_newcomers_that_wait_for_more_than_ever_come_are_not_seated_again_and_again() -> None:
    """Each word of one of them cost as much as all of them."""
    membership = pending(*range(60000, 60300))
    with patch.object(membership, "_seat", wraps=getattr(membership, "_seat")) as seat:  # noqa: B009
        assert membership.admissible() == []
    assert [call.args for call in seat.call_args_list] == [([],)]


def test_newcomers_of_whom_each_wants_one_more_than_there_are_cost_a_few_seatings() -> None:
    membership = pending(*range(1, 301))
    for number in range(1, 300):  # only some have the links that all of them need
        membership.report_link(PeerId(number), PeerId(number + 1), None, 0)
    with patch.object(membership, "_seat", wraps=getattr(membership, "_seat")) as seat:  # noqa: B009
        assert [peer.id for peer in membership.admissible()] == [1, 2]
    assert seat.call_count < 12


@pytest.mark.parametrize("host", ["\U0001f600" * 64, "a" * 254, "a\nb", "\0"])
def test_what_is_no_host_name_is_refused(host: str) -> None:
    machine = crowd(1)
    machine.handle(ConnectionOpened(7, "there", key(7)), 0)
    refused, closed = machine.handle(ConnectionMessage(7, msg.Register(0, host, 1)), 0)
    assert isinstance(refused, SendTo)
    assert isinstance(refused.message, msg.Refused)
    assert isinstance(closed, CloseConnection)
    assert len(machine.membership.peers) == 1


def test_of_a_member_that_waits_for_very_much_a_part_is_named() -> None:
    watch = LockstepWatch(Timing(waiting_report_s=1.0))
    waits = [Wait(OperationId(1, 0, 1, tag, 0), f"tag {tag}", (OTHER,), (ME,)) for tag in range(99)]
    waits.append(Wait(OperationId(1, 0, 1, 99, 0), "tag 99", (ME,), (OTHER,)))
    assert watch.look(waits, (), 0) == []
    *_, last = watch.look(waits, (), 10**9)
    assert isinstance(last, LongWait)
    (calls,) = last.calls
    assert calls.startswith("tag 0 and tag 1 and ")
    assert calls.endswith("tag 15 and 83 more")
