"""Masters of a run that has more than one: what waits for a majority, and who goes on."""

from __future__ import annotations

from typing import Any

import pytest

from pccl.machines.master.events import (
    CloseConnection,
    ConnectionClosed,
    ConnectionOpened,
    MasterEffect,
    MasterTick,
    Remember,
    SendTo,
)
from pccl.machines.master.succession.majority import HELD_BACK, Basis
from pccl.machines.master.succession.origin import Origin
from pccl.protocol import messages as msg
from pccl.protocol.limits import TERM_GAP
from pccl.protocol.types import PeerId, Roster, RoundId, RoundKind
from tests.support.master_stage import MASTER as FIRST
from tests.support.master_stage import NEXT, RUN, MasterStage, closed, sent, told
from tests.support.scenarios import key, op, roster

STANDBY = msg.MasterAddress("b", 2)
VERSION, VIEW = 7, 4
WHOLE = roster(VERSION, VIEW, 1, 2, 3)
OPERATION = op()
PENDING = RoundId(RoundKind.PEERS_PENDING, 0)


def ids(*peers: int) -> frozenset[PeerId]:
    return frozenset(PeerId(peer) for peer in peers)


def acknowledge(
    master: MasterStage, connection: int, term: int | None = None, stored: int = 0
) -> list[MasterEffect]:
    """What a peer says that follows this master, and has all that it was sent.

    Args:
        stored: up to where it has stored what was proposed.
    """
    version, term = master.machine.membership.version, term or master.machine.term
    beat = msg.Heartbeat(roster_version=version, term=term, proposed=stored)
    return master.hear(connection, beat)


def promise(master: MasterStage, connection: int, term: int) -> list[MasterEffect]:
    return master.hear(connection, msg.Heartbeat(roster_version=VERSION, term=term))


def come(master: MasterStage, peer: int, *known: Roster, **options: Any) -> list[MasterEffect]:
    """A member returns with these rosters."""
    usual = {"masters": 2, "ratified": VERSION}
    return master.come(peer, known=known, **{**usual, **options})


def incumbent(*groups: int) -> MasterStage:
    """A master with a standby, and members that have acknowledged their roster."""
    master = MasterStage().begin(RUN, incumbent=FIRST, standbys=(STANDBY,))
    master.together(*groups, masters=2)
    for peer in range(1, len(groups) + 1):
        acknowledge(master, peer)
    return master


def standby() -> MasterStage:
    """One that has learnt which run it is."""
    return MasterStage().begin(RUN, 1, Origin.STANDBY, NEXT, (STANDBY,))


def moving(effects: list[MasterEffect]) -> list[tuple[int, str]]:
    """What moves the run."""
    return [
        (to, type(message).__name__)
        for to, message in sent(effects)
        if isinstance(message, HELD_BACK)
    ]


def resumed(effects: list[MasterEffect]) -> list[int]:
    return [connection for connection, _ in told(effects, msg.Resumed)]


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
    master = incumbent(0, 0, 0)
    assert moving(master.start(1, 2, 3, what=OPERATION)) == [
        (peer, "OperationStarted") for peer in (1, 2, 3)
    ]


def test_a_loss_moves_nothing_before_a_majority_knows_of_it() -> None:
    master = incumbent(0, 0, 0)
    master.hear(1, msg.RoundRequest(PENDING))
    master.hear(2, msg.RoundRequest(PENDING))
    master.do(ConnectionClosed(3, "reset"))
    effects = master.wait(2, 1, 2)
    assert moving(effects) == []
    assert [type(message) for _, message in sent(effects)] == [msg.RosterChanged] * 2
    assert moving(acknowledge(master, 1)) == []
    assert moving(acknowledge(master, 2, term=9)) == []  # it follows another master
    assert moving(acknowledge(master, 2)) == [(1, "RoundClosed"), (2, "RoundClosed")]


def test_who_says_goodbye_is_not_asked() -> None:
    master = incumbent(0, 0)
    master.hear(1, msg.RoundRequest(PENDING))
    assert moving(master.hear(2, msg.Goodbye())) == []
    assert moving(acknowledge(master, 1)) == [(1, "RoundClosed")]


def test_what_the_others_have_acknowledged_is_told() -> None:
    master = incumbent(0, 0, 0)
    master.hear(3, msg.Goodbye())
    before = master.machine.membership.version - 1

    def beats(seconds: float) -> set[int]:
        master.sleep(seconds)
        return {beat.ratified for _, beat in told(master.do(MasterTick()), msg.MasterHeartbeat)}

    assert beats(1) == {before}
    for peer in (1, 2):
        acknowledge(master, peer)
    beats(0.25)
    assert beats(0.75) == {before + 1}


def test_exactly_half_goes_on_with_the_incumbent() -> None:
    master = incumbent(0, 0, 0, 0)
    for peer in (1, 2):
        master.hear(peer, msg.RoundRequest(PENDING))
    for peer in (3, 4):
        master.do(ConnectionClosed(peer, "reset"))
    master.wait(2, 1, 2)
    assert [peer.id for peer in master.machine.membership.members()] == [1, 2]
    assert moving(acknowledge(master, 1)) == []
    assert moving(acknowledge(master, 2)) == [(1, "RoundClosed"), (2, "RoundClosed")]


def test_a_minority_is_closed_and_its_own_successor_gives_it_nothing() -> None:
    master = incumbent(0, 0, 0)
    for peer in (2, 3):
        master.do(ConnectionClosed(peer, "reset"))
    effects = master.wait(2, 1) + acknowledge(master, 1)
    successor = master.machine.membership.roster(0)
    assert successor.ring == (PeerId(1),)
    effects += master.wait(5.25, 1)
    assert moving(effects) == []
    assert closed(effects) == [1]
    assert master.machine.recovering
    whole = roster(1, 1, 1, 2, 3)
    for _ in range(3):  # it may come back as often as it likes
        effects = come(master, 1, whole, successor, ratified=1)
        effects += master.wait(5.25)
        assert (moving(effects), resumed(effects)) == ([], [])
        assert closed(effects) == [1]
    come(master, 1, whole, successor, ratified=1)
    assert resumed(come(master, 2, whole, ratified=1)) == [1, 2]


# -- the standby -----------------------------------------------------------------------------


def test_a_standby_begins_no_run() -> None:
    master = standby()
    master.do(ConnectionOpened(9, "10.0.0.9", key(9)))
    reason = "this is a standby, and no member of its run has returned to it"
    assert master.hear(9, msg.Register(0, "", 4009)) == [
        SendTo(9, msg.Refused(None, reason)),
        CloseConnection(9, reason),
    ]


def test_it_asks_a_majority_to_follow_it_and_rebuilds_the_run_then() -> None:
    master = standby()
    assert come(master, 1, WHOLE) == []
    assert come(master, 2, WHOLE) == []
    effects = master.wait(5, 1, 2)
    asked = msg.Resumed(2, NEXT, (STANDBY,))
    assert effects == [Remember(RUN, 2, NEXT), SendTo(1, asked), SendTo(2, asked)]
    assert promise(master, 1, 1) == []  # that was said before it heard
    assert promise(master, 1, 2) == []
    effects = promise(master, 2, 2)
    newest = told(effects, msg.RosterChanged)[-1][1].roster
    assert (newest.version, newest.view) == ((2 << 31) + 2, VIEW + TERM_GAP + 1)
    assert newest.ring == (PeerId(1), PeerId(2))
    assert moving(effects) == []
    for peer in (1, 2):
        assert moving(master.hear(peer, msg.RoundRequest(PENDING))) == []
    assert moving(acknowledge(master, 1)) == []
    assert moving(acknowledge(master, 2)) == [(1, "RoundClosed"), (2, "RoundClosed")]


@pytest.mark.parametrize(("by", "goes_on"), [(FIRST, False), (NEXT, True)])
def test_exactly_half_is_enough_for_who_told_the_roster(by: bytes, goes_on: bool) -> None:
    master = standby()
    for peer in (1, 2):
        come(master, peer, roster(VERSION, VIEW, 1, 2, 3, 4), incumbent=by)
    effects = master.wait(5, 1, 2)
    assert resumed(effects) == ([1, 2] if goes_on else [])
    assert closed(effects) == ([] if goes_on else [1, 2])


def test_a_roster_that_may_have_counted_needs_its_own_majority() -> None:
    """Peer 3 knows that 1, 2 and 3 may have gone on: with 4 and 5 it is no majority of these."""
    whole, later = roster(VERSION, VIEW, 1, 2, 3, 4, 5), roster(VERSION + 1, VIEW + 1, 1, 2, 3)
    master = standby()
    come(master, 3, whole, later)
    come(master, 4, whole)
    come(master, 5, whole)
    effects = master.wait(5, 3, 4, 5)
    assert (resumed(effects), closed(effects)) == ([], [3, 4, 5])
    for peer in (3, 4, 5):
        come(master, peer, whole, *((later,) if peer == 3 else ()))
    effects = come(master, 2, whole) + master.wait(5, 2, 3, 4, 5)
    assert resumed(effects) == [2, 3, 4, 5]


def test_what_was_ratified_since_makes_older_rosters_not_count() -> None:
    whole, later = roster(VERSION, VIEW, 1, 2, 3, 4, 5), roster(VERSION + 1, VIEW + 1, 1, 2)
    master = standby()
    come(master, 1, whole, later, ratified=VERSION + 1)
    assert resumed(come(master, 2, whole, later)) == [1, 2]


def test_who_breaks_off_before_it_has_promised_has_said_nothing() -> None:
    master = standby()
    come(master, 1, WHOLE)
    come(master, 2, WHOLE)
    master.wait(5, 1, 2)
    promise(master, 1, 2)
    master.do(ConnectionClosed(2, "reset"))
    effects = master.wait(2.25, 1)
    assert closed(effects) == [1]
    assert master.machine.recovering
    come(master, 1, WHOLE, term=2, incumbent=NEXT)
    effects = come(master, 2, WHOLE) + master.wait(5, 1, 2)
    assert SendTo(1, msg.Resumed(3, NEXT, (STANDBY,))) in effects  # in a term of its own


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_member_that_loses_its_connection_before_it_promises_is_waited_for(
    comes_back: bool,
) -> None:
    master = standby()
    for peer in (1, 2, 3):
        come(master, peer, WHOLE)
    master.do(ConnectionClosed(3, "a message was damaged on the way", damaged=True))
    for peer in (1, 2):
        promise(master, peer, 2)
    assert master.machine.recovering
    if comes_back:
        come(master, 3, WHOLE, connection=13)
        assert master.machine.recovering
        promise(master, 13, 2)
    else:
        master.wait(2.25, 1, 2)
    assert not master.machine.recovering
    there = [PeerId(peer) for peer in ((1, 2, 3) if comes_back else (1, 2))]
    assert [peer.id for peer in master.machine.membership.members()] == there


def test_who_comes_back_without_having_followed_is_not_counted() -> None:
    master = standby()
    for peer in (1, 2, 3):
        come(master, peer, WHOLE)
    for peer in (1, 2, 3):
        promise(master, peer, 2)
    assert not master.machine.recovering
    master.do(ConnectionClosed(3, "reset"))
    assert come(master, 3, WHOLE, connection=13) == [
        CloseConnection(13, "the peer does not follow this master")
    ]
    assert master.resume(3, 14, 99, FIRST) == [
        CloseConnection(14, "the peer follows another master in this term")
    ]


# -- what a majority has to store before it is told ----------------------------------------------


def started(*groups: int) -> MasterStage:
    """An operation of all members of group 0 has begun."""
    master = incumbent(*groups)
    master.start(*(peer for peer, group in enumerate(groups, 1) if group == 0), what=OPERATION)
    return master


LATE = msg.Withdraw(OPERATION, "it is late")


def test_an_abort_is_proposed_to_all_and_told_when_a_majority_has_stored_it() -> None:
    master = started(0, 0, 0)
    effects = master.hear(3, LATE)
    asked = told(effects, msg.Proposed)
    assert [connection for connection, _ in asked] == [1, 2, 3]
    assert {(m.place, m.outcome.abort.name) for _, m in asked if m.outcome and m.outcome.abort} == {
        (1, "WITHDRAWN")
    }
    assert moving(effects) == []
    assert moving(acknowledge(master, 3, stored=1)) == []
    assert moving(acknowledge(master, 1, stored=1)) == [
        (peer, "OperationEnded") for peer in (1, 2, 3)
    ]


def test_members_of_other_groups_store_it_too() -> None:
    """A majority of the run need not contain anybody of the group."""
    master = started(0, 0, 1)
    effects = master.hear(1, LATE)
    assert [connection for connection, _ in told(effects, msg.Proposed)] == [1, 2, 3]
    acknowledge(master, 3, stored=1)
    assert moving(acknowledge(master, 2, stored=1)) == [
        (1, "OperationEnded"),
        (2, "OperationEnded"),
    ]


def test_a_commit_that_all_members_have_reported_done_needs_no_proposal() -> None:
    master = started(0, 0, 0)
    done = msg.OperationDone(OPERATION, b"same")
    effects = [effect for peer in (1, 2, 3) for effect in master.hear(peer, done)]
    assert told(effects, msg.Proposed) == []
    assert moving(effects) == [(peer, "OperationEnded") for peer in (1, 2, 3)]


def test_a_commit_after_a_loss_is_proposed() -> None:
    master = started(0, 0, 0, 0)
    for peer in (1, 2, 3):
        master.hear(peer, msg.OperationDone(OPERATION, b"same"))
    effects = master.do(ConnectionClosed(4, "reset")) + master.hear(
        1, msg.LinkReport(PeerId(4), False, "reset")
    )
    asked = [message.outcome for _, message in told(effects, msg.Proposed)]
    assert [outcome.contributors for outcome in asked if outcome] == [(1, 2, 3, 4)] * 3
    assert moving(effects) == []
    acknowledge(master, 1)  # the roster alone is not enough
    acknowledge(master, 2)
    assert moving(acknowledge(master, 3)) == []
    assert moving(acknowledge(master, 1, stored=1)) == []
    effects = acknowledge(master, 2, stored=1)
    # With exactly half of those before, the incumbent goes on.
    assert moving(effects) == [(peer, "OperationEnded") for peer in (1, 2, 3)]


def test_what_is_asked_for_again_is_told_once() -> None:
    master = started(0, 0, 0)
    master.hear(3, LATE)
    for _ in range(3):
        master.hear(3, LATE, msg.OutcomeQuery(OPERATION))
    acknowledge(master, 1, stored=1)
    assert moving(acknowledge(master, 2, stored=1)).count((3, "OperationEnded")) == 1


def test_whoever_is_resumed_or_admitted_gets_proposals_before_rosters() -> None:
    master = started(0, 0, 0)
    master.hear(3, LATE)
    master.do(ConnectionClosed(2, "reset"))
    effects = master.resume(2, 12, 0, FIRST)
    kinds = [type(message).__name__ for _, message in sent(effects)]
    assert kinds.index("Proposed") < kinds.index("Admitted")
    master.register(4, masters=2)
    master.link(4)
    effects = master.round(RoundKind.UPDATE_TOPOLOGY, 0, 1, 12, 3)
    to_newcomer = [type(message).__name__ for peer, message in sent(effects) if peer == 4]
    assert to_newcomer == ["Proposed", "Admitted"]


def test_what_everybody_has_acknowledged_is_not_proposed_any_more() -> None:
    master = started(0, 0, 0)
    master.hear(3, LATE)
    for peer in (1, 2):
        acknowledge(master, peer, stored=1)
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(operations=(OPERATION,)))
    master.do(ConnectionClosed(3, "reset"))
    version = master.machine.membership.version
    assert told(master.resume(3, 13, version, FIRST), msg.Proposed) == []


def test_without_a_standby_an_abort_is_told_at_once() -> None:
    master = MasterStage().begin(RUN, incumbent=FIRST).together(0, 0)
    master.start(1, 2, what=OPERATION)
    effects = master.hear(2, LATE)
    assert told(effects, msg.Proposed) == []
    assert moving(effects) == [(1, "OperationEnded"), (2, "OperationEnded")]


def test_a_newcomer_that_says_it_knows_another_master_ends_nothing() -> None:
    """Where the operator has named no standby, members alone may say that there is one."""
    master = MasterStage().begin(RUN, incumbent=FIRST)
    for peer, masters in ((1, 1), (2, 5)):
        master.register(peer, masters=masters)
    asked = msg.RoundRequest(PENDING)
    assert moving(master.hear(1, asked)) == [(1, "RoundClosed")]  # without any acknowledgement
    master.link(2)
    assert moving(master.round(RoundKind.UPDATE_TOPOLOGY, 0, 1)) == []
    assert moving(acknowledge(master, 1)) == [(1, "RoundClosed")]


def test_a_master_names_those_that_may_have_gone_on_without_it() -> None:
    """It has removed them, and nobody has acknowledged that: its standby has to know them."""
    master = incumbent(0, 0, 0)
    for peer in (2, 3):
        master.do(ConnectionClosed(peer, "reset"))
    master.wait(2, 1)
    assert master.machine.membership.roster(0).ring == (PeerId(1),)
    assert set(master.machine.vouched().keys or ()) == {1, 2, 3}


def test_the_store_answers_once_a_majority_still_follows_this_master() -> None:
    """Another master may have carried out other writes since."""
    master = MasterStage().new()
    master.together(0, 0, 0, masters=2)
    for peer in (1, 2):
        acknowledge(master, peer)
    asked = msg.StoreRequest(1, msg.StoreOp.SET, (b"k",), b"v", open=(1,))
    effects = master.hear(1, asked)
    assert told(effects, msg.Proposed) == [(n, msg.Proposed(1, None, None)) for n in (1, 2, 3)]
    assert told(effects, msg.StoreAnswer) == []
    assert told(acknowledge(master, 1, stored=1), msg.StoreAnswer) == []
    assert [n for n, _ in told(acknowledge(master, 2, stored=1), msg.StoreAnswer)] == [1]
    effects = master.hear(2, msg.StoreRequest(1, msg.StoreOp.GET, (b"k",), open=(1,)))
    assert {one.place for _, one in told(effects, msg.Proposed)} == {2}
    acknowledge(master, 3, stored=2)
    assert [n for n, _ in told(acknowledge(master, 1, stored=2), msg.StoreAnswer)] == [2]
