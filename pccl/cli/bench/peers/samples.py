"""Random values for results that are not exact: their error, and what it must not exceed.

Every peer's values are independent of the others', one period of them, seeded by the peer's number;
each round begins at another place of it, as in ``values``. The exact sum is that
of the values as the tensor's dtype holds them, in float64. The error is relative in L2, so that of
a sum is that of a mean.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from pccl.cli.bench.peers.bounds import Bound, bound_of
from pccl.cli.bench.peers.ours import Ours
from pccl.cli.bench.peers.values import PERIOD, Array, Pattern, WrongValue
from pccl.cli.bench.variants import ALGORITHMS, Variant

KINDS = ("normal", "outliers")

SEED = 20_240
OUTLIER_SHARE = 0.01
OUTLIER_SIGMAS = 20.0

CARRIERS = tuple(name for name in ALGORITHMS if name != "auto")


def draw(kind: str, peer: int) -> Array:
    """One period of one peer's values, float64, shape (PERIOD,), of standard deviation 1.

    Args:
        kind: ``normal``; or ``outliers``: one of a hundred is 20 or -20 instead.
        peer: counted from 0.
    """
    generator = np.random.default_rng([SEED, peer])
    values = generator.standard_normal(PERIOD)
    if kind == "outliers":
        chosen = generator.random(PERIOD) < OUTLIER_SHARE
        values[chosen] = np.copysign(OUTLIER_SIGMAS, values[chosen])
    return values


class Samples:
    """What one peer puts in, and the exact sums.

    Args:
        dtype: of the tensors; a float.
        peer: whose values, counted from 0.
        peer_count: how many peers' values are added.
        kind: of the values.
    """

    def __init__(self, dtype: np.dtype[Any], peer: int, peer_count: int, kind: str) -> None:
        finfo: Any = ml_dtypes.finfo  # typed in part only
        self._epsilon = float(finfo(dtype).eps)
        held = [draw(kind, other).astype(dtype) for other in range(peer_count)]
        self._contributions = [values.astype(np.float64) for values in held]
        total: Array = np.sum(np.stack(self._contributions), axis=0)
        self.input = Pattern(held[peer])
        self.exact = Pattern(total)
        self.mean_square = float(np.mean(np.square(total)))

    def bounds(self, variant: Variant) -> dict[str, Bound]:
        """Of the error of the sum, by algorithm."""
        return {
            carrier: bound_of(self._contributions, variant, carrier, self._epsilon)
            for carrier in CARRIERS
        }


class Approximate:
    """The values of a side that quantizes; keeps the error and a digest of all its results.

    Args:
        samples: what goes in.
        bounds: what the errors must not exceed, by algorithm.
        ours: tells which algorithm a result has come by.
        shift: rounds by which its values are others than those of the samples' first round.
    """

    def __init__(
        self, samples: Samples, bounds: dict[str, Bound], ours: Ours, shift: int = 0
    ) -> None:
        self._shift = shift
        self._samples = samples
        self._bounds = bounds
        self._ours = ours
        self._digest = xxhash.xxh3_64()
        self._squares = self._exact_squares = 0.0
        self._work = np.zeros(PERIOD)

    @property
    def error(self) -> float:
        """Relative L2 error of all results so far."""
        return math.sqrt(self._squares / self._exact_squares) if self._exact_squares else 0.0

    @property
    def digest(self) -> str:
        """Of the bits of all results so far."""
        return self._digest.hexdigest()

    def fill(self, tensor: Array, round_number: int) -> None:
        """Write this peer's values of a round into a tensor, shape (n,)."""
        self._samples.input.fill(tensor, round_number + self._shift)

    def check_input(self, tensor: Array, round_number: int) -> WrongValue | None:
        """Where a tensor is not what ``fill`` has written."""
        return self._samples.input.compare(tensor, round_number + self._shift)

    def check_sum(self, tensor: Array, round_number: int) -> str | None:
        """What is wrong with a result: its error, as large as no format's is."""
        self._digest.update(tensor.view(np.uint8).data)
        squares = exact_squares = 0.0
        for begin, part in self._samples.exact.parts(len(tensor), round_number + self._shift):
            for at in range(0, len(part), PERIOD):
                exact = part[at : at + PERIOD]
                work = self._work[: len(exact)]
                work[:] = tensor[begin + at : begin + at + len(exact)]
                np.subtract(work, exact, out=work)
                squares += float(np.dot(work, work))
                exact_squares += float(np.dot(exact, exact))
        self._squares += squares
        self._exact_squares += exact_squares
        bound = self._bounds[self._ours.algorithm]
        limit = bound.typical if len(tensor) >= PERIOD else bound.worst
        error = math.sqrt(squares / len(tensor))
        if error <= limit:  # not so if any value is NaN
            return None
        scale = math.sqrt(self._samples.mean_square)
        return (
            f"the relative error is {error / scale:.2e}, and {limit / scale:.2e} is the most that "
            f"the format may cost by {self._ours.algorithm}"
        )
