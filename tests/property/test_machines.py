"""The machines against everything that may happen to them: alone, in a closed loop, and twins."""

from __future__ import annotations

import random
import re
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import combinations, count

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.master import events as me
from pccl.machines.master.machine import MasterMachine
from pccl.machines.peer import events as pe
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.machines.reachability import MeetPeer, TryAddress, TryCaller
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import (
    AbortCause,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    Roster,
    RoundId,
    RoundKind,
)
from tests.support.scenarios import key
from tests.support.secrets import MASTER_SIGNER

SECOND = 1_000_000_000
TIMING = Timing()
DESCRIPTORS = [
    Descriptor(DataType.FLOAT, ReduceOp.SUM, 8),
    Descriptor(DataType.FLOAT, ReduceOp.AVG, 8),
]
SEEDS = st.integers(0, (1 << 32) - 1)
UPDATE = RoundKind.UPDATE_TOPOLOGY


def new_master(now_ns: int = 0) -> MasterMachine:
    numbers = count(1)
    return MasterMachine(
        TIMING, b"r" * 16, 1, lambda size: next(numbers).to_bytes(size, "big"), now_ns,
        signer=MASTER_SIGNER,
    )  # fmt: skip


# -- what must be true of everything that a master does ------------------------------------------


class MasterWitness:
    """Watches a master from outside: keeps the facts, and holds each effect against them."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.peer_of: dict[int, PeerId] = {}
        self.connection_of: dict[PeerId, int] = {}
        self.proven: dict[int, bytes] = {}
        """Connection -> the key of the process behind it."""
        self.keys: dict[PeerId, bytes] = {}
        self.group_of: dict[PeerId, int] = {}
        self.min_peers: dict[PeerId, int] = {}
        self.blocked: dict[PeerId, bool] = {}
        """What each peer has said last."""
        self.replied: set[tuple[PeerId, int]] = set()
        """Who has answered to which query that it is blocked."""
        self.last_query = 0
        self.members: set[PeerId] = set()
        self.new_members: set[PeerId] = set()
        """Those that were admitted by the present event."""
        self.resuming = False
        """Whether the present event resumes a connection."""
        self.removed: set[PeerId] = set()
        self.shown: dict[PeerId, list[int]] = {}
        """Versions of the rosters that each peer was sent."""
        self.rings: dict[tuple[int, int], tuple[PeerId, ...]] = {}
        self.rosters: dict[tuple[int, int], Roster] = {}
        self.requests: dict[OperationId, dict[PeerId, Descriptor]] = {}
        self.fresh_request: tuple[OperationId, PeerId] | None = None
        """The request that the present event brings."""
        self.fresh_round: tuple[RoundId, PeerId] | None = None
        self.started: set[OperationId] = set()
        self.digests: dict[OperationId, dict[PeerId, bytes]] = {}
        self.outcomes: dict[OperationId, tuple[AbortCause | None, tuple[PeerId, ...]]] = {}
        self.owed: dict[PeerId, set[OperationId]] = {}
        self.acknowledged: set[tuple[PeerId, OperationId]] = set()
        self.rounds = dict.fromkeys(RoundKind, 0)
        self.round_requests: dict[RoundId, set[PeerId]] = {}
        self.answers: dict[RoundId, msg.RoundClosed] = {}

    def before(self, event: me.MasterEvent) -> None:
        self.fresh_request = self.fresh_round = None
        match event:
            case me.ConnectionOpened(connection, _, proven):
                assert connection not in self.open
                self.open.add(connection)
                self.proven[connection] = proven
            case me.ConnectionClosed(connection):
                self.open.discard(connection)
                self._forget(connection)
            case me.ConnectionMessage(connection, message) if connection in self.peer_of:
                self._note(self.peer_of[connection], message)
            case _:
                pass

    def _forget(self, connection: int) -> None:
        peer = self.peer_of.pop(connection, None)
        if peer is not None and self.connection_of.get(peer) == connection:
            del self.connection_of[peer]

    def _note(self, peer: PeerId, message: msg.Message) -> None:
        match message:
            case msg.Heartbeat():
                self.blocked[peer] = message.blocked
            case msg.BlockedReply(query, blocked):
                self.blocked[peer] = blocked
                self.replied.discard((peer, query))
                if blocked:
                    self.replied.add((peer, query))
            case msg.RoundRequest() | msg.OperationRequest():
                self.blocked[peer] = False
            case _:
                pass
        match message:
            case msg.OperationRequest(operation, descriptor):
                asked = self.requests.setdefault(operation, {})
                if peer not in asked:
                    asked[peer] = descriptor
                    self.fresh_request = (operation, peer)
            case msg.OperationDone(operation, digest) if operation in self.started:
                self.digests.setdefault(operation, {}).setdefault(peer, digest)
            case msg.RoundRequest(round_id):
                requested = self.round_requests.setdefault(round_id, set())
                if peer not in requested:
                    requested.add(peer)
                    self.fresh_round = (round_id, peer)
            case msg.Heartbeat(_, operations, _):
                for operation in operations:
                    if operation in self.outcomes:
                        self.acknowledged.add((peer, operation))
                        self.owed.get(peer, set()).discard(operation)
            case _:
                pass

    def after(self, event: me.MasterEvent, effects: list[me.MasterEffect]) -> None:
        self.new_members = set[PeerId]()
        self.resuming = False
        told: dict[OperationId, set[PeerId]] = {}
        fresh: set[OperationId] = set()
        resumed: PeerId | None = None
        gone: set[PeerId] = set()
        for effect in effects:
            match effect:
                case me.Announce("removed", peer):
                    assert peer not in self.removed, "removed twice"
                    self.removed.add(peer)
                    self.members.discard(peer)
                    self.owed.pop(peer, None)
                    gone.add(peer)
                case me.Announce("admitted", peer, text=text):
                    assert int(text.removeprefix("world size ")) >= self.min_peers[peer]
                    self.members.add(peer)
                    self.new_members.add(peer)
                case (
                    me.Announce()
                    | me.Remember()
                    | me.ForgetRun()
                    | me.AskMaster()
                    | me.Warn()
                    | me.SendStatus()
                    | me.SendAddress()
                    | me.InspectProcess()
                    | TryAddress()
                    | TryCaller()
                ):
                    pass
                case me.CloseConnection(connection):
                    self._on_close(connection)
                case me.SendTo(connection, message):
                    assert connection in self.open, f"sent to a closed connection: {message}"
                    if isinstance(message, msg.Registered):
                        assert isinstance(event, me.ConnectionMessage)
                        assert isinstance(event.message, msg.Register)
                        self.peer_of[connection] = message.peer
                        self.connection_of[message.peer] = connection
                        self.keys[message.peer] = self.proven[connection]
                        self.group_of[message.peer] = event.message.group
                        self.min_peers[message.peer] = event.message.min_peers
                    elif isinstance(message, msg.Resumed):
                        assert isinstance(event, me.ConnectionMessage)
                        assert isinstance(event.message, msg.Resume)
                        resumed = event.message.peer
                        self.resuming = True
                        assert self.proven[connection] == self.keys[resumed]
                        self.peer_of[connection] = resumed
                        self.connection_of[resumed] = connection
                    receiver = self.peer_of.get(connection)
                    if receiver in self.removed or receiver is None:
                        assert isinstance(message, msg.Refused), f"{message} to a stranger"
                    else:
                        self._on_send(receiver, message, told, fresh)
        for operation in fresh:
            survivors = set(self.rings[operation.group, operation.view]) - self.removed
            connected = {peer for peer in survivors if peer in self.connection_of}
            assert told[operation] >= connected, f"{operation} was not told to all"
        if resumed is not None:
            received = {operation for operation, peers in told.items() if resumed in peers}
            assert received >= self.owed.get(resumed, set()), "an outcome is lost"

    def _on_close(self, connection: int) -> None:
        assert connection in self.open, "closed twice"
        if self.fresh_request is not None:
            operation, peer = self.fresh_request
            if self.peer_of.get(connection) == peer:  # it was refused, and does not count
                del self.requests[operation][peer]
        if self.fresh_round is not None:
            round_id, peer = self.fresh_round
            if self.peer_of.get(connection) == peer:
                self.round_requests[round_id].discard(peer)
        self.open.discard(connection)
        self._forget(connection)

    def _on_send(
        self,
        peer: PeerId,
        message: msg.MasterMessage,
        told: dict[OperationId, set[PeerId]],
        fresh: set[OperationId],
    ) -> None:
        match message:
            case msg.Admitted(roster) | msg.RosterChanged(roster):
                assert roster.group == self.group_of[peer]
                assert peer in roster.ring
                self.shown.setdefault(peer, [0]).append(roster.version)
                ring = self.rings.setdefault((roster.group, roster.view), roster.ring)
                assert ring == roster.ring, "a view has changed"
                known = self.rosters.setdefault((roster.group, roster.version), roster)
                assert known == roster, "a version has changed"
            case msg.RoundClosed(round_id):
                known_answer = self.answers.get(round_id)
                if known_answer is None:
                    # Equal, but for answers that nobody was connected to hear.
                    assert round_id.n >= self.rounds[round_id.kind]
                    self.rounds[round_id.kind] = round_id.n + 1
                    self.answers[round_id] = message
                    if self.resuming:
                        return  # it is old, and so were its members
                    if message.lockstep:
                        asked = self.round_requests[round_id]
                        self._verdict_is_just(message.lockstep, asked, self.members)
                    else:
                        assert self.round_requests[round_id] >= self.members - self.new_members
                else:
                    assert message == known_answer, "a round was answered in two ways"
            case msg.OperationStarted(operation):
                ring = self.rings[operation.group, operation.view]
                descriptors = self.requests[operation]
                assert set(descriptors) >= set(ring), "started before everyone had asked"
                assert len({descriptors[member] for member in ring}) == 1
                assert operation not in self.outcomes
                self.started.add(operation)
            case msg.OperationEnded():
                self._on_outcome(peer, message, told, fresh)
            case _:
                self._on_wait(peer, message)

    def _on_outcome(
        self,
        peer: PeerId,
        message: msg.OperationEnded,
        told: dict[OperationId, set[PeerId]],
        fresh: set[OperationId],
    ) -> None:
        operation, abort, contributors = message.operation, message.abort, message.contributors
        assert message.roster_version <= max(v for _, v in self.rosters)
        if (peer, operation) in self.acknowledged:
            return  # it asks again what it has acknowledged: its own fault
        told.setdefault(operation, set()).add(peer)
        ring = self.rings.get((operation.group, operation.view), ())
        if peer not in ring:
            assert abort is AbortCause.VIEW_CLOSED
            return
        outcome = (abort, contributors)
        if operation not in self.outcomes:
            self.outcomes[operation] = outcome
            if abort is not AbortCause.VIEW_CLOSED:
                fresh.add(operation)
                for member in set(ring) - self.removed:
                    self.owed.setdefault(member, set()).add(operation)
            if abort is None:
                self._commit_is_justified(operation, ring, contributors)
            elif abort is AbortCause.LOCKSTEP and not self.resuming:
                assert operation not in self.started
                asked = set(self.requests[operation])
                self._verdict_is_just(message.reason, asked, set(ring))
        assert self.outcomes[operation] == outcome, "two outcomes"

    def _on_wait(self, peer: PeerId, message: msg.MasterMessage) -> None:
        match message:
            case msg.RoundWaits(round_id, waited_s, whom):
                assert peer in self.round_requests[round_id]
                assert round_id not in self.answers
                self._wait_is_real(self.round_requests[round_id], waited_s, whom)
            case msg.OperationWaits(operation, waited_s, whom):
                assert peer in self.requests[operation]
                assert operation not in self.started
                assert operation not in self.outcomes
                self._wait_is_real(set(self.requests[operation]), waited_s, whom)
            case msg.BlockedQuery(query):
                assert peer in self.members
                assert self.blocked[peer]
                assert query >= self.last_query
                if query > self.last_query:  # answers to it that came before it do not count
                    self.replied.clear()
                self.last_query = query
            case _:
                pass

    def _wait_is_real(self, asked: set[PeerId], waited_s: int, whom: str) -> None:
        named = {PeerId(int(number)) for number in re.findall(r"peer (\d+) at \S+ \(in ", whom)}
        assert named
        assert named <= self.members - asked
        assert waited_s >= TIMING.waiting_report_s

    def _verdict_is_just(self, reason: str, asked: set[PeerId], scope: set[PeerId]) -> None:
        """Everybody it speaks of said that it was blocked, and was asked once more."""
        named = {PeerId(int(number)) for number in re.findall(r"peer (\d+) in ", reason)}
        assert named <= self.members
        assert all(self.blocked[peer] for peer in named)
        assert all((peer, self.last_query) in self.replied for peer in named)
        assert named & asked, "nobody of the stuck waited for this"
        assert (named & scope) - asked, "nobody of the stuck kept this from coming about"

    def _commit_is_justified(
        self, operation: OperationId, ring: tuple[PeerId, ...], contributors: tuple[PeerId, ...]
    ) -> None:
        assert operation in self.started
        assert contributors == ring
        done = self.digests[operation]
        survivors = [peer for peer in ring if peer not in self.removed]
        assert survivors
        assert len({done[peer] for peer in survivors}) == 1


# -- (a) the master alone ------------------------------------------------------------------------


class MasterAlone:
    """Feeds one master with whatever several connections might send, in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.master = new_master()
        self.witness = MasterWitness()
        self.now_ns = 0
        self.last_connection = 0

    def feed(self, event: me.MasterEvent) -> None:
        self.witness.before(event)
        effects = self.master.handle(event, self.now_ns)
        self.witness.after(event, effects)
        self.master.check()

    def step(self) -> None:
        rng = self.rng
        self.now_ns += int(rng.choice([0, 0.001, 0.05, 0.2]) * SECOND)
        connections = sorted(self.witness.open)
        choice = rng.random()
        if choice < 0.10 or not connections:
            self.last_connection += 1
            proven, greeting = self._greeting()
            self.feed(me.ConnectionOpened(self.last_connection, "host", proven))
            if rng.random() < 0.9:
                self.feed(me.ConnectionMessage(self.last_connection, greeting))
        elif choice < 0.14:
            self.feed(me.ConnectionClosed(rng.choice(connections), "reset"))
        elif choice < 0.15:
            self.feed(me.ConnectionClosed(rng.randint(1, self.last_connection), "late"))
        elif choice < 0.28:
            gap_s = rng.choice([0.1, 0.25, 0.25, 0.25, 0.4, 1, 12, 40])
            for _ in range(rng.choice([1, 1, 1, 4, 44]) if gap_s < 0.5 else 1):
                self.now_ns += int(gap_s * SECOND)
                self.feed(me.MasterTick())
        elif choice < 0.62:
            self._together()
        else:
            connection = rng.choice(connections)
            for _ in range(rng.choice([1, 1, 3])):
                self.feed(me.ConnectionMessage(connection, self._message(connection)))

    def _greeting(self) -> tuple[bytes, msg.Message]:
        """The key of a process, and its first message."""
        rng, witness, own = self.rng, self.witness, key(self.last_connection)
        if not witness.keys or rng.random() < 0.4:
            min_peers = rng.choice([1, 1, 1, 1, 2, 3, 9])
            host = rng.choice(["", "me"])
            return own, msg.Register(rng.choice([0, 0, 0, 1]), host, 9, min_peers)
        peer = rng.choice(sorted(witness.keys))
        proven = witness.keys[peer] if rng.random() < 0.95 else own
        return proven, msg.Resume(peer, rng.choice(witness.shown.get(peer, [0])))

    def _together(self) -> None:
        """What well-behaved members do: everyone who can makes the same call."""
        rng, witness = self.rng, self.witness
        peers = [peer for peer in sorted(witness.connection_of) if peer not in witness.removed]
        rng.shuffle(peers)
        what = rng.choice(["link", "round", "round", "operation", "operation", "done", "circle"])
        if what == "circle":
            self._wait_in_a_circle(peers)
            return
        kind = rng.choice([RoundKind.UPDATE_TOPOLOGY] * 4 + [RoundKind.OPTIMIZE_TOPOLOGY])
        round_id = RoundId(kind, witness.rounds[kind])
        for peer in peers:
            if peer not in witness.connection_of or rng.random() < 0.02:
                continue
            messages: list[msg.Message] = []
            if what == "link":
                messages += [msg.LinkReport(other, True, "") for other in peers if other != peer]
            elif what == "done":
                messages += [
                    msg.OperationDone(operation, b"same" if rng.random() < 0.97 else b"other")
                    for operation in sorted(witness.started - set(witness.outcomes))
                    if peer in witness.rings[operation.group, operation.view]
                ]
            elif peer in witness.members and what == "round":
                messages.append(msg.RoundRequest(round_id))
            elif peer in witness.members:
                operation = self._next_operation(witness.group_of[peer], tag=0)
                messages.append(msg.OperationRequest(operation, DESCRIPTORS[0]))
            for message in messages:
                if peer in witness.connection_of:
                    self.feed(me.ConnectionMessage(witness.connection_of[peer], message))

    def _wait_in_a_circle(self, peers: list[PeerId]) -> None:
        """Each member waits for something, and most of them say so for a while."""
        rng, witness = self.rng, self.witness
        waiting = [p for p in peers if p in witness.members and p in witness.connection_of]
        for peer in waiting:
            kind = rng.choice(list(RoundKind))
            message: msg.Message = msg.RoundRequest(RoundId(kind, witness.rounds[kind]))
            if rng.random() < 0.5:
                operation = self._next_operation(witness.group_of[peer], tag=rng.choice([0, 1]))
                message = msg.OperationRequest(operation, DESCRIPTORS[0])
            if peer in witness.connection_of:
                self.feed(me.ConnectionMessage(witness.connection_of[peer], message))
        for _ in range(rng.choice([3, 8, 30])):
            self.now_ns += SECOND // 4
            for peer in waiting:
                if peer not in witness.connection_of or rng.random() < 0.01:
                    continue
                answer: msg.Message = msg.Heartbeat(blocked=rng.random() < 0.99)
                if rng.random() < 0.5:
                    answer = msg.BlockedReply(witness.last_query, rng.random() < 0.99)
                self.feed(me.ConnectionMessage(witness.connection_of[peer], answer))
            self.feed(me.MasterTick())

    def _next_operation(self, group: int, tag: int) -> OperationId:
        view = max((view for g, view in self.witness.rings if g == group), default=0)
        key = (group, view, tag)
        ended = [o.n for o in self.witness.outcomes if (o.group, o.view, o.tag) == key]
        return OperationId(1, group, view, tag, max(ended, default=-1) + 1)

    def _some_peer(self) -> PeerId:
        return PeerId(self.rng.randint(0, len(self.witness.keys) + 1))

    def _operation(self, peer: PeerId | None) -> OperationId:
        rng, witness = self.rng, self.witness
        group = witness.group_of.get(peer, 0) if peer is not None else 0
        operation = self._next_operation(group, rng.choice([0, 0, 1]))
        view = operation.view + rng.choice([0] * 6 + [-1, -2, 1])
        n = operation.n + rng.choice([0] * 6 + [-1, 1])
        operation = replace(operation, view=max(view, 0), n=max(n, 0))
        return replace(operation, term=2) if rng.random() < 0.01 else operation

    def _message(self, connection: int) -> msg.Message:
        rng, witness = self.rng, self.witness
        peer = witness.peer_of.get(connection)
        operation = self._operation(peer)
        if rng.random() < 0.01:
            misplaced: list[msg.Message] = [msg.Resumed(1), msg.OperationStarted(operation)]
            return rng.choice(misplaced)
        kind = rng.choice(["request"] * 8 + ["done"] * 8 + ["round"] * 6 + ["link"] * 4 + [
            "beat"] * 3 + ["reply"] * 2 + ["withdraw", "query", "goodbye", "greeting"])  # fmt: skip
        match kind:
            case "request":
                return msg.OperationRequest(operation, DESCRIPTORS[rng.random() < 0.03])
            case "done":
                running = sorted(witness.started - set(witness.outcomes))
                if running and rng.random() < 0.9:
                    operation = rng.choice(running)
                return msg.OperationDone(operation, rng.choice([b"same"] * 9 + [b"other"]))
            case "round":
                round_kind = rng.choice([RoundKind.UPDATE_TOPOLOGY, *RoundKind])
                n = witness.rounds[round_kind] + rng.choice([0] * 8 + [-1, 1])
                return msg.RoundRequest(RoundId(round_kind, max(n, 0)))
            case "link":
                up = rng.random() < 0.85
                return msg.LinkReport(self._some_peer(), up, "" if up else "gone")
            case "beat":
                received, ready, received_bytes = (rng.randint(0, 9) for _ in range(3))
                progress = msg.Progress(operation, received, ready, received_bytes)
                ended = tuple(sorted(witness.outcomes)[:3])
                answered = tuple(witness.answers)[:2]
                strange = (operation, RoundId(RoundKind.PEERS_PENDING, rng.randint(0, 99)))
                return msg.Heartbeat(
                    (progress,), (*ended, strange[0]), (*answered, strange[1]), rng.random() < 0.6
                )
            case "reply":
                query = rng.choice([witness.last_query, rng.randint(0, 4), (1 << 32) - 1])
                return msg.BlockedReply(query, rng.random() < 0.8)
            case "withdraw":
                return msg.Withdraw(operation, "out of time")
            case "query":
                return msg.OutcomeQuery(operation)
            case "goodbye":
                return msg.Goodbye()
            case _:
                return self._greeting()[1]


@settings(max_examples=150)
@given(SEEDS)
def test_a_master_survives_anything_that_peers_may_send(seed: int) -> None:
    world = MasterAlone(seed)
    for _ in range(120):
        world.step()


# -- (b) a master and its peers in a closed loop ---------------------------------------------------


@dataclass
class Wire:
    """One control connection. What is on its way when it breaks may be lost from any point on."""

    number: int
    up: deque[msg.PeerMessage | None] = field(default_factory=deque[msg.PeerMessage | None])
    """To the master; None is its end."""
    down: deque[msg.MasterMessage | None] = field(default_factory=deque[msg.MasterMessage | None])


@dataclass
class Posted:
    call: int | None
    """None once the caller has left and his memory is his own again."""
    ring: tuple[PeerId, ...]
    begun: bool = False
    done: bool = False


Answer = pe.ReturnValue | errors.PCCLError
"""Of a call."""


class Process:
    """A peer machine and what its shell would keep, with everything held against the promises."""

    def __init__(self, world: World, group: int) -> None:
        self.world = world
        self.group = group
        self.machine = PeerMachine(TIMING, world.now_ns)
        self.key = key(next(world.numbers))
        self.wire: Wire | None = None
        self.dial_ns: int | None = None
        self.wanted: tuple[Member, ...] = ()
        self.up: set[PeerId] = set()
        self.posted: dict[OperationId, Posted] = {}
        self.left: set[OperationId] = set()
        self.calls: dict[int, pe.PeerEvent] = {}
        self.results: dict[int, Answer] = {}
        self.handles: dict[int, bool] = {}
        """Detached calls that were not claimed -> whether there is an outcome."""
        self.left_rounds: set[RoundKind] = set()
        """Those that a caller has left and whose answer has not come."""
        self.unanswered: set[RoundKind] = set()
        """Those that a caller has left and whose answer no other call has taken."""
        self.asked: deque[int] = deque()
        self.gaps: deque[pe.CloseGap] = deque()
        self.computes = False
        """Whether a thread of it is not inside any call."""
        self.frozen = False
        self.dead = False
        self.latest = 0
        """The last call of the program that it follows."""
        self.latest_was_reduce = True

    @property
    def id(self) -> PeerId:
        return self.machine.peer

    @property
    def member(self) -> bool:
        return not self.dead and self.machine.standing is Standing.MEMBER

    def call(self, event: pe.PeerEvent, number: int) -> None:
        self.calls[number] = event
        if isinstance(event, pe.ReduceCall) and event.detached:
            self.handles[number] = False
        changes = isinstance(event, pe.RoundCall) and event.kind is not RoundKind.PEERS_PENDING
        must_wait = any(self._names_a_roster(handle) for handle in self.handles)
        self.feed(event)
        if changes and must_wait and number in self.results:
            assert isinstance(self.results[number], errors.PCCLError), "a handle was open"
        concerns_the_call = isinstance(result := self.results.get(number), errors.PCCLError) and (
            result.result is not errors.Result.RANK_CONNECTION_LOST
        )
        if concerns_the_call and number in self.handles:
            self.claim(number)  # as the shell does, which raises it at once

    def _names_a_roster(self, handle: int) -> bool:
        """Whether a detached call is an operation whose outcome, or what it shows, is unseen."""
        if handle not in self.results:
            return any(posted.call == handle for posted in self.posted.values())
        told = (pe.ReduceResult, errors.CollectiveAborted, errors.LockstepError)
        return isinstance(self.results[handle], told)

    def claim(self, number: int) -> None:
        assert self.handles.pop(number), "only outcomes can be claimed"
        self.feed(pe.Claim(number))

    def feed(self, event: pe.PeerEvent) -> None:
        assert not self.dead
        seen = self.machine.seen
        unanswered, calls_before = set(self.unanswered), set(self.calls)
        match event:
            case pe.LeaveCall(call) if isinstance(left := self.calls.get(call), pe.RoundCall):
                self.left_rounds.add(left.kind)
                self.unanswered.add(left.kind)
            case pe.RoundCall(_, kind):
                self.unanswered.discard(kind)
            case pe.ControlMessage(msg.RoundClosed(round_id)):
                self.left_rounds.discard(round_id.kind)
            case _:
                pass
        detached = set(self.handles)
        effects = self.machine.handle(event, self.world.now_ns)
        self.machine.check()
        shown = isinstance(event, pe.Claim)
        for effect in effects:
            if isinstance(effect, pe.ReturnCall | pe.RaiseCall):
                shown |= effect.call not in detached
                if isinstance(event, pe.LeaveCall):
                    self.handles.pop(effect.call, None)  # it has no outcome
            self._carry_out(effect)
        if self.machine.seen != seen:
            # Or a call that was open takes the answer of an update that was left.
            caught_up = UPDATE in unanswered and calls_before | set(self.calls)
            assert shown or caught_up, "another membership, but no call has returned"
        for operation in self.posted:
            assert self.machine.phase_of(operation) is not None
            assert not self.machine.collectives.may_come(operation)
        while self.asked:
            self.feed(pe.CallersAsked(self.asked.popleft(), self.callers_blocked))
        while self.gaps:
            gap = self.gaps.popleft()
            complete = self.world.rng.random() < 0.7
            self.feed(pe.HoldingsKnown(gap.operation, gap.lost, complete))

    @property
    def callers_blocked(self) -> bool:
        return bool(self.calls) and not self.computes

    def waits(self) -> list[RoundKind | OperationId]:
        """What its callers, and callers that have left, wait for: calls of other members."""
        kinds = [e.kind for e in self.calls.values() if isinstance(e, pe.RoundCall)]
        undone = [operation for operation, posted in self.posted.items() if not posted.done]
        return [*sorted({*kinds, *self.left_rounds}), *undone]

    def _carry_out(self, effect: pe.PeerEffect) -> None:
        match effect:
            case pe.Send(message):
                if self.wire is not None:
                    if isinstance(message, msg.OperationRequest | msg.OperationDone):
                        known = message.operation in self.posted or message.operation in self.left
                        assert known, "requested before it was posted"
                    self.wire.up.append(message)
            case pe.DialControl(delay_ns):
                assert self.dial_ns is None, "two dials at once"
                self.dial_ns = self.world.now_ns + delay_ns
            case pe.CloseControl():
                self.dial_ns = None
                if self.wire is not None:
                    self.wire.up.append(None)
                    self.wire.down.clear()
                    self.wire = None
            case pe.SetLinks(peers):
                self.wanted = peers
                self.up &= {member.peer for member in peers}
            case pe.Post(call, operation, _, ring):
                assert operation not in self.world.every_post.setdefault(self, set())
                self.world.every_post[self].add(operation)
                assert self.id in ring
                self.posted[operation] = Posted(call, ring)
            case pe.Begin(operation):
                assert not self.posted[operation].begun
                self.posted[operation].begun = True
                self.world.begun.setdefault(operation, set()).add(self.id)
            case pe.Detach(operation):
                posted = self.posted[operation]
                assert posted.done
                assert posted.call is not None, "detached twice"
                posted.call = None
            case pe.End(operation, committed):
                posted = self.posted.pop(operation)
                self.left.add(operation)
                assert not (committed and not posted.done)
            case pe.CloseGap():
                self.gaps.append(effect)
            case TryAddress() | MeetPeer() | pe.ReportUndialable() | pe.GiveEvidence():
                pass
            case pe.FetchResult() | pe.KeepResult():
                raise AssertionError("no call of this property has a quorum")
            case pe.AskCallers() | pe.ReportWait() | pe.ForgetEarly() | pe.SendAcross():
                self._take_note(effect)
            case pe.ReturnCall() | pe.RaiseCall():
                self._finish_call(effect)
            case pe.PostSync() | pe.BeginSync() | pe.CompareSync():
                raise AssertionError("nobody synchronizes here")

    def _take_note(
        self, effect: pe.AskCallers | pe.ReportWait | pe.ForgetEarly | pe.SendAcross
    ) -> None:
        match effect:
            case pe.AskCallers(query):
                self.asked.append(query)
            case pe.ReportWait(call, what, whom, waited_s):
                assert call in self.calls
                assert what
                assert whom
                assert waited_s >= TIMING.waiting_report_s
            case pe.SendAcross(operation):
                assert operation in self.posted
            case pe.ForgetEarly():
                pass

    def _finish_call(self, effect: pe.ReturnCall | pe.RaiseCall) -> None:
        match effect:
            case pe.ReturnCall(call, value):
                self._answer(call, value)
                if isinstance(value, pe.ReduceResult):
                    assert self.world.witness.outcomes[value.operation] == (
                        None,
                        value.contributors,
                    )
            case pe.RaiseCall(call, error):
                assert isinstance(error, errors.PCCLError)
                assert error.reason
                assert not isinstance(error, errors.LocalProtocolError)
                if isinstance(error, errors.LockstepError):
                    self.world.verdicts += 1
                self._answer(call, error)

    def _answer(self, call: int, value: Answer) -> None:
        del self.calls[call]  # exactly once
        assert all(posted.call != call for posted in self.posted.values()), "returned before End"
        self.results[call] = value
        if call in self.handles:
            self.handles[call] = True


class World:
    """One master, some processes, and in-memory queues between them."""

    def __init__(self, seed: int, processes: int, groups: int) -> None:
        self.rng = random.Random(seed)
        self.now_ns = SECOND
        self.master = new_master(self.now_ns)
        self.witness = MasterWitness()
        self.wires: list[Wire] = []
        self.last_number = 0
        self.numbers = count(1)
        """Of processes."""
        self.last_call = 0
        self.begun: dict[OperationId, set[PeerId]] = {}
        self.every_post: dict[Process, set[OperationId]] = {}
        self.verdicts = 0
        """How many callers were told that members wait for different things."""
        self.processes = [Process(self, index % groups) for index in range(processes)]

    # -- the master's shell ------------------------------------------------------------------

    def feed_master(self, event: me.MasterEvent) -> None:
        self.witness.before(event)
        effects = self.master.handle(event, self.now_ns)
        self.witness.after(event, effects)
        self.master.check()
        by_number = {wire.number: wire for wire in self.wires}
        for effect in effects:
            match effect:
                case me.SendTo(number, message):
                    by_number[number].down.append(message)
                case me.CloseConnection(number):
                    by_number[number].down.append(None)
                    by_number[number].up.clear()
                    self.wires.remove(by_number[number])
                case me.Announce() | me.Remember() | me.ForgetRun() | me.AskMaster() | me.Warn():
                    pass
                case (
                    me.SendStatus()
                    | me.SendAddress()
                    | me.InspectProcess()
                    | TryAddress()
                    | TryCaller()
                ):
                    raise AssertionError("nobody asks for the status, or has an address tested")

    # -- single steps ------------------------------------------------------------------------

    def new_call(self) -> int:
        self.last_call += 1
        return self.last_call

    def alive(self) -> list[Process]:
        return [p for p in self.processes if not p.dead]

    def responsive(self) -> list[Process]:
        return [p for p in self.processes if not p.dead and not p.frozen]

    def deliver_up(self, wire: Wire) -> None:
        message = wire.up.popleft()
        if message is None:
            self.wires.remove(wire)
            self.feed_master(me.ConnectionClosed(wire.number, "closed by peer"))
        else:
            self.feed_master(me.ConnectionMessage(wire.number, message))

    def deliver_down(self, process: Process) -> None:
        assert process.wire is not None
        message = process.wire.down.popleft()
        if message is None:
            process.wire = None
            process.feed(pe.ControlClosed("closed by master"))
        else:
            process.feed(pe.ControlMessage(message))

    def dial(self, process: Process) -> None:
        process.dial_ns = None
        self.last_number += 1
        process.wire = Wire(self.last_number)
        self.wires.append(process.wire)
        self.feed_master(me.ConnectionOpened(self.last_number, "host", process.key))
        process.feed(pe.ControlOpened(self.master.run, self.master.term))

    def drop(self, wire: Wire) -> None:
        """The network breaks a connection; each side keeps a prefix of what was on its way."""
        for queue in (wire.up, wire.down):
            keep = self.rng.randint(0, len(queue))
            while len(queue) > keep:
                queue.pop()
            queue.append(None)

    def link(self, process: Process) -> None:
        """Make, or fail to make, one link that this (the younger) process wants."""
        missing = [m.peer for m in process.wanted if m.peer < process.id
                   and m.peer not in process.up]  # fmt: skip
        if not missing:
            return
        peer = self.rng.choice(missing)
        other = next((p for p in self.alive() if p.id == peer), None)
        if other is None or other.machine.standing in (Standing.LOST, Standing.CLOSED):
            process.feed(pe.LinkChanged(peer, "refused"))
        elif not other.frozen:
            process.up.add(peer)
            other.up.add(process.id)
            process.feed(pe.LinkChanged(peer, None))
            other.feed(pe.LinkChanged(process.id, None))

    def break_link(self, process: Process) -> None:
        if process.up:
            peer = self.rng.choice(sorted(process.up))
            process.up.discard(peer)
            process.feed(pe.LinkChanged(peer, "reset"))
            other = next((p for p in self.alive() if p.id == peer), None)
            if other is not None and process.id in other.up:
                other.up.discard(process.id)
                if not other.frozen:
                    other.feed(pe.LinkChanged(process.id, "reset"))

    def kill(self, process: Process) -> None:
        process.dead = True
        if process.wire is not None:
            process.wire.up.append(None)
        for other in self.responsive():
            if process.id in other.up:
                other.up.discard(process.id)
                other.feed(pe.LinkChanged(process.id, "reset"))

    def may_finish(self, process: Process, operation: OperationId) -> bool:
        posted = process.posted[operation]
        others = set(posted.ring) - {process.id}
        return not posted.done and self.begun.get(operation, set()) >= others

    def finish(self, process: Process, operation: OperationId, digest: bytes) -> None:
        process.posted[operation].done = True
        process.feed(pe.ReduceDone(operation, digest))

    def finishable(self) -> list[tuple[Process, OperationId]]:
        return [(p, o) for p in self.responsive() for o in p.posted if self.may_finish(p, o)]

    def tick(self) -> None:
        self.feed_master(me.MasterTick())
        for process in self.responsive():
            progress = tuple(
                msg.Progress(operation, 0, 1, 0) for operation in process.posted
                if process.posted[operation].begun
            )  # fmt: skip
            process.feed(pe.Tick(progress, process.callers_blocked))

    # -- anything may happen ---------------------------------------------------------------------

    def random_step(self) -> None:
        rng = self.rng
        self.now_ns += int(rng.choice([0, 0.0001, 0.002]) * SECOND)
        processes = self.responsive()
        choice = rng.random()
        if choice < 0.50:
            for _ in range(rng.choice([1, 3, 12])):
                self._deliver_something()
        elif choice < 0.66:
            for process in self.alive():
                process.frozen = process.frozen and rng.random() < 0.9
            for process in processes:
                if rng.random() < 0.5:
                    self._call_something(process)
        elif choice < 0.82:
            for process, operation in self.finishable():
                if rng.random() < 0.3:
                    continue
                digest = b"right" if rng.random() < 0.97 else b"wrong"
                self.finish(process, operation, digest)
                if rng.random() < 0.04 and operation in process.posted:
                    call = process.posted[operation].call
                    if call is not None:
                        process.feed(pe.LeaveCall(call, "Ctrl-C"))
        elif choice < 0.88:
            for process in processes:
                self.link(process)
        elif choice < 0.93:
            gap_s = rng.choice([0.1, 0.25, 0.25, 0.4, 3])
            for _ in range(48 if gap_s == 0.25 and rng.random() < 0.03 else 1):
                self.now_ns += int(gap_s * SECOND)
                self.tick()
        elif choice < 0.934 and self.wires:
            rng.choice(self.wires).down.append(self._odd_message())
        elif choice < 0.94 and self.wires:
            self.drop(rng.choice(self.wires))
        elif choice < 0.945 and processes:
            self.break_link(rng.choice(processes))
        elif choice < 0.95 and len(self.alive()) > 2:
            self.kill(rng.choice(self.alive()))
        elif choice < 0.956:
            process = rng.choice(self.processes)
            process.frozen = True
            for _ in range(rng.choice([0, 0, 48])):
                self.now_ns += SECOND // 4
                self.tick()

    def _odd_message(self) -> msg.MasterMessage:
        """What a master may say at any time, about anything, without harm."""
        rng = self.rng
        round_id = RoundId(rng.choice(list(RoundKind)), rng.randint(0, 4))
        operation = OperationId(1, rng.choice([0, 1]), rng.randint(0, 4), rng.choice([0, 9]), 0)
        odd: list[msg.MasterMessage] = [
            msg.RoundWaits(round_id, 7, "peer 99 (in no call)"),
            msg.OperationWaits(operation, 7, "peer 99 (in no call)"),
            msg.BlockedQuery(rng.choice([self.witness.last_query, 77])),
            msg.MasterHeartbeat(),
        ]
        return rng.choice(odd)

    def _deliver_something(self) -> None:
        ups = [wire for wire in self.wires if wire.up]
        downs = [p for p in self.responsive() if p.wire is not None and p.wire.down]
        dials = [p for p in self.responsive()
                 if p.dial_ns is not None and p.dial_ns <= self.now_ns]  # fmt: skip
        number = self.rng.randrange(max(len(ups) + len(downs) + len(dials), 1))
        if number < len(ups):
            self.deliver_up(ups[number])
        elif number < len(ups) + len(downs):
            self.deliver_down(downs[number - len(ups)])
        elif dials:
            self.dial(dials[number - len(ups) - len(downs)])

    def _call_something(self, process: Process) -> None:
        rng, number = self.rng, self.new_call()
        if process.machine.standing is Standing.OUTSIDE:
            company = rng.choice([1, 1, 1, 2, len(self.processes)])
            process.call(pe.JoinCall(number, process.group, "", 9, 5, company), number)
            return
        if process.machine.knows_its_loss and rng.random() < 0.5:
            again = Process(self, process.group)
            self.processes[self.processes.index(process)] = again
            again.call(pe.JoinCall(number, process.group, "", 9, 5, 1, True), number)
            return
        process.computes = rng.random() < 0.2
        for handle, ended in list(process.handles.items()):
            if ended and rng.random() < 0.7:
                process.claim(handle)
        if rng.random() < 0.95:
            self._follow_program(process)
            return
        match rng.choice(["reduce"] * 6 + ["round"] * 6 + ["leave"] * 6):
            case "reduce":
                tag, descriptor = rng.choice([0, 0, 1]), DESCRIPTORS[rng.random() < 0.02]
                detached = rng.random() < 0.3
                process.call(pe.ReduceCall(number, tag, descriptor, detached), number)
            case "round":
                kind = rng.choice([RoundKind.UPDATE_TOPOLOGY] * 4 + list(RoundKind))
                process.call(pe.RoundCall(number, kind), number)
            case _:
                joins = [n for n, e in process.calls.items() if isinstance(e, pe.JoinCall)]
                joined = [n for n in process.calls if n not in joins]
                done = [p.call for p in process.posted.values() if p.done and p.call is not None]
                leavable = [*done, *done, *joined, *(joins if rng.random() < 0.1 else [])]
                if leavable:
                    process.feed(pe.LeaveCall(rng.choice(leavable), "out of time"))

    def _follow_program(self, process: Process) -> None:
        """What training loops do: update, then reduce two tensors; after a failure, update."""
        if process.calls:
            return
        latest = process.results.get(process.latest)
        if isinstance(latest, errors.PCCLError) or process.latest_was_reduce:
            process.latest_was_reduce = False
            process.latest = self.new_call()
            kind = RoundKind.UPDATE_TOPOLOGY
            if self.rng.random() < 0.1:
                kind = self.rng.choice([RoundKind.PEERS_PENDING, RoundKind.OPTIMIZE_TOPOLOGY])
            process.call(pe.RoundCall(process.latest, kind), process.latest)
            return
        process.latest_was_reduce = True
        detached = self.rng.random() < 0.3
        for tag in (0, 1):
            process.latest = self.new_call()
            event = pe.ReduceCall(process.latest, tag, DESCRIPTORS[0], detached)
            process.call(event, process.latest)

    # -- the storm is over -------------------------------------------------------------------

    def settle(self, seconds: float = 4.0) -> None:
        """No more faults: deliver everything, make every link, finish what can be finished."""
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            self._settle_now()
            self.now_ns += SECOND // 4
            self.tick()
        self._settle_now()

    def _settle_now(self) -> None:
        while True:
            moved = False
            for wire in list(self.wires):
                while wire.up and wire in self.wires:
                    self.deliver_up(wire)
                    moved = True
            for process in self.responsive():
                while process.wire is not None and process.wire.down:
                    self.deliver_down(process)
                    moved = True
                if process.dial_ns is not None and process.dial_ns <= self.now_ns:
                    self.dial(process)
                    moved = True
            for process, operation in self.finishable():
                if operation in process.posted:
                    self.finish(process, operation, b"right")
                    moved = True
            if not moved:
                break
        for process in self.responsive():
            for _ in range(len(process.wanted)):
                self.link(process)

    def members(self) -> list[Process]:
        return [process for process in self.processes if process.member]

    def nobody_waits_for_nothing(self) -> None:
        """Whoever made a call that all others have made too has an answer."""
        members = self.members()
        for kind in RoundKind:
            waiting = [
                p for p in members
                if any(isinstance(e, pe.RoundCall) and e.kind is kind for e in p.calls.values())
            ]  # fmt: skip
            assert not waiting or len(waiting) < len(members), f"all wait in {kind.name}"
        for process in members:
            for operation, posted in process.posted.items():
                absent = [peer for peer in posted.ring if not any(
                    p.id == peer and operation in p.posted for p in members)]  # fmt: skip
                assert absent, f"{operation} was asked for by everyone and stands still"

    def stuck(self) -> set[Process]:
        """All members that can't be released, because everything they wait for lacks their calls.

        The definition spelt out; it looks at the processes only, and never into the master.
        """
        members = self.members()
        waits = {process: process.waits() for process in members}
        blocked = [p for p in members if p.callers_blocked and not p.handles and waits[p]]
        union: set[Process] = set()
        for size in range(1, len(blocked) + 1):
            for some in combinations(blocked, size):
                if all(self._lack_one_of(some, wait) for p in some for wait in waits[p]):
                    union |= set(some)
        return union

    def _lack_one_of(self, some: tuple[Process, ...], wait: RoundKind | OperationId) -> bool:
        if isinstance(wait, RoundKind):
            return any(wait not in process.waits() for process in some)
        rings = [p.posted[wait].ring for p in self.members() if wait in p.posted]
        return any(p.id in rings[0] and wait not in p.posted for p in some)

    def recover(self) -> None:
        """The processes that are left do what a sensible program does, and must succeed."""
        for process in self.alive():
            process.frozen = process.computes = False
        self.settle()
        self.nobody_waits_for_nothing()
        for _ in range(4):  # whoever was told may have kept others
            if self.stuck():
                self.settle(2.0)
        assert not self.stuck(), "members wait for each other, and nobody tells them"
        for process in self.alive():
            for number, event in list(process.calls.items()):
                alone = isinstance(event, pe.JoinCall) and event.min_peers == 1
                if number in process.calls and not alone:
                    process.feed(pe.LeaveCall(number, "starting over"))
            for handle, ended in list(process.handles.items()):
                if ended:
                    process.claim(handle)
        self.settle()
        survivors = [self._restarted(process) for process in self.alive()]
        self.processes = survivors
        for _ in range(16):
            for process in survivors:
                if not process.calls:
                    number = self.new_call()
                    if process.member:
                        process.call(pe.RoundCall(number, RoundKind.UPDATE_TOPOLOGY), number)
                    elif process.machine.standing is Standing.OUTSIDE:
                        process.call(pe.JoinCall(number, process.group, "", 9, 5), number)
            self.settle(1.0)
            views = {p.machine.seen.version if p.machine.seen else 0 for p in survivors}
            if all(p.member and not p.calls for p in survivors) and len(views) == 1:
                break
        assert all(p.member and not p.calls for p in survivors), "they never came together"
        assert len({p.machine.seen.version for p in survivors if p.machine.seen}) == 1
        for process in survivors:
            assert process.machine.seen is not None
            assert set(process.machine.seen.ring) == {
                p.id for p in survivors if p.group == process.group
            }
            assert process.machine.seen.global_world_size == len(survivors)
        self._reduce_together(survivors)
        self.settle(2.5)
        for process in survivors:
            assert not self.witness.owed.get(process.id), "an outcome was never acknowledged"

    def _restarted(self, process: Process) -> Process:
        """Whoever was thrown out, or must resync, begins anew as another peer."""
        if process.machine.standing is Standing.MEMBER:
            number = self.new_call()
            process.call(pe.ReduceCall(number, 7, DESCRIPTORS[0]), number)
            error = process.results.get(number)
            if not isinstance(error, errors.ResyncRequired):
                if number in process.calls:
                    process.feed(pe.LeaveCall(number, "only asking"))
                return process
        elif process.machine.standing is not Standing.LOST:
            return process
        if process.machine.standing is not Standing.LOST:
            process.feed(pe.Close())
        return Process(self, process.group)

    def _reduce_together(self, survivors: list[Process]) -> None:
        """After at most one error each, one reduce of each group commits for all alike."""
        for group in {process.group for process in survivors}:
            peers = [process for process in survivors if process.group == group]
            for _ in range(2):
                numbers = {process: self.new_call() for process in peers}
                for process, number in numbers.items():
                    process.call(pe.ReduceCall(number, 3, DESCRIPTORS[0]), number)
                self.settle(0.5)
                results = [process.results[number] for process, number in numbers.items()]
                if len(peers) == 1:
                    assert isinstance(results[0], errors.TooFewPeers)
                    continue
                assert len(set(map(repr, results))) == 1
                assert isinstance(results[0], pe.ReduceResult), results[0]
                assert set(results[0].contributors) == {process.id for process in peers}


@settings(max_examples=200)
@given(SEEDS, st.integers(2, 5), st.sampled_from([1, 1, 2]))
def test_members_that_wait_for_each_other_are_told_and_nobody_else(
    seed: int, processes: int, groups: int
) -> None:
    """Everybody makes a few calls, and then only time passes."""
    world = World(seed, processes, groups)
    rng = world.rng
    for process in world.processes:
        number = world.new_call()
        process.call(pe.JoinCall(number, process.group, "", 9, 5, processes), number)
    world.settle(1.0)
    assert len(world.members()) == processes, "a gang is admitted together"
    for process in world.processes:
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            number, tag = world.new_call(), rng.choice([0, 0, 1])
            event: pe.PeerEvent = pe.ReduceCall(number, tag, DESCRIPTORS[0], rng.random() < 0.1)
            if rng.random() < 0.6:
                event = pe.RoundCall(number, rng.choice([UPDATE, UPDATE, *RoundKind]))
            process.call(event, number)
        process.computes = rng.random() < 0.1
    world.settle(0.25)
    stuck = world.stuck()
    in_collectives = {p for p in stuck if any(isinstance(wait, OperationId) for wait in p.waits())}
    calls = {process: dict(process.calls) for process in world.processes}
    for _ in range(12):
        if not world.verdicts:
            world.settle(0.25)
    told = [
        (process, event)
        for process in world.processes
        for number, event in calls[process].items()
        if isinstance(process.results.get(number), errors.LockstepError)
    ]
    assert bool(told) == bool(stuck)
    assert {process for process, _ in told} >= (in_collectives or stuck)
    if in_collectives:
        assert all(isinstance(event, pe.ReduceCall) for _, event in told), "a round ended as well"
    for _ in range(5):  # those that are left may be stuck among themselves
        world.settle(2.0)
    assert not world.stuck()


@settings(max_examples=400)
@given(SEEDS, st.integers(2, 5), st.sampled_from([1, 1, 2]))
def test_a_run_keeps_its_promises_and_recovers_from_anything(
    seed: int, processes: int, groups: int
) -> None:
    world = World(seed, processes, groups)
    if seed % 2:
        for process in world.processes:
            number = world.new_call()
            process.call(pe.JoinCall(number, process.group, "", 9, 5), number)
        world.settle(1.0)
    for _ in range(seed % 7 * 60 + 40):
        world.random_step()
    world.recover()
