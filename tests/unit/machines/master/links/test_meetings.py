"""At which relay two peers meet, and when they try again."""

from __future__ import annotations

from itertools import combinations

import pytest

from pccl.machines.master.links.meetings import Meetings
from pccl.machines.master.membership import Membership, RegisteredPeer
from pccl.protocol import messages as msg
from pccl.protocol.limits import MEETINGS_MAX, MEETINGS_PAIRS_MAX
from pccl.protocol.types import LinkMeasure, Member, PeerId
from tests.support.scenarios import where

ONE, TWO, THREE, FOUR, FIVE, SIX = (PeerId(n) for n in range(1, 7))
PAUSE = 1000
THE_MASTER = Member(PeerId(0), "", 0)


class Run:
    """The peers of a run, all connected and reached by tests, and who of them has to meet."""

    def __init__(self, peers: int = 6, *, master_relays: bool = False) -> None:
        self.membership = Membership(1)
        for n in range(1, peers + 1):
            peer = PeerId(n)
            self.membership.peers[peer] = RegisteredPeer(
                peer, 0, where(n), admitted=True, connection=n
            )
        self.dialable: dict[PeerId, bool | None] = {}
        """What tests have shown of peers; the others can be dialled."""
        self.meetings = Meetings(
            self.membership,
            lambda peer: self.dialable.get(peer, True),
            PAUSE,
            master_relays=master_relays,
        )

    def __getitem__(self, peer: PeerId) -> RegisteredPeer:
        return self.membership.peers[peer]

    def link(self, one: PeerId, *others: PeerId) -> None:
        for other in others:
            self.membership.links.report(one, other, None, 0)

    def measure(self, one: PeerId, other: PeerId, rtt_ns: int) -> None:
        self.membership.note_measure(one, other, LinkMeasure(rtt_ns, 0))

    def relays(self, one: PeerId = ONE, other: PeerId = TWO) -> list[int]:
        """The relays that the two could meet at, the best first."""
        return [relay.peer for relay in self.meetings.relays(self[one], self[other])]

    def need(self, one: PeerId, other: PeerId, now_ns: int = 0) -> None:
        """Two peers have had no link for a while, so that they meet from ``now_ns`` on."""
        self.meetings.need(one, other, now_ns - PAUSE)

    def due(self, now_ns: int) -> list[tuple[int, int, int]]:
        """Who is told to meet whom at which relay."""
        found = list(self.meetings.due(now_ns))
        assert all(told.member == where(told.member.peer) for _, told in found)
        return [(peer.id, told.member.peer, told.relay.peer) for peer, told in found]


# -- which relay ---------------------------------------------------------------------------------


def test_peers_that_were_reached_come_first_then_the_master_then_untested_ones() -> None:
    run = Run(master_relays=True)
    run.dialable = {THREE: None, FOUR: False, FIVE: True, SIX: None}
    assert run.relays() == [5, 0, 3, 6]
    run.link(THREE, ONE, TWO)  # even if an untested one has links to both
    assert run.relays() == [5, 0, 3, 6]


def test_the_master_is_named_only_if_it_forwards() -> None:
    run = Run()
    run.dialable = {THREE: None, FOUR: False}
    assert run.relays() == [5, 6, 3]
    assert Run(2).relays() == []
    assert Run(2, master_relays=True).relays() == [0]


def test_a_relay_is_named_as_peers_can_dial_it() -> None:
    run = Run(3, master_relays=True)
    assert run.meetings.relays(run[ONE], run[TWO]) == [where(3), THE_MASTER]


def test_a_relay_has_links_to_both_if_possible() -> None:
    run = Run()
    run.link(FOUR, ONE)
    run.link(FIVE, TWO)
    run.link(SIX, ONE)
    run.link(TWO, SIX)  # one end of a link is enough
    assert run.relays() == [6, 3, 4, 5]


def test_a_relay_with_fewer_links_to_carry_is_better() -> None:
    run = Run(8)
    seven, eight = PeerId(7), PeerId(8)
    for other in (THREE, FOUR):  # as the ends with the higher ids say
        run.membership.links.report(seven, other, None, 0, relay=FIVE)
    run.membership.links.report(eight, THREE, None, 0, relay=SIX)
    run.membership.links.report(THREE, seven, None, 0, relay=SIX)  # the other end decides
    for peer in (THREE, FOUR, FIVE, SIX, seven):
        run.link(peer, ONE, TWO)
        run.measure(peer, ONE, 10 * peer)
    assert run.relays() == [3, 4, 7, 6, 5, 8]
    run.membership.links.report(seven, THREE, None, 0)  # they have found a direct way
    run.membership.links.report(seven, FOUR, "reset", 0)
    assert run.relays() == [3, 4, 5, 7, 6, 8]


def test_links_to_both_count_more_than_few_links_to_carry() -> None:
    run = Run(5)
    run.link(FOUR, ONE, TWO)
    run.membership.links.report(FIVE, THREE, None, 0, relay=FOUR)
    assert run.relays() == [4, 3, 5]


def test_of_equals_the_nearest_is_the_best() -> None:
    run = Run()
    for peer, there, back in ((THREE, 50, 60), (FOUR, 70, 20), (FIVE, 40, 40), (SIX, 41, 40)):
        run.measure(peer, ONE, there)
        run.measure(TWO, peer, back)
    assert run.relays() == [5, 6, 4, 3]
    run.measure(ONE, THREE, 10)  # of two measures of a link the shorter one counts
    assert run.relays() == [3, 5, 6, 4]
    assert run.relays(TWO, ONE) == [3, 5, 6, 4]


def test_no_relay_is_of_another_group_or_away_or_one_of_the_two() -> None:
    run = Run()
    run[FOUR].group = 1
    run[FIVE].connection = None
    assert run.relays() == [3, 6]
    assert run.relays(THREE, SIX) == [1, 2]


def test_a_newcomer_may_be_a_relay() -> None:
    run = Run(3)
    run[THREE].admitted = False
    assert run.relays() == [3]


# -- when ----------------------------------------------------------------------------------------


def test_both_are_told_the_same() -> None:
    run = Run(3)
    run.need(TWO, ONE)
    found = list(run.meetings.due(0))
    assert [peer for peer, _ in found] == [run[ONE], run[TWO]]
    assert [told for _, told in found] == [
        msg.Meet(where(2), where(3)),
        msg.Meet(where(1), where(3)),
    ]


@pytest.mark.parametrize(
    ("one", "other", "after"),
    [
        (False, False, 0),
        (False, None, PAUSE),
        (None, False, PAUSE),
        (True, False, PAUSE),
        (None, None, PAUSE),
        (True, True, PAUSE),
    ],
)
def test_they_meet_at_once_only_if_nobody_can_dial_any_of_them(
    one: bool | None, other: bool | None, after: int
) -> None:
    run = Run(3)
    run.dialable = {ONE: one, TWO: other}
    run.meetings.need(ONE, TWO, 70)
    assert run.due(70 + after - 1) == []
    run.meetings.need(TWO, ONE, 70 + after - 1)  # it is not put off
    assert run.due(70 + after) == [(1, 2, 3), (2, 1, 3)]
    assert run.due(70 + after + PAUSE - 1) == []
    assert run.due(70 + after + PAUSE) == [(1, 2, 3), (2, 1, 3)]


def test_a_link_that_comes_meanwhile_needs_no_meeting() -> None:
    run = Run(3)
    run.meetings.need(ONE, TWO, 0)
    run.meetings.linked(ONE, TWO)
    assert run.due(2 * PAUSE) == []


def test_a_pair_beyond_the_limit_is_known_when_it_is_reported_again() -> None:
    run = Run(92)
    pairs = list(combinations(map(PeerId, range(1, 93)), 2))[: MEETINGS_PAIRS_MAX + 1]
    for one, other in pairs:
        run.need(one, other)
    *known, last, beyond = pairs
    assert len(known) == MEETINGS_PAIRS_MAX - 1
    run.need(*known[0])
    run.need(*beyond)
    for one, other in known:
        run.meetings.linked(one, other)
    assert [one[:2] for one in run.due(0)] == [last, last[::-1]]
    run.need(*beyond)
    assert [one[:2] for one in run.due(1)] == [beyond, beyond[::-1]]


def test_nobody_is_told_without_need() -> None:
    run = Run()
    assert run.due(0) == []
    run.need(ONE, TWO)
    run.meetings.linked(TWO, ONE)
    run.meetings.linked(ONE, THREE)
    assert run.due(0) == []


def test_after_a_failure_the_next_relay_is_named_and_after_the_last_one_the_first() -> None:
    run = Run(4, master_relays=True)
    run.need(ONE, TWO)
    assert [run.due(n * 100 * PAUSE)[0][2] for n in range(7)] == [3, 4, 0, 3, 4, 0, 3]


def test_a_relay_that_has_gone_is_named_no_more() -> None:
    run = Run(4)
    run.need(ONE, TWO)
    assert run.due(0) == [(1, 2, 3), (2, 1, 3)]
    run[THREE].connection = None
    assert run.due(PAUSE) == [(1, 2, 4), (2, 1, 4)]


def test_pauses_double_up_to_a_limit() -> None:
    run = Run(3)
    run.need(ONE, TWO)
    told_at: list[int] = []
    for now in range(0, 20 * PAUSE, PAUSE // 10):
        if run.due(now):
            told_at.append(now // PAUSE)
        run.need(TWO, ONE, now)  # a report that repeats itself changes nothing
        run.meetings.beat()
    assert told_at == [0, 1, 3, 7, 11, 15, 19]


def test_a_link_that_was_up_for_a_while_begins_again() -> None:
    run = Run(4)
    run.need(ONE, TWO)
    assert run.due(0) == [(1, 2, 3), (2, 1, 3)]
    run.meetings.linked(ONE, TWO)
    run.need(ONE, TWO, 1)
    assert run.due(1) == [(1, 2, 3), (2, 1, 3)]
    assert run.due(PAUSE) == []
    assert run.due(PAUSE + 1) == [(1, 2, 4), (2, 1, 4)]


def test_each_peer_is_told_of_few_meetings_for_each_heartbeat() -> None:
    more = 3
    run = Run(2 + MEETINGS_MAX + more)
    others = [PeerId(n) for n in range(3, 3 + MEETINGS_MAX + more)]
    for other in others:
        run.need(ONE, other)
    first = run.due(0)
    assert [one for one, _, _ in first] == [n for other in others[:-more] for n in (1, other)]
    run.need(TWO, others[-1])
    assert [one[:2] for one in run.due(1)] == [(2, others[-1]), (others[-1], 2)], "others have room"
    run.meetings.beat()
    late = run.due(2)
    assert [one for one, _, _ in late] == [n for other in others[-more:] for n in (1, other)]
    assert {relay for _, _, relay in late} == {2}, "they have missed none of their relays"
    assert run.due(3) == []


def test_a_peer_that_is_away_is_told_when_it_is_back() -> None:
    run = Run(3)
    run[TWO].connection = None
    run.need(ONE, TWO)
    assert run.due(0) == []
    run[TWO].connection = 9
    assert run.due(1) == [(1, 2, 3), (2, 1, 3)]


def test_without_a_relay_the_two_wait_for_one() -> None:
    run = Run(3)
    run.dialable = {THREE: False}
    run.need(ONE, TWO)
    assert run.due(0) == []
    run.dialable = {}
    assert run.due(1) == [(1, 2, 3), (2, 1, 3)]


def test_peers_that_were_removed_are_forgotten() -> None:
    run = Run(5)
    for one, other in ((ONE, TWO), (TWO, FOUR), (ONE, FIVE)):
        run.need(one, other)
    gone = [run[TWO], run[THREE]]
    run.meetings.forget({TWO, THREE})
    run.membership.peers = {p: one for p, one in run.membership.peers.items() if one not in gone}
    assert run.due(0) == [(1, 5, 4), (5, 1, 4)]


def test_the_deadline_of_a_newcomer_begins_anew_at_its_first_meeting_only() -> None:
    run = Run(4)
    run[TWO].admitted = False
    run.need(ONE, TWO)
    run.due(500)
    assert (run[ONE].pending_ns, run[TWO].pending_ns) == (0, 500)
    assert run.due(500 + PAUSE) != []
    assert (run[ONE].pending_ns, run[TWO].pending_ns) == (0, 500)
