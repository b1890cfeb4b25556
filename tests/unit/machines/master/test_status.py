"""What a master tells of its run: scenarios, the largest report, and no side effects."""

from __future__ import annotations

import pickle
from dataclasses import replace
from random import Random

import pytest

from pccl.machines.master import status
from pccl.machines.master.events import CloseConnection, ConnectionClosed, ConnectionOpened, SendTo
from pccl.machines.reachability import AddressTried
from pccl.protocol import messages as msg
from pccl.protocol.codec import PREFIX_BYTES, decode, encode
from pccl.protocol.handshake.keys import fingerprint_of
from pccl.protocol.limits import (
    BYTES_PER_S_MAX,
    CONTROL_MESSAGE_BYTES_MAX,
    RTT_NS_MAX,
)
from pccl.protocol.link_messages import LinkMeasure, LinkPath, MeasuredLink
from pccl.protocol.status_report import (
    FIGURE_NAME_BYTES_MAX,
    FIGURES_MAX,
    EndedStatus,
    Figure,
    GroupStatus,
    LinkSpeed,
    MemberStatus,
    NewcomerStatus,
    OperationStatus,
    RemovalStatus,
    RoundStatus,
    StatusReport,
)
from pccl.protocol.types import (
    ALGORITHM_STEPS_MAX,
    HOST_CHARACTERS_MAX,
    LOSS_MAX,
    NAME_BYTES_MAX,
    AbortCause,
    Algorithm,
    AlgorithmStep,
    AlgorithmTable,
    OperationId,
    PeerId,
    RemovalCause,
    RoundId,
    RoundKind,
)
from pccl.protocol.vocabulary.mesh_plan import MESH_MEMBERS_MAX, SHARE_UNITS, MeshPlan
from pccl.telemetry.ended import KEPT_MAX
from tests.support.master_stage import SECOND, SUM, MasterStage
from tests.support.scenarios import key, op

ASKER = 99
ONE, TWO, THREE = PeerId(1), PeerId(2), PeerId(3)
RUN = b"r" * 16
REDUCE = op(view=2, term=7)
ASKED = msg.OperationRequest(REDUCE, SUM)


def new(members: int = 0) -> MasterStage:
    """A master of term 7 that began at 5 s, and members of view 2."""
    master = MasterStage()
    master.now_ns = 5 * SECOND
    master.begin(RUN, 7)
    for peer in range(1, members + 1):
        master.register(peer)
        master.link(peer)
    if members > 1:
        master.round(RoundKind.UPDATE_TOPOLOGY, 0, 1)
    return master


def ask(master: MasterStage) -> StatusReport:
    master.do(ConnectionOpened(ASKER, "10.0.0.99", key(99)))
    answer, closing = master.hear(ASKER, msg.StatusRequest())
    assert closing == CloseConnection(ASKER, "the query is answered")
    assert isinstance(answer, SendTo)
    assert answer.connection == ASKER
    assert isinstance(answer.message, StatusReport)
    return answer.message


def member(
    peer: int,
    rank: int,
    silent_ms: int,
    awaited_ms: int | None,
    calls: str,
    last: tuple[str, int],
) -> MemberStatus:
    host, port = f"10.0.0.{peer}", 4000 + peer
    return MemberStatus(
        PeerId(peer), "", 0, rank, host, port, True, silent_ms, awaited_ms, calls, *last, 0, 0,
        fingerprint=fingerprint_of(key(peer)),
    )  # fmt: skip


def newcomer(peer: int, group: int, waits_for: str) -> NewcomerStatus:
    where = (f"10.0.0.{peer}", 4000 + peer)
    known = (0, fingerprint_of(key(peer)))
    return NewcomerStatus(PeerId(peer), "", group, *where, True, 0, 3000, waits_for, *known)


def test_an_empty_run() -> None:
    nothing: tuple[int, tuple[()]] = (0, ())
    lists = (*nothing, *nothing, *nothing, (), *nothing, *nothing, *nothing, *nothing)
    expected = StatusReport(RUN, 7, 0, 0, *lists, "")
    zeros = "members: 0, newcomers: 0, open calls: 0, removals: 0"
    assert repr(expected) == f"<MasterStatus: term 7, {zeros}>"
    assert ask(new()) == expected


def test_an_open_round_and_an_operation_say_who_is_missing_and_since_when() -> None:
    master = new(3)
    master.wait(1, 1, 2, 3)
    round_id = RoundId(RoundKind.PEERS_PENDING, 0)
    master.hear(1, msg.RoundRequest(round_id))
    master.hear(2, ASKED)
    master.wait(2, 1, 2)
    found = ask(master)
    assert found.uptime_ms == 3000
    assert found.members == (
        member(1, 0, 0, 1750, "are_peers_pending", ("are_peers_pending", 2000)),
        member(2, 1, 0, 1750, "tag 5 (SUM of 8 x float32)", ("tag 5 (SUM of 8 x float32)", 2000)),
        member(3, 2, 2000, 1750, "", ("", 0)),
    )
    assert found.rounds == (RoundStatus(round_id, 1750, 1, (TWO, THREE), 2),)
    assert found.operations == (
        OperationStatus(
            operation=REDUCE,
            what="tag 5 (SUM of 8 x float32)",
            started=False,
            open_ms=2000,
            still_ms=2000,
            member_count=3,
            missing=(ONE, THREE),
            missing_count=2,
            least_bytes=0,
            most_bytes=0,
        ),
    )
    assert found.groups == (
        GroupStatus(0, 2, 3, (1, 2), master.machine.membership.roster(0).algorithms),
    )


def test_a_started_operation_shows_how_far_it_is() -> None:
    master = new(3)
    for peer in (1, 2, 3):
        master.hear(peer, ASKED)
    for peer, received in ((1, 300), (2, 100), (3, 200)):
        master.hear(peer, msg.Heartbeat((msg.Progress(REDUCE, 1, 1, received),)))
    master.wait(1)
    master.hear(3, msg.OperationDone(REDUCE, b"x"))
    (found,) = ask(master).operations
    assert (found.started, found.missing, found.missing_count) == (True, (ONE, TWO), 2)
    assert (found.least_bytes, found.most_bytes) == (100, 300)
    assert (found.open_ms, found.still_ms) == (1000, 0)


def test_an_ended_call_says_who_came_last_and_how_late() -> None:
    master = new(3)
    for peer in (1, 3, 2):
        master.hear(peer, ASKED)
        master.wait(1)
    for peer in (1, 2, 3):
        master.hear(peer, msg.OperationDone(REDUCE, b"x"))
    for peer in (2, 3, 1):
        master.hear(peer, msg.RoundRequest(RoundId(RoundKind.PEERS_PENDING, 0)))
    master.wait(4)
    found = ask(master)
    reduced = EndedStatus(
        "tag 5 (SUM of 8 x float32)", 0, 4000, 3_000_000, TWO, 2_000_000, 32, None
    )
    asked = EndedStatus("are_peers_pending", None, 4000, 0, ONE, 0, 0, None)
    assert found.ended[:2] == (asked, reduced)
    assert found.ended_count == 3  # and the update that admitted two of them


def test_a_call_that_a_member_left_says_why_it_has_no_result() -> None:
    master = new(2)
    master.hear(1, ASKED)
    master.hear(2, msg.Withdraw(REDUCE, "Ctrl-C"))
    assert ask(master).ended[0].cause is AbortCause.WITHDRAWN


def test_a_round_without_the_calls_of_a_removed_member_has_a_last_caller() -> None:
    master = new(3)
    round_id = RoundId(RoundKind.PEERS_PENDING, 0)
    for peer in (1, 2):
        master.hear(peer, msg.RoundRequest(round_id))
    master.wait(2)
    master.hear(3, msg.Goodbye())
    ended = ask(master).ended[0]
    assert (ended.last, ended.took_us, ended.late_us) == (TWO, 2_000_000, 0)


def test_links_are_shown_by_peers_and_the_slowest_if_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master = new(3)
    speeds = {(2, 1): 50, (1, 3): 0, (1, 2): 90, (3, 1): 70}
    for (peer, other), speed in speeds.items():
        measured = MeasuredLink(PeerId(other), LinkMeasure(2_000_000, speed))
        master.hear(peer, msg.LinksMeasured((measured,)))
    found = ask(master)
    assert [(link.peer, link.other, link.bytes_per_s) for link in found.links] == [
        (*pair, speed) for pair, speed in sorted(speeds.items())
    ]
    assert {link.rtt_us for link in found.links} == {2000}
    monkeypatch.setattr(status, "LINKS_SHOWN_MAX", 2)
    found = ask(master)
    assert (found.link_count, [link.bytes_per_s for link in found.links]) == (4, [50, 70])
    master.hear(1, msg.Goodbye())
    assert ask(master).links == ()


def test_a_link_shows_its_path_and_which_ends_can_be_dialled() -> None:
    master = MasterStage().begin(tests_addresses=True, relays=True)
    for peer, reason in ((1, ""), (2, "connection refused")):
        master.register(peer)
        master.do(AddressTried(PeerId(peer), "" if reason else f"10.0.0.{peer}", reason, key(peer)))
    master.register(3)
    for peer, other in ((1, 2), (2, 1), (3, 1), (2, 3)):
        measured = MeasuredLink(PeerId(other), LinkMeasure(1, 1))
        master.hear(peer, msg.LinksMeasured((measured,)))
    master.hear(1, msg.LinkReport(TWO, True, "", None, LinkPath.DIALLED_BACK))
    master.hear(2, msg.LinkReport(THREE, True, "", ONE, LinkPath.RELAYED))
    links = {(link.peer, link.other): link for link in ask(master).links}
    assert {pair: (link.path, link.relay) for pair, link in links.items()} == {
        (1, 2): (LinkPath.DIALLED_BACK, None),
        (2, 1): (None, None),
        (2, 3): (LinkPath.RELAYED, ONE),
        (3, 1): (None, None),
    }
    assert {pair: (link.peer_dialable, link.other_dialable) for pair, link in links.items()} == {
        (1, 2): (True, False),
        (2, 1): (False, True),
        (2, 3): (False, None),
        (3, 1): (None, True),
    }
    untested = new(2)
    untested.hear(1, msg.LinksMeasured((MeasuredLink(TWO, LinkMeasure(1, 1)),)))
    (link,) = ask(untested).links
    assert (link.path, link.peer_dialable, link.other_dialable) == (None, None, None)


@pytest.mark.parametrize("known", [0, 3, 20, 132])
@pytest.mark.parametrize("sampled", [1, 5, 4096])
def test_of_many_links_the_slowest_are_shown_whatever_the_sample_says(
    monkeypatch: pytest.MonkeyPatch, known: int, sampled: int
) -> None:
    monkeypatch.setattr(status, "LINKS_SHOWN_MAX", 10)
    monkeypatch.setattr(status, "LINKS_SAMPLED", sampled)
    master, size = new(12), 12
    speeds = [*range(1, known + 1), *[0] * (size * (size - 1) - known)]
    Random(1).shuffle(speeds)
    left = iter(speeds)
    for peer in range(1, size + 1):
        others = (PeerId(other) for other in range(1, size + 1) if other != peer)
        links = tuple(MeasuredLink(other, LinkMeasure(1, next(left))) for other in others)
        master.hear(peer, msg.LinksMeasured(links))
    found = [link.bytes_per_s for link in ask(master).links]
    shown = min(known, 10)
    assert sorted(found, key=lambda speed: speed or BYTES_PER_S_MAX) == [
        *range(1, shown + 1),
        *[0] * (10 - shown),
    ]


def test_newcomers_and_what_each_waits_for() -> None:
    master = new(1)
    master.register(2)
    master.hear(2, msg.LinkReport(ONE, False, "connection refused"))
    master.register(3, min_peers=5, group=1)
    master.wait(3, 1, 2, 3)
    found = ask(master)
    assert found.newcomers == (
        newcomer(2, 0, "a link to peer 1: connection refused"),
        newcomer(
            3, 1, "5 members; with this one there are 3 (start 2 more, unless the run is over)"
        ),
    )
    assert found.member_count == 1


def test_removals_the_newest_first_and_members_without_a_connection() -> None:
    master = new(3)
    master.hear(3, msg.Goodbye())
    master.do(ConnectionClosed(2, "reset"))
    assert [one.connected for one in ask(master).members] == [True, False]
    master.wait(4, 1)
    found = ask(master)
    assert found.removals == (
        RemovalStatus(TWO, "", 0, RemovalCause.CONTROL_LOST, "it did not reconnect in time", 2000),
        RemovalStatus(THREE, "", 0, RemovalCause.GOODBYE, "it left", 4000),
    )
    assert (found.removal_count, found.member_count) == (2, 1)


def test_names_and_steps_of_members_newcomers_and_lost_peers() -> None:
    master = new()
    for peer, name in ((1, "alice"), (2, "bob"), (3, "")):
        master.register(peer, name=name)
        master.link(peer)
    master.round(RoundKind.UPDATE_TOPOLOGY, 0, 1)
    master.register(4, min_peers=9, name="dave")
    for step, loss in ((10, 3.5), (14, -2.25)):
        master.hear(1, msg.Heartbeat(step=step, loss=loss))
        master.sleep(2)
    master.hear(2, msg.Goodbye())
    found = ask(master)
    assert [(one.name, one.step, one.step_us, one.loss) for one in found.members] == [
        ("alice", 14, 500_000, -2.25),
        ("", 0, 0, None),
    ]
    assert [one.name for one in found.newcomers] == ["dave"]
    assert [(one.peer, one.name) for one in found.removals] == [(TWO, "bob")]


def test_to_ask_changes_nothing_and_is_no_way_in() -> None:
    master, twin = new(2), new(2)
    for _ in range(3):
        ask(master)
    before, after = (
        pickle.dumps((one.machine.membership.roster(0), sorted(one.machine.membership.peers)))
        for one in (master, twin)
    )
    assert before == after
    assert master.hear(ASKER, msg.Register(0, "", 1)) == []  # that connection is over
    for one in (master, twin):
        one.hear(1, ASKED)
    assert master.hear(2, ASKED) == twin.hear(2, ASKED)


def test_the_history_of_a_master_keeps_no_reports() -> None:
    master = new(2)
    ask(master)
    assert "SendStatus(connection=99)" in str(master.machine.history)
    assert "StatusReport" not in str(master.machine.history)


def test_a_peer_of_the_run_has_no_business_to_ask_on_its_connection() -> None:
    master = new(2)
    assert master.hear(2, msg.StatusRequest()) == [
        CloseConnection(2, "StatusRequest is unexpected")
    ]


def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMBERS", "NEWCOMERS", "GROUPS", "OPERATIONS", "MISSING", "REMOVALS"):
        monkeypatch.setattr(status, f"{name}_SHOWN_MAX", 2)
    master = new(6)
    for tag in range(3):
        master.hear(1, msg.OperationRequest(op(tag=tag, view=2, term=7), SUM))
    for peer in range(7, 10):
        master.register(peer, group=peer, host="h" * HOST_CHARACTERS_MAX)
        master.hear(peer, msg.LinkReport(ONE, False, "\N{HANGUL SYLLABLE GAG}" * 1000))
    for peer in (7, 8, 9):
        master.hear(peer, msg.Goodbye())
        master.register(peer + 10, min_peers=99)
    found = ask(master)
    assert (found.member_count, len(found.members)) == (6, 2)
    assert (found.newcomer_count, len(found.newcomers)) == (3, 2)
    assert (found.operation_count, len(found.operations)) == (3, 2)
    assert (found.removal_count, [one.peer for one in found.removals]) == (3, [9, 8])
    (first, _) = found.operations
    assert (first.missing_count, first.missing) == (5, (2, 3))
    assert decode(encode(found)[3], encode(found)[PREFIX_BYTES:]) == found


def test_long_words_are_cut_between_characters() -> None:
    master = new(1)
    master.register(2)
    master.hear(2, msg.LinkReport(ONE, False, "\N{HANGUL SYLLABLE GAG}" * 1000))
    (found,) = ask(master).newcomers
    syllables = found.waits_for.removeprefix("a link to peer 1: ").removesuffix("...")
    assert set(syllables) == {"\N{HANGUL SYLLABLE GAG}"}
    bytes_max = status.TEXT_CHARACTERS_MAX
    assert bytes_max - 3 < len(found.waits_for.encode()) <= bytes_max


def test_the_largest_report_fits_into_a_message() -> None:
    assert _largest_bytes() < CONTROL_MESSAGE_BYTES_MAX


def _largest_bytes() -> int:
    """A report in which every list is full and every value as long as it can be."""
    most, peer, text = (1 << 64) - 1, PeerId((1 << 64) - 1), "x" * status.TEXT_CHARACTERS_MAX
    host, u32 = "h" * HOST_CHARACTERS_MAX, (1 << 32) - 1
    missing = (peer,) * status.MISSING_SHOWN_MAX
    operation = OperationId(u32, u32, most, most, most)
    figures = (Figure("f" * FIGURE_NAME_BYTES_MAX, LOSS_MAX),) * FIGURES_MAX
    name, paces = "n" * NAME_BYTES_MAX, (text, most, most, most, LOSS_MAX, figures)
    members = MemberStatus(
        peer, name, u32, u32, host, 65535, False, most, most, text, *paces, most, b"f" * 16
    )
    plain, rest = replace(members, figures=()), status.MEMBERS_SHOWN_MAX - status.FIGURES_SHOWN_MAX
    newcomers = NewcomerStatus(
        peer, name, u32, host, 65535, False, most, most, text, most, b"f" * 16
    )
    steps = (AlgorithmStep(most, Algorithm.MESH),) * ALGORITHM_STEPS_MAX
    plan = AlgorithmTable(steps, mesh=MeshPlan((SHARE_UNITS,) * MESH_MEMBERS_MAX))
    groups = GroupStatus(u32, most, u32, (most,) * status.VIEWS_SHOWN_MAX, plan)
    unplanned, others = replace(groups, plan=None), status.GROUPS_SHOWN_MAX - status.PLANS_SHOWN_MAX
    rounds = RoundStatus(RoundId(RoundKind.UPDATE_TOPOLOGY, most), most, u32, missing, u32)
    operations = OperationStatus(operation, text, False, most, most, u32, missing, u32, most, most)
    ended = EndedStatus(text, u32, most, most, peer, most, most, AbortCause.LOCKSTEP)
    path = (peer, LinkPath.RELAYED, False, False)
    links = LinkSpeed(peer, peer, RTT_NS_MAX // 1000, BYTES_PER_S_MAX, *path)
    reason = "x" * status.REASON_CHARACTERS_MAX
    removals = RemovalStatus(peer, name, u32, RemovalCause.SILENT, reason, most)
    largest = StatusReport(
        *(b"r" * 16, u32, most, most),
        *(u32, (members,) * status.FIGURES_SHOWN_MAX + (plain,) * rest),
        *(u32, (newcomers,) * status.NEWCOMERS_SHOWN_MAX),
        *(u32, (groups,) * status.PLANS_SHOWN_MAX + (unplanned,) * others),
        (rounds,) * len(RoundKind),
        *(u32, (operations,) * status.OPERATIONS_SHOWN_MAX),
        *(most, (ended,) * KEPT_MAX),
        *(u32, (links,) * status.LINKS_SHOWN_MAX),
        *(u32, (removals,) * status.REMOVALS_SHOWN_MAX),
        reason,
    )
    return len(encode(largest))
