"""Computes the figures of a case from the measurements of all peers. Pure.

The time of a round is the mean over the peers, each from its call to its return, as in nccl-tests.
Its span is the time from the first call to the last return of all peers.
Bus bandwidth is the load of each link of a ring, and so is comparable across numbers of peers. CPU
seconds per GiB are those of all peers in a round, divided by the size of the tensor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pccl.cli.bench.machine import GIB, MIB
from pccl.cli.bench.plan import EXACT, PLAIN, BenchPlan, Variant

OURS = "pccl"
"""Name of the side of this library."""

DIFFERENT = "the results differ between peers"
"""The fault that only the digests of all peers show."""

DIGITS = 9
"""Decimal places of times in seconds: whole nanoseconds."""

Figures: TypeAlias = dict[str, Any]
"""One object of ``--json``; ``docs/benchmarks.md`` lists its fields."""


@dataclass(frozen=True, slots=True)
class SourcesReady:
    """The report that the workers that start first are connected, so the rest can start."""


@dataclass(frozen=True, slots=True)
class CaseDone:
    """The report of one case: figures of all workers."""

    figures: Figures


@dataclass(slots=True)
class Timed:
    """The measurements of one peer for one side of a case.

    Attributes:
        began_s: beginning of each measured round, on the clock of this peer's machine.
        seconds: time of each measured round, from this peer's call to its return.
        cpu_s: user and system time of the whole process from call to return.
        fault: description of the first wrong value of all rounds; empty: none.
        error: relative L2 error of the worst result; 0: all results were exact.
        digest: digest of the bits of all quantized results.
        extra_bytes: peak of resident memory beyond that of the connected process and the buffers.
    """

    began_s: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    fault: str = ""
    error: float = 0.0
    digest: int = 0
    extra_bytes: int = 0


def results_of(
    plan: BenchPlan,
    size: int,
    sides: Sequence[tuple[str, Variant]],
    known: Sequence[Figures],
    logs: Sequence[Sequence[Timed]],
) -> list[Figures]:
    """Return the figures of all sides of a case.

    Args:
        plan: the plan of the benchmark.
        size: size of the tensor, in bytes.
        sides: name and variant of each side. ``OURS`` is first, then come other names.
        known: further figures of each side, of this peer alone.
        logs: measurements of each side, by rank.
    """
    found = [_result_of(plan, size, *side) for side in zip(sides, known, logs, strict=True)]
    exact_s = [each["seconds_median"] for each in found if each["quantize"] == EXACT]
    for each in found:
        if each["side"] != OURS:
            each["ratio"] = each["seconds_median"] / exact_s[0]
    return found


def _result_of(
    plan: BenchPlan,
    size: int,
    side: tuple[str, Variant],
    known: Figures,
    parts: Sequence[Timed],
) -> Figures:
    name, variant = side
    figures = side_of(size, parts, one_clock=plan.one_clock)
    bandwidth = size / figures["seconds_median"]
    found: Figures = {
        "side": name,
        "peers": len(parts),
        "bytes": size,
        "dtype": plan.dtype,
        "algorithm_asked": variant.algorithm,
        "quantize": variant.quantize,
        "in_place": plan.in_place,
        **known,
        **figures,
        "algorithm_bandwidth": bandwidth,
        "bus_bandwidth": bandwidth * bus_factor(len(parts)),
        "error": max(part.error for part in parts),
    }
    if name == OURS:
        found["extra_mib"] = round(max(part.extra_bytes for part in parts) / MIB, 3)
    return found


def side_of(size: int, parts: Sequence[Timed], *, one_clock: bool = True) -> Figures:
    """Return the times, CPU times and faults of one side, for a tensor of ``size`` bytes.

    Without ``one_clock``, the peers' beginnings cannot be compared, and there are no spans.
    """
    rounds = list(zip(*(part.seconds for part in parts), strict=True))
    means = [round(statistics.fmean(peers), DIGITS) for peers in rounds]
    begins = list(zip(*(part.began_s for part in parts), strict=True))
    spans = [
        round(max(map(sum, zip(begun, took, strict=True))) - min(begun), DIGITS)
        for begun, took in zip(begins, rounds, strict=True)
    ]
    cpu_s = math.fsum(cpu_s for part in parts for cpu_s in part.cpu_s)
    faults = [f"peer {peer}: {part.fault}" for peer, part in enumerate(parts) if part.fault]
    if len({part.digest for part in parts}) > 1:
        faults.append(DIFFERENT)
    return {
        **_times_of("seconds", means),
        **(_times_of("span", spans) if one_clock else {}),
        "seconds_slowest_median": round(statistics.median(map(max, rounds)), DIGITS),
        "cpu_s_per_gib": cpu_s / (size * len(rounds) / GIB),
        "values_ok": not faults,
        "faults": faults,
    }


def _times_of(name: str, times: list[float]) -> Figures:
    return {
        f"{name}_median": round(statistics.median(times), DIGITS),
        f"{name}_min": min(times),
        f"{name}_p95": percentile(times, 0.95),
        f"{name}_p99": percentile(times, 0.99),
        name: times,
    }


def faults_of(result: Figures) -> list[str]:
    """Return the faults of a result, each with its side and case."""
    variant = variant_of(result)
    case = f"{result['peers']} peers" + (f", {variant}" if variant != PLAIN else "")
    return [f"{result['side']}, {case}, {fault}" for fault in result["faults"]]


def variant_of(result: Figures) -> Variant:
    """Return the variant of a case."""
    return Variant(result["algorithm_asked"], result["quantize"])


def bus_factor(peers: int) -> float:
    """Return the bytes that each peer of a ring sends, as a multiple of the tensor's size."""
    return 2 * (peers - 1) / peers


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that a ``share`` of all values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
