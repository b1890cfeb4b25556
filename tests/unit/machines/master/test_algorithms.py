"""Which algorithm an all-reduce takes: the table of a view, from the master to every request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pccl._api.arguments import reduce_request
from pccl.machines.master import membership
from pccl.machines.master.ballots.ballot import Abort, Commit
from pccl.machines.master.ballots.collective_ballot import CollectiveBallot
from pccl.machines.master.events import ConnectionOpened
from pccl.machines.peer import events as ev
from pccl.machines.peer.words import aborted
from pccl.machines.repair import Tell
from pccl.protocol import errors
from pccl.protocol import messages as msg
from pccl.protocol.data_type import DataType
from pccl.protocol.limits import BYTES_PER_S_MAX, RTT_NS_MAX, TERM_GAP
from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.operation import Eager
from pccl.protocol.types import (
    ALGORITHM_STEPS_MAX,
    STAR_BYTES_MAX,
    AbortCause,
    Algorithm,
    AlgorithmStep,
    AlgorithmTable,
    Descriptor,
    PeerId,
    Quantization,
    ReduceOp,
    Roster,
    RoundId,
    RoundKind,
    WireFormat,
)
from pccl.protocol.vocabulary.mesh_plan import SHARE_UNITS, MeshPlan
from pccl.topology.cost_model import AssumedLinks
from pccl.topology.link_measures import ToldMeasures
from pccl.topology.ring_order import Pair
from tests.support.master_stage import MasterStage, told
from tests.support.master_stage import sent as sent_to
from tests.support.peer_stage import RUN, PeerStage, ended, sent
from tests.support.scenarios import key, op, roster, subset

UPDATE, OPTIMIZE = RoundKind.UPDATE_TOPOLOGY, RoundKind.OPTIMIZE_TOPOLOGY
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
    assert SMALL_STAR.is_sound_for(3)


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
        AlgorithmTable(mesh=MeshPlan((SHARE_UNITS, 0))),
        AlgorithmTable(mesh=MeshPlan((SHARE_UNITS, 0, 1))),
        AlgorithmTable(mesh=MeshPlan((0, 0, 0))),
    ],
)
def test_tables_that_no_master_makes(table: AlgorithmTable) -> None:
    assert not table.is_sound_for(3)


def test_what_auto_becomes() -> None:
    assert SUM.settled(SMALL_STAR) == replace(SUM, algorithm=STAR)
    assert by(MESH, forced=True).settled(SMALL_STAR) == by(MESH, forced=True)
    coded = replace(SUM, count=1024, quantization=Quantization(WireFormat.INT8, 32))
    rounds_less = AlgorithmTable((), RING, MESH)
    assert coded.settled(rounds_less) == replace(coded, algorithm=MESH)
    assert coded.settled(AlgorithmTable()) == replace(coded, algorithm=RING)
    assert SUM.settled(rounds_less) == by(RING)
    assert SUM.settled(SMALL_STAR, near=True) == replace(SUM, algorithm=STAR, near=True)
    assert by(MESH).settled(SMALL_STAR, near=True) == replace(by(MESH), near=True)
    broadcast = Descriptor.broadcast(DataType.FLOAT, 16, 0)
    assert broadcast.settled(SMALL_STAR, near=True) == broadcast
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
    asked = [request(8, name) for name in (*names, "Mesh")]
    assert [descriptor.algorithm for descriptor in asked] == [0, 1, 2, 3, 3]
    assert request(8, Algorithm.MESH).algorithm is MESH


@pytest.mark.parametrize(
    ("given", "error"),
    [("tree", ValueError), (9, ValueError), (None, TypeError)],
)
def test_what_is_no_algorithm(given: Any, error: type[Exception]) -> None:
    with pytest.raises(
        error, match=r"algorithm must be one of 'auto', 'ring', 'star', 'mesh', not"
    ):
        request(8, given)


def request(count: int, algorithm: Algorithm | str) -> Descriptor:
    tensor = np.zeros(count, np.float32)
    return reduce_request(tensor, algorithm=algorithm).asks.descriptor


def test_what_is_asked_for() -> None:
    assert request(16, "auto") == SUM
    assert request(16, "ring") == by(RING, forced=True)
    largest = STAR_BYTES_MAX // 4
    assert request(largest, "star") == by(STAR, largest, forced=True)
    assert request(largest + 1, "mesh") == by(MESH, largest + 1, forced=True)
    with pytest.raises(
        ValueError, match="up to 4194304 bytes, and this tensor has 4194308; use 'mesh'"
    ):
        request(largest + 1, "star")


# -- peers -------------------------------------------------------------------------------------

ONE, TWO, THREE = (PeerId(n) for n in (1, 2, 3))
TRIO = (ONE, TWO, THREE)


def known(version: int, view: int, table: AlgorithmTable) -> Roster:
    return roster(version, view, 1, 2, 3, algorithms=table)


def member(table: AlgorithmTable) -> PeerStage:
    return PeerStage().member(1, 2, 3, algorithms=table)


def test_auto_is_settled_before_anybody_is_asked() -> None:
    peer = member(SMALL_STAR)
    assert peer.do(ev.ReduceCall(9, 5, SUM)) == [
        ev.Post(9, op(), by(STAR), TRIO),
        ev.Send(msg.OperationRequest(op(), by(STAR))),
    ]
    peer.do(msg.OperationStarted(op()))
    peer.do(ev.ReduceDone(op(), b"digest"))
    result = ev.ReduceResult(op(), TRIO, 1, STAR)
    assert ev.ReturnCall(9, result) in peer.do(ended(op(), contributors=TRIO))


def test_the_view_says_what_auto_is_and_a_caller_who_forces_it_is_asked_nothing() -> None:
    peer = member(AlgorithmTable())
    assert sent(peer.do(ev.ReduceCall(9, 5, SUM))) == [msg.OperationRequest(op(), by(RING))]
    assert sent(peer.do(ev.ReduceCall(10, 6, by(MESH, forced=True)))) == [
        msg.OperationRequest(op(tag=6), by(MESH, forced=True))
    ]


def test_a_hostile_table_ends_the_connection() -> None:
    peer = member(SMALL_STAR)
    bad = known(2, 2, AlgorithmTable((), Algorithm.AUTO))
    with pytest.raises(errors.RemoteProtocolError, match="invalid algorithm table"):
        peer.do(msg.RosterChanged(bad))


def test_after_optimizing_a_caller_goes_on_in_the_view_that_it_has_opened() -> None:
    peer = member(AlgorithmTable())
    peer.do(ev.RoundCall(8, OPTIMIZE))
    peer.do(msg.RosterChanged(known(2, 2, SMALL_STAR)))
    assert peer.do(msg.RoundClosed(RoundId(OPTIMIZE, 0), 2, False))[-1:] == [ev.ReturnCall(8, None)]
    effects = peer.do(ev.ReduceCall(9, 5, SUM))
    assert sent(effects) == [msg.OperationRequest(op(view=2), by(STAR))]


def test_who_has_left_the_round_goes_on_there_too() -> None:
    peer = member(AlgorithmTable())
    peer.do(ev.RoundCall(8, OPTIMIZE))
    peer.do(ev.LeaveCall(8, "impatient"))
    peer.do(msg.RosterChanged(known(2, 2, SMALL_STAR)))
    peer.do(msg.RoundClosed(RoundId(OPTIMIZE, 0), 2, False))
    assert sent(peer.do(ev.ReduceCall(9, 5, SUM))) == [msg.OperationRequest(op(view=2), by(STAR))]
    peer.do(ended(op(view=2), AbortCause.WITHDRAWN, version=2))
    assert peer.do(ev.RoundCall(10, OPTIMIZE)) == [
        ev.ReturnCall(10, None)
    ]  # its answer is still his


def test_only_what_has_changed_much_is_reported_and_everything_to_a_new_master() -> None:
    def link(peer: int, rtt_ns: int, speed: int) -> MeasuredLink:
        return MeasuredLink(PeerId(peer), LinkMeasure(rtt_ns, speed))

    peer = member(AlgorithmTable())
    first = (link(1, 50_000, 0), link(3, 80_000_000, 10**7))
    assert sent(peer.do(ev.LinkMeasurements(first))) == [msg.LinksMeasured(first)]
    assert peer.do(ev.LinkMeasurements(first)) == []
    # 149 us is noise; 1.5 times as long or as fast is no news yet.
    same = (link(1, 149_000, 0), link(3, 120_000_000, 15 * 10**6))
    assert peer.do(ev.LinkMeasurements(same)) == []
    news = (link(1, 50_000, 10**9), link(3, 121_000_000, 10**7))
    assert sent(peer.do(ev.LinkMeasurements(news))) == [msg.LinksMeasured(news)]
    slower = (link(3, 121_000_000, 6 * 10**6),)
    assert sent(peer.do(ev.LinkMeasurements(slower))) == [msg.LinksMeasured(slower)]
    report = sent(peer.do(ev.ControlOpened(RUN, 2)))
    assert isinstance(report[0], msg.Return)
    assert msg.LinksMeasured((news[0], slower[0])) in report


@pytest.mark.parametrize(("kind", "closed"), [(UPDATE, 1), (OPTIMIZE, 0)])
def test_before_a_round_that_may_plan_all_measures_are_reported_exactly(
    kind: RoundKind, closed: int
) -> None:
    def measures(rtt_ns: int, speed: int) -> tuple[MeasuredLink, ...]:
        return (MeasuredLink(PeerId(1), LinkMeasure(rtt_ns, speed)),)

    peer = member(AlgorithmTable())
    peer.do(ev.LinkMeasurements(measures(30_000_000, 10**7)))
    assert peer.do(ev.LinkMeasurements(measures(30_000_000, 9 * 10**6))) == []
    asked = msg.RoundRequest(RoundId(kind, closed))
    exact = msg.LinksMeasured(measures(30_000_000, 9 * 10**6))
    assert sent(peer.do(ev.RoundCall(8, kind))) == [exact, asked]
    peer.do(msg.RoundClosed(asked.round, 1, False))
    peer.do(ev.LinkMeasurements(measures(30_100_000, 9 * 10**6)))  # noise
    assert sent(peer.do(ev.RoundCall(9, kind))) == [msg.RoundRequest(RoundId(kind, closed + 1))]


def test_measures_of_links_that_are_gone_are_forgotten() -> None:
    told = ToldMeasures()
    links = tuple(MeasuredLink(PeerId(n), LinkMeasure(n * 10**6, n)) for n in (1, 2))
    assert told.news(links) == links
    told.keep({PeerId(2)})
    assert list(told.all()) == [links[1]]
    assert told.news(links) == links[:1]


# -- the master --------------------------------------------------------------------------------


def by_speed(
    ring: Sequence[PeerId], links: AssumedLinks, broken: Collection[Pair], *_: object
) -> AlgorithmTable:
    """A star up to so many bytes as the slowest link brings in a second; no mesh past a gap."""
    speeds = [
        measure.bytes_per_s for (a, b), measure in links.measured.items() if a in ring and b in ring
    ]
    if not speeds:
        return AlgorithmTable()
    mesh = () if broken else (AlgorithmStep(1 << 40, MESH),)
    return AlgorithmTable((AlgorithmStep(min(speeds), STAR), *mesh))


def star_up_to(tensor_bytes: int, *, mesh: bool = True) -> AlgorithmTable:
    beyond = (AlgorithmStep(1 << 40, MESH),) if mesh else ()
    return AlgorithmTable((AlgorithmStep(tensor_bytes, STAR), *beyond))


@pytest.fixture(autouse=True)
def _chosen_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setattr(membership, "plan_view", by_speed)


def new(size: int = 3) -> MasterStage:
    """Members of view 2, which was opened when nothing was measured."""
    return MasterStage().new(size)


def view_of(master: MasterStage) -> tuple[int, AlgorithmTable]:
    newest = master.machine.membership.roster(0)
    return newest.view, newest.algorithms


def test_a_view_is_opened_with_what_is_known_then() -> None:
    master = new()
    assert view_of(master) == (2, AlgorithmTable())
    master.hear(1, measured((2, 10**6, 1000)))
    assert view_of(master)[1] == AlgorithmTable()  # of the view, which is open
    master.register(4)
    master.link(4)
    master.hear(4, measured((1, 10**6, 500)))
    effects = master.round(UPDATE, 1, 1, 2, 3)
    assert view_of(master) == (3, star_up_to(500))
    rosters = [message.roster for _, message in told(effects, msg.RosterChanged)]
    rosters += [message.roster for _, message in told(effects, msg.Admitted)]
    assert {newest.algorithms for newest in rosters} == {star_up_to(500)}
    assert len(rosters) == 4


def test_optimizing_opens_a_view_for_another_table_and_only_then() -> None:
    master = new()
    answer = master.round(OPTIMIZE, 0, 1, 2, 3)
    assert view_of(master) == (2, AlgorithmTable())
    assert sent_to(answer) == told(answer, msg.RoundClosed)
    master.hear(3, measured((1, 10**6, 700), (2, 10**6, 900)))
    answer = master.round(OPTIMIZE, 1, 1, 2, 3)
    assert view_of(master) == (3, star_up_to(700))
    messages = [message for _, message in sent_to(answer)]
    assert [type(message) for message in messages[:3]] == [msg.RosterChanged] * 3
    version = master.machine.membership.version
    assert messages[3:] == [msg.RoundClosed(RoundId(OPTIMIZE, 1), version, False)] * 3
    assert master.machine.membership.roster(0).open_views == (3,)
    master.round(OPTIMIZE, 2, 1, 2, 3)
    assert view_of(master)[0] == 3


def test_a_view_in_which_something_is_asked_for_stays() -> None:
    master = new()
    master.hear(3, measured((1, 10**6, 700)))
    master.hear(1, msg.RoundRequest(RoundId(OPTIMIZE, 0)))
    master.hear(1, msg.OperationRequest(op(view=2), by(RING)))  # its caller has left the round
    master.round(OPTIMIZE, 0, 2, 3)
    assert view_of(master) == (2, AlgorithmTable())


def test_a_loss_opens_a_view_and_takes_the_measures_along() -> None:
    master = new()
    master.hear(3, measured((1, 10**6, 700)))
    master.hear(1, measured((2, 10**6, 900)))
    master.hear(3, msg.Goodbye())
    assert view_of(master) == (3, star_up_to(900))


def test_measures_are_bounded_and_of_the_own_group() -> None:
    master = new()
    master.hear(1, measured((1, 5, 5), (99, 5, 5), (2, 1 << 63, 1 << 63)))
    known = master.machine.membership._measures.matrix  # pyright: ignore[reportPrivateUsage]
    assert known == {(PeerId(1), PeerId(2)): LinkMeasure(RTT_NS_MAX, BYTES_PER_S_MAX)}


def what_a_broken_pair_ends(master: MasterStage) -> list[msg.OperationEnded]:
    """Peers 1 and 3 of four, who are no neighbours, have no link for 3 s."""
    master.hear(3, msg.LinkReport(PeerId(1), False, "reset"))
    return [message for _, message in told(master.wait(3, 1, 2, 3, 4), msg.OperationEnded)]


def test_a_mesh_of_members_that_cannot_talk_gives_way_to_a_view_without_one() -> None:
    master = new(4)
    master.hear(1, measured((2, 10**6, 900)))
    master.round(OPTIMIZE, 0, 1, 2, 3, 4)
    assert view_of(master)[1] == star_up_to(900)
    asked = op(view=3)
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, by(MESH)))
    aborts = what_a_broken_pair_ends(master)
    assert [m.abort for m in aborts] == [AbortCause.VIEW_CLOSED] * 4
    assert aborts[0].reason == ("peers 1, 3 have no link (reset); the master opened another view")
    assert view_of(master) == (4, star_up_to(900, mesh=False))
    assert len(master.machine.membership.members()) == 4


def test_a_mesh_that_was_named_fails_alone_where_members_cannot_talk() -> None:
    """Another view would be no help, and would cost everybody else's operations."""
    master = new(4)
    view = view_of(master)[0]
    asked = op(view=view)
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, by(MESH, forced=True)))
        master.hear(peer, msg.OperationRequest(replace(asked, tag=6), by(RING)))
    aborts = what_a_broken_pair_ends(master)
    assert [(m.operation, m.abort) for m in aborts] == [(asked, AbortCause.LINK_BROKEN)] * 4
    assert aborts[0].reason == ('peers 1, 3 have no link (reset); omit algorithm, or use "ring"')
    assert view_of(master)[0] == view
    error = aborted(aborts[0], by(MESH, forced=True))
    assert isinstance(error, errors.LinkError)


def test_a_sparse_reduce_waits_for_a_redial_or_a_relay() -> None:
    """No other view helps it: the end that has not noticed yet that the link is gone may redial."""
    master = new(4)
    sparse = replace(by(MESH), quantization=Quantization(WireFormat.SPARSE, 128))
    asked = op(view=view_of(master)[0])
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, sparse))
    assert what_a_broken_pair_ends(master) == []
    aborts = [message for _, message in told(master.wait(8, 1, 2, 3, 4), msg.OperationEnded)]
    assert [(m.operation, m.abort) for m in aborts] == [(asked, AbortCause.LINK_BROKEN)] * 4
    assert aborts[0].reason.startswith("peers 1, 3 have no link (reset); a sparse reduce needs")


def test_a_sparse_reduce_waits_for_the_verdict_on_a_silent_member() -> None:
    """It may be dead, and its connection open: then its links say nothing about the others."""
    master = new(4)
    sparse = replace(by(MESH), quantization=Quantization(WireFormat.SPARSE, 128))
    asked = op(view=view_of(master)[0])
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, sparse))
    master.hear(3, msg.LinkReport(PeerId(1), False, "refused"))
    master.wait(5, 1, 2, 3, 4)
    assert told(master.wait(8, 2, 3, 4), msg.OperationEnded) == []
    aborts = [message for _, message in told(master.wait(4, 2, 3, 4), msg.OperationEnded)]
    assert [(m.operation, m.abort) for m in aborts] == [(asked, AbortCause.MEMBER_LOST)] * 3


def test_a_mesh_that_was_named_waits_for_the_verdict_on_a_silent_member() -> None:
    master = new(4)
    asked = op(view=view_of(master)[0])
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, by(MESH, forced=True)))
    master.wait(2, 2, 3, 4)
    master.hear(3, msg.LinkReport(PeerId(1), False, "refused"))
    assert told(master.wait(6, 2, 3, 4), msg.OperationEnded) == []
    aborts = [message for _, message in told(master.wait(4, 2, 3, 4), msg.OperationEnded)]
    assert [(m.operation, m.abort) for m in aborts] == [(asked, AbortCause.MEMBER_LOST)] * 3


def test_a_sparse_reduce_keeps_no_other_operation_waiting() -> None:
    master = new(4)
    sparse = replace(by(MESH), quantization=Quantization(WireFormat.SPARSE, 128))
    asked = op(view=view_of(master)[0])
    for peer in (1, 2, 3, 4):
        master.hear(peer, msg.OperationRequest(asked, sparse))
        master.hear(peer, msg.OperationRequest(replace(asked, tag=6), by(MESH, forced=True)))
    aborts = what_a_broken_pair_ends(master)
    assert [m.operation.tag for m in aborts] == [6] * 4


def test_the_ring_of_a_subset_needs_its_own_links() -> None:
    """The master cannot reorder it; peers 1 and 3 are neighbours here, but not in the group."""
    master = new(4)
    view = view_of(master)[0]
    apart, fine = subset(2, 1, 3), subset(1, 2, 3, 4)
    for among in (apart, fine):
        for peer in among.peers:
            asked = op(tag=among.operation_tag, view=view)
            master.hear(peer, msg.OperationRequest(asked, by(RING), among=among))
    assert what_a_broken_pair_ends(master) == []  # a relay may join them
    aborts = [message for _, message in told(master.wait(8, 1, 2, 3, 4), msg.OperationEnded)]
    assert [m.operation.tag for m in aborts] == [apart.operation_tag] * 3
    assert {m.abort for m in aborts} == {AbortCause.LINK_BROKEN}
    assert aborts[0].reason == (
        "peers 1, 3 have no link (reset); the ring of this subgroup needs that link; name its "
        "ranks in another order"
    )
    assert view_of(master)[0] == view
    error = aborted(aborts[0], by(RING), among=apart)
    assert isinstance(error, errors.LinkError)
    assert error.reason.startswith("tag 5 of peers 1, 2, 3: peers 1, 3 have no link")


def test_a_mesh_of_a_subset_gives_way_to_a_view_without_one() -> None:
    master = new(4)
    view, among = view_of(master)[0], subset(1, 2, 3)
    for peer in among.peers:
        asked = op(tag=among.operation_tag, view=view)
        master.hear(peer, msg.OperationRequest(asked, by(MESH), among=among))
    aborts = what_a_broken_pair_ends(master)
    assert [m.abort for m in aborts] == [AbortCause.VIEW_CLOSED] * 3
    assert view_of(master)[0] > view


# -- restart -----------------------------------------------------------------------------------


def test_a_restarted_master_keeps_the_table_of_a_view_and_learns_the_measures_anew() -> None:
    master = MasterStage().restarted()
    for peer in (1, 2, 3):
        measures = measured((peer % 3 + 1, 10**6, 400))
        master.come(peer, measures, known=(known(7, 3, star_up_to(700)),))
    assert not master.machine.recovering
    now = master.machine.membership.roster(0)
    assert (now.version, now.view, now.algorithms) == (7 + TERM_GAP + 1, 3, star_up_to(700))
    master.round(OPTIMIZE, 0, 1, 2, 3)
    assert view_of(master) == (3 + TERM_GAP + 1, star_up_to(400))


def test_a_returning_peer_with_a_table_that_no_master_makes_is_not_believed() -> None:
    master = MasterStage().restarted()
    bad = known(7, 3, AlgorithmTable((), STAR))
    assert "the reported roster has impossible fields" in str(master.come(1, known=(bad,)))


# -- ballots -----------------------------------------------------------------------------------


def started(descriptor: Descriptor) -> CollectiveBallot:
    ballot = CollectiveBallot(op(), TRIO, ONE, 0)
    for peer in TRIO:
        ballot.request(peer, descriptor, 0)
    return ballot


CODED_RING = replace(SUM, algorithm=RING, quantization=Quantization(WireFormat.INT8, 32))


@pytest.mark.parametrize("descriptor", [by(STAR), by(MESH), CODED_RING], ids=str)
def test_only_a_ring_of_plain_values_is_repaired(descriptor: Descriptor) -> None:
    ballot = started(descriptor)
    abort = Abort(AbortCause.MEMBER_LOST, "the run lost peer 3: gone")
    assert ballot.lose([THREE], "gone", 1) == abort
    ballot = started(by(RING))
    assert isinstance(ballot.lose([THREE], "gone", 1), Tell)


@pytest.mark.parametrize("algorithm", [STAR, MESH])
def test_what_all_survivors_have_is_committed_however_it_came(algorithm: Algorithm) -> None:
    ballot = started(by(algorithm))
    for peer in (ONE, TWO):
        assert ballot.done(peer, b"same", 1) is None
    assert ballot.lose([THREE], "gone", 2) == Commit()


def test_who_forces_another_algorithm_is_told_so() -> None:
    ballot = CollectiveBallot(op(), (ONE, TWO), ONE, 0)
    ballot.request(ONE, by(RING), 0)
    decision = ballot.request(TWO, by(RING, forced=True), 0)
    assert decision == Abort(
        AbortCause.DESCRIPTOR_MISMATCH,
        "tag 5: peer 1 asked for SUM of 16 x float32; peer 2 asked for SUM of 16 x float32 by ring",
    )


def test_whoever_goes_ahead_late_is_told_of_the_start_too() -> None:
    ballot = CollectiveBallot(op(), TRIO, ONE, 0)
    for peer in (ONE, TWO):
        ballot.request(peer, by(RING), 0, eager=Eager.SEGMENTS)
    ballot.done(ONE, b"x", 0)  # so all have asked, and the last request is on its way
    assert ballot.take_untold() == [1, 2]
    assert ballot.take_untold() == []
    ballot.request(THREE, by(RING), 1, eager=Eager.SEGMENTS)
    assert ballot.take_untold() == [1, 2, 3]


def test_who_has_to_talk_to_whom() -> None:
    one_three, two_three = Pair((ONE, THREE)), Pair((TWO, THREE))
    for algorithm, separated in ((STAR, [one_three]), (MESH, [one_three, two_three])):
        ballot = started(by(algorithm))
        assert ballot.separated([two_three, one_three]) == separated


# -- one machine -------------------------------------------------------------------------------


@pytest.mark.parametrize(("machines", "near"), [((7, 7), True), ((7, 8), False), ((0, 0), False)])
def test_members_of_one_machine_know_it(machines: tuple[int, int], near: bool) -> None:
    master = MasterStage().begin()
    for number, machine in enumerate(machines, 1):
        master.do(ConnectionOpened(number, "10.0.0.1", key(number)))
        master.hear(number, msg.Register(0, "", 4000 + number, len(machines), machine=machine))
        master.link(number)
    known = master.machine.membership.roster(0)
    assert [member.machine for member in known.members] == list(machines)
    assert known.is_near is near
    peer = PeerStage().member(1, 2, members=known.members)
    (asked,) = sent(peer.do(ev.ReduceCall(9, 5, SUM)))
    assert asked == msg.OperationRequest(op(), replace(by(RING), near=near))
