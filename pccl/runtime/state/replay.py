"""``Replay``: applies the members' reductions to the state of a newcomer.

When the members commit the first result after a synchronization, it writes their state of that
synchronization into the tensors. Before, the tensors may hold a checkpoint that is newer than all
that is left of the run. Then it lets the program apply each committed result, in order
(``results``). It compares the outcome with the members' state after their next synchronization.
The prefetch fetches any difference, for example after a missed result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pccl.collectives.weighting import total_weight
from pccl.protocol.types import PeerId
from pccl.runtime.collective.memory import Array
from pccl.runtime.hashing import Hasher
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.memory.state_hashing import StateHashing
from pccl.runtime.state.prefetch import Prefetch
from pccl.runtime.state.results import ResultNews, fetch_result, result_memory

_log = logging.getLogger("pccl.peer")

NEWS_KEPT_MAX = 256
"""Limit of announced results that wait for their replay; the newcomer forgets the oldest."""

RESULT_BYTES_MIN, RESULT_STATES_MAX = 1 << 30, 8
"""A newcomer ignores a result larger than both this size and this multiple of its state."""


@dataclass(frozen=True, slots=True)
class ObservedReduction:
    """A reduction that the members have committed.

    Attributes:
        tag: tag of the reduction.
        values: its result, shape (n,), in the dtype of the members' tensors. The program owns it.
        contributors: ids of the members whose values are in it.
        view: number of the view of the reduction.
        n: its number among the operations of its tag and view.
        weights: weights of the contributors in a weighted average, in their order; else empty.
    """

    tag: int
    values: Array
    contributors: tuple[int, ...]
    view: int
    n: int
    weights: tuple[float, ...] = ()

    @property
    def total_weight(self) -> float | None:
        """The sum of ``weights``; None if the reduction is no weighted average."""
        return total_weight(self.weights)


class Replay:
    """Replays reductions for one newcomer before its admission.

    Args:
        loop: event loop of the replay.
        prefetch: download of the newcomer's state.
        exchange: fetches results.
        hasher: hashes, copies and calls ``on_reduction``, off the event loop.
        on_reduction: the program's function, which applies a result to the tensors of the state.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        prefetch: Prefetch,
        exchange: StateExchange,
        hasher: Hasher,
        on_reduction: Callable[[ObservedReduction], None],
    ) -> None:
        self._loop = loop
        self._prefetch = prefetch
        self._exchange = exchange
        self._hasher = hasher
        self._on_reduction = on_reduction
        states_bytes = RESULT_STATES_MAX * prefetch.memory.layout.nbytes
        self._result_bytes_max = max(RESULT_BYTES_MIN, states_bytes)
        self._news: dict[tuple[bytes, int], ResultNews] = {}
        """(content, index) -> the announced result that waits for its replay."""
        self._adopted = b""
        """Digest of the last snapshot that the replay wrote into the tensors."""
        self._holds = b""
        """Digest of the members' contents from which ``_index`` counts the results."""
        self._index = 0
        """Index of the next result to replay."""
        self._ends = False
        self._gave_up = False
        """Whether ``on_reduction`` has raised."""
        self._turn: asyncio.Future[None] | None = None

    def heard(self, peer: PeerId, payload: bytearray) -> None:
        """Store an announcement within the limits. Repetitions by other members change nothing.

        Raises:
            RemoteProtocolError: ``payload`` is malformed.
        """
        news = ResultNews.unpack(payload)
        fits = news.count * news.dtype.itemsize <= self._result_bytes_max
        if fits:
            self._news.setdefault((news.content, news.index), news)
        if len(self._news) > NEWS_KEPT_MAX:
            del self._news[next(iter(self._news))]
        self.wake()

    def wake(self) -> None:
        """Let ``run`` check for new results."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def end(self) -> None:
        """Let ``run`` return once it has replayed all announced results."""
        self._ends = True
        self.wake()

    async def run(self) -> None:
        """Replay results as they come, until ``end`` or until ``on_reduction`` raises."""
        while not self._gave_up:
            if await self._step():
                continue
            if self._ends:
                return
            self._turn = self._loop.create_future()
            await self._turn

    async def _step(self) -> bool:
        """Adopt a snapshot or replay one result. Return False if nothing can be done now."""
        content = self._prefetch.content
        if content != self._adopted and (content, 0) in self._news:
            self._prefetch.download.is_held = True
            try:
                await self._adopt(content)
            finally:
                self._prefetch.download.is_held = False
            return True
        news = self._news.pop((self._holds, self._index), None)
        if news is not None:
            return await self._replay(news)
        return self._has_caught_up()

    async def _adopt(self, content: bytes) -> None:
        """Write the fetched snapshot into the tensors; the next result is the first after it.

        Skip a snapshot that is older than the tensors. It was compared with them before a replay,
        so its missing pieces do not restore what the replay has changed. Without this check, the
        tensors would be a mixture, to which the same results are applied again.
        """
        memory, prefetch = self._prefetch.memory, self._prefetch
        if not prefetch.completes:
            self._adopted = content
            return
        await self._hasher.run(partial(prefetch.fetched.apply, prefetch.download.wanted))
        await StateHashing(self._hasher).run(memory)
        self._adopted = self._holds = content
        self._index = 0
        self._news = {key: one for key, one in self._news.items() if key[0] == content}

    async def _replay(self, news: ResultNews) -> bool:
        values = await self._fetch(news)
        if values is None:
            return False
        op = news.operation
        seen = ObservedReduction(
            op.tag, values, news.contributors, view=op.view, n=op.n, weights=news.weights
        )
        memory = self._prefetch.memory
        self._prefetch.download.is_held = True
        try:
            memory.touch_all()  # first: the program may fail, having changed some of it
            try:
                await self._hasher.run(partial(self._on_reduction, seen))
            except Exception:  # noqa: BLE001 - the program's bug: the peer fetches the difference
                _log.exception("on_reduction failed; this peer does not call it again")
                self._gave_up = True
            await StateHashing(self._hasher).run(memory)
        finally:
            self._prefetch.download.is_held = False
        self._index += 1
        self._prefetch.has_changed(memory.piece_map.digest(may_differ=False))
        return True

    def _has_caught_up(self) -> bool:
        """If the tensors equal a newer state of the members, continue from it and return True."""
        here = self._prefetch.memory.piece_map.digest(may_differ=False)
        if here == self._holds or (here, 0) not in self._news:
            return False
        self._holds, self._index = here, 0
        return True

    async def _fetch(self, news: ResultNews) -> Array | None:
        """Fetch the values of a result. Return None if no member offers them."""
        values = np.empty(news.count, news.dtype.to_numpy_dtype())
        memory = result_memory(str(news.operation), values, news.dtype)
        return values if await fetch_result(self._exchange, memory, news.digest) else None
