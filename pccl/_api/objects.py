"""Objects as bytes: MessagePack, or pickle if the caller trusts all members.

The keys of dicts are str or bytes, whose hashes a sender cannot know. With other keys it could make
the dict of a receiver so slow that this process does nothing else for hours.
"""

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
        try:
            data = pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError, ValueError) as error:
            raise TypeError(f"value cannot be pickled ({error}); pass one that can") from error
    else:
        try:
            data = msgpack.packb(value)
            msgpack.unpackb(data)  # as all members will
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(
                f"value cannot be sent ({error}); pass None, bool, int, float, str, bytes, lists "
                "of these and dicts with keys of str or bytes, or pickled=True if all members "
                "trust each other"
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
        return msgpack.unpackb(encoded.data)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"  # not its repr, which may have all the bytes
        reason = f"rank {rank} sent an object that cannot be read ({why})"
        raise RemoteProtocolError(reason=reason) from error
