"""Whom peers dial once a peer has another address. ``test_peer_links`` covers what else they do."""

from __future__ import annotations

from dataclasses import replace

from pccl.machines.master.links.dial_plans import DialPlans
from pccl.protocol import messages as msg
from pccl.protocol.types import PeerId
from tests.support.meeting_runs import MeetingRun

AWAY = "198.51.100.7"


def move(run: MeetingRun, peer: int) -> None:
    one = run[PeerId(peer)]
    run.membership.move(one, replace(one.member, host=AWAY))


def told(plans: DialPlans) -> dict[int, list[tuple[int, str]]]:
    """Return, for each peer, the peers that a heartbeat tells it to dial, and their hosts."""
    found: dict[int, list[tuple[int, str]]] = {}
    for peer, message in plans.beat():
        assert isinstance(message, msg.DialNewcomers | msg.LinkPlan)
        named = message.elders if isinstance(message, msg.LinkPlan) else message.newcomers
        found.setdefault(peer.id, []).extend((one.peer, one.host) for one in named)
    return found


def test_an_elder_that_was_asked_is_told_the_new_address_and_no_other() -> None:
    run = MeetingRun(members=2)
    plans = DialPlans(run.membership, lambda _: True)
    run.register(3)
    assert plans.ask(PeerId(1), PeerId(3), proven=True)
    assert told(plans) == {}
    move(run, 3)
    plans.moves(run[PeerId(3)])
    assert told(plans) == {1: [(3, AWAY)]}
    assert told(plans) == {}, "once"


def test_younger_peers_are_told_the_new_address_of_an_elder_the_last_one_only() -> None:
    run = MeetingRun(members=3)
    plans = DialPlans(run.membership, lambda _: True)
    plans.comes(run[PeerId(2)])
    move(run, 2)
    plans.comes(run[PeerId(2)])
    assert told(plans) == {3: [(2, AWAY)]}


def test_a_peer_that_moved_and_left_is_dialled_no_more() -> None:
    run = MeetingRun(members=2)
    plans = DialPlans(run.membership, lambda _: True)
    run.register(3)
    plans.ask(PeerId(1), PeerId(3), proven=True)
    told(plans)
    gone = run[PeerId(3)]
    plans.moves(gone)
    plans.remove([gone])
    del run.membership.peers[PeerId(3)]
    assert told(plans) == {1: []}
