"""``MasterMachine``: closes rounds and decides operations for the peers of a run.

Pure: :meth:`MasterMachine.handle` takes one event and the time and returns effects in the order in
which they must happen. It knows connections only as numbers that the shell hands out.

Invariants:

* An operation starts when every member of its view has asked for the same thing, and its outcome
  (:class:`~pccl.protocol.operation.Ballot`) is announced once, to every member that is left.
* Outcomes and round answers are kept until everyone concerned has acknowledged them.
* A member is removed for one of the causes in :class:`~pccl.protocol.types.RemovalCause` only.
* Membership changes reach a peer before anything that was decided because of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.history import InvariantViolation
from pccl.protocol.kept import Kept
from pccl.protocol.limits import OPERATIONS_OPEN_MAX, OWED_MAX, TAGS_PER_VIEW_MAX, Timing
from pccl.protocol.lockstep import AskBlocked, Finding, LockstepWatch, LongWait, Stuck, Wait
from pccl.protocol.membership import RegisteredPeer
from pccl.protocol.operation import Ballot, Commit, Decision, Phase, Start, name_peers
from pccl.protocol.registrar import Registrar
from pccl.protocol.types import AbortCause, OperationId, PeerId, RemovalCause, RoundId, RoundKind


class MasterMachine(Registrar):
    """Coordinates one run.

    Args:
        timing: deadlines.
        run: the run's id, 16 bytes.
        term: number of this incarnation.
        random_bytes: source of resume tokens; must be unpredictable outside simulation.
        now_ns: the present.
    """

    def __init__(
        self,
        timing: Timing,
        run: bytes,
        term: int,
        random_bytes: Callable[[int], bytes],
        now_ns: int,
    ) -> None:
        super().__init__(timing, run, term, random_bytes, now_ns)
        self._rounds: dict[RoundKind, dict[PeerId, None]] = {kind: {} for kind in RoundKind}
        """Who has made the call that the present round of each kind waits for."""
        self._round_counts: dict[RoundKind, int] = dict.fromkeys(RoundKind, 0)
        self._ballots: dict[OperationId, Ballot] = {}
        self._opened: Counter[PeerId] = Counter()
        """How many of them were opened by each member."""
        self._next_n: dict[tuple[int, int, int], int] = {}
        """(group, open view, tag) -> number of the next operation that may be asked for."""
        self._outcomes: Kept[OperationId, msg.OperationEnded] = Kept()
        self._answers: Kept[RoundId, msg.RoundClosed] = Kept()
        self._lockstep = LockstepWatch(timing)

    # -- what peers say ------------------------------------------------------------------------

    def _on_request(self, peer: RegisteredPeer, message: msg.Message) -> None:
        match message:
            case msg.Heartbeat():
                self._on_heartbeat(peer, message)
            case msg.BlockedReply(query, blocked):
                peer.blocked = blocked
                self._lockstep.answered(peer.id, query, blocked=blocked)
            case msg.RoundRequest(round_id):
                peer.blocked = False
                self._on_round_request(peer, round_id)
            case msg.OperationRequest():
                peer.blocked = False
                self._on_operation_request(peer, message)
            case msg.OperationDone(operation, digest):
                ballot = self._find_ballot(peer, operation, opens=False)
                if ballot is not None:
                    self._decide(ballot, ballot.done(peer.id, digest, self._now_ns))
            case msg.Withdraw(operation, reason):
                ballot = self._find_ballot(peer, operation, opens=True)
                if ballot is not None:
                    self._decide(ballot, ballot.withdraw(peer.id, reason))
            case msg.OutcomeQuery(operation):
                self._find_ballot(peer, operation, opens=False)
            case _:
                raise RemoteProtocolError(reason=f"unexpected {type(message).__name__}")

    def _owed_to(self, peer: RegisteredPeer) -> Iterator[msg.MasterMessage]:
        for ballot in self._ballots.values():
            if peer.id in ballot.survivors and ballot.phase is Phase.STARTED:
                yield msg.OperationStarted(ballot.operation)
        yield from self._outcomes.owed_to(peer.id)
        yield from self._answers.owed_to(peer.id)

    def _on_heartbeat(self, peer: RegisteredPeer, message: msg.Heartbeat) -> None:
        peer.blocked = message.blocked
        for progress in message.progress:
            ballot = self._ballots.get(progress.operation)
            if ballot is not None and peer.id in ballot.survivors:
                ballot.report(peer.id, progress, self._now_ns)
        for operation in message.operations:
            self._outcomes.acknowledge(operation, peer.id)
        for round_id in message.rounds:
            self._answers.acknowledge(round_id, peer.id)

    # -- rounds --------------------------------------------------------------------------------

    def _on_round_request(self, peer: RegisteredPeer, round_id: RoundId) -> None:
        present = self._round_counts[round_id.kind]
        if not peer.admitted or round_id.n > present:
            raise RemoteProtocolError(reason=f"{round_id} is not open")
        if round_id.n < present:
            answer = self._answers.owed(round_id, peer.id)
            if answer is None:
                raise RemoteProtocolError(reason=f"{round_id} was acknowledged")
            self._send(peer, answer)
            return
        self._rounds[round_id.kind][peer.id] = None
        self._close_round_if_complete(round_id.kind)

    def _close_round_if_complete(self, kind: RoundKind) -> None:
        requested = self._rounds[kind]
        members = self.membership.members()
        if not requested or any(peer.id not in requested for peer in members):
            return
        newcomers = self.membership.admissible()
        if kind is RoundKind.UPDATE_TOPOLOGY:
            self._admit(newcomers)
        self._answer_round(kind, members, pending=bool(newcomers))
        if kind is RoundKind.UPDATE_TOPOLOGY:
            for peer in newcomers:
                self._send(peer, self._admission(peer))

    def _answer_round(
        self, kind: RoundKind, members: list[RegisteredPeer], *, pending: bool, lockstep: str = ""
    ) -> None:
        round_id = RoundId(kind, self._round_counts[kind])
        self._round_counts[kind] += 1
        self._rounds[kind] = {}
        answer = msg.RoundClosed(round_id, self.membership.version, pending, lockstep)
        self._answers.keep(round_id, answer, [peer.id for peer in members])
        for peer in members:
            self._send(peer, answer)

    def _admit(self, newcomers: list[RegisteredPeer]) -> None:
        renew = self._groups_with_many_numbers()
        if not newcomers and not renew:
            return
        informed = self.membership.members()
        busy = {(ballot.group, ballot.view) for ballot in self._ballots}
        self.membership.admit(newcomers, renew, busy)
        self._forget_numbers()
        self._tell_rosters(informed)
        for peer in newcomers:
            self._announce("admitted", peer, f"world size {len(self.membership.members())}")

    def _admit_into_empty_run(self) -> None:
        if self.membership.members():
            return
        # Nobody is left who could call: the rounds that were open have no scope any more.
        for kind in RoundKind:
            self._rounds[kind] = {}
        newcomers = self.membership.admissible()
        self._admit(newcomers)
        for peer in newcomers:
            self._send(peer, self._admission(peer))

    def _admission(self, peer: RegisteredPeer) -> msg.Admitted:
        counts = tuple(msg.RoundCount(kind, n) for kind, n in self._round_counts.items())
        return msg.Admitted(self.membership.roster(peer.group), counts)

    # -- operations ----------------------------------------------------------------------------

    def _on_operation_request(self, peer: RegisteredPeer, message: msg.OperationRequest) -> None:
        ballot = self._find_ballot(peer, message.operation, opens=True)
        if ballot is not None:
            self._repeat_start(peer, ballot)
            self._decide(ballot, ballot.request(peer.id, message.descriptor, self._now_ns))

    def _find_ballot(
        self, peer: RegisteredPeer, operation: OperationId, *, opens: bool
    ) -> Ballot | None:
        """The ballot that a member's message is about; a new one if that message ``opens`` it.

        None if the operation has ended; ``peer`` is told how. A withdrawal too may be the first
        that is heard of an operation (its request got lost with a connection), and it must end for
        everybody: all members have to count the same numbers.

        Raises:
            RemoteProtocolError: ``peer`` has no part in it, or it is not the next of its tag.
        """
        if operation in self._outcomes:
            outcome = self._outcomes.owed(operation, peer.id)
            if outcome is None:
                raise RemoteProtocolError(reason=f"the outcome of {operation} was acknowledged")
            self._send(peer, outcome)
            return None
        if not peer.admitted or operation.term != self.term or operation.group != peer.group:
            raise RemoteProtocolError(reason=f"operation {operation} is not of this run")
        if operation.view > self.membership.newest_view(operation.group):
            raise RemoteProtocolError(reason=f"operation {operation} of a future view")
        ring = self.membership.ring(operation.group, operation.view)
        if ring is None:
            self._send(peer, self._ended_by_closed_view(operation))
            return None
        if peer.id not in ring:
            raise RemoteProtocolError(reason=f"not a member of view {operation.view}")
        ballot = self._ballots.get(operation)
        if ballot is None:
            tag = (operation.group, operation.view, operation.tag)
            if not opens or operation.n != self._next_n.get(tag, 0):
                raise RemoteProtocolError(reason=f"operation {operation} is not the next one")
            if self._opened[peer.id] >= OPERATIONS_OPEN_MAX:
                raise RemoteProtocolError(reason="too many operations are open")
            self._opened[peer.id] += 1
            ballot = self._ballots[operation] = Ballot(operation, ring, peer.id, self._now_ns)
        return ballot

    def _groups_with_many_numbers(self) -> set[int]:
        """The groups whose newest view has seen so many tags that a new one should begin."""
        if len(self._next_n) <= TAGS_PER_VIEW_MAX:
            return set()
        counts: Counter[tuple[int, int]] = Counter((group, view) for group, view, _ in self._next_n)
        newest = self.membership.newest_view
        return {
            group
            for (group, view), count in counts.items()
            if count > TAGS_PER_VIEW_MAX and view == newest(group)
        }

    def _forget_numbers(self) -> None:
        """Nothing is counted any more in views that are closed."""
        ring = self.membership.ring
        self._next_n = {tag: n for tag, n in self._next_n.items() if ring(tag[0], tag[1])}

    def _ended_by_closed_view(self, operation: OperationId) -> msg.OperationEnded:
        return msg.OperationEnded(
            operation,
            AbortCause.VIEW_CLOSED,
            "a member was lost before this call",
            (),
            self.membership.version,
        )

    def _decide(self, ballot: Ballot, decision: Decision | None) -> None:
        """Announce what a ballot has decided, if anything."""
        if decision is None:
            return
        concerned = [self.membership.peers[peer] for peer in ballot.survivors]
        if isinstance(decision, Start):
            for peer in concerned:
                self._send(peer, msg.OperationStarted(ballot.operation))
            return
        operation = ballot.operation
        del self._ballots[operation]
        self._opened[ballot.opener] -= 1
        if self.membership.ring(operation.group, operation.view) is not None:
            self._next_n[operation.group, operation.view, operation.tag] = operation.n + 1
        committed = isinstance(decision, Commit)
        ended = msg.OperationEnded(
            ballot.operation,
            None if isinstance(decision, Commit) else decision.cause,
            "" if isinstance(decision, Commit) else decision.reason,
            ballot.members if committed else (),
            self.membership.version,
        )
        self._outcomes.keep(ballot.operation, ended, [peer.id for peer in concerned])
        for peer in concerned:
            self._send(peer, ended)

    def _repeat_start(self, peer: RegisteredPeer, ballot: Ballot) -> None:
        if ballot.phase is Phase.STARTED:
            self._send(peer, msg.OperationStarted(ballot.operation))

    def _acknowledges(self, peer: RegisteredPeer) -> bool:
        owed = self._outcomes.count_owed_to(peer.id) + self._answers.count_owed_to(peer.id)
        return owed <= OWED_MAX

    # -- removal -------------------------------------------------------------------------------

    def _draw_conclusions(self, peer: RegisteredPeer, closed_views: list[int], why: str) -> None:
        self._forget_numbers()
        self._outcomes.forget(peer.id)
        self._answers.forget(peer.id)
        for operation, ballot in list(self._ballots.items()):
            if operation.group == peer.group and operation.view in closed_views:
                self._decide(ballot, ballot.lose(peer.id, why))
        for kind in RoundKind:
            self._rounds[kind].pop(peer.id, None)
            if self.membership.members():
                self._close_round_if_complete(kind)
        del self._opened[peer.id]

    # -- time ----------------------------------------------------------------------------------

    def _awaited(self) -> set[PeerId]:
        awaited: set[PeerId] = set()
        for requested in self._rounds.values():
            if requested:
                members = self.membership.members()
                awaited.update(peer.id for peer in members if peer.id not in requested)
        for ballot in self._ballots.values():
            awaited.update(ballot.waiting_for())
        return awaited

    def _shift_deadlines(self, gap_ns: int) -> None:
        super()._shift_deadlines(gap_ns)
        for ballot in self._ballots.values():
            ballot.progress_ns = min(ballot.progress_ns + gap_ns, self._now_ns)

    def _judge_waits(self) -> None:
        for ballot in list(self._ballots.values()):
            self._judge_progress(ballot)
        blocked = [peer.id for peer in self.membership.members() if peer.blocked]
        for finding in self._lockstep.look(self._waits(), blocked, self._now_ns):
            self._carry_out(finding)

    def _waits(self) -> list[Wait]:
        """Everything that was requested and isn't decided."""
        waits: list[Wait] = []
        members = [peer.id for peer in self.membership.members()]
        for kind, requested in self._rounds.items():
            if requested:
                round_id = RoundId(kind, self._round_counts[kind])
                missing = tuple(peer for peer in members if peer not in requested)
                waits.append(Wait(round_id, kind.call_name, tuple(requested), missing))
        for operation, ballot in self._ballots.items():
            missing = tuple(ballot.waiting_for()) if ballot.phase is Phase.REQUESTED else ()
            waits.append(Wait(operation, ballot.what, tuple(ballot.requested_by()), missing))
        return waits

    def _carry_out(self, finding: Finding) -> None:
        peers = self.membership.peers
        match finding:
            case LongWait(wait, waited_s, whom):
                subject = wait.subject
                for peer in wait.requested:
                    self._send(
                        peers[peer],
                        msg.RoundWaits(subject, waited_s, whom)
                        if isinstance(subject, RoundId)
                        else msg.OperationWaits(subject, waited_s, whom),
                    )
            case AskBlocked(query, asked):
                for peer in asked:
                    self._send(peers[peer], msg.BlockedQuery(query))
            case Stuck(subjects, reason):
                for subject in subjects:
                    if isinstance(subject, RoundId):
                        members = self.membership.members()
                        self._answer_round(subject.kind, members, pending=False, lockstep=reason)
                    else:
                        ballot = self._ballots[subject]
                        self._decide(ballot, ballot.get_stuck(reason))

    def _judge_progress(self, ballot: Ballot) -> None:
        stalled_ns = self._now_ns - ballot.progress_ns
        if ballot.phase is not Phase.STARTED or stalled_ns < self.timing.ns(self.timing.progress_s):
            return
        culprit = ballot.culprit()
        peer = self.membership.peers.get(culprit) if culprit is not None else None
        if peer is not None and ballot.operation in self._ballots:
            reason = f"{ballot.operation} stands still for {stalled_ns / 1e9:.1f} s"
            self._remove(peer, RemovalCause.NO_PROGRESS, reason)

    def check(self) -> None:
        """Assert what must always hold (tests and the simulator call this after every event).

        Raises:
            InvariantViolation: a rule of this machine is broken; carries its history.
        """
        members = {peer.id: peer for peer in self.membership.members()}
        for operation, ballot in self._ballots.items():
            ring = self.membership.ring(operation.group, operation.view)
            if ballot.phase.ended or operation in self._outcomes:
                raise InvariantViolation(f"{operation} is decided and undecided", self.history)
            if ring != ballot.members or any(peer not in members for peer in ballot.members):
                raise InvariantViolation(f"{operation} is open in a closed view", self.history)
        for owed in (*self._outcomes.everybody_owed(), *self._answers.everybody_owed()):
            strangers = [peer for peer in owed if peer not in members]
            if strangers or not owed:
                raise InvariantViolation(
                    f"outcome kept for {name_peers(strangers) if strangers else 'nobody'}",
                    self.history,
                )
        for kind, requested in self._rounds.items():
            if requested and all(peer in requested for peer in members):
                raise InvariantViolation(f"round {kind.name} should be closed", self.history)
