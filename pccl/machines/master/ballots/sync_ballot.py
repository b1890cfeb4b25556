"""The master's ballot over shared state: it elects the content that all members shall hold.

    requested ──all have offered──> elected ──all hold it──> committed
        │  └──states conflict──> compared ──> the minority is expelled, or aborted for all
        └── a member is lost before the rest has offered: aborted, and called again

With a quorum, the master may elect among the offers without late members, if one offer is the state
that the group expects. Late members get the outcome, and offer again in the next synchronization.

After a loss, the remaining members elect among themselves, or continue while one of them has the
elected content. After an abort, members keep the pieces that they have fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pccl.machines.master.ballots.ballot import Abort, Ballot, Decision, Expel
from pccl.machines.repair import Tell
from pccl.protocol.limits import Timing
from pccl.protocol.messages import CompareStates, MasterMessage, SyncStarted
from pccl.protocol.operation import Phase, name_peers
from pccl.protocol.shared_state import (
    Differ,
    Difference,
    Elected,
    Expected,
    Lineage,
    Offer,
    SharedStateSyncStrategy,
    SyncPurpose,
    Unavailable,
    expected_after,
)
from pccl.protocol.types import AbortCause, OperationId, PeerId, Quorum, RemovalCause
from pccl.state.election import elect, has_valid

_UNKNOWN = Difference("", None, "")

DIFFERENCES_MAX = 4
"""How many differences a reason names, one for each set of members with other contents."""


class SyncBallot(Ballot):
    """What the master knows about one undecided synchronization.

    Args:
        operation: its id.
        members: all members of its view, in ring order.
        opener: the member that sent the first message about it.
        now_ns: current time.
        expected: returns the group's expected shared state, and how many collectives the group has
            committed since its last synchronization.
        inherited: whether an earlier master may have started it.
    """

    def __init__(
        self,
        operation: OperationId,
        members: tuple[PeerId, ...],
        opener: PeerId,
        now_ns: int,
        expected: Callable[[], tuple[Expected, int]],
        *,
        inherited: bool = False,
    ) -> None:
        super().__init__(operation, members, opener, now_ns, inherited=inherited)
        self._expected = expected
        self._offers: dict[PeerId, Offer] = {}
        self._quorum: Quorum | None = None
        self._asked_ns: list[int] = []
        self._elected: Elected | None = None
        self._started_ns = now_ns
        self._early: dict[PeerId, bytes] = {}
        """Members that were done under an earlier master -> their digests."""
        self._conflict: Differ | None = None
        self._compared: dict[PeerId, Difference | None] = {}
        """Members that were asked how their state differs -> their answers; None: not yet."""
        self._compared_ns = now_ns

    # -- what it is about ------------------------------------------------------------------------

    @property
    def what(self) -> str:
        """The call that members have made; ``sync_shared_state`` if none is known yet."""
        offer = next(iter(self._offers.values()), None)
        return offer.purpose.call_name if offer is not None else "sync_shared_state"

    @property
    def outlives_view(self) -> bool:
        """Whether a member was lost; then the remaining members continue."""
        return len(self.concerned) < len(self.members)

    @property
    def quorum(self) -> Quorum | None:
        """The quorum in the offers so far; None: the operation waits for all members."""
        return self._quorum

    @property
    def goes_on_by_itself(self) -> bool:
        """Whether the operation can begin without a further call."""
        return self._quorum is not None and super().goes_on_by_itself and self._has_valid

    @property
    def _has_valid(self) -> bool:
        """Whether no other member need offer what the group holds."""
        offers = [(peer, self._offers[peer]) for peer in self.requested_by()]
        return has_valid(offers, *self._expected())

    @property
    def lags_ns(self) -> list[int | None]:
        """Each member's delay after the quorum; None: the member was left out."""
        return self._lags_of(self._asked_ns)

    @property
    def elected_without_all(self) -> Elected | None:
        """The elected state, for late members; None: there are none."""
        if not self.left_out or self._elected is None:
            return None
        return replace(self._elected, sources=(), behind=(), outdated=(), extra_sources=())

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """The members that have not been lost, in ring order."""
        return tuple(self.survivors)

    def _has_asked(self, peer: PeerId) -> bool:
        return peer in self._offers

    def waiting_for(self) -> list[PeerId]:
        """Return the members whose offer, comparison or done report is missing."""
        silent = [peer for peer, answer in self._compared.items() if answer is None]
        return super().waiting_for() or silent

    def owed_to(self, peer: PeerId) -> Iterator[MasterMessage]:
        """Yield the result of the election, or the question how the member's state differs."""
        if peer not in self.survivors:
            return
        if self._elected is not None:
            yield SyncStarted(self.operation, self._elected)
        elif self._conflict is not None and self._compared.get(peer, _UNKNOWN) is None:
            yield self._question(self._conflict)

    def expected_after(self, run: bytes) -> Expected | None:
        """Return the group's expected shared state after a commit; None if it does not change."""
        assert self._elected is not None
        if next(iter(self._offers.values())).purpose is SyncPurpose.VERIFY:
            return None
        return expected_after(self._elected, Lineage(run, self.operation))

    # -- what members do -------------------------------------------------------------------------

    def request(
        self, peer: PeerId, offer: Offer, now_ns: int, quorum: Quorum | None = None
    ) -> Decision | None:
        """Record a member's offer. A second request of the same member changes nothing.

        If members give different quorums, all must call.
        """
        if self.phase.ended or peer in self._offers:
            return None
        self._quorum = quorum if not self._offers or quorum == self._quorum else None
        self._asked_ns.append(now_ns)
        self._offers[peer] = offer
        self.latest, self.latest_ns = peer, now_ns
        self.progress_ns = now_ns
        return self._hold_election(now_ns)

    def done(self, peer: PeerId, digest: bytes, now_ns: int) -> Decision | None:
        """Record that a member holds the elected content, or held it under an earlier master."""
        if self.phase is Phase.REQUESTED and self._inherited:
            self._early[peer] = digest  # all members offer again
            return None
        if self.phase is not Phase.STARTED or peer in self._digests:
            return None
        self._digests[peer] = digest
        self.progress_ns = now_ns
        return self._outcome_if_complete()

    def compared(self, peer: PeerId, difference: Difference, now_ns: int) -> Decision | None:
        """Record how a member's state differs from that of another member."""
        if self._conflict is None or self._compared.get(peer, _UNKNOWN) is not None:
            return None
        self._compared[peer] = difference
        if None in self._compared.values():
            return None
        return self._judge_conflict(self._conflict)

    def go_on(self) -> Decision | None:
        """Elect without the members that have not offered."""
        self._leave_out(self.waiting_for())
        return self._hold_election(self.latest_ns)

    def lose(self, peers: Sequence[PeerId], reason: str, now_ns: int) -> Decision | None:
        """Drop lost members; then commit, elect again, continue with other sources, or abort."""
        self._drop(peers, reason)
        if not any(peer in self.participants for peer in peers):
            return None  # the operation continues without them
        self.progress_ns = now_ns
        for lost in peers:
            self._offers.pop(lost, None)
        if not self.survivors:
            return self._give_up()
        if self.phase is Phase.REQUESTED:
            if len(self._offers) < len(self.survivors) or self._early:
                return self._give_up()  # the rest calls again in the next view
            if self.left_out and not self._has_valid:
                return self._give_up()  # one of these may hold what the group holds
            self._conflict = None
            self._compared.clear()
            return self._hold_election(now_ns)
        outcome = self._outcome_if_complete()
        if outcome is not None:
            return outcome
        return self._go_on()

    def awaited(self, still_ns: int) -> list[PeerId]:
        """Return the missing members and, without progress since ``still_ns``, the sources."""
        waiting = self.waiting_for()
        if self._elected is None or self.progress_ns > still_ns:
            return waiting
        sources = {*self._elected.sources, *self._elected.extra_sources}
        return [peer for peer in self.survivors if peer in waiting or peer in sources]

    # -- time --------------------------------------------------------------------------------------

    def look(self, timing: Timing, now_ns: int) -> Decision | None:
        """Act on missing comparisons, slow newcomers, and fetches without progress."""
        if self._conflict is not None and self.phase is Phase.REQUESTED:
            is_late = now_ns - self._compared_ns >= timing.ns(timing.deadline_s)
            return self._judge_conflict(self._conflict) if is_late else None
        if self.phase is not Phase.STARTED or self._elected is None:
            return None
        late = self.waiting_for()
        others = [peer for peer in self.survivors if peer not in late]
        is_first = self._expected()[0].lineage is None  # then no member is a newcomer
        newcomers = not is_first and all(peer in self._elected.outdated for peer in late)
        held_s = (now_ns - self._started_ns) / 1e9
        if newcomers and others and held_s >= timing.hold_s:
            reason = (
                f"it kept other members waiting for {held_s:.0f} s while it received the shared "
                "state; it keeps the pieces that it has"
            )
            return Expel(tuple(late), RemovalCause.TOO_SLOW, reason)
        still_s = (now_ns - self.progress_ns) / 1e9
        if others and still_s >= timing.progress_s:
            reason = f"it has received nothing of the shared state for {still_s:.1f} s"
            return Expel(tuple(late), RemovalCause.NO_PROGRESS, reason)
        return None

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """Shift the times of progress, start and comparison, because this process slept."""
        super().shift(gap_ns, now_ns)
        self._started_ns = min(self._started_ns + gap_ns, now_ns)
        self._compared_ns = min(self._compared_ns + gap_ns, now_ns)

    # -- decisions ---------------------------------------------------------------------------------

    def _hold_election(self, now_ns: int) -> Decision | None:
        if self.waiting_for():
            return None
        offers = [(peer, self._offers[peer]) for peer in self.survivors]
        if not _agree([offer for _, offer in offers]):
            return self._end(Abort(AbortCause.DESCRIPTOR_MISMATCH, self._who_asked_what()))
        verdict = elect(offers, *self._expected())
        if isinstance(verdict, Unavailable):
            return self._end(Abort(AbortCause.STATE_UNAVAILABLE, verdict.reason))
        if isinstance(verdict, Elected):
            self.phase = Phase.STARTED
            self._started_ns = self.progress_ns = now_ns
            self._elected = verdict
            holders = {p: d for p, d in self._early.items() if p in self.survivors}
            if any(digest != verdict.content for digest in holders.values()):
                reason = "an earlier master elected other contents"
                return self._end(Abort(AbortCause.MEMBER_LOST, reason))
            self._digests.update(holders)
            return self._outcome_if_complete() or self._tell()
        self._conflict = verdict
        self._compared = dict.fromkeys((members[0] for members in verdict.sets[1:]), None)
        self._compared_ns = now_ns
        return Tell(tuple(self._compared), self._question(verdict))

    def _question(self, conflict: Differ) -> CompareStates:
        return CompareStates(self.operation, conflict.sets[0][0])

    def _judge_conflict(self, conflict: Differ) -> Decision:
        """Decide a conflict, with the answers that have arrived in time."""
        told = {peer: answer for peer, answer in self._compared.items() if answer and answer.tensor}
        difference = next(iter(told.values()), _UNKNOWN)
        reference, *others = conflict.sets
        them = ", and from those of ".join(name_peers(list(members)) for members in others)
        mine = name_peers(list(reference))
        reason = f"{conflict.what}: those of {mine} differ from those of {them}"
        for peer, answer in list(told.items())[:DIFFERENCES_MAX]:
            reason += f"; peer {peer}: {answer.text}" if len(told) > 1 else f"; {answer.text}"
        self._conflict = None
        self._compared.clear()
        if conflict.losers:
            return Expel(conflict.losers, RemovalCause.STATE_CONFLICT, reason)
        return self._end(
            Abort(AbortCause.STATE_MISMATCH, f"{reason}; {conflict.what.remedy}", difference)
        )

    def _tell(self) -> Tell:
        assert self._elected is not None
        return Tell(tuple(self.survivors), SyncStarted(self.operation, self._elected))

    def _go_on(self) -> Decision | None:
        """Continue after a loss, if a remaining member has the elected content; else abort."""
        assert self._elected is not None
        holders = [
            peer
            for peer in self.survivors
            if peer in self._elected.sources or peer in self._digests
        ]
        if not holders:
            return self._give_up()
        elected = self._elected
        done = [peer for peer in holders if peer in self._digests]
        if not any(peer in elected.sources for peer in holders):
            elected = replace(elected, sources=tuple(done))
        if elected.extra_sources and not any(p in elected.extra_sources for p in self.survivors):
            elected = self._with_other_extra(elected, done)
        if elected == self._elected:
            return None
        self._elected = elected
        return self._tell()

    def _with_other_extra(self, elected: Elected, done: list[PeerId]) -> Elected:
        """Replace lost sources of ``extra``: by newcomers that are done, else by any source."""
        heirs = tuple(peer for peer in done if peer in elected.outdated)
        if heirs:
            return replace(elected, extra_sources=heirs)
        chosen = next(peer for peer in self.survivors if peer in elected.sources)
        return replace(elected, extra=self._offers[chosen].extra, extra_sources=(chosen,))

    def _who_asked_what(self) -> str:
        asked: dict[str, list[PeerId]] = {}
        for peer, offer in self._offers.items():
            asked.setdefault(str(offer), []).append(peer)
        return "; ".join(f"{name_peers(peers)} asked for {what}" for what, peers in asked.items())


def _agree(offers: list[Offer]) -> bool:
    """Whether all offers are of the same call, with compatible strategies."""
    popular = SharedStateSyncStrategy.ENFORCE_POPULAR
    calls = {(offer.purpose, offer.resume, offer.strategy is popular) for offer in offers}
    return len(calls) == 1
