"""The vocabulary of the protocol: ids, enums and value types that compare by value."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil
from operator import attrgetter
from typing import Annotated, NewType

from pccl.protocol.data_type import BLOCK_MAX as BLOCK_MAX
from pccl.protocol.data_type import BLOCK_MIN as BLOCK_MIN
from pccl.protocol.data_type import UNQUANTIZED as UNQUANTIZED
from pccl.protocol.data_type import DataType
from pccl.protocol.data_type import Quantization as Quantization
from pccl.protocol.data_type import WireFormat as WireFormat
from pccl.protocol.guards.bounds import AtMost as AtMost
from pccl.protocol.guards.bounds import Below as Below
from pccl.protocol.guards.bounds import UpTo as UpTo
from pccl.protocol.guards.contributions import ContributionGuard
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MeshPlan
from pccl.protocol.vocabulary.tags import SYNC_TAG as SYNC_TAG
from pccl.protocol.vocabulary.tags import tag_text

PeerId = NewType("PeerId", int)
"""One incarnation of one process in a run. Ids grow: a peer that joins later has a larger id."""
NOBODY = PeerId(0)
"""The id of no peer. In a handshake: a master, or a peer that is not registered yet."""
KEY_BYTES = 32
"""Length of a public key, and of each key of a connection."""
NS_PER_S, NS_PER_MS = 1_000_000_000, 1_000_000


NAME_BYTES_MAX, HOST_CHARACTERS_MAX, ADDRESS_CHARACTERS_MAX, HOSTS_MAX = 64, 253, 46, 3
PeerName = Annotated[str, AtMost(NAME_BYTES_MAX)]
HostName = Annotated[str, AtMost(HOST_CHARACTERS_MAX)]
"""An address or a name; a longer name cannot exist (RFC 1035)."""
Hosts = Annotated[tuple[Annotated[str, AtMost(ADDRESS_CHARACTERS_MAX)], ...], AtMost(HOSTS_MAX)]
WEIGHT_MAX = 1e300
"""The largest weight. The sum of all weights stays finite even in the largest run."""
Weight = Annotated[float, UpTo(WEIGHT_MAX)]
"""The weight of a contribution to an average."""
LOSS_MAX = 1e300
Loss = Annotated[float, UpTo(LOSS_MAX, -LOSS_MAX)]
"""The loss of a program's model, or another number that it reports."""


class ReduceOp(enum.IntEnum):
    """The operation that combines the contributions of all members."""

    SUM = 0
    AVG = 1
    PROD = 2
    MAX = 3
    MIN = 4


class Collective(enum.IntEnum):
    """The kind of a joint operation under one tag."""

    ALL_REDUCE = 1
    BROADCAST = 2
    BARRIER = 3
    SYNC = 4
    """Members synchronize or compare their shared states."""
    ALL_GATHER = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    REDUCE = 9
    REDUCE_SCATTER = 10
    SEND_RECV = 11
    """One member gives values to one other member."""

    @cached_property
    def label(self) -> str:
        """The name that users write."""
        return self.name.lower()


EXCHANGES = frozenset((
    Collective.ALL_GATHER, Collective.GATHER, Collective.SCATTER, Collective.ALL_TO_ALL,
    Collective.SEND_RECV,
))  # fmt: skip
"""The collectives in which members give each other blocks of values, and combine none."""
REDUCTIONS_OF_PARTS = frozenset({Collective.REDUCE, Collective.REDUCE_SCATTER})
"""The reductions of which a member gets a part of the result, or nothing."""
_ROOTED = frozenset((Collective.GATHER, Collective.SCATTER, Collective.REDUCE))


class Algorithm(enum.IntEnum):
    """The path of the values in an all-reduce."""

    AUTO = 0
    """The algorithm that the master expects to be fastest for the size of the tensor."""
    RING = 1
    """From neighbour to neighbour, twice around: 2(N-1) steps."""
    STAR = 2
    """To one member and back: two steps, for small tensors."""
    MESH = 3
    """From each member to every other member: two steps, and as many bytes as in a ring."""

    @cached_property
    def label(self) -> str:
        """The name that users write."""
        return self.name.lower()


STAR_BYTES_MAX = 4 << 20
"""The largest tensor of a star, in bytes. A call with a larger tensor raises ``ValueError``.

The root stores contributions that arrive before their turn. Peers refuse a table with more."""

ALGORITHM_STEPS_MAX = 4
"""Most steps in the algorithm table of a view. Three algorithms with one range each need two."""


class RoundKind(enum.IntEnum):
    """The kinds of joint calls that all members of the run make together."""

    UPDATE_TOPOLOGY = 1
    PEERS_PENDING = 2
    OPTIMIZE_TOPOLOGY = 3

    @property
    def call_name(self) -> str:
        """The name of the call in the API."""
        return "are_peers_pending" if self is RoundKind.PEERS_PENDING else self.name.lower()


class RemovalCause(enum.IntEnum):
    """All reasons for which the master removes a peer, or does not admit it."""

    GOODBYE = 1
    """The peer left."""
    CONNECTIONS_LOST = 2
    """The peer lost both its control connection and a lane to a neighbour."""
    CONTROL_LOST = 3
    """The peer lost its control connection, and did not resume it in time."""
    SILENT = 4
    """It sent nothing for ``deadline_s`` while a call waited for it; a newcomer, at any time."""
    NO_PROGRESS = 5
    """An operation waited for data that the peer could send and did not send."""
    UNREACHABLE = 6
    """The newcomer could not link to its neighbours."""
    LINK_BROKEN = 7
    """The member has no link to another member, and no order of the ring avoids that."""
    STATE_CONFLICT = 8
    """The peer's shared state conflicts with that of the majority of its group."""
    TOO_SLOW = 9
    """The outdated member delayed a synchronization for too long."""
    CROWDED_OUT = 10
    """Too many newcomers wait, and this one is the oldest from the largest source."""
    EXPELLED = 11
    """A person has expelled the peer (``pccl expel``). Its key is never registered again."""


class AbortCause(enum.IntEnum):
    """The reasons why an operation ends without a result. Each maps to one error for the caller."""

    MEMBER_LOST = 1
    VIEW_CLOSED = 2
    WITHDRAWN = 3
    DESCRIPTOR_MISMATCH = 4
    DIGEST_MISMATCH = 5
    LOCKSTEP = 6
    """The members waited in different calls, and none of them could continue."""
    LINK_BROKEN = 7
    """Two members without a link must exchange data for the algorithm that the caller named."""
    STATE_MISMATCH = 8
    """Shared states that must be equal differ, and no majority decides between them."""
    STATE_UNAVAILABLE = 9
    """No member offers a shared state that counts."""


QUOTES_MEMBERS = (
    AbortCause.MEMBER_LOST, AbortCause.VIEW_CLOSED, AbortCause.WITHDRAWN, AbortCause.LINK_BROKEN
)  # fmt: skip
"""Causes whose reasons quote texts of members."""


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """The id of one round: the n-th of its kind in the run, from 0."""

    kind: RoundKind
    n: int


@dataclass(frozen=True, slots=True, order=True)
class OperationId:
    """The id of one collective: the n-th use of ``tag`` in ``view``. Each member derives it."""

    term: int
    group: int
    view: int
    tag: int
    n: int

    def __str__(self) -> str:
        tag = "state" if self.tag == SYNC_TAG else f"tag{tag_text(self.tag)}"
        return f"t{self.term}/g{self.group}/v{self.view}/{tag}#{self.n}"


@dataclass(frozen=True, slots=True)
class AlgorithmStep:
    """One step of a table: tensors of at most ``up_to_bytes`` use this algorithm."""

    up_to_bytes: int
    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class AlgorithmTable:
    """The meaning of AUTO in one view: the same table for all members, which never changes."""

    steps: Annotated[tuple[AlgorithmStep, ...], AtMost(ALGORITHM_STEPS_MAX)] = ()
    """Steps in the order of their sizes, the smallest first."""
    beyond: Algorithm = Algorithm.RING
    """The algorithm for all larger tensors."""
    quantized: Algorithm = Algorithm.RING
    """The algorithm for quantized tensors in place of the ring: a mesh rounds less often."""
    mesh: MeshPlan = EQUAL_MESH
    """Who owns which part of a tensor in a mesh, and which members are near each other."""

    def algorithm_for(self, tensor_bytes: int) -> Algorithm:
        """Return the algorithm for a tensor of this size."""
        for step in self.steps:
            if tensor_bytes <= step.up_to_bytes:
                return step.algorithm
        return self.beyond

    def is_sound_for(self, members: int) -> bool:
        """Whether a master may send this table: short, sorted, without AUTO, with small stars."""
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
            and self.mesh.is_sound_for(members)
        )


QUORUM_MIN = 2
"""The smallest quorum: one member alone reduces nothing."""
GRACE_MS_MAX = 3600 * 1000
QUORUM_MEMBERS_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Quorum:
    """When a joint call continues without the members that have not made it."""

    members: Annotated[int, Below(QUORUM_MEMBERS_MAX)] = 0
    """How many members must have made it; 0: ``share`` counts."""
    share: Annotated[float, UpTo(1.0)] = 0.0
    """The same as a share of the members."""
    grace_ms: Annotated[int, Below(GRACE_MS_MAX + 1)] | None = None
    """How long these then wait for late members; nil: the master adapts it."""

    def of(self, size: int) -> int:
        """Return how many of ``size`` members must have made the call; at most all."""
        wanted = self.members or ceil(self.share * size - 1e-9)
        return min(max(wanted, QUORUM_MIN), size)

    def __str__(self) -> str:
        who = f"{self.members} members" if self.members else f"{self.share:.9g} of the members"
        wait = "an adaptive grace" if self.grace_ms is None else f"{self.grace_ms / 1e3:g} s"
        return f"a quorum of {who} and {wait}"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The request of one member for an operation. All members must make the same request."""

    dtype: DataType
    op: ReduceOp
    count: int
    collective: Collective = Collective.ALL_REDUCE
    root: int = 0
    """The rank that sends alone (broadcast, scatter), or gets alone (gather, reduce)."""
    quantization: Quantization = UNQUANTIZED
    algorithm: Algorithm = Algorithm.AUTO
    """Algorithm of an all-reduce. ``settled`` replaces AUTO before the peer sends the request."""
    forced: bool = False
    """Whether the caller has named the algorithm."""
    weighted: bool = False
    """Whether each member gives a weight. The weight itself is not in the descriptor."""
    guard: ContributionGuard | None = None
    """What happens to a contribution of a weighted average that is not finite, or too large."""
    near: bool = False
    """Whether all members of an all-reduce may pull its segments; ``settled`` fills it in."""
    quorum: Quorum | None = None
    """When an all-reduce continues without late members; nil: never."""

    @staticmethod
    def broadcast(dtype: DataType, count: int, root: int) -> Descriptor:
        """Describe an operation that gives all members the values of rank ``root``."""
        return Descriptor(dtype, ReduceOp.SUM, count, Collective.BROADCAST, root)

    @staticmethod
    def barrier() -> Descriptor:
        """Describe an operation in which each member waits for all others."""
        return Descriptor(DataType.UINT8, ReduceOp.SUM, 0, Collective.BARRIER)

    @staticmethod
    def sync() -> Descriptor:
        """Describe an operation that synchronizes or compares shared state."""
        return Descriptor(DataType.UINT8, ReduceOp.SUM, 0, Collective.SYNC)

    @staticmethod
    def direct(
        collective: Collective,
        dtype: DataType,
        *,
        root: int = 0,
        count: int = 0,
        op: ReduceOp = ReduceOp.SUM,
    ) -> Descriptor:
        """Describe an exchange, or a reduction of parts with its operation and its count."""
        return Descriptor(dtype, op, count, collective, root, algorithm=Algorithm.MESH)

    @property
    def is_exchange(self) -> bool:
        """Whether members give each other blocks; each request names their lengths."""
        return self.collective in EXCHANGES

    @property
    def is_direct(self) -> bool:
        """Whether each member sends its values to those that need them, without the ring.

        A member may have its own result before others have its values.
        """
        return self.is_exchange or self.collective in REDUCTIONS_OF_PARTS

    @property
    def gives_all_the_same(self) -> bool:
        """Whether all members get the same result, so that their digests must agree."""
        return not self.is_direct or self.collective is Collective.ALL_GATHER

    @property
    def tensor_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.count * self.dtype.itemsize

    @property
    def carrier(self) -> Algorithm:
        """The settled algorithm of an all-reduce; other collectives use the ring."""
        return Algorithm.RING if self.algorithm is Algorithm.AUTO else self.algorithm

    @property
    def follows_mesh_plan(self) -> bool:
        """Whether the plan of the view says who owns which part of the tensor."""
        is_mesh = self.carrier is Algorithm.MESH and self.collective is Collective.ALL_REDUCE
        return is_mesh and not self.quantization.is_gathered

    @property
    def follows_ring(self) -> bool:
        """Whether each member sends its data only to the next one in the ring."""
        return self.carrier is Algorithm.RING

    @property
    def is_repairable(self) -> bool:
        """Whether the operation can continue across the gap that a lost member leaves.

        A quantized one cannot: a member that decoded a result no longer has the sent bytes.
        """
        return self.follows_ring and not self.quantization.active

    def may_begin_early(self, world_size: int) -> bool:
        """Whether it may begin before its start: it needs data of all members, and no weights."""
        waits = self.weighted or self.quorum is not None
        is_parted = self.collective in REDUCTIONS_OF_PARTS  # an empty part needs no data
        reduces = is_parted or self.collective is Collective.ALL_REDUCE
        return reduces and self.count >= (world_size if is_parted else 1) and not waits

    def settled(self, table: AlgorithmTable, *, near: bool = False) -> Descriptor:
        """Return the same descriptor with what the view determines.

        Args:
            table: says which algorithm AUTO stands for.
            near: whether all members of the view share one machine's memory.
        """
        if self.collective is not Collective.ALL_REDUCE:
            return self
        return _settled(self, table, near)

    def __str__(self) -> str:
        what = f"{self.count} x {self.dtype.label}"
        how = f" by {self.algorithm.label}" if self.forced else ""
        op = f"weighted {self.op.name}" if self.weighted else self.op.name
        how += f" with a guard ({self.guard})" if self.guard is not None else ""
        how += f" with {self.quorum}" if self.quorum is not None else ""
        match self.collective:
            case Collective.BARRIER:
                return "a barrier"
            case Collective.SYNC:
                return "shared state"
            case Collective.BROADCAST:
                return f"broadcast of {what} from rank {self.root}"
            case Collective.SEND_RECV:
                return f"send of {self.dtype.label}"
            case _ if self.is_direct:
                what = f"({op}) of {what}" if self.count else f"of {self.dtype.label}"
                ends = self.collective in _ROOTED
                return f"{self.collective.label} {what}" + f" with root {self.root}" * ends
            case Collective.ALL_REDUCE if self.quantization.active:
                return f"{op} of {what}{how}, quantized as {self.quantization}"
            case _:
                return f"{op} of {what}{how}"


@lru_cache(maxsize=1024)
def _settled(descriptor: Descriptor, table: AlgorithmTable, near: bool) -> Descriptor:
    algorithm = descriptor.algorithm
    if algorithm is Algorithm.AUTO:
        algorithm = table.algorithm_for(descriptor.tensor_bytes)
        if descriptor.quantization.is_gathered:
            algorithm = Algorithm.MESH
        elif algorithm is Algorithm.RING and descriptor.quantization.active:
            algorithm = table.quantized
    pulls = near and not descriptor.quantization.active and not descriptor.weighted
    return replace(descriptor, algorithm=algorithm, near=pulls)


@dataclass(frozen=True, slots=True)
class Member:
    """The id, address, machine, name and public key of a peer, as other members see it."""

    peer: PeerId
    host: str
    port: int
    machine: Annotated[int, Below(1 << 16)] = 0
    """Hash of its machine and user if it can share memory there; otherwise 0."""
    name: PeerName = ""
    key: Annotated[bytes, AtMost(KEY_BYTES)] = b""
    hosts: Hosts = ()
    """Further hosts, to dial at the same port, such as that in its local network."""


_peer_of = attrgetter("peer")
_machine_of = attrgetter("machine")


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of one group at one instant, as its master announces them.

    ``version`` grows with each change of the run. ``view`` is the group's newest view, and
    ``members`` its ring in order. ``open_views`` has the numbers of all views of the group in which
    the master may still decide operations. No other view can open again.
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
    """Term of the master that opened ``view``; operations of the view keep it."""
    updates: int = field(default=0, compare=False)
    """Number of closed rounds of ``update_topology``, including the round that made this change."""
    algorithms: AlgorithmTable = AlgorithmTable()
    """Algorithm table of ``view``."""
    newest_peer: PeerId = field(default=NOBODY, compare=False)
    """The highest id that the master has given out."""
    pending: tuple[PeerId, ...] = field(default=(), compare=False)
    """Newcomers of the group, in order of id."""

    @property
    def ring(self) -> tuple[PeerId, ...]:
        """Ids of the members in ring order. The rank of a member is its index."""
        return tuple(map(_peer_of, self.members))

    def has_left(self, peer: PeerId) -> bool:
        """Whether an id is that of a former peer, or of a peer of another group."""
        return peer <= self.newest_peer and peer not in self.pending and peer not in self.ring

    @property
    def is_near(self) -> bool:
        """Whether all members share the memory of one machine."""
        return self.members[0].machine > 0 and len(set(map(_machine_of, self.members))) == 1
