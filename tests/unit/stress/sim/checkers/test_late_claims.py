"""The judge of missed results: which a process may not go on without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext

import pytest

from pccl.machines.peer import events as ev
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.types import SYNC_TAG, AbortCause, OperationId, PeerId
from pccl.stress.sim.checkers.late_claims import LateClaims
from pccl.stress.sim.checkers.outcomes import Violation
from tests.support.peer_stage import QUORATE, ended
from tests.support.scenarios import op
from tests.unit.machines.peer.test_synchronization import ELECTED

ME, ONE, THREE = PeerId(2), PeerId(1), PeerId(3)


class Claiming:
    """Peer 2, and its judge."""

    def __init__(self, *missed: OperationId, first_view: int = 0) -> None:
        self.done: Counter[str] = Counter()
        self.judge = LateClaims("p2", self.done, lambda: first_view)
        for operation in missed:
            self.hears(ended(operation, contributors=(ONE, THREE)))

    def hears(self, message: msg.Message, effects: Iterable[ev.PeerEffect] = ()) -> None:
        self.judge.saw(ME, ev.ControlMessage(message), effects)

    def does(self, *effects: ev.PeerEffect) -> None:
        self.judge.saw(ME, ev.Tick(), effects)

    def posts(self, operation: OperationId) -> None:
        self.does(ev.Post(9, operation, QUORATE, (ONE, ME, THREE)))

    def gets(self, operation: OperationId) -> None:
        result = ev.ReduceResult(operation, (ONE, THREE), took_part=False)
        self.does(ev.ReturnCall(9, result))


def test_results_are_claimed_in_order() -> None:
    peer = Claiming(op(0), op(1))
    peer.gets(op(0))
    peer.gets(op(1))
    peer.posts(op(2))


@pytest.mark.parametrize("later", [op(1), op(view=2), op(view=2, tag=6)])
def test_no_later_call_goes_on_without_one(later: OperationId) -> None:
    with pytest.raises(Violation, match="lacks the result of t1/g0/v1/tag5#0"):
        Claiming(op(0)).posts(later)
    with pytest.raises(Violation, match="lacks the result"):
        Claiming(op(0), later).gets(later)


def test_calls_of_other_tags_of_the_view_go_on() -> None:
    peer = Claiming(op(0))
    peer.posts(op(3, tag=6))
    peer.gets(op(0))


def test_outcomes_that_are_none_to_claim() -> None:
    peer = Claiming(op(0, tag=SYNC_TAG))
    peer.hears(ended(op(0), AbortCause.WITHDRAWN))
    peer.hears(ended(op(1)))  # it has contributed
    peer.posts(op(view=2))


def test_a_repeated_outcome_is_owed_once() -> None:
    peer = Claiming(op(0))
    peer.gets(op(0))
    peer.hears(ended(op(0), contributors=(ONE, THREE)))
    peer.posts(op(1))


def test_nobody_gets_what_it_has_not_missed() -> None:
    with pytest.raises(Violation, match="which it had not missed"):
        Claiming().gets(op(0))


def test_a_resync_or_the_state_of_the_members_replaces_them() -> None:
    peer = Claiming(op(0))
    peer.does(ev.RaiseCall(9, errors.ResyncRequired(reason="late")))
    peer.posts(op(view=2))
    peer = Claiming(op(0))
    synced = ev.SyncResult(op(1, tag=SYNC_TAG), ELECTED, (ONE, THREE))
    peer.does(ev.ReturnCall(9, synced))  # the members made that one before
    with pytest.raises(Violation):
        peer.posts(op(1))
    peer = Claiming(op(0))
    peer.does(ev.ReturnCall(9, ev.SyncResult(op(1, tag=SYNC_TAG), ELECTED, (ONE, ME))))
    peer.posts(op(1))


def test_whoever_has_the_contents_of_a_synchronization_lacks_nothing_before_it() -> None:
    peer = Claiming(op(0), op(0, tag=SYNC_TAG), op(1))
    synced = ev.SyncResult(op(0, tag=SYNC_TAG), ELECTED, (ONE, THREE))
    peer.does(ev.ReturnCall(9, synced))
    with pytest.raises(Violation, match="tag5#1"):  # that came after the synchronization
        peer.posts(op(2))
    peer.gets(op(1))


def test_another_life_owes_nothing() -> None:
    peer = Claiming(op(0))
    peer.judge.saw(PeerId(7), ev.Tick(), [ev.Post(9, op(1), QUORATE, (ONE, PeerId(7)))])


def test_what_is_counted() -> None:
    peer = Claiming()
    narrowed = msg.OperationNarrowed(op(), b"\x03")
    peer.hears(narrowed)
    peer.hears(narrowed, [ev.Post(9, op(), QUORATE, (ONE, ME))])
    peer.judge.saw(ME, ev.ResultFetched(9, has_arrived=False), ())
    peer.judge.saw(ME, ev.ResultFetched(9, has_arrived=True), ())
    assert (peer.done["narrowed"], peer.done["late result is gone"]) == (1, 1)


@pytest.mark.parametrize(("first_view", "is_owed"), [(3, False), (2, True)])
def test_only_results_since_the_admission_are_owed(first_view: int, is_owed: bool) -> None:
    peer = Claiming(op(0, view=2), first_view=first_view)
    with pytest.raises(Violation) if is_owed else nullcontext():
        peer.posts(op(0, view=3))
