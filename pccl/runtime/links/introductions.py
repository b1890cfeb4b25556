"""``Introductions``: asks a relay for the address that a simultaneous open needs.

Either that of another peer, which comes to the relay, too; or that from which the relay sees a new
connection of this one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.limits import Timing
from pccl.protocol.types import Member, PeerId
from pccl.runtime.clock import Clock
from pccl.runtime.control.greeting import Credentials, Identity, introduce, opening_of
from pccl.topology.segment_limit import CAREFUL_SEGMENT_BYTES
from pccl.transports.base import Address, Connection, Transport
from pccl.transports.relay import Introduction, RelayedConnection, behind


class Introductions:
    """Dials relays for one peer.

    Args:
        clock: gives the time.
        transport: the network.
        timing: deadlines.
        identity: identity of this peer.
        credentials: makes the handshakes of this peer.
        master: returns the address of the master, which may be a relay.
        may_dial: whether a peer that advertises a host may be dialled at an address of that host.
    """

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        timing: Timing,
        identity: Identity,
        credentials: Credentials,
        master: Callable[[], Address],
        may_dial: Callable[[str, str], bool],
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._identity = identity
        self._credentials = credentials
        self._master = master
        self._may_dial = may_dial

    async def through(self, relay: Member, peer: PeerId) -> tuple[RelayedConnection, Address]:
        """Return a connection to ``peer`` through a relay, and the address that it has there.

        Raises:
            LinkError, RemoteProtocolError: the relay cannot be used, or the peer has not come.
        """
        opening = opening_of(Channel.RELAY, self._identity, peer)
        connection, there = await self._ask(relay, opening)
        return RelayedConnection(connection, behind(peer, relay.peer)), there

    async def seen_by(self, relay: Member) -> tuple[Connection, Address]:
        """Return a new connection to a relay, and the address from which the relay sees it.

        The caller ends the connection. Until then, translators keep its port for this peer.

        Raises:
            LinkError, RemoteProtocolError: the relay cannot be used.
        """
        return await self._ask(relay, opening_of(Channel.RELAY, self._identity))

    async def _ask(self, relay: Member, opening: Opening) -> tuple[Connection, Address]:
        """Dial a relay; return the connection, then paused, and the address that it brings."""
        patience_s, at_relay = self._timing.dial_s, list[Connection]()
        introduced: asyncio.Future[Address] = asyncio.get_running_loop().create_future()

        def take(connection: Connection, remote: Opening) -> None:
            at_relay.append(connection)
            Introduction(connection, introduced)

        dial = partial(self._transport.dial, segment_bytes=CAREFUL_SEGMENT_BYTES)
        if relay.peer:
            may_dial = partial(self._may_dial, relay.host)
            address = Address(relay.host, relay.port)
            connection = await dial(address, patience_s, may_dial, relay.hosts)
        else:
            connection = await dial(self._master(), patience_s)
        key = relay.key if relay.peer else self._identity.certificate.authority
        expects = fingerprint_of(key) if key else b""
        handshake = self._credentials.dial(connection, opening, expects)
        deadline_ns = self._clock.now_ns() + self._timing.ns(patience_s)
        await introduce(connection, handshake, self._clock, deadline_ns, take)
        timer = self._clock.call_at_ns(deadline_ns, at_relay[0].abort)
        try:
            there = await introduced
        except asyncio.CancelledError:
            at_relay[0].abort()
            raise
        finally:
            timer.cancel()
        return at_relay[0], there
