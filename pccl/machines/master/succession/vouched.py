"""The members of a run as its master names them, so that another master can recognize them.

Each member has a key, which it proves when it connects. Its master tells the keys to other masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pccl.protocol.run_messages import MemberProof
from pccl.protocol.types import PeerId


@dataclass(frozen=True, slots=True)
class Vouched:
    """The members of a run, as its master named them.

    Attributes:
        version: version of the roster that names them; None: no master has named members.
        keys: their public keys, by peer; None: no master has named members.
    """

    version: int | None = None
    keys: Mapping[PeerId, bytes] | None = None

    @staticmethod
    def of(version: int, proofs: Iterable[MemberProof]) -> Vouched:
        """Return the members that a master's answer names."""
        return Vouched(version, {proof.peer: proof.key for proof in proofs})

    def proofs(self) -> tuple[MemberProof, ...]:
        """Return the members in the form that masters send and store."""
        return tuple(MemberProof(peer, key) for peer, key in (self.keys or {}).items())


NOT_TOLD = Vouched()
