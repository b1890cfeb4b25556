"""Finds the first difference between two shared states, and describes it."""

from __future__ import annotations

from itertools import zip_longest

from pccl.protocol.shared_state import Difference
from pccl.protocol.types import PeerId
from pccl.state.digests import PieceMap
from pccl.state.layout import StateLayout


def layout_difference(
    mine: StateLayout, theirs: StateLayout, reference: PeerId
) -> Difference | None:
    """Describe the first tensor whose name, dtype, size or flag differs; None: none differs.

    ``theirs`` is the layout of peer ``reference``; ``mine`` is another layout.
    """
    for index, (own, other) in enumerate(zip_longest(mine.entries, theirs.entries)):
        if own == other:
            continue
        entry = own if own is not None else other
        assert entry is not None
        text = (
            f"tensor {index} is {other or 'missing'} at peer {reference}, "
            f"but {own or 'missing'} at a peer that differs"
        )
        return Difference(entry.name, None, text)
    return None


def content_difference(mine: PieceMap, theirs: PieceMap) -> Difference | None:
    """Describe the first piece in which two states of the same layout differ, or return None.

    Tensors that may differ do not count.
    """
    for index, entry in enumerate(mine.layout.entries):
        numbers = mine.layout.pieces(index)
        if entry.may_differ or mine.part(numbers) == theirs.part(numbers):
            continue
        piece = next(i for i, number in enumerate(numbers) if mine[number] != theirs[number])
        first = piece * mine.layout.piece_bytes
        last = min(first + mine.layout.piece_bytes, entry.nbytes)
        text = f"tensor {entry} differs first in piece {piece}, bytes {first} to {last}"
        return Difference(entry.name, piece, text)
    return None
