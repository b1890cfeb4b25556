"""What the master tells two peers that have no link: when they meet, and at which relay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.master.events import Announce, MasterEffect
from pccl.machines.reachability import AddressTried
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.types import Algorithm, Descriptor, Member, PeerId, RemovalCause
from tests.support.master_stage import FIRST, SECOND, SUM, MasterStage, removals, told
from tests.support.scenarios import key, where

PAUSE_S = Timing().resume_s / 2
THE_MASTER = Member(PeerId(0), "", 0)


def down(peer: int) -> msg.LinkReport:
    """A report that there is no link to a peer."""
    return msg.LinkReport(PeerId(peer), False, "no answer in time")


def meet(one: int, other: int, relay: Member) -> list[tuple[int, msg.Meet]]:
    """What both are told."""
    return [(one, msg.Meet(where(other), relay)), (other, msg.Meet(where(one), relay))]


def apart(stage: MasterStage) -> None:
    """Members 1 and 2 report that they have no link."""
    stage.hear(1, down(2))
    stage.hear(2, down(1))


def met(effects: list[MasterEffect]) -> list[tuple[int, msg.Meet]]:
    return told(effects, msg.Meet)


def tried(stage: MasterStage, peer: int, reason: str = "connection refused") -> list[MasterEffect]:
    """The master's own test of a newcomer has ended."""
    host = "" if reason else f"10.0.0.{peer}"
    return stage.do(AddressTried(PeerId(peer), host, reason, key(peer)))


def undialable_members() -> MasterStage:
    """Two members that were linked by the master, since tests have reached neither."""
    stage = MasterStage().begin(tests_addresses=True, relays=True)
    for peer in (1, 2):
        stage.register(peer, min_peers=2)
        tried(stage, peer)
    stage.hear(1, msg.LinkReport(PeerId(2), True, "", PeerId(0)))
    assert len(stage.machine.membership.members()) == 2
    return stage


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_two_members_that_report_a_link_down_meet_if_it_stays_down(first: int, second: int) -> None:
    stage = MasterStage().new(3)
    assert met(stage.hear(first, down(second))) == []
    assert met(stage.wait(0.5, 1, 2, 3)) == []
    assert met(stage.hear(second, down(first))) == []
    assert met(stage.wait(PAUSE_S - 0.75, 1, 2, 3)) == [], "one of them may still dial the other"
    assert met(stage.wait(0.25, 1, 2, 3)) == meet(1, 2, where(3)), "at the next heartbeat"
    assert met(stage.hear(second, down(first))) == []


def test_two_members_that_nobody_can_dial_meet_at_the_next_heartbeat() -> None:
    stage = undialable_members()
    stage.hear(2, msg.LinkReport(PeerId(1), True, "", PeerId(0)))
    assert met(stage.wait(10, 1, 2)) == []
    assert met(stage.hear(1, down(2))) == []
    assert met(stage.wait(1, 1, 2)) == [], "the other end still has the link"
    assert met(stage.hear(2, down(1))) == []
    assert met(stage.wait(0.75, 1, 2)) == []
    assert met(stage.wait(0.25, 1, 2)) == meet(1, 2, THE_MASTER)
    assert met(stage.hear(1, down(2))) == []


def test_a_link_that_is_up_again_soon_needs_no_meeting() -> None:
    stage = MasterStage().new(3)
    apart(stage)
    assert met(stage.wait(PAUSE_S - 0.25, 1, 2, 3)) == []
    stage.hear(1, msg.LinkReport(PeerId(2), True, ""))
    assert met(stage.wait(10, 1, 2, 3)) == []


def test_one_end_alone_meets_nobody() -> None:
    stage = MasterStage().new(3)
    assert met(stage.hear(2, down(1))) == []
    assert met(stage.wait(20, 1, 2, 3)) == []
    up = msg.LinkReport(PeerId(1), True, "")
    assert met(stage.hear(2, up)) == met(stage.hear(1, down(2))) == []


def test_they_are_told_again_until_one_of_them_has_the_link() -> None:
    stage = MasterStage().new(4)
    apart(stage)
    assert met(stage.wait(1.5 * PAUSE_S, 1, 2, 3, 4)) == meet(1, 2, where(3))
    assert met(stage.wait(0.25, 1, 2, 3, 4)) == []
    assert met(stage.wait(0.5, 1, 2, 3, 4)) == meet(1, 2, where(4)), "at the next heartbeat"
    stage.hear(1, msg.LinkReport(PeerId(2), True, "", PeerId(4)))
    assert met(stage.wait(30, 1, 2, 3, 4)) == []


def test_a_member_that_leaves_is_not_told_any_more() -> None:
    stage = MasterStage().new(4)
    apart(stage)
    stage.hear(2, msg.Goodbye())
    assert met(stage.wait(10, 1, 3, 4)) == []


def test_a_report_of_a_relayed_link_is_a_load_of_its_relay() -> None:
    stage = MasterStage().new(5)
    stage.hear(5, msg.LinkReport(PeerId(4), True, "", PeerId(3)))
    apart(stage)
    assert met(stage.wait(1.5 * PAUSE_S, 1, 2, 3, 4, 5)) == meet(1, 2, where(4))
    stage = MasterStage().new(5)
    stage.hear(5, msg.LinkReport(PeerId(4), True, "", PeerId(3)))
    stage.hear(5, msg.LinkReport(PeerId(4), True, ""))
    apart(stage)
    assert met(stage.wait(1.5 * PAUSE_S, 1, 2, 3, 4, 5)) == meet(1, 2, where(3))


def test_two_members_meet_at_the_master_if_it_forwards() -> None:
    stage = MasterStage().begin(relays=True).together(0, 0)
    apart(stage)
    assert met(stage.wait(1.5 * PAUSE_S, 1, 2)) == meet(1, 2, THE_MASTER)
    silent = MasterStage().begin().together(0, 0)
    apart(silent)
    assert met(silent.wait(10, 1, 2)) == []


def test_a_newcomer_that_nobody_can_dial_meets_such_a_member_when_its_tests_have_ended() -> None:
    stage = MasterStage().begin(tests_addresses=True, relays=True)
    stage.register(1)
    assert met(tried(stage, 1)) == []
    assert met(stage.register(2)) == []
    assert met(tried(stage, 2)) == []
    assert met(stage.wait(0.5, 1, 2)) == [], "the member has not tested it yet"
    assert met(stage.hear(1, msg.AddressProbed(PeerId(2), "connection refused"))) == []
    assert met(stage.wait(0.25, 1, 2)) == meet(1, 2, THE_MASTER), "at the next tick"


def test_a_newcomer_that_was_reached_needs_no_relay() -> None:
    stage = MasterStage().begin(tests_addresses=True, relays=True)
    stage.register(1)
    tried(stage, 1)
    stage.register(2)
    assert met(tried(stage, 2, "")) == []
    assert met(stage.hear(1, msg.AddressProbed(PeerId(2), ""))) == []
    assert met(stage.wait(5, 1, 2)) == []


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 1)])
def test_two_newcomers_that_nobody_can_dial_meet_when_the_tests_of_both_have_ended(
    first: int, last: int
) -> None:
    stage = MasterStage().begin(tests_addresses=True, relays=True)
    for peer in (1, 2):
        stage.register(peer, min_peers=2)
    tried(stage, first)
    assert met(stage.wait(0.5, 1, 2)) == []
    effects = tried(stage, last)
    assert met(effects) == []
    effects += stage.wait(0.25, 1, 2)
    assert met(effects) == meet(1, 2, THE_MASTER)
    assert told(effects, msg.DialNewcomers) == [], "that helps only if one can be dialled"
    assert met(stage.hear(2, down(1))) == met(stage.hear(1, down(2))) == []
    effects = stage.hear(1, msg.LinkReport(PeerId(2), True, "", PeerId(0)))
    assert [one.peer for one in effects if isinstance(one, Announce)] == [1, 2], "admitted"


@pytest.mark.parametrize(("first", "last"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("reached", [1, 2])
def test_two_newcomers_of_which_one_was_reached_do_not_meet(
    reached: int, first: int, last: int
) -> None:
    stage = MasterStage().begin(tests_addresses=True, relays=True)
    for peer in (1, 2):
        stage.register(peer, min_peers=2)
    asked: list[int] = []
    for peer in (first, last):
        effects = tried(stage, peer, "" if peer == reached else "connection refused")
        assert met(effects) == []
        asked += [to for to, _ in told(effects, msg.DialNewcomers)]
    assert asked == ([1] if reached == 2 else []), "an elder that nobody can dial dials"
    assert met(stage.wait(5, 1, 2)) == []


def test_newcomers_of_two_groups_do_not_meet() -> None:
    stage = MasterStage().begin(tests_addresses=True, relays=True)
    for peer in (1, 2):
        stage.register(peer, min_peers=2, group=peer)
        tried(stage, peer)
        stage.hear(peer, down(3 - peer))
    assert met(stage.wait(5, 1, 2)) == []


def test_no_undialable_peer_is_named_as_a_relay() -> None:
    stage = MasterStage().begin(tests_addresses=True)
    for peer, reason in ((1, ""), (2, "refused"), (3, "refused"), (4, "refused")):
        stage.register(peer, min_peers=4)
        assert met(tried(stage, peer, reason)) == []
        stage.hear(peer, msg.LinkReport(PeerId(1), True, ""))
    assert met(stage.wait(0.25, 1, 2, 3, 4)) == [*meet(2, 3, where(1)), *meet(2, 4, where(1))]
    for newcomer in (3, 4):
        stage.hear(newcomer, msg.LinkReport(PeerId(2), True, "", PeerId(1)))
    assert met(stage.wait(0.25, 1, 2, 3, 4)) == meet(3, 4, where(1)), "future neighbours, too"


def unlinked(stage: MasterStage) -> None:
    """Of a run of two members, a newcomer that lacks a link to the first one."""
    stage.new(2)
    stage.register(3)
    stage.link(3, 2)
    stage.hear(3, down(1))


def removed_after(stage: MasterStage) -> float:
    """After how many seconds the newcomer is removed."""
    began_ns = stage.now_ns
    while not (found := removals(stage.wait(0.25, 1, 2, 3))):
        assert stage.now_ns - began_ns < 100 * SECOND
    ((peer, why),) = found
    assert peer == 3
    assert why.startswith(RemovalCause.UNREACHABLE.name)
    return (stage.now_ns - began_ns) / SECOND


def test_a_newcomer_has_the_whole_time_for_its_link_from_its_first_meeting_on() -> None:
    timing = Timing()
    alone, meeting = MasterStage(), MasterStage()
    unlinked(alone)
    assert removed_after(alone) == timing.link_s
    unlinked(meeting)
    assert met(meeting.wait(timing.link_s - 0.25, 1, 2, 3)) == []
    meeting.hear(1, down(3))
    assert met(meeting.wait(0.25, 1, 2, 3)) == meet(1, 3, where(2)), "its time is short"
    assert removed_after(meeting) == timing.link_s, "though it is told of meetings meanwhile"


# -- operations that need a link -----------------------------------------------------------------


def stuck(members: int, op: Descriptor = SUM, other: int = 2) -> MasterStage:
    """The first operation of all members has begun when 1 and another one lose their link."""
    stage = MasterStage().new(members)
    for peer in range(1, members + 1):
        stage.hear(peer, msg.OperationRequest(FIRST, op))
    stage.hear(1, down(other))
    stage.hear(other, down(1))
    return stage


def lost_for_their_link(effects: list[MasterEffect]) -> list[int]:
    """The peers that were removed because 1 and 2 have no link."""
    why = "LINK_BROKEN: peers 1, 2 have no link (no answer in time), and no order of the ring "
    return [peer for peer, reason in removals(effects) if reason.startswith(why)]


def test_a_member_is_removed_for_a_broken_link_only_after_two_meetings() -> None:
    stage = stuck(3)
    effects = stage.wait(2.75, 1, 2, 3)
    assert met(effects) == 2 * meet(1, 2, where(3))
    assert removals(effects) == []
    effects = stage.wait(0.25, 1, 2, 3)
    assert met(effects) == meet(1, 2, where(3)), "the third one is due"
    assert lost_for_their_link(effects) == [2]


def test_a_member_with_a_link_that_a_meeting_gave_stays() -> None:
    stage = stuck(3)
    assert removals(stage.wait(2.75, 1, 2, 3)) == []
    for end, there in ((1, 2), (2, 1)):
        stage.hear(end, msg.LinkReport(PeerId(there), True, "", PeerId(3)))
    assert removals(stage.wait(20, 1, 2, 3)) == []


def test_without_a_relay_a_member_is_removed_for_a_broken_link_as_soon_as_that_is_certain() -> None:
    stage = stuck(2)
    assert removals(stage.wait(Timing().resume_s - 0.25, 1, 2)) == []
    assert lost_for_their_link(stage.wait(0.25, 1, 2)) == [2]


def test_the_ring_keeps_its_order_while_a_meeting_may_succeed() -> None:
    stage = stuck(4)
    assert told(stage.wait(2.75, 1, 2, 3, 4), msg.RosterChanged) == []
    effects = stage.wait(0.25, 1, 2, 3, 4)
    rings = {told.roster.ring for _, told in told(effects, msg.RosterChanged)}
    assert rings == {(1, 3, 2, 4)}
    assert removals(effects) == []


def test_in_a_large_group_members_meet_once_their_operation_needs_the_link() -> None:
    everybody = range(1, 10)
    mesh = replace(SUM, algorithm=Algorithm.MESH, forced=True)
    idle = MasterStage().new(9)
    idle.hear(1, down(3))
    idle.hear(3, down(1))
    assert met(idle.wait(20, *everybody)) == [], "they are no neighbours"
    stage = stuck(9, mesh, other=3)
    assert met(stage.wait(2, *everybody)) == []
    assert met(stage.wait(1, *everybody)) == meet(1, 3, where(2))
    for end, there in ((1, 3), (3, 1)):
        stage.hear(end, msg.LinkReport(PeerId(there), True, "", PeerId(2)))
    effects = stage.wait(20, *everybody)
    assert (met(effects), told(effects, msg.OperationEnded)) == ([], [])
