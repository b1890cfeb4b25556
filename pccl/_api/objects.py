"""Objects as bytes: MessagePack, or pickle if the caller trusts all members."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from pccl.checks import check_flag
from pccl.errors import RemoteProtocolError

Array = npt.NDArray[Any]

OBJECT_BYTES_MAX = 1 << 30
"""Bytes of all encoded objects that members give to one of them in one call."""


def length_of(encoded: Array) -> Array:
    """Return the length of an encoded object, shape (1,), as members send it first."""
    return np.array([len(encoded)], np.int64)


def checked_lengths(lengths: Array) -> list[int]:
    """Return the lengths that members have sent.

    Raises:
        RemoteProtocolError: one is impossible, or all objects together are too long.
    """
    told: list[int] = lengths.tolist()
    if min(told) < 1 or sum(told) > OBJECT_BYTES_MAX:
        reason = f"members sent objects of {told} bytes; all together may have {OBJECT_BYTES_MAX}"
        raise RemoteProtocolError(reason=reason)
    return told


def encode_object(value: Any, *, pickled: bool) -> Array:
    """Return an object as bytes, shape (n,).

    Raises:
        TypeError, ValueError: it cannot be encoded, or is too long; the message says what to do.
    """
    if check_flag("pickled", pickled):
        data = pickle.dumps(value)
    else:
        try:
            data = msgpack.packb(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"value cannot be sent ({error}); pass None, bool, int, float, str, bytes, lists "
                "and dicts of these, or pickled=True if all members trust each other"
            ) from error
    if len(data) > OBJECT_BYTES_MAX:
        raise ValueError(f"value takes {len(data)} bytes, more than {OBJECT_BYTES_MAX}")
    return np.frombuffer(bytearray(data), np.uint8)


def decode_object(encoded: Array, rank: int, *, pickled: bool) -> Any:
    """Return the object that a member has sent.

    Raises:
        RemoteProtocolError: the bytes are no object.
    """
    try:
        if pickled:
            return pickle.loads(encoded.data)
        return msgpack.unpackb(encoded.data, strict_map_key=False)
    except Exception as error:
        reason = f"rank {rank} sent an object that cannot be read ({error!r})"
        raise RemoteProtocolError(reason=reason) from error
