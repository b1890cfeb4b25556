"""The events that a ``PeerMachine`` takes, and the effects that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.blocks import BufferLengths
from pccl.machines.reachability import AddressTried, MeetPeer, TryAddress
from pccl.machines.reachability import LinkChanged as LinkChanged
from pccl.machines.reachability import LinkMeasurements as LinkMeasurements
from pccl.machines.reachability import ReportUndialable as ReportUndialable
from pccl.machines.results import ReduceResult as ReduceResult
from pccl.machines.results import StoreResult as StoreResult
from pccl.machines.results import SyncResult as SyncResult
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.operation import BlockLengths, Eager, Subset
from pccl.protocol.run_messages import EvidenceKind
from pccl.protocol.shared_state import Difference, Elected, Offer
from pccl.protocol.status_report import Figures
from pccl.protocol.types import NOBODY, Descriptor, Hosts, Member, OperationId, PeerId, Roster
from pccl.protocol.types import Quorum as Quorum
from pccl.protocol.types import RoundKind as RoundKind
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MeshPlan

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinCall:
    """The caller asks to join; with an empty ``host``, peers dial the host that the master sees."""

    call: int
    group: int
    host: str
    port: int
    attempts: int
    """How many attempts to reach a master the peer makes before it gives up."""
    min_peers: int = 1
    """Members that the run must have, this peer included, for its admission."""
    rejoins: bool = False
    """Whether an ``update_topology`` made it, after a loss; the admission counts as its round."""
    masters: int = 1
    """Known addresses of masters."""
    prefetches: bool = False
    """Whether the master may admit this peer only after ``PrefetchDone``."""
    machine: int = 0
    """Hash of its machine and user if it can share memory there; otherwise 0."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class RoundCall:
    """The caller makes a joint call that returns once all members have made it."""

    call: int
    kind: RoundKind
    quorum: Quorum | None = None
    """When it continues without late members; None: never."""


@dataclass(frozen=True, slots=True)
class ReduceCall:
    """The caller starts a collective."""

    call: int
    tag: int
    """The tag of the operation."""
    descriptor: Descriptor
    detached: bool = False
    """Whether no caller waits for the outcome; the peer keeps it until ``Claim``."""
    begun_by: PeerId = NOBODY
    """The incarnation that began the call, for a retry or the next of several operations; or 0."""
    weight: float = 0.0
    """Weight of this peer's contribution to a weighted average."""
    norm: float | None = 0.0
    """L2 norm of that contribution, if the average has a guard; None: not finite."""
    buffers: BufferLengths | None = None
    """The caller's buffers, if their lengths depend on the group."""
    fits: bool = False
    """Whether they fit the group that the caller saw."""
    ring: tuple[PeerId, ...] = ()
    """The only group with which the caller wants to make the call, in ring order; empty: any."""
    among: Subset | None = None
    """The members that make the call, and the caller's tag; None: the whole group."""

    def members_of(self, seen: Roster) -> tuple[PeerId, ...]:
        """Return the members that make the call in a group, in the order of their ranks."""
        return seen.ring if self.among is None else self.among.peers


@dataclass(frozen=True, slots=True)
class SyncCall:
    """The caller wants to make the members' shared states equal, or to verify that they are."""

    call: int
    offer: Offer
    begun_by: PeerId = NOBODY
    """As in ``ReduceCall``."""
    quorum: Quorum | None = None


@dataclass(frozen=True, slots=True)
class StoreCall:
    """The caller asks the run's store. It is no joint call."""

    call: int
    op: msg.StoreOp
    keys: tuple[bytes, ...] = ()
    value: bytes = b""
    expected: bytes = b""


CallEvent = JoinCall | RoundCall | ReduceCall | SyncCall | StoreCall
"""The events that begin a call; each has a number."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The caller reads the outcome of a detached operation."""

    call: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The handle of a detached operation is gone, so no caller will read the outcome."""

    call: int


@dataclass(frozen=True, slots=True)
class LeaveCall:
    """The caller stops waiting for a call: cancelled, timed out, or interrupted with Ctrl-C."""

    call: int
    reason: str


@dataclass(frozen=True, slots=True)
class CallersAsked:
    """The answer to ``AskCallers``: whether all callers wait in calls that have no outcome."""

    query: int
    blocked: bool


@dataclass(frozen=True, slots=True)
class Close:
    """The communicator is closed: the peer sends a goodbye, and its open calls fail."""


@dataclass(frozen=True, slots=True)
class ControlOpened:
    """The shell has a connection to a master that claims to coordinate ``run`` in ``term``."""

    run: bytes
    """The run; the master may not know it yet."""
    term: int
    hosts: Hosts = ()
    """Addresses of this machine that others may dial; empty if this peer declares a host."""


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """The master sent ``message``."""

    message: msg.Message


@dataclass(frozen=True, slots=True)
class ControlClosed:
    """The connection to the master was lost, or an attempt to connect failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class ReduceDone:
    """This peer's result of an operation, or the whole elected state, is complete."""

    operation: OperationId
    digest: bytes
    is_kept: bool = False
    """Whether it is the content digest, after ``KeepResult``."""


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A contribution that ``peer`` had declared as finite has arrived, and is not."""

    operation: OperationId
    peer: PeerId


@dataclass(frozen=True, slots=True)
class ResultFetched:
    """The result for a late call has arrived, or no member has it any more."""

    call: int
    has_arrived: bool


@dataclass(frozen=True, slots=True)
class SyncStarved:
    """No source is left for the missing pieces of the elected state."""

    operation: OperationId
    reason: str


@dataclass(frozen=True, slots=True)
class ComparisonDone:
    """The result of ``CompareSync``."""

    operation: OperationId
    difference: Difference


@dataclass(frozen=True, slots=True)
class PrefetchDone:
    """The prefetch has ended: this peer has the group's state and result, or the available part."""


@dataclass(frozen=True, slots=True)
class HoldingsKnown:
    """The result of ``CloseGap``."""

    operation: OperationId
    lost: int
    """Lost members of the ring."""
    complete: bool


@dataclass(frozen=True, slots=True)
class LeftCommitted:
    """The caller left before it saw that ``operation`` was committed."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class LeftAnswered:
    """The caller left before it saw that its call for a round had returned."""

    kind: RoundKind


@dataclass(frozen=True, slots=True)
class LeftFailed:
    """The caller left before it saw an ``error`` that callers get only once."""

    error: errors.PCCLError


@dataclass(frozen=True, slots=True)
class LeftAdmitted:
    """The caller left before it saw that this peer was admitted."""


@dataclass(frozen=True, slots=True)
class LeavesSoon:
    """This peer will leave the run soon: from now on, members are notified of its rounds."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; ``progress`` is the progress of started operations."""

    progress: tuple[msg.Progress, ...] = ()
    blocked: bool = False
    """Whether all callers wait in calls that have no outcome."""
    busy_ns: int = 0
    """Processor time of the I/O thread since the previous tick."""
    step: int = 0
    """Step of the program, if it reports steps."""
    loss: float | None = None
    """Loss of the program, if it reports one."""
    figures: Figures = ()
    """Other numbers that it reports."""


PeerEvent = (
    JoinCall | RoundCall | ReduceCall | SyncCall | StoreCall | Claim | Forget | LeaveCall |
    CallersAsked | Close | ControlOpened | ControlMessage | ControlClosed | LinkChanged |
    LinkMeasurements | AddressTried | ReduceDone | NotFinite | ResultFetched | SyncStarved |
    ComparisonDone | PrefetchDone | HoldingsKnown | LeftCommitted | LeftAnswered | LeftFailed |
    LeftAdmitted | LeavesSoon | msg.AnnounceVersions | Tick
)  # fmt: skip

# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to the master."""

    message: msg.PeerMessage


@dataclass(frozen=True, slots=True)
class DialControl:
    """Connect to the master after a delay; report ``ControlOpened`` or ``ControlClosed``."""

    delay_ns: int


@dataclass(frozen=True, slots=True)
class CloseControl:
    """Send pending messages, then close the connection to the master; do not report its end."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetLinks:
    """Keep links to exactly these peers, and close all others."""

    peers: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Register the buffers of a call for this operation in a ring; a second one replaces it."""

    call: int
    operation: OperationId
    descriptor: Descriptor
    ring: tuple[PeerId, ...]
    blocks: BlockLengths | None = None
    """The lengths of the own blocks in an exchange."""
    mesh: MeshPlan = EQUAL_MESH
    """Shares and sites of the ring's members, for a mesh."""


@dataclass(frozen=True, slots=True)
class PostSync:
    """Serve the shared state of a call to the members of this operation."""

    call: int
    operation: OperationId
    ring: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class BeginSync:
    """Fetch missing pieces of the elected state, unless already begun; report ``ReduceDone``."""

    operation: OperationId
    elected: Elected


@dataclass(frozen=True, slots=True)
class CompareSync:
    """Compare this peer's state with that of ``reference``; report ``ComparisonDone``."""

    operation: OperationId
    reference: PeerId


@dataclass(frozen=True, slots=True)
class Begin:
    """Move the data of an operation, unless it moves already."""

    operation: OperationId
    eager: Eager = Eager.NOTHING
    """What to send early, before all members are known to have posted the operation."""
    weights: tuple[float, ...] = ()
    """One per member in ring order, for a weighted average."""
    infinite: frozenset[int] = frozenset()
    """The ranks that have declared a contribution that is not finite."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """Fetch the result of an operation that left this peer out; report ``ResultFetched``."""

    call: int
    operation: OperationId
    descriptor: Descriptor
    content: bytes
    """Digest of the values, or of the elected contents."""


@dataclass(frozen=True, slots=True)
class KeepResult:
    """Copy and hash this peer's result for late members; report ``ReduceDone``."""

    operation: OperationId
    descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class CloseGap:
    """Receive the missing data from ``upstream``, because the members in between are lost.

    Do so only if no data is missing that only they could send; report ``HoldingsKnown``.
    """

    operation: OperationId
    lost: int
    upstream: PeerId
    size: int
    """How many members are lost between ``upstream`` and this peer."""


@dataclass(frozen=True, slots=True)
class SendAcross:
    """Send to ``downstream`` what the lost members in between would have sent."""

    operation: OperationId
    downstream: PeerId
    size: int
    """How many members are lost between this peer and ``downstream``."""


@dataclass(frozen=True, slots=True)
class Detach:
    """Release the buffers of a caller that left after completion, and restore the input.

    Members may still need data from this peer, so the operation continues until its ``End``.
    """

    operation: OperationId


@dataclass(frozen=True, slots=True)
class End:
    """End an operation: release its buffers, and restore the input unless committed."""

    operation: OperationId
    committed: bool


@dataclass(frozen=True, slots=True)
class AskCallers:
    """Find out whether all callers are inside calls now; report ``CallersAsked``."""

    query: int


@dataclass(frozen=True, slots=True)
class ReportWait:
    """Report that a call has been waiting for other members for ``waited_s`` seconds."""

    call: int
    what: str
    """The call, as its caller knows it."""
    whom: str
    """The members, in words."""
    waited_s: int
    others: int = 0
    """How many other calls wait for the same members."""


@dataclass(frozen=True, slots=True)
class GiveEvidence:
    """Answer a person's question with an ``EvidenceReply``."""

    query: int
    kind: EvidenceKind


@dataclass(frozen=True, slots=True)
class ForgetEarly:
    """Drop the stored early frames of operations that can no longer be posted here."""


ReturnValue = ReduceResult | SyncResult | StoreResult | bool | None


@dataclass(frozen=True, slots=True)
class ReturnCall:
    """Return ``value`` to the caller.

    The value is a ReduceResult for collectives, a SyncResult for shared state, a StoreResult for
    the store, a bool for PEERS_PENDING, else None.
    """

    call: int
    value: ReturnValue


@dataclass(frozen=True, slots=True)
class RaiseCall:
    """Raise ``error`` in the caller; a ValueError rejects an argument."""

    call: int
    error: errors.PCCLError | ValueError


PeerEffect = (
    Send | DialControl | CloseControl | SetLinks | MeetPeer | Post | PostSync | BeginSync |
    CompareSync | Begin | FetchResult | KeepResult | CloseGap | SendAcross | Detach | End |
    AskCallers | ReportWait | TryAddress | ReportUndialable | GiveEvidence | ForgetEarly |
    ReturnCall | RaiseCall
)  # fmt: skip
