"""Plans that a master renews in ``update_topology`` rounds, without another call."""

from __future__ import annotations

from itertools import permutations
from random import Random
from typing import Any

import pytest

from pccl.machines.master import membership
from pccl.machines.master.events import MasterEffect
from pccl.machines.master.links.plan_renewal import PlanRenewal
from pccl.protocol import messages as msg
from pccl.protocol.limits import TERM_GAP
from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import AlgorithmTable, PeerId, Quorum, RoundId, RoundKind
from pccl.protocol.vocabulary.mesh_plan import SHARE_UNITS
from pccl.topology.planner import plan_view
from tests.support.master_stage import SECOND, MasterStage, sent, told
from tests.support.scenarios import roster

UPDATE = RoundKind.UPDATE_TOPOLOGY
MB = 10**6
SLOW_PAIR = {(1, 2): MB, (1, 3): 10 * MB, (2, 3): 10 * MB}
"""A port carries 10 / 1.08 = 9.26 MB/s, so member 3 owns s with 1 - s = (1 + s) / 9.26."""
SHARE = 0.805
OTHER_SLOW_PAIR = {(1, 2): 10 * MB, (1, 3): MB, (2, 3): 10 * MB}


class Group:
    """A run of three members that makes rounds of ``update_topology``."""

    def __init__(self, master: MasterStage | None = None) -> None:
        self.master = master or MasterStage().new(3)
        self.rounds = 1 if master is None else 0

    @property
    def view(self) -> int:
        return self.master.machine.membership.roster(0).view

    @property
    def plan(self) -> AlgorithmTable:
        return self.master.machine.membership.roster(0).algorithms

    def measure(self, speeds: dict[tuple[int, int], int], noise: Random | None = None) -> None:
        """All members report the speeds of their links."""
        for one, other in permutations((1, 2, 3), 2):
            speed = speeds[min(one, other), max(one, other)]
            exact = round(speed * (noise.uniform(0.9, 1.1) if noise else 1))
            measured = MeasuredLink(PeerId(other), LinkMeasure(30 * MB, exact))
            self.master.hear(one, msg.LinksMeasured((measured,)))

    def update(self, after_s: float = 0) -> list[MasterEffect]:
        """Make a round."""
        self.master.sleep(after_s)
        self.rounds += 1
        return self.master.round(UPDATE, self.rounds - 1, 1, 2, 3)


def test_an_update_adopts_the_plan_of_what_was_measured() -> None:
    group = Group()
    group.update()
    assert (group.view, group.plan.mesh.shares) == (2, ())
    group.measure(SLOW_PAIR)
    answer = [message for _, message in sent(group.update())]
    assert group.view == 3
    assert group.plan.mesh.shares[2] / SHARE_UNITS == pytest.approx(SHARE, abs=0.02)
    now = group.master.machine.membership.roster(0)
    assert now.open_views == (2, 3), "operations of the earlier view may be undecided"
    assert (
        answer
        == [msg.RosterChanged(now)] * 3
        + [msg.RoundClosed(RoundId(UPDATE, 2), now.version, False)] * 3
    )


def test_the_next_plan_comes_an_interval_later() -> None:
    group = Group()
    group.measure(SLOW_PAIR)
    group.update()
    group.measure(OTHER_SLOW_PAIR)
    group.update(30)
    group.update(29.9)
    assert group.view == 3
    group.update(0.1)
    assert group.view == 4
    assert group.plan.mesh.shares[1] / SHARE_UNITS == pytest.approx(SHARE, abs=0.02)


def test_noise_of_a_tenth_opens_no_view() -> None:
    group, noise = Group(), Random(5)
    group.measure(SLOW_PAIR)
    group.update()
    plan = group.plan
    assert plan.mesh.shares
    for _ in range(50):
        group.measure(SLOW_PAIR, noise)
        group.update(60)
    assert group.plan is plan


def test_without_news_nothing_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    group.measure(SLOW_PAIR)
    group.update()
    plans: list[object] = []

    def counted(*args: Any) -> AlgorithmTable:
        plans.append(args)
        return plan_view(*args)

    monkeypatch.setattr(membership, "plan_view", counted)
    for _ in range(10):
        group.measure(SLOW_PAIR)  # the same again
        group.update(60)
    assert plans == []
    group.measure({**SLOW_PAIR, (1, 2): MB + 1})
    group.update(60)
    assert len(plans) == 1


def test_newcomers_bring_a_plan_of_their_own() -> None:
    group = Group()
    group.measure(SLOW_PAIR)
    group.master.register(4)
    group.master.link(4)
    answer = group.update()
    assert [message.roster.view for _, message in told(answer, msg.Admitted)] == [3]
    assert len(group.plan.mesh.shares) == 4, "links of a newcomer count as slow"


def test_a_round_with_a_late_member_renews_nothing() -> None:
    """The late member may be about to begin an operation in the present view."""
    group = Group()
    group.measure(SLOW_PAIR)
    asked = msg.RoundRequest(RoundId(UPDATE, group.rounds), Quorum(2, grace_ms=1000))
    for peer in (1, 2):
        group.master.hear(peer, asked)
    assert len(told(group.master.wait(2, 1, 2, 3), msg.RoundClosed)) == 3
    assert (group.view, group.plan.mesh.shares) == (2, ())
    group.rounds += 1
    group.update()
    assert group.view == 3


def test_a_restarted_master_plans_by_what_members_report_again() -> None:
    known = roster(7, 3, 1, 2, 3)
    group = Group(MasterStage().restarted())
    for peer in (1, 2, 3):
        group.master.come(peer, known=(known,))
    group.update()
    assert group.view == 3
    group.measure(SLOW_PAIR)
    group.update()
    assert group.view == 3 + TERM_GAP + 1
    assert group.plan.mesh.shares


def test_groups_take_turns() -> None:
    renewal = PlanRenewal()
    due = [renewal.due({9, 4}, {9, 4}, second * SECOND) for second in range(131)]
    assert {at: group for at, group in enumerate(due) if group is not None} == {
        0: 4, 5: 9, 60: 4, 65: 9, 120: 4, 125: 9,
    }  # fmt: skip
    assert renewal.due({4, 9, 7}, {4, 9, 7}, 131 * SECOND) == 7, "it had no turn yet"


def test_groups_that_have_ended_are_forgotten() -> None:
    renewal = PlanRenewal()
    assert renewal.due({4}, {4, 5}, 0) == 4
    assert renewal.due({5}, {5}, 5 * SECOND) == 5
    assert renewal.due({4}, {4, 5}, 10 * SECOND) == 4, "it has other members now"
