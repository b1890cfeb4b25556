"""Outcomes and answers in one sequence, kept until every member concerned has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pccl.machines.history import History, InvariantViolation
from pccl.machines.master.ballots.kept import Kept, affordable
from pccl.machines.master.connections import Outbox
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.machines.master.succession.ratification import Ratification
from pccl.machines.master.succession.recovered import Recovered
from pccl.protocol import messages as msg
from pccl.protocol.limits import OWED_MAX
from pccl.protocol.operation import name_peers
from pccl.protocol.shared_state import Expected
from pccl.protocol.types import OperationId, PeerId, RoundId
from pccl.telemetry.ended import EndedCalls


class Finals:
    """The outcomes of operations and the answers to rounds that a member may still lack."""

    def __init__(self, membership: Membership, ratification: Ratification, outbox: Outbox) -> None:
        self._membership = membership
        self._ratification = ratification
        self._outbox = outbox
        self.outcomes: Kept[OperationId, msg.OperationEnded] = Kept()
        self.answers: Kept[RoundId, msg.RoundClosed] = Kept()
        self.ended = EndedCalls()
        """The decisions for people. A new master begins without any."""
        self._sequence = 0
        """The place of the last decision."""

    def next_sequence(self) -> int:
        """Return the place of a new decision."""
        self._sequence += 1
        return self._sequence

    @property
    def settled(self) -> int:
        """The first place in the sequence whose decision a member may still lack."""
        outcome, answer = self.outcomes.oldest(), self.answers.oldest()
        return min(
            self._sequence + 1 if outcome is None else outcome.sequence,
            self._sequence + 1 if answer is None else answer.sequence,
        )

    # -- sending -------------------------------------------------------------------------------

    def end(
        self,
        ended: msg.OperationEnded,
        concerned: list[PeerId],
        expected: Expected,
        *,
        follows: bool,
    ) -> None:
        """Keep the outcome of an operation, and send it.

        Args:
            ended: the outcome.
            concerned: the members that have to receive the outcome.
            expected: the group's expected shared state from now on.
            follows: whether every master that a majority follows reaches this outcome by itself.
        """
        self.outcomes.keep(ended.operation, ended, concerned)
        if concerned and not follows:
            self._ratification.propose(ended, expected)
        self._ratification.tell([self._membership.peers[peer] for peer in concerned], ended)

    def answer(
        self, answer: msg.RoundClosed, members: Sequence[RegisteredPeer], *, proposes: bool
    ) -> None:
        """Keep and send the answer to a round; ``proposes``: another master could contradict it."""
        self.answers.keep(answer.round, answer, [peer.id for peer in members])
        if proposes:
            self._ratification.propose(answer)
        self._ratification.tell(members, answer)

    def tell_rosters(
        self, peers: Iterable[RegisteredPeer], departures: tuple[msg.Departure, ...] = ()
    ) -> None:
        """Send the new rosters after a change of the membership.

        Before that, propose the commits in views that these rosters close.
        """
        ring = self._membership.ring
        for outcome in self.outcomes:
            operation = outcome.operation
            is_open = ring(operation.group, operation.view) is not None
            has_proposed = self._ratification.has_proposed(operation)
            if outcome.abort is None and not is_open and not has_proposed:
                self._ratification.propose(outcome)
        for peer in peers:
            told = msg.RosterChanged(self._membership.roster(peer.group), departures)
            self._outbox.send(peer, told)

    # -- what members lack ---------------------------------------------------------------------

    def acknowledge(
        self, peer: PeerId, operations: Iterable[OperationId], rounds: Iterable[RoundId]
    ) -> None:
        """Record that a member has these outcomes and answers."""
        self._ratification.acknowledged(self.outcomes.acknowledge(operations, peer))
        self._ratification.acknowledged(self.answers.acknowledge(rounds, peer))

    def owed_to(self, peer: PeerId) -> Iterator[msg.MasterMessage]:
        """Yield the outcomes and answers that a member may lack."""
        yield from self.outcomes.owed_to(peer)
        yield from self.answers.owed_to(peer)

    def are_acknowledged_by(self, peer: PeerId) -> bool:
        """Whether a member has at most ``OWED_MAX`` unacknowledged outcomes and answers."""
        return self.outcomes.count_owed_to(peer) + self.answers.count_owed_to(peer) <= OWED_MAX

    def forget(self, gone: Iterable[PeerId]) -> None:
        """Forget which outcomes and answers removed members lack."""
        for peer in gone:
            self._ratification.acknowledged(self.outcomes.forget(peer))
            self._ratification.acknowledged(self.answers.forget(peer))

    # -- a master before this one ----------------------------------------------------------------

    def take_up(self, recovered: Recovered) -> list[OperationId]:
        """Keep the finals of a recovered run; return the operations that have an outcome."""
        self.outcomes, self.answers = Kept(), Kept()
        self._sequence = recovered.sequence
        told = {
            report.peer: {o.outcome.sequence for o in report.outcomes if o.told}
            | {a.answer.sequence for a in report.answers if a.told}
            for report in recovered.returned
        }
        sizes = Counter(peer.group for peer in self._membership.members())
        outcomes = affordable(
            recovered.outcomes, told.values(), lambda outcome: sizes[outcome.operation.group]
        )
        for operation, outcome in outcomes:
            members = [peer.id for peer in self._membership.members(operation.group)]
            lacking = [peer for peer in members if outcome.sequence not in told.get(peer, ())]
            self.outcomes.keep(operation, outcome, lacking)
            if lacking:
                self._ratification.propose(outcome, recovered.states[operation], sends=False)
        members = [peer.id for peer in self._membership.members()]
        for round_id, answer in affordable(
            recovered.answers, told.values(), lambda _: len(members)
        ):
            lacking = [peer for peer in members if answer.sequence not in told.get(peer, ())]
            self.answers.keep(round_id, answer, lacking)
            if lacking:
                self._ratification.propose(answer, sends=False)
        taken = {
            (report.peer, count.kind): count.n
            for report in recovered.returned
            for count in report.header.rounds
        }
        for kind, count in recovered.counts.items():
            last = RoundId(kind, count - 1)
            lacking = [peer for peer in members if taken.get((peer, kind), 0) < count]
            if lacking and last not in recovered.answers:  # no returning member knows the answer
                self.answers.keep(last, self._closed(last), lacking)
        return [operation for operation, _ in outcomes]

    def close_again(self, round_id: RoundId, peer: PeerId) -> msg.RoundClosed:
        """Keep and return, for ``peer``, the answer to a round that an earlier master closed."""
        answer = self.answers.get(round_id) or self._closed(round_id)
        self.answers.keep(round_id, answer, [peer])
        return answer

    def _closed(self, round_id: RoundId) -> msg.RoundClosed:
        version, sequence = self._membership.version, self.next_sequence()
        return msg.RoundClosed(round_id, version, pending=False, sequence=sequence)

    def check(self, history: History) -> None:
        """Assert that each final is kept for at least one member, and for members only.

        Raises:
            InvariantViolation: a final is kept for no member, or for another peer.
        """
        members = {peer.id for peer in self._membership.members()}
        for owed in (*self.outcomes.everybody_owed(), *self.answers.everybody_owed()):
            if not owed or not members.issuperset(owed):
                strangers = [peer for peer in owed if peer not in members]
                whom = f"{name_peers(strangers)}, not a member" if strangers else "no member"
                raise InvariantViolation(f"a final is kept for {whom}", history)
