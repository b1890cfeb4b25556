"""The requests of NAT-PMP (RFC 6886) and their answers, for TCP.

The protocol has no nonce: an answer counts if it comes from the router and names the own port.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from struct import Struct

from pccl.protocol.port_mapping.answers import (
    DATAGRAM_BYTES_MAX,
    PortDenied,
    PortGranted,
    RouterAddress,
)

ADDRESS_REQUEST = bytes(2)
"""Asks for the router's own address on the other side."""

_VERSION = 0
_ADDRESS, _MAP_TCP = 0x80, 0x82
_MAP_REQUEST = Struct("!BBxxHHI")
"""Version, opcode, own port, port of the router, lifetime in seconds."""

_HEADER = Struct("!BBHI")
"""Version, opcode, result, epoch in seconds."""

_ADDRESS_BODY = Struct("!4s")
_MAP_BODY = Struct("!HHI")
"""Own port, port of the router, lifetime in seconds."""

RESULTS = {
    1: "it does not know this version",
    2: "it allows this machine no ports (not authorized)",
    3: "it has no connection to the internet (network failure)",
    4: "it has no free ports (no resources)",
    5: "it forwards no ports (unsupported opcode)",
}
"""What the result codes mean."""


def pack_map(port: int, outer: int, lifetime_s: int) -> bytes:
    """Return the request to forward a port.

    Args:
        port: own TCP port.
        outer: the router's port that is wanted; 0: any, and always to delete a mapping.
        lifetime_s: for how long to forward; 0 deletes the mapping.
    """
    return _MAP_REQUEST.pack(_VERSION, _MAP_TCP & 0x7F, port, outer, lifetime_s)


def read(data: bytes, port: int) -> PortGranted | PortDenied | RouterAddress | None:
    """Return the answer in a datagram of the router; None: it is no answer to these requests.

    Args:
        data: the datagram.
        port: own port in the request.
    """
    if not _HEADER.size <= len(data) <= DATAGRAM_BYTES_MAX:
        return None
    version, opcode, result, epoch_s = _HEADER.unpack_from(data)
    if version != _VERSION or opcode not in (_ADDRESS, _MAP_TCP):
        return None
    body = data[_HEADER.size :]
    if result:
        # An answer about another port is foreign; some routers send the header only.
        if opcode == _MAP_TCP and len(body) >= 2 and int.from_bytes(body[:2]) not in (port, 0):
            return None
        return PortDenied(RESULTS.get(result, f"result {result}"), epoch_s)
    if opcode == _ADDRESS:
        if len(body) < _ADDRESS_BODY.size:
            return None
        return RouterAddress(str(IPv4Address(body[: _ADDRESS_BODY.size])), epoch_s)
    if len(body) < _MAP_BODY.size:
        return None
    own, outer, lifetime_s = _MAP_BODY.unpack_from(body)
    return PortGranted("", outer, lifetime_s, epoch_s) if own == port else None
