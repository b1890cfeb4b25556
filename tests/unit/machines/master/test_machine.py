"""What scenarios of a master can't show: see ``tests/scenario/master`` for all else."""

from __future__ import annotations

import pytest

from pccl.machines.master.events import CloseConnection, MasterEffect, MasterTick
from pccl.protocol import messages as msg
from pccl.protocol.types import PeerId, RoundId, RoundKind
from tests.support.master_stage import FIRST, SECOND, SUM, MasterStage, removals, sent
from tests.support.scenarios import op, roster, subset

UPDATE, PENDING = RoundKind.UPDATE_TOPOLOGY, RoundKind.PEERS_PENDING
TWO = PeerId(2)


def new(members: int = 0, **options: float) -> MasterStage:
    stage = MasterStage()
    stage.new(members, **options)
    return stage


def test_newcomers_are_told_what_they_wait_for() -> None:
    master = new(1)
    master.register(2, min_peers=4)
    master.register(3)
    told: list[tuple[int, int, str]] = []
    for _ in range(4 * 21):
        master.now_ns += SECOND // 4
        for peer in (1, 2, 3):
            master.hear(peer, msg.LinkReport(PeerId(1), True, "") if peer > 1 else msg.Heartbeat())
        for connection, message in sent(master.do(MasterTick())):
            if isinstance(message, msg.AdmissionWaits):
                told.append((connection, message.waited_s, message.whom))
    company = "4 members; with this one there are 3 (start 1 more, unless the run is over)"
    assert told == [
        *[(2, 5, company), (3, 5, "the members' update_topology()")],
        *[(2, 10, company), (3, 10, "the members' update_topology()")],
        *[(2, 20, company), (3, 20, "the members' update_topology()")],
    ]


def test_a_member_can_open_so_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.ballots.open_ballots.OPERATIONS_OPEN_MAX", 2)
    master = new(2)
    for tag in (0, 1):
        assert master.hear(1, msg.OperationRequest(op(view=2, tag=tag), SUM)) == []
    master.start(1, 2, what=op(view=2, tag=0))  # one that is open already is nobody's surplus
    assert master.hear(2, msg.OperationRequest(op(view=2, tag=2), SUM)) == []  # nor is another's
    master.hear(2, msg.Withdraw(op(view=2, tag=1), "x"))
    assert master.hear(1, msg.OperationRequest(op(view=2, tag=3), SUM)) == []
    assert master.hear(1, msg.OperationRequest(op(view=2, tag=4), SUM)) == [
        CloseConnection(1, "over 2 operations are open")
    ]


def test_many_tags_are_followed_by_a_new_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.ballots.open_ballots.TAGS_PER_VIEW_MAX", 2)
    master = new(2)

    def reduce(view: int, *tags: int) -> None:
        for tag in tags:
            what = op(view=view, tag=tag)
            master.start(1, 2, what=what)
            for peer in (1, 2):
                master.hear(peer, msg.OperationDone(what, b"same"))

    def update(n: int) -> list[tuple[int, msg.MasterMessage]]:
        master.hear(1, msg.RoundRequest(RoundId(UPDATE, n)))
        return sent(master.hear(2, msg.RoundRequest(RoundId(UPDATE, n))))

    reduce(2, 0, 1)
    assert update(1) == [(p, msg.RoundClosed(RoundId(UPDATE, 1), 2, False)) for p in (1, 2)]
    reduce(2, 7)
    assert update(2) == [
        *((p, msg.RosterChanged(roster(3, 3, 1, 2, open_views=(2, 3)))) for p in (1, 2)),
        *((p, msg.RoundClosed(RoundId(UPDATE, 2), 3, False)) for p in (1, 2)),
    ]
    reduce(3, 0, 1, 2)  # numbers begin anew
    assert update(3)[0] == (1, msg.RosterChanged(roster(4, 4, 1, 2, open_views=(3, 4))))


def test_who_acknowledges_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.ballots.finals.OWED_MAX", 2)
    master = new(2)
    for n in range(3):
        for peer in (1, 2):
            master.hear(peer, msg.RoundRequest(RoundId(PENDING, n)))
        master.hear(2, msg.Heartbeat((), (), (RoundId(PENDING, n), RoundId(UPDATE, 0))))
    assert master.wait(0.25, 1, 2) == [
        CloseConnection(1, "the peer has too many unacknowledged results")
    ]


def test_no_progress_is_charged_to_the_furthest_upstream() -> None:
    master = new(3)
    what = FIRST
    master.start(1, 2, 3)
    stuck = [msg.Progress(what, 4, 4, 4), msg.Progress(what, 2, 2, 2), msg.Progress(what, 2, 2, 2)]

    def stand_still(seconds: float) -> list[MasterEffect]:
        effects: list[MasterEffect] = []
        for _ in range(int(seconds * 4)):
            for peer, progress in enumerate(stuck, start=1):
                effects += master.hear(peer, msg.Heartbeat((progress,)))
            effects += master.wait(0.25)
        return effects

    assert stand_still(29.75) == []
    effects = stand_still(0.5)
    evidence = "peer 2 has 2 of the 4 segments that peer 1 could send it"
    reason = f"t1/g0/v2/tag5#0 made no progress for 30.0 s, and {evidence}"
    assert removals(effects) == [(1, f"NO_PROGRESS: {reason}")]
    assert (2, msg.RosterChanged(roster(3, 3, 2, 3))) in sent(effects)


def test_of_two_with_a_stuck_link_the_one_with_more_broken_links_pays() -> None:
    master = new(4)
    what = FIRST
    master.start(1, 2, 3, 4)
    master.hear(4, msg.LinkReport(TWO, False, "no route"))
    stuck = [(4, 4), (2, 2), (2, 2), (4, 4)]
    effects: list[MasterEffect] = []
    for _ in range(121):
        for peer, (received, ready) in enumerate(stuck, start=1):
            progress = msg.Progress(what, received, ready, received)
            effects += master.hear(peer, msg.Heartbeat((progress,)))
        effects += master.wait(0.25)
    assert [peer for peer, _ in removals(effects)] == [2]


def test_a_neighbour_does_not_pay_for_a_silent_member() -> None:
    """Member 2 may have patience for longer than the operation has; its own deadline ends it."""
    master = new(3, deadline_s=60.0)
    what = FIRST
    master.start(1, 2, 3)
    told = [msg.Progress(what, 4, 6, 4), msg.Progress(what, 2, 4, 2), msg.Progress(what, 2, 2, 2)]
    for peer, progress in enumerate(told, start=1):
        master.hear(peer, msg.Heartbeat((progress,)))
    effects: list[MasterEffect] = []
    for _ in range(4 * 59):
        for peer in (1, 3):
            effects += master.hear(peer, msg.Heartbeat((told[peer - 1],)))
        effects += master.wait(0.25)
    assert removals(effects) == []
    assert removals(master.wait(2, 1, 3)) == [(2, "SILENT: silent for 60.2 s while awaited")]


def test_members_that_share_a_tag_by_chance_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of their hashes may be equal."""

    def one_tag_for_all(*_: object) -> int:
        return 1 << 63

    monkeypatch.setattr("pccl.protocol.operation.subset_tag", one_tag_for_all)
    master = new(5)
    asked = op(tag=1 << 63, view=2)
    first = msg.OperationRequest(asked, SUM, among=subset(1, 2))
    assert master.hear(1, first) == []
    for peer, others in ((3, subset(3, 4)), (2, subset(2, 5))):
        (refused,) = master.hear(peer, msg.OperationRequest(asked, SUM, among=others))
        assert isinstance(refused, CloseConnection)
        assert refused.reason == f"{asked} is of tag 5 of peers 1, 2, not {others}"
    assert [str(ballot.among) for ballot in master.machine.ballots.open.values()] == [
        "5 of peers 1, 2"
    ]
