"""Secrets for the handshakes of tests, always the same."""

from __future__ import annotations

from dataclasses import replace

from pccl.protocol.handshake.keys import CURVE25519, Secrets, Signer, derive_token_key
from pccl.protocol.handshake.opening import Opening


def signer_of(who: bytes) -> Signer:
    """The key of a process; processes with different ``who`` (a byte) differ."""
    return CURVE25519.signer(who * 32)


MASTER_SIGNER = signer_of(b"m")
"""The key of a master in tests."""


def secrets_of(
    token: bytes | None = None, who: bytes = b"a", number: int = 0, flags: int = 0
) -> Secrets:
    """The secrets of a side that knows a token; sides with different ``who`` (a byte) differ."""
    tokens = {} if token is None else {number: derive_token_key(token)}
    return Secrets(CURVE25519, signer_of(who), who.swapcase() * 32, tokens, flags)


def as_sent(opening: Opening, who: bytes = b"a") -> bytes:
    """The opening that the handshake of this side would send."""
    secrets = secrets_of(None, who)
    share, key = CURVE25519.share(secrets.share), secrets.signer.key
    return replace(opening, share=share, key=key).encode()
