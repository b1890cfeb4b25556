"""``ProxyHeader``: what a TCP proxy sends in front of a connection, so that its source is known.

PROXY protocol, version 2 (haproxy.org, ``proxy-protocol.txt``, section 2.2), big-endian:

    signature 12 bytes | version and command u8 | family and transport u8 | length u16
    source address | destination address | source port u16 | destination port u16 | further fields

``length`` counts all bytes of the second line. Any process could pretend to be a proxy, and claim
any source. So only connections from a named address may begin with a header, and they must: nothing
here guesses whether there is one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import PROXY_FIELDS_BYTES_MAX

IPNetwork: TypeAlias = IPv4Network | IPv6Network
IPAddress: TypeAlias = IPv4Address | IPv6Address

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_TEXT = b"PROXY "
"""The first bytes of version 1, which is a line of text."""
_FIXED = struct.Struct(">12sBBH")
_LAYOUTS = {0x11: struct.Struct(">4s4xH2x"), 0x21: struct.Struct(">16s16xH2x")}
"""Family and transport -> the addresses and ports: TCP over IPv4 and IPv6. The code reads nothing
of other transports (UDP, Unix sockets)."""
_VERSION, _LOCAL, _PROXY = 2, 0, 1
_FAMILY_MAX, _TRANSPORT_MAX = 3, 2
FIXED_BYTES = _FIXED.size

assert [FIXED_BYTES, *(layout.size for layout in _LAYOUTS.values())] == [16, 12, 36]


def is_named(host: str, proxies: Iterable[IPNetwork]) -> bool:
    """Whether ``host``, from which a connection comes, is one of the named proxies."""
    address = _address(host)
    return address is not None and any(address in network for network in proxies)


def begins_header(data: bytes) -> bool:
    """Whether the first 8 bytes of a connection, or more, begin a header of any version."""
    return data.startswith((SIGNATURE[:8], _TEXT))


class ProxyHeader:
    """One header, as it arrives. Callers pass in the received bytes, in any split.

    Args:
        proxy: host from which the proxy connects.

    Attributes:
        awaited_bytes: number of bytes to read next, and never more; 0: the header is complete.
        source: host and port from which the proxied connection comes. None: the proxy does not
            know them, or has connected on its own, such as for a health check. Then the
            connection comes from the proxy.
    """

    def __init__(self, proxy: str) -> None:
        self.awaited_bytes = FIXED_BYTES
        self.source: tuple[str, int] | None = None
        self._proxy = proxy
        self._data = bytearray()
        self._kind: int | None = None
        """Family and transport, once the fixed part is complete; 0: none of interest."""

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Process the next bytes, at most ``awaited_bytes``.

        Raises:
            RemoteProtocolError: this is no acceptable header. Close the connection.
        """
        assert len(data) <= self.awaited_bytes
        self._data += data
        self.awaited_bytes -= len(data)
        if self._kind is None:
            _check_signature(bytes(self._data))
            if self.awaited_bytes:
                return
            self._kind, self.awaited_bytes = _decode_fixed(bytes(self._data))
        if not self.awaited_bytes:
            self.source = self._decode(self._kind, bytes(self._data[FIXED_BYTES:]))

    def _decode(self, kind: int, fields: bytes) -> tuple[str, int] | None:
        layout = _LAYOUTS.get(kind)
        if layout is None:
            return None
        if len(fields) < layout.size:
            raise _refused(f"its PROXY header has {len(fields)} bytes, too few for its addresses")
        packed, port = layout.unpack_from(fields)
        host = _unmapped(ip_address(packed))
        if host.is_unspecified or host.is_multicast:
            raise _refused(f"its PROXY header names the source {host}, which no host has")
        if host.is_loopback and not _is_loopback(self._proxy):
            return None  # it is on the machine of the proxy, whose loopback is not ours
        return str(host), port


def _check_signature(data: bytes) -> None:
    begun = data[: len(SIGNATURE)]
    if begun == SIGNATURE[: len(begun)]:
        return
    if begun.startswith(_TEXT[:2]):
        raise _refused("it sent version 1 of the PROXY header: let it send version 2")
    advice = "let it send version 2, or remove it from --proxy-from"
    raise _refused(f"it sent no PROXY header: {advice}")


def _decode_fixed(data: bytes) -> tuple[int, int]:
    """Return family and transport (0: they do not matter), and the number of further bytes."""
    _, version_and_command, kind, length = _FIXED.unpack(data)
    version, command = divmod(version_and_command, 16)
    family, transport = divmod(kind, 16)
    if version != _VERSION or command not in (_LOCAL, _PROXY):
        raise _refused(f"its PROXY header has version {version}, command {command}")
    if length > PROXY_FIELDS_BYTES_MAX:
        most = f"at most {PROXY_FIELDS_BYTES_MAX} are accepted"
        raise _refused(f"its PROXY header announces {length} bytes of fields; {most}")
    if command == _LOCAL:
        return 0, length
    if family > _FAMILY_MAX or transport > _TRANSPORT_MAX:
        raise _refused(f"its PROXY header has family {family}, transport {transport}")
    return kind, length


def _address(host: str) -> IPAddress | None:
    try:
        return _unmapped(ip_address(host.partition("%")[0]))
    except ValueError:  # a simulated host
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return address is not None and address.is_loopback


def _unmapped(address: IPAddress) -> IPAddress:
    """Return an IPv4 address that an IPv6 listener has mapped as such."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _refused(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(func="handshake", reason=f"the proxy is not set up well: {reason}")
