"""The asyncio API: the same calls, awaitable on the caller's loop.

The data moves on the library's I/O thread, so a busy loop of the caller's does not slow it down.
Cancelling a call leaves it for good: once the ``CancelledError`` is raised, nothing is written into
the buffers any more.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from pccl._api.base import CommunicatorBase
from pccl._api.handles import AsyncReduceHandle
from pccl._api.reports import MemberInfo, ReduceInfo, info_of, sync_info_of
from pccl._api.session import CheckedCall
from pccl.descriptors import QuantizationOptions, ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.errors import PCCLError, named
from pccl.progress import listening
from pccl.protocol.types import Algorithm, ReduceOp
from pccl.runtime.io_thread import ended
from pccl.runtime.state.progress import SyncProgress
from pccl.runtime.state.replay import ObservedReduction
from pccl.shared_state import SharedState, SharedStateSyncInfo, SharedStateSyncStrategy

_T = TypeVar("_T")

__all__ = ["AsyncReduceHandle", "Communicator", "MemberInfo", "ReduceInfo"]


class Communicator(CommunicatorBase):
    """One process's membership in a run; see :class:`pccl.Communicator` for all details.

    Use with ``async with``, or call ``await close()``. For the arguments see
    :class:`pccl._api.base.CommunicatorBase`.
    """

    async def connect(
        self,
        n_attempts: int = 5,
        *,
        min_peers: int | None = None,
        shared_state: SharedState | None = None,
        staging_bytes_max: int = 1 << 30,
        staging_directory: str | os.PathLike[str] | None = None,
        on_progress: Callable[[SyncProgress], None] | None = None,
        on_reduction: Callable[[ObservedReduction], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Join the run; see :meth:`pccl.Communicator.connect`."""
        with listening(on_progress, "joining") as listener:
            call = self._session.connect(
                n_attempts,
                min_peers,
                timeout_s,
                shared_state,
                staging_bytes_max,
                staging_directory,
                listener,
                on_reduction,
            )
            await self._run(call)

    async def update_topology(self, *, timeout_s: float | None = None) -> None:
        """Admit newcomers; see :meth:`pccl.Communicator.update_topology`."""
        await self._run(self._session.update_topology(timeout_s))

    async def are_peers_pending(self, *, timeout_s: float | None = None) -> bool:
        """Whether newcomers wait; see :meth:`pccl.Communicator.are_peers_pending`."""
        return await self._run(self._session.are_peers_pending(timeout_s))

    async def optimize_topology(self, *, timeout_s: float | None = None) -> None:
        """Settle the order of the rings; see :meth:`pccl.Communicator.optimize_topology`."""
        await self._run(self._session.optimize_topology(timeout_s))

    async def all_reduce(
        self,
        send: object,
        recv: object | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        weight: float | None = None,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        algorithm: Algorithm | str = "auto",
        observable: bool = False,
        retry: bool = False,
        timeout_s: float | None = None,
    ) -> ReduceInfo:
        """Reduce over the group; see :meth:`pccl.Communicator.all_reduce`."""
        call = self._session.all_reduce(
            send,
            recv,
            op,
            tag,
            operand_descriptor,
            quantization_options,
            retry,
            timeout_s,
            algorithm,
            observable,
            weight,
        )
        return info_of(await self._run(call))

    async def all_reduce_async(
        self,
        send: object,
        recv: object | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        weight: float | None = None,
        tag: int = 0,
        operand_descriptor: ReduceOperandDescriptor | None = None,
        quantization_options: QuantizationOptions | None = None,
        algorithm: Algorithm | str = "auto",
        observable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncReduceHandle:
        """Start a reduce; await the handle for its outcome.

        See :meth:`pccl.Communicator.all_reduce_async`. Unlike a task around ``all_reduce``, the
        reduce is launched when this returns, and cancelling a wait for it does not withdraw it.
        """
        call = self._session.launch(
            send,
            recv,
            op,
            tag,
            operand_descriptor,
            quantization_options,
            timeout_s,
            algorithm,
            observable,
            weight,
        )
        return AsyncReduceHandle(self._session, await self._run(call))

    async def all_reduce_many(
        self,
        tensors: Iterable[object],
        recv: Iterable[object] | None = None,
        *,
        op: ReduceOp = ReduceOp.SUM,
        weight: float | None = None,
        tag: int = 0,
        quantization_options: QuantizationOptions | None = None,
        algorithm: Algorithm | str = "auto",
        observable: bool = False,
        retry: bool = False,
        timeout_s: float | None = None,
    ) -> ReduceInfo:
        """Reduce several as one; see :meth:`pccl.Communicator.all_reduce_many`."""
        what = (tensors, recv, op, tag, quantization_options, algorithm)
        call = self._session.all_reduce_many(*what, retry, timeout_s, observable, weight)
        return info_of(await self._run(call))

    async def all_reduce_multiple_with_retry(
        self,
        descriptors: Iterable[ReduceOpDescriptor],
        *,
        max_in_flight: int = 4,
        timeout_s: float | None = None,
    ) -> ReduceInfo:
        """Reduce several; see :meth:`pccl.Communicator.all_reduce_multiple_with_retry`."""
        call = self._session.all_reduce_multiple(descriptors, max_in_flight, timeout_s)
        return info_of(await self._run(call))

    async def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
        *,
        expect_unchanged: bool = False,
        resume: str = "never",
        in_place: bool = False,
        staging_bytes_max: int = 1 << 30,
        staging_directory: str | os.PathLike[str] | None = None,
        on_progress: Callable[[SyncProgress], None] | None = None,
        timeout_s: float | None = None,
    ) -> SharedStateSyncInfo:
        """Make shared states equal; see :meth:`pccl.Communicator.sync_shared_state`."""
        with listening(on_progress, "synchronizing") as listener:
            call = self._session.sync_shared_state(
                shared_state,
                strategy,
                expect_unchanged,
                resume,
                in_place,
                staging_bytes_max,
                staging_directory,
                listener,
                timeout_s,
            )
            return sync_info_of(await self._run(call))

    async def verify(self, shared_state: SharedState, *, timeout_s: float | None = None) -> None:
        """Make sure that they are equal; see :meth:`pccl.Communicator.verify`."""
        await self._run(self._session.verify(shared_state, timeout_s))

    async def broadcast(
        self, tensor: object, *, root: int = 0, tag: int = 0, timeout_s: float | None = None
    ) -> ReduceInfo:
        """Take over one member's values; see :meth:`pccl.Communicator.broadcast`."""
        return info_of(await self._run(self._session.broadcast(tensor, root, tag, timeout_s)))

    async def barrier(self, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Wait for the group; see :meth:`pccl.Communicator.barrier`."""
        await self._run(self._session.barrier(tag, timeout_s))

    async def close(self) -> None:
        """Say goodbye and free everything; idempotent."""
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

    async def _run(self, call: CheckedCall[_T]) -> _T:
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
