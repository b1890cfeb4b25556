"""The queue of connections that ask a master a question: one is served at a time, then a pause.

The status and the list of members are the largest answers that a process without a place in the run
can ask for. The queue keeps them from slowing down the run.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.messages import RunQuery, StatusRequest
from pccl.runtime.clock import Clock, Timer

PAUSE_NS = 20_000_000
"""Fifty answers a second are more than people read; each costs a master of a thousand members a
few milliseconds."""


class StatusDesk:
    """Connections that have asked.

    Args:
        clock: time.
        serve: called with each connection in turn, and with its question.
    """

    def __init__(
        self, clock: Clock, serve: Callable[[int, RunQuery | StatusRequest], None]
    ) -> None:
        self._clock = clock
        self._serve = serve
        self._waiting: dict[int, RunQuery | StatusRequest] = {}
        self._timer: Timer | None = None

    def __contains__(self, connection: int) -> bool:
        return connection in self._waiting

    def ask(self, connection: int, question: RunQuery | StatusRequest) -> None:
        """Queue a question; the caller bounds the number of connections, and so of questions."""
        self._waiting[connection] = question
        if self._timer is None:
            self._serve_next()

    def forget(self, connection: int) -> None:
        """It is gone, or is served in another way."""
        self._waiting.pop(connection, None)

    def close(self) -> None:
        """Serve nobody any more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _serve_next(self) -> None:
        self._timer = None
        connection = next(iter(self._waiting), None)
        if connection is not None:
            question = self._waiting.pop(connection)
            self._timer = self._clock.call_at_ns(self._clock.now_ns() + PAUSE_NS, self._serve_next)
            self._serve(connection, question)
