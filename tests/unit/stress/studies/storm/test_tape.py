"""Tapes are lines of JSON in the order of time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccl.stress.studies.storm.tape import (
    ReplicaAway,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
    read_tape,
    write_tape,
)


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
