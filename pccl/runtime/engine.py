"""``PeerEngine``: a ``PeerMachine`` with its control connection, links and data plane.

It carries out effects in order and feeds back what happens; it decides nothing. All methods run on
the loop; other threads go through ``io_thread``. The same class runs over TCP and in the simulator.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pccl.protocol import errors
from pccl.protocol.limits import Timing
from pccl.protocol.messages import Message
from pccl.protocol.peer import PeerMachine, Standing
from pccl.protocol.peer_events import (
    Begin,
    Close,
    CloseControl,
    ControlClosed,
    ControlMessage,
    ControlOpened,
    DialControl,
    End,
    ForgetEarly,
    JoinCall,
    LeaveCall,
    LeftCommitted,
    LinkChanged,
    PeerEffect,
    PeerEvent,
    Post,
    Raise,
    ReduceCall,
    ReduceDone,
    ReduceResult,
    Return,
    RoundCall,
    Send,
    SetLinks,
    Tick,
)
from pccl.protocol.types import (
    Descriptor,
    OperationId,
    PeerId,
    ReduceOp,
    Roster,
    RoundKind,
)
from pccl.runtime.clock import Clock, Ticker, Timer
from pccl.runtime.control import ControlStream
from pccl.runtime.data_plane import DataPlane
from pccl.runtime.link_keeper import LinkKeeper
from pccl.runtime.operand import Operand
from pccl.transports.base import Address, Listener, Transport
from pccl.transports.link import Link

_log = logging.getLogger("pccl.peer")


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What a peer may be told."""

    timing: Timing = field(default_factory=Timing)
    listen: Address = field(default_factory=lambda: Address("0.0.0.0", 0))
    """Where its one port listens; port 0: any free one."""
    segment_bytes: int | None = None
    """Fixed segment size (tests); None: chosen. All members must agree."""


@dataclass(frozen=True, slots=True)
class ReduceReport:
    """A committed reduce as the engine knows it."""

    operation: OperationId
    contributors: tuple[PeerId, ...]
    tx_bytes: int
    rx_bytes: int


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[Any]
    operand: Operand | None = None
    tx_bytes: int = 0
    rx_bytes: int = 0


class PeerEngine:
    """One process in a run.

    Args:
        loop: where everything runs.
        clock: time.
        transport: the network.
        master: where the master listens.
        group: the peer group.
        options: deadlines and the like.
        observer: called with each event and its effects after they were carried out (traces).
        make_link: makes the link to a peer (the simulator brings a faulty one).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        transport: Transport,
        master: Address,
        group: int,
        options: PeerOptions,
        observer: Callable[[PeerEvent, list[PeerEffect]], None] | None = None,
        make_link: Callable[[PeerId], Link] = Link,
    ) -> None:
        self.master = master
        self.group = group
        self._loop = loop
        self._clock = clock
        self._transport = transport
        self._options = options
        self._timing = options.timing
        self._observer = observer
        self._make_link = make_link
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._listener: Listener | None = None
        self._control: ControlStream | None = None
        self._dial_timer: Timer | None = None
        self._control_dial: asyncio.Task[None] | None = None
        self._ticker = Ticker(clock, self._timing.ns(self._timing.tick_s), self._tick)
        self._calls: dict[int, _Call] = {}
        self._posted: dict[OperationId, int] = {}
        self._last_call = 0
        self._events: deque[PeerEvent] = deque()
        self._busy = False
        self._closed = False
        self._broken: errors.LocalProtocolError | None = None
        self._enter_run()

    def _enter_run(self) -> None:
        """Begin anew, as a process that no run knows."""
        self.machine = PeerMachine(self._timing, self._clock.now_ns())
        self.keeper = LinkKeeper(
            self._clock,
            self._transport,
            self._timing,
            self.machine,
            self._on_link_change,
            self._create_task,
            self._make_link,
        )
        self.data_plane = DataPlane(
            self.keeper.link_to, self.machine.may_come, self._on_done, self._options.segment_bytes
        )
        self.keeper.data_plane = self.data_plane

    # -- calls ---------------------------------------------------------------------------------

    @property
    def roster(self) -> Roster | None:
        """Membership as the caller may know it; None before the first admission."""
        return self.machine.seen

    async def connect(self, n_attempts: int = 5) -> None:
        """Join the run; returns when admitted.

        Args:
            n_attempts: how often to try to reach the master.

        Raises:
            MasterLost: no master answered in time.
            NotAdmitted: the master refused us; the reason says why.
            LinkError: the own port cannot be opened.
        """
        if self._closed:
            raise errors.NotConnected(reason="the communicator was closed; make a new one")
        if self.machine.standing is Standing.LOST or self.machine.needs_resync or self._broken:
            if self._broken is None:
                self._feed(Close())
            self.keeper.close()
            self._broken = None
            self._enter_run()
        if self._listener is None:
            self._listener = await self._listen()
            self._ticker.start()
        port = self._listener.address.port
        await self._call(lambda call: JoinCall(call, self.group, "", port, n_attempts))

    async def _listen(self) -> Listener:
        wanted = self._options.listen
        try:
            return await self._transport.listen(wanted, self._accept)
        except errors.LinkError:
            if wanted.host != "::":
                raise
            everywhere = Address("0.0.0.0", wanted.port)  # a machine without IPv6
            return await self._transport.listen(everywhere, self._accept)

    async def update_topology(self) -> None:
        """Joint call of all members: admit newcomers that are ready."""
        await self._call(lambda call: RoundCall(call, RoundKind.UPDATE_TOPOLOGY))

    async def are_peers_pending(self) -> bool:
        """Joint call of all members: is anybody waiting to be admitted?"""
        return bool(await self._call(lambda call: RoundCall(call, RoundKind.PEERS_PENDING)))

    async def all_reduce(self, operand: Operand, op: ReduceOp, tag: int) -> ReduceReport:
        """Joint call of all members of the group: reduce ``operand``.

        Raises:
            ValueError: another call of this peer still uses the memory.
        """
        for call in self._calls.values():
            if call.operand is not None and operand.collides_with(call.operand):
                raise ValueError(
                    "another collective still uses this memory; wait for it, or pass a copy()"
                )
        descriptor = Descriptor(operand.data_type, op, operand.send.size)
        report = await self._call(lambda call: ReduceCall(call, tag, descriptor), operand)
        assert isinstance(report, ReduceReport)
        return report

    def left_unnoticed(self, result: object) -> None:
        """The caller left without noticing that his call had returned this."""
        if isinstance(result, ReduceReport):
            self._feed(LeftCommitted(result.operation))

    def operand_of(self, call: int) -> Operand:
        """The buffers that an open call has lent (for observers)."""
        operand = self._calls[call].operand
        assert operand is not None
        return operand

    async def close(self) -> None:
        """Say goodbye and let go of everything; idempotent."""
        if self._closed:
            return
        if self._broken is None:
            self._feed(Close())
        self._closed = True
        self._ticker.stop()
        if self._dial_timer is not None:
            self._dial_timer.cancel()
        if self._listener is not None:
            self._listener.close()
        self.keeper.close()
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            with suppress(asyncio.CancelledError):
                await task
        for _ in range(2):  # let the transport report the ends of what was closed
            await _next_turn(self._loop)

    async def _call(
        self, make_event: Callable[[int], PeerEvent], operand: Operand | None = None
    ) -> object:
        if self._broken is not None:
            raise self._broken
        self._last_call += 1
        number = self._last_call
        call = self._calls[number] = _Call(self._loop.create_future(), operand)
        try:
            self._feed(make_event(number))
            return await call.future
        except asyncio.CancelledError:
            if number in self._calls:
                self._feed(LeaveCall(number, "the caller left"))
            elif not call.future.cancelled() and call.future.exception() is None:
                self.left_unnoticed(call.future.result())
            raise
        finally:
            self._calls.pop(number, None)

    # -- the machine ---------------------------------------------------------------------------

    def _feed(self, event: PeerEvent) -> None:
        """Handle an event, after those that are being handled."""
        if self._broken is not None:
            return
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._step(self._events.popleft())
        except errors.RemoteProtocolError:
            raise  # not our fault: whoever handed over the bytes closes that connection
        except Exception as error:  # noqa: BLE001 - reported below
            self._break_down(error)
        finally:
            self._busy = False

    def _break_down(self, error: Exception) -> None:
        """A bug of ours: give back every buffer, fail every call, and let the run go on without us.

        Anything else would leave the caller, or the other members, waiting for ever.
        """
        self._events.clear()
        reason = f"internal error, please report it: {error!r}; connect() again to rejoin"
        self._broken = errors.LocalProtocolError(reason=reason)
        self._broken.__cause__ = error
        for operation in list(self.data_plane.transfers):
            self.data_plane.end(operation, committed=False, data_needed=False)
        self._posted.clear()
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(self._broken)
        self._close_control("internal error")
        self.keeper.close()
        self._loop.call_exception_handler({"message": reason, "exception": error})

    def _step(self, event: PeerEvent) -> None:
        effects = self.machine.handle(event, self._clock.now_ns())
        for effect in effects:
            self._carry_out(effect)
        if self._observer is not None:
            self._observer(event, effects)

    def _carry_out(self, effect: PeerEffect) -> None:
        match effect:
            case Send(message):
                if self._control is not None:
                    self._control.send(message)
            case DialControl(delay_ns):
                when_ns = self._clock.now_ns() + delay_ns
                self._dial_timer = self._clock.call_at_ns(when_ns, self._dial_control)
            case CloseControl(reason):
                self._close_control(reason)
            case SetLinks(peers):
                self.keeper.want(peers)
            case Post(number, operation, descriptor, ring):
                operand = self._calls[number].operand
                assert operand is not None
                self._posted[operation] = number
                self.data_plane.post(operation, descriptor, operand, ring, self.machine.peer)
            case Begin(operation):
                self.data_plane.begin(operation)
            case End(operation, committed, data_needed):
                self._end(operation, committed, data_needed)
            case ForgetEarly():
                self.data_plane.forget_early()
            case Return(number, value):
                self._return(number, value)
            case Raise(number, error):
                call = self._calls.pop(number, None)
                if call is not None and not call.future.done():
                    call.future.set_exception(error)

    def _end(self, operation: OperationId, committed: bool, data_needed: bool) -> None:
        transfer = self.data_plane.end(operation, committed=committed, data_needed=data_needed)
        call = self._calls.get(self._posted.pop(operation))
        if call is not None:
            call.tx_bytes += transfer.tx_bytes
            call.rx_bytes += transfer.rx_bytes

    def _return(self, number: int, value: ReduceResult | bool | None) -> None:
        call = self._calls.pop(number, None)
        if call is None or call.future.done():
            return
        if isinstance(value, ReduceResult):
            call.future.set_result(
                ReduceReport(value.operation, value.contributors, call.tx_bytes, call.rx_bytes)
            )
        else:
            call.future.set_result(value)

    def _tick(self) -> None:
        if self._broken is not None:
            return
        patience_ns = self._timing.ns(self._timing.lane_stall_s) // 2
        self.data_plane.ask_if_idle(self._clock.now_ns(), patience_ns)
        self.keeper.replace_stalled_lanes()
        self._feed(Tick(self.data_plane.progress()))

    # -- the control connection ----------------------------------------------------------------

    def _dial_control(self) -> None:
        self._dial_timer = None
        self._control_dial = self._create_task(self._connect_control())

    async def _connect_control(self) -> None:
        try:
            connection = await self._transport.dial(self.master, self._timing.dial_s)
        except errors.LinkError as error:
            self._feed(ControlClosed(error.reason))
            return
        stream: ControlStream | None = None

        def on_message(message: Message) -> None:
            if self._control is stream:
                self._feed(ControlMessage(message))

        def on_closed(reason: str) -> None:
            if self._control is stream:
                self._control = None
                self._feed(ControlClosed(reason))

        self._control = stream = ControlStream(connection, on_message, on_closed)
        self._feed(ControlOpened())

    def _close_control(self, reason: str) -> None:
        if self._dial_timer is not None:
            self._dial_timer.cancel()
            self._dial_timer = None
        if self._control_dial is not None:
            self._control_dial.cancel()
            self._control_dial = None
        if self._control is not None:
            _log.info("closing the control connection: %s", reason)
            self._control.close()
            self._control = None

    # -- the data plane --------------------------------------------------------------------------

    def _accept(self, connection: Any) -> None:
        self.keeper.accept(connection)

    def _on_link_change(self, peer: PeerId, reason: str | None) -> None:
        self.data_plane.link_changed(peer)
        self._feed(LinkChanged(peer, reason))

    def _on_done(self, operation: OperationId, digest: bytes) -> None:
        self._feed(ReduceDone(operation, digest))

    # -- tasks -----------------------------------------------------------------------------------

    def _create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and task.exception() is not None:
            context = {"message": "pccl task failed", "exception": task.exception()}
            self._loop.call_exception_handler(context)


async def _next_turn(loop: asyncio.AbstractEventLoop) -> None:
    turn = loop.create_future()
    loop.call_soon(turn.set_result, None)
    await turn


__all__ = ["PeerEngine", "PeerOptions", "ReduceReport"]
