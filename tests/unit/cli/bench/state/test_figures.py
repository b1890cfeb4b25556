"""Figures of ``pccl bench state``, from what processes have seen."""

from __future__ import annotations

import pytest

from pccl.cli.bench.state.figures import (
    JoinPart,
    Played,
    StateTask,
    join_figures,
    median_of,
    sync_figures,
    to_line,
)
from pccl.cli.bench.state.peer import Contents

GIB = 1 << 30
TASK = StateTask("sync", GIB, 3, 1, joiners=2)
JOIN = StateTask("join", GIB, 3, 1, sources=2)


def played(*seconds: float, joins: bool = True, fault: str = "") -> Played:
    phases = tuple((each / 2, each / 4, each / 4) for each in seconds)
    cpu_s = (1.0,) * len(seconds)
    return Played(joins, seconds, cpu_s, phases, 3 << 20, 5 << 20, fault)


def test_a_synchronization_takes_as_long_as_the_last_joiner() -> None:
    source = played(9.0, 9.0, 9.0, joins=False)
    found = sync_figures(TASK, [source, played(1.0, 4.0, 3.0), played(2.0, 3.0, 1.0)])
    assert found["case"] == "1 source, 2 joiners"
    assert found["seconds"] == [2.0, 4.0, 3.0]
    assert (found["seconds_median"], found["seconds_min"], found["seconds_max"]) == (3.0, 2.0, 4.0)
    assert found["gib_per_s"] == pytest.approx(2 / 3)
    assert found["source_cpu_s_per_gib"] == pytest.approx(0.5)
    assert found["joiner_cpu_s_per_gib"] == pytest.approx(1.0)
    assert found["joiner_extra_mib"] == 5
    assert found["tx_mib"] == [3, 3, 3]
    assert found["hashing_s"] == 1.25  # half of the median of 1, 4, 3, 2, 3, 1
    assert found["values_ok"] is True
    assert to_line(found).startswith("sync      1 source, 2 joiners")


def test_a_wrong_value_is_told() -> None:
    found = sync_figures(TASK, [played(1.0, joins=False), played(1.0, fault="tensor 3")])
    assert found["faults"] == ["tensor 3"]
    assert found["values_ok"] is False


def test_what_members_lose_by_a_join() -> None:
    member = JoinPart(((1.0, 0.1), (2.0, 0.2), (3.0, 0.1), (4.0, 0.1), (7.0, 2.1)))
    slower = JoinPart(((1.0, 0.1), (2.0, 0.1), (3.0, 0.1), (4.0, 0.1), (7.0, 2.6)))
    joiner = JoinPart((), 3.5, 0.5, 2.0, 8 << 20)
    found = join_figures(JOIN, [member, slower, joiner])
    [seconds] = found["seconds"]
    assert seconds == pytest.approx(2.5)
    assert found["case"] == "fetched when admitted"
    assert found["longest_s"] == 2.6
    assert found["usual_s"] == pytest.approx(0.1)
    assert found["steps"] == 2
    assert (found["connect_s"], found["first_sync_s"], found["first_sync_mib"]) == (0.5, 2.0, 8)


def test_several_joins() -> None:
    members = [
        JoinPart(((1.0, 0.0), (4.0, lost)), fault="x" * (lost > 2)) for lost in (1.0, 2.0, 6.0)
    ]
    joins = [join_figures(JOIN, [member, JoinPart((), 2.0, 0.5, 2.0, 0)]) for member in members]
    found = median_of(joins)
    assert found["seconds"] == [1.0, 2.0, 6.0]
    assert (found["seconds_median"], found["seconds_min"], found["seconds_max"]) == (2.0, 1.0, 6.0)
    assert found["longest_s"] == 2.0
    assert (found["values_ok"], found["faults"]) == (False, ["x"])
    assert found["bytes"] == GIB


def test_every_tensor_of_every_round_holds_something_else() -> None:
    contents = Contents(1 << 20)
    contents.fill(3)
    assert contents.fault(3) == ""
    assert contents.fault(4).startswith("tensor 0, round 4: element 0 is ")
    contents.fill_one(0, 9)
    assert contents.fault(3, changing=9) == ""
    assert contents.fault(3).startswith("tensor 0, round 3: ")
