"""What scenarios of a peer can't show: see ``tests/scenario/peer`` for all else."""

from __future__ import annotations

import pytest

from pccl.machines.peer import events as ev
from pccl.protocol import messages as msg
from pccl.protocol.errors import PCCLError, ResyncRequired
from pccl.protocol.operation import Phase
from pccl.protocol.types import AbortCause, RoundId, RoundKind
from tests.support.peer_stage import SUM, PeerStage, ended, raised, sent
from tests.support.scenarios import op, roster


def test_what_may_come() -> None:
    stage = PeerStage()
    assert not stage.machine.collectives.may_come(op())
    stage.member()
    may_come = stage.machine.collectives.may_come
    assert may_come(op())
    assert may_come(op(7, tag=99))
    assert not may_come(op(view=2))
    assert not may_come(op(term=2))
    assert not may_come(op(group=1))
    stage.do(ev.ReduceCall(9, 5, SUM))
    assert not may_come(op())
    assert may_come(op(1))
    stage.do(msg.RosterChanged(roster(2, 2, 1, 2)))
    assert not may_come(op(1))


def test_no_data_may_come_of_what_has_ended_before_it_was_asked_for() -> None:
    stage = PeerStage().member()
    stage.do(ended(op(), AbortCause.LOCKSTEP))
    assert not stage.machine.collectives.may_come(op())


def test_so_many_collectives_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.machines.peer.collectives.OPERATIONS_OPEN_MAX", 3)
    stage = PeerStage().member()
    for tag in (0, 1, 2):
        assert len(stage.do(ev.ReduceCall(tag + 10, tag, SUM))) == 2
    error = raised(stage.do(ev.ReduceCall(13, 3, SUM)), PCCLError)
    assert "collectives are open already; wait for some of them first" in str(error)
    stage.do(ended(op(tag=1), AbortCause.WITHDRAWN))
    assert len(stage.do(ev.ReduceCall(14, 3, SUM))) == 2


def test_an_admitted_peer_knows_its_place() -> None:
    stage = PeerStage().member()
    machine = stage.machine
    assert (machine.peer, machine.term, machine.run) == (2, 1, b"the run's own id")
    assert machine.phase_of(op()) is None
    stage.do(ev.ReduceCall(9, 5, SUM))
    assert machine.phase_of(op()) is Phase.REQUESTED


def test_a_caller_is_in_a_round_until_it_leaves() -> None:
    stage = PeerStage().member()
    machine = stage.machine
    assert not machine.in_round
    stage.do(ev.RoundCall(3, RoundKind.UPDATE_TOPOLOGY))
    assert machine.in_round
    stage.do(ev.LeaveCall(3, "0.5 s are over"))
    assert not machine.in_round


def test_a_full_batch_of_acknowledgements_does_not_wait() -> None:
    stage = PeerStage().member()
    effects = [effect for n in range(64) for effect in stage.do(ended(op(n), AbortCause.WITHDRAWN))]
    beat = msg.Heartbeat((), tuple(op(n) for n in range(64)), (), False, 1)
    assert sent(effects) == [beat]


def test_acknowledgements_never_replace_a_heartbeat_with_progress() -> None:
    stage = PeerStage().running()
    beats: list[msg.Heartbeat] = []
    for n in range(2000):  # 100 small reduces a second for 20 s, beside a large one
        stage.now_ns += 10_000_000
        effects = stage.do(ended(op(n, tag=77), AbortCause.WITHDRAWN))
        if n % 25 == 0:
            effects += stage.do(ev.Tick((msg.Progress(op(), n, n, n),)))
        beats += [message for message in sent(effects) if isinstance(message, msg.Heartbeat)]
    with_progress = [beat for beat in beats if beat.progress]
    assert len(with_progress) >= 18
    assert len(beats) > len(with_progress) + 10  # batches of acknowledgements in between


def test_a_caller_that_left_without_noticing_a_commit_must_synchronize() -> None:
    stage = PeerStage().running(done=True)
    stage.do(ended(op()))
    stage.do(ev.LeftCommitted(op()))
    assert stage.machine.needs_resync
    raised(stage.do(ev.ReduceCall(10, 5, SUM)), ResyncRequired)


def test_newcomers_wait_until_the_next_round_of_members() -> None:
    stage = PeerStage().member()
    machine = stage.machine
    present = RoundId(RoundKind.UPDATE_TOPOLOGY, 1)
    stage.do(msg.RoundAwaits(RoundId(RoundKind.UPDATE_TOPOLOGY, 0), newcomers=True))
    assert not machine.newcomers_wait, "that round is over"
    stage.do(msg.RoundAwaits(present, newcomers=True))
    assert machine.newcomers_wait
    assert not machine.is_awaited
    stage.do(ev.RoundCall(9, RoundKind.PEERS_PENDING))
    assert machine.newcomers_wait
    stage.do(ev.RoundCall(10, RoundKind.UPDATE_TOPOLOGY))
    assert not machine.newcomers_wait
    stage.do(msg.RoundClosed(present, 1, True, sequence=1))
    assert not machine.newcomers_wait


def test_the_rounds_of_a_peer_that_leaves_soon_are_urgent() -> None:
    stage = PeerStage().member()
    asked = sent(stage.do(ev.RoundCall(9, RoundKind.UPDATE_TOPOLOGY)))
    (update,) = (one.round for one in asked if isinstance(one, msg.RoundRequest))
    assert sent(stage.do(ev.LeavesSoon())) == [msg.RoundRequest(update, leaves=True)]
    pending = RoundId(RoundKind.PEERS_PENDING, 0)
    later = stage.do(ev.RoundCall(10, RoundKind.PEERS_PENDING))
    assert sent(later) == [msg.RoundRequest(pending, leaves=True)]
