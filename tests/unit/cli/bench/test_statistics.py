"""Figures of a benchmark, computed by hand."""

from __future__ import annotations

import pytest

from pccl.cli.bench.plan import BenchPlan, Variant
from pccl.cli.bench.statistics import (
    OURS,
    Timed,
    bus_factor,
    faults_of,
    percentile,
    results_of,
    side_of,
)

GIB = 1 << 30
PLAN = BenchPlan((GIB,), in_place=True, against=("gloo", "ring"))
KNOWN = {"algorithm": "ring", "lanes": 2, "wire_bytes_per_value": 4.0, "congestion": "reno"}
THEIRS = {"algorithm": "", "congestion": "bbr"}


def timed(
    *seconds: float, cpu_s: float = 1.0, fault: str = "", digest: int = 0, late_s: float = 0.0
) -> Timed:
    """The measurements of a peer whose rounds began at 10, 20, … s, or later by ``late_s``."""
    begins = tuple(10.0 * number + late_s for number, _ in enumerate(seconds, 1))
    cpus = (cpu_s,) * len(seconds)
    return Timed(begins, seconds, cpus, fault, digest=digest, extra_bytes=1 << 20)


OURS_TIMED = [timed(1.0, 4.0, 2.0), timed(3.0, 4.0, 2.0, cpu_s=0.5, late_s=0.5)]


def test_a_round_is_the_mean_over_peers_and_a_span_is_the_whole() -> None:
    found = side_of(GIB, OURS_TIMED)
    spans = {name: found.pop(name) for name in tuple(found) if name.startswith("span")}
    assert found == {
        "seconds_median": 2.0,
        "seconds_min": 2.0,
        "seconds_p95": 4.0,
        "seconds_p99": 4.0,
        "seconds_slowest_median": 3.0,
        "seconds": [2.0, 4.0, 2.0],
        "cpu_s_per_gib": 1.5,  # 4.5 seconds for three rounds of 1 GiB
        "values_ok": True,
        "faults": [],
    }
    assert spans == {
        "span_median": 3.5,
        "span_min": 2.5,
        "span_p95": 4.5,
        "span_p99": 4.5,
        "span": [3.5, 4.5, 2.5],
    }
    assert side_of(GIB, OURS_TIMED, one_clock=False) == found


def test_the_first_call_and_the_last_return_may_be_of_one_peer() -> None:
    assert side_of(GIB, [timed(5.0), timed(1.0, late_s=2.0)])["span"] == [5.0]
    assert side_of(GIB, [timed(1.0, late_s=0.5), timed(1.5)])["span"] == [1.5]


def test_result() -> None:
    [found] = results_of(PLAN, GIB, [(OURS, Variant())], [KNOWN], [OURS_TIMED])
    assert found == {
        "side": "pccl",
        "peers": 2,
        "bytes": GIB,
        "dtype": "float32",
        "algorithm_asked": "auto",
        "quantize": "none",
        "in_place": True,
        **KNOWN,
        **side_of(GIB, OURS_TIMED),
        "algorithm_bandwidth": GIB / 2,
        "bus_bandwidth": GIB / 2,
        "error": 0.0,
        "extra_mib": 1.0,
    }


def test_peers_on_several_hosts_have_no_spans() -> None:
    plan = BenchPlan((GIB,), one_clock=False)
    [found] = results_of(plan, GIB, [(OURS, Variant())], [KNOWN], [OURS_TIMED])
    assert found["seconds_p99"] == 4.0
    assert not [name for name in found if name.startswith("span")]


def test_comparison() -> None:
    """Others are compared with what is not quantized."""
    sides = [(OURS, Variant("mesh", "int8")), (OURS, Variant()), ("gloo", Variant())]
    logs = [[timed(9.0, 9.0)] * 2, [timed(1.0, 1.0)] * 2, [timed(3.0, 2.0, cpu_s=0.25)] * 2]
    quantized, plain, gloo = results_of(PLAN, GIB, sides, [KNOWN, KNOWN, THEIRS], logs)
    assert [quantized["side"], plain["side"], gloo["side"]] == ["pccl", "pccl", "gloo"]
    assert "ratio" not in quantized | plain
    assert "extra_mib" not in gloo
    assert (gloo["algorithm"], gloo["congestion"]) == ("", "bbr")
    assert gloo["seconds_median"] == 2.5
    assert gloo["seconds"] == [3.0, 2.0]
    assert gloo["cpu_s_per_gib"] == 0.5
    assert gloo["values_ok"] is True
    assert gloo["ratio"] == 2.5


def test_faults_of_all_sides_are_named() -> None:
    sides = [(OURS, Variant()), (OURS, Variant("mesh", "int8")), ("gloo", Variant())]
    ours, theirs = [timed(1.0), timed(1.0, fault="a")], [timed(1.0, fault="b"), timed(1.0)]
    results = results_of(PLAN, GIB, sides, [KNOWN] * 3, [ours, ours, theirs])
    assert [each["values_ok"] for each in results] == [False] * 3
    assert [faults_of(each) for each in results] == [
        ["pccl, 2 peers, peer 1: a"],
        ["pccl, 2 peers, mesh int8, peer 1: a"],
        ["gloo, 2 peers, peer 0: b"],
    ]


def test_peers_that_hold_different_bits_are_a_fault() -> None:
    assert side_of(GIB, [timed(1.0, digest=1), timed(1.0, digest=2)])["faults"] == [
        "the results differ between peers"
    ]


@pytest.mark.parametrize(("peers", "factor"), [(2, 1.0), (3, 4 / 3), (4, 1.5), (64, 126 / 64)])
def test_bus_factor(peers: int, factor: float) -> None:
    assert bus_factor(peers) == factor


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 1), (0.05, 1), (0.06, 2), (0.5, 10), (0.95, 19), (0.99, 20), (1.0, 20)],
)
def test_percentile(share: float, expected: int) -> None:
    assert percentile(list(range(20, 0, -1)), share) == expected
