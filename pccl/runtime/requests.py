"""What the API hands to the engine, and what it gets back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from pccl.collectives.residual import Residual
from pccl.collectives.weighting import total_weight
from pccl.machines.peer.events import ReduceCall, ReduceResult, SyncResult
from pccl.protocol.limits import EAGER_BYTES_MAX, Timing
from pccl.protocol.types import RoundKind
from pccl.runtime.collective.memory import Range
from pccl.runtime.collective.operand import Operand
from pccl.runtime.state.progress import SyncProgress
from pccl.runtime.state.running_prefetch import PrefetchRequest
from pccl.transports.base import Address


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What a peer may be told."""

    timing: Timing = field(default_factory=Timing)
    listen: Address = field(default_factory=lambda: Address("0.0.0.0", 0))
    """Where its one port listens; port 0: any free one."""
    ports: tuple[int, int] | None = None
    """Listen on the first free port from the first to the second one (which counts), instead."""
    advertise_host: str = ""
    """The host that others are told; empty: the one that the master sees."""
    advertise_port: int = 0
    """The port that others are told; 0: the one where it listens."""
    token: bytes | None = None
    """The run's secret, if it has one."""
    other_masters: tuple[Address, ...] = ()
    """Where to look for a master if the first one is not there, or is gone."""
    lanes: int = 0
    """Connections per link; 0: what the other side was told, or the usual number."""
    segment_bytes: int | None = None
    """Fixed segment size (tests); None: chosen. All members must agree."""
    eager_bytes_max: int = EAGER_BYTES_MAX
    """The largest tensor whose data goes ahead of the start of its operation; 0: none."""
    callers_blocked: Callable[[], bool] | None = None
    """Whether everybody who makes calls here is inside one; None: whenever a call is open."""
    random_bytes: Callable[[int], bytes] = os.urandom
    """Source of nonces; must be unpredictable outside simulation."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A caller wants to join the run."""

    attempts: int = 5
    """How often to try to reach a master."""
    min_peers: int = 1
    """How many members the run must have with this one."""
    prefetch: PrefetchRequest | None = None
    """What is fetched before the admission."""
    timeout_s: float | None = None
    """Budget of the whole call, as of all requests; None: for ever."""

    @property
    def on_progress(self) -> Callable[[SyncProgress], None] | None:
        """Told how far the prefetch is."""
        return self.prefetch.on_progress if self.prefetch is not None else None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A caller makes a joint call of all members of the run."""

    kind: RoundKind
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReduceRequest:
    """A caller wants one operation of his group: a reduce, a broadcast, a barrier."""

    operand: Operand | None
    """The memory; None for a barrier."""
    asks: ReduceCall
    """What the machine is told. It gets its number when the call begins."""
    open_residual: Callable[[], Residual] | None = None
    """Of a reduce with error feedback; the call drops it at its end. Raises ValueError if another
    one uses it."""

    observable: bool = False
    """Whether newcomers may fetch its result."""
    retry: bool = False
    """Try again, with the members that are left, when one was lost or withdrew."""
    timeout_s: float | None = None
    """Budget of all attempts together."""

    @property
    def tag(self) -> int:
        """Of the operation."""
        return self.asks.tag

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The memory that is lent."""
        return self.operand.ranges if self.operand is not None else ()


@dataclass(frozen=True, slots=True)
class ReduceManyRequest:
    """A caller wants several reduces, each again until it succeeds."""

    requests: tuple[ReduceRequest, ...]
    max_in_flight: int
    """How many at a time."""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """What a reduce or a broadcast did.

    Attributes:
        local_world_size: members of the own group whose values are in the result.
        tx_bytes: payload bytes this peer sent.
        rx_bytes: payload bytes this peer received.
        contributors: ids of the members whose values are in the result, in ring order. Of several
            tensors: of the one that was reduced last.
        view: number of the view that the operation belonged to.
        attempts: how many operations it took; more than one after losses.
        algorithm: how the values travelled: ``ring``, ``star`` or ``mesh``; a broadcast goes along
            the ring. Of several tensors: of the one that was reduced last.
        compression: how many times as many bytes this peer would have sent without quantization.
        quantization_error: relative L2 error of all that this peer has rounded; of several tensors
            the largest.
        weights: of a weighted average those of the contributors, in their order; otherwise empty.
        outcome: the operation itself (for the library).
    """

    local_world_size: int
    tx_bytes: int
    rx_bytes: int
    contributors: tuple[int, ...] = ()
    view: int = 0
    attempts: int = 0
    algorithm: str = ""
    compression: float = 1.0
    quantization_error: float = 0.0
    weights: tuple[float, ...] = ()
    outcome: ReduceResult | None = field(default=None, repr=False, compare=False, kw_only=True)

    @property
    def total_weight(self) -> float | None:
        """The sum of ``weights``; None if it is no weighted average."""
        return total_weight(self.weights)


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """What a synchronization moved.

    Attributes:
        tx_bytes: bytes of tensors that other members fetched from this peer.
        rx_bytes: bytes of tensors that this peer fetched.
        revision: that all members have now.
        members: ids of those that took part, in ring order.
        attempts: how many operations it took; more than one after losses.
        wrong_pieces: that came with wrong bytes, and were fetched again.
        outcome: the operation itself (for the library).
    """

    tx_bytes: int
    rx_bytes: int
    revision: int = 0
    members: tuple[int, ...] = ()
    attempts: int = 1
    wrong_pieces: int = 0
    outcome: SyncResult | None = field(default=None, repr=False, compare=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a caller's time budget runs out."""

    when_ns: int
    budget_s: float
