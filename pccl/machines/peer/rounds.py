"""The rounds (joint decisions) that one peer has requested: at most one of each kind at a time.

If a caller leaves a round, the request stays open. The next call of that kind takes the round,
even if its answer has arrived already. The same holds for a round that closed without this peer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from pccl.machines.peer import events as ev
from pccl.machines.peer import words
from pccl.machines.peer.contact import PeerOutbox
from pccl.machines.peer.finals import Heartbeats, SeenFinals
from pccl.machines.peer.membership import KnownMembership, PeerIdentity
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import MISSED_KEPT_MAX
from pccl.protocol.types import Quorum, RoundId, RoundKind


@dataclass(slots=True)
class OpenRound:
    """A round that this peer has requested, and whose answer no caller has taken yet."""

    id: RoundId
    call: int | None
    """None once the caller has left; the next call of the same kind takes the round."""
    answer: msg.RoundClosed | None = None
    waits_for: str = ""
    """The members that the round waits for, as the master last reported."""
    quorum: Quorum | None = None


class OpenRounds:
    """All rounds that one peer has requested, and how many of each kind the run has had.

    Args:
        out: for effects.
        own: this peer.
        membership: the rosters; callers see a new one when a call returns.
        finals: keeps the answers for another master.
        heartbeats: acknowledges the answers.
    """

    def __init__(
        self,
        out: PeerOutbox,
        own: PeerIdentity,
        membership: KnownMembership,
        finals: SeenFinals,
        heartbeats: Heartbeats,
    ) -> None:
        self._out, self._own, self._membership = out, own, membership
        self._finals, self._heartbeats = finals, heartbeats
        self._open: dict[RoundKind, OpenRound] = {}
        self._counts: dict[RoundKind, int] = dict.fromkeys(RoundKind, 0)
        self._last: dict[RoundKind, OpenRound] = {}
        """The last round of each kind whose answer a caller has taken."""
        self._missed = {kind: deque[msg.RoundClosed]() for kind in RoundKind}
        """Answers of rounds that closed without this peer, for its next calls."""
        self._awaited: set[RoundId] = set()
        """The rounds in which a quorum waits for this peer."""
        self._newcomers_wait_for: RoundId | None = None
        """The round in which the members can admit newcomers."""
        self._admission_unused = False
        """Whether the round that admitted this peer satisfies the next ``update_topology``."""
        self._leaves = False
        """Whether this peer will leave the run soon."""

    def __len__(self) -> int:
        return len(self._open)

    def waiting(self) -> list[OpenRound]:
        """Return the rounds that callers wait for."""
        return [current for current in self._open.values() if current.call is not None]

    def of_call(self, call: int) -> OpenRound | None:
        """Return the round that a call waits for, if there is one."""
        return next((current for current in self._open.values() if current.call == call), None)

    def counts(self) -> tuple[msg.RoundCount, ...]:
        """Return how many rounds of each kind were closed, as far as this peer knows."""
        return tuple(msg.RoundCount(kind, n) for kind, n in self._counts.items())

    def start_from(self, counts: tuple[msg.RoundCount, ...], *, rejoins: bool) -> None:
        """Record how many rounds of each kind were closed before this peer's admission.

        Args:
            counts: one per kind.
            rejoins: whether an ``update_topology`` asked for the admission.
        """
        self._counts.update({count.kind: count.n for count in counts})
        self._admission_unused = not rejoins

    # -- calls ---------------------------------------------------------------------------------

    def use_admission(self) -> None:
        """Record another joint call: the admission no longer satisfies an ``update_topology``."""
        self._admission_unused = False

    def call(self, event: ev.RoundCall) -> None:
        """Request a round, or take the round that another caller has left."""
        kind = event.kind
        satisfied = kind is RoundKind.UPDATE_TOPOLOGY and self._admission_unused
        self.use_admission()
        if satisfied:
            self._last.pop(kind, None)  # this call returns without a round
            self._out.return_(event.call)
            return
        if kind is RoundKind.OPTIMIZE_TOPOLOGY and self._membership.is_alone:
            self._out.raise_(event.call, words.alone_in_the_run())
            return
        current = self._open.get(kind)
        if current is None and self._missed[kind]:
            answer = self._missed[kind].popleft()
            self._out.send(msg.BlockedReply(0, False))  # this peer makes calls again
            current = self._open[kind] = OpenRound(answer.round, event.call, answer)
            self._return(current, answer)
        elif current is None:
            round_id = RoundId(kind, self._counts[kind])
            current = self._open[kind] = OpenRound(round_id, event.call, quorum=event.quorum)
            self._request(current)
        elif current.call is not None:
            self._out.raise_(event.call, words.same_call_twice(kind.call_name))
        else:
            current.call = event.call
            if current.answer is not None:
                self._return(current, current.answer)

    def leave(self, current: OpenRound, reason: str) -> None:
        """Raise in a caller that leaves its round; ``reason``: why. The request stays open."""
        assert current.call is not None
        call, current.call = current.call, None
        self._out.raise_(call, words.left_round(reason, current.id.kind, current.waits_for))

    def left_answered(self, kind: RoundKind) -> None:
        """Keep an answer that its caller missed by leaving, for the next call of that kind."""
        last = self._last.pop(kind, None)
        if last is None:  # no round of the kind was needed
            self._admission_unused = kind is RoundKind.UPDATE_TOPOLOGY
        elif kind not in self._open:
            last.call = None
            self._open[kind] = last

    @property
    def is_update_left(self) -> bool:
        """Whether a caller has left an ``update_topology`` that has no answer yet."""
        left = self._open.get(RoundKind.UPDATE_TOPOLOGY)
        return left is not None and left.call is None and left.answer is None

    def follow_left(self) -> bool:
        """Catch up with the other members after rounds whose callers have left.

        Otherwise their collectives and those of this peer would wait for each other in different
        views.

        Returns:
            Whether there was an answer that no caller has seen.
        """
        found = False
        left = self._open.get(RoundKind.OPTIMIZE_TOPOLOGY)
        if left is not None and left.call is None and left.answer is not None:
            self._membership.follow(left.answer.roster_version)  # the next call gets the answer
            found = True
        left = self._open.get(RoundKind.UPDATE_TOPOLOGY)
        if left is not None and left.call is None and left.answer is not None:
            self._take_answer(left, left.answer)
            found = True
        return found

    # -- messages of the master ------------------------------------------------------------------

    def closed(self, message: msg.RoundClosed) -> bool:
        """Record an answer; return False if this peer does not wait for it, as in a repetition."""
        self._finals.see(message)
        current = self._open.get(message.round.kind)
        if current is None or current.id != message.round or current.answer is not None:
            self._miss(message)
            self._heartbeats.acknowledge(message.round)
            return False
        current.answer = message
        if current.call is not None:
            self._return(current, message)
        return True

    def _miss(self, answer: msg.RoundClosed) -> None:
        """Keep the answer of a round that closed without this peer, unless it is a repetition."""
        kind, missed = answer.round.kind, self._missed[answer.round.kind]
        if answer.lockstep:
            self._skip(answer.round)
        opened = self._open.get(kind)
        newest = missed[-1].round.n if missed else -1 if opened is None else opened.id.n
        if answer.round.n < self._counts[kind] or answer.round.n <= newest:
            return
        missed.append(replace(answer, sequence=self._own.place_of(answer.sequence)))
        if len(missed) > MISSED_KEPT_MAX:
            missed.popleft()

    def catch_up(self, place: int) -> None:
        """Forget the rounds that closed without this peer before a place that it has reached."""
        for missed in self._missed.values():
            while missed and missed[0].sequence < place:
                self._skip(missed.popleft().round)

    def is_awaited(self, kind: RoundKind) -> bool:
        """Whether members wait for this peer's next call of a kind, or left it out."""
        awaits = RoundId(kind, self._counts[kind]) in self._awaited and kind not in self._open
        return awaits or bool(self._missed[kind])

    @property
    def newcomers_wait(self) -> bool:
        """Whether newcomers are ready for admission in the next ``update_topology``."""
        kind = RoundKind.UPDATE_TOPOLOGY
        return self._newcomers_wait_for == RoundId(kind, self._counts[kind]) and not (
            kind in self._open or self._missed[kind]
        )

    def note_wait(self, message: msg.RoundWaits | msg.RoundAwaits) -> None:
        """Record for which members a round waits; report that if it has a caller."""
        if isinstance(message, msg.RoundAwaits):
            if message.newcomers:
                self._newcomers_wait_for = message.round
                return
            self._awaited = {one for one in self._awaited if one.kind is not message.round.kind}
            self._awaited.add(message.round)
            return
        current = self._open.get(message.round.kind)
        if current is not None and current.id == message.round and current.call is not None:
            current.waits_for = message.whom
            what = current.id.kind.call_name
            self._out.report_wait(current.call, what, message.whom, message.waited_s)

    def repeat(self) -> None:
        """Request the unanswered rounds again."""
        for current in self._open.values():
            if current.answer is None:
                self._request(current)

    def hurry(self) -> None:
        """Let the master notify the members that are missing in this peer's rounds from now on."""
        self._leaves = True
        self.repeat()

    def _request(self, current: OpenRound) -> None:
        self._out.send(msg.RoundRequest(current.id, current.quorum, self._leaves))

    def _return(self, current: OpenRound, answer: msg.RoundClosed) -> None:
        assert current.call is not None
        self._take_answer(current, answer)
        if answer.lockstep:
            self._out.raise_(current.call, errors.LockstepError(reason=answer.lockstep))
            return
        asked = current.id.kind is RoundKind.PEERS_PENDING
        self._out.return_(current.call, answer.pending if asked else None)

    def _take_answer(self, current: OpenRound, answer: msg.RoundClosed) -> None:
        """Take the answer, so that the next call of the kind opens the next round."""
        self._last[current.id.kind] = self._open.pop(current.id.kind)
        self._skip(current.id)
        self._heartbeats.acknowledge(current.id)
        if current.id.kind is RoundKind.UPDATE_TOPOLOGY:
            self._membership.see(answer.roster_version)
        elif current.id.kind is RoundKind.OPTIMIZE_TOPOLOGY:
            self._membership.follow(answer.roster_version)

    def _skip(self, closed: RoundId) -> None:
        """Never request round ``closed`` or an older one of its kind again."""
        self._counts[closed.kind] = max(self._counts[closed.kind], closed.n + 1)

    def clear(self) -> None:
        """Drop all rounds, because this peer leaves the run."""
        self._open.clear()
        self._last.clear()
        for missed in self._missed.values():
            missed.clear()
