"""Handshakes on connections: what is read before a stranger has proven who he is, and by when.

A ``Greeting`` is the receiver of a connection while its handshake goes on. It asks the network for
exactly the bytes of the next step, so that nothing behind the handshake is read before it is over;
then the connection is handed over as it is. ``introduce`` does the dialling side; a ``Reception``
holds what was accepted: a bounded number, shared fairly among the addresses that they come from,
each for a bounded time, however slowly it drips.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from pccl.protocol.errors import LinkError, PCCLError, RemoteProtocolError
from pccl.protocol.guards.source_shares import SourceShares
from pccl.protocol.handshake import (
    NO_RUN,
    NONCE_BYTES,
    OPENING_BYTES,
    Channel,
    Handshake,
    HandshakeRefused,
    Opening,
    derive_key,
)
from pccl.protocol.types import NOBODY, PeerId
from pccl.runtime.clock import Clock
from pccl.runtime.control.stranger_log import StrangerLog
from pccl.transports.base import Connection

_log = logging.getLogger("pccl.link")


class Identity(Protocol):
    """Who a peer is; its machine knows."""

    @property
    def peer(self) -> PeerId:
        """The own id; 0 before registration."""
        ...

    @property
    def run(self) -> bytes:
        """The run's id; empty before registration."""
        ...

    @property
    def term(self) -> int:
        """The term that we follow."""
        ...


class Credentials:
    """What a process greets with.

    Args:
        token: what every process of the run has to know; None: anybody may come.
        random_bytes: source of nonces; must be unpredictable outside simulation.
    """

    def __init__(self, token: bytes | None, random_bytes: Callable[[int], bytes]) -> None:
        self._key = None if token is None else derive_key(token)
        self._random_bytes = random_bytes

    def opening(
        self,
        channel: Channel,
        own: Identity,
        target: PeerId = NOBODY,
        *,
        lane: int = 0,
        lanes: int = 0,
    ) -> Opening:
        """What a peer says first."""
        nonce = self._random_bytes(NONCE_BYTES)
        run = own.run or NO_RUN
        return Opening(channel, nonce, run, own.term, own.peer, target, lane, lanes)

    def strangers_opening(self) -> Opening:
        """What is said first to a master by somebody who takes no part in its run."""
        return Opening(Channel.CONTROL, self._random_bytes(NONCE_BYTES))

    def masters_opening(self, run: bytes, term: int) -> Opening:
        """What a master says first."""
        return Opening(Channel.CONTROL, self._random_bytes(NONCE_BYTES), run, term)

    def dial(self, opening: Opening) -> Handshake:
        """The handshake of the side that has dialled."""
        return Handshake.dial(opening, self._key)

    def accept(self, identify: Callable[[], Opening]) -> Handshake:
        """The handshake of the side that was dialled."""
        return Handshake.accept(identify, self._key)


class Greeting:
    """One handshake on one connection.

    Args:
        connection: not started yet; it is started here.
        handshake: at its beginning.
        clock: time.
        deadline_ns: when it must be over.
        on_proven: called when all is said and sent; has to start the connection anew, or end it.
        on_failed: called instead with the reason; the connection is closed, or about to be.
            After ``dismiss`` neither is called.
        on_opening: called when the other side's opening is here, and is one of ours.
    """

    def __init__(
        self,
        connection: Connection,
        handshake: Handshake,
        clock: Clock,
        deadline_ns: int,
        on_proven: Callable[[Opening], None],
        on_failed: Callable[[PCCLError], None],
        on_opening: Callable[[], None] | None = None,
    ) -> None:
        self.connection = connection
        self._handshake = handshake
        self._on_proven = on_proven
        self._on_failed: Callable[[PCCLError], None] | None = on_failed
        self._on_opening = on_opening
        self._opening_bytes_missing = OPENING_BYTES
        self._buffer = memoryview(bytearray(OPENING_BYTES))
        self._unsent = handshake.take_output()
        self._refused: HandshakeRefused | None = None
        self._heard = False
        self.was_probe = False
        """Whether the other side has connected and left without a word."""
        self._timer = clock.call_at_ns(deadline_ns, self._overdue)
        connection.start(self)
        self._flush()

    def dismiss(self) -> None:
        """End it at once; nobody is told."""
        self._on_failed = None
        self._timer.cancel()
        self.connection.abort()

    def _overdue(self) -> None:
        reason = "it took the connection, but did not greet as we do in time"
        self._fail(LinkError(func="handshake", reason=reason))
        self.connection.abort()

    def _flush(self) -> None:
        while self._unsent:
            taken = self.connection.send([self._unsent])
            self._unsent = self._unsent[taken:]
            if self._unsent:
                self.connection.notify_writable()
                return
        if self._refused is not None:
            self._fail(self._refused)
            self.connection.close()
        elif self._handshake.remote is not None:
            self._timer.cancel()
            self._on_proven(self._handshake.remote)
            self._on_failed = None

    def _fail(self, error: PCCLError) -> None:
        self._timer.cancel()
        report, self._on_failed = self._on_failed, None
        if report is not None:
            report(error)

    # -- what the connection calls ---------------------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Memory for the bytes of the next step, so that nothing behind the handshake is read."""
        return self._buffer[: max(self._handshake.awaited_bytes, 1)]

    def buffer_updated(self, nbytes: int) -> None:
        """Continue the handshake, and send the answer or the refusal."""
        self._heard = True
        if self._refused is not None:
            return  # only our last words are still to be sent
        if not self._handshake.awaited_bytes:
            raise RemoteProtocolError(func="handshake", reason="went on without our answer")
        try:
            self._handshake.receive(self._buffer[:nbytes])
            self._opening_bytes_missing -= nbytes
            if self._on_opening is not None and self._opening_bytes_missing <= 0:
                self._on_opening()
                self._on_opening = None
        except HandshakeRefused as error:
            self._refused = error
            self._unsent += error.last_words
        self._unsent += self._handshake.take_output()
        self._flush()

    def writable(self) -> None:
        """Continue to send."""
        self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        """Report that the handshake has failed; the other side was a probe if it sent nothing."""
        self.was_probe = not self._heard
        if isinstance(error, PCCLError):
            self._fail(error)
        else:
            self._fail(LinkError(func="handshake", reason=str(error or "closed here")))


async def introduce(
    connection: Connection,
    handshake: Handshake,
    clock: Clock,
    deadline_ns: int,
    take: Callable[[Connection, Opening], None],
) -> None:
    """Greet on a connection that we have dialled.

    Args:
        connection: not started yet.
        handshake: at its beginning.
        clock: time.
        deadline_ns: when it must be over.
        take: called at the end of the handshake, with what the other side has said; has to start
            the connection. When it has been
            called there is no error any more, and when this is cancelled before, it never is.

    Raises:
        HandshakeRefused: the other side cannot be worked with; to try again is of no use until
            somebody has changed what the reason says.
        RemoteProtocolError: what answered is none of ours.
        LinkError: the connection was lost, or there was no answer in time.
    """
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def proven(remote: Opening) -> None:
        if over.done():  # cancelled, and we are not awake yet
            connection.abort()
        else:
            take(connection, remote)
            over.set_result(None)

    def failed(error: PCCLError) -> None:
        if not over.done():
            over.set_exception(error)

    greeting = Greeting(connection, handshake, clock, deadline_ns, proven, failed)
    try:
        await over
    except asyncio.CancelledError:
        greeting.dismiss()
        raise


class Reception:
    """Where accepted connections wait until they have proven who they are.

    Args:
        clock: time.
        patience_ns: how long each may take.
        unproven_max: how many may wait; for one more, ``SourceShares`` says which has to go.
        credentials: what we greet with.
        identify: gives what we say to whoever has begun.
        on_proven: called with a connection, what its other side has said, and its deadline; has
            to start the connection.
    """

    def __init__(
        self,
        clock: Clock,
        patience_ns: int,
        unproven_max: int,
        credentials: Credentials,
        identify: Callable[[], Opening],
        on_proven: Callable[[Connection, Opening, int], None],
    ) -> None:
        self._clock = clock
        self._patience_ns = patience_ns
        self._credentials = credentials
        self._identify = identify
        self._on_proven = on_proven
        self._waiting: dict[Connection, Greeting] = {}
        self._shares: SourceShares[Connection] = SourceShares(unproven_max)
        self.log = StrangerLog(clock, _log)
        """For what strangers do at this port, now and later."""

    def accept(self, connection: Connection) -> None:
        """Somebody has connected to our port."""
        goes = self._shares.add(connection, connection.remote.host)
        if goes is not None:
            self._waiting.pop(goes).dismiss()
            reason = "closed a connection from %s: too many others came before it proved itself"
            self.log.write(logging.INFO, reason, goes.remote)
        deadline_ns = self._clock.now_ns() + self._patience_ns

        def proven(remote: Opening) -> None:
            del self._waiting[connection]
            self._shares.remove(connection)
            self._on_proven(connection, remote, deadline_ns)

        def failed(error: PCCLError) -> None:
            greeting = self._waiting.pop(connection, None)
            self._shares.remove(connection)
            is_ours = isinstance(error, RemoteProtocolError)
            level = logging.WARNING if is_ours else logging.INFO
            if greeting is not None and greeting.was_probe:
                level = logging.DEBUG  # as `pccl join` does, to find out whether we are there
            text = "closed a connection from %s: %s"
            self.log.write(level, text, connection.remote, error.reason)

        def begun() -> None:
            self._shares.spoke(connection)

        handshake = self._credentials.accept(self._identify)
        self._waiting[connection] = Greeting(
            connection, handshake, self._clock, deadline_ns, proven, failed, begun
        )

    def close(self) -> None:
        """Send everybody away."""
        for connection, greeting in self._waiting.items():
            self._shares.remove(connection)
            greeting.dismiss()
        self._waiting.clear()
        self.log.close()
