"""The asyncio API: the same calls, awaitable on the caller's loop.

The data moves on the library's I/O thread, so a busy loop of the caller's does not slow it down.
Cancelling a call leaves it for good: once the ``CancelledError`` is raised, nothing is written into
the buffers any more. The blocking calls (:mod:`pccl.communicator`) are made from these.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from pccl._api.arguments import (
    barrier_request,
    broadcast_request,
    join_request,
    list_request,
    many_request,
    reduce_request,
    sync_request,
    verify_request,
)
from pccl._api.base import CommunicatorBase
from pccl._api.handles import AsyncReduceHandle
from pccl._api.reports import MemberInfo
from pccl._api.session import CheckedCall
from pccl._api.signatures import asking
from pccl.checks import check_timeout
from pccl.errors import PCCLError, named
from pccl.progress import showing
from pccl.protocol.types import RoundKind
from pccl.runtime.engine import PeerEngine
from pccl.runtime.io_thread import ended
from pccl.runtime.requests import (
    JoinRequest,
    ReduceInfo,
    ReduceManyRequest,
    ReduceRequest,
    RunRequest,
    SharedStateSyncInfo,
)
from pccl.runtime.state.sync import SyncOptions

_T = TypeVar("_T")

__all__ = ["AsyncReduceHandle", "Communicator", "MemberInfo", "ReduceInfo"]


class Communicator(CommunicatorBase):
    """One process's membership in a run; see :class:`pccl.Communicator` for all details.

    Use with ``async with``, or call ``await close()``. For the arguments see
    :class:`pccl._api.base.CommunicatorBase`.
    """

    @asking(join_request)
    async def connect(self, request: JoinRequest) -> None:
        """Join the run. Returns when the members have admitted this peer, in a joint call.

        With ``shared_state`` this peer first fetches the contents of the members' last
        synchronization, in the background, while the members keep working. They admit it after
        that. The first ``sync_shared_state`` of the same state fetches the changes since then.
        Until then no tensor is changed.

        Args:
            n_attempts: how often to try to reach the master, one second apart.
            min_peers: how many members the run must have, this one included, before this peer is
                admitted; None: what ``PCCL_MIN_PEERS`` says, otherwise 1.
            shared_state: state to fetch before the admission; None: none.
            staging_bytes_max: as of ``sync_shared_state``.
            staging_directory: as of ``sync_shared_state``.
            on_progress: as of ``sync_shared_state``.
            on_reduction: with ``shared_state``: called, in order and in a thread of the library,
                with the result of each ``observable`` reduce that the members commit after the
                synchronization whose state was fetched. It must change the tensors as the members
                do with that result, so that this peer need not fetch the changes. Then the tensors
                are written before the admission; missed changes are fetched. If it raises, the
                library logs that, stops calling it, and fetches the pieces that differ.
            timeout_s: budget.

        Raises:
            MasterLost: no master was found. Start it, or correct the address, and call again.
            NotAdmitted: the master refused; the reason says what to change.
            LinkError: the own port could not be opened.
            DeadlineExceeded: the budget ran out. Call again.
            PCCLError: it is connected already (INVALID_USAGE).
        """
        with showing(request.on_progress):
            await self._run(CheckedCall("connect", self._engine.connect, request, joint=False))

    async def update_topology(self, *, timeout_s: float | None = None) -> None:
        """Admit newcomers that are ready. Joint call of all members of all groups.

        World sizes change here, and when a collective returns or raises. After Evicted and
        MasterLost it joins the run again, as a newcomer.

        Raises:
            PendingOperations: a collective of this peer is still open. Wait for it first.
            DeadlineExceeded: the budget ran out. Call again: it takes part in the same round.
        """
        await self._run(_round(self._engine, RoundKind.UPDATE_TOPOLOGY, timeout_s))

    async def are_peers_pending(self, *, timeout_s: float | None = None) -> bool:
        """Whether newcomers are ready to be admitted; the same answer for all.

        Joint call of all members of all groups; may be made while collectives are in flight.

        Raises:
            DeadlineExceeded: the budget ran out. Call again: it takes part in the same round.
        """
        return await self._run(_round(self._engine, RoundKind.PEERS_PENDING, timeout_s))

    async def optimize_topology(self, *, timeout_s: float | None = None) -> None:
        """Settle the order of the rings. Joint call of all members of all groups.

        For now, rings stay in the order of the ids. If the measured links have changed, the master
        chooses the algorithms of ``algorithm="auto"`` again, in a new view.

        Raises:
            TooFewPeers: alone in the run. Wait for newcomers with ``update_topology``.
            PendingOperations: a collective of this peer is still open. Wait for it first.
            DeadlineExceeded: the budget ran out. Call again: it takes part in the same round.
        """
        await self._run(_round(self._engine, RoundKind.OPTIMIZE_TOPOLOGY, timeout_s))

    @asking(reduce_request)
    async def all_reduce(self, request: ReduceRequest) -> ReduceInfo:
        """Reduce ``send`` over all members of the group. Joint call of the group, per tag.

        The result is bit-identical on all members. All members receive it, or none does.

        Args:
            send: NumPy array or torch CPU tensor, any shape, contiguous, of any ``DataType``. Not
                changed unless in place.
            recv: where the result goes: same dtype and number of elements, not overlapping; None
                (or ``send``): in place.
            op: SUM and PROD (integers wrap), AVG (integers are truncated toward zero), MIN, MAX.
            weight: with AVG of floats: how much ``send`` counts, 0 or more. The result is the sum
                of weights times values over the sum of the weights; zeros if that is 0. With
                weight 0 values don't count, whatever they are. None: all count the same. Either
                all members give a weight, each its own, or none does.
            tag: collectives with different tags may be in flight at the same time, from several
                threads; the members pair them by tag.
            operand_descriptor: must state the tensor's own dtype; None: not checked.
            quantization_options: how values are quantized for the wire; floats only. All members
                must give the same.
            algorithm: how the values travel: ``"ring"``, ``"star"`` (tensors up to 4 MiB),
                ``"mesh"``, or ``"auto"``: the fastest for this size in the master's cost model,
                the same for all members. All members must give the same.
            observable: send the result to newcomers that replay reductions (``on_reduction`` of
                ``connect``); it is copied if there are any.
            retry: when a member is lost or withdraws, reduce again with the remaining members.
            timeout_s: budget of all attempts together.

        Returns:
            Bytes moved, the members that contributed, their weights, and the algorithm.

        Raises:
            CollectiveAborted: a member was lost, or withdrew. ``send`` is bit for bit what it
                was; re-read the world size and call again.
            DescriptorMismatch: the members asked for different dtypes, ops, counts or algorithms,
                or only some gave a weight.
            TooFewPeers: alone in the group. Wait for newcomers with ``update_topology``.
            DeadlineExceeded, OutcomeUnknown: the budget ran out; ``send`` is what it was.
            PCCLError: the tag is in use by a collective that is still open (INVALID_ARGUMENT).
            ValueError, TypeError: a buffer that cannot be used; the message says how to mend it.
        """
        return await self._run(CheckedCall("all_reduce", self._engine.reduce, request))

    @asking(reduce_request)
    async def all_reduce_async(self, request: ReduceRequest) -> AsyncReduceHandle:
        """Start ``all_reduce`` and return at once; the handle has its outcome.

        The tensors are borrowed until the reduce has ended. A wrong argument raises here; the
        handle raises what happens during the run. Unlike a task around ``all_reduce``, the reduce
        is launched when this returns, and a cancelled wait for it does not withdraw it.

        It takes the arguments of ``all_reduce``, with two differences.

        Args:
            retry: must be False. After a loss the group is another one, and the caller must learn
                that from the handle before it reduces again.
            timeout_s: budget of the reduce, also while nothing waits for the handle.

        Raises:
            TooFewPeers, PCCLError, ValueError, TypeError: as of ``all_reduce``.
        """
        if request.retry:
            raise ValueError(
                "all_reduce_async cannot retry: after a loss the group is another one, and the "
                "handle must say so first. Leave retry out, and reduce again if the handle fails"
            )
        launch = self._session.launch
        ticket = await self._run(CheckedCall("all_reduce_async", launch, request, joint=False))
        return AsyncReduceHandle(self._session, ticket)

    @asking(list_request)
    async def all_reduce_many(self, request: ReduceRequest) -> ReduceInfo:
        """Reduce several tensors as one: one operation, one outcome. Joint call of the group.

        It equals ``all_reduce`` of their concatenation, but does not concatenate them. Hundreds of
        small tensors cost about as much as one of their total size. Either all tensors are reduced
        on all members, or none is.

        Args:
            tensors: as of ``all_reduce``, all of one dtype, with at least one element in total.
                Empty tensors are allowed. The total number of elements must be equal on all
                members; each member may split them differently.
            recv: for each tensor where its result goes, as of ``all_reduce``; None (or
                ``tensors``): in place. Either all are in place or none.
            op: as of ``all_reduce``.
            weight: as of ``all_reduce``.
            tag: as of ``all_reduce``, which shares the tags.
            quantization_options: as of ``all_reduce``; blocks and the residual of an
                ``error_feedback`` span the concatenation.
            algorithm: as of ``all_reduce``, for the total size.
            observable: as of ``all_reduce``; the newcomer gets the concatenation.
            retry: as of ``all_reduce``, for all tensors together.
            timeout_s: budget of all attempts together.

        Returns:
            As of ``all_reduce``.

        Raises:
            ValueError: dtypes differ (group the tensors by dtype, one call for each), tensors
                overlap, or there is nothing to reduce.
            PCCLError, TypeError: as of ``all_reduce``.
        """
        return await self._run(CheckedCall("all_reduce_many", self._engine.reduce, request))

    @asking(many_request)
    async def all_reduce_multiple_with_retry(self, request: ReduceManyRequest) -> ReduceInfo:
        """Reduce several tensors, each again after losses until it is done.

        Joint call of the group; the members pair the tensors by tag. It returns when every tensor
        is reduced on all members. Tensors may differ in their contributors if a member is lost
        during the call.

        Args:
            descriptors: one for each tensor, with a tag of its own.
            max_in_flight: number of tensors that are reduced at the same time.
            timeout_s: budget of the whole call.

        Returns:
            Bytes moved in total, and the contributors of the last one.

        Raises:
            TooFewPeers: no other member is left in the group. All errors of this call list the
                tags of the reduced tensors in ``completed_tags``; the other tensors are unchanged.
            DescriptorMismatch: the members asked for different things under one tag.
            DeadlineExceeded, OutcomeUnknown: the budget ran out.
            Evicted, MasterLost: this peer lost its membership or the master. These errors take
                precedence over other failures.
            ValueError, TypeError: nothing to reduce, a tag twice, or a tensor that cannot be used.
        """
        name = "all_reduce_multiple_with_retry"
        return await self._run(CheckedCall(name, self._engine.reduce_many, request))

    @asking(sync_request)
    async def sync_shared_state(self, request: SyncOptions) -> SharedStateSyncInfo:
        """Make the shared states of all members of the group equal. Joint call of the group.

        The group elects one content (``docs/shared-state.md`` has the rules). Members with other
        contents receive the pieces that differ, from all members that have them. All members commit
        it or none does; if it fails, every tensor is unchanged. After a loss the call continues or
        restarts by itself, and keeps the pieces that it has received.

        Args:
            shared_state: tensors and their revision. A member is outdated, and receives both, if
                its revision is not the one that follows the last synchronization.
            strategy: ENFORCE_POPULAR of all members, or SEND_ONLY and RECEIVE_ONLY.
            expect_unchanged: raise StateMismatch, for all members, rather than receive anything.
            resume: which revision wins if no member has the group's. ``"never"``: none, and
                StateUnavailable is raised. ``"highest"``: the highest of any member.
                ``"advanced"``: the same, but never 0 once the group is past it; and a higher
                revision than expected wins if it comes from the group's last synchronization.
                All members must give the same.
            in_place: write pieces straight into the tensors, without staging them: if the call
                fails, the tensors are undefined. Only for the first synchronization.
            staging_bytes_max: received pieces are staged until all have arrived: up to so many
                bytes in memory, more in a temporary file.
            staging_directory: an existing directory for that file; None: the default directory
                for temporary files.
            on_progress: called with a :class:`pccl.SyncProgress` some times a second, on the
                library's thread: it must return soon, and not call the communicator. If it raises,
                that is logged, and it is not called any more. A
                :class:`pccl.progress.ProgressBar` can be given; None: one is used if
                ``PCCL_PROGRESS`` says so, and the fetch takes longer than a second.
            timeout_s: budget of all attempts together.

        Returns:
            Bytes that this peer sent to other members, and bytes that it received.

        Raises:
            StateMismatch: names, dtypes or lengths of tensors differ, or contents that must not;
                the message names the first tensor, the piece, and the members.
            StateUnavailable: no member has a state to continue with; the message says what to do.
            DescriptorMismatch: members gave strategies that exclude each other.
            Evicted: this peer's state conflicts with that of the majority.
            PendingOperations: collectives of this peer are still open.
            DeadlineExceeded, OutcomeUnknown: the budget ran out; the state is what it was.
            OSError: there is no space to stage the received pieces.
            ValueError, TypeError: an argument that cannot be used.
        """
        with showing(request.on_progress):
            return await self._run(CheckedCall("sync_shared_state", self._engine.sync, request))

    @asking(verify_request)
    async def verify(self, request: SyncOptions) -> None:
        """Make sure that all members of the group hold the same contents. Joint call of the group.

        It changes nothing, and ignores revisions and tensors that may differ.

        Args:
            shared_state: as of ``sync_shared_state``.
            timeout_s: budget.

        Raises:
            StateMismatch: contents differ; the message names the first tensor and piece that
                differ, and which members hold which contents.
            PendingOperations, DeadlineExceeded: as of ``sync_shared_state``.
        """
        await self._run(CheckedCall("verify", self._engine.sync, request))

    @asking(broadcast_request)
    async def broadcast(self, request: ReduceRequest) -> ReduceInfo:
        """Give all members of the group the values of one. Joint call of the group, per tag.

        All members receive the values, or none does. A single member returns at once.

        Args:
            tensor: as of ``all_reduce``, overwritten in place (on the root: unchanged).
            root: rank of the member that sends its values.
            tag: as of ``all_reduce``, which shares the tags.
            timeout_s: budget.

        Returns:
            Bytes moved, and the members that took part.

        Raises:
            CollectiveAborted: a member was lost, or withdrew; ``tensor`` is what it was. Ranks
                may have changed.
            DescriptorMismatch: the members asked for different dtypes, counts or roots.
            DeadlineExceeded, OutcomeUnknown: the budget ran out; ``tensor`` is what it was.
            ValueError, TypeError: no such rank, or a tensor that cannot be used.
        """
        return await self._run(CheckedCall("broadcast", self._engine.reduce, request))

    @asking(barrier_request)
    async def barrier(self, request: ReduceRequest) -> None:
        """Wait until all members of the group have called it. Joint call of the group, per tag.

        A single member returns at once.

        Raises:
            CollectiveAborted: a member was lost, or withdrew. Call again.
            DescriptorMismatch: other members use the tag for another call.
            DeadlineExceeded, OutcomeUnknown: the budget ran out.
        """
        await self._run(CheckedCall("barrier", self._engine.reduce, request))

    async def close(self) -> None:
        """Leave the run and free all resources; idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._session.close)

    async def __aenter__(self) -> Communicator:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, call: CheckedCall[Any, _T]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        submission = self._session.submit(call)
        with self._session.inside(call, task):
            finished = submission.start().finished
            try:
                await ended(finished)
                return finished.result()
            except PCCLError as error:
                failure, cause = named(error, call.func), error.__cause__
            except asyncio.CancelledError:
                submission.cancel()
                while not finished.done():  # until the buffers are free, however often cancelled
                    with suppress(asyncio.CancelledError):
                        await ended(finished)
                self._session.settle_left(call, submission)
                raise
            except GeneratorExit:  # the loop was closed with this task still waiting
                submission.cancel()
                raise
        raise failure from cause  # out here, so that no frame of the I/O thread comes along


def _round(
    engine: PeerEngine, kind: RoundKind, timeout_s: float | None
) -> CheckedCall[RunRequest, bool]:
    request = RunRequest(kind, check_timeout(timeout_s))
    return CheckedCall(kind.call_name, engine.round, request)
