"""What goes ahead of a start never costs more than was charged for it, whatever the schedule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pccl.collectives.schedules.direct import DirectSchedule
from pccl.collectives.schedules.plan import schedule_of
from pccl.collectives.schedules.ring import RingSchedule
from pccl.machines.peer.eager import EagerBudget
from pccl.protocol.data_type import DataType
from pccl.protocol.frame import HEADER_BYTES
from pccl.protocol.limits import ANNOUNCE_BYTES_MAX, EAGER_BYTES_MAX, EARLY_STORE_BYTES_MAX
from pccl.protocol.operation import Eager
from pccl.protocol.types import (
    STAR_BYTES_MAX,
    Algorithm,
    Collective,
    Descriptor,
    OperationId,
    ReduceOp,
)

RING, STAR, MESH = Algorithm.RING, Algorithm.STAR, Algorithm.MESH


@given(
    world_size=st.integers(2, 33),
    kind=st.sampled_from([DataType.UINT8, DataType.FLOAT16, DataType.FLOAT, DataType.DOUBLE]),
    nbytes=st.integers(8, EAGER_BYTES_MAX) | st.integers(EAGER_BYTES_MAX, 16 << 20),
    algorithm=st.sampled_from([RING, STAR, MESH]),
    segment_bytes=st.none() | st.integers(20_000, 2 << 20),
    near=st.booleans(),
    part=st.none() | st.sampled_from([Collective.REDUCE, Collective.REDUCE_SCATTER]),
)
def test_the_cost_covers_all_frames_of_a_link(
    world_size: int,
    kind: DataType,
    nbytes: int,
    algorithm: Algorithm,
    segment_bytes: int | None,
    near: bool,
    part: Collective | None,
) -> None:
    nbytes = min(nbytes, STAR_BYTES_MAX) if algorithm is STAR else nbytes
    what = Descriptor(
        kind, ReduceOp.SUM, nbytes // kind.itemsize, algorithm=algorithm, forced=True, near=near
    )
    if part is not None:
        what = Descriptor.direct(part, kind, count=what.count, root=world_size // 2)
    budget, operation = EagerBudget(EAGER_BYTES_MAX, segment_bytes), OperationId(1, 0, 1, 0, 0)
    budget.all_asked(OperationId(1, 0, 1, 9, 0))
    eager = budget.take(operation, what, world_size)
    charged = EARLY_STORE_BYTES_MAX - budget.free_bytes
    for rank in {0, 1, world_size - 1}:
        schedule = schedule_of(what, rank, world_size, segment_bytes)
        if isinstance(schedule, RingSchedule):
            # The last steps of a reduce-scatter need a contribution that is missing.
            steps, routes = world_size - 2, [schedule.outgoing]
        else:
            assert isinstance(schedule, DirectSchedule)
            steps, routes = 0, list(schedule.outgoing_to.values())
            if eager and part is not None:  # so that a complete part proves that all have begun
                assert len(schedule.incoming_from) == world_size - 1
        for route in routes:
            early = [hop.segment.wire_length for hop in route.hops if hop.step <= steps]
            payload = sum(early) if eager is Eager.SEGMENTS else len(early) * ANNOUNCE_BYTES_MAX
            query = HEADER_BYTES
            needed = query + payload + len(early) * HEADER_BYTES
            assert not eager or needed <= charged
