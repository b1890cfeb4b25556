"""What a member does with a result that it offers to newcomers, or keeps for late members."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl.machines.peer.events import KeepResult, ReduceDone
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Descriptor, OperationId, PeerId, Quorum, ReduceOp
from pccl.runtime.collective.memory import Memory
from pccl.runtime.hashing import Hasher, InlineHasher, hash_here
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import ResultNews, late_memory, result_memory
from pccl.runtime.state.service import StateService
from pccl.runtime.tasks import Tasks
from pccl.transports.link import Links
from tests.support.small_state import Recorder

OPERATION = OperationId(1, 0, 1, 5, 0)
COUNT = 30
ASKED = Descriptor(DataType.FLOAT, ReduceOp.SUM, COUNT, quorum=Quorum(2))
SEGMENT = 1
VALUES = np.arange(COUNT, dtype=np.float32)


class Stage:
    """A service, and a transfer that is complete."""

    def __init__(self, hasher: Hasher) -> None:
        self.loop = asyncio.new_event_loop()
        self.fed: list[Any] = []
        self.read = 0
        unused: Any = None
        clock: Any = SimpleNamespace(now_ns=lambda: 0)
        self.service = StateService(
            clock, unused, self.fed.append, 0, hasher, Tasks(self.loop), 10, unused
        )
        self.links = Links(Recorder)
        self.service.exchange = StateExchange(0, self.links, lambda: 0, 10, self.fed.append)

    def keep(self) -> None:
        transfer: Any = self
        self.service.keep_result(KeepResult(OPERATION, ASKED), transfer)

    def copy_into(self, values: npt.NDArray[np.float32]) -> Iterator[int]:
        for start in range(0, COUNT, SEGMENT):
            values[start : start + SEGMENT] = VALUES[start : start + SEGMENT]
            self.read += 1
            yield 4 * SEGMENT

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.loop.run_until_complete(asyncio.sleep(0))

    @property
    def shown(self) -> int:
        return len(self.service.exchange.snapshots)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage(InlineHasher())
    made.keep()
    yield made
    made.loop.close()


def test_it_is_copied_in_turns_then_hashed_and_shown_after_the_commit(stage: Stage) -> None:
    stage.turns(2)
    assert 0 < stage.read < COUNT // SEGMENT, "the loop does other work meanwhile"
    stage.turns(20)
    memory = late_memory(OPERATION, ASKED, VALUES)
    hash_here(memory, range(1))
    digest = memory.piece_map.digest(may_differ=False)
    assert stage.fed == [ReduceDone(OPERATION, digest, is_kept=True)]
    assert stage.shown == 0
    stage.service.result_ended(OPERATION, committed=True)
    assert stage.shown == 1


@pytest.mark.parametrize("turns", [0, 3])
def test_nothing_is_read_after_the_operation(stage: Stage, turns: int) -> None:
    """Its caller may have its memory back."""
    stage.turns(turns)
    stage.service.result_ended(OPERATION, committed=False)
    read = stage.read
    stage.turns(20)
    assert (stage.read, stage.fed, stage.shown) == (read, [], 0)


class Gated(InlineHasher):
    """Waits with its work, as the threads of the real one may."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def hash_pieces(self, memory: StateMemory, numbers: Iterable[int]) -> None:
        await self.gate.wait()
        await super().hash_pieces(memory, numbers)


def test_a_result_for_newcomers_is_hashed_while_the_loop_does_other_work() -> None:
    """Its call returns, and the program may change the memory: the copy is another."""
    hasher = Gated()
    stage, values = Stage(hasher), VALUES.copy()
    results = stage.service.exchange.results
    results.synchronized(b"c" * 32)
    results.watch(PeerId(9), StateSender(OperationId(0, 0, 0, 1, 0), stage.links))
    operand: Any = SimpleNamespace(data_type=DataType.FLOAT, target=Memory([values]))
    call: Any = SimpleNamespace(operand=operand, observable=True)
    result: Any = SimpleNamespace(operation=OPERATION, contributors=(PeerId(1),), weights=())
    stage.service.note_result(call, result)
    values[:] = 0
    stage.turns(9)
    assert stage.shown == 0
    hasher.gate.set()
    stage.turns(9)
    assert stage.shown == 1
    link = stage.links.to(PeerId(9))
    assert isinstance(link, Recorder)
    ((_, payload),) = link.sent
    assert isinstance(payload, bytes)
    offered = result_memory(str(OPERATION), VALUES, DataType.FLOAT)
    hash_here(offered, range(1))
    assert ResultNews.unpack(payload).digest == offered.piece_map.digest(may_differ=False)
    stage.loop.close()
