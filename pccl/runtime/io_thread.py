"""The one thread per process that runs the loop, and the bridge that other threads use.

The thread starts with its first user and ends with its last, so that a closed library leaves
nothing behind. A child made by fork has no such thread: its copy is abandoned, which closes the
descriptors and tells nobody, and whoever needs one in the child starts anew.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

from pccl.protocol.errors import NotConnected
from pccl.transports.tcp import TcpTransport

_T = TypeVar("_T")

INTERRUPT_POLL_S = 0.2
"""A blocked thread looks up this often: a signal that comes just before it blocks wakes nobody."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class Submission(Generic[_T]):
    """Work handed to the I/O thread.

    Unlike a bare concurrent future, ``finished`` completes only when the work has really ended:
    after :meth:`cancel` that is when every buffer it had borrowed is free again. Work that has
    begun is a user of the thread, which therefore does not end before it.
    """

    def __init__(self, io: IOThread, work: Coroutine[Any, Any, _T]) -> None:
        self.finished: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._io = io
        self._held = False
        self._work = work
        self._task: asyncio.Task[_T] | None = None

    def start(self) -> Submission[_T]:
        """Let the work begin; it fails with NotConnected if the thread has ended meanwhile."""
        self._held = self._io.hold()
        if self._held:
            self._io.loop.call_soon_threadsafe(self._start)
        else:
            self._work.close()
            reason = "closed by another thread just before this call"
            self.finished.set_exception(NotConnected(reason=reason))
        return self

    def cancel(self) -> None:
        """Ask the work to end; any thread."""
        if self._held:
            self._io.loop.call_soon_threadsafe(self._cancel)

    def wait(self) -> _T:
        """Start the work and block until it has ended.

        An exception in this thread (Ctrl-C) cancels the work and is raised once it has ended; more
        of them, while it ends, change nothing.
        """
        try:
            self.start()
            while not self._ended_within(INTERRUPT_POLL_S):
                pass
            return self.finished.result()
        except BaseException:
            while self._held and not self.finished.done():
                with suppress(BaseException):
                    self.cancel()
                    concurrent.futures.wait([self.finished], INTERRUPT_POLL_S)
            raise

    def _ended_within(self, timeout_s: float) -> bool:
        try:
            self.finished.exception(timeout_s)
        except concurrent.futures.TimeoutError:
            return False
        return True

    def _start(self) -> None:
        if not self.finished.done():
            self._task = self._io.loop.create_task(self._work)
            self._task.add_done_callback(self._done)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.finished.done():  # it has not begun, and now never will
            self._work.close()
            self._io.release()
            self.finished.set_exception(asyncio.CancelledError())

    def _done(self, task: asyncio.Task[_T]) -> None:
        self._io.release()
        if task.cancelled():
            self.finished.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.finished.set_exception(error)
        else:
            self.finished.set_result(task.result())


class IOThread:
    """The process's I/O thread; take it with :meth:`acquire`, give it back with ``release``.

    Attributes:
        loop: what the thread runs.
        transport: the network, for everybody on this thread.
        abandoned: this is a forked child's copy, which nobody runs; do not use it.
    """

    _shared: ClassVar[IOThread | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self) -> None:
        self.loop = _new_loop()
        self.transport = TcpTransport(self.loop)
        self.abandoned = False
        self._users = 0
        self._thread = threading.Thread(target=self._run, name="pccl-io", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> IOThread:
        """Start the thread if need be, and count one more user."""
        with cls._lock:
            shared = cls._shared = cls._shared or cls()
            shared._users += 1
            return shared

    def hold(self) -> bool:
        """Count one more user, unless the thread has ended (False)."""
        with IOThread._lock:
            if self._users:
                self._users += 1
            return self._users > 0

    def release(self) -> None:
        """Count one user less; the last one ends the thread."""
        with IOThread._lock:
            self._users -= 1
            if self._users:
                return
            IOThread._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @classmethod
    def abandon(cls) -> None:
        """Let go of a copy that fork made; the parent's connections do not notice."""
        cls._lock = threading.RLock()  # some thread of the parent may have held it
        copy, cls._shared = cls._shared, None
        if copy is not None:
            copy.abandoned = True
            copy.transport.abandon()

    def submit(self, work: Coroutine[Any, Any, _T]) -> Submission[_T]:
        """Prepare ``work`` for the I/O thread; ``start`` or ``wait`` lets it begin."""
        return Submission(self, work)

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a short function on the I/O thread and return its value."""

        async def run() -> _T:
            return function()

        return self.submit(run()).wait()

    def owns_current_thread(self) -> bool:
        """Whether the caller is the I/O thread itself, which must not block."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=IOThread.abandon)
