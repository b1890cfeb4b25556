"""``Coding``: how one running collective quantizes the values that it sends.

A lane encodes contributions and partial results right before it sends them, so at most one segment
per lane is encoded at a time. The owner of a result encodes it once. The encoded bytes stay in the
place of the result until the operation ends, so that a peer can send them again.

With error feedback a peer keeps its own rounding errors for the next reduce of the same tensor:
1-bit SGD (Seide et al., Interspeech 2014) for contributions, DoubleSqueeze (Tang et al., ICML 2019)
for results, whose error the owner keeps for all members.

The residual is in units of one contribution; for a weighted average, of a contribution with average
weight. So it corrects the result by the same amount, whatever the own weight is next time.
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
        codec: codec for the dtype of the result.
        wide_codec: codec for float32 if the result has 16-bit floats, otherwise ``codec``. It
            encodes the contribution plus residual, which may not fit into 16 bits.
        result: memory of the result.
        residual: residual of earlier operations, which also takes new errors; None: no feedback.
        operation: id of the operation.
        rank: own rank.
        shares: contributions per unit of the result: the world size for an average, weighted or
            not, otherwise 1.
        stochastic: whether to round at random, with a reproducible generator.
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
        self._is_muted = False
        """Whether the own contribution has weight 0, so that it is never read."""
        self._values = Scratch()
        self._total = Scratch()
        self._decoded = Scratch()
        self._errors: dict[int, EncodeError] = {}
        """Rounding errors of the first encoding of each segment, by position."""
        self._coded: dict[int, Segment] = {}
        """Segments of the result that are still encoded, by position."""

    def weigh(self, weighting: Weighting) -> None:
        """Set the factors of the own contribution and of the residual in a weighted average."""
        self._factor, self._mean_factor = weighting.factor, weighting.mean_factor
        self._is_muted = self._rank in weighting.muted

    @property
    def error(self) -> float:
        """Relative L2 error of all values that this peer has rounded; 0.0 if there are none."""
        errors = self._errors.values()
        whole = sum(error.value_squares for error in errors)
        return sqrt(sum(error.error_squares for error in errors) / whole) if whole else 0.0

    def own(self, segment: Segment, values: Array) -> Array:
        """Return the own contribution plus residual, to be combined with other contributions.

        The array is valid until the next call. The part that the dtype cannot hold stays in the
        residual.
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
                staged[~np.isfinite(staged)] = 0
        return rounded

    def abstain(self, segment: Segment) -> None:
        """Keep the residual of a segment, because a muted contribution adds nothing."""
        if self._residual is not None and segment.position not in self._errors:
            self._residual.keep(self._range(segment))

    def _with_residual(self, segment: Segment, values: Array) -> Array:
        """Return ``values`` plus residual, in the residual's dtype. Finite values stay finite."""
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
        """Return the wire bytes of the own contribution plus residual; zeros if muted."""
        if self._is_muted:
            self.abstain(segment)
            return self.encode(segment, np.zeros_like(values))
        if self._residual is None or not segment.is_coded:
            return self.encode(segment, self.own(segment, values))
        if segment.position not in self._errors:
            self._residual.staged[self._range(segment)] = 0
        encoded = np.empty(segment.wire_length, np.uint8)
        total = self._with_residual(segment, values)
        self._encode(segment, total, encoded, self._wide_codec, shares=1 / self._mean_factor)
        return encoded.data

    def encode(self, segment: Segment, values: Array) -> memoryview:
        """Return the wire bytes of a partial result."""
        if not segment.is_coded:
            return values.copy().view(np.uint8).data
        encoded = np.empty(segment.wire_length, np.uint8)
        self._encode(segment, values, encoded, self._codec, shares=1 / self._mean_factor)
        return encoded.data

    def settle(self, segment: Segment) -> None:
        """Replace the complete result of an own segment by its encoded bytes."""
        if not segment.is_coded:
            return
        exact = self._result.elements(segment.offset, segment.offset + segment.length)
        encoded = np.empty(segment.wire_length, np.uint8)
        self._encode(segment, exact, encoded, self._codec, shares=self._shares)
        self._result.write(segment.offset, encoded)
        self.keep_coded(segment)

    def keep_coded(self, segment: Segment) -> None:
        """Record that the place of a segment holds encoded bytes, which may be sent again."""
        if segment.is_coded:
            self._coded[segment.position] = segment

    def decode(self, segment: Segment, encoded: memoryview) -> Array:
        """Return the values of encoded bytes, in an array that is valid until the next call."""
        if not segment.is_coded:
            return np.frombuffer(encoded, self._dtype)
        values = self._values.array(segment.length // self._dtype.itemsize, self._dtype)
        self._codec.decode(np.frombuffer(encoded, np.uint8), values)
        return values

    def decode_in_place(self, segment: Segment) -> None:
        """Replace the encoded bytes in the place of a segment by its values."""
        if not segment.is_coded:
            return
        first, result = segment.offset, self._result
        target = result.whole(first, first + segment.length)
        if target is not None:
            self._codec.decode(self._bytes_in_place(segment), target)
        else:
            result.write(first, self.coded_values(segment))

    def values_in_place(self, segment: Segment) -> Array | None:
        """Return the values of a segment that is still encoded in its place; None: it is not."""
        return self.coded_values(segment) if segment.position in self._coded else None

    def coded_values(self, segment: Segment) -> Array:
        """Return the values of the encoded bytes in the place of a segment, as ``decode`` does."""
        return self.decode(segment, self._bytes_in_place(segment).data)

    def _bytes_in_place(self, segment: Segment) -> npt.NDArray[np.uint8]:
        views = self._result.views(segment.offset, segment.offset + segment.wire_length)
        return np.concatenate([np.frombuffer(view, np.uint8) for view in views])

    def end(self, *, committed: bool) -> None:
        """End the operation. If ``committed``, decode the result and commit the residual."""
        if committed:
            for segment in self._coded.values():
                self.decode_in_place(segment)
        self._coded.clear()
        if committed and self._residual is not None:
            self._residual.commit()

    def detach(self) -> None:
        """Forget the residual: the caller left, and this peer does not know the outcome."""
        self._coded.clear()
        if self._residual is not None:
            self._residual.forget()
            self._residual = None

    def _encode(
        self, segment: Segment, values: Array, encoded: Array, codec: Codec, *, shares: float
    ) -> None:
        """Encode ``values``. The first encoding of a segment also records the rounding error.

        A peer that has the first copy discards a second one, whose values may differ.
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
        with np.errstate(all="ignore"):
            lost = np.subtract(values, decoded, dtype=residual.staged.dtype)
            np.multiply(lost, shares, out=lost)
            staged = residual.staged[self._range(segment)]
            np.add(staged, lost, out=staged)
            staged[~np.isfinite(staged)] = 0

    def _range(self, segment: Segment) -> slice:
        itemsize = self._dtype.itemsize
        first = segment.offset // itemsize
        return slice(first, first + segment.length // itemsize)
