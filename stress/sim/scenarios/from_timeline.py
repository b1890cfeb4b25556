"""Turns a timeline, the scenario file of the harness on real processes, into a scenario."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from pccl.protocol.data_type import DataType
from pccl.protocol.limits import Timing
from pccl.protocol.types import NS_PER_S, ReduceOp
from pccl.stress.sim.faults import between, corrupt, garbage, kills, master, processes
from pccl.stress.sim.faults.base import MS, Fault, LifePhase
from pccl.stress.sim.scenarios.scenario import Scenario, Slot
from pccl.stress.timeline import FaultKind, Timeline
from pccl.stress.timeline import TimelineFault as Entry

_ITERATIONS = 300
"""Approximate number of iterations, so that simulating hours does not take hours."""

BEGAN_NS = NS_PER_S
"""Time at which a timeline begins; by then all members have joined."""

_SCHEDULER_NS = 200 * MS
"""Longest time that a process without CPU waits for its turn."""


def from_timeline(timeline: Timeline, began_ns: int = BEGAN_NS) -> Scenario:
    """Return the scenario with the same faults at the same times.

    Args:
        timeline: the timeline.
        began_ns: time at which it begins.
    """
    rng = Random(f"{timeline.seed}/timeline")
    link = timeline.link_spec
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
        machine_size=timeline.processes if timeline.local else 1,
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
            yield kills.Kill(peer, LifePhase.OTHER, 0, when_ns)
        case FaultKind.RESTART:
            yield kills.Restart(peer, LifePhase.OTHER, 0, when_ns, duration_ns)
        case FaultKind.FREEZE:
            yield processes.Freeze(when_ns, peer, duration_ns)
        case FaultKind.SLOW:
            yield processes.Slow(when_ns, peer, round((1 - amount) * _SCHEDULER_NS), duration_ns)
        case FaultKind.NAP:
            yield processes.Nap(when_ns, peer, duration_ns)
        case FaultKind.CLOCK_PAUSE:
            yield processes.ClockPause(when_ns, peer, duration_ns, clock_stands=False)
        case FaultKind.RESET:
            yield between.PairReset(when_ns, peer, other, 0)
        case FaultKind.HALF_OPEN:
            yield between.PairHalfOpen(when_ns, peer, other, 0)
        case FaultKind.STALL:
            yield between.PairStall(when_ns, peer, other, duration_ns)
        case FaultKind.PARTITION:
            yield between.Partition(when_ns, peer, other, duration_ns)
        case FaultKind.PARTITION_ONE_WAY:
            yield between.OneWayPartition(when_ns, peer, other, duration_ns)
        case FaultKind.BANDWIDTH:
            yield between.Bandwidth(when_ns, peer, other, round(amount), duration_ns)
        case FaultKind.DELAY:
            yield between.Delay(when_ns, peer, other, _ns(amount), duration_ns)
        case FaultKind.CORRUPT:
            yield corrupt.CorruptLine(
                when_ns, peer, other, amount, 0, duration_ns, rng.randrange(1 << 32)
            )
        case FaultKind.JOINERS:
            yield processes.Joiners(when_ns, round(amount))
        case FaultKind.GARBAGE:
            for _ in range(round(amount)):
                what = rng.choice(tuple(garbage.Rubbish))
                yield garbage.Garbage(when_ns, peer, what, rng.randrange(1 << 32))
        case FaultKind.LEAVE:
            yield processes.Leave(when_ns, peer)
        case FaultKind.MASTER_RESTART:
            yield master.MasterRestart(when_ns, duration_ns)
        case FaultKind.MASTER_RESTART_BLANK:
            yield master.BlankMasterRestart(when_ns, duration_ns)
        case FaultKind.STANDBY:
            yield master.Takeover(when_ns)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)
