"""Copies of states, and the deltas between them. Call these functions off the event loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pccl.protocol.data_type import DataType
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import Loose
from pccl.state.delta import apply_delta, delta_layout, encode_delta
from pccl.state.layout import Entry, StateLayout
from pccl.state.versions import CHEAP_SHARE


def fresh_memory(layout: StateLayout, base: StateMemory | None = None) -> StateMemory:
    """Return memory for a state; with ``base``, of the same layout, a copy of it."""
    arrays = [np.empty(entry.count, entry.dtype.to_numpy_dtype()) for entry in layout.entries]
    memory = StateMemory(
        [Loose(e.name, array, e.dtype) for e, array in zip(layout.entries, arrays, strict=True)]
    )
    if base is not None:
        for view, there in zip(memory.views, base.views, strict=True):
            view[:] = there
        memory.piece_map = base.piece_map.copy()
    return memory


def copy_of(memory: StateMemory, entries: Sequence[Entry | None]) -> StateMemory:
    """Return a copy of some tensors of a state.

    Args:
        memory: the state.
        entries: the entry of each tensor in the copy; None: the copy lacks it.
    """
    memory.load(range(len(entries)))
    copied = fresh_memory(StateLayout(entry for entry in entries if entry is not None))
    views = [view for view, one in zip(memory.views, entries, strict=True) if one is not None]
    for view, there in zip(copied.views, views, strict=True):
        view[:] = there
    return copied


def delta_between(before: StateMemory, after: StateMemory) -> StateMemory | None:
    """Return the deltas between two states of one layout, both with up-to-date digests.

    None: they would be too long to be worth fetching.
    """
    layout = after.layout
    left = layout.nbytes // CHEAP_SHARE
    deltas: list[bytes | memoryview] = []
    for number in range(layout.piece_count):
        if before.piece_map[number] == after.piece_map[number]:
            deltas.append(b"")
            continue
        piece = layout.piece(number)
        itemsize = layout.entries[piece.entry].dtype.itemsize
        delta = encode_delta(before.view(piece), after.view(piece), itemsize)
        deltas.append(delta)
        left -= len(delta)
        if left < 0:
            return None
    made = fresh_memory(delta_layout(map(len, deltas)))
    for view, delta in zip(made.views, deltas, strict=True):
        view[:] = delta
    return made


def apply_deltas(memory: StateMemory, deltas: StateMemory) -> list[int]:
    """Apply ``deltas``, which fit the layout of a state, to it; return the changed pieces.

    Raises:
        ValueError: a delta does not fit its piece; then the state is half changed.
    """
    layout = memory.layout
    changed = [n for n, entry in enumerate(deltas.layout.entries) if entry.count]
    for number in changed:
        piece = layout.piece(number)
        itemsize = layout.entries[piece.entry].dtype.itemsize
        apply_delta(deltas.views[number], memory.view(piece), itemsize)
    return changed


def as_array(memory: StateMemory, index: int, shape: Sequence[int]) -> np.ndarray:
    """Return a tensor of a state as a read-only array, which shares its memory."""
    dtype: DataType = memory.layout.entries[index].dtype
    array = np.frombuffer(memory.views[index], dtype.to_numpy_dtype()).reshape(shape)
    array.flags.writeable = False
    return array
