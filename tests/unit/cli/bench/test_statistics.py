"""Figures of a benchmark, computed by hand."""

from __future__ import annotations

import dataclasses

import pytest

from pccl.cli.bench.floor import Bandwidths, costs_of
from pccl.cli.bench.peers.words import Measured, Timed
from pccl.cli.bench.statistics import BenchResult, bus_factor, percentile, result_of, side_of
from pccl.cli.bench.variants import Variant

GIB = 1 << 30


def timed(*seconds: float, cpu_s: float = 1.0, fault: str = "") -> Timed:
    return Timed(seconds, (cpu_s,) * len(seconds), fault)


def measured(
    ours: Timed, theirs: Timed | None = None, *, extra_bytes: int = 0, congestion: str = "reno"
) -> Measured:
    return Measured(GIB, extra_bytes, (2,), (congestion,), ours, theirs, wire_bytes_per_value=4.0)


def result(*parts: Measured, lanes: int = 0, against: str = "") -> BenchResult:
    return result_of(
        parts,
        dtype="float32",
        lanes=lanes,
        in_place=True,
        against=against,
        master_cpu_s=6.0,
        connect_bytes=3 << 20,
    )


ALONE = result(
    measured(timed(1.0, 4.0, 2.0), extra_bytes=1 << 20),
    measured(timed(3.0, 4.0, 2.0, cpu_s=0.5), extra_bytes=1 << 19, congestion="cubic"),
)
COMPARED = result(
    measured(timed(1.0, 1.0), timed(3.0, 2.0, cpu_s=0.25)),
    measured(timed(1.0, 1.0), timed(3.0, 2.0, cpu_s=0.25)),
    lanes=4,
    against="gloo",
)


def test_a_round_is_the_mean_over_peers() -> None:
    side = side_of([timed(1.0, 4.0, 2.0), timed(3.0, 4.0, 2.0, cpu_s=0.5)])
    assert side.seconds == (2.0, 4.0, 2.0)
    assert side.slowest == (3.0, 4.0, 2.0)
    assert side.median == 2.0
    assert side.cpu_s == 4.5
    assert side.faults == ()


def test_result() -> None:
    assert ALONE.to_dict() == {
        "peers": 2,
        "bytes": GIB,
        "dtype": "float32",
        "algorithm": "ring",
        "algorithm_asked": "auto",
        "quantize": "none",
        "block": None,
        "stochastic": False,
        "tensors": 1,
        "many": False,
        "lanes": 2,
        "in_place": True,
        "seconds_median": 2.0,
        "seconds_min": 2.0,
        "seconds_p95": 4.0,
        "seconds_slowest_median": 3.0,
        "seconds": [2.0, 4.0, 2.0],
        "algorithm_bandwidth": GIB / 2,
        "bus_bandwidth": GIB / 2,
        "cpu_s_per_gib": 1.5,  # 4.5 seconds for three rounds of 1 GiB
        "master_cpu_s_per_gib": 2.0,
        "error": 0.0,
        "wire_bytes_per_value": 4.0,
        "extra_mib": 1.0,
        "connect_mib": 3.0,
        "values_ok": True,
        "faults": [],
        "congestion": "cubic,reno",
    }


def test_comparison() -> None:
    found = COMPARED.to_dict()
    assert found["lanes"] == 4
    assert found["against"] == "gloo"
    assert found["against_seconds_median"] == 2.5
    assert found["against_seconds"] == [3.0, 2.0]
    assert found["against_cpu_s_per_gib"] == 0.5
    assert found["against_values_ok"] is True
    assert found["ratio"] == 2.5


def test_faults() -> None:
    wrong = result(measured(timed(1.0)), measured(timed(1.0, fault="round 3: element 5")))
    assert wrong.values_ok is False
    assert wrong.to_dict()["faults"] == ["peer 1: round 3: element 5"]


VARIANTS = (Variant(), Variant("mesh", "int8", 4))


def quantized(error: float, wire_bytes: float, digest: str) -> BenchResult:
    """Of two peers, the first of which is as the arguments say."""
    parts = [
        Measured(GIB, 0, (1,), ("reno",), timed(1.0), None, 1, "mesh", *figures)
        for figures in ((wire_bytes, error, digest), (1.06, 0.007, "5eed"))
    ]
    return result_of(
        parts,
        dtype="float32",
        lanes=1,
        in_place=False,
        against="",
        master_cpu_s=None,
        connect_bytes=0,
        variants=VARIANTS,
    )


def test_a_quantized_case() -> None:
    found = quantized(0.0078, 1.07, "5eed").to_dict()
    assert found["algorithm"] == found["algorithm_asked"] == "mesh"
    assert (found["quantize"], found["block"], found["tensors"]) == ("int8", 32, 4)
    assert found["error"] == 0.0078  # of the worst peer
    assert found["wire_bytes_per_value"] == pytest.approx(1.065)
    assert found["master_cpu_s_per_gib"] is None  # it ran elsewhere
    assert found["faults"] == []


def test_peers_that_hold_different_bits_are_a_fault() -> None:
    assert quantized(0.007, 1.06, "beef").to_dict()["faults"] == [
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


SPEEDS = Bandwidths(
    loopback=GIB,
    congestion="reno",
    copy_cache=8 * GIB,
    copy_memory=4 * GIB,
    add_cache=2 * GIB,
    add_memory=GIB,
    hash_cache=16 * GIB,
    hash_memory=8 * GIB,
)


def test_costs_of_four_peers_on_two_cores() -> None:
    four = dataclasses.replace(ALONE, peers=4)
    costs = costs_of(four, SPEEDS, [0.1, 0.3, 0.2], cores=2)
    assert costs.to_dict() == {
        "floor": "case",
        "peers": 4,
        "lanes": 2,
        "way": "auto",
        "bytes": GIB,
        "seconds_median": 2.0,
        "floor_seconds": 3.75,  # twice 1.5 GiB moved and 0.75 GiB added
        "floor_ratio": 2.0 / 3.75,
        "transfer_seconds": 3.0,
        "adds_seconds": 0.75,
        "digest_seconds": 0.125,
        "backup_seconds": 0.5,
        "commit_seconds": 0.2,
    }


def test_no_backup_into_a_second_buffer_and_no_turns_on_many_cores() -> None:
    costs = costs_of(dataclasses.replace(ALONE, in_place=False), SPEEDS, [0.1], cores=8)
    assert costs.backup == 0.0
    assert costs.turns == 1.0
    assert costs.floor == 1.25


def test_bandwidths_are_objects_that_no_result_looks_like() -> None:
    found = SPEEDS.to_dicts()
    assert found[0] == {"floor": "loopback", "bytes_per_s": GIB, "congestion": "reno"}
    assert [each["floor"] for each in found[1:]] == [
        *("copy_cache", "copy_memory", "add_cache", "add_memory", "hash_cache", "hash_memory")
    ]
    assert all("algorithm" not in each for each in found)
    assert "floor" not in COMPARED.to_dict()
