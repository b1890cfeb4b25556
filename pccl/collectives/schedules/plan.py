"""The schedule of an operation: all members derive the same schedule."""

from __future__ import annotations

from collections.abc import Callable

from pccl.collectives.layout import SegmentLayout, segment_bytes_for
from pccl.collectives.schedules.broadcast import BroadcastSchedule
from pccl.collectives.schedules.direct import DirectSchedule
from pccl.collectives.schedules.exchange import ExchangeSchedule
from pccl.collectives.schedules.gather import GatherSchedule
from pccl.collectives.schedules.ring import RingSchedule
from pccl.protocol.operation import BlockLengths
from pccl.protocol.types import Algorithm, Collective, Descriptor
from pccl.protocol.vocabulary.mesh_plan import EQUAL_MESH, MeshPlan

Schedule = RingSchedule | BroadcastSchedule | DirectSchedule | GatherSchedule | ExchangeSchedule

STAR_ROOT = 0
"""The eldest member is the root of a star."""


def schedule_of(
    descriptor: Descriptor,
    rank: int,
    world_size: int,
    segment_bytes: int | None,
    wire_bytes: Callable[[int], int] | None = None,
    blocks: BlockLengths | None = None,
    mesh_plan: MeshPlan = EQUAL_MESH,
) -> Schedule:
    """Return the schedule of an operation as ``rank`` sees it.

    Args:
        descriptor: what all members requested; its algorithm is settled.
        rank: own position in the ring.
        world_size: members of the ring, at least 2.
        segment_bytes: upper bound of a segment; None: chosen for the tensor and the ring.
        wire_bytes: number of elements -> bytes on the wire; None: values are not encoded.
        blocks: the lengths of the own blocks in an exchange.
        mesh_plan: shares and sites of the ranks, for a mesh.

    Raises:
        ValueError: the rank or the root is outside the ring.
    """
    itemsize = descriptor.dtype.itemsize
    if blocks is not None:
        to_all = descriptor.collective is Collective.ALL_GATHER
        return ExchangeSchedule(rank, blocks, itemsize, segment_bytes, gives_to_all=to_all)
    star, mesh = (descriptor.algorithm is one for one in (Algorithm.STAR, Algorithm.MESH))
    gathers = mesh and descriptor.quantization.is_gathered
    segment_bytes = segment_bytes or segment_bytes_for(
        descriptor.count * itemsize, 1 if gathers else world_size, near=descriptor.near
    )
    match descriptor.collective:
        case Collective.ALL_REDUCE:
            chunks = 1 if star or gathers else world_size
            shares = mesh_plan.shares or ((1,) * world_size if mesh_plan.sites else ())
            layout = SegmentLayout(
                descriptor.count,
                itemsize,
                chunks,
                segment_bytes,
                wire_bytes,
                shares if descriptor.follows_mesh_plan else (),
            )
            if star:
                return DirectSchedule(rank, world_size, layout, STAR_ROOT)
            if gathers:
                return GatherSchedule(rank, world_size, layout)
            if mesh:
                return DirectSchedule(rank, world_size, layout, sites=mesh_plan.sites)
            return RingSchedule(rank, layout)
        case Collective.REDUCE | Collective.REDUCE_SCATTER:
            receivers = (descriptor.root,) if descriptor.collective is Collective.REDUCE else ()
            layout = SegmentLayout(descriptor.count, itemsize, world_size, segment_bytes)
            return DirectSchedule(rank, world_size, layout, receivers=receivers)
        case Collective.BROADCAST:
            layout = SegmentLayout(descriptor.count, itemsize, 1, segment_bytes)
            return BroadcastSchedule(rank, descriptor.root, world_size, layout)
        case Collective.BARRIER:  # a ring without elements
            return RingSchedule(rank, SegmentLayout(0, itemsize, world_size, segment_bytes))
        case _:
            raise ValueError(f"{descriptor} has no schedule without blocks")
