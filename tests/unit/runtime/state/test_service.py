"""What a participant does with a result that it keeps for late members."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pccl.machines.peer.events import KeepResult, ReduceDone
from pccl.protocol.data_type import DataType
from pccl.protocol.types import Descriptor, OperationId, Quorum, ReduceOp
from pccl.runtime.hashing import InlineHasher
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.results import late_memory, result_digest
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

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.fed: list[Any] = []
        self.read = 0
        unused: Any = None
        clock: Any = SimpleNamespace(now_ns=lambda: 0)
        self.service = StateService(
            clock, unused, self.fed.append, 0, InlineHasher(), Tasks(self.loop), 10, unused
        )
        links = Links(Recorder)
        self.service.exchange = StateExchange(0, links, lambda: 0, 10, self.fed.append)
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
    made = Stage()
    yield made
    made.loop.close()


def test_it_is_copied_in_turns_then_hashed_and_shown_after_the_commit(stage: Stage) -> None:
    stage.turns(2)
    assert 0 < stage.read < COUNT // SEGMENT, "the loop does other work meanwhile"
    stage.turns(20)
    digest = result_digest(late_memory(OPERATION, ASKED, VALUES))
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
