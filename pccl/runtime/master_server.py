"""``MasterServer``: a ``MasterMachine`` on a transport. It moves messages and decides nothing."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pccl.protocol import messages as msg
from pccl.protocol.handshake import RUN_BYTES, Opening
from pccl.protocol.limits import Timing
from pccl.protocol.master import MasterMachine
from pccl.protocol.master_events import (
    Announce,
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    MasterEvent,
    Send,
    Tick,
)
from pccl.runtime.clock import Clock, Ticker, Timer
from pccl.runtime.control import ControlStream
from pccl.runtime.greeting import Credentials, Reception
from pccl.transports.base import Address, Connection, Listener, Transport

_log = logging.getLogger("pccl.master")

STRANGERS_MAX = 1024
"""Connections before the end of the handshake, and again as many that have sent no message since;
more are closed, the oldest first. So many, because a whole run may come back at once."""


class MasterServer:
    """Coordinates one run over ``transport``.

    Args:
        clock: time.
        transport: the network.
        timing: deadlines.
        random_bytes: source of run id, nonces and resume tokens.
        observer: called with each event and its effects after they were carried out (traces).
        token: what every process of the run has to know; None: anybody may come.
    """

    def __init__(
        self,
        clock: Clock,
        transport: Transport,
        timing: Timing,
        random_bytes: Callable[[int], bytes],
        observer: Callable[[MasterEvent, list[object]], None] | None = None,
        token: bytes | None = None,
    ) -> None:
        self._clock = clock
        self._transport = transport
        self._timing = timing
        self._observer = observer
        run = random_bytes(RUN_BYTES)
        self.machine = MasterMachine(timing, run, 1, random_bytes, clock.now_ns())
        self._credentials = Credentials(token, random_bytes)
        self._reception = Reception(
            clock,
            timing.ns(timing.dial_s),
            STRANGERS_MAX,
            self._credentials,
            self._identify,
            self._on_proven,
        )
        self._ticker = Ticker(clock, timing.ns(timing.tick_s), self._tick)
        self._listener: Listener | None = None
        self._streams: dict[int, ControlStream] = {}
        self._silent: dict[int, Timer] = {}
        """Connections that have said nothing yet, the oldest first."""
        self._last_connection = 0
        self._events: deque[MasterEvent] = deque()
        self._busy = False

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._listener is not None, "not started"
        return self._listener.address

    async def start(self, address: Address) -> None:
        """Listen.

        Raises:
            LinkError: the address cannot be used.
        """
        self._listener = await self._transport.listen(address, self._reception.accept)
        self._ticker.start()
        _log.info("master listens on %s", self._listener.address)

    def close(self) -> None:
        """Stop at once; the peers find out by their lost connections."""
        self._ticker.stop()
        if self._listener is not None:
            self._listener.close()
        self._reception.close()
        for number in list(self._silent):
            self._silent.pop(number).cancel()
        for stream in list(self._streams.values()):
            stream.close()
        self._streams.clear()

    # -- connections ---------------------------------------------------------------------------

    def _identify(self) -> Opening:
        return self._credentials.masters_opening(self.machine.run, self.machine.term)

    def _on_proven(self, connection: Connection, remote: Opening, deadline_ns: int) -> None:
        self._last_connection += 1
        number = self._last_connection
        self._feed(ControlOpened(number, connection.remote.host))

        def on_message(message: msg.Message) -> None:
            self._has_spoken(number)
            self._feed(ControlMessage(number, message))

        def on_closed(reason: str) -> None:
            self._has_spoken(number)
            self._streams.pop(number, None)
            self._feed(ControlClosed(number, reason))

        self._streams[number] = ControlStream(connection, on_message, on_closed)
        if len(self._silent) >= STRANGERS_MAX:
            self._dismiss(next(iter(self._silent)), "too many others came")
        reason = "it said nothing in time"
        self._silent[number] = self._clock.call_at_ns(deadline_ns, self._dismiss, number, reason)

    def _has_spoken(self, number: int) -> None:
        timer = self._silent.pop(number, None)
        if timer is not None:
            timer.cancel()

    def _dismiss(self, number: int, reason: str) -> None:
        self._has_spoken(number)
        self._streams.pop(number).close()
        self._feed(ControlClosed(number, reason))
        _log.info("closed control connection %d: %s", number, reason)

    def _tick(self) -> None:
        self._feed(Tick())

    # -- the machine ---------------------------------------------------------------------------

    def _feed(self, event: MasterEvent) -> None:
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._busy = False

    def _step(self, event: MasterEvent) -> None:
        effects = self.machine.handle(event, self._clock.now_ns())
        for effect in effects:
            match effect:
                case Send(connection, message):
                    stream = self._streams.get(connection)
                    if stream is not None:
                        stream.send(message)
                case CloseControl(connection, reason):
                    stream = self._streams.pop(connection, None)
                    if stream is not None:
                        stream.close()
                        _log.info("closed control connection %d: %s", connection, reason)
                case Announce(what, peer, group, text):
                    _log.info("peer %d of group %d %s: %s", peer, group, what, text)
        if self._observer is not None:
            self._observer(event, list(effects))
