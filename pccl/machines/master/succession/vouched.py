"""The members of a run as its master names them, so that another master can recognize them.

Only a peer and the master that registered it know its resume token. Other masters get a digest of
each token, and recognize returning members by it. A digest does not reveal the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from pccl.protocol.limits import TOKEN_DIGEST_BYTES
from pccl.protocol.run_messages import MemberProof
from pccl.protocol.types import PeerId


def token_digest(token: bytes) -> bytes:
    """Return the digest of a resume token, for masters that did not issue it."""
    return blake2b(token, digest_size=TOKEN_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Vouched:
    """The members of a run, as its master named them.

    Attributes:
        version: version of the roster that names them; None: no master has named members.
        digests: digests of their resume tokens, by peer; None: no master has named members.
    """

    version: int | None = None
    digests: Mapping[PeerId, bytes] | None = None

    @staticmethod
    def of(version: int, proofs: Iterable[MemberProof]) -> Vouched:
        """Return the members that a master's answer names."""
        return Vouched(version, {proof.peer: proof.digest for proof in proofs})

    def proofs(self) -> tuple[MemberProof, ...]:
        """Return the members in the form that masters send and store."""
        return tuple(MemberProof(peer, digest) for peer, digest in (self.digests or {}).items())


NOT_TOLD = Vouched()
