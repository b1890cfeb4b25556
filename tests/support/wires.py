"""Connections without a network: a test hands a receiver the bytes that arrive, in any split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from pccl.protocol.errors import RemoteProtocolError
from pccl.transports.base import Address, Receiver


class FakeTimer:
    """Of a clock that never calls."""

    def cancel(self) -> None:
        """There is nothing to cancel."""


class FakeClock:
    """Time that stands still, unless a test moves it."""

    def __init__(self) -> None:
        self.time_ns = 0

    def now_ns(self) -> int:
        """The time."""
        return self.time_ns

    def busy_ns(self) -> int:
        """Nothing takes any time."""
        return 0

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> FakeTimer:
        """Never calls."""
        return FakeTimer()


class Wire:
    """One end of a connection, and what a transport does to its receiver.

    Args:
        on_sent: takes what the receiver sends; None: the network takes nothing, ever.
    """

    portions: tuple[int, ...] = (1, 5, 48, 1000)
    """So many bytes arrive at a time, or all."""

    def __init__(self, on_sent: Callable[[bytes], None] | None = None) -> None:
        self.remote = Address("elsewhere", 1)
        self.local = Address("here", 1)
        self.congestion = ""
        self.error: Exception | None = None
        self.open = True
        self.on_sent = on_sent
        self.receiver: Receiver | None = None

    def start(self, receiver: Receiver) -> None:
        """Take the receiver."""
        self.receiver = receiver

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Take all or nothing."""
        if self.on_sent is None or not self.open:
            return 0
        data = b"".join(buffers)
        self.on_sent(data)
        return len(data)

    def notify_writable(self) -> None:
        """Do nothing: the test says when."""

    def pause_reading(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Be closed, without a word to the receiver."""
        self.open = False

    def abort(self) -> None:
        """Be closed, without a word to the receiver."""
        self.open = False

    def feed(self, data: bytes, rng: Random) -> None:
        """Bytes arrive, in any split. Whatever but a RemoteProtocolError is raised gets out."""
        view = memoryview(data)
        while view and self.open:
            assert self.receiver is not None
            buffer = self.receiver.get_buffer()
            assert len(buffer) > 0
            nbytes = min(len(buffer), len(view), rng.choice((*self.portions, len(view))))
            buffer[:nbytes] = view[:nbytes]
            view = view[nbytes:]
            try:
                self.receiver.buffer_updated(nbytes)
            except RemoteProtocolError as error:
                self.open, self.error = False, error

    def end(self) -> None:
        """Tell of the end, if it has not been told."""
        receiver, self.receiver, self.open = self.receiver, None, False
        if receiver is not None:
            receiver.connection_lost(self.error)
