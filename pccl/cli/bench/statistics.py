"""Computes the figures of a case from the measurements of all peers. Pure.

The time of a round is the mean over the peers, each from its call to its return, as in nccl-tests.
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
from pccl.cli.bench.plan import PLAIN, BenchPlan, Variant

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
        seconds: time of each measured round, from this peer's call to its return.
        cpu_s: user and system time of the whole process from call to return.
        fault: description of the first wrong value of all rounds; empty: none.
        error: relative L2 error of the worst result; 0: all results were exact.
        digest: digest of the bits of all quantized results.
        extra_bytes: peak of resident memory beyond that of the connected process and the buffers.
    """

    seconds: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    fault: str = ""
    error: float = 0.0
    digest: int = 0
    extra_bytes: int = 0


def result_of(
    plan: BenchPlan,
    variant: Variant,
    size: int,
    known: Figures,
    ours: Sequence[Timed],
    theirs: Sequence[Timed] = (),
) -> Figures:
    """Return the figures of one case.

    Args:
        plan: the plan of the benchmark.
        variant: variant of this case.
        size: size of the tensor, in bytes.
        known: further figures, of this peer alone.
        ours: measurements of this library, by rank.
        theirs: measurements of the other library, by rank; empty: none.
    """
    side = side_of(size, ours)
    bandwidth = size / side["seconds_median"]
    found: Figures = {
        "peers": len(ours),
        "bytes": size,
        "dtype": plan.dtype,
        "algorithm_asked": variant.algorithm,
        "quantize": variant.quantize,
        "in_place": plan.in_place,
        **known,
        **side,
        "algorithm_bandwidth": bandwidth,
        "bus_bandwidth": bandwidth * bus_factor(len(ours)),
        "error": max(part.error for part in ours),
        "extra_mib": round(max(part.extra_bytes for part in ours) / MIB, 3),
    }
    if theirs:
        sides = {f"against_{name}": value for name, value in side_of(size, theirs).items()}
        ratio = sides["against_seconds_median"] / side["seconds_median"]
        found |= {"against": plan.against, **sides, "ratio": ratio}
    return found


def side_of(size: int, parts: Sequence[Timed]) -> Figures:
    """Return the times, CPU times and faults of one side, for a tensor of ``size`` bytes."""
    rounds = list(zip(*(part.seconds for part in parts), strict=True))
    means = [round(statistics.fmean(peers), DIGITS) for peers in rounds]
    cpu_s = math.fsum(cpu_s for part in parts for cpu_s in part.cpu_s)
    faults = [f"peer {peer}: {part.fault}" for peer, part in enumerate(parts) if part.fault]
    if len({part.digest for part in parts}) > 1:
        faults.append(DIFFERENT)
    return {
        "seconds_median": round(statistics.median(means), DIGITS),
        "seconds_min": min(means),
        "seconds_p95": percentile(means, 0.95),
        "seconds_slowest_median": round(statistics.median(map(max, rounds)), DIGITS),
        "seconds": means,
        "cpu_s_per_gib": cpu_s / (size * len(rounds) / GIB),
        "values_ok": not faults,
        "faults": faults,
    }


def faults_of(result: Figures) -> list[str]:
    """Return the faults of both sides, each with its library and case."""
    variant = variant_of(result)
    case = f"{result['peers']} peers" + (f", {variant}" if variant != PLAIN else "")
    theirs = result.get("against_faults", [])
    sides = (("pccl", result["faults"]), (result.get("against", ""), theirs))
    return [f"{name}, {case}, {fault}" for name, faults in sides for fault in faults]


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
