"""The names with which peers register: good ones go into the roster, others are refused."""

from __future__ import annotations

import pytest

from pccl.machines.master.events import (
    Announce,
    CloseConnection,
    ConnectionClosed,
    ConnectionOpened,
    MasterEffect,
    SendTo,
)
from pccl.machines.reachability import AddressTried, TryAddress
from pccl.protocol import messages as msg
from pccl.protocol.handshake.certificates import is_certified
from pccl.protocol.handshake.keys import CURVE25519
from pccl.protocol.limits import Timing
from pccl.protocol.types import KEY_BYTES, PeerId, RemovalCause
from tests.support.master_stage import NEW_RUN, RUN, MasterStage, closed, told
from tests.support.scenarios import key
from tests.support.secrets import MASTER_SIGNER

BAD = {
    " alice": "a name must not be empty, or begin or end with white space",
    "al\nice": "a name must consist of printable characters",
    "al\N{RIGHT-TO-LEFT OVERRIDE}ice": "a name must consist of printable characters",
    "n" * 65: "a name must not be longer than 64 bytes",
}


@pytest.mark.parametrize(("name", "reason"), BAD.items())
def test_a_bad_name_is_refused_with_the_reason(name: str, reason: str) -> None:
    master = MasterStage().new(1)
    effects = master.register(2, name=name)
    assert effects == [SendTo(2, msg.Refused(None, reason)), CloseConnection(2, reason)]
    assert list(master.machine.membership.peers) == [1]


def test_names_are_in_the_roster_and_in_what_operators_learn() -> None:
    master = MasterStage().new()
    (registered, _) = [one for one in master.register(1, name="alice") if isinstance(one, Announce)]
    assert registered == Announce("registered", PeerId(1), "alice", 0, "from 10.0.0.1:4001")
    master.register(2, name="bob")
    ((_, plan),) = told(master.register(3), msg.LinkPlan)
    assert [member.name for member in plan.elders] == ["alice", "bob"]


def test_two_peers_may_have_one_name() -> None:
    """Names are for people; ids tell peers apart."""
    master = MasterStage().new()
    master.register(1, name="alice")
    master.register(2, name="alice")
    assert [peer.member.name for peer in master.machine.membership.peers.values()] == ["alice"] * 2


@pytest.mark.parametrize(("name", "reason"), BAD.items())
def test_a_peer_that_returns_with_a_bad_name_is_turned_away(name: str, reason: str) -> None:
    master = MasterStage()
    master.restarted()
    header = msg.Return(
        peer=PeerId(1), run=RUN, term=1,
        registration=msg.Register(0, "", 1, name=name),
        roster_version=1, rounds=(), incumbent=b"",
    )  # fmt: skip
    master.do(ConnectionOpened(1, "10.0.0.1", key(1)))
    effects = master.hear(1, header)
    assert closed(effects) == [1]
    assert effects == [CloseConnection(1, reason)]


# -- peers that come back --------------------------------------------------------------------------


def test_a_peer_is_known_by_its_key() -> None:
    master = MasterStage().new(2)
    for connection, proven in ((11, key(1)), (12, key(66)), (13, bytes(KEY_BYTES)), (14, b"k")):
        effects = master.resume(2, connection, 0, proven=proven)
        reason = "this master does not know this peer"
        refused = [
            SendTo(connection, msg.Refused(None, reason)),
            CloseConnection(connection, reason),
        ]
        assert effects == refused
    peer = master.machine.membership.peers[PeerId(2)]
    assert peer.connection == 2, "its connection was not touched"
    ((_, resumed),) = told(master.resume(2, 21, 0), msg.Resumed)
    assert is_certified(CURVE25519, resumed.certificate, NEW_RUN, PeerId(2), key(2))
    assert (peer.connection, resumed.certificate.authority) == (21, MASTER_SIGNER.key)


def test_a_newcomer_gets_a_certificate_for_the_key_that_it_has_proven() -> None:
    master = MasterStage().new(1)
    ((_, registered),) = told(master.register(2), msg.Registered)
    certificate = registered.certificate
    assert is_certified(CURVE25519, certificate, NEW_RUN, registered.peer, key(2))
    assert not is_certified(CURVE25519, certificate, NEW_RUN, registered.peer, key(1))
    assert master.machine.membership.peers[registered.peer].member.key == key(2)


def test_a_member_that_did_not_return_to_a_recovered_run_cannot_resume() -> None:
    """Its key is in the rosters of others, but it may know what was decided differently."""
    master = MasterStage().restarted()
    master.come(1)
    master.come(2)
    master.wait(5, 1, 2)
    assert master.machine.membership.keys() == {1: key(1), 2: key(2)}
    for effects in (master.resume(3, 13, 7), master.come(3, connection=14)):
        ((_, refused),) = told(effects, msg.Refused)
        assert refused.cause is RemovalCause.CONTROL_LOST
        assert closed(effects)
    peer = master.machine.membership.peers[PeerId(2)]
    peer.absent = True  # for as long as the master removes those that did not return
    ((_, refused),) = told(master.resume(2, 12, 7), msg.Refused)
    assert refused.reason == "this master does not know this peer"
    assert master.machine.membership.keys() == {1: key(1)}


def test_rosters_tell_who_has_left() -> None:
    """Those whom it names, and newcomers after it, have not."""
    master = MasterStage().new(3)
    for newcomer in (4, 5):
        master.register(newcomer, min_peers=9)
    master.hear(4, msg.Goodbye())
    (_, one), _ = told(master.hear(2, msg.Goodbye()), msg.RosterChanged)
    roster = one.roster
    assert (roster.newest_peer, roster.pending) == (5, (5,))
    assert [peer for peer in range(1, 9) if roster.has_left(PeerId(peer))] == [2, 4]


def test_a_newcomer_that_returns_late_is_in_new_rosters() -> None:
    """Members would take it for one that has left."""
    master = MasterStage().restarted()
    for peer in (1, 2, 3):
        master.come(peer)
    master.wait(5, 1, 2, 3)
    first = master.machine.membership.roster(0)
    assert not first.has_left(PeerId(50)), "it may return"
    master.register(8, min_peers=9)
    assert told(master.come(50, known=()), msg.RosterChanged) == []
    (_, one), _ = told(master.hear(2, msg.Goodbye()), msg.RosterChanged)
    newest = master.machine.membership.newest_peer
    assert (one.roster.newest_peer, one.roster.pending) == (newest, (50, newest))
    effects = master.come(51, known=())
    (_, one), _ = told(effects, msg.RosterChanged)
    assert one.roster.pending == (50, 51, newest)


def test_a_closed_connection_proves_nothing_any_more() -> None:
    master = MasterStage().new(2)
    master.do(ConnectionClosed(2, "reset"))
    assert set(master.machine.connections.callers) == {1}
    master.do(ConnectionOpened(2, "10.0.0.9", key(66)))  # a shell would take another number
    assert told(master.hear(2, msg.Resume(PeerId(2), 0)), msg.Resumed) == []


# -- addresses that change -------------------------------------------------------------------------


def resume_from(
    master: MasterStage, host: str, hosts: tuple[str, ...] = (), peer: int = 2
) -> list[MasterEffect]:
    """A peer comes back on connection 20, from this host."""
    master.do(ConnectionClosed(peer, "reset"))
    master.do(ConnectionOpened(20, host, key(peer)))
    version = master.machine.membership.version
    return master.hear(20, msg.Resume(PeerId(peer), version, hosts=hosts))


def where(told: msg.RosterChanged, peer: int) -> tuple[str, tuple[str, ...]]:
    return next((one.host, one.hosts) for one in told.roster.members if one.peer == peer)


def test_a_member_that_resumes_from_elsewhere_is_dialled_there() -> None:
    master = MasterStage().new(3)
    view = master.machine.membership.roster(0).view
    effects = resume_from(master, "198.51.100.6")
    assert told(effects, msg.RosterChanged) == [], "all that move are told at once"
    master.do(ConnectionClosed(20, "reset"))
    effects = resume_from(master, "198.51.100.7", ("192.168.1.5",))
    beat = master.wait(Timing().heartbeat_s, 1, 20, 3)
    news = told(beat, msg.RosterChanged)
    assert [to for to, _ in news] == [1, 20, 3]
    assert {where(one, 2) for _, one in news} == {("198.51.100.7", ("192.168.1.5",))}
    assert {one.roster.view for _, one in news} == {view}, "operations go on"
    assert Announce("moved", PeerId(2), "", 0, "to 198.51.100.7:4002") in effects
    plans = told(beat, msg.LinkPlan)
    assert told(master.wait(5, 1, 20, 3), msg.RosterChanged) == []
    assert [(to, [one.host for one in plan.elders]) for to, plan in plans] == [
        (3, ["198.51.100.7"])
    ]


def test_a_member_that_resumes_from_where_it_was_changes_nothing() -> None:
    master = MasterStage().new(3)
    effects = resume_from(master, "10.0.0.2")
    assert told(effects, msg.RosterChanged) == []
    assert [one for one in effects if isinstance(one, Announce)] == []


def test_who_declares_a_host_keeps_it_wherever_it_comes_from() -> None:
    master = MasterStage().new()
    for peer, host in ((1, ""), (2, "example.org")):
        master.register(peer, min_peers=2, host=host)
    master.link(2)
    assert master.machine.membership.size == 2
    assert told(resume_from(master, "198.51.100.7"), msg.RosterChanged) == []


def test_a_newcomer_that_resumes_from_elsewhere_is_dialled_there() -> None:
    master = MasterStage().new(1)
    master.register(2)
    effects = resume_from(master, "198.51.100.7")
    assert told(effects, msg.RosterChanged) == []
    assert master.machine.membership.peers[PeerId(2)].member.host == "198.51.100.7"


def test_a_resumed_peer_with_a_host_that_breaks_lines_is_closed() -> None:
    master = MasterStage().new(2)
    effects = resume_from(master, "h", ("a\nb",))
    reasons = [one.reason for one in effects if isinstance(one, CloseConnection)]
    assert reasons == ["an advertised host is invalid or too long"]


def test_a_test_of_the_old_address_says_nothing_of_the_new_one() -> None:
    master = MasterStage().begin(tests_addresses=True, relays=True)
    master.register(1)
    master.do(AddressTried(PeerId(1), "10.0.0.1", "", key(1)))
    effects = master.register(2)
    assert [one.hosts for one in effects if isinstance(one, TryAddress)] == [("10.0.0.2",)]
    resume_from(master, "198.51.100.7")
    effects = master.do(AddressTried(PeerId(2), "", "connection refused", key(2)))
    effects += master.hear(1, msg.AddressProbed(PeerId(2), "connection refused"))
    assert told(effects, msg.Undialable) == []
    effects = master.wait(Timing().heartbeat_s, 1, 20)
    assert [one.hosts for one in effects if isinstance(one, TryAddress)] == [("198.51.100.7",)]
    effects = master.do(AddressTried(PeerId(2), "", "no answer", key(2)))
    effects += master.hear(1, msg.AddressProbed(PeerId(2), "no answer"))
    assert [(to, one.reason) for to, one in told(effects, msg.Undialable)] == [
        (20, "at 198.51.100.7:4002 (peer 1: no answer)")
    ]


def test_a_tester_that_leaves_does_not_delay_the_test_of_the_new_address() -> None:
    master = MasterStage().begin(tests_addresses=True, relays=True)
    master.register(1)
    master.do(AddressTried(PeerId(1), "10.0.0.1", "", key(1)))
    master.register(2)
    resume_from(master, "198.51.100.7")
    master.do(AddressTried(PeerId(2), "", "connection refused", key(2)))
    assert [one for one in master.wait(1, 1, 20) if isinstance(one, TryAddress)] == []
    master.hear(1, msg.Goodbye())
    tests = [one for one in master.wait(1, 20) if isinstance(one, TryAddress)]
    assert [one.hosts for one in tests] == [("198.51.100.7",)]
