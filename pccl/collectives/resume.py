"""What is left of a ring that has lost ranks: its layout without them, and the sums that they lack.

The chunks stay what they were, with the same segments; the chunk of a rank that is lost goes to the
next rank that is left, which begins it, beside its own. So a chunk is still folded in ring order
from the rank that begins it, and partial sums that none of the lost has contributed to are what the
smaller ring would compute.
"""

from __future__ import annotations

from collections.abc import Sequence

from pccl.collectives.layout import SegmentLayout


def layout_without(layout: SegmentLayout, left: Sequence[int]) -> SegmentLayout:
    """The layout of the smaller ring.

    Args:
        layout: of the ring that has lost ranks.
        left: the ranks that are left, ascending, at least one.
    """
    world_size = layout.world_size
    groups: list[tuple[int, ...]] = []
    for number, rank in enumerate(left):
        before = left[number - 1] - (world_size if number == 0 else 0)
        groups.append(tuple(chunk % world_size for chunk in range(before + 1, rank + 1)))
    return layout.regrouped(groups)


def reusable_chunks(rank: int, world_size: int, left: Sequence[int]) -> list[int]:
    """The chunks of which ``rank`` may hold a sum over ranks that are all left, the nearest first.

    Args:
        rank: one that is left.
        world_size: of the ring that has lost ranks.
        left: the ranks that are left.
    """
    chunks: list[int] = []
    for hop in range(1, world_size):
        chunk = (rank - hop) % world_size
        if chunk not in left:
            break
        chunks.append(chunk)
    return chunks
