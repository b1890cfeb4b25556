"""``Coding``: how one running collective shortens what it sends, and what that costs in accuracy.

Contributions and partial results are encoded when a lane is about to send them, so at most one
segment per lane is encoded at a time. A result is encoded once, by its owner, and its encoded bytes
stay where the result will be until it has to be there: whoever lacks them can be sent them again.

With error feedback what a peer's own roundings have cost is kept for the next reduce of the same
tensor: 1-bit SGD (Seide et al., Interspeech 2014) for contributions, DoubleSqueeze (Tang et al.,
ICML 2019) for results, whose rounding the owner owes to everybody.

What is owed is in units of a contribution, of a weighted average in those of one of average weight.
So it pays what the result has lost, whatever weight the own contribution has the next time.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pccl.collectives.layout import Segment
from pccl.collectives.quantization import Codec, EncodeError, noise_source
from pccl.collectives.reductions import Scratch
from pccl.collectives.residual import Residual
from pccl.collectives.weighting import Weighting, scale
from pccl.protocol.types import OperationId
from pccl.runtime.collective.memory import Memory

Array = npt.NDArray[Any]


class Coding:
    """The codec of one operation, bound to its buffers.

    Args:
        codec: of the result's dtype.
        wide_codec: of float32 if that is a half, otherwise the same: encodes what a half cannot
            hold, the contribution and what is owed.
        result: where the result will be.
        residual: what is owed from before and takes what this operation costs; None: nothing is.
        operation: whose values they are.
        rank: own rank.
        shares: how many contributions one unit of the result stands for: the world size of an
            average, weighted or not, otherwise 1.
        stochastic: round at random, by a generator that anybody can repeat.
    """

    def __init__(
        self,
        codec: Codec,
        wide_codec: Codec,
        result: Memory,
        residual: Residual | None,
        operation: OperationId,
        rank: int,
        shares: int,
        *,
        stochastic: bool,
    ) -> None:
        self._codec = codec
        self._wide_codec = wide_codec
        self._residual = residual
        self._result = result
        self._dtype = result.dtype
        self._operation = operation
        self._rank = rank
        self._shares = shares
        self._stochastic = stochastic
        self._factor = 1.0
        self._mean_factor = 1.0
        self._values = Scratch()
        self._total = Scratch()
        self._decoded = Scratch()
        self._errors: dict[int, EncodeError] = {}
        """By position: what rounding has cost, the first time."""
        self._coded: dict[int, Segment] = {}
        """Segments of the result that are still encoded, by position."""

    def weigh(self, weighting: Weighting) -> None:
        """How contributions count, and thus what is owed."""
        self._factor, self._mean_factor = weighting.factor, weighting.mean_factor

    @property
    def error(self) -> float:
        """Relative L2 error of all that this peer has rounded; 0.0 if that was nothing."""
        errors = self._errors.values()
        whole = sum(error.value_squares for error in errors)
        return sqrt(sum(error.error_squares for error in errors) / whole) if whole else 0.0

    def own(self, segment: Segment, values: Array) -> Array:
        """The own contribution with what is owed from before, to be combined with others.

        Good until the next call. What the dtype cannot hold of it stays owed.
        """
        residual = self._residual
        if residual is None:
            if self._factor == 1.0:
                return values
            rounded = self._values.array(len(values), self._dtype)
            scale(values, self._factor, rounded)
            return rounded
        total = self._with_residual(segment, values)
        rounded = self._values.array(len(values), self._dtype)
        with np.errstate(all="ignore"):
            np.copyto(rounded, total, casting="same_kind")
            if segment.position not in self._errors:
                staged = residual.staged[self._range(segment)]
                np.subtract(total, rounded, out=staged)
                if self._mean_factor != 1.0:
                    np.divide(staged, staged.dtype.type(self._mean_factor), out=staged)
        return rounded

    def _with_residual(self, segment: Segment, values: Array) -> Array:
        """In float32, or in float64 if that is the dtype; no finite value becomes infinite."""
        assert self._residual is not None
        staged, current = self._residual.staged, self._residual.current
        total = self._total.array(len(values), staged.dtype)
        np.copyto(total, values, casting="same_kind")
        if self._factor != 1.0:
            scale(total, self._factor, total)
        if current is not None:
            finfo: Any = ml_dtypes.finfo  # typed in part only
            largest = float(finfo(self._dtype).max)
            infinite = np.isinf(total)
            owed = current[self._range(segment)]
            with np.errstate(all="ignore"):
                if self._mean_factor != 1.0:
                    owed = owed * owed.dtype.type(self._mean_factor)
                np.add(total, owed, out=total)
            np.clip(total, -largest, largest, out=total, where=~infinite)
        return total

    def contribute(self, segment: Segment, values: Array) -> memoryview:
        """What the own contribution, with what is owed, is on the wire."""
        if self._residual is None or not segment.is_coded:
            return self.encode(segment, self.own(segment, values))
        if segment.position not in self._errors:
            self._residual.staged[self._range(segment)] = 0
        encoded = np.empty(segment.wire_length, np.uint8)
        total = self._with_residual(segment, values)
        self._encode(segment, total, encoded, self._wide_codec, shares=1 / self._mean_factor)
        return encoded.data

    def encode(self, segment: Segment, values: Array) -> memoryview:
        """What a partial result is on the wire."""
        if not segment.is_coded:
            return values.copy().view(np.uint8).data
        encoded = np.empty(segment.wire_length, np.uint8)
        self._encode(segment, values, encoded, self._codec, shares=1 / self._mean_factor)
        return encoded.data

    def settle(self, segment: Segment) -> None:
        """The result of an own segment is known: from now on it is what its encoded bytes say."""
        if not segment.is_coded:
            return
        exact = self._result.elements(segment.offset, segment.offset + segment.length)
        encoded = np.empty(segment.wire_length, np.uint8)
        self._encode(segment, exact, encoded, self._codec, shares=self._shares)
        self._result.write(segment.offset, encoded)
        self.keep_coded(segment)

    def keep_coded(self, segment: Segment) -> None:
        """The encoded bytes of a segment are in its place of the result, and may be sent again."""
        if segment.is_coded:
            self._coded[segment.position] = segment

    def decode(self, segment: Segment, encoded: memoryview) -> Array:
        """The values of encoded bytes; good until the next call."""
        if not segment.is_coded:
            return np.frombuffer(encoded, self._dtype)
        values = self._values.array(segment.length // self._dtype.itemsize, self._dtype)
        self._codec.decode(np.frombuffer(encoded, np.uint8), values)
        return values

    def decode_in_place(self, segment: Segment) -> None:
        """The encoded bytes of a segment are in its place; put the values there."""
        if not segment.is_coded:
            return
        first, result = segment.offset, self._result
        encoded = np.concatenate(
            [np.frombuffer(v, np.uint8) for v in result.views(first, first + segment.wire_length)]
        )
        target = result.whole(first, first + segment.length)
        if target is not None:
            self._codec.decode(encoded, target)
        else:
            result.write(first, self.decode(segment, encoded.data))

    def end(self, *, committed: bool) -> None:
        """The result counts, and what is still encoded is decoded; or it does not."""
        if committed:
            for segment in self._coded.values():
                self.decode_in_place(segment)
        self._coded.clear()
        if committed and self._residual is not None:
            self._residual.commit()

    def detach(self) -> None:
        """The caller has left, and does not know whether the others commit the result."""
        self._coded.clear()
        if self._residual is not None:
            self._residual.forget()
            self._residual = None

    def _encode(
        self, segment: Segment, values: Array, encoded: Array, codec: Codec, *, shares: float
    ) -> None:
        """Encode, and the first time see what it costs.

        A second copy for a peer that has the first one may find other values in the result; nobody
        takes it for anything.
        """
        noise = None
        if self._stochastic:
            noise = noise_source(self._operation, self._rank, segment.position)
        if segment.position in self._errors:
            codec.encode(values, encoded, noise)
            return
        residual = self._residual
        if residual is None:
            self._errors[segment.position] = codec.encode(values, encoded, noise)
            return
        decoded = self._decoded.array(len(values), self._dtype)
        if codec is self._codec:
            self._errors[segment.position] = codec.encode(values, encoded, noise, decoded)
        else:
            self._errors[segment.position] = codec.encode(values, encoded, noise)
            self._codec.decode(encoded, decoded)
        lost = np.subtract(values, decoded, dtype=residual.staged.dtype)
        with np.errstate(all="ignore"):
            np.multiply(lost, shares, out=lost)
            staged = residual.staged[self._range(segment)]
            np.add(staged, lost, out=staged)
            staged[~np.isfinite(staged)] = 0

    def _range(self, segment: Segment) -> slice:
        itemsize = self._dtype.itemsize
        first = segment.offset // itemsize
        return slice(first, first + segment.length // itemsize)
