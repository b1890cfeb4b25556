"""Which schedule carries out what was asked for. All members derive the same one."""

from __future__ import annotations

from typing import assert_never

from pccl.collectives.broadcast import BroadcastSchedule
from pccl.collectives.layout import Layout, segment_bytes_for
from pccl.collectives.ring import RingSchedule
from pccl.collectives.schedule import Schedule
from pccl.protocol.types import Collective, Descriptor


def plan(descriptor: Descriptor, rank: int, world_size: int, segment_bytes: int | None) -> Schedule:
    """The schedule of an operation as ``rank`` sees it.

    Args:
        descriptor: what all members asked for.
        rank: own position in the ring.
        world_size: members of the ring, at least 2.
        segment_bytes: upper bound of a segment; None: chosen by size of tensor and ring.

    Raises:
        ValueError: a rank or a root outside the ring.
    """
    itemsize = descriptor.dtype.itemsize
    segment_bytes = segment_bytes or segment_bytes_for(descriptor.count * itemsize, world_size)
    match descriptor.collective:
        case Collective.ALL_REDUCE:
            layout = Layout(descriptor.count, itemsize, world_size, segment_bytes)
            return RingSchedule(rank, layout)
        case Collective.BROADCAST:
            layout = Layout(descriptor.count, itemsize, 1, segment_bytes)
            return BroadcastSchedule(rank, descriptor.root, world_size, layout)
        case Collective.BARRIER:  # a ring of nothing
            return RingSchedule(rank, Layout(0, itemsize, world_size, segment_bytes))
        case _:
            assert_never(descriptor.collective)
