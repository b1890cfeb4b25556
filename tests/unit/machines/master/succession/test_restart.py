"""What scenarios of a restarted master can't show: see ``tests/scenario/master`` for all else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.machines.master.events import (
    Announce,
    CloseConnection,
    ConnectionOpened,
    MasterAnswered,
    MasterEffect,
)
from pccl.machines.master.succession.vouched import Vouched
from pccl.machines.reachability import AddressTried, TryAddress
from pccl.protocol import messages as msg
from pccl.protocol.guards.allowance import Trust
from pccl.protocol.limits import PENDING_MAX, TERM_GAP, Timing
from pccl.protocol.types import PeerId, RemovalCause
from tests.support.master_stage import (
    MASTER,
    NEXT,
    OTHER_RUN,
    RUN,
    MasterStage,
    closed,
    sent,
    told,
)
from tests.support.scenarios import key, roster

ONE = PeerId(1)


@pytest.mark.parametrize("peer", [3, 2], ids=["a newcomer", "a member"])
def test_a_late_return_is_charged_until_all_is_said(peer: int) -> None:
    master = MasterStage().blank()
    known = (roster(7, 4, 1, 2),)
    master.come(1, known=known)
    assert master.machine.trust_in(1) is Trust.MEMBER, "it returned in time"
    master.say(2, known=known)
    assert master.machine.trust_in(2) is Trust.RETURNING
    master.hear(2, msg.Reported())
    late, term = 10 + peer, master.machine.term
    if peer == 2:
        master.say(2, known=known, connection=late, term=term, incumbent=NEXT)
    else:
        master.say(3, known=(), connection=late)
    assert master.machine.trust_in(late) is Trust.LATE
    assert master.hear(late, *(msg.KnownRoster(r) for r in known * 1000)) == []
    master.hear(late, msg.Reported())
    assert master.machine.trust_in(late) is (Trust.MEMBER if peer == 2 else Trust.NEWCOMER)


def test_a_report_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.recovery.REPORT_BYTES_MAX", 20 << 10)
    master = MasterStage().blank()
    assert master.say(1, *[msg.Heartbeat()] * 10) == []
    assert master.hear(1, *[msg.Heartbeat()] * 10) == [
        CloseConnection(1, "the peer's report takes too much memory")
    ]


def learns(
    master: MasterStage, run: bytes = RUN, *members: int, settled: bool = True
) -> list[MasterEffect]:
    """The master that a standby stands by for has said which run it has, and who is in it."""
    proofs = tuple(msg.MemberProof(PeerId(peer), key(peer)) for peer in members)
    who = (7, proofs) if members else (0, None)
    return master.do(MasterAnswered(0, msg.RunIs(run, 1, settled, *who)))


def vouched_for(*members: int) -> Vouched:
    return Vouched.of(7, [msg.MemberProof(PeerId(peer), key(peer)) for peer in members])


INVENTED = (roster(1 << 40, 99, 99),)
"""What an intruder says that it was told: it alone is the run, by now."""


def test_a_master_that_is_started_again_knows_its_members() -> None:
    """An intruder had only to be there when it came back: the newest roster was his."""
    master = MasterStage().restarted(vouched=vouched_for(1, 2, 3))
    master.come(99, known=INVENTED, masters=5)
    effects = [effect for peer in (1, 2, 3) for effect in master.come(peer)]
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]
    reason = "the run continued without it"
    assert (99, msg.Refused(RemovalCause.CONTROL_LOST, reason, 0)) in sent(effects)


def test_whoever_comes_again_and_again_does_not_make_a_master_wait() -> None:
    """The time to return begins with the first that returns, and with the first that counts."""
    master = MasterStage().restarted(vouched=vouched_for(1, 2, 3))
    connection = 99
    while master.machine.recovering:
        master.come(99, connection=connection, known=INVENTED)
        master.wait(1)
        connection += 1
    assert connection - 99 <= 6
    assert master.machine.membership.members() == []


def test_who_was_named_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others have returned, and whatever they have said."""
    monkeypatch.setattr("pccl.machines.master.succession.recovery.PEERS_MAX", 5)
    monkeypatch.setattr("pccl.machines.master.succession.recovered.PEERS_MAX", 5)
    master = MasterStage().standby()
    learns(master, RUN, 1, 2, 3)
    for stranger in range(90, 95):
        master.come(stranger, known=INVENTED[:0])
    full = [CloseConnection(95, "5 peers have returned already")]
    assert master.say(95, known=INVENTED[:0]) == full
    effects = [effect for peer in (1, 2, 3) for effect in master.come(peer)]
    assert closed(effects) == [90, 91, 92]
    for peer in (1, 2, 3):
        master.hear(peer, msg.Heartbeat(term=2))
    assert [int(peer.id) for peer in master.machine.membership.members()] == [1, 2, 3]


def test_newcomers_that_wait_for_a_recovery_are_bounded_and_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.restart.PENDING_MAX", 3)
    master = MasterStage().restarted()
    for number in (10, 11, 12):
        master.do(ConnectionOpened(number, "10.0.0.9", key(number)))
        assert master.hear(number, msg.Register(0, "", 4000)) == []
    master.do(ConnectionOpened(20, "10.0.0.20", key(20)))
    effects = master.hear(20, msg.Register(0, "", 4000))
    assert [connection for connection, _ in sent(effects)] == [10]


@pytest.mark.parametrize("host", ["x" * 254, "x" * 4000, "a\nb"])
def test_a_return_passes_the_checks_of_a_registration(host: str) -> None:
    header = msg.Return(ONE, RUN, 1, msg.Register(0, host, 1), 0, (), MASTER)
    for master in (MasterStage().blank(), MasterStage().restarted()):
        master.do(ConnectionOpened(1, "10.0.0.1", key(1)))
        reason = "the advertised host is invalid or too long"
        assert master.hear(1, header) == [CloseConnection(1, reason)]


def test_reports_that_are_not_complete_are_closed_when_the_run_goes_on() -> None:
    """Nobody would ever hear of that connection again, and it would stay."""
    known = (roster(7, 4, 1, 2),)
    master = MasterStage().restarted()
    master.say(9, known=())
    master.come(1, known=known)
    effects = master.come(2, known=known)
    assert CloseConnection(9, "the run continued before the peer's report was complete") in effects
    assert set(master.machine.connections.callers) == {1, 2}


def test_a_process_that_registered_anew_before_the_restart_is_a_newcomer() -> None:
    """It has the key of a member, which it was; a key has one peer, so others get none for it."""
    known = (roster(7, 4, 1, 2, 3),)
    master = MasterStage().restarted()
    for newcomer in (8, 9):
        master.come(newcomer, known=(), proven=key(3))
    master.come(10, known=(), proven=key(2))
    for peer in (1, 2):
        master.come(peer, known=known)
    master.wait(6, 1, 2, 8, 9, 10)
    peers = master.machine.membership.peers.values()
    assert [(peer.id, peer.admitted) for peer in peers] == [(1, True), (2, True), (9, False)]


def test_the_largest_report_has_to_go_if_there_is_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.recovery.REPORTS_BYTES_MAX", 40 << 10)
    known = (roster(7, 4, 1, 2, 3),)
    master = MasterStage().restarted()
    master.come(1, known=known)
    effects = master.say(3, *[msg.Heartbeat()] * 25, known=known)
    assert effects == []
    reason = "all reports together take too much memory, so this one was dropped"
    assert CloseConnection(3, reason) in master.say(2, *[msg.Heartbeat()] * 10, known=known)
    master.hear(2, msg.Reported())
    assert set(master.machine.connections.callers) == {1, 2}


def test_what_a_crowd_reports_alike_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand members of a full run have all been told the same rosters."""
    monkeypatch.setattr("pccl.machines.master.succession.recovery.REPORTS_BYTES_MAX", 3 << 19)
    crowd = tuple(range(1, 101))
    rosters = tuple(roster(7 + n, 4 + n, *crowd) for n in range(20))
    master = MasterStage().restarted()
    for peer in crowd:  # a roster takes about 20 KiB, all that they tell 40 MiB
        assert told(master.come(peer, known=rosters), msg.Refused) == []
    assert len(master.machine.membership.members()) == 100


def test_a_roster_is_told_once_and_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.master.succession.recovery.ROSTERS_KEPT_MAX", 2)
    many = tuple(roster(7 + n, 4 + n, 1) for n in range(3))
    for known in ((many[0], many[0]), many):
        master = MasterStage().restarted()
        assert master.say(1, known=known) == [
            CloseConnection(1, "the peer reported too many rosters, or one twice")
        ]


def test_a_member_that_returns_from_elsewhere_is_dialled_there() -> None:
    """Its address has changed while there was no master, or the last one did not hear of it."""
    usual = roster(7, 4, 1, 2, 3)
    before = replace(usual.members[1], host="198.51.100.7")
    known = (replace(usual, members=(usual.members[0], before, usual.members[2])),)
    master = MasterStage().restarted()
    effects = [effect for peer in (1, 2, 3) for effect in master.come(peer, known=known)]
    assert Announce("moved", PeerId(2), "", 0, "to 10.0.0.2:4002") in effects
    plans = {to: plan.elders for to, plan in told(effects, msg.LinkPlan)}
    assert [one.host for one in plans[3]] == ["10.0.0.1", "10.0.0.2"]
    news = told(master.wait(Timing().heartbeat_s, 1, 2, 3), msg.RosterChanged)
    assert {to: one.roster.members[1].host for to, one in news} == dict.fromkeys(
        (1, 2, 3), "10.0.0.2"
    )


def test_a_test_of_a_young_run_says_nothing_of_a_peer_of_the_older_one() -> None:
    """Both have id 1."""
    master = MasterStage().begin(OTHER_RUN, incumbent=NEXT, tests_addresses=True)
    (test,) = (one for one in master.register(9) if isinstance(one, TryAddress))
    assert (test.member.peer, test.member.key) == (1, key(9))
    master.come(1, known=(roster(7, 4, 1),))
    assert master.machine.run == RUN
    late = master.do(AddressTried(ONE, "", "another process answered", test.member.key))
    assert told(late, msg.Undialable) == []
    own = master.do(AddressTried(ONE, "", "no answer", key(1)))
    assert [to for to, _ in told(own, msg.Undialable)] == [1]


def test_two_restarts_in_a_row_give_out_different_ids() -> None:
    """The newcomer of the first one has not come back when the second one begins."""
    given: list[int] = []
    for chance in (b"\x07", b"\x09"):
        master = MasterStage().restarted()
        master.machine.registration.random_bytes = lambda size, chance=chance: chance * size  # type: ignore[misc]
        for peer in (1, 2, 3):
            master.come(peer)
        ((_, registered),) = told(master.register(9), msg.Registered)
        given.append(registered.peer)
    jumps = [int.from_bytes(chance * 3) for chance in (b"\x07", b"\x09")]
    assert given == [3 + TERM_GAP + jump + 1 for jump in jumps]


@pytest.mark.parametrize("says", [msg.StatusRequest(), msg.Resume(ONE, 0)])
def test_who_waits_and_says_something_else_waits_no_more(says: msg.Message) -> None:
    """Its connection is closed, so it must not count among those that wait."""
    master = MasterStage().restarted(1)
    for connection in range(1, PENDING_MAX + 2):
        master.do(ConnectionOpened(connection, "10.0.0.1", key(connection)))
        assert master.hear(connection, msg.Register(0, "", 5000)) == []  # there is room
        if connection == 1:
            assert closed(master.hear(connection, says)) == [connection]
