"""At which relay two peers meet, and when they try again."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from pccl.protocol import messages as msg
from pccl.protocol.types import Member, PeerId
from pccl.topology.ring_order import Pair
from tests.support.meeting_runs import MeetingRun, meet
from tests.support.scenarios import where

ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN, EIGHT, NINE = (PeerId(n) for n in range(1, 10))
S = 1_000_000_000
PAUSE = 1 * S
LASTING = 30 * S
THE_MASTER = Member(PeerId(0), "", 0)

# -- which relay ---------------------------------------------------------------------------------


def test_peers_that_were_reached_come_first_then_the_master_then_untested_ones() -> None:
    run = MeetingRun(master_relays=True)
    run.dialable = {THREE: None, FOUR: False, FIVE: True, SIX: None}
    assert run.relays() == [5, 0, 3, 6]
    run.link(THREE, ONE, TWO)  # even if an untested one has links to both
    assert run.relays() == [5, 0, 3, 6]


def test_a_peer_that_forwards_already_needs_no_test() -> None:
    run = MeetingRun(master_relays=True)
    run.dialable = {THREE: None, FOUR: None, FIVE: None, SIX: False}
    run.load(FOUR, 2)
    run.load(SIX, 1)
    assert run.relays() == [4, 0, 3, 5], "but a test that has failed counts"


def test_the_master_is_named_only_if_it_forwards() -> None:
    run = MeetingRun()
    run.dialable = {THREE: None, FOUR: False}
    assert run.relays() == [5, 6, 3]
    assert MeetingRun(2).relays() == []
    assert MeetingRun(2, master_relays=True).relays() == [0]


def test_a_relay_is_named_as_peers_can_dial_it() -> None:
    run = MeetingRun(3, master_relays=True)
    assert run.meetings.relays(run[ONE], run[TWO]) == [where(3), THE_MASTER]


def test_members_are_better_than_newcomers_and_these_are_better_than_the_master() -> None:
    run = MeetingRun(4, master_relays=True)
    run.register(5)
    run.register(6)
    run.dialable = {THREE: None}
    run.link(FIVE, ONE, TWO)
    for relay in (FOUR, SIX):
        run.load(relay, 40)
    assert run.relays() == [4, 5, 6, 0, 3]


def test_a_relay_has_direct_links_to_both_if_possible() -> None:
    run = MeetingRun()
    run.link(FOUR, ONE)
    run.link(FIVE, TWO)
    run.link(SIX, ONE)
    run.link(TWO, SIX)  # one end of a link is enough
    assert run.relays() == [6, 3, 4, 5]
    run.link(FIVE, ONE, relay=PeerId(0))
    assert run.relays() == [6, 3, 4, 5], "a relayed link does not count"
    run.link(FIVE, ONE)
    assert run.relays() == [5, 6, 3, 4]


def test_a_relay_with_fewer_links_to_carry_is_better() -> None:
    run = MeetingRun()
    for relay, links in ((THREE, 2), (FOUR, 0), (FIVE, 3), (SIX, 1)):
        run.load(relay, links)
    for nearest in (FIVE, THREE):
        run.measure(nearest, ONE, 1)
        run.measure(nearest, TWO, 1)
    assert run.relays() == [4, 6, 3, 5]


def test_links_to_both_count_more_than_few_links_to_carry() -> None:
    run = MeetingRun(5)
    run.link(FOUR, ONE, TWO)
    run.load(FOUR, 7)
    assert run.relays() == [4, 3, 5]


def test_of_equals_the_nearest_is_the_best() -> None:
    run = MeetingRun()
    for peer, there, back in ((THREE, 50, 60), (FOUR, 70, 20), (FIVE, 40, 40), (SIX, 41, 40)):
        run.measure(peer, ONE, there)
        run.measure(TWO, peer, back)
    assert run.relays() == [5, 6, 4, 3]
    run.measure(ONE, THREE, 10)  # of two measures of a link the shorter one counts
    assert run.relays() == [3, 5, 6, 4]
    assert run.relays(TWO, ONE) == [3, 5, 6, 4]


def test_a_round_trip_that_nobody_has_measured_counts_as_the_longest_possible() -> None:
    run = MeetingRun(7)
    run.measure(FOUR, ONE, 1)  # the way to the other end is unknown: a minute
    run.measure(FIVE, ONE, 30 * S)
    run.measure(FIVE, TWO, 30 * S)
    run.measure(SIX, ONE, 0)  # 0 says that it is unknown
    run.measure(SIX, TWO, 2)
    run.measure(SEVEN, ONE, 31 * S)
    run.measure(SEVEN, TWO, 30 * S)
    assert run.relays() == [5, 4, 6, 7, 3]


def test_no_relay_is_of_another_group_or_away_or_one_of_the_two() -> None:
    run = MeetingRun(5)
    run.admit(6, group=1)
    run[FIVE].connection = None
    assert run.relays() == [3, 4]
    assert run.relays(THREE, FOUR) == [1, 2]


def test_few_relays_are_compared_for_one_pair() -> None:
    run = MeetingRun(30, master_relays=True)
    for peer in range(1, 11):
        run.dialable[PeerId(peer)] = None
    for peer in range(11, 20):
        run.load(PeerId(peer), 1)
    best = [*range(20, 31), *range(11, 16)]
    assert run.relays(ONE, TWO) == [*best, 0]
    assert run.relays(PeerId(20), PeerId(11)) == [*best[1:11], *best[12:], 0]


def test_the_relays_are_found_anew_at_each_heartbeat() -> None:
    run = MeetingRun(4)
    run.down(0)
    run.dialable = {FOUR: False}
    assert run.beat(PAUSE) == meet(1, 2, 3)
    run.dialable = {THREE: False}
    assert run.beat(2 * PAUSE) == meet(1, 2, 4)


# -- which pairs ---------------------------------------------------------------------------------


def test_all_members_of_a_small_group_need_links() -> None:
    run = MeetingRun(8)
    run.dialable = dict.fromkeys(map(PeerId, range(1, 8)), False)
    expected = [one for pair in combinations(range(1, 8), 2) for one in meet(*pair, 8)]
    assert run.beat(0) == expected


def test_in_a_larger_group_only_neighbours_need_links() -> None:
    run = MeetingRun(9)
    run.dialable = dict.fromkeys(map(PeerId, (1, 2, 3, 4, 9)), False)
    pairs = [(1, 9), (1, 2), (2, 3), (3, 4)]
    assert run.beat(0) == [one for pair in pairs for one in meet(*pair, 5)]
    run.membership.reorder(0, [ONE, TWO, FOUR, FIVE, THREE, SIX, SEVEN, EIGHT, NINE])
    assert run.beat(PAUSE) == [*meet(1, 9, 6), *meet(1, 2, 6), *meet(2, 4, 5)], "and these only"


def test_members_of_a_larger_group_get_a_link_that_is_demanded_until_they_have_it() -> None:
    run = MeetingRun(10)
    for other in (THREE, FOUR, FIVE):
        run.down(0, ONE, other)
    run.meetings.demand([Pair((FIVE, ONE)), Pair((ONE, THREE))])
    assert run.beat(PAUSE) == [*meet(1, 3, 2), *meet(1, 5, 2)]
    run.meetings.demand([Pair((ONE, THREE))])
    run.up(PAUSE, ONE, FIVE)
    assert run.beat(2 * PAUSE) == meet(1, 3, 5), "which one of them reaches"
    run.down(2 * PAUSE, ONE, FIVE)
    run.membership.remove([run[THREE]])
    assert run.beat(9 * PAUSE) == [], "it was demanded no more"


def test_a_demanded_link_that_is_there_needs_no_meeting() -> None:
    run = MeetingRun(9)
    run.meetings.demand([Pair((ONE, THREE))])
    run.link(ONE, THREE)
    assert run.beat(PAUSE) == []
    run.down(PAUSE, ONE, THREE)
    assert run.beat(9 * PAUSE) == []


def test_members_of_two_groups_do_not_meet() -> None:
    run = MeetingRun(3)
    run.admit(4, 5, 6, group=1)
    run.dialable = dict.fromkeys((ONE, TWO, FOUR, FIVE), False)
    run.down(0, ONE, FOUR)
    assert run.beat(PAUSE) == [*meet(1, 2, 3), *meet(4, 5, 6)]


def test_both_are_told_the_same() -> None:
    run = MeetingRun(3)
    run.down(0, TWO, ONE)
    found = list(run.meetings.beat(PAUSE))
    assert [peer for peer, _ in found] == [run[ONE], run[TWO]]
    assert [told for _, told in found] == [
        msg.Meet(where(2), where(3)),
        msg.Meet(where(1), where(3)),
    ]


@pytest.mark.parametrize(
    ("one", "other"), [(None, False), (True, False), (None, None), (True, True)]
)
def test_two_of_which_one_may_dial_the_other_meet_if_both_have_no_link_for_a_while(
    one: bool | None, other: bool | None
) -> None:
    run = MeetingRun(3)
    run.dialable = {ONE: one, TWO: other}
    run.links.report(ONE, TWO, "refused", 70)
    run.links.report(TWO, ONE, "refused", 80)
    assert run.beat(70 + PAUSE - 1) == []
    run.down(70 + PAUSE - 1)  # it is not put off
    assert run.beat(70 + PAUSE) == meet(1, 2, 3)


def test_two_meet_of_which_one_end_sees_their_link_go_up_and_down() -> None:
    """The other end gets damaged data, and does not count it as up."""
    run = MeetingRun(3)
    run.dialable = {ONE: True, TWO: True}
    run.links.report(ONE, TWO, "a payload was damaged", 0)
    assert run.beat(50 * PAUSE) == [], "the other end has said nothing"
    for now_ns in range(0, 50 * PAUSE, PAUSE // 2):
        run.links.report(TWO, ONE, "reset", now_ns)
        run.links.report(TWO, ONE, None, now_ns)
    run.links.report(TWO, ONE, "reset", 50 * PAUSE)
    assert run.beat(50 * PAUSE) == meet(1, 2, 3)


def test_the_other_end_need_not_report_if_it_cannot_dial() -> None:
    run = MeetingRun(3)
    run.dialable = {ONE: False, TWO: True}
    run.links.report(ONE, TWO, "no answer in time", 70)
    assert run.beat(70 + PAUSE - 1) == []
    assert run.beat(70 + PAUSE) == meet(1, 2, 3)


def test_a_relay_that_one_of_the_two_has_not_reached_comes_last() -> None:
    run = MeetingRun(5, master_relays=True)
    assert run.relays() == [3, 4, 5, 0]
    run.links.report(TWO, THREE, "no answer in time", 0)
    run.links.report(FIVE, ONE, "no answer in time", 0)
    assert run.relays() == [4, 5, 0, 3], "what a relay reports says nothing of the two"


def test_two_that_nobody_can_dial_meet_at_once_unless_they_have_a_link() -> None:
    run = MeetingRun(4)
    run.dialable = dict.fromkeys((ONE, TWO, THREE), False)
    run.link(THREE, ONE, TWO)
    assert run.beat(0) == meet(1, 2, 4), "even if they have said nothing"
    run.links.report(THREE, TWO, "reset", PAUSE - 1)
    run.links.report(ONE, THREE, None, PAUSE - 1)
    run.link(TWO, ONE)
    assert run.beat(PAUSE - 1) == meet(2, 3, 4)
    run.link(THREE, TWO)
    run.links.report(ONE, THREE, "reset", PAUSE)
    assert run.beat(PAUSE) == [], "the other end still has the link"
    run.links.report(THREE, ONE, "reset", PAUSE)
    assert run.beat(PAUSE) == meet(1, 3, 4)


def test_a_link_that_comes_meanwhile_needs_no_meeting() -> None:
    run = MeetingRun(3)
    run.down(0)
    run.up(PAUSE - 1)
    assert run.beat(2 * PAUSE) == []
    run.links.report(ONE, TWO, "reset", 2 * PAUSE)
    assert run.beat(4 * PAUSE) == [], "one end still has it"


# -- newcomers -----------------------------------------------------------------------------------


def test_a_newcomer_meets_its_neighbour_at_once_if_both_have_no_link() -> None:
    run = MeetingRun(3)
    run.register(4)
    assert run.tick(FOUR, ONE, 0) == []
    run.links.report(FOUR, ONE, "refused", 1)
    assert run.tick(FOUR, ONE, 1) == []
    run.links.report(ONE, FOUR, "refused", 2)
    assert run.tick(FOUR, ONE, 2) == meet(1, 4, 2)
    assert run.tick(FOUR, ONE, 3) == []
    assert run.beat(2 + PAUSE) == [], "heartbeats are for members"
    assert run.tick(FOUR, ONE, 2 + PAUSE) == meet(1, 4, 3)
    run.links.report(FOUR, ONE, None, 3 + PAUSE)
    assert run.tick(FOUR, ONE, 9 * PAUSE) == []


def test_a_newcomer_that_nobody_can_dial_meets_such_a_neighbour_unasked() -> None:
    run = MeetingRun(4)
    run.dialable = {ONE: False, FIVE: False}
    run.register(5)
    assert run.tick(FIVE, TWO, 0) == []
    assert run.tick(FIVE, ONE, 0) == meet(1, 5, 2)
    run.register(6)
    run.dialable[SIX] = False
    assert run.tick(FIVE, SIX, 1) == meet(5, 6, 2), "of two newcomers, too"


def test_the_deadline_of_a_newcomer_begins_anew_at_its_first_meeting_only() -> None:
    run = MeetingRun(4)
    run.register(5, now_ns=100)
    run.down(100, ONE, FIVE)
    assert run.tick(FIVE, ONE, 500) == meet(1, 5, 2)
    assert (run[ONE].pending_ns, run[FIVE].pending_ns) == (0, 500)
    assert run.tick(FIVE, ONE, 500 + PAUSE) == meet(1, 5, 3)
    assert (run[ONE].pending_ns, run[FIVE].pending_ns) == (0, 500)


@pytest.mark.parametrize(("after_ns", "renews"), [(20 * S - 1, True), (20 * S, False)])
def test_only_a_young_newcomer_gets_more_time(after_ns: int, *, renews: bool) -> None:
    run = MeetingRun(3)
    run.register(4, now_ns=7)
    run[FOUR].pending_ns = 7
    run.down(8, ONE, FOUR)
    assert run.tick(FOUR, ONE, 7 + after_ns) == meet(1, 4, 2)
    assert run[FOUR].pending_ns == (7 + after_ns if renews else 7)


def test_a_newcomer_that_is_told_nothing_gets_no_more_time() -> None:
    run = MeetingRun(2)
    run.register(3)
    run.dialable = {TWO: False}
    run.down(0, ONE, THREE)
    assert run.tick(THREE, ONE, 500) == []
    assert run[THREE].pending_ns == 0


# -- again ---------------------------------------------------------------------------------------


def test_after_a_failure_the_next_relay_is_named_and_after_the_last_one_the_first() -> None:
    run = MeetingRun(4, master_relays=True)
    run.down(0)
    found = [run.beat(n * 20 * PAUSE) for n in range(1, 8)]
    assert found == [meet(1, 2, relay) for relay in (3, 4, 0, 3, 4, 0, 3)]


def test_a_relay_that_lets_every_link_die_is_not_named_again_and_again() -> None:
    run = MeetingRun(4, master_relays=True)
    run.down(0)
    named: list[int] = []
    for second in range(1, 20):
        for _, _, relay in run.beat(second * S)[:1]:
            named.append(relay)
            run.up(second * S, relay=relay)
        if second % 2:
            run.down(second * S + S // 2)
    assert named[:4] == [3, 4, 0, 3]


@pytest.mark.parametrize(("up_for_ns", "relay"), [(LASTING - S, 4), (LASTING, 3)])
def test_after_a_link_that_lasted_the_best_relay_is_named_first(up_for_ns: int, relay: int) -> None:
    run = MeetingRun(4)
    run.down(0)
    assert run.beat(S) == meet(1, 2, 3)
    run.up(S, relay=3)
    for now_ns in range(2 * S, S + up_for_ns + 1, S):
        assert run.beat(now_ns) == []
    lost_ns = S + up_for_ns + 1
    run.down(lost_ns)
    assert run.beat(lost_ns + S) == meet(1, 2, relay)


def test_after_a_link_that_lasted_the_pauses_begin_anew() -> None:
    run = MeetingRun(3)
    run.down(0)
    for second in (1, 2, 3, 5):
        assert run.beat(second * S) == meet(1, 2, 3)
    run.up(5 * S, relay=3)
    assert run.beat(5 * S + LASTING) == []
    run.down(40 * S)
    told_at = [second for second in range(41, 46) if run.beat(second * S)]
    assert told_at == [41, 42, 43, 45]


def test_a_relay_that_has_gone_is_named_no_more() -> None:
    run = MeetingRun(5)
    run.down(0)
    assert run.beat(PAUSE) == meet(1, 2, 3)
    run[FOUR].connection = None
    assert run.beat(2 * PAUSE) == meet(1, 2, 5)
    run.membership.remove([run[THREE]])
    assert run.beat(9 * PAUSE) == meet(1, 2, 5)


@pytest.mark.parametrize(
    ("relays", "expected"),
    [
        (1, [1, 2, 3, 5, 7, 11, 15, 23, 31, 39, 47]),
        (2, [1, 2, 3, 4, 5, 7, 9, 11, 13, 17, 21, 25, 29, 37, 45]),
    ],
)
def test_pauses_double_up_to_a_limit_each_time_when_all_relays_were_named_twice(
    relays: int, expected: list[int]
) -> None:
    run = MeetingRun(2 + relays)
    run.down(0)
    told_at: list[float] = []
    for tenth in range(500):
        now_ns = tenth * PAUSE // 10
        if run.beat(now_ns):
            told_at.append(tenth / 10)
        run.down(now_ns)  # a report that repeats itself changes nothing
    assert told_at == expected


def test_a_peer_that_is_away_is_told_when_it_is_back() -> None:
    run = MeetingRun(3)
    run[TWO].connection = None
    run.down(0)
    assert run.beat(PAUSE) == []
    run[TWO].connection = 9
    assert run.beat(PAUSE + 1) == meet(1, 2, 3)


def test_without_a_relay_the_two_wait_for_one() -> None:
    run = MeetingRun(4)
    run.dialable = {THREE: False, FOUR: False}
    run.link(THREE, ONE, TWO, FOUR)
    run.down(0)
    assert run.beat(PAUSE) == []
    run.dialable = {}
    assert run.beat(2 * PAUSE) == meet(1, 2, 3), "no relay was left out"


def test_peers_that_were_removed_are_forgotten() -> None:
    run = MeetingRun(5)
    for one, other in ((ONE, TWO), (TWO, FOUR), (ONE, FIVE)):
        run.down(0, one, other)
    assert [told[:2] for told in run.beat(PAUSE)] == [
        (1, 2),
        (2, 1),
        (1, 5),
        (5, 1),
        (2, 4),
        (4, 2),
    ]
    run.membership.remove([run[TWO], run[THREE]])
    assert run.beat(2 * PAUSE) == meet(1, 5, 4)


# -- whether a meeting is still to come ----------------------------------------------------------


def test_one_of_the_first_two_meetings_may_succeed_until_the_third_is_due() -> None:
    run = MeetingRun(4)
    assert not run.is_open(0)
    run.links.report(ONE, TWO, "refused", 0)
    assert not run.is_open(0), "the other end may still have the link"
    run.down(0)
    assert run.is_open(0)
    assert run.beat(PAUSE) == meet(1, 2, 3)
    assert run.is_open(2 * PAUSE - 1)
    assert run.is_open(3 * PAUSE), "the next heartbeat brings the second one, however late"
    assert run.beat(2 * PAUSE) == meet(1, 2, 4)
    assert run.is_open(3 * PAUSE - 1)
    assert not run.is_open(3 * PAUSE)
    assert run.beat(3 * PAUSE) == meet(1, 2, 3)
    assert not run.is_open(3 * PAUSE)
    assert not run.is_open(50 * PAUSE)


def test_a_pair_with_a_link_waits_for_no_meeting() -> None:
    run = MeetingRun(3)
    run.down(0)
    run.up(1)
    assert not run.is_open(1)


def test_two_that_nobody_can_dial_wait_for_a_meeting_before_they_report() -> None:
    run = MeetingRun(3)
    run.dialable = {ONE: False, TWO: False}
    assert run.is_open(0)
    run.link(ONE, TWO)
    assert not run.is_open(0)


def test_nobody_waits_for_a_meeting_without_a_relay() -> None:
    run = MeetingRun(3)
    run.dialable = {THREE: False}
    run.down(0)
    assert not run.is_open(0)
    alone, relayed = MeetingRun(2), MeetingRun(2, master_relays=True)
    for pair in (alone, relayed):
        pair.down(0)
    assert (alone.is_open(0), relayed.is_open(0)) == (False, True)


def test_after_a_link_that_lasted_the_next_meeting_is_a_first_one() -> None:
    run = MeetingRun(3)
    run.down(0)
    for second in (1, 2, 3):
        assert run.beat(second * S) == meet(1, 2, 3)
    assert not run.is_open(3 * S)
    run.up(3 * S, relay=3)
    run.beat(3 * S + LASTING)
    run.down(40 * S)
    assert run.is_open(40 * S)


def test_a_relay_that_is_removed_leaves_time_for_two_more_meetings() -> None:
    run = MeetingRun(5)
    run.down(0)
    assert run.beat(PAUSE) == meet(1, 2, 3)
    assert run.beat(2 * PAUSE) == meet(1, 2, 4)
    run.up(2 * PAUSE, relay=4)
    lost_ns = 2 * PAUSE + LASTING // 2
    run.meetings.forget({FOUR})
    run.membership.remove([run[FOUR]])
    run.down(lost_ns)
    assert run.is_open(lost_ns)
    assert run.beat(lost_ns + PAUSE) == meet(1, 2, 5)
    assert run.beat(lost_ns + 2 * PAUSE) == meet(1, 2, 3)
    assert run.is_open(lost_ns + 3 * PAUSE - 1)
    assert not run.is_open(lost_ns + 3 * PAUSE)


def test_a_removed_peer_that_is_not_the_last_relay_changes_nothing() -> None:
    run = MeetingRun(5)
    run.down(0)
    assert run.beat(PAUSE) == meet(1, 2, 3)
    assert run.beat(2 * PAUSE) == meet(1, 2, 4)
    run.meetings.forget({THREE})
    assert not run.is_open(3 * PAUSE)


# -- cost ----------------------------------------------------------------------------------------


def test_a_large_group_takes_few_steps() -> None:
    run = MeetingRun(1000)
    run.dialable = {peer: peer % 10 == 0 for peer in run.membership.peers}
    newcomers = [run.register(1000 + n).id for n in (1, 2)]
    run.dialable |= dict.fromkeys(newcomers, False)
    assert len(run.beat(0)) == 2 * 800, "each tenth can be dialled by both neighbours"
    assert run.asked < 25_000, "less than 25 for each pair that meets"
    run.asked = 0
    assert run.beat(1) == []
    assert run.asked < 6000, "none of the pairs is due"
    for newcomer, asked in zip(newcomers, (1200, 30), strict=True):
        run.asked = 0
        assert run.tick(newcomer, ONE, 1) == meet(1, newcomer, 10)
        assert run.asked < asked, "the first one finds the relays for all until the next heartbeat"
    for one, other in pairwise([*run.membership.peers][:1000]):
        run.link(one, other)
    run.asked = 0
    assert run.beat(2) == []
    assert run.asked < 10, "all neighbours have links"
