"""Tapes are lines of JSON in the order of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccl.stress.studies.storm.tape import (
    ReplicaAway,
    ReplicaKilled,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
    of_fault,
    read_tape,
    write_tape,
)
from pccl.stress.timeline import MASTER, FaultKind, TimelineFault


def test_a_tape_is_read_as_it_was_written(tmp_path: Path) -> None:
    events: list[TapeEvent] = [
        StormBegan(1.0),
        ReplicaTrains(2.0, 0, 5),
        RoundDone(3.0, 0, "aa", 0, (5, 6), 40.0, 20.0, 100),
        ReplicaAway(4.0, 1, 9.0, "freeze", False),
    ]
    write_tape([*reversed(events)], tmp_path / "tape")
    assert read_tape(tmp_path / "tape") == events


def test_a_line_without_an_event_is_named(tmp_path: Path) -> None:
    write_tape([StormBegan(1.0)], tmp_path / "tape")
    with (tmp_path / "tape").open("a") as file:
        file.write('{"report": "ReplicaTrains", "at": 1}\n')
    with pytest.raises(ValueError, match="line 2: no event of a storm"):
        read_tape(tmp_path / "tape")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (TimelineFault(1.0, FaultKind.KILL, 1), [ReplicaKilled(5.0, 1)]),
        (TimelineFault(1.0, FaultKind.LEAVE, 1), [ReplicaKilled(5.0, 1)]),
        (TimelineFault(1.0, FaultKind.RESTART, 1, None, 2.0), [ReplicaKilled(5.0, 1)]),
        (TimelineFault(1.0, FaultKind.NAP, 1, None, 2.0), [ReplicaAway(5.0, 1, 7.0, "nap", False)]),
        (
            TimelineFault(1.0, FaultKind.PARTITION, 1, None, 2.0),
            [ReplicaAway(5.0, 1, 7.0, "partition", True)],
        ),
        (
            TimelineFault(1.0, FaultKind.PARTITION, MASTER, 1, 2.0),
            [ReplicaAway(5.0, 1, 7.0, "partition", True)],
        ),
        (
            TimelineFault(1.0, FaultKind.PARTITION, MASTER, None, 2.0),
            [ReplicaAway(5.0, index, 7.0, "partition", True) for index in range(3)],
        ),
        (TimelineFault(1.0, FaultKind.PARTITION, 1, 2, 2.0), []),
        (TimelineFault(1.0, FaultKind.RESET, 1), []),
    ],
    ids=lambda value: str(value.kind) if isinstance(value, TimelineFault) else "",
)
def test_a_fault_ends_replicas_or_keeps_them_away(
    fault: TimelineFault, expected: list[TapeEvent]
) -> None:
    assert list(of_fault(fault, 3, 5.0, 7.0)) == expected
