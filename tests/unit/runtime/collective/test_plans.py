"""Plans: one for equal requests in the same ring, a bounded number of them, no caller's memory."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from pccl.protocol.data_type import DataType
from pccl.protocol.types import (
    Algorithm,
    Descriptor,
    OperationId,
    PeerId,
    Quantization,
    ReduceOp,
    WireFormat,
)
from pccl.runtime.collective.data_plane import DataPlane
from pccl.runtime.collective.operand import borrow
from pccl.runtime.collective.plans import HOPS_MAX, PLANS_MAX, Plans
from pccl.transports.link import Link

ME, OTHER, THIRD = PeerId(1), PeerId(2), PeerId(9)
RING = (ME, OTHER)
WHAT = Descriptor(DataType.FLOAT, ReduceOp.SUM, 1000, algorithm=Algorithm.RING)
BYTES_PER_HOP_MAX = 600


def test_equal_requests_share_a_plan() -> None:
    plans = Plans(None)
    assert plans.find(replace(WHAT), (ME, OTHER), ME) is plans.find(WHAT, RING, ME)
    assert len(plans) == 1


@pytest.mark.parametrize(
    "other",
    [
        (replace(WHAT, count=1001), RING, ME),
        (replace(WHAT, op=ReduceOp.AVG), RING, ME),
        (replace(WHAT, dtype=DataType.INT32), RING, ME),
        (replace(WHAT, algorithm=Algorithm.MESH), RING, ME),
        (replace(WHAT, quantization=Quantization(WireFormat.INT8, 32)), RING, ME),
        (replace(WHAT, weighted=True), RING, ME),
        (WHAT, (OTHER, ME), ME),
        (WHAT, (ME, THIRD), ME),
        (WHAT, (ME, OTHER, THIRD), ME),
        (WHAT, RING, OTHER),
    ],
)
def test_any_other_request_or_ring_has_a_plan_of_its_own(
    other: tuple[Descriptor, tuple[PeerId, ...], PeerId],
) -> None:
    plans = Plans(None)
    first, found = plans.find(WHAT, RING, ME), plans.find(*other)
    what, ring, own = other
    assert found is not first
    assert (found.descriptor, found.ring) == (what, ring)
    assert found.schedule.rank == ring.index(own)
    assert found.schedule.world_size == len(ring)
    assert found.schedule.layout.nbytes == what.tensor_bytes
    assert found.reduction.lacks_weights is what.weighted
    assert (found.codec is not None) is what.quantization.active


@pytest.mark.parametrize(("shapes", "elements"), [(10_000, 1), (1000, 100_000), (300, 20_000_000)])
def test_any_number_of_shapes_leaves_few_plans(shapes: int, elements: int) -> None:
    """Of tiny tensors, of some with a few segments, and of some with hundreds."""
    plans = Plans(None)
    plans.find(WHAT, RING, ME)
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(shapes):
            plans.find(replace(WHAT, count=elements + number), RING, ME)
            assert len(plans) <= PLANS_MAX
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < HOPS_MAX * BYTES_PER_HOP_MAX
    newest = replace(WHAT, count=elements + shapes - 1)
    assert plans.find(newest, RING, ME) is plans.find(newest, RING, ME)


def test_a_plan_over_the_limit_is_not_kept() -> None:
    plans = Plans(8)
    kept = plans.find(WHAT, RING, ME)
    huge = replace(WHAT, count=HOPS_MAX * 8)
    assert plans.find(huge, RING, ME).schedule.hop_count > HOPS_MAX
    assert len(plans) == 0
    assert plans.find(WHAT, RING, ME) is not kept
    assert len(plans) == 1


def ignore(operation: OperationId, digest: bytes) -> None:
    """No operation is done here."""


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.STAR, Algorithm.MESH])
def test_a_plan_keeps_no_memory_of_a_caller(algorithm: Algorithm) -> None:
    link = Link(OTHER)
    plane = DataPlane(lambda peer: link, lambda operation: False, ignore, None)
    what = replace(WHAT, algorithm=algorithm)
    for n in range(3):
        operation = OperationId(term=1, group=0, view=3, tag=5, n=n)
        send, recv = np.ones(1000, np.float32), np.empty(1000, np.float32)
        alive = [weakref.ref(send), weakref.ref(recv)]
        plane.post(operation, what, borrow(send, recv), RING, ME)
        plane.begin(operation)
        plane.end(operation, committed=False)
        del send, recv
        gc.collect()
        assert [reference() for reference in alive] == [None, None]
