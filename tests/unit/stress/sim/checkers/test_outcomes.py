"""The simulator's own judges: what is a violation, and what only looks like one."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from pccl.machines.peer.events import ReduceResult
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import Algorithm, OperationId, PeerId, ReduceOp, RemovalCause
from pccl.stress.sim.checkers.excuses import Excuses
from pccl.stress.sim.checkers.in_run import InRun
from pccl.stress.sim.checkers.outcomes import Checkers, Violation
from pccl.stress.sim.checkers.training import Contents, TrainingCheckers
from pccl.stress.sim.faults.base import Ground
from pccl.stress.sim.faults.between import Delay
from pccl.stress.sim.scenarios.scenario import Slot, draw
from pccl.stress.sim.scenarios.to_train import draw_to_train
from pccl.stress.sim.workloads.toy_model import ToyOuter
from pccl.transports.base import Address

FIRST, SECOND = b"the first run...", b"the second run.."
ONE, TWO = PeerId(1), PeerId(2)
HERE, THERE = Address("p0", 1), Address("p1", 1)
LEFT = (RemovalCause.GOODBYE, "it left")
OPERATION = OperationId(1, 0, 1, 5, 0)
SLOT = Slot(5, 2, DataType.INT32, ReduceOp.SUM)


@pytest.fixture
def checkers() -> Checkers:
    found = Checkers(draw(0), Excuses(Timing(), 1, lambda: 0))
    # A master that knows of no run has begun another one, and given out the same id again.
    found.registered(FIRST, ONE, HERE.host, HERE.port)
    found.registered(SECOND, ONE, THERE.host, THERE.port)
    return found


def test_a_removal_concerns_the_peer_of_its_own_run(checkers: Checkers) -> None:
    checkers.believes = {THERE: (SECOND, ONE)}.get
    checkers.removed(FIRST, ONE, *LEFT)  # he is gone
    with pytest.raises(Violation, match=r"peer 1 \(p1\) was removed without a cause"):
        checkers.removed(SECOND, ONE, *LEFT)


def test_inputs_of_one_run_are_not_those_of_another(checkers: Checkers) -> None:
    for run, value in ((FIRST, 0), (SECOND, 1)):
        for peer in (ONE, TWO):
            checkers.posted(InRun(run, OPERATION), peer, np.full(2, value, np.int32))
    outcome = ReduceResult(OPERATION, (ONE, TWO), Algorithm.RING)
    two, zero = np.full(2, 2, np.int32), np.zeros(2, np.int32)
    checkers.succeeded("p1", SECOND, outcome, SLOT, two)
    with pytest.raises(Violation, match="wrong result of t1/g0/v1/tag5#0 of run 74686520"):
        checkers.succeeded("p0", FIRST, outcome, SLOT, two)
    checkers.succeeded("p0", FIRST, outcome, SLOT, zero)
    with pytest.raises(Violation, match="differs from another member"):
        checkers.succeeded("p2", FIRST, outcome, SLOT, two)


def test_an_attempt_that_begins_with_what_another_one_has_left_is_seen(checkers: Checkers) -> None:
    checkers.posted(InRun(FIRST, OPERATION), ONE, np.array([1, 2], np.int32))
    checkers.began_intact("p0", InRun(FIRST, OPERATION), ONE, np.array([1, 2], np.int32))
    with pytest.raises(Violation, match="p0: an attempt before t1/g0/v1/tag5#0 of run 74686520"):
        checkers.began_intact("p0", InRun(FIRST, OPERATION), ONE, np.array([1, 3], np.int32))


@pytest.mark.parametrize(
    ("world_size", "gone", "seen", "fine"),
    [(5, 0, 5, True), (4, 0, 4, False), (5, 0, 4, False), (5, 1, 4, True), (5, 1, 3, False)],
)
def test_a_gang_is_as_large_as_it_wanted_unless_somebody_has_gone(
    checkers: Checkers, world_size: int, gone: int, seen: int, fine: bool
) -> None:
    checkers.removed(FIRST, ONE, *LEFT)  # before, and in the other run: that excuses nothing
    checkers.registered(FIRST, TWO, "p2", 1)
    checkers.admitted(FIRST, TWO, world_size, 3)
    checkers.removed(SECOND, ONE, *LEFT)
    for _ in range(gone):
        checkers.removed(FIRST, ONE, *LEFT)
    if fine:
        checkers.joined("p2", FIRST, TWO, seen, 5)
    else:
        with pytest.raises(Violation, match="p2 wanted 5 members"):
            checkers.joined("p2", FIRST, TWO, seen, 5)


def test_a_member_is_one_since_its_first_admission_in_the_run(checkers: Checkers) -> None:
    assert checkers.first_view(FIRST, TWO) == 0
    for view in (3, 5):
        checkers.admitted(FIRST, TWO, 2, view)
    assert (checkers.first_view(FIRST, TWO), checkers.first_view(SECOND, TWO)) == (3, 0)


def test_no_delay_is_near_the_deadline_of_a_dial() -> None:
    timing = Timing(dial_s=1.0)
    ground = Ground(5, 10**9, 40_000_000, timing)
    drawn = [Delay.draw(Random(seed), ground).extra_ns for seed in range(100)]
    assert max(drawn) == 62_000_000  # a sixteenth


def toy(rounds: int, *, is_open: bool) -> Contents:
    """Outer parameters after so many rounds."""
    outer = ToyOuter(1, 1, 1024)
    for _ in range(rounds):
        outer.ledger.close([1, 2])
    if is_open:
        outer.ledger.open()
    return outer.contents()


@pytest.mark.parametrize(
    ("steady", "elected", "fine"),
    [
        (toy(1, is_open=True), toy(1, is_open=True), True),
        (toy(1, is_open=True), toy(1, is_open=False), True),  # nobody has put work in yet
        (toy(1, is_open=False), toy(1, is_open=True), False),
        (toy(1, is_open=True), toy(0, is_open=False), False),
        (toy(1, is_open=True), toy(0, is_open=True), False),
        (toy(1, is_open=True), toy(2, is_open=False), False),
    ],
)
def test_of_a_steady_member_only_an_opened_round_is_taken_back(
    steady: Contents, elected: Contents, *, fine: bool
) -> None:
    training, done = draw_to_train(4).training, Counter[str]()
    assert training is not None
    checkers = TrainingCheckers(training, 1, done, Excuses(Timing(), 1, lambda: 0))
    first = InRun(FIRST, OperationId(1, 0, 1, 0, 0))
    checkers.offered(first, ONE, steady)
    checkers.synced("p0", first, ONE, (ONE,), 1, steady, steady)
    second = InRun(FIRST, OperationId(1, 0, 2, 0, 0))
    checkers.offered(second, ONE, steady)
    checkers.offered(second, TWO, elected)
    if fine:
        assert checkers.synced("p1", second, TWO, (ONE, TWO), 2, elected, elected) == 1
        assert done["round called off"] == (steady != elected)
    else:
        with pytest.raises(Violation, match="changed the contents of steady peer 1"):
            checkers.synced("p1", second, TWO, (ONE, TWO), 2, elected, elected)


@pytest.mark.parametrize(("number", "is_lagging", "fine"), [(2, 0, 1), (0, 0, 0), (0, 1, 1)])
def test_a_late_synchronization_does_not_take_a_steady_member_back(
    number: int, *, is_lagging: bool, fine: bool
) -> None:
    """It may lead over rounds that the member has missed, of which checkers know."""
    training, done = draw_to_train(4).training, Counter[str]()
    assert training is not None
    checkers = TrainingCheckers(training, 1, done, Excuses(Timing(), 1, lambda: 0))
    mine, others = toy(1, is_open=False), toy(number, is_open=False)
    first, second = (InRun(FIRST, OperationId(1, 0, 1, 0, n)) for n in range(2))
    for peer in (ONE, TWO):
        checkers.offered(first, peer, mine)
    for peer in (ONE, TWO):
        checkers.synced("p0", first, peer, (ONE, TWO), 1, mine, mine)
    checkers.lags(FIRST, TWO)
    if is_lagging:
        checkers.lags(FIRST, ONE)
    vars(checkers)["_parents"][others] = mine if number > 1 else toy(7, is_open=False)
    checkers.offered(second, TWO, others)
    if fine:
        checkers.synced("p1", second, TWO, (TWO,), 2, others, others)
        line = vars(checkers)["_synced"][second][1]
        vars(checkers)["_synced"][second] = others, 1
        assert checkers.synced("p0", second, ONE, (TWO,), 2, mine, others) == 1 <= line
        assert done["late training sync over many rounds"] == 1
    else:
        checkers.synced("p1", second, TWO, (TWO,), 2, others, others)
        with pytest.raises(Violation, match="is of line 2, not 1"):
            checkers.synced("p0", second, ONE, (TWO,), 2, mine, others)
        vars(checkers)["_synced"][second] = others, 1
        with pytest.raises(Violation, match="reverted its contents, and it was steady"):
            checkers.synced("p0", second, ONE, (TWO,), 2, mine, others)


@pytest.mark.parametrize(
    ("sleeper", "restarted", "is_explained"),
    [("master", True, True), ("master", False, False), ("p1", True, False)],
)
def test_a_restarted_master_that_sleeps_again_and_again_recovers_late(
    sleeper: str, restarted: bool, is_explained: bool
) -> None:
    timing = Timing(recovery_s=5, master_lost_s=12)
    excuses = Excuses(timing, 1, lambda: timing.ns(20))
    if restarted:
        excuses.restarted_master(0)
    assert not excuses.lost_master("p0")
    excuses.dozed(sleeper, timing.ns(10))
    assert excuses.lost_master("p0") is is_explained


@pytest.mark.parametrize(("first_s", "is_explained"), [(2, False), (9, True)])
def test_each_of_two_restarted_masters_takes_its_time_to_recover(
    first_s: int, is_explained: bool
) -> None:
    now_s = first_s
    timing = Timing(recovery_s=5, master_lost_s=14)
    excuses = Excuses(timing, 1, lambda: timing.ns(now_s))
    excuses.restarted_master(0)
    now_s = 16
    excuses.restarted_master(timing.ns(3))
    now_s = 22
    assert excuses.lost_master("p0") is is_explained
