"""Which algorithm an all-reduce takes: the table of a view, from the master to every request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pccl._api.arguments import check_algorithm, reduce_request
from pccl.machines.master import membership
from pccl.machines.master.ballots.ballot import Abort, Commit
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.events import ConnectionMessage as Heard
from pccl.machines.master.events import ConnectionOpened as Opened
from pccl.machines.master.events import MasterEffect, MasterTick
from pccl.machines.master.events import SendTo as Told
from pccl.machines.master.machine import MasterMachine
from pccl.machines.master.succession.origin import Origin
from pccl.machines.peer.events import (
    ControlMessage,
    ControlOpened,
    JoinCall,
    LeaveCall,
    LinkMeasurements,
    PeerEffect,
    PeerEvent,
    Post,
    ReduceCall,
    ReduceDone,
    ReduceResult,
    ReturnCall,
    RoundCall,
    Send,
)
from pccl.machines.peer.machine import PeerMachine
from pccl.machines.peer.words import aborted
from pccl.machines.repair import Tell
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.handshake import RUN_BYTES
from pccl.protocol.limits import BYTES_PER_S_MAX, RTT_NS_MAX, TERM_GAP, Timing
from pccl.protocol.types import (
    ALGORITHM_STEPS_MAX,
    NS_PER_S,
    STAR_BYTES_MAX,
    AbortCause,
    Algorithm,
    AlgorithmStep,
    AlgorithmTable,
    Descriptor,
    LinkMeasure,
    MeasuredLink,
    Member,
    OperationId,
    PeerId,
    Quantization,
    ReduceOp,
    Roster,
    RoundId,
    RoundKind,
    WireFormat,
)
from pccl.topology.link_measures import LinkMatrix, ToldMeasures
from pccl.topology.ring_order import Pair

UPDATE, OPTIMIZE = RoundKind.UPDATE_TOPOLOGY, RoundKind.OPTIMIZE_TOPOLOGY
RUN = b"r" * RUN_BYTES
RING, STAR, MESH = Algorithm.RING, Algorithm.STAR, Algorithm.MESH

SMALL_STAR = AlgorithmTable((AlgorithmStep(64, STAR), AlgorithmStep(1024, MESH)), RING)
"""Up to 16 float32 by star, up to 256 by mesh, more by ring."""

SUM = Descriptor(DataType.FLOAT, ReduceOp.SUM, 16)


def by(algorithm: Algorithm, count: int = 16, *, forced: bool = False) -> Descriptor:
    return Descriptor(DataType.FLOAT, ReduceOp.SUM, count, algorithm=algorithm, forced=forced)


def measured(*links: tuple[int, int, int]) -> msg.LinksMeasured:
    return msg.LinksMeasured(
        tuple(MeasuredLink(PeerId(peer), LinkMeasure(rtt, speed)) for peer, rtt, speed in links)
    )


# -- the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor_bytes", "algorithm"),
    [(0, STAR), (64, STAR), (65, MESH), (1024, MESH), (1025, RING), (1 << 40, RING)],
)
def test_a_table_is_read_from_the_small_ones_up(tensor_bytes: int, algorithm: Algorithm) -> None:
    assert SMALL_STAR.algorithm_for(tensor_bytes) is algorithm
    assert SMALL_STAR.is_sound


@pytest.mark.parametrize(
    "table",
    [
        AlgorithmTable((AlgorithmStep(64, STAR), AlgorithmStep(64, MESH))),
        AlgorithmTable((AlgorithmStep(65, STAR), AlgorithmStep(64, MESH))),
        AlgorithmTable((AlgorithmStep(64, Algorithm.AUTO),)),
        AlgorithmTable((), Algorithm.AUTO),
        AlgorithmTable((), STAR),
        AlgorithmTable((), RING, STAR),
        AlgorithmTable((AlgorithmStep(STAR_BYTES_MAX + 1, STAR),)),
        AlgorithmTable(tuple(AlgorithmStep(n, MESH) for n in range(ALGORITHM_STEPS_MAX + 1))),
    ],
)
def test_tables_that_no_master_makes(table: AlgorithmTable) -> None:
    assert not table.is_sound


def test_what_auto_becomes() -> None:
    assert SUM.settled(SMALL_STAR) == replace(SUM, algorithm=STAR)
    assert by(MESH, forced=True).settled(SMALL_STAR) == by(MESH, forced=True)
    coded = replace(SUM, count=1024, quantization=Quantization(WireFormat.INT8, 32))
    rounds_less = AlgorithmTable((), RING, MESH)
    assert coded.settled(rounds_less) == replace(coded, algorithm=MESH)
    assert coded.settled(AlgorithmTable()) == replace(coded, algorithm=RING)
    assert SUM.settled(rounds_less) == by(RING)
    broadcast = Descriptor.broadcast(DataType.FLOAT, 16, 0)
    assert broadcast.settled(SMALL_STAR) == broadcast
    assert Descriptor.barrier().settled(SMALL_STAR) == Descriptor.barrier()
    assert [what.follows_ring for what in (SUM, by(RING), by(STAR), by(MESH), broadcast)] == [
        True, True, False, False, True,
    ]  # fmt: skip


def test_only_a_forced_algorithm_is_told_to_people() -> None:
    assert str(by(MESH)) == "SUM of 16 x float32"
    assert str(by(MESH, forced=True)) == "SUM of 16 x float32 by mesh"


# -- arguments ---------------------------------------------------------------------------------


def test_an_algorithm_is_given_by_name_or_as_a_member() -> None:
    names = ("auto", "ring", "star", "mesh")
    assert [check_algorithm(name) for name in names] == [0, 1, 2, 3]
    assert check_algorithm(Algorithm.MESH) is MESH


@pytest.mark.parametrize(
    ("given", "error"),
    [("tree", ValueError), ("Ring", ValueError), (1, TypeError), (None, TypeError)],
)
def test_what_is_no_algorithm(given: Any, error: type[Exception]) -> None:
    with pytest.raises(
        error, match=r"algorithm must be one of 'auto', 'ring', 'star', 'mesh', not"
    ):
        check_algorithm(given)


def request(count: int, algorithm: str) -> Descriptor:
    tensor = np.zeros(count, np.float32)
    return reduce_request(tensor, algorithm=algorithm).asks.descriptor


def test_what_is_asked_for() -> None:
    assert request(16, "auto") == SUM
    assert request(16, "ring") == by(RING, forced=True)
    largest = STAR_BYTES_MAX // 4
    assert request(largest, "star") == by(STAR, largest, forced=True)
    assert request(largest + 1, "mesh") == by(MESH, largest + 1, forced=True)
    with pytest.raises(
        ValueError, match="up to 4194304 bytes, and this one has 4194308; take 'mesh'"
    ):
        request(largest + 1, "star")


# -- peers -------------------------------------------------------------------------------------

MEMBERS = tuple(Member(PeerId(n), f"10.0.0.{n}", 4000 + n) for n in (1, 2, 3))


def roster(version: int, view: int, table: AlgorithmTable, *views: int) -> Roster:
    return Roster(version, 0, view, MEMBERS, views or (view,), 3, 1, 3, algorithms=table)


class Peer:
    """Peer 2 of three."""

    def __init__(self, table: AlgorithmTable) -> None:
        self.machine = PeerMachine(Timing(), 0)
        self.do(JoinCall(1, 0, "", 4002, 1))
        self.do(ControlOpened(RUN, 1))
        self.hear(msg.Registered(PeerId(2), 1, RUN, b"token"))
        self.hear(msg.Admitted(roster(1, 1, table), ()))

    def do(self, event: PeerEvent) -> list[PeerEffect]:
        effects = self.machine.handle(event, 0)
        self.machine.check()
        return effects

    def hear(self, message: msg.Message) -> list[PeerEffect]:
        return self.do(ControlMessage(message))


def sent(effects: list[PeerEffect]) -> list[msg.PeerMessage]:
    return [effect.message for effect in effects if isinstance(effect, Send)]


def what(n: int = 0, view: int = 1) -> OperationId:
    return OperationId(1, 0, view, 5, n)


def test_auto_is_settled_before_anybody_is_asked() -> None:
    peer = Peer(SMALL_STAR)
    assert peer.do(ReduceCall(9, 5, SUM)) == [
        Post(9, what(), by(STAR), (PeerId(1), PeerId(2), PeerId(3))),
        Send(msg.OperationRequest(what(), by(STAR))),
    ]
    peer.hear(msg.OperationStarted(what()))
    peer.do(ReduceDone(what(), b"digest"))
    ended = msg.OperationEnded(what(), None, "", (PeerId(1), PeerId(2), PeerId(3)), 1)
    result = ReduceResult(what(), ended.contributors, 1, STAR)
    assert ReturnCall(9, result) in peer.hear(ended)


def test_the_view_says_what_auto_is_and_a_caller_who_forces_it_is_asked_nothing() -> None:
    peer = Peer(AlgorithmTable())
    assert sent(peer.do(ReduceCall(9, 5, SUM))) == [msg.OperationRequest(what(), by(RING))]
    assert sent(peer.do(ReduceCall(10, 6, by(MESH, forced=True)))) == [
        msg.OperationRequest(replace(what(), tag=6), by(MESH, forced=True))
    ]


def test_a_hostile_table_ends_the_connection() -> None:
    peer = Peer(SMALL_STAR)
    bad = roster(2, 2, AlgorithmTable((), Algorithm.AUTO))
    with pytest.raises(errors.RemoteProtocolError, match="invalid algorithm table"):
        peer.hear(msg.RosterChanged(bad))


def test_after_optimizing_a_caller_goes_on_in_the_view_that_it_has_opened() -> None:
    peer = Peer(AlgorithmTable())
    peer.do(RoundCall(8, OPTIMIZE))
    peer.hear(msg.RosterChanged(roster(2, 2, SMALL_STAR)))
    assert peer.hear(msg.RoundClosed(RoundId(OPTIMIZE, 0), 2, False))[-1:] == [ReturnCall(8, None)]
    effects = peer.do(ReduceCall(9, 5, SUM))
    assert sent(effects) == [msg.OperationRequest(what(view=2), by(STAR))]


def test_who_has_left_the_round_goes_on_there_too() -> None:
    peer = Peer(AlgorithmTable())
    peer.do(RoundCall(8, OPTIMIZE))
    peer.do(LeaveCall(8, "impatient"))
    peer.hear(msg.RosterChanged(roster(2, 2, SMALL_STAR)))
    peer.hear(msg.RoundClosed(RoundId(OPTIMIZE, 0), 2, False))
    assert sent(peer.do(ReduceCall(9, 5, SUM))) == [msg.OperationRequest(what(view=2), by(STAR))]
    peer.hear(msg.OperationEnded(what(view=2), AbortCause.WITHDRAWN, "", (), 2))
    assert peer.do(RoundCall(10, OPTIMIZE)) == [ReturnCall(10, None)]  # its answer is still his


def test_only_what_has_changed_much_is_reported_and_everything_to_a_new_master() -> None:
    def link(peer: int, rtt_ns: int, speed: int) -> MeasuredLink:
        return MeasuredLink(PeerId(peer), LinkMeasure(rtt_ns, speed))

    peer = Peer(AlgorithmTable())
    first = (link(1, 50_000, 0), link(3, 80_000_000, 10**7))
    assert sent(peer.do(LinkMeasurements(first))) == [msg.LinksMeasured(first)]
    assert peer.do(LinkMeasurements(first)) == []
    # 149 us is noise; 1.5 times as long or as fast is no news yet.
    same = (link(1, 149_000, 0), link(3, 120_000_000, 15 * 10**6))
    assert peer.do(LinkMeasurements(same)) == []
    news = (link(1, 50_000, 10**9), link(3, 121_000_000, 10**7))
    assert sent(peer.do(LinkMeasurements(news))) == [msg.LinksMeasured(news)]
    slower = (link(3, 121_000_000, 6 * 10**6),)
    assert sent(peer.do(LinkMeasurements(slower))) == [msg.LinksMeasured(slower)]
    report = sent(peer.do(ControlOpened(RUN, 2)))
    assert isinstance(report[0], msg.Return)
    assert msg.LinksMeasured((news[0], slower[0])) in report


def test_measures_of_links_that_are_gone_are_forgotten() -> None:
    told = ToldMeasures()
    links = tuple(MeasuredLink(PeerId(n), LinkMeasure(n * 10**6, n)) for n in (1, 2))
    assert told.news(links) == links
    told.keep({PeerId(2)})
    assert list(told.all()) == [links[1]]
    assert told.news(links) == links[:1]


# -- the master --------------------------------------------------------------------------------


def by_speed(ring: Sequence[PeerId], links: LinkMatrix, broken: Collection[Pair]) -> AlgorithmTable:
    """A star up to so many bytes as the slowest link brings in a second; no mesh past a gap."""
    speeds = [measure.bytes_per_s for (a, b), measure in links.items() if a in ring and b in ring]
    if not speeds:
        return AlgorithmTable()
    mesh = () if broken else (AlgorithmStep(1 << 40, MESH),)
    return AlgorithmTable((AlgorithmStep(min(speeds), STAR), *mesh))


def star_up_to(tensor_bytes: int, *, mesh: bool = True) -> AlgorithmTable:
    beyond = (AlgorithmStep(1 << 40, MESH),) if mesh else ()
    return AlgorithmTable((AlgorithmStep(tensor_bytes, STAR), *beyond))


@pytest.fixture(autouse=True)
def _chosen_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(membership, "choose_algorithms", by_speed)


class Master:
    """Three members in a view that was opened when nothing was measured."""

    def __init__(self, size: int = 3) -> None:
        numbers = iter(range(1, 99))
        self.machine = MasterMachine(Timing(), RUN, 1, lambda n: bytes([next(numbers)] * n), 0)
        self.now_ns = 0
        for peer in range(1, size + 1):
            self.register(peer)
        self.round(UPDATE, 0, 1)

    def do(self, event: Any) -> list[MasterEffect]:
        effects = self.machine.handle(event, self.now_ns)
        self.machine.check()
        return effects

    def hear(self, peer: int, message: msg.Message) -> list[MasterEffect]:
        return self.do(Heard(peer, message))

    def register(self, peer: int) -> None:
        self.do(Opened(peer, f"10.0.0.{peer}"))
        self.hear(peer, msg.Register(0, "", 4000 + peer))
        for elder in range(1, peer):
            self.hear(peer, msg.LinkReport(PeerId(elder), True, ""))

    def round(self, kind: RoundKind, n: int, *peers: int) -> list[MasterEffect]:
        effects: list[MasterEffect] = []
        for peer in peers:
            effects = self.hear(peer, msg.RoundRequest(RoundId(kind, n)))
        return effects

    @property
    def table(self) -> AlgorithmTable:
        return self.machine.membership.roster(0).algorithms

    @property
    def view(self) -> int:
        return self.machine.membership.newest_view(0)


def test_a_view_is_opened_with_what_is_known_then() -> None:
    master = Master()
    assert (master.view, master.table) == (2, AlgorithmTable())
    master.hear(1, measured((2, 10**6, 1000)))
    assert master.table == AlgorithmTable()  # of the view, which is open
    master.register(4)
    master.hear(4, measured((1, 10**6, 500)))
    effects = master.round(UPDATE, 1, 1, 2, 3)
    assert (master.view, master.table) == (3, star_up_to(500))
    told = [
        effect.message.roster
        for effect in effects
        if isinstance(effect, Told) and isinstance(effect.message, msg.RosterChanged | msg.Admitted)
    ]
    assert {known.algorithms for known in told} == {star_up_to(500)}
    assert len(told) == 4


def test_optimizing_opens_a_view_for_another_table_and_only_then() -> None:
    master = Master()
    answer = master.round(OPTIMIZE, 0, 1, 2, 3)
    assert (master.view, master.table) == (2, AlgorithmTable())
    assert all(isinstance(e.message, msg.RoundClosed) for e in answer if isinstance(e, Told))
    master.hear(3, measured((1, 10**6, 700), (2, 10**6, 900)))
    answer = master.round(OPTIMIZE, 1, 1, 2, 3)
    assert (master.view, master.table) == (3, star_up_to(700))
    kinds = [type(e.message) for e in answer if isinstance(e, Told)]
    assert kinds == [msg.RosterChanged] * 3 + [msg.RoundClosed] * 3  # in that order
    version = master.machine.membership.version
    answers = [e.message for e in answer if isinstance(e, Told)][3:]
    assert answers == [msg.RoundClosed(RoundId(OPTIMIZE, 1), version, False)] * 3
    assert master.machine.membership.roster(0).open_views == (3,)
    master.round(OPTIMIZE, 2, 1, 2, 3)
    assert master.view == 3


def test_a_view_in_which_something_is_asked_for_stays() -> None:
    master = Master()
    master.hear(3, measured((1, 10**6, 700)))
    master.hear(1, msg.RoundRequest(RoundId(OPTIMIZE, 0)))
    master.hear(1, msg.OperationRequest(what(view=2), by(RING)))  # its caller has left the round
    master.round(OPTIMIZE, 0, 2, 3)
    assert (master.view, master.table) == (2, AlgorithmTable())


def test_a_loss_opens_a_view_and_takes_the_measures_along() -> None:
    master = Master()
    master.hear(3, measured((1, 10**6, 700)))
    master.hear(1, measured((2, 10**6, 900)))
    master.hear(3, msg.Goodbye())
    assert (master.view, master.table) == (3, star_up_to(900))


def test_measures_are_bounded_and_of_the_own_group() -> None:
    master = Master()
    master.hear(1, measured((1, 5, 5), (99, 5, 5), (2, 1 << 63, 1 << 63)))
    known = master.machine.membership._measures.matrix  # pyright: ignore[reportPrivateUsage]
    assert known == {(PeerId(1), PeerId(2)): LinkMeasure(RTT_NS_MAX, BYTES_PER_S_MAX)}


def what_a_broken_pair_ends(master: Master) -> list[msg.OperationEnded]:
    """Peers 1 and 3 of four, who are no neighbours, cannot talk to each other for 3 s."""
    master.hear(3, msg.LinkReport(PeerId(1), False, "reset"))
    effects: list[MasterEffect] = []
    for _ in range(12):
        master.now_ns += NS_PER_S // 4
        for peer in (1, 2, 3, 4):
            master.hear(peer, msg.Heartbeat())
        effects += master.do(MasterTick())
    told = [effect.message for effect in effects if isinstance(effect, Told)]
    return [message for message in told if isinstance(message, msg.OperationEnded)]


def test_a_mesh_of_members_that_cannot_talk_gives_way_to_a_view_without_one() -> None:
    master = Master(size=4)
    master.hear(1, measured((2, 10**6, 900)))
    master.round(OPTIMIZE, 0, 1, 2, 3, 4)
    assert master.table == star_up_to(900)
    asked = what(view=3)
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, by(MESH)))
    aborts = what_a_broken_pair_ends(master)
    assert [m.abort for m in aborts] == [AbortCause.VIEW_CLOSED] * 4
    assert aborts[0].reason == (
        "peers 1 and 3 cannot talk to each other (reset); the master opened another view"
    )
    assert (master.view, master.table) == (4, star_up_to(900, mesh=False))
    assert len(master.machine.membership.members()) == 4


def test_a_mesh_that_was_named_fails_alone_where_members_cannot_talk() -> None:
    """Another view would be no help, and would cost everybody else's operations."""
    master = Master(size=4)
    view = master.view
    asked = what(view=view)
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, by(MESH, forced=True)))
        master.hear(peer, msg.OperationRequest(replace(asked, tag=6), by(RING)))
    aborts = what_a_broken_pair_ends(master)
    assert [(m.operation, m.abort) for m in aborts] == [(asked, AbortCause.LINK_BROKEN)] * 4
    assert aborts[0].reason == (
        "peers 1 and 3 cannot talk to each other (reset); leave algorithm out, or name the ring"
    )
    assert master.view == view
    error = aborted(aborts[0], 0)
    assert isinstance(error, errors.LinkError)


# -- restart -----------------------------------------------------------------------------------


def test_a_restarted_master_keeps_the_table_of_a_view_and_learns_the_measures_anew() -> None:
    numbers = iter(range(1, 99))
    machine = MasterMachine(
        Timing(), RUN, 2, lambda n: bytes([next(numbers)] * n), 0, Origin.RESTARTED,
        b"next",
    )  # fmt: skip
    known = roster(7, 3, star_up_to(700))
    for peer in (1, 2, 3):
        machine.handle(Opened(peer, f"10.0.0.{peer}"), 0)
        registration = msg.Register(0, "", 4000 + peer)
        header = msg.Return(PeerId(peer), b"t%d" % peer, RUN, 1, registration, 7, (), b"before")
        for message in (header, msg.KnownRoster(known), measured((peer % 3 + 1, 10**6, 400))):
            machine.handle(Heard(peer, message), 0)
        machine.handle(Heard(peer, msg.Reported()), 0)
    assert not machine.recovering
    now = machine.membership.roster(0)
    assert (now.version, now.view, now.algorithms) == (7 + TERM_GAP + 1, 3, star_up_to(700))
    for peer in (1, 2, 3):
        machine.handle(Heard(peer, msg.RoundRequest(RoundId(OPTIMIZE, 0))), 0)
    now = machine.membership.roster(0)
    assert (now.view, now.algorithms) == (3 + TERM_GAP + 1, star_up_to(400))


def test_a_returning_peer_with_a_table_that_no_master_makes_is_not_believed() -> None:
    machine = MasterMachine(Timing(), RUN, 2, lambda n: bytes(n), 0, Origin.RESTARTED, b"next")
    machine.handle(Opened(1, "10.0.0.1"), 0)
    registration = msg.Register(0, "", 4001)
    header = msg.Return(PeerId(1), b"t", RUN, 1, registration, 7, (), b"before")
    machine.handle(Heard(1, header), 0)
    bad = msg.KnownRoster(roster(7, 3, AlgorithmTable((), STAR)))
    effects = machine.handle(Heard(1, bad), 0)
    assert "the reported roster has impossible numbers" in str(effects)


# -- ballots -----------------------------------------------------------------------------------


def started(descriptor: Descriptor) -> CollectiveBallot:
    ballot = CollectiveBallot(what(), (PeerId(1), PeerId(2), PeerId(3)), PeerId(1), 0)
    for peer in (1, 2, 3):
        ballot.request(PeerId(peer), descriptor, 0)
    return ballot


CODED_RING = replace(SUM, algorithm=RING, quantization=Quantization(WireFormat.INT8, 32))


@pytest.mark.parametrize("descriptor", [by(STAR), by(MESH), CODED_RING], ids=str)
def test_only_a_ring_of_plain_values_is_repaired(descriptor: Descriptor) -> None:
    ballot = started(descriptor)
    abort = Abort(AbortCause.MEMBER_LOST, "peer 3 lost: gone")
    assert ballot.lose([PeerId(3)], "gone", 1) == abort
    ballot = started(by(RING))
    assert isinstance(ballot.lose([PeerId(3)], "gone", 1), Tell)


@pytest.mark.parametrize("algorithm", [STAR, MESH])
def test_what_all_survivors_have_is_committed_however_it_came(algorithm: Algorithm) -> None:
    ballot = started(by(algorithm))
    for peer in (1, 2):
        assert ballot.done(PeerId(peer), b"same", 1) is None
    assert ballot.lose([PeerId(3)], "gone", 2) == Commit()


def test_who_forces_another_algorithm_is_told_so() -> None:
    ballot = CollectiveBallot(what(), (PeerId(1), PeerId(2)), PeerId(1), 0)
    ballot.request(PeerId(1), by(RING), 0)
    decision = ballot.request(PeerId(2), by(RING, forced=True), 0)
    assert decision == Abort(
        AbortCause.DESCRIPTOR_MISMATCH,
        "tag 5: peer 1 asked for SUM of 16 x float32; peer 2 asked for SUM of 16 x float32 by ring",
    )


def test_whoever_goes_ahead_late_is_told_of_the_start_too() -> None:
    ballot = CollectiveBallot(what(), (PeerId(1), PeerId(2), PeerId(3)), PeerId(1), 0)
    for peer in (1, 2):
        ballot.request(PeerId(peer), by(RING), 0, eager=True)
    ballot.done(PeerId(1), b"x", 0)  # so all have asked, and the last request is on its way
    assert ballot.take_untold() == [1, 2]
    assert ballot.take_untold() == []
    ballot.request(PeerId(3), by(RING), 1, eager=True)
    assert ballot.take_untold() == [1, 2, 3]


def test_who_has_to_talk_to_whom() -> None:
    one_three, two_three = (Pair((PeerId(a), PeerId(b))) for a, b in ((1, 3), (2, 3)))
    for algorithm, separated in ((STAR, [one_three]), (MESH, [one_three, two_three])):
        ballot = started(by(algorithm))
        assert ballot.separated([two_three, one_three]) == separated
