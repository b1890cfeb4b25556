"""A router of a home network that forwards ports, written from RFC 6886 and RFC 6887 alone."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Container, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Address


@dataclass
class HomeRouter:
    """What a router answers to a datagram; it keeps the mappings.

    Attributes:
        pcp: whether it knows PCP.
        nat_pmp: whether it knows NAT-PMP.
        host: its own address on the other side.
        taken: ports that another machine has.
        result: refuses with this code, if not 0.
        lifetime_s: the longest lifetime that it grants.
        epoch_s: its clock.
        ports: own port of the machine -> port of the router.
        received: every datagram.
    """

    pcp: bool = True
    nat_pmp: bool = True
    host: str = "8.8.4.4"
    taken: Container[int] = ()
    result: int = 0
    lifetime_s: int = 7200
    epoch_s: int = 1000
    ports: dict[int, int] = field(default_factory=dict[int, int])
    received: list[bytes] = field(default_factory=list[bytes])

    def answers(self, data: bytes) -> Iterator[bytes]:
        """What it sends back for a datagram."""
        self.received.append(data)
        if data[0] == 2 and self.pcp:
            yield self._answer_pcp(data)
        elif data[0] == 2 and self.nat_pmp:
            yield struct.pack("!BBHI", 0, 0x80 | data[1], 1, self.epoch_s)
        elif data[0] == 0 and self.nat_pmp:
            yield self._answer_nat_pmp(data)

    def _map(self, own: int, wanted: int, lifetime_s: int) -> tuple[int, int]:
        if lifetime_s == 0:
            self.ports.pop(own, None)
            return 0, 0
        port = self.ports.get(own) or wanted or own
        while port in self.taken:
            port += 1
        self.ports[own] = port
        return port, min(lifetime_s, self.lifetime_s)

    def _answer_pcp(self, data: bytes) -> bytes:
        version, opcode, lifetime_s = struct.unpack("!BBxxI", data[:8])
        nonce, protocol, own, wanted = struct.unpack("!12sB3xHH", data[24:44])
        assert (version, opcode, protocol, len(data)) == (2, 1, 6, 60)
        port = 0
        if not self.result:
            port, lifetime_s = self._map(own, wanted, lifetime_s)
        host = b"\0" * 10 + b"\xff\xff" + IPv4Address(self.host).packed
        header = struct.pack("!BBxBII12x", 2, 0x80 | opcode, self.result, lifetime_s, self.epoch_s)
        return header + struct.pack("!12sB3xHH16s", nonce, protocol, own, port, host)

    def _answer_nat_pmp(self, data: bytes) -> bytes:
        header = struct.pack("!BBHI", 0, 0x80 | data[1], self.result, self.epoch_s)
        if data[1] == 0:
            assert len(data) == 2
            return header + IPv4Address(self.host).packed
        _, opcode, own, wanted, lifetime_s = struct.unpack("!BBxxHHI", data)
        assert opcode == 2
        port = 0
        if not self.result:
            port, lifetime_s = self._map(own, wanted, lifetime_s)
        return header + struct.pack("!HHI", own, port, lifetime_s)


@contextmanager
def serving(router: HomeRouter) -> Generator[int]:
    """Let a router answer at a UDP port of this machine, which this yields."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                data, source = sock.recvfrom(2048)
                if not data:
                    return
                for answer in router.answers(data):
                    sock.sendto(answer, source)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as waker:
                waker.sendto(b"", sock.getsockname())
            thread.join()
