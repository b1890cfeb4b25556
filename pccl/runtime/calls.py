"""The calls of one peer: who waits for what, with what memory, and until when.

A call has a number, by which the machine speaks of it, and a future. It is open until the machine
has returned or raised it. A launched call has nobody who waits for it; its number is then a ticket,
by which its outcome is asked for later, and it is kept until nobody can ask any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pccl.collectives.residual import Residual
from pccl.machines.peer.events import (
    Claim,
    Forget,
    JoinCall,
    LeaveCall,
    LeftAdmitted,
    LeftAnswered,
    LeftCommitted,
    LeftFailed,
    PeerEvent,
    ReduceCall,
    ReduceResult,
    RoundCall,
    SyncCall,
    SyncResult,
)
from pccl.protocol import errors
from pccl.protocol.types import OperationId, RoundKind
from pccl.runtime.clock import Clock, Timer
from pccl.runtime.collective.memory import LentRanges, Range
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.transfer import Transfer
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

LEFT = "the caller left"
_ErrorT = TypeVar("_ErrorT", bound=Exception)

CallEvent = JoinCall | RoundCall | ReduceCall | SyncCall
"""What begins a call; it gets its number here."""


@dataclass(slots=True)
class OpenCall:
    """One call."""

    future: asyncio.Future[Any]
    operand: Operand | None = None
    """What its caller lends; None once it has ended."""
    event: CallEvent | None = None
    """What the machine was told."""
    operation: OperationId | None = None
    """The one that it is, while its memory is lent."""
    began_ns: int | None = None
    """When its first attempt began."""
    tx_bytes: int = 0
    rx_bytes: int = 0
    raw_tx_bytes: int = 0
    quantization_error: float = 0.0
    failures: int = 0
    """Attempts that were lost."""
    timer: Timer | None = None
    forgotten: bool = False
    """Nobody will ask for its outcome."""
    observable: bool = False
    """Whether newcomers may fetch its result."""
    residual: Residual | None = None
    """Of a reduce with error feedback."""
    sync: StateSync | None = None
    """Of a call about shared state."""

    def take_back(self, transfer: Transfer) -> None:
        """An attempt is over: what it has moved counts."""
        self.operation = None
        self.tx_bytes += transfer.tx_bytes
        self.rx_bytes += transfer.rx_bytes
        self.raw_tx_bytes += transfer.raw_tx_bytes
        self.quantization_error = transfer.quantization_error

    def info(self, result: ReduceResult) -> ReduceInfo:
        """What its caller is told of a committed operation."""
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
            outcome=result,
        )


class Calls:
    """All calls of one peer.

    Args:
        loop: where everything runs.
        clock: time, for deadlines.
        feed: gives an event to the machine.

    Attributes:
        bug: what every new call raises since the machine broke down; None: it has not.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Clock, feed: Callable[[PeerEvent], None]
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._feed = feed
        self._open: dict[int, OpenCall] = {}
        self._lent = LentRanges()
        """Memory of the callers of the open ones."""
        self.held = LentRanges()
        """Memory of those that may make further attempts, also between two of them."""
        self._launched: dict[int, OpenCall] = {}
        """By ticket."""
        self._last = 0
        self.bug: errors.LocalProtocolError | None = None

    def __iter__(self) -> Iterator[OpenCall]:
        return iter(self._open.values())

    def items(self) -> list[tuple[int, OpenCall]]:
        """The open calls with their numbers."""
        return list(self._open.items())

    def __len__(self) -> int:
        return len(self._open)

    def get(self, number: int) -> OpenCall | None:
        """The open call of that number."""
        return self._open.get(number)

    def of_operand(self, operand: Operand) -> tuple[int, OperationId | None]:
        """The open call that this memory is lent to, and its operation; 0: there is none."""
        for number, call in self._open.items():
            if call.operand is operand:
                return number, call.operation
        return 0, None

    def check_free(self, ranges: Sequence[Range]) -> None:
        """Check that no collective uses this memory.

        Raises:
            ValueError: one does.
        """
        if self._lent.clash(ranges) or self.held.clash(ranges):
            raise ValueError(
                "another collective still uses this memory; wait for it, or pass a copy()"
            )

    def new(self, operand: Operand | None = None) -> OpenCall:
        """A call that has not begun, with the memory that its caller lends."""
        return OpenCall(self._loop.create_future(), operand)

    def renew(self, call: OpenCall, operand: Operand | None) -> None:
        """Another attempt of a call that has raised; what it moved counts on."""
        call.failures += 1
        call.future, call.operand = self._loop.create_future(), operand

    # -- calls that are waited for -------------------------------------------------------------

    async def wait(
        self, event: CallEvent, deadline: Deadline | None, call: OpenCall | None = None
    ) -> Any:
        """Begin a call and wait until it returns.

        Raises:
            PCCLError: it raised.
            ValueError: it asked for what cannot be.
        """
        call = call or self.new()
        lent = call.operand
        number = self._begin(event, deadline, call)
        try:
            return await call.future
        except asyncio.CancelledError:
            if number in self._open:
                self._feed(LeaveCall(number, LEFT))
            elif not call.future.cancelled():
                self._left_unnoticed(call, lent)
            raise
        finally:
            self._end(number)

    def left_committed(self, info: ReduceInfo, lent: Iterable[Operand | None]) -> None:
        """The caller left without noticing that an operation was committed.

        Args:
            info: what he has not noticed.
            lent: his memory: the inputs become what they were.
        """
        for operand in lent:
            if operand is not None:
                operand.restore()
        assert info.outcome is not None
        self._feed(LeftCommitted(info.outcome.operation))

    def left_failed(self, error: BaseException) -> None:
        """The caller left without noticing that his call had raised this."""
        if isinstance(error, errors.MembershipError | errors.ResyncRequired):
            self._feed(LeftFailed(error))

    def left(self, request: object, result: Any) -> None:
        """The caller left without noticing that his request had this result."""
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
                pass  # of a synchronization he has the state and its revision

    def _left_unnoticed(self, call: OpenCall, lent: Operand | None) -> None:
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
        """Begin a call that nobody waits for yet; return its ticket.

        Raises:
            PCCLError: it can't be made now. What becomes of the run is told by ``finish``.
            ValueError: it asks for what cannot be.
        """
        ticket = self._begin(event, deadline, call)
        error = call.future.exception() if call.future.done() else None
        if error is not None and not _is_fate(error):
            self._feed(Claim(ticket))
            raise error
        call.future.add_done_callback(lambda future: future.exception())  # nobody may ever ask
        self._launched[ticket] = call
        return ticket

    async def finish(self, ticket: int) -> Any:
        """Wait for a launched call; its outcome counts as seen when this returns or raises.

        To leave does not disturb it; any number of waiters may come.
        """
        call = self._launched[ticket]
        await settled(call.future)
        self._feed(Claim(ticket))
        return call.future.result()

    def has_ended(self, ticket: int) -> bool:
        """Whether a launched call has an outcome. Any thread may ask."""
        call = self._launched.get(ticket)
        return call is None or call.future.done()

    def result_of(self, ticket: int) -> object:
        """What a launched call has returned; None: nothing, or not yet. Any thread may ask."""
        call = self._launched.get(ticket)
        if call is None or not call.future.done() or call.future.cancelled():
            return None
        return None if call.future.exception() is not None else call.future.result()

    def forget(self, ticket: int) -> None:
        """Nobody will ask for the outcome of a launched call any more: its handle is gone."""
        call = self._launched.pop(ticket, None)
        if call is not None:
            call.forgotten = True
            self._feed(Forget(ticket))

    def withdraw(self, ticket: int) -> None:
        """The caller left while he launched a call: it ends, and his memory is his again."""
        call = self._launched.get(ticket)
        if call is None:
            return
        if not call.future.done():
            self._feed(LeaveCall(ticket, LEFT))
        elif call.future.exception() is None:
            self._left_unnoticed(call, None)
        self.forget(ticket)

    # -- what becomes of them ------------------------------------------------------------------

    def resolve(self, number: int, value: ReduceResult | SyncResult | bool | None) -> None:
        """A call returns."""
        call = self._answered(number)
        if call is not None:
            result = call.info(value) if isinstance(value, ReduceResult) else value
            call.future.set_result(result)
            self._forget_again(number, call)

    def reject(self, number: int, error: errors.PCCLError | ValueError) -> None:
        """A call raises."""
        call = self._answered(number)
        if call is not None:
            # A copy: the machine's story keeps the error, and must not keep the frames it went
            # through, with all that they hold.
            call.future.set_exception(fresh(error))
            self._forget_again(number, call)

    def break_down(self, bug: errors.LocalProtocolError) -> None:
        """Every open call raises, and every later one."""
        self.bug = bug
        for number in list(self._open):
            self.reject(number, bug)

    def _answered(self, number: int) -> OpenCall | None:
        """The call that ends; None: it has ended before.

        Its caller may have been cancelled in this moment, without having run since: it finds the
        answer when it runs, and tells that it has left without noticing it.
        """
        call = self._end(number)
        if call is not None and call.future.cancelled():
            call.future = self._loop.create_future()
            call.future.add_done_callback(lambda future: future.exception())
        return call if call is not None and not call.future.done() else None

    def _forget_again(self, number: int, call: OpenCall) -> None:
        """An outcome that nobody will ask for has come, and must not wait for anybody."""
        if call.forgotten:
            self._feed(Forget(number))

    def _begin(self, event: CallEvent, deadline: Deadline | None, call: OpenCall) -> int:
        self._last += 1
        number = self._last
        self._open[number] = call
        if call.operand is not None:
            self._lent.add(call.operand.ranges)
        call.event = replace(event, call=number)
        if call.began_ns is None:
            call.began_ns = self._clock.now_ns()
        if deadline is not None:
            leave = LeaveCall(number, f"timeout_s={deadline.budget_s:g} ran out")
            call.timer = self._clock.call_at_ns(deadline.when_ns, self._feed, leave)
        if self.bug is not None:
            self.reject(number, self.bug)
        else:
            self._feed(call.event)
        return number

    def _end(self, number: int) -> OpenCall | None:
        call = self._open.pop(number, None)
        if call is not None:
            if call.operand is not None:
                self._lent.remove(call.operand.ranges)
                call.operand = None
            if call.timer is not None:
                call.timer.cancel()
        return call


def _is_fate(error: BaseException) -> bool:
    """Whether it tells what has become of the run, and not what is wrong with the call."""
    return isinstance(error, errors.CollectiveAborted | errors.Evicted | errors.MasterLost)


def fresh(error: _ErrorT) -> _ErrorT:
    """The same error, raised by nobody yet."""
    copied = copy(error)
    copied.__cause__ = error.__cause__
    return copied
