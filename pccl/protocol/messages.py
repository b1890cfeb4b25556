"""Control messages between a peer and its master, as frozen dataclasses.

Field order is the wire order. The integer types carry their range; the codec enforces it along
with every other bound. Messages that a peer may have to repeat after a reconnect (requests, done
reports) are keyed by their round or operation, so that the master can answer a second copy from
what it keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pccl.protocol.limits import (
    ACKNOWLEDGED_BATCH_MAX,
    FLOWS_MAX,
    HOST_CHARACTERS_MAX,
    PEERS_MAX,
    PROGRESS_BATCH_MAX,
    REASON_BYTES_MAX,
    STANDBYS_MAX,
    WAITS_NAMED_MAX,
)
from pccl.protocol.link_messages import AddressProbed as AddressProbed
from pccl.protocol.link_messages import DialNewcomers as DialNewcomers
from pccl.protocol.link_messages import LinkPlan as LinkPlan
from pccl.protocol.link_messages import LinkReport as LinkReport
from pccl.protocol.link_messages import LinksMeasured as LinksMeasured
from pccl.protocol.link_messages import ProbeAddress as ProbeAddress
from pccl.protocol.link_messages import Undialable as Undialable
from pccl.protocol.run_messages import MemberProof as MemberProof
from pccl.protocol.run_messages import RunIs as RunIs
from pccl.protocol.run_messages import RunQuery as RunQuery
from pccl.protocol.shared_state import NOTHING_EXPECTED, Difference, Elected, Expected, Offer
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import (
    AbortCause,
    AtMost,
    Below,
    Descriptor,
    OperationId,
    PeerId,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
    Weight,
)

U16 = Annotated[int, Below(1 << 16)]
U32 = Annotated[int, Below(1 << 32)]
HostName = Annotated[str, AtMost(HOST_CHARACTERS_MAX)]
Peers = Annotated[tuple[PeerId, ...], AtMost(PEERS_MAX)]

# -- peer to master ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """First message of a newcomer: its group and where its port can be reached.

    An empty ``host`` means: the address that the master sees. It wants to be admitted only into a
    run that then has ``min_peers`` members or more.
    """

    group: U32
    host: HostName
    port: U16
    min_peers: U16 = 1
    masters: U16 = 1
    """How many masters' addresses it knows."""
    prefetches: bool = False
    """Whether it fetches what its group holds first, and is to be admitted when it says so."""


@dataclass(frozen=True, slots=True)
class Resume:
    """First message on a new connection of a peer that lost its old one."""

    peer: PeerId
    token: bytes
    roster_version: int
    """The newest roster it knows; the master sends what came after."""
    incumbent: bytes = field(default=b"", compare=False)
    """Id of the master that it follows."""


@dataclass(frozen=True, slots=True)
class RoundCount:
    """How many rounds of a kind the run has had."""

    kind: RoundKind
    n: int


RoundCounts = Annotated[tuple[RoundCount, ...], AtMost(len(RoundKind))]


@dataclass(frozen=True, slots=True)
class Return:
    """First message to a master of another incarnation than the one that the peer has followed.

    What the peer knows of the run follows: rosters, outcomes and answers that may not have reached
    everybody, its links, what it has asked for. ``Reported`` ends it.
    """

    peer: PeerId
    token: bytes
    run: bytes
    term: U32
    registration: Register
    """As it came, or would come, as a newcomer."""
    roster_version: int
    """The newest roster it knows; 0: it has not been admitted, as far as it knows."""
    rounds: RoundCounts
    incumbent: bytes
    """Id of the master that it has followed."""
    ratified: int = field(default=0, compare=False)
    """The newest roster of which it knows that a majority of the members before it had it."""
    expected: Expected = NOTHING_EXPECTED
    """What it knows of its group's shared state."""


@dataclass(frozen=True, slots=True)
class KnownRoster:
    """A roster that the master of before has told."""

    roster: Roster
    incumbent: bytes = field(default=b"", compare=False)
    """Id of the master that told it."""


@dataclass(frozen=True, slots=True)
class Reported:
    """End of what a returning peer knows."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The newcomer has what its group holds, or as much as can be had: it may be admitted."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """First and only message of somebody who wants a ``StatusReport`` and no part in the run."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer leaves now."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """What has come from the master was damaged on the way.

    The peer comes back on another connection: that it gives up this one is no sign of its death.
    """


@dataclass(frozen=True, slots=True)
class Flow:
    """What has come from one other member, and what could go to it."""

    peer: PeerId
    received: U32
    """Segments."""
    ready: U32
    """Segments."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one peer is in one started operation: what it has received and what it could send."""

    operation: OperationId
    received: U32
    """Segments."""
    ready: U32
    """Segments."""
    received_bytes: int
    """Also of segments that have arrived in part: on a slow link one may take long. In a
    synchronization also of maps of pieces."""
    flows: Annotated[tuple[Flow, ...], AtMost(FLOWS_MAX)] = ()
    """In a mesh or a star: which of them are whose."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A sign of life, with progress, and with the outcomes and answers that have arrived."""

    progress: Annotated[tuple[Progress, ...], AtMost(PROGRESS_BATCH_MAX)] = ()
    operations: Annotated[tuple[OperationId, ...], AtMost(ACKNOWLEDGED_BATCH_MAX)] = ()
    rounds: Annotated[tuple[RoundId, ...], AtMost(ACKNOWLEDGED_BATCH_MAX)] = ()
    blocked: bool = False
    """Whether all callers are inside calls that wait for other members."""
    roster_version: int = 0
    """The newest roster that has arrived."""
    term: U32 = field(default=0, compare=False)
    """The one that the peer follows: it takes nothing from a master of a lower one any more."""
    proposed: int = field(default=0, compare=False)
    """The last place in that term up to which it has stored all that was ``Proposed``."""


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """The peer's application has made this joint call."""

    round: RoundId


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """The peer has posted its buffers for this operation."""

    operation: OperationId
    descriptor: Descriptor
    eager: bool = False
    """Whether its data goes ahead; otherwise the peer waits for the start."""
    weight: Weight = 0.0
    """Of its contribution to a weighted average."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """The peer lends its shared state to this operation."""

    operation: OperationId
    offer: Offer


@dataclass(frozen=True, slots=True)
class StatesCompared:
    """Answer to ``CompareStates``."""

    operation: OperationId
    difference: Difference


@dataclass(frozen=True, slots=True)
class OperationDone:
    """The peer holds the complete result, with this digest, and waits for the outcome."""

    operation: OperationId
    digest: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The peer's caller left before the operation was done."""

    operation: OperationId
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]


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
class Holdings:
    """Answer to ``HoldingsQuery``."""

    operation: OperationId
    lost: U32
    """How many lost members the question named: only more can be lost by the next one."""
    complete: bool
    """Whether nothing is missing but what the member before the gap can send; it alone may from
    now on."""


# -- master to peer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Where another master of the run listens."""

    host: HostName
    port: U16


Masters = Annotated[tuple[MasterAddress, ...], AtMost(STANDBYS_MAX)]


@dataclass(frozen=True, slots=True)
class Registered:
    """The newcomer's identity. It stays pending until it is ``Admitted``."""

    peer: PeerId
    term: U32
    run: bytes
    token: bytes
    incumbent: bytes = b""
    """Id of the master."""
    standbys: Masters = ()
    """Where to look for a master if this one is gone."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The connection is resumed; everything that was missed follows."""

    term: U32
    incumbent: bytes = b""
    standbys: Masters = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """Not (or no longer) welcome, in words; the master closes the connection.

    ``cause`` is None if this peer was never part of the run.
    """

    cause: RemovalCause | None
    reason: str
    removed_ms: int = 0
    """When it was removed, by the master's clock; means nothing without a cause."""
    now_ms: int = 0
    """The present by the same clock."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The newcomer is a member from this roster on."""

    roster: Roster
    rounds: RoundCounts
    ratified: int = field(default=0, compare=False)
    """The newest roster of which the master knows that a majority of the members before it had it.
    Without that, whoever is admitted into a run that has lost its majority takes it for whole."""


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
    sequence: int = field(default=0, compare=False)
    """Its place among everything that the run has decided."""


@dataclass(frozen=True, slots=True)
class OperationStarted:
    """Every member has asked for the same thing: move the data."""

    operation: OperationId
    weights: Annotated[tuple[Weight, ...], AtMost(PEERS_MAX)] = ()
    """Of a weighted average those of all members, in ring order."""


@dataclass(frozen=True, slots=True)
class SyncStarted:
    """What is elected: whoever is behind fetches it. Told again when it has changed."""

    operation: OperationId
    elected: Elected


@dataclass(frozen=True, slots=True)
class CompareStates:
    """How does the state that you offer differ from that of ``reference``?"""

    operation: OperationId
    reference: PeerId


@dataclass(frozen=True, slots=True)
class OperationEnded:
    """The outcome, the same for all. ``abort`` is None if it was committed."""

    operation: OperationId
    abort: AbortCause | None
    reason: str
    contributors: Peers
    roster_version: int
    """The caller sees this membership when his call returns."""
    sequence: int = field(default=0, compare=False)
    """Its place among everything that the run has decided; 0: it was decided by a closed view."""
    difference: Difference | None = None
    """Of shared states that must not differ."""


@dataclass(frozen=True, slots=True)
class KnownOutcome:
    """An outcome that the master of before has told, or has proposed."""

    outcome: OperationEnded
    told: bool = True
    expected: Expected = NOTHING_EXPECTED
    """Of one that was proposed: see ``Proposed``."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """An answer that the master of before has told, or has proposed."""

    answer: RoundClosed
    told: bool = True


@dataclass(frozen=True, slots=True)
class Proposed:
    """Store this outcome or answer (one of them), and say so at once; nobody acts on it yet.

    It is told once a majority has stored it. Until it is settled, a member reports it to any other
    master.
    """

    place: int
    """Among everything that was proposed in this term."""
    outcome: OperationEnded | None
    answer: RoundClosed | None
    expected: Expected = NOTHING_EXPECTED
    """Of the shared state of the outcome's group, if that commits a synchronization."""


@dataclass(frozen=True, slots=True)
class HoldingsQuery:
    """Members of the operation's ring are lost, some right before you: can it go on for you?"""

    operation: OperationId
    lost: Peers
    """All of them, in ring order."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The operation goes on without these members: send across the gap behind you."""

    operation: OperationId
    lost: Peers


@dataclass(frozen=True, slots=True)
class RoundWaits:
    """Whom the peer's request of this round has been waiting for, and what they do meanwhile."""

    round: RoundId
    waited_s: U32
    whom: str


@dataclass(frozen=True, slots=True)
class OperationWaits:
    """Whom the peer's request of this operation has been waiting for, and what they do.

    Attributes:
        operation: the one that has waited longest.
        waited_s: for how long.
        whom: the members, and what they do.
        alike: some others that wait for the same members, the oldest first.
        alike_count: how many others do.
    """

    operation: OperationId
    waited_s: U32
    whom: str
    alike: Annotated[tuple[OperationId, ...], AtMost(WAITS_NAMED_MAX)] = ()
    alike_count: U32 = 0


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

    now_ms: int = 0
    """The present by the master's clock, which only durations can be taken from."""
    settled: int = field(default=0, compare=False)
    """Everybody has whatever was decided before this place in the sequence."""
    ratified: int = field(default=0, compare=False)
    """The newest roster that a majority of the members before it has acknowledged."""


PeerMessage = (
    Register
    | Resume
    | Return
    | KnownRoster
    | KnownOutcome
    | KnownAnswer
    | Reported
    | Prefetched
    | StatusRequest
    | RunQuery
    | Goodbye
    | Damaged
    | Heartbeat
    | RoundRequest
    | OperationRequest
    | SyncRequest
    | StatesCompared
    | OperationDone
    | Withdraw
    | OutcomeQuery
    | BlockedReply
    | Holdings
    | LinkReport
    | LinksMeasured
    | AddressProbed
)
MasterMessage = (
    Registered
    | LinkPlan
    | DialNewcomers
    | ProbeAddress
    | Undialable
    | Resumed
    | Refused
    | Admitted
    | RosterChanged
    | RoundClosed
    | OperationStarted
    | SyncStarted
    | CompareStates
    | OperationEnded
    | Proposed
    | HoldingsQuery
    | Repair
    | RoundWaits
    | OperationWaits
    | AdmissionWaits
    | BlockedQuery
    | MasterHeartbeat
    | RunIs
    | StatusReport
)
Message = PeerMessage | MasterMessage
