"""Figures of a benchmark, computed by hand."""

from __future__ import annotations

import pytest

from pccl.cli.bench.plan import BenchPlan, Variant
from pccl.cli.bench.statistics import Timed, bus_factor, faults_of, percentile, result_of, side_of

GIB = 1 << 30
PLAN = BenchPlan((GIB,), in_place=True, against="gloo")
KNOWN = {"algorithm": "ring", "lanes": 2, "wire_bytes_per_value": 4.0, "congestion": "reno"}


def timed(*seconds: float, cpu_s: float = 1.0, fault: str = "", digest: int = 0) -> Timed:
    return Timed(seconds, (cpu_s,) * len(seconds), fault, digest=digest, extra_bytes=1 << 20)


OURS = [timed(1.0, 4.0, 2.0), timed(3.0, 4.0, 2.0, cpu_s=0.5)]


def test_a_round_is_the_mean_over_peers() -> None:
    assert side_of(GIB, OURS) == {
        "seconds_median": 2.0,
        "seconds_min": 2.0,
        "seconds_p95": 4.0,
        "seconds_slowest_median": 3.0,
        "seconds": [2.0, 4.0, 2.0],
        "cpu_s_per_gib": 1.5,  # 4.5 seconds for three rounds of 1 GiB
        "values_ok": True,
        "faults": [],
    }


def test_result() -> None:
    found = result_of(PLAN, Variant(), GIB, KNOWN, OURS)
    assert found == {
        "peers": 2,
        "bytes": GIB,
        "dtype": "float32",
        "algorithm_asked": "auto",
        "quantize": "none",
        "in_place": True,
        **KNOWN,
        **side_of(GIB, OURS),
        "algorithm_bandwidth": GIB / 2,
        "bus_bandwidth": GIB / 2,
        "error": 0.0,
        "extra_mib": 1.0,
    }


def test_comparison() -> None:
    theirs = [timed(3.0, 2.0, cpu_s=0.25)] * 2
    found = result_of(PLAN, Variant(), GIB, KNOWN, [timed(1.0, 1.0)] * 2, theirs)
    assert found["against"] == "gloo"
    assert found["against_seconds_median"] == 2.5
    assert found["against_seconds"] == [3.0, 2.0]
    assert found["against_cpu_s_per_gib"] == 0.5
    assert found["against_values_ok"] is True
    assert found["ratio"] == 2.5


def test_faults_of_both_sides_are_named() -> None:
    ours, theirs = [timed(1.0), timed(1.0, fault="a")], [timed(1.0, fault="b"), timed(1.0)]
    found = result_of(PLAN, Variant(), GIB, KNOWN, ours, theirs)
    assert found["values_ok"] is found["against_values_ok"] is False
    assert faults_of(found) == ["pccl, 2 peers, peer 1: a", "gloo, 2 peers, peer 0: b"]
    quantized = result_of(PLAN, Variant("mesh", "int8"), GIB, KNOWN, ours)
    assert faults_of(quantized) == ["pccl, 2 peers, mesh int8, peer 1: a"]


def test_peers_that_hold_different_bits_are_a_fault() -> None:
    assert side_of(GIB, [timed(1.0, digest=1), timed(1.0, digest=2)])["faults"] == [
        "the results differ between peers"
    ]


@pytest.mark.parametrize(("peers", "factor"), [(2, 1.0), (3, 4 / 3), (4, 1.5), (64, 126 / 64)])
def test_bus_factor(peers: int, factor: float) -> None:
    assert bus_factor(peers) == factor


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.05, 1), (0.06, 2), (0.5, 10), (0.95, 19), (1.0, 20)]
)
def test_percentile(share: float, expected: int) -> None:
    assert percentile(list(range(20, 0, -1)), share) == expected
