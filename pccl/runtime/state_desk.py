"""``StateDesk``: everything that a peer's engine does about shared state.

Calls come in here, and what the machine wants done about them; frames go to the exchange.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from pccl.protocol.messages import Difference
from pccl.protocol.peer import PeerMachine
from pccl.protocol.peer_events import (
    BeginSync,
    CompareSync,
    PeerEvent,
    PostSync,
    ReduceDone,
    StatesCompared,
    SyncStarved,
)
from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.calls import Call, Calls
from pccl.runtime.hashing import Hasher
from pccl.runtime.operand import Operand
from pccl.runtime.requests import Deadline
from pccl.runtime.state_exchange import StateExchange
from pccl.runtime.state_sync import StateSync, SyncReport, SyncRequest
from pccl.transports.link import Links


class Host(Protocol):
    """The engine, as far as shared state has to do with it."""

    @property
    def machine(self) -> PeerMachine:
        """Of the run that this peer is in now."""
        ...

    @property
    def links(self) -> Links:
        """Likewise."""
        ...

    @property
    def calls(self) -> Calls:
        """Of this peer."""
        ...

    def now_ns(self) -> int:
        """The present."""
        ...

    def feed(self, event: PeerEvent) -> None:
        """Give an event to the machine."""
        ...

    def use_link(self, peer: PeerId) -> None:
        """The link to ``peer`` gets all its lanes."""
        ...

    def call(
        self, make_event: Callable[[int], PeerEvent], deadline: Deadline | None, call: Call
    ) -> Awaitable[object]:
        """Make a call and wait for it."""
        ...

    def join_again(self, deadline: Deadline | None) -> Awaitable[None]:
        """Come back to the run as a newcomer."""
        ...


class StateDesk:
    """Shared state of one peer.

    Args:
        host: the engine.
        hasher: does what takes a processor for long.
        stall_ns: a source that sends nothing for so long is passed over.

    Attributes:
        exchange: what is given and taken in the run that this peer is in now.
    """

    def __init__(self, host: Host, hasher: Hasher, stall_ns: int) -> None:
        self._host = host
        self._hasher = hasher
        self._stall_ns = stall_ns
        self._syncs: dict[StateSync, None] = {}
        """Calls that are open."""
        self.exchange = self.enter_run()

    def enter_run(self) -> StateExchange:
        """Begin anew, with other links."""
        feed = self._host.feed

        def on_done(operation: OperationId, digest: bytes) -> None:
            feed(ReduceDone(operation, digest))

        def on_starved(operation: OperationId, reason: str) -> None:
            feed(SyncStarved(operation, reason))

        def on_compared(operation: OperationId, difference: Difference) -> None:
            feed(StatesCompared(operation, difference))

        links, now_ns = self._host.links, self._host.now_ns
        self.exchange = StateExchange(
            links, now_ns, self._stall_ns, on_done, on_starved, on_compared
        )
        return self.exchange

    # -- calls -------------------------------------------------------------------------------------

    async def sync(self, request: SyncRequest, deadline: Deadline | None) -> SyncReport:
        """Make shared states equal, or compare them.

        Raises:
            ValueError: another call uses the state; or its tensors lie elsewhere by now.
        """
        sync = StateSync(self, self._hasher, request, deadline, self._host.now_ns)
        if any(other.memory is sync.memory for other in self._syncs):
            raise ValueError("another call still uses this shared state; wait for it")
        self._syncs[sync] = None
        try:
            return await sync.run()
        finally:
            del self._syncs[sync]

    async def attempt(self, make_event: Callable[[int], PeerEvent], sync: StateSync) -> object:
        """One attempt of a call.

        Raises:
            PCCLError: it has failed.
        """
        call = self._host.calls.new()
        call.sync = sync
        return await self._host.call(make_event, sync.deadline, call)

    async def join_again(self, deadline: Deadline | None) -> None:
        """Come back as a newcomer."""
        await self._host.join_again(deadline)

    @property
    def run(self) -> bytes:
        """The run's id."""
        return self._host.machine.run

    def feed(self, event: PeerEvent) -> None:
        """Give an event to the machine."""
        self._host.feed(event)

    def check_apart(self, operand: Operand) -> None:
        """Make sure that a collective does not use memory of a state that is being synchronized.

        Raises:
            ValueError: it does.
        """
        for sync in self._syncs:
            sync.check_apart(operand)

    # -- what the machine wants --------------------------------------------------------------------

    def carry_out(self, effect: PostSync | BeginSync | CompareSync) -> None:
        """Do it."""
        match effect:
            case PostSync(number, operation, ring):
                self._post(number, operation, ring)
            case BeginSync(operation, elected):
                self.exchange.begin(operation, elected)
            case CompareSync(operation, reference):
                self.exchange.compare(operation, reference)

    def _post(self, number: int, operation: OperationId, ring: tuple[PeerId, ...]) -> None:
        call, own = self._host.calls.get(number), self._host.machine.peer
        assert call is not None
        assert call.sync is not None
        call.operation = operation
        sync = call.sync
        sync.session = self.exchange.post(operation, sync.memory, sync.stock, ring, own)
        for peer in ring:
            if peer != own:
                self._host.use_link(peer)

    # -- time --------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time has passed."""
        self.exchange.tick()
        for sync in self._syncs:
            sync.report()

    def break_down(self) -> None:
        """A bug of ours: give every memory back."""
        for operation in list(self.exchange.sessions):
            self.exchange.end(operation)

    def close(self) -> None:
        """Nobody calls any more."""
        self._hasher.close()
