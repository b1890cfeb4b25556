"""The one thread per process that runs the loop, and how other threads submit work to it.

The thread starts with its first user and ends with its last one. A forked child has no such thread.
It drops its copy: it closes the descriptors and sends nothing. The first user starts a new thread.
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
from pccl.runtime.lookups import LookUps
from pccl.transports.local.process_memory import process_memory
from pccl.transports.tcp import TcpTransport

_T = TypeVar("_T")

FAREWELL_S = 5.0
"""Longest time that a finalizer blocks the interpreter; closing takes milliseconds."""

INTERRUPT_POLL_S = 0.2
"""Interval of signal checks in a blocked thread; a signal just before it blocks cannot wake it."""


SLOW_CALLBACK_S = 5.0
"""Time above which asyncio's debug mode reports a callback; a callback may copy large tensors."""


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # no wheel for this platform
        loop = asyncio.new_event_loop()
    else:
        loop = uvloop.new_event_loop()
    loop.slow_callback_duration = SLOW_CALLBACK_S
    return loop


class Submission(Generic[_T]):
    """A piece of work for the I/O thread.

    Unlike a bare concurrent future, ``finished`` completes only when the work has ended and has
    released every buffer that it borrowed, even after :meth:`cancel`. Started work is a user of
    the thread, so the thread ends after it.
    """

    def __init__(self, io: IOThread, work: Callable[[], Coroutine[Any, Any, _T]]) -> None:
        self.finished: concurrent.futures.Future[_T] = concurrent.futures.Future()
        self._io = io
        self._work = work
        self._task: asyncio.Task[_T] | None = None

    def start(self) -> Submission[_T]:
        """Begin the work. ``finished`` gets NotConnected if the thread has ended meanwhile."""
        try:
            if self._io.hold(self):
                self._io.loop.call_soon_threadsafe(self._start)
            else:
                reason = "the object was closed by another thread just before this call"
                self.finished.set_exception(NotConnected(reason=reason))
        except BaseException:  # Ctrl-C; the work may be a user already
            self.cancel()
            raise
        return self

    def cancel(self) -> None:
        """Ask the work to end. Any thread may call this."""
        with suppress(RuntimeError):  # the thread has ended, and the work with it
            if self._is_under_way():
                self._io.loop.call_soon_threadsafe(self._cancel)

    def wait(self) -> _T:
        """Start the work and block until it has ended.

        An exception in this thread (Ctrl-C) cancels the work, and is raised once the work has
        ended. Further exceptions while the work ends are ignored.
        """
        try:
            self.start()
            while True:
                try:
                    self.finished.exception(INTERRUPT_POLL_S)
                except concurrent.futures.TimeoutError:
                    continue
                return self.finished.result()
        except BaseException:
            while self._is_under_way():
                with suppress(BaseException):
                    self.cancel()
                    concurrent.futures.wait([self.finished], INTERRUPT_POLL_S)
            raise

    def _is_under_way(self) -> bool:
        """Whether the work has begun and not ended. Ctrl-C may have interrupted ``start``."""
        begun = self._task is not None or self._io.is_held_by(self)
        return begun and not self.finished.done()

    def _start(self) -> asyncio.Task[_T]:
        if self._task is None:
            self._task = self._io.loop.create_task(self._work())
            self._task.add_done_callback(self._done)
        return self._task

    def _cancel(self) -> None:
        self._start().cancel()  # a task that has not begun never does

    def _done(self, task: asyncio.Task[_T]) -> None:
        self._io.release(self)
        if task.cancelled():
            self.finished.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.finished.set_exception(error)
        else:
            self.finished.set_result(task.result())


async def ended(future: concurrent.futures.Future[Any]) -> None:
    """Wait on the running loop until ``future`` is done; cancelling the wait does not cancel it."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    def call(_: object) -> None:
        with suppress(RuntimeError):  # that loop is closed: no coroutine waits there any more
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(call)
    await woken


class IOThread:
    """The process's I/O thread. Users get it from :meth:`acquire`, and :meth:`release` it.

    The class keeps a set of users instead of a count, because Ctrl-C at any point could make a
    count wrong.

    Attributes:
        loop: event loop that the thread runs.
        transport: the network, shared by all users of this thread.
        abandoned: whether this is a forked child's copy, which no thread runs; do not use it.
    """

    _shared: ClassVar[IOThread | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self) -> None:
        self.loop = _new_loop()
        self.transport = TcpTransport(self.loop, LookUps(), memory=process_memory())
        self.abandoned = False
        self._users: set[object] = set()
        self._thread = threading.Thread(target=self._run, name="pccl-io", daemon=True)

    @classmethod
    def acquire(cls, user: object) -> IOThread:
        """Return the running I/O thread. It runs until its last user releases it."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            shared = cls._shared
            shared._users.add(user)
            if not shared._thread.is_alive():
                shared._thread.start()
            return shared

    @classmethod
    def give_up(cls, user: object) -> None:
        """Release the thread for ``user``, whose :meth:`acquire` may have been interrupted."""
        if cls._shared is not None:
            cls._shared.release(user)

    def hold(self, user: object) -> bool:
        """Add a user; return False if the thread ends because it has no users."""
        with IOThread._lock:
            if self._users:
                self._users.add(user)
            return user in self._users

    def is_held_by(self, user: object) -> bool:
        """Whether ``user`` is a user of the thread."""
        return user in self._users

    def release(self, user: object) -> None:
        """Remove ``user``; idempotent. The last user ends the thread, and waits until it ends."""
        self._users.discard(user)
        if self._users or self.abandoned:
            return
        if self.owns_current_thread():
            self._end_if_unused()
            return
        with suppress(RuntimeError):  # it has ended already
            self.loop.call_soon_threadsafe(self._end_if_unused)
        while self._thread.is_alive() and not self._users:  # there may be a new user
            self._thread.join(0.01)

    def leave(self, user: object, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do a user's last work, then release the thread; a second call changes nothing.

        This waits for both (at most ``FAREWELL_S`` for the work), except on the I/O thread. An
        exception in this thread (Ctrl-C) is raised at once, and the work ends on its own.
        """
        if self.abandoned:  # a copy that fork made
            return
        if not self.is_held_by(user):
            self.release(user)  # the first release may have been interrupted
            return
        submission = self.submit(farewell).start()
        if self.owns_current_thread():  # a finalizer that happens to run on this thread
            submission.finished.add_done_callback(lambda _: self.release(user))
            return
        try:
            with suppress(TimeoutError, asyncio.CancelledError):
                submission.finished.result(FAREWELL_S)
        finally:
            self.release(user)

    def _end_if_unused(self) -> None:
        with IOThread._lock:
            if self._users:
                return
            if IOThread._shared is self:
                IOThread._shared = None
        self.loop.stop()

    @classmethod
    def abandon(cls) -> None:
        """Drop the parent's thread in a forked child. The parent's connections stay open."""
        cls._lock = threading.RLock()  # some thread of the parent may have held it
        copy, cls._shared = cls._shared, None
        if copy is not None:
            copy.abandoned = True
            copy.transport.abandon()

    def submit(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Submission[_T]:
        """Prepare ``work`` for the I/O thread; ``start`` or ``wait`` begins it.

        The I/O thread makes the coroutine, so that no coroutine is left unawaited.
        """
        return Submission(self, work)

    def call(self, function: Callable[[], _T]) -> _T:
        """Run a short function on the I/O thread, and return its result."""

        async def run() -> _T:
            return function()

        return self.submit(run).wait()

    def owns_current_thread(self) -> bool:
        """Whether the caller runs on the I/O thread, which must not block."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=IOThread.abandon)
