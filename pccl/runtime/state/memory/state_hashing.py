"""``StateHashing``: brings the digests of a state up to date, and stops when it has to."""

from __future__ import annotations

import asyncio
from typing import Any

from pccl.protocol.errors import NotConnected
from pccl.runtime.hashing import Hasher
from pccl.runtime.state.memory.state_memory import StateMemory


class StateHashing:
    """Hashing on behalf of one call.

    Args:
        hasher: does it.

    Attributes:
        is_stopped: whether the communicator is closed.
    """

    def __init__(self, hasher: Hasher) -> None:
        self.is_stopped = False
        self._hasher = hasher
        self._task: asyncio.Task[Any] | None = None
        """Who waits for digests."""

    async def run(self, memory: StateMemory) -> None:
        """Know the digest of everything that may have changed.

        Raises:
            NotConnected: the communicator was closed.
        """
        entries = sorted(memory.stale)
        self._task = asyncio.current_task()
        try:
            if memory.has_devices:
                await self._hasher.run(memory.load)
            await self._hasher.hash_pieces(memory, memory.stale_pieces())
        except asyncio.CancelledError:
            if self.is_stopped:
                raise NotConnected(reason="the communicator was closed") from None
            raise
        finally:
            self._task = None
        memory.hashed(entries)

    def stop(self) -> None:
        """The communicator is closed: fail soon."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()
