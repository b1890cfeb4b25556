"""A timeline, the scenario file of the harness on real processes, as a simulated scenario."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, ReduceOp
from pccl.stress.sim.faults.base import MS, Fault, LifePhase
from pccl.stress.sim.faults.between import (
    Bandwidth,
    Delay,
    OneWayPartition,
    PairHalfOpen,
    PairReset,
    PairStall,
    Partition,
)
from pccl.stress.sim.faults.corrupt import CorruptLine
from pccl.stress.sim.faults.garbage import Garbage, Rubbish
from pccl.stress.sim.faults.kills import Kill, Restart
from pccl.stress.sim.faults.master import BlankMasterRestart, MasterRestart, Takeover
from pccl.stress.sim.faults.processes import ClockPause, Freeze, Joiners, Leave, Slow
from pccl.stress.sim.scenarios.scenario import Scenario, Slot
from pccl.stress.timeline import FaultKind, Timeline
from pccl.stress.timeline import TimelineFault as Entry

_ITERATIONS = 300
"""So many in all, about: a run of hours must not take hours."""

_SCHEDULER_NS = 200 * MS
"""The longest that a process without CPU waits for its turn."""


def from_timeline(timeline: Timeline) -> Scenario:
    """The scenario in which the same goes wrong at the same time."""
    rng = Random(f"{timeline.seed}/timeline")
    link = timeline.link_spec
    began_ns = NS_PER_S  # until then all members have come together
    stop_ns = began_ns + _ns(timeline.duration_s)
    types, ops = tuple(DataType), tuple(ReduceOp)
    return Scenario(
        seed=timeline.seed,
        peers=timeline.peers,
        slots=tuple(
            Slot(tag, rng.randint(1, 1500), rng.choice(types), rng.choice(ops)) for tag in range(2)
        ),
        segment_bytes=256,
        latency_ns=max(MS // 20, _ns(link.rtt_s / 2)),
        bytes_per_s=None if link.rate_bps is None else max(1, link.rate_bps // 8),
        stop_ns=stop_ns,
        faults=tuple(
            fault for entry in timeline.faults for fault in _convert(entry, began_ns, rng)
        ),
        groups=timeline.groups,
        retries=True,
        min_peers=timeline.peers,
        lanes=timeline.lanes,
        timing=Timing(deadline_s=timeline.deadline_s),
        settles_ns=60 * NS_PER_S,
        standby=any(entry.kind is FaultKind.STANDBY for entry in timeline.faults),
        pause_ns=_ns(timeline.duration_s / _ITERATIONS),
    )


def _convert(entry: Entry, began_ns: int, rng: Random) -> Iterator[Fault]:
    when_ns, duration_ns = began_ns + _ns(entry.at_s), _ns(entry.duration_s)
    peer, other, amount = entry.peer, entry.other, entry.amount
    match entry.kind:
        case FaultKind.KILL:
            yield Kill(peer, LifePhase.OTHER, 0, when_ns)
        case FaultKind.RESTART:
            yield Restart(peer, LifePhase.OTHER, 0, when_ns, duration_ns)
        case FaultKind.FREEZE:
            yield Freeze(when_ns, peer, duration_ns)
        case FaultKind.SLOW:
            yield Slow(when_ns, peer, round((1 - amount) * _SCHEDULER_NS), duration_ns)
        case FaultKind.CLOCK_PAUSE:
            yield ClockPause(when_ns, peer, duration_ns, clock_stands=False)
        case FaultKind.RESET:
            yield PairReset(when_ns, peer, other, 0)
        case FaultKind.HALF_OPEN:
            yield PairHalfOpen(when_ns, peer, other, 0)
        case FaultKind.STALL:
            yield PairStall(when_ns, peer, other, duration_ns)
        case FaultKind.PARTITION:
            yield Partition(when_ns, peer, other, duration_ns)
        case FaultKind.PARTITION_ONE_WAY:
            yield OneWayPartition(when_ns, peer, other, duration_ns)
        case FaultKind.BANDWIDTH:
            yield Bandwidth(when_ns, peer, other, round(amount), duration_ns)
        case FaultKind.DELAY:
            yield Delay(when_ns, peer, other, _ns(amount), duration_ns)
        case FaultKind.CORRUPT:
            yield CorruptLine(when_ns, peer, other, amount, 0, duration_ns, rng.randrange(1 << 32))
        case FaultKind.JOINERS:
            yield Joiners(when_ns, round(amount))
        case FaultKind.GARBAGE:
            for _ in range(round(amount)):
                what = rng.choice(tuple(Rubbish))
                yield Garbage(when_ns, peer, what, rng.randrange(1 << 32))
        case FaultKind.LEAVE:
            yield Leave(when_ns, peer)
        case FaultKind.MASTER_RESTART:
            yield MasterRestart(when_ns, duration_ns)
        case FaultKind.MASTER_RESTART_BLANK:
            yield BlankMasterRestart(when_ns, duration_ns)
        case FaultKind.STANDBY:
            yield Takeover(when_ns)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
