"""The vocabulary of the protocol: ids, enums and the value types that rooms hand to each other.

Nothing here has behaviour beyond trivial derivations; everything is immutable and compares by
value, so that machines, simulator and tests can pass it around freely.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Annotated, NewType

from pccl.protocol.data_type import DataType

PeerId = NewType("PeerId", int)
NOBODY = PeerId(0)
"""The id of no peer; in a handshake that of a master, or of a peer that is not registered yet."""
"""One incarnation of one process in a run. Ids grow; whoever joins later has the larger one."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Below:
    """Annotation of an integer field: valid values are ``0 <= value < bound``."""

    bound: int


@dataclass(frozen=True, slots=True)
class UpTo:
    """Annotation of a float field: valid values are ``0 <= value <= largest``."""

    largest: float


@dataclass(frozen=True, slots=True)
class AtMost:
    """Annotation of a text, a byte string or a list: so many bytes (of UTF-8) or items."""

    count: int


WEIGHT_MAX = 1e300
"""The sum of as many as there can be members is finite."""

Weight = Annotated[float, UpTo(WEIGHT_MAX)]
"""How much one contribution to a weighted average counts."""


class ReduceOp(enum.IntEnum):
    """How the contributions of all members become one value."""

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class Collective(enum.IntEnum):
    """What members do together under one tag."""

    ALL_REDUCE = 1
    BROADCAST = 2
    BARRIER = 3
    SYNC = 4
    """They make their shared states equal, or find out if they are."""


class Algorithm(enum.IntEnum):
    """How the values of an all-reduce travel."""

    AUTO = 0
    """As the master has found to be the quickest, by the size of the tensor."""
    RING = 1
    """From neighbour to neighbour, twice around: 2(N-1) steps."""
    STAR = 2
    """To one member and back: two steps, for small tensors."""
    MESH = 3
    """From everyone to everyone: two steps, and as many bytes as in a ring."""

    @property
    def label(self) -> str:
        """As users write it."""
        return self.name.lower()


STAR_BYTES_MAX = 4 << 20
"""The largest tensor of a star. The call raises ``ValueError``; a table with more is refused.

The root keeps what comes too early to be added."""

ALGORITHM_STEPS_MAX = 4
"""Steps of the algorithm table of a view.

Three algorithms need two, if each is the quickest in one range of sizes."""


class QuantizationAlgorithm(enum.IntEnum):
    """How values are shortened for the wire."""

    NONE = 0
    MIN_MAX = 1
    ZERO_POINT_SCALE = 2


class Attribute(enum.IntEnum):
    """What :meth:`pccl.Communicator.get_attribute` can be asked for."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


class RoundKind(enum.IntEnum):
    """The joint decisions that all members of the run take together."""

    UPDATE_TOPOLOGY = 1
    PEERS_PENDING = 2
    OPTIMIZE_TOPOLOGY = 3

    @property
    def call_name(self) -> str:
        """The call that users know it by."""
        return "are_peers_pending" if self is RoundKind.PEERS_PENDING else self.name.lower()


class RemovalCause(enum.IntEnum):
    """Why a peer is no longer (or will not become) a member. There are no other reasons."""

    GOODBYE = 1
    """It said that it leaves."""
    CONNECTIONS_LOST = 2
    """Its control connection and a lane to a neighbour are both gone."""
    CONTROL_LOST = 3
    """Its control connection is gone and was not resumed in time."""
    SILENT = 4
    """It sent nothing for the whole deadline while a round or an operation waited for it, or while
    it was a newcomer."""
    NO_PROGRESS = 5
    """An operation waited for data that it had the inputs for and did not send."""
    UNREACHABLE = 6
    """A newcomer that could not be linked to its neighbours."""
    LINK_BROKEN = 7
    """A live member that cannot talk to another one, and no order of the ring avoids that."""
    STATE_CONFLICT = 8
    """Its shared state conflicts with what the majority of its group has."""
    TOO_SLOW = 9
    """A newcomer that kept the others waiting for its first synchronization."""
    CROWDED_OUT = 10
    """Too many newcomers wait: it is the oldest from the source with the most of them."""


class AbortCause(enum.IntEnum):
    """Why an operation ended without a result. Each maps to one error for the caller."""

    MEMBER_LOST = 1
    VIEW_CLOSED = 2
    WITHDRAWN = 3
    DESCRIPTOR_MISMATCH = 4
    DIGEST_MISMATCH = 5
    LOCKSTEP = 6
    """The members waited for different things, and nobody was left who could have gone on."""
    LINK_BROKEN = 7
    """Members cannot talk that have to for the algorithm that was named."""
    STATE_MISMATCH = 8
    """Shared states differ that must not, and no majority says which is right."""
    STATE_UNAVAILABLE = 9
    """Nobody has a shared state that the group could go on with."""


QUOTES_MEMBERS = (
    AbortCause.MEMBER_LOST, AbortCause.VIEW_CLOSED, AbortCause.WITHDRAWN, AbortCause.LINK_BROKEN
)  # fmt: skip
"""Their reasons quote what members have said."""


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """One joint decision: the n-th of its kind in the run (n counts up from 0)."""

    kind: RoundKind
    n: int


SYNC_TAG = (1 << 64) - 1
"""Under this tag shared state is synchronized; no caller may use it for anything else."""


@dataclass(frozen=True, slots=True, order=True)
class OperationId:
    """One collective. Every member derives it locally: the n-th use of ``tag`` in ``view``."""

    term: int
    group: int
    view: int
    tag: int
    n: int

    def __str__(self) -> str:
        tag = "state" if self.tag == SYNC_TAG else f"tag{self.tag}"
        return f"t{self.term}/g{self.group}/v{self.view}/{tag}#{self.n}"


BLOCK_MIN = 8
BLOCK_MAX = 1 << 16
"""Values per block of a wire format: shorter ones would be mostly metadata, longer ones have a step
that fits nobody."""


class WireFormat(enum.IntEnum):
    """How values are written for the wire (``pccl.collectives.quantization`` describes each)."""

    NONE = 0
    """As they are."""
    UINT8 = 1
    """256 even steps from each block's minimum to its maximum."""
    INT8 = 2
    """255 even steps, zero among them, as far as each block's largest magnitude."""
    COMPANDED8 = 3
    """As INT8 of the square root: fine steps near zero, for heavy tails."""
    INT4 = 4
    """As UINT8 with 16 steps, two values in a byte."""
    FLOAT16 = 5
    """Half precision, with a power of two per block: nothing overflows."""
    BFLOAT16 = 6
    """As FLOAT16 with 8 bits of precision instead of 11."""
    UINT16 = 7
    """As UINT8 with 65536 steps."""

    @property
    def label(self) -> str:
        """Its name for callers and for messages."""
        return self.name.lower()

    @property
    def bits(self) -> int:
        """Bits per value, metadata of blocks aside; meaningless for NONE."""
        return _WIRE[self][0]

    @property
    def default_block(self) -> int:
        """Values per block unless the caller says otherwise; 0 for NONE."""
        return _WIRE[self][1]


_WIRE = {
    WireFormat.NONE: (0, 0),
    WireFormat.UINT8: (8, 96),
    WireFormat.INT8: (8, 32),
    WireFormat.COMPANDED8: (8, 32),
    WireFormat.INT4: (4, 32),
    WireFormat.FLOAT16: (16, 256),
    WireFormat.BFLOAT16: (16, 256),
    WireFormat.UINT16: (16, 96),
}
"""Bits per value, and the default block: about as long as the metadata allow at 1.07 bytes a value
for 8 bits; the figures are in docs/benchmarks.md."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What becomes of values on their way; all members of an operation must agree about it."""

    format: WireFormat = WireFormat.NONE
    block: Annotated[int, Below(BLOCK_MAX + 1)] = 0
    """Values that share a step; 0 if they are sent as they are."""
    stochastic: bool = False
    """Rounded up with the probability that keeps the mean, not to the nearest."""

    @property
    def active(self) -> bool:
        """Whether values change on their way."""
        return self.format is not WireFormat.NONE

    def __str__(self) -> str:
        rounded = ", stochastic" if self.stochastic else ""
        return f"{self.format.label} in blocks of {self.block}{rounded}"


UNQUANTIZED = Quantization()


@dataclass(frozen=True, slots=True)
class AlgorithmStep:
    """Tensors of up to so many bytes, and more than the step before, take this algorithm."""

    up_to_bytes: int
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """What AUTO means in one view: made by the master, the same for all members, never changed."""

    steps: Annotated[tuple[AlgorithmStep, ...], AtMost(ALGORITHM_STEPS_MAX)] = ()
    """The smallest tensors first."""
    beyond: Algorithm = Algorithm.RING
    """For all larger ones."""
    quantized: Algorithm = Algorithm.RING
    """For those that would take the ring, if they are quantized: a mesh rounds less often."""

    def algorithm_for(self, tensor_bytes: int) -> Algorithm:
        """What a tensor of this size takes."""
        for step in self.steps:
            if tensor_bytes <= step.up_to_bytes:
                return step.algorithm
        return self.beyond

    @property
    def is_sound(self) -> bool:
        """Whether a master may have made it: short, in order, and within the bounds of the star."""
        sizes = [step.up_to_bytes for step in self.steps]
        chosen = [*(step.algorithm for step in self.steps), self.beyond]
        stars = [step.up_to_bytes for step in self.steps if step.algorithm is Algorithm.STAR]
        return (
            len(sizes) <= ALGORITHM_STEPS_MAX
            and sizes == sorted(set(sizes))
            and Algorithm.AUTO not in chosen
            and self.beyond is not Algorithm.STAR
            and self.quantized in (Algorithm.RING, Algorithm.MESH)
            and max(stars, default=0) <= STAR_BYTES_MAX
        )


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """What one end of a link has seen of it while it was in use; 0 where it knows nothing."""

    rtt_ns: int
    """The shortest round trip."""
    bytes_per_s: int
    """What this end could send."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link, named by its other end, and what this end has measured."""

    peer: PeerId
    measure: LinkMeasure


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What one member asked for; all members of an operation must ask for the same."""

    dtype: DataType
    op: ReduceOp
    count: int
    collective: Collective = Collective.ALL_REDUCE
    root: int = 0
    """The rank whose values are broadcast."""
    quantization: Quantization = UNQUANTIZED
    algorithm: Algorithm = Algorithm.AUTO
    """Of an all-reduce; what that is for AUTO is settled before anybody is asked."""
    forced: bool = False
    """Whether the caller has named the algorithm."""
    weighted: bool = False
    """Whether each member gives a weight, which is no part of this."""

    @staticmethod
    def broadcast(dtype: DataType, count: int, root: int) -> Descriptor:
        """Everybody gets the values of rank ``root``."""
        return Descriptor(dtype, ReduceOp.SUM, count, Collective.BROADCAST, root)

    @staticmethod
    def barrier() -> Descriptor:
        """Everybody waits for everybody."""
        return Descriptor(DataType.UINT8, ReduceOp.SUM, 0, Collective.BARRIER)

    @staticmethod
    def sync() -> Descriptor:
        """Everybody gets the same shared state."""
        return Descriptor(DataType.UINT8, ReduceOp.SUM, 0, Collective.SYNC)

    @property
    def tensor_bytes(self) -> int:
        """Size of the tensor."""
        return self.count * self.dtype.itemsize

    @property
    def carrier(self) -> Algorithm:
        """How the data travels, once that is settled; what is no all-reduce goes along the ring."""
        return Algorithm.RING if self.algorithm is Algorithm.AUTO else self.algorithm

    @property
    def follows_ring(self) -> bool:
        """Whether all data goes from each member to the next one in the ring."""
        return self.carrier is Algorithm.RING

    @property
    def is_repairable(self) -> bool:
        """Whether it can go on across the gap that a lost member leaves.

        Whoever has decoded a quantized result can't send it on as the bytes that it was.
        """
        return self.follows_ring and not self.quantization.active

    def settled(self, table: AlgorithmTable) -> Descriptor:
        """The same with the algorithm that AUTO stands for."""
        if self.collective is not Collective.ALL_REDUCE or self.algorithm is not Algorithm.AUTO:
            return self
        algorithm = table.algorithm_for(self.tensor_bytes)
        if algorithm is Algorithm.RING and self.quantization.active:
            algorithm = table.quantized
        return replace(self, algorithm=algorithm)

    def __str__(self) -> str:
        what = f"{self.count} x {self.dtype.label}"
        how = f" by {self.algorithm.label}" if self.forced else ""
        op = f"weighted {self.op.name}" if self.weighted else self.op.name
        match self.collective:
            case Collective.BARRIER:
                return "a barrier"
            case Collective.SYNC:
                return "shared state"
            case Collective.BROADCAST:
                return f"broadcast of {what} from rank {self.root}"
            case Collective.ALL_REDUCE if self.quantization.active:
                return f"{op} of {what}{how}, quantized as {self.quantization}"
            case _:
                return f"{op} of {what}{how}"


@dataclass(frozen=True, slots=True)
class Member:
    """A peer as the others see it: who it is and where its port is."""

    peer: PeerId
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Roster:
    """Membership as of one instant, as the members of one group are told it.

    ``version`` grows with every change anywhere in the run. ``view`` is the group's newest view,
    ``members`` its ring in order. ``open_views`` are the numbers of all views of the group in
    which operations may still be decided; a view that is not among them is closed for good.
    """

    version: int
    group: int
    view: int
    members: tuple[Member, ...]
    open_views: tuple[int, ...]
    global_world_size: int
    peer_groups: int
    largest_group_size: int
    term: int = 1
    """Of the master that opened ``view``; operations in it carry it, whoever decides them."""
    updates: int = field(default=0, compare=False)
    """How many rounds of ``update_topology`` were closed before or with this change."""
    algorithms: AlgorithmTable = AlgorithmTable()
    """Of ``view``."""

    @property
    def ring(self) -> tuple[PeerId, ...]:
        """The members' ids in ring order; a member's rank is its index here."""
        return tuple(member.peer for member in self.members)
