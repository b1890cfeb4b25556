"""Secrets for the handshakes of tests, always the same."""

from __future__ import annotations

from dataclasses import replace

from pccl.protocol.handshake.keys import CURVE25519, Secrets, derive_token_key
from pccl.protocol.handshake.opening import Opening


def secrets_of(token: bytes | None = None, who: bytes = b"a") -> Secrets:
    """The secrets of a side that knows a token; sides with different ``who`` (a byte) differ."""
    tokens = {} if token is None else {0: derive_token_key(token)}
    return Secrets(CURVE25519, CURVE25519.signer(who * 32), who.swapcase() * 32, tokens)


def as_sent(opening: Opening, who: bytes = b"a") -> bytes:
    """The opening that the handshake of this side would send."""
    secrets = secrets_of(None, who)
    share, identity = CURVE25519.share(secrets.share), secrets.signer.key
    return replace(opening, share=share, key=identity).encode()
