"""Masters of a run that has more than one: what waits for a majority, and who goes on."""

from __future__ import annotations

from itertools import count

import pytest

from pccl.machines.master.events import (
    CloseConnection,
    ConnectionClosed,
    ConnectionMessage,
    ConnectionOpened,
    MasterEffect,
    MasterEvent,
    MasterTick,
    Remember,
    SendTo,
)
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.succession.majority import HELD_BACK, Basis
from pccl.machines.master.succession.origin import Origin
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import TERM_GAP, Timing
from pccl.protocol.types import (
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    Roster,
    RoundId,
    RoundKind,
)

SECOND = 1_000_000_000
RUN = b"the run of these"
FIRST, NEXT = b"master A", b"master B"
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
STANDBY = msg.MasterAddress("b", 2)
VERSION, VIEW = 7, 4


def ids(*peers: int) -> frozenset[PeerId]:
    return frozenset(PeerId(peer) for peer in peers)


def roster(version: int, view: int, *peers: int) -> Roster:
    members = tuple(Member(PeerId(p), f"10.0.0.{p}", 4000 + p) for p in peers)
    return Roster(version, 0, view, members, (view,), len(peers), 1, len(peers))


class Master:
    """A machine and its clock. Peer n speaks on connection n, unless it is said otherwise."""

    def __init__(
        self,
        origin: Origin,
        incumbent: bytes,
        term: int = 1,
        standbys: tuple[msg.MasterAddress, ...] = (STANDBY,),
    ) -> None:
        numbers = count(1)
        run = RUN  # a standby has learnt it
        self.now_ns = 0
        self.machine = MasterMachine(
            Timing(), run, term, lambda size: bytes([next(numbers)] * size), 0,
            origin, incumbent, standbys,
        )  # fmt: skip

    def do(self, event: MasterEvent) -> list[MasterEffect]:
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return effects

    def hear(self, connection: int, *messages: msg.Message) -> list[MasterEffect]:
        return [e for m in messages for e in self.do(ConnectionMessage(connection, m))]

    def acknowledge(self, connection: int, term: int | None = None) -> list[MasterEffect]:
        """What a peer says that follows this master and has all that it was sent."""
        version, term = self.machine.membership.version, term or self.machine.term
        return self.hear(connection, msg.Heartbeat(roster_version=version, term=term))

    def promise(self, connection: int, term: int) -> list[MasterEffect]:
        return self.hear(connection, msg.Heartbeat(roster_version=VERSION, term=term))

    def come(
        self,
        peer: int,
        *known: Roster,
        by: bytes = FIRST,
        ratified: int = VERSION,
        term: int = 1,
        connection: int = 0,
    ) -> list[MasterEffect]:
        registration = msg.Register(0, "", 4000 + peer, masters=2)
        header = msg.Return(
            PeerId(peer), bytes([peer] * 16), RUN, term, registration,
            max(r.version for r in known), (), by, ratified,
        )  # fmt: skip
        self.do(ConnectionOpened(connection or peer, f"10.0.0.{peer}"))
        words = [msg.KnownRoster(r, by) for r in known]
        return self.hear(connection or peer, header, *words, msg.Reported())

    def wait(self, seconds: float, speaking: tuple[int, ...] = ()) -> list[MasterEffect]:
        """Punctual ticks; all effects but signs of life."""
        effects: list[MasterEffect] = []
        end_ns = self.now_ns + round(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns += SECOND // 4
            for connection in speaking:
                effects += self.hear(connection, msg.Heartbeat())
            effects += self.do(MasterTick())
        beats = msg.MasterHeartbeat
        return [e for e in effects if not (isinstance(e, SendTo) and isinstance(e.message, beats))]


def incumbent(members: int) -> Master:
    """A master with a standby, and members that have acknowledged their roster."""
    master = Master(Origin.BLANK, FIRST)
    for peer in range(1, members + 1):
        master.do(ConnectionOpened(peer, f"10.0.0.{peer}"))
        master.hear(peer, msg.Register(0, "", 4000 + peer, members, 2))
        for elder in range(1, peer):
            master.hear(peer, msg.LinkReport(PeerId(elder), True, ""))
    for peer in range(1, members + 1):
        master.acknowledge(peer)
    assert len(master.machine.membership.members()) == members
    return master


def standby() -> Master:
    return Master(Origin.STANDBY, NEXT)


def moving(effects: list[MasterEffect]) -> list[tuple[int, str]]:
    """What moves the run."""
    sends = [e for e in effects if isinstance(e, SendTo) and isinstance(e.message, HELD_BACK)]
    return [(e.connection, type(e.message).__name__) for e in sends]


def closed(effects: list[MasterEffect]) -> list[int]:
    return [effect.connection for effect in effects if isinstance(effect, CloseConnection)]


def resumed(effects: list[MasterEffect]) -> list[int]:
    sends = [e for e in effects if isinstance(e, SendTo)]
    return [e.connection for e in sends if isinstance(e.message, msg.Resumed)]


# -- arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "ours", "theirs"),
    [(1, 1, 1), (2, 1, 2), (3, 2, 2), (4, 2, 3), (5, 3, 3), (6, 3, 4), (7, 4, 4)],
)
def test_how_many_are_enough(size: int, ours: int, theirs: int) -> None:
    for is_ours, enough in ((True, ours), (False, theirs)):
        basis = Basis(ids(*range(size)), size, is_ours)
        assert [basis.consents(ids(*range(n))) for n in range(size + 1)] == [
            n >= enough for n in range(size + 1)
        ]
    assert not Basis(ids(1, 2, 3), 3, is_ours=True).consents(ids(3, 4, 5))


# -- the incumbent ---------------------------------------------------------------------------


def test_while_nobody_is_lost_nothing_waits() -> None:
    master = incumbent(3)
    what = OperationId(1, 0, 1, 5, 0)
    effects: list[MasterEffect] = []
    for peer in (1, 2, 3):
        effects = master.hear(peer, msg.OperationRequest(what, SUM))
    assert moving(effects) == [(peer, "OperationStarted") for peer in (1, 2, 3)]


def test_a_loss_moves_nothing_before_a_majority_knows_of_it() -> None:
    master = incumbent(3)
    round_id = RoundId(RoundKind.PEERS_PENDING, 0)
    master.hear(1, msg.RoundRequest(round_id))
    master.hear(2, msg.RoundRequest(round_id))
    master.do(ConnectionClosed(3, "reset"))
    effects = master.wait(2, speaking=(1, 2))
    assert moving(effects) == []
    assert [type(e.message) for e in effects if isinstance(e, SendTo)] == [msg.RosterChanged] * 2
    assert moving(master.acknowledge(1)) == []
    assert moving(master.acknowledge(2, term=9)) == []  # it follows another master
    assert moving(master.acknowledge(2)) == [(1, "RoundClosed"), (2, "RoundClosed")]


def test_who_says_goodbye_is_not_asked() -> None:
    master = incumbent(2)
    master.hear(1, msg.RoundRequest(RoundId(RoundKind.PEERS_PENDING, 0)))
    assert moving(master.hear(2, msg.Goodbye())) == []
    assert moving(master.acknowledge(1)) == [(1, "RoundClosed")]


def test_what_the_others_have_acknowledged_is_told() -> None:
    master = incumbent(3)
    master.hear(3, msg.Goodbye())
    before = master.machine.membership.version - 1
    master.now_ns += SECOND
    beats = [e.message for e in master.do(MasterTick()) if isinstance(e, SendTo)]
    assert {m.ratified for m in beats if isinstance(m, msg.MasterHeartbeat)} == {before}
    for peer in (1, 2):
        master.acknowledge(peer)
    master.now_ns += SECOND // 4
    master.do(MasterTick())
    master.now_ns += 3 * SECOND // 4
    beats = [e.message for e in master.do(MasterTick()) if isinstance(e, SendTo)]
    assert {m.ratified for m in beats if isinstance(m, msg.MasterHeartbeat)} == {before + 1}


def test_exactly_half_goes_on_with_the_incumbent() -> None:
    master = incumbent(4)
    round_id = RoundId(RoundKind.PEERS_PENDING, 0)
    for peer in (1, 2):
        master.hear(peer, msg.RoundRequest(round_id))
    for peer in (3, 4):
        master.do(ConnectionClosed(peer, "reset"))
    master.wait(2, speaking=(1, 2))
    assert [peer.id for peer in master.machine.membership.members()] == [1, 2]
    assert moving(master.acknowledge(1)) == []
    assert moving(master.acknowledge(2)) == [(1, "RoundClosed"), (2, "RoundClosed")]


def test_a_minority_is_closed_and_its_own_successor_gives_it_nothing() -> None:
    master = incumbent(3)
    for peer in (2, 3):
        master.do(ConnectionClosed(peer, "reset"))
    effects = master.wait(2, speaking=(1,)) + master.acknowledge(1)
    successor = master.machine.membership.roster(0)
    assert successor.ring == (PeerId(1),)
    effects += master.wait(5.25, speaking=(1,))
    assert moving(effects) == []
    assert closed(effects) == [1]
    assert master.machine.recovering
    whole = roster(1, 1, 1, 2, 3)
    for _ in range(3):  # it may come back as often as it likes
        effects = master.come(1, whole, successor, ratified=1)
        effects += master.wait(5.25)
        assert (moving(effects), resumed(effects)) == ([], [])
        assert closed(effects) == [1]
    master.come(1, whole, successor, ratified=1)
    assert resumed(master.come(2, whole, ratified=1)) == [1, 2]


# -- the standby -----------------------------------------------------------------------------


def test_a_standby_begins_no_run() -> None:
    master = standby()
    master.do(ConnectionOpened(9, "10.0.0.9"))
    reason = "this is a standby, and no member of its run has returned to it"
    assert master.hear(9, msg.Register(0, "", 4009)) == [
        SendTo(9, msg.Refused(None, reason)),
        CloseConnection(9, reason),
    ]


def test_it_asks_a_majority_to_follow_it_and_rebuilds_the_run_then() -> None:
    master = standby()
    whole = roster(VERSION, VIEW, 1, 2, 3)
    assert master.come(1, whole) == []
    assert master.come(2, whole) == []
    effects = master.wait(5, speaking=(1, 2))
    asked = msg.Resumed(2, NEXT, (STANDBY,))
    assert effects == [Remember(RUN, 2, NEXT), SendTo(1, asked), SendTo(2, asked)]
    assert master.promise(1, 1) == []  # that was said before it heard
    assert master.promise(1, 2) == []
    effects = master.promise(2, 2)
    changed = [e.message for e in effects if isinstance(e, SendTo)]
    newest = [m.roster for m in changed if isinstance(m, msg.RosterChanged)][-1]
    assert (newest.version, newest.view) == ((2 << 31) + 2, VIEW + TERM_GAP + 1)
    assert newest.ring == (PeerId(1), PeerId(2))
    assert moving(effects) == []
    round_id = RoundId(RoundKind.PEERS_PENDING, 0)
    for peer in (1, 2):
        assert moving(master.hear(peer, msg.RoundRequest(round_id))) == []
    assert moving(master.acknowledge(1)) == []
    assert moving(master.acknowledge(2)) == [(1, "RoundClosed"), (2, "RoundClosed")]


@pytest.mark.parametrize(("by", "goes_on"), [(FIRST, False), (NEXT, True)])
def test_exactly_half_is_enough_for_who_told_the_roster(by: bytes, goes_on: bool) -> None:
    master = standby()
    for peer in (1, 2):
        master.come(peer, roster(VERSION, VIEW, 1, 2, 3, 4), by=by)
    effects = master.wait(5, speaking=(1, 2))
    assert resumed(effects) == ([1, 2] if goes_on else [])
    assert closed(effects) == ([] if goes_on else [1, 2])


def test_a_roster_that_may_have_counted_needs_its_own_majority() -> None:
    """Peer 3 knows that 1, 2 and 3 may have gone on: with 4 and 5 it is no majority of these."""
    whole, later = roster(VERSION, VIEW, 1, 2, 3, 4, 5), roster(VERSION + 1, VIEW + 1, 1, 2, 3)
    master = standby()
    master.come(3, whole, later)
    master.come(4, whole)
    master.come(5, whole)
    effects = master.wait(5, speaking=(3, 4, 5))
    assert (resumed(effects), closed(effects)) == ([], [3, 4, 5])
    for peer in (3, 4, 5):
        master.come(peer, whole, *((later,) if peer == 3 else ()))
    effects = master.come(2, whole) + master.wait(5, speaking=(2, 3, 4, 5))
    assert resumed(effects) == [2, 3, 4, 5]


def test_what_was_ratified_since_makes_older_rosters_not_count() -> None:
    whole, later = roster(VERSION, VIEW, 1, 2, 3, 4, 5), roster(VERSION + 1, VIEW + 1, 1, 2)
    master = standby()
    master.come(1, whole, later, ratified=VERSION + 1)
    assert resumed(master.come(2, whole, later)) == [1, 2]


def test_who_breaks_off_before_it_has_promised_has_said_nothing() -> None:
    whole = roster(VERSION, VIEW, 1, 2, 3)
    master = standby()
    master.come(1, whole)
    master.come(2, whole)
    master.wait(5, speaking=(1, 2))
    master.promise(1, 2)
    master.do(ConnectionClosed(2, "reset"))
    effects = master.wait(2.25, speaking=(1,))
    assert closed(effects) == [1]
    assert master.machine.recovering
    master.come(1, whole, term=2, by=NEXT)
    effects = master.come(2, whole) + master.wait(5, speaking=(1, 2))
    assert SendTo(1, msg.Resumed(3, NEXT, (STANDBY,))) in effects  # in a term of its own


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_member_that_loses_its_connection_before_it_promises_is_waited_for(
    comes_back: bool,
) -> None:
    whole = roster(VERSION, VIEW, 1, 2, 3)
    master = standby()
    for peer in (1, 2, 3):
        master.come(peer, whole)
    master.do(ConnectionClosed(3, "a message was damaged on the way", damaged=True))
    for peer in (1, 2):
        master.promise(peer, 2)
    assert master.machine.recovering
    if comes_back:
        master.come(3, whole, connection=13)
        assert master.machine.recovering
        master.promise(13, 2)
    else:
        master.wait(2.25, speaking=(1, 2))
    assert not master.machine.recovering
    there = [PeerId(peer) for peer in ((1, 2, 3) if comes_back else (1, 2))]
    assert [peer.id for peer in master.machine.membership.members()] == there


def test_who_comes_back_without_having_followed_is_not_counted() -> None:
    whole = roster(VERSION, VIEW, 1, 2, 3)
    master = standby()
    for peer in (1, 2, 3):
        master.come(peer, whole)
    for peer in (1, 2, 3):
        master.promise(peer, 2)
    assert not master.machine.recovering
    master.do(ConnectionClosed(3, "reset"))
    assert master.come(3, whole, connection=13) == [
        CloseConnection(13, "the peer has not followed this master")
    ]
    other = msg.Resume(PeerId(3), bytes([3] * 16), 99, FIRST)
    master.do(ConnectionOpened(14, "10.0.0.3"))
    assert master.hear(14, other) == [
        CloseConnection(14, "the peer follows another master in this term")
    ]


# -- what a majority has to store before it is told ----------------------------------------------


OPERATION = OperationId(1, 0, 1, 5, 0)


def started(members: int, *, group_of_last: int = 0) -> Master:
    """An operation of all members (of group 0) has begun."""
    master = Master(Origin.BLANK, FIRST)
    for peer in range(1, members + 1):
        group = group_of_last if peer == members else 0
        master.do(ConnectionOpened(peer, f"10.0.0.{peer}"))
        master.hear(peer, msg.Register(group, "", 4000 + peer, members, 2))
        for elder in range(1, peer):
            master.hear(peer, msg.LinkReport(PeerId(elder), True, ""))
    for peer in range(1, members + 1):
        master.acknowledge(peer)
    ring = master.machine.membership.ring(0, 1)
    assert ring is not None
    for peer in ring:
        master.hear(peer, msg.OperationRequest(OPERATION, SUM))
    return master


def proposed(effects: list[MasterEffect]) -> list[tuple[int, msg.Proposed]]:
    sends = [e for e in effects if isinstance(e, SendTo)]
    return [(e.connection, e.message) for e in sends if isinstance(e.message, msg.Proposed)]


def store(master: Master, connection: int, place: int) -> list[MasterEffect]:
    """What a peer says that has stored everything up to there."""
    version, term = master.machine.membership.version, master.machine.term
    beat = msg.Heartbeat(roster_version=version, term=term, proposed=place)
    return master.hear(connection, beat)


def test_an_abort_is_proposed_to_all_and_told_when_a_majority_has_stored_it() -> None:
    master = started(3)
    effects = master.hear(3, msg.Withdraw(OPERATION, "it is late"))
    asked = proposed(effects)
    assert [connection for connection, _ in asked] == [1, 2, 3]
    assert {(m.place, m.outcome.abort.name) for _, m in asked if m.outcome and m.outcome.abort} == {
        (1, "WITHDRAWN")
    }
    assert moving(effects) == []
    assert moving(store(master, 3, 1)) == []
    told = store(master, 1, 1)
    assert moving(told) == [(peer, "OperationEnded") for peer in (1, 2, 3)]


def test_members_of_other_groups_store_it_too() -> None:
    """A majority of the run need not contain anybody of the group."""
    master = started(3, group_of_last=1)
    effects = master.hear(1, msg.Withdraw(OPERATION, "it is late"))
    assert [connection for connection, _ in proposed(effects)] == [1, 2, 3]
    store(master, 3, 1)
    assert moving(store(master, 2, 1)) == [(1, "OperationEnded"), (2, "OperationEnded")]


def test_a_commit_that_all_members_have_reported_done_needs_no_proposal() -> None:
    master = started(3)
    effects = [
        e for peer in (1, 2, 3) for e in master.hear(peer, msg.OperationDone(OPERATION, b"same"))
    ]
    assert proposed(effects) == []
    assert moving(effects) == [(peer, "OperationEnded") for peer in (1, 2, 3)]


def test_a_commit_after_a_loss_is_proposed() -> None:
    master = started(4)
    for peer in (1, 2, 3):
        master.hear(peer, msg.OperationDone(OPERATION, b"same"))
    effects = master.do(ConnectionClosed(4, "reset")) + master.hear(
        1, msg.LinkReport(PeerId(4), False, "reset")
    )
    assert [m.outcome.contributors for _, m in proposed(effects) if m.outcome] == [(1, 2, 3, 4)] * 3
    assert moving(effects) == []
    master.acknowledge(1)  # the roster alone is not enough
    master.acknowledge(2)
    assert moving(master.acknowledge(3)) == []
    assert moving(store(master, 1, 1)) == []
    told = store(master, 2, 1)  # with exactly half of those before, the incumbent goes on
    assert moving(told) == [(peer, "OperationEnded") for peer in (1, 2, 3)]


def test_what_is_asked_for_again_is_told_once() -> None:
    master = started(3)
    master.hear(3, msg.Withdraw(OPERATION, "it is late"))
    for _ in range(3):
        master.hear(3, msg.Withdraw(OPERATION, "it is late"), msg.OutcomeQuery(OPERATION))
    store(master, 1, 1)
    told = store(master, 2, 1)
    assert moving(told).count((3, "OperationEnded")) == 1


def test_whoever_is_resumed_or_admitted_gets_proposals_before_rosters() -> None:
    master = started(3)
    master.hear(3, msg.Withdraw(OPERATION, "it is late"))
    master.do(ConnectionClosed(2, "reset"))
    master.do(ConnectionOpened(12, "10.0.0.2"))
    token = master.machine.membership.peers[PeerId(2)].token
    effects = master.hear(12, msg.Resume(PeerId(2), token, 0, FIRST))
    kinds = [type(e.message).__name__ for e in effects if isinstance(e, SendTo)]
    assert kinds.index("Proposed") < kinds.index("Admitted")
    master.do(ConnectionOpened(4, "10.0.0.4"))
    master.hear(4, msg.Register(0, "", 4004, 1, 2))
    for elder in (1, 2, 3):
        master.hear(4, msg.LinkReport(PeerId(elder), True, ""))
    update = msg.RoundRequest(RoundId(RoundKind.UPDATE_TOPOLOGY, 0))
    effects = master.hear(1, update) + master.hear(12, update) + master.hear(3, update)
    to_newcomer = [e.message for e in effects if isinstance(e, SendTo) and e.connection == 4]
    kinds = [type(message).__name__ for message in to_newcomer]
    assert kinds == ["Proposed", "Admitted"]


def test_what_everybody_has_acknowledged_is_not_proposed_any_more() -> None:
    master = started(3)
    master.hear(3, msg.Withdraw(OPERATION, "it is late"))
    for peer in (1, 2):
        store(master, peer, 1)
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(operations=(OPERATION,)))
    master.do(ConnectionClosed(3, "reset"))
    master.do(ConnectionOpened(13, "10.0.0.3"))
    token = master.machine.membership.peers[PeerId(3)].token
    version = master.machine.membership.version
    assert proposed(master.hear(13, msg.Resume(PeerId(3), token, version, FIRST))) == []


def test_without_a_standby_an_abort_is_told_at_once() -> None:
    master = Master(Origin.BLANK, FIRST)
    master.machine = MasterMachine(Timing(), RUN, 1, bytes, 0, Origin.BLANK, FIRST)
    for peer in (1, 2):
        master.do(ConnectionOpened(peer, f"10.0.0.{peer}"))
        master.hear(peer, msg.Register(0, "", 4000 + peer, 2))
        for elder in range(1, peer):
            master.hear(peer, msg.LinkReport(PeerId(elder), True, ""))
    for peer in (1, 2):
        master.hear(peer, msg.OperationRequest(OPERATION, SUM))
    effects = master.hear(2, msg.Withdraw(OPERATION, "it is late"))
    assert proposed(effects) == []
    assert moving(effects) == [(1, "OperationEnded"), (2, "OperationEnded")]


def test_a_newcomer_that_says_it_knows_another_master_ends_nothing() -> None:
    """Where the operator has named no standby, members alone may say that there is one."""
    master = Master(Origin.BLANK, FIRST, standbys=())
    for peer, masters in ((1, 1), (2, 5)):
        master.do(ConnectionOpened(peer, f"10.0.0.{peer}"))
        master.hear(peer, msg.Register(0, "", 4000 + peer, 1, masters))
    asked = msg.RoundRequest(RoundId(RoundKind.PEERS_PENDING, 0))
    assert moving(master.hear(1, asked)) == [(1, "RoundClosed")]  # without any acknowledgement
    master.hear(2, msg.LinkReport(PeerId(1), True, ""))
    asked = msg.RoundRequest(RoundId(RoundKind.UPDATE_TOPOLOGY, 0))
    assert moving(master.hear(1, asked)) == []
    assert moving(master.acknowledge(1)) == [(1, "RoundClosed")]


def test_a_master_names_those_that_may_have_gone_on_without_it() -> None:
    """It has removed them, and nobody has acknowledged that: its standby has to know them."""
    master = incumbent(3)
    for peer in (2, 3):
        master.do(ConnectionClosed(peer, "reset"))
    master.wait(2, speaking=(1,))
    assert master.machine.membership.roster(0).ring == (PeerId(1),)
    assert set(master.machine.vouched().digests or ()) == {1, 2, 3}
