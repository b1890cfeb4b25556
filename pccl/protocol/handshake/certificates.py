"""Certificates, with which a master vouches for the key of a peer that it has registered.

A newcomer shows its certificate to peers whose roster does not name it yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.handshake.keys import SIGNATURE_BYTES, Curves, Signer
from pccl.protocol.types import KEY_BYTES, AtMost, PeerId

_CERTIFIED = b"pccl registered peer"


@dataclass(frozen=True, slots=True)
class Certificate:
    """The signature of a master under the run, the id and the key of a peer."""

    authority: Annotated[bytes, AtMost(KEY_BYTES)] = b""
    """The public key of the master that has signed; empty: there is no certificate."""
    signature: Annotated[bytes, AtMost(SIGNATURE_BYTES)] = b""


NO_CERTIFICATE = Certificate()


def certify(signer: Signer, run: bytes, peer: PeerId, key: bytes) -> Certificate:
    """Return the certificate of a master that it has registered the owner of ``key``."""
    return Certificate(signer.key, signer.sign(_certified(run, peer, key)))


def is_certified(
    curves: Curves, certificate: Certificate, run: bytes, peer: PeerId, key: bytes
) -> bool:
    """Whether the certificate's master has registered the owner of ``key`` as this peer."""
    message = _certified(run, peer, key)
    return curves.is_signed(certificate.authority, certificate.signature, message)


def _certified(run: bytes, peer: PeerId, key: bytes) -> bytes:
    return _CERTIFIED + run + peer.to_bytes(8) + key
