"""What a master knows when it starts, and its identity in a run."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pccl.protocol.handshake.certificates import Certificate, certify
from pccl.protocol.handshake.keys import Signer
from pccl.protocol.messages import MasterAddress
from pccl.protocol.types import Member


class Origin(enum.Enum):
    """What a master knows when it starts."""

    BLANK = "blank"
    """Nothing. The master begins a run, unless members of another run return."""
    RESTARTED = "restarted"
    """The run that the master coordinated before. It waits for the members to return."""
    STANDBY = "standby"
    """That the master coordinates no run. It waits for the members of its master's run."""


@dataclass(slots=True)
class Incarnation:
    """The identity of a master in its run. The object stays when the master changes its run.

    Attributes:
        run: the run's id.
        term: the number of this incarnation.
        incumbent: the id of the master.
        standbys: addresses of the run's other masters.
        signer: key of the master, with which it signs certificates.
    """

    run: bytes
    term: int
    incumbent: bytes
    standbys: tuple[MasterAddress, ...]
    signer: Signer

    def certify(self, member: Member) -> Certificate:
        """Return what lets other peers recognize a newcomer that this master has registered."""
        return certify(self.signer, self.run, member.peer, member.key)
