"""Which kinds of fault a seed draws, and how many of each."""

from __future__ import annotations

from random import Random

from pccl.stress.sim.faults import (
    between,
    connections,
    corrupt,
    divide,
    garbage,
    kills,
    master,
    narrowing,
    processes,
    state,
)
from pccl.stress.sim.faults.base import Fault, Ground

_CALM = 0.35
"""Share of runs in which no living process may lose its place."""

Draws = dict[type[Fault], tuple[int, ...]]
"""Kind of fault -> counts from which a seed draws."""

PLAIN: Draws = {
    kills.Kill: (0, 0, 1, 1, 1, 2, 2, 3),
    connections.Cut: (0, 0, 0, 1, 3, 10),
    processes.Interrupt: (0, 0, 0, 1, 3),
    kills.Restart: (0,) * 8 + (1, 2),
    processes.Slow: (0,) * 8 + (1, 2),
    between.Bandwidth: (0,) * 12 + (1, 2),
    between.Delay: (0,) * 12 + (1, 2),
    processes.Joiners: (0,) * 30 + (1,),
    garbage.Garbage: (0,) * 12 + (1, 3),
    processes.Leave: (0,) * 12 + (1, 2),
    connections.Reset: (0, 0, 0, 0, 1, 2, 4),
    connections.DeadLane: (0,) * 6 + (1, 2),
    connections.HalfOpen: (0,) * 6 + (1, 2),
    connections.StreamStall: (0,) * 9 + (1, 2),
    between.BlackHole: (0,) * 10 + (1, 2),
    between.PairReset: (0,) * 20 + (1,),
    between.PairHalfOpen: (0,) * 20 + (1,),
    between.PairStall: (0,) * 20 + (1,),
    between.Partition: (0,) * 8 + (1, 2),
    between.OneWayPartition: (0,) * 8 + (1, 2),
    processes.Freeze: (0,) * 5 + (1, 2),
    processes.ClockPause: (0,) * 9 + (1, 2),
    processes.PullsRefused: (0,) * 5 + (1, 2),
    processes.Load: (0,) * 10 + (1,),
    master.MasterDeath: (0,) * 24 + (1,),
    master.MasterRestart: (0,) * 10 + (1, 2),
    master.BlankMasterRestart: (0,) * 10 + (1, 2),
    master.Takeover: (0,) * 9 + (1,),
    connections.SilentLoss: (0,) * 6 + (1, 2),
    connections.BehindNat: (0,) * 7 + (1,),
    connections.Moved: (0,) * 12 + (1, 2),
}

OF_STATE: Draws = {
    state.Lies: (0, 0, 0, 1, 2),
    state.FetchKill: (0, 0, 0, 1, 2),
    state.FetchStall: (0, 0, 0, 0, 1),
    state.FetchInterrupt: (0, 0, 0, 0, 1),
    state.FetchMaster: (0, 0, 0, 0, 0, 1),
}
"""Further faults of runs with shared state."""

OF_MASTERS: Draws = {
    divide.MasterHalfOpen: (1, 1, 2),
    divide.MasterCutOff: (0, 1, 1),
}
"""Faults that cut members off from the first of two living masters; each run has at least one."""

OF_BITS: Draws = {
    corrupt.Corrupt: (1, 2, 4, 8),
    corrupt.CorruptLine: (0, 0, 1, 2),
}
"""Faults that damage data in transit; each run has at least one."""

OF_NAPS: Draws = {
    narrowing.NarrowedKill: (0, 0, 0, 1),
    narrowing.NarrowedMaster: (0, 0, 0, 1, 2),
}
"""Faults that strike when an operation goes on without members that nap."""

UNDRAWN: Draws = {connections.OneIpVersion: (0,), processes.Nap: (0,)}
"""Faults of scenarios that a test or a file writes."""

KINDS: dict[str, type[Fault]] = {
    fault.kind: fault for fault in (*PLAIN, *OF_STATE, *OF_MASTERS, *OF_BITS, *OF_NAPS, *UNDRAWN)
}


def kinds(draws: Draws) -> tuple[str, ...]:
    """Return the names of the kinds in ``draws``."""
    return tuple(fault.kind for fault in draws)


def draw_faults(
    draws: Draws, seed: int, ground: Ground, *, also_if_calm: bool = False
) -> tuple[Fault, ...]:
    """Draw the faults of ``seed``; every kind has its own random generator."""
    calm = Random(f"{seed}/calm").random() < _CALM and not also_if_calm
    faults: list[Fault] = []
    for fault, counts in draws.items():
        rng = Random(f"{seed}/{fault.kind}")
        count = rng.choice(counts)
        if fault.calm or not calm:
            faults += [fault.draw(rng, ground) for _ in range(count)]
    return tuple(faults)
