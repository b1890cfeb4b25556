"""The asyncio API, with the same calls as the blocking one.

Data moves on the library's I/O thread, so a busy loop of the caller does not slow it down. Once a
cancelled call has raised ``CancelledError``, the library no longer writes into its buffers. The
blocking calls (:mod:`pccl.communicator`) are made from these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar

from pccl._api.arguments import (
    join_request,
    many_request,
    publish_request,
    sync_request,
    verify_request,
)
from pccl._api.base import CommunicatorBase, SubgroupBase
from pccl._api.group_calls import GroupCalls
from pccl._api.handles import AsyncReduceHandle
from pccl._api.reports import MemberInfo
from pccl._api.session import CheckedCall
from pccl._api.signatures import asking
from pccl._api.store.faces import AsyncStore
from pccl.checks import check_quorum, check_timeout
from pccl.errors import PCCLError, named
from pccl.progress import showing
from pccl.protocol.types import Quorum, RoundKind
from pccl.runtime.engine import PeerEngine
from pccl.runtime.io_thread import ended
from pccl.runtime.publishing.publisher import PublishRequest
from pccl.runtime.requests import (
    JoinRequest,
    ReduceInfo,
    ReduceManyRequest,
    RunRequest,
    SharedStateSyncInfo,
)
from pccl.runtime.state.sync import SyncOptions

_T = TypeVar("_T")

__all__ = [
    "AsyncReduceHandle",
    "AsyncStore",
    "Communicator",
    "MemberInfo",
    "ReduceInfo",
    "Subgroup",
]


class Subgroup(SubgroupBase, GroupCalls):
    """Some members of a group; see :class:`pccl._api.base.SubgroupBase`."""


class Communicator(CommunicatorBase, GroupCalls):
    """One process's membership in a run; see :class:`pccl.Communicator` for all details.

    Use with ``async with``, or call ``await close()``. For the arguments see
    :class:`pccl._api.base.CommunicatorBase`.
    """

    @asking(join_request)
    async def connect(self, request: JoinRequest) -> None:
        """Join the run. Returns when the members have admitted this peer, in a joint call.

        With ``shared_state`` this peer first fetches the contents of the members' last
        synchronization, in the background, while the members keep working. Then they admit it.
        The first ``sync_shared_state`` of the same state fetches the changes since then. Without
        ``on_reduction``, no tensor is changed before that call.

        Args:
            n_attempts: number of attempts to reach the master, one second apart.
            min_peers: number of members that the run must have, this one included, before this
                peer is admitted; None: ``PCCL_MIN_PEERS``, otherwise 1.
            shared_state: state to fetch before the admission; None: none.
            staging_bytes_max: as for ``sync_shared_state``.
            staging_directory: as for ``sync_shared_state``.
            on_progress: as for ``sync_shared_state``.
            on_reduction: with ``shared_state``: called in a thread of the library with the result
                of each ``observable`` reduce that the members commit after the fetched
                synchronization, in order. It must change the tensors as the members do with that
                result, so that this peer need not fetch the changes. The library then writes the
                tensors before the admission, and fetches missed changes. If it raises, the library
                logs that, stops calling it, and fetches the pieces that differ.
            timeout_s: budget of the call, in seconds.

        Raises:
            MasterLost: no master was found. Start it, or correct the address, and call again.
            NotAdmitted: the master refused this peer; the reason says what to change.
            LinkError: this peer could not open its own port.
            DeadlineExceeded: the budget ran out. Call again.
            PCCLError: the communicator is connected already (INVALID_USAGE).
        """
        with showing(request.on_progress):
            await self._run(CheckedCall("connect", self._engine.connect, request, joint=False))

    async def update_topology(
        self,
        *,
        quorum: int | float | None = None,
        grace_s: float | str = "auto",
        timeout_s: float | None = None,
    ) -> None:
        """Admit newcomers that are ready. Joint call of all members of all groups.

        If the measured links have changed, the master may also renew the plan of a group, at most
        once a minute: the algorithms of ``algorithm="auto"`` and the shares of a mesh.

        World sizes change in this call, and when a collective returns or raises. After Evicted and
        MasterLost, this call joins the run again, as a newcomer.

        Args:
            quorum: as for ``all_reduce``, of the members of each group. A late call returns at
                once.
            grace_s: as for ``all_reduce``.
            timeout_s: budget of the call, in seconds.

        Raises:
            PendingOperations: a collective of this peer is still open. Wait for it first.
            DeadlineExceeded: the budget ran out. Call again, to take part in the same round.
        """
        needed = check_quorum(quorum, grace_s)
        await self._run(_round(self._engine, RoundKind.UPDATE_TOPOLOGY, timeout_s, needed))

    async def are_peers_pending(self, *, timeout_s: float | None = None) -> bool:
        """Whether newcomers are ready to be admitted. All members get the same answer.

        Joint call of all members of all groups, also while collectives are in flight.

        Raises:
            DeadlineExceeded: the budget ran out. Call again, to take part in the same round.
        """
        return await self._run(_round(self._engine, RoundKind.PEERS_PENDING, timeout_s))

    async def optimize_topology(self, *, timeout_s: float | None = None) -> None:
        """Renew the plans of all groups at once. Joint call of all members of all groups.

        If the measured links have changed, the master chooses the algorithms of
        ``algorithm="auto"`` and the shares of a mesh again, in a new view. Rings keep their order.

        Raises:
            TooFewPeers: this peer is alone in the run. Wait for newcomers in ``update_topology``.
            PendingOperations: a collective of this peer is still open. Wait for it first.
            DeadlineExceeded: the budget ran out. Call again, to take part in the same round.
        """
        await self._run(_round(self._engine, RoundKind.OPTIMIZE_TOPOLOGY, timeout_s))

    @asking(many_request)
    async def all_reduce_multiple_with_retry(self, request: ReduceManyRequest) -> ReduceInfo:
        """Reduce several tensors; after a loss, reduce the affected tensors again.

        Joint call of the group; the members pair the tensors by tag. It returns when every tensor
        is reduced on all members. Tensors may differ in their contributors if a member is lost
        during the call.

        Args:
            descriptors: one descriptor for each tensor, each with its own tag.
            max_in_flight: number of tensors that are reduced at the same time.
            timeout_s: budget of the whole call, in seconds.

        Returns:
            Bytes moved in total, and the contributors of the last tensor.

        Raises:
            TooFewPeers: no other member is left in the group. All errors of this call list the
                tags of the reduced tensors in ``completed_tags``; the other tensors are unchanged.
            DescriptorMismatch: the members asked for different things under one tag.
            DeadlineExceeded, OutcomeUnknown: the budget ran out.
            Evicted, MasterLost: this peer lost its membership or the master. These errors take
                precedence over other failures.
            ValueError, TypeError: the list is empty, a tag is not unique, or a tensor is unusable.
        """
        name = "all_reduce_multiple_with_retry"
        return await self._run(CheckedCall(name, self._engine.reduce_many, request))

    @asking(sync_request)
    async def sync_shared_state(self, request: SyncOptions) -> SharedStateSyncInfo:
        """Make the shared states of all members of the group equal. Joint call of the group.

        The group elects one content (``docs/shared-state.md`` has the rules). Members with other
        contents receive the pieces that differ, from all members that have them. All members commit
        it or none does; a failed call changes no tensor, unless ``in_place``. After a loss the call
        continues or restarts by itself, and keeps the pieces that it has received.

        Args:
            shared_state: tensors and their revision. A member is outdated, and receives both, if
                its revision is not the one that follows the last synchronization.
            strategy: ENFORCE_POPULAR of all members, or SEND_ONLY and RECEIVE_ONLY.
            expect_unchanged: raise StateMismatch on all members if a member would receive contents.
            resume: which revision wins if no member has the group's. ``"never"``: none, and the
                call raises StateUnavailable. ``"highest"``: the highest revision of any member.
                ``"advanced"``: the same, but never 0 once the group had a later one; a higher
                revision than expected wins if it comes from the group's last synchronization.
                All members must give the same.
            in_place: write pieces straight into the tensors, without staging them: if the call
                fails, the tensors are undefined. Only for the first synchronization.
            staging_bytes_max: limit of memory for staging, in bytes. Received pieces are staged
                until all have arrived; pieces beyond the limit go to a temporary file.
            staging_directory: an existing directory for that file; None: the default directory
                for temporary files.
            on_progress: called with a :class:`pccl.SyncProgress` several times a second, on the
                library's thread: it must return soon, and not call the communicator. If it raises,
                the library logs the error, and stops calling it. It may be a
                :class:`pccl.progress.ProgressBar`. None: with ``PCCL_PROGRESS=1``, a bar shows
                fetches that take longer than a second.
            quorum: as for ``all_reduce``. A late call fetches the elected contents.
            grace_s: as for ``all_reduce``.
            timeout_s: budget of all attempts together, in seconds.

        Returns:
            Bytes that this peer sent to other members, and bytes that it received.

        Raises:
            StateMismatch: names, dtypes or lengths of tensors differ, or contents that must not
                differ; the message names the first tensor, the piece, and the members.
            StateUnavailable: no member has a state to continue with; the message says what to do.
            ResyncRequired: this call is late, and no member offers the elected state any more. A
                further call takes part in the next synchronization.
            DescriptorMismatch: members gave strategies that exclude each other.
            Evicted: this peer's state conflicts with that of the majority.
            PendingOperations: collectives of this peer are still open.
            DeadlineExceeded, OutcomeUnknown: the budget ran out; the state is unchanged.
            OSError: there is no space to stage the received pieces.
            ValueError, TypeError: an argument cannot be used; the message says why.
        """
        with showing(request.on_progress):
            return await self._run(CheckedCall("sync_shared_state", self._engine.sync, request))

    @asking(verify_request)
    async def verify(self, request: SyncOptions) -> None:
        """Check that all members of the group have the same contents. Joint call of the group.

        It changes nothing, and ignores revisions and tensors that may differ.

        Args:
            shared_state: as for ``sync_shared_state``.
            timeout_s: budget of the call, in seconds.

        Raises:
            StateMismatch: contents differ; the message names the first tensor and piece that
                differ, and which members hold which contents.
            PendingOperations, DeadlineExceeded: as for ``sync_shared_state``.
        """
        await self._run(CheckedCall("verify", self._engine.sync, request))

    @asking(publish_request)
    async def publish(self, request: PublishRequest) -> int:
        """Publish the present contents of a shared state to readers outside the run.

        No joint call: it returns when the state is copied, and waits for no member and no reader.
        All members should call it, with the same contents: a version counts once more than half of
        the group have published the same bytes. A reader then fetches what differs from the version
        that it has; see :class:`pccl.publishing.Subscriber` and ``docs/publishing.md``.

        This peer keeps copies of the newest two versions in the memory of the host. Tensors that
        may differ between members are not published.

        Args:
            shared_state: tensors, and the revision, which is the number of the version.
            readers_bytes_per_s_max: how many bytes per second this peer sends to all readers
                together, at most; it applies to readers that connect from now on. 0 or None: no
                limit of its own.

        Returns:
            The number of the version.

        Raises:
            NotConnected: this peer is not a member.
            MemoryError: there is no memory for the copy.
            ValueError, TypeError: an argument cannot be used; the message says why.
        """
        call = CheckedCall("publish", self._engine.publish, request, joint=False, is_caller=False)
        return await self._run(call)

    def subgroup(self, ranks: Sequence[int]) -> Subgroup:
        """Return the collectives of some members, as ``pccl.Communicator.subgroup`` does. Local."""
        return Subgroup(self._members_at(ranks), self.peer_id, self._reduce, self._start)

    @property
    def store(self) -> AsyncStore:
        """The run's key-value store; see :class:`pccl.communicator.Store`."""
        return AsyncStore(self._engine.ask_store, self._run)

    async def close(self) -> None:
        """Leave the run and free all resources. Idempotent."""
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
        with self._session.inside(call, task) as joint:
            submission = self._session.submit(call, joint)
            finished = submission.start().finished
            try:
                await ended(finished)
                return finished.result()
            except PCCLError as error:
                failure, cause = named(error, call.func), error.__cause__
            except asyncio.CancelledError:
                submission.cancel()
                while not finished.done():  # until the buffers are free, even if cancelled again
                    with suppress(asyncio.CancelledError):
                        await ended(finished)
                self._session.settle_left(call, submission)
                raise
            except GeneratorExit:  # the loop was closed with this task still waiting
                submission.cancel()
                raise
        raise failure from cause  # raised here, so that the traceback has no I/O thread frames


def _round(
    engine: PeerEngine, kind: RoundKind, timeout_s: float | None, quorum: Quorum | None = None
) -> CheckedCall[RunRequest, bool]:
    request = RunRequest(kind, check_timeout(timeout_s), quorum)
    return CheckedCall(kind.call_name, engine.round, request)
