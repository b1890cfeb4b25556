"""The results of committed operations, as their callers get them."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.protocol.guards.contributions import FlaggedContribution
from pccl.protocol.shared_state import Elected
from pccl.protocol.types import Algorithm, OperationId, PeerId


@dataclass(frozen=True, slots=True)
class ReduceResult:
    """The result of a committed operation for its caller."""

    operation: OperationId
    contributors: tuple[PeerId, ...]
    attempts: int = 1
    algorithm: Algorithm = Algorithm.RING
    weights: tuple[float, ...] = ()
    """One per contributor, for a weighted average."""
    flagged: tuple[FlaggedContribution, ...] = ()
    """The contributions that its guard does not trust."""
    took_part: bool = True
    """Whether this peer's values are in it; False: the call was late."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result of a committed synchronization for its caller."""

    operation: OperationId
    elected: Elected
    members: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The answer of the run's store for its caller."""

    done: bool
    """Whether the key was set or deleted, or all keys exist."""
    value: bytes | None
    """The value of the key now, or the count of keys; None: there is none."""
