"""Newcomers' addresses are tested, and whoever can be dialled is dialled."""

from __future__ import annotations

import pytest

from pccl.machines.master.events import (
    Announce,
    CloseConnection,
    ConnectionClosed,
    ConnectionOpened,
    MasterEffect,
    SendAddress,
    SendTo,
)
from pccl.machines.reachability import (
    AddressTried,
    CallerTests,
    CallerTried,
    Reachability,
    TryAddress,
    TryCaller,
    dialled_at,
    may_be_dialled,
)
from pccl.protocol import messages as msg
from pccl.protocol.limits import (
    ASKED_BEATS_MAX,
    ASKED_UNPROVEN_MAX,
    ELDERS_UNPROVEN_MAX,
    QUERIES_AT_ONCE_MAX,
    QUERIES_PER_S,
    TESTS_AT_ONCE_MAX,
    TESTS_PER_S,
    Timing,
)
from pccl.protocol.types import NS_PER_S, Member, PeerId, RemovalCause, RoundId, RoundKind
from tests.support.master_stage import SECOND, MasterStage, told
from tests.support.scenarios import key, where

UPDATE = RoundKind.UPDATE_TOPOLOGY


class Master(MasterStage):
    """One that tests newcomers' addresses."""

    def __init__(self, members: int = 0) -> None:
        super().__init__()
        self.begin(tests_addresses=True)
        for peer in range(1, members + 1):
            self.admit(peer)

    def answered(self, peer: int, reason: str = "") -> list[MasterEffect]:
        """The master's own test has ended."""
        host = "" if reason else f"10.0.0.{peer}"
        return self.do(AddressTried(PeerId(peer), host, reason, key(peer)))

    def undialable(self, peer: int) -> None:
        """A newcomer, at an address where the master does not reach it."""
        self.register(peer)
        self.answered(peer, "connection refused")

    def admit(self, peer: int, reason: str = "") -> list[MasterEffect]:
        """Of peers 1 to n the next one becomes a member; all before it have links to it."""
        self.register(peer)
        self.link(peer)
        for other in self.machine.membership.members():
            self.hear(other.id, msg.AddressProbed(PeerId(peer), reason))
        effects = self.answered(peer, reason)
        if peer > 1:
            self.round(UPDATE, peer - 2, *range(1, peer))
        assert self.ring() == list(range(1, peer + 1))
        return effects

    def ring(self) -> list[int]:
        return [int(peer) for peer in self.machine.membership.order(0)]

    def tick(self, seconds: float) -> list[MasterEffect]:
        """Let time pass; everybody that is connected speaks."""
        effects: list[MasterEffect] = []
        for _ in range(round(4 * seconds)):
            peers = self.machine.membership.peers.values()
            effects += self.wait(0.25, *(peer.connection for peer in peers if peer.connection))
        return effects


def dials(elder: int, *newcomers: int) -> list[tuple[int, msg.DialNewcomers]]:
    """The peers that the master tells it to dial."""
    return [(elder, msg.DialNewcomers(tuple(map(where, newcomers))))]


def asked(master: Master, seconds: float) -> tuple[Member, ...]:
    """Whom the only elder that is asked for it has to dial."""
    ((_, plan),) = told(master.tick(seconds), msg.DialNewcomers)
    return plan.newcomers


def test_a_newcomer_is_dialled_at_what_it_declares_and_at_where_it_was_seen() -> None:
    master = Master()
    tries = [e for e in master.register(1, host="example.org") if isinstance(e, TryAddress)]
    declared = Member(PeerId(1), "example.org", 4001, key=key(1))
    assert tries == [TryAddress(declared, ("example.org", "10.0.0.1"), "10.0.0.1")]


def test_nobody_is_admitted_before_the_test() -> None:
    master = Master()
    assert not told(master.register(1), msg.Admitted)
    assert [to for to, _ in told(master.answered(1), msg.Admitted)] == [1]


def test_a_member_tests_as_well() -> None:
    """A master in the newcomer's own network proves nothing."""
    master = Master(1)
    assert told(master.register(2), msg.ProbeAddress) == [
        (1, msg.ProbeAddress(where(2), "10.0.0.2"))
    ]
    master.link(2, 1)
    master.answered(2)
    assert master.round(UPDATE, 0, 1)[-1] == SendTo(
        1, msg.RoundClosed(RoundId(UPDATE, 0), 1, False)
    )
    effects = master.hear(1, msg.AddressProbed(PeerId(2), "no answer in time"))
    text = "at 10.0.0.2:4002 (peer 1: no answer in time)"
    assert effects == [
        SendTo(2, msg.Undialable(text)),
        Announce("undialable", PeerId(2), "", 0, text),
    ]
    assert [to for to, _ in told(master.round(UPDATE, 1, 1), msg.Admitted)] == [2]


def test_a_member_tests_addresses_of_a_version_of_ip_that_it_has() -> None:
    """A member without IPv6 reaches no IPv6 address, and would call the newcomer undialable."""
    master = Master(1)
    assert not told(master.register(2, host="2001:db8::2"), msg.ProbeAddress)
    master.link(2, 1)
    master.do(AddressTried(PeerId(2), "2001:db8::2", "", key(2)))
    master.round(UPDATE, 0, 1)
    assert master.ring() == [1, 2]
    asked = [to for to, _ in told(master.register(3, host="2001:db8::3"), msg.ProbeAddress)]
    assert asked == [2]


def test_a_test_that_never_ends_keeps_nobody_out() -> None:
    master = Master()
    master.register(1)
    assert not told(master.tick(Timing().dial_s - 0.25), msg.Admitted)
    assert told(master.tick(0.25), msg.Admitted)


def test_a_peer_that_answers_elsewhere_reads_where() -> None:
    master = Master()
    master.register(1, host="example.org")
    effects = master.do(AddressTried(PeerId(1), "10.0.0.1", "connection refused", key(1)))
    text = "at example.org:4001 (the master: connection refused; it answers at 10.0.0.1)"
    assert told(effects, msg.Undialable) == [(1, msg.Undialable(text))]


def test_who_cannot_be_dialled_dials_every_newcomer() -> None:
    master = Master()
    master.admit(1, "connection refused")
    assert told(master.admit(2), msg.DialNewcomers) == []  # it was told when the member had tried
    assert told(master.register(3), msg.DialNewcomers) == []
    assert told(master.answered(3), msg.DialNewcomers) == []  # once a heartbeat
    assert told(master.tick(1), msg.DialNewcomers) == dials(1, 2, 3)


def test_newcomers_that_nobody_can_dial_cost_the_next_ones_nothing() -> None:
    """A thousand of them would otherwise be told of each one that comes, with all before it."""
    master = Master(1)
    for newcomer in (2, 3):
        master.undialable(newcomer)
        master.hear(1, msg.AddressProbed(PeerId(newcomer), "connection refused"))
    assert told(master.register(4), msg.DialNewcomers) == []
    failed = msg.LinkReport(PeerId(2), False, "connection refused")
    assert told(master.hear(4, failed), msg.DialNewcomers) == dials(2, 4)


def test_who_was_not_reached_dials() -> None:
    """A test may say that it can be reached, from where the testers are."""
    master = Master(2)
    master.register(3)
    failed = msg.LinkReport(PeerId(2), False, "no answer in time")
    assert told(master.hear(3, failed), msg.DialNewcomers) == dials(2, 3)
    assert told(master.hear(3, failed), msg.DialNewcomers) == []  # it does already
    assert told(master.hear(3, msg.Goodbye()), msg.DialNewcomers) == []
    assert told(master.tick(1), msg.DialNewcomers) == dials(2)


FAILED_TWO = msg.LinkReport(PeerId(2), False, "no answer in time")


def test_on_the_word_of_newcomers_few_are_dialled() -> None:
    """Each says that an elder cannot be reached, and where the elder shall dial it."""
    master = Master(2)
    many = range(3, 3 + TESTS_AT_ONCE_MAX)
    for peer in many:
        master.undialable(peer)
        master.hear(peer, FAILED_TWO)
    assert len(asked(master, 1)) == ASKED_UNPROVEN_MAX
    assert told(master.tick(4), msg.DialNewcomers) == []
    master.link(2, 3)  # it has reached one of them, so there is room for the next one
    assert len(asked(master, 1.25)) == ASKED_UNPROVEN_MAX + 1


def test_newcomers_for_whom_there_was_no_room_have_time() -> None:
    """Their elder is busy with others; that they have no link is not their fault."""
    master = Master(2)
    many = range(3, 5 + ASKED_UNPROVEN_MAX)
    for peer in many:
        master.undialable(peer)
        master.hear(1, msg.LinkReport(PeerId(peer), True, ""))
        master.hear(peer, FAILED_TWO)
    master.tick(Timing().link_s + Timing().dial_s)
    left = [int(peer.id) for peer in master.machine.membership.pending()]
    assert left == [3 + ASKED_UNPROVEN_MAX, 4 + ASKED_UNPROVEN_MAX]
    assert told(master.tick(2), msg.DialNewcomers) == dials(2, *left), "there is room for them now"
    master.link(2, *left)
    master.round(UPDATE, 1, 1, 2)
    assert master.ring() == [1, 2, left[0]]


def test_an_elder_that_tries_in_vain_for_long_is_asked_no_more() -> None:
    """Newcomers that wait for something else are not refused for want of a link."""
    master = Master(2)
    master.do(ConnectionOpened(3, "10.0.0.3", key(3)))
    master.hear(3, msg.Register(0, "", 4003, 1, 1, prefetches=True))
    master.do(AddressTried(PeerId(3), "", "connection refused", key(3)))
    assert told(master.hear(3, FAILED_TWO), msg.DialNewcomers) == dials(2, 3)
    assert told(master.tick(ASKED_BEATS_MAX + 2), msg.DialNewcomers) == dials(2)


def test_who_leaves_before_its_test_is_forgotten() -> None:
    reachability = Reachability(0)
    for n in range(3, 50):
        reachability.begin(where(n), f"10.0.0.{n}", PeerId(2), 0)
        reachability.forget([PeerId(n)])
    assert reachability._tests_by == {PeerId(2): set()}  # pyright: ignore[reportPrivateUsage]


def test_whom_somebody_has_reached_is_dialled_on_its_word() -> None:
    master = Master(2)
    last = 3 + 2 * ASKED_UNPROVEN_MAX
    for peer in range(3, last):
        master.register(peer)
        master.answered(peer)
        master.hear(peer, FAILED_TWO)
    assert asked(master, 1) == tuple(where(peer) for peer in range(3, last))


def test_loopback_is_no_address_of_a_peer_from_elsewhere() -> None:
    """Everybody would dial himself, at whatever port a token holder says."""
    master = Master()
    master.register(1, host="127.0.0.1")
    master.register(2, host="169.254.169.254")
    hosts = [peer.member.host for peer in master.machine.membership.peers.values()]
    assert hosts == ["10.0.0.1", "10.0.0.2"]


def test_a_pair_that_cannot_talk_is_apart_in_the_ring() -> None:
    master = Master(3)
    master.register(4)
    master.answered(4)
    master.hear(3, msg.AddressProbed(PeerId(4), ""))
    master.link(4, 2, 3)
    master.hear(4, msg.LinkReport(PeerId(1), False, "x"))
    master.round(UPDATE, 2, 1, 2, 3)
    assert master.ring() == [1, 2, 3]  # the other side has not tried yet
    master.hear(1, msg.LinkReport(PeerId(4), False, "y"))
    master.round(UPDATE, 3, 1, 2, 3)
    assert master.ring() == [1, 2, 4, 3]


def test_a_newcomer_that_is_cut_off_from_its_master_is_not_judged_by_its_links() -> None:
    """It may not have heard yet whom to dial."""
    master = Master(2)
    master.register(3)
    master.answered(3)
    silent_s = Timing().deadline_s - 1
    assert told(master.wait(silent_s, 1, 2), msg.Refused) == []
    assert told(master.tick(Timing().link_s - 1), msg.Refused) == [], "it has as long as others"
    ((to, refused), *_) = told(master.tick(2), msg.Refused)
    assert (to, refused.cause) == (3, RemovalCause.UNREACHABLE)


def test_where_no_ring_avoids_a_pair_it_is_named() -> None:
    master = Master(2)
    master.register(3)
    master.link(3, 2)
    master.hear(3, msg.LinkReport(PeerId(1), False, "connection refused"))
    master.hear(1, msg.LinkReport(PeerId(3), False, "no answer in time"))
    (_, refused), *_ = told(master.tick(Timing().link_s + Timing().dial_s), msg.Refused)
    assert refused.reason == (
        "it could not be linked to peer 1, and no ring avoids the pair: peer 3 cannot dial peer 1 "
        "at 10.0.0.1:4001 (connection refused), and peer 1 cannot dial peer 3 at 10.0.0.3:4003 (no "
        "answer in time); one of the two must be reachable: check the address that it "
        "advertises, and open its port. Or let another process forward: a member that both can "
        "dial, or the master (pccl master --relay)"
    )
    assert master.ring() == [1, 2]


@pytest.mark.parametrize(
    ("host", "seen", "by", "may"),
    [
        ("198.51.100.7", "198.51.100.7", "203.0.113.9", True),
        ("example.org", "198.51.100.7", "203.0.113.9", True),
        ("10.1.2.3", "198.51.100.7", "203.0.113.9", True),  # one network for all, perhaps
        ("127.0.0.1", "198.51.100.7", "203.0.113.9", False),
        ("127.8.9.1", "198.51.100.7", "127.0.0.1", False),
        ("localhost", "198.51.100.7", "203.0.113.9", False),
        ("::1", "198.51.100.7", "203.0.113.9", False),
        ("::ffff:127.0.0.1", "198.51.100.7", "203.0.113.9", False),
        ("0.0.0.0", "198.51.100.7", "203.0.113.9", False),
        ("169.254.169.254", "198.51.100.7", "203.0.113.9", False),
        ("fe80::1%eth0", "198.51.100.7", "203.0.113.9", False),
        ("224.0.0.1", "127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.1", "203.0.113.9", False),  # the master's own machine, not ours
        ("169.254.0.9", "169.254.0.9", "169.254.0.1", True),
    ],
)
def test_loopback_and_link_local_addresses_only_for_who_is_as_near(
    host: str, seen: str, by: str, may: bool
) -> None:
    assert may_be_dialled(host, seen=seen, by=by) is may


def test_an_address_that_must_not_be_dialled_is_not_even_tried() -> None:
    reachability = Reachability(0)
    member = Member(PeerId(1), "127.0.0.1", 22)
    test = reachability.begin(member, "198.51.100.7", None, 0)
    assert test == TryAddress(member, ("198.51.100.7",), "198.51.100.7")


def test_tests_are_few() -> None:
    reachability = Reachability(0)
    begun = [reachability.begin(where(n), f"10.0.0.{n}", None, 0) for n in range(1, 200)]
    assert [test is not None for test in begun].count(True) == TESTS_AT_ONCE_MAX
    later = [reachability.begin(where(n), f"10.0.0.{n}", None, SECOND) for n in range(1, 200)]
    assert [test is not None for test in later].count(True) == TESTS_PER_S
    much_later = [reachability.begin(where(n), "x", None, 10**6 * SECOND) for n in range(1, 200)]
    assert [test is not None for test in much_later].count(True) == TESTS_AT_ONCE_MAX


def test_answers_of_whoever_was_not_asked_change_nothing() -> None:
    reachability = Reachability(0)
    reachability.begin(where(1), "10.0.0.1", PeerId(2), 0)
    reachability.tested(PeerId(1), PeerId(3), "", "a lie")
    reachability.tested(PeerId(9), PeerId(2), "", "of somebody else")
    assert reachability.awaits(PeerId(1))
    reachability.tested(PeerId(1), PeerId(2), "10.0.0.1", "")
    reachability.tested(PeerId(1), PeerId(2), "", "another answer")
    reachability.tested(PeerId(1), None, "10.0.0.1", "")
    assert reachability.why_undialable(PeerId(1)) is None
    assert not reachability.awaits(PeerId(1))


def test_a_tester_that_is_gone_is_not_waited_for() -> None:
    reachability = Reachability(0)
    reachability.begin(where(1), "10.0.0.1", PeerId(2), 0)
    reachability.tested(PeerId(1), None, "10.0.0.1", "")
    assert reachability.awaits(PeerId(1))
    reachability.forget([PeerId(2)])
    assert not reachability.awaits(PeerId(1))


def test_a_newcomer_dials_few_of_those_before_it_that_nobody_has_reached() -> None:
    """They all may have registered at the address of somebody else."""
    master = Master(1)
    for peer in range(2, 42):
        master.register(peer)
        if peer % 10:
            master.do(AddressTried(PeerId(peer), "", "connection refused", key(peer)))
        else:
            master.answered(peer)
    ((_, plan),) = told(master.register(42), msg.LinkPlan)
    unproven = [peer for peer in range(2, 42) if peer % 10][-ELDERS_UNPROVEN_MAX:]
    assert [int(elder.peer) for elder in plan.elders] == sorted([1, 10, 20, 30, 40, *unproven])


def test_a_newcomer_dials_whom_it_needs_a_link_to() -> None:
    """The last one that has its links came before many that have none."""
    master = Master(1)
    for peer in range(2, 42):
        master.undialable(peer)
        master.hear(1, msg.AddressProbed(PeerId(peer), "connection refused"))
    master.link(2, 1)
    ((_, plan),) = told(master.register(42), msg.LinkPlan)
    assert where(2) not in plan.elders
    master.hear(1, msg.AddressProbed(PeerId(42), ""))
    master.answered(42)
    master.link(42, 1)
    needed = [plan for to, plan in told(master.tick(0.25), msg.LinkPlan) if to == 42]
    assert needed == [msg.LinkPlan((where(2),))]
    assert [plan for to, plan in told(master.tick(0.25), msg.LinkPlan) if to == 42] == needed
    master.link(42, 2)
    assert [plan for to, plan in told(master.tick(0.25), msg.LinkPlan) if to == 42] == []


def test_who_is_proven_later_is_dialled_by_those_after_it() -> None:
    master = Master(1)
    for peer in range(2, 42):
        master.register(peer)
    master.answered(5)
    plans = told(master.tick(1), msg.LinkPlan)
    assert {to for to, plan in plans if plan == msg.LinkPlan((where(5),))} == set(range(6, 42))


# -- processes outside the run that ask for a test -------------------------------------------------

ASKER = 70


def answered(seen: str, dialled: bool, reason: str, padding: bytes = b"") -> list[MasterEffect]:
    return [
        SendAddress(ASKER, seen, dialled, reason, padding),
        CloseConnection(ASKER, "the query is answered"),
    ]


def test_a_stranger_learns_how_it_is_seen_and_whether_it_can_be_dialled() -> None:
    master = Master(1)
    before = master.machine.status()
    master.do(ConnectionOpened(ASKER, "10.0.0.9", key(9)))
    (test,) = master.hear(ASKER, msg.AddressQuery("example.org", 48200))
    assert test == TryCaller(ASKER, "example.org", 48200, "10.0.0.9")
    tried = master.do(CallerTried(ASKER, "connection refused"))
    assert tried == answered("10.0.0.9", True, "connection refused")

    master.do(ConnectionOpened(ASKER, "10.0.0.9", key(9)))
    (test,) = master.hear(ASKER, msg.AddressQuery(port=9))
    assert test == TryCaller(ASKER, "10.0.0.9", 9, "10.0.0.9")
    assert master.do(CallerTried(ASKER, "")) == answered("10.0.0.9", True, "")
    assert master.machine.status() == before


def test_a_query_without_a_port_is_answered_at_once() -> None:
    master = Master()
    for _ in range(2 * QUERIES_AT_ONCE_MAX):
        master.do(ConnectionOpened(ASKER, "10.0.0.9", key(9)))
        effects = master.hear(ASKER, msg.AddressQuery(padding=b"pad"))
        assert effects == answered("10.0.0.9", False, "", b"pad")


def test_an_address_of_the_masters_own_machine_is_not_dialled() -> None:
    master = Master()
    master.do(ConnectionOpened(ASKER, "10.0.0.9", key(9)))
    reason = "127.0.0.1 is an address for its own machine or network only"
    effects = master.hear(ASKER, msg.AddressQuery("127.0.0.1", 22))
    assert effects == answered("10.0.0.9", False, reason)


def test_who_left_gets_no_answer_and_may_ask_again() -> None:
    master = Master()
    for _ in range(2):
        master.do(ConnectionOpened(ASKER, "10.0.0.9", key(9)))
        assert len(master.hear(ASKER, msg.AddressQuery(port=9))) == 1
        master.do(ConnectionClosed(ASKER, "it left"))
        assert master.do(CallerTried(ASKER, "")) == []


def test_a_member_asks_nothing() -> None:
    master = Master(1)
    effects = master.hear(1, msg.AddressQuery())
    assert effects == [CloseConnection(1, "AddressQuery is unexpected")]


def test_callers_are_tested_one_at_a_time_for_a_source_and_seldom_in_all() -> None:
    tests, query = CallerTests(0), msg.AddressQuery(port=9)
    assert isinstance(tests.begin(1, query, "10.0.0.1", 0), TryCaller)
    again = tests.begin(2, query, "10.0.0.1", 0)
    assert again == "the master is testing another address for this host; ask again later"
    for caller in range(2, QUERIES_AT_ONCE_MAX + 1):
        assert isinstance(tests.begin(caller, query, f"10.0.0.{caller}", 0), TryCaller)
    tests.ended(1)
    too_many = tests.begin(1, query, "10.0.0.1", 0)
    assert too_many == "the master tests 1 address a second; ask again later"
    assert isinstance(tests.begin(1, query, "10.0.0.1", NS_PER_S // QUERIES_PER_S), TryCaller)


def test_callers_take_nothing_from_newcomers() -> None:
    master = Master()
    for caller in range(2 * QUERIES_AT_ONCE_MAX):
        master.do(ConnectionOpened(ASKER + caller, f"10.0.1.{caller}", key(ASKER + caller)))
        master.hear(ASKER + caller, msg.AddressQuery(port=9))
    newcomers = range(1, TESTS_AT_ONCE_MAX + 1)
    tries = [effect for peer in newcomers for effect in master.register(peer)]
    assert len([effect for effect in tries if isinstance(effect, TryAddress)]) == TESTS_AT_ONCE_MAX


# -- several hosts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "own", "seen", "expected"),
    [
        ("", (), "198.51.100.7", ("198.51.100.7", ())),
        ("", ("192.168.1.5",), "198.51.100.7", ("198.51.100.7", ("192.168.1.5",))),
        ("", ("2001:db8::5", "10.0.0.5"), "10.0.0.5", ("10.0.0.5", ("2001:db8::5",))),
        ("", ("10.0.0.5", "10.0.0.5"), "198.51.100.7", ("198.51.100.7", ("10.0.0.5",))),
        ("", ("127.0.0.1", "fe80::1", "224.0.0.1", ""), "198.51.100.7", ("198.51.100.7", ())),
        ("example.org", ("10.0.0.5",), "198.51.100.7", ("example.org", ("10.0.0.5",))),
        ("x" * 47, ("10.0.0.5",), "198.51.100.7", ("x" * 47, ())),
        ("127.0.0.1", ("10.0.0.5",), "198.51.100.7", ("198.51.100.7", ("10.0.0.5",))),
    ],
)
def test_at_which_hosts_a_peer_is_dialled(
    declared: str, own: tuple[str, ...], seen: str, expected: tuple[str, tuple[str, ...]]
) -> None:
    assert dialled_at(declared, own, seen) == expected
