"""From what the peers report to the figures of a case. Pure.

- A round's time is the mean over the peers of what each measured from its call to its return, as
  nccl-tests has it; the slowest peer's is kept beside it. Of the rounds, the median counts.
- Algorithm bandwidth is the tensor's bytes by that time; bus bandwidth is 2(N-1)/N of it: what
  each link of a ring has to carry, and so what can be compared across N.
- CPU seconds per GiB: user and system time of all peer processes in all measured rounds, by the
  GiB that were reduced (a tensor counts once, not once per peer).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pccl.cli.bench.peers.words import Measured, Timed
from pccl.cli.bench.variants import PLAIN, Variant

MIB = 1 << 20
GIB = 1 << 30

DIFFERENT = "the results differ between peers"
"""A fault that no peer sees alone."""

DIGITS = 9
"""Times are printed in whole nanoseconds."""


@dataclass(frozen=True, slots=True)
class SideFigures:
    """What one side of a case has cost.

    Attributes:
        seconds: of every round: mean over the peers.
        slowest: of every round: the slowest peer's seconds.
        cpu_s: of all peers in all rounds.
        faults: the first wrong value of each peer that had one.
    """

    seconds: tuple[float, ...]
    slowest: tuple[float, ...]
    cpu_s: float
    faults: tuple[str, ...]

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The figures of one case.

    Attributes:
        peers: how many there were.
        bytes: of the tensor.
        dtype: of the tensor.
        lanes: connections per link that were asked for or, if that was left to the library, the
            most that a link had.
        in_place: whether the result replaced the input.
        ours: what the library has cost.
        against: name of the other side, if there was one.
        theirs: what it has cost.
        master_cpu_s: of the master's process while the rounds ran; None: it ran elsewhere.
        extra_bytes: peak memory beyond the caller's buffers, of the worst peer.
        connect_bytes: what connecting alone has added to a process, of the worst peer.
        congestion: names of the congestion controls in use, with commas.
        variant: how it was asked for.
        algorithm: by which values have travelled; names with commas, if there were several.
        wire_bytes_per_value: what peers have sent for each value that they sent.
        error: relative L2 error of the results, of the worst peer; 0: they were exact.
    """

    peers: int
    bytes: int
    dtype: str
    lanes: int
    in_place: bool
    ours: SideFigures
    against: str
    theirs: SideFigures | None
    master_cpu_s: float | None
    extra_bytes: int
    connect_bytes: int
    congestion: str
    variant: Variant = PLAIN
    algorithm: str = "ring"
    wire_bytes_per_value: float = 0.0
    error: float = 0.0

    @property
    def values_ok(self) -> bool:
        """Whether every value of every round was right, on all peers."""
        return not self.ours.faults

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes / self.ours.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second and link of a ring."""
        return self.algorithm_bandwidth * bus_factor(self.peers)

    @property
    def ratio(self) -> float | None:
        """How many times the other side's speed."""
        return None if self.theirs is None else self.theirs.median / self.ours.median

    def cpu_s_per_gib(self, cpu_s: float) -> float:
        """CPU time of all rounds by what they reduced."""
        return cpu_s / (self.bytes * len(self.ours.seconds) / GIB)

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints of the case."""
        found: dict[str, Any] = {
            "peers": self.peers,
            "bytes": self.bytes,
            "dtype": self.dtype,
            "algorithm": self.algorithm,
            "algorithm_asked": self.variant.algorithm,
            "quantize": self.variant.quantize,
            "block": None if self.variant.exact else self.variant.wire_block,
            "stochastic": self.variant.stochastic,
            "tensors": self.variant.tensors,
            "many": self.variant.many,
            "lanes": self.lanes,
            "in_place": self.in_place,
            **_times("seconds", self.ours),
            "algorithm_bandwidth": self.algorithm_bandwidth,
            "bus_bandwidth": self.bus_bandwidth,
            "cpu_s_per_gib": self.cpu_s_per_gib(self.ours.cpu_s),
            "master_cpu_s_per_gib": None
            if self.master_cpu_s is None
            else self.cpu_s_per_gib(self.master_cpu_s),
            "error": self.error,
            "wire_bytes_per_value": round(self.wire_bytes_per_value, 4),
            "extra_mib": round(self.extra_bytes / MIB, 3),
            "connect_mib": round(self.connect_bytes / MIB, 3),
            "values_ok": self.values_ok,
            "faults": list(self.ours.faults),
            "congestion": self.congestion,
        }
        if self.theirs is not None:
            found |= {
                "against": self.against,
                **_times("against_seconds", self.theirs),
                "against_cpu_s_per_gib": self.cpu_s_per_gib(self.theirs.cpu_s),
                "against_values_ok": not self.theirs.faults,
                "against_faults": list(self.theirs.faults),
                "ratio": self.ratio,
            }
        return found


def bus_factor(peers: int) -> float:
    """Share of the tensor that each peer of a ring sends."""
    return 2 * (peers - 1) / peers


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def side_of(parts: Sequence[Timed]) -> SideFigures:
    """Put the peers' measurements of one side together; the first peer comes first."""
    rounds = list(zip(*(part.seconds for part in parts), strict=True))
    return SideFigures(
        seconds=tuple(statistics.fmean(peers) for peers in rounds),
        slowest=tuple(max(peers) for peers in rounds),
        cpu_s=math.fsum(cpu_s for part in parts for cpu_s in part.cpu_s),
        faults=tuple(f"peer {peer}: {part.fault}" for peer, part in enumerate(parts) if part.fault),
    )


def result_of(
    parts: Sequence[Measured],
    *,
    dtype: str,
    lanes: int,
    in_place: bool,
    against: str,
    master_cpu_s: float | None,
    connect_bytes: int,
    variants: Sequence[Variant] = (PLAIN,),
) -> BenchResult:
    """Put all peers' parts of one case together.

    Args:
        parts: of each peer, the first one first.
        dtype: of the tensor.
        lanes: as asked for.
        in_place: whether the result replaced the input.
        against: name of the other side, or nothing.
        master_cpu_s: of the master's process while the rounds ran; None: it ran elsewhere.
        connect_bytes: what connecting has added, of the worst peer.
        variants: the ways that were measured; the parts say which one.
    """
    theirs = [part.theirs for part in parts if part.theirs is not None]
    ours = side_of([part.ours for part in parts])
    if len({part.digest for part in parts}) > 1:
        ours = replace(ours, faults=(*ours.faults, DIFFERENT))
    return BenchResult(
        peers=len(parts),
        bytes=parts[0].bytes,
        dtype=dtype,
        lanes=lanes or max((count for part in parts for count in part.lanes), default=0),
        in_place=in_place,
        ours=ours,
        against=against if theirs else "",
        theirs=side_of(theirs) if theirs else None,
        master_cpu_s=master_cpu_s,
        extra_bytes=max(part.extra_bytes for part in parts),
        connect_bytes=connect_bytes,
        congestion=",".join(sorted({name for part in parts for name in part.congestion if name})),
        variant=variants[parts[0].variant],
        algorithm=parts[0].algorithm,
        wire_bytes_per_value=statistics.fmean(part.wire_bytes_per_value for part in parts),
        error=max(part.error for part in parts),
    )


def _times(name: str, side: SideFigures) -> dict[str, Any]:
    return {
        f"{name}_median": round(side.median, DIGITS),
        f"{name}_min": round(min(side.seconds), DIGITS),
        f"{name}_p95": round(percentile(side.seconds, 0.95), DIGITS),
        f"{name}_slowest_median": round(statistics.median(side.slowest), DIGITS),
        name: [round(each, DIGITS) for each in side.seconds],
    }
