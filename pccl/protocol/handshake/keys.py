"""The keys of processes and of connections, and what is computed with them.

Each process has a key, Ed25519 (RFC 8032), made at its start and kept in memory only.
Each connection has two X25519 shares (RFC 7748), used once. From both shares, the token and both
openings, the two sides derive the same keys (HKDF, RFC 5869). An attacker that records the
connection, and learns token and secrets of the processes later, cannot derive them.

The simulator has a ``Curves`` of its own, which is quick, and keeps no secret.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from pccl.protocol.types import KEY_BYTES

SECRET_BYTES = 32
"""Length of the secret of a key or of a share."""

SIGNATURE_BYTES = 64
MAC_BYTES = 32
FINGERPRINT_BYTES = 16
_TOKEN_INFO = b"pccl handshake key"
_KEYS_INFO = b"pccl connection keys"


class Signer(Protocol):
    """The secret part of the key of a process."""

    @property
    def key(self) -> bytes:
        """The public key, ``KEY_BYTES``."""
        ...

    def sign(self, message: bytes) -> bytes:
        """Return a signature of ``SIGNATURE_BYTES``."""
        ...


class Curves(Protocol):
    """What is computed with secret and public keys."""

    def signer(self, secret: bytes) -> Signer:
        """Return the key with this secret."""
        ...

    def is_signed(self, key: bytes, signature: bytes, message: bytes) -> bool:
        """Whether the owner of ``key`` has signed the message."""
        ...

    def share(self, secret: bytes) -> bytes:
        """Return the public part of a share, ``KEY_BYTES``."""
        ...

    def agree(self, secret: bytes, share: bytes) -> bytes | None:
        """Return what only the owners of both shares can compute; None: ``share`` is invalid."""
        ...


class _Ed25519Signer:
    def __init__(self, secret: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(secret)
        self.key = self._private.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)


class Curve25519:
    """Ed25519 and X25519."""

    def signer(self, secret: bytes) -> Signer:
        """Return the Ed25519 key with this secret."""
        return _Ed25519Signer(secret)

    def is_signed(self, key: bytes, signature: bytes, message: bytes) -> bool:
        """Whether the Ed25519 key has signed the message."""
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        except (InvalidSignature, ValueError):  # ValueError: the key is no point of the curve
            return False
        return True

    def share(self, secret: bytes) -> bytes:
        """Return the public X25519 key of this secret."""
        return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()

    def agree(self, secret: bytes, share: bytes) -> bytes | None:
        """Return the X25519 result; None if it would be zero, whatever the secret is."""
        try:
            theirs = X25519PublicKey.from_public_bytes(share)
            return X25519PrivateKey.from_private_bytes(secret).exchange(theirs)
        except ValueError:
            return None


CURVE25519 = Curve25519()


class ConnectionKeys(NamedTuple):
    """The keys that both ends of one connection derive, each of ``KEY_BYTES``. ``repr`` shows none.

    Attributes:
        dialler_proves: for the proof of the side that dialled.
        acceptor_proves: for the proof of the other side.
        dialler_sends: seals what the side that dialled sends after the handshake.
        acceptor_sends: seals what the other side sends.
    """

    dialler_proves: bytes
    acceptor_proves: bytes
    dialler_sends: bytes
    acceptor_sends: bytes

    def __repr__(self) -> str:
        return "<ConnectionKeys>"


@dataclass(frozen=True, slots=True)
class Secrets:
    """What a side needs for one handshake. ``repr`` shows nothing of it.

    Attributes:
        curves: computes with keys.
        signer: key of the process.
        share: secret of its share of this connection, ``SECRET_BYTES`` that nobody can predict.
        tokens: by number: see ``derive_token_key``; empty: no token; a dialler has at most one.
        flags: flags of the opening.
    """

    curves: Curves
    signer: Signer
    share: bytes
    tokens: Mapping[int, bytes]
    flags: int = 0

    def __repr__(self) -> str:
        return "<Secrets>"


def derive_token_key(token: bytes) -> bytes:
    """Derive from the token, the secret of the run, what enters the keys of connections."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=_TOKEN_INFO).derive(token)


def fingerprint_of(key: bytes) -> bytes:
    """Return a short hash of a public key, by which people and tokens name its owner."""
    return sha256(key).digest()[:FINGERPRINT_BYTES]


def transcript_of(dialler: bytes, acceptor: bytes) -> bytes:
    """Return the digest of both openings, as sent."""
    return sha256(dialler + acceptor).digest()


def derive_keys(agreed: bytes, token_key: bytes | None, transcript: bytes) -> ConnectionKeys:
    """Derive the keys of a connection.

    Args:
        agreed: result of ``Curves.agree``.
        token_key: see ``derive_token_key``; None: the two sides prove no token.
        transcript: see ``transcript_of``.
    """
    info, length = _KEYS_INFO + transcript, len(ConnectionKeys._fields) * KEY_BYTES
    keys = HKDF(algorithm=SHA256(), length=length, salt=token_key, info=info).derive(agreed)
    return ConnectionKeys(*(keys[i : i + KEY_BYTES] for i in range(0, length, KEY_BYTES)))


def mac_of(key: bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA256 of a message."""
    return hmac.digest(key, message, "sha256")


def is_mac(mac: bytes, key: bytes, message: bytes) -> bool:
    """Whether ``mac`` is the HMAC-SHA256 of the message; in constant time."""
    return hmac.compare_digest(mac, mac_of(key, message))
