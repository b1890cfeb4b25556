"""The store of several members, with lost connections and masters, equals a plain dict.

The members are the production clients, and the master is the production server. Messages wait in
queues, in any order between members. A lost connection loses the messages in both directions; a
lost master loses the map, and the next one knows the reports of the members alone.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.machines.history import History
from pccl.machines.key_value.client import StoreClient
from pccl.machines.key_value.server import StoreServer
from pccl.machines.peer import events as ev
from pccl.machines.peer.contact import MasterLiveness, PeerOutbox
from pccl.machines.peer.membership import PeerIdentity, Standing
from pccl.protocol.limits import Timing
from pccl.protocol.messages import StoreAnswer, StoreOp, StoreRequest
from pccl.protocol.types import PeerId

KEYS = (b"a", b"b", b"c")
NUMBERS = (b"m", b"n")
SEEDS = st.integers(0, (1 << 32) - 1)
WRITES = (StoreOp.SET, StoreOp.ADD, StoreOp.COMPARE_SET, StoreOp.DELETE, StoreOp.APPEND)


@dataclass
class Member:
    """One member: its client, and the messages on the way."""

    peer: PeerId
    calls: dict[int, ev.StoreCall] = field(default_factory=dict[int, ev.StoreCall])
    """The open ones."""
    to_master: deque[StoreRequest] = field(default_factory=deque[StoreRequest])
    to_member: deque[StoreAnswer] = field(default_factory=deque[StoreAnswer])

    def __post_init__(self) -> None:
        self.effects: list[ev.PeerEffect] = []
        contact, own = MasterLiveness(Timing(), 0), PeerIdentity()
        contact.connected = True
        own.peer = self.peer
        for standing in (Standing.JOINING, Standing.PENDING, Standing.MEMBER):
            own.become(standing)
        self.client = StoreClient(PeerOutbox(contact, self.effects), own)


class World:
    """Some members, a master, and a dict."""

    def __init__(self, seed: int, members: int) -> None:
        self.rng = Random(seed)
        self.members = [Member(PeerId(n + 1)) for n in range(members)]
        self.master, self.term = StoreServer(), 1
        self.last_call = 0
        self.truth: dict[bytes, bytes] = {}
        """What the keys are after all writes that the master has carried out."""
        self.results: dict[tuple[PeerId, int], tuple[bool, bytes | None]] = {}
        """By member and number: what a write has given, by the dict."""
        self.sums: defaultdict[bytes, list[int]] = defaultdict(list)
        """What callers of ``add`` have got."""
        self.added: defaultdict[bytes, int] = defaultdict(int)

    # -- the members -----------------------------------------------------------------------------

    def call(self, member: Member, op: StoreOp, *keys: bytes, **values: bytes) -> None:
        self.last_call += 1
        event = ev.StoreCall(self.last_call, op, keys, **values)
        member.calls[event.call] = event
        member.client.call(event, None)
        self.carry_out(member)

    def carry_out(self, member: Member) -> None:
        effects, member.effects[:] = list(member.effects), []
        for effect in effects:
            match effect:
                case ev.Send(StoreRequest() as request):
                    member.to_master.append(request)
                case ev.ReturnCall(call, ev.StoreResult() as result):
                    self.returned(member, member.calls.pop(call), result)
                case ev.RaiseCall(call):
                    del member.calls[call]
                case _:
                    raise AssertionError(effect)

    def returned(self, member: Member, event: ev.StoreCall, result: ev.StoreResult) -> None:
        if event.op is StoreOp.ADD:
            assert result.value is not None
            self.sums[event.keys[0]].append(int(result.value))

    def call_something(self, *, adds_only: bool) -> None:
        member, rng = self.rng.choice(self.members), self.rng
        if len(member.client) >= 20:
            return
        op = rng.choice([StoreOp.ADD, StoreOp.GET] if adds_only else list(StoreOp)[1:])
        key = rng.choice(NUMBERS if op is StoreOp.ADD or adds_only else KEYS)
        value, expected = rng.choice((b"", b"1", b"22")), rng.choice((b"", b"1", b"22"))
        match op:
            case StoreOp.ADD:
                self.call(member, op, key, value=b"1")
                self.added[key] += 1
            case StoreOp.SET | StoreOp.APPEND:
                self.call(member, op, key, value=value)
            case StoreOp.COMPARE_SET:
                self.call(member, op, key, value=value, expected=expected)
            case StoreOp.CHECK | StoreOp.WAIT:
                self.call(member, op, *rng.sample(KEYS, rng.randint(1, 3)))
            case StoreOp.COUNT:
                self.call(member, op)
            case _:
                self.call(member, op, key)

    def leave_something(self) -> None:
        member = self.rng.choice(self.members)
        reads = [c for c, event in member.calls.items() if event.op not in WRITES]
        if reads:
            member.client.leave(self.rng.choice(reads), "left")
            self.carry_out(member)

    # -- the master ------------------------------------------------------------------------------

    def hear(self, member: Member) -> None:
        """The master takes one message."""
        request = member.to_master.popleft()
        answers = self.master.take(member.peer, request, self.term)
        self.master.check(History("test"))
        for peer, answer in answers:
            asker = self.members[peer - 1]
            asker.to_member.append(answer)
            if peer == member.peer and answer.number == request.number:
                self.hold_against_the_dict(peer, request, answer)

    def hold_against_the_dict(
        self, peer: PeerId, request: StoreRequest, answer: StoreAnswer
    ) -> None:
        """A write is as the dict has it, a repeated one as at the first time; a read as it is."""
        place = peer, request.number
        if request.op in WRITES and place in self.results:
            first = self.results[place]
            assert first == (answer.done, answer.value) or (
                request.op is StoreOp.APPEND and answer == StoreAnswer(request.number)
            )
            return
        done, value = self.by_the_dict(request)
        if request.op in (StoreOp.SET, StoreOp.DELETE) or (
            request.op is StoreOp.COMPARE_SET and done
        ):
            value = b"" if done else None
        assert (answer.done, answer.value) == (done, value)
        if request.op in WRITES and done:
            self.results[place] = done, value

    def by_the_dict(self, request: StoreRequest) -> tuple[bool, bytes | None]:
        truth, keys, value = self.truth, request.keys, request.value
        match request.op:
            case StoreOp.SET:
                truth[keys[0]] = value
                return True, value
            case StoreOp.APPEND:
                longer = truth[keys[0]] = truth.get(keys[0], b"") + value
                return True, longer
            case StoreOp.ADD:
                total = truth[keys[0]] = b"%d" % (int(truth.get(keys[0], b"0")) + int(value))
                return True, total
            case StoreOp.DELETE:
                return truth.pop(keys[0], None) is not None, None
            case StoreOp.COMPARE_SET:
                present = truth.get(keys[0])
                if request.expected == (b"" if present is None else present):
                    truth[keys[0]] = value
                    return True, value
                return False, present
            case StoreOp.COUNT:
                return True, b"%d" % len(truth)
            case StoreOp.CHECK:
                return all(key in truth for key in keys), None
            case StoreOp.GET:
                return True, truth[keys[0]]
            case _:
                assert all(key in truth for key in keys)
                return True, None

    # -- faults ----------------------------------------------------------------------------------

    def reconnect(self, member: Member) -> None:
        member.to_master.clear()
        member.to_member.clear()
        member.client.repeat()
        if self.rng.random() < 0.2:
            member.client.repeat()  # as after a report, and again after ``Resumed``
        self.carry_out(member)

    def lose_master(self) -> None:
        """Another one takes over from what the members report."""
        reports = [entry for member in self.members for entry in member.client.report()]
        self.rng.shuffle(reports)
        self.master, self.term = StoreServer(), self.term + 1
        self.master.take_up(reports, [member.peer for member in self.members])
        self.master.check(History("test"))
        for member in self.members:
            self.reconnect(member)

    def go_on(self, steps: int, *, adds_only: bool, loses_masters: bool) -> None:
        for _ in range(steps):
            member = self.rng.choice(self.members)
            match self.rng.randrange(40):
                case 0:
                    self.reconnect(member)
                case 1 if loses_masters:
                    self.lose_master()
                case 2:
                    self.leave_something()
                case n if n < 14:
                    self.call_something(adds_only=adds_only)
                case n if n < 27 and member.to_master:
                    self.hear(member)
                case _ if member.to_member:
                    member.client.answered(member.to_member.popleft())
                    self.carry_out(member)
                case _:
                    pass

    def end(self) -> None:
        """Deliver everything; then all calls but those that wait for a missing key have ended."""
        while any(member.to_master or member.to_member for member in self.members):
            for member in self.members:
                while member.to_master:
                    self.hear(member)
                while member.to_member:
                    member.client.answered(member.to_member.popleft())
                    self.carry_out(member)
        for member in self.members:
            for event in member.calls.values():
                assert event.op in (StoreOp.GET, StoreOp.WAIT)
                assert not all(key in self.truth for key in event.keys)


@settings(max_examples=200)
@given(SEEDS, st.integers(1, 4))
def test_any_requests_and_reconnects_equal_a_dict(seed: int, members: int) -> None:
    world = World(seed, members)
    world.go_on(400, adds_only=False, loses_masters=False)
    world.end()


@settings(max_examples=200)
@given(SEEDS, st.integers(1, 4))
def test_sums_are_distinct_and_whole_although_masters_are_lost(seed: int, members: int) -> None:
    """All members return, so each addition counts once."""
    world = World(seed, members)
    world.hold_against_the_dict = lambda *_: None  # type: ignore[method-assign]
    world.go_on(400, adds_only=True, loses_masters=True)
    for key in NUMBERS:
        world.call(world.members[0], StoreOp.ADD, key, value=b"1")
        world.added[key] += 1
    world.truth = dict.fromkeys(NUMBERS, b"")
    world.end()
    assert {key: sorted(sums) for key, sums in world.sums.items()} == {
        key: list(range(1, count + 1)) for key, count in world.added.items()
    }
