"""What the API hands to the engine, and what it gets back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from pccl.collectives.residual import Residual
from pccl.machines.peer.events import PeerEvent, ReduceCall
from pccl.protocol.limits import EAGER_BYTES_MAX, Timing
from pccl.protocol.types import NOBODY, Algorithm, Descriptor, OperationId, PeerId
from pccl.runtime.collective.operand import Operand
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
    """Connections per link; 0: as many as the other side was told, or are found good by trying."""
    segment_bytes: int | None = None
    """Fixed segment size (tests); None: chosen. All members must agree."""
    eager_bytes_max: int = EAGER_BYTES_MAX
    """The largest tensor whose data goes ahead of the start of its operation; 0: none."""
    callers_blocked: Callable[[], bool] | None = None
    """Whether everybody who makes calls here is inside one; None: whenever a call is open."""
    random_bytes: Callable[[int], bytes] = os.urandom
    """Source of nonces; must be unpredictable outside simulation."""


@dataclass(frozen=True, slots=True)
class ReduceRequest:
    """One operation that a caller wants: what, on which memory, under which tag."""

    operand: Operand | None
    """None for a barrier."""
    descriptor: Descriptor
    tag: int
    open_residual: Callable[[], Residual] | None = None
    """Of a reduce with error feedback; the call drops it at its end. Raises ValueError if another
    one uses it."""

    observable: bool = False
    """Whether newcomers may fetch its result."""
    weight: float = 0.0
    """Of the own contribution to a weighted average."""
    begun_by: PeerId = NOBODY
    """The incarnation of this peer that began the caller's call, if this goes on with it."""

    def event(self, *, detached: bool = False) -> Callable[[int], PeerEvent]:
        """Makes the event that begins it from the number of its call."""
        what = (self.tag, self.descriptor, detached, self.begun_by, self.weight)
        return lambda call: ReduceCall(call, *what)


@dataclass(frozen=True, slots=True)
class ReduceReport:
    """A committed operation as the engine knows it."""

    operation: OperationId
    contributors: tuple[PeerId, ...]
    tx_bytes: int
    rx_bytes: int
    attempts: int = 1
    """How often it was begun, the last time included."""
    algorithm: Algorithm = Algorithm.RING
    """How its values travelled; a broadcast goes along the ring."""
    raw_tx_bytes: int = 0
    """What ``tx_bytes`` would have been without quantization."""
    quantization_error: float = 0.0
    """Relative L2 error of what this peer has rounded, the last time."""
    weights: tuple[float, ...] = ()
    """Of a weighted average those of the contributors."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a caller's time budget runs out."""

    when_ns: int
    budget_s: float
