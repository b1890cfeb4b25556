"""Checksums that find damaged bytes. They find accidents in transit, not malice.

TCP's own sixteen bits miss about one damaged packet in 65,536, and a relay that changes bytes
computes them again. So this library sends a checksum with all data, and the receiver verifies it
before it uses the data. XXH3-64, which is as fast as memory, protects a payload. A CRC protects the
header in front of it: it finds each flipped bit, and each burst up to its own length.

All functions are pure. An attacker can also change the checksums; see ``docs/security.md``.
"""

from __future__ import annotations

import struct
from binascii import crc_hqx
from typing import Any
from zlib import crc32

import xxhash

from pccl.protocol.errors import RemoteProtocolError

Bytes = bytes | bytearray | memoryview

_SEAL = struct.Struct("<I")
SEAL_BYTES = _SEAL.size


class DamagedData(RemoteProtocolError):
    """The received bytes differ from the sent ones. The library makes a new connection."""


bytes_hash = xxhash.xxh3_64_intdigest
"""Returns the 64-bit hash of a payload in one part."""


def payload_hash(*parts: Bytes) -> int:
    """Return the 64-bit hash of a payload, given in one or several parts."""
    if len(parts) == 1:
        return bytes_hash(parts[0])
    hasher = PayloadHasher()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()


PayloadHasher = xxhash.xxh3_64
"""Computes the same hash of a payload that arrives in small parts."""


def seal(data: bytes) -> bytes:
    """Return ``data`` with its CRC-32 appended, in four bytes."""
    return data + _SEAL.pack(crc32(data))


def unseal(sealed: Bytes, func: str, what: str) -> bytes:
    """Verify and remove the CRC-32 of ``sealed``.

    Raises:
        DamagedData: the CRC-32 is wrong.
    """
    data = bytes(sealed)
    (check,) = _SEAL.unpack_from(data, len(data) - SEAL_BYTES)
    data = data[:-SEAL_BYTES]
    if crc32(data) != check:
        raise DamagedData(func=func, reason=f"{what} was damaged on the way")
    return data


def unpack_sealed(form: struct.Struct, sealed: Bytes, func: str, what: str) -> tuple[Any, ...]:
    """Verify the CRC-32 of a sealed record, and return its fields.

    Raises:
        DamagedData: the CRC-32 or the length is wrong.
    """
    if len(sealed) != form.size + SEAL_BYTES:
        raise DamagedData(func=func, reason=f"{what} has a wrong length: {len(sealed)} bytes")
    (check,) = _SEAL.unpack_from(sealed, form.size)
    if crc32(memoryview(sealed)[: form.size]) != check:
        raise DamagedData(func=func, reason=f"{what} was damaged on the way")
    return form.unpack_from(sealed)


def short_check(data: bytes) -> int:
    """Return the CRC-16 of a few bytes."""
    return crc_hqx(data, 0)
