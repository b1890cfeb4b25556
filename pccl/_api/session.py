"""What the blocking and the asyncio communicator share: an engine on the I/O thread.

A session owns the engine but not the other way round, and ``weakref.finalize`` closes it when the
communicator is collected or the interpreter ends, so nobody has to call ``close``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from pccl._api import draining
from pccl._api.arguments import (
    broadcast_request,
    list_request,
    many_requests,
    prefetch_request,
    reduce_request,
    sync_request,
    verify_request,
)
from pccl._api.callers import Caller, Callers
from pccl._api.reports import Status, status_of
from pccl.addresses import reachable_at
from pccl.checks import (
    ATTEMPTS_MAX,
    IN_FLIGHT_MAX,
    TAG_MAX,
    check_flag,
    check_range,
    check_timeout,
    check_timing,
)
from pccl.config import (
    resolve_advertise,
    resolve_drain,
    resolve_group,
    resolve_listen,
    resolve_masters,
    resolve_min_peers,
    resolve_token,
)
from pccl.descriptors import QuantizationOptions, ReduceOpDescriptor, ReduceOperandDescriptor
from pccl.errors import NotConnected
from pccl.protocol.limits import Timing
from pccl.protocol.shared_state import SharedStateSyncStrategy
from pccl.protocol.types import Algorithm, PeerId, ReduceOp, Roster, RoundKind
from pccl.runtime.clock import LoopClock
from pccl.runtime.collective.operand import Operand
from pccl.runtime.engine import PeerEngine
from pccl.runtime.hashing import PooledHasher
from pccl.runtime.io_thread import IOThread, Submission
from pccl.runtime.requests import ReduceReport
from pccl.runtime.state.progress import SyncProgress
from pccl.runtime.state.replay import ObservedReduction
from pccl.runtime.state.sync import SyncOptions, SyncReport
from pccl.shared_state import SharedState

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckedCall(Generic[_T]):
    """A call of the API whose arguments are checked.

    Attributes:
        func: its name, for errors.
        work: does it, on the I/O thread.
        joint: its caller waits for other members.
        left: told, on the I/O thread, what the work returned if its caller had left by then.
    """

    func: str
    work: Callable[[], Coroutine[Any, Any, _T]]
    joint: bool
    left: Callable[[_T], None]


class Session:
    """An engine on the I/O thread, and the checks at the edge of the API."""

    def __init__(
        self,
        owner: object,
        address: str | None,
        peer_group: int | None,
        lanes: int,
        timing: Timing | None,
        token: str | bytes | None,
        advertise: str | None,
        listen: str | None,
    ) -> None:
        master, *others = resolve_masters(address)
        group = resolve_group(peer_group)
        self.callers = Callers()
        options = replace(
            reachable_at(master, resolve_advertise(advertise), resolve_listen(listen)),
            timing=check_timing(timing),
            lanes=lanes,
            other_masters=tuple(others),
            token=resolve_token(token),
            callers_blocked=self.callers.all_blocked,
        )
        user = object()

        def make_engine() -> PeerEngine:
            io = self._io
            clock = LoopClock(io.loop)
            return PeerEngine(
                io.loop, clock, io.transport, master, group, options, hasher=PooledHasher(io.loop)
            )

        try:
            self._io = IOThread.acquire(user)
            self.engine = self._io.call(make_engine)
            self._leave = partial(self._io.leave, user, self.engine.close)
            self._finalizer = weakref.finalize(owner, self._leave)
            if resolve_drain():
                draining.drain(self)
        except BaseException:
            IOThread.give_up(user)
            raise

    # -- calls -----------------------------------------------------------------------------------

    def connect(
        self,
        n_attempts: int,
        min_peers: int | None,
        timeout_s: float | None,
        shared_state: SharedState | None = None,
        staging_bytes_max: int = 1 << 30,
        staging_directory: str | os.PathLike[str] | None = None,
        on_progress: Callable[[SyncProgress], None] | None = None,
        on_reduction: Callable[[ObservedReduction], None] | None = None,
    ) -> CheckedCall[None]:
        """Prepare ``connect``."""
        n_attempts = check_range("n_attempts", n_attempts, 1, ATTEMPTS_MAX)
        peers = resolve_min_peers(min_peers)
        limit_s = check_timeout(timeout_s)
        prefetch = prefetch_request(
            shared_state, staging_bytes_max, staging_directory, on_progress, on_reduction
        )

        def work() -> Coroutine[Any, Any, None]:
            return self.engine.connect(
                n_attempts, min_peers=peers, timeout_s=limit_s, prefetch=prefetch
            )

        return CheckedCall("connect", work, joint=False, left=self._left_admitted)

    def update_topology(self, timeout_s: float | None) -> CheckedCall[None]:
        """Prepare ``update_topology``."""
        limit_s = check_timeout(timeout_s)
        return self._round(
            "update_topology",
            RoundKind.UPDATE_TOPOLOGY,
            lambda: self.engine.update_topology(timeout_s=limit_s),
        )

    def are_peers_pending(self, timeout_s: float | None) -> CheckedCall[bool]:
        """Prepare ``are_peers_pending``."""
        limit_s = check_timeout(timeout_s)
        return self._round(
            "are_peers_pending",
            RoundKind.PEERS_PENDING,
            lambda: self.engine.are_peers_pending(timeout_s=limit_s),
        )

    def optimize_topology(self, timeout_s: float | None) -> CheckedCall[None]:
        """Prepare ``optimize_topology``."""
        limit_s = check_timeout(timeout_s)
        return self._round(
            "optimize_topology",
            RoundKind.OPTIMIZE_TOPOLOGY,
            lambda: self.engine.optimize_topology(timeout_s=limit_s),
        )

    def all_reduce(
        self,
        send: object,
        recv: object | None,
        op: ReduceOp,
        tag: int,
        operand_descriptor: ReduceOperandDescriptor | None,
        quantization_options: QuantizationOptions | None,
        retry: bool,
        timeout_s: float | None,
        algorithm: Algorithm | str = Algorithm.AUTO,
        observable: bool = False,
        weight: float | None = None,
    ) -> CheckedCall[ReduceReport]:
        """Prepare ``all_reduce``."""
        limit_s, again = check_timeout(timeout_s), check_flag("retry", retry)
        what = (send, recv, op, tag, operand_descriptor, quantization_options)
        request = reduce_request(*what, algorithm, observable, weight)
        return self._collective(
            "all_reduce",
            lambda: self.engine.reduce(request, retry=again, timeout_s=limit_s),
            [request.operand],
        )

    def all_reduce_many(
        self,
        tensors: Iterable[object],
        recv: Iterable[object] | None,
        op: ReduceOp,
        tag: int,
        quantization_options: QuantizationOptions | None,
        algorithm: Algorithm | str,
        retry: bool,
        timeout_s: float | None,
        observable: bool = False,
        weight: float | None = None,
    ) -> CheckedCall[ReduceReport]:
        """Prepare ``all_reduce_many``."""
        limit_s, again = check_timeout(timeout_s), check_flag("retry", retry)
        what = (tensors, recv, op, tag, quantization_options)
        request = list_request(*what, algorithm, observable, weight)
        return self._collective(
            "all_reduce_many",
            lambda: self.engine.reduce(request, retry=again, timeout_s=limit_s),
            [request.operand],
        )

    def launch(
        self,
        send: object,
        recv: object | None,
        op: ReduceOp,
        tag: int,
        operand_descriptor: ReduceOperandDescriptor | None,
        quantization_options: QuantizationOptions | None,
        timeout_s: float | None,
        algorithm: Algorithm | str = Algorithm.AUTO,
        observable: bool = False,
        weight: float | None = None,
    ) -> CheckedCall[int]:
        """Prepare the launch of ``all_reduce_async``, which returns a ticket."""
        limit_s = check_timeout(timeout_s)
        what = (send, recv, op, tag, operand_descriptor, quantization_options)
        request = reduce_request(*what, algorithm, observable, weight)

        async def work() -> int:
            return self.engine.launch(request, timeout_s=limit_s)

        return CheckedCall("all_reduce_async", work, joint=False, left=self.engine.calls.withdraw)

    def finish(self, ticket: int) -> Submission[ReduceReport]:
        """Wait for a launched reduce; to cancel this leaves the reduce alone.

        Raises:
            NotConnected: the communicator is closed.
        """
        if self.closed:
            raise self._closed_error("all_reduce_async")
        return self._io.submit(lambda: self.engine.finish(ticket))

    def report_of(self, ticket: int) -> ReduceReport | None:
        """Of a launched reduce that was committed, also after ``close``; otherwise None."""
        report = self.engine.calls.result_of(ticket)
        return report if isinstance(report, ReduceReport) else None

    def has_ended(self, ticket: int) -> bool:
        """Whether a launched reduce has an outcome, or will never have one."""
        return self.closed or self.engine.calls.has_ended(ticket)

    def forget(self, ticket: int) -> None:
        """Nobody will ask for the outcome of a launched reduce any more. Any thread."""
        if not self.closed:
            with suppress(RuntimeError):  # closed by another thread just now
                self._io.loop.call_soon_threadsafe(self.engine.calls.forget, ticket)

    def all_reduce_multiple(
        self,
        descriptors: Iterable[ReduceOpDescriptor],
        max_in_flight: int,
        timeout_s: float | None,
    ) -> CheckedCall[ReduceReport]:
        """Prepare ``all_reduce_multiple_with_retry``."""
        in_flight = check_range("max_in_flight", max_in_flight, 1, IN_FLIGHT_MAX)
        limit_s = check_timeout(timeout_s)
        requests = many_requests(descriptors)

        def work() -> Coroutine[Any, Any, ReduceReport]:
            return self.engine.reduce_many(requests, max_in_flight=in_flight, timeout_s=limit_s)

        lent = [request.operand for request in requests]
        return self._collective("all_reduce_multiple_with_retry", work, lent)

    def broadcast(
        self, tensor: object, root: int, tag: int, timeout_s: float | None
    ) -> CheckedCall[ReduceReport]:
        """Prepare ``broadcast``."""
        limit_s = check_timeout(timeout_s)
        request = broadcast_request(tensor, root, tag)
        return self._collective(
            "broadcast",
            lambda: self.engine.reduce(request, timeout_s=limit_s),
            [request.operand],
        )

    def barrier(self, tag: int, timeout_s: float | None) -> CheckedCall[ReduceReport]:
        """Prepare ``barrier``."""
        limit_s = check_timeout(timeout_s)
        number = check_range("tag", tag, 0, TAG_MAX)
        return self._collective("barrier", lambda: self.engine.barrier(number, timeout_s=limit_s))

    def sync_shared_state(
        self,
        shared_state: SharedState,
        strategy: SharedStateSyncStrategy,
        expect_unchanged: bool,
        resume: str,
        in_place: bool,
        staging_bytes_max: int,
        staging_directory: str | os.PathLike[str] | None,
        on_progress: Callable[[SyncProgress], None] | None,
        timeout_s: float | None,
    ) -> CheckedCall[SyncReport]:
        """Prepare ``sync_shared_state``."""
        request = sync_request(
            shared_state,
            strategy,
            expect_unchanged,
            resume,
            in_place,
            staging_bytes_max,
            staging_directory,
            on_progress,
        )
        return self._sync("sync_shared_state", request, timeout_s)

    def verify(self, shared_state: SharedState, timeout_s: float | None) -> CheckedCall[SyncReport]:
        """Prepare ``verify``."""
        return self._sync("verify", verify_request(shared_state), timeout_s)

    def _sync(
        self, func: str, request: SyncOptions, timeout_s: float | None
    ) -> CheckedCall[SyncReport]:
        limit_s = check_timeout(timeout_s)
        # Whoever leaves without noticing that it was committed has the state and its revision.
        return CheckedCall(
            func,
            lambda: self.engine.sync(request, timeout_s=limit_s),
            joint=True,
            left=lambda _: None,
        )

    def _collective(
        self,
        func: str,
        work: Callable[[], Coroutine[Any, Any, ReduceReport]],
        lent: Iterable[Operand | None] = (),
    ) -> CheckedCall[ReduceReport]:
        left = partial(self.engine.calls.left_committed, lent=lent)
        return CheckedCall(func, work, joint=True, left=left)

    def _round(
        self, func: str, kind: RoundKind, work: Callable[[], Coroutine[Any, Any, _T]]
    ) -> CheckedCall[_T]:
        return CheckedCall(
            func, work, joint=True, left=lambda _: self.engine.calls.left_answered(kind)
        )

    def _left_admitted(self, _: None) -> None:
        self.engine.calls.left_admitted()

    # -- carrying them out -----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or this is a copy that fork made."""
        return not self._finalizer.alive or self._io.abandoned

    def submit(self, call: CheckedCall[_T]) -> Submission[_T]:
        """Hand a call to the I/O thread; ``start`` or ``wait`` lets it begin.

        Raises:
            NotConnected: the communicator is closed.
        """
        if self.closed:
            raise self._closed_error(call.func)
        if call.joint:
            return self._io.submit(lambda: self.callers.counted(call.work))
        return self._io.submit(call.work)

    def inside(self, call: CheckedCall[Any], caller: Caller) -> AbstractContextManager[None]:
        """While the caller waits for the call."""
        if call.joint:
            return self.callers.inside(caller)
        self.callers.note(caller)
        return nullcontext()

    def settle_left(self, call: CheckedCall[_T], submission: Submission[_T]) -> None:
        """The caller left; if his call had ended all the same, the engine must know how."""
        finished = submission.finished
        if not finished.done() or finished.cancelled():
            return
        error = finished.exception()
        with suppress(NotConnected):  # closed meanwhile
            if error is None:
                self._io.call(lambda: call.left(finished.result()))
            else:
                self._io.call(lambda: self.engine.calls.left_failed(error))

    # -- what is known here ----------------------------------------------------------------------

    def roster(self, func: str) -> Roster:
        """Membership as of the caller's last joint call.

        Raises:
            NotConnected: not a member yet, or closed.
        """
        if self.closed:
            raise self._closed_error(func)
        roster = self.engine.roster
        if roster is None:
            raise NotConnected(None, func, "not a member of a run yet; call connect() first")
        return roster

    def peer_id(self, func: str) -> PeerId:
        """The own id.

        Raises:
            NotConnected: not a member yet, or closed.
        """
        self.roster(func)
        return self.engine.machine.peer

    def status(self, func: str) -> Status:
        """What this peer knows of itself.

        Raises:
            NotConnected: not a member yet, or closed.
        """
        self.roster(func)
        return self._io.call(lambda: status_of(self.engine))

    def describe(self) -> str:
        """Who this is, for people."""
        where = f"master {self.engine.master}, group {self.engine.group}"
        if self.closed:
            return f"{where}, closed"
        roster, me = self.engine.roster, self.engine.machine.peer
        if roster is None or me not in roster.ring:
            return f"{where}, not a member"
        return f"{where}, peer {me}, rank {roster.ring.index(me)} of {len(roster.ring)}"

    def close(self) -> None:
        """Leave the run and free everything; idempotent."""
        try:
            self._finalizer()
        except BaseException:  # Ctrl-C, and the finalizer does nothing if it is called again
            self._leave()
            raise

    def _closed_error(self, func: str) -> NotConnected:
        why = "belongs to the parent process" if self._io.abandoned else "is closed"
        return NotConnected(None, func, f"the communicator {why}; make a new one")
