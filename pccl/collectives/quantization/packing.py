"""Several short codes in a byte.

Of ``n`` codes in ``m`` bytes, code ``i`` shares its byte with ``i + m``, ``i + 2 * m`` and so on,
the first in the lowest bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def pack(codes: Array, bits: int, out: Array) -> None:
    """Pack codes.

    Args:
        codes: uint8, shape (n,), each below ``2**bits``.
        bits: bits per code; a divisor of 8.
        out: uint8, shape (ceil(n * bits / 8),).
    """
    length = len(out)
    np.copyto(out, codes[:length])
    for place in range(1, 8 // bits):
        part = codes[place * length : (place + 1) * length]
        out[: len(part)] |= part << np.uint8(place * bits)


def unpack(packed: Array, bits: int, codes: Array) -> None:
    """Unpack what ``pack`` has packed; see there."""
    length = len(packed)
    for place in range(8 // bits):
        part = codes[place * length : (place + 1) * length]
        np.right_shift(packed[: len(part)], np.uint8(place * bits), out=part)
    np.bitwise_and(codes, np.uint8((1 << bits) - 1), out=codes)
