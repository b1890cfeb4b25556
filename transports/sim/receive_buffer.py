"""What has arrived at one end of a connection, until the process there reads it.

Its kernel keeps and acknowledges up to one window for a process that does not run, runs late, or
has paused reading.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from pccl.transports.sim.events import Events
from pccl.transports.sim.run_queue import RunQueue


class ReceiveBuffer:
    """What one end has received and not read, in order; at the end why the stream ended.

    Args:
        events: the order of everything.
        process: when the process runs.
        window_bytes: how much is kept at most.
        read: the process reads; returns what it has not read, since it has paused.
        end: the stream has ended, and why.

    Attributes:
        awaits_start: nobody reads yet; what arrives waits on the way.
        vanished: the host went away without a word: it acknowledges nothing.
        paused: the process reads nothing for now.
        on_room: called when something was read.
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
        """What was being read when the process paused."""
        self._resuming = False
        self._reads_later = False
        """When the process reads again, it reads the next of ``_unread``."""

    def has_room(self, nbytes: int) -> bool:
        """Whether so many more bytes can be kept."""
        return self._unread_bytes + nbytes <= self._window_bytes

    def put(self, what: memoryview | str) -> None:
        """Bytes have arrived, or the news that the stream has ended."""
        if not (self._unread or self.paused or self._resuming or self._process.is_late):
            self._hand_over(what)
            return
        self._unread.append(what)
        self._unread_bytes += len(what) if isinstance(what, memoryview) else 0
        if len(self._unread) == 1:
            self._read_next()

    def resume(self) -> None:
        """The process reads again, soon."""
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
