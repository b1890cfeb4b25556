"""Calls with objects: as MessagePack, or pickle if the caller trusts all members.

The keys of dicts are str or bytes, whose hashes a sender cannot know. With other keys it could make
the dict of a receiver so slow that this process does nothing else for hours.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from pccl._api.arguments import broadcast_request
from pccl._api.exchange_arguments import all_gather_request
from pccl.checks import check_flag, check_range, check_timeout
from pccl.errors import RemoteProtocolError
from pccl.machines.peer.words import no_such_root
from pccl.protocol.limits import PEERS_MAX
from pccl.protocol.types import PeerId
from pccl.runtime.requests import ReduceInfo, ReduceRequest

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


class ObjectCalls:
    """Two joint calls of the same members for one with objects: of lengths, and of bytes.

    All members fail if one is lost between two calls. Otherwise a caller that knows the loss from
    another thread's call would make the second call when others make the first one again.

    Args:
        reduce: makes a call.
        ring: the members in the order of their ranks.
        tag: tag of the calls.
        timeout_s: budget of both together; None: no limit.
    """

    def __init__(
        self,
        reduce: Callable[[str, ReduceRequest], Coroutine[Any, Any, ReduceInfo]],
        ring: tuple[PeerId, ...],
        tag: int,
        timeout_s: float | None,
    ) -> None:
        self._reduce, self._ring, self._tag = reduce, ring, tag
        limit_s = check_timeout(timeout_s)
        self._ends_s = None if limit_s is None else time.monotonic() + limit_s

    async def all_gather(self, value: Any, *, pickled: bool) -> list[Any]:
        """Return the objects of all members, in the order of ranks."""
        own, size = encode_object(value, pickled=pickled), len(self._ring)
        if size < 2:
            return [decode_object(own, 0, pickled=pickled)]
        lengths = np.zeros(size, np.int64)
        await self._make("all_gather_object", all_gather_request, length_of(own), lengths)
        parts = [np.empty(length, np.uint8) for length in checked_lengths(lengths)]
        await self._make("all_gather_object", all_gather_request, own, parts)
        return [decode_object(one, rank, pickled=pickled) for rank, one in enumerate(parts)]

    async def broadcast(self, value: Any, root: int, peer: PeerId, *, pickled: bool) -> Any:
        """Return the object of rank ``root`` on all members; ``peer`` is this one."""
        check_flag("pickled", pickled)
        rank = check_range("root", root, 0, PEERS_MAX - 1)
        if rank >= len(self._ring):
            raise no_such_root(rank, len(self._ring))
        is_root = self._ring[rank] == peer
        own = encode_object(value, pickled=pickled) if is_root else np.empty(0, np.uint8)
        length = length_of(own)
        await self._make("broadcast_object", broadcast_request, length, root=rank)
        if not is_root:
            own = np.empty(checked_lengths(length)[0], np.uint8)
        await self._make("broadcast_object", broadcast_request, own, root=rank)
        return decode_object(own, rank, pickled=pickled)

    async def _make(
        self, name: str, request_of: Callable[..., ReduceRequest], *args: object, **options: int
    ) -> None:
        left_s = None if self._ends_s is None else max(self._ends_s - time.monotonic(), 1e-3)
        request = request_of(*args, tag=self._tag, timeout_s=left_s, **options)
        asks = replace(request.asks, ring=self._ring)
        await self._reduce(name, replace(request, asks=asks))
