"""``SealedConnection``: an encrypted connection over another connection.

It keeps the interface of ``Connection`` and its rules, with one difference: it holds at most two
sealed records that the network has not accepted. Encryption reads long data where it lies; short
data is collected into one record. A record is decrypted in place, before copying it to the
receiver. So nobody sees a byte that is not verified, and only the receiver copies long data.

The loop does this work. It takes some 70 µs per 256 KiB, during which the program's threads go on,
because the cipher releases the interpreter lock. (Measured: other threads would need two to three
times the processor time in all, because each record would change the thread twice.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from pccl.protocol.checksum import DamagedData
from pccl.protocol.errors import LinkError
from pccl.protocol.handshake.records import (
    LENGTH_BYTES,
    RECORD_BYTES_MAX,
    TAG_BYTES,
    RecordCipher,
    RecordKeys,
    RecordSize,
    plain_length,
    plain_of,
)
from pccl.protocol.limits import LINGER_S
from pccl.protocol.types import NS_PER_S
from pccl.transports.base import (
    Address,
    Connection,
    PathMeasure,
    Receiver,
    Timers,
    receiver_failure,
)

_OVERHEAD_BYTES = LENGTH_BYTES + TAG_BYTES
_SHORT_BYTES = 16 << 10
_LONG_BYTES = 32 << 10
"""Data of this length has a record of its own: its copy would cost more than a record."""

_TWO_BYTES = 2 * _OVERHEAD_BYTES
_MEMORY_BYTES = RECORD_BYTES_MAX + _SHORT_BYTES + _TWO_BYTES
"""Memory for a long record, and a short one before it."""

_KEPT_MAX = 16
_NOTHING = memoryview(b"")
_kept: list[memoryview] = []
"""Memory for long records that no connection uses now."""


@cache
def processor_has_aes() -> bool:
    """Whether the processor has instructions for AES; True if the system does not say."""
    try:
        return b"aes" in Path("/proc/cpuinfo").read_bytes().split()
    except OSError:
        return True


class DamagedThere(LinkError):
    """The other side has closed the connection, because data was damaged on the way to it."""


def _memory_for(plain_bytes: int) -> memoryview:
    """Return memory for two records with so much plaintext, and perhaps more."""
    if plain_bytes <= _SHORT_BYTES:
        return memoryview(bytearray(plain_bytes + _TWO_BYTES))
    return _kept.pop() if _kept else memoryview(bytearray(_MEMORY_BYTES))


def _release(memory: memoryview) -> None:
    if len(memory) == _MEMORY_BYTES and len(_kept) < _KEPT_MAX:
        _kept.append(memory)


class SealedConnection:
    """Encrypts and decrypts what one connection carries. See ``Connection``.

    Args:
        connection: a connection whose handshake is over.
        keys: what the handshake agreed on.
        clock: gives the time, and calls back.
        record_bytes_max: the longest plaintext that one record may have, sent or received.
            Records are shorter on a slow line.
    """

    def __init__(
        self,
        connection: Connection,
        keys: RecordKeys,
        clock: Timers,
        record_bytes_max: int = RECORD_BYTES_MAX,
    ) -> None:
        self._inner = connection
        self._clock = clock
        self._record_bytes_max = record_bytes_max
        self._size = RecordSize(record_bytes_max)
        self._sealed_ns = self._sealed_bytes = 0
        """When the last record was sealed, and its plaintext."""
        self._sealer = RecordCipher(keys.sends, has_aes=keys.has_aes)
        self._opener = RecordCipher(keys.receives, has_aes=keys.has_aes)
        self._receiver: Receiver | None = None
        self._unsent_memory = self._unsent = _NOTHING
        """Memory of sealed records, and the part of them that the network has not accepted."""
        self._head = memoryview(bytearray(LENGTH_BYTES))
        self._memory = self._record = _NOTHING
        """Memory of the record that arrives, and this record; nothing until its length is known."""
        self._received = 0
        """Bytes of the length, or then of the record, that have arrived."""
        self._opened_memory = self._plain = _NOTHING
        """Memory of the last whole record, and its bytes that are not delivered yet."""
        self._awaits_room = self._paused = self._delivers = False
        self._open = True
        """Whether this side may still send and receive."""
        self._ended: Exception | None = None
        """Why the connection below has ended; reported after all data that arrived before."""
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
        if not self._open:
            return
        is_first, self._receiver = self._receiver is None, receiver
        if is_first and (self._plain or self._ended is not None):
            self._soon(self._deliver)

    # -- sending -------------------------------------------------------------------------------

    def send(self, buffers: Sequence[bytes | bytearray | memoryview]) -> int:
        """Seal and send bytes until the network accepts no more; return how many were sealed."""
        if not self._open or self._ended is not None or not self._flush():
            return 0
        left, taken = [memoryview(one) for one in reversed(buffers) if len(one)], 0
        while left and not self._unsent:
            taken += self._seal(*self._next_parts(left))
        return taken

    def _next_parts(self, left: list[memoryview]) -> tuple[list[memoryview], memoryview]:
        """Take the plaintext of one record, of which the last part is first in ``left``.

        Returns short parts, and a long one for a record of its own; either may be empty.
        """
        most = room = self._size.plain_bytes
        parts: list[memoryview] = []
        while left and room and len(left[-1]) < _LONG_BYTES:
            part = left.pop()
            parts.append(part[:room])
            if len(part) > room:
                left.append(part[room:])
            room -= len(parts[-1])
        if not left or most - room > _SHORT_BYTES:
            return parts, _NOTHING
        part = left.pop()
        if len(part) > most:
            left.append(part[most:])
        return parts, part[:most]

    def _seal(self, parts: Sequence[memoryview], long: memoryview) -> int:
        """Seal short parts as one record, and a long one as another; return their bytes."""
        size = sum(map(len, parts))
        memory = _memory_for(size + len(long))
        end = size + _OVERHEAD_BYTES if size or not long else 0
        if end:
            plain, at = plain_of(memory[:end]), 0
            for part in parts:
                plain[at : at + len(part)] = part
                at += len(part)
            self._sealer.seal(memory[:end], plain)
        if long:
            record = memory[end : end + len(long) + _OVERHEAD_BYTES]
            self._sealer.seal(record, long)
            end += len(record)
        self._unsent_memory, self._unsent = memory, memory[:end]
        self._sealed_ns, self._sealed_bytes = self._clock.now_ns(), size + len(long)
        self._flush()
        return size + len(long)

    def _flush(self) -> bool:
        """Pass on the sealed record; return whether nothing of it is left."""
        while self._unsent:
            taken = self._inner.send([self._unsent])
            self._unsent = self._unsent[taken:]
            if not taken:
                self._inner.notify_writable()
                return False
        if self._unsent_memory:
            _release(self._unsent_memory)
            self._unsent_memory = self._unsent = _NOTHING
            self._size.note(self._sealed_bytes, self._clock.now_ns() - self._sealed_ns)
        return True

    def notify_writable(self) -> None:
        """Ask for one call of ``writable`` as soon as ``send`` can accept bytes."""
        if self._open and not self._awaits_room:
            self._awaits_room = True
            self._inner.notify_writable()

    # -- receiving -----------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Stop delivering data, and reading from the connection below."""
        self._paused = True
        self._inner.pause_reading()

    def resume_reading(self) -> None:
        """End a pause; a later turn of the loop delivers what has arrived."""
        if self._paused and self._open:
            self._paused = False
            self._soon(self._deliver)

    def _deliver(self) -> None:
        """Copy decrypted bytes to the receiver, until it pauses."""
        if self._delivers or self._receiver is None:
            return  # or the receiver has caused this call; the loop below goes on
        self._delivers = True
        try:
            while self._plain and not self._paused:
                memory = self._receiver.get_buffer()
                assert len(memory), "memory for a read must not be empty"
                part = min(len(memory), len(self._plain))
                memory[:part] = self._plain[:part]
                self._plain = self._plain[part:]
                self._receiver.buffer_updated(part)
                if not self._open:
                    return
        finally:
            self._delivers = False
        if self._paused or not self._open:
            return
        if self._ended is not None:
            self._tell_lost(self._ended)
            return
        if self._opened_memory:
            _release(self._opened_memory)
            self._opened_memory = self._plain = _NOTHING
        self._inner.resume_reading()

    # -- callbacks of the connection below -----------------------------------------------------

    def get_buffer(self) -> memoryview:
        """Return memory for the rest of a length, or of a record and the next length."""
        if self._record:
            return self._memory[self._received : len(self._record) + LENGTH_BYTES]
        return self._head[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take the length of a record, or open the whole record and deliver it."""
        self._received += nbytes
        size = len(self._record)
        if size and self._received >= size:
            self._received -= size
            self._head[: self._received] = self._memory[size : size + self._received]
            self._open_record()
        if self._open and not self._record and self._received == LENGTH_BYTES:
            self._begin_record(plain_length(self._head))

    def _begin_record(self, plain_bytes: int) -> None:
        if plain_bytes > self._record_bytes_max:
            self._refuse(f"a received length was damaged, or forged, on the way: {plain_bytes}")
            return
        self._memory = _memory_for(plain_bytes)
        self._record = self._memory[: plain_bytes + _OVERHEAD_BYTES]
        self._record[:LENGTH_BYTES] = self._head

    def _open_record(self) -> None:
        record, self._opened_memory = self._record, self._memory
        self._memory = self._record = _NOTHING
        if not self._opener.open(record):
            self._refuse("received data was damaged, or forged, on the way")
            return
        self._plain = plain_of(record)
        if not self._plain:
            reason = f"data was damaged on the way to {self.remote}"
            self._end_with(DamagedThere(func="connection", reason=reason))
            self._leave()
            return
        self._deliver()
        if self._plain:  # the receiver has paused, or there is none yet
            self._inner.pause_reading()

    def writable(self) -> None:
        """Go on sending."""
        if not self._flush():
            return
        if not self._open:
            self._inner.close()
        elif self._awaits_room:
            self._awaits_room = False
            assert self._receiver is not None, "a connection is started before anything else"
            self._receiver.writable()

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the receiver, after delivering what has arrived before."""
        self._unsent = _NOTHING
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
        self._unsent = _NOTHING
        self._inner.abort()

    def _end_with(self, error: Exception | None) -> None:
        """Deliver nothing more, and tell the receiver soon."""
        receiver, self._receiver = self._receiver, None
        self._open = False
        if receiver is not None:
            self._soon(partial(receiver.connection_lost, error))

    def _refuse(self, reason: str) -> None:
        """End the connection because of what has arrived, and tell the other side."""
        self._end_with(DamagedData(func="connection", reason=reason))
        if self._flush():  # else the other side finds out by itself
            self._seal((), _NOTHING)
        self._leave()

    def _leave(self) -> None:
        """Close the connection below when it has accepted everything."""
        self._inner.pause_reading()
        if self._flush():
            self._inner.close()
        else:
            self._later(round(LINGER_S * NS_PER_S), self._inner.abort)

    def _tell_lost(self, error: Exception | None) -> None:
        self._open = False
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(error)

    def _soon(self, callback: Callable[[], None]) -> None:
        self._later(0, partial(self._go_on, callback))

    def _later(self, delay_ns: int, callback: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and calls nobody
            self._clock.call_at_ns(self._clock.now_ns() + delay_ns, callback)

    def _go_on(self, callback: Callable[[], None]) -> None:
        """Call back from the loop; an error of the receiver ends the connection."""
        try:
            callback()
        except Exception as error:
            failure = receiver_failure(self.remote, error)
            if self._open:
                self._end_with(failure)
            self.abort()
            if failure is not error:
                raise
