"""The asyncio calls in which members give each other values, or get a part of a reduction."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pccl._api.arguments import barrier_request, broadcast_request
from pccl._api.exchange_arguments import (
    all_gather_request,
    all_to_all_request,
    gather_request,
    recv_request,
    reduce_scatter_request,
    root_reduce_request,
    scatter_request,
    send_request,
)
from pccl._api.handles import AsyncReduceHandle
from pccl._api.objects import checked_lengths, decode_object, encode_object, length_of
from pccl._api.reports import MemberInfo
from pccl._api.signatures import asking
from pccl.checks import check_flag, check_range, check_timeout
from pccl.machines.peer.words import no_such_root
from pccl.protocol.limits import PEERS_MAX
from pccl.protocol.types import PeerId
from pccl.runtime.requests import ReduceInfo, ReduceRequest

Array = npt.NDArray[Any]


class Exchanges(ABC):
    """Joint calls of the group, per tag, as ``all_reduce``; either all of it happens or nothing.

    A call that fails leaves its input unchanged, bit for bit; the result's memory is undefined. A
    peer that is alone in its group raises TooFewPeers, but not in calls with objects.
    """

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def peer_id(self) -> int: ...

    @abstractmethod
    def members(self) -> tuple[MemberInfo, ...]: ...

    @abstractmethod
    async def _reduce(self, call_name: str, request: ReduceRequest) -> ReduceInfo: ...

    @abstractmethod
    async def _start(self, call_name: str, request: ReduceRequest) -> AsyncReduceHandle: ...

    @asking(all_gather_request)
    async def all_gather(self, request: ReduceRequest) -> ReduceInfo:
        """Give each member's values to all members of the group. Joint call of the group, per tag.

        Args:
            send: as for ``all_reduce``; may be empty. Members may send different lengths.
            recv: one tensor for all members' values in the order of ranks, if all lengths are
                equal; otherwise a list with a tensor for each rank. ``send`` may be the own part of
                it.
            tag: as for ``all_reduce``, which shares the tags.
            timeout_s: budget of the call, in seconds.

        Returns:
            Bytes moved, and the members that took part.

        Raises:
            CollectiveAborted: a member was lost, or withdrew. Read the world size again, and call
                again with buffers for it.
            DescriptorMismatch: the members asked for different things, or one sends another length
                than a second one expects; the message names them.
            TooFewPeers: this peer is alone in the group. Wait in ``update_topology``.
            DeadlineExceeded, OutcomeUnknown: the budget ran out; ``send`` is unchanged.
            ValueError, TypeError: a buffer cannot be used, or does not fit the world size.
        """
        return await self._reduce("all_gather", request)

    @asking(gather_request)
    async def gather(self, request: ReduceRequest) -> ReduceInfo:
        """Give each member's values to one member, the root. Joint call of the group, per tag.

        Args:
            send: as for ``all_gather``.
            recv: on the root, as for ``all_gather``, but apart from ``send``; elsewhere None.
            root: rank of the member that gets the values.
            tag: as for ``all_reduce``.
            timeout_s: budget of the call, in seconds.

        Returns:
            As for ``all_gather``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather``.
        """
        return await self._reduce("gather", request)

    @asking(scatter_request)
    async def scatter(self, request: ReduceRequest) -> ReduceInfo:
        """Give each member its part of one member's values. Joint call of the group, per tag.

        Args:
            send: on the root, one tensor that all members share equally in the order of ranks, or
                a list with a tensor for each rank; elsewhere None.
            recv: a tensor for the own part.
            root: rank of the member that has the values.
            tag: as for ``all_reduce``.
            timeout_s: budget of the call, in seconds.

        Returns:
            As for ``all_gather``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather``.
        """
        return await self._reduce("scatter", request)

    @asking(all_to_all_request)
    async def all_to_all(self, request: ReduceRequest) -> ReduceInfo:
        """Give each member another part of the own values. Joint call of the group, per tag.

        Args:
            send: one tensor that all members share equally in the order of ranks, or a list with
                a tensor for each rank; some may be empty.
            recv: the same for the values that come from each rank.
            tag: as for ``all_reduce``.
            timeout_s: budget of the call, in seconds.

        Returns:
            As for ``all_gather``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather``.
        """
        return await self._reduce("all_to_all", request)

    @asking(reduce_scatter_request)
    async def reduce_scatter(self, request: ReduceRequest) -> ReduceInfo:
        """Reduce ``send`` over all members, and give each its part. Joint call, per tag.

        Args:
            send: as for ``all_reduce``, of the same length on all members.
            recv: a tensor for the own part. Parts go to the ranks in order; they are equal, or the
                first ranks get one element more.
            op: as for ``all_reduce``.
            tag: as for ``all_reduce``.
            timeout_s: budget of the call, in seconds.

        Returns:
            As for ``all_gather``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather``.
        """
        return await self._reduce("reduce_scatter", request)

    @asking(root_reduce_request)
    async def reduce(self, request: ReduceRequest) -> ReduceInfo:
        """Reduce ``send`` over all members, for one member, the root. Joint call, per tag.

        Args:
            send: as for ``all_reduce``. On other ranks than the root it stays unchanged.
            recv: on the root, as for ``all_reduce``; elsewhere without effect.
            op: as for ``all_reduce``.
            root: rank of the member that gets the result.
            tag: as for ``all_reduce``.
            retry: when a member is lost or withdraws, reduce again with the remaining members. The
                root is a rank, which then may be another member. If there is none, the call fails.
            timeout_s: budget of all attempts together, in seconds.

        Returns:
            As for ``all_reduce``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_reduce``.
        """
        return await self._reduce("reduce", request)

    @asking(send_request)
    async def send(self, request: ReduceRequest) -> ReduceInfo:
        """Give values to one other member, which calls ``recv``. Returns when it has them.

        No third member takes part. The n-th ``send`` to a member under a tag meets its n-th
        ``recv`` from this one.

        Args:
            tensor: the values, as ``send`` of ``all_gather``.
            to: rank of the member that gets them.
            tag: from 0 to 2**39 - 1; each pair and direction has its own.
            timeout_s: budget of the call, in seconds.

        Returns:
            As for ``all_gather``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather``.
        """
        return await self._reduce("send", request)

    @asking(recv_request)
    async def recv(self, request: ReduceRequest) -> ReduceInfo:
        """Get values from one other member, which calls ``send``.

        Args:
            tensor: memory for the values, of the dtype and length that the other member sends.
            source: rank of the member that gives them.
            tag: as for ``send``.
            timeout_s: budget of the call, in seconds.

        Returns:
            As for ``all_gather``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather``.
        """
        return await self._reduce("recv", request)

    @asking(send_request)
    async def send_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``send`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("send_async", request)

    @asking(recv_request)
    async def recv_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``recv`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("recv_async", request)

    @asking(all_gather_request)
    async def all_gather_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``all_gather`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("all_gather_async", request)

    @asking(gather_request)
    async def gather_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``gather`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("gather_async", request)

    @asking(scatter_request)
    async def scatter_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``scatter`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("scatter_async", request)

    @asking(all_to_all_request)
    async def all_to_all_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``all_to_all`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("all_to_all_async", request)

    @asking(reduce_scatter_request)
    async def reduce_scatter_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``reduce_scatter`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("reduce_scatter_async", request)

    @asking(root_reduce_request)
    async def reduce_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``reduce`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("reduce_async", request)

    @asking(broadcast_request)
    async def broadcast_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``broadcast`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("broadcast_async", request)

    @asking(barrier_request)
    async def barrier_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``barrier`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("barrier_async", request)

    # -- objects -------------------------------------------------------------------------------

    async def all_gather_object(
        self, value: Any, *, pickled: bool = False, tag: int = 0, timeout_s: float | None = None
    ) -> list[Any]:
        """Return the objects of all members, in the order of ranks. Joint call, per tag.

        It makes two ``all_gather``, the first one of the lengths.

        Args:
            value: what MessagePack can encode: None, bool, int, float, str, bytes, lists of these,
                and dicts with keys of str or bytes; tuples become lists. At most 1 GiB.
            pickled: encode with pickle instead; all members must pass the same. Only for members
                that trust each other: a pickle can run any code on the members that receive it.
            tag: as for ``all_reduce``.
            timeout_s: budget of the call, in seconds.

        Raises:
            RemoteProtocolError: a member sent no such object; the message names its rank.
            TypeError: ``value`` cannot be encoded.
            PCCLError, ValueError: as for ``all_gather``.
        """
        own, ring = encode_object(value, pickled=pickled), _ring_of(self)
        if len(ring) < 2:
            return [decode_object(own, 0, pickled=pickled)]
        calls = _Calls(self._reduce, ring, tag, timeout_s)
        lengths = np.zeros(len(ring), np.int64)
        await calls.make("all_gather_object", all_gather_request, length_of(own), lengths)
        parts = [np.empty(length, np.uint8) for length in checked_lengths(lengths)]
        await calls.make("all_gather_object", all_gather_request, own, parts)
        return [decode_object(one, rank, pickled=pickled) for rank, one in enumerate(parts)]

    async def broadcast_object(
        self,
        value: Any = None,
        *,
        root: int = 0,
        pickled: bool = False,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> Any:
        """Return one member's object on all members. Joint call of the group, per tag.

        It makes two ``broadcast``, the first one of the length.

        Args:
            value: on the root, as for ``all_gather_object``; elsewhere ignored.
            root: rank of the member that gives the object.
            pickled: as for ``all_gather_object``.
            tag: as for ``all_reduce``.
            timeout_s: budget of the call, in seconds.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather_object`` and ``broadcast``.
        """
        ring = _ring_of(self)
        calls = _Calls(self._reduce, ring, tag, timeout_s)
        check_flag("pickled", pickled)
        rank = check_range("root", root, 0, PEERS_MAX - 1)
        if rank >= len(ring):
            raise no_such_root(rank, len(ring))
        is_root = ring[rank] == self.peer_id
        own = encode_object(value, pickled=pickled) if is_root else np.empty(0, np.uint8)
        length = length_of(own)
        await calls.make("broadcast_object", broadcast_request, length, root=rank)
        if not is_root:
            own = np.empty(checked_lengths(length)[0], np.uint8)
        await calls.make("broadcast_object", broadcast_request, own, root=rank)
        return decode_object(own, rank, pickled=pickled)


def _ring_of(comm: Exchanges) -> tuple[PeerId, ...]:
    return tuple(PeerId(member.peer_id) for member in comm.members())


class _Calls:
    """Several joint calls of the same members, with one time budget.

    All members fail if one is lost between two calls. Otherwise a caller that knows the loss from
    another thread's call would make the second call when others make the first one again.
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

    async def make(
        self, name: str, request_of: Callable[..., ReduceRequest], *args: object, **options: int
    ) -> None:
        left_s = None if self._ends_s is None else max(self._ends_s - time.monotonic(), 1e-3)
        request = request_of(*args, tag=self._tag, timeout_s=left_s, **options)
        asks = replace(request.asks, ring=self._ring)
        await self._reduce(name, replace(request, asks=asks))
