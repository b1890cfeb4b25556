"""``Listeners``: calls several consumers with each event, and drops one that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Listeners"]

_log = logging.getLogger("pccl.events")


class Listeners:
    """Calls each consumer with each event. A consumer that raises is logged once and dropped.

    ``DiLoCo`` and ``GradientAverager`` call what they are given as ``on_event`` this way: a full
    disk or a bug in a consumer ends neither the training of its peer nor that of the partners. A
    program that passes events of its own can use it, too:

        tell = Listeners([JsonlWriter("run.jsonl"), StatusLine()])
        tell(Evaluated(step=100, loss=1.7))

    ``KeyboardInterrupt`` and ``SystemExit`` are no failures: they reach the caller.

    Args:
        consumers: functions of one argument.
    """

    def __init__(self, consumers: Iterable[Callable[[Any], object]]) -> None:
        self._consumers = list(consumers)

    def __call__(self, event: Any) -> None:
        """Call every consumer that is left, in order."""
        for consumer in tuple(self._consumers):
            try:
                consumer(event)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                self._consumers = [one for one in self._consumers if one is not consumer]
                # The place matters if the program has a bug, and not if the system says no.
                trace = None if isinstance(error, OSError) else error
                _log.error(
                    "an on_event consumer failed, and is not called any more (training goes on): "
                    "%r: %s: %s",
                    consumer,
                    type(error).__name__,
                    error,
                    exc_info=trace,
                )
