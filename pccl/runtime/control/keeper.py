"""Keeps a peer's connection to the master: dials, and passes on received messages.

The machine decides when to dial and when to give up; ``MasterTurns`` chooses the master to dial.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pccl.machines.peer.contact import MasterTurns
from pccl.machines.peer.events import ControlClosed, ControlMessage, ControlOpened, PeerEvent
from pccl.machines.reachability import TryAddress, may_be_dialled
from pccl.protocol.errors import LinkError, RemoteProtocolError
from pccl.protocol.guards.allowance import masters_bytes_max
from pccl.protocol.handshake.exchange import Handshake
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.handshake.opening import Channel, Opening
from pccl.protocol.messages import (
    Damaged,
    MasterAddress,
    Message,
    Refused,
    Registered,
    Resumed,
    Subscribed,
)
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.control.greeting import Credentials, Identity, introduce, opening_of
from pccl.runtime.control.probe import probe
from pccl.runtime.control.stream import ControlStream
from pccl.topology.segment_limit import CAREFUL_SEGMENT_BYTES
from pccl.transports.base import Address, Connection, Traffic, Transport

_log = logging.getLogger("pccl.peer")


class ControlKeeper:
    """The control connection of a peer, or an attempt to make one; there is at most one.

    Args:
        masters: addresses of masters, the first choice first.
        dial_s: time limit of connecting, and of the handshake after it.
        credentials: makes the handshakes of this peer.
        identify: returns the current identity of this peer.
        feed: takes ControlOpened, ControlMessage, ControlClosed and AddressTried.
        create_task: runs dials and probes as tasks.
        hosts: returns the addresses of this machine at which others may dial this peer.
    """

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        masters: Sequence[Address],
        dial_s: float,
        credentials: Credentials,
        identify: Callable[[], Identity],
        feed: Callable[[PeerEvent], None],
        create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        hosts: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._hosts = hosts
        self._turns = MasterTurns([MasterAddress(one.host, one.port) for one in masters])
        self._dial_s = dial_s
        self._credentials = credentials
        self._identify = identify
        self._feed = feed
        self._create_task = create_task
        self._timer: Timer | None = None
        self._dial_task: asyncio.Task[None] | None = None
        self._stream: ControlStream | None = None
        self.traffic = Traffic()
        """Bytes of all connections to masters, without the handshakes."""
        self.met_at = ""
        """Host of the last master that this peer connected to; empty: none yet."""
        self.met_from = ""
        """Host of this end of that connection."""

    @property
    def address(self) -> Address:
        """Address of the connected master, or of the next one to dial."""
        master = self._turns.turn
        return Address(master.host, master.port)

    @property
    def masters_count(self) -> int:
        """Number of known masters."""
        return len(self._turns.masters)

    def dial(self, delay_ns: int) -> None:
        """Try once to connect, after ``delay_ns``."""
        self._timer = self._clock.call_at_ns(self._clock.now_ns() + delay_ns, self._dial)

    def may_dial(self, own_host: str, host: str, found: str) -> bool:
        """Whether this peer may dial another peer of the run at ``found``.

        Args:
            own_host: host that this peer advertises.
            host: host that the other peer advertises.
            found: an address of ``host``; the name of this machine may resolve to loopback.
        """
        is_own = bool(own_host) and host == own_host
        return is_own or may_be_dialled(found, seen=found, by=self.met_at)

    def probe(self, test: TryAddress) -> None:
        """Dial a newcomer because the master asks for it, and feed the result."""
        self._create_task(self._probe(test))

    async def _probe(self, test: TryAddress) -> None:
        def greet(connection: Connection) -> Handshake:
            opening = opening_of(Channel.PROBE, self._identify(), test.member.peer)
            return self._credentials.dial(connection, opening, fingerprint_of(test.member.key))

        patience_ns = round(self._dial_s * NS_PER_S)
        self._feed(
            await probe(
                self._transport, self._clock, test, greet, patience_ns=patience_ns, by=self.met_at
            )
        )

    def send(self, message: Message) -> None:
        """Send a message to the master; drop it if there is no connection."""
        if self._stream is not None:
            self._stream.send(message)

    def close(self, reason: str) -> None:
        """Close the connection after sending queued messages, or stop dialling. Feed no event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dial_task is not None:
            self._dial_task.cancel()
            self._dial_task = None
        if self._stream is not None:
            _log.debug("this peer closes its control connection to the master: %s", reason)
            self._stream.close()
            self._stream = None

    def _dial(self) -> None:
        self._timer = None
        self._dial_task = self._create_task(self._connect())

    async def _connect(self) -> None:
        own, credentials, deadline_ns = self._identify(), self._credentials, 0
        try:
            connection = await self._transport.dial(
                self.address, self._dial_s, segment_bytes=CAREFUL_SEGMENT_BYTES
            )
            handshake = credentials.dial(connection, opening_of(Channel.CONTROL, own))
            deadline_ns = self._clock.now_ns() + round(self._dial_s * NS_PER_S)
            await introduce(connection, handshake, self._clock, deadline_ns, self._take)
        except (LinkError, RemoteProtocolError) as error:
            cut_off = isinstance(error, LinkError) and self._clock.now_ns() < deadline_ns
            is_final = self._turns.failed(error, registered=bool(own.peer), cut_off=cut_off)
            if is_final:
                self._feed(ControlMessage(Refused(None, error.reason)))
            else:
                self._feed(ControlClosed(error.reason))

    def _take(self, connection: Connection, remote: Opening) -> None:
        stream: ControlStream | None = None
        master = self._turns.turn

        def on_message(message: Message) -> None:
            if self._stream is not stream:
                return
            if isinstance(message, Registered | Resumed):
                self._turns.follow(master, message.standbys)
            if isinstance(message, Subscribed):
                self._turns.follow(master, ())
            if isinstance(message, Refused):
                registered = bool(self._identify().peer)
                if self._turns.refused(message, registered=registered):
                    self.close(message.reason)
                    self._feed(ControlClosed(message.reason))
                    return
            self._feed(ControlMessage(message))

        def on_closed(reason: str) -> None:
            if self._stream is stream:
                self._stream = None
                self._turns.lost()
                self._feed(ControlClosed(reason))

        self.met_at, self.met_from = connection.remote.host, connection.local.host
        self._stream = stream = ControlStream(
            connection,
            on_message,
            on_closed,
            self._clock,
            masters_bytes_max,
            farewell=Damaged(),
            traffic=self.traffic,
        )
        self._feed(ControlOpened(remote.run, remote.term, self._hosts()))
