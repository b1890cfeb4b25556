"""Long waits in words: where the missing members are, what they do, and how far behind they are."""

from __future__ import annotations

import pytest

from pccl.machines.master.events import MasterTick
from pccl.protocol import messages as msg
from pccl.protocol.types import RoundId, RoundKind
from tests.support.master_stage import MasterStage, told
from tests.support.scenarios import op

PENDING = RoundId(RoundKind.PEERS_PENDING, 0)


def beat(master: MasterStage, peer: int, step: int) -> None:
    master.hear(peer, msg.Heartbeat(step=step))


def waits(master: MasterStage, seconds: float) -> list[tuple[int, int, str]]:
    """What the members are told while so much time passes: connection, seconds, words."""
    effects = master.wait(seconds, *master.machine.connections.callers)
    rounds = [(where, one.waited_s, one.whom) for where, one in told(effects, msg.RoundWaits)]
    return rounds + [
        (where, one.waited_s, one.whom) for where, one in told(effects, msg.OperationWaits)
    ]


@pytest.fixture(name="master")
def make_master() -> MasterStage:
    """Three members, and a round that the first one has asked for."""
    master = MasterStage().new(3)
    master.hear(1, msg.RoundRequest(PENDING))
    return master


def test_members_that_make_no_call(master: MasterStage) -> None:
    first = "peer 1 at 10.0.0.1"
    assert first not in (found := waits(master, 5.25))[0][2]
    silent = "peer 3 at 10.0.0.3 (in no call)"
    assert found == [(1, 5, f"peer 2 at 10.0.0.2 (in no call), {silent}")]


def test_the_last_call_of_a_member_and_when(master: MasterStage) -> None:
    master.start(2, what=op(view=2))
    master.start(3, what=op(view=2))
    master.start(1, what=op(view=2))
    for peer in (1, 2, 3):
        master.hear(peer, msg.OperationDone(op(view=2), b"digest"))
    ((where, waited_s, whom),) = waits(master, 5.25)
    assert (where, waited_s) == (1, 5)
    last = "in no call; its last was tag 5 (SUM of 8 x float32), 5.2 s ago"
    assert whom == f"peer 2 at 10.0.0.2 ({last}), peer 3 at 10.0.0.3 ({last})"


def test_a_member_in_another_call_is_named_with_that(master: MasterStage) -> None:
    master.start(2, what=op(view=2))
    found = [whom for where, _, whom in waits(master, 5.25) if where == 1]
    assert found == [
        "peer 2 at 10.0.0.2 (in tag 5 (SUM of 8 x float32)), peer 3 at 10.0.0.3 (in no call)"
    ]


@pytest.mark.parametrize(
    ("steps", "second", "third"),
    [
        ((10, 7, 10), "; at step 7, 3 behind", "; at step 10"),
        ((10, 12, 0), "; at step 12", ""),
        ((0, 4, 0), "; at step 4", ""),
    ],
)
def test_how_far_behind_members_are_that_report_steps(
    master: MasterStage, steps: tuple[int, ...], second: str, third: str
) -> None:
    for peer, step in enumerate(steps, 1):
        beat(master, peer, step)
    found: list[str] = []
    for _ in range(21):  # heartbeats in between would say step 0
        master.sleep(0.25)
        effects = master.do(MasterTick())
        found += [one.whom for _, one in told(effects, msg.RoundWaits)]
    named = f"peer 2 at 10.0.0.2 (in no call{second}), peer 3 at 10.0.0.3 (in no call{third})"
    assert found == [named]


def test_a_member_that_is_gone_is_not_named(master: MasterStage) -> None:
    master.hear(2, msg.Goodbye())
    assert waits(master, 5.25) == [(1, 5, "peer 3 at 10.0.0.3 (in no call)")]


def test_waits_of_a_collective(master: MasterStage) -> None:
    master.hear(2, msg.RoundRequest(PENDING))
    master.hear(3, msg.RoundRequest(PENDING))
    master.start(1, 2, what=op(view=2))
    last = "its last was are_peers_pending, 5.2 s ago"
    whom = f"peer 3 at 10.0.0.3 (in no call; {last})"
    assert waits(master, 5.25) == [(1, 5, whom), (2, 5, whom)]


def test_a_peer_that_leaves_soon_lets_the_missing_members_be_notified() -> None:
    master = MasterStage().new(3)
    assert told(master.hear(1, msg.RoundRequest(PENDING)), msg.RoundAwaits) == []
    master.hear(2, msg.RoundRequest(PENDING))
    again = master.hear(1, msg.RoundRequest(PENDING, leaves=True))
    assert told(again, msg.RoundAwaits) == [(3, msg.RoundAwaits(PENDING))]
    repeated = master.hear(1, msg.RoundRequest(PENDING, leaves=True))
    assert told(repeated, msg.RoundAwaits) == []
    last = master.hear(3, msg.RoundRequest(PENDING, leaves=True))
    assert told(last, msg.RoundAwaits) == []
