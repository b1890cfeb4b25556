"""Background work of one engine: none outlives it, and no failure goes unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


class Tasks:
    """Tasks that nobody awaits.

    Args:
        loop: where they run.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._open: dict[asyncio.Task[None], None] = {}

    def create(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Let some work begin; if it fails, the loop's exception handler is told."""
        task = self.loop.create_task(work)
        self._open[task] = None
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """Cancel everything, and wait until it has ended."""
        for task in list(self._open):
            task.cancel()
        for task in list(self._open):
            with suppress(asyncio.CancelledError):
                await task

    def abandon(self) -> None:
        """Cancel everything; it ends when the loop comes to it."""
        for task in list(self._open):
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "pccl task failed", "exception": task.exception()}
            self.loop.call_exception_handler(context)
