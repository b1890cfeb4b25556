"""Objects as bytes: what is encoded, what is refused, and what others may have sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pccl._api.objects import (
    OBJECT_BYTES_MAX,
    checked_lengths,
    decode_object,
    encode_object,
    length_of,
)
from pccl.errors import RemoteProtocolError


def nested(depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("value", [None, True, -1, 1.5, "ä", b"\0", [1, [2]], {"b": {b"a": None}}])
@pytest.mark.parametrize("pickled", [False, True])
def test_there_and_back(value: object, *, pickled: bool) -> None:
    encoded = encode_object(value, pickled=pickled)
    assert length_of(encoded).tolist() == [len(encoded)]
    assert decode_object(encoded, 0, pickled=pickled) == value


@pytest.mark.parametrize("value", [{1, 2}, 1 << 64, object(), nested(2000), {1: 2}])
def test_what_messagepack_cannot_encode(value: object) -> None:
    with pytest.raises(TypeError, match="pass None, bool, int"):
        encode_object(value, pickled=False)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x92\x01", b"\x01\x02", b"\xa1\xff", b"\x91" * 9999]
)
@pytest.mark.parametrize("pickled", [False, True])
def test_bytes_that_are_no_object_name_their_sender(data: bytes, *, pickled: bool) -> None:
    with pytest.raises(RemoteProtocolError, match="rank 3 sent an object that cannot be read"):
        decode_object(np.frombuffer(data, np.uint8), 3, pickled=pickled)


@pytest.mark.parametrize("lengths", [[1, 0], [-1, 5], [OBJECT_BYTES_MAX, 1]])
def test_lengths_that_cannot_be(lengths: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match=str(OBJECT_BYTES_MAX)):
        checked_lengths(np.array(lengths, np.int64))
    assert checked_lengths(np.array([1, OBJECT_BYTES_MAX - 1])) == [1, OBJECT_BYTES_MAX - 1]
