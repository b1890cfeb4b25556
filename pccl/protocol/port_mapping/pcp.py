"""The MAP request of PCP (RFC 6887) and its answer, for TCP and IPv4.

An answer counts only if it repeats the nonce, the protocol and the port of the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address
from struct import Struct

from pccl.protocol.port_mapping.answers import (
    DATAGRAM_BYTES_MAX,
    OtherVersion,
    PortDenied,
    PortGranted,
)

VERSION = 2
NONCE_BYTES = 12

_MAP = 1
_ANSWER = 0x80
_TCP = 6
_UNSUPPORTED_VERSION = 1

_REQUEST_HEADER = Struct("!BBxxI16s")
"""Version, opcode, lifetime in seconds, own address."""

_ANSWER_HEADER = Struct("!BBxBII12x")
"""Version, opcode, result, lifetime in seconds, epoch in seconds."""

_BODY = Struct("!12sB3xHH16s")
"""Nonce, protocol, own port, port and address of the router (wanted, or assigned)."""

_OLD_ANSWER = Struct("!BBHI")
"""The beginning of an answer of NAT-PMP: version 0, opcode, result, epoch."""

_IPV4_PREFIX = bytes(10) + b"\xff\xff"
"""IPv4 addresses are written as IPv6 addresses that begin with this."""

RESULTS = {
    2: "it allows this machine no ports (not authorized)",
    3: "it calls the request malformed",
    4: "it forwards no ports (unsupported opcode)",
    5: "it lacks an option",
    6: "it calls an option malformed",
    7: "it has no connection to the internet (network failure)",
    8: "it has no free ports (no resources)",
    9: "it does not forward TCP",
    10: "this machine has too many ports already (quota)",
    11: "it cannot provide the port",
    12: "another router lies between it and this machine (address mismatch)",
    13: "too many remote peers",
}
"""What the result codes mean."""


@dataclass(frozen=True, slots=True)
class PortRequest:
    """A request to forward a port.

    Attributes:
        nonce: random bytes, the same as long as the mapping lives.
        own_host: IPv4 address of this machine toward the router.
        port: own TCP port.
    """

    nonce: bytes
    own_host: str
    port: int

    def pack(self, outer: int, lifetime_s: int) -> bytes:
        """Return the request.

        Args:
            outer: the wanted port of the router; 0: any.
            lifetime_s: for how long to forward; 0 deletes the mapping.
        """
        header = _REQUEST_HEADER.pack(VERSION, _MAP, lifetime_s, _pack_host(self.own_host))
        return header + _BODY.pack(self.nonce, _TCP, self.port, outer, _pack_host("0.0.0.0"))

    def read(self, data: bytes) -> PortGranted | PortDenied | OtherVersion | None:
        """Return the answer in a datagram of the router; None: it is no answer to this request."""
        if data[:1] == b"\0":
            return _read_old(data)
        if len(data) < _ANSWER_HEADER.size or len(data) > DATAGRAM_BYTES_MAX:
            return None
        version, opcode, result, lifetime_s, epoch_s = _ANSWER_HEADER.unpack_from(data)
        if opcode != _ANSWER | _MAP:
            return None
        if result == _UNSUPPORTED_VERSION:
            return OtherVersion()
        if version != VERSION or len(data) < _ANSWER_HEADER.size + _BODY.size:
            return None
        nonce, protocol, port, outer, host = _BODY.unpack_from(data, _ANSWER_HEADER.size)
        if (nonce, protocol, port) != (self.nonce, _TCP, self.port):
            return None
        if result:
            return PortDenied(RESULTS.get(result, f"result {result}"), epoch_s)
        return PortGranted(_unpack_host(host), outer, lifetime_s, epoch_s)


def _read_old(data: bytes) -> OtherVersion | None:
    """Return what a router answers that knows NAT-PMP only (RFC 6886, section 3.5)."""
    if not _OLD_ANSWER.size <= len(data) <= DATAGRAM_BYTES_MAX:
        return None
    _, opcode, result, _ = _OLD_ANSWER.unpack_from(data)
    is_refusal = opcode & _ANSWER and result == _UNSUPPORTED_VERSION
    return OtherVersion() if is_refusal else None


def _pack_host(host: str) -> bytes:
    return _IPV4_PREFIX + bytes(map(int, host.split(".")))


def _unpack_host(data: bytes) -> str:
    address = IPv6Address(data)
    return str(address.ipv4_mapped or address)
