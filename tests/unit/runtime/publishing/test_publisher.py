"""A member publishes one version at a time, also when several threads or tasks call ``publish``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from pccl.protocol.data_type import DataType
from pccl.protocol.publication.versions import PublishedVersion
from pccl.protocol.types import NS_PER_S
from pccl.runtime.hashing import InlineHasher
from pccl.runtime.publishing.publisher import Publisher, PublishRequest
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import Loose
from pccl.runtime.tasks import Tasks
from pccl.state.versions import shaped
from tests.support.wires import FakeClock

_T = TypeVar("_T")
COUNT = 1000


class Slow(InlineHasher):
    """Lets other coroutines run meanwhile, as threads do."""

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        await asyncio.sleep(0)
        await super().hash_pieces(memory, numbers)

    async def run(self, function: Callable[[], _T]) -> _T:
        await asyncio.sleep(0)
        return await super().run(function)


def request_of(number: int) -> PublishRequest:
    """A state of its own that differs from the others in one element."""
    array = np.zeros(COUNT, np.float32)
    array[number] = 1
    memory = StateMemory([Loose("w", array, DataType.FLOAT)])
    return PublishRequest(memory, (shaped(memory.layout.entries[0], (COUNT,)),), number)


def test_calls_at_the_same_time_publish_one_after_the_other() -> None:
    announced: list[tuple[PublishedVersion, ...]] = []
    failures: list[dict[str, Any]] = []

    async def publish() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        publisher = Publisher(
            FakeClock(), Any, 0, Slow(), Tasks(loop), NS_PER_S, announced.append  # type: ignore[arg-type]
        )  # fmt: skip
        await asyncio.gather(*(publisher.publish(request_of(number)) for number in range(3)))
        await publisher.publish(request_of(3))  # it waits until the others are announced
        publisher.close()

    asyncio.run(publish())
    assert not failures
    assert [[one.number for one in versions] for versions in announced] == [[0], [1, 0], [2, 1]]
    deltas = announced[-1][0].deltas
    assert [one.after for one in deltas] == [each[0].state.content for each in announced[1:]]
