"""A peer's connection to one of several masters, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from pccl.machines.peer.events import ControlClosed, ControlMessage, ControlOpened, PeerEvent
from pccl.protocol import messages as msg
from pccl.protocol.handshake.certificates import NO_CERTIFICATE, Certificate
from pccl.protocol.limits import Timing
from pccl.protocol.types import NOBODY, NS_PER_S, PeerId
from pccl.runtime.control.greeting import Credentials
from pccl.runtime.control.keeper import ControlKeeper
from pccl.runtime.master_server import MasterServer
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address
from pccl.transports.sim.connection import SimConnection
from pccl.transports.sim.network import SimNetwork
from tests.support.clear import in_the_clear

TIMING = Timing()
FIRST, SECOND, THIRD = (Address(f"master{n}", 48000 + n) for n in (1, 2, 3))
TOKEN, OTHER_TOKEN = b"the token of this run", b"the token of another"


@dataclass
class Identity:
    """A newcomer, until it is told who it is."""

    peer: PeerId = NOBODY
    run: bytes = b""
    term: int = 0
    certificate: Certificate = NO_CERTIFICATE


class World:
    """Masters on a network, and the keeper of one peer; it dials when the test says so."""

    def __init__(self, *known: Address) -> None:
        self.loop = VirtualLoop(limit_ns=600 * NS_PER_S)
        self.network = SimNetwork(self.loop, Random(0), latency_ns=1_000_000, ragged=False)
        self.identity = Identity()
        self.events: list[PeerEvent] = []
        self.keeper = ControlKeeper(
            self.loop, self.network.host("peer"), known, TIMING.dial_s,
            Credentials(TOKEN, Random(1).randbytes, encrypts=in_the_clear),
            lambda: self.identity, self.events.append,
            self.loop.create_task,
        )  # fmt: skip
        self.servers: list[MasterServer] = []

    def close(self) -> None:
        self.keeper.close("over")
        for server in self.servers:
            server.close()
        self.run(1.0)
        self.loop.close()

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(self._sleep(seconds))

    async def _sleep(self, seconds: float) -> None:
        woken = self.loop.create_future()
        self.loop.call_later(seconds, woken.set_result, None)
        await woken

    def serve(
        self,
        address: Address,
        *,
        standby_of: tuple[Address, ...] = (),
        standbys: tuple[Address, ...] = (),
        token: bytes = TOKEN,
    ) -> MasterServer:
        host = self.network.host(address.host)
        server = MasterServer(
            self.loop, host, TIMING, Random(address.port).randbytes, token=token,
            standbys=tuple(msg.MasterAddress(a.host, a.port) for a in standbys),
            standby_of=standby_of, encrypts=in_the_clear,
        )  # fmt: skip
        self.loop.run_until_complete(server.start(address))
        self.servers.append(server)
        return server

    def dial(self) -> list[PeerEvent]:
        """One attempt; give what it brings."""
        self.events.clear()
        self.keeper.dial(0)
        self.run(0.1)
        return list(self.events)

    def attempt(self) -> Address:
        """One attempt that fails; give whose turn it was."""
        turn = self.keeper.address
        (event,) = self.dial()
        assert isinstance(event, ControlClosed)
        return turn

    def register(self) -> msg.Registered:
        assert [type(event) for event in self.dial()] == [ControlOpened]
        self.keeper.send(msg.Register(0, "", 4000))
        self.run(0.1)
        words = [e.message for e in self.events if isinstance(e, ControlMessage)]
        assert isinstance(words[0], msg.Registered)
        return words[0]


class Flips:
    """Flips a bit of what arrives at the peer, so often."""

    def __init__(self, network: SimNetwork, times: int) -> None:
        self.left = times
        network.noises.append(self)

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        if not self.left or end.local.host != "peer":
            return data
        self.left -= 1
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 1
        return memoryview(damaged)


def test_after_a_damaged_greeting_the_same_master_is_tried_once_more() -> None:
    world = World(FIRST, SECOND)
    world.serve(FIRST)
    flips = Flips(world.network, 2)
    turns = [world.attempt() for _ in range(2)]
    assert (turns, flips.left) == ([FIRST, FIRST], 0)
    assert world.keeper.address == SECOND  # a line that damages everything is no reason to stay
    world.attempt()
    Flips(world.network, 1)
    assert world.attempt() == FIRST
    assert isinstance(world.register(), msg.Registered)
    world.close()


def test_a_standby_sends_newcomers_on() -> None:
    world = World(FIRST, SECOND)
    world.serve(FIRST, standby_of=(THIRD,))
    world.serve(SECOND)
    world.dial()
    world.keeper.send(msg.Register(0, "", 4000, masters=2))
    world.run(0.1)
    reason = "this is a standby, and no member of its run has returned to it"
    assert world.events[-1] == ControlClosed(reason)
    assert world.keeper.address == SECOND
    assert isinstance(world.register(), msg.Registered)
    world.close()


def test_a_master_says_where_others_are() -> None:
    world = World(FIRST)
    server = world.serve(FIRST, standbys=(SECOND, FIRST))
    registered = world.register()
    assert registered.standbys == tuple(msg.MasterAddress(a.host, a.port) for a in (SECOND, FIRST))
    assert world.keeper.masters_count == 2
    server.close()
    world.run(0.1)
    assert [world.attempt() for _ in range(3)] == [FIRST, SECOND, FIRST]
    world.close()


def test_a_refusal_counts_where_there_is_one_master() -> None:
    world = World(FIRST)
    world.serve(FIRST, token=OTHER_TOKEN)
    (event,) = world.dial()
    assert isinstance(event, ControlMessage)
    assert isinstance(event.message, msg.Refused)
    assert "does not accept this token" in event.message.reason
    world.close()


def test_a_member_tries_on_whatever_answers_instead_of_its_master() -> None:
    world = World(FIRST, SECOND)
    for address in (FIRST, SECOND):
        world.serve(address, token=OTHER_TOKEN)
    world.identity = Identity(PeerId(3), b"the run of these", 2)
    assert [world.attempt() for _ in range(4)] == [FIRST, SECOND, FIRST, SECOND]
    world.close()


def test_a_removal_is_final_whoever_else_there_is() -> None:
    world = World(FIRST, SECOND)
    world.serve(FIRST)
    registered = world.register()
    world.keeper.send(msg.Goodbye())
    world.run(0.1)
    world.identity = Identity(registered.peer, registered.run, registered.term)
    world.dial()
    world.keeper.send(msg.Resume(registered.peer, 0))
    world.run(0.1)
    refusals = [e.message for e in world.events if isinstance(e, ControlMessage)]
    assert [m.cause is not None for m in refusals if isinstance(m, msg.Refused)] == [True]
    world.close()


def test_closing_stops_a_dial() -> None:
    world = World(FIRST)
    world.serve(FIRST)
    world.keeper.dial(0)
    world.keeper.close("not wanted")
    world.run(10.0)
    assert world.events == []
    world.close()
