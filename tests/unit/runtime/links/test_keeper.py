"""Two link keepers on a network in virtual time: how many lanes, and what becomes of lost ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from pccl.protocol.errors import LinkError
from pccl.protocol.frame import HEADER_BYTES, NO_OPERATION, FrameHeader, FrameKind
from pccl.protocol.handshake.certificates import NO_CERTIFICATE, Certificate, certify
from pccl.protocol.handshake.keys import Signer
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import Timing
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import NS_PER_S, Member, OperationId, PeerId
from pccl.runtime.clock import Ticker
from pccl.runtime.control.greeting import Credentials, introduce, opening_of
from pccl.runtime.links import lane_checks
from pccl.runtime.links.frame_router import FrameRouter
from pccl.runtime.links.keeper import LinkKeeper
from pccl.stress.sim.loop import VirtualLoop
from pccl.topology.link_steps import TellLink
from pccl.topology.segment_limit import LaneFacts
from pccl.transports.base import Address, Connection
from pccl.transports.link import Lane, Link, Links
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.network import SimHost, SimNetwork
from pccl.transports.sinks import Drain, Sink
from tests.support.clear import in_the_clear
from tests.support.secrets import MASTER_SIGNER, signer_of

MS = 1_000_000
LATENCY = 1 * MS
SETTLED_NS = 20 * MS
"""Long enough to dial and greet several times over."""

RELAY, ELDER, YOUNG = PeerId(1), PeerId(3), PeerId(7)
RUN = bytes(range(16))
OPERATION = OperationId(1, 0, 1, 0, 0)
TIMING = Timing(tick_s=0.25, lane_stall_s=10.0, dial_s=5.0, redial_min_s=0.02, redial_max_s=0.5)
STALL_NS, TICK_NS, LONG_NS = 10 * NS_PER_S, NS_PER_S // 4, NS_PER_S
"""LONG_NS: a lane that has lived so long is redialled at once."""

GRACE_NS = NS_PER_S // 2 + 20 * MS
"""After so long the elder has dialled, too."""

PORTS = {RELAY: 4001, ELDER: 4003, YOUNG: 4007}
NOT_THERE = tuple(PeerId(100 + n) for n in range(63))
"""Members that have still to come up."""


class Frames(FrameRouter):
    """What a keeper tells whoever understands the frames. No frame with a meaning is sent here."""

    def __init__(self) -> None:
        self.came: list[PeerId] = []
        """Whose lanes have come up, one by one."""
        self.lost: list[Lane] = []
        self.used: set[PeerId] = set()
        """Peers whose links a running transfer needs."""
        self.known: set[PeerId] = set()

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        if header.kind is FrameKind.MEET:
            self.on_meet(lane, header)
            return Drain(0)
        raise AssertionError(f"nobody sends {header}")

    def lane_up(self, lane: Lane) -> None:
        self.came.append(lane.link.peer)

    def lane_failed(self, link: Link, number: int) -> None:
        pass

    def lane_lost(self, lane: Lane) -> None:
        self.lost.append(lane)

    def uses(self, peer: PeerId) -> bool:
        return peer in self.used

    def expect_peer(self, peer: PeerId) -> None:
        self.known.add(peer)

    def forget_peer(self, peer: PeerId) -> None:
        self.known.discard(peer)


@dataclass(frozen=True)
class Identity:
    """A peer of a run."""

    peer: PeerId
    run: bytes = RUN
    term: int = 1
    certificate: Certificate = NO_CERTIFICATE


@dataclass
class Change:
    """A call of ``on_change``."""

    when_ns: int
    reason: str | None
    path: LinkPath


class Side:
    """One peer, which listens, ticks, and wants what it is told to want."""

    def __init__(self, world: World, host: SimHost, peer: PeerId, lanes: int) -> None:
        self.world, self.host = world, host
        self.other = YOUNG if peer == ELDER else ELDER
        self.frames = Frames()
        self.links = Links()
        self.changes: list[Change] = []
        self.narrow: list[int] = []
        """Sizes of segments that were found to pass."""
        self.credentials = Credentials(world.token, Random(peer).randbytes, encrypts=in_the_clear)
        self.identity = Identity(peer)
        self.identity = replace(self.identity, certificate=self.certified())
        self.keeper = LinkKeeper(
            world.loop,
            host,
            TIMING,
            self.identity,
            self.links,
            self.frames,
            self._on_change,
            world.loop.create_task,
            self.credentials,
            lanes,
            has_left=world.gone.__contains__,
            has_mapped_port=lambda: world.maps_ports,
            on_narrow=lambda peer, segment_bytes: self.narrow.append(segment_bytes),
        )
        self.address = Address(host.name, PORTS[peer])
        self.member = Member(peer, host.name, PORTS[peer], key=self.credentials.signer.key)
        self._wakes_ns = 0
        Ticker(world.loop, TICK_NS, self._tick).start()

    def certified(
        self,
        by: Signer = MASTER_SIGNER,
        *,
        run: bytes = RUN,
        peer: PeerId | None = None,
        key: bytes = b"",
    ) -> Certificate:
        """What the master of the run signs for this peer, or another one, or for another peer."""
        return certify(by, run, peer or self.identity.peer, key or self.credentials.signer.key)

    def sleep(self, duration_ns: int) -> None:
        """The process is not given the processor: no tick comes for a while."""
        self._wakes_ns = self.world.now_ns + duration_ns

    def _tick(self, busy_ns: int) -> None:
        if self.world.now_ns >= self._wakes_ns:
            self.keeper.look(busy_ns)

    def _on_change(self, link: TellLink) -> None:
        assert link.peer in (self.other, *NOT_THERE)
        if link.peer == self.other:
            self.changes.append(Change(self.world.loop.now_ns(), link.reason, link.path))

    async def listen(self) -> None:
        await self.host.listen(self.address, self.keeper.accept)

    def deafen(self) -> None:
        """Whoever dials from now on is refused by the network."""
        self.host.listeners.clear()

    @property
    def lanes(self) -> dict[int, Lane]:
        """By number."""
        lanes = self.links.to(self.other).lanes
        found = {lane.number: lane for lane in lanes}
        assert len(found) == len(lanes)
        return found

    @property
    def ups_and_downs(self) -> list[bool]:
        """What it was told, in short."""
        return [change.reason is None for change in self.changes]

    def end(self, number: int) -> SimConnection:
        """This end of a lane's connection."""
        connection = self.lanes[number].connection
        connection = getattr(connection, "_inner", connection)  # both have dialled it
        assert isinstance(connection, SimConnection)
        return connection


@dataclass
class World:
    """An elder and a younger peer that want a link; each says how many lanes it wants."""

    elder_lanes: int = 0
    young_lanes: int = 0
    near: bool = False
    """Whether they are on one machine."""
    elder_wants: bool = True
    elder_listens: bool = True
    young_listens: bool = True
    token: bytes | None = None
    maps_ports: bool = False
    """Whether the routers of both forward their ports."""
    young_host: str = "here"
    dials_ns: list[int] = field(default_factory=list[int])
    """When somebody dialled."""
    gone: set[PeerId] = field(default_factory=set[PeerId])
    """Peers that have left the run."""

    def __post_init__(self) -> None:
        self.loop = VirtualLoop(limit_ns=600 * NS_PER_S)
        self.network = SimNetwork(
            self.loop, Random(0), self._note, latency_ns=LATENCY, ragged=False
        )
        there = self.network.host("there")
        here = there if self.near else self.network.host(self.young_host)
        self.elder = Side(self, there, ELDER, self.elder_lanes)
        self.young = Side(self, here, YOUNG, self.young_lanes)
        self.sides = (self.elder, self.young)
        self.relay = Side(self, self.network.host("relay"), RELAY, 0)

    def _note(self, now_ns: int, what: str) -> None:
        if what.startswith("dial "):
            self.dials_ns.append(now_ns)

    def run(self, main: Callable[[World], Coroutine[Any, Any, None]]) -> World:
        """Both want each other; then ``main`` is run."""

        async def scenario() -> None:
            if self.young_listens:
                await self.young.listen()
            if self.elder_listens:
                await self.elder.listen()
            self.want()
            await self.settle()
            await main(self)
            for side in (*self.sides, self.relay):
                side.keeper.close()

        try:
            self.loop.run_until_complete(scenario())
        finally:
            self.loop.close()
        return self

    def want(self) -> None:
        """Both (or the younger one alone) want the link."""
        if self.elder_wants:
            self.elder.keeper.want((self.young.member,))
        self.young.keeper.want((self.elder.member,))

    @property
    def now_ns(self) -> int:
        return self.loop.now_ns()

    async def sleep_until(self, when_ns: int) -> None:
        woken = self.loop.create_future()
        self.loop.call_at_ns(when_ns, woken.set_result, None)
        await woken

    async def sleep(self, duration_ns: int) -> None:
        await self.sleep_until(self.now_ns + duration_ns)

    async def settle(self) -> None:
        await self.sleep(SETTLED_NS)

    async def meet(self) -> None:
        """The master names a relay to both."""
        if not self.relay.host.listeners:
            await self.relay.listen()
        self.elder.keeper.meet(self.young.member, self.relay.member)
        self.young.keeper.meet(self.elder.member, self.relay.member)
        await self.sleep(2 * LONG_NS)

    async def use(self) -> None:
        """A collective begins on both sides."""
        for side in self.sides:
            side.keeper.use((side.other,))
        await self.settle()

    def numbers(self) -> list[int]:
        """Of the lanes, which both sides have."""
        assert list(self.elder.lanes) == list(self.young.lanes)
        return list(self.young.lanes)

    def check_joined(self) -> None:
        """Both sides have the same connections, and there are no others."""
        for number in self.numbers():
            assert self.elder.end(number).other is self.young.end(number)
        assert len(self.network.ends) == 2 * len(self.numbers())

    def check_never_down(self) -> None:
        """Each side was told once that the link is up, and nothing else."""
        assert self.elder.ups_and_downs == self.young.ups_and_downs == [True]


Story = Callable[[World], Coroutine[Any, Any, None]]


def between(
    elder: int = 0, young: int = 0, *, steady: bool = False, **options: Any
) -> Callable[[Story], Callable[[], None]]:
    """Make a test of a story in such a world. ``steady``: its link is never down."""

    def make(story: Story) -> Callable[[], None]:
        def test() -> None:
            world = World(elder, young, **options).run(story)
            if steady:
                world.check_never_down()

        return test

    return make


# -- how many ------------------------------------------------------------------------------------


@between(4, 4, steady=True)
async def test_the_lanes_behind_the_first_are_dialled_when_the_link_is_used(world: World) -> None:
    await world.sleep(60 * NS_PER_S)
    assert world.numbers() == [0]
    assert len(world.dials_ns) == 1
    await world.use()
    assert world.numbers() == [0, 1, 2, 3]
    await world.use()
    await world.sleep(60 * NS_PER_S)
    assert world.numbers() == [0, 1, 2, 3]
    assert len(world.dials_ns) == 4
    assert world.elder.frames.lost == world.young.frames.lost == []


@between(5, 0, elder_listens=False, young_listens=False)
async def test_a_link_that_is_used_before_it_is_up_gets_its_lanes_when_it_is(world: World) -> None:
    await world.use()
    await world.sleep(NS_PER_S)
    assert world.numbers() == []
    for side in world.sides:
        assert not any(side.ups_and_downs)
        assert all("connection refused" in str(change.reason) for change in side.changes)
    await world.elder.listen()
    await world.sleep(NS_PER_S)
    assert world.numbers() == [0, 1, 2, 3, 4]
    assert [side.ups_and_downs.count(True) for side in world.sides] == [1, 1]


@pytest.mark.parametrize("near", [False, True], ids=["far", "near"])
@pytest.mark.parametrize(
    ("elder", "young", "far_width", "near_width"),
    [
        (0, 0, 16, 1),
        (1, 0, 1, 1),
        (0, 1, 1, 1),
        (3, 0, 3, 3),
        (0, 3, 3, 3),
        (2, 5, 5, 5),
        (5, 2, 5, 5),
        (6, 6, 6, 6),
        (0, 256, 256, 256),
    ],
)
def test_the_number_of_lanes(
    elder: int, young: int, far_width: int, near_width: int, near: bool
) -> None:
    async def main(world: World) -> None:
        assert world.numbers() == [0]
        await world.use()
        assert world.numbers() == list(range(near_width if near else far_width))

    World(elder, young, near).run(main).check_never_down()


@between(1000, 0, steady=True)
async def test_no_link_has_more_lanes_than_there_are_numbers(world: World) -> None:
    await world.use()
    assert world.numbers() == list(range(256))


@between(4, 4, steady=True)
async def test_without_a_collective_on_the_dialling_side_there_is_one_lane(world: World) -> None:
    world.elder.keeper.use((YOUNG,))
    await world.sleep(10 * NS_PER_S)
    assert world.numbers() == [0]


# -- how many, if nobody was told ------------------------------------------------------------------


@between(steady=True)
async def test_links_that_are_used_together_share_the_connections(world: World) -> None:
    there = (world.elder.member, *(Member(peer, "nowhere", 1) for peer in NOT_THERE))
    world.young.keeper.want(there)
    world.young.keeper.use(member.peer for member in there)
    await world.settle()
    assert world.numbers() == [0, 1, 2, 3]
    assert len(world.dials_ns) == 4


@between(steady=True)
async def test_what_is_more_than_its_share_is_closed_once_it_is_idle(world: World) -> None:
    await world.use()
    assert world.numbers() == list(range(16))
    there = (world.elder.member, *(Member(peer, "nowhere", 1) for peer in NOT_THERE))
    world.young.lanes[9].carried[OPERATION] = [7]
    world.young.keeper.want(there)
    world.young.keeper.use(member.peer for member in there)
    await world.sleep(TICK_NS + SETTLED_NS)
    assert world.numbers() == [0, 1, 2, 3, 9]
    del world.young.lanes[9].carried[OPERATION]
    await world.sleep(TICK_NS)
    assert world.numbers() == [0, 1, 2, 3]
    assert len(world.elder.frames.lost) == 12


@between(20, 0, steady=True)
async def test_a_number_that_was_told_is_not_shared(world: World) -> None:
    there = (world.elder.member, *(Member(peer, "nowhere", 1) for peer in NOT_THERE))
    world.young.keeper.want(there)
    world.young.keeper.use(member.peer for member in there)
    await world.sleep(TICK_NS + SETTLED_NS)
    assert world.numbers() == list(range(20))


# -- who may have them -----------------------------------------------------------------------------


@between(4, 4, elder_wants=False, steady=True)
async def test_a_newcomer_gets_one_lane_until_it_is_wanted(world: World) -> None:
    await world.use()
    await world.sleep(10 * NS_PER_S)
    assert list(world.elder.lanes) == [0]
    assert world.elder.frames.lost == []
    world.elder.keeper.want((world.young.member,))
    await world.sleep(NS_PER_S)  # its next attempts, each after half a second
    assert world.numbers() == [0, 1, 2, 3]


@between(elder_wants=False)
async def test_the_lanes_of_a_newcomer_that_leaves_are_forgotten(world: World) -> None:
    world.young.keeper.want(())
    await world.settle()
    assert world.elder.links.all() == []
    assert world.elder.ups_and_downs == [True, False]
    assert world.elder.frames.known == set()


@pytest.mark.parametrize(("number", "is_taken"), [(255, True), (256, False), (65535, False)])
def test_a_lane_number_out_of_range_is_refused(
    number: int, is_taken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pccl.link")

    async def main(world: World) -> None:
        await dial_by_hand(world, number)
        assert list(world.elder.lanes) == ([0, number] if is_taken else [0])
        assert (f"lane {number} is above" in caplog.text) is not is_taken

    World(4, 4).run(main).check_never_down()


async def dial_by_hand(
    world: World,
    number: int,
    certificate: Certificate | None = None,
    credentials: Credentials | None = None,
) -> None:
    """Greet the elder in the name of the younger one, whose keeper does not know of it."""
    side = world.young
    connection = await side.host.dial(world.elder.address, 1.0)
    identity = replace(side.identity, certificate=certificate or side.identity.certificate)
    opening = opening_of(Channel.LANE, identity, ELDER, lane=number, lanes=4)
    deadline_ns, credentials = world.now_ns + NS_PER_S, credentials or side.credentials

    def take(connection: Connection, remote: Opening) -> None:
        Lane(connection, number, world.young.links.to(ELDER), world.young.keeper)

    await introduce(
        connection, credentials.dial(connection, opening), world.loop, deadline_ns, take
    )
    await world.settle()


FALSE: dict[str, Callable[[Side], Certificate]] = {
    "none": lambda _: NO_CERTIFICATE,
    "of another peer": lambda side: side.certified(peer=PeerId(8)),
    "of another key": lambda side: side.certified(key=signer_of(b"x").key),
    "of another run": lambda side: side.certified(run=bytes(16)),
    "of another master": lambda side: side.certified(signer_of(b"x")),
}


@pytest.mark.parametrize("made", FALSE.values(), ids=FALSE)
def test_a_newcomer_with_a_false_certificate_is_refused(
    made: Callable[[Side], Certificate], caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: World) -> None:
        world.young.keeper.want(())
        await world.settle()
        with pytest.raises(LinkError):
            await dial_by_hand(world, 0, made(world.young))
        assert world.elder.frames.came == [YOUNG], "with its certificate"
        assert "the master of this peer has not registered it" in caplog.text
        await dial_by_hand(world, 0)
        assert list(world.elder.lanes) == [0]

    World(elder_wants=False).run(main)


def test_a_member_with_another_key_than_the_roster_says_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(world: World) -> None:
        thief = Credentials(world.token, Random(99).randbytes, encrypts=in_the_clear)
        certificate = world.young.certified(key=thief.signer.key)
        for number in (0, 1):
            with pytest.raises(LinkError):
                await dial_by_hand(world, number, certificate, thief)
        assert "it does not have the key of peer 7" in caplog.text
        assert world.elder.frames.came == [YOUNG]
        world.check_joined()

    World().run(main).check_never_down()


@between(elder_wants=False)
async def test_a_process_with_another_key_than_the_roster_says_is_not_used(world: World) -> None:
    world.young.keeper.want(())
    await world.settle()
    world.young.keeper.want((replace(world.elder.member, key=signer_of(b"x").key),))
    await world.sleep(10 * NS_PER_S)
    assert world.numbers() == []
    assert world.young.ups_and_downs[:1] == [True]
    assert not any(world.young.ups_and_downs[1:])
    assert "another process answered instead of peer 3" in str(world.young.changes[-1].reason)


# -- lost lanes ------------------------------------------------------------------------------------


@between(4, 4, steady=True)
async def test_a_lane_that_lived_long_is_redialled_at_once(world: World) -> None:
    await world.use()
    await world.sleep(LONG_NS)
    for number in (2, 0, 3, 1):
        before = [side.lanes[number] for side in world.sides]
        world.young.end(number).reset()
        await world.sleep(7 * LATENCY)  # three round trips, and less than any back-off
        assert sorted(world.numbers()) == [0, 1, 2, 3]
        for side, lane in zip(world.sides, before, strict=True):
            assert side.lanes[number] is not lane
            assert side.frames.lost[-1] is lane
    assert [len(side.frames.lost) for side in world.sides] == [4, 4]


@between(2, 2, elder_wants=False, steady=True)
async def test_a_lane_that_is_lost_as_soon_as_it_is_up_is_redialled_ever_more_seldom(
    world: World,
) -> None:
    await world.use()  # the elder refuses lane 1 each time
    world.dials_ns.clear()
    await world.sleep(5 * NS_PER_S)
    pauses_ms = [
        (later - earlier) // MS
        for earlier, later in zip(world.dials_ns, world.dials_ns[1:], strict=False)
    ]
    waits_ms = [40, 80, 160, 320, 500, 500, 500, 500, 500, 500, 500]
    # Between the end of one pause and the beginning of the next: dialling, greeting, the end.
    extra_ms = [pause - wait for pause, wait in zip(pauses_ms[:8], waits_ms[:8], strict=True)]
    assert all(6 <= extra <= 8 for extra in extra_ms)
    assert list(world.elder.lanes) == [0]
    world.elder.keeper.want((world.young.member,))
    await world.sleep(10 * NS_PER_S)
    assert world.numbers() == [0, 1]
    world.young.end(1).reset()  # it had lived long: forgiven
    await world.sleep(7 * LATENCY)
    assert world.numbers() == [0, 1]
    world.young.end(1).reset()  # it had not, and waits for as long as if it had never failed
    await world.sleep(15 * MS)
    assert world.numbers() == [0]
    await world.sleep(15 * MS)
    assert world.numbers() == [0, 1]


@between(4, 4, steady=True)
async def test_a_new_lane_takes_the_place_of_the_one_of_its_number(world: World) -> None:
    await world.use()
    await world.sleep(LONG_NS)
    old = world.elder.lanes[2]
    world.young.end(2).stall(None)  # the elder is not told that it is over
    world.young.lanes[2].abort()
    await world.settle()
    new = world.elder.lanes[2]
    assert new is not old
    assert world.numbers() == [0, 1, 2, 3]
    assert world.elder.frames.lost == [old]
    assert not old.ready
    await world.sleep(10 * NS_PER_S)
    assert world.elder.lanes[2] is new
    assert world.elder.frames.lost == [old]


@between(1, 1)
async def test_the_only_lane_is_replaced_without_a_word(world: World) -> None:
    await world.sleep(LONG_NS)
    old = world.elder.lanes[0]
    world.young.end(0).stall(None)
    world.young.lanes[0].abort()
    await world.settle()
    assert world.numbers() == [0]
    assert world.elder.lanes[0] is not old
    assert world.elder.frames.lost == [old]
    assert world.elder.ups_and_downs == [True]
    assert world.young.ups_and_downs == [True, False, True]


@between(4, 4)
async def test_the_link_is_down_when_its_last_lane_is(world: World) -> None:
    await world.use()
    await world.sleep(LONG_NS)
    world.elder.deafen()
    for number in (1, 0, 3):
        world.young.end(number).reset()
        await world.settle()
        world.check_never_down()
    assert world.numbers() == [2]
    down_ns = world.now_ns
    world.young.end(2).reset()
    await world.settle()
    assert world.elder.ups_and_downs == [True, False]
    assert "connection reset by the network" in str(world.elder.changes[-1].reason)
    await world.elder.listen()
    await world.sleep(NS_PER_S)
    assert world.numbers() == [0, 1, 2, 3]
    assert world.elder.ups_and_downs == [True, False, True]
    assert world.young.ups_and_downs[:2] == [True, False]
    assert world.young.ups_and_downs.count(True) == 2
    assert world.young.ups_and_downs[-1]
    downs = [change.reason for change in world.young.changes if change.reason is not None]
    assert downs[0] == "lost the connection to there:4003: connection reset by the network"
    assert all("connection refused" in reason for reason in downs[1:])
    assert world.young.changes[1].when_ns - down_ns < LATENCY


@between(4, 4)
async def test_all_lanes_lost_at_once(world: World) -> None:
    await world.use()
    await world.sleep(LONG_NS)
    for number in range(4):
        world.young.end(number).reset()
    await world.settle()
    assert world.numbers() == [0, 1, 2, 3]
    assert [len(side.frames.lost) for side in world.sides] == [4, 4]
    for side in world.sides:
        assert side.ups_and_downs == [True, False, True]


# -- when the younger cannot dial, or need not -----------------------------------------------------


@pytest.mark.parametrize(("elder", "young"), [(4, 4), (0, 3), (1, 1)])
def test_an_elder_that_nobody_can_dial_dials_the_younger(elder: int, young: int) -> None:
    async def main(world: World) -> None:
        assert world.numbers() == []
        await world.sleep(GRACE_NS)
        assert world.numbers() == [0]
        await world.use()
        for _ in range(3):
            assert world.numbers() == list(range(max(elder, young)))
            world.check_joined()
            for number in world.numbers():
                world.young.end(number).reset()
            await world.sleep(GRACE_NS)
        assert world.young.ups_and_downs.count(True) == 4
        reasons = [change.reason for change in world.young.changes if change.reason is not None]
        assert all("refused" in reason or "reset" in reason for reason in reasons)

    World(elder, young, elder_listens=False).run(main)


@between(2, 0, young_listens=False, steady=True)
async def test_a_younger_that_nobody_can_dial_dials_the_elder(world: World) -> None:
    world.check_joined()
    await world.use()
    await world.sleep(LONG_NS)
    world.young.end(0).reset()
    await world.settle()
    assert world.numbers() == [0, 1]
    world.check_joined()


@pytest.mark.parametrize("who", ["elder", "young"])
def test_a_link_that_only_one_end_has_lost_comes_back(who: str) -> None:
    async def main(world: World) -> None:
        await world.sleep(LONG_NS)
        one = world.elder if who == "elder" else world.young
        one.end(0).stall(None)  # the other end never hears of the reset
        one.lanes[0].abort()
        await world.sleep(GRACE_NS)
        world.check_joined()
        assert one.ups_and_downs == [True, False, True]

    World(1, 1).run(main)


@pytest.mark.parametrize("token", [None, b"a secret that both of them know"])
def test_dials_that_cross_leave_one_link(token: bytes | None) -> None:
    async def main(world: World) -> None:
        dialled_by_elder: list[bool] = []
        for lead_ns in range(-8 * LATENCY, 8 * LATENCY + 1, LATENCY // 4):
            for side in world.sides:
                side.keeper.want(())
            await world.sleep(NS_PER_S)
            world.elder.keeper.want((world.young.member,))
            await world.sleep(NS_PER_S // 2 + lead_ns)  # now, or nearly, the elder dials
            world.young.keeper.want((world.elder.member,))
            await world.sleep(100 * LATENCY)
            assert world.numbers() == [0]
            world.check_joined()
            dialled_by_elder.append(world.elder.end(0).local.port != PORTS[ELDER])
            world.dials_ns.clear()
            await world.sleep(3 * NS_PER_S)
            assert world.dials_ns == []
        assert dialled_by_elder == sorted(dialled_by_elder)
        assert len(set(dialled_by_elder)) == 2

    World(1, 1, token=token).run(main)


# -- peers that are not wanted any more ------------------------------------------------------------


@between(4, 4)
async def test_the_lanes_of_an_unwanted_peer_are_closed(world: World) -> None:
    await world.use()
    assert world.young.frames.known == {ELDER}
    world.dials_ns.clear()
    world.young.keeper.want(())
    await world.settle()
    assert world.numbers() == []
    assert world.elder.ups_and_downs == [True, False]
    world.elder.keeper.want(())
    await world.sleep(10 * NS_PER_S)
    assert world.dials_ns == []
    assert world.young.frames.known == world.elder.frames.known == set()
    assert list(world.network.ends) == []
    world.want()
    await world.settle()
    assert world.numbers() == [0]  # it has not been used since
    await world.use()
    assert world.numbers() == [0, 1, 2, 3]


@between(4, 4)
async def test_a_peer_that_is_unwanted_while_its_lanes_are_dialled(world: World) -> None:
    for delay_ns in range(0, 6 * LATENCY, LATENCY // 2):
        for side in world.sides:
            side.keeper.use((side.other,))
        await world.sleep(delay_ns)
        for side in world.sides:
            side.keeper.want(())
        world.dials_ns.clear()
        await world.sleep(NS_PER_S)
        assert world.numbers() == []
        assert world.dials_ns == []
        assert list(world.network.ends) == []
        world.want()
        await world.settle()
        assert world.numbers() == [0]


@between(4, 4)
async def test_a_peer_that_is_unwanted_while_a_redial_waits(world: World) -> None:
    await world.use()
    world.elder.deafen()
    for number in range(4):
        world.young.end(number).reset()
    await world.settle()
    assert world.numbers() == []
    for side in world.sides:  # the elder's dial waits, too
        side.keeper.want(())
    await world.elder.listen()
    world.dials_ns.clear()
    await world.sleep(10 * NS_PER_S)
    assert world.dials_ns == []


@between(4, 4)
async def test_after_the_end_nothing_is_dialled_or_told(world: World) -> None:
    await world.use()
    world.young.end(1).reset()
    world.young.keeper.close()
    await world.settle()
    world.elder.keeper.want(())
    world.dials_ns.clear()
    connection = await world.elder.host.dial(world.young.address, 1.0)
    assert len(world.dials_ns) == 1
    connection.start(Deaf(connection))
    await world.sleep(10 * NS_PER_S)
    assert len(world.dials_ns) == 1
    assert world.young.ups_and_downs == [True]
    assert world.elder.ups_and_downs == [True, False]
    assert list(world.network.ends) == []


class Deaf:
    """Expects nothing but the end."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def get_buffer(self) -> memoryview:
        return memoryview(bytearray(1))

    def buffer_updated(self, nbytes: int) -> None:
        raise AssertionError("nobody has anything to say")

    def writable(self) -> None:
        raise AssertionError("nobody has asked")

    def connection_lost(self, error: Exception | None) -> None:
        assert error is not None


# -- lanes that are silent -------------------------------------------------------------------------


@between(4, 4, steady=True)
async def test_a_lane_that_answers_is_left_alone(world: World) -> None:
    await world.use()
    before = [dict(side.lanes) for side in world.sides]
    for side in world.sides:
        side.frames.used.add(side.other)
    await world.sleep(100 * NS_PER_S)
    assert [side.lanes for side in world.sides] == before
    # Every five seconds or a little more, a question, an answer, or one of each; 56 bytes.
    for side in world.sides:
        for lane in side.lanes.values():
            assert 16 <= lane.received_bytes / HEADER_BYTES <= 40
            assert lane.received_bytes % HEADER_BYTES == 0


@between(4, 4, steady=True)
async def test_lanes_that_nobody_needs_are_not_asked(world: World) -> None:
    await world.use()
    for side in world.sides:
        side.end(1).stall(None)
    before = [dict(side.lanes) for side in world.sides]
    await world.sleep(100 * NS_PER_S)
    assert [side.lanes for side in world.sides] == before
    for side in world.sides:
        assert [lane.received_bytes for lane in side.lanes.values()] == [0] * 4


@between(4, 4, steady=True)
async def test_whoever_receives_says_so_from_time_to_time(world: World) -> None:
    """On a slow line the sender's question would wait behind what it has sent."""
    await world.use()
    lane, other = world.young.lanes[1], world.elder.lanes[1]
    for quarters in range(1, 5):
        lane.payload_bytes += 1  # something arrives, bit by bit
        await world.sleep(STALL_NS // 4 + 2 * TICK_NS)
        assert other.received_bytes == quarters * HEADER_BYTES
        assert other.moved_bytes == other.received_bytes
    await world.sleep(10 * STALL_NS)  # nothing more does
    assert other.received_bytes == 4 * HEADER_BYTES
    for side in world.sides:
        assert [side.lanes[n].received_bytes for n in (0, 2, 3)] == [0] * 3


@pytest.mark.parametrize("who", ["both", "elder", "young"])
def test_a_silent_lane_that_is_needed_is_replaced(who: str) -> None:
    async def main(world: World) -> None:
        needy = {"both": world.sides, "elder": (world.elder,), "young": (world.young,)}[who]
        await world.use()
        await world.sleep(20 * NS_PER_S)
        old = [side.lanes[1] for side in world.sides]
        others = [[side.lanes[n] for n in (0, 2, 3)] for side in world.sides]
        for side in world.sides:
            side.end(1).stall(None)
        begin_ns = world.now_ns
        for side in needy:
            side.frames.used.add(side.other)

        await world.sleep_until(begin_ns + STALL_NS // 2 - TICK_NS)
        assert all(side.lanes[1].sent_bytes == 0 for side in needy)
        await world.sleep_until(begin_ns + STALL_NS // 2 + TICK_NS)
        assert all(side.lanes[1].sent_bytes == HEADER_BYTES for side in needy)

        await world.sleep_until(begin_ns + STALL_NS - TICK_NS)
        assert [side.lanes[1] for side in world.sides] == old
        await world.sleep_until(begin_ns + STALL_NS + TICK_NS)
        if who == "elder":  # the younger one, which would have to dial, has not been told
            assert 1 not in world.elder.lanes
            world.young.frames.used.add(ELDER)
            await world.sleep(STALL_NS + 2 * TICK_NS)
        await world.settle()
        assert world.numbers() == [0, 1, 2, 3]
        for side, lane in zip(world.sides, old, strict=True):
            assert side.lanes[1] is not lane
            assert side.frames.lost == [lane]
        assert [[side.lanes[n] for n in (0, 2, 3)] for side in world.sides] == others

    World(4, 4).run(main).check_never_down()


@between(4, 4, steady=True)
async def test_a_lane_that_comes_up_while_it_is_needed_has_its_time(world: World) -> None:
    await world.use()
    await world.sleep(20 * NS_PER_S)
    for side in world.sides:
        side.frames.used.add(side.other)
    world.young.end(1).reset()
    await world.settle()
    new = [side.lanes[1] for side in world.sides]
    await world.sleep(60 * NS_PER_S)
    assert [side.lanes[1] for side in world.sides] == new
    assert [len(side.frames.lost) for side in world.sides] == [1, 1]


@between(4, 4, steady=True)
async def test_a_process_that_slept_gives_its_lanes_time(world: World) -> None:
    await world.use()
    for side in world.sides:
        side.frames.used.add(side.other)
        side.end(1).stall(None)
    old = [side.lanes[1] for side in world.sides]
    await world.sleep(STALL_NS - NS_PER_S)
    for side in world.sides:
        side.sleep(NS_PER_S)
    await world.sleep(STALL_NS - NS_PER_S)
    assert [side.lanes[1] for side in world.sides] == old
    await world.sleep(3 * NS_PER_S)
    assert all(side.lanes[1] is not lane for side, lane in zip(world.sides, old, strict=True))


# -- how they are connected ------------------------------------------------------------------------


def paths(world: World) -> list[list[LinkPath]]:
    """The paths that the elder and the younger peer were told."""
    return [[change.path for change in side.changes] for side in world.sides]


@between(steady=True)
async def test_the_younger_has_dialled(world: World) -> None:
    assert paths(world) == [[LinkPath.DIRECT]] * 2


@between(maps_ports=True, young_host="203.0.113.7", steady=True)
async def test_a_mapped_port_was_dialled_as_its_owner_knows(world: World) -> None:
    assert paths(world) == [[LinkPath.MAPPED], [LinkPath.DIRECT]]


@between(maps_ports=True, young_host="192.168.1.7", steady=True)
async def test_inside_a_mapped_port_means_nothing(world: World) -> None:
    assert paths(world) == [[LinkPath.DIRECT]] * 2


@between(elder_listens=False)
async def test_the_elder_has_dialled(world: World) -> None:
    await world.sleep(GRACE_NS)
    assert [told[-1] for told in paths(world)] == [LinkPath.DIALLED_BACK] * 2


# -- lanes that both have dialled ------------------------------------------------------------------


def behind_nats(**options: Any) -> Callable[[Story], Callable[[], None]]:
    """Make a test of a story in which nobody can dial either of the two."""
    return between(elder_listens=False, young_listens=False, **options)


@behind_nats()
async def test_two_that_have_dialled_each_other_get_the_usual_lanes(world: World) -> None:
    await world.meet()
    assert world.numbers() == [0]
    assert [told[-2:] for told in paths(world)] == [[LinkPath.RELAYED, LinkPath.PUNCHED]] * 2
    told = [len(side.changes) for side in world.sides]
    await world.use()
    assert world.numbers() == list(range(16))
    world.check_joined()
    assert [len(side.changes) for side in world.sides] == told, "the link is the same"
    before = dict(world.young.lanes)
    world.young.end(0).reset()
    world.young.end(7).reset()
    await world.settle()
    assert world.numbers() == [0, *range(1, 7), *range(8, 16)], "they lived for a moment only"
    await world.sleep(LONG_NS)
    assert world.numbers() == list(range(16))
    assert [n for n, lane in world.young.lanes.items() if lane is not before[n]] == [0, 7]
    world.check_joined()


@behind_nats()
async def test_a_busy_lane_asks_for_each_of_the_others(world: World) -> None:
    await world.meet()
    lane = world.young.lanes[0]
    lane.ready = False
    await world.use()
    assert world.numbers() == [0]
    lane.writable()
    await world.sleep(LONG_NS)
    assert world.numbers() == list(range(16))


@behind_nats()
async def test_a_peer_that_leaves_is_dialled_no_more(world: World) -> None:
    await world.meet()
    ask = FrameHeader(FrameKind.MEET, replace(NO_OPERATION, n=1), 0, 0, 0, what=4444)
    world.young.lanes[0].say(ask)
    await world.settle()
    assert world.elder.host.dials
    world.elder.keeper.want(())
    await world.settle()
    assert not world.elder.host.dials


@behind_nats()
async def test_without_the_relay_a_link_keeps_the_lanes_that_it_has(world: World) -> None:
    await world.meet()
    world.relay.deafen()
    dials = len(world.dials_ns)
    await world.use()
    await world.sleep(300 * NS_PER_S)
    assert world.numbers() == [0]
    assert len(world.dials_ns) - dials == 15 + 4
    assert world.dials_ns[-1] - world.dials_ns[dials] < 40 * NS_PER_S
    world.check_joined()


@behind_nats()
async def test_a_lane_through_a_relay_that_was_removed_is_not_kept(world: World) -> None:
    """A frozen relay closes no connection."""
    await world.relay.listen()
    world.elder.keeper.meet(world.young.member, world.relay.member)
    world.young.keeper.meet(world.elder.member, world.relay.member)
    while not all(side.lanes for side in world.sides):
        await world.sleep(LATENCY // 4)
    assert [told[-1] for told in paths(world)] == [LinkPath.RELAYED] * 2
    lanes = [side.lanes[0] for side in world.sides]
    world.gone.add(RELAY)
    world.want()
    await world.sleep(LATENCY // 4)
    assert [side.changes[-1].reason for side in world.sides] == [
        f"its relay, peer {RELAY}, has left the run"
    ] * 2
    await world.sleep(LONG_NS)
    assert [told[-1] for told in paths(world)] == [LinkPath.PUNCHED] * 2
    assert all(side.lanes[0] is not lane for side, lane in zip(world.sides, lanes, strict=True))


@behind_nats()
async def test_an_elder_dials_for_lanes_only_whom_it_has_met_so(world: World) -> None:
    ask = FrameHeader(FrameKind.MEET, replace(NO_OPERATION, n=1), 0, 0, 0, what=4444)
    await world.meet()
    await world.use()
    before = len(world.dials_ns)
    world.elder.lanes[0].say(ask)  # the younger does not dial for an elder
    world.young.lanes[0].say(
        replace(ask, operation=replace(NO_OPERATION, n=16))
    )  # nor the elder for more lanes than usual
    await world.settle()
    assert not world.elder.keeper._punches  # pyright: ignore[reportPrivateUsage]
    assert len(world.dials_ns) == before
    world.young.lanes[0].say(ask)
    await world.settle()
    assert list(world.elder.keeper._punches) == [(YOUNG, 1)]  # pyright: ignore[reportPrivateUsage]
    world.young.lanes[0].say(ask)  # again
    await world.sleep(TIMING.ns(TIMING.dial_s))
    assert not world.elder.keeper._punches, "nobody has come"  # pyright: ignore[reportPrivateUsage]
    world.check_joined()


@behind_nats(elder_wants=False)
async def test_a_newcomer_that_becomes_direct_before_it_is_wanted_is_told(world: World) -> None:
    await world.meet()
    told = [LinkPath.RELAYED, LinkPath.PUNCHED]
    assert [change.path for change in world.elder.changes if change.reason is None] == told
    world.elder.keeper.want((world.young.member,))
    await world.use()
    assert world.numbers() == list(range(16))


@behind_nats()
async def test_a_meeting_that_the_master_repeats_disturbs_none(world: World) -> None:
    """The elder cannot tell whether the younger one still has the relayed lane."""
    await world.relay.listen()
    elder, young, relay = world.elder, world.young, world.relay.member
    elder.keeper.meet(young.member, replace(relay, peer=PeerId(2), port=1))
    for _ in range(2):
        elder.keeper.meet(young.member, relay)  # it waits there, and no more at the other one
    young.keeper.meet(elder.member, relay)
    meetings = elder.keeper._meetings  # pyright: ignore[reportPrivateUsage]
    assert list(meetings) == [(YOUNG, 2)]
    while not elder.lanes:
        await world.sleep(LATENCY)
    elder.keeper.meet(young.member, relay)  # both dial each other now
    assert list(meetings) == [(YOUNG, 2), (YOUNG, 3)]
    await world.settle()
    assert [told[-1] for told in paths(world)] == [LinkPath.PUNCHED] * 2
    await world.sleep(2 * TIMING.ns(TIMING.dial_s))
    assert not meetings
    world.check_joined()


# -- large packets that vanish ---------------------------------------------------------------------


def test_lanes_that_are_stuck_are_dialled_with_smaller_segments(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel says that nothing larger than 1200 bytes is acknowledged."""
    asked: list[int] = []

    def facts(connection: Connection) -> LaneFacts:
        if asked[-1]:
            return LaneFacts(asked[-1], 1 << 20, 1 << 20, 0, 0, 0)
        return LaneFacts(1448, 300, 300, unacknowledged=12, retransmits=4, ack_ago_ns=0)

    async def dial(host: SimHost, *args: Any) -> Connection:
        asked.append(args[-1])
        return await dial_any(host, *args)

    async def main(world: World) -> None:
        for side in world.sides:
            side.frames.used.add(side.other)
        while not world.young.narrow and world.now_ns < 100 * NS_PER_S:
            for side in world.sides if not asked[-1] else ():
                for number in side.lanes:
                    side.end(number).stall(None)  # nor does any answer come
            await world.sleep(TICK_NS)
        assert asked == [0, 0, 1200]
        assert world.young.narrow == [1200]
        await world.sleep(100 * NS_PER_S)
        assert asked == [0, 0, 1200], "that lane stays"
        world.check_joined()

    dial_any = SimHost.dial
    monkeypatch.setattr(SimHost, "dial", dial)
    monkeypatch.setattr(lane_checks, "facts_of", facts)
    caplog.set_level(logging.INFO, "pccl.link")
    World(1, 1).run(main)
    said = [one.getMessage() for one in caplog.records if "large packets" in one.getMessage()]
    assert said == [
        "large packets seem to vanish on the way to peer 3: the next connections try segments of "
        "1200 bytes"
    ], "the elder can do nothing"
