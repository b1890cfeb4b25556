"""Deltas of whole states: which are made, and where they lead."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pccl.protocol.data_type import DataType
from pccl.runtime.publishing.copies import apply_deltas, delta_between, fresh_memory
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.digests import piece_digest
from pccl.state.layout import Entry, StateLayout

COUNT = 1 << 19
"""Elements of two pieces."""


def state(values: npt.NDArray[np.float32]) -> StateMemory:
    memory = fresh_memory(StateLayout([Entry("w", DataType.FLOAT, COUNT)]))
    memory.views[0][:] = values.tobytes()
    for number in range(memory.layout.piece_count):
        memory.piece_map[number] = piece_digest(memory.view(memory.layout.piece(number)))
    return memory


@pytest.mark.parametrize(("share", "is_made"), [(0.0, True), (0.01, True), (0.6, False)])
def test_only_short_deltas_are_made(share: float, is_made: bool) -> None:
    rng = np.random.default_rng(1)
    old = rng.standard_normal(COUNT, np.float32)
    new = old + (rng.random(COUNT) < share)
    before, after = state(old), state(new.astype(np.float32))
    deltas = delta_between(before, after)
    assert (deltas is not None) == is_made
    if deltas is not None:
        apply_deltas(before, deltas)
        assert bytes(before.views[0]) == bytes(after.views[0])
