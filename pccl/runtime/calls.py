"""The calls of one peer: their futures, borrowed memory and deadlines.

The machine refers to a call by its number. A call is open until it has a result or an error.
A launched call begins without a waiter. Its number is then a ticket, with which the program asks
for the outcome later. ``Calls`` keeps a launched call until the program can no longer ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pccl.collectives.residual import Residual
from pccl.machines.peer.events import (
    CallEvent,
    Claim,
    Forget,
    JoinCall,
    LeaveCall,
    LeftAdmitted,
    LeftAnswered,
    LeftCommitted,
    LeftFailed,
    PeerEvent,
    ReduceResult,
    ReturnValue,
    RoundCall,
    StoreCall,
    SyncCall,
    SyncResult,
)
from pccl.machines.peer.words import call_name
from pccl.protocol import errors
from pccl.protocol.types import NS_PER_S, OperationId, RoundKind
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.collective.memory import LentRanges, Range
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.transfers.transfer import Transfer
from pccl.runtime.requests import (
    Deadline,
    JoinRequest,
    ReduceInfo,
    ReduceManyRequest,
    ReduceRequest,
    RunRequest,
)
from pccl.runtime.state.sync import StateSync
from pccl.runtime.waiting import settled
from pccl.telemetry.events import CallEnded
from pccl.telemetry.names import Names
from pccl.telemetry.stream import EventStream

LEFT = "the caller left"
_ErrorT = TypeVar("_ErrorT", bound=Exception)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class OpenCall:
    """The state of one call."""

    future: asyncio.Future[Any]
    operand: Operand | None = None
    """Memory borrowed from the caller; None once the call has ended."""
    event: CallEvent | None = None
    """Event that began the call at the machine."""
    lent: tuple[Range, ...] = ()
    """Memory that a launched call borrows; the waiter of an awaited call lends its memory."""
    operation: OperationId | None = None
    """Operation of the running attempt; None between attempts."""
    began_ns: int | None = None
    """Time at which the first attempt began."""
    tried_ns: int = 0
    """Time at which the running attempt began."""
    moves_ns: int | None = None
    """Time from which the running attempt moves data; None: it waits for members."""
    tx_bytes: int = 0
    rx_bytes: int = 0
    raw_tx_bytes: int = 0
    quantization_error: float = 0.0
    failures: int = 0
    """Number of failed attempts."""
    timer: Timer | None = None
    forgotten: bool = False
    """Whether the program dropped the handle. Once the call ends, the machine drops its outcome."""
    observable: bool = False
    """Whether newcomers may fetch the result."""
    residual: Residual | None = None
    """Residual of a reduce with error feedback."""
    sync: StateSync | None = None
    """Synchronization that a call about shared state makes."""

    def take_back(self, transfer: Transfer) -> None:
        """Add the traffic of an ended attempt to the call's totals, and keep its rounding error."""
        self.operation = None
        for outlet in transfer.outlets.values():
            self.tx_bytes += outlet.sent_bytes
            self.raw_tx_bytes += outlet.raw_bytes
        self.rx_bytes += transfer.rx_bytes
        self.quantization_error = transfer.quantization_error

    def info(self, result: ReduceResult) -> ReduceInfo:
        """Return the report for the caller: ``result``, and the traffic of all attempts."""
        return ReduceInfo(
            local_world_size=len(result.contributors),
            tx_bytes=self.tx_bytes,
            rx_bytes=self.rx_bytes,
            contributors=result.contributors,
            view=result.operation.view,
            attempts=result.attempts + self.failures,
            algorithm=result.algorithm.label,
            compression=self.raw_tx_bytes / self.tx_bytes if self.tx_bytes else 1.0,
            quantization_error=self.quantization_error,
            weights=result.weights,
            took_part=result.took_part,
            excluded=tuple(result.contributors[one.rank] for one in result.flagged if one.excluded),
            outcome=result,
        )


class JointWork:
    """What one joint call of a program, or its wait for a handle, does in the engine.

    It knows the calls of the machine that it waits for, also in tasks of its own.
    """

    def __init__(self) -> None:
        self._awaited: list[OpenCall] = []

    @property
    def is_undecided(self) -> bool:
        """Whether the work waits for calls, and none of them has an outcome. I/O thread."""
        return bool(self._awaited) and not any(call.future.done() for call in self._awaited)

    async def do(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Do the work, in a task of its own. I/O thread."""
        JOINT_WORK.set(self)
        return await work()

    @contextmanager
    def waits_for(self, call: OpenCall) -> Generator[None]:
        """Record that the work waits for ``call`` inside this context."""
        self._awaited.append(call)
        try:
            yield
        finally:
            self._awaited.remove(call)


JOINT_WORK: ContextVar[JointWork | None] = ContextVar("JOINT_WORK", default=None)


class Calls:
    """All calls of one peer.

    Args:
        loop: event loop that the calls run on.
        clock: gives the time, for deadlines.
        feed: passes an event to the machine.
        events: stream that takes the end of each call.
        names: names of the peers that errors mention.

    Attributes:
        work: all work outside of a ``JOINT_WORK`` context.
        bug: error that new calls raise after the machine broke down; None: the machine works.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        feed: Callable[[PeerEvent], None],
        events: EventStream,
        names: Names,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._feed = feed
        self._events, self._names = events, names
        self.open: dict[int, OpenCall] = {}
        """Open calls by number."""
        self.lent = LentRanges()
        """Memory that open collectives borrow, an awaited reduce also between two attempts."""
        self._launched: dict[int, OpenCall] = {}
        """Launched calls by ticket."""
        self._last = 0
        self.work = JointWork()
        self.bug: errors.LocalProtocolError | None = None

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(self.open.values())

    def __len__(self) -> int:
        return len(self.open)

    def of_operand(self, operand: Operand) -> tuple[int, OperationId | None]:
        """Return number and operation of the open call that borrows ``operand``, or (0, None)."""
        for number, call in self.open.items():
            if call.operand is operand:
                return number, call.operation
        return 0, None

    def check_free(self, ranges: Sequence[Range]) -> None:
        """Check that no collective uses this memory.

        Raises:
            ValueError: an open collective uses it. Wait for it, or pass a copy.
        """
        if self.lent.clash(ranges):
            raise ValueError(
                "another collective still uses this memory; wait for it, or pass a copy()"
            )

    def new(self, operand: Operand | None = None) -> OpenCall:
        """Return a call that has not begun, with the memory that it borrows."""
        return OpenCall(self._loop.create_future(), operand)

    def renew(self, call: OpenCall, operand: Operand | None) -> None:
        """Prepare another attempt of a failed call. The traffic of all attempts counts."""
        call.failures += 1
        call.future, call.operand = self._loop.create_future(), operand

    def moves(self, number: int) -> None:
        """Note that all members have made the call ``number``."""
        call = self.open.get(number)
        if call is not None and call.moves_ns is None:
            call.moves_ns = self._clock.now_ns()

    # -- calls that are waited for -------------------------------------------------------------

    async def wait(
        self, event: CallEvent, deadline: Deadline | None, call: OpenCall | None = None
    ) -> Any:
        """Begin a call and wait until it returns.

        Raises:
            PCCLError: the call failed.
            ValueError: the group cannot do what the call asks; for example, it has no such root.
        """
        call = call or self.new()
        lent = call.operand
        number = self._begin(event, deadline, call)
        try:
            with nullcontext() if isinstance(event, StoreCall) else self._waiting_for(call):
                return await call.future
        except asyncio.CancelledError:
            if number in self.open:
                self._feed(LeaveCall(number, LEFT))
            elif not call.future.cancelled():
                self._left_unnoticed(call, lent)
            raise
        finally:
            if number in self.open:
                self._end(number)

    def _waiting_for(self, call: OpenCall) -> AbstractContextManager[None]:
        return (JOINT_WORK.get() or self.work).waits_for(call)

    def left_committed(self, info: ReduceInfo, lent: Iterable[Operand | None]) -> None:
        """Restore the inputs of a caller that missed a committed operation; inform the machine.

        Args:
            info: report of the operation.
            lent: operands of the caller.
        """
        for operand in lent:
            if operand is not None:
                operand.restore()
        assert info.outcome is not None
        self._feed(LeftCommitted(info.outcome.operation))

    def left_failed(self, error: BaseException) -> None:
        """Inform the machine that the caller missed an error that is raised only once."""
        if isinstance(error, errors.MembershipError | errors.ResyncRequired):
            self._feed(LeftFailed(error))

    def left(self, request: object, result: Any) -> None:
        """Inform the machine that the caller missed ``result``; no-op for a synchronization."""
        match request:
            case JoinRequest():
                self._feed(LeftAdmitted())
            case RunRequest(kind):
                self._feed(LeftAnswered(kind))
            case ReduceRequest() if isinstance(result, int):  # a ticket
                self.withdraw(result)
            case ReduceRequest(operand):
                self.left_committed(result, [operand])
            case ReduceManyRequest(requests):
                self.left_committed(result, [each.operand for each in requests])
            case _:
                pass  # a synchronization has updated the caller's tensors and revision

    def _left_unnoticed(self, call: OpenCall, lent: Operand | None) -> None:
        if isinstance(call.event, StoreCall):
            return
        error = call.future.exception()
        if error is not None:
            self.left_failed(error)
            return
        match call.event:
            case RoundCall(_, kind):
                self._feed(LeftAnswered(kind))
            case JoinCall(rejoins=True):
                self._feed(LeftAnswered(RoundKind.UPDATE_TOPOLOGY))
            case JoinCall():
                self._feed(LeftAdmitted())
            case SyncCall():
                result: SyncResult = call.future.result()
                self._feed(LeftCommitted(result.operation))
            case _:
                self.left_committed(call.future.result(), [lent])

    # -- calls that are launched ---------------------------------------------------------------

    def launch(self, event: CallEvent, deadline: Deadline | None, call: OpenCall) -> int:
        """Begin a call without a waiter; return its ticket.

        Raises:
            PCCLError: the call cannot be made now. ``finish`` raises errors of the run.
            ValueError: the group cannot do what the call asks, as in :meth:`wait`.
        """
        if call.operand is not None:
            call.lent = call.operand.ranges
            self.lent.add(call.lent)
        ticket = self._begin(event, deadline, call)
        error = call.future.exception() if call.future.done() else None
        if error is not None and not _is_fate(error):
            self._feed(Claim(ticket))
            raise error
        call.future.add_done_callback(lambda future: future.exception())  # mark it as retrieved
        self._launched[ticket] = call
        return ticket

    async def finish(self, ticket: int) -> Any:
        """Wait for a launched call. Its outcome counts as seen when this returns or raises it.

        A cancelled wait does not cancel the call. Any number of coroutines may wait.
        """
        call = self._launched[ticket]
        with self._waiting_for(call):
            await settled(call.future)
        self._feed(Claim(ticket))
        return call.future.result()

    def has_ended(self, ticket: int) -> bool:
        """Whether a launched call has an outcome, or is forgotten. Any thread may call this."""
        call = self._launched.get(ticket)
        return call is None or call.future.done()

    def result_of(self, ticket: int) -> object:
        """Return the result of a launched call; None: no result (yet). Any thread may call this."""
        call = self._launched.get(ticket)
        if call is None or not call.future.done() or call.future.cancelled():
            return None
        return None if call.future.exception() is not None else call.future.result()

    def forget(self, ticket: int) -> None:
        """Drop the outcome of a launched call, because the program dropped its handle."""
        call = self._launched.pop(ticket, None)
        if call is not None:
            call.forgotten = True
            self._feed(Forget(ticket))

    def withdraw(self, ticket: int) -> None:
        """End a launched call whose caller left before it got the ticket; release its memory."""
        call = self._launched.get(ticket)
        if call is None:
            return
        if not call.future.done():
            self._feed(LeaveCall(ticket, LEFT))
        elif call.future.exception() is None:
            self._left_unnoticed(call, None)
        self.forget(ticket)

    # -- outcomes ------------------------------------------------------------------------------

    def resolve(self, number: int, value: ReturnValue) -> None:
        """End the call ``number`` with a result."""
        call = self._answered(number)
        if call is not None:
            result = call.info(value) if isinstance(value, ReduceResult) else value
            self._report(call, None)
            call.future.set_result(result)
            if call.forgotten:
                self._feed(Forget(number))

    def reject(self, number: int, error: errors.PCCLError | ValueError) -> None:
        """End the call ``number`` with an error."""
        call = self._answered(number)
        if call is not None:
            # A copy: the machine keeps the error, and must not keep its traceback, whose frames
            # hold the caller's tensors.
            raised = fresh(error)
            if isinstance(raised, errors.PCCLError):
                raised.reason = self._names.explain(raised.reason)
            self._report(call, raised)
            call.future.set_exception(raised)
            if call.forgotten:
                self._feed(Forget(number))

    def _report(self, call: OpenCall, error: errors.PCCLError | ValueError | None) -> None:
        """Put the end of a call, or of one attempt, into the stream."""
        assert call.event is not None
        assert call.began_ns is not None
        now_ns = self._clock.now_ns()
        moves_ns = now_ns if call.moves_ns is None else call.moves_ns
        name, tag = call_name(call.event)
        told = CallEnded(
            call=name,
            tag=tag,
            outcome="ok" if error is None else type(error).__name__,
            reason=error.reason if isinstance(error, errors.PCCLError) else str(error or ""),
            seconds=(now_ns - call.began_ns) / NS_PER_S,
            waited_s=(moves_ns - call.tried_ns) / NS_PER_S,
            moved_s=(now_ns - moves_ns) / NS_PER_S,
            attempts=call.failures + 1,
            tx_bytes=call.tx_bytes,
            rx_bytes=call.rx_bytes,
        )
        self._events.put(told, now_ns)

    def break_down(self, bug: errors.LocalProtocolError) -> None:
        """End every open call with ``bug``, and every later one."""
        self.bug = bug
        for number in list(self.open):
            self.reject(number, bug)

    def _answered(self, number: int) -> OpenCall | None:
        """Return the call that ends; None if it has ended before.

        The caller may have been cancelled without having run yet. A new future then takes the
        outcome, so that ``wait`` finds it, and reports that the caller missed the outcome.
        """
        call = self._end(number)
        if call is not None and call.future.cancelled():
            call.future = self._loop.create_future()
            call.future.add_done_callback(lambda future: future.exception())
        return call if call is not None and not call.future.done() else None

    def _begin(self, event: CallEvent, deadline: Deadline | None, call: OpenCall) -> int:
        self._last += 1
        number = self._last
        self.open[number] = call
        call.event = replace(event, call=number)
        call.tried_ns, call.moves_ns = self._clock.now_ns(), None
        if call.began_ns is None:
            call.began_ns = call.tried_ns
        if deadline is not None:
            leave = LeaveCall(number, f"timeout_s={deadline.budget_s:g} ran out")
            call.timer = self._clock.call_at_ns(deadline.when_ns, self._feed, leave)
        if self.bug is not None:
            self.reject(number, self.bug)
        else:
            self._feed(call.event)
        return number

    def _end(self, number: int) -> OpenCall | None:
        call = self.open.pop(number, None)
        if call is not None:
            if call.lent:
                self.lent.remove(call.lent)
            call.operand, call.lent = None, ()
            if call.timer is not None:
                call.timer.cancel()
        return call


def _is_fate(error: BaseException) -> bool:
    """Whether ``error`` reports a failure of the run, not a mistake in the call."""
    return isinstance(error, errors.CollectiveAborted | errors.Evicted | errors.MasterLost)


def fresh(error: _ErrorT) -> _ErrorT:
    """Return a copy of ``error`` with the same cause, but without its traceback."""
    copied = copy(error)
    copied.__cause__ = error.__cause__
    return copied
