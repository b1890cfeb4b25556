"""The vocabulary of the protocol: ids, enums and the value types that rooms hand to each other.

Nothing here has behaviour beyond trivial derivations; everything is immutable and compares by
value, so that machines, simulator and tests can pass it around freely.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

PeerId = NewType("PeerId", int)
"""One incarnation of one process in a run. Ids grow; whoever joins later has the larger one."""

NS_PER_S = 1_000_000_000


class ReduceOp(enum.IntEnum):
    """How the contributions of all members become one value."""

    SUM = 0
    AVG = 1


class DataType(enum.IntEnum):
    """Element types that collectives carry, with their size in bytes."""

    INT32 = 5
    INT64 = 7
    FLOAT = 10
    DOUBLE = 11

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return 4 if self in (DataType.INT32, DataType.FLOAT) else 8


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


class AbortCause(enum.IntEnum):
    """Why an operation ended without a result. Each maps to one error for the caller."""

    MEMBER_LOST = 1
    VIEW_CLOSED = 2
    WITHDRAWN = 3
    DESCRIPTOR_MISMATCH = 4
    DIGEST_MISMATCH = 5


@dataclass(frozen=True, slots=True, order=True)
class RoundId:
    """One joint decision: the n-th of its kind in the run (n counts up from 0)."""

    kind: RoundKind
    n: int


@dataclass(frozen=True, slots=True, order=True)
class OperationId:
    """One collective. Every member derives it locally: the n-th use of ``tag`` in ``view``."""

    term: int
    group: int
    view: int
    tag: int
    n: int

    def __str__(self) -> str:
        return f"t{self.term}/g{self.group}/v{self.view}/tag{self.tag}#{self.n}"


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What one member asked for; all members of an operation must ask for the same."""

    dtype: DataType
    op: ReduceOp
    count: int

    def __str__(self) -> str:
        return f"{self.op.name} of {self.count} x {self.dtype.name}"


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

    @property
    def ring(self) -> tuple[PeerId, ...]:
        """The members' ids in ring order; a member's rank is its index here."""
        return tuple(member.peer for member in self.members)
