from __future__ import annotations

from pathlib import Path

import pytest

from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.studies.storm.tape import (
    HeldOutLoss,
    ReplicaKilled,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
)
from pccl.stress.timeline import FaultKind, Timeline, TimelineFault

pytest.importorskip("PIL")

from PIL import Image

from pccl.stress.studies.storm.picture import clock, columns_of, write_picture


def storm_of(peers: int) -> tuple[Storm, list[TapeEvent]]:
    """A storm that kills replica 1 after 5 of 20 s, and its tape."""
    fault = TimelineFault(5.0, FaultKind.RESTART, 1, duration_s=0.5)
    tape: list[TapeEvent] = [StormBegan(0.0), ReplicaKilled(5.0, 1)]
    tape += [ReplicaTrains(0.0, index, index) for index in range(peers)]
    tape += [RoundDone(2.0 * n, 0, "run", n, (0, 1), 8.0, 4.0, 100) for n in range(1, 10)]
    tape += [HeldOutLoss(2.0 * n, n, 3.0 - n / 10) for n in (1, 5, 9)]
    return Storm(Timeline(1, peers, 20.0, (fault,)), StormTraining(step_s=0.5)), tape


def test_a_tape_always_gives_the_same_animation(tmp_path: Path) -> None:
    storm, tape = storm_of(4)
    paths = [tmp_path / "first.gif", tmp_path / "second.gif"]
    for path in paths:
        write_picture(storm, tape, path, seconds=2.0)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    with Image.open(paths[0]) as picture:
        assert getattr(picture, "n_frames", 1) == 20
        assert picture.width <= 900
        assert picture.info["loop"] == 0


@pytest.mark.parametrize(("peers", "columns"), [(2, 2), (8, 8), (64, 8), (65, 16), (128, 16)])
def test_the_picture_has_room_for_all_replicas(tmp_path: Path, peers: int, columns: int) -> None:
    assert columns_of(peers) == columns
    storm, tape = storm_of(peers)
    write_picture(storm, tape, tmp_path / "storm.gif", seconds=0.3)
    with Image.open(tmp_path / "storm.gif") as picture:
        assert picture.height <= 700


def test_a_tape_without_losses_gives_a_lower_picture(tmp_path: Path) -> None:
    storm, tape = storm_of(4)
    heights: list[int] = []
    for events in (tape, [one for one in tape if not isinstance(one, HeldOutLoss)]):
        write_picture(storm, events, tmp_path / "storm.gif", seconds=0.3)
        with Image.open(tmp_path / "storm.gif") as picture:
            heights.append(picture.height)
    assert heights[0] > heights[1]


def test_times_are_minutes_and_seconds() -> None:
    assert [clock(at) for at in (0.0, 59.9, 65.0, 3600.0)] == ["0:00", "0:59", "1:05", "60:00"]
