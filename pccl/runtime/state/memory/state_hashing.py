"""``StateHashing``: updates the digests of a state, and stops when the communicator closes."""

from __future__ import annotations

import asyncio
from typing import Any

from pccl.protocol.errors import NotConnected
from pccl.runtime.hashing import Hasher
from pccl.runtime.state.memory.state_memory import StateMemory


class StateHashing:
    """The hashing of one call.

    Args:
        hasher: hashes off the event loop.

    Attributes:
        is_stopped: whether the communicator is closed.
    """

    def __init__(self, hasher: Hasher) -> None:
        self.is_stopped = False
        self._hasher = hasher
        self._task: asyncio.Task[Any] | None = None
        """The task that waits for the digests."""

    async def run(self, memory: StateMemory) -> None:
        """Hash all stale tensors.

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
        """Cancel the hashing, because the communicator is closed."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()
