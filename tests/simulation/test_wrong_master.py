"""A master that breaks the protocol costs a connection, not the peer."""

from __future__ import annotations

from random import Random

import pytest

from pccl.protocol import messages as msg
from pccl.protocol.codec import encode
from pccl.protocol.errors import MasterLost
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.runtime.control.greeting import anyone
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, PeerOptions
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.sim.network import SimNetwork
from tests.support.clear import in_the_clear
from tests.support.secrets import secrets_of

MASTER = Address("master", 48148)


class Impostor:
    """Says what no master says, and ignores the rest."""

    def __init__(self, connection: Connection) -> None:
        self._memory = memoryview(bytearray(4096))
        opening = Opening(Channel.CONTROL, b"another run here")
        self._handshake = Handshake.accept(lambda: opening, secrets_of(), anyone)
        self._connection = connection
        connection.start(self)

    def get_buffer(self) -> memoryview:
        return self._memory[: self._handshake.awaited_bytes or None]

    def buffer_updated(self, nbytes: int) -> None:
        if self._handshake.awaited_bytes:
            self._handshake.receive(self._memory[:nbytes])
            words = encode(msg.Goodbye()) if self._handshake.remote is not None else b""
            self._connection.send([self._handshake.take_output() + words])

    def writable(self) -> None:
        pass

    def connection_lost(self, error: Exception | None) -> None:
        pass


def test_a_message_that_no_master_sends() -> None:
    loop = VirtualLoop(limit_ns=60 * 10**9)
    network = SimNetwork(loop, Random(1), ragged=False)
    masters: list[Impostor] = []

    async def main() -> None:
        await network.host("master").listen(MASTER, lambda c: masters.append(Impostor(c)))
        options = PeerOptions(listen=Address("", 0), encrypts=in_the_clear)
        engine = PeerEngine(loop, loop, network.host("peer"), MASTER, 0, options)
        for _ in range(2):  # the peer is unharmed: it can try again
            with pytest.raises(MasterLost, match="after 2 attempts: Goodbye has 1 bytes; the"):
                await engine.connect(JoinRequest(2))
        await engine.close()

    loop.run_until_complete(main())
    loop.close()
    assert len(masters) == 4
