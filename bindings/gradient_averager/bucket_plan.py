"""Which gradients are reduced together. Pure: numbers in, numbers out.

Backward makes the gradients of the last layers first, so buckets are filled from the last parameter
to the first: the first bucket is complete, and on its way, while most of backward is still to come
(Li et al., arXiv:2006.15704, section 3.2.3). The plan follows from the parameters alone and not
from the order in which their gradients happen to arrive, so that it is the same on all peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """What the plan has to know of a parameter.

    Attributes:
        numel: its elements.
        dtype: the name of its dtype; only equal ones share a bucket.
        itemsize: bytes of an element.
    """

    numel: int
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class BucketSlot:
    """Where in a bucket a gradient lies.

    Attributes:
        parameter: its number, in the order that was given.
        begin: its first element.
        end: behind its last element.
    """

    parameter: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket: gradients of one dtype, one behind the other.

    Attributes:
        dtype: of all of them.
        slots: from the last parameter to the first.
    """

    dtype: str
    slots: tuple[BucketSlot, ...]

    @property
    def numel(self) -> int:
        """Elements in all."""
        return self.slots[-1].end


def plan_buckets(pieces: Sequence[BucketPiece], bucket_bytes: int) -> list[BucketPlan]:
    """Deal parameters out to buckets.

    Args:
        pieces: the parameters, in the order of their registration.
        bucket_bytes: what a bucket holds at most; a parameter that is larger has one of its own.

    Returns:
        The buckets, in the order in which backward is expected to complete them. Parameters without
        elements are in none.
    """
    plans: list[BucketPlan] = []
    filling: dict[str, list[BucketSlot]] = {}
    for number in reversed(range(len(pieces))):
        piece = pieces[number]
        if not piece.numel:
            continue
        slots = filling.setdefault(piece.dtype, [])
        begin = slots[-1].end if slots else 0
        if slots and (begin + piece.numel) * piece.itemsize > bucket_bytes:
            plans.append(BucketPlan(piece.dtype, tuple(slots)))
            slots = filling[piece.dtype] = []
            begin = 0
        slots.append(BucketSlot(number, begin, begin + piece.numel))
    rest = [BucketPlan(dtype, tuple(slots)) for dtype, slots in filling.items()]
    return sorted([*plans, *rest], key=lambda plan: -plan.slots[-1].parameter)
