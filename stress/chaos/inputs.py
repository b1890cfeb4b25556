"""Inputs and expected results of the peers: the seed gives both, without rounding.

All values are whole numbers, so small that no dtype used here rounds a sum of them. So a result
does not depend on the order of additions. The peers compare it bit for bit with a sum that is
computed without the library.
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
"""Values are below this, in magnitude; the sum of 64 of them is exact even in float32."""

COUNT_MAX_BITS = 19
"""Binary logarithm of the largest count: 2 or 4 MiB, several segments for each of six peers."""

DTYPES = ("float32", "float64", "int32", "int64")
TAGS_MAX = 3

_MIX = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)
"""Odd constants (of xxHash), one for each number that the values depend on."""


class ReduceStyle(StrEnum):
    """How a peer calls the reduces of an iteration."""

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
    """The reduces that all members call in one iteration."""

    style: ReduceStyle
    reduces: tuple[PlannedReduce, ...]


def iteration(seed: int, number: int) -> Iteration:
    """Return the reduces of iteration ``number``, equal for all members."""
    random = Random(f"iteration {seed} {number}")
    reduces: list[PlannedReduce] = []
    for tag in range(random.randrange(1, TAGS_MAX + 1)):
        dtype = random.choice(DTYPES)
        ops = [ReduceOp.SUM, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX]
        if dtype.startswith("int"):
            ops.append(ReduceOp.AVG)  # an average of floats is rounded
        count = max(1, int(2 ** (random.random() * COUNT_MAX_BITS)))
        reduces.append(PlannedReduce(tag, count, dtype, random.choice(ops), random.random() < 0.5))
    return Iteration(random.choice(list(ReduceStyle)), tuple(reduces))


def values(seed: int, peer: int, number: int, what: PlannedReduce) -> npt.NDArray[np.int32]:
    """Return the input of a peer, int32, shape (what.count,).

    Args:
        seed: seed of the run.
        peer: ``PeerId`` of the peer.
        number: number of the iteration.
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
    """Return ``values`` in the dtype of the reduce."""
    return values(seed, peer, number, what).astype(what.dtype)


def result_of(seed: int, peers: Sequence[int], number: int, what: PlannedReduce) -> Array:
    """Return the expected result over the inputs of ``peers``, in the dtype of the reduce."""
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
