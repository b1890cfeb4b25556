"""Tests whether a peer can be dialled: connects, does the handshake, and disconnects."""

from __future__ import annotations

from collections.abc import Callable

from pccl.machines.reachability import AddressTried, TryAddress, may_be_dialled
from pccl.protocol.errors import LinkError, RemoteProtocolError
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.opening import Opening
from pccl.runtime.clock import Clock
from pccl.runtime.control.greeting import introduce
from pccl.transports.base import Address, Connection, Transport

TEST_STEPS = 3
"""A dial and a handshake of a test have ``dial_s / TEST_STEPS`` each. So a process outside the run
has its answer before the master closes its connection as silent, and newcomers wait less."""


async def probe(
    transport: Transport,
    clock: Clock,
    test: TryAddress,
    greet: Callable[[Connection], Handshake],
    patience_ns: int,
    by: str,
) -> AddressTried:
    """Dial a peer, do the handshake, disconnect; return the host that answered, or the error.

    Args:
        transport: the network.
        clock: gives the time.
        test: the peer, and the hosts to try in order.
        greet: makes the handshake on a connection.
        patience_ns: time limit of each dial, and of each handshake.
        by: host between this process and the master.
    """

    def may_dial(found: str) -> bool:
        return may_be_dialled(found, seen=test.seen, by=by)

    def leave(connection: Connection, remote: Opening) -> None:
        connection.close()

    peer, why = test.member.peer, ""
    for host in test.hosts:
        try:
            address = Address(host, test.member.port)
            connection = await transport.dial(address, patience_ns / 1e9, may_dial)
            deadline_ns = clock.now_ns() + patience_ns
            await introduce(connection, greet(connection), clock, deadline_ns, leave)
        except (LinkError, RemoteProtocolError) as error:
            why = why or error.reason
        else:
            return AddressTried(peer, host, why)
    return AddressTried(peer, "", why or "its address is for its own machine or network only")
