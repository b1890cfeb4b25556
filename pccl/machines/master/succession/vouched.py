"""The members of a run as its master names them, so that another master can recognize them.

Only a peer and the master that issued it know a resume token. A standby and a restarted master get
a digest of each token, and recognize returning members by it. A digest does not reveal the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from pccl.protocol.limits import TOKEN_DIGEST_BYTES
from pccl.protocol.run_messages import MemberProof
from pccl.protocol.types import PeerId


def token_digest(token: bytes) -> bytes:
    """The digest of a resume token, for masters that did not issue it."""
    return blake2b(token, digest_size=TOKEN_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Vouched:
    """The members of a run, as its master named them.

    Attributes:
        version: of the roster that names them; None: no master has named members.
        digests: of their resume tokens, by peer; None: no master has named members.
    """

    version: int | None = None
    digests: Mapping[PeerId, bytes] | None = None

    @staticmethod
    def of(version: int, proofs: Iterable[MemberProof]) -> Vouched:
        """The members in a master's answer."""
        return Vouched(version, {proof.peer: proof.digest for proof in proofs})

    def proofs(self) -> tuple[MemberProof, ...]:
        """The members as they are sent and stored."""
        return tuple(MemberProof(peer, digest) for peer, digest in (self.digests or {}).items())


NOT_TOLD = Vouched()
