"""How far one peer is: its latest call, and its steps, from what its master hears."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as msg
from pccl.protocol.shared_state import SyncPurpose
from pccl.protocol.types import RoundId, RoundKind
from pccl.telemetry.pace import Pace, Request
from tests.support.master_stage import SECOND, SUM
from tests.support.offers import offer
from tests.support.scenarios import op

MS = SECOND // 1000


def beats(pace: Pace, *steps: tuple[int, int]) -> list[tuple[int, int]]:
    """After heartbeats at these times in ms, with these steps: the step, and its time in us."""
    found: list[tuple[int, int]] = []
    for at_ms, step in steps:
        pace.beat(msg.Heartbeat(step=step), at_ms * MS)
        found.append((pace.step, pace.step_us))
    return found


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (msg.RoundRequest(RoundId(RoundKind.UPDATE_TOPOLOGY, 3)), "update_topology"),
        (msg.RoundRequest(RoundId(RoundKind.PEERS_PENDING, 3)), "are_peers_pending"),
        (msg.OperationRequest(op(tag=7), SUM), "tag 7 (SUM of 8 x float32)"),
        (msg.SyncRequest(op(), offer()), "sync_shared_state"),
        (msg.SyncRequest(op(), offer(purpose=SyncPurpose.VERIFY)), "verify"),
    ],
)
def test_the_latest_call_by_its_name(request_: Request, name: str) -> None:
    pace = Pace()
    assert (pace.last_call, pace.called_ns) == ("", 0)
    pace.called(msg.OperationRequest(op(tag=9), SUM), 1 * SECOND)
    pace.called(request_, 2 * SECOND)
    assert (pace.last_call, pace.called_ns) == (name, 2 * SECOND)


def test_the_time_of_a_step_is_that_between_two_reports() -> None:
    assert beats(Pace(), (0, 0), (1000, 10), (1500, 10), (3000, 12), (3500, 17)) == [
        (0, 0),  # it reports no steps
        (10, 0),  # when it began is unknown
        (10, 0),
        (12, 1_000_000),
        (17, 100_000),
    ]


def test_a_step_that_does_not_end_keeps_the_time_of_the_last() -> None:
    assert beats(Pace(), (0, 1), (1000, 2), (60_000, 2))[-1] == (2, 1_000_000)


def test_a_program_that_begins_anew_is_measured_anew() -> None:
    """It has loaded a checkpoint, or trains the next model."""
    assert beats(Pace(), (0, 5), (1000, 6), (2000, 3), (2500, 4), (2600, 0), (2700, 7)) == [
        (5, 0),
        (6, 1_000_000),
        (3, 0),
        (4, 500_000),
        (0, 0),
        (7, 0),
    ]


def test_steps_that_take_no_time_are_not_measured() -> None:
    assert beats(Pace(), (10, 1), (10, 2)) == [(1, 0), (2, 0)]


def test_a_heartbeat_is_echoed_once_with_the_time_for_which_it_was_held() -> None:
    pace = Pace()
    assert pace.echo(5) == (0, 0)
    pace.beat(msg.Heartbeat(sent_ns=77), 100)
    pace.beat(msg.Heartbeat(sent_ns=88), 200)
    pace.beat(msg.Heartbeat(), 210)  # a further part of a long heartbeat
    assert pace.echo(250) == (88, 50)
    assert pace.echo(260) == (0, 0)
