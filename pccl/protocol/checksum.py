"""Checksums of what travels in the clear: they find accidents on the way, not malice.

TCP's own sixteen bits let about one damaged packet in 65,536 through, and a relay that changes
bytes makes them anew. So everything that this library sends says what it should be, and nothing
counts before that was verified: a payload by XXH3-64, which is as fast as memory; the few bytes in
front of it, which say how long it is and what it belongs to, by a CRC, which finds every flipped
bit and every burst up to its own length.

Pure. Whoever changes bytes on purpose makes the checksums fit; see ``docs/security.md``.
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
    """What has arrived is not what was sent. The connection is closed, and made anew."""


def payload_hash(*parts: Bytes) -> int:
    """Of a payload in one piece or in several: 64 bits."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    hasher = PayloadHasher()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()


PayloadHasher = xxhash.xxh3_64
"""The same of a payload that comes little by little."""


def seal(data: bytes) -> bytes:
    """``data`` and behind it four bytes that verify it."""
    return data + _SEAL.pack(crc32(data))


def unseal(sealed: Bytes, func: str, what: str) -> bytes:
    """What was sealed.

    Raises:
        DamagedData: the bytes are not those that were sealed.
    """
    data = bytes(sealed)
    (check,) = _SEAL.unpack_from(data, len(data) - SEAL_BYTES)
    data = data[:-SEAL_BYTES]
    if crc32(data) != check:
        raise DamagedData(func=func, reason=f"{what} was damaged on the way")
    return data


def unpack_sealed(form: struct.Struct, sealed: Bytes, func: str, what: str) -> tuple[Any, ...]:
    """The fields of a sealed record.

    Raises:
        DamagedData: the bytes are not those that were sealed, or not as many.
    """
    if len(sealed) != form.size + SEAL_BYTES:
        raise DamagedData(func=func, reason=f"{what} has {len(sealed)} bytes")
    (check,) = _SEAL.unpack_from(sealed, form.size)
    if crc32(memoryview(sealed)[: form.size]) != check:
        raise DamagedData(func=func, reason=f"{what} was damaged on the way")
    return form.unpack_from(sealed)


def short_check(data: bytes) -> int:
    """Sixteen bits that verify a few bytes."""
    return crc_hqx(data, 0)
