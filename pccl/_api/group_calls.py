"""The asyncio calls that members of a group make with each other, about values or objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pccl._api.arguments import (
    barrier_request,
    broadcast_request,
    list_request,
    reduce_request,
)
from pccl._api.exchange_arguments import (
    addressed,
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
from pccl._api.objects import ObjectCalls
from pccl._api.reports import MemberInfo
from pccl._api.signatures import asking
from pccl.protocol.types import PeerId
from pccl.runtime.requests import ReduceInfo, ReduceRequest


class GroupCalls(ABC):
    """Joint calls of a group or a subgroup, per tag; either all of a call happens or nothing.

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

    _within: int
    """Hash of the subgroup's members, for calls of two of them; 1: this is the group."""

    @abstractmethod
    async def _start(self, call_name: str, request: ReduceRequest) -> AsyncReduceHandle: ...

    @asking(reduce_request)
    async def all_reduce(self, request: ReduceRequest) -> ReduceInfo:
        """Reduce ``send`` over all members of the group. Joint call of the group, per tag.

        The result is bit-identical on all members. All members receive it, or none does.

        Args:
            send: NumPy array or torch CPU tensor, any shape, contiguous, of any ``DataType``. Not
                changed unless in place.
            recv: destination of the result: same dtype and number of elements, not overlapping;
                None (or ``send``): in place.
            op: SUM and PROD (integers wrap), AVG (integers are truncated toward zero), MIN, MAX;
                or a name, as ``"avg"``.
            weight: weight of ``send``, 0 or more, for AVG of floats. The result is the sum of
                weights times values, divided by the sum of the weights; zeros if that is 0. With
                weight 0, values are ignored, even NaN. None: all members count equally. Either
                all members give a weight, each its own, or none does.
            guard: for AVG of floats: what happens to contributions with NaN, or of an unusual norm:
                a ``Guard``, ``"exclude"`` or ``"warn"``. All members must give the same. The result
                is that of a call in which the excluded members gave weight 0. A contribution that
                is not finite although its member declared so aborts the call.
            quorum: the call continues without late members when so many have made it and the grace
                is over: 2 or more members, or a share of the group as a float. A late call returns
                the same result, with ``took_part=False``, so ``recv`` must not be ``send``. None:
                the call waits for all members. All members must give the same.
            grace_s: how long a quorum waits for late members, in seconds; ``"auto"``: adapted to
                earlier calls, from 0.1 to 10 s.
            tag: collectives with different tags may be in flight at the same time, from several
                threads; the members pair them by tag.
            operand_descriptor: must state the tensor's own dtype; None: not checked.
            quantization_options: how values are quantized for the wire; floats only. All members
                must give the same.
            algorithm: ``"ring"``, ``"star"`` (tensors up to 4 MiB), ``"mesh"``, or ``"auto"``. For
                ``"auto"``, the master's cost model chooses the fastest algorithm for this size and
                group. All members must give the same.
            observable: send the result to newcomers that replay reductions (``on_reduction`` of
                ``connect``); if there are any, it is copied.
            retry: when a member is lost or withdraws, reduce again with the remaining members.
            timeout_s: budget of all attempts together, in seconds.

        Returns:
            Bytes moved, the members that contributed, their weights, and the algorithm.

        Raises:
            CollectiveAborted: a member was lost, or withdrew. ``send`` is unchanged, bit for bit;
                read the world size again, and call again.
            ResyncRequired: this call is late, and no member has the result any more. Synchronize
                the shared state.
            DescriptorMismatch: the members asked for different dtypes, ops, counts or algorithms,
                or only some gave a weight, or their guards differ.
            TooFewPeers: this peer is alone in the group. Wait in ``update_topology``.
            DeadlineExceeded, OutcomeUnknown: the budget ran out; ``send`` is unchanged.
            PCCLError: an open collective uses the tag (INVALID_ARGUMENT).
            ValueError, TypeError: a buffer cannot be used; the message says what to do.
        """
        return await self._reduce("all_reduce", request)

    @asking(reduce_request)
    async def all_reduce_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``all_reduce`` and return at once; the handle has its outcome.

        Do not change the tensors until the reduce has ended. A wrong argument raises here; the
        handle raises later errors. Unlike with a task around ``all_reduce``, the reduce has started
        when this returns, and cancelling a wait for it does not withdraw it.

        It takes the arguments of ``all_reduce``, with two differences.

        Args:
            retry: must be False. After a loss the group has changed, and the handle must report
                that to the caller before it reduces again.
            timeout_s: budget of the reduce, which runs also while no thread waits for the handle.

        Raises:
            TooFewPeers, PCCLError, ValueError, TypeError: as for ``all_reduce``.
        """
        return await self._start("all_reduce_async", request)

    @asking(list_request)
    async def all_reduce_many(self, request: ReduceRequest) -> ReduceInfo:
        """Reduce several tensors as one: one operation, one outcome. Joint call of the group.

        It equals ``all_reduce`` of their concatenation, but does not concatenate them. Hundreds of
        small tensors cost about as much as one of their total size. Either all tensors are reduced
        on all members, or none is.

        Args:
            tensors: as for ``all_reduce``, all of one dtype, with at least one element in total.
                Empty tensors are allowed. The total number of elements must be equal on all
                members; each member may split them differently.
            recv: destination of each tensor's result, as for ``all_reduce``; None (or
                ``tensors``): in place. Either all are in place or none.
            op: as for ``all_reduce``.
            weight: as for ``all_reduce``.
            guard: as for ``all_reduce``.
            quorum: as for ``all_reduce``.
            grace_s: as for ``all_reduce``.
            tag: as for ``all_reduce``, which shares the tags.
            quantization_options: as for ``all_reduce``; blocks and the residual of an
                ``error_feedback`` span the concatenation.
            algorithm: as for ``all_reduce``, for the total size.
            observable: as for ``all_reduce``; the newcomer gets the concatenation.
            retry: as for ``all_reduce``, for all tensors together.
            timeout_s: budget of all attempts together.

        Returns:
            As for ``all_reduce``.

        Raises:
            ValueError: dtypes differ (group the tensors by dtype, one call for each), tensors
                overlap, or there is nothing to reduce.
            PCCLError, TypeError: as for ``all_reduce``.
        """
        return await self._reduce("all_reduce_many", request)

    @asking(broadcast_request)
    async def broadcast(self, request: ReduceRequest) -> ReduceInfo:
        """Copy one member's values to all members of the group. Joint call of the group, per tag.

        All members receive the values, or none does. A single member returns at once.

        Args:
            tensor: as for ``all_reduce``, overwritten in place (on the root: unchanged).
            root: rank of the member that sends its values.
            tag: as for ``all_reduce``, which shares the tags.
            timeout_s: budget of the call, in seconds.

        Returns:
            Bytes moved, and the members that took part.

        Raises:
            CollectiveAborted: a member was lost, or withdrew; ``tensor`` is unchanged. Ranks may
                have changed.
            DescriptorMismatch: the members asked for different dtypes, counts or roots.
            DeadlineExceeded, OutcomeUnknown: the budget ran out; ``tensor`` is unchanged.
            ValueError, TypeError: there is no such rank, or the tensor cannot be used.
        """
        return await self._reduce("broadcast", request)

    @asking(barrier_request)
    async def barrier(self, request: ReduceRequest) -> None:
        """Wait until all members of the group have made this call. Joint call, per tag.

        A single member returns at once.

        Raises:
            CollectiveAborted: a member was lost, or withdrew. Call again.
            DescriptorMismatch: other members use the tag for another call.
            DeadlineExceeded, OutcomeUnknown: the budget ran out.
        """
        await self._reduce("barrier", request)

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
    async def send(self, asked: tuple[ReduceRequest, int]) -> ReduceInfo:
        """Give values to one other member, which calls ``recv``. Returns when it has them.

        No third member takes part. The n-th ``send`` to a member under a tag meets its n-th
        ``recv`` from this one.

        Args:
            tensor: the values, as ``send`` of ``all_gather``.
            to: rank of the member that gets them.
            tag: as for ``all_reduce``, but each pair and direction has its own.
            timeout_s: budget of the call, in seconds.

        Returns:
            As for ``all_gather``.

        Raises:
            PCCLError, ValueError, TypeError: as for ``all_gather``.
        """
        return await self._reduce("send", _to_other(self, self._within, asked))

    @asking(recv_request)
    async def recv(self, asked: tuple[ReduceRequest, int]) -> ReduceInfo:
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
        return await self._reduce("recv", _to_other(self, self._within, asked))

    @asking(send_request)
    async def send_async(self, asked: tuple[ReduceRequest, int]) -> AsyncReduceHandle:
        """Start ``send`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("send_async", _to_other(self, self._within, asked))

    @asking(recv_request)
    async def recv_async(self, asked: tuple[ReduceRequest, int]) -> AsyncReduceHandle:
        """Start ``recv`` and return at once, as ``all_reduce_async`` does."""
        return await self._start("recv_async", _to_other(self, self._within, asked))

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
        calls = ObjectCalls(self._reduce, _ring_of(self), tag, timeout_s)
        return await calls.all_gather(value, pickled=pickled)

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
        calls = ObjectCalls(self._reduce, _ring_of(self), tag, timeout_s)
        return await calls.broadcast(value, root, PeerId(self.peer_id), pickled=pickled)


def _ring_of(comm: GroupCalls) -> tuple[PeerId, ...]:
    return tuple(PeerId(member.peer_id) for member in comm.members())


def _to_other(comm: GroupCalls, within: int, asked: tuple[ReduceRequest, int]) -> ReduceRequest:
    return addressed(*asked, _ring_of(comm), comm.rank, within=within)
