"""Faults of all connections between one process and another one, or between it and all others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pccl.stress.sim.faults.base import (
    MS,
    Drawn,
    Duration,
    Ground,
    OtherProcess,
    Peer,
    Process,
    TimedFault,
    one_of,
)

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection

_Spell = Annotated[int, one_of(100 * MS, 1000 * MS, 4000 * MS)]


@dataclass(frozen=True)
class BetweenFault(TimedFault):
    """A fault of all connections between ``peer`` and ``other``."""

    peer: Process
    other: OtherProcess

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault, its two processes first."""
        if not given:
            given["peer"], given["other"] = ground.pair(rng)
        return super().draw(rng, ground, **given)


# -- links ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bandwidth(BetweenFault, kind="bandwidth", calm=True, keeps_majority=True):
    """Both directions between two processes carry at most ``bytes_per_s``, for a while."""

    bytes_per_s: Annotated[int, one_of(5_000, 20_000, 100_000)]
    duration_ns: _Spell

    def strike(self, stage: Stage) -> Iterator[int]:
        """Limit the rate, and lift the limit after a while."""
        stage.struck(self)
        for other in stage.others(self.peer, self.other):
            stage.excuses.narrowed(stage.name(self.peer), other, self.duration_ns)
        routes = stage.routes(self.peer, self.other)
        for route in routes:
            route.caps.append(self.bytes_per_s)
        yield self.duration_ns
        for route in routes:
            route.caps.remove(self.bytes_per_s)


def _extra_ns(ground: Ground, rng: Random) -> int:
    """Draw an extra latency in ns; the longest is well below every deadline."""
    longest_ns = round(ground.timing.dial_s * 1000 / 16) * MS
    return rng.choice((min(10 * ground.latency_ns, longest_ns), longest_ns // 4, longest_ns))


@dataclass(frozen=True)
class Delay(BetweenFault, kind="delay", calm=True, keeps_majority=True):
    """Data in either direction between two processes takes ``extra_ns`` longer, for a while."""

    extra_ns: Annotated[int, Drawn(_extra_ns)]
    duration_ns: _Spell

    def strike(self, stage: Stage) -> Iterator[int]:
        """Lengthen the latency, and restore it after a while."""
        stage.struck(self)
        routes = stage.routes(self.peer, self.other)
        for route in routes:
            route.extra_ns += self.extra_ns
        yield self.duration_ns
        for route in routes:
            route.extra_ns -= self.extra_ns

    @property
    def ends_ns(self) -> int:
        """Time in ns at which the last delayed byte has arrived."""
        return super().ends_ns + self.extra_ns


@dataclass(frozen=True)
class Partition(BetweenFault, kind="partition"):
    """No data moves between ``peer`` and ``other``. No data is lost: it arrives after the fault."""

    one_way: ClassVar[bool] = False

    duration_ns: Duration

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault; sometimes it cuts a peer off from all other processes."""
        peer, other = ground.pair(rng)
        alone = rng.random() < 0.25 and peer >= 0
        return super().draw(rng, ground, peer=peer, other=None if alone else other)

    def strike(self, stage: Stage) -> None:
        """Stop the data for ``duration_ns``."""
        stage.struck(self)
        name = stage.name(self.peer)
        for other in stage.others(self.peer, self.other):
            stage.excuses.silenced(name, other, self.duration_ns)
            stage.network.stall(name, other, self.duration_ns, one_way=self.one_way)


@dataclass(frozen=True)
class OneWayPartition(Partition, kind="partition_one_way", one_way=True):
    """No data arrives at ``other`` from ``peer``; the other direction works."""


@dataclass(frozen=True)
class BlackHole(TimedFault, kind="black_hole", calm=True, keeps_majority=True):
    """Segments above ``largest_bytes`` vanish on the way from ``peer`` to ``other``, from now on.

    Smaller ones pass: a tunnel on the way takes no larger ones, and no message says so.
    """

    peer: Peer
    other: OtherProcess
    """None: all other processes."""
    largest_bytes: Annotated[int, one_of(1250, 1400)]

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault, its two peers first."""
        peer, other = rng.sample(range(ground.peers), 2)
        return super().draw(rng, ground, peer=peer, other=other if rng.random() < 0.5 else None)

    def strike(self, stage: Stage) -> None:
        """Lose large segments."""
        stage.struck(self)
        for other in stage.others(self.peer, self.other):
            route = stage.network.route(stage.name(self.peer), other)
            route.largest_bytes = self.largest_bytes


# -- open connections ----------------------------------------------------------------------------


@dataclass(frozen=True)
class PairFault(BetweenFault):
    """A fault of each open connection between two processes; new connections work."""

    duration_ns: Duration

    def strike(self, stage: Stage) -> None:
        """Apply the fault to each connection."""
        stage.struck(self)
        name, others = stage.name(self.peer), stage.others(self.peer, self.other)
        for end in list(stage.network.ends):
            if end.local.host == name and end.other.local.host in others:
                self._befall(stage, end)

    @abstractmethod
    def _befall(self, stage: Stage, end: SimConnection) -> None:
        """Apply the fault to one connection, whose end at ``peer`` is ``end``."""


@dataclass(frozen=True)
class PairReset(PairFault, kind="pair_reset"):
    """Both ends of the connections are reset."""

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.broken(end)
        end.reset()


@dataclass(frozen=True)
class PairStall(PairFault, kind="pair_stall"):
    """The connections stall in both directions for a while."""

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.silenced(end.local.host, end.other.local.host, self.duration_ns)
        end.stall(self.duration_ns)
        end.other.stall(self.duration_ns)


@dataclass(frozen=True)
class PairHalfOpen(PairFault, kind="pair_half_open"):
    """``other`` loses the connections, and ``peer`` does not notice that until it sends."""

    def _befall(self, stage: Stage, end: SimConnection) -> None:
        stage.excuses.deadened(end)
        end.other.forget()
