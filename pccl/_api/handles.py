"""``AsyncReduceHandle``: the outcome of a reduce that runs in the background.

The first waiter asks the engine for the outcome. When the last waiter has left (Ctrl-C,
cancellation, a time limit), the handle withdraws the question, and the reduce continues. An outcome
counts as seen, and may change the membership that the caller sees, once a waiter has received it.
A dropped handle releases its outcome in the engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

from pccl._api.session import Session
from pccl.checks import check_timeout
from pccl.errors import PCCLError, Result, named
from pccl.runtime.calls import JointWork
from pccl.runtime.io_thread import INTERRUPT_POLL_S, Submission, ended
from pccl.runtime.requests import ReduceInfo

NO_INFO = ReduceInfo(0, 0, 0)
"""The info of a reduce that failed."""


class AsyncReduceHandle:
    """A reduce in flight; any thread, and any asyncio loop, may wait for it, also repeatedly.

    The reduce uses the tensors until it has ended: a wait has returned, or ``done`` is True. A
    program may drop the handle: the reduce continues without it.
    """

    def __init__(self, session: Session, ticket: int, func: str) -> None:
        self._func = func
        self._session = session
        self._ticket = ticket
        self._lock = threading.Lock()
        self._question: Submission[ReduceInfo] | None = None
        self._joint = JointWork()
        """The work of the question."""
        self._waiters = 0
        self._outcome: ReduceInfo | BaseException | None = None
        self._forget = weakref.finalize(self, session.forget, ticket)
        self._forget.atexit = False

    @property
    def done(self) -> bool:
        """Whether the reduce has an outcome, so that a wait does not block."""
        return self._outcome is not None or self._session.has_ended(self._ticket)

    def wait(self) -> tuple[bool, Result, ReduceInfo]:
        """Wait for the outcome. Errors of the run are returned, not raised.

        Ctrl-C raises KeyboardInterrupt. The reduce continues, and the program may wait again.

        Returns:
            (True, SUCCESS, what the reduce did), or (False, the status code, zeros): then the
            input is unchanged. ``result`` raises the error itself.
        """
        try:
            return True, Result.SUCCESS, self.result()
        except PCCLError as error:
            return False, error.result, NO_INFO
        except Exception:  # noqa: BLE001 - whatever it is, ``result`` raises it
            return False, Result.INTERNAL_ERROR, NO_INFO

    def result(self, timeout_s: float | None = None) -> ReduceInfo:
        """Wait for the outcome.

        Args:
            timeout_s: longest wait, in seconds; None: no limit. The time of the reduce itself is
                limited by the ``timeout_s`` of ``all_reduce_async``.

        Raises:
            TimeoutError: no outcome yet; the reduce continues, and the program may wait again.
            CollectiveAborted: a member was lost, or withdrew; the input is unchanged. Read the
                world size again, and call again.
            PCCLError: the errors of ``all_reduce``.
        """
        limit_s = check_timeout(timeout_s)
        if self._outcome is None and limit_s is None:
            with self._session.callers.waiting(threading.current_thread(), self._joint):
                self._wait(None)
        elif self._outcome is None:
            self._wait(limit_s)  # it may go on without the other members
        return self._told()

    def __await__(self) -> Generator[Any, None, ReduceInfo]:
        """Wait on the running loop; return and raise as ``result`` does.

        A cancelled wait does not cancel the reduce.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> ReduceInfo:
        question = self._ask() if self._outcome is None else None
        if question is not None:
            task = asyncio.current_task()
            assert task is not None
            try:
                with self._session.callers.waiting(task, self._joint):
                    await ended(question.finished)
            finally:
                self._leave(question)
        return self._told()

    def _wait(self, limit_s: float | None) -> None:
        question = self._ask()
        if question is None:
            return
        ends = None if limit_s is None else time.monotonic() + limit_s
        try:
            while not question.finished.done():
                left_s = INTERRUPT_POLL_S if ends is None else ends - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(
                        f"the reduce did not end within {limit_s:g} s, but continues; wait again"
                    )
                concurrent.futures.wait([question.finished], min(left_s, INTERRUPT_POLL_S))
        finally:
            self._leave(question)

    def _ask(self) -> Submission[ReduceInfo] | None:
        """Add a waiter, and return its question to the engine; None if the outcome is known."""
        with self._lock:
            if self._outcome is None and self._question is None:
                try:
                    self._question = self._session.finish(self._ticket, self._joint).start()
                except PCCLError as error:  # closed
                    self._outcome = self._session.info_of(self._ticket) or error
            if self._outcome is not None:
                return None
            self._waiters += 1
            return self._question

    def _leave(self, question: Submission[ReduceInfo]) -> None:
        """Remove a waiter. Keep any outcome; otherwise the last waiter withdraws the question."""
        with self._lock:
            self._waiters -= 1
            if self._outcome is not None:
                return
            if question.finished.done():
                error = question.finished.exception()
                if error is not None:
                    self._outcome = error.with_traceback(None)  # its frames hold the tensors
                else:
                    self._outcome = question.finished.result()
            elif not self._waiters:
                question.cancel()
            else:
                return
            self._question = None
        if self._outcome is not None:
            self._forget()  # the engine has no reason to keep it

    def _told(self) -> ReduceInfo:
        outcome = self._outcome
        if isinstance(outcome, PCCLError):
            raise named(outcome, self._func) from outcome.__cause__
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return outcome
