"""Two masters, the members of one run, and a network that is cut in any way: one run stays one.

The real machines on both sides, connections as queues. Masters are cut off from some members, die
and come back with their state; members hop between them in the middle of anything. In unruly runs a
master need not hear that a member has gone to the other one, callers leave, and results differ.
Whatever is decided must be decided once, and of two rings in which anything happens one contains
the other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.master import events as me
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.succession.majority import HELD_BACK
from pccl.machines.master.succession.origin import Origin
from pccl.machines.master.succession.vouched import NOT_TOLD
from pccl.machines.peer import events as pe
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.machines.peer.operations import OpenOperation
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError, ResyncRequired
from pccl.protocol.handshake.opening import NO_RUN
from pccl.protocol.limits import Timing
from pccl.protocol.types import (
    KEY_BYTES,
    AbortCause,
    Descriptor,
    OperationId,
    PeerId,
    ReduceOp,
    Roster,
    RoundId,
    RoundKind,
)
from pccl.protocol.types import Member as Whereabouts
from tests.support.scenarios import key
from tests.support.secrets import MASTER_SIGNER

SECOND = 1_000_000_000
STEP_NS = SECOND // 4
RUN = b"the run of these"
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
TIMING = Timing(resume_s=1.0, recovery_s=2.0, master_lost_s=1000.0)
ADDRESSES = (msg.MasterAddress("a", 1), msg.MasterAddress("b", 2))
SEEDS = st.integers(0, (1 << 32) - 1)


@dataclass
class Line:
    """A control connection: what is under way, and which ends still hold it."""

    number: int
    peer: int
    master: int
    to_master: deque[msg.PeerMessage | None] = field(default_factory=deque[msg.PeerMessage | None])
    to_peer: deque[msg.MasterMessage | None] = field(
        default_factory=deque[msg.MasterMessage | None]
    )
    at_master: bool = True
    at_peer: bool = True


class Member:
    """A peer and its application: reduces and asks for newcomers, again and again."""

    def __init__(self, number: int, now_ns: int) -> None:
        self.number = number
        self.machine = PeerMachine(TIMING, now_ns)
        self.line: Line | None = None
        self.dial_ns: int | None = None
        self.working: dict[OperationId, None] = {}
        self.applied: list[OperationId] = []
        self.steps = 0
        self.calls = count(2)
        self.inside: int | None = None
        """The call that its caller is in."""

    def open(self) -> tuple[OpenOperation, ...]:
        return self.machine.open_operations


class World:
    """Masters 0 and 1 (the standby), members, and who reaches whom."""

    def __init__(
        self, seed: int, size: int, *, unruly: bool = False, imposters: bool = False
    ) -> None:
        self.rng = Random(seed)
        self.unruly = unruly
        self.lies = Random(f"{seed}/lies") if imposters else None
        self.imposters: dict[int, int] = {}
        """Connections of processes that know the token and say that they are members."""
        self.moods = Random(f"{seed}/unruly")
        self.now_ns = 0
        self.numbers = count(1)
        self.chances = count(1)
        self.lines: dict[int, Line] = {}
        self.kept: list[tuple[bytes, int] | None] = [None, None]
        self.vouched = [NOT_TOLD, NOT_TOLD]
        self.between = True
        """Whether the standby reaches the first master."""
        self.masters: list[MasterMachine | None] = [
            self.new_master(0, RUN, 1, Origin.BLANK),
            self.new_master(1, NO_RUN, 1, Origin.STANDBY),
        ]
        self.reach = [[True] * size, [True] * size]
        self.outcomes: dict[OperationId, tuple[AbortCause | None, tuple[PeerId, ...]]] = {}
        self.answers: dict[RoundId, tuple[bool, str]] = {}
        self.rings: dict[frozenset[PeerId], str] = {}
        self.commits = 0
        self.raised: Counter[str] = Counter()
        self.members = [Member(number, 0) for number in range(size)]
        for member in self.members:
            join = pe.JoinCall(1, 0, "", 4000 + member.number, 5, min_peers=size, masters=2)
            self.tell(member, join)
        for _ in range(20 * size):
            self.pass_time(0)
            self.deliver_all()
        assert all(m.machine.standing is Standing.MEMBER for m in self.members)

    def new_master(self, index: int, run: bytes, term: int, origin: Origin) -> MasterMachine:
        if origin is not Origin.STANDBY:
            self.kept[index] = (run, term)
        return MasterMachine(
            TIMING, run, term, lambda size: next(self.chances).to_bytes(size, "big"),
            self.now_ns, origin, b"master %d" % index, (ADDRESSES[1 - index],),
            stands_by_for=("a",) if index else (), vouched=self.vouched[index],
            signer=MASTER_SIGNER,
        )  # fmt: skip

    # -- the shells ----------------------------------------------------------------------------

    def tell(self, member: Member, event: pe.PeerEvent) -> None:
        for effect in member.machine.handle(event, self.now_ns):
            self.carry_out(member, effect)
        member.machine.check()

    def carry_out(self, member: Member, effect: pe.PeerEffect) -> None:
        match effect:
            case pe.Send(message) if member.line is not None:
                member.line.to_master.append(message)
            case pe.DialControl(delay_ns):
                member.dial_ns = self.now_ns + delay_ns
            case pe.CloseControl():
                self.hang_up(member)
                member.dial_ns = None
            case pe.SetLinks(peers):
                for known in peers:
                    self.tell(member, pe.LinkChanged(known.peer, None))
            case pe.Begin(operation):
                member.working[operation] = None
            case pe.End(operation, committed):
                member.working.pop(operation, None)
                if committed:
                    member.applied.append(operation)
                    self.commits += 1
            case pe.ReturnCall(call):
                member.steps += call > 1
                member.inside = None
                self.call(member)
            case pe.RaiseCall(_, error):
                member.inside = None
                self.raised[type(error).__name__] += 1
                if isinstance(error, ResyncRequired):  # nothing is shared here: that is done
                    member.machine.refusals.synchronized()
                self.call(member)
            case pe.AskCallers(query):
                self.tell(member, pe.CallersAsked(query, False))
            case _:
                pass

    def call(self, member: Member) -> None:
        if member.machine.standing is not Standing.MEMBER:
            return
        seen = member.machine.seen
        if member.steps % 3 == 2 or (seen is not None and len(seen.members) < 2):
            event: pe.PeerEvent = pe.RoundCall(next(member.calls), RoundKind.PEERS_PENDING)
        else:
            event = pe.ReduceCall(next(member.calls), 5, SUM)
            member.inside = event.call
        self.tell(member, event)

    def hang_up(self, member: Member) -> None:
        if member.line is not None:
            member.line.at_peer = False
            member.line.to_peer.clear()
            member.line.to_master.append(None)
            member.line = None

    def tell_master(self, index: int, event: me.MasterEvent) -> None:
        master = self.masters[index]
        if master is None:
            return
        effects = list(master.handle(event, self.now_ns))
        if not master.recovering and master.membership.version:
            self.vouched[index] = master.vouched()  # on disk before it is told
        for effect in effects:
            match effect:
                case me.SendTo(connection, message):
                    self.watch(master, message)
                    line = self.lines.get(connection)
                    if connection in self.imposters and isinstance(message, msg.Resumed):
                        follows = msg.Heartbeat(roster_version=1 << 40, term=message.term)
                        self.tell_master(index, me.ConnectionMessage(connection, follows))
                    if line is not None and line.at_master and line.at_peer:
                        line.to_peer.append(message)
                case me.CloseConnection(connection) if connection in self.imposters:
                    del self.imposters[connection]
                case me.CloseConnection(connection):
                    self.drop(self.lines[connection])
                case me.Remember(run, term, coordinated=coordinated, vouched=vouched):
                    if coordinated:
                        self.kept[index] = (run, term)
                    else:
                        self.vouched[index] = vouched
                case me.AskMaster(number, query):
                    self.ask(number, query)
                case _:
                    pass
        master.check()

    def ask(self, number: int, query: msg.RunQuery) -> None:
        """The standby asks the first master for its run."""
        first = self.masters[0]
        answer: me.MasterEvent = me.MasterUnanswered(number, "nobody there")
        if first is not None and self.between:
            first.handle(me.ConnectionOpened(0, "standby", MASTER_SIGNER.key), self.now_ns)
            asked = me.ConnectionMessage(0, query)
            for effect in first.handle(asked, self.now_ns):
                if isinstance(effect, me.SendTo):
                    assert isinstance(effect.message, msg.RunIs)
                    answer = me.MasterAnswered(number, effect.message)
            first.handle(me.ConnectionClosed(0, "it knows"), self.now_ns)
        self.tell_master(1, answer)

    def drop(self, line: Line) -> None:
        """The master's end is closed."""
        line.at_master = False
        line.to_master.clear()
        line.to_peer.append(None)

    # -- what must hold ------------------------------------------------------------------------

    def watch(self, master: MasterMachine, message: msg.MasterMessage) -> None:
        if not isinstance(message, HELD_BACK):
            return
        match message:
            case msg.OperationStarted(operation) | msg.SyncStarted(operation):
                ring = master.membership.ring(operation.group, operation.view)
                if ring is not None:  # it was held back, and the view has been closed since
                    self.moves(frozenset(ring), f"{master.incumbent!r} in term {master.term}")
            case msg.OperationEnded(operation, abort, _, contributors):
                known = self.outcomes.setdefault(operation, (abort, contributors))
                assert (known[0] is None, known[1]) == (abort is None, contributors), (
                    f"{operation} has ended with {known}, and with {abort}, {contributors}"
                )
                if AbortCause.VIEW_CLOSED not in (abort, known[0]):  # it comes with another cause
                    assert abort is known[0], operation
            case msg.RoundClosed(round_id, _, pending, lockstep):
                answer = (pending, lockstep)
                assert self.answers.setdefault(round_id, answer) == answer
            case msg.StoreAnswer():
                pass  # nobody asks the store here

    def moves(self, ring: frozenset[PeerId], who: str) -> None:
        for other, by in self.rings.items():
            assert ring <= other or other <= ring, f"{set(ring)} by {who}, {set(other)} by {by}"
        self.rings.setdefault(ring, who)

    # -- what happens --------------------------------------------------------------------------

    def deliver(self, line: Line) -> None:
        queues = [bool(line.to_master and line.at_master), bool(line.to_peer and line.at_peer)]
        if queues[0] and (not queues[1] or self.rng.random() < 0.5):
            message = line.to_master.popleft()
            if message is None:
                line.at_master = False
                self.tell_master(line.master, me.ConnectionClosed(line.number, "closed"))
            else:
                self.tell_master(line.master, me.ConnectionMessage(line.number, message))
        elif queues[1]:
            word = line.to_peer.popleft()
            member = self.members[line.peer]
            if word is None or (isinstance(word, msg.Refused) and word.cause is None):
                self.hang_up(member)
                self.tell(member, pe.ControlClosed("closed"))
            else:
                try:
                    self.tell(member, pe.ControlMessage(word))
                except RemoteProtocolError as error:
                    self.hang_up(member)
                    self.tell(member, pe.ControlClosed(error.reason))

    def busy(self) -> list[Line]:
        for number, line in list(self.lines.items()):
            if not line.at_master and not line.at_peer:
                del self.lines[number]
        return [
            line
            for line in self.lines.values()
            if (line.to_master and line.at_master) or (line.to_peer and line.at_peer)
        ]

    def deliver_all(self) -> None:
        for _ in range(2000):
            lines = self.busy()
            if not lines:
                return
            self.deliver(self.rng.choice(lines))

    def cut(self, line: Line) -> None:
        """Both ends learn of it; what was under way is lost."""
        if line.at_master:
            line.at_master = False
            self.tell_master(line.master, me.ConnectionClosed(line.number, "reset"))
        if line.at_peer:
            member = self.members[line.peer]
            self.hang_up(member)
            line.to_master.clear()
            self.tell(member, pe.ControlClosed("reset"))

    def dial(self, member: Member) -> None:
        choice = [i for i in (0, 1) if self.reach[i][member.number] and self.masters[i]]
        if not member.machine.run:
            choice = [0]
        member.dial_ns = None
        if not choice:
            self.tell(member, pe.ControlClosed("nobody there"))
            return
        index = self.rng.choice(choice)
        master = self.masters[index]
        assert master is not None
        run, term = master.shown_run, master.shown_term
        if run != NO_RUN and (term < member.machine.term or run != RUN):
            self.tell(member, pe.ControlClosed("a master of the past"))
            return
        line = Line(next(self.numbers), member.number, index)
        self.lines[line.number] = member.line = line
        self.tell_master(index, me.ConnectionOpened(line.number, "host", key(member.number)))
        self.tell(member, pe.ControlOpened(run, term))

    def pass_time(self, step_ns: int = STEP_NS) -> None:
        self.now_ns += step_ns
        for index in (0, 1):
            if step_ns:
                self.tell_master(index, me.MasterTick())
        for member in self.members:
            if step_ns:
                self.tell(member, pe.Tick())
            if member.dial_ns is not None and member.dial_ns <= self.now_ns:
                self.dial(member)

    def finish_some(self) -> None:
        for member in self.members:
            if member.working and self.rng.random() < 0.7:
                operation = next(iter(member.working))
                del member.working[operation]
                digest = b"the same for all"
                if self.unruly and self.moods.random() < 0.03:
                    digest = b"its own"
                self.tell(member, pe.ReduceDone(operation, digest))

    def fault(self) -> None:
        rng = self.rng
        kind = rng.choice(("split", "split", "cut", "hop", "kill", "restart", "restart", "heal"))
        lines = [line for line in self.lines.values() if line.at_master and line.at_peer]
        if kind == "split":
            here = {m.number for m in self.members if rng.random() < 0.5}
            for index, side in ((0, True), (1, False)):
                self.reach[index] = [(m.number in here) is side for m in self.members]
            for line in lines:
                if not self.reach[line.master][line.peer]:
                    self.cut(line)
        elif kind == "heal":
            self.heal()
        elif kind in ("cut", "hop") and lines:
            line = rng.choice(lines)
            self.reach = [list(reach) for reach in self.reach]
            if kind == "hop":
                self.reach[line.master][line.peer] = False
                self.reach[1 - line.master][line.peer] = True
            self.cut(line)
        elif kind == "kill":
            self.kill(rng.randrange(2))
        elif kind == "restart":
            index = rng.randrange(2)
            self.kill(index)
            self.restart(index)

    def intrude(self, lies: Random) -> None:
        """Somebody returns as a member, or as nobody whom any master knows, with lies."""
        index, connection = lies.randrange(2), next(self.numbers)
        if self.masters[index] is None:
            return
        size = len(self.members)
        peer = PeerId(lies.choice((*range(1, size + 3), 99)))
        known = [m.machine.newest for m in self.members if m.machine.newest is not None]
        roster = lies.choice(known)
        if peer not in roster.ring or lies.random() < 0.5:
            version = lies.choice((roster.version, roster.version + 1, 1 << 40))
            alone = (Whereabouts(peer, "host", 4000 + peer - 1),)
            roster = Roster(version, 0, roster.view, alone, (roster.view,), 1, 1, 1)
        own = lies.randbytes(KEY_BYTES)
        members = [replace(one, key=own) if one.peer == peer else one for one in roster.members]
        roster = replace(roster, members=tuple(members))
        ratified = lies.choice((0, roster.version))
        registration = msg.Register(0, "", 4000 + peer - 1, masters=2)
        header = msg.Return(
            peer, RUN, lies.choice((1, 1, 2, 3)), registration,
            roster.version, (), lies.choice((b"master 0", b"master 1")), ratified,
        )  # fmt: skip
        self.imposters[connection] = index
        words: list[msg.PeerMessage] = [
            header,
            msg.KnownRoster(roster, header.incumbent),
            msg.Reported(),
        ]
        if lies.random() < 0.2:
            words.append(msg.Goodbye())
        self.tell_master(index, me.ConnectionOpened(connection, "elsewhere", own))
        for word in words:
            if connection in self.imposters:
                self.tell_master(index, me.ConnectionMessage(connection, word))

    def hop_some_half_open(self) -> None:
        index = self.moods.randrange(2)
        mine = [line for line in self.lines.values() if line.master == index and line.at_peer]
        self.hop_half_open([line for line in mine if self.moods.random() < 0.6])

    def hop_half_open(self, lines: list[Line]) -> None:
        """Members lose a master, and find the other one; that master hears nothing of it."""
        self.reach = [list(reach) for reach in self.reach]
        for line in lines:
            self.reach[line.master][line.peer] = False
            self.reach[1 - line.master][line.peer] = True
            member = self.members[line.peer]
            line.at_peer = False
            line.to_peer.clear()
            member.line = None
            self.tell(member, pe.ControlClosed("timed out"))

    def leave(self, member: Member) -> None:
        if member.inside is not None:
            self.tell(member, pe.LeaveCall(member.inside, "its time is over"))

    def heal(self) -> None:
        for index in (0, 1):
            self.reach[index] = [True] * len(self.members)
            if self.masters[index] is None:
                self.restart(index)

    def restart(self, index: int) -> None:
        kept = self.kept[index]
        if kept is None:
            self.masters[index] = self.new_master(index, NO_RUN, 1, Origin.STANDBY)
        else:
            run, term = kept
            self.masters[index] = self.new_master(index, run, term + 1, Origin.RESTARTED)

    def kill(self, index: int) -> None:
        self.masters[index] = None
        self.imposters = {c: master for c, master in self.imposters.items() if master != index}
        for line in list(self.lines.values()):
            if line.master == index and (line.at_master or line.at_peer):
                self.cut(line)

    def live(self, steps: int) -> None:
        rng = self.rng
        for _ in range(steps):
            if rng.random() < 0.12:
                self.fault()
            if self.unruly and self.moods.random() < 0.06:
                self.hop_some_half_open()
            if self.lies is not None and self.lies.random() < 0.4:
                self.intrude(self.lies)
            if self.unruly and self.moods.random() < 0.25:
                self.leave(self.moods.choice(self.members))
            if rng.random() < 0.5:
                for _ in range(rng.randrange(12)):
                    lines = self.busy()
                    if lines:
                        self.deliver(rng.choice(lines))
            else:
                self.deliver_all()
            self.finish_some()
            if rng.random() < 0.7:
                self.pass_time()
            else:
                self.pass_time(0)

    # -- scripts -------------------------------------------------------------------------------

    def all_work(self) -> OperationId:
        """All members have begun the same operation."""
        self.deliver_all()
        (operation,) = {one for member in self.members for one in member.working}
        assert all(operation in member.working for member in self.members)
        return operation

    def finish(self, *members: Member) -> None:
        for member in members:
            (operation,) = member.working
            del member.working[operation]
            self.tell(member, pe.ReduceDone(operation, b"the same for all"))

    def lines_of(self, *members: Member) -> list[Line]:
        return [member.line for member in members if member.line is not None]

    def deliver_to(self, *members: Member, until: Callable[[], bool]) -> None:
        """Let messages go both ways between these members and their masters, until something."""
        numbers = {member.number for member in members}
        while not until():
            self.deliver(next(line for line in self.busy() if line.peer in numbers))

    def wait(self, steps: int) -> None:
        for _ in range(steps):
            self.pass_time()
            self.deliver_all()


def two_of_three_are_done() -> tuple[World, OperationId]:
    """1 and 2 are done, and have said so."""
    world = World(0, 3)
    operation = world.all_work()
    world.finish(*world.members[:2])
    world.deliver_all()
    return world, operation


def test_an_abort_that_no_majority_has_stored_is_not_told() -> None:
    """1 and 2 are done and follow the standby, unknown to the first master, when 3 withdraws."""
    world, operation = two_of_three_are_done()
    one, two, three = world.members
    world.hop_half_open(world.lines_of(one, two))
    world.leave(three)
    world.deliver_all()
    assert operation not in world.outcomes
    assert world.raised == {"OutcomeUnknown": 1}
    world.wait(40)
    assert world.outcomes[operation] == (None, (1, 2, 3))
    assert one.applied[0] == two.applied[0] == operation
    assert three.applied == []
    assert world.raised["Evicted"] == 1


def test_results_that_differ_are_told_once_a_majority_has_stored_that() -> None:
    world, operation = two_of_three_are_done()
    one, two, three = world.members
    world.hop_half_open(world.lines_of(one, two))
    world.tell(three, pe.ReduceDone(operation, b"another"))
    world.deliver_all()
    assert operation not in world.outcomes
    world.wait(40)
    assert world.outcomes[operation] == (None, (1, 2, 3))


def test_a_standby_adopts_the_abort_that_a_majority_has_stored() -> None:
    """Of those that come to it one has stored it, and was not told."""
    world, operation = two_of_three_are_done()
    one, two, three = world.members
    world.leave(three)
    world.deliver_to(one, three, until=lambda: operation in world.outcomes)
    assert world.outcomes[operation] == (AbortCause.WITHDRAWN, ())
    world.hop_half_open(world.lines_of(one, two))
    assert operation in {known.id for known in one.open()}
    world.wait(40)
    assert world.outcomes[operation] == (AbortCause.WITHDRAWN, ())
    assert operation not in {known.id for member in world.members for known in member.open()}
    assert operation not in (*one.applied, *two.applied, *three.applied)


def test_whoever_hears_that_a_view_is_closed_knows_what_was_committed_in_it() -> None:
    """1 alone is told of the commit, then 5 is lost; 2, 3 and 4 hear of that, and go."""
    world = World(0, 5)
    one, two, three, four, five = world.members
    operation = world.all_work()
    world.finish(two, three, four, five)
    world.deliver_all()
    world.reach = [[True, True, True, True, False] for _ in world.reach]
    world.cut(*world.lines_of(five))
    for _ in range(3):
        world.pass_time()
    world.hop_half_open(world.lines_of(two, three, four))
    world.reach = [[True, True, True, True, False], [False] * 5]  # they come back
    world.finish(one)
    world.deliver_to(one, until=lambda: operation in one.applied)
    before = one.machine.newest
    assert before is not None
    world.pass_time()  # 5 is removed

    def knows(member: Member) -> bool:
        newest = member.machine.newest
        return newest is not None and newest.version > before.version

    for member in (two, three, four):
        world.deliver_to(member, until=partial(knows, member))
        world.hop_half_open(world.lines_of(member))
        assert member.applied == []
    world.wait(40)
    assert world.outcomes[operation] == (None, (1, 2, 3, 4, 5))
    assert [m.applied[0] for m in (two, three, four)] == [operation] * 3


@settings(max_examples=12)
@given(SEEDS, st.integers(2, 7))
def test_two_masters_never_both_move_a_run(seed: int, size: int) -> None:
    World(seed, size).live(40)


@settings(max_examples=18)
@given(SEEDS, st.integers(2, 7))
def test_half_open_masters_and_leaving_callers_see_one_outcome(seed: int, size: int) -> None:
    World(seed, size, unruly=True).live(40)


@settings(max_examples=18)
@given(SEEDS, st.integers(2, 7))
def test_imposters_have_no_part_in_any_outcome(seed: int, size: int) -> None:
    """They know the token, the run, the members' ids and ports, and have keys of their own."""
    world = World(seed, size, unruly=True, imposters=True)
    world.live(60)
    for master in world.masters:
        if master is not None and not master.recovering:
            keys = {key(member.number) for member in world.members}
            assert {peer.member.key for peer in master.membership.members()} <= keys


@pytest.mark.parametrize(("seed", "size"), [(3, 5), (46, 6), (53, 7), (82, 6)])
def test_splits_that_were_found_once(seed: int, size: int) -> None:
    World(seed, size).live(60)


@pytest.mark.parametrize(
    ("seed", "size"), [(1, 3), (81, 5), (111, 5), (191, 7), (233, 7), (386, 4)]
)
def test_half_open_hops_that_gave_two_outcomes_once(seed: int, size: int) -> None:
    World(seed, size, unruly=True).live(60)


def test_when_all_is_healed_the_run_goes_on() -> None:
    world = World(4, 5)
    world.live(20)
    world.heal()
    before = world.commits
    for _ in range(100):
        world.deliver_all()
        world.finish_some()
        world.pass_time()
    assert world.commits > before + 20
