"""The interface between the runtime and the network, which every transport implements.

A connection is a bidirectional byte stream. It delivers bytes in order until it ends, and loses no
byte in between. The runtime relies on two rules:

* **Placement on receive.** Before *every* read the connection asks its receiver for memory and
  reads straight into it. The connection uses this memory for one read only, so the receiver may
  return other memory for the next one.
* **No buffering on send.** :meth:`Connection.send` passes on the bytes that the network accepts
  right now, and queues nothing. The caller keeps the rest, and sends it later.

All methods and callbacks run on the transport's loop. A connection never calls its receiver from
within one of its own methods.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pccl.protocol.errors import LinkError, LocalProtocolError, RemoteProtocolError
from pccl.protocol.guards.source_shares import PortLimits
from pccl.transports.announcement import Announcement

SILENCE_MAX_S = 30
"""How long the other side's kernel may acknowledge nothing before this kernel ends the connection.
It is longer than all deadlines of the protocol, which act first. A short limit would hit
applications that hold the interpreter lock, because these keep their TCP windows closed."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one side of a connection: a host (name or IP address) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True)
class Traffic:
    """Bytes that connections have carried, since the process began."""

    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PathMeasure:
    """Latency and speed of a connection's path, measured on earlier traffic; 0 means unknown.

    Attributes:
        rtt_ns: shortest round-trip time.
        bytes_per_s: rate at which the other side received the most recent data.
        is_lower_bound: whether the path may be faster, because the sender had too little to send.
        unacknowledged: packets on the way that the other system has not acknowledged.
        retransmits: how often the oldest of them was sent again without an answer.
        probes: unanswered probes of a receiver without room, which a stopped process leaves full.
        ack_ago_ms: time since the other system acknowledged anything.
        limit_bytes_per_s: what this process lets all its connections send together, this one
            included; 0: as much as they can.
        segment_bytes: the largest segment that it sends; 0: the system does not tell.
        acked_bytes: bytes that the other system has acknowledged.
        arrived_bytes: bytes that have arrived.
        busy_ns: time in which there were bytes to send or to acknowledge; 0: unknown.
    """

    rtt_ns: int
    bytes_per_s: int
    is_lower_bound: bool
    unacknowledged: int = 0
    retransmits: int = 0
    probes: int = 0
    ack_ago_ms: int = 0
    limit_bytes_per_s: int = 0
    segment_bytes: int = 0
    acked_bytes: int = 0
    arrived_bytes: int = 0
    busy_ns: int = 0


class Timers(Protocol):
    """What connections need of a clock."""

    def now_ns(self) -> int:
        """Return the current time in nanoseconds."""
        ...

    def call_at_ns(self, when_ns: int, callback: Callable[..., None], *args: object) -> object:
        """Call ``callback`` at ``when_ns``, or as soon as possible if that has passed."""
        ...


class Receiver(Protocol):
    """The callbacks of a connection, which the runtime implements."""

    def get_buffer(self) -> memoryview:
        """Return writable, non-empty, contiguous memory of bytes for the next read.

        After a read that finds no data, the connection does not call ``buffer_updated``.
        """
        ...

    def buffer_updated(self, nbytes: int) -> None:
        """Process the ``nbytes`` (at least 1) that were read into the start of the last buffer.

        This may raise RemoteProtocolError: the connection then aborts, and calls
        ``connection_lost`` with that error. Any other exception, from any method, is a bug: the
        connection calls the loop's exception handler, and aborts.
        """
        ...

    def writable(self) -> None:
        """Send again: the network accepts bytes. Called once per ``notify_writable``."""
        ...

    def connection_lost(self, error: Exception | None) -> None:
        """Handle the end of the connection; called exactly once, as the last callback.

        ``error`` is None if this process called ``close`` or ``abort``. Otherwise it is a
        LinkError (the other side closed, or the network failed), the RemoteProtocolError that
        ``buffer_updated`` raised, or a LocalProtocolError (the receiver raised another error).
        """
        ...


def receiver_failure(remote: Address, error: Exception) -> RemoteProtocolError | LocalProtocolError:
    """Return the error for ``connection_lost`` after a receiver raised ``error``."""
    if isinstance(error, RemoteProtocolError):
        return error
    reason = f"pccl failed to process data from {remote}; please report this bug: {error!r}"
    bug = LocalProtocolError(func="connection", reason=reason)
    bug.__cause__ = error
    return bug


class Connection(Protocol):
    """One byte stream to one other process."""

    @property
    def remote(self) -> Address:
        """The address of the other side, as this host sees it."""
        ...

    @property
    def local(self) -> Address:
        """The address of this side."""
        ...

    @property
    def congestion(self) -> str:
        """The kernel's name of the congestion control in use; empty if there is none."""
        ...

    def measure(self) -> PathMeasure | None:
        """Return the measured latency and speed, without sending anything; None: unknown."""
        ...

    def start(self, receiver: Receiver) -> None:
        """Begin to read. Before this call, only ``close`` and ``abort`` may be called.

        After an earlier ``close`` or ``abort``, no receiver is called. ``buffer_updated`` and
        ``writable`` may call ``start`` again: the new receiver then gets all later callbacks,
        ``connection_lost`` included.
        """
        ...

    def pause_reading(self) -> None:
        """Stop reading until ``resume_reading``; ``buffer_updated`` is not called meanwhile.

        The connection may notice a network failure only after the pause. Idempotent.
        """
        ...

    def resume_reading(self) -> None:
        """End a pause; a later turn of the loop reads the data that has arrived. Idempotent."""
        ...

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Pass as many bytes as possible to the network; return the number of accepted bytes.

        Returns 0 when the network is full (then use ``notify_writable``) and when the connection
        has already ended (then ``connection_lost`` follows).
        """
        ...

    def notify_writable(self) -> None:
        """Ask for one call of ``Receiver.writable`` as soon as ``send`` can accept bytes.

        Another call before ``writable`` has no further effect.
        """
        ...

    def close(self) -> None:
        """End the stream; bytes that ``send`` accepted still arrive. Idempotent.

        This side ends at once: it discards data that still arrives, and calls
        ``connection_lost`` without waiting for the other side.
        """
        ...

    def abort(self) -> None:
        """End the stream at once; bytes in transit may be lost. Idempotent."""
        ...


class Listener(Protocol):
    """A listening port."""

    @property
    def address(self) -> Address:
        """The listening address, with the actual port number."""
        ...

    def close(self) -> None:
        """Stop accepting connections. Connections that were accepted stay open."""
        ...


class Lease(Protocol):
    """Lets other processes of this machine pull memory of this process, until it is revoked."""

    def announce(self, views: Sequence[memoryview]) -> bytes:
        """Return the payload of an ANNOUNCE for a segment in ``views``, at most ``PARTS_MAX``.

        The memory must stay valid and unchanged until it was pulled, or the lease is revoked.
        """
        ...

    def revoke(self) -> None:
        """Withdraw all announcements: a pull that ends after this call counts nothing."""
        ...

    def release(self) -> None:
        """Revoke the lease, and give it back; it must not be used again."""
        ...


MACHINES = 65535
"""Number of values of :attr:`LocalMemory.machine`."""


class LocalMemory(Protocol):
    """The memory of this process, for others to pull, and the memory of others, to pull from."""

    @property
    def ancestry(self) -> Sequence[int]:
        """Id of this process, of its parent, and so on."""
        ...

    @property
    def machine(self) -> int:
        """Hash of machine and user, from 1 to ``MACHINES``; 0: no memory is shared.

        Processes that can share memory have equal hashes; equal hashes prove nothing.
        """
        ...

    @property
    def pull_bytes_min(self) -> int:
        """Length of the shortest segment that is pulled: a shorter one is sent in less time."""
        ...

    def reaches(self, connection: Connection) -> bool:
        """Whether the other side of ``connection`` may be a process of this machine."""
        ...

    def holds(self, pid: int, connection: Connection) -> bool:
        """Whether process ``pid`` itself is the other side of ``connection``."""
        ...

    def lease(self) -> Lease:
        """Return a lease for the memory of one operation."""
        ...

    def show(self, proof: bytes) -> Shown:
        """Store ``proof`` in the memory of this process, where the reader can find it."""
        ...

    @property
    def scope(self) -> int | None:
        """The ptrace scope of Linux's security module Yama; None: the system has no Yama."""
        ...

    @property
    def named(self) -> int | None:
        """The process that may read the memory of this one under Yama; None: no process."""
        ...

    def name(self, pid: int) -> None:
        """Let this process and its descendants read the memory of this one under Yama.

        It replaces the process named before. ``pid`` may be ``pccl.topology.tracer.ANYONE``.
        """
        ...

    def prove(self, pid: int, address: int, proof: bytes) -> bool:
        """Whether ``proof`` is at ``address`` in process ``pid``, whose memory can be read."""
        ...

    def pull(self, pid: int, announcement: Announcement, into: Sequence[memoryview]) -> bool:
        """Copy an announced segment of process ``pid`` into memory of the same total length.

        Returns:
            False if the segment was withdrawn; ``into`` then has undefined bytes.

        Raises:
            OSError: the memory cannot be read.
        """
        ...


class Shown(Protocol):
    """Bytes that :meth:`LocalMemory.show` keeps in memory for as long as this object exists."""

    @property
    def place(self) -> tuple[int, int]:
        """Id of this process, and address of the bytes."""
        ...


class Transport(Protocol):
    """The network as one host uses it: it listens and dials."""

    @property
    def memory(self) -> LocalMemory | None:
        """The memory that processes of this machine share; None: they use connections only."""
        ...

    @property
    def port_limits(self) -> PortLimits:
        """The number of connections of each kind that a listening port may hold."""
        ...

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """Listen on ``address`` (port 0: any free port).

        ``on_connection`` gets each accepted connection, and starts or closes it, then or later.

        Raises:
            LinkError: the address cannot be used; the reason says why.
        """
        ...

    def hosts(self, address: Address) -> tuple[str, ...]:
        """Return the addresses of this machine at which others may reach a port of it.

        ``address``: where the port listens. Empty if that has a host, which says all.
        """
        ...

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool] = lambda _: True,
        hosts: Sequence[str] = (),
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to ``address``, or to its port at a further host: to the first that answers.

        Args:
            address: address of the other side; a host name is looked up.
            timeout_s: time limit for looking up and connecting.
            may_dial: called with each IP address that was found; True if it may be dialled.
            hosts: further hosts of the other side.
            segment_bytes: the largest segment of the connection, in both directions; 0: any.

        Raises:
            LinkError: no process listens there, or none answered within ``timeout_s``.
        """
        ...

    async def punch(
        self,
        local: Address,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool],
        segment_bytes: int = 0,
    ) -> Connection:
        """Connect to a process that dials this one at the same time, each behind a translator.

        Both packets of a simultaneous open (RFC 9293, section 3.5) pass the translators, because
        each looks like an answer to the other; see RFC 5128, section 3.4.

        Args:
            local: address that another connection of this process has: the translator gave it the
                port that the other process dials.
            address: the address of the other process, as seen from outside.
            timeout_s: time limit.
            may_dial: as in ``dial``.
            segment_bytes: as in ``dial``.

        Raises:
            LinkError: the two have not met within ``timeout_s``.
        """
        ...


__all__ = [
    "Address",
    "Connection",
    "Lease",
    "LinkError",
    "Listener",
    "LocalMemory",
    "PathMeasure",
    "PortLimits",
    "Receiver",
    "Shown",
    "Timers",
    "Transport",
    "receiver_failure",
]
