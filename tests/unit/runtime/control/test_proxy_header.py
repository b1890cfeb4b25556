"""Connections of proxies: the header, the handshake behind it, and from where they come then."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from ipaddress import ip_network
from random import Random
from typing import Any

import pytest

from pccl.protocol.errors import LinkError
from pccl.protocol.handshake.certificates import NO_CERTIFICATE
from pccl.protocol.handshake.opening import ENCRYPTS, OPENING_BYTES, Channel, Opening
from pccl.protocol.types import NS_PER_S, PeerId
from pccl.runtime.control.greeting import (
    Credentials,
    Reception,
    introduce,
    leaves_machine,
    opening_of,
)
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.sim.network import SimNetwork
from tests.support import proxy_headers as say
from tests.support.clear import in_the_clear
from tests.support.proxy_headers import fields_of, header, proxied
from tests.support.secrets import as_sent
from tests.unit.runtime.control.test_greeting import Reader, StubConnection

MASTER = "10.0.0.1"
PROXY, STRANGER = "10.0.0.9", "10.0.1.9"
PROXIES = "10.0.0.8/30"
PEER = "192.0.2.7"
PATIENCE_S = 5


class Newcomer:
    """A process that has no id yet."""

    run = b""
    term = 0
    peer = PeerId(0)
    certificate = NO_CERTIFICATE


class Port:
    """The port of a master behind proxies, on a network that cuts bytes anywhere."""

    def __init__(
        self,
        seed: int = 0,
        *,
        proxies: str = PROXIES,
        unproven_max: int = 8,
        encrypts: Callable[[Connection], bool] = in_the_clear,
    ) -> None:
        self.loop = VirtualLoop(limit_ns=600 * NS_PER_S)
        self.network = SimNetwork(self.loop, Random(seed), latency_ns=1_000_000)
        self.address = Address(MASTER, 4000)
        self.rng = Random(seed)
        self.taken: list[Reader] = []
        self.reception = Reception(
            self.loop,
            PATIENCE_S * NS_PER_S,
            unproven_max,
            Credentials(None, self.rng.randbytes, encrypts=encrypts),
            lambda: Opening(Channel.CONTROL, bytes(range(16)), 1),
            lambda connection, remote, _: self.taken.append(Reader(connection, says=b"welcome")),
            proxies=[ip_network(proxies)],
        )

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        async def listening() -> None:
            host = self.network.host(self.address.host)
            listener = await host.listen(self.address, self.reception.accept)
            await main
            listener.close()

        self.loop.run_until_complete(listening())
        self.loop.close()

    async def sleep(self, seconds: float) -> None:
        woken = self.loop.create_future()
        self.loop.call_at_ns(self.loop.now_ns() + round(seconds * NS_PER_S), woken.set_result, None)
        await woken

    async def dial(self, host: str) -> Connection:
        known = self.network.hosts.get(host) or self.network.host(host)
        return await known.dial(self.address, 1.0)

    async def send(self, says: bytes, host: str = PROXY) -> Reader:
        """Connect from ``host``, and send this."""
        return Reader(await self.dial(host), says=says)

    async def join(self, says: bytes, host: str = PROXY) -> Reader:
        """Connect from ``host``; send this, and then a handshake, and at once more."""
        connection = (await self.send(says, host)).connection
        await self.sleep(0.1)
        mine: list[Reader] = []

        def take(connection: Connection, remote: object) -> None:
            mine.append(Reader(connection, says=b"and thanks"))

        credentials = Credentials(None, self.rng.randbytes, encrypts=in_the_clear)
        handshake = credentials.dial(connection, opening_of(Channel.CONTROL, Newcomer()))
        deadline_ns = self.loop.now_ns() + PATIENCE_S * NS_PER_S
        await introduce(connection, handshake, self.loop, deadline_ns, take)
        await self.sleep(1)
        return mine[0]

    @property
    def remotes(self) -> list[str]:
        """Where the connections come from that have proven themselves."""
        return [str(reader.connection.remote) for reader in self.taken]


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.message) for record in caplog.records]


# -- a header, and what follows ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_what_comes_behind_the_header_is_a_handshake(seed: int) -> None:
    port = Port(seed)

    async def main() -> None:
        sent = {
            proxied(PEER, 50_000): f"{PEER}:50000",
            proxied("2001:db8::7", 50_001, bytes(900)): "[2001:db8::7]:50001",
            proxied(f"::ffff:{PEER}", 50_002): f"{PEER}:50002",
        }
        for says, remote in sent.items():
            me = await port.join(says)
            assert bytes(me.received) == b"welcome"
            assert port.remotes[-1] == remote
            assert bytes(port.taken[-1].received) == b"and thanks"
            assert port.taken[-1].connection.local == port.address

    port.run(main())
    assert len(port.taken) == 3


@pytest.mark.parametrize(
    "says",
    [
        header(b"", 0x00, say.LOCAL),
        header(fields_of(PEER, 1), say.TCP4, say.LOCAL),
        header(b"", say.UNSPECIFIED),
        header(fields_of(PEER, 1), say.UDP4),
        header(bytes(216), say.UNIX),
        proxied("127.0.0.1"),
    ],
    ids=["local", "local with fields", "unspecified", "UDP", "Unix", "loopback of the proxy"],
)
def test_without_a_source_it_comes_from_the_proxy(says: bytes) -> None:
    port = Port()

    async def main() -> None:
        await port.join(says)

    port.run(main())
    assert [remote.rpartition(":")[0] for remote in port.remotes] == [PROXY]


def test_others_send_no_header() -> None:
    port = Port()

    async def main() -> None:
        await port.join(b"", STRANGER)

    port.run(main())
    assert [remote.rpartition(":")[0] for remote in port.remotes] == [STRANGER]


@pytest.mark.parametrize(
    ("proxy", "master", "told", "is_encrypted"),
    [
        ("127.0.0.2", "127.0.0.1", PEER, True),
        ("::1", "::1", "2001:db8::7", True),
        ("127.0.0.2", "127.0.0.1", "127.0.0.1", False),
        ("127.0.0.2", "127.0.0.1", "::1", False),
        (PROXY, MASTER, PEER, True),
        (PROXY, MASTER, "127.0.0.1", True),
    ],
)
def test_what_leaves_a_machine_is_encrypted_behind_a_proxy_too(
    proxy: str, master: str, told: str, *, is_encrypted: bool
) -> None:
    """A proxy on the master's machine connects over loopback, but the bytes come from elsewhere."""
    connection = StubConnection()
    connection.remote, connection.local = Address(proxy, 1), Address(master, 4000)
    port = Port(proxies=proxy, encrypts=leaves_machine)
    port.reception.accept(connection)
    connection.deliver(proxied(told) + as_sent(Opening(Channel.CONTROL)))
    answer = Opening.decode(bytes(connection.sent[:OPENING_BYTES]))
    assert bool(answer.flags & ENCRYPTS) is is_encrypted
    port.reception.close()
    port.loop.close()


# -- what is refused -----------------------------------------------------------------------------

ASKS_FOR_A_NAME = "A master accepts one, from a proxy that it was told: pccl master --proxy-from"


@pytest.mark.parametrize(
    ("says", "host", "comes_from", "why"),
    [
        (proxied(PEER), STRANGER, STRANGER, ASKS_FOR_A_NAME),
        (b"PROXY TCP4 192.0.2.7 198.51.100.1 1 2\r\n", STRANGER, STRANGER, ASKS_FOR_A_NAME),
        (2 * proxied(PEER), PROXY, PEER, ASKS_FOR_A_NAME),
        (as_sent(Opening(Channel.CONTROL)), PROXY, PROXY, "it sent no PROXY header"),
        (b"PROXY TCP4 192.0.2.7 198.51.100.1 1 2\r\n", PROXY, PROXY, "version 1 of the PROXY"),
        (header(length=65535), PROXY, PROXY, "announces 65535 bytes of fields"),
        (proxied("224.0.0.1"), PROXY, PROXY, "names the source 224.0.0.1"),
        (proxied(PEER) + b"GET / HTTP/1.1", PROXY, PEER, "does not speak this protocol"),
    ],
    ids=["forged", "forged, in text", "twice", "none", "in text", "long", "multicast", "browser"],
)
def test_anything_else_is_refused_at_once(
    says: bytes, host: str, comes_from: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = Port()

    async def main() -> None:
        reader = await port.send(says, host)
        await port.sleep(1)
        assert len(reader.lost) == 1
        assert reader.received == b""

    port.run(main())
    ((level, text),) = logged(caplog)
    assert level == "WARNING"
    assert text.startswith(f"closed a connection from {comes_from}:")
    assert why in text
    assert port.taken == []


@pytest.mark.parametrize("begun", [b"", proxied(PEER)[:1], proxied(PEER)[:-1], proxied(PEER)])
def test_header_and_handshake_have_one_deadline(
    begun: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if a byte comes now and then."""
    caplog.set_level("INFO", "pccl.link")
    port = Port()

    async def main() -> None:
        reader = await port.send(begun)
        rest = (proxied(PEER) + as_sent(Opening(Channel.CONTROL)))[len(begun) :]
        for second in range(PATIENCE_S - 1):
            await port.sleep(1.0)
            assert not reader.lost
            assert reader.connection.send([rest[second : second + 1]]) == 1
        await port.sleep(1.1)
        assert isinstance(reader.lost[0], LinkError)

    port.run(main())
    ((level, text),) = logged(caplog)
    assert level == "INFO"
    assert "did not complete the" in text


@pytest.mark.parametrize("says", [b"", header(command=say.LOCAL, kind=0), proxied(PEER)])
def test_a_health_check_is_no_news(says: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pccl.link")
    port = Port()

    async def main() -> None:
        reader = await port.send(says)
        await port.sleep(1)
        reader.connection.close()
        await port.sleep(1)

    port.run(main())
    assert [level for level, _ in logged(caplog)] == ["DEBUG"]


# -- bounds --------------------------------------------------------------------------------------


async def sent_in_turn(port: Port, all_say: Sequence[bytes]) -> list[Reader]:
    readers: list[Reader] = []
    for says in all_say:
        readers.append(await port.send(says))
        await port.sleep(0.01)
    return readers


def test_the_number_of_pending_headers_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "pccl.link")
    port = Port(unproven_max=3)

    async def main() -> None:
        readers = await sent_in_turn(port, [proxied(PEER)[:20]] * 5)
        assert [bool(reader.lost) for reader in readers] == [True, True, False, False, False]
        await port.join(proxied(PEER))
        port.reception.close()
        await port.sleep(0.1)
        assert all(reader.lost for reader in readers)

    port.run(main())
    assert port.remotes == [f"{PEER}:50000"]
    assert {text.partition(": ")[2] for _, text in logged(caplog)} == {
        "too many newer ones came during its PROXY header"
    }


def test_a_flood_through_the_proxy_does_not_push_out_peers_far_away() -> None:
    """All come from the proxy, and still each source has its own share."""
    port = Port(unproven_max=3)
    opening = as_sent(Opening(Channel.CONTROL))

    async def main() -> None:
        (peer,) = await sent_in_turn(port, [proxied(PEER) + opening])
        flood = await sent_in_turn(port, [proxied("203.0.113.5") + opening] * 6)
        assert [bool(reader.lost) for reader in (peer, *flood)] == [False] + [True] * 4 + [
            False
        ] * 2
        assert [len(reader.received) >= OPENING_BYTES for reader in (peer, *flood)] == [True] * 7

    port.run(main())
