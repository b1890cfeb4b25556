"""Asks for the status of a run, keeps what the page shows of the past, and tells all browsers.

Whatever browsers do, the master gets one question at a time, and at most two a second.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from pccl.observe.page.picture import picture, point
from pccl.protocol.status_report import StatusReport
from pccl.telemetry.events import PeerReport
from pccl.telemetry.words import line_of

PERIOD_S = 0.5
IDLE_PERIOD_S = 2.0
"""Time between two questions, with and without browsers."""

POINTS_MAX = 1200
"""Points of the charts: ten minutes with a browser."""

LOG_MAX = 500
"""Lines of the log that a new browser gets."""

CLIENTS_MAX = 16
"""Browsers at the same time."""


class Feed:
    """The messages for all browsers.

    Args:
        status: returns the status of the run. It may block, and runs in another thread. If it
            raises, the page says why, and keeps the last picture.
    """

    def __init__(self, status: Callable[[], StatusReport]) -> None:
        self._status = status
        self.clients = 0
        self._picture = "null"
        self._trouble = ""
        self._version = 0
        self._before: StatusReport | None = None
        self._asked_s = time.monotonic()
        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS_MAX)
        self._log: deque[tuple[int, dict[str, Any]]] = deque(maxlen=LOG_MAX)
        self._logged = 0
        self._lock = threading.Lock()
        """Protects the log, which another thread writes."""
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, event: PeerReport) -> None:
        """Add an event to the log. Any thread may call this; it does not block."""
        level, text = line_of(event)
        line = {"at": time.time(), "level": level.name, "text": text}
        with self._lock:
            self._logged += 1
            self._log.append((self._logged, line))

    async def run(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await self._ask()
            await asyncio.sleep(PERIOD_S if self.clients else IDLE_PERIOD_S)

    def end(self) -> None:
        """End the messages of all browsers."""
        self._ended = True
        self._wake()

    async def _ask(self) -> None:
        try:
            status = await asyncio.to_thread(self._status)
        except Exception as error:  # noqa: BLE001 - the page shows it, and asks again
            self._trouble = f"no status: {error}"
        else:
            self._take(status, time.monotonic())
        self._version += 1
        self._wake()

    def _take(self, status: StatusReport, now_s: float) -> None:
        passed_s, self._asked_s = now_s - self._asked_s, now_s
        before, self._before = self._before, status
        if before is not None and (before.run, before.term) != (status.run, status.term):
            before = None
        if before is not None:
            self._points.append({"at": time.time(), **point(before, status, passed_s)})
        self._picture, self._trouble = json.dumps(picture(status)), ""

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _lines_after(self, number: int) -> list[tuple[int, dict[str, Any]]]:
        with self._lock:
            return [line for line in self._log if line[0] > number]

    async def messages(self, last: int) -> AsyncIterator[str]:
        """Yield server-sent events for one browser: the past, then what changes.

        A slow browser misses pictures, and gets the newest one. It costs no memory.

        Args:
            last: number of the last line of the log that the browser has; 0: none.
        """
        if self.clients >= CLIENTS_MAX:
            return
        self.clients += 1
        try:
            yield "retry: 2000\n\n"
            yield _event("past", json.dumps(list(self._points)))
            sent = -1
            while not self._ended:
                changed = self._changed
                for number, line in self._lines_after(last):
                    last = number
                    yield _event("log", json.dumps(line), number)
                if sent != self._version:
                    sent = self._version
                    latest = self._points[-1] if self._points else None
                    yield _event(
                        "picture",
                        f'{{"trouble": {json.dumps(self._trouble)}, "point": {json.dumps(latest)}, '
                        f'"run": {self._picture}}}',
                    )
                await changed.wait()
        finally:
            self.clients -= 1


def _event(kind: str, data: str, number: int | None = None) -> str:
    """Return one server-sent event. JSON has no line ends of its own."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {kind}\ndata: {data}\n\n"
