"""What a benchmark shows: cells by hand, the same cases as lines and objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pccl.cli.bench.plan import BenchPlan
from pccl.cli.bench.view import BenchView, Screen, duration, gigabytes, percent

PLAN = BenchPlan((1 << 20,), (4,), rounds=2, warmup=1, against=("gloo", "ring"))
RESULT: dict[str, Any] = {
    **{"bytes": 1 << 20, "peers": 4, "lanes": 2, "algorithm": "mesh", "algorithm_asked": "auto"},
    **{"quantize": "int8", "seconds_median": 0.003, "seconds_p95": 0.004, "seconds_p99": 0.005},
    **{"side": "pccl", "span_median": 0.0031},
    **{"bus_bandwidth": 524.3e6, "cpu_s_per_gib": 5.12, "extra_mib": 1.5, "error": 0.0078},
    **{"wire_bytes_per_value": 1.0625, "congestion": "reno"},
}
THEIRS: dict[str, Any] = {
    **{"side": "gloo-cubic", "bytes": 1 << 20, "peers": 4, "seconds_median": 0.006},
    **{"seconds_p95": 0.007, "seconds_p99": 0.008, "span_median": 0.0062, "congestion": "cubic"},
    **{"bus_bandwidth": 262e6, "cpu_s_per_gib": 10.24, "ratio": 2.0},
}
TIMES = ["3.00", "ms", "4.00", "ms", "5.00", "ms", "3.10", "ms"]
COSTS = [*TIMES, "0.524", "5.12", "1.50"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.3456, "12.3 s"),
        (1.0, "1.00 s"),
        (0.1234, "123 ms"),
        (0.00987, "9.87 ms"),
        (0.000123, "123 µs"),
        (0.0000004, "0.40 µs"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_gigabytes() -> None:
    assert gigabytes(1.2346e9) == "1.235"
    assert gigabytes(64e3) == "6e-05"


@pytest.mark.parametrize(
    ("error", "text"), [(0.0, "0"), (0.0078, "0.780%"), (0.19, "19.000%"), (3.4e-8, "3.4e-08")]
)
def test_percent(error: float, text: str) -> None:
    assert percent(error) == text


def shown(
    capsys: pytest.CaptureFixture[str], plan: BenchPlan, *results: Any, as_json: bool = False
) -> list[str]:
    """The lines of a benchmark."""
    view = BenchView(Screen(as_json=as_json))
    view.begin(plan)
    view.doing("something")
    for result in results:
        view.add(result)
    view.conclude()
    return capsys.readouterr().out.splitlines()


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    said = shown(capsys, PLAN, RESULT, THEIRS)
    rows = [line for line in said if " 1 MiB " in line]
    assert rows[0].split() == ["1", "MiB", "4", "2", "pccl", *COSTS, "-"]
    assert rows[1].split() == [
        *("1", "MiB", "4", "-", "gloo-cubic"),
        *("6.00", "ms", "7.00", "ms", "8.00", "ms", "6.20", "ms", "0.262", "10.24", "-", "2.00"),
    ]
    assert all(len(row) <= 100 for row in rows)
    assert said[0].startswith("pccl ")
    assert "2 rounds in turn with gloo and ring after 1 to warm up, every value checked" in said
    assert "congestion control of the peers' connections: pccl reno, gloo-cubic cubic" in said
    assert not [line for line in said if "forbids" in line]
    assert "something" not in said
    assert said[-1] == "ratio: time of the other side divided by ours: above 1, ours is faster"


def test_a_column_that_a_system_forbids(capsys: pytest.CaptureFixture[str]) -> None:
    view = BenchView(Screen(as_json=False))
    view.begin(BenchPlan((1 << 20,), against=("ring",)), no_namespace="unshare: No")
    view.add({**RESULT, "congestion": ""})
    view.conclude()
    said = capsys.readouterr().out.splitlines()
    assert "congestion control of the peers' connections: pccl unknown" in said
    assert (
        "no Gloo under our congestion control, since this system forbids namespaces: unshare: No"
    ) in said


def test_lines_of_several_hosts_have_no_span(capsys: pytest.CaptureFixture[str]) -> None:
    result = {name: value for name, value in RESULT.items() if name != "span_median"}
    said = shown(capsys, BenchPlan((4,), one_clock=False), result)
    [row] = [line for line in said if " 1 MiB " in line]
    assert row.split() == ["1", "MiB", "4", "2", *TIMES[:-2], "-", *COSTS[len(TIMES) :]]
    assert len(row) <= 80


def test_lines_of_several_ways(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, BenchPlan((4,), formats=("none", "int8")), RESULT)
    [row] = [line.split() for line in said if " 1 MiB " in line]
    assert row == ["1", "MiB", "4", "2", "auto", "mesh", "int8", *COSTS, "0.780%", "1.062"]


def test_objects(capsys: pytest.CaptureFixture[str]) -> None:
    [line] = shown(capsys, BenchPlan((4,), rounds=2, warmup=1), RESULT, as_json=True)
    found = json.loads(line)
    conditions = found.pop("conditions")
    assert found == RESULT
    assert set(conditions["versions"]) == {"pccl", "Python", "numpy"}
    assert conditions["cores"] >= 1
    assert conditions["processor"]
    assert (conditions["rounds"], conditions["warmup"]) == (2, 1)
    assert (conditions["emulate"], conditions["master"]) == ("", "")
    assert conditions["no_namespace"] == ""
