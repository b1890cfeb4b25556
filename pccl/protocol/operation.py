"""The life cycle of one collective, and the master's ballot over it.

    requested ──all asked for the same──> started ──own result complete──> done
        │                                    │                               │
        └──────────────┬─────────────────────┴───────────────┬───────────────┘
                       v                                     v
                    aborted                              committed

An operation is committed if and only if every member that has not been lost reported the same
digest; it is aborted as soon as that can no longer happen. Both are final and the same for all.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pccl.protocol.messages import Progress
from pccl.protocol.types import AbortCause, Descriptor, OperationId, PeerId


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


@dataclass(frozen=True, slots=True)
class Commit:
    """All members that are left hold the same result."""


@dataclass(frozen=True, slots=True)
class Abort:
    """There will be no result."""

    cause: AbortCause
    reason: str


Decision = Start | Commit | Abort


def name_peers(peers: list[PeerId]) -> str:
    """``peer 3`` or ``peers 1, 2``, for messages to people."""
    return f"peer{'s' if len(peers) > 1 else ''} " + ", ".join(str(peer) for peer in sorted(peers))


class Ballot:
    """What the master knows about one undecided operation. It decides; the master announces."""

    def __init__(
        self, operation: OperationId, members: tuple[PeerId, ...], opener: PeerId, now_ns: int
    ) -> None:
        self.operation = operation
        self.opener = opener
        """Who was the first to speak of it."""
        self.members = members
        """All members of the view, in ring order; also those that were lost since."""
        self.phase = Phase.REQUESTED
        self.progress_ns = now_ns
        """When progress was last seen."""
        self._present = list(members)
        self._descriptors: dict[PeerId, Descriptor] = {}
        self._digests: dict[PeerId, bytes] = {}
        self._progress: dict[PeerId, Progress] = {}
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

    def request(self, peer: PeerId, descriptor: Descriptor, now_ns: int) -> Decision | None:
        """A member asks for the operation. A second request of the same member changes nothing."""
        if self.phase is not Phase.REQUESTED or peer in self._descriptors:
            return None
        self._descriptors[peer] = descriptor
        self.progress_ns = now_ns
        if descriptor != next(iter(self._descriptors.values())):
            return self._end(Abort(AbortCause.DESCRIPTOR_MISMATCH, self._who_asked_what()))
        return self._start_if_complete()

    def done(self, peer: PeerId, digest: bytes, now_ns: int) -> Decision | None:
        """A member holds the complete result."""
        if self.phase is not Phase.STARTED or peer in self._digests:
            return None
        self._digests[peer] = digest
        self.progress_ns = now_ns
        return self._outcome_if_complete()

    @property
    def what(self) -> str:
        """How its callers know it."""
        asked = next(iter(self._descriptors.values()), None)
        return f"tag {self.operation.tag}" + (f" ({asked})" if asked else "")

    def requested_by(self) -> list[PeerId]:
        """The members that have asked for it and have not been lost."""
        return [peer for peer in self._present if peer in self._descriptors]

    def get_stuck(self, reason: str) -> Decision:
        """The members wait for different things."""
        return self._end(Abort(AbortCause.LOCKSTEP, reason))

    def withdraw(self, peer: PeerId, reason: str) -> Decision:
        """A member's caller has left before it was done."""
        return self._end(Abort(AbortCause.WITHDRAWN, f"peer {peer} withdrew: {reason}"))

    def lose(self, peer: PeerId, reason: str) -> Decision:
        """A member is lost: commit if everyone left has the result, otherwise abort."""
        self._present.remove(peer)
        outcome = self._outcome_if_complete() if self.phase is Phase.STARTED else None
        return outcome or self._end(Abort(AbortCause.MEMBER_LOST, f"peer {peer} lost: {reason}"))

    def report(self, peer: PeerId, progress: Progress, now_ns: int) -> None:
        """A member says how far it is."""
        if progress.received_bytes > self._moved_bytes.get(peer, -1):
            # More than ever: parts of a segment that begin anew on another lane are none.
            self._moved_bytes[peer] = progress.received_bytes
            self.progress_ns = now_ns
        self._progress[peer] = progress

    def culprit(self) -> PeerId | None:
        """Whom lack of progress is charged to: who could send, and whose neighbour lacks it.

        In a ring each member receives from its predecessor. One that still waits for its own
        inputs is not to blame; the furthest upstream that has them is.
        """
        blamed: PeerId | None = None
        blamed_backlog = 0
        for rank, peer in enumerate(self.members):
            upstream = self.members[rank - 1]
            mine, theirs = self._progress.get(peer), self._progress.get(upstream)
            if peer in self._digests or mine is None or theirs is None:
                continue
            backlog = theirs.ready - mine.received
            if backlog > blamed_backlog:
                blamed, blamed_backlog = upstream, backlog
        return blamed

    # -- decisions -----------------------------------------------------------------------------

    def _start_if_complete(self) -> Decision | None:
        if self.waiting_for():
            return None
        self.phase = Phase.STARTED
        return Start()

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

    def _end(self, decision: Commit | Abort) -> Decision:
        self.phase = Phase.COMMITTED if isinstance(decision, Commit) else Phase.ABORTED
        return decision

    def _who_asked_what(self) -> str:
        asked: dict[Descriptor, list[PeerId]] = {}
        for peer, descriptor in self._descriptors.items():
            asked.setdefault(descriptor, []).append(peer)
        claims = [f"{name_peers(peers)} asked for {what}" for what, peers in asked.items()]
        return f"tag {self.operation.tag}: " + "; ".join(claims)
