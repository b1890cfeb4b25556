"""The ledger of samples, one round after the other."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.bindings.data.sample_ledger import LEASE_MAX, ROUNDS_AHEAD, RUNS_MAX, SampleLedger


def make(lease: int = 10, total: int | None = None) -> SampleLedger:
    return SampleLedger(np.zeros(SampleLedger.SIZE, np.int64), lease, total)


def test_newcomers_get_leases_in_the_order_of_their_ids() -> None:
    ledger = make()
    ledger.admit([5, 2])
    assert ledger.lease(2) == [(0, 10)]
    assert ledger.lease(5) == [(10, 20)]
    ledger.admit([2, 3])
    assert ledger.lease(2) == [(0, 10)]
    assert ledger.lease(3) == [(20, 30)]
    assert ledger.done == 0


def test_a_round_marks_the_first_positions_of_each_lease() -> None:
    ledger = make()
    ledger.admit([1, 2])
    ledger.close({1: 3.0, 2: 0.0})
    assert ledger.done == 3
    assert ledger.rest == [(3, 10), (10, 20), (20, 30)]
    assert ledger.lease(1) == [(3, 10), (20, 30)]
    assert ledger.lease(2) == [(10, 20)]


def test_leases_grow_with_the_work_of_a_peer() -> None:
    ledger = make()
    ledger.admit([1])
    ledger.close({1: 10.0})
    assert sum(end - start for start, end in ledger.lease(1)) == ROUNDS_AHEAD * 10
    ledger.admit([2])  # as the fastest one, before anybody knows
    assert sum(end - start for start, end in ledger.lease(2)) == ROUNDS_AHEAD * 10


def test_what_a_lost_peer_has_not_done_goes_to_the_next() -> None:
    ledger = make()
    ledger.admit([1, 2])
    ledger.close({1: 4.0, 2: 0.0})
    ledger.close({2: 10.0})
    assert ledger.lease(1) == []
    assert ledger.lease(2) == [(4, 10), (20, 62)]
    assert ledger.done == 14


def test_a_late_peer_keeps_its_lease_for_some_rounds() -> None:
    ledger = make()
    ledger.admit([1, 2])
    for _ in range(2):
        ledger.close({2: 0.0}, patience=2)
    ledger.close({1: 1.0, 2: 0.0}, patience=2)
    assert ledger.lease(1)[0] == (1, 10)
    for _ in range(3):
        assert ledger.lease(1)
        ledger.close({2: 0.0}, patience=2)
    assert ledger.lease(1) == []


def test_peers_share_the_end_of_the_stream() -> None:
    """So none has the whole rest while the others have nothing to do."""
    ledger, peers = make(total=44), (1, 2, 3, 4)
    ledger.admit(peers)
    assert [ledger.lease(peer) for peer in peers] == [[(0, 10)], [(10, 19)], [(19, 26)], [(26, 31)]]
    rounds = 0
    while not ledger.is_finished:
        assert all(map(ledger.lease, peers)) or not ledger.unleased
        ledger.close(dict.fromkeys(peers, 5.0))
        rounds += 1
    assert rounds == 3
    assert ledger.done == 44
    assert not ledger.rest


def test_a_count_above_the_lease_takes_no_other_positions() -> None:
    ledger = make()
    ledger.admit([1, 2])
    ledger.close({1: 1e18, 2: 0.0})
    assert ledger.done == 10
    assert ledger.lease(2) == [(10, 20)]


def test_no_lease_begins_while_the_ledger_is_full() -> None:
    """The newcomer has to wait for the others, and loses nothing."""
    size = SampleLedger.SIZE - (RUNS_MAX - 8) * (SampleLedger.SIZE // RUNS_MAX)
    ledger, peers = SampleLedger(np.zeros(size, np.int64), 10), range(8)
    ledger.admit(peers)
    ledger.admit([8])
    assert ledger.next == 80
    assert not ledger.lease(8)
    ledger.close(dict.fromkeys(peers, 1.0))
    assert ledger.next == 90  # the last run has grown
    ledger.close({8: 0.0})
    assert ledger.lease(8) == [(1, 10), (11, 20)]
    for _ in range(5):
        ledger.close({8: 18.0})
    assert ledger.lease(8)[0][0] > 70
    assert ledger.done > 70


def test_it_takes_kilobytes_whatever_the_number_of_samples() -> None:
    assert make(10**9).record.nbytes < 100_000


@pytest.mark.parametrize("lie", [11.0, 1e300])
def test_no_peer_has_done_more_than_it_holds(lie: float) -> None:
    ledger = make()
    ledger.admit([1, 2])
    ledger.close({1: lie, 2: 4.0})
    assert ledger.done == 14
    assert sum(end - start for start, end in ledger.lease(1)) == ROUNDS_AHEAD * 10


def test_leases_of_a_peer_that_lies_again_and_again_stay_bounded() -> None:
    ledger = make()
    ledger.admit([1, 2])
    for _ in range(100):
        ledger.close({1: 1e300, 2: 4.0})
    assert sum(end - start for start, end in ledger.lease(1)) == LEASE_MAX
    ledger.admit([3])
    assert sum(end - start for start, end in ledger.lease(3)) == LEASE_MAX
