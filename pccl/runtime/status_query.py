"""Asking a master for the status of its run, without taking part in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pccl.protocol.errors import LinkError, NotAdmitted, PCCLError, RemoteProtocolError
from pccl.protocol.handshake import NONCE_BYTES, Channel, Opening
from pccl.protocol.intake import masters_bytes_max
from pccl.protocol.messages import Message, Refused, StatusRequest
from pccl.protocol.status_report import StatusReport
from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock
from pccl.runtime.control import ControlStream
from pccl.runtime.greeting import Credentials, introduce
from pccl.transports.base import Address, Connection, Transport


async def ask_status(
    clock: Clock,
    transport: Transport,
    master: Address,
    token: bytes | None,
    random_bytes: Callable[[int], bytes],
    timeout_s: float,
) -> StatusReport:
    """Connect, ask, and leave.

    Args:
        clock: time.
        transport: the network.
        master: where the master listens.
        token: the run's secret; None: there is none.
        random_bytes: source of nonces.
        timeout_s: for all of it.

    Raises:
        LinkError: nobody is there, or there was no answer in time.
        NotAdmitted: a master is there that gives no status; the reason says why.
        RemoteProtocolError: what is there is no master of our version, or has another token.
    """
    deadline_ns = clock.now_ns() + round(timeout_s * NS_PER_S)
    connection = await transport.dial(master, timeout_s)
    query = _Query(clock)
    credentials = Credentials(token, random_bytes)
    handshake = credentials.dial(Opening(Channel.CONTROL, random_bytes(NONCE_BYTES)))
    await introduce(connection, handshake, clock, deadline_ns, query.begin)
    overdue = LinkError(reason="it greeted, but gave no status in time")
    timer = clock.call_at_ns(deadline_ns, query.fail, overdue)
    try:
        return await query.answer
    finally:
        timer.cancel()
        query.end()


class _Query:
    """One question on one connection."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.answer: asyncio.Future[StatusReport] = asyncio.get_running_loop().create_future()
        self._stream: ControlStream | None = None

    def begin(self, connection: Connection, remote: Opening) -> None:
        """The handshake is over."""
        self._stream = ControlStream(
            connection, self._on_message, self._on_closed, self._clock, masters_bytes_max
        )
        self._stream.send(StatusRequest())

    def fail(self, error: PCCLError) -> None:
        """There will be no answer."""
        if not self.answer.done():
            self.answer.set_exception(error)

    def end(self) -> None:
        """Nothing more is wanted."""
        if self._stream is not None:
            self._stream.close()

    def _on_message(self, message: Message) -> None:
        match message:
            case StatusReport() if not self.answer.done():
                self.answer.set_result(message)
            case Refused(reason=reason):
                self.fail(NotAdmitted(reason=reason))
            case _:
                what = type(message).__name__
                raise RemoteProtocolError(func="control", reason=f"{what} is no status")

    def _on_closed(self, reason: str) -> None:
        self.fail(LinkError(reason=f"it closed the connection without a status: {reason}"))
