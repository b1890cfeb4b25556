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

from pccl.protocol.types import KEY_BYTES

LENGTH_BYTES = 4
TAG_BYTES = 16
RECORD_BYTES_MAX = (256 << 10) + 64
"""The most plaintext in one record. Less costs more per byte, more delays what follows."""

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


def plain_of(record: memoryview) -> memoryview:
    """Return the part of a record where its plaintext is, before sealing or after opening."""
    return record[LENGTH_BYTES : len(record) - TAG_BYTES]


def plain_length(head: bytes | bytearray | memoryview) -> int:
    """Return the length of the plaintext of the record that begins with these bytes."""
    return int(_LENGTH.unpack_from(head)[0])
