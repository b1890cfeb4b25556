"""``QuickCurves``: keys for simulated processes, in a hundredth of the time. They keep no secret.

Each public key is the hash of its secret. A process that knows a public key can sign for it, and
compute what its owner agrees on. Simulated liars do not try.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from pccl.protocol.handshake.keys import SIGNATURE_BYTES
from pccl.protocol.types import KEY_BYTES


def _public(secret: bytes) -> bytes:
    return blake2b(secret, digest_size=KEY_BYTES, person=b"public").digest()


@dataclass(frozen=True)
class _QuickSigner:
    key: bytes

    def sign(self, message: bytes) -> bytes:
        return blake2b(message, key=self.key, digest_size=SIGNATURE_BYTES).digest()


class QuickCurves:
    """Deterministic stand-ins for Ed25519 and X25519."""

    def signer(self, secret: bytes) -> _QuickSigner:
        """Return the key with this secret."""
        return _QuickSigner(_public(secret))

    def is_signed(self, key: bytes, signature: bytes, message: bytes) -> bool:
        """Whether the owner of ``key`` has signed the message."""
        return _QuickSigner(key).sign(message) == signature

    def share(self, secret: bytes) -> bytes:
        """Return the public part of a share."""
        return _public(secret)

    def agree(self, secret: bytes, share: bytes) -> bytes | None:
        """Return a hash of both public shares."""
        both = sorted((_public(secret), share))
        return blake2b(b"".join(both), digest_size=KEY_BYTES, person=b"agreed").digest()
