"""Control messages between a peer and its master, as frozen dataclasses.

Field order is the wire order. The codec enforces the range of each integer type, and every other
bound. A peer may repeat requests and done reports after a reconnect. They name their round or
operation, so that the master can answer a second copy from its memory.

These fields mean the same everywhere. ``incumbent`` is the id of a master. ``roster_version`` is
the newest roster that the sender knows; 0: none. ``ratified`` is the newest roster that a majority
of the previous members has. ``sequence`` is the place among all decisions of the run, and
``now_ms`` and ``now_ns`` the time by the master's clock.

The docstrings are the texts of ``docs/protocol/messages.md``: after a change run
``python -m pccl.stress reference``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated

from pccl.protocol.guards.contributions import FlaggedContribution, Norm
from pccl.protocol.handshake.certificates import NO_CERTIFICATE, Certificate
from pccl.protocol.limits import (
    ACKNOWLEDGED_BATCH_MAX,
    DEPARTURE_BYTES_MAX,
    DEPARTURES_MAX,
    FLOWS_MAX,
    PEERS_MAX,
    PROGRESS_BATCH_MAX,
    REASON_BYTES_MAX,
    STANDBYS_MAX,
    STORE_KEY_BYTES_MAX,
    STORE_KEYS_NAMED_MAX,
    STORE_OPEN_MAX,
    STORE_RECEIPTS_MAX,
    STORE_VALUE_BYTES_MAX,
    WAITS_NAMED_MAX,
)
from pccl.protocol.link_messages import AddressIs as AddressIs
from pccl.protocol.link_messages import AddressProbed as AddressProbed
from pccl.protocol.link_messages import AddressQuery as AddressQuery
from pccl.protocol.link_messages import DialNewcomers as DialNewcomers
from pccl.protocol.link_messages import LinkPlan as LinkPlan
from pccl.protocol.link_messages import LinkReport as LinkReport
from pccl.protocol.link_messages import LinksMeasured as LinksMeasured
from pccl.protocol.link_messages import Meet as Meet
from pccl.protocol.link_messages import ProbeAddress as ProbeAddress
from pccl.protocol.link_messages import Undialable as Undialable
from pccl.protocol.operation import BlockLengths, Eager, Subset
from pccl.protocol.publication.versions import AnnounceVersions as AnnounceVersions
from pccl.protocol.publication.versions import CurrentVersion as CurrentVersion
from pccl.protocol.publication.versions import ReaderLives as ReaderLives
from pccl.protocol.publication.versions import Subscribe as Subscribe
from pccl.protocol.publication.versions import Subscribed as Subscribed
from pccl.protocol.run_messages import EvidenceQuery as EvidenceQuery
from pccl.protocol.run_messages import EvidenceReply as EvidenceReply
from pccl.protocol.run_messages import EvidenceReport as EvidenceReport
from pccl.protocol.run_messages import EvidenceRequest as EvidenceRequest
from pccl.protocol.run_messages import MemberProof as MemberProof
from pccl.protocol.run_messages import RunIs as RunIs
from pccl.protocol.run_messages import RunQuery as RunQuery
from pccl.protocol.shared_state import NOTHING_EXPECTED, Difference, Elected, Expected, Offer
from pccl.protocol.status_report import Figures, StatusReport
from pccl.protocol.types import (
    AbortCause,
    AtMost,
    Below,
    Descriptor,
    HostName,
    Hosts,
    Loss,
    OperationId,
    PeerId,
    PeerName,
    Quorum,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
    Weight,
)

U16 = Annotated[int, Below(1 << 16)]
U32 = Annotated[int, Below(1 << 32)]
Peers = Annotated[tuple[PeerId, ...], AtMost(PEERS_MAX)]
Ranks = Annotated[bytes, AtMost(PEERS_MAX // 8)]
"""Some members of a view: bit ``i`` of byte ``i // 8`` is set for rank ``i``."""

StoreKey = Annotated[bytes, AtMost(STORE_KEY_BYTES_MAX)]
StoreValue = Annotated[bytes, AtMost(STORE_VALUE_BYTES_MAX)]
NUMBER_BYTES_MAX = 20
"""A 64-bit number as text."""


class StoreOp(enum.IntEnum):
    """What a request asks of the run's store."""

    FORGET = 0
    """Nothing: only ``open`` matters. No answer."""
    SET = 1
    GET = 2
    """Answered once the key exists."""
    ADD = 3
    """The value is the text of a number, and so is the result."""
    COMPARE_SET = 4
    """Set the value if the present one is ``expected``, or there is none and that is empty."""
    DELETE = 5
    CHECK = 6
    """Do all keys exist now?"""
    WAIT = 7
    """Answered once all keys exist."""
    COUNT = 8
    APPEND = 9

    @property
    def label(self) -> str:
        """The name that users write."""
        return self.name.lower()

    @property
    def names_keys(self) -> bool:
        """Whether a request names keys."""
        return self not in (StoreOp.FORGET, StoreOp.COUNT)


class StoreRefusal(enum.IntEnum):
    """Why the store did not carry out a request."""

    FULL = 1
    MEMBER_FULL = 2
    """The member has written too much."""
    NO_NUMBER = 3
    """The value of the key, or the sum, is no 64-bit number."""
    TOO_LONG = 4
    """The appended value would be."""


@dataclass(frozen=True, slots=True)
class StoreReceipt:
    """A write of a member that may not have the answer."""

    peer: PeerId
    number: int
    """Of its request."""
    sequence: int
    """As in ``StoreChange``."""
    result: Annotated[bytes, AtMost(NUMBER_BYTES_MAX)] = b""
    """The sum of an addition."""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """The last change of a key."""

    sequence: int
    """Place among all changes; the term is in the upper bits."""
    writer: PeerId
    receipts: Annotated[tuple[StoreReceipt, ...], AtMost(STORE_RECEIPTS_MAX)] = ()
    """Writes of this key that another master must not repeat."""


# -- peer to master ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """First message of a newcomer: its group, and where peers can dial it."""

    group: U32
    host: HostName
    """If empty, the address that the master sees."""
    port: U16
    min_peers: U16 = 1
    """Members of the smallest run that it joins."""
    masters: U16 = 1
    """Master addresses that it knows."""
    prefetches: bool = False
    """It is admitted only after ``Prefetched``."""
    machine: U16 = 0
    """Hash of machine and user if it can share memory there; otherwise 0."""
    name: PeerName = ""
    hosts: Hosts = ()
    """Its own addresses; empty if ``host`` says all."""


@dataclass(frozen=True, slots=True)
class Resume:
    """First message after a lost connection."""

    peer: PeerId
    roster_version: int
    incumbent: bytes = field(default=b"", compare=False)
    hosts: Hosts = field(default=(), compare=False)
    """Its addresses now, as in ``Register``."""


@dataclass(frozen=True, slots=True)
class RoundCount:
    """Number of rounds of one kind that the run has had."""

    kind: RoundKind
    n: int


RoundCounts = Annotated[tuple[RoundCount, ...], AtMost(len(RoundKind))]


@dataclass(frozen=True, slots=True)
class Return:
    """First message to another incarnation of the master. Begins a report, until ``Reported``.

    The report has rosters, outcomes and answers that other members may lack, links, and requests.
    """

    peer: PeerId
    run: bytes
    term: U32
    registration: Register
    roster_version: int
    rounds: RoundCounts
    incumbent: bytes
    """The master that the peer followed."""
    ratified: int = field(default=0, compare=False)
    expected: Expected = NOTHING_EXPECTED
    """Expected shared state of its group."""


@dataclass(frozen=True, slots=True)
class KnownRoster:
    """Report: a roster that a master has sent."""

    roster: Roster
    incumbent: bytes = field(default=b"", compare=False)
    """That master."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The report is complete."""


@dataclass(frozen=True, slots=True)
class Prefetched:
    """The newcomer has fetched what it could of its group's state."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """A process outside the run asks for a ``StatusReport``; its only message."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer leaves the run."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A message from the master was damaged; the peer reconnects."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Progress between two members in one operation."""

    peer: PeerId
    received: U32
    """Segments received from this peer."""
    ready: U32
    """Segments ready to be sent to this peer."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one peer in one started operation."""

    operation: OperationId
    received: U32
    """Received segments; in a synchronization pieces."""
    ready: U32
    """Segments ready to be sent."""
    received_bytes: int
    """Received bytes, also of incomplete segments, because one may take long on a slow link. In a
    synchronization also bytes of maps."""
    flows: Annotated[tuple[Flow, ...], AtMost(FLOWS_MAX)] = ()
    """In a mesh or a star: the same for each other member."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The peer lives. Progress, and the ended operations and rounds that it knows."""

    progress: Annotated[tuple[Progress, ...], AtMost(PROGRESS_BATCH_MAX)] = ()
    operations: Annotated[tuple[OperationId, ...], AtMost(ACKNOWLEDGED_BATCH_MAX)] = ()
    rounds: Annotated[tuple[RoundId, ...], AtMost(ACKNOWLEDGED_BATCH_MAX)] = ()
    blocked: bool = False
    """All its callers wait for other members."""
    roster_version: int = 0
    term: U32 = field(default=0, compare=False)
    """It ignores masters of lower terms."""
    proposed: int = field(default=0, compare=False)
    """It has stored each ``Proposed`` of this term up to this place."""
    step: int = field(default=0, compare=False)
    """Step that its program reports, otherwise 0."""
    loss: Loss | None = field(default=None, compare=False)
    """Loss that its program reports."""
    figures: Figures = field(default=(), compare=False)
    """Other numbers that its program reports."""
    sent_ns: int = field(default=0, compare=False)
    """Time by its clock, which the master returns."""


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """The peer has made this joint call."""

    round: RoundId
    quorum: Quorum | None = None
    """When the round closes without late members; nil: never."""
    leaves: bool = False
    """The peer will leave soon: notify the members that are missing."""


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """The peer has posted its buffers for this operation."""

    operation: OperationId
    descriptor: Descriptor
    eager: Eager = Eager.NOTHING
    """What it sends before the start."""
    weight: Weight = 0.0
    """Of its contribution to a weighted average."""
    norm: Norm | None = 0.0
    """Of its contribution, if guarded; nil: not finite."""
    participants: Ranks = b""
    """The members for which it has posted them, after ``OperationNarrowed``."""
    blocks: BlockLengths | None = None
    """The lengths of its blocks in an exchange; nil: another collective."""
    among: Subset | None = None
    """Its members; nil: all of the view."""


@dataclass(frozen=True, slots=True)
class SyncRequest:
    """The peer offers its shared state to this synchronization."""

    operation: OperationId
    offer: Offer
    quorum: Quorum | None = None
    """When it continues without late members; nil: never."""


@dataclass(frozen=True, slots=True)
class StatesCompared:
    """Answer to ``CompareStates``."""

    operation: OperationId
    difference: Difference


@dataclass(frozen=True, slots=True)
class OperationDone:
    """The peer has the complete result."""

    operation: OperationId
    digest: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The caller left before the result was complete."""

    operation: OperationId
    reason: Annotated[str, AtMost(REASON_BYTES_MAX)]
    among: Subset | None = None
    """As in ``OperationRequest``."""


@dataclass(frozen=True, slots=True)
class OutcomeQuery:
    """Asks for the outcome after the caller left when this peer was done."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A member asks the run's store."""

    number: int
    op: StoreOp
    keys: Annotated[tuple[StoreKey, ...], AtMost(STORE_KEYS_NAMED_MAX)] = ()
    value: StoreValue = b""
    expected: StoreValue = b""
    open: Annotated[tuple[int, ...], AtMost(STORE_OPEN_MAX)] = ()
    """All unanswered requests. The master forgets the other ones."""


@dataclass(frozen=True, slots=True)
class KnownEntry:
    """Report: a key of the store, as the peer last wrote or read it."""

    key: StoreKey
    value: StoreValue | None
    """Nil if it was deleted."""
    change: StoreChange


@dataclass(frozen=True, slots=True)
class BlockedReply:
    """Answer to ``BlockedQuery``: no, too, while a handle is open or its outcome is unread."""

    query: U32
    """0: nobody asked; a late member makes calls again."""
    blocked: bool


@dataclass(frozen=True, slots=True)
class Holdings:
    """Answer to ``HoldingsQuery``."""

    operation: OperationId
    lost: U32
    """Lost members in the query."""
    complete: bool
    """The member before the gap can send all missing data; from now on only it may."""


# -- master to peer ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Address of another master of the run."""

    host: HostName
    port: U16


Masters = Annotated[tuple[MasterAddress, ...], AtMost(STANDBYS_MAX)]


@dataclass(frozen=True, slots=True)
class Registered:
    """The identity of the newcomer, which now waits."""

    peer: PeerId
    term: U32
    run: bytes
    incumbent: bytes = b""
    standbys: Masters = ()
    """Addresses of other masters."""
    certificate: Certificate = field(default=NO_CERTIFICATE, compare=False)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The master resumes the connection, or the run in this term. Missed messages follow."""

    term: U32
    incumbent: bytes = b""
    standbys: Masters = ()
    certificate: Certificate = field(default=NO_CERTIFICATE, compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """The peer is not, or no longer, part of the run. The connection is closed."""

    cause: RemovalCause | None
    """Nil if it was never part of the run."""
    reason: str
    removed_ms: int = 0
    """Time of the removal."""
    now_ms: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """The newcomer is a member from this roster on."""

    roster: Roster
    rounds: RoundCounts
    ratified: int = field(default=0, compare=False)
    expected: Expected = NOTHING_EXPECTED
    """A later master may learn it from the newcomer alone."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Part of ``RosterChanged``: why a member is gone."""

    peer: PeerId
    cause: RemovalCause
    reason: Annotated[str, AtMost(DEPARTURE_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class RosterChanged:
    """The members of the run have changed."""

    roster: Roster
    departures: Annotated[tuple[Departure, ...], AtMost(DEPARTURES_MAX)] = field(
        default=(), compare=False
    )
    """For people; it may lack removals."""


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """The answer of a round, the same for all members."""

    round: RoundId
    roster_version: int
    """The roster that callers see now."""
    pending: bool
    """Newcomers are waiting."""
    lockstep: str = ""
    """Why there is no answer; otherwise empty."""
    sequence: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class OperationNarrowed:
    """The operation continues with these participants: post buffers for them, and request again."""

    operation: OperationId
    participants: Ranks


@dataclass(frozen=True, slots=True)
class OperationStarted:
    """All participants have requested the same operation: move the data."""

    operation: OperationId
    weights: Annotated[tuple[Weight, ...], AtMost(PEERS_MAX)] = ()
    """Of all participants in a weighted average, in ring order."""
    flagged: Annotated[tuple[FlaggedContribution, ...], AtMost(PEERS_MAX)] = ()
    """Untrusted contributions."""


@dataclass(frozen=True, slots=True)
class SyncStarted:
    """The elected state, to fetch if it is missing. Sent again after each change."""

    operation: OperationId
    elected: Elected


@dataclass(frozen=True, slots=True)
class CompareStates:
    """Where does the peer's state differ from that of this member?"""

    operation: OperationId
    reference: PeerId


@dataclass(frozen=True, slots=True)
class OperationEnded:
    """The outcome of an operation, the same for all members."""

    operation: OperationId
    abort: AbortCause | None
    """Nil if it is committed."""
    reason: str
    contributors: Peers
    roster_version: int
    """The roster that callers see now."""
    sequence: int = field(default=0, compare=False)
    """0 if a closed view decided it."""
    difference: Difference | None = None
    """Where shared states differ that must be equal."""
    weights: Annotated[tuple[Weight, ...], AtMost(PEERS_MAX)] = ()
    """Of the contributors to a weighted average, for late members."""
    elected: Elected | None = None
    """The elected state, for late members of a synchronization."""
    digest: bytes = b""
    """Of the values, for late members."""


@dataclass(frozen=True, slots=True)
class KnownOutcome:
    """Report: an outcome that other members may lack."""

    outcome: OperationEnded
    told: bool = True
    """False if it was only ``Proposed``."""
    expected: Expected = NOTHING_EXPECTED


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """Report: the answer of a round that other members may lack."""

    answer: RoundClosed
    told: bool = True


@dataclass(frozen=True, slots=True)
class Proposed:
    """Store this outcome or answer, acknowledge it at once, and do not act on it yet.

    The master sends it as a decision once a majority has stored it. Without outcome and answer, the
    acknowledgement alone matters.
    """

    place: int
    """Its place among all proposals of this term."""
    outcome: OperationEnded | None
    answer: RoundClosed | None
    expected: Expected = NOTHING_EXPECTED
    """Of the group after this outcome."""


@dataclass(frozen=True, slots=True)
class HoldingsQuery:
    """Members right before this peer are lost. Can the operation continue?"""

    operation: OperationId
    lost: Peers
    """All lost members, in ring order."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The operation continues without these members: send across the gap."""

    operation: OperationId
    lost: Peers


@dataclass(frozen=True, slots=True)
class RoundWaits:
    """Which members a round waits for, and what these do."""

    round: RoundId
    waited_s: U32
    whom: str


@dataclass(frozen=True, slots=True)
class RoundAwaits:
    """The members that have made this joint call need yours now; or newcomers wait for it.

    Enough members have made it, and the grace runs. Or one of them will leave soon.
    """

    round: RoundId
    newcomers: bool = False
    """Whether only newcomers wait, which are ready for their admission."""


@dataclass(frozen=True, slots=True)
class OperationWaits:
    """The same for the operation with the longest wait."""

    operation: OperationId
    waited_s: U32
    whom: str
    alike: Annotated[tuple[OperationId, ...], AtMost(WAITS_NAMED_MAX)] = ()
    """Others that wait for the same members."""
    alike_count: U32 = 0


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """Answer to ``StoreRequest``."""

    number: int
    refusal: StoreRefusal | None = None
    done: bool = True
    """Set, deleted, or all keys exist."""
    value: StoreValue | None = None
    """The value, sum or count. Not what the peer has just set."""
    change: StoreChange | None = None
    """Of the key; nil if it has never existed."""


@dataclass(frozen=True, slots=True)
class AdmissionWaits:
    """Why the newcomer is not admitted yet."""

    waited_s: U32
    whom: str


@dataclass(frozen=True, slots=True)
class BlockedQuery:
    """Do all callers wait for other members now?"""

    query: U32


@dataclass(frozen=True, slots=True)
class MasterHeartbeat:
    """The master lives."""

    now_ns: int = 0
    settled: int = field(default=0, compare=False)
    """All members have the decisions before this place."""
    ratified: int = field(default=0, compare=False)
    echo_ns: int = field(default=0, compare=False)
    """``sent_ns`` of the peer's last heartbeat; 0: none since the master's last one."""
    held_ns: int = field(default=0, compare=False)
    """Time since that arrived."""


PeerMessage = (
    Register
    | Resume
    | Return
    | KnownRoster
    | KnownOutcome
    | KnownAnswer
    | KnownEntry
    | Reported
    | Prefetched
    | StatusRequest
    | RunQuery
    | EvidenceRequest
    | EvidenceReply
    | AddressQuery
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
    | StoreRequest
    | BlockedReply
    | Holdings
    | LinkReport
    | LinksMeasured
    | AddressProbed
    | AnnounceVersions
    | Subscribe
    | ReaderLives
)
MasterMessage = (
    Registered
    | LinkPlan
    | DialNewcomers
    | Meet
    | ProbeAddress
    | Undialable
    | Resumed
    | Refused
    | Admitted
    | RosterChanged
    | RoundClosed
    | OperationNarrowed
    | OperationStarted
    | SyncStarted
    | CompareStates
    | OperationEnded
    | Proposed
    | HoldingsQuery
    | Repair
    | RoundWaits
    | RoundAwaits
    | OperationWaits
    | StoreAnswer
    | AdmissionWaits
    | BlockedQuery
    | MasterHeartbeat
    | RunIs
    | EvidenceQuery
    | EvidenceReport
    | StatusReport
    | AddressIs
    | Subscribed
    | CurrentVersion
)
Message = PeerMessage | MasterMessage
