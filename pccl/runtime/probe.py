"""A greeting that finds out whether a peer can be dialled, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.errors import LinkError, RemoteProtocolError
from pccl.protocol.handshake import Handshake, Opening
from pccl.runtime.clock import Clock
from pccl.runtime.greeting import introduce
from pccl.transports.base import Address, Connection, Transport


async def probe(
    transport: Transport,
    clock: Clock,
    address: Address,
    handshake: Callable[[], Handshake],
    patience_ns: int,
    may_dial: Callable[[str], bool],
) -> str:
    """Dial a peer, greet it and leave; return why that failed, empty if it did not.

    Args:
        transport: the network.
        clock: time.
        address: where the peer says that it listens.
        handshake: begins the greeting.
        patience_ns: how long the dial and the greeting may take, each.
        may_dial: whether an address, which a name may stand for, may be dialled.
    """

    def leave(connection: Connection, remote: Opening) -> None:
        connection.close()

    try:
        connection = await transport.dial(address, patience_ns / 1e9, may_dial)
        deadline_ns = clock.now_ns() + patience_ns
        await introduce(connection, handshake(), clock, deadline_ns, leave)
    except (LinkError, RemoteProtocolError) as error:
        return error.reason
    return ""
