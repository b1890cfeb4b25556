"""Which faults a seed draws, and how many of each."""

from __future__ import annotations

from random import Random

from pccl.stress.sim.faults.base import Fault, Ground
from pccl.stress.sim.faults.between import (
    Bandwidth,
    Delay,
    OneWayPartition,
    PairHalfOpen,
    PairReset,
    PairStall,
    Partition,
)
from pccl.stress.sim.faults.connections import (
    BehindNat,
    Cut,
    DeadLane,
    HalfOpen,
    Reset,
    SilentLoss,
    StreamStall,
)
from pccl.stress.sim.faults.corrupt import Corrupt, CorruptLine
from pccl.stress.sim.faults.divide import MasterCutOff, MasterHalfOpen
from pccl.stress.sim.faults.garbage import Garbage
from pccl.stress.sim.faults.kills import Kill, Restart
from pccl.stress.sim.faults.master import (
    BlankMasterRestart,
    MasterDeath,
    MasterRestart,
    Takeover,
)
from pccl.stress.sim.faults.processes import (
    ClockPause,
    Freeze,
    Interrupt,
    Joiners,
    Leave,
    Load,
    Slow,
)
from pccl.stress.sim.faults.state import (
    FetchInterrupt,
    FetchKill,
    FetchMaster,
    FetchStall,
    Lies,
)

_CALM = 0.35
"""The share of runs in which nobody who lives may lose his place."""

Draws = dict[type[Fault], tuple[int, ...]]
"""From which counts the seed draws, by kind of fault."""

PLAIN: Draws = {
    Kill: (0, 0, 1, 1, 1, 2, 2, 3),
    Cut: (0, 0, 0, 1, 3, 10),
    Interrupt: (0, 0, 0, 1, 3),
    Restart: (0,) * 8 + (1, 2),
    Slow: (0,) * 8 + (1, 2),
    Bandwidth: (0,) * 12 + (1, 2),
    Delay: (0,) * 12 + (1, 2),
    Joiners: (0,) * 30 + (1,),
    Garbage: (0,) * 12 + (1, 3),
    Leave: (0,) * 12 + (1, 2),
    Reset: (0, 0, 0, 0, 1, 2, 4),
    DeadLane: (0,) * 6 + (1, 2),
    HalfOpen: (0,) * 6 + (1, 2),
    StreamStall: (0,) * 9 + (1, 2),
    PairReset: (0,) * 20 + (1,),
    PairHalfOpen: (0,) * 20 + (1,),
    PairStall: (0,) * 20 + (1,),
    Partition: (0,) * 8 + (1, 2),
    OneWayPartition: (0,) * 8 + (1, 2),
    Freeze: (0,) * 5 + (1, 2),
    ClockPause: (0,) * 9 + (1, 2),
    Load: (0,) * 10 + (1,),
    MasterDeath: (0,) * 24 + (1,),
    MasterRestart: (0,) * 10 + (1, 2),
    BlankMasterRestart: (0,) * 10 + (1, 2),
    Takeover: (0,) * 9 + (1,),
    SilentLoss: (0,) * 6 + (1, 2),
    BehindNat: (0,) * 12 + (1,),
}

OF_STATE: Draws = {
    Lies: (0, 0, 0, 1, 2),
    FetchKill: (0, 0, 0, 1, 2),
    FetchStall: (0, 0, 0, 0, 1),
    FetchInterrupt: (0, 0, 0, 0, 1),
    FetchMaster: (0, 0, 0, 0, 0, 1),
}
"""Likewise, where there is shared state."""

OF_MASTERS: Draws = {
    MasterHalfOpen: (1, 1, 2),
    MasterCutOff: (0, 1, 1),
}
"""How the first of two masters is cut off from members, where both live; some are in every run."""

OF_BITS: Draws = {
    Corrupt: (1, 2, 4, 8),
    CorruptLine: (0, 0, 1, 2),
}
"""What is damaged on the way, where anything is; something is in each run."""

KINDS: dict[str, type[Fault]] = {
    fault.kind: fault for fault in (*PLAIN, *OF_STATE, *OF_MASTERS, *OF_BITS)
}


def kinds(draws: Draws) -> tuple[str, ...]:
    """Their names."""
    return tuple(fault.kind for fault in draws)


def draw_faults(
    draws: Draws, seed: int, ground: Ground, *, also_if_calm: bool = False
) -> tuple[Fault, ...]:
    """Draw the faults of ``seed``; every kind has a generator of its own."""
    calm = Random(f"{seed}/calm").random() < _CALM and not also_if_calm
    faults: list[Fault] = []
    for fault, counts in draws.items():
        rng = Random(f"{seed}/{fault.kind}")
        count = rng.choice(counts)
        if fault.calm or not calm:
            faults += [fault.draw(rng, ground) for _ in range(count)]
    return tuple(faults)
