"""Control messages between a peer and its master, as frozen dataclasses.

Field order is the wire order. The integer types carry their range; the codec enforces it along
with every other bound. Messages that a peer may have to repeat after a reconnect (requests, done
reports) are keyed by their round or operation, so that the master can answer a second copy from
what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pccl.protocol.types import (
    AbortCause,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
)


@dataclass(frozen=True, slots=True)
class Below:
    """Annotation of an integer field: valid values are ``0 <= value < bound``."""

    bound: int


U16 = Annotated[int, Below(1 << 16)]
U32 = Annotated[int, Below(1 << 32)]

# -- peer to master ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """First message of a newcomer: its group and where its port can be reached.

    An empty ``host`` means: the address that the master sees. It wants to be admitted only into a
    run that then has ``min_peers`` members or more.
    """

    group: U32
    host: str
    port: U16
    min_peers: U16 = 1


@dataclass(frozen=True, slots=True)
class Resume:
    """First message on a new connection of a peer that lost its old one."""

    peer: PeerId
    token: bytes
    roster_version: int
    """The newest roster it knows; the master sends what came after."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer leaves now."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one peer is in one started operation: what it has received and what it could send."""

    operation: OperationId
    received: U32
    """Segments."""
    ready: U32
    """Segments."""
    received_bytes: int
    """Also of segments that have arrived in part: on a slow link one may take long."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, with progress, and with the outcomes and answers that have arrived."""

    progress: tuple[Progress, ...] = ()
    operations: tuple[OperationId, ...] = ()
    rounds: tuple[RoundId, ...] = ()
    blocked: bool = False
    """Whether all callers are inside calls that wait for other members."""


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """The peer's application has made this joint call."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """The peer has posted its buffers for this operation and waits for its start."""

    operation: OperationId
    descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class OperationDone:
    """The peer holds the complete result, with this digest, and waits for the outcome."""

    operation: OperationId
    digest: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The peer's caller left before the operation was done."""

    operation: OperationId
    reason: str


@dataclass(frozen=True, slots=True)
class OutcomeQuery:
    """What became of this operation?"""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class BlockedReply:
    """Answer to ``BlockedQuery``."""

    query: U32
    blocked: bool


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The state of the link to another peer has changed."""

    peer: PeerId
    up: bool
    reason: str


# -- master to peer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """The newcomer's identity. It stays pending until it is ``Admitted``."""

    peer: PeerId
    term: U32
    run: bytes
    token: bytes


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The older peers of the own group (members and pending ones) that this peer shall dial."""

    elders: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The connection is resumed; everything that was missed follows."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Not (or no longer) welcome, in words; the master closes the connection.

    ``cause`` is None if this peer was never part of the run.
    """

    cause: RemovalCause | None
    reason: str


@dataclass(frozen=True, slots=True)
class RoundCount:
    """How many rounds of a kind the run has had."""

    kind: RoundKind
    n: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The newcomer is a member from this roster on."""

    roster: Roster
    rounds: tuple[RoundCount, ...]


@dataclass(frozen=True, slots=True)
class RosterChanged:
    """Membership has changed somewhere in the run. Callers see it when a joint call returns."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Every member has made the call; the answer is the same for all."""

    round: RoundId
    roster_version: int
    pending: bool
    """Whether newcomers are waiting."""
    lockstep: str = ""
    """Not empty: there is no answer, because the members waited for different things (whom for
    what); the next call of the kind opens the next round."""


@dataclass(frozen=True, slots=True)
class OperationStarted:
    """Every member has asked for the same thing: move the data."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class OperationEnded:
    """The outcome, the same for all. ``abort`` is None if it was committed."""

    operation: OperationId
    abort: AbortCause | None
    reason: str
    contributors: tuple[PeerId, ...]
    roster_version: int
    """The caller sees this membership when his call returns."""


@dataclass(frozen=True, slots=True)
class RoundWaits:
    """Whom the peer's request of this round has been waiting for, and what they do meanwhile."""

    round: RoundId
    waited_s: U32
    whom: str


@dataclass(frozen=True, slots=True)
class OperationWaits:
    """Whom the peer's request of this operation has been waiting for, and what they do."""

    operation: OperationId
    waited_s: U32
    whom: str


@dataclass(frozen=True, slots=True)
class AdmissionWaits:
    """What the newcomer has been waiting for."""

    waited_s: U32
    whom: str


@dataclass(frozen=True, slots=True)
class BlockedQuery:
    """Are all your callers inside calls that wait for other members, right now?"""

    query: U32


@dataclass(frozen=True, slots=True)
class MasterHeartbeat:
    """The master's sign of life."""


PeerMessage = (
    Register
    | Resume
    | Goodbye
    | Heartbeat
    | RoundRequest
    | OperationRequest
    | OperationDone
    | Withdraw
    | OutcomeQuery
    | BlockedReply
    | LinkReport
)
MasterMessage = (
    Registered
    | LinkPlan
    | Resumed
    | Refused
    | Admitted
    | RosterChanged
    | RoundClosed
    | OperationStarted
    | OperationEnded
    | RoundWaits
    | OperationWaits
    | AdmissionWaits
    | BlockedQuery
    | MasterHeartbeat
)
Message = PeerMessage | MasterMessage
