"""What people are told of one peer: each change once, with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.machines.peer import events as ev
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.machines.peer.reporter import PeerReporter
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.limits import Timing
from pccl.protocol.types import Member, PeerId, RemovalCause, Roster, RoundId, RoundKind
from pccl.telemetry import events as tell
from pccl.telemetry.names import Names
from pccl.telemetry.recorder import Recorder
from pccl.telemetry.stream import EventStream
from tests.support.peer_stage import ME, RUN, SUM, PeerStage
from tests.support.scenarios import op, roster

NAMES = {1: "alice", ME: "bob", 3: "carol", 4: "dave"}
UPDATE = RoundKind.UPDATE_TOPOLOGY
FIRST, THIRD = PeerId(1), PeerId(3)


def members(version: int, *peers: int, view: int = 1) -> Roster:
    """A roster of peers with names."""
    where = tuple(Member(PeerId(n), f"10.0.0.{n}", 4000 + n, 0, NAMES.get(n, "")) for n in peers)
    return roster(version, view, *peers, members=where)


class Told(PeerStage):
    """Peer 2, and what its reporter has put into the stream since it was looked at last."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.names = EventStream(), Names()
        self.reporter = PeerReporter(self.stream, self.names, Recorder(), Timing())
        self._looked = 0

    def do(self, said: Any) -> list[ev.PeerEffect]:
        event = said if isinstance(said, ev.PeerEvent) else ev.ControlMessage(said)
        effects = super().do(event)
        self.reporter.note(self.machine, event, effects, self.now_ns)
        return effects

    def new(self) -> list[tell.PeerReport]:
        kept = [stamped.event for stamped in self.stream.kept]
        new, self._looked = kept[self._looked :], len(kept)
        return new

    def joined(self, *peers: int) -> Told:
        """A member, whose joining has been looked at."""
        self.registered()
        self.admitted(*peers)
        self.do(ev.RoundCall(2, UPDATE))  # the admission is its answer
        self.new()
        return self

    def call(self, call: int) -> RoundId:
        """Make a joint call; return the round that the peer asks for."""
        asked = [one.message for one in self.do(ev.RoundCall(call, UPDATE)) if type(one) is ev.Send]
        (request,) = [one for one in asked if isinstance(one, msg.RoundRequest)]
        return request.round

    def admitted(self, *peers: int, version: int = 1) -> None:
        counts = (msg.RoundCount(UPDATE, 1), msg.RoundCount(RoundKind.PEERS_PENDING, 0))
        self.do(msg.Admitted(members(version, *(peers or (1, ME))), counts))

    def join_again(self, peer: int = 5, run: bytes = RUN) -> None:
        """With a new machine, as an engine does."""
        self.machine = PeerMachine(Timing(), self.now_ns, former_loss=self.machine.loss)
        self.do(ev.JoinCall(3, 0, "", 4002, 5, rejoins=True))
        self.do(ev.ControlOpened(run, 1))
        self.do(msg.Registered(PeerId(peer), 1, run))

    def evict(self, cause: RemovalCause = RemovalCause.SILENT, why: str = "peer 1 said so") -> None:
        now_ms = self.now_ns // 1_000_000
        self.do(msg.Refused(cause, why, now_ms, now_ms))


# -- membership ---------------------------------------------------------------------------------


def test_it_has_joined() -> None:
    peer = Told()
    peer.registered()
    assert peer.new() == []
    peer.admitted(3, 1, ME)
    joined = tell.Joined(
        peer_id=2, name="bob", run=RUN.hex(), rank=2, world_size=3, rejoined=False, away_s=0.0
    )
    assert peer.new() == [joined]
    peer.admitted(3, 1, ME)
    assert peer.new() == []  # a repetition
    assert [peer.names.of(n) for n in (1, 2, 3)] == ["alice", "bob", "carol"]


def test_it_has_rejoined() -> None:
    peer = Told().joined()
    peer.evict()
    peer.new()
    peer.sleep(2.5)
    peer.join_again()
    peer.admitted(1, 5, version=3)
    (joined,) = peer.new()
    assert joined == tell.Joined(
        peer_id=5, name="", run=RUN.hex(), rank=1, world_size=2, rejoined=True, away_s=2.5
    )


def test_an_attempt_to_rejoin_that_failed_is_part_of_its_absence() -> None:
    peer = Told().joined()
    peer.evict()
    peer.sleep(2.0)
    peer.join_again()
    peer.do(msg.Refused(None, "the run is full", 0, 0))
    assert peer.machine.standing is Standing.LOST
    peer.sleep(2.0)
    peer.join_again(6)
    peer.admitted(1, 6, version=3)
    assert [type(event).__name__ for event in peer.new()] == ["MembershipLost", "Joined"]
    last = peer.stream.kept[-1].event
    assert isinstance(last, tell.Joined)
    assert (last.rejoined, last.away_s) == (True, 4.0)


def test_to_join_another_run_is_not_to_rejoin() -> None:
    peer = Told().joined()
    peer.evict()
    peer.sleep(2.0)
    peer.join_again(run=b"another run's id")
    peer.admitted(1, 5)
    (_, joined) = peer.new()
    assert isinstance(joined, tell.Joined)
    assert (joined.rejoined, joined.away_s) == (False, 0.0)


def test_it_was_evicted() -> None:
    peer = Told().joined()
    peer.evict(RemovalCause.CONNECTIONS_LOST, "peers 1, 3 waited for it")
    (lost,) = peer.new()
    assert isinstance(lost, tell.MembershipLost)
    assert lost.cause == "CONNECTIONS_LOST"
    assert "peers 1 (alice), 3 waited for it [CONNECTIONS_LOST]" in lost.reason
    peer.wait(2.0)
    peer.do(ev.Close())
    assert peer.new() == []


def test_it_has_left() -> None:
    peer = Told().joined()
    peer.do(ev.Close())
    assert peer.new() == [tell.MembershipLost(cause="CLOSED", reason="the communicator was closed")]


def test_a_caller_that_leaves_its_own_admission_costs_the_membership() -> None:
    peer = Told().joined()
    peer.do(ev.LeftAdmitted())
    (lost,) = peer.new()
    assert isinstance(lost, tell.MembershipLost)
    assert lost.cause == "DeadlineExceeded"


def test_a_newcomer_that_goes_was_never_a_member() -> None:
    peer = Told()
    peer.registered()
    peer.do(ev.Close())
    assert peer.new() == []


def test_a_bug_ends_the_membership_and_what_waits() -> None:
    peer = Told().joined()
    peer.do(msg.RoundWaits(peer.call(9), 2, "peer 1"))
    peer.sleep(1.0)
    peer.new()
    bug = errors.LocalProtocolError(reason="a bug")
    peer.reporter.broke_down(bug, peer.now_ns)
    peer.reporter.broke_down(bug, peer.now_ns)
    assert peer.new() == [
        tell.WaitingEnded(call="update_topology", waited_s=3.0),
        tell.MembershipLost(cause="INTERNAL_ERROR", reason="a bug"),
    ]
    peer.join_again()
    peer.admitted(1, 5, version=3)
    (joined,) = peer.new()
    assert isinstance(joined, tell.Joined)
    assert joined.rejoined


# -- other members ------------------------------------------------------------------------------


def test_another_has_joined() -> None:
    peer = Told().joined()
    peer.do(msg.RosterChanged(members(2, 1, ME, 3, view=2)))
    new = tell.MemberJoined(peer_id=3, name="carol", host="10.0.0.3", world_size=3)
    assert peer.new() == [new]
    peer.do(msg.RosterChanged(members(2, 1, ME, 3, view=2)))  # a repetition
    peer.do(msg.RosterChanged(members(3, ME, 3, 1, view=3)))  # another order
    assert peer.new() == []


@pytest.mark.parametrize(
    ("departures", "cause", "reason"),
    [
        ((), "", ""),
        ((msg.Departure(FIRST, RemovalCause.GOODBYE, "it left"),), "", ""),
        (
            (msg.Departure(THIRD, RemovalCause.CONNECTIONS_LOST, "peer 1 lost its link"),),
            "CONNECTIONS_LOST",
            "peer 1 (alice) lost its link",
        ),
    ],
)
def test_another_is_lost(departures: Any, cause: str, reason: str) -> None:
    peer = Told().joined(1, ME, 3)
    peer.do(msg.RosterChanged(members(2, 1, ME, view=2), departures))
    lost = tell.MemberLost(peer_id=3, name="carol", cause=cause, reason=reason, world_size=2)
    assert peer.new() == [lost]


def test_one_takes_the_place_of_another() -> None:
    peer = Told().joined(1, ME, 3)
    peer.do(msg.RosterChanged(members(2, 1, ME, 4, view=2)))
    assert peer.new() == [
        tell.MemberLost(peer_id=3, name="carol", cause="", reason="", world_size=3),
        tell.MemberJoined(peer_id=4, name="dave", host="10.0.0.4", world_size=3),
    ]


def test_an_outdated_roster_says_nothing() -> None:
    peer = Told().joined()
    peer.do(msg.RosterChanged(members(3, 1, ME, 3, view=3)))
    peer.new()
    peer.do(msg.RosterChanged(members(2, 1, ME, view=2)))
    assert peer.new() == []


def test_members_that_changed_before_the_admission_arrived_are_no_news() -> None:
    peer = Told()
    peer.registered()
    peer.do(msg.RosterChanged(members(2, 1, ME, 3, view=2)))
    peer.admitted(1, ME)
    (joined,) = peer.new()
    assert isinstance(joined, tell.Joined)
    assert joined.world_size == 3
    peer.do(msg.RosterChanged(members(3, 1, ME, 3, view=3)))
    assert peer.new() == []


# -- the master ---------------------------------------------------------------------------------


def reconnect(peer: Told, term: int = 1) -> None:
    peer.do(ev.ControlOpened(RUN, 1))
    peer.do(msg.Resumed(term, b"", ()))


def test_a_master_that_is_back_at_once_is_no_news() -> None:
    peer = Told().joined()
    peer.do(ev.ControlClosed("reset"))
    peer.wait(0.75)
    reconnect(peer)
    peer.wait(2.0, hears=msg.MasterHeartbeat())
    assert peer.new() == []


def test_a_master_that_stays_away_is_reported_once_and_so_is_its_return() -> None:
    peer = Told().joined()
    peer.wait(2.0, hears=msg.MasterHeartbeat())
    peer.do(ev.ControlClosed("reset"))
    peer.do(ev.ControlClosed("connection refused"))
    peer.wait(0.75)
    assert peer.new() == []
    peer.wait(0.25)
    gone = tell.MasterDisconnected(reason="connection refused", gives_up_s=59.0)
    assert peer.new() == [gone]
    peer.do(ev.ControlClosed("connection refused"))
    peer.wait(4.0)
    peer.do(ev.ControlOpened(RUN, 1))  # it may still refuse this peer
    assert peer.new() == []
    peer.sleep(1.5)
    peer.do(msg.Resumed(2, b"", ()))
    assert peer.new() == [tell.MasterReconnected(away_s=6.5, term=2)]


def test_each_absence_is_reported() -> None:
    peer = Told().joined()
    for _ in range(2):
        peer.do(ev.ControlClosed("reset"))
        peer.wait(1.0)
        reconnect(peer)
        assert [type(event) for event in peer.new()] == [
            tell.MasterDisconnected,
            tell.MasterReconnected,
        ]


def test_a_master_that_is_silent_is_reported_although_its_connection_stays_open() -> None:
    peer = Told().joined()
    peer.call(9)
    peer.wait(Timing().deadline_s + 1.0)
    (gone,) = peer.new()
    assert isinstance(gone, tell.MasterDisconnected)
    assert gone.reason == "the connection is open, but the master sends nothing"


def test_a_master_that_does_not_come_back_costs_the_membership() -> None:
    peer = Told().joined()
    peer.do(ev.ControlClosed("reset"))
    peer.wait(Timing().master_lost_s)
    gone, lost = peer.new()
    assert isinstance(gone, tell.MasterDisconnected)
    assert isinstance(lost, tell.MembershipLost)
    assert lost.cause == "MASTER_LOST"
    peer.join_again()
    peer.admitted(1, 5, version=3)
    peer.wait(2.0, hears=msg.MasterHeartbeat())
    assert [type(event) for event in peer.new()] == [tell.Joined]


def test_a_newcomer_reports_no_absence_of_its_master() -> None:
    peer = Told()
    peer.registered()
    peer.do(ev.ControlClosed("reset"))
    peer.wait(3.0)
    reconnect(peer)
    assert peer.new() == []


# -- waits --------------------------------------------------------------------------------------


def test_a_wait_is_reported_until_its_call_ends() -> None:
    peer = Told().joined(1, ME, 3)
    peer.do(ev.ReduceCall(9, 5, SUM))
    whom = "peer 3 at 10.0.0.3 (in no call), peer 4 at 10.0.0.4 (in no call)"
    named = "peer 3 (carol) at 10.0.0.3 (in no call), peer 4 at 10.0.0.4 (in no call)"
    waits: list[tell.PeerReport] = []
    for waited_s, others in ((2, 0), (4, 3), (8, 1)):
        peer.do(msg.OperationWaits(op(), waited_s, whom, (), others))
        peer.sleep(1.0)
        waits += peer.new()
    call = "tag 5 (SUM of 8 x float32)"  # a listener knows by it which wait ends
    assert waits == [
        tell.Waiting(call=call, waits_for=named, waited_s=waited_s, others=others)
        for waited_s, others in ((2, 0), (4, 3), (8, 1))
    ]
    peer.do(msg.RosterChanged(members(2, 1, ME, view=2)))
    peer.new()
    peer.do(ev.LeaveCall(9, "the caller left"))
    assert peer.new() == [tell.WaitingEnded(call=call, waited_s=5.0)]


@pytest.mark.parametrize("ending", [ev.Close(), ev.LeaveCall(9, "the caller left")])
def test_a_wait_ends_with_whatever_ends_its_call(ending: ev.PeerEvent) -> None:
    peer = Told().joined()
    peer.do(msg.RoundWaits(peer.call(9), 2, "peer 1"))
    peer.new()
    peer.sleep(0.5)
    peer.do(ending)
    assert tell.WaitingEnded(call="update_topology", waited_s=2.5) in peer.new()


def test_a_newcomer_says_what_its_admission_waits_for() -> None:
    peer = Told()
    peer.registered()
    peer.do(msg.AdmissionWaits(4, "update_topology of peer 1"))
    peer.sleep(2.0)
    waiting = tell.Waiting(call="connect", waits_for="update_topology of peer 1", waited_s=4)
    assert peer.new() == [waiting]
    peer.admitted()
    ended, joined = sorted(peer.new(), key=lambda one: isinstance(one, tell.Joined))
    assert ended == tell.WaitingEnded(call="connect", waited_s=6.0)
    assert isinstance(joined, tell.Joined)


def test_a_call_that_has_not_waited_long_ends_in_silence() -> None:
    peer = Told().joined()
    peer.call(9)
    peer.do(ev.LeaveCall(9, "the caller left"))
    assert peer.new() == []


# -- links and addresses ------------------------------------------------------------------------


def test_a_link_is_lost_and_restored() -> None:
    peer = Told().joined()
    peer.do(ev.LinkChanged(FIRST, None))
    assert peer.new() == []  # the first time is no restoration
    peer.do(ev.LinkChanged(FIRST, "peer 1 reset it"))
    peer.do(ev.LinkChanged(FIRST, "refused"))
    peer.sleep(0.75)
    peer.do(ev.Tick())
    assert peer.new() == []  # it may be the end of that peer
    peer.sleep(0.25)
    peer.do(ev.Tick())
    peer.do(ev.Tick())
    lost = tell.LinkLost(peer_id=1, name="alice", reason="peer 1 (alice) reset it")
    assert peer.new() == [lost]
    peer.sleep(0.25)
    peer.do(ev.LinkChanged(FIRST, None))
    assert peer.new() == [tell.LinkRestored(peer_id=1, name="alice", away_s=1.25)]


def test_a_link_that_is_back_at_once_was_lost_all_the_same() -> None:
    peer = Told().joined()
    peer.do(ev.LinkChanged(FIRST, "reset"))
    peer.sleep(0.25)
    peer.do(ev.LinkChanged(FIRST, None))
    lost = tell.LinkLost(peer_id=1, name="alice", reason="reset")
    assert peer.new() == [lost, tell.LinkRestored(peer_id=1, name="alice", away_s=0.25)]


def test_links_to_newcomers_come_and_go() -> None:
    peer = Told().joined()
    peer.do(ev.LinkChanged(THIRD, None))
    peer.do(ev.LinkChanged(THIRD, "reset"))
    peer.do(msg.RosterChanged(members(2, 1, ME, 3, view=2)))
    peer.new()
    peer.do(ev.LinkChanged(THIRD, None))
    assert peer.new() == []


def test_a_link_to_a_lost_member_is_not_restored() -> None:
    peer = Told().joined(1, ME, 3)
    peer.do(ev.LinkChanged(THIRD, "reset"))
    peer.do(msg.RosterChanged(members(2, 1, ME, view=2)))
    peer.do(msg.RosterChanged(members(3, 1, ME, 3, view=3)))
    peer.new()
    peer.do(ev.LinkChanged(THIRD, None))
    assert peer.new() == []


def test_an_address_that_no_peer_can_dial_is_reported() -> None:
    peer = Told()
    peer.registered()
    peer.do(msg.Undialable("at 10.0.0.2:4002 (peer 1: no answer in time)"))
    (told,) = peer.new()
    assert isinstance(told, tell.AddressUnreachable)
    assert told.reason.startswith("peers cannot dial this peer at 10.0.0.2:4002")


# -- any sequence -------------------------------------------------------------------------------

_PEERS = st.sets(st.sampled_from([1, 3, 4, 5]), max_size=4)
_LINKS = st.tuples(st.sampled_from([1, 3, 4, 5]), st.sampled_from([None, "reset"]))
_STEPS = st.one_of(
    st.tuples(st.just("roster"), _PEERS, st.integers(-1, 2)),
    st.tuples(st.just("link"), _LINKS, st.just(0)),
    st.tuples(
        st.sampled_from(["evict", "close", "drop", "resume", "wait", "admit", "call", "leave"]),
        st.just(None),
        st.integers(0, 3),
    ),
)


class Chance(Told):
    """Does one thing after another, as far as the machine can take it."""

    version = 1
    calls = 100

    def step(self, what: str, which: Any, number: int) -> None:
        machine = self.machine
        match what:
            case "roster" if machine.standing is Standing.MEMBER:
                self.version += max(number, 0)
                ring = sorted({*which, machine.peer})
                departures = tuple(
                    msg.Departure(PeerId(one), RemovalCause.SILENT, "gone") for one in (1, 3)
                )
                changed = members(max(self.version + min(number, 0), 1), *ring, view=self.version)
                self.do(msg.RosterChanged(changed, departures))
            case "link":
                self.do(ev.LinkChanged(PeerId(which[0]), which[1]))
            case "evict" if machine.own.takes_part:
                self.evict()
            case "close":
                self.do(ev.Close())
            case "drop" if machine.own.takes_part:
                self.do(ev.ControlClosed("reset"))
            case "resume" if machine.standing is Standing.MEMBER:
                reconnect(self)
            case "wait":
                self.wait(number + 0.5)
            case "call" if machine.standing is Standing.MEMBER and not machine.in_round:
                self.calls += 1
                for one in self.do(ev.RoundCall(self.calls, UPDATE)):
                    if isinstance(one, ev.Send) and isinstance(one.message, msg.RoundRequest):
                        self.do(msg.RoundWaits(one.message.round, 2, "peer 1"))
            case "leave":
                self.do(ev.LeaveCall(self.calls, "the caller left"))
            case "admit" if not machine.own.takes_part or machine.standing is Standing.PENDING:
                if machine.standing is not Standing.PENDING:
                    self.join_again(20 + self.version)
                self.version += 1
                self.admitted(1, self.machine.peer, version=self.version)
            case _:
                pass


@given(st.lists(_STEPS, max_size=30))
def test_after_any_sequence_the_events_tell_the_present(steps: list[Any]) -> None:
    """Who listens knows the members, without one that was lost before it came."""
    peer = Chance()
    peer.registered()
    present: set[int] | None = None
    unlinked: set[int] = set()
    for what, which, number in steps:
        peer.step(what, which, number)
        for event in peer.new():
            match event:
                case tell.Joined(peer_id=own):
                    assert present is None
                    # Peers that were there before are in the roster, not in events.
                    assert peer.machine.newest is not None
                    present = set(map(int, peer.machine.newest.ring)) - {own}
                case tell.MembershipLost():
                    assert present is not None
                    present = None
                    unlinked.clear()
                case tell.MemberJoined(peer_id=one, name=name):
                    assert present is not None
                    assert one not in present
                    assert name == NAMES.get(one, "")
                    present.add(one)
                case tell.MemberLost(peer_id=one):
                    assert present is not None
                    present.remove(one)
                    unlinked.discard(one)
                case tell.LinkLost(peer_id=one):
                    assert present is not None
                    assert one in present
                    assert one not in unlinked
                    unlinked.add(one)
                case tell.LinkRestored(peer_id=one):
                    unlinked.remove(one)
                case _:
                    pass
        is_member = peer.machine.standing is Standing.MEMBER
        assert (present is not None) is is_member
        if present is not None:
            assert peer.machine.newest is not None
            assert present == {*peer.machine.newest.ring} - {peer.machine.peer}
