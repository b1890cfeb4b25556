"""Which lanes a peer dials and closes, and when; no network and no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.limits import Timing
from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import KEY_BYTES, NS_PER_S, Member, PeerId
from pccl.topology.link_steps import (
    DialLane,
    DropLink,
    GiveUpLane,
    LeaveRelay,
    LinkStep,
    NarrowLink,
    TellLink,
)
from pccl.topology.link_upkeep import LinkUpkeep
from pccl.topology.segment_limit import LaneFacts, Proof, StuckLane, Way
from pccl.topology.wanted_link import KnownLink, lanes_of

MS = 1_000_000
TIMING = Timing(redial_min_s=0.02, redial_max_s=0.5, lane_stall_s=10.0)
OWN = PeerId(5)


def key(peer: int) -> bytes:
    return bytes([peer]) * KEY_BYTES


def member(peer: int, host: str) -> Member:
    return Member(PeerId(peer), host, peer, key=key(peer))


ELDER, YOUNGER, STRANGER = member(3, "a"), member(7, "b"), PeerId(9)
KNOWN = KnownLink(0, near=False, relay=None)
RELAY = member(1, "c")
SOON, LATER = DialLane(ELDER, 0, is_brief=True), DialLane(YOUNGER, 0, 500 * MS)
AGAIN = DialLane(ELDER, 0)


def upkeep(*members: Member, lanes: int = 4) -> LinkUpkeep:
    """Of a peer that wants links to these, and has none."""
    made = LinkUpkeep(TIMING, lanes, newcomers_max=2)
    assert made.want(OWN, members, {}) == [{3: SOON, 7: LATER}[member.peer] for member in members]
    return made


def dial(links: LinkUpkeep, number: int = 0, *, now_ns: int = 0) -> list[LinkStep]:
    """The dial of a lane to the elder succeeds."""
    peer = ELDER.peer
    steps = links.attached(peer, number, 0, now_ns, near=False, ours=True, more=number > 0)
    return [step for step in steps if step != TellLink(peer, None)]


def lose(
    links: LinkUpkeep, member: Member, number: int, now_ns: int, *, up: bool
) -> list[LinkStep]:
    """A lane is reset."""
    return links.lost(member.peer, number, "reset", now_ns, up=up, damaged=None)


def lanes(numbers: Iterable[int], pause_ns: int = 0) -> list[DialLane]:
    return [DialLane(ELDER, number, pause_ns) for number in numbers]


@pytest.mark.parametrize(
    ("told", "near", "sharers", "count"),
    [
        (0, False, 1, 16),
        (0, False, 16, 16),
        (0, False, 17, 15),
        (0, False, 63, 4),
        (0, False, 256, 1),
        (0, False, 1000, 1),
        (0, True, 0, 1),
        (5, True, 0, 5),
        (200, False, 63, 200),
    ],
)
def test_the_lanes_of_a_link_that_is_used(told: int, near: bool, sharers: int, count: int) -> None:
    assert lanes_of(told, near=near, sharers=sharers) == count


def test_the_younger_dials_at_once_and_the_elder_later() -> None:
    links = upkeep(ELDER, YOUNGER)
    assert links.due(YOUNGER.peer, 0) == [DialLane(YOUNGER, 0, is_brief=True)]


def test_only_the_first_dial_to_a_peer_is_brief() -> None:
    """A firewall that swallows it costs little, and a slow answer has the second one."""
    links = upkeep(ELDER)
    assert links.failed(ELDER.peer, 0, "no answer") == [
        DialLane(ELDER, 0, 20 * MS),
        TellLink(ELDER.peer, "no answer"),
    ]
    assert links.due(ELDER.peer, 0) == [AGAIN]
    dial(links)
    assert lose(links, ELDER, 0, 60 * NS_PER_S, up=False)[0] == AGAIN


def test_the_other_lanes_are_dialled_when_the_link_is_up_and_used() -> None:
    links = upkeep(ELDER)
    assert links.use([ELDER.peer]) == []  # the first one finds out
    assert dial(links) == lanes([1, 2, 3])
    links = upkeep(ELDER)
    assert dial(links) == []
    assert links.use([ELDER.peer, STRANGER]) == lanes([1, 2, 3])
    assert links.use([ELDER.peer]) == []


def test_the_side_that_was_told_a_larger_number_is_heeded() -> None:
    links = upkeep(ELDER, lanes=2)
    links.use([ELDER.peer])
    steps = links.attached(ELDER.peer, 0, 3, 0, near=True, ours=True, more=False)
    assert steps == [*lanes([1, 2]), TellLink(ELDER.peer, None)]


@pytest.mark.parametrize(("met", "longest_ms"), [(False, 2000), (True, 500)])
def test_the_pauses_between_dials_double(met: bool, longest_ms: int) -> None:
    links = upkeep(ELDER)
    if met:
        dial(links)
        lose(links, ELDER, 0, NS_PER_S, up=False)
    pauses: list[int] = []
    for _ in range(9):
        step, told = links.failed(ELDER.peer, 0, "refused")
        assert isinstance(step, DialLane)
        assert told == TellLink(ELDER.peer, "refused")
        pauses.append(step.pause_ns // MS)
        assert links.due(ELDER.peer, 0) == lanes([0])
    doubled = [20 << n for n in range(9)]
    assert pauses == [min(pause, longest_ms) for pause in doubled]


def test_a_lane_that_has_lived_is_redialled_at_once_and_another_one_later() -> None:
    links = upkeep(ELDER)
    links.use([ELDER.peer])
    dial(links)
    for number in (1, 2, 3):
        assert dial(links, number, now_ns=NS_PER_S) == []
    soon = lose(links, ELDER, 1, NS_PER_S + 499 * MS, up=True)
    assert soon == lanes([1], 20 * MS)
    assert lose(links, ELDER, 2, NS_PER_S + 500 * MS, up=True) == lanes([2])
    last = lose(links, ELDER, 0, 9 * NS_PER_S, up=False)
    assert last == [*lanes([0]), TellLink(ELDER.peer, "reset")]
    assert links.due(ELDER.peer, 1) == []  # the first lane brings the others


def test_a_dial_is_superfluous_when_the_other_side_has_dialled() -> None:
    links = upkeep(YOUNGER)
    links.due(YOUNGER.peer, 0)
    assert links.greeted(YOUNGER.peer, YOUNGER.key, 0, "b") == []  # the dial of an elder goes on
    assert not links.gives_way(YOUNGER.peer, 0)
    told = links.attached(YOUNGER.peer, 0, 0, 0, near=False, ours=False, more=False)
    assert told == [TellLink(YOUNGER.peer, None)]
    assert links.gives_way(YOUNGER.peer, 0)
    links = upkeep(ELDER)
    assert links.greeted(ELDER.peer, ELDER.key, 0, "a") == [GiveUpLane(ELDER.peer, 0)]


def test_newcomers_have_one_lane_each_and_bounded_room() -> None:
    links = upkeep()
    assert links.greeted(PeerId(11), key(11), 1, "x") is None
    assert links.greeted(PeerId(11), key(11), 0, "x") == []
    assert links.greeted(PeerId(11), key(11), 0, "x") == []
    assert links.greeted(PeerId(12), key(12), 0, "x") == []
    dropped = DropLink(PeerId(11), "too many newcomers dialled")
    assert links.greeted(PeerId(13), key(13), 0, "y") == [dropped]
    told = TellLink(PeerId(12), "reset")
    assert links.lost(PeerId(12), 0, "reset", 0, up=False, damaged=None) == [
        DropLink(PeerId(12)),
        told,
    ]
    assert links.want(OWN, [member(13, "y")], {PeerId(13): KNOWN}) == []
    assert links.greeted(PeerId(13), key(13), 1, "y") == []


def test_links_of_newcomers_that_the_run_has_removed_are_dropped() -> None:
    gone: set[PeerId] = set()
    links = LinkUpkeep(TIMING, 4, newcomers_max=2, has_left=gone.__contains__)
    for newcomer in (11, 12):
        assert links.greeted(PeerId(newcomer), key(newcomer), 0, "x") == []
    assert links.want(OWN, [], {}) == []
    gone.add(PeerId(11))
    assert links.want(OWN, [], {}) == [DropLink(PeerId(11), "it has left the run")]
    assert links.want(OWN, [], {}) == []
    assert links.greeted(PeerId(13), key(13), 0, "y") == [], "there is room again"


def test_spare_lanes_are_closed_unless_they_carry_something() -> None:
    links = upkeep(ELDER, lanes=0)
    links.use([ELDER.peer])
    assert dial(links) == lanes(range(1, 16))
    others = [Member(PeerId(100 + n), "c", 1) for n in range(31)]
    links.want(OWN, [ELDER, *others], {})
    assert links.look(ELDER.peer, (), 0, 0) == []
    links.use([member.peer for member in others])
    closed = [GiveUpLane(ELDER.peer, number, is_spare=True) for number in range(8, 16)]
    assert links.look(ELDER.peer, {9}, 0, 0) == [step for step in closed if step.number != 9]
    assert links.look(ELDER.peer, (), 0, 0) == [step for step in closed if step.number == 9]
    links.want(OWN, [ELDER, *others[:15]], {})  # the others have gone
    assert links.look(ELDER.peer, (), 0, 0) == lanes(range(8, 16))
    assert links.look(ELDER.peer, (), 0, 0) == []


def test_a_link_that_damages_what_comes_is_up_when_it_has_proven_itself() -> None:
    links = upkeep(ELDER)
    dial(links)
    for news in ([TellLink(ELDER.peer, None)], []):  # the first damage says nothing of the line
        links.lost(ELDER.peer, 0, "damaged", 0, up=False, damaged=1000)
        links.due(ELDER.peer, 0)
        steps = links.attached(ELDER.peer, 0, 0, 0, near=False, ours=True, more=False)
        assert steps == news
    assert links.look(ELDER.peer, (), 999, NS_PER_S) == []
    assert links.look(ELDER.peer, (), 1000, NS_PER_S) == [TellLink(ELDER.peer, None)]
    assert links.look(ELDER.peer, (), 1000, NS_PER_S) == []


def test_a_link_that_damages_what_comes_is_dialled_seldom_and_by_one_lane() -> None:
    links = upkeep(ELDER)
    dial(links)
    pauses: list[int] = []
    for _ in range(3):
        steps = links.lost(ELDER.peer, 0, "damaged", 0, up=False, damaged=1000)
        pauses += [step.pause_ns for step in steps if isinstance(step, DialLane)]
        links.due(ELDER.peer, 0)
        links.attached(ELDER.peer, 0, 0, 0, near=False, ours=True, more=False)
    assert pauses == [20 * MS, 500 * MS, 500 * MS]
    assert links.use([ELDER.peer]) == []
    assert links.look(ELDER.peer, (), 1000, 0) == [TellLink(ELDER.peer, None)]
    assert len(links.look(ELDER.peer, (), 1000, 0)) == 3  # the other lanes


def test_a_relayed_link_has_one_lane_until_a_direct_dial_succeeds() -> None:
    links = upkeep(ELDER)
    assert links.meets(ELDER.peer)
    assert links.attached(
        ELDER.peer, 0, 0, 0, near=False, ours=True, more=False, relay=PeerId(1)
    ) == [
        GiveUpLane(ELDER.peer, 0),
        DialLane(ELDER, 0, 5 * NS_PER_S),
        TellLink(ELDER.peer, None, PeerId(1), LinkPath.RELAYED),
    ]
    assert not links.meets(ELDER.peer)
    assert links.use([ELDER.peer]) == []
    for pause_s in (10, 20, 40, 80, 160, 300, 300):
        assert links.due(ELDER.peer, 0) == [AGAIN]
        later = [DialLane(ELDER, 0, pause_s * NS_PER_S)]
        assert links.failed(ELDER.peer, 0, "refused") == later
    assert links.due(ELDER.peer, 0) == [AGAIN]
    steps = links.attached(ELDER.peer, 0, 0, 0, near=False, ours=True, more=True)
    more = [DialLane(ELDER, number) for number in (1, 2, 3)]
    assert steps == [*more, TellLink(ELDER.peer, None)]


def punched(links: LinkUpkeep, peer: PeerId, number: int = 0, now_ns: int = 0) -> list[LinkStep]:
    """A lane that both have dialled comes up, the first one in the place of a relayed one."""
    ours, more = peer < OWN, True
    if not number:
        links.attached(peer, 0, 0, 0, near=False, ours=ours, more=False, relay=RELAY.peer)
        assert links.meets(peer, punches=True)
    return links.attached(peer, number, 0, now_ns, near=False, ours=ours, more=more, met_at=RELAY)


def met_lanes(numbers: Iterable[int], pause_ns: int = 0) -> list[DialLane]:
    """Dials of lanes that the elder dials, too."""
    met_at = None if pause_ns else RELAY
    return [DialLane(ELDER, number, pause_ns, met_at=met_at) for number in numbers]


def used_punched() -> LinkUpkeep:
    """Of the younger of two that have dialled each other, with four lanes."""
    links = upkeep(ELDER)
    punched(links, ELDER.peer)
    assert links.use([ELDER.peer]) == met_lanes([1, 2, 3])
    for number in (1, 2, 3):
        assert punched(links, ELDER.peer, number) == []
    return links


def test_of_two_that_have_dialled_each_other_the_younger_keeps_the_link() -> None:
    links = upkeep(ELDER, YOUNGER)
    for member in (ELDER, YOUNGER):
        peer = member.peer
        steps = punched(links, peer)
        assert steps == [GiveUpLane(peer, 0), TellLink(peer, None, None, LinkPath.PUNCHED)]
        assert links.meets(peer, punches=True) is (member is YOUNGER), "who cannot tell"
        assert links.redials(peer) is (member is ELDER)
        assert links.look(peer, (), 0, 9000 * MS) == []
    assert links.use([YOUNGER.peer]) == [], "that one asks"
    assert [links.punches(YOUNGER.peer, number) for number in (0, 3, 4)] == [True, True, False]
    assert not links.punches(ELDER.peer, 1), "the younger one does not dial for it"
    assert not links.punches(STRANGER, 1)
    assert lose(links, YOUNGER, 0, 60_000 * MS, up=False) == [
        LATER,
        TellLink(YOUNGER.peer, "reset"),
    ]
    assert not links.punches(YOUNGER.peer, 1)


def test_a_link_that_both_have_dialled_gets_the_lanes_of_another_one() -> None:
    links = used_punched()
    assert links.use([ELDER.peer]) == []
    assert lose(links, ELDER, 0, 60 * NS_PER_S, up=True) == met_lanes([0]), "the first one, too"
    assert punched(links, ELDER.peer, 2, 61 * NS_PER_S) == [], "a newer one has replaced it"
    soon = lose(links, ELDER, 2, 61 * NS_PER_S, up=True)
    assert soon == met_lanes([2], 20 * MS), "it lived for a moment only"


def test_without_a_lane_nothing_asks_the_elder_and_the_younger_dials_as_at_first() -> None:
    links = used_punched()
    lose(links, ELDER, 0, 60 * NS_PER_S, up=True)
    lost = lose(links, ELDER, 3, 60 * NS_PER_S, up=False)
    given_up = [GiveUpLane(ELDER.peer, number) for number in (0, 1, 2, 3)]
    assert sorted(map(str, lost[:4])) == sorted(map(str, given_up))
    assert lost[4:] == [AGAIN, TellLink(ELDER.peer, "reset")]
    assert dial(links) == lanes([1, 2, 3]), "a direct link has them, too"


def test_a_link_that_gets_no_further_lanes_goes_on_with_those_that_it_has() -> None:
    links = upkeep(ELDER)
    punched(links, ELDER.peer)
    links.use([ELDER.peer])
    assert links.failed(ELDER.peer, 1, "no answer") == []
    assert links.look(ELDER.peer, (), 0, 0) == [], "the others may fail, too"
    assert links.failed(ELDER.peer, 3, "no answer") == []
    for pause_s in (2, 4, 8, 16):
        assert links.failed(ELDER.peer, 2, "no answer") == met_lanes([2], pause_s * NS_PER_S)
        assert links.look(ELDER.peer, (), 0, 0) == []
        assert links.due(ELDER.peer, 2) == met_lanes([2])
    assert links.failed(ELDER.peer, 2, "no answer") == []
    assert links.look(ELDER.peer, (), 0, 0) == []
    assert lose(links, ELDER, 0, 60 * NS_PER_S, up=False)[1:] == [
        AGAIN,
        TellLink(ELDER.peer, "reset"),
    ]


def test_when_one_lane_succeeds_after_failures_the_others_follow() -> None:
    links = upkeep(ELDER)
    punched(links, ELDER.peer)
    links.use([ELDER.peer])
    assert links.failed(ELDER.peer, 1, "no answer") == []
    assert links.failed(ELDER.peer, 3, "no answer") == []
    assert punched(links, ELDER.peer, 2) == met_lanes([1, 3])
    for number in (1, 3):
        punched(links, ELDER.peer, number)
    assert lose(links, ELDER, 1, 60 * NS_PER_S, up=True) == met_lanes([1])
    assert links.failed(ELDER.peer, 1, "no answer") == met_lanes([1], NS_PER_S), "alone"


def test_a_newcomer_that_was_met_before_it_was_wanted_is_met_for_further_lanes() -> None:
    known = KnownLink(4, near=False, relay=None, met_at=RELAY)
    links = LinkUpkeep(TIMING, 4, newcomers_max=2)
    assert links.want(OWN, [ELDER, YOUNGER], {ELDER.peer: known, YOUNGER.peer: known}) == []
    assert links.use([ELDER.peer, YOUNGER.peer]) == met_lanes([1, 2, 3])
    assert links.punches(YOUNGER.peer, 3)


@pytest.mark.parametrize(
    ("member", "ours", "mapped", "path"),
    [
        (ELDER, True, False, LinkPath.DIRECT),
        (ELDER, False, False, LinkPath.DIALLED_BACK),
        (ELDER, False, True, LinkPath.MAPPED),
        (YOUNGER, True, False, LinkPath.DIALLED_BACK),
        (YOUNGER, False, False, LinkPath.DIRECT),
        (YOUNGER, False, True, LinkPath.MAPPED),
    ],
)
def test_the_path_says_which_side_has_dialled_and_where(
    member: Member, ours: bool, mapped: bool, path: LinkPath
) -> None:
    peer = member.peer
    links = upkeep(member)
    steps = links.attached(peer, 0, 0, 0, near=False, ours=ours, more=False, mapped=mapped)
    assert steps == [TellLink(peer, None, None, path)]
    again = links.attached(peer, 0, 0, 0, near=False, ours=ours, more=True, mapped=mapped)
    assert again == []
    other = links.attached(peer, 0, 0, 0, near=False, ours=False, more=True, mapped=not mapped)
    accepted = LinkPath.DIALLED_BACK if member is ELDER else LinkPath.DIRECT
    assert other == [TellLink(peer, None, None, accepted if mapped else LinkPath.MAPPED)]


@pytest.mark.parametrize(("met_at", "path"), [(RELAY, LinkPath.PUNCHED), (None, LinkPath.DIRECT)])
def test_a_newcomer_that_was_relayed_is_reached_without_the_relay(
    met_at: Member | None, path: LinkPath
) -> None:
    links = LinkUpkeep(TIMING, 4, newcomers_max=2)
    links.want(OWN, [], {})
    peer, relay = YOUNGER.peer, PeerId(1)
    relayed = links.attached(peer, 0, 0, 0, near=False, ours=False, more=False, relay=relay)
    assert relayed == [TellLink(peer, None, relay, LinkPath.RELAYED)]
    direct = links.attached(peer, 0, 0, 0, near=False, ours=False, more=True, met_at=met_at)
    assert direct == [TellLink(peer, None, None, path)], "though nobody wants it yet"
    assert links.want(OWN, [YOUNGER], {peer: KNOWN._replace(met_at=met_at)}) == []


def test_a_new_path_of_a_link_that_was_up_before_it_was_wanted_is_not_told() -> None:
    links = LinkUpkeep(TIMING, 4, newcomers_max=2)
    links.want(OWN, [], {})
    links.greeted(YOUNGER.peer, key(7), 0, "b")
    told = links.attached(YOUNGER.peer, 0, 0, 0, near=False, ours=False, more=False)
    assert told == [TellLink(YOUNGER.peer, None, None, LinkPath.DIRECT)]
    assert links.want(OWN, [YOUNGER], {YOUNGER.peer: KNOWN}) == []
    assert links.attached(YOUNGER.peer, 1, 0, 0, near=False, ours=False, more=True) == []


def test_a_link_is_dialled_where_its_peer_is_now() -> None:
    links = upkeep(ELDER)
    moved = replace(ELDER, host="elsewhere", hosts=("10.0.0.3",))
    assert links.want(OWN, [moved], {}) == []
    assert links.failed(ELDER.peer, 0, "no answer") == [
        DialLane(moved, 0, 20 * MS),
        TellLink(ELDER.peer, "no answer"),
    ]


MOVED = replace(ELDER, host="elsewhere")


def linked(*, used: bool = True) -> LinkUpkeep:
    """Of a peer that has dialled all lanes of a link, which then lived for a while."""
    links = upkeep(ELDER, lanes=2)
    dial(links)
    if used:
        links.use([ELDER.peer])
        dial(links, 1)
    return links


def up_at(host: str, *, near: bool = False) -> dict[PeerId, KnownLink]:
    return {ELDER.peer: KnownLink(0, near=near, relay=None, at=host)}


def test_lanes_to_an_address_that_a_peer_has_left_are_replaced() -> None:
    links = linked()
    assert links.want(OWN, [MOVED], up_at("a")) == [DialLane(MOVED, 0), DialLane(MOVED, 1)]
    assert links.want(OWN, [MOVED], up_at("a")) == [], "and both are under way"
    assert dial(links) == []
    assert links.failed(ELDER.peer, 1, "no answer") == [DialLane(MOVED, 1, 20 * MS)]
    assert lose(links, ELDER, 1, 60 * NS_PER_S, up=True) == [], "its dial waits already"
    assert links.due(ELDER.peer, 1) == [DialLane(MOVED, 1)]
    assert dial(links, 1) == []
    assert lose(links, ELDER, 0, 60 * NS_PER_S, up=True) == [DialLane(MOVED, 0)]


@pytest.mark.parametrize(
    ("member", "up"),
    [
        (ELDER, up_at("b")),  # the address is that of before
        (replace(MOVED, hosts=("10.0.0.3",)), up_at("10.0.0.3")),  # reached in its local network
        (MOVED, up_at("a", near=True)),  # reached inside this machine
        (MOVED, {}),
    ],
)
def test_lanes_that_may_lead_to_a_peer_stay(member: Member, up: dict[PeerId, KnownLink]) -> None:
    assert linked().want(OWN, [member], up) == []


def test_the_side_that_was_dialled_does_not_follow_a_peer_that_moves() -> None:
    links = upkeep(ELDER)
    dial(links)
    links.greeted(ELDER.peer, key(3), 0, "a")
    links.attached(ELDER.peer, 0, 0, 0, near=False, ours=False, more=True)
    assert links.want(OWN, [MOVED], up_at("a")) == []


def test_a_lane_stays_if_its_peer_cannot_be_dialled_at_its_new_address() -> None:
    links = linked(used=False)
    steps = links.want(OWN, [MOVED], up_at("a"))
    pauses_ms: list[int] = []
    while steps:
        assert steps == [DialLane(MOVED, 0)]
        steps = links.failed(ELDER.peer, 0, "no answer")
        for step in steps:
            assert isinstance(step, DialLane)
            pauses_ms.append(step.pause_ns // MS)
            steps = links.due(ELDER.peer, 0)
    assert pauses_ms == [20, 40, 80, 160, 320]
    assert lose(links, ELDER, 0, 60 * NS_PER_S, up=False)[0] == DialLane(MOVED, 0)
    assert links.failed(ELDER.peer, 0, "no answer"), "the link is down, so dials go on"


def test_a_lane_that_was_lost_is_dialled_until_it_is_up() -> None:
    links = linked()
    links.want(OWN, [MOVED], up_at("a"))
    assert lose(links, ELDER, 1, 60 * NS_PER_S, up=True) == []
    for _ in range(20):
        assert links.failed(ELDER.peer, 1, "no answer")
        assert links.due(ELDER.peer, 1) == [DialLane(MOVED, 1)]


def test_after_another_process_has_answered_each_host_is_dialled_alone() -> None:
    several = replace(ELDER, hosts=("10.0.0.3", "10.0.0.4"))
    links = LinkUpkeep(TIMING, 4, newcomers_max=2)
    assert links.want(OWN, [several], {}) == [DialLane(several, 0, is_brief=True)]
    dialled: list[Member] = []
    for answered in (False, True, True, True, False):
        links.failed(ELDER.peer, 0, "another key", answered=answered)
        (step,) = links.due(ELDER.peer, 0)
        assert isinstance(step, DialLane)
        dialled.append(step.member)
    alone = [replace(ELDER, host=host) for host in ("10.0.0.3", "10.0.0.4", ELDER.host)]
    assert dialled == [several, *alone, alone[-1]]


def test_a_relayed_link_that_is_lost_is_dialled_directly_at_once() -> None:
    links = upkeep(ELDER)
    links.attached(ELDER.peer, 0, 0, 0, near=False, ours=True, more=False, relay=PeerId(0))
    told = TellLink(ELDER.peer, "reset")
    assert lose(links, ELDER, 0, 0, up=False) == [GiveUpLane(ELDER.peer, 0), AGAIN, told]
    assert links.meets(ELDER.peer)


def test_a_lane_is_left_when_its_relay_has_left_the_run() -> None:
    """A relay that was removed because it is frozen closes no connection."""
    gone = {PeerId(0), PeerId(1)}
    links = LinkUpkeep(TIMING, 4, newcomers_max=2, has_left=gone.__contains__)
    links.want(OWN, [ELDER], {})
    for relay in (PeerId(0), PeerId(2)):  # 0: the master
        links.attached(ELDER.peer, 0, 0, 0, near=False, ours=True, more=False, relay=relay)
        assert links.want(OWN, [ELDER], {}) == []
    gone.add(PeerId(2))
    leave = LeaveRelay(ELDER.peer, PeerId(2))
    assert links.want(OWN, [ELDER], {}) == [leave]
    assert DialLane(ELDER, 0) in lose(links, ELDER, 0, 0, up=False)
    assert links.want(OWN, [ELDER], {}) == []
    relayed = {YOUNGER.peer: KNOWN._replace(relay=PeerId(2))}
    assert links.want(OWN, [YOUNGER], relayed)[-1] == replace(leave, peer=YOUNGER.peer)


def test_the_side_that_was_met_tries_direct_dials_too_a_little_later() -> None:
    links = upkeep(YOUNGER)
    links.greeted(YOUNGER.peer, key(7), 0, "peer 7 through peer 1")
    steps = links.attached(
        YOUNGER.peer, 0, 0, 0, near=False, ours=False, more=False, relay=PeerId(1)
    )
    assert steps[-2:] == [
        DialLane(YOUNGER, 0, 7_500 * MS),
        TellLink(YOUNGER.peer, None, PeerId(1), LinkPath.RELAYED),
    ]
    assert links.due(YOUNGER.peer, 0) == [DialLane(YOUNGER, 0)]
    assert not links.gives_way(YOUNGER.peer, 0)
    direct = links.attached(YOUNGER.peer, 0, 0, 0, near=False, ours=True, more=True)
    assert direct == [TellLink(YOUNGER.peer, None, None, LinkPath.DIALLED_BACK)]


def test_an_elder_meets_whom_its_master_names_and_a_younger_one_whom_it_lacks() -> None:
    links = upkeep(ELDER)
    assert links.meets(STRANGER)  # a newcomer that the elder may not know yet
    assert not links.meets(PeerId(4))
    assert not links.meets(OWN)


def test_a_link_on_which_large_packets_vanish_gets_smaller_segments() -> None:
    links, peer = upkeep(ELDER), ELDER.peer
    assert links.redials(peer) is True
    steps: list[LinkStep] = []
    for now_s in (10, 20):
        assert links.segment_bytes(peer) == 0
        dial(links, now_ns=(now_s - 10) * NS_PER_S)
        lane = StuckLane(Way.OUT, 1448, (now_s - 5) * NS_PER_S)
        now_ns = now_s * NS_PER_S
        steps = links.lost(peer, 0, "stuck", now_ns, up=False, damaged=None, stuck=lane)
        assert links.suspects(peer, now_ns) is Proof.OPENED
    assert steps == [
        DialLane(ELDER, 0, segment_bytes=1200),
        TellLink(peer, "stuck"),
        NarrowLink(peer, 1200, is_proven=False),
    ]
    dial(links, now_ns=20 * NS_PER_S)
    passed = LaneFacts(1188, 1 << 20, 300, unacknowledged=0, retransmits=0, ack_ago_ns=0)
    proof = links.carried(peer, passed, 20 * NS_PER_S)
    assert proof == [NarrowLink(peer, 1200, is_proven=True)]
    assert links.suspects(peer, 20 * NS_PER_S) is None
    assert links.segment_bytes(peer) == 1200
    lose(links, ELDER, 0, 90 * NS_PER_S, up=False)
    assert links.segment_bytes(peer) == 1200


def test_the_side_that_does_not_dial_says_nothing_of_smaller_segments() -> None:
    links = upkeep(YOUNGER)
    peer = YOUNGER.peer
    for now_s in (10, 20):
        links.attached(peer, 0, 0, 0, near=False, ours=False, more=False)
        assert links.may_narrow(peer)
        lane = StuckLane(Way.IN, 1448, (now_s - 5) * NS_PER_S)
        now_ns = now_s * NS_PER_S
        steps = links.lost(peer, 0, "stuck", now_ns, up=False, damaged=None, stuck=lane)
        assert [step for step in steps if isinstance(step, NarrowLink)] == []
    assert links.segment_bytes(peer) == 1200, "in case that it has to dial"


def test_what_the_kernel_says_of_a_relay_or_of_this_machine_does_not_count() -> None:
    links = upkeep(ELDER, YOUNGER)
    for peer, near, relay in ((ELDER.peer, True, None), (YOUNGER.peer, False, PeerId(1))):
        links.greeted(peer, key(peer), 0, "host")
        links.attached(peer, 0, 0, 0, near=near, ours=False, more=False, relay=relay)
        assert not links.may_narrow(peer)
    assert not links.may_narrow(STRANGER)


def test_a_link_that_is_not_wanted_has_no_segments_of_its_own() -> None:
    links = upkeep()
    facts = LaneFacts(1448, 0, 0, unacknowledged=0, retransmits=0, ack_ago_ns=0)
    assert links.carried(STRANGER, facts, 0) == []
    assert links.segment_bytes(STRANGER) == 0
    assert links.suspects(STRANGER, 0) is None
    assert not links.redials(STRANGER)


def test_a_meeting_that_its_master_repeats_goes_on() -> None:
    links = upkeep(ELDER)
    one, other = PeerId(1), PeerId(2)
    first = links.begins_meeting(ELDER.peer, one)
    assert first
    assert not links.begins_meeting(ELDER.peer, one)
    assert links.begins_meeting(STRANGER, one)
    second = links.begins_meeting(ELDER.peer, other)
    links.leaves_meeting(ELDER.peer, first)  # that was left for the other one
    assert not links.begins_meeting(ELDER.peer, other)
    links.leaves_meeting(ELDER.peer, second)
    third = links.begins_meeting(ELDER.peer, one)
    links.leaves_meeting(ELDER.peer, first)  # it ends late: this is another one at that relay
    assert not links.begins_meeting(ELDER.peer, one)
    links.leaves_meeting(ELDER.peer, third)
    assert links.begins_meeting(ELDER.peer, one)
    assert not links.begins_meeting(OWN, one)


class Shell:
    """Carries out steps, and checks that each makes sense."""

    def __init__(self) -> None:
        self.gone: set[PeerId] = set()
        """Relays that have left the run."""
        self.upkeep = LinkUpkeep(TIMING, 3, newcomers_max=2, has_left=self.gone.__contains__)
        self.wanted: set[PeerId] = set()
        self.up: set[tuple[PeerId, int]] = set()
        self.waits: set[tuple[PeerId, int]] = set()
        self.dials: set[tuple[PeerId, int]] = set()
        self.told: dict[PeerId, tuple[bool, PeerId | None]] = {}
        self.relays: dict[PeerId, PeerId] = {}
        """Peer -> the relay of the link to it, if it was not direct when its last lane came up."""
        self.met: set[PeerId] = set()
        """Peers whose last lane both have dialled."""
        self.hosts: dict[PeerId, str] = {}
        """Peer -> its newest address."""
        self.now_ns = 0

    def is_up(self, peer: PeerId) -> bool:
        return any(one == peer for one, _ in self.up)

    def carry_out(self, steps: Iterable[LinkStep]) -> None:
        for step in steps:
            match step:
                case DialLane(member, number, pause_ns, _, met_at, _):
                    lane = member.peer, number
                    assert met_at is None or (member.peer == ELDER.peer and member.peer in self.met)
                    assert member.peer in self.wanted
                    assert lane not in self.waits | self.dials
                    longest_s = (
                        300
                        if member.peer in self.relays.keys() | self.met
                        else 4 * TIMING.redial_max_s
                    )
                    assert pause_ns <= TIMING.ns(longest_s)
                    (self.waits if pause_ns else self.dials).add(lane)
                case GiveUpLane(peer, number, is_spare):
                    self.waits.discard((peer, number))
                    self.dials.discard((peer, number))
                    if is_spare:
                        self.up.discard((peer, number))
                case DropLink(peer):
                    self.up = {lane for lane in self.up if lane[0] != peer}
                    assert all(one != peer for one, _ in self.waits | self.dials)
                    self.told.pop(peer, None)
                    self.relays.pop(peer, None)
                    self.met.discard(peer)
                case TellLink(peer, reason, relay):
                    self.told[peer] = reason is None, relay
                case LeaveRelay(peer, relay):
                    assert relay in self.gone
                    assert self.relays[peer] == relay
                    self.lose(peer, 0)
                case NarrowLink():
                    raise AssertionError("no lane of this test is stuck")

    def want(self, wanted: set[PeerId]) -> None:
        self.wanted = wanted
        members = [
            replace(one, host=self.hosts.get(one.peer, one.host))
            for one in PEERS
            if one.peer in wanted
        ]
        up = {
            one: KnownLink(
                0,
                False,
                self.relays.get(one),
                RELAY if one in self.met else None,
                "an old address",
            )
            for one, _ in self.up
        }
        self.carry_out(self.upkeep.want(OWN, members, up))

    def attach(
        self,
        peer: PeerId,
        number: int,
        *,
        ours: bool,
        relay: PeerId | None = None,
        met_at: Member | None = None,
    ) -> None:
        more = self.is_up(peer)
        self.up.add((peer, number))
        self.relays.pop(peer, None)
        (self.met.discard if met_at is None else self.met.add)(peer)
        if relay is not None:
            self.relays[peer] = relay
        facts = peer, number, 0, self.now_ns
        steps = self.upkeep.attached(
            *facts, near=False, ours=ours, more=more, relay=relay, met_at=met_at
        )
        self.carry_out(steps)

    def punch(self, peer: PeerId) -> None:
        """A relayed link is replaced by one that both have dialled."""
        ours = peer < OWN
        if peer not in self.relays or (ours and peer not in self.wanted):
            return
        steps = [] if ours else self.upkeep.greeted(peer, key(peer), 0, "host")
        self.carry_out(steps or ())
        self.attach(peer, 0, ours=ours, met_at=RELAY)

    def ask(self, peer: PeerId, number: int) -> None:
        """A peer asks for a further lane that both dial."""
        if self.upkeep.punches(peer, number):
            assert peer in self.wanted & self.met
            self.attach(peer, number, ours=False, met_at=RELAY)

    def lose(self, peer: PeerId, number: int) -> None:
        self.up.remove((peer, number))
        if not self.is_up(peer):
            self.relays.pop(peer, None)
            self.met.discard(peer)
        facts = peer, number, "reset", self.now_ns
        self.carry_out(self.upkeep.lost(*facts, up=self.is_up(peer), damaged=None))

    def check(self) -> None:
        """A wanted link that is not direct is being dialled, or will be; what was told is true."""
        for peer in self.wanted:
            under_way = {number for one, number in self.waits | self.dials if one == peer}
            assert (self.is_up(peer) and peer not in self.relays) or 0 in under_way
            told, relay = self.told.get(peer, (False, None))
            assert (told, relay) == (self.is_up(peer), self.relays.get(peer))


PEERS = (ELDER, YOUNGER)
HAPPENS = (
    "want",
    "drop",
    "moved",
    "use",
    "due",
    "made",
    "failed",
    "came",
    "met",
    "relayed",
    "relay left",
    "punched",
    "asked",
)
RELAYS = (PeerId(0), PeerId(1), PeerId(2))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*HAPPENS, "lost"]),
            st.integers(0, 50),
            st.sampled_from([MS, 100 * MS, NS_PER_S]),
        ),
        max_size=60,
    )
)
def test_every_wanted_link_is_up_or_under_way(events: list[tuple[str, int, int]]) -> None:
    shell = Shell()
    for what, choice, passed_ns in events:
        shell.now_ns += passed_ns
        member, number = PEERS[choice % 2], choice // 2 % 3
        keys = {"due": shell.waits, "made": shell.dials, "failed": shell.dials, "lost": shell.up}
        some = sorted(keys.get(what, ()))
        peer, lane = some[choice % len(some)] if some else (member.peer, number)
        if what in keys and not some:
            continue
        match what:
            case "want" | "drop" | "moved" | "relay left":
                if what == "moved":
                    shell.hosts[peer] = f"host-{choice}"
                shell.gone |= {RELAYS[lane]} if what == "relay left" else set()
                shell.want(shell.wanted - {peer} if what == "drop" else shell.wanted | {peer})
            case "use":
                shell.carry_out(shell.upkeep.use([peer]))
            case "due":
                shell.waits.remove((peer, lane))
                shell.carry_out(shell.upkeep.due(peer, lane))
            case "made":
                shell.dials.remove((peer, lane))
                if not shell.upkeep.gives_way(peer, lane):
                    met_at = RELAY if peer in shell.met else None
                    shell.attach(peer, lane, ours=True, met_at=met_at)
            case "failed":
                shell.dials.remove((peer, lane))
                shell.carry_out(shell.upkeep.failed(peer, lane, "refused"))
            case "came":
                steps = shell.upkeep.greeted(peer, key(peer), lane, "host")
                if steps is not None:
                    shell.carry_out(steps)
                    shell.attach(peer, lane, ours=False)
            case "met":
                if shell.upkeep.meets(peer) and peer in shell.wanted:
                    shell.attach(peer, 0, ours=True, relay=RELAYS[lane])
            case "relayed":
                steps = shell.upkeep.greeted(peer, key(peer), 0, "host")
                if steps is not None:
                    shell.carry_out(steps)
                    shell.attach(peer, 0, ours=False, relay=RELAYS[lane])
            case "punched":  # in the place of a relayed one
                shell.punch(peer)
            case "asked":
                shell.ask(peer, lane)
            case _:
                shell.lose(peer, lane)
        shell.check()
