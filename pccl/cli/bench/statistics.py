"""From what the peers have measured to the figures of a case. Pure.

A round's time is the mean over the peers of what each measured from its call to its return, as
nccl-tests has it. Bus bandwidth is what each link of a ring has to carry, and so can be compared
across N. Of CPU seconds per GiB a tensor counts once, not once per peer.
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
"""A fault that no peer sees alone."""

DIGITS = 9
"""Times are told in whole nanoseconds."""

Figures: TypeAlias = dict[str, Any]
"""One object of ``--json``; ``docs/benchmarks.md`` lists its fields."""


@dataclass(frozen=True, slots=True)
class SourcesReady:
    """The workers that start first are connected, and the others may come."""


@dataclass(frozen=True, slots=True)
class CaseDone:
    """The figures of one case, of all workers."""

    figures: Figures


@dataclass(slots=True)
class Timed:
    """One peer's part of one side of a case.

    Attributes:
        seconds: of every measured round, from this peer's call to its return.
        cpu_s: user and system time of the whole process, likewise.
        fault: the first wrong value, in words, of all rounds; empty: all were right.
        error: relative L2 error of the worst result; 0: they were exact.
        digest: of the bits of all results that were not.
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
    """Put all peers' parts of one case together.

    Args:
        plan: all that is measured.
        variant: one of its ways.
        size: of the tensor, in bytes.
        known: more figures, of which one peer is enough.
        ours: what each peer says of this library, by rank.
        theirs: likewise of the other side; empty: there is none.
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
    """What one side of a case has cost, of a tensor of so many bytes."""
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
    """Wrong values of both sides, with whose they are and in which case."""
    variant = variant_of(result)
    case = f"{result['peers']} peers" + (f", {variant}" if variant != PLAIN else "")
    theirs = result.get("against_faults", [])
    sides = (("pccl", result["faults"]), (result.get("against", ""), theirs))
    return [f"{name}, {case}, {fault}" for name, faults in sides for fault in faults]


def variant_of(result: Figures) -> Variant:
    """How a case was asked for."""
    return Variant(result["algorithm_asked"], result["quantize"])


def bus_factor(peers: int) -> float:
    """Share of the tensor that each peer of a ring sends."""
    return 2 * (peers - 1) / peers


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
