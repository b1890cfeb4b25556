"""What a master knows of shared state that takes up a run from what returning members say."""

from __future__ import annotations

from typing import Any

import pytest

from pccl.machines.master.events import MasterEffect
from pccl.protocol import messages as msg
from pccl.protocol.shared_state import NOTHING_EXPECTED, Expected, Lineage, Offer
from pccl.protocol.types import SYNC_TAG, AbortCause, OperationId, PeerId
from tests.support import offers
from tests.support.master_stage import RUN, MasterStage, closed, told
from tests.support.scenarios import op

VIEW = 4
OPERATION = op(6, tag=SYNC_TAG, view=VIEW)
OLD = Lineage(RUN, op(5, tag=SYNC_TAG, view=VIEW))
OLDER = Lineage(RUN, op(99, tag=SYNC_TAG, view=VIEW - 1))
KNOWN = Expected(3, OLD)


def offer(content: bytes = b"x", **changes: Any) -> Offer:
    return offers.offer(content, **{"revision": 3, "lineage": OLD, **changes})


def asks(content: bytes = b"x", **changes: Any) -> msg.SyncRequest:
    return msg.SyncRequest(OPERATION, offer(content, **changes))


DONE = msg.OperationDone(OPERATION, b"x")


def expected(master: MasterStage) -> Expected:
    return master.machine.ballots.expected.get(0, NOTHING_EXPECTED)


def aborts(effects: list[MasterEffect]) -> list[tuple[int, AbortCause | None]]:
    return [(peer, message.abort) for peer, message in told(effects, msg.OperationEnded)]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_the_latest_synchronization_that_anybody_knows_of_counts(order: tuple[int, ...]) -> None:
    """Not the highest revision: that may be of a lineage that was given up."""
    reports = {1: Expected(3000, OLDER), 2: KNOWN, 3: NOTHING_EXPECTED}
    master = MasterStage().restarted()
    for peer in order:
        master.come(peer, expected=reports[peer])
    assert not master.machine.recovering
    assert expected(master) == KNOWN


def test_nobody_knows_of_any() -> None:
    master = MasterStage().restarted()
    for peer in (1, 2, 3):
        master.come(peer, expected=NOTHING_EXPECTED)
    assert expected(master) == NOTHING_EXPECTED


@pytest.mark.parametrize(
    "operation",
    [
        op(50, tag=SYNC_TAG, view=VIEW, group=5),
        op(50, tag=SYNC_TAG, view=VIEW, term=2),  # of a term that it does not follow
        op(50, tag=SYNC_TAG, view=1 << 63),
        op(1 << 63, tag=SYNC_TAG, view=VIEW),
    ],
)
def test_who_tells_of_a_synchronization_that_cannot_have_been_is_not_believed(
    operation: OperationId,
) -> None:
    """Nobody's contents would count any more."""
    master = MasterStage().restarted()
    assert closed(master.come(1, expected=Expected(9, Lineage(RUN, operation)))) == [1]


def test_one_that_was_under_way_goes_on() -> None:
    """One had received what was elected, and is told nothing new; the other one goes on."""
    master = MasterStage().restarted()
    master.come(1, asks(), DONE, expected=KNOWN)
    master.come(2, asks(b"y"), DONE, expected=KNOWN)
    effects = master.come(3, asks(), expected=KNOWN)
    started = told(effects, msg.SyncStarted)
    assert {peer for peer, _ in started} == {1, 2, 3}
    assert {(m.elected.content, m.elected.behind) for _, m in started} == {(b"x", (PeerId(2),))}
    assert aborts(master.hear(3, DONE)) == [(1, None), (2, None), (3, None)]
    assert expected(master) == Expected(4, Lineage(RUN, OPERATION))


def test_all_were_done_when_the_master_died() -> None:
    master = MasterStage().restarted()
    effects: list[MasterEffect] = []
    for peer in (1, 2, 3):
        effects = master.come(peer, asks(), DONE, expected=KNOWN)
    assert aborts(effects) == [(1, None), (2, None), (3, None)]
    assert expected(master) == Expected(4, Lineage(RUN, OPERATION))


def test_an_outcome_that_one_member_knows_counts_for_all() -> None:
    """It has put in place what was committed; the others must not be told anything else."""
    master = MasterStage().restarted()
    ended = msg.OperationEnded(OPERATION, None, "", (PeerId(1), PeerId(2), PeerId(3)), 7, 5)
    after = Expected(4, Lineage(RUN, OPERATION))
    master.come(1, msg.KnownOutcome(ended), expected=after)
    effects: list[MasterEffect] = []
    for peer in (2, 3):
        effects += master.come(peer, asks(), DONE, expected=KNOWN)
    assert set(aborts(effects)) >= {(2, None), (3, None)}
    assert expected(master) == after


def test_one_that_a_member_is_lost_from_with_the_master_begins_again() -> None:
    """The others might elect something else without it than what one of them is done with."""
    master = MasterStage().restarted()
    master.come(1, asks(revision=0, lineage=None), DONE, expected=NOTHING_EXPECTED)
    effects = master.come(2, asks(b"y"), expected=NOTHING_EXPECTED)
    effects += master.wait(20, 1, 2)
    lost = AbortCause.MEMBER_LOST
    assert set(aborts(effects)) == {(1, lost), (2, lost)}
    assert expected(master) == NOTHING_EXPECTED
    assert not told(effects, msg.SyncStarted)


def test_a_master_that_was_told_nothing_of_it_lets_them_call_again() -> None:
    """Requests that come after the reports are as good."""
    master = MasterStage().restarted()
    for peer in (1, 2, 3):
        master.come(peer, expected=KNOWN)
    effects: list[MasterEffect] = []
    for peer in (1, 2, 3):
        effects += master.hear(peer, asks())
    assert [peer for peer, _ in told(effects, msg.SyncStarted)] == [1, 2, 3]
