"""What a seed means: the options of one simulated run, all drawn from it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from pccl.protocol.data_type import DataType
from pccl.protocol.limits import EAGER_BYTES_MAX, Timing
from pccl.protocol.types import (
    NS_PER_S,
    UNQUANTIZED,
    Algorithm,
    Descriptor,
    Quantization,
    ReduceOp,
    WireFormat,
)
from pccl.stress.sim.faults.base import MS, Fault, Ground
from pccl.stress.sim.faults.connections import BehindNat
from pccl.stress.sim.faults.draws import OF_BITS, OF_MASTERS, OF_STATE, PLAIN, draw_faults
from pccl.stress.sim.faults.master import MasterDeath, Takeover
from pccl.stress.sim.faults.processes import Freeze, Interrupt
from pccl.stress.sim.faults.state import FetchInterrupt, Lies
from pccl.stress.sim.workloads.syncs import Syncs, draw_syncs
from pccl.stress.sim.workloads.training_plan import LIVES_MAX, TrainingPlan, draw_training


class Style(enum.Enum):
    """How the collectives of one iteration are called."""

    SEQUENTIAL = "sequential"
    CONCURRENT = "concurrent"
    """From one task each."""
    HANDLES = "handles"
    """All launched, then waited for in order."""
    MULTIPLE = "multiple"
    """One call that retries each."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One collective of the workload's loop: the same for all members."""

    tag: int
    count: int
    data_type: DataType
    op: ReduceOp
    algorithm: Algorithm = Algorithm.AUTO
    quantization: Quantization = UNQUANTIZED
    weighted: bool = False

    def descriptor(self) -> Descriptor:
        """What is asked of the collective."""
        return Descriptor(
            self.data_type,
            self.op,
            self.count,
            quantization=self.quantization,
            algorithm=self.algorithm,
            forced=self.algorithm is not Algorithm.AUTO,
            weighted=self.weighted,
        )


@dataclass(frozen=True, slots=True)
class Mistake:
    """One process calls ``update_topology`` once too often, in one of its iterations."""

    culprit: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Reduces that each iteration launches while it computes, before it waits for any of them."""

    count: int
    compute_ns: int
    """Between two launches."""
    asks: bool
    """Whether all ask between two launches if anybody is pending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run; what has a default is plainest with it."""

    seed: int
    peers: int
    late_peers: int = 0
    """How many of them start only after a while."""
    slots: tuple[Slot, ...]
    style: Style = Style.SEQUENTIAL
    segment_bytes: int
    latency_ns: int
    uneven_links: bool = False
    bytes_per_s: int | None = None
    window_bytes: int = 65536
    stop_ns: int
    """When members begin to vote for the end."""
    faults: tuple[Fault, ...]
    repeats: float = 0.0
    """Probability that a segment is sent twice, as a sender may that has lost a lane."""
    asks_pending: bool = False
    """Whether members ask if anybody is pending, and admit only then."""
    groups: int = 1
    """Process i is in group i modulo this."""
    retries: bool = False
    """Whether the library itself tries again, where a call can be told to."""
    broadcasts: bool = False
    barriers: bool = False
    optimizes: bool = False
    min_peers: int = 1
    """What those that start early demand of ``connect``, for a while."""
    impatience: float = 0.0
    """Probability that a call gets a time budget of a few latencies."""
    mistake: Mistake | None = None
    secured: bool = False
    """Whether the run has a token."""
    drops: bool = False
    """Whether each iteration launches a reduce whose handle is dropped at once."""
    lanes: int = 1
    """How many lanes of a link every second process wants; the others leave it to the library."""
    timing: Timing
    settles_ns: int = 0
    """How long members go on after the last fault, to be all together then (0: not asked)."""
    standby: bool = False
    """Whether there is a second master."""
    pause_ns: int = 0
    """How long a process computes between two iterations."""
    eager_bytes_max: int = EAGER_BYTES_MAX
    """The largest tensor that goes ahead in every second process; the others have the default."""
    syncs: Syncs | None = None
    """The shared state that members synchronize in each iteration; None: there is none."""
    training: TrainingPlan | None = None
    """What processes train, instead of everything else that they do; None: nothing."""
    buckets: Buckets | None = None
    """What each iteration launches besides; None: nothing."""

    @property
    def token(self) -> bytes | None:
        """The run's secret, if it has one."""
        return b"a secret that all of them know" if self.secured else None

    @property
    def undisturbed(self) -> bool:
        """Whether nobody may be removed who was not killed."""
        return all(fault.calm for fault in self.faults)

    @property
    def processes_max(self) -> int:
        """How many may take part, one after the other or at the same time; each has some lives."""
        return LIVES_MAX * (self.peers + sum(fault.starts for fault in self.faults))

    @property
    def ends_ns(self) -> int:
        """When members may stop: all faults are over, and forgotten."""
        over_ns = max((fault.ends_ns for fault in self.faults), default=0)
        return max(self.stop_ns, over_ns) + self.settles_ns


TIMINGS: dict[str, Timing] = {
    "default": Timing(),
    "quick": Timing(
        heartbeat_s=0.25,
        tick_s=0.1,
        deadline_s=2.0,
        resume_s=1.0,
        lane_stall_s=2.0,
        progress_s=6.0,
        link_s=3.0,
        dial_s=1.0,
        lockstep_s=0.5,
        master_lost_s=12.0,
    ),
    "patient": Timing(heartbeat_s=2.0, deadline_s=20.0, lane_stall_s=15.0, progress_s=40.0),
}
"""The deadlines that a seed draws from."""

_CROWDS = (24, 32, 48, 64)

_TRAINERS_MAX = 6
_WINDOW_MIN = 4096
"""Narrower ones, where a map of pieces takes seconds, have a test of their own."""
_NOT_FOR_TRAINERS = (Interrupt, FetchInterrupt, Lies)
"""Their calls are made by a thread that nobody interrupts; who is lied to by all has to give up."""
_NOT_FOR_TWO_MASTERS = (MasterDeath, Takeover)
"""Both are to live."""
_MEMBERS_OF_TWO_MASTERS_MAX = 7
_STEPS = 0.15
"""The share of runs whose iterations launch reduces while they compute."""
_LONGER = 4
"""A round is several calls: a run in which processes train is longer by this factor."""

_FORMATS = (WireFormat.UINT8, WireFormat.INT8, WireFormat.COMPANDED8, WireFormat.FLOAT16)
_FLOATS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)
_PROD = ReduceOp.PROD
_ALGORITHMS = (
    *(Algorithm.RING, Algorithm.RING, Algorithm.RING),  # only a ring is repaired
    *(Algorithm.AUTO, Algorithm.STAR, Algorithm.MESH),
)


def draw(seed: int) -> Scenario:
    """Draw the scenario of ``seed``."""
    rng = Random(seed)
    crowd = Random(f"{seed}/crowd")
    peers = rng.choice((2, 2, 3, 3, 4, 4, 5, 5, 6, 8, 12))
    slots = tuple(_draw_slot(rng, tag, peers) for tag in range(rng.choice((1, 1, 2, 3))))
    ways = Random(f"{seed}/ways")
    slots = tuple(_draw_way(ways, slot) for slot in slots)
    weights = Random(f"{seed}/weights")
    slots = tuple(_draw_weighted(weights, slot) for slot in slots)
    latency_ns = rng.choice((MS // 20, MS // 2, 5 * MS, 40 * MS))
    stop_ns = rng.randint(12, 40) * max(latency_ns, MS // 4)
    if crowd.random() < 0.02:
        peers = 16
    if crowd.random() < 0.004:
        peers, slots, stop_ns = crowd.choice(_CROWDS), slots[:1], 1
    timing = TIMINGS[rng.choice(("default", "default", "default", "quick", "quick", "patient"))]
    scenario = Scenario(
        seed=seed,
        peers=peers,
        late_peers=rng.choice((0, 0, 1, 2)) if peers > 2 else 0,
        slots=slots,
        style=rng.choice(tuple(Style)),
        segment_bytes=rng.choice((64, 256, 1024)),
        latency_ns=latency_ns,
        uneven_links=rng.random() < 0.3,
        bytes_per_s=rng.choice((None, 125_000_000, 2_000_000)),
        window_bytes=rng.choice((600, 4096, 65536)),
        stop_ns=stop_ns,
        faults=draw_faults(PLAIN, seed, Ground(peers, stop_ns, latency_ns, timing)),
        repeats=rng.choice((0.0, 0.0, 0.02, 0.3)),
        asks_pending=rng.random() < 0.3,
        groups=rng.choice((1, 1, 1, 2, 3)) if peers > 3 else 1,
        retries=rng.random() < 0.4,
        broadcasts=rng.random() < 0.3,
        barriers=rng.random() < 0.3,
        optimizes=rng.random() < 0.2,
        min_peers=rng.randint(2, peers) if rng.random() < 0.3 else 1,
        impatience=rng.choice((0.0, 0.0, 0.0, 0.05, 0.2)),
        mistake=Mistake(rng.randrange(peers), rng.randrange(4)) if rng.random() < 0.1 else None,
        secured=rng.random() < 0.3,
        drops=rng.random() < 0.2,
        lanes=rng.choice((1, 1, 2, 3, 8)),
        timing=timing,
        settles_ns=_settling_ns(timing) if rng.random() < 0.3 else 0,
    )
    eager = Random(f"{seed}/eager").choice((0, 256, EAGER_BYTES_MAX, EAGER_BYTES_MAX))
    scenario = replace(scenario, eager_bytes_max=eager)
    syncs = draw_syncs(seed) if peers not in _CROWDS else None
    if syncs is not None:
        ground = Ground(peers, stop_ns, latency_ns, timing)
        # What members may hold differently comes from one of them, which all have to reach.
        faults = (*_one_shut(scenario.faults), *draw_faults(OF_STATE, seed, ground))
        # After a mistake of one, those who vote would wait for newcomers, who synchronize.
        scenario = replace(scenario, syncs=syncs, faults=faults, mistake=None)
    if peers not in _CROWDS:
        scenario = _with_buckets(scenario)
    shut = [len(fault.peers) for fault in scenario.faults if isinstance(fault, BehindNat)]
    if max(shut, default=0) > 1:  # a pair of them has no link, whatever a caller names
        slots = tuple(replace(slot, algorithm=Algorithm.AUTO) for slot in scenario.slots)
        # Nor is there a ring once more than half of those that are left are such.
        scenario = replace(scenario, slots=slots, settles_ns=0)
    if rng.random() < 0.03 or any(fault.needs_standby for fault in scenario.faults):
        scenario = replace(scenario, standby=True)
    if peers in _CROWDS:  # some of so many would always be impatient
        scenario = replace(scenario, impatience=0.0)
    if scenario.impatience:  # who leaves the last vote early has another one later
        scenario = replace(scenario, settles_ns=0)
    # Elsewhere the others would not come to the call that the culprit waits in.
    plain = not scenario.asks_pending and not scenario.optimizes
    return scenario if plain else replace(scenario, mistake=None)


def _one_shut(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """The faults, with at most one process that nobody can dial."""
    return tuple(
        replace(one, peers=one.peers[:1]) if isinstance(one, BehindNat) else one for one in faults
    )


def draw_to_train(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which processes train.

    Network, deadlines and faults are drawn as in ``draw``; nobody is impatient, interrupted
    or lied to.
    """
    plain = draw(seed)
    peers = min(plain.peers, _TRAINERS_MAX)
    stop_ns = max(plain.stop_ns, 12 * plain.latency_ns) * _LONGER
    ground = Ground(peers, stop_ns, plain.latency_ns, plain.timing)
    drawn = (*draw_faults(PLAIN, seed, ground), *draw_faults(OF_STATE, seed, ground))
    # All are to train together: two that cannot be dialled may never meet.
    faults = _one_shut(one for one in drawn if not isinstance(one, _NOT_FOR_TRAINERS))
    return replace(
        plain,
        peers=peers,
        late_peers=min(plain.late_peers, peers - 2),
        slots=(),
        style=Style.SEQUENTIAL,
        window_bytes=max(plain.window_bytes, _WINDOW_MIN),
        stop_ns=stop_ns,
        faults=faults,
        asks_pending=False,
        groups=1,
        retries=True,
        broadcasts=False,
        barriers=False,
        optimizes=False,
        min_peers=1,
        impatience=0.0,
        mistake=None,
        drops=False,
        standby=plain.standby or any(fault.needs_standby for fault in faults),
        syncs=None,
        buckets=None,
        training=draw_training(seed, plain.latency_ns),
    )


def draw_two_masters(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which the first of two masters is cut off, and lives.

    Everything else is drawn as in ``draw``; callers have little time, often.
    """
    plain = draw(seed)
    rng = Random(f"{seed}/two masters")
    peers = min(max(plain.peers, 3), _MEMBERS_OF_TWO_MASTERS_MAX)
    stop_ns = max(plain.stop_ns, 12 * plain.latency_ns)
    ground = Ground(peers, stop_ns, plain.latency_ns, plain.timing)
    divides = draw_faults(OF_MASTERS, seed, ground, also_if_calm=True)
    kept = tuple(
        fault
        for fault in plain.faults
        if not isinstance(fault, _NOT_FOR_TWO_MASTERS)
        and all(index < peers for index in fault.indices)
    )
    return replace(
        plain,
        peers=peers,
        late_peers=min(plain.late_peers, peers - 3),
        stop_ns=stop_ns,
        faults=(*kept, *divides),
        impatience=rng.choice((0.05, 0.2, 0.2, 0.5)),
        mistake=None,
        settles_ns=0,
        standby=True,
    )


def draw_corrupted(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which bits flip on the way, beside all other faults."""
    plain = draw(seed)
    ground = Ground(plain.peers, plain.stop_ns, plain.latency_ns, plain.timing)
    flips = draw_faults(OF_BITS, seed, ground, also_if_calm=True)
    return replace(plain, faults=(*plain.faults, *flips))


def _settling_ns(timing: Timing) -> int:
    """Long enough for every deadline to pass, and for whoever was removed to come back."""
    return round(NS_PER_S * (timing.progress_s + timing.deadline_s + 2 * timing.dial_s))


def _draw_slot(rng: Random, tag: int, peers: int) -> Slot:
    return Slot(
        tag=tag,
        count=rng.choice((1, peers - 1, peers, peers + 1, 37, 500, rng.randint(1, 1500))),
        data_type=rng.choice(tuple(DataType)),
        op=rng.choice(tuple(ReduceOp)),
    )


def _with_buckets(scenario: Scenario) -> Scenario:
    """In some, peers compute between launches, and one is stopped for longer than the deadline."""
    rng = Random(f"{scenario.seed}/buckets")
    if rng.random() >= _STEPS:
        return scenario
    compute_ns = rng.choice((scenario.latency_ns, NS_PER_S // 4, NS_PER_S, NS_PER_S))
    # Elsewhere not all ask: a culprit, or who is alone in a group, waits in another call.
    asks = rng.random() < 0.3 and scenario.mistake is None and scenario.groups == 1
    buckets = Buckets(rng.randint(3, 6), compute_ns, asks)
    step_ns = buckets.count * compute_ns  # so long it may take until the others wait
    when_ns = rng.randrange(scenario.stop_ns + 2 * step_ns)
    duration_ns = round(NS_PER_S * (scenario.timing.deadline_s + rng.uniform(1, 5))) + step_ns
    stop = Freeze(when_ns, rng.randrange(scenario.peers), duration_ns)
    return replace(scenario, buckets=buckets, faults=(*scenario.faults, stop))


def _draw_weighted(rng: Random, slot: Slot) -> Slot:
    """Some become weighted averages."""
    if slot.data_type not in _FLOATS or slot.op is _PROD or rng.random() < 0.6:
        return slot
    return replace(slot, op=ReduceOp.AVG, weighted=True)


def _draw_way(rng: Random, slot: Slot) -> Slot:
    """How the values travel."""
    algorithm = rng.choice(_ALGORITHMS)
    wire = rng.choice(_FORMATS)
    quantization = Quantization(wire, rng.choice((8, 32)), rng.random() < 0.3)
    may_quantize = slot.data_type in (DataType.FLOAT, DataType.DOUBLE) and slot.op is not _PROD
    if not may_quantize or rng.random() < 0.5:
        quantization = UNQUANTIZED
    return replace(slot, algorithm=algorithm, quantization=quantization)
