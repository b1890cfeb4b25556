"""``Scenario``: the options of one simulated run, all drawn from a seed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from random import Random

from pccl.protocol.data_type import DataType
from pccl.protocol.guards.contributions import ContributionGuard, GuardAction
from pccl.protocol.limits import EAGER_BYTES_MAX, Timing
from pccl.protocol.types import (
    EXCHANGES,
    NS_PER_S,
    REDUCTIONS_OF_PARTS,
    UNQUANTIZED,
    Algorithm,
    Collective,
    Descriptor,
    Quantization,
    Quorum,
    ReduceOp,
    WireFormat,
)
from pccl.stress.sim.faults.base import MS, Fault, Ground
from pccl.stress.sim.faults.between import BlackHole
from pccl.stress.sim.faults.connections import BehindNat
from pccl.stress.sim.faults.draws import OF_BITS, OF_MASTERS, OF_STATE, PLAIN, draw_faults
from pccl.stress.sim.faults.master import MasterDeath, Takeover
from pccl.stress.sim.faults.processes import Freeze
from pccl.stress.sim.workloads.syncs import Syncs, draw_syncs
from pccl.stress.sim.workloads.training_plan import LIVES_MAX, TrainingPlan
from pccl.transports.base import Connection
from pccl.transports.sim.connection import SEGMENT_BYTES


class Style(enum.Enum):
    """How an application calls the collectives of one iteration."""

    SEQUENTIAL = "sequential"
    CONCURRENT = "concurrent"
    """Each from its own task."""
    HANDLES = "handles"
    """All launched, then waited for in order."""
    MULTIPLE = "multiple"
    """All in one call, which retries each."""


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
    guard: ContributionGuard | None = None
    quorum: Quorum | None = None

    def descriptor(self) -> Descriptor:
        """Return the descriptor of the collective."""
        return Descriptor(
            self.data_type,
            self.op,
            self.count,
            quantization=self.quantization,
            algorithm=self.algorithm,
            forced=self.algorithm is not Algorithm.AUTO,
            weighted=self.weighted,
            guard=self.guard,
            quorum=self.quorum,
        )


@dataclass(frozen=True, slots=True)
class Mistake:
    """One process calls ``update_topology`` one extra time, in one of its iterations."""

    culprit: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Reduces that each iteration launches while it computes, before it waits for any of them."""

    count: int
    compute_ns: int
    """Time between two launches."""
    asks: bool
    """Whether all members ask for pending newcomers between two launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The options of one run; each default is the simplest value."""

    seed: int
    peers: int
    late_peers: int = 0
    """Number of peers that start only after a while."""
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
    """Probability that a link sends a segment twice, like a sender that lost a lane."""
    asks_pending: bool = False
    """Whether members first ask for pending newcomers, and only then admit them, if any."""
    groups: int = 1
    """Number of groups: process i is in group ``i % groups``."""
    retries: bool = False
    """Whether calls that have this option retry by themselves."""
    broadcasts: bool = False
    barriers: bool = False
    exchanges: tuple[Collective, ...] = ()
    """Exchanges and reductions of parts, which each iteration makes one after the other."""
    store: bool = False
    """Whether each process calls the run's store, beside its joint calls."""
    readers: int = 0
    """How many processes outside the run read the versions that the members of group 0 publish."""
    optimizes: bool = False
    min_peers: int = 1
    """``min_peers`` of the first ``connect`` of each process, which has a time limit."""
    impatience: float = 0.0
    """Probability that a call gets a time budget of a few latencies."""
    mistake: Mistake | None = None
    secured: bool = False
    """Whether the run has a token."""
    sealed: bool = False
    """Whether all connections are encrypted."""
    relays: bool = False
    """Whether the masters forward for peers that cannot dial each other."""
    quorum: Quorum | None = None
    """Quorum of slots, vote, ``update_topology`` and syncs; None: all members must call."""
    naps: float = 0.0
    """Probability that a process does nothing for a while, before a call with that quorum."""
    drops: bool = False
    """Whether each iteration launches a reduce and drops its handle at once."""
    lanes: int = 1
    """Lanes of a link that every second process wants; the other processes have the default."""
    machine_size: int = 1
    """How many processes are on each machine, where they pull segments from each other's memory."""
    site_size: int = 1
    """How many processes are at each site, where links take a hundredth of the latency."""
    timing: Timing
    settles_ns: int = 0
    """How long members continue after the last fault; then all must be together (0: unchecked)."""
    standby: bool = False
    """Whether the run has a second master."""
    pause_ns: int = 0
    """How long a process computes between two iterations."""
    eager_bytes_max: int = EAGER_BYTES_MAX
    """Largest tensor that every second process sends early; the rest uses the default."""
    syncs: Syncs | None = None
    """The shared state that members synchronize in each iteration; None: no shared state."""
    training: TrainingPlan | None = None
    """The training, which replaces all other work of the processes; None: no training."""
    buckets: Buckets | None = None
    """Further reduces that each iteration launches; None: no further reduces."""

    @property
    def token(self) -> bytes | None:
        """Secret of the run; None: the run has no token."""
        return b"a secret that all of them know" if self.secured else None

    def encrypts(self, connection: Connection) -> bool:
        """Whether each side wants a connection to be encrypted."""
        return self.sealed

    @property
    def undisturbed(self) -> bool:
        """Whether the master may remove only processes that were killed."""
        return all(fault.calm for fault in self.faults)

    @property
    def processes_max(self) -> int:
        """Maximum number of lives in the run: each process may have several."""
        return LIVES_MAX * (self.peers + sum(fault.starts for fault in self.faults))

    @property
    def ends_ns(self) -> int:
        """Time at which members may stop: all faults are over, and the settling time has passed."""
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
"""Deadlines from which a seed draws."""

_CROWDS = (24, 32, 48, 64)

_NOT_FOR_TWO_MASTERS = (MasterDeath, Takeover)
"""Excluded: in these runs both masters must live."""
_MEMBERS_OF_TWO_MASTERS_MAX = 7
_QUORUMS = 0.25
"""Share of runs that go on without late processes; all runs of the mix ``quorum`` do."""
_STEPS = 0.15
"""Share of runs whose iterations launch reduces while they compute."""

_FORMATS = (WireFormat.UINT8, WireFormat.INT8, WireFormat.COMPANDED8, WireFormat.FLOAT16)
_FLOATS = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT, DataType.DOUBLE)
_PROD = ReduceOp.PROD
_UNGUARDED = 0.3
"""Share of the weighted averages without a guard."""
_ACTIONS = (GuardAction.OFF, GuardAction.WARN, *(GuardAction.EXCLUDE,) * 3)
_ALGORITHMS = (
    *(Algorithm.RING, Algorithm.RING, Algorithm.RING),  # only a ring is repaired
    *(Algorithm.AUTO, Algorithm.STAR, Algorithm.MESH),
)


def draw(seed: int, *, quorums: bool = True) -> Scenario:
    """Draw the scenario of ``seed``; without ``quorums``, all calls wait for all members."""
    rng = Random(seed)
    crowd = Random(f"{seed}/crowd")
    peers = rng.choice((2, 2, 3, 3, 4, 4, 5, 5, 6, 8, 12))
    slots = tuple(_draw_slot(rng, tag, peers) for tag in range(rng.choice((1, 1, 2, 3))))
    ways = Random(f"{seed}/ways")
    slots = tuple(_draw_way(ways, slot) for slot in slots)
    weights = Random(f"{seed}/weights")
    slots = tuple(_draw_weighted(weights, slot) for slot in slots)
    sparse = Random(f"{seed}/sparse")
    slots = tuple(_draw_sparse(sparse, slot) for slot in slots)
    guards = Random(f"{seed}/guards")
    slots = tuple(_draw_guarded(guards, slot) for slot in slots)
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
    relays, far = Random(f"{seed}/relays").random() < 0.5, latency_ns >= 5 * MS
    scenario = replace(
        scenario,
        eager_bytes_max=Random(f"{seed}/eager").choice((0, 64, 256, EAGER_BYTES_MAX)),
        machine_size=Random(f"{seed}/machines").choice((1,) * 6 + (2, 3, peers, peers)),
        site_size=Random(f"{seed}/sites").choice((1, 1, 1, 2, 2, 3, 4)) if far else 1,
        relays=relays,
    )
    syncs = draw_syncs(seed) if peers not in _CROWDS else None
    if syncs is not None:
        ground = Ground(peers, stop_ns, latency_ns, timing)
        # Tensors that may differ come from one member, which all others must reach.
        faults = (*one_shut(scenario), *draw_faults(OF_STATE, seed, ground))
        # After a mistake, members in a vote would wait for newcomers, which synchronize.
        scenario = replace(scenario, syncs=syncs, faults=faults, mistake=None)
    if peers not in _CROWDS:
        scenario = _with_buckets(scenario)
    scenario = _with_large_segments(scenario)
    shut = [len(fault.peers) for fault in scenario.faults if isinstance(fault, BehindNat)]
    if max(shut, default=0) > 1 and not relays:  # two have no link, whatever a caller names
        slots = tuple(replace(slot, algorithm=Algorithm.AUTO) for slot in scenario.slots)
        # And once more than half of the remaining peers are such, no ring exists.
        scenario = replace(scenario, slots=slots, settles_ns=0)
    if rng.random() < 0.03 or any(fault.needs_standby for fault in scenario.faults):
        scenario = replace(scenario, standby=True)
    late = Random(f"{seed}/quorum")
    if quorums and peers > 2 and late.random() < _QUORUMS:
        scenario = with_quorum(scenario, late, (0.0, 0.02, 0.1))
    if peers in _CROWDS:  # in a crowd, some would always be impatient
        scenario = replace(scenario, impatience=0.0)
    if scenario.impatience:  # a process that leaves the last vote early has another vote
        scenario = replace(scenario, settles_ns=0)
    # Otherwise the other members would not make the call in which the culprit waits.
    plain = not scenario.asks_pending and not scenario.optimizes
    return scenario if plain else replace(scenario, mistake=None)


def with_quorum(scenario: Scenario, rng: Random, naps: tuple[float, ...]) -> Scenario:
    """Let members go on without those that are late; ``naps``: how often some are, to draw from."""
    grace_ms = rng.choice((None, None, 0, 50, 500))
    shares = [Quorum(share=share, grace_ms=grace_ms) for share in (0.3, 0.5, 0.7)]
    counts = [Quorum(count, grace_ms=grace_ms) for count in (2, 2, 3)]
    quorum, often = rng.choice(shares + counts), rng.choice(naps)
    slots = tuple(replace(slot, quorum=quorum) for slot in scenario.slots)
    scenario = replace(scenario, slots=slots, quorum=quorum, naps=often, mistake=None)
    return replace(scenario, settles_ns=0)  # who is late at the end votes again, alone


def one_shut(scenario: Scenario) -> tuple[Fault, ...]:
    """Return the faults; without relays, at most one process is one that no other can dial."""
    return tuple(
        replace(one, peers=one.peers[:1])
        if isinstance(one, BehindNat) and not scenario.relays
        else one
        for one in scenario.faults
    )


def draw_two_masters(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which a living first master is cut off from some members.

    Everything else is drawn as in ``draw``, but callers often have short time limits.
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
    """Draw the scenario of ``seed`` in which bits flip in transit, in addition to other faults."""
    plain = draw(seed)
    ground = Ground(plain.peers, plain.stop_ns, plain.latency_ns, plain.timing)
    flips = draw_faults(OF_BITS, seed, ground, also_if_calm=True)
    return replace(plain, faults=(*plain.faults, *flips))


def draw_with_exchanges(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which members also exchange blocks, and reduce parts.

    Callers more often have short time limits, and links are slower: members that have their own
    part then leave while others still lack theirs. Everything else is drawn as in ``draw``.
    """
    plain = draw(seed)
    rng = Random(f"{seed}/exchanges")
    if plain.peers not in _CROWDS:
        impatience = rng.choice((plain.impatience, 0.05, 0.2))
        settles_ns = 0 if impatience else plain.settles_ns
        slower = rng.choice((plain.bytes_per_s, 1_000_000))
        plain = replace(plain, impatience=impatience, settles_ns=settles_ns, bytes_per_s=slower)
    kinds = rng.sample(sorted(EXCHANGES | REDUCTIONS_OF_PARTS), rng.randint(1, 3))
    shut = max((len(one.peers) for one in plain.faults if isinstance(one, BehindNat)), default=0)
    if shut > 1 and not plain.relays:  # some pair never has a link
        kinds = []
    return replace(plain, exchanges=tuple(kinds))


def draw_with_store(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which members also call the run's store.

    In every third run, a living first master is cut off from some members.
    """
    return replace(draw(seed) if seed % 3 else draw_two_masters(seed), store=True)


def draw_with_readers(seed: int) -> Scenario:
    """Draw the scenario of ``seed`` in which members publish, and processes outside the run read.

    The run has one master, which lives or comes back, and readers can dial all members.
    """
    plain = draw(seed)
    not_for_readers = (BehindNat, MasterDeath, Takeover)
    faults = tuple(
        fault
        for fault in plain.faults
        if not isinstance(fault, not_for_readers) and not fault.needs_standby
    )
    readers = Random(f"{seed}/how many read").choice((1, 2, 3, 3, 6))
    return replace(plain, readers=readers, faults=faults, standby=False, settles_ns=0)


def _settling_ns(timing: Timing) -> int:
    """Return a time in which every deadline passes, and every removed process can return."""
    return round(NS_PER_S * (timing.progress_s + timing.deadline_s + 2 * timing.dial_s))


def _draw_slot(rng: Random, tag: int, peers: int) -> Slot:
    return Slot(
        tag=tag,
        count=rng.choice((1, peers - 1, peers, peers + 1, 37, 500, rng.randint(1, 1500))),
        data_type=rng.choice(tuple(DataType)),
        op=rng.choice(tuple(ReduceOp)),
    )


def _with_buckets(scenario: Scenario) -> Scenario:
    """In some runs, let peers compute between launches, and freeze one beyond the deadline."""
    rng = Random(f"{scenario.seed}/buckets")
    if rng.random() >= _STEPS:
        return scenario
    compute_ns = rng.choice((scenario.latency_ns, NS_PER_S // 4, NS_PER_S, NS_PER_S))
    # Otherwise not all ask: a culprit, or a peer alone in a group, waits in another call.
    asks = rng.random() < 0.3 and scenario.mistake is None and scenario.groups == 1
    buckets = Buckets(rng.randint(3, 6), compute_ns, asks)
    step_ns = buckets.count * compute_ns  # the others may start to wait only then
    when_ns = rng.randrange(scenario.stop_ns + 2 * step_ns)
    duration_ns = round(NS_PER_S * (scenario.timing.deadline_s + rng.uniform(1, 5))) + step_ns
    stop = Freeze(when_ns, rng.randrange(scenario.peers), duration_ns)
    return replace(scenario, buckets=buckets, faults=(*scenario.faults, stop))


def _with_large_segments(scenario: Scenario) -> Scenario:
    """In a run in which large segments vanish, let all data move in such segments."""
    if not any(isinstance(fault, BlackHole) for fault in scenario.faults):
        return scenario
    count = scenario.peers * SEGMENT_BYTES
    slots = tuple(replace(slot, count=max(slot.count, count)) for slot in scenario.slots)
    larger = replace(scenario, slots=slots, segment_bytes=4 * SEGMENT_BYTES)
    return replace(larger, window_bytes=65536, machine_size=1)


def _draw_weighted(rng: Random, slot: Slot) -> Slot:
    """Turn some slots into weighted averages."""
    if slot.data_type not in _FLOATS or slot.op is _PROD or rng.random() < 0.6:
        return slot
    return replace(slot, op=ReduceOp.AVG, weighted=True)


def _draw_sparse(rng: Random, slot: Slot) -> Slot:
    """Let some sums travel as sparse contributions."""
    may_be_sparse = slot.data_type in _FLOATS and slot.op in (ReduceOp.SUM, ReduceOp.AVG)
    if not may_be_sparse or rng.random() < 0.85:
        return slot
    quantization = Quantization(WireFormat.SPARSE, rng.choice((32, 128)))
    return replace(slot, algorithm=Algorithm.AUTO, quantization=quantization)


def _draw_guarded(rng: Random, slot: Slot) -> Slot:
    """Give most weighted averages a guard."""
    if not slot.weighted or rng.random() < _UNGUARDED:
        return slot
    actions = rng.choice(_ACTIONS), rng.choice(_ACTIONS)
    guard = ContributionGuard(*actions, rng.choice((1.0, 3.0, 8.0)), rng.choice((0, 1, 8)))
    return replace(slot, guard=guard if any(actions) else None)


def _draw_way(rng: Random, slot: Slot) -> Slot:
    """Draw algorithm and quantization of a slot."""
    algorithm = rng.choice(_ALGORITHMS)
    wire = rng.choice(_FORMATS)
    quantization = Quantization(wire, rng.choice((8, 32)), rng.random() < 0.3)
    may_quantize = slot.data_type in (DataType.FLOAT, DataType.DOUBLE) and slot.op is not _PROD
    if not may_quantize or rng.random() < 0.5:
        quantization = UNQUANTIZED
    return replace(slot, algorithm=algorithm, quantization=quantization)
