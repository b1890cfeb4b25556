"""Questions of people to peers: each gets one answer, whatever peers and strangers send."""

from __future__ import annotations

import pytest

from pccl.machines.history import InvariantViolation
from pccl.machines.master.events import (
    CloseConnection,
    ConnectionClosed,
    ConnectionOpened,
    InspectProcess,
    MasterEffect,
    MasterTick,
    ProcessInspected,
    SendTo,
)
from pccl.protocol import messages as msg
from pccl.protocol.limits import INQUIRIES_MAX
from pccl.protocol.run_messages import EvidenceKind
from pccl.protocol.types import PeerId, RoundKind
from tests.support.master_stage import SECOND, MasterStage, closed, told
from tests.support.scenarios import key, roster

ASKER, OTHER = 90, 91
STATE, STACKS = EvidenceKind.STATE, EvidenceKind.STACKS


def ask(
    master: MasterStage, peer: int, asker: int = ASKER, kind: EvidenceKind = STATE
) -> list[MasterEffect]:
    master.do(ConnectionOpened(asker, "10.0.0.90", key(90)))
    return master.hear(asker, msg.EvidenceRequest(PeerId(peer), kind))


def reply(master: MasterStage, peer: int, query: int, data: bytes = b"data") -> list[MasterEffect]:
    return master.hear(peer, msg.EvidenceReply(query, data))


def reported(
    data: bytes = b"", refusal: str = "", asker: int = ASKER, *, silent: bool = False
) -> list[MasterEffect]:
    """The only answer, after which the connection is closed."""
    closing = CloseConnection(asker, "the query is answered")
    return [SendTo(asker, msg.EvidenceReport(data, refusal, silent)), closing]


SILENT = reported(refusal="peer 2 did not answer within 3 s", silent=True)


@pytest.fixture(name="master")
def make_master() -> MasterStage:
    return MasterStage().new(3)


def test_a_question_goes_to_its_peer_and_the_answer_back(master: MasterStage) -> None:
    assert ask(master, 2, kind=STACKS) == [SendTo(2, msg.EvidenceQuery(1, STACKS))]
    assert reply(master, 2, 1) == reported(b"data")
    assert reply(master, 2, 1) == []  # once


def test_a_refusal_goes_back_too(master: MasterStage) -> None:
    ask(master, 2)
    effects = master.hear(2, msg.EvidenceReply(1, b"", "this peer keeps no record"))
    assert effects == reported(refusal="this peer keeps no record")


@pytest.mark.parametrize("peer", [0, 9, 1 << 62])
def test_an_unknown_peer_is_not_asked(master: MasterStage, peer: int) -> None:
    refusal = f"peer {peer} is not a member of the run"
    assert ask(master, peer) == reported(refusal=refusal)


def test_a_newcomer_is_not_asked(master: MasterStage) -> None:
    master.register(4)
    assert ask(master, 4) == reported(refusal="peer 4 is not a member of the run")


def test_a_peer_without_a_connection_is_not_asked(master: MasterStage) -> None:
    master.do(ConnectionClosed(2, "reset"))
    assert ask(master, 2) == reported(refusal="peer 2 has no connection to the master")


def test_so_many_questions_may_be_open(master: MasterStage) -> None:
    for number in range(INQUIRIES_MAX):
        assert len(ask(master, 2, 100 + number)) == 1
    last = 100 + INQUIRIES_MAX
    refusal = f"{INQUIRIES_MAX} questions are open; ask again later"
    assert ask(master, 3, last) == reported(refusal=refusal, asker=last)
    assert reply(master, 2, 5) == reported(b"data", asker=104)
    assert len(ask(master, 3, last + 1)) == 1


def test_the_answer_of_another_peer_is_ignored(master: MasterStage) -> None:
    ask(master, 2)
    assert reply(master, 3, 1, b"a lie") == []
    assert reply(master, 3, 2, b"a lie") == []
    assert reply(master, 2, 1) == reported(b"data")


def test_answers_may_come_in_another_order(master: MasterStage) -> None:
    ask(master, 2)
    ask(master, 3, OTHER)
    assert reply(master, 3, 2, b"three") == reported(b"three", asker=OTHER)
    assert reply(master, 2, 1, b"two") == reported(b"two")


def test_a_peer_has_three_seconds(master: MasterStage) -> None:
    ask(master, 2)
    assert master.wait(2.75) == []
    assert master.wait(0.25) == SILENT
    assert reply(master, 2, 1) == []  # too late
    assert ask(master, 2) == [SendTo(2, msg.EvidenceQuery(2, STATE))]


def test_a_question_ends_with_the_connection_of_its_peer(master: MasterStage) -> None:
    ask(master, 2)
    master.do(ConnectionClosed(2, "reset"))
    refusal = "peer 2 has lost its connection to the master"
    assert master.wait(0.25) == reported(refusal=refusal)


def test_a_peer_that_reconnects_at_once_may_answer(master: MasterStage) -> None:
    ask(master, 2)
    master.do(ConnectionClosed(2, "reset"))
    master.resume(2, 12, 3)
    assert reply(master, 12, 1) == reported(b"data")


def test_a_peer_that_reconnects_is_not_silent(master: MasterStage) -> None:
    """The question may have been lost with the old connection."""
    ask(master, 2)
    master.do(ConnectionClosed(2, "reset"))
    master.resume(2, 12, 3)
    refusal = "peer 2 has connected to the master again meanwhile; ask again"
    assert master.wait(3.0) == reported(refusal=refusal)


def test_a_question_ends_with_the_membership_of_its_peer(master: MasterStage) -> None:
    ask(master, 2)
    master.hear(2, msg.Goodbye())
    refusal = "peer 2 is no longer a member of the run"
    assert master.wait(0.25) == reported(refusal=refusal)


def test_a_master_that_slept_calls_no_peer_silent(master: MasterStage) -> None:
    """The answer may have come while the master did not read."""
    ask(master, 2)
    master.sleep(60.0)
    assert closed(master.do(MasterTick())) == []
    assert reply(master, 2, 1) == reported(b"data")
    ask(master, 2)
    master.sleep(60.0)
    assert closed(master.do(MasterTick())) == []
    assert master.wait(2.75) == []
    assert master.wait(0.25) == SILENT


def test_a_busy_master_reads_first_and_then_judges(master: MasterStage) -> None:
    ask(master, 2)
    master.sleep(4.0)
    assert closed(master.do(MasterTick(busy_ns=4 * SECOND))) == []
    assert master.wait(0.25) == SILENT


def test_whoever_goes_gets_no_answer(master: MasterStage) -> None:
    ask(master, 2)
    master.do(ConnectionClosed(ASKER, "Ctrl-C"))
    assert reply(master, 2, 1) == []
    assert master.wait(3.5) == []


@pytest.mark.parametrize(
    "second",
    [
        msg.EvidenceRequest(PeerId(3), STATE),
        msg.StatusRequest(),
        msg.RunQuery(),
        msg.Register(0, "", 4004),
        msg.Resume(PeerId(3), 1, b""),
    ],
)
def test_a_question_is_the_only_message(master: MasterStage, second: msg.PeerMessage) -> None:
    """Otherwise its answer closes the connection of a peer, or one stranger asks all questions."""
    ask(master, 2)
    effects = master.hear(ASKER, second)
    reason = "an EvidenceRequest must be the only message of its sender"
    assert effects == [CloseConnection(ASKER, reason)]
    assert list(master.machine.membership.peers) == [1, 2, 3]
    assert reply(master, 2, 1) == []


def test_questions_change_nothing_in_the_run(master: MasterStage) -> None:
    """A peer that answers is not thereby awaited, and one that does not is not removed."""
    ask(master, 2)
    assert closed(master.wait(60.0, 1, 3)) == [ASKER]
    assert [peer.id for peer in master.machine.membership.members()] == [1, 2, 3]


def test_a_recovering_master_has_no_peer_to_ask() -> None:
    master = MasterStage()
    master.restarted()
    master.say(1)
    (told_why, _) = ask(master, 1)
    assert isinstance(told_why, SendTo)
    assert isinstance(told_why.message, msg.EvidenceReport)
    assert told_why.message.refusal.startswith("this master coordinates no run: ")
    assert not told_why.message.silent
    effects = master.hear(1, msg.EvidenceRequest(PeerId(1), STATE))
    assert closed(effects) == [1]


def blank() -> MasterStage:
    """A young run of peers 1 and 2, which gives way to the older run if enough return to that."""
    master = MasterStage()
    master.blank()
    master.together(0, 0)
    return master


def test_questions_are_refused_when_the_run_gives_way_to_an_older_one() -> None:
    """Its members may return slowly, and the peers that were asked are gone."""
    master = blank()
    ask(master, 2)
    ask(master, 2, OTHER, EvidenceKind.PROCESS)
    known = (roster(7, 4, *range(1, 8)),)
    for peer in (1, 2):
        master.come(peer, connection=20 + peer, known=known)
    assert master.machine.recovering
    reports = dict(told(master.wait(0.25), msg.EvidenceReport))
    assert reports.keys() == {ASKER, OTHER}
    for report in reports.values():
        assert report.refusal.startswith("this master coordinates no run: ")
        assert not report.silent


def test_a_question_of_the_run_before_blames_nobody_in_the_older_run() -> None:
    """The peer that has the id now was never asked."""
    master = blank()
    ask(master, 2)
    for peer in (1, 2, 3):
        master.come(peer, connection=20 + peer)
    assert not master.machine.recovering
    refusal = "peer 2 has connected to the master again meanwhile; ask again"
    effects = master.wait(3.0, 21, 22, 23)
    assert told(effects, msg.EvidenceReport) == [(ASKER, msg.EvidenceReport(b"", refusal))]


def without_majority() -> MasterStage:
    """A master with a standby, of whose three members one is still connected."""
    master = MasterStage()
    master.blank(msg.MasterAddress("10.0.0.8", 1))
    master.together(0, 0, 0, masters=2)
    for peer in (1, 2):
        master.do(ConnectionClosed(peer, "reset"))
    return master


def test_a_question_ends_when_the_master_stands_down() -> None:
    """Then the master closes all connections."""
    master, seconds = without_majority(), 0
    while not master.machine.recovering:
        master.wait(1, 3)
        seconds += 1
    master = without_majority()
    master.wait(seconds - 1, 3)
    assert ask(master, 3) == [SendTo(3, msg.EvidenceQuery(1, STATE))]
    assert closed(master.wait(1, 3)) == [3, ASKER]
    assert master.machine.recovering


def test_a_member_cannot_ask(master: MasterStage) -> None:
    """A member's connection is not a question's: the answer would close it."""
    effects = master.hear(1, msg.EvidenceRequest(PeerId(2), STATE))
    assert told(effects, msg.EvidenceQuery) == []
    assert closed(effects) == [1]
    assert master.round(RoundKind.PEERS_PENDING, 0, 2, 3) == []


def test_a_question_of_a_peer_would_be_noticed(master: MasterStage) -> None:
    ask(master, 2)
    machine = master.machine
    machine.connections.bind(ASKER, machine.membership.peers[PeerId(3)])
    with pytest.raises(InvariantViolation, match="a question has no connection of its own"):
        machine.check()


# -- questions that the shell answers ------------------------------------------------------------


def test_the_shell_answers_what_the_peer_cannot(master: MasterStage) -> None:
    assert ask(master, 2, kind=EvidenceKind.PROCESS) == [InspectProcess(1, 2, "")]
    assert reply(master, 2, 1, b"a lie") == []
    assert master.do(ProcessInspected(1, b"data", "")) == reported(b"data")
    assert master.do(ProcessInspected(1, b"data", "")) == []
    assert master.wait(3.5) == []


def test_an_error_of_the_shell_goes_back_too(master: MasterStage) -> None:
    ask(master, 2, kind=EvidenceKind.PROCESS)
    assert master.do(ProcessInspected(1, b"", "failed")) == reported(refusal="failed")


def test_the_shell_does_not_answer_for_a_peer(master: MasterStage) -> None:
    ask(master, 2)
    assert master.do(ProcessInspected(1, b"data", "")) == []
    assert reply(master, 2, 1) == reported(b"data")


def test_a_peer_without_a_connection_has_a_process(master: MasterStage) -> None:
    master.do(ConnectionClosed(2, "reset"))
    assert ask(master, 2, kind=EvidenceKind.PROCESS) == [InspectProcess(1, None, "")]
    assert master.wait(1.0) == []


def test_the_shell_has_three_seconds_too_and_its_delay_is_no_silence(master: MasterStage) -> None:
    ask(master, 2, kind=EvidenceKind.PROCESS)
    refusal = "the process of peer 2 was not inspected within 3 s"
    assert master.wait(3.0) == reported(refusal=refusal)
    assert master.do(ProcessInspected(1, b"data", "")) == []


def test_questions_for_the_shell_count(master: MasterStage) -> None:
    """Each costs the shell a task."""
    for number in range(INQUIRIES_MAX):
        assert len(ask(master, 2, 100 + number, EvidenceKind.PROCESS)) == 1
    refusal = f"{INQUIRIES_MAX} questions are open; ask again later"
    assert ask(master, 2, kind=EvidenceKind.PROCESS) == reported(refusal=refusal)
    again = master.hear(100, msg.EvidenceRequest(PeerId(2), EvidenceKind.PROCESS))
    assert closed(again) == [100]
