"""The session that the blocking and the asyncio communicator share: an engine on the I/O thread.

A session owns its engine, and the engine does not refer to it. ``weakref.finalize`` closes the
session when the communicator is collected or the interpreter ends, so ``close`` is optional.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pccl._api.callers import Caller, Callers
from pccl._api.evidence import Evidence
from pccl._api.recording import Recording
from pccl._api.reports import Status, status_of
from pccl.errors import NotConnected
from pccl.observe.listeners import Consumers
from pccl.observe.logs import log_events
from pccl.observe.metrics_server import Served
from pccl.observe.peer_metrics import PeerMetrics
from pccl.protocol.types import PeerId, Roster
from pccl.runtime.calls import JointWork
from pccl.runtime.clock import LoopClock
from pccl.runtime.engine import PeerEngine
from pccl.runtime.hashing import PooledHasher
from pccl.runtime.io_thread import IOThread, Submission
from pccl.runtime.links.port_mapping import PortMapping, router_access
from pccl.runtime.requests import PeerOptions, ReduceInfo, ReduceRequest
from pccl.telemetry.events import Joined
from pccl.telemetry.names import with_name
from pccl.telemetry.stream import Stamped
from pccl.transports.base import Address
from pccl.transports.datagrams import interface_of

_log = logging.getLogger("pccl.peer")

_Request = TypeVar("_Request")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CheckedCall(Generic[_Request, _T]):
    """A call of the API whose arguments are checked.

    Attributes:
        func: name of the call, for errors.
        work: function that does the call, on the I/O thread.
        request: argument of ``work``.
        joint: whether the caller waits for other members.
        is_caller: whether the caller counts from then on as one that may make joint calls.
    """

    func: str
    work: Callable[[_Request], Coroutine[Any, Any, _T]]
    request: _Request
    joint: bool = True
    is_caller: bool = True


async def _stop_recording(
    recording: Recording, close: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    recording.stop()
    await close()


def _say_where(engine: PeerEngine, stamped: Stamped) -> None:
    """Log the interface and the address of a peer that has joined."""
    if isinstance(stamped.event, Joined) and (host := engine.own_host):
        name = interface_of(host)
        through = f" (interface {name})" if name else ""
        _log.info("reaches the master %s from %s%s", engine.master, host, through)


class Session:
    """The engine of one communicator, on the I/O thread.

    Args:
        owner: the communicator.
        master: where the first master listens.
        group: the peer group.
        options: further options of the peer.
        metrics: where to serve its metrics; None: nowhere.
        record_to: folder for records; None: this peer writes none.
        maps_port: whether this peer may ask its router to forward its port.

    Raises:
        ImportError, OSError: the metrics cannot be served.
    """

    def __init__(
        self,
        owner: object,
        master: Address,
        group: int,
        options: PeerOptions,
        metrics: Address | None = None,
        record_to: Path | None = None,
        *,
        maps_port: bool = False,
    ) -> None:
        self.callers = Callers()
        self.has_work: Callable[[], bool] | None = None
        """Whether the program has work to hand over before it leaves; None: it cannot say."""
        self.is_leaving = False
        """Whether the program was told to leave soon, and closes this session by itself."""
        told = replace(options, callers_blocked=self.callers.all_blocked)
        user = object()
        served: Served | None = None

        def make_engine() -> PeerEngine:
            io = self._io
            clock, hasher = LoopClock(io.loop), PooledHasher(io.loop)
            mapping: PortMapping | None = None
            if maps_port:
                access = router_access(io.loop, told.interface)
                mapping = PortMapping(io.loop, clock, access, told.random_bytes)
            transport = io.transport.through(told.interface)
            return PeerEngine(
                io.loop, clock, transport, master, group, told, hasher=hasher,
                port_mapping=mapping,
            )  # fmt: skip

        try:
            self._io = IOThread.acquire(user)
            self.engine = self._io.call(make_engine)
            log_events(self.engine.events, lambda: options.name)
            self.engine.events.listen(partial(_say_where, self.engine))
            self.engine.evidence = Evidence(self.engine, options, self.callers).give
            if metrics is not None:
                values = self._io.call(lambda: PeerMetrics(self.engine))
                served = Served(metrics, options.name, self._io, values.read)
            farewell = self.engine.close
            if record_to is not None:
                io, engine = self._io, self.engine
                recording = io.call(lambda: Recording(io.loop, engine, options.name, record_to))
                farewell = partial(_stop_recording, recording, farewell)
            leave = partial(self._io.leave, user, farewell)
            if served is not None:
                leave = partial(served.end_before, leave)
            self.consumers = Consumers(self.engine.events)
            self._leave = partial(self.consumers.end_after, leave)
            self._finalizer = weakref.finalize(owner, self._leave)
        except BaseException:
            if served is not None:
                served.end()
            IOThread.give_up(user)
            raise

    # -- launched reduces ------------------------------------------------------------------------

    async def launch(self, request: ReduceRequest) -> int:
        """Begin a reduce without a waiter; return its ticket. I/O thread."""
        return self.engine.launch(request)

    def finish(self, ticket: int, joint: JointWork) -> Submission[ReduceInfo]:
        """Wait for a launched reduce, as ``joint``. A cancelled wait does not cancel the reduce.

        Raises:
            NotConnected: the communicator is closed.
        """
        if self.closed:
            raise self._closed_error("all_reduce_async")
        return self._io.submit(lambda: joint.do(lambda: self.engine.finish(ticket)))

    def info_of(self, ticket: int) -> ReduceInfo | None:
        """Return the result of a launched reduce, also after ``close``; None if not committed."""
        info = self.engine.calls.result_of(ticket)
        return info if isinstance(info, ReduceInfo) else None

    def has_ended(self, ticket: int) -> bool:
        """Whether a launched reduce has an outcome, or will never have one."""
        return self.closed or self.engine.calls.has_ended(ticket)

    def forget(self, ticket: int) -> None:
        """Drop the outcome of a launched reduce; no caller will ask for it. Any thread."""
        if not self.closed:
            with suppress(RuntimeError):  # closed by another thread just now
                self._io.loop.call_soon_threadsafe(self.engine.calls.forget, ticket)

    # -- calls -----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the session is closed, or belongs to the parent of this forked process."""
        return not self._finalizer.alive or self._io.abandoned

    def submit(self, call: CheckedCall[_Request, _T], joint: JointWork | None) -> Submission[_T]:
        """Hand a call to the I/O thread; ``start`` or ``wait`` lets it begin.

        Args:
            call: the call.
            joint: what :meth:`inside` returned for it.

        Raises:
            NotConnected: the communicator is closed.
        """
        if self.closed:
            raise self._closed_error(call.func)
        work = partial(call.work, call.request)
        return Submission(self._io, partial(joint.do, work) if joint is not None else work)

    def inside(
        self, call: CheckedCall[Any, Any], caller: Caller
    ) -> AbstractContextManager[JointWork | None]:
        """Return the context in which ``caller`` waits for the call; None: no joint call."""
        if call.joint:
            return self.callers.inside(caller, JointWork())
        if call.is_caller:
            self.callers.note(caller)
        return nullcontext()

    def settle_left(self, call: CheckedCall[_Request, _T], submission: Submission[_T]) -> None:
        """Report to the engine that the caller left, if the call ended before its cancellation."""
        finished = submission.finished
        if not finished.done() or finished.cancelled():
            return
        error = finished.exception()
        with suppress(NotConnected):  # closed meanwhile
            if error is None:
                self._io.call(lambda: self.engine.calls.left(call.request, finished.result()))
            elif call.is_caller:
                self._io.call(lambda: self.engine.calls.left_failed(error))

    # -- queries ---------------------------------------------------------------------------------

    def roster(self, func: str) -> Roster:
        """Return the membership as of this peer's last joint call.

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        if self.closed:
            raise self._closed_error(func)
        roster = self.engine.roster
        if roster is None:
            raise NotConnected(None, func, "this peer is not a member yet; call connect() first")
        return roster

    def peer_id(self, func: str) -> PeerId:
        """Return this peer's id.

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        self.roster(func)
        return self.engine.machine.peer

    def status(self, func: str) -> Status:
        """Return this peer's own view of the run.

        Raises:
            NotConnected: this peer is not a member yet, or the communicator is closed.
        """
        self.roster(func)
        return self._io.call(lambda: status_of(self.engine))

    def give_notice(self, notice_s: float, over: Callable[[], None]) -> None:
        """Tell the program to leave; call ``over`` on the I/O thread when the notice is over.

        It takes no lock, so a signal handler may call it.
        """
        self.is_leaving = True
        loop = self._io.loop
        with suppress(RuntimeError):  # closed by another thread just now
            loop.call_soon_threadsafe(self.engine.leave_soon)
            loop.call_soon_threadsafe(loop.call_later, notice_s, over)

    def describe(self) -> str:
        """Return a name of this peer for messages."""
        where = f"master {self.engine.master}, group {self.engine.group}"
        if self.closed:
            return f"{where}, closed"
        roster, me = self.engine.roster, self.engine.machine.peer
        if roster is None or me not in roster.ring:
            return f"{where}, not a member"
        who = with_name(me, self.engine.names.of(me))
        return f"{where}, peer {who}, rank {roster.ring.index(me)} of {len(roster.ring)}"

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
