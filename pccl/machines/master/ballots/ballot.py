"""The master's ballot over one operation, whatever it is for.

An operation is committed if and only if every member that has not been lost reported the same
digest; it is aborted as soon as that can no longer happen. Both are final and the same for all.
After a loss it goes on if the members that are left can complete the result. The life cycle:
:mod:`~pccl.protocol.operation`.

A ballot decides; the master announces. There is one kind for collectives
(``collective_ballot``), and one for shared state
(``sync_ballot``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pccl.machines.master.lockstep import Wait
from pccl.machines.repair import Tell
from pccl.protocol.guards.texts import shortened
from pccl.protocol.limits import REASON_BYTES_MAX, Timing
from pccl.protocol.messages import MasterMessage, Progress
from pccl.protocol.operation import Phase, name_peers
from pccl.protocol.shared_state import Difference
from pccl.protocol.types import QUOTES_MEMBERS, AbortCause, OperationId, PeerId, RemovalCause
from pccl.topology.ring_order import Pair


@dataclass(frozen=True, slots=True)
class Start:
    """All members asked for the same thing."""

    weights: tuple[float, ...] = ()
    """Of a weighted average those of all members, in ring order."""


@dataclass(frozen=True, slots=True)
class Commit:
    """All members that are left hold the same result."""


@dataclass(frozen=True, slots=True)
class Abort:
    """There will be no result."""

    cause: AbortCause
    reason: str
    difference: Difference | None = None
    """Of states that must not differ."""

    @property
    def told_reason(self) -> str:
        """What members are told; what members have said is cut, since a master keeps it."""
        cuts = self.cause in QUOTES_MEMBERS
        return shortened(self.reason, REASON_BYTES_MAX) if cuts else self.reason


@dataclass(frozen=True, slots=True)
class Expel:
    """The others go on without these members."""

    peers: tuple[PeerId, ...]
    cause: RemovalCause
    reason: str


Decision = Start | Commit | Abort | Tell | Expel


@dataclass(frozen=True, slots=True)
class Stall:
    """What could go from one member to its neighbour in the ring, and does not arrive."""

    upstream: PeerId
    downstream: PeerId
    ready: int
    """Segments that ``upstream`` could have sent."""
    received: int
    """Segments that ``downstream`` has."""

    @property
    def backlog(self) -> int:
        """How many segments are stuck; not above 0: none."""
        return self.ready - self.received

    def __str__(self) -> str:
        return (
            f"peer {self.downstream} has {self.received} of the {self.ready} segments that "
            f"peer {self.upstream} could send it"
        )


class Ballot(ABC):
    """What the master knows about one undecided operation.

    Args:
        operation: its id.
        members: all members of its view, in ring order.
        opener: who was the first to speak of it.
        now_ns: the present.
        inherited: whether a master before this one may have started it.
    """

    def __init__(
        self,
        operation: OperationId,
        members: tuple[PeerId, ...],
        opener: PeerId,
        now_ns: int,
        *,
        inherited: bool = False,
    ) -> None:
        self.operation = operation
        self.opener = opener
        """Who was the first to speak of it."""
        self.members = members
        """All members of the view, in ring order; also those that were lost since."""
        self.phase = Phase.REQUESTED
        self.opened_ns = now_ns
        """When it was first heard of."""
        self.progress_ns = now_ns
        """When progress was last seen."""
        self._inherited = inherited
        self._loss = ""
        """Who was lost last, and why."""
        self._present = list(members)
        self._digests: dict[PeerId, bytes] = {}
        self._progress: dict[PeerId, Progress] = {}
        self._reported_ns: dict[PeerId, int] = {}
        self._moved_bytes: dict[PeerId, int] = {}
        """The most that each has received so far."""

    # -- what it is about ------------------------------------------------------------------------

    @property
    @abstractmethod
    def what(self) -> str:
        """How its callers know it."""

    @property
    @abstractmethod
    def outlives_view(self) -> bool:
        """Whether it goes on although a member is lost, and its view is closed."""

    @abstractmethod
    def _has_asked(self, peer: PeerId) -> bool:
        """Whether a member has asked for it."""

    @abstractmethod
    def owed_to(self, peer: PeerId) -> Iterator[MasterMessage]:
        """What a member may have missed while its connection was lost."""

    @property
    def survivors(self) -> list[PeerId]:
        """The members that have not been lost, in ring order."""
        return list(self._present)

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """Whose part is in what was committed, in ring order."""
        return self.members

    def requested_by(self) -> list[PeerId]:
        """The members that have asked for it and have not been lost."""
        return [peer for peer in self._present if self._has_asked(peer)]

    def waiting_for(self) -> list[PeerId]:
        """The members whose request (or, once started, done report) is missing."""
        if self.phase is Phase.REQUESTED:
            return [peer for peer in self._present if not self._has_asked(peer)]
        return [peer for peer in self._present if peer not in self._digests]

    def awaited(self, still_ns: int) -> list[PeerId]:
        """Without whom it cannot go on; nothing moves if nothing has since ``still_ns``."""
        return self.waiting_for()

    @property
    def has_company(self) -> bool:
        """Whether the operation has several members.

        A single member waits only for itself.
        """
        return len(self._present) > 1

    def wait(self) -> Wait:
        """What waits, and for whose calls."""
        missing = self.waiting_for() if self.phase is Phase.REQUESTED else ()
        return Wait(self.operation, self.what, tuple(self.requested_by()), tuple(missing))

    def wait_for_start(self) -> list[PeerId]:
        """The members that do nothing before they are told of the start."""
        return list(self._present)

    # -- what members do -------------------------------------------------------------------------

    @abstractmethod
    def done(self, peer: PeerId, digest: bytes, now_ns: int) -> Decision | None:
        """A member holds the complete result."""

    @abstractmethod
    def lose(self, peers: Sequence[PeerId], reason: str, now_ns: int) -> Decision | None:
        """Members are lost: commit if everyone left has the result, or find out if they can."""

    def withdraw(self, peer: PeerId, reason: str) -> Decision:
        """A member's caller has left before it was done."""
        return self._end(Abort(AbortCause.WITHDRAWN, f"peer {peer} withdrew: {reason}"))

    def get_stuck(self, reason: str) -> Decision:
        """The members wait for different things."""
        return self._end(Abort(AbortCause.LOCKSTEP, reason))

    def close_view(self, reason: str) -> Decision:
        """The members go on in another view; nobody is lost."""
        return self._end(Abort(AbortCause.VIEW_CLOSED, reason))

    def report(self, peer: PeerId, progress: Progress, now_ns: int) -> None:
        """A member says how far it is."""
        if progress.received_bytes > self._moved_bytes.get(peer, -1):
            # More than ever: parts of a segment that begin anew on another lane are none.
            self._moved_bytes[peer] = progress.received_bytes
            self.progress_ns = now_ns
        self._progress[peer] = progress
        self._reported_ns[peer] = now_ns

    def received_bytes(self, peer: PeerId) -> int:
        """The most that a member is known to have received."""
        return self._moved_bytes.get(peer, 0)

    # -- time, and links ---------------------------------------------------------------------------

    @abstractmethod
    def look(self, timing: Timing, now_ns: int) -> Decision | None:
        """A tick: is it over for a reason that lies in itself?"""

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """This process slept: nothing has stood still for so long."""
        self.progress_ns = min(self.progress_ns + gap_ns, now_ns)

    def separated(self, broken: Collection[Pair]) -> list[Pair]:
        """The pairs of members that have to talk for this, and cannot."""
        return []

    def stall(self, since_ns: int) -> Stall | None:
        """Where the data is stuck, as far as reports since then tell."""
        return None

    @property
    def follows_ring(self) -> bool:
        """Whether its data goes from each member to the next one, as far as is known."""
        return False

    @property
    def is_forced(self) -> bool:
        """Whether its callers have named the algorithm."""
        return False

    def cannot_talk(self, reason: str) -> Decision:
        """Members that have to talk for the algorithm that was asked for cannot."""
        return self._end(Abort(AbortCause.LINK_BROKEN, reason))

    # -- decisions -----------------------------------------------------------------------------

    def _outcome_if_complete(self) -> Decision | None:
        if self.waiting_for() or not self._present:
            return None
        digests = [self._digests[peer] for peer in self._present]
        if len(set(digests)) == 1:
            return self._end(Commit())
        common = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
        minority = [peer for peer in self._present if self._digests[peer] != common]
        return self._end(
            Abort(
                AbortCause.DIGEST_MISMATCH,
                f"results differ: {name_peers(minority)} computed something else than the others",
            )
        )

    def _drop(self, peers: Sequence[PeerId], reason: str) -> None:
        self._present = [peer for peer in self._present if peer not in peers]
        self._loss = f"{name_peers(list(peers))} lost: {reason}"

    def _give_up(self) -> Decision:
        return self._end(Abort(AbortCause.MEMBER_LOST, self._loss))

    def _end(self, decision: Commit | Abort) -> Decision:
        self.phase = Phase.COMMITTED if isinstance(decision, Commit) else Phase.ABORTED
        return decision
