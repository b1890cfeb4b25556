"""One collective of a process group, from its start to its outcome, as a torch ``Work``."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any

from torch import Tensor

from pccl import AsyncReduceHandle, Result
from pccl.bindings.process_group.promise import Promise, RunFuture
from pccl.bindings.process_group.team import LiveRanks, Team
from pccl.bindings.process_group.untyped import futures
from pccl.errors import CollectiveAborted, TooFewPeers

Launch = Callable[[LiveRanks], AsyncReduceHandle]
"""Starts the collective among the live ranks."""


class Flight(Promise):
    """A collective that is repeated after a loss, if ``repeats``.

    Args:
        team: who takes part.
        launch: starts it.
        tensors: what it returns.
        tag: its tag; None: none that all ranks know.
        alone: does the same in a team of one.
        finish: copies results to the tensors, where they were staged.
        repeats: whether it makes sense without the lost ranks.
        in_background: whether it ends while nobody waits.
    """

    def __init__(
        self,
        team: Team,
        launch: Launch,
        tensors: list[Tensor],
        tag: int | None,
        *,
        alone: Callable[[], object],
        finish: Callable[[], object],
        repeats: bool,
        in_background: bool,
    ) -> None:
        super().__init__(tensors, tag)
        self._team, self._launch, self._alone, self._finish = team, launch, alone, finish
        self._repeats = repeats
        self._lock = threading.Lock()
        self._handle = self._start()
        self._settles_here = not in_background
        if in_background:
            asyncio.run_coroutine_threadsafe(self._settle(_suspended), courier())

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait for the outcome; see the base class. A limit counts for background flights only."""
        if self._settles_here:
            with self._lock:
                if not self._ended.done():
                    _run(self._settle(_blocking))
        return super().wait(timeout)

    def get_future(self) -> Any:
        """Return a future of the tensors; from now on, the flight ends in the background."""
        with self._lock:
            if self._settles_here and not self._ended.done():
                asyncio.run_coroutine_threadsafe(self._settle(_suspended), courier())
            self._settles_here = False
        return super().get_future()

    def _call_back(self, future: RunFuture) -> None:
        """Let the program's callbacks run in a thread of their own: they may wait for flights."""
        threading.Thread(
            target=future.complete, args=(self._told,), name="pccl-callbacks", daemon=True
        ).start()

    def _start(self) -> AsyncReduceHandle | None:
        live = self._team.look()
        if not self._repeats:
            for rank in range(self._team.size):
                live.place(rank)
        try:
            return self._launch(live)
        except TooFewPeers:
            return None

    async def _settle(self, outcome_of: Callable[[AsyncReduceHandle], Any]) -> None:
        try:
            while self._handle is not None:
                try:
                    await outcome_of(self._handle)
                    break
                except TooFewPeers:
                    self._handle = None
                except CollectiveAborted as error:
                    if not is_repeatable(error):
                        raise
                    self._handle = self._start()
            if self._handle is None:
                self._alone()
            self._finish()
        except KeyboardInterrupt:
            raise  # it may be waited for again
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            self.end(error)
        else:
            self.end()


class Several(Promise):
    """Several collectives as one ``Work``."""

    def __init__(self, works: Sequence[Any], tensors: list[Tensor]) -> None:
        super().__init__(tensors, works[0].tag if works else None)
        self._works: Sequence[Promise] = works

    def settle(self) -> None:
        """Do so for all of them."""
        for work in self._works:
            work.settle()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait(timeout)
        return True

    def get_future(self) -> Any:
        """Return a future of all tensors."""
        if self._future is None:
            self._future = future = RunFuture(self.tag, self.settle, "+")
            both = futures.collect_all([work.get_future() for work in self._works])
            both.add_done_callback(partial(future.complete, self._collected))
        return self._future

    def _collected(self, all_done: Any) -> list[Tensor]:
        for one in all_done.value():
            one.value()
        return self._tensors

    def is_completed(self) -> bool:
        """Whether all have an outcome."""
        return all(work.is_completed() for work in self._works)


def is_repeatable(error: CollectiveAborted) -> bool:
    """Whether the same collective may succeed if it is called again."""
    return type(error) is CollectiveAborted and error.result is Result.RANK_CONNECTION_LOST


async def _suspended(handle: AsyncReduceHandle) -> None:
    await handle


async def _blocking(handle: AsyncReduceHandle) -> None:
    handle.result()


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("the coroutine has suspended")


@cache
def courier() -> asyncio.AbstractEventLoop:
    """Return the loop that ends the flights of this process in the background."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="pccl-flights", daemon=True).start()
    return loop


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=courier.cache_clear)
