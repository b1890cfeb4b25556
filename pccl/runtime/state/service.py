"""``StateService``: runs the calls about shared state for a peer's engine.

It receives calls and the machine's effects for them; the exchange receives the frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import numpy as np

from pccl.machines.peer.events import (
    FetchResult,
    KeepResult,
    LeftCommitted,
    PeerEvent,
    PrefetchDone,
    ReduceDone,
    ReduceResult,
    ResultFetched,
    SyncResult,
)
from pccl.machines.peer.machine import PeerMachine, Standing
from pccl.protocol import errors
from pccl.protocol.shared_state import Elected, SyncPurpose
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.calls import Calls, OpenCall
from pccl.runtime.clock import Clock
from pccl.runtime.collective.operand import Operand
from pccl.runtime.collective.transfers.transfer import Transfer
from pccl.runtime.hashing import Hasher
from pccl.runtime.requests import Deadline, SharedStateSyncInfo
from pccl.runtime.state.exchange import StateExchange
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_hashing import StateHashing
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.results import LateResults, ResultCopy, fetch_result, late_memory
from pccl.runtime.state.running_prefetch import PrefetchRequest, RunningPrefetch
from pccl.runtime.state.sync import StateSync, SyncOptions
from pccl.runtime.tasks import Tasks
from pccl.runtime.waiting import next_turn
from pccl.state.attempts import Next
from pccl.transports.link import Links


class StateService:
    """Runs all calls about shared state of one peer.

    Args:
        clock: clock of this peer.
        calls: open calls of this peer.
        feed: passes an event to the machine.
        group: the peer group.
        hasher: hashes and copies, off the event loop.
        tasks: runs background tasks.
        stall_ns: nanoseconds without a byte after which a source counts as stalled.
        join_again: joins the run again as a newcomer.

    Attributes:
        exchange: uploads and downloads in the run that this peer is in now.
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
        """Open calls."""
        self._hashing: StateHashing | None = None
        """The hashing before a prefetch; set until the newcomer is admitted."""
        self._all_over: asyncio.Future[None] | None = None
        """The future that ``close`` waits for: done once no call is open."""
        self._running: RunningPrefetch | None = None
        """The prefetch of this newcomer, until it is admitted."""
        self._fetched: FetchedPieces | None = None
        """The pieces of a prefetch, until a call takes them."""

    def enter_run(self, machine: PeerMachine, links: Links) -> None:
        """Switch to the machine and the links of a new run."""
        self._machine = machine
        self.exchange = StateExchange(
            self._group, links, self._clock.now_ns, self._stall_ns, self._feed
        )

    # -- calls -------------------------------------------------------------------------------------

    async def sync(self, request: SyncOptions, deadline: Deadline | None) -> SharedStateSyncInfo:
        """Make shared states equal, or compare them.

        Raises:
            ValueError: another call uses the state, or the program gave a tensor other memory.
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
            PCCLError: the call has failed; without ``in_place`` the state is unchanged.
            OSError, MemoryError: this peer has no room for the missing pieces.
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
            # This state may be half-written, while the other members hold all contents.
            self._feed(LeftCommitted(result.operation))
            raise
        if request.purpose is SyncPurpose.SYNC:
            self._show(request.state.memory)

    async def _come_back(self, sync: StateSync) -> None:
        """Join again as a newcomer, and keep fetching until the admission."""
        request = PrefetchRequest(sync.memory, sync.fetched, sync.on_progress)
        await self._fetch_while(request, partial(self._join_again, sync.deadline))

    # -- before the admission ----------------------------------------------------------------------

    async def fetch_before(
        self, request: PrefetchRequest, joins: Callable[[], Awaitable[None]]
    ) -> None:
        """Fetch the members' snapshot while ``joins`` waits for this peer's admission.

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
        """Hand over the pieces that a prefetch has fetched for ``memory``; None: there are none."""
        if self._fetched is None or self._fetched.memory is not memory:
            return None
        fetched, self._fetched = self._fetched, None
        return fetched

    def _show(self, memory: StateMemory) -> None:
        """Unless a tensor is only an address, offer this state and later results to newcomers."""
        if memory.holds_tensors:
            self.exchange.show(memory)
            newest = self._machine.newest
            if newest is not None:  # its members are no newcomers any more
                self.exchange.results.forget(newest.ring)
            self.exchange.results.synchronized(memory.piece_map.digest(may_differ=False))

    def note_result(self, call: OpenCall, result: ReduceResult) -> None:
        """Offer an observable result to newcomers.

        The call has not returned, so its caller has not changed the memory yet.
        """
        operand = call.operand
        if operand is not None and call.observable:
            copy = self.exchange.results.committed(
                result.operation,
                operand.data_type,
                operand.target,
                result.contributors,
                result.weights,
            )
            if copy is not None:
                self._tasks.create(self._announce(copy))

    async def _announce(self, copy: ResultCopy) -> None:
        await self._hasher.hash_pieces(copy.memory, range(copy.memory.layout.piece_count))
        self.exchange.results.announce(copy)

    def keep_result(self, keep: KeepResult, transfer: Transfer) -> None:
        """Keep a copy of a complete result for late members."""
        late, asked = self.exchange.late_results, keep.descriptor
        values = np.empty(asked.count, asked.dtype.to_numpy_dtype())
        memory = late.stage(keep.operation, asked, values)
        copying = transfer.copy_into(values)
        self._tasks.create(self._keep(late, keep.operation, memory, copying))

    async def _keep(
        self,
        late: LateResults,
        operation: OperationId,
        memory: StateMemory,
        copying: Iterator[int],
    ) -> None:
        """Copy and hash a result while the I/O thread works on; after its operation, read nothing.

        A thread must not copy: the caller could get its memory back meanwhile.
        """
        while late.is_staged(operation) and next(copying, 0):
            await next_turn(self._tasks.loop)
        if late.is_staged(operation):
            await self._hasher.hash_pieces(memory, range(memory.layout.piece_count))
        if late.is_staged(operation):
            content = memory.piece_map.digest(may_differ=False)
            self._feed(ReduceDone(operation, content, is_kept=True))

    def result_ended(self, operation: OperationId, *, committed: bool) -> None:
        """Offer a committed result to late members; drop that of an aborted operation."""
        self.exchange.late_results.ended(operation, self._clock.now_ns(), committed=committed)

    def fetch_result(self, fetch: FetchResult) -> None:
        """Fetch the result for a late call, from a member that has kept it."""
        self._tasks.create(self._fetch_result(fetch))

    def fetch_state(self, number: int, content: bytes) -> None:
        """Fetch, for a late call, the contents that other members have elected and offer."""
        self._tasks.create(self._fetch_state(number, content))

    async def _fetch_state(self, number: int, content: bytes) -> None:
        call = self._calls.open.get(number)
        sync = call.sync if call is not None else None
        has_arrived = sync is not None and await sync.fetch_shown(self.exchange, content)
        self._feed(ResultFetched(number, has_arrived))

    async def _fetch_result(self, fetch: FetchResult) -> None:
        asked = fetch.descriptor
        values = np.empty(asked.count, asked.dtype.to_numpy_dtype())
        memory = late_memory(fetch.operation, asked, values)
        has_arrived = await fetch_result(self.exchange, memory, fetch.content)
        call = self._calls.open.get(fetch.call)
        if has_arrived and call is not None and call.operand is not None:
            call.operand.target.write(0, values.view(np.uint8).data)
        self._feed(ResultFetched(fetch.call, has_arrived))

    def check_apart(self, operand: Operand) -> None:
        """Check that a collective does not use memory of a state that is being synchronized.

        Raises:
            ValueError: the collective uses it; wait until the synchronization has returned.
        """
        for sync in self._syncs:
            sync.check_apart(operand)

    # -- what the machine wants --------------------------------------------------------------------

    def post(self, number: int, operation: OperationId, ring: tuple[PeerId, ...]) -> None:
        """Open a session for the state of a call."""
        call, own = self._calls.open.get(number), self._machine.peer
        assert call is not None
        assert call.sync is not None
        call.operation = operation
        sync = call.sync
        sync.session = self.exchange.post(operation, sync.memory, sync.fetched, ring, own)

    def partners(self, operation: OperationId, elected: Elected) -> list[PeerId]:
        """Return the peers with which this one may exchange pieces of ``elected``."""
        own = self._machine.peer
        fetchers = {*elected.behind, *elected.outdated}
        others = (peer for peer in self.exchange.sessions[operation].ring if peer != own)
        return [peer for peer in others if own in fetchers or peer in fetchers]

    # -- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Check timeouts of all downloads, and report their progress."""
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
        """Adapt all uploads and downloads to a link that came up or broke."""
        self._look_at_prefetch()
        self.exchange.link_changed(peer, up=up)

    def break_down(self) -> None:
        """Stop using the callers' memory, because the peer machine has failed with a bug."""
        self.exchange.close()

    def _note_end(self) -> None:
        """Wake ``close`` if no call is open."""
        over = self._all_over
        if over is not None and not self._is_in_use and not over.done():
            over.set_result(None)

    @property
    def _is_in_use(self) -> bool:
        return bool(self._syncs) or self._hashing is not None

    async def close(self) -> None:
        """Stop all calls; return when none is open and no thread works for them."""
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
