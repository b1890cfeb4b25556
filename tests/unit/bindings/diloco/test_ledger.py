"""What the members write down about their rounds, and what can be found in it later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.bindings.diloco.ledger import CONTRIBUTORS_MAX, ROUNDS_KEPT, Ledger, Revisions


def empty() -> Ledger:
    return Ledger(np.zeros(Ledger.SIZE, np.int64))


def test_a_run_begins_before_round_0() -> None:
    ledger = empty()
    assert (ledger.number, ledger.is_open) == (0, False)
    assert not ledger.has_applied(0, 1, b"")


def test_a_round_opens_and_closes() -> None:
    ledger = empty()
    ledger.open()
    assert (ledger.number, ledger.is_open) == (0, True)
    assert not ledger.has_applied(0, 7, b"")
    ledger.close([9, 7])
    assert (ledger.number, ledger.is_open) == (1, False)
    assert ledger.has_applied(0, 7, b"")
    assert ledger.has_applied(0, 9, b"")
    assert not ledger.has_applied(0, 8, b"")
    assert not ledger.has_applied(1, 7, b"")


def test_who_has_replayed_rounds_offers_more_than_who_has_nothing() -> None:
    ledger = empty()
    revisions = Revisions(ledger)
    assert revisions.next() == 0  # a beginning
    ledger.close([1])
    ledger.close([1])
    assert revisions.next() == 5


def test_who_has_replayed_more_rounds_offers_more_than_a_member_that_was_cut_off() -> None:
    member, newcomer = empty(), empty()
    of_member, of_newcomer = Revisions(member), Revisions(newcomer)
    of_member.synced(0)
    for number in range(30):
        newcomer.close([1])
        if number < 20:
            member.close([1])
            of_member.synced(of_member.next())
    assert of_newcomer.next() > of_member.next()


def test_each_synchronization_and_each_round_counts() -> None:
    ledger = empty()
    revisions = Revisions(ledger)
    revisions.synced(0)
    assert revisions.next() == 1
    ledger.close([1])
    assert revisions.next() == 2
    revisions.synced(4)
    assert revisions.next() == 5
    ledger.close([1])
    assert revisions.next() == 6


def test_an_older_snapshot_over_a_checkpoint_offers_what_it_holds() -> None:
    ledger = Ledger(np.zeros(Ledger.SIZE, np.int64))
    for _ in range(3):
        ledger.close([1])
    revisions = Revisions(ledger)
    revisions.synced(9)
    assert revisions.next() == 10
    ledger = Ledger(np.zeros(Ledger.SIZE, np.int64))
    vars(revisions)["_ledger"] = ledger
    ledger.close([1])
    assert revisions.next() == 3, "as a newcomer that has replayed one round"


def test_a_round_without_contributors_has_nobodys_work() -> None:
    ledger = empty()
    ledger.close([])
    assert not ledger.has_applied(0, 0, b"")
    assert not ledger.has_applied(0, 1, b"")


def test_it_is_a_view_of_the_shared_array_and_follows_it() -> None:
    mine, theirs = np.zeros(Ledger.SIZE, np.int64), np.zeros(Ledger.SIZE, np.int64)
    Ledger(theirs).close([3])
    ledger = Ledger(mine)
    mine[:] = theirs
    assert ledger.number == 1
    assert ledger.has_applied(0, 3, b"")


def test_a_peer_of_another_run_with_the_same_id_is_another_peer() -> None:
    ledger = empty()
    ledger.run = b"first run"
    ledger.close([1])
    ledger.run = b"second run"
    ledger.close([1])
    assert ledger.has_applied(0, 1, b"first run")
    assert not ledger.has_applied(0, 1, b"second run")
    assert ledger.has_applied(1, 1, b"second run")
    assert not ledger.has_applied(1, 1, b"first run")


def test_a_crowd_of_another_run_leaves_no_doubt() -> None:
    ledger = empty()
    ledger.run = b"second run"
    ledger.close(range(1, CONTRIBUTORS_MAX + 2))
    assert ledger.has_applied(0, 1, b"second run")
    assert not ledger.has_applied(0, 1, b"first run")


def test_a_newcomer_that_replays_a_round_writes_the_run_of_the_one_before() -> None:
    mine, theirs = np.zeros(Ledger.SIZE, np.int64), np.zeros(Ledger.SIZE, np.int64)
    member, newcomer = Ledger(theirs), Ledger(mine)
    member.run = b"a run"
    for _ in range(ROUNDS_KEPT + 1):
        member.close([1])
        mine[:] = theirs
        newcomer.close([1, 2])
        member.close([1, 2])
        assert mine.tobytes() == theirs.tobytes()


def test_the_first_round_that_a_newcomer_replays_may_be_of_any_run() -> None:
    """If the members of that round are cut off, and go on from its state, their work is in it."""
    ledger = empty()
    ledger.close([1, 2])
    ledger.run = b"a run"
    ledger.close([1])
    assert ledger.has_applied(0, 2, b"a run")
    assert not ledger.has_applied(0, 3, b"a run")


def test_the_order_of_contributors_does_not_show() -> None:
    one, two = np.zeros(Ledger.SIZE, np.int64), np.zeros(Ledger.SIZE, np.int64)
    Ledger(one).close([5, 2, 9])
    Ledger(two).close([9, 5, 2])
    assert one.tobytes() == two.tobytes()


def test_a_shorter_row_leaves_nothing_of_the_one_before() -> None:
    ledger = empty()
    for _ in range(ROUNDS_KEPT):
        ledger.close([1, 2, 3])
    ledger.close([4])  # in the row of round 0
    assert ledger.has_applied(ROUNDS_KEPT, 4, b"")
    assert not any(ledger.has_applied(ROUNDS_KEPT, peer, b"") for peer in (0, 1, 2, 3))


def test_who_is_in_doubt_too_long_takes_its_work_for_applied() -> None:
    ledger = empty()
    ledger.close([1])
    for _ in range(ROUNDS_KEPT - 1):
        ledger.close([2])
    assert not ledger.has_applied(0, 2, b"")
    ledger.close([2])
    assert ledger.has_applied(0, 2, b"")  # forgotten: at most once, rather than twice


@pytest.mark.parametrize("count", [CONTRIBUTORS_MAX, CONTRIBUTORS_MAX + 1])
def test_a_crowd_is_not_written_down(count: int) -> None:
    ledger = empty()
    ledger.close(range(1, count + 1))
    assert ledger.has_applied(0, count, b"")
    assert ledger.has_applied(0, count + 1, b"") == (count > CONTRIBUTORS_MAX)


@given(
    rounds=st.lists(
        st.frozensets(st.integers(1, 6)) | st.just(frozenset(range(1, CONTRIBUTORS_MAX + 2))),
        max_size=40,
    ),
    asked=st.integers(0, 45),
    peer=st.integers(1, 7),
)
def test_it_answers_as_a_list_of_everything_would_or_with_doubt(
    rounds: list[frozenset[int]], asked: int, peer: int
) -> None:
    ledger = empty()
    for contributors in rounds:
        ledger.open()
        ledger.close(sorted(contributors))
    answer = ledger.has_applied(asked, peer, b"")
    if asked >= len(rounds):
        assert answer is False
    elif asked < len(rounds) - 16 or len(rounds[asked]) > 255:
        assert answer is True
    else:
        assert answer is (peer in rounds[asked])
