"""The queue of connections that ask a master a question: one is served at a time, then a pause.

Sources take turns, so that nobody keeps others from an answer by asking much.

The status and the list of members are the largest answers that a process without a place in the run
can ask for. The queue keeps them from slowing down the run.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.guards.source_shares import source_of
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
        self._waiting: dict[str, dict[int, RunQuery | StatusRequest]] = {}
        """By source, the one whose turn it is first; none is empty."""
        self._source_of: dict[int, str] = {}
        self._timer: Timer | None = None

    def __contains__(self, connection: int) -> bool:
        return connection in self._source_of

    def ask(self, connection: int, host: str, question: RunQuery | StatusRequest) -> None:
        """Queue a question; the caller bounds the number of connections, and so of questions."""
        source = self._source_of[connection] = source_of(host)
        self._waiting.setdefault(source, {})[connection] = question
        if self._timer is None:
            self._serve_next()

    def forget(self, connection: int) -> None:
        """It is gone, or is served in another way."""
        source = self._source_of.pop(connection, None)
        if source is not None:
            del self._waiting[source][connection]
            if not self._waiting[source]:
                del self._waiting[source]

    def close(self) -> None:
        """Serve nobody any more."""
        self._waiting.clear()
        self._source_of.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _serve_next(self) -> None:
        self._timer = None
        source = next(iter(self._waiting), None)
        if source is not None:
            questions = self._waiting[source] = self._waiting.pop(source)  # it is the last one now
            connection, question = next(iter(questions.items()))
            self.forget(connection)
            self._timer = self._clock.call_at_ns(self._clock.now_ns() + PAUSE_NS, self._serve_next)
            self._serve(connection, question)
