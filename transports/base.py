"""The seam between the runtime and the network: what a transport must offer.

A connection is a bidirectional byte stream that delivers bytes in order or dies; it never loses
one in the middle. The two rules that everything above relies on:

* **Placement on receive.** Before *every* read the connection asks its receiver for memory and
  reads straight into it. The memory is used for that one read only and never kept, so the
  receiver may change its mind between any two reads.
* **Nothing is kept on send.** :meth:`Connection.send` takes what the network accepts right now
  and copies nothing into queues of its own; what it did not take stays the caller's business.

All methods are called on, and all callbacks come from, the loop that the transport runs on. No
callback is made from within a call that the receiver itself made into the connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pccl.protocol.errors import LinkError, LocalProtocolError, RemoteProtocolError
from pccl.protocol.guards.source_shares import PortLimits


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens or whom we are connected to: a host (name or literal) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PathMeasure:
    """What a connection knows of its path, from what has gone over it; 0 where it knows nothing.

    Attributes:
        rtt_ns: the shortest round trip.
        bytes_per_s: at which the other side took what was sent last.
        is_lower_bound: whether there was too little to send to see how fast it could be.
    """

    rtt_ns: int
    bytes_per_s: int
    is_lower_bound: bool


class Receiver(Protocol):
    """What a connection calls. Implemented above the seam."""

    def get_buffer(self) -> memoryview:
        """Return writable, non-empty, contiguous memory of bytes for the next read.

        If that read finds nothing, ``buffer_updated`` is not called and the next read asks anew.
        """
        ...

    def buffer_updated(self, nbytes: int) -> None:
        """``nbytes`` (at least 1) have been read into the start of the last buffer.

        May raise RemoteProtocolError: the connection is then aborted and ``connection_lost``
        called with that error. Any other exception, here and in the other methods, is a bug: the
        loop's exception handler is told, and the connection aborted.
        """
        ...

    def writable(self) -> None:
        """The network takes bytes again; called once after a ``notify_writable``."""
        ...

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is gone; called exactly once, and last.

        ``error`` is None after our own ``close`` or ``abort``, otherwise a LinkError (the other
        side closed, or the network failed), the RemoteProtocolError that ``buffer_updated``
        raised, or a LocalProtocolError (the receiver failed in another way).
        """
        ...


def receiver_failure(remote: Address, error: Exception) -> RemoteProtocolError | LocalProtocolError:
    """What ``connection_lost`` is called with when a receiver has raised; the latter is a bug."""
    if isinstance(error, RemoteProtocolError):
        return error
    reason = f"the receiver of {remote} failed: {error!r}"
    bug = LocalProtocolError(func="connection", reason=reason)
    bug.__cause__ = error
    return bug


class Connection(Protocol):
    """One byte stream to one other process."""

    @property
    def remote(self) -> Address:
        """The other side, as this host sees it."""
        ...

    @property
    def local(self) -> Address:
        """This side."""
        ...

    @property
    def congestion(self) -> str:
        """What paces the bytes we send: the kernel's name for it, empty if there is none."""
        ...

    def measure(self) -> PathMeasure | None:
        """What is known of the path, without sending anything; None: nothing is."""
        ...

    def start(self, receiver: Receiver) -> None:
        """Begin to read; must be called before anything but ``close`` and ``abort``.

        A connection that is ended before that calls nobody. Called again, from within
        ``buffer_updated`` or ``writable``, it hands the stream over: everything that comes after,
        ``connection_lost`` included, goes to the new receiver.
        """
        ...

    def pause_reading(self) -> None:
        """Read nothing more for now: the receiver is not called before ``resume_reading``.

        What has begun to fail may be noticed only then. Idempotent.
        """
        ...

    def resume_reading(self) -> None:
        """End a pause; what has come meanwhile is read in a later turn of the loop. Idempotent."""
        ...

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Hand as much of ``buffers`` as possible to the network; return the bytes taken.

        Takes 0 when the network is full (then use ``notify_writable``) and when the connection is
        already gone (then ``connection_lost`` is about to be called).
        """
        ...

    def notify_writable(self) -> None:
        """Ask for one call of ``Receiver.writable`` as soon as ``send`` can take bytes.

        To ask again before it came changes nothing.
        """
        ...

    def close(self) -> None:
        """End the stream in order: bytes already taken by ``send`` still arrive. Idempotent.

        For this side it is over at once: what still arrives is discarded, and
        ``connection_lost`` comes without waiting for the other side.
        """
        ...

    def abort(self) -> None:
        """End the stream at once; bytes on their way may be lost. Idempotent."""
        ...


class Listener(Protocol):
    """A listening port."""

    @property
    def address(self) -> Address:
        """Where it listens, with the real port number."""
        ...

    def close(self) -> None:
        """Stop to accept. Connections that were accepted live on."""
        ...


class Transport(Protocol):
    """A host's way into the network."""

    @property
    def port_limits(self) -> PortLimits:
        """How many connections of strangers each of its ports has room for."""
        ...

    async def listen(
        self, address: Address, on_connection: Callable[[Connection], None]
    ) -> Listener:
        """Listen on ``address`` (port 0: any free port); each accepted connection is handed over.

        ``on_connection`` starts or ends the connection, then or later.

        Raises:
            LinkError: the address cannot be used; the reason says why.
        """
        ...

    async def dial(
        self,
        address: Address,
        timeout_s: float,
        may_dial: Callable[[str], bool] = lambda _: True,
    ) -> Connection:
        """Connect to ``address``.

        Args:
            address: of the other side; a name is looked up.
            timeout_s: how long that may take.
            may_dial: whether an address that was found may be dialled.

        Raises:
            LinkError: nobody there, no way, or no answer within ``timeout_s``.
        """
        ...


__all__ = [
    "Address",
    "Connection",
    "LinkError",
    "Listener",
    "PathMeasure",
    "PortLimits",
    "Receiver",
    "Transport",
    "receiver_failure",
]
