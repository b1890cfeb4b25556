"""Forwards the packets between the interfaces of all sites, in one thread."""

from __future__ import annotations

import os
import select
import time
from random import Random
from typing import NoReturn, Self

from pccl.stress.emulator.sites.matrix import SiteMatrix
from pccl.stress.emulator.sites.packets import OUTSIDE, PacketNetwork
from pccl.stress.emulator.sites.tunnels import MTU_BYTES, VIRTIO_BYTES, SiteTunnel, make_site

NETWORK = "10.77.0"
"""Network of all sites. No process outside the namespaces sees it."""

OUTSIDE_NUMBER = 254
"""Last number of the address of the outside; those of the sites are 1, 2, ..."""

READS_PER_TURN = 32
"""Packets of one site that are read before those of the next."""

_READ_BYTES = VIRTIO_BYTES + (1 << 16)
_VERSION = VIRTIO_BYTES
_PROTOCOL = VIRTIO_BYTES + 9
_SOURCE_HOST = VIRTIO_BYTES + 12
_TARGET = VIRTIO_BYTES + 19
_FLOW = slice(_SOURCE_HOST, VIRTIO_BYTES + 24)
"""Addresses and ports, if the header has no options, as the kernel's packets of TCP."""

_V4_PLAIN, _TCP = 0x45, 6


class SiteRouter:
    """The namespaces of all sites and of the outside, and the packets between them.

    Args:
        matrix: the sites.
        mtu_bytes: largest packet on a wire. The kernel of a site sends at least two at a time.
        seed: seed of jitter.

    Raises:
        SitesRefused: the system does not allow namespaces or interfaces.
    """

    def __init__(self, matrix: SiteMatrix, mtu_bytes: int = MTU_BYTES, seed: int = 0) -> None:
        self.network = PacketNetwork[bytes](matrix, Random(seed))
        self._tunnels: dict[int, SiteTunnel] = {}
        self._poll = select.epoll()
        self._numbers: dict[int, int] = {}
        """Descriptor -> number of its site."""
        try:
            for site in (*range(len(matrix.sites)), OUTSIDE):
                self._tunnels[site] = tunnel = make_site(self.host(site), mtu_bytes)
                self._numbers[tunnel.packets] = site
                self._poll.register(tunnel.packets, select.EPOLLIN)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors."""
        for tunnel in self._tunnels.values():
            tunnel.close()
        self._tunnels.clear()
        self._poll.close()

    @staticmethod
    def host(site: int) -> str:
        """Return the address of a site, or of ``OUTSIDE``."""
        return f"{NETWORK}.{OUTSIDE_NUMBER if site == OUTSIDE else site + 1}"

    def namespace(self, site: int) -> str:
        """Return the path of a site's namespace, for ``enter_site`` and ``nsenter --net=PATH``."""
        return f"/proc/{os.getpid()}/fd/{self._tunnels[site].namespace}"

    def run(self) -> NoReturn:
        """Forward packets until a signal's handler raises."""
        network = self.network
        while True:
            due_ns = network.next_event_ns()
            now_ns = time.monotonic_ns()
            # Rounded up to a millisecond by the system. A late turn lowers no rate, because
            # packets are late only by the time that they have waited here.
            wait_s = None if due_ns is None else max(0.0, (due_ns - now_ns) / 1e9)
            ready = self._poll.poll(wait_s)
            now_ns = time.monotonic_ns()
            for fd, _ in ready:
                self._read(fd, now_ns)
            for target, packet in network.advance(now_ns):
                self._write(target, packet)

    def _read(self, fd: int, now_ns: int) -> None:
        source, offer = self._numbers[fd], self.network.offer
        for _ in range(READS_PER_TURN):
            try:
                packet = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if packet[_VERSION] != _V4_PLAIN or packet[_PROTOCOL] != _TCP:
                continue  # of discovery protocols, which no link carries
            number = packet[_TARGET]
            target = OUTSIDE if number == OUTSIDE_NUMBER else number - 1
            offer(now_ns, source, target, packet[_FLOW], len(packet) - VIRTIO_BYTES, packet)

    def _write(self, target: int, packet: bytes) -> None:
        # The kernel drops a packet without memory for it, as a link may; TCP sends it again.
        try:
            os.write(self._tunnels[target].packets, packet)
        except BlockingIOError:
            self.network.dropped += 1
