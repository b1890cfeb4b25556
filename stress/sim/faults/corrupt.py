"""Flips bits in transit: in one portion of arriving data, or in many for a while.

A TCP checksum misses some flips, and a relay that changes bytes computes a new checksum. A flipped
bit may end a connection, which is then made again. It damages no value, and removes no member.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Self

from pccl.runtime.control.greeting import Greeting
from pccl.runtime.control.stream import ControlStream
from pccl.stress.sim.faults.base import Duration, Ground, LifePhase, Seed, TimedFault, one_of
from pccl.stress.sim.faults.between import BetweenFault

if TYPE_CHECKING:
    from pccl.stress.sim.stage import Stage
    from pccl.transports.sim.connection import SimConnection

_BITS = (1, 1, 1, 2, 3, 8)
_FOR_EVER_NS = 1 << 62


class OnWire(enum.Enum):
    """The kind of data that damaged bytes belong to."""

    HANDSHAKE = "handshake"
    CONTROL = "control"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    STATE = "shared state"
    OTHER = "another lane"


_OF_A_LANE = {
    LifePhase.REDUCE_SCATTER: OnWire.REDUCE_SCATTER,
    LifePhase.GATHER: OnWire.GATHER,
    LifePhase.SYNC: OnWire.STATE,
    LifePhase.FETCHING: OnWire.STATE,
}


def on_wire(stage: Stage, end: SimConnection) -> OnWire | None:
    """Return the kind of data that arrives at ``end``; None: no process of the run reads it."""
    if isinstance(end.receiver, Greeting):
        return OnWire.HANDSHAKE
    if isinstance(end.receiver, ControlStream):
        return OnWire.CONTROL
    for seat in stage.seats:
        if seat.process.host.name == end.local.host:
            return _OF_A_LANE.get(seat.process.life_phase(), OnWire.OTHER)
    return None


def flipped(data: memoryview, rng: Random, bits: int) -> memoryview:
    """Return a copy of ``data`` with ``bits`` bits flipped, or all if it has fewer."""
    changed = bytearray(data)
    for bit in rng.sample(range(8 * len(changed)), min(bits, 8 * len(changed))):
        changed[bit // 8] ^= 1 << bit % 8
    return memoryview(changed)


def flipped_in(kind: str, where: OnWire) -> str:
    """Return the name under which a summary counts flipped bits."""
    return f"{kind} in {where.value}"


class _Noise:
    """Flips bits of arriving data; adds itself to the network."""

    def __init__(
        self,
        stage: Stage,
        kind: str,
        seed: int,
        until_ns: int,
        hits: Callable[[SimConnection, OnWire, int, Random], bool],
        *,
        once: bool = False,
    ) -> None:
        self._stage = stage
        self._kind = kind
        self._rng = Random(seed)
        self._until_ns = until_ns
        self._hits = hits
        self._once = once
        self._over = False
        stage.network.noises.append(self)

    def changed(self, end: SimConnection, data: memoryview) -> memoryview:
        """Return ``data``, with flipped bits if ``hits`` chooses it; end when the time is over."""
        stage = self._stage
        if self._over or stage.now_ns() >= self._until_ns:
            stage.network.noises.remove(self)
            return data
        where = on_wire(stage, end)
        if where is None or not self._hits(end, where, len(data), self._rng):
            return data
        self._over = self._once
        stage.strikes[self._kind] += self._once
        stage.flipped(flipped_in(self._kind, where), end)
        return flipped(data, self._rng, self._rng.choice(_BITS))


@dataclass(frozen=True)
class Corrupt(TimedFault, kind="corrupt", calm=True, keeps_majority=True):
    """Flip bits in one portion of data of the kind ``where``, after ``skip`` such portions."""

    where: OnWire
    skip: Annotated[int, one_of(0, 0, 1, 3, 10)]
    seed: Seed

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault; in handshakes it often strikes early, when most greetings arrive."""
        where = rng.choice(tuple(OnWire))
        early = where is OnWire.HANDSHAKE and rng.random() < 0.7
        when_ns = 0 if early else ground.instant(rng)
        return super().draw(rng, ground, when_ns=when_ns, where=where)

    def strike(self, stage: Stage) -> None:
        """Wait for the portion, and flip its bits."""
        skips = self.skip

        def hits(end: SimConnection, where: OnWire, nbytes: int, rng: Random) -> bool:
            nonlocal skips
            if where is self.where:
                skips -= 1
            return where is self.where and skips < 0

        _Noise(stage, self.kind, self.seed, _FOR_EVER_NS, hits, once=True)


@dataclass(frozen=True)
class CorruptLine(BetweenFault, kind="corrupt_line"):
    """For a while bits flip in a share of the data between ``peer`` and ``other``."""

    share: float
    """Share of the arriving portions, on old and new connections."""
    bytes_min: int
    """Shorter portions stay intact, because many bad lines damage segments but no greetings."""
    duration_ns: Duration
    seed: Seed

    @classmethod
    def draw(cls, rng: Random, ground: Ground, **given: Any) -> Self:
        """Draw a fault, often of a single pair."""
        peer, other = ground.pair(rng)
        return super().draw(
            rng,
            ground,
            peer=peer,
            other=None if rng.random() < 0.3 else other,
            share=rng.choice((0.02, 0.1, 0.5, 1.0)),
            bytes_min=rng.choice((0, 0, 150, 400)),
        )

    def strike(self, stage: Stage) -> None:
        """Start to flip bits."""
        stage.struck(self)
        one, others = stage.name(self.peer), stage.others(self.peer, self.other)
        pairs = {(one, other) for other in others} | {(other, one) for other in others}
        for other in others:
            stage.excuses.garbled(one, other, self.duration_ns)

        def hits(end: SimConnection, where: OnWire, nbytes: int, rng: Random) -> bool:
            concerned = nbytes >= self.bytes_min and (end.local.host, end.other.local.host) in pairs
            return concerned and rng.random() < self.share

        until_ns = self.when_ns + self.duration_ns
        _Noise(stage, self.kind, self.seed, until_ns, hits)
