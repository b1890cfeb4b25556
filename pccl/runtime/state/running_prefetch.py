"""``RunningPrefetch``: a newcomer's prefetch and replay, from registration to admission.

It fetches the members' snapshot. With ``on_reduction``, it also replays the members' results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.types import NS_PER_S
from pccl.runtime.hashing import Hasher
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.prefetch import Prefetch
from pccl.runtime.state.progress import ProgressMeter, SyncProgress
from pccl.runtime.state.replay import ObservedReduction, Replay
from pccl.runtime.tasks import Tasks
from pccl.runtime.waiting import cancelled_and_settled, settled

SETTLE_NS = 10 * NS_PER_S
"""Time for which an admitted newcomer may replay, while the members wait for its next call. The
synchronization fetches the pieces that the remaining results would change."""


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """The request of a newcomer to fetch its state before the admission.

    Attributes:
        memory: memory of the state.
        fetched: stores the pieces.
        on_progress: receives progress reports, on the loop's thread.
        on_reduction: applies a result of the members to the state; runs in another thread.
    """

    memory: StateMemory
    fetched: FetchedPieces
    on_progress: Callable[[SyncProgress], None] | None = None
    on_reduction: Callable[[ObservedReduction], None] | None = None


class RunningPrefetch:
    """One prefetch and its replay, from registration to admission.

    Args:
        request: state and callbacks of the program.
        hasher: hashes, copies and calls ``on_reduction``, off the event loop.
        tasks: runs the replay.
        now_ns: returns the current time in nanoseconds.
        on_ready: called once, when the download is done or has failed.
    """

    def __init__(
        self,
        request: PrefetchRequest,
        hasher: Hasher,
        tasks: Tasks,
        now_ns: Callable[[], int],
        on_ready: Callable[[], None],
    ) -> None:
        self._request = request
        self._hasher = hasher
        self._tasks = tasks
        self._now_ns = now_ns
        self._on_ready = on_ready
        self._exchange: StateExchange | None = None
        """The exchange of the run that this peer joins."""
        self._meter = ProgressMeter(request.on_progress, request.fetched, now_ns)
        self._prefetch: Prefetch | None = None
        self._replay: Replay | None = None
        self._task: asyncio.Task[None] | None = None
        self._settle_by_ns: int | None = None

    def look(self, exchange: StateExchange, *, is_pending: bool) -> None:
        """Start once this peer is registered; stop a replay that outlasts ``SETTLE_NS``."""
        by_ns = self._settle_by_ns
        if self._task is not None and by_ns is not None and self._now_ns() >= by_ns:
            self._task.cancel()
        if self._prefetch is not None or not is_pending:
            return
        request, self._exchange = self._request, exchange
        self._prefetch = exchange.begin_prefetch(request.memory, request.fetched, self._on_ready)
        if request.on_reduction is not None:
            replay = self._replay = Replay(
                self._tasks.loop, self._prefetch, exchange, self._hasher, request.on_reduction
            )
            self._prefetch.on_complete = replay.wake
            self._prefetch.watch(replay.heard)
            self._task = self._tasks.create(replay.run())

    def report(self) -> None:
        """Report the progress to the program."""
        if self._prefetch is not None:
            self._meter.report("prefetching", self._prefetch.download)

    async def settle(self) -> None:
        """Finish the replay after the admission, within ``SETTLE_NS``."""
        self.report()
        if self._replay is not None and self._task is not None:
            self._replay.end()
            self._settle_by_ns = self._now_ns() + SETTLE_NS
            await settled(self._task)

    async def close(self) -> None:
        """Stop the download and the replay. After this, neither of them writes into the tensors."""
        if self._prefetch is not None and self._exchange is not None:
            self._exchange.end_prefetch(self._prefetch.operation)
        if self._task is not None:
            await cancelled_and_settled(self._task)
