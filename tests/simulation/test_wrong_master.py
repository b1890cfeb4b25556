"""A master that breaks the protocol costs a connection, not the peer."""

from __future__ import annotations

from random import Random

import pytest

from pccl.protocol import messages as msg
from pccl.protocol.codec import encode
from pccl.protocol.errors import MasterLost
from pccl.protocol.handshake import Channel, Opening
from pccl.runtime.engine import PeerEngine
from pccl.runtime.requests import JoinRequest, PeerOptions
from pccl.stress.sim.loop import VirtualLoop
from pccl.transports.base import Address, Connection
from pccl.transports.sim.network import SimNetwork

MASTER = Address("master", 48148)


class Impostor:
    """Says what no master says, and ignores the rest."""

    def __init__(self, connection: Connection) -> None:
        self._memory = memoryview(bytearray(4096))
        connection.start(self)
        opening = Opening(Channel.CONTROL, bytes(32), b"another run here").encode()
        assert connection.send([opening + encode(msg.Goodbye())])

    def get_buffer(self) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        pass

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
        options = PeerOptions(listen=Address("", 0))
        engine = PeerEngine(loop, loop, network.host("peer"), MASTER, 0, options)
        for _ in range(2):  # the peer is unharmed: it can try again
            with pytest.raises(MasterLost, match="after 2 attempts: Goodbye has 1 bytes; the"):
                await engine.connect(JoinRequest(2))
        await engine.close()

    loop.run_until_complete(main())
    loop.close()
    assert len(masters) == 4
