"""``Work`` and ``Future`` of torch, whose outcome a thread of ours sets.

A callback of a future runs at another moment on each rank, and callbacks of several futures run in
another order. So the collectives in a callback have numbers of their own (``Branch``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Future as Outcome
from contextlib import suppress
from contextvars import ContextVar
from datetime import timedelta
from itertools import count
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

TAGS = 1024
"""Different tags of one process group, which its collectives take in turn."""

BRANCH_TAGS = 8
"""Different tags of the collectives of one callback, which they take in turn."""

BRANCHES = 1 << 15
"""Ranges of tags of a process group for the collectives of callbacks."""


class Branch:
    """A callback of the program, which counts its collectives by itself.

    Args:
        tag: tag of the collective whose outcome it gets.
        path: which of the callbacks of that collective it is.
    """

    current: ContextVar[Branch | None] = ContextVar("branch", default=None)
    """The callback that runs in this thread."""

    def __init__(self, tag: int, path: str) -> None:
        self._slot, self._name, self._numbers = tag % TAGS, f"{tag}{path}", count()

    def number(self) -> int:
        """Return the number of the next collective, the same on all ranks.

        Two callbacks of collectives in flight at once never share one.
        """
        name = f"{self._name}:{next(self._numbers) % BRANCH_TAGS}"
        return self._slot + TAGS * (1 + zlib.crc32(name.encode()) % BRANCHES)

    def run(self, callback: Callable[[Any], Any], future: Any) -> Any:
        """Call a callback."""
        before = self.current.set(self)
        try:
            return callback(future)
        finally:
            self.current.reset(before)


class RunFuture(Future[Any]):
    """A future of which a wait does what must be done for the outcome to come.

    torch's own futures are objects of C++, whose wait only waits. DDP waits for this one as for
    them.

    Args:
        tag: tag of the collective; None: its callbacks are no branches.
        settle: does what must be done.
        path: which callback of the collective has this outcome.
    """

    def __init__(self, tag: int | None, settle: Callable[[], object], path: str = "") -> None:
        super().__init__()
        self._tag, self._path = tag, path
        self._settle: Callable[[], object] | None = settle
        self._callbacks = count()

    def wait(self) -> Any:
        """Wait for the value. The error of a collective or a callback is a RuntimeError."""
        settle = self._settle
        if settle is not None and not self.done():
            with suppress(Exception):  # it is the outcome of this future, too
                settle()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> RunFuture:
        """Return a future of what a callback returns."""
        path = f"{self._path}/{next(self._callbacks)}"
        chained = RunFuture(self._tag, self._settle or _nothing, path)
        call = self._called_as(path, callback)
        super().add_done_callback(lambda future: chained.complete(call, future))
        return chained

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Let a callback run when there is a value."""
        path = f"{self._path}/{next(self._callbacks)}"
        super().add_done_callback(self._called_as(path, callback))

    def complete(self, call: Callable[..., Any], *values: Any) -> None:
        """Take what a call returns or raises as the outcome."""
        try:
            value = call(*values)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            value = _Failure(error)
            self._set_unwrap_func(_Failure.value)  # pyright: ignore[reportUnknownMemberType]
        self._settle = None
        self.set_result(value)

    def _called_as(self, path: str, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if self._tag is None:
            return callback
        branch = Branch(self._tag, path)
        return lambda future: branch.run(callback, future)


class _Failure:
    """The outcome of a future that has failed.

    For C++, an error that was set in Python is a value. DDP searches it for tensors, by pickling
    it, or converts it to one, by its text if it is none. Both raise the error.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def value(self) -> None:
        raise RuntimeError(str(self)) from self._error

    def __str__(self) -> str:
        return f"{type(self._error).__name__}: {self._error}"

    def __reduce__(self) -> Any:
        return self.value()


def _nothing() -> None:
    """A future with an outcome needs nothing."""


class Promise(Work):
    """A ``Work`` whose outcome some thread sets.

    Args:
        tensors: what the collective returns.
        tag: tag of the collective.
    """

    def __init__(self, tensors: list[Tensor], tag: int | None = None) -> None:
        super().__init__()
        self.tag = tag
        self._tensors = tensors
        self._ended = Outcome[None]()
        self._future: RunFuture | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Set the outcome."""
        if error is not None:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def settle(self) -> None:
        """Do what the thread that waits must do for an outcome to come."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait for the outcome.

        Raises:
            TimeoutError: none came in this time; zero: no limit.
            PCCLError, RankLost: the collective failed.
        """
        self._ended.result(timeout.total_seconds() or None)
        return True

    def get_future(self) -> Any:
        """Return a future of the tensors. Its error is a RuntimeError with the text of ours."""
        if self._future is None:
            self._future = future = RunFuture(self.tag, self.settle)
            self._ended.add_done_callback(lambda _: self._call_back(future))
        return self._future

    def _call_back(self, future: RunFuture) -> None:
        future.complete(self._told)

    def _told(self) -> list[Tensor]:
        self._ended.result()
        return self._tensors

    def is_completed(self) -> bool:
        """Whether there is an outcome."""
        return self._ended.done()

    def is_success(self) -> bool:
        """Whether it has succeeded."""
        return self._ended.done() and self._ended.exception() is None

    def exception(self) -> BaseException | None:
        """Return why it has failed; None: it has not."""
        return self._ended.exception() if self._ended.done() else None

    def result(self) -> list[Tensor]:
        """Return the tensors, once there is an outcome."""
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        """Wait for the outcome."""
        self.wait()


def done(tensors: list[Tensor]) -> Promise:
    """Return the work of tensors that no other rank is needed for."""
    promise = Promise(tensors)
    promise.end()
    return promise
