"""What goes into a ``PeerMachine`` (events) and what comes out of it (effects)."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.machines.reachability import AddressTried, TryAddress
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.shared_state import Difference, Elected, Offer
from pccl.protocol.types import (
    NOBODY,
    Algorithm,
    Descriptor,
    MeasuredLink,
    Member,
    OperationId,
    PeerId,
    RoundKind,
)

# -- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinCall:
    """The caller wants to join; ``host`` empty: the address that the master sees."""

    call: int
    group: int
    host: str
    port: int
    attempts: int
    """How often to try to reach a master before giving up."""
    min_peers: int = 1
    """How many members the run must have once this peer is one of them."""
    rejoins: bool = False
    """Whether it is an ``update_topology`` that brings a lost member back: it counts as the call
    that the round which admits the peer satisfies."""
    masters: int = 1
    """How many masters' addresses are known."""
    prefetches: bool = False
    """Whether it wants to be admitted only after ``PrefetchDone``."""


@dataclass(frozen=True, slots=True)
class RoundCall:
    """The caller makes a joint call that all members answer together."""

    call: int
    kind: RoundKind


@dataclass(frozen=True, slots=True)
class ReduceCall:
    """The caller wants an operation: a reduce, a broadcast, a barrier."""

    call: int
    tag: int
    descriptor: Descriptor
    detached: bool = False
    """Nobody waits for the outcome: it is kept until ``Claim``."""
    begun_by: PeerId = NOBODY
    """The incarnation of this peer that began the call, if this goes on with it: another attempt,
    or the next of several operations; 0: it begins now."""
    weight: float = 0.0
    """Of the own contribution to a weighted average."""


@dataclass(frozen=True, slots=True)
class SyncCall:
    """The caller wants the members' shared states to be equal, or to know whether they are."""

    call: int
    offer: Offer
    begun_by: PeerId = NOBODY
    """As of ``ReduceCall``."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The caller of a detached operation looks at its outcome."""

    call: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody will ever look at the outcome of a detached operation."""

    call: int


@dataclass(frozen=True, slots=True)
class LeaveCall:
    """The caller does not wait any longer (cancelled, out of time, Ctrl-C)."""

    call: int
    reason: str


@dataclass(frozen=True, slots=True)
class CallersAsked:
    """What ``AskCallers`` wanted to know."""

    query: int
    blocked: bool


@dataclass(frozen=True, slots=True)
class Close:
    """The communicator is closed: say goodbye, fail what is open."""


@dataclass(frozen=True, slots=True)
class ControlOpened:
    """The shell has a connection to a master, which says to coordinate ``run`` in ``term``.

    It may not know yet which run that is.
    """

    run: bytes
    term: int


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """The master has sent something."""

    message: msg.Message


@dataclass(frozen=True, slots=True)
class ControlClosed:
    """The connection to the master is gone, or an attempt to make one has failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The link to a peer is up (``reason`` None) or not."""

    peer: PeerId
    reason: str | None


@dataclass(frozen=True, slots=True)
class LinkMeasurements:
    """What the links can do, as far as was seen; also those that are what they were."""

    links: tuple[MeasuredLink, ...]


@dataclass(frozen=True, slots=True)
class ReduceDone:
    """The own result of an operation is complete; of shared state: all that is elected is here."""

    operation: OperationId
    digest: bytes


@dataclass(frozen=True, slots=True)
class SyncStarved:
    """Nobody is left who gives what is missing of the elected state."""

    operation: OperationId
    reason: str


@dataclass(frozen=True, slots=True)
class ComparisonDone:
    """What ``CompareSync`` has come to."""

    operation: OperationId
    difference: Difference


@dataclass(frozen=True, slots=True)
class PrefetchDone:
    """What the group holds is here, or as much of it as can be had."""


@dataclass(frozen=True, slots=True)
class HoldingsKnown:
    """What ``CloseGap`` has come to."""

    operation: OperationId
    lost: int
    """How many members of its ring are lost."""
    complete: bool


@dataclass(frozen=True, slots=True)
class LeftCommitted:
    """The caller left without noticing that the operation had been committed."""

    operation: OperationId


@dataclass(frozen=True, slots=True)
class LeftAnswered:
    """The caller left without noticing that his call of a round had returned."""

    kind: RoundKind


@dataclass(frozen=True, slots=True)
class LeftFailed:
    """The caller left without noticing that his call had raised something that is told once."""

    error: errors.PCCLError


@dataclass(frozen=True, slots=True)
class LeftAdmitted:
    """The caller left without noticing that he had been admitted."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; ``progress`` is what the data plane knows about started operations."""

    progress: tuple[msg.Progress, ...] = ()
    blocked: bool = False
    """Whether all callers are inside calls."""
    busy_ns: int = 0
    """Processor time of the I/O thread since the tick before."""


PeerEvent = (
    JoinCall
    | RoundCall
    | ReduceCall
    | SyncCall
    | Claim
    | Forget
    | LeaveCall
    | CallersAsked
    | Close
    | ControlOpened
    | ControlMessage
    | ControlClosed
    | LinkChanged
    | LinkMeasurements
    | AddressTried
    | ReduceDone
    | SyncStarved
    | ComparisonDone
    | PrefetchDone
    | HoldingsKnown
    | LeftCommitted
    | LeftAnswered
    | LeftFailed
    | LeftAdmitted
    | Tick
)

# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to the master."""

    message: msg.PeerMessage


@dataclass(frozen=True, slots=True)
class DialControl:
    """Connect to the master after a delay; report ControlOpened or ControlClosed."""

    delay_ns: int


@dataclass(frozen=True, slots=True)
class CloseControl:
    """Close the connection to the master after what was sent; its end is not reported."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetLinks:
    """Keep links to exactly these peers: dial the elders among them, accept the others."""

    peers: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Post:
    """Post the buffers of a call under this operation, for the ring of its view."""

    call: int
    operation: OperationId
    descriptor: Descriptor
    ring: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class PostSync:
    """Lend the shared state of a call to this operation: whoever asks for pieces gets them."""

    call: int
    operation: OperationId
    ring: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class BeginSync:
    """This is elected: fetch what is missing, unless that is under way; report ReduceDone."""

    operation: OperationId
    elected: Elected


@dataclass(frozen=True, slots=True)
class CompareSync:
    """Find out how the own state differs from that of ``reference``; report StatesCompared."""

    operation: OperationId
    reference: PeerId


@dataclass(frozen=True, slots=True)
class Begin:
    """Everybody has posted: move the data, unless it moves already."""

    operation: OperationId
    ahead: bool = False
    """It is small: move the data although others may not have posted."""
    weights: tuple[float, ...] = ()
    """Of a weighted average those of all members, in ring order."""


@dataclass(frozen=True, slots=True)
class CloseGap:
    """The members right before this one are lost: take what is missing from ``upstream``.

    Do so if all is here that only they could send; report HoldingsKnown.
    """

    operation: OperationId
    lost: int
    upstream: PeerId
    size: int
    """How many are lost between the two."""


@dataclass(frozen=True, slots=True)
class SendAcross:
    """The members right behind this one are lost: send what they would send to ``downstream``."""

    operation: OperationId
    downstream: PeerId
    size: int
    """How many are lost between the two."""


@dataclass(frozen=True, slots=True)
class Detach:
    """The caller leaves after his result was complete: free his buffers, restore the input.

    The others may still need what this peer has to send, so the operation goes on until its End.
    """

    operation: OperationId


@dataclass(frozen=True, slots=True)
class End:
    """The operation is over: free its buffers, and restore the input unless committed."""

    operation: OperationId
    committed: bool


@dataclass(frozen=True, slots=True)
class AskCallers:
    """Are all callers inside calls right now? Report CallersAsked."""

    query: int


@dataclass(frozen=True, slots=True)
class ReportWait:
    """A call has been waiting for others for a while; people may want to know."""

    text: str
    waited_s: int


@dataclass(frozen=True, slots=True)
class ReportUndialable:
    """Nobody can dial this peer: people want to know, and what to do about it."""

    text: str


@dataclass(frozen=True, slots=True)
class ForgetEarly:
    """Views were closed: forget the frames that are kept for operations which can't come now."""


@dataclass(frozen=True, slots=True)
class ReduceResult:
    """What a committed operation tells its caller."""

    operation: OperationId
    contributors: tuple[PeerId, ...]
    attempts: int = 1
    algorithm: Algorithm = Algorithm.RING
    weights: tuple[float, ...] = ()
    """Of a weighted average those of the contributors."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What a committed synchronization tells its caller."""

    operation: OperationId
    elected: Elected
    members: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class ReturnCall:
    """A call returns.

    ``value``: ReduceResult for reduces, SyncResult for shared state, bool for PEERS_PENDING, else
    None.
    """

    call: int
    value: ReduceResult | SyncResult | bool | None


@dataclass(frozen=True, slots=True)
class RaiseCall:
    """A call raises; ValueError: it asked for what cannot be."""

    call: int
    error: errors.PCCLError | ValueError


PeerEffect = (
    Send
    | DialControl
    | CloseControl
    | SetLinks
    | Post
    | PostSync
    | BeginSync
    | CompareSync
    | Begin
    | CloseGap
    | SendAcross
    | Detach
    | End
    | AskCallers
    | ReportWait
    | TryAddress
    | ReportUndialable
    | ForgetEarly
    | ReturnCall
    | RaiseCall
)
