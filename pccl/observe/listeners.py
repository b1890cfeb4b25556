"""Calls several consumers with each event, drops one that fails, and ends them all in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from pccl.observe.handoff import Handoff
from pccl.telemetry.events import PeerReport
from pccl.telemetry.stream import EventStream

__all__ = ["Listeners"]

_log = logging.getLogger("pccl.events")


class Listeners:
    """Calls each consumer with each event; logs the error of a failing consumer, and drops it.

    ``DiLoCo`` and ``GradientAverager`` call the functions in ``on_event`` this way: a full disk or
    a bug in a consumer does not end the training. A program can use it for its own events, too:

        tell = Listeners([JsonlWriter("run.jsonl"), StatusLine()])
        tell(Evaluated(step=100, loss=1.7))

    ``KeyboardInterrupt`` and ``SystemExit`` are not failures: they reach the caller.

    Args:
        consumers: functions of one argument.
    """

    def __init__(self, consumers: Iterable[Callable[[Any], object]]) -> None:
        self._consumers = list(consumers)

    @property
    def count(self) -> int:
        """Number of consumers that have not failed."""
        return len(self._consumers)

    def __call__(self, event: Any) -> None:
        """Call all remaining consumers, in order."""
        for consumer in tuple(self._consumers):
            try:
                consumer(event)
            except Exception as error:  # noqa: BLE001 - training must continue after any error
                self._consumers = [one for one in self._consumers if one is not consumer]
                # A traceback helps with a bug of the program, but not with an error of the system.
                trace = None if isinstance(error, OSError) else error
                _log.error(
                    "the on_event consumer %r failed, and is not called again; training continues. "
                    "%s: %s",
                    consumer,
                    type(error).__name__,
                    error,
                    exc_info=trace,
                )


class Consumers:
    """The functions to which a program passes the events of one peer or master.

    Args:
        stream: the events.
    """

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._ends: dict[object, Callable[[], None]] = {}

    def add(self, consumer: Callable[[PeerReport], object]) -> Callable[[], None]:
        """Call ``consumer`` with each later event, in a thread of its own.

        Returns:
            A function that ends this.
        """
        handoff = Handoff("pccl-events", Listeners([consumer]))
        end = self._stream.listen(lambda stamped: handoff.put(stamped.event))
        key = object()

        def stop() -> None:
            self._ends.pop(key, None)
            end()
            handoff.close()

        self._ends[key] = stop
        return stop

    def end_after(self, leave: Callable[[], None]) -> None:
        """Call ``leave``, whose events they still get, and end them all."""
        try:
            leave()
        finally:
            for stop in list(self._ends.values()):
                stop()
