"""The base class of the master's ballots: the vote over one operation.

A ballot commits an operation if and only if every remaining member reports the same digest. It
aborts the operation as soon as that is impossible. Each outcome is final and the same for all.
After a loss, the operation continues if the remaining members can complete the result.
:mod:`~pccl.protocol.operation` describes the life cycle.

A ballot decides, and ``OpenBallots`` carries out the decision. ``collective_ballot`` is for
collectives, and ``sync_ballot`` for shared state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pccl.machines.master.ballots.arrivals import Arrivals
from pccl.machines.master.lockstep import Wait
from pccl.machines.repair import Tell
from pccl.protocol.guards.contributions import FlaggedContribution
from pccl.protocol.guards.texts import shortened
from pccl.protocol.limits import REASON_BYTES_MAX, Timing
from pccl.protocol.messages import MasterMessage, Progress
from pccl.protocol.operation import Phase, Subset, name_peers
from pccl.protocol.shared_state import Difference
from pccl.protocol.types import (
    QUOTES_MEMBERS,
    AbortCause,
    OperationId,
    PeerId,
    Quorum,
    RemovalCause,
)
from pccl.topology.ring_order import Pair


@dataclass(frozen=True, slots=True)
class Start:
    """The operation starts, because all members have made the same request."""

    weights: tuple[float, ...] = ()
    """The weights of all members in ring order, for a weighted average."""
    flagged: tuple[FlaggedContribution, ...] = ()
    """The contributions that its guard does not trust."""


@dataclass(frozen=True, slots=True)
class Commit:
    """The operation is committed, because all remaining members hold the same result."""


@dataclass(frozen=True, slots=True)
class Abort:
    """The operation ends without a result."""

    cause: AbortCause
    reason: str
    difference: Difference | None = None
    """How shared states that must be equal differ."""

    @property
    def told_reason(self) -> str:
        """The reason that members receive; cut if it quotes members, since a master keeps it."""
        cuts = self.cause in QUOTES_MEMBERS
        return shortened(self.reason, REASON_BYTES_MAX) if cuts else self.reason


@dataclass(frozen=True, slots=True)
class Expel:
    """The master removes these members, and the rest continues without them."""

    peers: tuple[PeerId, ...]
    cause: RemovalCause
    reason: str


Decision = Start | Commit | Abort | Tell | Expel


@dataclass(frozen=True, slots=True)
class Stall:
    """Segments that one member could send to another one, and that do not arrive."""

    upstream: PeerId
    downstream: PeerId
    ready: int
    """Segments that ``upstream`` could have sent."""
    received: int
    """Segments that ``downstream`` has."""

    @property
    def backlog(self) -> int:
        """How many segments are stuck; 0 or less if none is."""
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
        members: all its members, in the order of their ranks.
        opener: the member that sent the first message about it.
        now_ns: current time.
        inherited: whether an earlier master may have started it.
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
        """The member that sent the first message about the operation."""
        self.members = members
        """All its members in the order of their ranks, lost members included."""
        self.among: Subset | None = None
        """Set if these are only some members of the view."""
        self.phase = Phase.REQUESTED
        self.opened_ns = now_ns
        """When the first message about the operation arrived."""
        self.progress_ns = now_ns
        """When the operation last made progress."""
        self.latest, self.latest_ns = opener, now_ns
        """The member whose request came last, and when it came."""
        self._inherited = inherited
        self._loss = ""
        """The members that were lost last, and why."""
        self.participants = members
        """The members that the operation has not left out, in ring order, lost ones included."""
        self.survivors = list(members)
        """The participants that have not been lost, in ring order; a loss replaces the list."""
        self.left_out: list[PeerId] = []
        """The late members that the operation continues without, except lost ones."""
        self._enough_ns: int | None = None
        """Since when enough members have made the call."""
        self._woke_ns = now_ns
        """When this process last woke up from a sleep."""
        self._digests: dict[PeerId, bytes] = {}
        """The survivors that are done -> their digests."""
        self._progress: dict[PeerId, Progress] = {}
        self._reported_ns: dict[PeerId, int] = {}
        self._moved_bytes: dict[PeerId, int] = {}
        """Member -> the highest number of received bytes that it has reported."""

    # -- what it is about ------------------------------------------------------------------------

    @property
    @abstractmethod
    def what(self) -> str:
        """The call, as its callers know it."""

    @property
    def tensor_bytes(self) -> int:
        """Size of each member's tensor in bytes; 0 if the operation has none."""
        return 0

    @property
    @abstractmethod
    def outlives_view(self) -> bool:
        """Whether the operation continues after a loss, although its view is closed."""

    @property
    def ends_with_view(self) -> bool:
        """Whether the operation ends if its view is closed by the loss of another member."""
        return self.among is not None and not self.outlives_view

    @property
    def quorum(self) -> Quorum | None:
        """The quorum in the requests so far; None: the operation waits for all members."""
        return None

    @property
    def concerned(self) -> list[PeerId]:
        """The members that must learn the outcome, in ring order."""
        there = {*self.survivors, *self.left_out}
        return [peer for peer in self.members if peer in there]

    @abstractmethod
    def _has_asked(self, peer: PeerId) -> bool:
        """Whether a member has requested the operation."""

    @abstractmethod
    def owed_to(self, peer: PeerId) -> Iterator[MasterMessage]:
        """Yield what a member may have missed while its connection was lost."""

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """The members whose contributions are in a committed result, in ring order."""
        return self.participants

    def requested_by(self) -> list[PeerId]:
        """Return the remaining members that have requested the operation."""
        return [peer for peer in self.survivors if self._has_asked(peer)]

    def waiting_for(self) -> list[PeerId]:
        """Return the members whose request (or, once started, done report) is missing."""
        if self.phase is Phase.REQUESTED:
            return [peer for peer in self.survivors if not self._has_asked(peer)]
        return [peer for peer in self.survivors if peer not in self._digests]

    def awaited(self, still_ns: int) -> list[PeerId]:
        """Return members that the operation waits for; more without progress since ``still_ns``."""
        return self.waiting_for()

    @property
    def has_company(self) -> bool:
        """Whether the operation has several remaining members.

        A single member waits only for itself.
        """
        return len(self.survivors) > 1

    def wait(self) -> Wait:
        """Return the operation as a ``Wait`` for the members whose requests are missing."""
        has_begun = self.phase is not Phase.REQUESTED or self.goes_on_by_itself
        missing = (peer for peer in self.survivors if not (has_begun or self._has_asked(peer)))
        return Wait(self.operation, self.what, tuple(self.requested_by()), tuple(missing))

    def wait_for_start(self) -> list[PeerId]:
        """Return the members that do nothing before they receive the start."""
        return list(self.survivors)

    # -- without all members ---------------------------------------------------------------------

    @property
    def lags_ns(self) -> list[int | None]:
        """Each member's delay after the quorum; None: the member was left out."""
        return []

    def _lags_of(self, asked_ns: Iterable[int]) -> list[int | None]:
        """Return the lags of requests at these times, and of the members that were left out."""
        since_ns = self.opened_ns if self._enough_ns is None else self._enough_ns
        lags_ns: list[int | None] = [None for _ in self.left_out]
        return [*lags_ns, *(max(0, at_ns - since_ns) for at_ns in asked_ns)]

    def go_on(self) -> Decision | None:
        """Continue without the members that have not made the call."""
        return None

    @property
    def goes_on_by_itself(self) -> bool:
        """Whether the operation can begin without a further call."""
        quorum = self.quorum
        enough = quorum is not None and len(self.requested_by()) >= quorum.of(len(self.survivors))
        return self._is_narrowed or enough

    def goes_on_ns(self, arrivals: Arrivals) -> int | None:
        """Return when the operation continues without the members that have not made the call.

        Returns:
            None if it waits for all, if all or too few have made it, or if it has continued.
        """
        quorum = self.quorum
        if quorum is None or self.phase is not Phase.REQUESTED or self._is_narrowed:
            return None
        if len(self.requested_by()) == len(self.survivors) or not self.goes_on_by_itself:
            return None
        if self._enough_ns is None:
            self._enough_ns = max(self.latest_ns, self._woke_ns)
        return arrivals.goes_on_ns(quorum, self._enough_ns)

    @property
    def _is_narrowed(self) -> bool:
        return len(self.participants) < len(self.members)

    def _leave_out(self, missing: Collection[PeerId]) -> None:
        self.participants = tuple(peer for peer in self.members if peer not in missing)
        self.left_out = [peer for peer in self.survivors if peer in missing]
        self.survivors = [peer for peer in self.survivors if peer not in missing]

    # -- what members do -------------------------------------------------------------------------

    @abstractmethod
    def done(self, peer: PeerId, digest: bytes, now_ns: int) -> Decision | None:
        """Record that a member holds the complete result."""

    @abstractmethod
    def lose(self, peers: Sequence[PeerId], reason: str, now_ns: int) -> Decision | None:
        """Drop lost members; commit if the rest has the result, else repair, continue or abort."""

    def withdraw(self, peer: PeerId, reason: str) -> Decision:
        """Abort, because a member's caller left before its result was complete."""
        return self._end(Abort(AbortCause.WITHDRAWN, f"peer {peer} withdrew: {reason}"))

    def get_stuck(self, reason: str) -> Decision:
        """Abort, because the members wait in different calls."""
        return self._end(Abort(AbortCause.LOCKSTEP, reason))

    def close_view(self, reason: str) -> Decision:
        """Abort, because the members continue in another view; no member is lost."""
        return self._end(Abort(AbortCause.VIEW_CLOSED, reason))

    def report(self, peer: PeerId, progress: Progress, now_ns: int) -> None:
        """Record the progress that a member reports."""
        if progress.received_bytes > self._moved_bytes.get(peer, -1):
            # Only a new maximum is progress: a segment may begin again on another lane.
            self._moved_bytes[peer] = progress.received_bytes
            self.progress_ns = now_ns
        self._progress[peer] = progress
        self._reported_ns[peer] = now_ns

    def received_bytes(self, peer: PeerId) -> int:
        """Return the highest number of received bytes that a member has reported."""
        return self._moved_bytes.get(peer, 0)

    # -- time, and links ---------------------------------------------------------------------------

    @abstractmethod
    def look(self, timing: Timing, now_ns: int) -> Decision | None:
        """Return a decision, at a tick, if a deadline of the operation itself has passed."""

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """Shift the times by ``gap_ns``, because this process slept that long."""
        self.progress_ns = min(self.progress_ns + gap_ns, now_ns)
        self._woke_ns = now_ns
        if self._enough_ns is not None:
            self._enough_ns = min(self._enough_ns + gap_ns, now_ns)

    def separated(self, broken: Collection[Pair]) -> list[Pair]:
        """Return the pairs of members that need a link for this operation, but have none."""
        return []

    def stall(self, since_ns: int) -> Stall | None:
        """Return where the data is stuck, by reports since ``since_ns``; None: nothing is stuck."""
        return None

    @property
    def follows_ring(self) -> bool:
        """Whether data goes from each member to the next one, by the requests so far."""
        return False

    @property
    def needs_each_link(self) -> bool:
        """Whether no algorithm can do without a link that members lack."""
        return False

    @property
    def way_out(self) -> str:
        """What callers can do if a link is down that the only algorithm needs; empty: nothing."""
        return ""

    def cannot_talk(self, reason: str) -> Decision:
        """Abort, because members lack a link that the named algorithm needs."""
        return self._end(Abort(AbortCause.LINK_BROKEN, reason))

    # -- decisions -----------------------------------------------------------------------------

    def _outcome_if_complete(self) -> Decision | None:
        if len(self._digests) < len(self.survivors) or not self.survivors:
            return None
        if len(set(self._digests.values())) == 1:
            return self._end(Commit())
        digests = [self._digests[peer] for peer in self.survivors]
        common = max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))
        minority = [peer for peer in self.survivors if self._digests[peer] != common]
        return self._end(
            Abort(
                AbortCause.DIGEST_MISMATCH,
                f"results differ: {name_peers(minority)} computed another result than the rest",
            )
        )

    def _drop(self, peers: Sequence[PeerId], reason: str) -> None:
        self.left_out = [peer for peer in self.left_out if peer not in peers]
        self.survivors = [peer for peer in self.survivors if peer not in peers]
        for peer in peers:
            self._digests.pop(peer, None)
        self._loss = f"the run lost {name_peers(list(peers))}: {reason}"

    def _give_up(self) -> Decision:
        """Abort the operation, because a member was lost."""
        return self._end(Abort(AbortCause.MEMBER_LOST, self._loss))

    def _end(self, decision: Commit | Abort) -> Decision:
        self.phase = Phase.COMMITTED if isinstance(decision, Commit) else Phase.ABORTED
        return decision
