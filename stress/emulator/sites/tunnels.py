"""Makes the namespace of a site: its own network, with one interface that a program serves.

The program reads from a descriptor the packets that processes in the namespace send, and writes
those that they receive. The namespace exists until all descriptors of it are closed and all
processes in it have ended, so nothing is left to remove.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

INTERFACE = "site0"

VIRTIO_BYTES = 10
"""Bytes before each packet: how the kernel would cut it into segments, and its checksum. With them
large packets pass from site to site uncut, which saves most of the work."""

MTU_BYTES = 9000

QUEUED_PACKETS = 10_000
"""Packets that may wait for the program, so that none is lost while it does not run."""

NEW_NETWORK = 0x40000000
_SET_TUNNEL, _SET_OFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_INFO, _VIRTIO = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _SEGMENTS_V4 = 1, 2
_SET_ADDRESS, _SET_MASK, _SET_MTU, _SET_QUEUE, _SET_FLAGS = 0x8916, 0x891C, 0x8922, 0x8943, 0x8914
_UP, _RUNNING = 0x1, 0x40


class SitesRefused(Exception):
    """The system does not allow namespaces or interfaces; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class SiteTunnel:
    """The two descriptors of a site, in this process.

    Attributes:
        packets: reads and writes one packet at a time, each after ``VIRTIO_BYTES``.
        namespace: its network namespace.
    """

    packets: int
    namespace: int

    def close(self) -> None:
        """Close both; connections of the site then end."""
        os.close(self.packets)
        os.close(self.namespace)


def make_site(host: str, mtu_bytes: int) -> SiteTunnel:
    """Make a namespace with an interface, whose address is ``host`` of a /24 network.

    Raises:
        SitesRefused: the system does not allow it.
    """
    try:
        with ThreadPoolExecutor(1) as thread:  # the namespace is that of its thread
            return thread.submit(_make, host, mtu_bytes).result()
    except (OSError, AttributeError) as error:  # a system without namespaces lacks unshare
        raise SitesRefused(
            f"a network of sites needs Linux, root and /dev/net/tun: {error}"
        ) from error


def enter_site(namespace: str) -> None:
    """Move this thread, and all that it starts later, into the namespace at a path.

    Raises:
        OSError: the system does not allow it, or the namespace is gone.
    """
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", fd, NEW_NETWORK)
    finally:
        os.close(fd)


def _make(host: str, mtu_bytes: int) -> SiteTunnel:
    _call("unshare", NEW_NETWORK)
    packets = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        name = INTERFACE.encode()
        fcntl.ioctl(packets, _SET_TUNNEL, _request(name, "H", _TUN | _NO_INFO | _VIRTIO))
        fcntl.ioctl(packets, _SET_OFFLOAD, _CHECKSUMS | _SEGMENTS_V4)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            fcntl.ioctl(sock, _SET_FLAGS, _request(b"lo", "H", _UP))
            fcntl.ioctl(sock, _SET_ADDRESS, _request(name, "16s", _address(host)))
            fcntl.ioctl(sock, _SET_MASK, _request(name, "16s", _address("255.255.255.0")))
            fcntl.ioctl(sock, _SET_MTU, _request(name, "i", mtu_bytes))
            fcntl.ioctl(sock, _SET_QUEUE, _request(name, "i", QUEUED_PACKETS))
            fcntl.ioctl(sock, _SET_FLAGS, _request(name, "H", _UP | _RUNNING))
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except BaseException:
        os.close(packets)
        raise
    return SiteTunnel(packets, namespace)


def _request(name: bytes, kind: str, value: int | bytes) -> bytes:
    """Return the structure ``ifreq`` of netdevice(7)."""
    return struct.pack(f"16s{kind}", name, value).ljust(40, b"\0")


def _address(host: str) -> bytes:
    """Return the structure ``sockaddr_in`` of ip(7)."""
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(host))


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0 or sets errno."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
