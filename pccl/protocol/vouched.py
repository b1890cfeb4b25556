"""Who is in a run, as its master says: what tells a member that returns from somebody else.

A resume token is known to a peer and to the master that has given it out. A standby, and a master
that is started again, get a digest of each, and know the members by that; from the digests nobody
can tell the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from pccl.protocol.limits import TOKEN_DIGEST_BYTES
from pccl.protocol.run_messages import MemberProof
from pccl.protocol.types import PeerId


def token_digest(token: bytes) -> bytes:
    """What stands for a resume token where others may read it."""
    return blake2b(token, digest_size=TOKEN_DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Vouched:
    """The members of a run, as its master had them.

    Attributes:
        version: of the roster that they were in.
        digests: of their resume tokens; None: nobody has said who they are.
    """

    version: int | None = None
    digests: Mapping[PeerId, bytes] | None = None

    @staticmethod
    def of(version: int, proofs: Iterable[MemberProof]) -> Vouched:
        """Those that a master has named."""
        return Vouched(version, {proof.peer: proof.digest for proof in proofs})

    def proofs(self) -> tuple[MemberProof, ...]:
        """Each of them, as it is sent and kept."""
        return tuple(MemberProof(peer, digest) for peer, digest in (self.digests or {}).items())


NOT_TOLD = Vouched()
