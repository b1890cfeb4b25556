"""``RunToken``: what a process must know to join a run, and its text.

The text is ``pccl1.FINGERPRINT.NUMBER.SECRET``: 16, 8 and 32 bytes in base64url without padding.
It names the key of the run, so a process finds out that another master answers before it proves
anything. Any other text is a plain secret: it has no fingerprint, and its number is 0.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from pccl.protocol.handshake.keys import FINGERPRINT_BYTES

TOKEN_SECRET_BYTES = 32
TOKEN_PREFIX = b"pccl1."
_NUMBER_BYTES = 8
_LENGTHS = (FINGERPRINT_BYTES, _NUMBER_BYTES, TOKEN_SECRET_BYTES)
NUMBER_MAX = 2 ** (8 * _NUMBER_BYTES) - 1


@dataclass(frozen=True, slots=True)
class RunToken:
    """A token of a run.

    Attributes:
        secret: what both sides of a control connection prove to know.
        number: number of the token in its run; 0: a plain secret.
        fingerprint: fingerprint of the run's key; empty: any master that knows the secret.
    """

    secret: bytes = field(repr=False)
    number: int = 0
    fingerprint: bytes = b""

    def text(self) -> str:
        """Return the text of a token with a fingerprint."""
        parts = (self.fingerprint, self.number.to_bytes(_NUMBER_BYTES), self.secret)
        assert tuple(map(len, parts)) == _LENGTHS
        return TOKEN_PREFIX.decode() + ".".join(_encoded(part).decode() for part in parts)


def parse_token(text: bytes) -> RunToken:
    """Return the token that a text names.

    Raises:
        ValueError: the text begins like that of a numbered token, and the rest is malformed.
    """
    if not text.startswith(TOKEN_PREFIX):
        return RunToken(text)
    encoded = text[len(TOKEN_PREFIX) :].split(b".", len(_LENGTHS))
    parts = [_decoded(part) for part in encoded]
    number = int.from_bytes(parts[1]) if len(parts) == len(_LENGTHS) else 0
    if tuple(map(len, parts)) != _LENGTHS or number == 0:
        raise ValueError("it begins with pccl1. like a token, but is malformed; copy it again")
    return RunToken(parts[2], number, parts[0])


def _encoded(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


def _decoded(encoded: bytes) -> bytes:
    """Return the bytes that only this text stands for; empty: there are none."""
    try:
        part = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""
    return part if _encoded(part) == encoded else b""
