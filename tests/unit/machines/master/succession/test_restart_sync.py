"""What a master knows of shared state that takes up a run from what returning members say."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from pccl.machines.master.events import (
    CloseConnection,
    ConnectionMessage,
    ConnectionOpened,
    MasterEffect,
    MasterTick,
    SendTo,
)
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.succession.origin import Origin
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import (
    NOTHING_EXPECTED,
    Expected,
    Lineage,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
)
from pccl.protocol.types import SYNC_TAG, AbortCause, Member, OperationId, PeerId, Roster

SECOND = 1_000_000_000
RUN = b"the run of these"
VERSION, VIEW = 7, 4
OPERATION = OperationId(1, 0, VIEW, SYNC_TAG, 6)
OLD = Lineage(RUN, OperationId(1, 0, VIEW, SYNC_TAG, 5))
OLDER = Lineage(RUN, OperationId(1, 0, VIEW - 1, SYNC_TAG, 99))
KNOWN = Expected(3, OLD)


def offer(content: bytes = b"x", **changes: Any) -> Offer:
    values: dict[str, Any] = {
        "purpose": SyncPurpose.SYNC,
        "strategy": SharedStateSyncStrategy.ENFORCE_POPULAR,
        "resume": ResumePolicy.NEVER,
        "revision": 3,
        "lineage": OLD,
        "stale": False,
        "unchanged": False,
        "layout": b"layout",
        "content": content,
        "extra": b"extra",
    }
    return Offer(**values | changes)


def roster() -> Roster:
    members = tuple(Member(PeerId(n), f"10.0.0.{n}", 4000 + n) for n in (1, 2, 3))
    return Roster(VERSION, 0, VIEW, members, (VIEW,), 3, 1, 3, 1)


class Master:
    """A machine that was just started. Peer n speaks on connection n."""

    def __init__(self) -> None:
        numbers = count(1)
        self.machine = MasterMachine(
            Timing(), RUN, 1, lambda size: bytes([next(numbers)] * size), 0,
            Origin.RESTARTED, b"master B",
        )  # fmt: skip
        self.now_ns = 0

    def hear(self, peer: int, *messages: msg.Message) -> list[MasterEffect]:
        effects: list[MasterEffect] = []
        for message in messages:
            effects += self.machine.handle(ConnectionMessage(peer, message), self.now_ns)
            self.machine.check()
        return effects

    def come(
        self, peer: int, expected: Expected, *more: msg.Message, group: int = 0
    ) -> list[MasterEffect]:
        """A peer returns with a report."""
        self.machine.handle(ConnectionOpened(peer, f"10.0.0.{peer}"), self.now_ns)
        token = bytes([100 + peer] * 16)
        header = msg.Return(
            PeerId(peer), token, RUN, 1, msg.Register(group, "", 4000 + peer), VERSION, (),
            b"master A", expected=expected,
        )  # fmt: skip
        known = msg.KnownRoster(roster())
        return self.hear(peer, header, known, *more, msg.Reported())

    def wait(self, seconds: int, *speaking: int) -> list[MasterEffect]:
        effects: list[MasterEffect] = []
        for _ in range(4 * seconds):
            self.now_ns += SECOND // 4
            for peer in speaking:
                effects += self.hear(peer, msg.Heartbeat())
            effects += self.machine.handle(MasterTick(), self.now_ns)
        return effects

    @property
    def expected(self) -> Expected:
        known = self.machine.ballots.expected
        return known.get(0, NOTHING_EXPECTED)


def told(effects: list[MasterEffect], kind: type[Any]) -> list[tuple[int, Any]]:
    return [
        (e.connection, e.message)
        for e in effects
        if isinstance(e, SendTo) and isinstance(e.message, kind)
    ]


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_the_latest_synchronization_that_anybody_knows_of_counts(order: tuple[int, ...]) -> None:
    """Not the highest revision: that may be of a lineage that was given up."""
    reports = {1: Expected(3000, OLDER), 2: KNOWN, 3: NOTHING_EXPECTED}
    master = Master()
    for peer in order:
        master.come(peer, reports[peer])
    assert not master.machine.recovering
    assert master.expected == KNOWN


def test_nobody_knows_of_any() -> None:
    master = Master()
    for peer in (1, 2, 3):
        master.come(peer, NOTHING_EXPECTED)
    assert master.expected == NOTHING_EXPECTED


def test_who_tells_of_another_groups_state_is_not_believed() -> None:
    master = Master()
    foreign = Expected(9, Lineage(RUN, OperationId(1, 5, VIEW, SYNC_TAG, 50)))
    effects = master.come(1, foreign)
    assert [e.connection for e in effects if isinstance(e, CloseConnection)] == [1]


@pytest.mark.parametrize(
    "operation",
    [
        OperationId(2, 0, VIEW, SYNC_TAG, 50),  # of a term that it does not follow
        OperationId(1, 0, 1 << 63, SYNC_TAG, 50),
        OperationId(1, 0, VIEW, SYNC_TAG, 1 << 63),
    ],
)
def test_who_tells_of_a_synchronization_that_cannot_have_been_is_not_believed(
    operation: OperationId,
) -> None:
    """Nobody's contents would count any more."""
    master = Master()
    effects = master.come(1, Expected(9, Lineage(RUN, operation)))
    assert [e.connection for e in effects if isinstance(e, CloseConnection)] == [1]


def test_one_that_was_under_way_goes_on() -> None:
    """One had received what was elected, and is told nothing new; the other one goes on."""
    master = Master()
    done = msg.OperationDone(OPERATION, b"x")
    master.come(1, KNOWN, msg.SyncRequest(OPERATION, offer()), done)
    master.come(2, KNOWN, msg.SyncRequest(OPERATION, offer(b"y")), done)
    effects = master.come(3, KNOWN, msg.SyncRequest(OPERATION, offer()))
    started = told(effects, msg.SyncStarted)
    assert {peer for peer, _ in started} == {1, 2, 3}
    assert {(m.elected.content, m.elected.behind) for _, m in started} == {(b"x", (PeerId(2),))}
    ends = told(master.hear(3, done), msg.OperationEnded)
    assert [(peer, m.abort) for peer, m in ends] == [(1, None), (2, None), (3, None)]
    assert master.expected == Expected(4, Lineage(RUN, OPERATION))


def test_all_were_done_when_the_master_died() -> None:
    master = Master()
    effects: list[MasterEffect] = []
    for peer in (1, 2, 3):
        request = msg.SyncRequest(OPERATION, offer())
        effects = master.come(peer, KNOWN, request, msg.OperationDone(OPERATION, b"x"))
    ends = told(effects, msg.OperationEnded)
    assert [(peer, m.abort) for peer, m in ends] == [(1, None), (2, None), (3, None)]
    assert master.expected == Expected(4, Lineage(RUN, OPERATION))


def test_an_outcome_that_one_member_knows_counts_for_all() -> None:
    """It has put in place what was committed; the others must not be told anything else."""
    master = Master()
    ended = msg.OperationEnded(OPERATION, None, "", (PeerId(1), PeerId(2), PeerId(3)), VERSION, 5)
    after = Expected(4, Lineage(RUN, OPERATION))
    master.come(1, after, msg.KnownOutcome(ended))
    effects: list[MasterEffect] = []
    for peer in (2, 3):
        request = msg.SyncRequest(OPERATION, offer())
        effects += master.come(peer, KNOWN, request, msg.OperationDone(OPERATION, b"x"))
    ends = told(effects, msg.OperationEnded)
    assert {(peer, m.abort) for peer, m in ends} >= {(2, None), (3, None)}
    assert master.expected == after


def test_one_that_a_member_is_lost_from_with_the_master_begins_again() -> None:
    """The others might elect something else without it than what one of them is done with."""
    master = Master()
    first = offer(revision=0, lineage=None)
    done = msg.OperationDone(OPERATION, b"x")
    master.come(1, NOTHING_EXPECTED, msg.SyncRequest(OPERATION, first), done)
    effects = master.come(2, NOTHING_EXPECTED, msg.SyncRequest(OPERATION, offer(b"y")))
    effects += master.wait(20, 1, 2)
    ends = told(effects, msg.OperationEnded)
    assert {(peer, m.abort) for peer, m in ends} == {
        (1, AbortCause.MEMBER_LOST),
        (2, AbortCause.MEMBER_LOST),
    }
    assert master.expected == NOTHING_EXPECTED
    assert not told(effects, msg.SyncStarted)


def test_a_master_that_was_told_nothing_of_it_lets_them_call_again() -> None:
    """Requests that come after the reports are as good."""
    master = Master()
    for peer in (1, 2, 3):
        master.come(peer, KNOWN)
    effects: list[MasterEffect] = []
    for peer in (1, 2, 3):
        effects += master.hear(peer, msg.SyncRequest(OPERATION, offer()))
    assert [peer for peer, _ in told(effects, msg.SyncStarted)] == [1, 2, 3]
