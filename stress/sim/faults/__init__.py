"""What goes wrong in a simulated run: one kind of fault, one file.

* ``base``: what every fault is: drawn from a seed, written into a scenario, planted into a run.
* ``timed``: what faults that strike at a time have in common.
* ``phase_watch``: waits until a process comes to a phase of its life.
* ``processes``: what happens to processes, and what strangers do.
* ``links``: what happens to connections.

Each is a frozen dataclass that is drawn from a seed, can be written into a file, and plants itself
into a run through a ``Stage``. All are what TCP really shows: inside a connection no byte is lost,
doubled or reordered. Flipped bits, which a relay brings about, have a mix of their own.
"""

from __future__ import annotations

from random import Random

from pccl.stress.sim.faults.base import MASTER, Fault, Ground, LifePhase
from pccl.stress.sim.faults.links.bandwidth import Bandwidth
from pccl.stress.sim.faults.links.between import PairHalfOpen, PairReset, PairStall
from pccl.stress.sim.faults.links.corrupt import (
    Corrupt,
    CorruptLine,
    OnWire,
    draw_corruption,
    flipped_in,
)
from pccl.stress.sim.faults.links.cut import Cut
from pccl.stress.sim.faults.links.delay import Delay
from pccl.stress.sim.faults.links.divide import DIVIDED_IN, Divide, MasterCutOff, MasterHalfOpen
from pccl.stress.sim.faults.links.half_open import DeadLane, HalfOpen, SilentLoss
from pccl.stress.sim.faults.links.partition import OneWayPartition, Partition
from pccl.stress.sim.faults.links.reset import Reset
from pccl.stress.sim.faults.links.stall import StreamStall
from pccl.stress.sim.faults.links.undialable import BehindNat
from pccl.stress.sim.faults.processes.clock_pause import ClockPause
from pccl.stress.sim.faults.processes.freeze import Freeze
from pccl.stress.sim.faults.processes.garbage import Garbage, Rubbish
from pccl.stress.sim.faults.processes.interrupt import Interrupt
from pccl.stress.sim.faults.processes.joiners import Joiners
from pccl.stress.sim.faults.processes.kill import Kill, Restart
from pccl.stress.sim.faults.processes.leave import Leave
from pccl.stress.sim.faults.processes.load import Load
from pccl.stress.sim.faults.processes.master import (
    BlankMasterRestart,
    MasterDeath,
    MasterRestart,
    Takeover,
)
from pccl.stress.sim.faults.processes.slow import Slow
from pccl.stress.sim.faults.processes.state import (
    FetchInterrupt,
    FetchKill,
    FetchMaster,
    FetchStall,
    Lies,
)

_CALM = 0.35
"""The share of runs in which nobody who lives may lose his place."""

_HOW_MANY: tuple[tuple[type[Fault], tuple[int, ...]], ...] = (
    (Kill, (0, 0, 1, 1, 1, 2, 2, 3)),
    (Cut, (0, 0, 0, 1, 3, 10)),
    (Interrupt, (0, 0, 0, 1, 3)),
    (Restart, (0,) * 8 + (1, 2)),
    (Slow, (0,) * 8 + (1, 2)),
    (Bandwidth, (0,) * 12 + (1, 2)),
    (Delay, (0,) * 12 + (1, 2)),
    (Joiners, (0,) * 30 + (1,)),
    (Garbage, (0,) * 12 + (1, 3)),
    (Leave, (0,) * 12 + (1, 2)),
    (Reset, (0, 0, 0, 0, 1, 2, 4)),
    (DeadLane, (0,) * 6 + (1, 2)),
    (HalfOpen, (0,) * 6 + (1, 2)),
    (StreamStall, (0,) * 9 + (1, 2)),
    (PairReset, (0,) * 20 + (1,)),
    (PairHalfOpen, (0,) * 20 + (1,)),
    (PairStall, (0,) * 20 + (1,)),
    (Partition, (0,) * 8 + (1, 2)),
    (OneWayPartition, (0,) * 8 + (1, 2)),
    (Freeze, (0,) * 5 + (1, 2)),
    (ClockPause, (0,) * 9 + (1, 2)),
    (Load, (0,) * 10 + (1,)),
    (MasterDeath, (0,) * 24 + (1,)),
    (MasterRestart, (0,) * 10 + (1, 2)),
    (BlankMasterRestart, (0,) * 10 + (1, 2)),
    (Takeover, (0,) * 9 + (1,)),
    (SilentLoss, (0,) * 6 + (1, 2)),
    (BehindNat, (0,) * 12 + (1,)),
)
"""From which counts the seed draws, by kind."""

_HOW_MANY_OF_STATE: tuple[tuple[type[Fault], tuple[int, ...]], ...] = (
    (Lies, (0, 0, 0, 1, 2)),
    (FetchKill, (0, 0, 0, 1, 2)),
    (FetchStall, (0, 0, 0, 0, 1)),
    (FetchInterrupt, (0, 0, 0, 0, 1)),
    (FetchMaster, (0, 0, 0, 0, 0, 1)),
)
"""Likewise, where there is shared state."""

_HOW_MANY_OF_MASTERS: tuple[tuple[type[Fault], tuple[int, ...]], ...] = (
    (MasterHalfOpen, (1, 1, 2)),
    (MasterCutOff, (0, 1, 1)),
)
"""Likewise, where there are two and both live."""

DRAWN: tuple[str, ...] = tuple(fault.kind for fault, _ in _HOW_MANY)
DRAWN_OF_STATE: tuple[str, ...] = tuple(fault.kind for fault, _ in _HOW_MANY_OF_STATE)
DRAWN_OF_MASTERS: tuple[str, ...] = tuple(fault.kind for fault, _ in _HOW_MANY_OF_MASTERS)

KINDS: dict[str, type[Fault]] = {
    **{fault.kind: fault for fault, _ in (*_HOW_MANY, *_HOW_MANY_OF_STATE, *_HOW_MANY_OF_MASTERS)},
    Corrupt.kind: Corrupt,
    CorruptLine.kind: CorruptLine,
}


def draw_faults(seed: int, ground: Ground) -> tuple[Fault, ...]:
    """Draw the faults of ``seed``; every kind has a generator of its own."""
    return _draw(_HOW_MANY, seed, ground)


def draw_state_faults(seed: int, ground: Ground) -> tuple[Fault, ...]:
    """Draw what happens to shared state besides."""
    return _draw(_HOW_MANY_OF_STATE, seed, ground)


def draw_divides(seed: int, ground: Ground) -> tuple[Fault, ...]:
    """Draw how the first of two masters is cut off from members; some are in every run."""
    drawn: list[Fault] = []
    for fault, counts in _HOW_MANY_OF_MASTERS:
        rng = Random(f"{seed}/{fault.kind}")
        drawn += [fault.draw(rng, ground) for _ in range(rng.choice(counts))]
    return tuple(drawn)


def _draw(
    how_many: tuple[tuple[type[Fault], tuple[int, ...]], ...], seed: int, ground: Ground
) -> tuple[Fault, ...]:
    calm = Random(f"{seed}/calm").random() < _CALM
    faults: list[Fault] = []
    for fault, counts in how_many:
        rng = Random(f"{seed}/{fault.kind}")
        count = rng.choice(counts)
        if fault.calm or not calm:
            faults += [fault.draw(rng, ground) for _ in range(count)]
    return tuple(faults)


__all__ = [
    "DIVIDED_IN",
    "DRAWN",
    "DRAWN_OF_MASTERS",
    "DRAWN_OF_STATE",
    "KINDS",
    "MASTER",
    "Bandwidth",
    "BehindNat",
    "BlankMasterRestart",
    "ClockPause",
    "Corrupt",
    "CorruptLine",
    "Cut",
    "DeadLane",
    "Delay",
    "Divide",
    "Fault",
    "FetchInterrupt",
    "FetchKill",
    "FetchMaster",
    "FetchStall",
    "Freeze",
    "Garbage",
    "Ground",
    "HalfOpen",
    "Interrupt",
    "Joiners",
    "Kill",
    "Leave",
    "Lies",
    "LifePhase",
    "Load",
    "MasterCutOff",
    "MasterDeath",
    "MasterHalfOpen",
    "MasterRestart",
    "OnWire",
    "OneWayPartition",
    "PairHalfOpen",
    "PairReset",
    "PairStall",
    "Partition",
    "Reset",
    "Restart",
    "Rubbish",
    "SilentLoss",
    "Slow",
    "StreamStall",
    "Takeover",
    "draw_corruption",
    "draw_divides",
    "draw_faults",
    "draw_state_faults",
    "flipped_in",
]
