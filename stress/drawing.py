"""Draws a timeline from a seed: faults of all kinds, in a weighted mix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from random import Random

from pccl.stress.timeline import (
    LASTING,
    MASTER,
    OF_PAIR,
    PROCESSES_MAX,
    FaultKind,
    Timeline,
    TimelineFault,
)

WEIGHTS: Mapping[FaultKind, int] = {
    FaultKind.KILL: 5,
    FaultKind.RESTART: 16,
    FaultKind.FREEZE: 10,
    FaultKind.SLOW: 4,
    FaultKind.CLOCK_PAUSE: 4,
    FaultKind.RESET: 12,
    FaultKind.HALF_OPEN: 4,
    FaultKind.PARTITION: 5,
    FaultKind.PARTITION_ONE_WAY: 4,
    FaultKind.STALL: 5,
    FaultKind.BANDWIDTH: 5,
    FaultKind.DELAY: 5,
    FaultKind.MASTER_RESTART: 5,
    FaultKind.MASTER_RESTART_BLANK: 2,
    FaultKind.STANDBY: 0,
    FaultKind.JOINERS: 6,
    FaultKind.GARBAGE: 5,
    FaultKind.LEAVE: 4,
    FaultKind.CORRUPT: 5,
}
"""Weight of each kind. STANDBY is never drawn, because it needs a second master from the start."""

SPREAD = 2
"""Kills, leaves and joiners change the number of peers by at most this many."""

_STILL = (FaultKind.FREEZE, FaultKind.CLOCK_PAUSE, FaultKind.PARTITION, FaultKind.STALL)


def draw(
    seed: int,
    peers: int,
    duration_s: float,
    every_s: float,
    *,
    lanes: int = 2,
    groups: int = 1,
    deadline_s: float = 10.0,
    link: str = "",
    local: bool = False,
    weights: Mapping[FaultKind, int] = WEIGHTS,
) -> Timeline:
    """Draw a timeline, which depends on the arguments only.

    All faults are over when the run ends. Gaps between faults are exponentially distributed, so
    some faults overlap.

    Args:
        seed: seed of all draws.
        peers: number of peers at the start.
        duration_s: duration of the run.
        every_s: mean gap between two faults.
        lanes: see ``Timeline``.
        groups: see ``Timeline``.
        deadline_s: see ``Timeline``; pauses of processes and links are shorter or longer than this.
        link: see ``Timeline``.
        local: see ``Timeline``.
        weights: weight of each kind; missing kinds are not drawn.

    Raises:
        TimelineError: an argument is out of range.
    """
    plain = Timeline(seed, peers, duration_s, (), lanes, groups, deadline_s, link, local)
    if not every_s > 0:
        raise ValueError(f"every_s must be above 0, not {every_s!r}")
    drawing = _Drawing(plain, weights)
    at_s = 0.0
    faults: list[TimelineFault] = []
    while True:
        # -log(u) is exponential; Random's own methods may differ between versions of Python.
        at_s += -math.log(1.0 - drawing.random.random()) * every_s
        if at_s >= duration_s:
            break
        fault = drawing.fault(round(at_s, 3))
        if fault is not None:
            faults.append(fault)
    return replace(plain, faults=tuple(faults))


class _Drawing:
    def __init__(self, plain: Timeline, weights: Mapping[FaultKind, int]) -> None:
        self.random = Random(f"timeline {plain.seed}")
        self._plain = plain
        self._weights = {kind: weights.get(kind, 0) for kind in FaultKind}
        self._alive = list(range(plain.peers))
        self._known = plain.peers

    def fault(self, at_s: float) -> TimelineFault | None:
        """Draw a fault that begins at ``at_s``; None if it lasts, and the run ends within 1 ms."""
        kind = self._kind()
        duration_s = 0.0
        if kind in LASTING:
            duration_s = min(self._duration_s(kind), self._plain.duration_s - at_s)
            duration_s = math.floor(duration_s * 1000) / 1000
            if duration_s < 0.001:
                return None
        peer, other = self._who(kind)
        fault = TimelineFault(at_s, kind, peer, other, duration_s, self._amount(kind))
        if kind in (FaultKind.KILL, FaultKind.LEAVE):
            self._alive.remove(peer)
        if kind is FaultKind.JOINERS:
            self._alive += range(self._known, self._known + round(fault.amount))
            self._known += round(fault.amount)
        return fault

    def _kind(self) -> FaultKind:
        weights = dict(self._weights)
        if len(self._alive) <= max(2, self._plain.peers - SPREAD):
            weights[FaultKind.KILL] = weights[FaultKind.LEAVE] = 0
        if len(self._alive) >= self._plain.peers + SPREAD or self._known >= PROCESSES_MAX:
            weights[FaultKind.JOINERS] = 0
        if not any(weights.values()):
            return FaultKind.RESET
        pick = self._below(sum(weights.values()))
        for kind, weight in weights.items():
            if pick < weight:
                return kind
            pick -= weight
        raise AssertionError("a pick below the sum of all weights")

    def _who(self, kind: FaultKind) -> tuple[int, int | None]:
        if kind is FaultKind.GARBAGE and self._below(3) == 0:
            return MASTER, None
        if kind in OF_PAIR:
            peer = self._one(self._alive)
            if self._plain.local:
                return peer, MASTER
            others = [MASTER, *(each for each in self._alive if each != peer)]
            alone = kind is not FaultKind.HALF_OPEN and self._below(5) == 0
            return peer, None if alone else self._one(others)
        if kind in (FaultKind.JOINERS, *_MASTERS):
            return MASTER, None
        return self._one(self._alive), None

    def _duration_s(self, kind: FaultKind) -> float:
        deadline_s = self._plain.deadline_s
        if kind in (FaultKind.RESTART, *_MASTERS):
            return self._between(0.1, 2.0)
        if kind in _STILL or kind is FaultKind.PARTITION_ONE_WAY:
            if self._below(4) == 0:  # longer than the deadline: the master evicts the peer
                return self._between(1.2 * deadline_s, 2.0 * deadline_s)
            return self._between(0.05 * deadline_s, 0.5 * deadline_s)
        return self._between(0.1 * deadline_s, deadline_s)

    def _amount(self, kind: FaultKind) -> float:
        match kind:
            case FaultKind.SLOW:
                return round(self._between(0.05, 0.5), 3)
            case FaultKind.BANDWIDTH:
                return float(round(10 ** self._between(5.5, 7.0)))
            case FaultKind.DELAY:
                return round(self._between(0.01, 0.2), 3)
            case FaultKind.CORRUPT:
                return round(10 ** self._between(-4.0, -1.0), 6)
            case FaultKind.JOINERS:
                alive_max = self._plain.peers + SPREAD
                room = min(alive_max - len(self._alive), PROCESSES_MAX - self._known)
                return 1 + self._below(min(3, room))
            case FaultKind.GARBAGE:
                return 1 + self._below(4)
            case _:
                return 0.0

    def _between(self, least: float, most: float) -> float:
        return round(least + (most - least) * self.random.random(), 3)

    def _below(self, end: int) -> int:
        return int(self.random.random() * end)

    def _one(self, of: list[int]) -> int:
        return of[self._below(len(of))]


_MASTERS = (FaultKind.MASTER_RESTART, FaultKind.MASTER_RESTART_BLANK, FaultKind.STANDBY)
