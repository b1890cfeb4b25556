"""``SealedConnection``: an encrypted connection over another connection.

It keeps the interface of ``Connection`` and its rules, with one difference: ``send`` copies what it
accepts, up to ``WINDOW`` records, and encrypts the copies in place. A received record is decrypted
in place, too, and copied to the receiver's memory once its tag is verified. So nobody sees a byte
that is not verified, and each side copies each byte once.

A crew does the work on long records, off the loop. Records stay in order: each has a place in a
queue before the work on it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pccl.protocol.checksum import DamagedData
from pccl.protocol.errors import LinkError
from pccl.protocol.limits import LINGER_S
from pccl.protocol.records import (
    LENGTH_BYTES,
    RECORD_BYTES_MAX,
    TAG_BYTES,
    RecordCipher,
    RecordKeys,
    plain_length,
    plain_of,
)
from pccl.protocol.types import NS_PER_S
from pccl.transports.base import Address, Connection, PathMeasure, Receiver, receiver_failure

WINDOW = 4
"""Records of each direction that are in work, or wait for the network or the receiver."""

ALONE_BYTES_MAX = 16 << 10
"""The longest record that the loop encrypts or decrypts itself: a thread would take longer."""

_OVERHEAD_BYTES = LENGTH_BYTES + TAG_BYTES
_KEPT_MAX = 64
_kept: list[memoryview] = []
"""Memory of long records that no connection uses, for the next ones."""

Crew = Callable[[Callable[[], None], Callable[[], None]], None]
"""Calls the first function on some thread, and then the second one on the loop."""


class DamagedThere(LinkError):
    """The other side has closed the connection, because data was damaged on the way to it."""


class _Clock(Protocol):
    def now_ns(self) -> int: ...

    def call_at_ns(self, when_ns: int, callback: Callable[..., None], *args: object) -> object: ...


@dataclass(slots=True)
class _Record:
    """A record in work."""

    memory: memoryview
    """Memory for the longest record, or just for this one if it is short."""
    whole: memoryview
    """The part of ``memory`` that this record uses."""
    rest: memoryview
    """Sealed bytes that the network has not accepted, or plaintext that is not delivered."""
    is_ready: bool = False
    """Whether the work is done."""
    is_damaged: bool = False

    @staticmethod
    def of(plain_bytes: int) -> _Record:
        """Return a record with room for so many bytes of plaintext."""
        size = plain_bytes + _OVERHEAD_BYTES
        if plain_bytes <= ALONE_BYTES_MAX:
            memory = memoryview(bytearray(size))
        elif _kept:
            memory = _kept.pop()
        else:
            memory = memoryview(bytearray(RECORD_BYTES_MAX + _OVERHEAD_BYTES))
        return _Record(memory, memory[:size], memory[:0])

    @property
    def is_long(self) -> bool:
        """Whether a crew does the work."""
        return len(self.whole) > ALONE_BYTES_MAX + _OVERHEAD_BYTES

    def release(self) -> None:
        """Let another record use the memory."""
        if self.is_long and len(_kept) < _KEPT_MAX:
            _kept.append(self.memory)


class SealedConnection:
    """Encrypts and decrypts what one connection carries. See ``Connection``.

    Args:
        connection: a connection whose handshake is over.
        keys: what the handshake agreed on.
        clock: gives the time, and calls back.
        crew: does the work on long records; None: the loop does it.
        record_bytes_max: the longest plaintext that one record may have, sent or received.
    """

    def __init__(
        self,
        connection: Connection,
        keys: RecordKeys,
        clock: _Clock,
        crew: Crew | None = None,
        record_bytes_max: int = RECORD_BYTES_MAX,
    ) -> None:
        self._inner = connection
        self._clock = clock
        self._crew = crew
        self._record_bytes_max = record_bytes_max
        self._sealer = RecordCipher(keys.sends, has_aes=keys.has_aes)
        self._opener = RecordCipher(keys.receives, has_aes=keys.has_aes)
        self._receiver: Receiver | None = None
        self._out: deque[_Record] = deque()
        self._in: deque[_Record] = deque()
        self._head = memoryview(bytearray(LENGTH_BYTES))
        self._coming: _Record | None = None
        """The record that is arriving, once its length has arrived."""
        self._received = 0
        """Bytes of the head, or then of the record, that have arrived."""
        self._awaits_room = self._paused = self._is_held = False
        """Whether the receiver waits to send, has paused, or is too slow for what arrives."""
        self._delivers = False
        self._open = True
        """Whether this side may still send and receive."""
        self._ended: Exception | None = None
        """Why the connection below has ended; told when what arrived before is delivered."""
        connection.start(self)

    def __repr__(self) -> str:
        return f"<sealed {self._inner!r}>"

    @property
    def remote(self) -> Address:
        """The address of the other side."""
        return self._inner.remote

    @property
    def local(self) -> Address:
        """The address of this side."""
        return self._inner.local

    @property
    def congestion(self) -> str:
        """The congestion control of the connection below."""
        return self._inner.congestion

    def measure(self) -> PathMeasure | None:
        """Return the measure of the connection below."""
        return self._inner.measure()

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver, or replace the receiver."""
        is_first, self._receiver = self._receiver is None, receiver
        if is_first and (self._in or self._ended is not None):
            self._soon(self._deliver)

    # -- sending -------------------------------------------------------------------------------

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Copy and encrypt as many bytes as the window has room for; return their number."""
        if not self._open or self._ended is not None:
            return 0
        missing, taken = sum(map(len, buffers)), 0
        views, number, start = buffers, 0, 0
        while missing and len(self._out) < WINDOW:
            size = min(missing, self._record_bytes_max)
            record = _Record.of(size)
            plain, at = plain_of(record.whole), 0
            while at < size:
                view = views[number]
                part = min(len(view) - start, size - at)
                plain[at : at + part] = view[start : start + part]
                at, start = at + part, start + part
                if start == len(view):
                    number, start = number + 1, 0
            missing, taken = missing - size, taken + size
            self._seal(record)
        self._flush()
        return taken

    def _seal(self, record: _Record) -> None:
        step = self._sealer.next()
        self._out.append(record)
        record.rest = record.whole

        def done() -> None:
            record.is_ready = True
            self._go_on(self._after_sending)

        if self._crew is None or not record.is_long:
            step.seal(record.whole)
            record.is_ready = True
        else:
            self._crew(lambda: step.seal(record.whole), done)

    def _flush(self) -> None:
        """Pass on the records that are ready."""
        while self._out and self._out[0].is_ready:
            ready: list[bytes | memoryview] = []
            for record in self._out:
                if not record.is_ready:
                    break
                ready.append(record.rest)
            taken = self._inner.send(ready)
            while self._out and taken >= len(self._out[0].rest) and self._out[0].is_ready:
                taken -= len(self._out[0].rest)
                self._out.popleft().release()
            if taken:
                self._out[0].rest = self._out[0].rest[taken:]
            if self._out and self._out[0].is_ready:
                self._inner.notify_writable()
                return
        if not (self._out or self._open):
            self._inner.close()

    def _after_sending(self) -> None:
        self._flush()
        if self._awaits_room and self._open and len(self._out) < WINDOW:
            self._awaits_room = False
            assert self._receiver is not None
            self._receiver.writable()

    def notify_writable(self) -> None:
        """Ask for one call of ``writable`` as soon as the window has room."""
        if self._open and not self._awaits_room:
            self._awaits_room = True
            if len(self._out) < WINDOW:
                self._soon(self._after_sending)

    # -- receiving -----------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Stop delivering, and reading below."""
        self._paused = True
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """End a pause; a later turn of the loop delivers what has arrived."""
        if self._paused:
            self._paused = False
            self._soon(self._deliver)

    def _deliver(self) -> None:
        """Deliver the plaintext of the records that are ready, until the receiver pauses."""
        if self._delivers or self._receiver is None:
            return  # or the receiver has caused this call; the loop below goes on
        self._delivers = True
        try:
            while self._open and not self._paused and self._in and self._in[0].is_ready:
                record = self._in[0]
                if record.is_damaged:
                    self._refuse("received data was damaged, or forged, on the way")
                elif len(record.whole) == _OVERHEAD_BYTES:
                    reason = f"data was damaged on the way to {self.remote}"
                    self._end_with(DamagedThere(func="connection", reason=reason))
                    self._leave()
                elif self._pass_on(record) and self._in:  # else the receiver has closed
                    self._in.popleft().release()
        finally:
            self._delivers = False
        if self._open and not self._paused:
            if self._ended is not None and not self._in:
                self._tell_lost(self._ended)
            elif self._is_held and len(self._in) < WINDOW:
                self._is_held = False
            if not self._is_held:
                self._inner.resume_reading()

    def _pass_on(self, record: _Record) -> bool:
        """Copy a record's plaintext to the receiver; return whether all of it is delivered."""
        plain = record.rest
        while plain and self._open and not self._paused:
            assert self._receiver is not None, "a connection is started before anything else"
            memory = self._receiver.get_buffer()
            part = min(len(memory), len(plain))
            memory[:part] = plain[:part]
            plain = record.rest = plain[part:]
            self._receiver.buffer_updated(part)
        return not plain

    def _open_record(self, record: _Record) -> None:
        step = self._opener.next()
        self._in.append(record)
        record.rest = plain_of(record.whole)

        def work() -> None:
            record.is_damaged = not step.open(record.whole)

        def done() -> None:
            record.is_ready = True
            self._go_on(self._deliver)

        if self._crew is None or not record.is_long:
            work()
            record.is_ready = True
        else:
            self._crew(work, done)

    # -- callbacks of the connection below -----------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return memory for the rest of a length, or of a record."""
        if self._coming is None:
            return self._head[self._received :]
        return self._coming.whole[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the length of a record, or open the whole record."""
        self._received += nbytes
        record = self._coming
        if record is None:
            if self._received == LENGTH_BYTES:
                self._begin_record(plain_length(self._head))
        elif self._received == len(record.whole):
            self._coming, self._received = None, 0
            self._open_record(record)
            if len(self._in) >= WINDOW and not self._is_held:
                self._is_held = True
                self._inner.pause_reading()
            self._deliver()

    def _begin_record(self, plain_bytes: int) -> None:
        if plain_bytes > self._record_bytes_max:
            self._refuse(f"a received length was damaged, or forged, on the way: {plain_bytes}")
            return
        self._coming = _Record.of(plain_bytes)
        self._coming.whole[:LENGTH_BYTES] = self._head

    def writable(self) -> None:
        """Go on sending."""
        self._after_sending()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the receiver, after delivering what has arrived before."""
        self._out.clear()
        if isinstance(error, LinkError) and self._open:
            self._ended = error
            self._deliver()
        else:
            self._tell_lost(error)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """End the stream; bytes that ``send`` accepted still arrive."""
        if self._open:
            self._end_with(None)
            self._leave()

    def abort(self) -> None:
        """End the stream at once."""
        if self._open:
            self._end_with(None)
        self._out.clear()
        self._inner.abort()

    def _end_with(self, error: Exception | None) -> None:
        """Deliver nothing more, and tell the receiver soon."""
        receiver, self._receiver = self._receiver, None
        self._open = False
        self._in.clear()
        if receiver is not None:
            self._soon(partial(receiver.connection_lost, error))

    def _refuse(self, reason: str) -> None:
        """End the connection because of what has arrived, and tell the other side."""
        self._end_with(DamagedData(func="connection", reason=reason))
        self._seal(_Record.of(0))
        self._leave()

    def _leave(self) -> None:
        """Close the connection below when it has accepted everything."""
        self._inner.pause_reading()
        if self._out:
            when_ns = self._clock.now_ns() + round(LINGER_S * NS_PER_S)
            self._clock.call_at_ns(when_ns, self._inner.abort)
        self._flush()

    def _tell_lost(self, error: Exception | None) -> None:
        self._open = False
        self._in.clear()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(error)

    def _soon(self, callback: Callable[[], None]) -> None:
        self._clock.call_at_ns(self._clock.now_ns(), self._go_on, callback)

    def _go_on(self, callback: Callable[[], None]) -> None:
        """Call back from the loop; an error of the receiver ends the connection."""
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - told to the receiver, and raised if it is a bug
            failure = receiver_failure(self.remote, error)
            if self._open:
                self._end_with(failure)
            self.abort()
            if failure is not error:
                raise
