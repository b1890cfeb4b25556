"""Control messages on one connection, after its handshake; the master's and the peers' side use it.

Decodes strictly, and bounds both directions. From a peer that sends much, a part is read at a time;
after each part all other connections have their turn. A peer that lets unread messages pile up is
cut off. So is a peer that does not read the last messages of a closed connection in time.
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
from pccl.transports.base import Connection

_log = logging.getLogger("pccl.link")

UNSENT_BYTES_MAX = 8 << 20
"""Messages that the other side of a control connection has not read.

Eight of the largest messages: far more than a reader in working order lets pile up."""


class ControlStream:
    """The receiver of a control connection.

    Args:
        connection: it is started here.
        on_message: called with each decoded message.
        on_closed: called once with the reason; not after our own ``close``.
        clock: time.
        bytes_max: how large a message of a type may be now.
        spend: told what was read, in bytes; returns for how long nothing more is to be read.
        farewell: said before the connection is closed because what came was damaged.
        log: takes the lines about what the other side has done wrong.

    Attributes:
        was_damaged: whether that is why it was closed.
    """

    def __init__(
        self,
        connection: Connection,
        on_message: Callable[[Message], None],
        on_closed: Callable[[str], None],
        clock: Clock,
        bytes_max: Callable[[type[Message]], int],
        *,
        spend: Callable[[int], int] = lambda cost: 0,
        farewell: Message | None = None,
        log: Callable[..., None] = _log.log,
    ) -> None:
        self.was_damaged = False
        self.connection = connection
        self._on_message = on_message
        self._on_closed: Callable[[str], None] | None = on_closed
        self._farewell = farewell
        self._log = log
        self._clock = clock
        self._decoder = StreamDecoder(bytes_max)
        self._spend = spend
        self._buffer = memoryview(bytearray(TURN_BYTES_MAX))
        self._pause: Timer | None = None
        self._cut_off: Timer | None = None
        """Runs from ``close`` until everything queued is handed to the network."""
        self._unsent = bytearray()
        self._waiting = False
        self._closing = False
        connection.start(self)

    def send(self, message: Message) -> None:
        """Queue a message."""
        if self._closing:
            return
        self._unsent += encode(message)
        if len(self._unsent) > UNSENT_BYTES_MAX:
            reason = "it does not read its control messages"
            self._complain(reason)
            self._end(reason)
            self.connection.abort()
            return
        if not self._waiting:
            self._flush()

    def close(self) -> None:
        """Close once everything queued is handed to the network; nothing is reported.

        The connection is reset if the other side does not read it within ``LINGER_S``.
        """
        self._on_closed = None
        self._closing = True
        if not self._unsent:
            self._stop_timers()
            self.connection.close()
        elif self._cut_off is None:
            # A pause goes on to its end: only a read shows that the other side is gone.
            when_ns = self._clock.now_ns() + round(LINGER_S * NS_PER_S)
            self._cut_off = self._clock.call_at_ns(when_ns, self.connection.abort)

    def read_on(self) -> bool:
        """End a pause early, and read again; return whether there was a pause."""
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
        """End at once; nothing is reported."""
        self._on_closed = None
        self._closing = True
        self.connection.abort()

    def _flush(self) -> None:
        while self._unsent:
            taken = self.connection.send([self._unsent])
            del self._unsent[:taken]
            if self._unsent:
                self._waiting = True
                self.connection.notify_writable()
                return
        if self._closing:
            self._stop_timers()
            self.connection.close()

    def _part(self, error: DamagedData) -> None:
        """What comes cannot be trusted any more; what goes can."""
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
        """The one buffer that every read fills from its start."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Pass on the decoded messages; pause after much data, close after damaged data."""
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
        wait_ns = self._spend(cost)
        if (wait_ns or nbytes == TURN_BYTES_MAX) and self._pause is None:
            # It sends much: it is the turn of others and of the timers.
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
        """Report why it ended, unless this side has closed it."""
        if isinstance(error, RemoteProtocolError):
            self._complain(error.reason)
        self._end(error.reason if isinstance(error, PCCLError) else str(error or "closed"))
