"""Headers of the PROXY protocol, version 2, as proxies write them."""

from __future__ import annotations

from ipaddress import ip_address

LOCAL, PROXY = 0x20, 0x21
"""Version 2, with each of its two commands."""
UNSPECIFIED, TCP4, UDP4, TCP6, UNIX = 0x00, 0x11, 0x12, 0x21, 0x31
SIGNATURE = bytes.fromhex("0d0a0d0a000d0a515549540a")


def header(
    fields: bytes = b"", kind: int = TCP4, command: int = PROXY, length: int | None = None
) -> bytes:
    """A header with any fields; ``length``: what it says about them, if not the truth."""
    length = len(fields) if length is None else length
    return SIGNATURE + bytes([command, kind]) + length.to_bytes(2, "big") + fields


def fields_of(source: str, port: int, more: bytes = b"") -> bytes:
    """The addresses and ports of a connection from ``source``, and further fields."""
    address = ip_address(source)
    there = ip_address("198.51.100.1" if address.version == 4 else "2001:db8::ff")
    ports = port.to_bytes(2, "big") + (443).to_bytes(2, "big")
    return address.packed + there.packed + ports + more


def proxied(source: str, port: int = 50000, more: bytes = b"") -> bytes:
    """The header of a connection from ``source``."""
    kind = TCP4 if ip_address(source).version == 4 else TCP6
    return header(fields_of(source, port, more), kind)
