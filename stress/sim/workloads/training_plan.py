"""``TrainingPlan``: how processes train in a simulated run, all drawn from the seed."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from random import Random

from pccl.bindings.compression import SPARSE_DECAY
from pccl.bindings.diloco.schedule import Schedule
from pccl.protocol.guards.contributions import ContributionGuard, GuardAction
from pccl.protocol.types import UNQUANTIZED, Quantization, WireFormat
from pccl.stress.sim.workloads.toy_model import CODED_DIGITS, DIGITS

_PIECES = (256, 1024, 8192)
_FORMATS = (WireFormat.FLOAT16, WireFormat.UINT16)
"""Precise enough to tell digits apart; their rounding errors are still far above float32's."""
_COARSE = (
    *(WireFormat.UINT8, WireFormat.INT8, WireFormat.COMPANDED8, WireFormat.BFLOAT16),
    *(WireFormat.INT4, WireFormat.E3M0, WireFormat.INT2),
)
_IS_CODED = 0.25
_IS_COARSE = 0.25
_IS_SPARSE = 0.5
_IS_STOCHASTIC = 0.3
_IS_EAGER = 0.5
_MIXES = 0.5
_IS_INTERRUPTED = 0.3
_STOPS = 0.2
_DRAINS = 0.3
_BLOCK = 32
_SPARSE_BLOCKS = (128, 3200)
"""Half of the values are kept, or one in fifty."""
_HAS_EXTRAS = 0.5
_IS_GUARDED = 0.4
_HAS_SHARDS = 0.15
_HAS_SAMPLES = 0.5
LIVES_MAX = 2
"""Maximum number of lives of a process."""


class Mode(enum.Enum):
    """How rounds and inner steps overlap."""

    SYNCHRONOUS = "synchronous"
    """The process waits for each round at once."""
    DELAYED = "delayed"
    """The process makes some inner steps during a round."""
    ROUND_DELAYED = "one round delayed"
    """The process makes inner steps until the next round begins."""
    STREAMING = "streaming"
    """Several fragments take turns."""
    BUDGET = "time budget"
    """Rounds begin after a time instead of a number of steps."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings of the training, equal on all processes of the run."""

    mode: Mode
    fragments: int
    sync_steps: int
    sync_s: float
    delay: int
    min_peers: int
    step_ns: int
    """Longest duration of an inner step; every process has its own pace."""
    piece_bytes: int
    wire: WireFormat = WireFormat.NONE
    """Wire format of the rounds, with error feedback; NONE: no compression."""
    block: int = _BLOCK
    """Values per block of the wire format."""
    stochastic: bool = False
    """Whether the wire format rounds at random."""
    eager: bool = False
    """Whether merges preview the next outer step."""
    slowest: float = 1.0
    """How much longer the inner steps of the second process are."""
    mixing: float = 0.0
    """Share of the untaken work that merges keep: 0 or a half."""
    interrupts: float = 0.0
    """Probability that Ctrl-C ends a wait for an average; the process trains on."""
    stops: float = 0.0
    """Probability that a process saves a checkpoint after some steps, and leaves; the next process
    that joins continues from it."""
    drains: float = 0.0
    """Probability that a process gets notice after some steps, hands over its work and leaves."""
    extras: bool = False
    """Whether the model has buffers, and the inner optimizer a state for late peers."""
    shards: int = 1
    """Number of processes that hold a replica, each in the group of its shard."""
    lease: int = 0
    """Samples that a process gets at first; 0: processes do not count samples."""
    samples: int | None = None
    """Number of samples; None: there is no end."""
    guard: ContributionGuard | None = None
    """Guard of the rounds; None: no guard, and all contributions are sound."""

    @property
    def quantization(self) -> Quantization:
        """The wire format, as an option of a reduce."""
        if self.wire is WireFormat.NONE:
            return UNQUANTIZED
        return Quantization(self.wire, self.block, self.stochastic)

    @property
    def is_exact(self) -> bool:
        """Whether an average shows all digits of the work in it."""
        return self.wire is WireFormat.NONE or self.wire in _FORMATS

    @property
    def decay(self) -> float:
        """Share of an error that the next round adds, as ``DiLoCo`` chooses it."""
        return SPARSE_DECAY if self.wire is WireFormat.SPARSE else 1.0

    @property
    def digits(self) -> int:
        """Number of inner steps in one place of the model."""
        digits = DIGITS if self.wire is WireFormat.NONE else CODED_DIGITS
        return digits - bool(self.mixing)  # so that values stay as small

    @property
    def unit(self) -> int:
        """Digit of a whole inner step."""
        return 2 if self.mixing else 1

    @property
    def schedule(self) -> Schedule:
        """The schedule that the processes follow."""
        return Schedule(self.fragments, self.sync_steps, self.sync_s, self.delay)

    @property
    def steps_between(self) -> int:
        """Approximate number of inner steps between two rounds."""
        return max(1, (self.sync_steps or 4) // self.fragments)


def draw_training(seed: int, latency_ns: int) -> TrainingPlan:
    """Draw how processes train, and when they synchronize."""
    rng = Random(f"{seed}/training")
    mode = rng.choice(tuple(Mode))
    fragments, sync_steps, sync_s = 1, rng.choice((1, 2, 4, 6)), 0.0
    step_ns = round(latency_ns * rng.uniform(0.3, 2.0))
    match mode:
        case Mode.SYNCHRONOUS:
            delay = 0
        case Mode.DELAYED:
            sync_steps = rng.randint(2, 6)
            delay = rng.randint(1, sync_steps - 1)
        case Mode.ROUND_DELAYED:
            delay = sync_steps
        case Mode.STREAMING:
            fragments = rng.randint(2, 4)
            sync_steps = rng.randint(fragments, 2 * fragments)
            delay = rng.randint(0, sync_steps)
        case Mode.BUDGET:
            fragments = rng.choice((1, 1, 2))
            sync_steps, sync_s = 0, rng.uniform(1, 6) * step_ns / 1e9
            delay = rng.choice((0, 1, 3))
    overlaps = 0 < delay < sync_steps
    compression = _draw_compression(seed)
    lease, samples = _draw_samples(seed)
    shards = 2 if Random(f"{seed}/shards").random() < _HAS_SHARDS else 1
    return TrainingPlan(
        mode=mode,
        fragments=fragments,
        sync_steps=sync_steps,
        sync_s=sync_s,
        delay=delay,
        min_peers=rng.choice((1, 1, 1, 2)),
        step_ns=step_ns,
        piece_bytes=rng.choice(_PIECES),
        wire=compression.format,
        block=compression.block,
        stochastic=compression.stochastic,
        extras=Random(f"{seed}/extras").random() < _HAS_EXTRAS,
        lease=lease,
        samples=samples,
        guard=_draw_guard(seed),
        eager=mode is Mode.ROUND_DELAYED and Random(f"{seed}/eager").random() < _IS_EAGER,
        interrupts=_IS_INTERRUPTED if Random(f"{seed}/interrupts").random() < 0.5 else 0.0,
        stops=_STOPS if Random(f"{seed}/stops").random() < 0.5 else 0.0,
        mixing=0.5 if overlaps and Random(f"{seed}/mixing").random() < _MIXES else 0.0,
        drains=_DRAINS if shards == 1 and Random(f"{seed}/drains").random() < 0.5 else 0.0,
        shards=shards,
    )


def slowed(training: TrainingPlan, step_ns: int, slowest: float) -> TrainingPlan:
    """Return a plan with inner steps of at least ``step_ns``; a budget of time grows likewise."""
    step_ns = max(step_ns, training.step_ns)
    sync_s = training.sync_s * step_ns / training.step_ns
    return replace(training, step_ns=step_ns, sync_s=sync_s, slowest=slowest)


def _draw_samples(seed: int) -> tuple[int, int | None]:
    rng = Random(f"{seed}/samples")
    if rng.random() >= _HAS_SAMPLES:
        return 0, None
    return rng.choice((1, 4, 16, 64)), rng.choice((None, None, 60, 400))


def _draw_guard(seed: int) -> ContributionGuard | None:
    rng = Random(f"{seed}/guards")
    if rng.random() >= _IS_GUARDED:
        return None
    outliers = rng.choice((GuardAction.WARN, GuardAction.EXCLUDE, GuardAction.EXCLUDE))
    exclude = GuardAction.EXCLUDE  # NaN is no whole number
    return ContributionGuard(exclude, outliers, rng.choice((3.0, 8.0, 30.0)), rng.choice((0, 8)))


def _draw_compression(seed: int) -> Quantization:
    rng, coarse = Random(f"{seed}/coded"), Random(f"{seed}/coarse")
    if rng.random() < _IS_CODED:
        return Quantization(rng.choice(_FORMATS), _BLOCK)
    if coarse.random() >= _IS_COARSE:
        return UNQUANTIZED
    if coarse.random() < _IS_SPARSE:
        return Quantization(WireFormat.SPARSE, coarse.choice(_SPARSE_BLOCKS))
    return Quantization(coarse.choice(_COARSE), _BLOCK, coarse.random() < _IS_STOCHASTIC)
