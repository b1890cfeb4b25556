"""The records of an encrypted connection, and the cipher of one direction. Pure.

After the handshake, each direction is a sequence of records:

    length u32, little-endian | ciphertext of that length | tag, 16 bytes

The length is authenticated as additional data. The nonce of a record is its number in its
direction, so a repeated, missing or reordered record fails. A record without plaintext says that
the last record from the other side failed; it is the last record of its sender.

The cipher is AES-256-GCM (NIST SP 800-38D) if both processors have instructions for AES, else
ChaCha20-Poly1305 (RFC 8439). Each direction changes its key after ``RECORDS_PER_KEY`` records.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from pccl.protocol.types import KEY_BYTES, NS_PER_S

LENGTH_BYTES = 4
TAG_BYTES = 16
RECORD_BYTES_MAX = (256 << 10) + 64
"""The most plaintext in one record. Less costs more per byte, more delays what follows."""

RECORD_BYTES_MIN = 1 << 10
"""The most plaintext in one record of the slowest connection, and of a new one."""

SLOW_RECORD_NS = NS_PER_S
QUICK_RECORD_NS = NS_PER_S // 4
QUICK_RECORDS = 8
"""Records become half as long after a slow one, twice as long after so many quick ones."""

RECORDS_PER_KEY = 1 << 20
"""Far below what NIST SP 800-38D, section 8.3, allows for one key."""

_NEXT_KEY_INFO = b"pccl next key"
_LENGTH = struct.Struct("<I")
_NONCE = struct.Struct(">IQ")


class RecordKeys(NamedTuple):
    """What the handshake agreed on for the records of a connection. ``repr`` shows no key.

    Attributes:
        sends: key of the records that this side sends.
        receives: key of the records that it receives.
        has_aes: whether the cipher is AES-256-GCM.
    """

    sends: bytes
    receives: bytes
    has_aes: bool

    def __repr__(self) -> str:
        return "<RecordKeys>"


class RecordCipher:
    """Seals the records of one direction, or opens them, in order.

    The cipher releases the interpreter lock meanwhile.

    Args:
        key: key of the first records.
        has_aes: see ``RecordKeys``.
    """

    def __init__(self, key: bytes, *, has_aes: bool) -> None:
        self._key = key
        self._cipher = AESGCM if has_aes else ChaCha20Poly1305
        self._aead = self._cipher(key)
        self._number = 0

    def seal(self, record: memoryview, plain: memoryview) -> None:
        """Write the record of a plaintext, which may lie at its place, ``plain_of(record)``."""
        head = record[:LENGTH_BYTES] = _LENGTH.pack(len(plain))
        nonce = self._next_nonce()
        self._aead.encrypt_into(nonce, plain, head, record[LENGTH_BYTES:])

    def open(self, record: memoryview) -> bool:
        """Decrypt a record in place; return False if it is not the next one that was sealed.

        The record then has undefined bytes.
        """
        sealed, head = record[LENGTH_BYTES:], bytes(record[:LENGTH_BYTES])
        nonce = self._next_nonce()
        try:
            self._aead.decrypt_into(nonce, sealed, head, plain_of(record))
        except InvalidTag:
            return False
        return True

    def _next_nonce(self) -> bytes:
        """Return the nonce of the next record; change the key when it is time."""
        if self._number == RECORDS_PER_KEY:
            expand = HKDFExpand(algorithm=SHA256(), length=KEY_BYTES, info=_NEXT_KEY_INFO)
            self._key = expand.derive(self._key)
            self._aead, self._number = self._cipher(self._key), 0
        self._number += 1
        return _NONCE.pack(0, self._number - 1)


class RecordSize:
    """Fits the length of a connection's records to its line.

    The other side delivers nothing of a record before all of it has arrived. So on a slow line, a
    long record would look like a connection that has failed.

    Args:
        longest: the most plaintext that the other side accepts in one record.

    Attributes:
        plain_bytes: the most plaintext to put into the next record.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.plain_bytes = min(RECORD_BYTES_MIN, longest)
        self._quick = 0

    def note(self, plain_bytes: int, took_ns: int) -> None:
        """Record how long the network took to accept a record."""
        if took_ns > SLOW_RECORD_NS:
            self.plain_bytes = min(self._longest, max(RECORD_BYTES_MIN, self.plain_bytes // 2))
            self._quick = 0
        elif took_ns <= QUICK_RECORD_NS and plain_bytes == self.plain_bytes < self._longest:
            self._quick += 1
            if self._quick == QUICK_RECORDS:
                self.plain_bytes = min(self._longest, 2 * self.plain_bytes)
                self._quick = 0


def plain_of(record: memoryview) -> memoryview:
    """Return the part of a record where its plaintext is, before sealing or after opening."""
    return record[LENGTH_BYTES : len(record) - TAG_BYTES]


def plain_length(head: bytes | bytearray | memoryview) -> int:
    """Return the length of the plaintext of the record that begins with these bytes."""
    return int(_LENGTH.unpack_from(head)[0])
