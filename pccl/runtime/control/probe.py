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

CALLER_SHARE = 2 / 3
"""Part of ``dial_s`` that a test for a process outside the run has, so that the answer comes before
the master closes the connection as silent."""

_DIAL_SHARE = 3
"""A dial has this part of a test's time, so that newcomers behind a silent firewall wait less."""


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
        patience_ns: time limit of a dial and a handshake together, for each host.
        by: host between this process and the master.
    """

    def may_dial(found: str) -> bool:
        return may_be_dialled(found, seen=test.seen, by=by)

    def leave(connection: Connection, remote: Opening) -> None:
        connection.close()

    peer, key, why = test.member.peer, test.member.key, ""
    for host in test.hosts:
        try:
            address = Address(host, test.member.port)
            dial_ns = patience_ns // _DIAL_SHARE
            connection = await transport.dial(address, dial_ns / 1e9, may_dial)
            deadline_ns = clock.now_ns() + patience_ns - dial_ns
            await introduce(connection, greet(connection), clock, deadline_ns, leave)
        except (LinkError, RemoteProtocolError) as error:
            why = why or error.reason
        else:
            return AddressTried(peer, host, why, key)
    why = why or "its address is for its own machine or network only"
    return AddressTried(peer, "", why, key)
