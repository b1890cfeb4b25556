"""The joint decisions of all members of a run, admission among them.

A round closes when every member has made its call, or a quorum has and its grace is over. All
members get the same answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pccl.machines.history import History, InvariantViolation
from pccl.machines.master.ballots.finals import Finals
from pccl.machines.master.ballots.open_ballots import OpenBallots
from pccl.machines.master.connections import Outbox
from pccl.machines.master.links.plan_renewal import PlanRenewal
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.succession.ratification import Ratification
from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.limits import SEATED_AT_ONCE_MAX
from pccl.protocol.shared_state import NOTHING_EXPECTED
from pccl.protocol.types import AbortCause, AlgorithmTable, PeerId, Quorum, RoundId, RoundKind
from pccl.telemetry.ended import EndedCall


class JointRounds:
    """Closes the joint rounds, admits newcomers, and opens new views."""

    def __init__(
        self,
        membership: Membership,
        ballots: OpenBallots,
        finals: Finals,
        ratification: Ratification,
        outbox: Outbox,
    ) -> None:
        self._membership = membership
        self._ballots = ballots
        self._finals = finals
        self._ratification = ratification
        self._outbox = outbox
        self.requested: dict[RoundKind, dict[PeerId, bool]] = {kind: {} for kind in RoundKind}
        """By kind: the members that have made the call of the present round, and whether the other
        ones were notified for them."""
        self._quorums: dict[RoundKind, dict[PeerId, Quorum]] = {kind: {} for kind in RoundKind}
        """By kind: the quorums with which they made it; one without a quorum waits for all."""
        self._calls_ns: dict[RoundKind, list[int]] = {kind: [] for kind in RoundKind}
        """By kind: when each of these calls came."""
        self._enough_ns: dict[RoundKind, int] = {}
        """By kind: when enough members had made the call."""
        self._changed_ns = 0
        """When a member was last removed, or this process woke up: no grace begins earlier."""
        self._asked_ns: dict[RoundKind, tuple[int, int]] = dict.fromkeys(RoundKind, (0, 0))
        """By kind: when the first and the last of these members made it."""
        self._counts: dict[RoundKind, int] = dict.fromkeys(RoundKind, 0)
        self._is_quorate = False
        """Whether members called the last ``update_topology`` with a quorum."""
        self._told_of_newcomers: RoundId | None = None
        """The round of which the members know that newcomers wait for it."""
        self._renewal = PlanRenewal()
        self._closed_before: Mapping[RoundKind, int] = {}
        """By kind: how many rounds earlier masters have closed."""

    def take_up(self, counts: Mapping[RoundKind, int]) -> None:
        """Begin without open rounds, after ``counts`` closed rounds of each kind."""
        for kind in RoundKind:
            self._forget_requests(kind)
        self._counts = dict(counts)
        self._closed_before = counts

    def present(self, kind: RoundKind) -> RoundId:
        """Return the open round of a kind, or else the next round."""
        return RoundId(kind, self._counts[kind])

    def _forget_requests(self, kind: RoundKind) -> None:
        self.requested[kind], self._quorums[kind], self._calls_ns[kind] = {}, {}, []
        self._enough_ns.pop(kind, None)

    def request(
        self, peer: RegisteredPeer, round_id: RoundId, quorum: Quorum | None, *, leaves: bool
    ) -> None:
        """Record that ``peer`` requested a round; repeat the answer if the round is closed.

        If it ``leaves`` the run soon, the missing members are notified.

        Raises:
            RemoteProtocolError: ``peer`` has acknowledged the answer, or cannot request the round.
        """
        present = self._counts[round_id.kind]
        if not peer.admitted or round_id.n > present:
            raise RemoteProtocolError(reason=f"{round_id.kind.name} {round_id.n} is not open to it")
        if round_id.n < present:
            answer = self._finals.answers.owed(round_id, peer.id)
            if answer is None and round_id.n < self._closed_before.get(round_id.kind, 0):
                # The last master may have removed this member without consent: it lags by several.
                answer = self._finals.close_again(round_id, peer.id)
            if answer is None:
                raise RemoteProtocolError(
                    reason=f"no answer of {round_id.kind.name} {round_id.n} is kept for the peer"
                )
            self._ratification.tell([peer], answer)
            return
        requested, now_ns = self.requested[round_id.kind], self._outbox.now_ns
        if peer.id not in requested:
            first_ns = self._asked_ns[round_id.kind][0] if requested else now_ns
            self._asked_ns[round_id.kind] = first_ns, now_ns
            requested[peer.id] = False
            self._calls_ns[round_id.kind].append(now_ns)
            if quorum is not None:
                self._quorums[round_id.kind][peer.id] = quorum
            if round_id.kind is RoundKind.UPDATE_TOPOLOGY:
                self._is_quorate = quorum is not None
        if leaves and not requested[peer.id]:
            requested[peer.id] = True
            self._notify_missing(round_id.kind)
        self._close_if_complete(round_id.kind)

    def forget(self, gone: Iterable[PeerId]) -> None:
        """Drop the requests of removed members."""
        self._changed_ns = self._outbox.now_ns
        for peer in gone:
            for kind in RoundKind:
                self.requested[kind].pop(peer, None)
                self._quorums[kind].pop(peer, None)

    def shift(self, gap_ns: int) -> None:
        """Shift the times of rounds and operations, because this process slept ``gap_ns``."""
        self._changed_ns = now_ns = self._outbox.now_ns
        for kind, enough_ns in self._enough_ns.items():
            self._enough_ns[kind] = min(enough_ns + gap_ns, now_ns)
        self._ballots.shift(gap_ns)

    def close_complete(self) -> None:
        """Close each round that waited for removed members only."""
        for kind in RoundKind:
            if self._membership.size:
                self._close_if_complete(kind)

    def _close_if_complete(self, kind: RoundKind) -> None:
        requested = self.requested[kind]
        if requested and all(peer.id in requested for peer in self._membership.members()):
            self._complete(kind)
        else:
            self._go_on_if_due(kind)

    def _quorum(self, kind: RoundKind) -> Quorum | None:
        """Return the quorum of a round that has enough calls, if all of these allow one.

        Each group must have enough: otherwise newcomers could enter a group whose members are in
        the middle of their work. Callers may name different quorums: all must be satisfied, and
        the last counts for the grace.
        """
        requested, quorums = self.requested[kind], self._quorums[kind]
        if not requested or len(quorums) < len(requested):
            return None
        members = self._membership.members()
        sizes = Counter(peer.group for peer in members)
        calls = Counter(peer.group for peer in members if peer.id in requested)
        for quorum in set(quorums.values()):
            if any(calls[group] < quorum.of(size) for group, size in sizes.items()):
                return None
        return next(reversed(quorums.values()))

    def goes_on_by_itself(self, kind: RoundKind) -> bool:
        """Whether the open round of a kind needs no further call."""
        return self._quorum(kind) is not None

    def go_on(self) -> None:
        """At a tick: close rounds without late members, if the grace is over.

        Then members of a run with a quorum hear of newcomers that are ready: those that compute may
        admit them at once.
        """
        for kind in RoundKind:
            self._go_on_if_due(kind)
        update = self.present(RoundKind.UPDATE_TOPOLOGY)
        is_news = self._is_quorate and update != self._told_of_newcomers
        if is_news and self._membership.admissible():
            self._told_of_newcomers = update
            for peer in self._membership.members():
                if peer.id not in self.requested[update.kind]:
                    self._outbox.send(peer, msg.RoundAwaits(update, newcomers=True))

    def _go_on_if_due(self, kind: RoundKind) -> None:
        """Close a round without late members, if the grace is over.

        When the grace begins, the missing members are notified: they may be able to call at once.
        """
        quorum = self._quorum(kind)
        if quorum is None:
            self._enough_ns.pop(kind, None)
            return
        last_ns = self._asked_ns[kind][1]
        missing = [p for p in self._membership.members() if p.id not in self.requested[kind]]
        if kind not in self._enough_ns:
            self._enough_ns[kind] = max(last_ns, self._changed_ns)
            self._notify_missing(kind)
        enough_ns = self._enough_ns[kind]
        goes_on_ns = self._ballots.arrivals.at(kind).goes_on_ns(quorum, enough_ns)
        if all(peer.left_out for peer in missing) or self._outbox.now_ns >= goes_on_ns:
            self._complete(kind)

    def _notify_missing(self, kind: RoundKind) -> None:
        """Tell members that have not made the call: they may be able to make it at once."""
        for peer in self._membership.members():
            if peer.id not in self.requested[kind]:
                self._outbox.send(peer, msg.RoundAwaits(self.present(kind)))

    def _complete(self, kind: RoundKind) -> None:
        members, requested = self._membership.members(), self.requested[kind]
        late = [peer for peer in members if peer.id not in requested]
        if self._quorums[kind]:
            since_ns = self._enough_ns.get(kind, self._asked_ns[kind][1])
            lags_ns = (max(0, at_ns - since_ns) for at_ns in self._calls_ns[kind])
            for lag_ns in (*lags_ns, *(None for _ in late)):
                self._ballots.arrivals.at(kind).note(lag_ns)
        newcomers = self._membership.admissible()
        if kind is RoundKind.UPDATE_TOPOLOGY:
            self._membership.updates = self._counts[kind] + 1
            self._admit(newcomers, {} if late else self._renewed_plan(newcomers))
        elif kind is RoundKind.OPTIMIZE_TOPOLOGY:
            self._renew_outdated()
        self._close(kind, members, pending=bool(newcomers))
        if kind is RoundKind.UPDATE_TOPOLOGY:
            self._tell_admitted(newcomers)
        for peer in late:
            peer.left_out = True
        for group in sorted({peer.group for peer in late}):
            self._ballots.supersede(group)

    def get_stuck(self, kind: RoundKind, reason: str) -> None:
        """End a round with ``reason``, because the members wait in different calls."""
        self._close(kind, self._membership.members(), pending=False, lockstep=reason)

    def _close(
        self, kind: RoundKind, members: list[RegisteredPeer], *, pending: bool, lockstep: str = ""
    ) -> None:
        round_id = self.present(kind)
        self._counts[kind] += 1
        cause = AbortCause.LOCKSTEP if lockstep else None
        (opened_ns, last_ns), now_ns = self._asked_ns[kind], self._outbox.now_ns
        last = next(reversed(self.requested[kind]))
        self._finals.ended.note(
            EndedCall(kind.call_name, None, opened_ns, last, last_ns, now_ns, 0, cause)
        )
        self._forget_requests(kind)
        version, sequence = self._membership.version, self._finals.next_sequence()
        answer = msg.RoundClosed(round_id, version, pending, lockstep, sequence)
        self._finals.answer(answer, members, proposes=bool(lockstep))

    # -- admission -----------------------------------------------------------------------------

    def _admit(self, newcomers: list[RegisteredPeer], plans: Mapping[int, AlgorithmTable]) -> None:
        renew = {**dict.fromkeys(self._ballots.groups_with_many_numbers()), **plans}
        if not newcomers and not renew:
            return
        informed = self._membership.members()
        self._ratification.note_masters(newcomers)
        self._membership.admit(newcomers, renew, self._ballots.busy_views())
        self._ballots.forget_numbers()
        self._finals.tell_rosters(informed)
        for peer in newcomers:
            self._outbox.announce("admitted", peer, f"world size {self._membership.size}")

    def admit_into_empty_run(self, *, at_tick: bool = False) -> None:
        """Admit newcomers if the run has no members; with many peers only ``at_tick``."""
        if self._membership.size or not self._ratification.has_consent:
            return
        if len(self._membership.peers) > SEATED_AT_ONCE_MAX and not at_tick:
            return
        for kind in RoundKind:
            self._forget_requests(kind)
        newcomers = self._membership.admissible()
        self._admit(newcomers, {})
        self._tell_admitted(newcomers)

    def _tell_admitted(self, newcomers: list[RegisteredPeer]) -> None:
        for peer in newcomers:
            peer.admission = self.admission(peer)
            self._ratification.tell_admitted(peer, peer.admission)

    def admission(self, peer: RegisteredPeer) -> msg.Admitted:
        """Return the message that tells a newcomer that it is a member."""
        counts = tuple(msg.RoundCount(kind, n) for kind, n in self._counts.items())
        roster = self._membership.roster(peer.group)
        expected = self._ballots.expected.get(peer.group, NOTHING_EXPECTED)
        return msg.Admitted(roster, counts, self._ratification.ratified, expected)

    def _renewed_plan(self, newcomers: list[RegisteredPeer]) -> dict[int, AlgorithmTable]:
        """Return a much faster plan of at most one group; a group with newcomers gets one anyway.

        Its present view stays open, as after an admission.
        """
        measured = self._membership.measured - {peer.group for peer in newcomers}
        if not measured:
            return {}
        groups = self._membership.groups()
        group = self._renewal.due(measured, groups, self._outbox.now_ns)
        plan = self._membership.better_plan(group) if group is not None else None
        return {group: plan} if group is not None and plan is not None else {}

    def _renew_outdated(self) -> None:
        """Open a new view of each group for which another plan is much faster.

        A group with undecided operations keeps its view: callers may have left the round's call.
        """
        busy = {group for group, _ in self._ballots.busy_views()}
        idle = sorted(set(self._membership.groups()) - busy)
        plans = {group: self._membership.better_plan(group) for group in idle}
        renewed = {group: plan for group, plan in plans.items() if plan is not None}
        for group, plan in renewed.items():
            self._membership.reorder(group, self._membership.order(group), plan)
        if renewed:
            self._ballots.forget_numbers()
            self._finals.tell_rosters(self._membership.members())

    def check(self, history: History) -> None:
        """Assert that every open round still lacks the call of a member.

        Raises:
            InvariantViolation: a round lacks no call, but is open.
        """
        members = self._membership.members()
        for kind, requested in self.requested.items():
            if requested and all(peer.id in requested for peer in members):
                raise InvariantViolation(f"round {kind.name} is complete, but open", history)
