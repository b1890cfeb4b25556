"""``AsyncReduceHandle``: the outcome of a reduce that goes on while its caller does other things.

Whoever waits asks the engine; when the last one who waits has left (Ctrl-C, cancellation, a time
limit), the question is withdrawn, and the reduce goes on. An outcome counts as seen, and may change
what the caller sees of the membership, when somebody has asked for it and been told. A handle that
is dropped tells the engine that nobody will ask.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
import weakref
from collections.abc import Generator
from typing import Any

from pccl._api.session import Session
from pccl.checks import check_timeout
from pccl.errors import PCCLError, Result, named
from pccl.runtime.io_thread import INTERRUPT_POLL_S, Submission, ended
from pccl.runtime.requests import ReduceInfo

FUNC = "all_reduce_async"

NO_INFO = ReduceInfo(0, 0, 0)
"""Of a reduce that failed."""


class AsyncReduceHandle:
    """A reduce in flight; any thread, and any asyncio loop, may wait for it, also repeatedly.

    The tensors are borrowed until the reduce has ended, which is when a wait has returned (without
    a wait: when ``done``). To drop a handle is fine: the reduce goes on without it.
    """

    def __init__(self, session: Session, ticket: int) -> None:
        self._session = session
        self._ticket = ticket
        self._lock = threading.Lock()
        self._question: Submission[ReduceInfo] | None = None
        self._waiters = 0
        self._outcome: ReduceInfo | BaseException | None = None
        self._forget = weakref.finalize(self, session.forget, ticket)
        self._forget.atexit = False

    @property
    def done(self) -> bool:
        """Whether the outcome is there, so that no wait would block."""
        return self._outcome is not None or self._session.has_ended(self._ticket)

    def wait(self) -> tuple[bool, Result, ReduceInfo]:
        """Wait for the outcome; whatever happens to the run, this raises nothing.

        Ctrl-C does raise KeyboardInterrupt; the reduce goes on, and waiting again is fine.

        Returns:
            (True, SUCCESS, what the reduce did), or (False, the status code, zeros): then the
            input is bit for bit what it was. ``result`` tells more.
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
            timeout_s: how long; None: until it is there. The time for the reduce itself is
                limited by the ``timeout_s`` of ``all_reduce_async``.

        Raises:
            TimeoutError: not yet; the reduce goes on, and waiting again is fine.
            CollectiveAborted: a member was lost, or withdrew; the input is what it was. Re-read
                the world size and call again.
            PCCLError: as of ``all_reduce``.
        """
        limit_s = check_timeout(timeout_s)
        if self._outcome is None:
            self._wait(limit_s)
        return self._told()

    def __await__(self) -> Generator[Any, None, ReduceInfo]:
        """Wait on the running loop; returns and raises as ``result`` does.

        Cancelling leaves the reduce alone.
        """
        return self._awaited().__await__()

    async def _awaited(self) -> ReduceInfo:
        question = self._ask() if self._outcome is None else None
        if question is not None:
            try:
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
                        f"the reduce has not ended within {limit_s:g} s; it goes on: wait again"
                    )
                concurrent.futures.wait([question.finished], min(left_s, INTERRUPT_POLL_S))
        finally:
            self._leave(question)

    def _ask(self) -> Submission[ReduceInfo] | None:
        """One more waits; None: the outcome is there already."""
        with self._lock:
            if self._outcome is None and self._question is None:
                try:
                    self._question = self._session.finish(self._ticket).start()
                except PCCLError as error:  # closed
                    self._outcome = self._session.info_of(self._ticket) or error
            if self._outcome is not None:
                return None
            self._waiters += 1
            return self._question

    def _leave(self, question: Submission[ReduceInfo]) -> None:
        """One less waits."""
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
            raise named(outcome, FUNC) from outcome.__cause__
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None
        return outcome
