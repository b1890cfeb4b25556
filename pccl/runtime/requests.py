"""Requests from the API to the engine, and the results that the engine returns."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from pccl.collectives.residual import Residual
from pccl.collectives.weighting import total_weight
from pccl.machines.peer.events import ReduceCall, ReduceResult, StoreCall, SyncResult
from pccl.protocol.handshake.keys import CURVE25519, Curves
from pccl.protocol.limits import EAGER_BYTES_MAX, Timing
from pccl.protocol.types import Quorum, RoundKind
from pccl.runtime.collective.operand import Operand
from pccl.runtime.control.greeting import leaves_machine
from pccl.runtime.state.progress import SyncProgress
from pccl.runtime.state.running_prefetch import PrefetchRequest
from pccl.transports.base import Address, Connection


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Settings of a peer."""

    timing: Timing = field(default_factory=Timing)
    listen: Address = field(default_factory=lambda: Address("0.0.0.0", 0))
    """Address of the peer's one port; port 0: any free port."""
    ports: tuple[int, int] | None = None
    """Ports to try instead of the one in ``listen``, from first to last, both included."""
    advertise_host: str = ""
    """Host that other peers dial; empty: the address from which the master sees the peer."""
    advertise_port: int = 0
    """Port that other peers dial; 0: the port that the peer listens on."""
    interface: str = ""
    """Network interface at which the peer listens and from which it dials; empty: any."""
    name: str = ""
    """Name of the peer, for people."""
    token: bytes | None = None
    """Secret of the run, if it has one."""
    other_masters: tuple[Address, ...] = ()
    """Masters to try if the first one does not answer."""
    lanes: int = 0
    """Connections per link; 0: the setting of the other side, or else the default."""
    upload_bytes_per_s_max: int | None = None
    """What the peer sends to other machines, at most; None: no limit."""
    segment_bytes: int | None = None
    """Fixed segment size for tests, equal on all members; None: chosen by tensor and world size."""
    eager_bytes_max: int = EAGER_BYTES_MAX
    """Largest tensor whose data the peer sends before its operation starts; 0: none."""
    pulls: bool = True
    """Whether to pull segments from processes of this machine, and to let them pull."""
    pulled_by_anyone: bool = False
    """Whether every process of the same user may read this one's memory, if the system asks."""
    callers_blocked: Callable[[], bool] | None = None
    """Whether every caller of this peer waits in a call without an outcome; None: the work that
    makes the calls is the only caller."""
    random_bytes: Callable[[int], bytes] = os.urandom
    """Source of secrets; must be unpredictable outside simulation."""
    curves: Curves = CURVE25519
    """Computes with keys."""
    encrypts: Callable[[Connection], bool] = leaves_machine
    """Whether this side wants a connection to be encrypted."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """A request to join the run."""

    attempts: int = 5
    """How many times to try to reach a master."""
    min_peers: int = 1
    """How many members the run must have, this one included."""
    prefetch: PrefetchRequest | None = None
    """Shared state to fetch before the admission, if any."""
    timeout_s: float | None = None
    """Time limit of the whole call, as in all requests; None: no limit."""

    @property
    def on_progress(self) -> Callable[[SyncProgress], None] | None:
        """Callback for the progress of the prefetch; None: no callback."""
        return self.prefetch.on_progress if self.prefetch is not None else None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request for a joint call of all members of the run."""

    kind: RoundKind
    timeout_s: float | None = None
    quorum: Quorum | None = None
    """When the call continues without late members; None: never."""


@dataclass(frozen=True, slots=True)
class StoreQuestion:
    """A question to the run's store. Many keys are asked for in several calls."""

    asks: StoreCall
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReduceRequest:
    """A request for one operation of the group: a reduce, a broadcast or a barrier."""

    operand: Operand | None
    """The caller's memory; None for a barrier."""
    asks: ReduceCall
    """Event for the machine. It gets its number when the call begins."""
    open_residual: Callable[[], Residual] | None = None
    """Opens the residual of a reduce with error feedback; the call drops it at its end. Raises
    ValueError if another call uses the residual."""

    observable: bool = False
    """Whether newcomers may fetch the result of the reduce."""
    retry: bool = False
    """Whether to retry with the remaining members after one was lost or withdrew."""
    timeout_s: float | None = None
    """Time limit of all attempts together; None: no limit."""

    @property
    def tag(self) -> int:
        """Tag of the operation."""
        return self.asks.tag


@dataclass(frozen=True, slots=True)
class ReduceManyRequest:
    """A request for several reduces, each of which is retried after a loss."""

    requests: tuple[ReduceRequest, ...]
    max_in_flight: int
    """How many reduces run at a time."""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReduceInfo:
    """The report of a completed reduce or broadcast.

    Attributes:
        local_world_size: number of members of the own group whose values are in the result.
        tx_bytes: payload bytes that this peer sent.
        rx_bytes: payload bytes that this peer received.
        contributors: ids of the members whose values are in the result, in ring order. For several
            tensors, this names the contributors of the last tensor in the call.
        view: number of the view in which the operation ran.
        attempts: how many operations it took; more than one after losses.
        algorithm: path of the values: ``ring``, ``star`` or ``mesh``; a broadcast uses the ring.
            For several tensors, this is the path of the last tensor in the call.
        compression: ratio of the payload without quantization to the payload that was sent.
        quantization_error: relative L2 error of all values that this peer rounded; for several
            tensors, the largest.
        weights: weights in a weighted average, ordered as ``contributors``; otherwise empty.
        excluded: ids of the contributors that a guard gave weight 0.
        took_part: whether the values of this peer are in the result. False: this peer called too
            late for a ``quorum``, and its input is intact.
        outcome: result of the operation (for the library).
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
    excluded: tuple[int, ...] = field(default=(), kw_only=True)
    took_part: bool = field(default=True, kw_only=True)
    outcome: ReduceResult | None = field(default=None, repr=False, compare=False, kw_only=True)

    @property
    def total_weight(self) -> float | None:
        """Sum of ``weights``; None if the operation was no weighted average."""
        return total_weight(self.weights)


@dataclass(frozen=True, slots=True)
class SharedStateSyncInfo:
    """The report of a completed synchronization.

    Attributes:
        tx_bytes: bytes of tensors that other members fetched from this peer.
        rx_bytes: bytes of tensors that this peer fetched.
        revision: revision that all members have now.
        members: ids of the participating members, in ring order.
        attempts: how many operations it took; more than one after losses.
        wrong_pieces: number of pieces that arrived with wrong bytes, and were fetched again.
        outcome: result of the operation (for the library).
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
    """The time at which a call's time budget runs out."""

    when_ns: int
    budget_s: float
