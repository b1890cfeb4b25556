"""Threads that look up host names, and that do not delay the end of the process.

The system may take half a minute to give up on a name server. An ordinary executor joins its
threads when the loop and the interpreter end, and would delay both ends for that time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LookUps(Executor):
    """An executor that runs each call on a new daemon thread."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Call ``fn`` on a new thread; return the future of its result."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the future carries it
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="pccl-lookup", daemon=True).start()
        return future
