"""``Replay``: a newcomer does to its state what the members do to theirs.

It puts what the members held after a synchronization into its tensors, and lets the program apply
each result that was committed since, in order (``results``). What comes of that
is compared with what the members hold after their next synchronization; where it differs, because
something was missed, the difference is fetched like anything else.
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
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_hashing import StateHashing
from pccl.runtime.state.prefetch import Prefetch
from pccl.runtime.state.results import ResultNews, result_memory

_log = logging.getLogger("pccl.peer")

NEWS_KEPT_MAX = 256
"""Results that were announced and not replayed; more means that something is wrong."""

RESULT_BYTES_MIN, RESULT_STATES_MAX = 1 << 30, 8
"""A result is replayed if it takes at most so many bytes, or as many as so many own states."""


@dataclass(frozen=True, slots=True)
class ObservedReduction:
    """A reduction that the members have committed.

    Attributes:
        tag: under which they made it.
        values: its result, shape (n,); of the dtype that they reduced. Yours to keep.
        contributors: ids of the members whose values are in it.
        view: number of the view that it belonged to.
        n: its number among those of its tag and view.
        weights: of a weighted average those of the contributors, in their order; otherwise empty.
    """

    tag: int
    values: Array
    contributors: tuple[int, ...]
    view: int
    n: int
    weights: tuple[float, ...] = ()

    @property
    def total_weight(self) -> float | None:
        """The sum of ``weights``; None if it is no weighted average."""
        return total_weight(self.weights)


class Replay:
    """What one newcomer replays before it is admitted.

    Args:
        loop: where it runs.
        prefetch: of the state.
        exchange: fetches results.
        hasher: hashes, copies, runs the program's function.
        on_reduction: the program's function: applies a result to the tensors of the state.
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
        """By content and index."""
        self._adopted = b""
        """What was fetched and put into the tensors last."""
        self._holds = b""
        """What the tensors were as of, before the results that were replayed."""
        self._index = 0
        """Of the next result."""
        self._ends = False
        self._gave_up = False
        """The program's function has raised."""
        self._turn: asyncio.Future[None] | None = None

    def heard(self, peer: PeerId, payload: bytearray) -> None:
        """A member has announced a result; others announce the same.

        Raises:
            RemoteProtocolError: it has not.
        """
        news = ResultNews.unpack(payload)
        fits = news.count * news.dtype.itemsize <= self._result_bytes_max
        if fits and len(self._news) < NEWS_KEPT_MAX:
            self._news.setdefault((news.content, news.index), news)
        self.wake()

    def wake(self) -> None:
        """Let ``run`` check for new results."""
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)

    def end(self) -> None:
        """Replay what is known, and return."""
        self._ends = True
        self.wake()

    async def run(self) -> None:
        """Replay whatever can be, until the end or until the program's function raises."""
        while not self._gave_up:
            if await self._step():
                continue
            if self._ends:
                return
            self._turn = self._loop.create_future()
            await self._turn

    async def _step(self) -> bool:
        """Do one thing, if there is any."""
        content = self._prefetch.content
        if content and content != self._adopted:
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
        """What was fetched is what the members held: it becomes what is here."""
        memory, prefetch = self._prefetch.memory, self._prefetch
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
            except Exception:  # noqa: BLE001 - the program's bug: what it has not done is fetched
                _log.exception("on_reduction failed, and is not called any more")
                self._gave_up = True
            await StateHashing(self._hasher).run(memory)
        finally:
            self._prefetch.download.is_held = False
        self._index += 1
        self._prefetch.has_changed(memory.piece_map.digest(may_differ=False))
        return True

    def _has_caught_up(self) -> bool:
        """Whether the members have synchronized, and what they held then is what is here."""
        here = self._prefetch.memory.piece_map.digest(may_differ=False)
        if here == self._holds or (here, 0) not in self._news:
            return False
        self._holds, self._index = here, 0
        return True

    async def _fetch(self, news: ResultNews) -> Array | None:
        """The values of a result; None: they can't be had any more."""
        values = np.empty(news.count, news.dtype.to_numpy_dtype())
        memory = result_memory(news.operation, values, news.dtype)
        fetched = FetchedPieces(memory, 0, in_place=True)
        done: asyncio.Future[None] = self._loop.create_future()

        def ready() -> None:
            if not done.done():
                done.set_result(None)

        fetch = self._exchange.begin_prefetch(memory, fetched, ready)
        try:
            await done
            is_whole = len(fetched.verified) == memory.layout.piece_count
            return values if is_whole and fetch.content == news.digest else None
        finally:
            self._exchange.end_prefetch(fetch.operation)
