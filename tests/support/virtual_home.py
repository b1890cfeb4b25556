"""A home network in virtual time: a router, and the mapping of one port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from pccl.machines.port_mapper import AskUpnp, UpnpAnswered
from pccl.machines.router_path import RouterPath
from pccl.runtime.links.port_mapping import PortMapping, RouterAccess
from pccl.stress.sim.loop import VirtualLoop
from pccl.telemetry.events import PortForwarded, PortNotForwarded
from pccl.transports.base import Address
from pccl.transports.datagrams import DatagramSocket
from tests.support.home_router import HomeRouter

MS, S = 1_000_000, 1_000_000_000
LATENCY_NS = 3 * MS
HOME = RouterPath("192.168.1.7", "8.8.8.8", "192.168.1.1", "192.168.1.7")
"""A private address, with a master elsewhere."""


class VirtualSocket:
    """A datagram socket in virtual time; a silent router answers nothing."""

    def __init__(self, world: VirtualHome, take: Callable[[bytes], None]) -> None:
        self._world, self._take = world, take
        self._open = True
        world.open += 1

    def send(self, data: bytes) -> None:
        assert self._open
        world = self._world
        if world.router is None:
            return
        world.router.epoch_s = 1000 + world.loop.now_ns() // S
        for answer in world.router.answers(data):
            world.loop.call_at_ns(world.loop.now_ns() + LATENCY_NS, self._arrived, answer)

    def _arrived(self, answer: bytes) -> None:
        if self._open:
            self._take(answer)

    def close(self) -> None:
        self._world.open -= self._open
        self._open = False


class VirtualHome:
    """A home network in virtual time, and a mapping in it.

    Args:
        loop: that of the mapping; None: a new one.
    """

    def __init__(self, loop: VirtualLoop | None = None) -> None:
        self.loop = loop or VirtualLoop(limit_ns=100_000 * S)
        self.router: HomeRouter | None = HomeRouter()
        self.path: RouterPath | OSError = HOME
        self.find_ns = 1 * MS
        self.upnp = UpnpAnswered(None, "not installed")
        self.asked: list[AskUpnp] = []
        self.open = 0
        """Sockets that are open."""
        self.sought: list[Address | None] = []
        self.told: list[PortForwarded | PortNotForwarded] = []
        self.access = RouterAccess(self._find, self._open, self._ask)
        self.mapping = PortMapping(self.loop, self.loop, self.access, bytes)
        self.mapping.on_changed = self.told.append

    def run_test(self, main: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(main)

    async def _find(self, master: Address | None) -> RouterPath:
        self.sought.append(master)
        await asyncio.sleep(self.find_ns / S)
        if isinstance(self.path, OSError):
            raise self.path
        return self.path

    def _open(
        self, router: Address, take: Callable[[bytes], None], refused: Callable[[], None]
    ) -> DatagramSocket:
        assert router == Address("192.168.1.1", 5351)
        return cast(DatagramSocket, VirtualSocket(self, take))

    async def _ask(self, asked: AskUpnp) -> UpnpAnswered:
        self.asked.append(asked)
        await asyncio.sleep(0.1)
        return self.upnp

    def take(self) -> list[PortForwarded | PortNotForwarded]:
        told = self.told.copy()
        self.told.clear()
        return told
