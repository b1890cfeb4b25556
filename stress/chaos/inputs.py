"""What the peers reduce, and what must come out: all follows from the seed, and nothing is rounded.

All values are whole numbers, so small that no sum of them is rounded in any dtype used here. So
what comes out does not depend on the order of additions, and is checked bit for bit against a sum
that is made without the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.protocol.types import ReduceOp

Array = npt.NDArray[Any]

VALUE_MAX = 512
"""Values lie below this, in magnitude; 64 of them add up exactly even in a float32."""

COUNT_MAX_BITS = 19
"""Half a million elements at most, 2 or 4 MiB: several segments for each of six peers."""

DTYPES = ("float32", "float64", "int32", "int64")
TAGS_MAX = 3

_MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""Odd constants (of xxHash), one for each thing that the values depend on."""


class ReduceStyle(StrEnum):
    """How an iteration's reduces are called."""

    ONE_BY_ONE = "one_by_one"
    RETRYING = "retrying"
    HANDLES = "handles"


@dataclass(frozen=True, slots=True)
class PlannedReduce:
    """One reduce of an iteration."""

    tag: int
    count: int
    dtype: str
    op: ReduceOp
    in_place: bool


@dataclass(frozen=True, slots=True)
class Iteration:
    """What all members call in one iteration."""

    style: ReduceStyle
    reduces: tuple[PlannedReduce, ...]


def iteration(seed: int, number: int) -> Iteration:
    """What iteration ``number`` consists of: the same for all members."""
    random = Random(f"iteration {seed} {number}")
    reduces: list[PlannedReduce] = []
    for tag in range(random.randrange(1, TAGS_MAX + 1)):
        dtype = random.choice(DTYPES)
        ops = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX]
        if dtype.startswith("int"):
            ops.append(ReduceOp.AVG)  # of floats it is rounded
        count = max(1, int(2 ** (random.random() * COUNT_MAX_BITS)))
        reduces.append(PlannedReduce(tag, count, dtype, random.choice(ops), random.random() < 0.5))
    return Iteration(random.choice(list(ReduceStyle)), tuple(reduces))


def values(seed: int, peer: int, number: int, what: PlannedReduce) -> npt.NDArray[np.int32]:
    """What a peer puts in, int32, shape (what.count,).

    Args:
        seed: of the run.
        peer: its ``PeerId``.
        number: of the iteration.
        what: the reduce.
    """
    mixed = 0
    for constant, part in zip(_MIX, (seed, peer, number, what.tag, 1), strict=True):
        mixed = ((mixed ^ part) * constant + (mixed >> 15)) & 0xFFFFFFFF
    found = np.arange(what.count, dtype=np.uint32)
    found *= np.uint32(mixed | 1)
    found += np.uint32(mixed >> 7)
    found >>= np.uint32(11)
    found %= np.uint32(2 * VALUE_MAX - 1)
    return found.astype(np.int32) - np.int32(VALUE_MAX - 1)


def input_of(seed: int, peer: int, number: int, what: PlannedReduce) -> Array:
    """``values`` in the dtype of the reduce."""
    return values(seed, peer, number, what).astype(what.dtype)


def result_of(seed: int, peers: Sequence[int], number: int, what: PlannedReduce) -> Array:
    """What must come out if these peers contributed, in the dtype of the reduce."""
    first, *rest = (values(seed, peer, number, what) for peer in peers)
    found = first
    for each in rest:
        match what.op:
            case ReduceOp.MIN:
                np.minimum(found, each, out=found)
            case ReduceOp.MAX:
                np.maximum(found, each, out=found)
            case _:
                found += each
    if what.op is ReduceOp.AVG:  # toward zero
        found = np.sign(found) * (np.abs(found) // len(peers))
    return found.astype(what.dtype)
