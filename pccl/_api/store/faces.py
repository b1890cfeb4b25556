"""The calls to the run's store: ``AsyncStore`` for asyncio, and ``Store``, made from it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from pccl._api.session import CheckedCall
from pccl._api.signatures import asking, blocking
from pccl._api.store.questions import (
    add_question,
    append_question,
    check_question,
    compare_set_question,
    count_question,
    delete_question,
    get_question,
    set_question,
    wait_question,
)
from pccl.machines.results import StoreResult
from pccl.runtime.requests import StoreQuestion

_Ask = Callable[[StoreQuestion], Coroutine[Any, Any, StoreResult]]
Run = Callable[[CheckedCall[StoreQuestion, StoreResult]], Coroutine[Any, Any, StoreResult]]
"""Makes a call of a communicator, and waits for its end."""


class StoreFace:
    """Base of both faces: asks the store through a communicator.

    Args:
        ask: asks the store, on the I/O thread.
        run: makes a call of the communicator.
    """

    def __init__(self, ask: _Ask, run: Run) -> None:
        self.__ask, self.__run = ask, run

    async def _ask(self, question: StoreQuestion) -> StoreResult:
        name = f"store.{question.asks.op.label}"
        if not question.asks.keys and question.asks.op.names_keys:
            return StoreResult(done=True, value=None)
        call = CheckedCall(name, self.__ask, question, joint=False, is_caller=False)
        return await self.__run(call)


class AsyncStore(StoreFace):
    """The run's key-value store; see :class:`Store`."""

    @asking(set_question)
    async def set(self, question: StoreQuestion) -> None:
        """Set a key."""
        await self._ask(question)

    @asking(get_question)
    async def get(self, question: StoreQuestion) -> bytes:
        """Return the value of a key; wait until the key exists.

        Raises:
            DeadlineExceeded: ``timeout_s`` ran out.
        """
        return (await self._ask(question)).value or b""

    @asking(add_question)
    async def add(self, question: StoreQuestion) -> int:
        """Add ``amount`` to a number, and return the sum. The value of the key is its text.

        A key that does not exist counts as 0.

        Raises:
            ValueError: the value, or the sum, is no 64-bit number.
        """
        return int((await self._ask(question)).value or b"0")

    @asking(append_question)
    async def append(self, question: StoreQuestion) -> None:
        """Append to the value of a key; set a key that does not exist.

        Raises:
            ValueError: the value would be too long.
        """
        await self._ask(question)

    @asking(compare_set_question)
    async def compare_set(self, question: StoreQuestion) -> bytes | None:
        """Set a key to ``desired`` if its value is ``expected``; return the value that it has now.

        A key that does not exist is set if ``expected`` is empty; otherwise None is returned.
        """
        return (await self._ask(question)).value

    @asking(delete_question)
    async def delete(self, question: StoreQuestion) -> bool:
        """Delete a key; return whether it existed."""
        return (await self._ask(question)).done

    @asking(check_question)
    async def check(self, question: StoreQuestion) -> bool:
        """Whether all these keys exist now."""
        return (await self._ask(question)).done

    @asking(wait_question)
    async def wait(self, question: StoreQuestion) -> None:
        """Wait until all these keys exist.

        Raises:
            DeadlineExceeded: ``timeout_s`` ran out.
        """
        await self._ask(question)

    @asking(count_question)
    async def count(self, question: StoreQuestion) -> int:
        """Return how many keys exist."""
        return int((await self._ask(question)).value or b"0")


class Store(StoreFace):
    """The run's key-value store: small values for all members of all groups, by key.

    The master has the map, and carries out each write once, also if this peer has to connect again.
    Each member keeps what it wrote last, and the newest of what it read. So another master
    continues with these keys. A key that only lost members wrote may then be lost, or have an older
    value; and a key that was deleted long ago may come back.

    A key has up to 256 bytes, a value up to 64 KiB. The store has 8 MiB, of which one member writes
    at most 1 MiB; each key counts 256 bytes more.

    Any thread may call. All calls wait while there is no master. They raise, besides other errors:

        Evicted, MasterLost: this peer is no longer a member; ``update_topology`` joins again.
        NotConnected: this peer is not a member yet, or the communicator is closed.
        PendingOperations: 64 calls of this peer to the store are open.
        PCCLError: the store is full (INVALID_USAGE).
    """

    set = blocking(AsyncStore.set)
    get = blocking(AsyncStore.get)
    add = blocking(AsyncStore.add)
    append = blocking(AsyncStore.append)
    compare_set = blocking(AsyncStore.compare_set)
    delete = blocking(AsyncStore.delete)
    check = blocking(AsyncStore.check)
    wait = blocking(AsyncStore.wait)
    count = blocking(AsyncStore.count)
