"""What a reduce cannot go below on this machine, and what its promises cost on top. Pure.

A peer of a ring sends and receives 2(N-1)/N of the tensor and adds (N-1)/N of it. At the speed of
raw loopback and of adds in the cache that is the floor: no frames, no digest, no decision. Where
there are more peers than cores they take turns, so it is that many times as long.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pccl.cli.bench.statistics import DIGITS, BenchResult, bus_factor


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """Bytes per second of one thread; of loopback: each way of two processes, at the same time.

    Attributes:
        loopback: between two plain processes.
        congestion: the congestion control that was used for it.
        copy_cache: of segments that stay in a core's cache.
        copy_memory: of a whole tensor.
        add_cache: likewise.
        add_memory: likewise.
        hash_cache: of the hash that digests consist of, likewise.
        hash_memory: likewise.
    """

    loopback: float
    congestion: str
    copy_cache: float
    copy_memory: float
    add_cache: float
    add_memory: float
    hash_cache: float
    hash_memory: float

    def to_dicts(self) -> list[dict[str, Any]]:
        """What ``--json`` prints: one object for each."""
        loopback = {
            "floor": "loopback",
            "bytes_per_s": self.loopback,
            "congestion": self.congestion,
        }
        names = (f"{work}_{where}" for work in ("copy", "add", "hash") for where in _PLACES)
        return [
            loopback,
            *({"floor": name, "bytes_per_s": getattr(self, name)} for name in names),
        ]


_PLACES = ("cache", "memory")


@dataclass(frozen=True, slots=True)
class Costs:
    """One case beside its floor; all in seconds of one peer.

    Attributes:
        peers: how many there were.
        lanes: connections per link.
        bytes: of the tensor.
        seconds: what a round took.
        transfer: bytes that a peer sends, by the bandwidth of loopback.
        adds: bytes that it adds, by the bandwidth of adds in the cache.
        digest: bytes of the tensor by the bandwidth of the hash in the cache.
        backup: bytes of the tensor by the bandwidth of copies in memory, if it reduces in place.
        commit: of the median barrier, which decides as a reduce does and moves nothing.
        turns: how many peers share a core.
        way: algorithm and number of tensors.
    """

    peers: int
    lanes: int
    bytes: int
    seconds: float
    transfer: float
    adds: float
    digest: float
    backup: float
    commit: float
    turns: float
    way: str = ""

    @property
    def floor(self) -> float:
        """What no implementation goes below."""
        return (self.transfer + self.adds) * self.turns

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "floor": "case",
            "peers": self.peers,
            "lanes": self.lanes,
            "way": self.way,
            "bytes": self.bytes,
            "seconds_median": round(self.seconds, DIGITS),
            "floor_seconds": round(self.floor, DIGITS),
            "floor_ratio": self.seconds / self.floor,
            "transfer_seconds": round(self.transfer * self.turns, DIGITS),
            "adds_seconds": round(self.adds * self.turns, DIGITS),
            "digest_seconds": round(self.digest * self.turns, DIGITS),
            "backup_seconds": round(self.backup * self.turns, DIGITS),
            "commit_seconds": round(self.commit, DIGITS),
        }


@dataclass(frozen=True, slots=True)
class Floor:
    """What the machine permits, and every case beside it."""

    speeds: Bandwidths
    costs: list[Costs]

    def to_dicts(self) -> list[dict[str, Any]]:
        """What ``--json`` prints."""
        return [*self.speeds.to_dicts(), *(costs.to_dict() for costs in self.costs)]


def costs_of(
    result: BenchResult, speeds: Bandwidths, barriers: Sequence[float], cores: int
) -> Costs:
    """Itemise one case.

    Args:
        result: its figures.
        speeds: of the machine.
        barriers: seconds of barriers among the same peers.
        cores: of the machine.
    """
    factor = bus_factor(result.peers)
    return Costs(
        peers=result.peers,
        lanes=result.lanes,
        bytes=result.bytes,
        seconds=result.ours.median,
        transfer=factor * result.bytes / speeds.loopback,
        adds=factor / 2 * result.bytes / speeds.add_cache,
        digest=result.bytes / speeds.hash_cache,
        backup=result.bytes / speeds.copy_memory if result.in_place else 0.0,
        commit=statistics.median(barriers),
        turns=max(1.0, result.peers / cores),
        way=str(result.variant),
    )
