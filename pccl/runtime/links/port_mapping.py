"""``PortMapping``: keeps a port of the router forwarded to this process.

``PortMapper`` decides; this class sends datagrams, sets timers, and looks up the route to
the router before each exchange. A socket is open only while this class waits for an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from pccl.machines.port_mapper import (
    AskUpnp,
    FindRouter,
    MapperEffect,
    MapperEvent,
    MapperTick,
    MappingClosed,
    NotMapped,
    PortMapped,
    PortMapper,
    PortUnmapped,
    RouterAnswered,
    RouterFound,
    RouterMissing,
    RouterRefused,
    SendDatagram,
    StartMapping,
    StopMapping,
    UpnpAnswered,
)
from pccl.machines.router_path import ForwardedPort, RouterPath
from pccl.protocol.port_mapping.answers import ROUTER_PORT
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.links.upnp import UpnpRouter
from pccl.runtime.lookups import LookUps
from pccl.runtime.tasks import Tasks
from pccl.telemetry.events import PortForwarded, PortNotForwarded
from pccl.transports.base import Address
from pccl.transports.datagrams import DatagramSocket, hosts_toward, router_host
from pccl.transports.tcp_socket import reason_of

_log = logging.getLogger("pccl.peer")

FIRST_WAIT_NS = NS_PER_S
"""How long a join waits for the router. Most answer within milliseconds, and some never."""

PATIENT_WAIT_NS = 6 * NS_PER_S
"""How long an examination waits: until all protocols have failed."""

FIND_S = 5.0
"""Longest look-up of the master's name."""

INTERNET = Address("192.0.2.1", 9)
"""An address for documentation: where no master is given, the default route leads there."""


@dataclass(frozen=True, slots=True)
class RouterAccess:
    """How a ``PortMapping`` reaches the network.

    Attributes:
        find: returns the way to a master and to the router; None: to the internet.
        open: opens a socket to the router.
        ask_upnp: asks in UPnP; never raises.
    """

    find: Callable[[Address | None], Awaitable[RouterPath]]
    open: Callable[[Address, Callable[[bytes], None], Callable[[], None]], DatagramSocket]
    ask_upnp: Callable[[AskUpnp], Awaitable[UpnpAnswered]]


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What the router of a machine has answered.

    Attributes:
        forwarded: the port that it forwards; None: none.
        reason: why it forwards none; empty: it has not answered in time.
        was_asked: whether it was asked.
    """

    forwarded: ForwardedPort | None = None
    reason: str = ""
    was_asked: bool = False


def router_access(loop: asyncio.AbstractEventLoop, interface: str = "") -> RouterAccess:
    """Return the access to the router of this machine.

    ``interface``: the interface that leads there; empty: the system chooses.
    """
    return RouterAccess(
        partial(find_router, loop, interface=interface),
        partial(DatagramSocket, loop, interface=interface),
        UpnpRouter(loop, LookUps()).ask,
    )


async def find_router(
    loop: asyncio.AbstractEventLoop, master: Address | None, interface: str = ""
) -> RouterPath:
    """Find out how this machine reaches a master and its router. Sends no packet to them.

    Raises:
        OSError: the master's name has no address, or there is no route.
    """
    remote, own = await hosts_toward(loop, LookUps(), master or INTERNET, interface)
    router, no_router = router_host(interface)
    inside = ""
    if router:
        there = Address(router, ROUTER_PORT)
        inside = (await hosts_toward(loop, None, there, interface))[1]
    return RouterPath(own, remote if master is not None else "", router, inside, no_router)


class PortMapping:
    """The forwarding of one port by the router, or the attempts to get it.

    Attributes:
        on_changed: called when the router begins or ends to forward a port, or refuses it.
        report: what the last call of ``start`` has found.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        access: RouterAccess,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self.on_changed: Callable[[PortForwarded | PortNotForwarded], None] = lambda _: None
        self.report = RouterReport()
        self._loop = loop
        self._clock = clock
        self._access = access
        self._mapper = PortMapper(random_bytes)
        self._master: Address | None = None
        self._tasks = Tasks(loop)
        self._socket: DatagramSocket | None = None
        self._timer: Timer | None = None
        self._settled: list[asyncio.Future[None]] = []
        """Futures of calls that wait for the first answer."""
        self._closed: asyncio.Future[None] = loop.create_future()

    async def start(
        self, port: int, master: Address | None, wait_ns: int = FIRST_WAIT_NS
    ) -> ForwardedPort | None:
        """Ask the router to forward a port; a later call returns what has become of it.

        Args:
            port: own TCP port.
            master: the master whose run this process joins; None: no run.
            wait_ns: how long to wait for the router. Without an answer, it is asked further.

        Returns:
            The port that the router forwards; None: none, or it has not answered yet.
        """
        self._master = master
        self._feed(StartMapping(port))
        if not self._mapper.is_settled:
            future = self._loop.create_future()
            self._settled.append(future)
            due_ns = self._clock.now_ns() + wait_ns
            timer = self._clock.call_at_ns(due_ns, _release, future)
            try:
                await future
            finally:
                timer.cancel()
                self._settled.remove(future)
        mapper = self._mapper
        self.report = RouterReport(mapper.forwarded, mapper.reason, mapper.was_asked)
        return mapper.forwarded

    async def close(self) -> None:
        """Delete the mapping, as far as the router answers within a second; idempotent."""
        self._feed(StopMapping())
        await asyncio.shield(self._closed)
        await self._tasks.cancel()

    def _feed(self, event: MapperEvent) -> None:
        for effect in self._mapper.handle(event, self._clock.now_ns()):
            self._carry_out(effect)
        if not self._mapper.awaits_datagrams and self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._mapper.is_settled:
            for future in self._settled:
                _release(future)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due_ns := self._mapper.due_ns) is not None:
            self._timer = self._clock.call_at_ns(due_ns, self._feed, MapperTick())

    def _carry_out(self, effect: MapperEffect) -> None:
        match effect:
            case FindRouter():
                self._tasks.create(self._find())
            case SendDatagram():
                self._send(effect)
            case AskUpnp():
                self._tasks.create(self._ask_upnp(effect))
            case PortMapped(forwarded):
                self.on_changed(
                    PortForwarded(
                        port=forwarded.port,
                        host=forwarded.host,
                        by=str(forwarded.by),
                        public=bool(forwarded.public_host),
                    )
                )
            case PortUnmapped(forwarded, reason):
                self.on_changed(PortNotForwarded(port=forwarded.port, reason=reason))
            case NotMapped(reason, was_asked=True):
                self.on_changed(PortNotForwarded(port=0, reason=reason))
            case NotMapped(reason):
                _log.debug("asks no router for a port: %s", reason)
            case MappingClosed():
                _release(self._closed)

    async def _find(self) -> None:
        try:
            async with asyncio.timeout(FIND_S):
                path = await self._access.find(self._master)
        except OSError as error:  # TimeoutError is one
            self._feed(RouterMissing(f"no way to the master: {reason_of(error)}"))
        else:
            self._feed(RouterFound(path))

    def _send(self, datagram: SendDatagram) -> None:
        if self._socket is None:
            router = Address(datagram.host, datagram.port)
            take = partial(self._take, router)
            try:
                self._socket = self._access.open(router, take, self._refused)
            except OSError:
                return  # as if it was lost: the way has just vanished
        self._socket.send(datagram.data)

    def _take(self, router: Address, data: bytes) -> None:
        self._feed(RouterAnswered(router.host, router.port, data))

    def _refused(self) -> None:
        self._feed(RouterRefused())

    async def _ask_upnp(self, asked: AskUpnp) -> None:
        self._feed(await self._access.ask_upnp(asked))


def _release(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
