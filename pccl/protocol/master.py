"""``MasterMachine``: admits peers, closes rounds, decides operations, removes who is gone.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pccl.protocol import messages as msg
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.history import History, InvariantViolation
from pccl.protocol.limits import HOST_CHARACTERS_MAX, PEERS_MAX, REMOVED_KEPT_MAX, Timing
from pccl.protocol.master_events import (
    Announce,
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    MasterEffect,
    MasterEvent,
    Send,
    Tick,
)
from pccl.protocol.membership import Membership, RegisteredPeer
from pccl.protocol.operation import Ballot, Commit, Decision, Phase, Start, name_peers
from pccl.protocol.types import (
    AbortCause,
    Member,
    OperationId,
    PeerId,
    RemovalCause,
    RoundId,
    RoundKind,
)

_Key = TypeVar("_Key", OperationId, RoundId)


@dataclass(slots=True)
class _Kept:
    """A final message and who has not acknowledged it yet."""

    message: msg.OperationEnded | msg.RoundClosed
    unacknowledged: list[PeerId]


class MasterMachine:
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
        self.timing = timing
        self.run = run
        self.term = term
        self.membership = Membership()
        self.history = History("master")
        self._random_bytes = random_bytes
        self._hosts: dict[int, str] = {}
        self._by_connection: dict[int, RegisteredPeer] = {}
        self._last_peer = PeerId(0)
        self._removed: dict[PeerId, tuple[RemovalCause, str]] = {}
        self._rounds: dict[RoundKind, dict[PeerId, None]] = {kind: {} for kind in RoundKind}
        """Who has made the call that the present round of each kind waits for."""
        self._round_counts: dict[RoundKind, int] = dict.fromkeys(RoundKind, 0)
        self._ballots: dict[OperationId, Ballot] = {}
        self._next_n: dict[tuple[int, int, int], int] = {}
        """(group, open view, tag) -> number of the next operation that may be asked for."""
        self._outcomes: dict[OperationId, _Kept] = {}
        self._answers: dict[RoundId, _Kept] = {}
        self._tick_ns = now_ns
        self._beat_ns = now_ns
        self._now_ns = now_ns
        self._effects: list[MasterEffect] = []

    def handle(self, event: MasterEvent, now_ns: int) -> list[MasterEffect]:
        """Take one event; return what must be done, in order."""
        self._now_ns = now_ns
        self.history.record(now_ns, event)
        match event:
            case ControlOpened(connection, host):
                self._hosts[connection] = host
            case ControlMessage(connection, message):
                try:
                    self._on_message(connection, message)
                except RemoteProtocolError as error:
                    self._effects.append(CloseControl(connection, error.reason))
                    self._on_closed(connection, error.reason)
            case ControlClosed(connection, reason):
                self._on_closed(connection, reason)
            case Tick():
                self._on_tick()
        effects, self._effects = self._effects, []
        for effect in effects:
            self.history.record(now_ns, effect)
        return effects

    # -- connections ---------------------------------------------------------------------------

    def _on_message(self, connection: int, message: msg.Message) -> None:
        if connection not in self._hosts:
            return  # closed by us; what it still had on its way no longer counts
        peer = self._by_connection.get(connection)
        if peer is None:
            match message:
                case msg.Register():
                    self._register(connection, message)
                case msg.Resume():
                    self._resume(connection, message)
                case _:
                    raise RemoteProtocolError(reason="did not begin with Register or Resume")
            return
        peer.heard_ns = self._now_ns
        match message:
            case msg.Heartbeat():
                self._on_heartbeat(peer, message)
            case msg.RoundRequest(round_id):
                self._on_round_request(peer, round_id)
            case msg.OperationRequest():
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
            case msg.LinkReport(other, up, reason):
                self._on_link_report(peer, other, None if up else reason)
            case msg.Goodbye():
                self._remove(peer, RemovalCause.GOODBYE, "it left")
            case _:
                raise RemoteProtocolError(reason=f"unexpected {type(message).__name__}")

    def _on_closed(self, connection: int, reason: str) -> None:
        self._hosts.pop(connection, None)
        peer = self._by_connection.pop(connection, None)
        if peer is None or peer.connection != connection:
            return
        peer.connection = None
        peer.control_lost_ns = self._now_ns
        trouble = self.membership.link_trouble(peer.id)
        if trouble is not None:
            self._remove(peer, RemovalCause.CONNECTIONS_LOST, f"{reason}; {trouble}")

    def _register(self, connection: int, message: msg.Register) -> None:
        if len(self.membership.peers) >= PEERS_MAX or len(message.host) > HOST_CHARACTERS_MAX:
            full = len(self.membership.peers) >= PEERS_MAX
            self._refuse(connection, None, "the run is full" if full else "host name too long")
            return
        self._last_peer = PeerId(self._last_peer + 1)
        host = message.host or self._hosts[connection]
        peer = RegisteredPeer(
            id=self._last_peer,
            group=message.group,
            member=Member(self._last_peer, host, message.port),
            token=self._random_bytes(16),
            connection=connection,
            heard_ns=self._now_ns,
            pending_ns=self._now_ns,
        )
        self.membership.peers[peer.id] = peer
        self._by_connection[connection] = peer
        self._send(peer, msg.Registered(peer.id, self.term, self.run, peer.token))
        self._send(peer, msg.LinkPlan(self.membership.elders(peer)))
        self._announce("registered", peer, f"from {host}:{message.port}")
        self._admit_into_empty_run()

    def _resume(self, connection: int, message: msg.Resume) -> None:
        peer = self.membership.peers.get(message.peer)
        if peer is None or peer.token != message.token:
            cause, reason = self._removed.get(message.peer, (None, "this master does not know you"))
            self._refuse(connection, cause, reason)
            return
        if peer.connection is not None:  # superseded: the old one's end means nothing any more
            self._effects.append(CloseControl(peer.connection, "superseded"))
            self._hosts.pop(peer.connection, None)
            del self._by_connection[peer.connection]
        peer.connection = connection
        peer.control_lost_ns = None
        peer.heard_ns = self._now_ns
        self._by_connection[connection] = peer
        self._send(peer, msg.Resumed())
        self._send(peer, msg.LinkPlan(self.membership.elders(peer)))
        if not peer.admitted:
            self._admit_into_empty_run()
            return
        if message.roster_version == 0:  # it was admitted, but that news was lost
            self._send(peer, self._admission(peer))
        else:
            for roster in self.membership.rosters_after(peer.group, message.roster_version):
                self._send(peer, msg.RosterChanged(roster))
        for ballot in self._ballots.values():
            if peer.id in ballot.survivors:
                self._repeat_start(peer, ballot)
        for kept in (*self._outcomes.values(), *self._answers.values()):
            if peer.id in kept.unacknowledged:
                self._send(peer, kept.message)

    def _refuse(self, connection: int, cause: RemovalCause | None, reason: str) -> None:
        self._effects.append(Send(connection, msg.Refused(cause, reason)))
        self._effects.append(CloseControl(connection, reason))
        self._hosts.pop(connection, None)

    def _on_heartbeat(self, peer: RegisteredPeer, message: msg.Heartbeat) -> None:
        for progress in message.progress:
            ballot = self._ballots.get(progress.operation)
            if ballot is not None and peer.id in ballot.survivors:
                ballot.report(peer.id, progress, self._now_ns)
        for operation in message.operations:
            _acknowledge(self._outcomes, operation, peer.id)
        for round_id in message.rounds:
            _acknowledge(self._answers, round_id, peer.id)

    def _on_link_report(self, peer: RegisteredPeer, other: PeerId, why: str | None) -> None:
        self.membership.report_link(peer.id, other, why)
        accused = self.membership.peers.get(other)
        if why is None or accused is None or not self.membership.may_accuse(peer.id):
            return
        if accused.connection is None:
            self._remove(accused, RemovalCause.CONNECTIONS_LOST, f"peer {peer.id}: {why}")

    # -- rounds --------------------------------------------------------------------------------

    def _on_round_request(self, peer: RegisteredPeer, round_id: RoundId) -> None:
        present = self._round_counts[round_id.kind]
        if not peer.admitted or round_id.n > present:
            raise RemoteProtocolError(reason=f"{round_id} is not open")
        if round_id.n < present:
            kept = self._answers.get(round_id)
            if kept is None or peer.id not in kept.unacknowledged:
                raise RemoteProtocolError(reason=f"{round_id} was acknowledged")
            self._send(peer, kept.message)
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
        round_id = RoundId(kind, self._round_counts[kind])
        self._round_counts[kind] += 1
        self._rounds[kind] = {}
        answer = msg.RoundClosed(round_id, self.membership.version, bool(newcomers))
        self._answers[round_id] = _Kept(answer, [peer.id for peer in members])
        for peer in members:
            self._send(peer, answer)
        if kind is RoundKind.UPDATE_TOPOLOGY:
            for peer in newcomers:
                self._send(peer, self._admission(peer))

    def _admit(self, newcomers: list[RegisteredPeer]) -> None:
        if not newcomers:
            return
        informed = self.membership.members()
        busy = {(ballot.group, ballot.view) for ballot in self._ballots}
        self.membership.admit(newcomers, busy)
        self._forget_numbers()
        self._tell_rosters(informed)
        for peer in newcomers:
            self._announce("admitted", peer, f"world size {len(self.membership.members())}")

    def _admit_into_empty_run(self) -> None:
        pending = [peer for peer in self.membership.pending() if peer.connection is not None]
        if pending and not self.membership.members():
            # Nobody is left who could call: the rounds that were open have no scope any more.
            for kind in RoundKind:
                self._rounds[kind] = {}
            self._admit(pending[:1])
            self._send(pending[0], self._admission(pending[0]))

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
        kept = self._outcomes.get(operation)
        if kept is not None:
            if peer.id not in kept.unacknowledged:
                raise RemoteProtocolError(reason=f"the outcome of {operation} was acknowledged")
            self._send(peer, kept.message)
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
            ballot = self._ballots[operation] = Ballot(operation, ring, self._now_ns)
        return ballot

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
        if concerned:
            self._outcomes[ballot.operation] = _Kept(ended, [peer.id for peer in concerned])
        for peer in concerned:
            self._send(peer, ended)

    def _repeat_start(self, peer: RegisteredPeer, ballot: Ballot) -> None:
        if ballot.phase is Phase.STARTED:
            self._send(peer, msg.OperationStarted(ballot.operation))

    # -- removal -------------------------------------------------------------------------------

    def _remove(self, peer: RegisteredPeer, cause: RemovalCause, reason: str) -> None:
        """Take a peer out of the run, and draw every conclusion from that."""
        self._announce("removed", peer, f"{cause.name}: {reason}")
        self._removed[peer.id] = (cause, reason)
        if len(self._removed) > REMOVED_KEPT_MAX:
            del self._removed[next(iter(self._removed))]
        if peer.connection is not None:
            if cause is not RemovalCause.GOODBYE:
                self._send(peer, msg.Refused(cause, reason))
            self._effects.append(CloseControl(peer.connection, reason))
            self._hosts.pop(peer.connection, None)
            self._by_connection.pop(peer.connection, None)
            peer.connection = None
        closed = self.membership.remove(peer)
        self._forget_numbers()
        if peer.admitted:
            self._tell_rosters(self.membership.members())
        for younger in self.membership.peers.values():
            if younger.group == peer.group and younger.id > peer.id:
                self._send(younger, msg.LinkPlan(self.membership.elders(younger)))
        for operation in list(self._outcomes):
            _acknowledge(self._outcomes, operation, peer.id)
        for round_id in list(self._answers):
            _acknowledge(self._answers, round_id, peer.id)
        for operation, ballot in list(self._ballots.items()):
            if operation.group == peer.group and operation.view in closed:
                self._decide(ballot, ballot.lose(peer.id, f"{cause.name.lower()}, {reason}"))
        for kind in RoundKind:
            self._rounds[kind].pop(peer.id, None)
            if self.membership.members():
                self._close_round_if_complete(kind)
        self._admit_into_empty_run()

    # -- time ----------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        if self._now_ns - self._beat_ns >= self.timing.ns(self.timing.heartbeat_s):
            self._beat_ns = self._now_ns
            for connection in self._by_connection:
                self._effects.append(Send(connection, msg.MasterHeartbeat()))
        gap = self._now_ns - self._tick_ns
        self._tick_ns = self._now_ns
        if gap >= 2 * self.timing.ns(self.timing.tick_s):
            # We slept, not the others: read what has come in meanwhile before judging anybody.
            self._shift_deadlines(gap)
            return
        self._note_who_is_waited_for()
        for peer in list(self.membership.peers.values()):
            if peer.id in self.membership.peers:
                self._judge(peer)
        for ballot in list(self._ballots.values()):
            self._judge_progress(ballot)

    def _shift_deadlines(self, gap_ns: int) -> None:
        for peer in self.membership.peers.values():
            peer.heard_ns = min(peer.heard_ns + gap_ns, self._now_ns)
            peer.pending_ns = min(peer.pending_ns + gap_ns, self._now_ns)
            if peer.control_lost_ns is not None:
                peer.control_lost_ns = min(peer.control_lost_ns + gap_ns, self._now_ns)
            if peer.waited_for_ns is not None:
                peer.waited_for_ns = min(peer.waited_for_ns + gap_ns, self._now_ns)
        for ballot in self._ballots.values():
            ballot.progress_ns = min(ballot.progress_ns + gap_ns, self._now_ns)

    def _note_who_is_waited_for(self) -> None:
        awaited: set[PeerId] = set()
        for requested in self._rounds.values():
            if requested:
                members = self.membership.members()
                awaited.update(peer.id for peer in members if peer.id not in requested)
        for ballot in self._ballots.values():
            awaited.update(ballot.waiting_for())
        for peer in self.membership.peers.values():
            if peer.id not in awaited:
                peer.waited_for_ns = None
            elif peer.waited_for_ns is None:
                peer.waited_for_ns = self._now_ns

    def _judge(self, peer: RegisteredPeer) -> None:
        """Remove ``peer`` if one of its deadlines has passed."""
        timing, now_ns = self.timing, self._now_ns
        if peer.control_lost_ns is not None:
            if now_ns - peer.control_lost_ns >= timing.ns(timing.resume_s):
                self._remove(peer, RemovalCause.CONTROL_LOST, "its connection was not resumed")
            return
        silent_since = peer.heard_ns
        if peer.admitted:
            if peer.waited_for_ns is None:
                return
            silent_since = max(silent_since, peer.waited_for_ns)
        if now_ns - silent_since >= timing.ns(timing.deadline_s):
            silence_s = (now_ns - peer.heard_ns) / 1e9
            awaited = " while awaited" if peer.admitted else ""
            self._remove(peer, RemovalCause.SILENT, f"silent for {silence_s:.1f} s{awaited}")
            return
        missing = None if peer.admitted else self.membership.missing_link(peer)
        if missing is None:
            peer.pending_ns = now_ns
        elif now_ns - peer.pending_ns >= timing.ns(timing.link_s):
            neighbour, why = missing
            self._remove(
                peer,
                RemovalCause.UNREACHABLE,
                f"it could not be linked to peer {neighbour}: {why}; open its port "
                f"({peer.member.host}:{peer.member.port}) to the other members",
            )

    def _judge_progress(self, ballot: Ballot) -> None:
        stalled_ns = self._now_ns - ballot.progress_ns
        if ballot.phase is not Phase.STARTED or stalled_ns < self.timing.ns(self.timing.progress_s):
            return
        culprit = ballot.culprit()
        peer = self.membership.peers.get(culprit) if culprit is not None else None
        if peer is not None and ballot.operation in self._ballots:
            reason = f"{ballot.operation} stands still for {stalled_ns / 1e9:.1f} s"
            self._remove(peer, RemovalCause.NO_PROGRESS, reason)

    # -- helpers -------------------------------------------------------------------------------

    def _tell_rosters(self, peers: list[RegisteredPeer]) -> None:
        for peer in peers:
            self._send(peer, msg.RosterChanged(self.membership.roster(peer.group)))

    def _send(self, peer: RegisteredPeer, message: msg.MasterMessage) -> None:
        if peer.connection is not None:
            self._effects.append(Send(peer.connection, message))

    def _announce(self, what: str, peer: RegisteredPeer, text: str) -> None:
        self._effects.append(Announce(what, peer.id, peer.group, text))

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
        for kept in (*self._outcomes.values(), *self._answers.values()):
            strangers = [peer for peer in kept.unacknowledged if peer not in members]
            if strangers or not kept.unacknowledged:
                raise InvariantViolation(
                    f"outcome kept for {name_peers(strangers) if strangers else 'nobody'}",
                    self.history,
                )
        for kind, requested in self._rounds.items():
            if requested and all(peer in requested for peer in members):
                raise InvariantViolation(f"round {kind.name} should be closed", self.history)


def _acknowledge(keep: dict[_Key, _Kept], key: _Key, peer: PeerId) -> None:
    kept = keep.get(key)
    if kept is not None and peer in kept.unacknowledged:
        kept.unacknowledged.remove(peer)
        if not kept.unacknowledged:
            del keep[key]
