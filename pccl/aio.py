"""The asyncio API: the same calls, awaitable on the caller's loop.

The data moves on the library's I/O thread, so a busy loop of the caller's does not slow it down.
Cancelling a call leaves it for good: once the ``CancelledError`` is raised, nothing is written into
the buffers any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from pccl.errors import PCCLError
from pccl.protocol.limits import Timing
from pccl.protocol.types import Attribute, ReduceOp
from pccl.session import (
    ATTEMPTS_MAX,
    POOL_SIZE_MAX,
    ReduceInfo,
    Session,
    check_range,
    info_of,
    named,
)

_T = TypeVar("_T")

__all__ = ["Communicator", "ReduceInfo"]


class Communicator:
    """One process's membership in a run; see :class:`pccl.Communicator` for all details.

    Use with ``async with``, or call ``await close()``.
    """

    def __init__(
        self,
        address: str,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        timing: Timing | None = None,
    ) -> None:
        pool_size = check_range(
            "p2p_connection_pool_size", p2p_connection_pool_size, 0, POOL_SIZE_MAX
        )
        self._session = Session(self, address, peer_group, timing)
        self.p2p_connection_pool_size = pool_size

    async def connect(self, n_attempts: int = 5) -> None:
        """Join the run; see :meth:`pccl.Communicator.connect`."""
        n_attempts = check_range("n_attempts", n_attempts, 1, ATTEMPTS_MAX)
        await self._run(self._session.engine.connect(n_attempts), "connect")

    async def update_topology(self) -> None:
        """Admit newcomers; see :meth:`pccl.Communicator.update_topology`."""
        await self._run(self._session.engine.update_topology(), "update_topology")

    async def are_peers_pending(self) -> bool:
        """Whether newcomers wait; see :meth:`pccl.Communicator.are_peers_pending`."""
        return await self._run(self._session.engine.are_peers_pending(), "are_peers_pending")

    async def all_reduce(
        self,
        send: object,
        recv: object | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        tag: int = 0,
    ) -> ReduceInfo:
        """Reduce over the group; see :meth:`pccl.Communicator.all_reduce`."""
        work = self._session.reduce(send, recv, op, tag)
        return info_of(await self._run(work, "all_reduce"))

    def get_attribute(self, attribute: Attribute) -> int:
        """A world size; see :meth:`pccl.Communicator.get_attribute`."""
        return self._session.attribute(attribute)

    @property
    def peer_id(self) -> int:
        """This incarnation's id."""
        return self._session.peer_id()

    async def close(self) -> None:
        """Say goodbye and free everything; idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._session.close)

    async def __aenter__(self) -> Communicator:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, work: Coroutine[Any, Any, _T], func: str) -> _T:
        submission = self._session.submit(work, func)
        ended = asyncio.wrap_future(submission.start().finished)
        try:
            return await asyncio.shield(ended)
        except PCCLError as error:
            raise named(error, func) from None
        except asyncio.CancelledError:
            submission.cancel()
            while not ended.done():  # until the buffers are free, however often we are cancelled
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            if not ended.cancelled():
                ended.exception()
            self._session.settle_left(submission)
            raise
