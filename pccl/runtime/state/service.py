"""``StateService``: everything that a peer's engine does about shared state.

Calls come in here, and what the machine wants done about them; frames go to the exchange.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from pccl.machines.peer.events import (
    LeftCommitted,
    PeerEvent,
    PrefetchDone,
    ReduceResult,
    SyncResult,
)
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.protocol import errors
from pccl.protocol.shared_state import Elected, SyncPurpose
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.calls import Calls, OpenCall
from pccl.runtime.clock import Clock
from pccl.runtime.collective.operand import Operand
from pccl.runtime.hashing import Hasher
from pccl.runtime.requests import Deadline, SharedStateSyncInfo
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_hashing import StateHashing
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.running_prefetch import PrefetchRequest, RunningPrefetch
from pccl.runtime.state.sync import StateSync, SyncOptions
from pccl.runtime.tasks import Tasks
from pccl.state.attempts import Next
from pccl.transports.link import Links


class StateService:
    """Shared state of one peer.

    Args:
        clock: time.
        calls: of this peer.
        feed: gives an event to the machine.
        group: the peer group.
        hasher: does what takes a processor for long.
        tasks: runs what nobody waits for.
        stall_ns: a source that sends nothing for so long is passed over.
        join_again: comes back to the run as a newcomer.

    Attributes:
        exchange: what is given and taken in the run that this peer is in now.
    """

    exchange: StateExchange
    _machine: PeerMachine

    def __init__(
        self,
        clock: Clock,
        calls: Calls,
        feed: Callable[[PeerEvent], None],
        group: int,
        hasher: Hasher,
        tasks: Tasks,
        stall_ns: int,
        join_again: Callable[[Deadline | None], Awaitable[None]],
    ) -> None:
        self._clock = clock
        self._calls = calls
        self._feed = feed
        self._group = group
        self._hasher = hasher
        self._tasks = tasks
        self._stall_ns = stall_ns
        self._join_again = join_again
        self._syncs: dict[StateSync, None] = {}
        """Calls that are open."""
        self._hashing: StateHashing | None = None
        """Of a newcomer that is about to join, or does."""
        self._all_over: asyncio.Future[None] | None = None
        """Done when no call is open any more."""
        self._running: RunningPrefetch | None = None
        """What this newcomer fetches before it is admitted."""
        self._fetched: FetchedPieces | None = None
        """What it has fetched, until a call takes it."""

    def enter_run(self, machine: PeerMachine, links: Links) -> None:
        """Begin anew, with another machine and other links."""
        self._machine = machine
        self.exchange = StateExchange(
            self._group, links, self._clock.now_ns, self._stall_ns, self._feed
        )

    # -- calls -------------------------------------------------------------------------------------

    async def sync(self, request: SyncOptions, deadline: Deadline | None) -> SharedStateSyncInfo:
        """Make shared states equal, or compare them.

        Raises:
            ValueError: another call uses the state; or its tensors lie elsewhere by now.
        """
        with request.state.memory.claimed():
            fetched = self._take_fetched(request.state.memory)
            sync = StateSync(self._hasher, request, fetched, deadline, self._clock.now_ns)
            self._syncs[sync] = None
            try:
                request.state.memory.check_in_place()
                result = await self._attempts(sync)
                await self._place(sync, result, request)
                return sync.finish(result)
            except BaseException:
                sync.fail()
                raise
            finally:
                sync.fetched.close()
                del self._syncs[sync]
                self._note_end()

    async def _attempts(self, sync: StateSync) -> SyncResult:
        """Make attempts until one is committed.

        Raises:
            PCCLError: the call has failed; the state is what it was.
            OSError: there is no room to stage what is to be received.
        """
        while True:
            await sync.hash()
            call, peer = self._calls.new(), self._machine.peer
            call.sync = sync
            try:
                result = await self._calls.wait(sync.event(), sync.deadline, call)
            except (errors.CollectiveAborted, errors.Evicted) as error:
                if sync.failed(error, peer) is Next.REJOIN:
                    await self._come_back(sync)
            else:
                assert isinstance(result, SyncResult)
                return result

    async def _place(self, sync: StateSync, result: SyncResult, request: SyncOptions) -> None:
        try:
            await sync.place(result, self._machine.run)
        except Exception:
            # Some of it is in place: the others have all of it.
            self._feed(LeftCommitted(result.operation))
            raise
        if request.purpose is SyncPurpose.SYNC:
            self._show(request.state.memory)

    async def _come_back(self, sync: StateSync) -> None:
        """Come back as a newcomer, which goes on fetching before it is admitted."""
        request = PrefetchRequest(sync.memory, sync.fetched, sync.on_progress)
        await self._fetch_while(request, partial(self._join_again, sync.deadline))

    # -- before the admission ----------------------------------------------------------------------

    async def fetch_before(
        self, request: PrefetchRequest, joins: Callable[[], Awaitable[None]]
    ) -> None:
        """Fetch what the members show while this peer waits for its admission.

        Raises:
            PCCLError: the join has failed.
            ValueError: another call uses the state.
        """
        try:
            with request.memory.claimed():
                await self._fetch(request, joins)
        except BaseException:
            request.fetched.close()
            raise
        if self._fetched is not None:
            self._fetched.close()
        self._fetched = request.fetched

    async def _fetch(self, request: PrefetchRequest, joins: Callable[[], Awaitable[None]]) -> None:
        self._hashing = StateHashing(self._hasher)
        try:
            await self._hashing.run(request.memory)
            await self._fetch_while(request, joins)
        finally:
            self._hashing = None
            self._note_end()

    async def _fetch_while(
        self, request: PrefetchRequest, joins: Callable[[], Awaitable[None]]
    ) -> None:
        def on_ready() -> None:
            self._feed(PrefetchDone())

        self._running = running = RunningPrefetch(
            request, self._hasher, self._tasks, self._clock.now_ns, on_ready
        )
        try:
            await joins()
            await running.settle()
        finally:
            self._running = None
            await running.close()

    def _take_fetched(self, memory: StateMemory) -> FetchedPieces | None:
        """What was fetched of this state before this peer was admitted."""
        if self._fetched is None or self._fetched.memory is not memory:
            return None
        fetched, self._fetched = self._fetched, None
        return fetched

    def _show(self, memory: StateMemory) -> None:
        """Let newcomers fetch this state."""
        if memory.holds_tensors:
            self.exchange.show(memory)
            newest = self._machine.newest
            if newest is not None:  # who was in it watches no longer
                self.exchange.results.forget(newest.ring)
            self.exchange.results.synchronized(memory.piece_map.digest(may_differ=False))

    def note_result(self, call: OpenCall, result: ReduceResult) -> None:
        """A collective was committed; its values are still where the caller wants them."""
        if call.observable and call.operand is not None:
            self.exchange.results.committed(
                result.operation,
                call.operand.data_type,
                call.operand.target,
                result.contributors,
                result.weights,
            )

    def check_apart(self, operand: Operand) -> None:
        """Make sure that a collective does not use memory of a state that is being synchronized.

        Raises:
            ValueError: it does.
        """
        for sync in self._syncs:
            sync.check_apart(operand)

    # -- what the machine wants --------------------------------------------------------------------

    def post(self, number: int, operation: OperationId, ring: tuple[PeerId, ...]) -> None:
        """Lend the state of a call to its operation."""
        call, own = self._calls.get(number), self._machine.peer
        assert call is not None
        assert call.sync is not None
        call.operation = operation
        sync = call.sync
        sync.session = self.exchange.post(operation, sync.memory, sync.fetched, ring, own)

    def partners(self, operation: OperationId, elected: Elected) -> list[PeerId]:
        """Whom this peer exchanges pieces with."""
        own = self._machine.peer
        fetchers = {*elected.behind, *elected.outdated}
        others = (peer for peer in self.exchange.sessions[operation].ring if peer != own)
        return [peer for peer in others if own in fetchers or peer in fetchers]

    # -- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed."""
        self._look_at_prefetch()
        self.exchange.tick()
        for sync in self._syncs:
            sync.report()
        if self._running is not None:
            self._running.report()

    def _look_at_prefetch(self) -> None:
        if self._running is not None:
            is_pending = self._machine.standing is Standing.PENDING
            self._running.look(self.exchange, is_pending=is_pending)

    def link_changed(self, peer: PeerId, *, up: bool) -> None:
        """The link to a peer has come up, or is down."""
        self._look_at_prefetch()
        self.exchange.link_changed(peer, up=up)

    def break_down(self) -> None:
        """A bug of ours: give every memory back."""
        self.exchange.close()

    def _note_end(self) -> None:
        """A call has ended."""
        over = self._all_over
        if over is not None and not self._is_in_use and not over.done():
            over.set_result(None)

    @property
    def _is_in_use(self) -> bool:
        return bool(self._syncs) or self._hashing is not None

    async def close(self) -> None:
        """The communicator is closed: return when no call is open, and no thread is at work."""
        if self._is_in_use:
            self._all_over = self._tasks.loop.create_future()
            for sync in self._syncs:
                sync.stop()
            if self._hashing is not None:
                self._hashing.stop()
            await self._all_over
        self.exchange.close()
        if self._fetched is not None:
            self._fetched.close()
        self._hasher.close()
