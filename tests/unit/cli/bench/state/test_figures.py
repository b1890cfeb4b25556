"""Figures of ``pccl bench state``, from what processes have said."""

from __future__ import annotations

import json

import pytest

from pccl.cli.bench.peers.words import decode, encode
from pccl.cli.bench.state.figures import hashing_figures, join_figure, played_figure, with_ratios
from pccl.cli.bench.state.peer import Contents
from pccl.cli.bench.state.words import Case, Gathering, JoinMeasured, JoinTask, Played, StateTask

GIB = 1 << 30


def played(*seconds: float, cpu_s: float = 1.0, fault: str = "") -> Played:
    count = len(seconds)
    phases = tuple(each / 4 for each in seconds)
    return Played(
        *(0, seconds, (cpu_s,) * count, phases, phases, phases, 0, 3 << 20, 5 << 20, 4 << 20),
        *(("reno",), fault),
    )


def test_a_case_takes_as_long_as_the_last_joiner() -> None:
    sources, joiners = [played(9.0, 9.0, 9.0)], [played(1.0, 4.0, 3.0), played(2.0, 3.0, 1.0)]
    figure = played_figure(Case("sync", 1, 2), "uplinks", GIB, sources, joiners)
    assert figure.seconds == (2.0, 4.0, 3.0)
    assert figure.case == "1 source, 2 joiners"
    assert figure.values["gib_per_s"] == pytest.approx(2 / 3)
    assert figure.values["source_cpu_s_per_gib"] == pytest.approx(0.5)
    assert figure.values["joiner_cpu_s_per_gib"] == pytest.approx(1.0)
    assert figure.values["tx_mib"] == [3, 3, 3]


def test_a_wrong_value_is_told() -> None:
    figure = played_figure(
        Case("staged"), "memory", GIB, [played(1.0)], [played(1.0, fault="tensor 3")]
    )
    assert figure.faults == ("tensor 3",)
    assert figure.to_dict()["values_ok"] is False
    assert figure.values["joiner_extra_mib"] == 5
    assert figure.values["joiner_extra_anonymous_mib"] == 4


def test_ratios() -> None:
    cases = [Case("copy"), Case("copy_hash"), Case("sync", 1)]
    seconds = [1.0, 2.0, 4.0]
    sync = [
        played_figure(case, "sync", GIB, [played(each)], [played(each)])
        for case, each in zip(cases, seconds, strict=True)
    ]
    found = with_ratios(sync)
    assert (found[2].values["of_copy"], found[2].values["of_hashed_copy"]) == (0.25, 0.5)
    cases = [Case("sync", 1), Case("sync", 3), Case("sync", 1, 2)]
    seconds = [6.0, 2.0, 7.5]
    uplinks = [
        played_figure(case, "uplinks", GIB, [played(each)], [played(each)])
        for case, each in zip(cases, seconds, strict=True)
    ]
    found = with_ratios(uplinks)
    assert found[1].values["times_one_source"] == 3.0
    assert found[2].values["times_one_joiner"] == 1.25


def test_hashing_beside_the_hash_itself() -> None:
    said = {"pieces": (0.5, 0.5), "all_processors": (0.4, 0.6), "one_processor": (1.0, 0.9)}
    found = hashing_figures(
        GIB, {name: {"seconds": [each], "cpu_s": [cpu]} for name, (each, cpu) in said.items()}
    )
    assert found[0].values["of_all_processors"] == pytest.approx(0.8)
    assert found[0].values["gib_per_s"] == pytest.approx(2.0)


def test_what_members_lose_by_a_join() -> None:
    member = JoinMeasured((0.1, 0.2, 0.1), (0.1, 2.1), 0.0, 0.0, 0, "")
    slower = JoinMeasured((0.1, 0.1, 0.1), (0.1, 2.6), 0.0, 0.0, 0, "")
    joiner = JoinMeasured((), (), 0.5, 2.0, 8 << 20, "")
    figure = join_figure(GIB, [[member, slower, joiner]], prefetches=False)
    [seconds] = figure.seconds
    assert seconds == pytest.approx(2.5)
    assert figure.values["longest_s"] == 2.6
    assert figure.values["usual_s"] == pytest.approx(0.1)
    assert figure.values["first_sync_mib"] == 8


def test_tasks_and_reports_are_read_back() -> None:
    gatherings = (Gathering(1, 2, "here:1", "here:2", "here:3"),)
    told = (True, 1, 2, 2, "here:4", 4096, 5, gatherings)
    task = StateTask(*told, warmup=1, cases=(Case("sync", 1, 2),), port=9)
    assert StateTask.from_json(task.to_json()) == task
    join = JoinTask(*told, compute_s=0.25, prefetches=True)
    assert JoinTask.from_json(join.to_json()) == join
    for report in (played(1.0), JoinMeasured((0.5,), (), 0.0, 0.0, 0, "x")):
        assert decode(encode(report)) == report
        assert json.loads(encode(report))["report"] == type(report).__name__.lower()


def test_every_tensor_of_every_round_holds_something_else() -> None:
    contents = Contents(1 << 20)
    contents.fill(3)
    assert contents.fault(3) == ""
    assert contents.fault(4).startswith("tensor 0, round 4: element")
    contents.tensors[5][7] += 1
    assert contents.fault(3).startswith("tensor 5, round 3: element 7 is")
    assert contents.fault(3, skipped=5) == ""
    tensors = [tensor[:100].tobytes() for tensor in contents.tensors]
    assert len(set(tensors)) == len(tensors)
