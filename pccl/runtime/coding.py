"""``Coding``: how one running collective shortens what it sends, and what that costs in accuracy.

Contributions and partial results are encoded when a lane is about to send them, so at most one
segment per lane is encoded at a time. A result is encoded once, by its owner, and its encoded bytes
stay where the result will be until it has to be there: whoever lacks them can be sent them again.

With error feedback what a peer's own roundings have cost is kept for the next reduce of the same
tensor: 1-bit SGD (Seide et al., Interspeech 2014) for contributions, DoubleSqueeze (Tang et al.,
ICML 2019) for results, whose rounding the owner owes to everybody.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl.collectives.layout import Segment
from pccl.collectives.quantization import Codec, EncodeError, noise_source
from pccl.collectives.reductions import Scratch
from pccl.protocol.types import OperationId
from pccl.runtime.operand import Operand

Array = npt.NDArray[Any]


class Coding:
    """The codec of one operation, bound to its buffers.

    Args:
        codec: of the operand's dtype.
        operand: the caller's buffers; its residual, if it has one, is added and staged.
        operation: whose values they are.
        rank: own rank.
        shares: how many contributions one unit of the result stands for: the world size of an
            average, otherwise 1.
        stochastic: round at random, by a generator that anybody can repeat.
    """

    def __init__(
        self,
        codec: Codec,
        operand: Operand,
        operation: OperationId,
        rank: int,
        shares: int,
        *,
        stochastic: bool,
    ) -> None:
        self._codec = codec
        self._residual = operand.residual
        self._result = operand.target
        self._dtype = operand.target.dtype
        self._operation = operation
        self._rank = rank
        self._shares = shares
        self._stochastic = stochastic
        self._values = Scratch()
        self._decoded = Scratch()
        self._errors: dict[int, EncodeError] = {}
        """By position: what rounding has cost."""
        self._coded: dict[int, Segment] = {}
        """Segments of the result that are still encoded, by position."""

    @property
    def error(self) -> float:
        """Relative L2 error of all that this peer has rounded; 0.0 if that was nothing."""
        errors = self._errors.values()
        whole = sum(error.value_squares for error in errors)
        return sqrt(sum(error.error_squares for error in errors) / whole) if whole else 0.0

    def own(self, segment: Segment, values: Array) -> Array:
        """The own contribution with what is owed from before; good until the next call."""
        residual = self._residual
        if residual is None or residual.current is None:
            return values
        total = self._values.array(len(values), values.dtype)
        np.add(values, residual.current[self._range(segment)], out=total, casting="same_kind")
        return total

    def encode(self, segment: Segment, values: Array) -> memoryview:
        """What a contribution or a partial result is on the wire."""
        if not segment.is_coded:
            self._owe_nothing(segment)
            return values.copy().view(np.uint8).data
        encoded = np.empty(segment.wire_length, np.uint8)
        self._encode(segment, values, encoded, shares=1)
        return encoded.data

    def settle(self, segment: Segment) -> None:
        """The result of an own segment is known: from now on it is what its encoded bytes say."""
        if not segment.is_coded:
            self._owe_nothing(segment)
            return
        exact = self._result.elements(segment.offset, segment.offset + segment.length)
        encoded = np.empty(segment.wire_length, np.uint8)
        self._encode(segment, exact, encoded, shares=self._shares)
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
        """The caller has left and takes nothing: neither a result nor what it has cost."""
        self._coded.clear()
        self._residual = None

    def _encode(self, segment: Segment, values: Array, encoded: Array, *, shares: int) -> None:
        noise = None
        if self._stochastic:
            noise = noise_source(self._operation, self._rank, segment.position)
        residual = self._residual
        decoded = None
        if residual is not None:
            decoded = self._decoded.array(len(values), values.dtype)
        self._errors[segment.position] = self._codec.encode(values, encoded, noise, decoded)
        if residual is not None and decoded is not None:
            staged = residual.staged[self._range(segment)]
            with np.errstate(all="ignore"):
                np.subtract(values, decoded, out=staged)
                np.multiply(staged, shares, out=staged)

    def _owe_nothing(self, segment: Segment) -> None:
        if self._residual is not None:
            self._residual.staged[self._range(segment)] = 0

    def _range(self, segment: Segment) -> slice:
        itemsize = self._dtype.itemsize
        first = segment.offset // itemsize
        return slice(first, first + segment.length // itemsize)
