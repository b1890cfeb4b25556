"""Members leave a call that is committed all the same: who has what, and how they go on.

Real machines of a master and its peers, with lists for connections. The master may be frozen: what
is sent to it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from pccl.machines.master import events as me
from pccl.machines.master.machine import MasterMachine
from pccl.machines.peer import events as pe
from pccl.machines.peer.machine import PeerMachine
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import Lineage, SyncPurpose
from pccl.protocol.types import SYNC_TAG, Descriptor, OperationId, PeerId, RoundKind
from tests.support.master_stage import RUN, SUM
from tests.support.offers import offer
from tests.support.scenarios import key
from tests.support.secrets import MASTER_SIGNER

FRESH = offer()


class Peer:
    """One peer, and the shared state of its caller."""

    def __init__(self, group: Group, content: bytes) -> None:
        self.group = group
        self.machine = PeerMachine(Timing(), 0)
        self.state = replace(FRESH, content=content)
        self.answers: dict[int, object] = {}

    def feed(self, event: pe.PeerEvent) -> None:
        later = self.group.later
        effects = self.machine.handle(event, 0)
        self.machine.check()
        for effect in effects:
            match effect:
                case pe.Send(message):
                    self.group.up.append((self, message))
                case pe.SetLinks(peers):
                    self.group.link(self, [member.peer for member in peers])
                case pe.Begin(operation):
                    later.append((self, pe.ReduceDone(operation, b"digest")))
                case pe.BeginSync(operation, elected):
                    later.append((self, pe.ReduceDone(operation, elected.content)))
                case pe.RaiseCall(call, error):
                    self.answers[call] = error
                case pe.ReturnCall(call, value):
                    self.answers[call] = value
                    if isinstance(value, pe.SyncResult):
                        self._take(value)
                case _:
                    pass

    def _take(self, result: pe.SyncResult) -> None:
        elected, lineage = result.elected, Lineage(RUN, result.operation)
        content, revision = elected.content, elected.revision
        self.state = replace(self.state, revision=revision, lineage=lineage, content=content)

    def push(self, content: bytes = b"next") -> None:
        """The caller changes the state, and says so."""
        self.state = replace(self.state, revision=self.state.revision + 1, content=content)


MakeCall = Callable[[int, Peer], pe.PeerEvent]


def sync(call: int, peer: Peer) -> pe.PeerEvent:
    return pe.SyncCall(call, peer.state)


def update(call: int, peer: Peer) -> pe.PeerEvent:
    return pe.RoundCall(call, RoundKind.UPDATE_TOPOLOGY)


def reduce(call: int, peer: Peer) -> pe.PeerEvent:
    return pe.ReduceCall(call, 5, SUM)


def broadcast_from_nobody(call: int, peer: Peer) -> pe.PeerEvent:
    return pe.ReduceCall(call, 5, Descriptor.broadcast(DataType.FLOAT, 8, 3))


class Group:
    """A master, and peers with these contents."""

    def __init__(self, *contents: bytes) -> None:
        numbers = count(1)
        self.master = MasterMachine(
            Timing(), RUN, 1, lambda size: next(numbers).to_bytes(size, "big"), 0,
            signer=MASTER_SIGNER,
        )  # fmt: skip
        self.calls = count(1)
        self.connections: dict[int, Peer] = {}
        self.up: deque[tuple[Peer, msg.Message]] = deque()
        self.later: deque[tuple[Peer, pe.PeerEvent]] = deque()
        self.frozen = False
        self.peers: list[Peer] = []
        for content in contents or (b"content",) * 3:
            self.join(Peer(self, content))

    def join(self, peer: Peer) -> None:
        """A newcomer comes, and the members admit it."""
        connection = len(self.connections) + 1
        self.connections[connection] = peer
        peer.feed(pe.JoinCall(next(self.calls), 0, "", 4000 + connection, 5))
        self._to_master(me.ConnectionOpened(connection, "10.0.0.1", key(connection)))
        peer.feed(pe.ControlOpened(RUN, 1))
        self.settle()
        members = list(self.peers)
        self.peers.append(peer)
        if members:
            self.call(update, *members)
        self.call(update, peer)  # went with its admission

    def rejoin(self, *peers: Peer) -> None:
        """They call ``connect`` again."""
        for peer in peers:
            peer.feed(pe.Close())
            self.settle()
            self.peers.remove(peer)
            peer.machine = PeerMachine(Timing(), 0, left_sync=peer.machine.left_sync)
        for peer in peers:
            self.join(peer)

    def link(self, peer: Peer, wanted: list[PeerId]) -> None:
        """Both sides have a link at once."""
        for other in dict.fromkeys(self.connections.values()):
            if other is not peer and other.machine.peer in wanted:
                self.later.append((peer, pe.LinkChanged(other.machine.peer, None)))
                self.later.append((other, pe.LinkChanged(peer.machine.peer, None)))

    def settle(self) -> None:
        """Deliver all that is on its way."""
        while self.later or (self.up and not self.frozen):
            if self.later:
                peer, event = self.later.popleft()
                peer.feed(event)
            else:
                sender, message = self.up.popleft()
                newest = max(n for n, peer in self.connections.items() if peer is sender)
                self._to_master(me.ConnectionMessage(newest, message))

    def _to_master(self, event: me.MasterEvent) -> None:
        effects = self.master.handle(event, 0)
        self.master.check()
        for effect in effects:
            if isinstance(effect, me.SendTo):
                heard = pe.ControlMessage(effect.message)
                self.later.append((self.connections[effect.connection], heard))

    def begin(self, make: MakeCall, *peers: Peer) -> dict[Peer, int]:
        """All, or these, make a call, which may not return."""
        numbers = {peer: next(self.calls) for peer in peers or self.peers}
        for peer, number in numbers.items():
            peer.feed(make(number, peer))
        self.settle()
        return numbers

    def call(self, make: MakeCall, *peers: Peer) -> list[object]:
        """The same; it returns."""
        return [peer.answers[n] for peer, n in self.begin(make, *peers).items()]

    def leave(self, make: MakeCall, *leaving: Peer) -> None:
        """All make a call, and all or these leave it when it is complete there; it is committed.

        The master is frozen meanwhile.
        """
        numbers = self._until_done(make)
        for peer in leaving or self.peers:
            peer.feed(pe.LeaveCall(numbers[peer], "timeout_s=0.7 ran out"))
            assert isinstance(peer.answers[numbers[peer]], errors.OutcomeUnknown)
        self.frozen = False
        self.settle()

    def _until_done(self, make: MakeCall) -> dict[Peer, int]:
        numbers = {peer: next(self.calls) for peer in self.peers}
        for peer, number in numbers.items():
            peer.feed(make(number, peer))
        while self.up:  # what all ask for
            peer, message = self.up.popleft()
            newest = max(n for n, one in self.connections.items() if one is peer)
            self._to_master(me.ConnectionMessage(newest, message))
        self.frozen = True
        self.settle()  # they are done, and say so
        return numbers

    def contents(self) -> set[tuple[int, bytes]]:
        """What all have that have synchronized."""
        return {(peer.state.revision, peer.state.content) for peer in self.peers}


def kinds(answers: list[object]) -> list[type]:
    return [type(answer) for answer in answers]


ALL_SYNCHRONIZED = [pe.SyncResult] * 3
ALL_REDUCED = [pe.ReduceResult] * 3


def go_on(group: Group) -> None:
    """The members are in step, whatever they were before."""
    count_ = len(group.peers)
    lineage = {peer.state.lineage for peer in group.peers}
    assert len(group.contents()) == len(lineage) == 1
    for _ in range(2):
        assert kinds(group.call(reduce)) == [pe.ReduceResult] * count_
        for peer in group.peers:
            peer.push(peer.state.content + b"+")
        assert kinds(group.call(sync)) == [pe.SyncResult] * count_
        assert len(group.contents()) == 1


@pytest.fixture
def group() -> Group:
    """A master, and three peers with the same contents."""
    return Group()


# -- a synchronization ----------------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
def test_all_leave_a_synchronization_and_call_it_again(group: Group, later: bool) -> None:
    """Everybody has what was elected: nobody has to receive anything."""
    for _ in range(2):
        group.leave(sync)
        assert not any(peer.machine.needs_resync for peer in group.peers)
        if later:  # a program that begins its loop anew
            group.call(update)
        assert kinds(group.call(sync)) == ALL_SYNCHRONIZED
        go_on(group)
        for peer in group.peers:
            peer.push()


@pytest.mark.parametrize("updates", [False, True])
def test_all_leave_it_and_go_on_without_it(group: Group, updates: bool) -> None:
    assert kinds(group.call(sync)) == ALL_SYNCHRONIZED
    for turn in range(3):
        for peer in group.peers:
            peer.push(b"%d" % turn)
        group.leave(sync)
        if updates:
            group.call(update)
        assert kinds(group.call(reduce)) == ALL_REDUCED
    for peer in group.peers:
        peer.push()
    answers = group.call(sync)
    assert kinds(answers) == ALL_SYNCHRONIZED
    assert group.contents() == {(4, b"next")}
    go_on(group)


def test_a_newcomer_receives_what_all_left(group: Group) -> None:
    group.leave(sync)
    group.join(Peer(group, b"other"))
    answers = group.call(sync)
    assert kinds(answers) == [pe.SyncResult] * 4
    first = answers[0]
    assert isinstance(first, pe.SyncResult)
    assert first.elected.behind == (group.peers[3].machine.peer,)
    go_on(group)


@pytest.mark.parametrize("mistaken", [False, True])
def test_one_leaves_it_and_calls_again_while_the_others_go_on(group: Group, mistaken: bool) -> None:
    """It must not wait for a call that the others have behind them."""
    leaver, *others = group.peers
    group.leave(sync, leaver)
    theirs = group.begin(reduce, *others)
    if mistaken:  # that is no joint call in between
        assert kinds(group.call(broadcast_from_nobody, leaver)) == [ValueError]
    [answer] = group.call(sync, leaver)
    assert isinstance(answer, pe.SyncResult)
    assert answer in others[0].answers.values()
    group.call(reduce, leaver)
    assert kinds([peer.answers[n] for peer, n in theirs.items()]) == [pe.ReduceResult] * 2
    go_on(group)


def test_a_call_that_is_not_the_same_is_a_new_one(group: Group) -> None:
    leaver = group.peers[0]
    group.leave(sync)
    leaver.push()
    [number] = group.begin(sync, leaver).values()
    assert number not in leaver.answers  # it waits for the others


def test_who_had_to_receive_something_is_behind() -> None:
    """All leave. The two that have what was elected are in step; the third one is not."""
    group = Group(b"content", b"content", b"other")
    group.leave(sync)
    *intact, behind = group.peers
    assert [peer.machine.needs_resync for peer in group.peers] == [False, False, True]
    [answer] = group.call(update, behind)
    assert isinstance(answer, errors.ResyncRequired)
    group.begin(update, *intact)
    group.rejoin(behind)
    assert kinds(group.call(sync)) == ALL_SYNCHRONIZED
    go_on(group)


def test_who_had_another_revision_is_behind(group: Group) -> None:
    ahead = group.peers[0]
    ahead.push(ahead.state.content)
    group.leave(sync)
    assert [peer.machine.needs_resync for peer in group.peers] == [False, True, True]


def test_what_was_left_is_known_after_a_rejoin(group: Group) -> None:
    """All leave a synchronization, then a collective, and connect again."""
    group.leave(sync)
    group.leave(reduce)
    assert kinds(group.call(update)) == [errors.ResyncRequired] * 3
    group.rejoin(*group.peers)
    for peer in group.peers:
        peer.push()
    assert kinds(group.call(sync)) == ALL_SYNCHRONIZED
    go_on(group)


def test_the_call_returned_and_its_caller_had_left(group: Group) -> None:
    """The same, but the outcome was there before anybody left."""
    group.call(sync)
    operation = OperationId(1, 0, group.master.membership.newest_view(0), SYNC_TAG, 0)
    for peer in group.peers:
        peer.state = FRESH
        peer.feed(pe.LeftCommitted(operation))
    assert kinds(group.call(sync)) == ALL_SYNCHRONIZED
    go_on(group)


def test_a_comparison_that_returned_unnoticed_changes_nothing(group: Group) -> None:
    group.call(sync)
    for peer in group.peers:
        looks = replace(peer.state, purpose=SyncPurpose.VERIFY)
        peer.feed(pe.SyncCall(next(group.calls), looks))
    group.settle()
    operation = OperationId(1, 0, group.master.membership.newest_view(0), SYNC_TAG, 1)
    group.peers[0].feed(pe.LeftCommitted(operation))
    assert not group.peers[0].machine.needs_resync
    assert kinds(group.call(reduce)) == [pe.ReduceResult] * 3


def test_a_state_of_another_layout_is_no_heir_of_what_was_left(group: Group) -> None:
    group.leave(sync)
    for peer in group.peers[:1]:
        peer.state = replace(FRESH, revision=1, layout=b"another")
    offered = group.peers[0].machine.left_sync.offer(group.peers[0].state, stale=False)
    assert offered.lineage is None


# -- a collective ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pushed", [False, True])
@pytest.mark.parametrize("how", ["sync", "connect"])
def test_all_leave_a_collective(group: Group, how: str, pushed: bool) -> None:
    """Nobody has the result: what was there before it is what all have."""
    group.call(sync)
    for peer in group.peers:
        peer.push()
    group.call(sync)
    group.leave(reduce)
    assert kinds(group.call(reduce)) == [errors.ResyncRequired] * 3
    if how == "connect":
        group.rejoin(*group.peers)
    if pushed:
        for peer in group.peers:
            peer.push(b"next")
    assert kinds(group.call(sync)) == ALL_SYNCHRONIZED
    assert group.contents() == {(1 + pushed, b"next")}
    go_on(group)


@pytest.mark.parametrize("how", ["sync", "connect"])
def test_one_has_taken_the_result(group: Group, how: str) -> None:
    """It is what the others receive, also if they say that theirs is of the same revision."""
    group.call(sync)
    *leaving, staying = group.peers
    group.leave(reduce, *leaving)
    staying.push(b"with the result")
    assert kinds(group.call(reduce, *leaving)) == [errors.ResyncRequired] * 2
    for peer in leaving:
        peer.push(b"without it")
    if how == "connect":
        group.rejoin(*leaving)
    assert kinds(group.call(sync)) == ALL_SYNCHRONIZED
    assert group.contents() == {(1, b"with the result")}
    go_on(group)


def test_one_has_taken_the_result_and_not_said_so(group: Group) -> None:
    """What it has is not given up for what the others had before."""
    group.call(sync)
    *leaving, staying = group.peers
    group.leave(reduce, *leaving)
    staying.state = replace(staying.state, content=b"with the result")
    group.call(reduce, *leaving)
    assert kinds(group.call(sync)) == [errors.StateUnavailable] * 3
