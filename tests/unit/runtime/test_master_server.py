"""A master on a simulated network, and newcomers that know the token and send without end."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from ipaddress import ip_network
from random import Random

import pytest

from pccl.machines.master.events import ConnectionMessage, ConnectionPaused, MasterEvent
from pccl.protocol import messages as msg
from pccl.protocol.codec import encode
from pccl.protocol.errors import LinkError, LocalProtocolError
from pccl.protocol.guards.allowance import Trust, masters_bytes_max
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import (
    MESSAGE_COST_BYTES,
    NEWCOMERS_BURST_BYTES,
    NEWCOMERS_BYTES_PER_S,
    TURN_BYTES_MAX,
    Timing,
)
from pccl.protocol.run_messages import EvidenceKind
from pccl.protocol.types import NS_PER_S, PeerId, RoundId, RoundKind
from pccl.runtime.control.greeting import Credentials, introduce
from pccl.runtime.control.stream import UNSENT_BYTES_MAX, ControlStream
from pccl.runtime.master_server import MasterServer
from pccl.runtime.master_store import MasterStore, Remembered
from pccl.stress.sim.loop import VirtualLoop
from pccl.telemetry.evidence import unpack_evidence
from pccl.transports.base import Address, Connection
from pccl.transports.sim.network import SimNetwork
from tests.support.claimant import alone, returning
from tests.support.clear import in_the_clear
from tests.support.proxy_headers import proxied
from tests.support.spliced import Dialled

TIMING = Timing(recovery_s=1.0)
ADDRESS = Address("master", 48000)
CHEAP = msg.LinkReport(PeerId(999), False, "x" * 200)
"""What a newcomer may say as often as it likes."""


class Client:
    """One control connection to the master."""

    def __init__(self, world: World, host: str, header: bytes = b"") -> None:
        self._header = header
        self.heard: list[msg.Message] = []
        self.lost = ""
        self._world = world
        world.loop.run_until_complete(self._dial(host))

    async def _dial(self, host: str) -> None:
        network, loop = self._world.network, self._world.loop
        transport = network.hosts.get(host) or network.host(host)
        self._world.clients += 1
        random_bytes = Random(self._world.clients).randbytes
        credentials = Credentials(None, random_bytes, encrypts=in_the_clear)
        self.credentials, self.key = credentials, credentials.signer.key
        self.transport = transport
        connection = await transport.dial(ADDRESS, TIMING.dial_s)
        if self._header:
            assert connection.send([self._header]) == len(self._header)
        handshake = credentials.dial(connection, Opening(Channel.CONTROL))
        await introduce(connection, handshake, loop, loop.now_ns() + NS_PER_S, self._take)

    def _take(self, connection: Connection, remote: object) -> None:
        self.stream = ControlStream(
            connection, self.heard.append, self._on_lost, self._world.loop, masters_bytes_max
        )

    def _on_lost(self, reason: str) -> None:
        self.lost = reason

    def forwarded(self, source: int, target: int) -> Dialled | None:
        """Ask the master to forward to a peer; None: it refuses."""
        dialled: list[Dialled] = []

        def take(connection: Connection, remote: object) -> None:
            dialled.append(Dialled(connection))

        async def dial() -> None:
            loop = self._world.loop
            connection = await self.transport.dial(ADDRESS, TIMING.dial_s)
            if self._header:
                assert connection.send([self._header]) == len(self._header)
            own = Opening(Channel.RELAY, source=PeerId(source), target=PeerId(target))
            handshake = self.credentials.dial(connection, own)
            await introduce(connection, handshake, loop, loop.now_ns() + NS_PER_S, take)

        with contextlib.suppress(LinkError):
            self._world.loop.run_until_complete(dial())
        self._world.run(0.1)
        return dialled[0] if dialled else None

    def say(self, *messages: msg.Message) -> None:
        for message in messages:
            self.stream.send(message)

    def flood(self, message: msg.Message) -> None:
        """Say it as often as the connection holds."""
        for _ in range((UNSENT_BYTES_MAX >> 1) // len(encode(message))):
            self.say(message)

    def hears(self, kind: type[msg.Message]) -> bool:
        return any(isinstance(message, kind) for message in self.heard)


class World:
    """A master, and time."""

    def __init__(
        self, store: MasterStore | None = None, *, relays: bool = False, proxy: str | None = None
    ) -> None:
        self.loop = VirtualLoop(limit_ns=600 * NS_PER_S)
        self.clients = 0
        self.network = SimNetwork(self.loop, Random(0), ragged=False)
        self.paused: dict[int, int] = {}
        """Connection -> until when the machine was told that it is paused."""
        self.cost_bytes: dict[int, int] = {}
        """Connection -> what its messages would be charged."""
        self.server = MasterServer(
            self.loop, self.network.host(ADDRESS.host), TIMING, Random(2).randbytes,
            self._observe, store=store, tests_addresses=False, encrypts=in_the_clear,
            relays=relays, proxies=() if proxy is None else [ip_network(proxy)],
        )  # fmt: skip
        self.loop.run_until_complete(self.server.start(ADDRESS))

    def _observe(self, event: MasterEvent, effects: list[object]) -> None:
        match event:
            case ConnectionPaused(connection, until_ns):
                self.paused[connection] = until_ns
            case ConnectionMessage(connection, message):
                cost = len(encode(message)) + MESSAGE_COST_BYTES
                self.cost_bytes[connection] = self.cost_bytes.get(connection, 0) + cost
            case _:
                pass

    def run(self, seconds: float) -> None:
        async def sleep() -> None:
            woken = self.loop.create_future()
            self.loop.call_later(seconds, woken.set_result, None)
            await woken

        self.loop.run_until_complete(sleep())

    def register(self, host: str, group: int = 0, header: bytes = b"") -> Client:
        client = Client(self, host, header)
        client.say(msg.Register(group, "", 4000))
        self.run(0.1)
        return client

    def flooders(self, host: str, count: int) -> list[Client]:
        clients = [self.register(host) for _ in range(count)]
        for client in clients:
            client.flood(CHEAP)
        return clients

    def close(self) -> None:
        self.server.close()
        self.run(10.0)
        self.loop.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def admitted(client: Client) -> bool:
    return client.hears(msg.Admitted)


def test_a_load_holds_back_its_own_source_only(world: World) -> None:
    first = world.register("first")
    assert admitted(first)
    world.flooders("flooder", 3)
    honest = world.register("honest")  # connections are numbered: 5
    for _ in range(50):
        honest.say(msg.Heartbeat())
        world.run(0.1)
    assert set(world.paused) == {2, 3, 4}
    assert sum(world.cost_bytes[n] for n in (2, 3, 4)) < (
        6 * NEWCOMERS_BYTES_PER_S + 2 * NEWCOMERS_BURST_BYTES
    )
    assert not honest.lost


def test_a_newcomer_held_back_with_its_source_is_not_silent(world: World) -> None:
    """Its heartbeats wait in the network, behind those that its master does not read."""
    deadline_ns = TIMING.ns(TIMING.deadline_s)
    assert admitted(world.register("first"))
    newcomer = world.register("crowd")
    # As if its source had sent for a quarter of an hour what is read in a second.
    for _ in range(15 * 60):
        world.server._newcomers.spend(  # pyright: ignore[reportPrivateUsage]
            "crowd", NEWCOMERS_BYTES_PER_S // 10, world.loop.now_ns()
        )
    newcomer.say(msg.Heartbeat())
    world.run(0.1)
    (until_ns,) = world.paused.values()
    assert until_ns - world.loop.now_ns() > 2 * deadline_ns
    for _ in range(20):
        newcomer.say(msg.Heartbeat())
        world.run(1.0)
    assert not newcomer.lost
    assert not newcomer.hears(msg.Refused)


def test_the_pause_of_a_newcomer_ends_with_its_admission(world: World) -> None:
    first, newcomer = world.register("first"), world.register("crowd")
    newcomer.say(msg.LinkReport(PeerId(1), True, ""))
    world.run(0.1)
    world.server._newcomers.spend(  # pyright: ignore[reportPrivateUsage]
        "crowd", 100 * NEWCOMERS_BYTES_PER_S, world.loop.now_ns()
    )
    newcomer.say(msg.Heartbeat())
    world.run(0.1)
    assert world.paused[2] > world.loop.now_ns()
    first.say(msg.RoundRequest(RoundId(RoundKind.UPDATE_TOPOLOGY, 0)))
    world.run(0.1)
    assert admitted(newcomer)
    assert world.paused[2] <= world.loop.now_ns(), "the machine knows that it is read again"
    newcomer.say(msg.Goodbye())
    world.run(0.1)
    assert [peer.id for peer in world.server.machine.membership.members()] == [1]


def test_a_late_return_costs_no_more_than_a_newcomer(world: World) -> None:
    """It reports without end, and never says that it has said all."""
    run = b"the run of these"
    early, late = Client(world, "early"), Client(world, "late")
    early.say(returning(run, 1), alone(1, early.key), msg.Reported())
    world.run(2.0)
    machine = world.server.machine
    assert (machine.run, machine.recovering) == (run, False)
    late.say(returning(run, 2))
    world.run(0.1)
    assert machine.trust_in(2) is Trust.LATE
    late.flood(alone(2, late.key))
    began = world.cost_bytes[2]
    world.run(2.0)
    most = 2 * NEWCOMERS_BYTES_PER_S + NEWCOMERS_BURST_BYTES + 2 * TURN_BYTES_MAX
    assert 0 < world.cost_bytes[2] - began < most
    assert world.paused[2] > world.loop.now_ns()
    assert not late.lost


class Disk:
    """A store that may be full."""

    def __init__(self) -> None:
        self.held: Remembered | None = None
        self.full = False
        self.attempts = 0

    def load(self) -> Remembered | None:
        return self.held

    def save(self, remembered: Remembered) -> None:
        self.attempts += 1
        if self.full:
            raise LocalProtocolError(func="master", reason="the disk is full")
        self.held = remembered

    def clear(self) -> None:
        self.held = None


def test_members_that_could_not_be_stored_are_stored_later() -> None:
    """Otherwise the next start would take them for strangers."""
    disk = Disk()
    world = World(disk)
    first = world.register("first")
    second = world.register("second")
    second.say(msg.LinkReport(PeerId(1), True, ""))
    world.run(0.1)
    assert members(disk) == [1]
    disk.full = True
    first.say(msg.RoundRequest(RoundId(RoundKind.UPDATE_TOPOLOGY, 0)))
    world.run(1.0)
    assert admitted(second)
    assert members(disk) == [1]
    assert 2 <= disk.attempts <= 10
    disk.full = False
    world.run(1.0)
    assert members(disk) == [1, 2]
    world.close()


def test_members_of_a_run_are_stored_with_that_run() -> None:
    """A run that was begun here gives way to one that was there before."""
    disk = Disk()
    world = World(disk)
    world.register("young")
    assert members(disk) == [1]
    older = Client(world, "older")
    older.say(returning(b"the run of these", 1), alone(1, older.key), msg.Reported())
    world.run(3.0)
    assert disk.held is not None
    assert disk.held.run == b"the run of these"
    assert disk.held.vouched.keys == {PeerId(1): older.key}
    world.close()


def members(disk: Disk) -> list[int]:
    assert disk.held is not None
    return sorted(int(peer) for peer in disk.held.vouched.keys or ())


# -- evidence ------------------------------------------------------------------------------------


def processes(world: World, inspect: Callable[[str], Awaitable[object]]) -> msg.EvidenceReport:
    """What the master answers when a person asks for the process of a peer."""
    world.register("peer")
    world.server.inspect_process = inspect
    person = Client(world, "person")
    person.say(msg.EvidenceRequest(PeerId(1), EvidenceKind.PROCESS))
    world.run(0.5)
    (report,) = person.heard
    assert isinstance(report, msg.EvidenceReport)
    assert not report.silent
    assert person.lost
    return report


def test_the_program_that_started_a_peer_says_what_it_knows(world: World) -> None:
    async def inspect(name: str) -> object:
        return {"pid": 7}

    report = processes(world, inspect)
    assert report.refusal == ""
    found = unpack_evidence(report.data)
    assert found["process"] == {"pid": 7}
    assert found["path"]["unacknowledged"] == 0


@pytest.mark.parametrize("found", [LookupError("no such process"), object()])
def test_an_error_in_an_inspection_is_an_answer(world: World, found: object) -> None:
    seen: list[object] = []
    world.loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))

    async def inspect(name: str) -> object:
        if isinstance(found, Exception):
            raise found
        return found

    report = processes(world, inspect)
    assert report.data == b""
    words = "LookupError: no such process" if seen == [found] else "TypeError: Object of type obj"
    assert report.refusal.startswith(f"gathering evidence failed: {words}")
    assert len(seen) == 1


# -- a relay -------------------------------------------------------------------------------------


@pytest.fixture
def relaying() -> Iterator[World]:
    made = World(relays=True)
    yield made
    made.close()


def test_a_master_forwards_only_if_it_was_told_to(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = world.register("first"), world.register("second")
    assert first.forwarded(1, 2) is second.forwarded(2, 1) is None
    assert caplog.text.count("this master forwards nothing: start it with --relay") == 2


def test_a_master_forwards_for_registered_peers_of_one_group(
    relaying: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = relaying.register("first"), relaying.register("second")
    relaying.register("elsewhere", group=1)
    assert relaying.server.relay is not None
    one, other = first.forwarded(1, 2), second.forwarded(2, 1)
    assert one is not None
    assert other is not None
    one.send(b"ping")
    other.send(b"answer")
    relaying.run(0.1)
    assert (bytes(one.received), bytes(other.received)) == (b"answer", b"ping")
    assert (relaying.server.relay.pairs, relaying.server.relay.carried_bytes) == (1, 10)
    refused = {
        (2, 1): "the master has not registered it",  # that is another process
        (0, 2): "the master has not registered it",
        (1, 3): "is not in its group",
        (1, 4): "is not in its group",
        (1, 1): "a relay connects two different peers",
    }
    for way, words in refused.items():
        caplog.clear()
        assert first.forwarded(*way) is None
        assert words in caplog.text
    assert one.is_open
    assert other.is_open


@pytest.mark.parametrize("how", ["goodbye", "silence"])
def test_a_master_forwards_no_more_for_a_peer_that_was_removed(relaying: World, how: str) -> None:
    clients = [relaying.register(host) for host in ("first", "second", "third")]
    ways = ((1, 2), (2, 1), (1, 3), (3, 1), (2, 3))
    found = [clients[source - 1].forwarded(source, target) for source, target in ways]
    dialled = [one for one in found if one is not None]
    assert [one.is_open for one in dialled] == [True] * len(ways)
    assert relaying.server.relay is not None
    assert relaying.server.relay.pairs == 2
    if how == "goodbye":
        clients[1].say(msg.Goodbye())
        relaying.run(0.1)
    else:
        clients[1].stream.abort()
        relaying.run(TIMING.resume_s + 1)
    assert [one.is_open for one in dialled] == [False, False, True, True, False]
    assert relaying.server.relay.pairs == 1
    assert clients[0].forwarded(1, 2) is None


# -- behind a proxy ------------------------------------------------------------------------------

PROXY, NEAR, FAR = "10.0.0.9", "192.0.2.7", "203.0.113.5"


@pytest.fixture
def proxied_world() -> Iterator[World]:
    made = World(proxy=PROXY)
    yield made
    made.close()


def test_a_peer_behind_a_proxy_is_seen_where_it_is(proxied_world: World) -> None:
    """Others dial it there, and its share of all newcomers is that of its own address."""
    first = proxied_world.register(PROXY, header=proxied(NEAR))
    assert admitted(first)
    peers = proxied_world.server.machine.membership.peers
    assert [(peer.seen, str(peer.member.host)) for peer in peers.values()] == [(NEAR, NEAR)]
    flooder = proxied_world.register(PROXY, header=proxied(FAR))
    flooder.flood(CHEAP)
    honest = proxied_world.register(PROXY, header=proxied("192.0.2.8"))
    for _ in range(50):
        honest.say(msg.Heartbeat())
        proxied_world.run(0.1)
    assert set(proxied_world.paused) == {2}
    assert [peer.seen for peer in peers.values()] == [NEAR, FAR, "192.0.2.8"]
    assert not honest.lost


def test_what_the_master_answers_names_the_source(proxied_world: World) -> None:
    client = Client(proxied_world, PROXY, proxied(NEAR))
    client.say(msg.AddressQuery(padding=b"pad"))
    proxied_world.run(10.0)
    (answer,) = client.heard
    assert isinstance(answer, msg.AddressIs)
    assert (answer.seen, answer.port, answer.relays) == (NEAR, 50000, False)
    assert answer.padding == b"pad"


def test_a_relay_behind_a_proxy_forwards(caplog: pytest.LogCaptureFixture) -> None:
    world = World(relays=True, proxy=PROXY)
    clients = [world.register(PROXY, header=proxied(host)) for host in (NEAR, FAR)]
    one, other = clients[0].forwarded(1, 2), clients[1].forwarded(2, 1)
    assert one is not None
    assert other is not None
    one.send(b"ping")
    world.run(0.1)
    assert bytes(other.received) == b"ping"
    world.close()
