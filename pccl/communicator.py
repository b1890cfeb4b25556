"""The blocking API. Each method is made from the asyncio method of the same name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TypeVar

from pccl import aio
from pccl._api.base import CommunicatorBase, SubgroupBase
from pccl._api.group_calls import GroupCalls
from pccl._api.reports import MemberInfo
from pccl._api.session import CheckedCall
from pccl._api.signatures import blocking
from pccl._api.store.faces import Store
from pccl.errors import PCCLError, named
from pccl.runtime.requests import ReduceInfo

_T = TypeVar("_T")

__all__ = ["Communicator", "MemberInfo", "ReduceInfo", "Store", "Subgroup"]


class _BlockingCalls:
    """The calls of a group or a subgroup; see :class:`pccl._api.group_calls.GroupCalls`."""

    all_reduce = blocking(GroupCalls.all_reduce)
    all_reduce_async = blocking(GroupCalls.all_reduce_async)
    all_reduce_many = blocking(GroupCalls.all_reduce_many)
    broadcast = blocking(GroupCalls.broadcast)
    barrier = blocking(GroupCalls.barrier)
    all_gather = blocking(GroupCalls.all_gather)
    gather = blocking(GroupCalls.gather)
    scatter = blocking(GroupCalls.scatter)
    all_to_all = blocking(GroupCalls.all_to_all)
    reduce_scatter = blocking(GroupCalls.reduce_scatter)
    reduce = blocking(GroupCalls.reduce)
    all_gather_async = blocking(GroupCalls.all_gather_async)
    gather_async = blocking(GroupCalls.gather_async)
    scatter_async = blocking(GroupCalls.scatter_async)
    all_to_all_async = blocking(GroupCalls.all_to_all_async)
    reduce_scatter_async = blocking(GroupCalls.reduce_scatter_async)
    reduce_async = blocking(GroupCalls.reduce_async)
    broadcast_async = blocking(GroupCalls.broadcast_async)
    barrier_async = blocking(GroupCalls.barrier_async)
    send = blocking(GroupCalls.send)
    recv = blocking(GroupCalls.recv)
    send_async = blocking(GroupCalls.send_async)
    recv_async = blocking(GroupCalls.recv_async)
    all_gather_object = blocking(GroupCalls.all_gather_object)
    broadcast_object = blocking(GroupCalls.broadcast_object)


class Subgroup(SubgroupBase, _BlockingCalls):
    """Some members of a group; see :class:`pccl._api.base.SubgroupBase`."""


class Communicator(CommunicatorBase, _BlockingCalls):
    """One process's membership in a run.

    Any thread may call its methods. Joint calls block until all members concerned have made them.
    Ctrl-C interrupts them promptly and leaves the inputs unchanged. (If the other members have the
    result by then, the next joint call raises ResyncRequired.)

    The end of the ``with`` block, ``close`` and garbage collection all leave the run.

    ``timeout_s`` is the budget of a whole call, in seconds; None: no limit. When the budget runs
    out, the call raises DeadlineExceeded. It raises OutcomeUnknown instead if this peer had
    finished its part of a reduce, or the run has a standby master. The buffers stay unchanged.

    All joint calls may raise these errors, in addition to the errors that they list:

        Evicted, MasterLost: this peer is no longer a member. All open calls and handles raise
            this, and so do new calls until one has raised it. ``update_topology`` joins again.
        ResyncRequired: the members committed a call that this peer had left. ``connect`` again,
            then ``sync_shared_state``.
        LockstepError: the members waited for different calls. Correct the program.
        NotConnected: ``connect`` was not called; or another call has raised Evicted or MasterLost.

    For the arguments see :class:`pccl._api.base.CommunicatorBase`.
    """

    connect = blocking(aio.Communicator.connect)
    update_topology = blocking(aio.Communicator.update_topology)
    are_peers_pending = blocking(aio.Communicator.are_peers_pending)
    optimize_topology = blocking(aio.Communicator.optimize_topology)
    all_reduce_multiple_with_retry = blocking(aio.Communicator.all_reduce_multiple_with_retry)
    sync_shared_state = blocking(aio.Communicator.sync_shared_state)
    verify = blocking(aio.Communicator.verify)
    publish = blocking(aio.Communicator.publish)

    def subgroup(self, ranks: Sequence[int]) -> Subgroup:
        """Return the collectives of some members of this peer's group. Local.

        Args:
            ranks: the members, by their present ranks in the group, with this peer's own rank; the
                order of ``ranks`` is that of the ranks in the subgroup.

        Raises:
            ValueError, TypeError: ``ranks`` are no such ranks.
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        return self._subgroup_of(self._members_at(ranks))

    def _subgroup_of(self, members: Sequence[MemberInfo]) -> Subgroup:
        """Return the collectives of members that the caller has read, with this peer."""
        return Subgroup(members, self.peer_id, self._reduce, self._start)

    @property
    def store(self) -> Store:
        """The run's key-value store."""
        return Store(self._engine.ask_store, self._run)

    def close(self) -> None:
        """Leave the run and free all resources. Idempotent; later calls raise NotConnected."""
        self._session.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def _run(self, call: CheckedCall[Any, _T]) -> _T:
        """Block the thread until the call has ended; this coroutine never suspends."""
        with self._session.inside(call, threading.current_thread()) as joint:
            submission = self._session.submit(call, joint)
            try:
                return submission.wait()
            except PCCLError as error:
                # Without the frames of the I/O thread, and those here, which keep the tensors.
                failure = named(error.with_traceback(None), call.func)
            except BaseException:  # Ctrl-C
                self._session.settle_left(call, submission)
                raise
        try:
            raise failure from failure.__cause__
        finally:
            del failure
