"""Decides which gradients are reduced together. Pure: numbers in, numbers out.

Backward makes the gradients of the last layers first, so buckets are filled from the last parameter
to the first. The reduce of the first bucket then starts early in the backward pass (Li et al.,
arXiv:2006.15704, section 3.2.3). The plan depends on the parameters only, not on the order in which
gradients arrive, so it is the same on all peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BucketPiece:
    """Facts about one parameter, for the plan.

    Attributes:
        dtype: name of its dtype; parameters in a bucket have equal dtypes.
        nbytes: size of its gradient in bytes.
    """

    dtype: str
    nbytes: int


def plan_buckets(pieces: Sequence[BucketPiece], bucket_bytes: int) -> list[list[int]]:
    """Distribute parameters over buckets.

    Args:
        pieces: the parameters, in the order of their registration.
        bucket_bytes: size limit of a bucket, in bytes; a larger parameter gets its own bucket.

    Returns:
        For each bucket the numbers of its parameters, descending. The buckets are in the order in
        which backward is expected to complete them. Parameters without elements are in no bucket.
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
