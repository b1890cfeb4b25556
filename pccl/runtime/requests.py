"""What the API hands to the engine, and what it gets back."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from pccl.protocol.limits import Timing
from pccl.protocol.types import Descriptor, OperationId, PeerId
from pccl.runtime.operand import Operand
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


@dataclass(frozen=True, slots=True)
class ReduceReport:
    """A committed operation as the engine knows it."""

    operation: OperationId
    contributors: tuple[PeerId, ...]
    tx_bytes: int
    rx_bytes: int
    attempts: int = 1
    """How often it was begun, the last time included."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a caller's time budget runs out."""

    when_ns: int
    budget_s: float
