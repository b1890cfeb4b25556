"""Scenarios of one master, with the peers' messages written out."""

from __future__ import annotations

from itertools import count

import pytest

from pccl.machines.master import membership
from pccl.machines.master.events import (
    Announce,
    CloseConnection,
    ConnectionClosed,
    ConnectionMessage,
    ConnectionOpened,
    ConnectionPaused,
    MasterEffect,
    MasterEvent,
    MasterTick,
    SendTo,
)
from pccl.machines.master.machine import MasterMachine
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import (
    AbortCause,
    AlgorithmTable,
    Descriptor,
    Member,
    OperationId,
    PeerId,
    ReduceOp,
    RemovalCause,
    Roster,
    RoundId,
    RoundKind,
)

SECOND = 1_000_000_000
SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 8)
AVG = Descriptor(DataType.FLOAT, ReduceOp.AVG, 8)
UPDATE, PENDING = RoundKind.UPDATE_TOPOLOGY, RoundKind.PEERS_PENDING
OPTIMIZE = RoundKind.OPTIMIZE_TOPOLOGY
ONE, TWO, THREE = PeerId(1), PeerId(2), PeerId(3)


def where(peer: int) -> Member:
    return Member(PeerId(peer), f"10.0.0.{peer}", 4000 + peer)


def roster(version: int, view: int, *peers: int, views: tuple[int, ...] | None = None) -> Roster:
    members = tuple(where(peer) for peer in peers)
    size = len(peers)
    return Roster(version, 0, view, members, views or (view,), size, 1, size)


def operation(n: int = 0, *, view: int = 2, tag: int = 5) -> OperationId:
    return OperationId(1, 0, view, tag, n)


def token(peer: int) -> bytes:
    return bytes([peer] * 16)


def counts(update: int, pending: int = 0, optimize: int = 0) -> tuple[msg.RoundCount, ...]:
    return (
        msg.RoundCount(UPDATE, update),
        msg.RoundCount(PENDING, pending),
        msg.RoundCount(OPTIMIZE, optimize),
    )


@pytest.fixture(autouse=True)
def _rings_only(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """Which algorithm is the quickest is not the subject here."""

    def ring(*known: object) -> AlgorithmTable:
        return AlgorithmTable()

    monkeypatch.setattr(membership, "choose_algorithms", ring)


class Master:
    """A machine and its clock. Peer n speaks on connection n, unless it is said otherwise."""

    def __init__(self, members: int = 0, timing: Timing | None = None) -> None:
        numbers = count(1)
        self.machine = MasterMachine(
            timing or Timing(), b"run", 1, lambda size: bytes([next(numbers)] * size), 0
        )
        self.now_ns = 0
        for peer in range(1, members + 1):
            self.register(peer)
        if members > 1:
            self.link_all(range(1, members + 1))
            self.hear(1, msg.RoundRequest(RoundId(UPDATE, 0)))
            self.hear(1, msg.Heartbeat((), (), (RoundId(UPDATE, 0),)))

    def do(self, event: MasterEvent) -> list[MasterEffect]:
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return effects

    def hear(self, connection: int, message: msg.Message) -> list[MasterEffect]:
        return self.do(ConnectionMessage(connection, message))

    def register(self, peer: int, min_peers: int = 1, group: int = 0) -> list[MasterEffect]:
        self.do(ConnectionOpened(peer, f"10.0.0.{peer}"))
        return self.hear(peer, msg.Register(group, "", 4000 + peer, min_peers))

    def resume(self, peer: int, connection: int, version: int) -> list[MasterEffect]:
        self.do(ConnectionOpened(connection, f"10.0.0.{peer}"))
        return self.hear(connection, msg.Resume(PeerId(peer), token(peer), version))

    def link_all(self, peers: range) -> None:
        for younger in peers:
            for elder in range(1, younger):
                self.hear(younger, msg.LinkReport(PeerId(elder), True, ""))

    def wait(self, seconds: float, speaking: tuple[int, ...] = ()) -> list[MasterEffect]:
        """Let time pass with punctual ticks; give all effects.

        Except for the master's heartbeats, and what newcomers are told about their waiting.
        """
        effects: list[MasterEffect] = []
        end_ns = self.now_ns + int(seconds * SECOND)
        while self.now_ns < end_ns:
            self.now_ns += SECOND // 4
            for connection in speaking:
                effects += self.hear(connection, msg.Heartbeat())
            effects += self.do(MasterTick())
        return [
            e for e in effects if not (isinstance(e, SendTo) and isinstance(e.message, BACKGROUND))
        ]

    def refused(self, cause: RemovalCause, reason: str) -> msg.Refused:
        """What a peer is told that is removed now."""
        now_ms = self.now_ns // 1_000_000
        return msg.Refused(cause, reason, now_ms, now_ms)

    def start(self, *peers: int, what: OperationId | None = None) -> OperationId:
        what = what or operation()
        effects: list[MasterEffect] = []
        for peer in peers:
            effects = self.hear(peer, msg.OperationRequest(what, SUM))
        assert effects == [SendTo(peer, msg.OperationStarted(what)) for peer in peers]
        return what


BACKGROUND = (msg.MasterHeartbeat, msg.AdmissionWaits)


def sent(effects: list[MasterEffect]) -> list[tuple[int, msg.MasterMessage]]:
    return [(e.connection, e.message) for e in effects if isinstance(e, SendTo)]


def admitted(effects: list[MasterEffect]) -> list[int]:
    return [e.peer for e in effects if isinstance(e, Announce) and e.what == "admitted"]


def removals(effects: list[MasterEffect]) -> list[tuple[int, str]]:
    return [(e.peer, e.text) for e in effects if isinstance(e, Announce) and e.what == "removed"]


# -- joining -----------------------------------------------------------------------------------


def test_the_first_peer_is_admitted_at_once() -> None:
    master = Master()
    assert master.do(ConnectionOpened(1, "10.0.0.1")) == []
    assert master.hear(1, msg.Register(0, "", 4001)) == [
        SendTo(1, msg.Registered(ONE, 1, b"run", token(1))),
        SendTo(1, msg.LinkPlan(())),
        Announce("registered", ONE, 0, "from 10.0.0.1:4001"),
        Announce("admitted", ONE, 0, "world size 1"),
        SendTo(1, msg.Admitted(roster(1, 1, 1), counts(0))),
    ]


def test_a_peer_may_name_its_own_host() -> None:
    master = Master(1)
    master.do(ConnectionOpened(2, "10.0.0.2"))
    effects = master.hear(2, msg.Register(0, "example.org", 9))
    assert Announce("registered", TWO, 0, "from example.org:9") in effects


def test_a_round_admits_who_is_linked() -> None:
    master = Master(1)
    assert master.register(2) == [
        SendTo(2, msg.Registered(TWO, 1, b"run", token(2))),
        SendTo(2, msg.LinkPlan((where(1),))),
        Announce("registered", TWO, 0, "from 10.0.0.2:4002"),
    ]
    assert master.hear(1, msg.RoundRequest(RoundId(PENDING, 0))) == [
        SendTo(1, msg.RoundClosed(RoundId(PENDING, 0), 1, False))
    ]
    assert master.hear(2, msg.LinkReport(ONE, True, "")) == []
    assert master.hear(1, msg.LinkReport(TWO, True, "")) == []
    assert master.hear(1, msg.RoundRequest(RoundId(PENDING, 1))) == [
        SendTo(1, msg.RoundClosed(RoundId(PENDING, 1), 1, True))
    ]
    both = roster(2, 2, 1, 2, views=(1, 2))
    assert master.hear(1, msg.RoundRequest(RoundId(UPDATE, 0))) == [
        SendTo(1, msg.RosterChanged(both)),
        Announce("admitted", TWO, 0, "world size 2"),
        SendTo(1, msg.RoundClosed(RoundId(UPDATE, 0), 2, True)),
        SendTo(2, msg.Admitted(both, counts(1, 2))),
    ]


def test_a_round_waits_for_all_members() -> None:
    master = Master(2)
    assert master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1))) == []
    assert master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1))) == []
    closed = msg.RoundClosed(RoundId(UPDATE, 1), 2, False)
    effects = master.hear(2, msg.RoundRequest(RoundId(UPDATE, 1)))
    assert effects == [SendTo(1, closed), SendTo(2, closed)]


def test_a_newcomer_that_cannot_be_linked_is_refused_and_members_carry_on() -> None:
    master = Master(2)
    master.register(3)
    master.hear(3, msg.LinkReport(ONE, True, ""))
    master.hear(3, msg.LinkReport(TWO, False, "connection refused"))
    master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1)))
    effects = master.hear(2, msg.RoundRequest(RoundId(UPDATE, 1)))
    assert effects[-1] == SendTo(2, msg.RoundClosed(RoundId(UPDATE, 1), 2, False))
    assert master.wait(9.75, speaking=(1, 2, 3)) == []
    reason = (
        "it could not be linked to peer 2, and no ring avoids the pair: peer 3 cannot dial peer 2 "
        "at 10.0.0.2:4002 (connection refused), and peer 2 cannot dial peer 3 at 10.0.0.3:4003 (no "
        "answer yet); one of the two must be reachable: check what it advertises, and open that "
        "port"
    )
    assert master.wait(0.25, speaking=(1, 2, 3)) == [
        Announce("removed", THREE, 0, f"UNREACHABLE: {reason}"),
        SendTo(3, master.refused(RemovalCause.UNREACHABLE, reason)),
        CloseConnection(3, reason),
    ]
    assert master.wait(1, speaking=(1, 2)) == [SendTo(2, msg.DialNewcomers(()))]
    master.start(1, 2)


def test_a_newcomer_that_reaches_nobody_costs_no_member_its_place() -> None:
    master = Master(2)
    master.register(3)
    master.hear(3, msg.LinkReport(TWO, False, "connection refused"))
    assert master.do(ConnectionClosed(2, "reset")) == []
    assert master.hear(3, msg.LinkReport(TWO, False, "timed out")) == []
    assert sent(master.resume(2, 12, 2))[0] == (12, msg.Resumed(1))


def test_the_last_member_leaves_and_the_next_newcomer_is_admitted() -> None:
    master = Master(1)
    master.register(2)
    master.hear(1, msg.RoundRequest(RoundId(PENDING, 0)))
    effects = master.hear(1, msg.Goodbye())
    assert (2, msg.Admitted(roster(3, 2, 2), counts(0, 1))) in sent(effects)
    assert master.hear(2, msg.RoundRequest(RoundId(PENDING, 1))) == [
        SendTo(2, msg.RoundClosed(RoundId(PENDING, 1), 3, False))
    ]


def test_a_newcomer_that_was_away_when_the_run_became_empty() -> None:
    master = Master(1)
    master.register(2)
    master.do(ConnectionClosed(2, "reset"))
    master.hear(1, msg.Goodbye())
    assert sent(master.resume(2, 12, 0))[-1] == (12, msg.Admitted(roster(3, 2, 2), counts(0)))


def test_a_round_of_optimizing_keeps_the_ring() -> None:
    master = Master(2)
    master.register(3)
    master.link_all(range(3, 4))
    assert master.hear(1, msg.RoundRequest(RoundId(OPTIMIZE, 0))) == []
    closed = msg.RoundClosed(RoundId(OPTIMIZE, 0), 2, True)
    effects = master.hear(2, msg.RoundRequest(RoundId(OPTIMIZE, 0)))
    assert effects == [SendTo(1, closed), SendTo(2, closed)]  # nobody is admitted, nothing moves
    master.start(1, 2)


def test_rounds_of_different_kinds_wait_side_by_side() -> None:
    master = Master(2)
    for kind, n in ((UPDATE, 1), (PENDING, 0), (OPTIMIZE, 0)):
        assert master.hear(1, msg.RoundRequest(RoundId(kind, n))) == []
    for kind, n in ((OPTIMIZE, 0), (UPDATE, 1), (PENDING, 0)):
        closed = msg.RoundClosed(RoundId(kind, n), 2, False)
        effects = master.hear(2, msg.RoundRequest(RoundId(kind, n)))
        assert effects == [SendTo(1, closed), SendTo(2, closed)]


def test_a_newcomer_learns_how_many_rounds_of_each_kind_there_were() -> None:
    master = Master(2)
    for connection in (1, 2):
        master.hear(connection, msg.RoundRequest(RoundId(OPTIMIZE, 0)))
    master.register(3)
    master.link_all(range(3, 4))
    master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1)))
    effects = master.hear(2, msg.RoundRequest(RoundId(UPDATE, 1)))
    joined = msg.Admitted(roster(3, 3, 1, 2, 3, views=(2, 3)), counts(2, 0, 1))
    assert sent(effects)[-1] == (3, joined)


# -- waiting for company -------------------------------------------------------------------------


def test_a_gang_enters_an_empty_run_together() -> None:
    master = Master()
    for peer in (1, 2, 3):
        assert admitted(master.register(peer, min_peers=3)) == []
    assert master.hear(2, msg.LinkReport(ONE, True, "")) == []
    assert master.hear(3, msg.LinkReport(ONE, True, "")) == []
    everybody = roster(1, 1, 1, 2, 3)
    assert master.hear(3, msg.LinkReport(TWO, True, "")) == [
        Announce("admitted", ONE, 0, "world size 3"),
        Announce("admitted", TWO, 0, "world size 3"),
        Announce("admitted", THREE, 0, "world size 3"),
        SendTo(1, msg.Admitted(everybody, counts(0))),
        SendTo(2, msg.Admitted(everybody, counts(0))),
        SendTo(3, msg.Admitted(everybody, counts(0))),
    ]


def test_groups_count_together() -> None:
    master = Master()
    master.register(1, min_peers=2, group=0)
    assert admitted(master.register(2, min_peers=2, group=1)) == [1, 2]


def test_newcomers_are_told_what_they_wait_for() -> None:
    master = Master(1)
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
    company = "4 members; with this one there are 3 (start 1 more, or the run is over)"
    assert told == [
        *[(2, 5, company), (3, 5, "the members' update_topology()")],
        *[(2, 10, company), (3, 10, "the members' update_topology()")],
        *[(2, 20, company), (3, 20, "the members' update_topology()")],
    ]


def test_who_wants_no_company_does_not_wait_for_those_who_do() -> None:
    master = Master()
    master.register(1, min_peers=3)
    master.register(2, min_peers=1)
    assert admitted(master.hear(2, msg.LinkReport(ONE, True, ""))) == []  # it was in at once
    assert [peer.id for peer in master.machine.membership.members()] == [2]


def test_a_newcomer_that_wants_more_company_is_not_there_yet() -> None:
    master = Master(1)
    master.register(2, min_peers=3)
    master.link_all(range(2, 3))
    assert master.hear(1, msg.RoundRequest(RoundId(PENDING, 0))) == [
        SendTo(1, msg.RoundClosed(RoundId(PENDING, 0), 1, False))
    ]
    assert master.hear(1, msg.RoundRequest(RoundId(UPDATE, 0))) == [
        SendTo(1, msg.RoundClosed(RoundId(UPDATE, 0), 1, False))
    ]
    master.register(3, min_peers=1)
    master.link_all(range(3, 4))
    assert admitted(master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1)))) == [2, 3]


def test_company_must_be_linked_to_count() -> None:
    master = Master(1)
    for newcomer in (2, 3):
        master.register(newcomer, min_peers=3)
        master.hear(newcomer, msg.LinkReport(ONE, True, ""))
    assert admitted(master.hear(1, msg.RoundRequest(RoundId(UPDATE, 0)))) == []
    master.hear(3, msg.LinkReport(TWO, True, ""))
    assert admitted(master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1)))) == [2, 3]


def test_company_must_be_connected_to_count() -> None:
    master = Master()
    master.register(1, min_peers=2)
    master.do(ConnectionClosed(1, "reset"))
    master.register(2, min_peers=2)
    assert admitted(master.hear(2, msg.LinkReport(ONE, True, ""))) == []
    assert admitted(master.resume(1, 11, 0)) == [1, 2]


def test_one_who_waits_for_company_keeps_nobody_else_out() -> None:
    """Peer 3 isn't linked to peer 2, and need not be: 2 does not come in."""
    master = Master()
    master.register(1, min_peers=2)
    master.register(2, min_peers=9)
    master.hear(2, msg.LinkReport(ONE, True, ""))
    master.register(3, min_peers=2)
    assert admitted(master.hear(3, msg.LinkReport(ONE, True, ""))) == [1, 3]


def test_a_gang_that_lost_one_waits_for_another() -> None:
    master = Master()
    master.register(1, min_peers=2)
    master.register(2, min_peers=2)
    assert admitted(master.hear(2, msg.Goodbye())) == []
    master.register(3, min_peers=2)
    assert admitted(master.hear(3, msg.LinkReport(ONE, True, ""))) == [1, 3]


def test_a_gang_that_cannot_be_linked_is_told() -> None:
    master = Master()
    for peer in (1, 2):
        master.register(peer, min_peers=2)
    master.hear(2, msg.LinkReport(ONE, False, "connection refused"))
    assert master.wait(9.75, speaking=(1, 2)) == []
    effects = master.wait(0.25, speaking=(1, 2))
    (removal,) = removals(effects)
    assert removal[0] == 2
    assert removal[1].startswith(
        "UNREACHABLE: it could not be linked to peer 1, and no ring avoids the pair: "
    )
    assert master.wait(60, speaking=(1,)) == [SendTo(1, msg.DialNewcomers(()))]  # it may wait on


def test_who_need_not_be_linked_is_not_refused_for_that() -> None:
    """Peer 3 isn't linked to peer 2, which wants more company than there is."""
    master = Master(1)
    master.register(2, min_peers=9)
    master.hear(2, msg.LinkReport(ONE, True, ""))
    master.register(3, min_peers=1)
    master.hear(3, msg.LinkReport(ONE, True, ""))
    master.hear(3, msg.LinkReport(TWO, False, "connection refused"))
    assert master.wait(60, speaking=(1, 2, 3)) == []
    assert admitted(master.hear(1, msg.RoundRequest(RoundId(UPDATE, 0)))) == [3]


def test_whoever_waits_for_company_is_patient() -> None:
    master = Master()
    master.register(1, min_peers=2)
    assert master.wait(300, speaking=(1,)) == []


# -- operations --------------------------------------------------------------------------------


def ended(
    what: OperationId, abort: AbortCause | None = None, reason: str = "",
    contributors: tuple[PeerId, ...] = (), version: int = 2,
) -> msg.OperationEnded:  # fmt: skip
    return msg.OperationEnded(what, abort, reason, contributors, version)


def test_who_is_admitted_in_a_tick_is_not_judged_by_what_it_lacked_before() -> None:
    """The last member's removal admits a newcomer that lacked a link to another newcomer."""
    master = Master(1)
    master.register(2, min_peers=5)
    master.hear(2, msg.LinkReport(ONE, True, ""))
    master.register(3)
    timing = Timing()
    master.wait(timing.link_s - timing.resume_s, speaking=(1, 2, 3))
    master.do(ConnectionClosed(1, "it is gone"))
    effects = master.wait(2 * timing.resume_s, speaking=(2, 3))
    assert [peer for peer, _ in removals(effects)] == [1]
    assert admitted(effects) == [3]


def test_all_or_nothing() -> None:
    master = Master(2)
    assert master.hear(2, msg.OperationRequest(operation(), SUM)) == []
    assert master.hear(1, msg.OperationRequest(operation(), SUM)) == [
        SendTo(1, msg.OperationStarted(operation())),
        SendTo(2, msg.OperationStarted(operation())),
    ]
    assert master.hear(1, msg.OperationDone(operation(), b"x")) == []
    committed = ended(operation(), contributors=(ONE, TWO))
    assert master.hear(2, msg.OperationDone(operation(), b"x")) == [
        SendTo(1, committed),
        SendTo(2, committed),
    ]


def test_descriptor_mismatch_names_who_asked_for_what() -> None:
    master = Master(2)
    master.hear(1, msg.OperationRequest(operation(), SUM))
    reason = "tag 5: peer 1 asked for SUM of 8 x float32; peer 2 asked for AVG of 8 x float32"
    aborted = ended(operation(), AbortCause.DESCRIPTOR_MISMATCH, reason)
    effects = master.hear(2, msg.OperationRequest(operation(), AVG))
    assert effects == [SendTo(1, aborted), SendTo(2, aborted)]


WEIGHTED = Descriptor(DataType.FLOAT, ReduceOp.AVG, 8, weighted=True)


def test_the_start_of_a_weighted_average_tells_all_weights_in_ring_order() -> None:
    master = Master(3)
    for peer, weight in ((3, 0.0), (1, 2.5)):
        assert master.hear(peer, msg.OperationRequest(operation(), WEIGHTED, weight=weight)) == []
    again = msg.OperationRequest(operation(), WEIGHTED, weight=9.0)
    assert master.hear(3, again) == []  # the first word counts
    started = msg.OperationStarted(operation(), weights=(2.5, 7.0, 0.0))
    effects = master.hear(2, msg.OperationRequest(operation(), WEIGHTED, weight=7.0))
    assert effects == [SendTo(peer, started) for peer in (1, 2, 3)]
    assert master.hear(2, again) == [SendTo(2, started)]  # it has lost its connection meanwhile
    assert (11, started) in sent(master.resume(1, 11, 2))


def test_weights_are_given_by_all_or_by_none() -> None:
    master = Master(2)
    master.hear(1, msg.OperationRequest(operation(), WEIGHTED, weight=1.0))
    reason = (
        "tag 5: peer 1 asked for weighted AVG of 8 x float32; peer 2 asked for AVG of 8 x float32"
    )
    aborted = ended(operation(), AbortCause.DESCRIPTOR_MISMATCH, reason)
    effects = master.hear(2, msg.OperationRequest(operation(), AVG))
    assert effects == [SendTo(1, aborted), SendTo(2, aborted)]


def test_contributors_that_are_lost_keep_their_weight() -> None:
    """Their values are in what the others can still finish."""
    master = Master(3)
    for peer in (1, 2, 3):
        master.hear(peer, msg.OperationRequest(operation(), WEIGHTED, weight=float(peer)))
    master.hear(3, msg.Goodbye())
    started = msg.OperationStarted(operation(), weights=(1.0, 2.0, 3.0))
    assert (11, started) in sent(master.resume(1, 11, 2))


def test_digest_mismatch_names_the_minority_and_the_next_number_may_follow() -> None:
    master = Master(3)
    # Master(3) admits both newcomers by one round: view 2 is {1, 2, 3}.
    what = master.start(1, 2, 3)
    master.hear(1, msg.OperationDone(what, b"x"))
    master.hear(2, msg.OperationDone(what, b"y"))
    reason = "results differ: peer 2 computed something else than the others"
    effects = master.hear(3, msg.OperationDone(what, b"x"))
    aborted = ended(what, AbortCause.DIGEST_MISMATCH, reason)
    assert effects == [SendTo(peer, aborted) for peer in (1, 2, 3)]
    master.start(1, 2, 3, what=operation(1))


def test_a_withdrawal_ends_it_for_all() -> None:
    master = Master(2)
    what = master.start(1, 2)
    aborted = ended(what, AbortCause.WITHDRAWN, "peer 2 withdrew: Ctrl-C")
    assert master.hear(2, msg.Withdraw(what, "Ctrl-C")) == [SendTo(1, aborted), SendTo(2, aborted)]


def test_a_withdrawal_whose_request_got_lost_still_uses_the_number_up() -> None:
    """Otherwise the one who left would ask for number 1 and the others wait in number 0."""
    master = Master(2)
    aborted = ended(operation(), AbortCause.WITHDRAWN, "peer 2 withdrew: Ctrl-C")
    effects = master.hear(2, msg.Withdraw(operation(), "Ctrl-C"))
    assert effects == [SendTo(1, aborted), SendTo(2, aborted)]
    assert master.hear(1, msg.OperationRequest(operation(), SUM)) == [SendTo(1, aborted)]
    master.start(1, 2, what=operation(1))


def test_a_death_commits_if_all_survivors_are_done() -> None:
    master = Master(3)
    what = master.start(1, 2, 3)
    master.hear(1, msg.OperationDone(what, b"x"))
    master.hear(2, msg.OperationDone(what, b"x"))
    left = roster(3, 3, 1, 2, views=(1, 3))
    committed = ended(what, contributors=(ONE, TWO, THREE), version=3)
    assert sent(master.hear(3, msg.Goodbye())) == [
        (1, msg.RosterChanged(left)),
        (2, msg.RosterChanged(left)),
        (1, committed),
        (2, committed),
    ]


def test_a_death_aborts_if_it_takes_a_contribution_along() -> None:
    master = Master(3)
    what = master.start(1, 2, 3)
    master.hear(2, msg.OperationDone(what, b"x"))
    asked = msg.HoldingsQuery(what, (THREE,))
    assert sent(master.hear(3, msg.Goodbye()))[2:] == [(1, asked)]  # it is behind peer 3
    reason = "peer 3 lost: goodbye, it left"
    aborted = ended(what, AbortCause.MEMBER_LOST, reason, version=3)
    answer = msg.Holdings(what, 1, complete=False)
    assert master.hear(1, answer) == [SendTo(1, aborted), SendTo(2, aborted)]


def test_a_death_that_takes_nothing_along_is_repaired() -> None:
    master = Master(3)
    what = master.start(1, 2, 3)
    master.hear(3, msg.Goodbye())
    assert master.hear(1, msg.Holdings(what, 1, complete=True)) == [
        SendTo(2, msg.Repair(what, (THREE,)))  # it is before peer 3
    ]
    assert master.hear(1, msg.Holdings(what, 1, complete=True)) == []
    assert master.hear(2, msg.OperationDone(what, b"x")) == []
    committed = ended(what, contributors=(ONE, TWO, THREE), version=3)
    done = msg.OperationDone(what, b"x")
    assert master.hear(1, done) == [SendTo(1, committed), SendTo(2, committed)]
    master.start(1, 2, what=operation(view=3))


def test_who_was_away_during_a_repair_is_told_again() -> None:
    master = Master(4)
    what = master.start(1, 2, 3, 4)
    master.hear(3, msg.Goodbye())
    left = roster(3, 3, 1, 2, 4, views=(1, 3))
    asked = msg.HoldingsQuery(what, (THREE,))
    again = [msg.RosterChanged(left), msg.OperationStarted(what)]
    assert [m for _, m in sent(master.resume(4, 14, 2))][2:] == [*again, asked]
    assert [m for _, m in sent(master.resume(2, 12, 2))][2:] == again
    repair = msg.Repair(what, (THREE,))
    assert master.hear(14, msg.Holdings(what, 1, complete=True)) == [SendTo(12, repair)]
    assert [m for _, m in sent(master.resume(4, 24, 3))][2:] == again[1:]
    assert [m for _, m in sent(master.resume(2, 22, 3))][2:] == [*again[1:], repair]
    # What they ask for once more is what is being repaired, though its view is closed.
    request = msg.OperationRequest(what, SUM)
    assert master.hear(22, request) == [SendTo(22, msg.OperationStarted(what))]


def test_a_withdrawal_ends_a_repair() -> None:
    master = Master(3)
    what = master.start(1, 2, 3)
    master.hear(3, msg.Goodbye())
    aborted = ended(what, AbortCause.WITHDRAWN, "peer 2 withdrew: Ctrl-C", version=3)
    effects = master.hear(2, msg.Withdraw(what, "Ctrl-C"))
    assert effects == [SendTo(1, aborted), SendTo(2, aborted)]
    assert master.hear(1, msg.Holdings(what, 1, complete=True)) == []


def test_who_does_not_answer_in_a_repair_is_lost_as_well() -> None:
    master = Master(3)
    what = master.start(1, 2, 3)
    master.hear(3, msg.Goodbye())
    effects = master.wait(10.25, speaking=(2,))
    left = roster(4, 4, 2, views=(4,))
    asked = msg.HoldingsQuery(what, (ONE, THREE))
    assert [m for connection, m in sent(effects) if connection == 2] == [
        msg.RosterChanged(left),
        asked,
    ]
    assert master.hear(1, msg.Holdings(what, 1, complete=True)) == []  # it is no member any more
    reason = "peer 1 lost: silent, silent for 10.2 s while awaited"
    aborted = ended(what, AbortCause.MEMBER_LOST, reason, version=4)
    assert master.hear(2, msg.Holdings(what, 1, complete=True)) == []  # to an older question
    assert master.hear(2, msg.Holdings(what, 2, complete=False)) == [SendTo(2, aborted)]


def test_a_request_that_crosses_a_death() -> None:
    master = Master(3)
    master.hear(3, msg.Goodbye())
    closed = "a member was lost before this call"
    assert master.hear(1, msg.OperationRequest(operation(), SUM)) == [
        SendTo(1, ended(operation(), AbortCause.VIEW_CLOSED, closed, version=3))
    ]
    master.start(1, 2, what=operation(view=3))


def test_an_older_view_stays_open_until_the_next_admission_but_one() -> None:
    master = Master(2)  # view 2 is {1, 2}
    effects: list[MasterEffect] = []
    for newcomer, n in ((3, 1), (4, 2)):
        if newcomer == 4:  # view 2 is busy and must survive the second admission too
            master.hear(1, msg.OperationRequest(operation(), SUM))
        master.register(newcomer)
        master.link_all(range(newcomer, newcomer + 1))
        for peer in range(1, newcomer):
            effects = master.hear(peer, msg.RoundRequest(RoundId(UPDATE, n)))
    admitted = sent(effects)[-1][1]
    assert isinstance(admitted, msg.Admitted)
    assert admitted.roster.open_views == (2, 3, 4)
    master.hear(2, msg.OperationRequest(operation(), SUM))
    master.hear(1, msg.OperationDone(operation(), b"x"))
    effects = master.hear(2, msg.OperationDone(operation(), b"x"))
    assert sent(effects)[0] == (1, ended(operation(), contributors=(ONE, TWO), version=4))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (msg.OperationRequest(operation(1), SUM), "t1/g0/v2/tag5#1 is not the next one"),
        (msg.OperationRequest(operation(view=3), SUM), "of a future view"),
        (msg.OperationRequest(operation(view=1), SUM), "not a member of view 1"),
        (msg.OperationRequest(OperationId(2, 0, 2, 5, 0), SUM), "is not of this run"),
        (msg.OperationRequest(OperationId(1, 1, 2, 5, 0), SUM), "is not of this run"),
        (msg.OperationDone(operation(), b"x"), "is not the next one"),
        (msg.OutcomeQuery(operation()), "is not the next one"),
        (msg.RoundRequest(RoundId(UPDATE, 2)), "is not open"),
        (msg.RoundRequest(RoundId(UPDATE, 0)), "was acknowledged"),
        (msg.Register(0, "", 9), "unexpected Register"),
        (msg.MasterHeartbeat(), "unexpected MasterHeartbeat"),
    ],
)
def test_what_the_protocol_forbids_costs_the_connection_and_nothing_else(
    message: msg.Message, reason: str
) -> None:
    master = Master(2)
    (effect,) = master.hear(2, message)
    assert isinstance(effect, CloseConnection)
    assert effect.connection == 2
    assert reason in effect.reason
    assert master.hear(2, msg.Goodbye()) == []  # what it still had on its way
    assert master.do(ConnectionClosed(2, "closed")) == []
    master.resume(2, 12, 2)
    master.hear(1, msg.OperationRequest(operation(), SUM))
    assert master.hear(12, msg.OperationRequest(operation(), SUM)) == [
        SendTo(1, msg.OperationStarted(operation())),
        SendTo(12, msg.OperationStarted(operation())),
    ]


def test_a_member_can_open_so_many_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.ballots.open_ballots.OPERATIONS_OPEN_MAX", 2)
    master = Master(2)
    for tag in (0, 1):
        assert master.hear(1, msg.OperationRequest(operation(tag=tag), SUM)) == []
    master.start(1, 2, what=operation(tag=0))  # one that is open already is nobody's surplus
    assert master.hear(2, msg.OperationRequest(operation(tag=2), SUM)) == []  # nor is another's
    master.hear(2, msg.Withdraw(operation(tag=1), "x"))
    assert master.hear(1, msg.OperationRequest(operation(tag=3), SUM)) == []
    assert master.hear(1, msg.OperationRequest(operation(tag=4), SUM)) == [
        CloseConnection(1, "too many operations are open")
    ]


def test_many_tags_are_followed_by_a_new_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.ballots.open_ballots.TAGS_PER_VIEW_MAX", 2)
    master = Master(2)

    def reduce(view: int, *tags: int) -> None:
        for tag in tags:
            what = operation(view=view, tag=tag)
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
        *((p, msg.RosterChanged(roster(3, 3, 1, 2, views=(2, 3)))) for p in (1, 2)),
        *((p, msg.RoundClosed(RoundId(UPDATE, 2), 3, False)) for p in (1, 2)),
    ]
    reduce(3, 0, 1, 2)  # numbers begin anew
    assert update(3)[0] == (1, msg.RosterChanged(roster(4, 4, 1, 2, views=(3, 4))))


def test_who_acknowledges_nothing_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.ballots.finals.OWED_MAX", 2)
    master = Master(2)
    for n in range(3):
        for peer in (1, 2):
            master.hear(peer, msg.RoundRequest(RoundId(PENDING, n)))
        master.hear(2, msg.Heartbeat((), (), (RoundId(PENDING, n), RoundId(UPDATE, 0))))
    assert master.wait(0.25, speaking=(1, 2)) == [CloseConnection(1, "it acknowledges nothing")]


def test_a_stranger_must_introduce_itself() -> None:
    master = Master(1)
    master.do(ConnectionOpened(9, "10.0.0.9"))
    assert master.hear(9, msg.Heartbeat()) == [
        CloseConnection(9, "did not begin with Register or Resume")
    ]


def test_a_newcomer_has_no_operations() -> None:
    master = Master(2)
    master.register(3)
    (effect,) = master.hear(3, msg.OperationRequest(operation(), SUM))
    assert isinstance(effect, CloseConnection)
    master.start(1, 2)


# -- losing and resuming connections -------------------------------------------------------------


def test_control_and_a_link_lost_removes_at_once_whichever_comes_first() -> None:
    for first, second in ((0, 1), (1, 0)):
        master = Master(2)
        events: list[MasterEvent] = [
            ConnectionClosed(2, "reset"),
            ConnectionMessage(1, msg.LinkReport(TWO, False, "lane reset")),
        ]
        assert master.do(events[first]) == []
        effects = master.do(events[second])
        assert [peer for peer, _ in removals(effects)] == [2]
        assert removals(effects)[0][1].startswith("CONNECTIONS_LOST: ")
        assert sent(effects) == [(1, msg.RosterChanged(roster(3, 3, 1, views=(1, 3))))]


def test_a_link_alone_costs_nobody_its_place() -> None:
    master = Master(2)
    master.hear(1, msg.LinkReport(TWO, False, "lane reset"))
    master.hear(2, msg.LinkReport(ONE, False, "lane reset"))
    assert master.wait(60, speaking=(1, 2)) == []


def test_control_loss_alone_has_two_seconds() -> None:
    master = Master(2)
    master.do(ConnectionClosed(2, "reset"))
    assert master.wait(1.75, speaking=(1,)) == []
    effects = master.wait(0.25, speaking=(1,))
    assert removals(effects) == [(2, "CONTROL_LOST: its connection was not resumed")]


def test_resuming_in_time_keeps_everything() -> None:
    master = Master(2)
    what = master.start(1, 2)
    master.hear(1, msg.OperationDone(what, b"x"))
    master.do(ConnectionClosed(2, "reset"))
    master.wait(1.75, speaking=(1,))
    assert master.resume(2, 12, 2) == [
        SendTo(12, msg.Resumed(1)),
        SendTo(12, msg.LinkPlan((where(1),))),
        SendTo(12, msg.OperationStarted(what)),
    ]
    assert master.hear(12, msg.OperationRequest(what, SUM)) == [
        SendTo(12, msg.OperationStarted(what))
    ]
    committed = ended(what, contributors=(ONE, TWO))
    effects = master.hear(12, msg.OperationDone(what, b"x"))
    assert effects == [SendTo(1, committed), SendTo(12, committed)]
    assert master.wait(60, speaking=(1, 12)) == []


def test_a_superseded_connection_means_nothing_any_more() -> None:
    master = Master(2)
    assert master.resume(2, 12, 2)[0] == CloseConnection(2, "superseded")
    assert master.do(ConnectionClosed(2, "reset")) == []
    assert master.hear(2, msg.Goodbye()) == []
    assert master.wait(60, speaking=(1, 12)) == []


def test_an_outcome_is_repeated_after_each_resume_until_it_is_acknowledged() -> None:
    master = Master(2)
    what = master.start(1, 2)
    master.hear(1, msg.OperationDone(what, b"x"))
    master.do(ConnectionClosed(2, "reset"))
    master.resume(2, 12, 2)
    master.hear(12, msg.OperationDone(what, b"x"))
    committed = ended(what, contributors=(ONE, TWO))
    for connection in (22, 32):
        assert sent(master.resume(2, connection, 2))[-1] == (connection, committed)
        assert master.hear(connection, msg.OutcomeQuery(what)) == [SendTo(connection, committed)]
        effects = master.hear(connection, msg.OperationDone(what, b"x"))
        assert effects == [SendTo(connection, committed)]
    master.hear(32, msg.Heartbeat((), (what,), ()))
    assert sent(master.resume(2, 42, 2)) == [
        (42, msg.Resumed(1)),
        (42, msg.LinkPlan((where(1),))),
    ]
    assert sent(master.resume(1, 11, 2))[-1] == (11, committed)


def test_an_answer_is_repeated_until_it_is_acknowledged() -> None:
    master = Master(2)
    round_id = RoundId(PENDING, 0)
    master.hear(1, msg.RoundRequest(round_id))
    master.hear(2, msg.RoundRequest(round_id))
    closed = msg.RoundClosed(round_id, 2, False)
    assert sent(master.resume(2, 12, 2))[-1] == (12, closed)
    assert master.hear(12, msg.RoundRequest(round_id)) == [SendTo(12, closed)]
    master.hear(12, msg.Heartbeat((), (), (round_id,)))
    assert closed not in [message for _, message in sent(master.resume(2, 22, 2))]


def test_rosters_that_were_missed_come_one_by_one() -> None:
    master = Master(3)
    master.do(ConnectionClosed(1, "reset"))
    master.hear(3, msg.Goodbye())
    master.hear(2, msg.Goodbye())
    assert sent(master.resume(1, 11, 2))[2:] == [
        (11, msg.RosterChanged(roster(3, 3, 1, 2, views=(1, 3)))),
        (11, msg.RosterChanged(roster(4, 4, 1, views=(1, 4)))),
    ]


def test_an_admission_that_got_lost_is_repeated() -> None:
    master = Master(1)
    admission = msg.Admitted(roster(1, 1, 1), counts(0))
    assert sent(master.resume(1, 11, 0))[-1] == (11, admission)


@pytest.mark.parametrize("older", [True, False])
def test_a_link_that_has_long_been_broken_does_not_make_a_lost_connection_a_death(
    older: bool,
) -> None:
    """Two who cannot talk are alive, also if one loses its master for a moment."""
    master = Master(3)
    master.hear(1, msg.LinkReport(TWO, False, "no route"))
    master.wait(2.25 if older else 1.75, speaking=(1, 2, 3))
    master.hear(1, msg.LinkReport(TWO, False, "no answer"))  # a redial that failed in another way
    effects = master.do(ConnectionClosed(2, "reset"))
    assert [peer for peer, _ in removals(effects)] == ([] if older else [2])
    if older:
        assert removals(master.hear(1, msg.LinkReport(TWO, False, "no route"))) == []
        assert SendTo(12, msg.Resumed(1)) in master.resume(2, 12, 2)


@pytest.mark.parametrize(("silent", "removed"), [((), 2), ((1,), 1), ((1, 2), 2)])
def test_of_two_that_cannot_talk_the_silent_one_goes(silent: tuple[int, ...], removed: int) -> None:
    """Peer 1 may be dead: its connection to the master stands still. Otherwise the younger goes."""
    master = Master(2)
    for peer in (1, 2):
        master.hear(peer, msg.OperationRequest(operation(), SUM))
    reporter = 2 if removed == 1 else 1
    master.hear(reporter, msg.LinkReport(PeerId(3 - reporter), False, "connection refused"))
    speaking = tuple(peer for peer in (1, 2) if peer not in silent)
    effects = master.wait(2.25, speaking=speaking)
    assert [peer for peer, _ in removals(effects)] == [removed]
    assert "no order of the ring avoids that" in removals(effects)[0][1]


def test_who_was_removed_is_told_why() -> None:
    master = Master(2)
    master.do(ConnectionClosed(2, "reset"))
    master.wait(9, speaking=(1,))
    reason = "its connection was not resumed"
    assert master.resume(2, 12, 2) == [
        SendTo(12, msg.Refused(RemovalCause.CONTROL_LOST, reason, 2000, 9000)),
        CloseConnection(12, reason),
    ]


def test_a_wrong_token_and_an_unknown_peer() -> None:
    master = Master(1)
    for connection, resume in enumerate(
        [msg.Resume(ONE, b"wrong", 1), msg.Resume(PeerId(99), token(99), 1)], start=7
    ):
        master.do(ConnectionOpened(connection, "10.0.0.9"))
        assert master.hear(connection, resume) == [
            SendTo(connection, msg.Refused(None, "this master does not know you")),
            CloseConnection(connection, "this master does not know you"),
        ]
    assert master.wait(60, speaking=(1,)) == []


# -- time --------------------------------------------------------------------------------------


def test_silence_alone_removes_no_member() -> None:
    assert Master(2).wait(120) == []


def test_a_silent_peer_is_removed_when_it_is_awaited_and_only_after_the_deadline() -> None:
    master = Master(2)
    master.wait(30, speaking=(1,))
    master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1)))
    waits = msg.RoundWaits(RoundId(UPDATE, 1), 5, "peer 2 (in no call)")
    effects = master.wait(10, speaking=(1,))  # awaited since the first of these ticks
    assert effects == [SendTo(1, waits)]
    effects = master.wait(0.25, speaking=(1,))
    assert removals(effects) == [(2, "SILENT: silent for 40.2 s while awaited")]
    reason = "silent for 40.2 s while awaited"
    assert (2, master.refused(RemovalCause.SILENT, reason)) in sent(effects)
    assert CloseConnection(2, reason) in effects
    assert (1, msg.RoundClosed(RoundId(UPDATE, 1), 3, False)) in sent(effects)


def test_a_newcomer_that_is_held_back_is_not_silent() -> None:
    master = Master(2)
    master.register(3)
    master.do(ConnectionPaused(3, 30 * SECOND))
    assert removals(master.wait(39.75, speaking=(1, 2))) == [], "nor does it lack a link"
    assert removals(master.wait(0.25, speaking=(1, 2))) == [(3, "SILENT: silent for 40.0 s")]


def test_a_member_whose_pause_is_over_is_silent_from_then_on() -> None:
    master = Master(2)
    master.hear(1, msg.OperationRequest(operation(), SUM))
    master.do(ConnectionPaused(2, 30 * SECOND))
    master.do(ConnectionPaused(2, master.now_ns))
    effects = master.wait(10.25, speaking=(1,))
    assert removals(effects) == [(2, "SILENT: silent for 10.2 s while awaited")]


def test_a_busy_master_removes_a_silent_member_as_soon_as_an_idle_one() -> None:
    """Somebody sends it so much that all of its ticks are late; it does not sleep."""
    master = Master(2)
    master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1)))
    removed_s = None
    for tick in range(1, 60):
        master.now_ns += SECOND
        master.hear(1, msg.Heartbeat())
        if removals(master.do(MasterTick(busy_ns=SECOND - 1000))):
            removed_s = tick
            break
    assert removed_s == 12, "awaited since the second tick, which is the first that is judged"


def test_a_silent_member_that_is_alone_keeps_its_place() -> None:
    """Its own operation goes on when it wakes; nobody else is there to wait for it."""
    master = Master(1)
    master.start(1, what=operation(view=1))
    assert removals(master.wait(3600)) == []


def test_a_silent_member_is_removed_when_only_a_newcomer_waits() -> None:
    master = Master(1)
    master.wait(30)
    master.register(2)
    assert master.wait(5, speaking=(2,)) == [], "it is not linked yet: it waits for no member"
    master.hear(2, msg.LinkReport(ONE, True, ""))
    assert removals(master.wait(10, speaking=(2,))) == []
    effects = master.wait(0.25, speaking=(2,))
    assert removals(effects) == [(1, "SILENT: silent for 45.2 s while awaited")]
    assert admitted(effects) == [2]


def test_a_member_that_computes_for_long_keeps_newcomers_waiting() -> None:
    master = Master(2)
    master.register(3)
    master.link_all(range(1, 4))
    assert master.wait(3600, speaking=(1, 2, 3)) == []


@pytest.mark.parametrize("lacks", ["what it fetches", "company", "its connection"])
def test_a_newcomer_that_lacks_more_than_the_round_does_not_count(lacks: str) -> None:
    master = Master(1)
    master.do(ConnectionOpened(2, "10.0.0.2"))
    company = 3 if lacks == "company" else 1
    fetches = lacks == "what it fetches"
    master.hear(2, msg.Register(0, "", 4002, company, prefetches=fetches))
    master.hear(2, msg.LinkReport(ONE, True, ""))
    if lacks == "its connection":
        assert removals(master.wait(9, speaking=(2,))) == []
        master.do(ConnectionClosed(2, "lost"))
        assert [peer for peer, _ in removals(master.wait(60))] == [2]
    else:
        assert removals(master.wait(60, speaking=(2,))) == []


def test_a_newcomer_does_not_wait_for_who_has_asked_for_the_round() -> None:
    master = Master(2)
    master.register(3)
    master.link_all(range(1, 4))
    master.hear(1, msg.RoundRequest(RoundId(UPDATE, 1)))
    effects = master.wait(60, speaking=(2, 3))
    assert removals(effects) == [], "the one who is silent is in the round, the other one speaks"


def test_who_speaks_is_waited_for() -> None:
    master = Master(2)
    master.hear(1, msg.OperationRequest(operation(), SUM))
    effects = master.wait(300, speaking=(1, 2))
    assert effects == [
        SendTo(1, msg.OperationWaits(operation(), waited_s, "peer 2 (in no call)"))
        for waited_s in (5, 10, 20, 40, 80, 160)
    ]


def test_whom_a_call_waits_for_and_what_they_do_meanwhile() -> None:
    master = Master(3)
    master.hear(1, msg.OperationRequest(operation(), SUM))
    master.wait(2, speaking=(1, 2, 3))
    master.hear(2, msg.RoundRequest(RoundId(UPDATE, 1)))
    operation_waits = msg.OperationWaits(
        operation(), 5, "peer 2 (in update_topology), peer 3 (in no call)"
    )
    effects = master.wait(3.25, speaking=(1, 2, 3))
    assert effects == [SendTo(1, operation_waits)]
    whom = "peer 1 (in tag 5 (SUM of 8 x float32)), peer 3 (in no call)"
    effects = master.wait(2, speaking=(1, 2, 3))
    assert effects == [SendTo(2, msg.RoundWaits(RoundId(UPDATE, 1), 5, whom))]


def test_a_started_operation_waits_for_no_call() -> None:
    master = Master(2)
    master.hear(1, msg.OperationRequest(operation(), SUM))
    assert master.wait(4.75, speaking=(1, 2)) == []
    master.hear(2, msg.OperationRequest(operation(), SUM))
    assert master.wait(20, speaking=(1, 2)) == []


@pytest.mark.parametrize("sleep_s", [0.5, 30, 3600])
def test_never_after_a_late_tick(sleep_s: float) -> None:
    master = Master(2)
    master.hear(1, msg.OperationRequest(operation(), SUM))
    master.wait(9.75)
    master.now_ns += int(sleep_s * SECOND)
    effects = master.do(MasterTick())
    assert removals(effects) == []
    assert removals(master.wait(0.25)) == []
    assert removals(master.wait(0.25)) != []  # the deadline has moved by the gap and no further


def test_a_late_tick_moves_the_time_to_resume_as_well() -> None:
    master = Master(2)
    master.do(ConnectionClosed(2, "reset"))
    master.wait(1.75)
    master.now_ns += 60 * SECOND
    master.do(MasterTick())
    assert master.resume(2, 12, 2)[0] == SendTo(12, msg.Resumed(1))


def test_signs_of_life() -> None:
    master = Master(2)
    beats: list[int] = []
    for _ in range(8):
        master.now_ns += SECOND // 4
        beats += [connection for connection, _ in sent(master.do(MasterTick()))]
    assert beats == [1, 2, 1, 2]
    master.now_ns += 5 * SECOND  # also when the master itself was late
    assert [connection for connection, _ in sent(master.do(MasterTick()))] == [1, 2]


def test_hostile_heartbeats_change_nothing() -> None:
    master = Master(2)
    what = master.start(1, 2)
    strange = operation(7, tag=99)
    beat = msg.Heartbeat(
        (msg.Progress(strange, 9, 9, 9),),
        (strange, what),
        (RoundId(OPTIMIZE, 9), RoundId(UPDATE, 0)),
    )
    assert master.hear(2, beat) == []
    master.hear(1, msg.OperationDone(what, b"x"))
    committed = ended(what, contributors=(ONE, TWO))
    effects = master.hear(2, msg.OperationDone(what, b"x"))
    assert effects == [
        SendTo(1, committed),
        SendTo(2, committed),
    ]  # it can't be acknowledged before


def test_no_progress_is_charged_to_the_furthest_upstream() -> None:
    master = Master(3)
    what = master.start(1, 2, 3)
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
    reason = f"t1/g0/v2/tag5#0 has stood still for 30.0 s, and {evidence}"
    assert removals(effects) == [(1, f"NO_PROGRESS: {reason}")]
    assert (2, msg.RosterChanged(roster(3, 3, 2, 3))) in sent(effects)


def test_of_two_with_a_stuck_link_the_one_with_more_broken_links_pays() -> None:
    master = Master(4)
    what = master.start(1, 2, 3, 4)
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
    master = Master(3, Timing(deadline_s=60.0))
    what = master.start(1, 2, 3)
    told = [msg.Progress(what, 4, 6, 4), msg.Progress(what, 2, 4, 2), msg.Progress(what, 2, 2, 2)]
    for peer, progress in enumerate(told, start=1):
        master.hear(peer, msg.Heartbeat((progress,)))
    effects: list[MasterEffect] = []
    for _ in range(4 * 59):
        for peer in (1, 3):
            effects += master.hear(peer, msg.Heartbeat((told[peer - 1],)))
        effects += master.wait(0.25)
    assert removals(effects) == []
    assert removals(master.wait(2, speaking=(1, 3))) == [
        (2, "SILENT: silent for 60.2 s while awaited")
    ]


def test_a_slow_reduce_that_progresses_is_left_alone() -> None:
    master = Master(2)
    what = master.start(1, 2)
    for number in range(10):
        for peer in (1, 2):
            progress = msg.Progress(what, number, number + 2, number)
            assert master.hear(peer, msg.Heartbeat((progress,))) == []
        assert master.wait(25, speaking=(1, 2)) == []
