"""Control messages on one connection, after its handshake; the master and the peers use this class.

The stream decodes strictly, and bounds both directions. It reads large amounts of data in parts;
after each part, other connections have their turn. It resets the connection if the other side lets
unread messages pile up, or does not read the last messages of a closed connection in time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pccl.protocol.checksum import DamagedData
from pccl.protocol.codec import StreamDecoder, encode
from pccl.protocol.errors import PCCLError, RemoteProtocolError
from pccl.protocol.limits import LINGER_S, MESSAGE_COST_BYTES, TURN_BYTES_MAX
from pccl.protocol.messages import Message
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock, Timer
from pccl.transports.base import Connection, Traffic
from pccl.transports.sealed import DamagedThere

_log = logging.getLogger("pccl.link")

UNSENT_BYTES_MAX = 8 << 20
"""Size limit of the messages that one control connection has queued.

It holds eight of the largest messages: far more than a working reader leaves unread."""


class ControlStream:
    """The receiver of a control connection.

    Args:
        connection: the connection; the stream starts it.
        on_message: called with each decoded message.
        on_closed: called once with the reason; not after ``close`` of this side.
        clock: gives the time.
        bytes_max: returns how large a message of a type may be now.
        spend: called with the cost of each read in bytes; returns how long to pause, in ns. None:
            reads cost nothing.
        farewell: message that the stream sends before it closes because of damaged data.
        log: writes log lines about errors of the other side.
        traffic: counts the bytes; None: a new count.

    Attributes:
        was_damaged: whether the stream closed because of damaged data.
    """

    def __init__(
        self,
        connection: Connection,
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
        clock: Clock,
        bytes_max: Callable[[type[Message]], int],
        *,
        spend: Callable[[int], int] | None = None,
        farewell: Message | None = None,
        log: Callable[..., None] = _log.log,
        traffic: Traffic | None = None,
    ) -> None:
        self.was_damaged = False
        self.connection = connection
        self._on_message = on_message
        self._on_closed: Callable[[str], None] | None = on_closed
        self._farewell = farewell
        self._log = log
        self._traffic = traffic if traffic is not None else Traffic()
        self._clock = clock
        self._decoder = StreamDecoder(bytes_max)
        self._spend = spend
        self._buffer = memoryview(bytearray(TURN_BYTES_MAX))
        self._pause: Timer | None = None
        self._cut_off: Timer | None = None
        """Timer that resets a closed connection whose queued messages are not sent in time."""
        self._unsent = bytearray()
        self._waiting = False
        self._closing = False
        connection.start(self)

    def send(self, message: Message) -> None:
        """Queue a message. If too many bytes are queued, reset the connection."""
        if self._closing:
            return
        self._unsent += encode(message)
        if len(self._unsent) > UNSENT_BYTES_MAX:
            reason = "the other side does not read its control messages"
            self._complain(reason)
            self._end(reason)
            self.connection.abort()
            return
        if not self._waiting:
            self._flush()

    def close(self) -> None:
        """Close when the network has accepted all queued messages; report nothing.

        The connection is reset if the other side does not read the messages within ``LINGER_S``.
        """
        self._on_closed = None
        self._closing = True
        if not self._unsent:
            self._stop_timers()
            self.connection.close()
        elif self._cut_off is None:
            # A pause still ends: only a read shows that the other side is gone.
            when_ns = self._clock.now_ns() + round(LINGER_S * NS_PER_S)
            self._cut_off = self._clock.call_at_ns(when_ns, self.connection.abort)

    def read_on(self) -> bool:
        """End a pause early, and read again. Return whether there was a pause."""
        if self._pause is None:
            return False
        self._pause.cancel()
        self._go_on()
        return True

    def _stop_timers(self) -> None:
        for timer in (self._pause, self._cut_off):
            if timer is not None:
                timer.cancel()
        self._pause = self._cut_off = None

    def abort(self) -> None:
        """Close the connection at once; report nothing."""
        self._on_closed = None
        self._closing = True
        self.connection.abort()

    def _flush(self) -> None:
        while self._unsent:
            taken = self.connection.send([self._unsent])
            self._traffic.sent_bytes += taken
            del self._unsent[:taken]
            if self._unsent:
                self._waiting = True
                self.connection.notify_writable()
                return
        if self._closing:
            self._stop_timers()
            self.connection.close()

    def _part(self, error: DamagedData) -> None:
        """Send the farewell and close, because received data can no longer be trusted."""
        self._complain(error.reason)
        self.was_damaged = True
        if self._farewell is not None:
            self.send(self._farewell)
        report = self._on_closed
        self.close()
        if report is not None:
            report(error.reason)

    def _complain(self, reason: str) -> None:
        text = "closed a control connection with %s: %s"
        self._log(logging.WARNING, text, self.connection.remote, reason)

    def _end(self, reason: str) -> None:
        report, self._on_closed = self._on_closed, None
        self._closing = True
        self._stop_timers()
        self._unsent.clear()
        if report is not None:
            report(reason)

    # -- what the connection calls ---------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return the one buffer, which every read fills from its start."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on the decoded messages; pause after much data, close after damaged data."""
        self._traffic.received_bytes += nbytes
        if self._on_closed is None:
            return
        cost = nbytes
        try:
            for message in self._decoder.feed(self._buffer[:nbytes]):
                cost += MESSAGE_COST_BYTES
                self._on_message(message)
                if self._on_closed is None:
                    return
        except DamagedData as error:
            self._part(error)
            return
        wait_ns = self._spend(cost) if self._spend is not None else 0
        if (wait_ns or nbytes == TURN_BYTES_MAX) and self._pause is None:
            # Much data came: other connections and the timers have their turn first.
            self.connection.pause_reading()
            when_ns = self._clock.now_ns() + wait_ns
            self._pause = self._clock.call_at_ns(when_ns, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self.connection.resume_reading()

    def writable(self) -> None:
        """Send queued messages."""
        self._waiting = False
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Report why the connection ended, unless this side has closed it."""
        if isinstance(error, RemoteProtocolError):
            self._complain(error.reason)
        self.was_damaged |= isinstance(error, DamagedData | DamagedThere)
        self._end(error.reason if isinstance(error, PCCLError) else str(error or "closed"))
