"""Greetings on a network that cuts bytes anywhere: deadlines, bounds, the moment of hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import pytest

from pccl.protocol.checksum import seal
from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.handshake.certificates import NO_CERTIFICATE
from pccl.protocol.handshake.exchange import REFUSAL, HandshakeRefused
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.handshake.opening import ENCRYPTS, OPENING_BYTES, Channel, Opening
from pccl.protocol.types import KEY_BYTES, NS_PER_S, PeerId
from pccl.runtime.control.greeting import Credentials, Reception, anyone, introduce, opening_of
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection, PathMeasure, Receiver
from pccl.transports.sim.network import SimNetwork
from tests.support.clear import in_the_clear
from tests.support.secrets import as_sent

PORT = Address("elder", 4000)
PATIENCE_S = 5
TOKEN, OTHER_TOKEN = b"the token of the run", b"the token of another"


class Reader:
    """Takes a connection over, and keeps all that comes."""

    def __init__(self, connection: Connection, *, says: bytes = b"") -> None:
        self.connection = connection
        self.received = bytearray()
        self.lost: list[Exception | None] = []
        self._buffer = memoryview(bytearray(1000))
        self._unsent = says
        connection.start(self)
        self.writable()

    def get_buffer(self) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]

    def writable(self) -> None:
        while self._unsent:
            taken = self.connection.send([self._unsent])
            self._unsent = self._unsent[taken:]
            if self._unsent:
                self.connection.notify_writable()
                return

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)


class Me:
    """Peer 7 of a run."""

    run = bytes(range(16))
    term = 1
    peer = PeerId(7)
    certificate = NO_CERTIFICATE


class Elder(Me):
    """Peer 3 of the same run."""

    peer = PeerId(3)


class World:
    """A younger peer that dials an elder one, at whose port there is a reception.

    The connections are control connections, which prove the token, unless the test says otherwise.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        token: bytes | None = TOKEN,
        unproven_max: int = 8,
        channel: Channel = Channel.CONTROL,
        judge: Callable[[Opening], str] = anyone,
    ) -> None:
        self.loop = VirtualLoop(limit_ns=600 * NS_PER_S)
        self.network = SimNetwork(self.loop, Random(seed), latency_ns=1_000_000)
        self.young, self.elder = self.network.host("young"), self.network.host("elder")
        self.rng = Random(seed)
        self.channel = channel
        self.taken: list[tuple[Reader, Opening]] = []
        """What the elder's reception has let in."""
        self.says = b""
        """What the elder sends as soon as he has let somebody in."""
        credentials = Credentials(token, self.rng.randbytes, encrypts=in_the_clear)
        self.elder_key = credentials.signer.key
        self.reception = Reception(
            self.loop,
            PATIENCE_S * NS_PER_S,
            unproven_max,
            credentials,
            lambda: opening_of(channel, Elder()),
            lambda connection, remote, _: self.taken.append(
                (Reader(connection, says=self.says), remote)
            ),
            judge,
        )

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        async def listening() -> None:
            listener = await self.elder.listen(PORT, self.reception.accept)
            await main
            listener.close()

        self.loop.run_until_complete(listening())
        self.loop.close()

    async def sleep(self, seconds: float) -> None:
        woken = self.loop.create_future()
        self.loop.call_at_ns(self.loop.now_ns() + round(seconds * NS_PER_S), woken.set_result, None)
        await woken

    async def stranger(self, says: bytes = b"") -> Reader:
        return Reader(await self.young.dial(PORT, 1.0), says=says)

    async def introduce(
        self,
        token: bytes | None,
        take: Callable[[Connection], object] = Reader,
        *,
        expects: bytes = b"",
    ) -> None:
        credentials = Credentials(token, self.rng.randbytes, encrypts=in_the_clear)
        opening = opening_of(self.channel, Me(), Elder.peer)
        connection = await self.young.dial(PORT, 1.0)
        fingerprint = fingerprint_of(expects) if expects else b""
        handshake = credentials.dial(connection, opening, fingerprint)
        deadline_ns = self.loop.now_ns() + PATIENCE_S * NS_PER_S
        await introduce(connection, handshake, self.loop, deadline_ns, lambda c, _: _do(take, c))


@pytest.mark.parametrize("channel", [Channel.CONTROL, Channel.LANE])
@pytest.mark.parametrize("token", [None, TOKEN], ids=["no token", "token"])
@pytest.mark.parametrize("seed", range(10))
def test_what_comes_behind_the_greeting_goes_to_the_next(
    seed: int, token: bytes | None, channel: Channel
) -> None:
    world = World(seed, token=token, channel=channel)
    world.says = b"from the elder, at once"
    mine: list[Reader] = []

    async def main() -> None:
        await world.introduce(token, lambda c: mine.append(Reader(c, says=b"from me, at once")))
        await world.sleep(1)

    world.run(main())
    (younger,), ((elder, opening),) = mine, world.taken
    assert (opening.source, opening.target, opening.run) == (7, 3, Me.run)
    assert bytes(younger.received) == b"from the elder, at once"
    assert bytes(elder.received) == b"from me, at once"
    assert (younger.lost, elder.lost) == ([], [])


@pytest.mark.parametrize("seed", range(10))
def test_both_sides_say_why(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    world = World(seed)

    async def main() -> None:
        for token, words in (
            (OTHER_TOKEN, "does not accept this token"),
            (None, "requires a token"),
        ):
            with pytest.raises(HandshakeRefused, match=words):
                await world.introduce(token)
        await world.sleep(1)
        assert world.loop.now_ns() < 2 * NS_PER_S

    world.run(main())
    assert world.taken == []
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "young" in caplog.messages[0]
    assert "its token is not one of this run" in caplog.messages[0]
    assert "it has no token" in caplog.messages[1]


def test_a_byte_now_and_then_wins_no_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pccl.link")
    world = World()

    async def main() -> None:
        opening = Opening(Channel.CONTROL, security=1).encode()
        stranger = await world.stranger()
        for second in range(PATIENCE_S):
            assert not stranger.lost
            assert stranger.connection.send([opening[second : second + 1]]) == 1
            await world.sleep(1.0 if second else 0.9)
        await world.sleep(0.2)
        assert isinstance(stranger.lost[0], LinkError)

    world.run(main())
    assert "did not complete the pccl handshake in time" in caplog.text


@pytest.mark.parametrize(("said", "levels"), [(b"", ["DEBUG"]), (b"P", ["INFO"])])
def test_who_leaves_without_a_word_is_no_news(
    said: bytes, levels: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "pccl.link")
    world = World()

    async def main() -> None:
        stranger = await world.stranger()
        if said:
            assert stranger.connection.send([said]) == 1
            await world.sleep(1)
        stranger.connection.close()
        await world.sleep(1)

    world.run(main())
    assert [record.levelname for record in caplog.records] == levels


def test_the_dialler_waits_no_longer_either() -> None:
    """He has reached somebody who takes connections and never speaks."""
    world = World()

    async def main() -> None:
        silent: list[Reader] = []
        listener = await world.elder.listen(
            Address("elder", 5000), lambda c: silent.append(Reader(c))
        )
        began_ns = world.loop.now_ns()
        connection = await world.young.dial(listener.address, 1.0)
        credentials = Credentials(TOKEN, world.rng.randbytes, encrypts=in_the_clear)
        handshake = credentials.dial(connection, opening_of(Channel.CONTROL, Me()))
        deadline_ns = world.loop.now_ns() + PATIENCE_S * NS_PER_S
        with pytest.raises(LinkError, match="did not complete the pccl handshake in time"):
            await introduce(connection, handshake, world.loop, deadline_ns, _never)
        assert PATIENCE_S <= (world.loop.now_ns() - began_ns) / NS_PER_S < PATIENCE_S + 0.1
        assert len(silent[0].received) == OPENING_BYTES
        listener.close()

    world.run(main())


def _do(take: Callable[[Connection], object], connection: Connection) -> None:
    take(connection)


def _never(connection: Connection, remote: Opening) -> None:
    raise AssertionError("handed over")


def test_the_oldest_stranger_goes_first() -> None:
    world = World(unproven_max=3)

    async def main() -> None:
        strangers: list[Reader] = []
        for _ in range(5):
            strangers.append(await world.stranger(b"PCC"))
            await world.sleep(0.01)
        assert [bool(stranger.lost) for stranger in strangers] == [True, True, False, False, False]
        await world.introduce(TOKEN)  # costs the third its place, and frees it
        await world.sleep(0.01)
        assert [bool(stranger.lost) for stranger in strangers] == [True] * 3 + [False] * 2
        world.reception.close()
        await world.sleep(0.01)
        assert all(stranger.lost for stranger in strangers)

    world.run(main())
    assert len(world.taken) == 1


@pytest.mark.parametrize("from_same_address", [False, True])
@pytest.mark.parametrize("says", [b"", b"PCC"], ids=["idle", "begins"])
def test_a_flood_of_strangers_does_not_push_out_peers_far_away(
    says: bytes, from_same_address: bool
) -> None:
    """At 1,250 dials a second 256 places last 0.2 s; the peers need 0.24 s to prove themselves."""
    world = World(unproven_max=256)
    world.network.set_link("young", "elder", latency_ns=60_000_000, bytes_per_s=None)
    crowd = world.young if from_same_address else world.network.host("crowd")
    strangers: list[Reader] = []
    dialling: list[asyncio.Task[None]] = []

    async def come() -> None:
        strangers.append(Reader(await crowd.dial(PORT, 1.0), says=says))

    async def main() -> None:
        for number in range(2500):
            dialling.append(world.loop.create_task(come()))
            await world.sleep(1 / 1250)
            if number in (1000, 1200):
                dialling.append(world.loop.create_task(world.introduce(TOKEN)))
        for task in dialling:
            await task
        await world.sleep(0.1)
        assert len(world.taken) == 2
        assert sum(not stranger.lost for stranger in strangers) == 256

    world.run(main())


@pytest.mark.parametrize("token", [None, TOKEN], ids=["no token", "token"])
def test_nothing_behind_the_greeting_is_read_before_the_proof(token: bytes | None) -> None:
    """Whoever sends his next bytes without waiting for the answer is sent away, unread."""
    world = World(token=token)
    security = 0 if token is None else 1
    opening = Opening(Channel.CONTROL, Me.run, 1, Me.peer, Elder.peer, security=security)

    async def main() -> None:
        stranger = await world.stranger(as_sent(opening) + seal(b"\xff" * 96) + b"next")
        await world.sleep(1)
        assert stranger.lost
        assert world.taken == []
        assert stranger.received[OPENING_BYTES:] == REFUSAL

    world.run(main())


def test_who_may_not_connect_learns_no_more_than_the_opening(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And is judged by what its opening says, before the other side computes anything."""
    judged: list[PeerId] = []

    def judge(remote: Opening) -> str:
        judged.append(remote.source)
        return "nobody knows it"

    world = World(channel=Channel.LANE, judge=judge)

    async def main() -> None:
        with pytest.raises(LinkError):
            await world.introduce(TOKEN)
        stranger = await world.stranger(as_sent(Opening(Channel.LANE, Me.run, 1, PeerId(9))))
        await world.sleep(1)
        assert stranger.lost
        assert len(stranger.received) == OPENING_BYTES

    world.run(main())
    assert (judged, world.taken) == ([7, 9], [])
    assert "nobody knows it" in caplog.text


def test_a_peer_dials_whom_it_expects_and_nobody_else() -> None:
    world = World(channel=Channel.LANE)

    async def main() -> None:
        await world.introduce(TOKEN, expects=world.elder_key)
        with pytest.raises(HandshakeRefused, match="another process answered instead of peer 3"):
            await world.introduce(TOKEN, expects=bytes(KEY_BYTES))

    world.run(main())
    assert len(world.taken) == 1


def test_who_is_cancelled_takes_nothing_over() -> None:
    """At every point of the handshake, also when it ends in the very turn of the cancellation."""
    ends: dict[bool, int] = {True: 0, False: 0}
    for after_us in range(1000, 9000, 250):
        world = World()
        mine: list[Reader] = []

        async def main(
            world: World = world, mine: list[Reader] = mine, after_us: int = after_us
        ) -> None:
            task = world.loop.create_task(world.introduce(TOKEN, lambda c: mine.append(Reader(c))))
            await world.sleep(after_us / 1e6)
            done = task.done()
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                assert not done
                assert mine == []
            await world.sleep(1)
            ends[done] += 1
            if not done:
                assert all(reader.lost for reader, _ in world.taken)

        world.run(main())
    assert min(ends.values()) > 5


@pytest.mark.parametrize(
    ("one", "other", "is_encrypted"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.9.9.9", False),
        ("::1", "::1", False),
        ("127.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("::ffff:10.0.0.1", "::1", True),
        ("a name", "127.0.0.1", True),
    ],
)
def test_what_may_leave_the_machine_is_encrypted(one: str, other: str, is_encrypted: bool) -> None:
    """Nobody has to ask for it."""
    for ends in ((one, other), (other, one)):
        connection = StubConnection()
        connection.local, connection.remote = (Address(host, 1) for host in ends)
        handshake = Credentials(None, Random(1).randbytes).dial(
            connection, Opening(Channel.CONTROL)
        )
        opening = Opening.decode(handshake.take_output())
        assert bool(opening.flags & ENCRYPTS) is is_encrypted


class StubConnection:
    """Takes everything and keeps its receiver, for bytes that come at a chosen moment."""

    congestion = ""

    def __init__(self) -> None:
        self.remote = self.local = Address("nowhere", 1)
        self.sent = bytearray()
        self.ended = False
        self.receiver: Receiver | None = None

    def measure(self) -> PathMeasure | None:
        return None

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        before = len(self.sent)
        self.sent += b"".join(buffers)
        return len(self.sent) - before

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def notify_writable(self) -> None:
        raise AssertionError("there is always room")

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def deliver(self, data: bytes) -> None:
        while data:
            assert self.receiver is not None
            buffer = self.receiver.get_buffer()
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]
            self.receiver.buffer_updated(len(buffer))


@pytest.mark.parametrize("answer", ["good", "bad"])
def test_cancelled_in_the_turn_in_which_the_answer_comes(answer: str) -> None:
    world = World()
    connection = StubConnection()

    async def main() -> None:
        credentials = Credentials(None, world.rng.randbytes, encrypts=in_the_clear)
        handshake = credentials.dial(connection, opening_of(Channel.LANE, Me(), Elder.peer))
        task = world.loop.create_task(
            introduce(connection, handshake, world.loop, NS_PER_S, _never)
        )
        await world.sleep(0.1)
        run = Me.run if answer == "good" else bytes(16)
        opening = Opening(Channel.LANE, run, 1, Elder.peer, Me.peer)
        task.cancel()
        connection.deliver(opening.encode())  # before the task is awake
        with pytest.raises(asyncio.CancelledError):
            await task

    world.run(main())
    assert len(connection.sent) == OPENING_BYTES
    assert connection.ended


@pytest.mark.parametrize("error", [RemoteProtocolError(reason="no"), KeyError("a bug")])
def test_a_failure_of_who_takes_over_is_raised(error: Exception) -> None:
    world = World()
    reported: list[object] = []
    world.loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def fail(connection: Connection) -> None:
        raise error

    async def main() -> None:
        with pytest.raises(PCCLError):
            await world.introduce(TOKEN, fail)

    world.run(main())
    assert reported == ([error] if isinstance(error, KeyError) else [])
