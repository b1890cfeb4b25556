"""The life cycle of one collective, and the master's ballot over it.

    requested ──all asked for the same──> started ──own result complete──> done
        │                                    │                               │
        └──────────────┬─────────────────────┴───────────────┬───────────────┘
                       v                                     v
                    aborted                              committed

An operation is committed if and only if every member that has not been lost reported the same
digest; it is aborted as soon as that can no longer happen. Both are final and the same for all.
After a loss it goes on if the members that are left can complete the result
(:mod:`~pccl.protocol.repair`).

Of a small all-reduce the data goes ahead of the start (:mod:`~pccl.protocol.eager`). Nobody is done
with one before all have asked for the same. So whoever is done shows that it has started, also
while the request of another one is still on its way to the master.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pccl.protocol.messages import MasterMessage, OperationStarted, Progress
from pccl.protocol.repair import RingRepair, Tell
from pccl.protocol.ring_order import Pair, broken_neighbours
from pccl.protocol.types import AbortCause, Algorithm, Descriptor, OperationId, PeerId


class Phase(enum.Enum):
    """Where an operation is in its life."""

    REQUESTED = "requested"
    STARTED = "started"
    DONE = "done"
    COMMITTED = "committed"
    ABORTED = "aborted"

    @property
    def ended(self) -> bool:
        """Whether nothing can change any more."""
        return self in (Phase.COMMITTED, Phase.ABORTED)


TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    Phase.REQUESTED: (Phase.STARTED, Phase.ABORTED),
    Phase.STARTED: (Phase.DONE, Phase.ABORTED),
    Phase.DONE: (Phase.COMMITTED, Phase.ABORTED),
    Phase.COMMITTED: (),
    Phase.ABORTED: (),
}


@dataclass(frozen=True, slots=True)
class Start:
    """All members asked for the same thing."""

    resumed: bool = False
    """Whether all resume the same earlier attempt."""


@dataclass(frozen=True, slots=True)
class Commit:
    """All members that are left hold the same result."""


@dataclass(frozen=True, slots=True)
class Abort:
    """There will be no result."""

    cause: AbortCause
    reason: str


Decision = Start | Commit | Abort | Tell


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


def name_peers(peers: list[PeerId]) -> str:
    """``peer 3`` or ``peers 1, 2``, for messages to people."""
    return f"peer{'s' if len(peers) > 1 else ''} " + ", ".join(str(peer) for peer in sorted(peers))


class Ballot:
    """What the master knows about one undecided operation. It decides; the master announces.

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
        self._inherited = inherited
        self.opener = opener
        """Who was the first to speak of it."""
        self.members = members
        """All members of the view, in ring order; also those that were lost since."""
        self.phase = Phase.REQUESTED
        self.opened_ns = now_ns
        """When it was first heard of."""
        self.progress_ns = now_ns
        """When progress was last seen."""
        self.repair: RingRepair | None = None
        """Since a member was lost while data moved."""
        self._loss = ""
        """Who was lost last, and why."""
        self._present = list(members)
        self._descriptors: dict[PeerId, Descriptor] = {}
        self._resumes: set[OperationId | None] = set()
        """The earlier attempts that they resume; None: somebody resumes none."""
        self._eager: dict[PeerId, None] = {}
        """Those who do not wait for the start."""
        self._untold = False
        """Whether they have yet to be told of it."""
        self._digests: dict[PeerId, bytes] = {}
        self._progress: dict[PeerId, Progress] = {}
        self._reported_ns: dict[PeerId, int] = {}
        self._moved_bytes: dict[PeerId, int] = {}
        """The most that each has received so far."""

    @property
    def survivors(self) -> list[PeerId]:
        """The members that have not been lost, in ring order."""
        return list(self._present)

    def waiting_for(self) -> list[PeerId]:
        """The members whose request (or, once started, done report) is missing."""
        heard = self._descriptors if self.phase is Phase.REQUESTED else self._digests
        return [peer for peer in self._present if peer not in heard]

    @property
    def resumed(self) -> bool:
        """Whether all who have asked resume the same earlier attempt.

        Only a ring of plain values can: what is left are partial sums of one.
        """
        return len(self._resumes) == 1 and None not in self._resumes and self.is_repairable

    def request(
        self,
        peer: PeerId,
        descriptor: Descriptor,
        now_ns: int,
        resumes: OperationId | None = None,
        *,
        eager: bool = False,
    ) -> Decision | None:
        """A member asks for the operation. A second request of the same member changes nothing.

        Args:
            peer: who.
            descriptor: what it asks for.
            now_ns: the present.
            resumes: the earlier attempt of which it has something left.
            eager: whether its data goes ahead.
        """
        if self.phase.ended or peer in self._descriptors:
            return None
        self._descriptors[peer] = descriptor
        if eager:
            self._eager[peer] = None
        self.progress_ns = now_ns
        if descriptor != next(iter(self._descriptors.values())):
            return self._end(Abort(AbortCause.DESCRIPTOR_MISMATCH, self._who_asked_what()))
        if self.phase is not Phase.REQUESTED:
            self._untold = self._untold or eager  # it was not there when the others were told
            return None
        self._resumes.add(resumes)
        return self._start_if_complete()

    def done(self, peer: PeerId, digest: bytes, now_ns: int) -> Decision | None:
        """A member holds the complete result."""
        if self.phase is Phase.REQUESTED and (self._inherited or self._is_ahead(peer)):
            # Nobody is done before all have asked, so it was started; not all may have heard that.
            self._digests[peer] = digest
            self.progress_ns = now_ns
            return self._start(resumed=False)
        if self.phase is not Phase.STARTED or peer in self._digests:
            return None
        if not self._inherited and peer not in self._descriptors:
            return None
        self._digests[peer] = digest
        self.progress_ns = now_ns
        outcome = self._outcome_if_complete()
        if outcome is None and self.repair is not None:
            return self.repair.is_done(peer)
        return outcome

    @property
    def follows_ring(self) -> bool:
        """Whether its data goes from each member to the next one, as far as is known."""
        return all(asked.follows_ring for asked in self._descriptors.values())

    @property
    def is_repairable(self) -> bool:
        """Whether what is left of it after a loss can be used, as far as is known."""
        return all(asked.is_repairable for asked in self._descriptors.values())

    @property
    def what(self) -> str:
        """How its callers know it."""
        asked = next(iter(self._descriptors.values()), None)
        return f"tag {self.operation.tag}" + (f" ({asked})" if asked else "")

    def requested_by(self) -> list[PeerId]:
        """The members that have asked for it and have not been lost."""
        return [peer for peer in self._present if peer in self._descriptors]

    def wait_for_start(self) -> list[PeerId]:
        """The members that do nothing before they are told of the start."""
        return [peer for peer in self._present if peer not in self._eager]

    def take_untold(self) -> list[PeerId]:
        """The members whose data went ahead, if nobody has told them yet that it has started.

        While all goes well they need not know. If it takes longer, they do: from then on a lane
        that brings nothing is suspect.
        """
        if not self._untold or self.phase is not Phase.STARTED:
            return []
        self._untold = False
        return [peer for peer in self._present if peer in self._eager]

    def get_stuck(self, reason: str) -> Decision:
        """The members wait for different things."""
        return self._end(Abort(AbortCause.LOCKSTEP, reason))

    def close_view(self, reason: str) -> Decision:
        """The members go on in another view; nobody is lost."""
        return self._end(Abort(AbortCause.VIEW_CLOSED, reason))

    def withdraw(self, peer: PeerId, reason: str) -> Decision:
        """A member's caller has left before it was done."""
        return self._end(Abort(AbortCause.WITHDRAWN, f"peer {peer} withdrew: {reason}"))

    def lose(self, peers: Sequence[PeerId], reason: str, now_ns: int) -> Decision | None:
        """Members are lost: commit if everyone left has the result, or find out if they can.

        Before it has started there is nothing that they could have. Only what travels from one
        member to the next, as it is, can be repaired.
        """
        self._present = [peer for peer in self._present if peer not in peers]
        self._loss = f"{name_peers(list(peers))} lost: {reason}"
        if self.phase is not Phase.STARTED or not self._present:
            return self._give_up()
        outcome = self._outcome_if_complete()
        if outcome is not None:
            return outcome
        if not self.is_repairable:
            return self._give_up()
        self.progress_ns = now_ns
        self.repair = RingRepair(self.operation, self.members, self._present, self._digests)
        return self.repair.begin()

    def holdings(self, peer: PeerId, lost_count: int, *, complete: bool) -> Decision | None:
        """A member behind a gap says whether it can go on. What was asked before is void."""
        if self.phase is not Phase.STARTED or self.repair is None:
            return None
        if not self.repair.waits_for(peer, lost_count):
            return None
        return self.repair.agrees(peer) if complete else self._give_up()

    def owed_to(self, peer: PeerId) -> Iterator[MasterMessage]:
        """What a member may have missed while its connection was lost."""
        if peer in self._present and self.phase is Phase.STARTED:
            yield OperationStarted(self.operation, self.resumed)
            if self.repair is not None:
                yield from self.repair.owed_to(peer)

    def report(self, peer: PeerId, progress: Progress, now_ns: int) -> None:
        """A member says how far it is."""
        if progress.received_bytes > self._moved_bytes.get(peer, -1):
            # More than ever: parts of a segment that begin anew on another lane are none.
            self._moved_bytes[peer] = progress.received_bytes
            self.progress_ns = now_ns
        self._progress[peer] = progress
        self._reported_ns[peer] = now_ns

    def separated(self, broken: Collection[Pair]) -> list[Pair]:
        """The pairs of members that have to talk for this, and cannot."""
        if self.follows_ring:
            return broken_neighbours(self._present, broken)
        star = all(asked.algorithm is Algorithm.STAR for asked in self._descriptors.values())
        present, root = set(self._present), self.members[0]
        apart = [pair for pair in broken if pair <= present and (not star or root in pair)]
        return sorted(apart, key=sorted)

    @property
    def is_forced(self) -> bool:
        """Whether its callers have named the algorithm."""
        return any(asked.forced for asked in self._descriptors.values())

    def cannot_talk(self, reason: str) -> Decision:
        """Members that have to talk for the algorithm that was asked for cannot."""
        return self._end(Abort(AbortCause.LINK_BROKEN, reason))

    def received_bytes(self, peer: PeerId) -> int:
        """The most that a member is known to have received."""
        return self._moved_bytes.get(peer, 0)

    def stall(self, since_ns: int) -> Stall | None:
        """Where the data is stuck: at a neighbour that lacks what could have been sent to it.

        In a ring each member receives from its predecessor, in a mesh from all. One that waits for
        its own inputs has nothing to send: what it was given is all on its way further. So once
        nothing moves any more, the links with a backlog are the stuck ones, and the largest counts.

        Reports from before ``since_ns`` prove nothing: a member that has fallen silent may be the
        cause, and neither neighbour pays for that. Its silence is judged for itself.
        """
        found: Stall | None = None
        ready = {upstream: self._ready_at(upstream) for upstream in self._present}
        for upstream, peer, received in self._flows():
            silent = any(self._reported_ns.get(end, -1) < since_ns for end in (peer, upstream))
            if peer in self._digests or silent:
                continue
            seen = Stall(upstream, peer, ready[upstream].get(peer, 0), received)
            if seen.backlog > (0 if found is None else found.backlog):
                found = seen
        return found

    def _flows(self) -> Iterator[tuple[PeerId, PeerId, int]]:
        """All (sender, receiver, segments received) that receivers have reported."""
        present = set(self._present)
        for rank, peer in enumerate(self._present):
            mine = self._progress.get(peer)
            if mine is None:
                continue
            if self.follows_ring:
                yield self._present[rank - 1], peer, mine.received
                continue
            for flow in mine.flows:
                if flow.peer in present:
                    yield flow.peer, peer, flow.received

    def _ready_at(self, upstream: PeerId) -> dict[PeerId, int]:
        """How many segments a member could have sent, by receiver."""
        theirs = self._progress.get(upstream)
        if theirs is None:
            return {}
        if self.follows_ring:
            rank = self._present.index(upstream)
            return {self._present[(rank + 1) % len(self._present)]: theirs.ready}
        return {flow.peer: flow.ready for flow in theirs.flows}

    # -- decisions -----------------------------------------------------------------------------

    def _start_if_complete(self) -> Decision | None:
        if self.waiting_for():
            return None
        return self._start(resumed=self.resumed)

    def _start(self, *, resumed: bool) -> Start:
        self.phase = Phase.STARTED
        self._untold = bool(self._eager)
        return Start(resumed)

    def _is_ahead(self, peer: PeerId) -> bool:
        """Whether a member may be done of which others are not known to have asked."""
        return peer in self._eager and len(self._eager) == len(self._descriptors)

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

    def _give_up(self) -> Decision:
        return self._end(Abort(AbortCause.MEMBER_LOST, self._loss))

    def _end(self, decision: Commit | Abort) -> Decision:
        self.phase = Phase.COMMITTED if isinstance(decision, Commit) else Phase.ABORTED
        return decision

    def _who_asked_what(self) -> str:
        asked: dict[Descriptor, list[PeerId]] = {}
        for peer, descriptor in self._descriptors.items():
            asked.setdefault(descriptor, []).append(peer)
        claims = [f"{name_peers(peers)} asked for {what}" for what, peers in asked.items()]
        return f"tag {self.operation.tag}: " + "; ".join(claims)
