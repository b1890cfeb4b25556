"""``HeaderReceiver``: receives the header that a named proxy sends in front of a connection."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.errors import LinkError, PCCLError
from pccl.protocol.handshake.proxy_header import FIXED_BYTES, ProxyHeader
from pccl.protocol.limits import PROXY_FIELDS_BYTES_MAX
from pccl.runtime.clock import Clock
from pccl.transports.base import Address, Connection
from pccl.transports.relay import RelayedConnection


class HeaderReceiver:
    """Receives one header. It asks the network for its bytes only, and for none behind them.

    Args:
        connection: a connection from a named proxy that is not started; this object starts it.
        clock: gives the time.
        deadline_ns: time by which the header must be complete.
        on_header: called with the connection, whose other side is the source that the header names
            from now on; must start or end the connection.
        on_failed: called with the error if there is no good header; ``dismiss`` does not call it.
    """

    def __init__(
        self,
        connection: Connection,
        clock: Clock,
        deadline_ns: int,
        on_header: Callable[[Connection], None],
        on_failed: Callable[[PCCLError], None],
    ) -> None:
        self._connection = connection
        self._header = ProxyHeader(connection.remote.host)
        self._buffer = memoryview(bytearray(max(FIXED_BYTES, PROXY_FIELDS_BYTES_MAX)))
        self._on_header = on_header
        self._on_failed: Callable[[PCCLError], None] | None = on_failed
        self._heard = False
        self.was_probe = False
        """Whether the proxy disconnected without sending a byte."""
        self._timer = clock.call_at_ns(deadline_ns, self._overdue)
        connection.start(self)

    def dismiss(self) -> None:
        """End the connection at once, without calling a callback."""
        self._on_failed = None
        self._timer.cancel()
        self._connection.abort()

    def _overdue(self) -> None:
        reason = "the proxy did not complete the PROXY header in time"
        self._fail(LinkError(func="handshake", reason=reason))
        self._connection.abort()

    def _fail(self, error: PCCLError) -> None:
        self._timer.cancel()
        report, self._on_failed = self._on_failed, None
        if report is not None:
            report(error)

    # -- what the connection calls ---------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return memory for exactly the next bytes of the header."""
        return self._buffer[: self._header.awaited_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Continue with the header; when it is complete, pass on the connection."""
        self._heard = True
        self._header.receive(self._buffer[:nbytes])
        if not self._header.awaited_bytes:
            self._timer.cancel()
            source, connection = self._header.source, self._connection
            self._on_header(
                connection if source is None else RelayedConnection(connection, Address(*source))
            )

    def writable(self) -> None:
        """Do nothing: nothing is sent before the header."""

    def connection_lost(self, error: Exception | None) -> None:
        """Report that there was no header, and note whether the proxy sent nothing."""
        self.was_probe = not self._heard
        if isinstance(error, PCCLError):
            self._fail(error)
        else:
            reason = str(error or "this side closed the connection")
            self._fail(LinkError(func="handshake", reason=reason))
