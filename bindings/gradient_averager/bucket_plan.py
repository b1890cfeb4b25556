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
        dtype: the name of its dtype; only equal ones share a bucket.
        nbytes: of its gradient.
    """

    dtype: str
    nbytes: int


def plan_buckets(pieces: Sequence[BucketPiece], bucket_bytes: int) -> list[list[int]]:
    """Deal parameters out to buckets.

    Args:
        pieces: the parameters, in the order of their registration.
        bucket_bytes: what a bucket holds at most; a parameter that is larger has one of its own.

    Returns:
        For each bucket the numbers of its parameters, descending. The buckets are in the order in
        which backward is expected to complete them. Parameters without elements are in none.
    """
    plans: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    for number, piece in reversed(list(enumerate(pieces))):
        if not piece.nbytes:
            continue
        plan = filling.get(piece.dtype, [])
        if not plan or sum(pieces[n].nbytes for n in plan) + piece.nbytes > bucket_bytes:
            plan = filling[piece.dtype] = []
            plans.append(plan)
        plan.append(number)
    return sorted(plans, key=lambda plan: -plan[-1])
