"""What a seed means: the options of one simulated run, all drawn from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from random import Random

from pccl.protocol.types import NS_PER_S, DataType, ReduceOp

MS = NS_PER_S // 1000


class LifePhase(enum.Enum):
    """What a process was doing when it was killed."""

    CONNECTING = "connecting"
    ROUND = "round"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    DONE = "done_before_commit"
    OTHER = "other"


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


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process once it is in ``phase`` (OTHER: at ``delay_ns`` of the run)."""

    victim: int
    phase: LifePhase
    occurrence: int
    """Which time it enters the phase (from 0)."""
    delay_ns: int
    """How long after that."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset one connection of the run: the ``choice``-th (modulo their number) at that time."""

    when_ns: int
    choice: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing moves between two processes for a while."""

    when_ns: int
    a: int
    b: int
    duration_ns: int
    one_way: bool


@dataclass(frozen=True, slots=True)
class DeadLane:
    """One connection delivers nothing more one way; new ones between the same two peers work."""

    when_ns: int
    choice: int


@dataclass(frozen=True, slots=True)
class Cut:
    """One lane is reset: the ``choice``-th (modulo their number) at that time.

    The others between the same two peers live on.
    """

    when_ns: int
    choice: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """The call that a process is in at that time is cancelled, as by Ctrl-C, and repeated."""

    when_ns: int
    victim: int


@dataclass(frozen=True, slots=True)
class Mistake:
    """One process calls ``update_topology`` once too often, in one of its iterations."""

    culprit: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run."""

    seed: int
    peers: int
    late_peers: int
    """How many of them start only after a while."""
    slots: tuple[Slot, ...]
    style: Style
    segment_bytes: int
    latency_ns: int
    uneven_links: bool
    bytes_per_s: int | None
    window_bytes: int
    stop_ns: int
    """When members begin to vote for the end."""
    kills: tuple[Kill, ...]
    resets: tuple[Reset, ...]
    stalls: tuple[Stall, ...]
    master_dies_ns: int | None
    repeats: float
    """Probability that a segment is sent twice, as a sender may that has lost a lane."""
    asks_pending: bool
    """Whether members ask if anybody is pending, and admit only then."""
    dead_lanes: tuple[DeadLane, ...]
    groups: int
    """Process i is in group i modulo this."""
    retries: bool
    """Whether the library itself tries again, where a call can be told to."""
    broadcasts: bool
    barriers: bool
    optimizes: bool
    min_peers: int
    """What those that start early demand of ``connect``, for a while."""
    impatience: float
    """Probability that a call gets a time budget of a few latencies."""
    interrupts: tuple[Interrupt, ...]
    mistake: Mistake | None
    secured: bool
    """Whether the run has a token."""
    drops: bool
    """Whether each iteration launches a reduce whose handle is dropped at once."""
    lanes: int
    """How many lanes of a link every second process wants; the others leave it to the library."""
    cuts: tuple[Cut, ...]

    @property
    def token(self) -> bytes | None:
        """The run's secret, if it has one."""
        return b"a secret that all of them know" if self.secured else None

    @property
    def undisturbed(self) -> bool:
        """Whether nobody may be removed who was not killed. A lane that is cut costs nobody."""
        return not (self.resets or self.stalls or self.dead_lanes or self.master_dies_ns)


_TARGETS = (
    LifePhase.CONNECTING,
    LifePhase.ROUND,
    LifePhase.REDUCE_SCATTER,
    LifePhase.GATHER,
    LifePhase.DONE,
    LifePhase.OTHER,
)


def draw(seed: int) -> Scenario:
    """Draw the scenario of ``seed``."""
    rng = Random(seed)
    peers = rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 8, 12, 16))
    slots = tuple(_draw_slot(rng, tag, peers) for tag in range(rng.choice((1, 1, 2, 3))))
    latency_ns = rng.choice((MS // 20, MS // 2, 5 * MS, 40 * MS))
    stop_ns = rng.randint(20, 60) * max(latency_ns, MS // 4)
    kills: list[Kill] = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        phase = rng.choice(_TARGETS)
        if phase is LifePhase.OTHER:
            delay_ns = rng.randrange(stop_ns)
        else:
            delay_ns = rng.choice((0, 1, rng.randrange(latency_ns), rng.randrange(latency_ns)))
        kills.append(Kill(rng.randrange(peers), phase, rng.choice((0, 0, 1, 3)), delay_ns))
    resets: list[Reset] = []
    if rng.random() < 0.35:
        count = rng.randint(1, 4)
        resets += [Reset(rng.randrange(stop_ns), rng.randrange(1 << 16)) for _ in range(count)]
    stalls: list[Stall] = []
    if rng.random() < 0.2:
        for _ in range(rng.randint(1, 2)):
            a, b = rng.sample(range(-1, peers), 2)  # -1 is the master
            duration_ns = rng.choice((10 * MS, 300 * MS, 3000 * MS, 15000 * MS, 45000 * MS))
            stalls.append(Stall(rng.randrange(stop_ns), a, b, duration_ns, rng.random() < 0.5))
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
        kills=tuple(kills),
        resets=tuple(resets),
        stalls=tuple(stalls),
        master_dies_ns=rng.randrange(stop_ns) if rng.random() < 0.06 else None,
        repeats=rng.choice((0.0, 0.0, 0.02, 0.3)),
        asks_pending=rng.random() < 0.3,
        dead_lanes=tuple(
            DeadLane(rng.randrange(stop_ns), rng.randrange(1 << 16))
            for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2)))
        ),
        groups=rng.choice((1, 1, 1, 2, 3)) if peers > 3 else 1,
        retries=rng.random() < 0.4,
        broadcasts=rng.random() < 0.3,
        barriers=rng.random() < 0.3,
        optimizes=rng.random() < 0.2,
        min_peers=rng.randint(2, peers) if rng.random() < 0.3 else 1,
        impatience=rng.choice((0.0, 0.0, 0.0, 0.05, 0.2)),
        interrupts=tuple(
            Interrupt(rng.randrange(stop_ns), rng.randrange(peers))
            for _ in range(rng.choice((0, 0, 0, 1, 3)))
        ),
        mistake=Mistake(rng.randrange(peers), rng.randrange(4)) if rng.random() < 0.1 else None,
        secured=rng.random() < 0.3,
        drops=rng.random() < 0.2,
        lanes=rng.choice((1, 1, 2, 3, 8)),
        cuts=tuple(
            Cut(rng.randrange(stop_ns), rng.randrange(1 << 16))
            for _ in range(rng.choice((0, 0, 0, 1, 3, 10)))
        ),
    )
    # Elsewhere the others would not come to the call that the culprit waits in.
    plain = not scenario.asks_pending and not scenario.optimizes
    return scenario if plain else replace(scenario, mistake=None)


def _draw_slot(rng: Random, tag: int, peers: int) -> Slot:
    return Slot(
        tag=tag,
        count=rng.choice((1, peers - 1, peers, peers + 1, 37, 500, rng.randint(1, 1500))),
        data_type=rng.choice(tuple(DataType)),
        op=rng.choice(tuple(ReduceOp)),
    )
