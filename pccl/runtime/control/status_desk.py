"""The queue of connections that ask a master a question: one is served at a time, with pauses.

Source addresses take turns, so that many questions of one source do not delay other sources.

The status and the list of members are the largest answers that a process outside the run can
request. The queue keeps them from slowing down the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pccl.protocol.guards.source_shares import source_of
from pccl.protocol.messages import EvidenceRequest, RunQuery, StatusRequest
from pccl.runtime.clock import Clock, Timer

Question: TypeAlias = RunQuery | StatusRequest | EvidenceRequest
"""The first and only message of a connection from outside the run."""

PAUSE_NS = 20_000_000
"""Pause after each answer. Fifty answers a second are more than people read; each costs a master
of a thousand members a few milliseconds."""


class StatusDesk:
    """The connections whose question waits for an answer.

    Args:
        clock: gives the time.
        serve: called with one connection at a time, and with its question.
    """

    def __init__(self, clock: Clock, serve: Callable[[int, Question], None]) -> None:
        self._clock = clock
        self._serve = serve
        self._waiting: dict[str, dict[int, Question]] = {}
        """Questions by source, then by connection. The next source is first; each has questions."""
        self._source_of: dict[int, str] = {}
        self._timer: Timer | None = None

    def __contains__(self, connection: int) -> bool:
        return connection in self._source_of

    def ask(self, connection: int, host: str, question: Question) -> None:
        """Queue a question. The caller bounds the connections, and thereby the questions."""
        source = self._source_of[connection] = source_of(host)
        self._waiting.setdefault(source, {})[connection] = question
        if self._timer is None:
            self._serve_next()

    def forget(self, connection: int) -> None:
        """Drop the question of a connection that is closed, or has its answer already."""
        source = self._source_of.pop(connection, None)
        if source is not None:
            del self._waiting[source][connection]
            if not self._waiting[source]:
                del self._waiting[source]

    def close(self) -> None:
        """Drop all questions."""
        self._waiting.clear()
        self._source_of.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _serve_next(self) -> None:
        self._timer = None
        source = next(iter(self._waiting), None)
        if source is not None:
            questions = self._waiting[source] = self._waiting.pop(source)  # moved to the end
            connection, question = next(iter(questions.items()))
            self.forget(connection)
            self._timer = self._clock.call_at_ns(self._clock.now_ns() + PAUSE_NS, self._serve_next)
            self._serve(connection, question)
