"""Holds the data that has arrived at one end of a connection, until the process reads it.

It stands for the kernel: it keeps and acknowledges up to one window for a process that is stopped,
late, or has paused reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from pccl.transports.sim.events import Events
from pccl.transports.sim.run_queue import RunQueue


class ReceiveBuffer:
    """The unread data of one end, in order, and then the reason why the stream ended.

    Args:
        events: events of the network.
        process: decides when the process runs.
        window_bytes: most bytes that the buffer keeps.
        read: lets the process read data; returns the rest if the process pauses meanwhile.
        end: called with the reason when the stream has ended.

    Attributes:
        awaits_start: True until the connection is started; until then the pipe delivers nothing.
        vanished: True if the host was switched off or forgot the connection; no more acks.
        paused: True while the process has paused reading.
        on_room: called after the process has read data.
    """

    def __init__(
        self,
        events: Events,
        process: RunQueue,
        window_bytes: int,
        read: Callable[[memoryview], memoryview | None],
        end: Callable[[str], None],
    ) -> None:
        self.awaits_start = True
        self.vanished = False
        self.paused = False
        self.on_room: Callable[[], None]
        self._events = events
        self._process = process
        self._window_bytes = window_bytes
        self._to_process = read
        self._end = end
        self._unread: deque[memoryview | str] = deque()
        self._unread_bytes = 0
        self._rest: memoryview | None = None
        """Rest of the data that the process was reading when it paused."""
        self._resuming = False
        self._reads_later = False
        """Whether ``_unread`` has data to read after the pause."""

    def has_room(self, nbytes: int) -> bool:
        """Whether the buffer can keep ``nbytes`` more bytes."""
        return self._unread_bytes + nbytes <= self._window_bytes

    def put(self, what: memoryview | str) -> None:
        """Add bytes that have arrived, or the reason why the stream has ended."""
        if not (self._unread or self.paused or self._resuming or self._process.is_late):
            self._hand_over(what)
            return
        self._unread.append(what)
        self._unread_bytes += len(what) if isinstance(what, memoryview) else 0
        if len(self._unread) == 1:
            self._read_next()

    def resume(self) -> None:
        """End a pause: schedule an event in which the process reads again."""
        if self.paused:
            self.paused = False
            self._resuming = True
            self._events.soon(partial(self._process.run, self._read_on))

    def _read_on(self) -> None:
        rest, self._rest = self._rest, None
        if rest is not None:
            self._hand_over(rest)
        self._resuming = False
        if self._reads_later and not self.paused:
            self._reads_later = False
            self._read()

    def _read_next(self) -> None:
        if self.paused or self._resuming:
            self._reads_later = True
        else:
            self._process.run(self._read)

    def _read(self) -> None:
        what = self._unread.popleft()
        self._unread_bytes -= len(what) if isinstance(what, memoryview) else 0
        self._hand_over(what)
        if self._unread:
            self._read_next()
        self.on_room()

    def _hand_over(self, what: memoryview | str) -> None:
        if isinstance(what, str):
            self._end(what)
        else:
            self._rest = self._to_process(what)
