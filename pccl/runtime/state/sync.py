"""``StateSync``: one call about shared state, from hashing to the last byte in place.

    hash what may have changed -> offer -> (fetch, verify) -> committed -> put in place

An attempt that fails for want of a member is followed by another one, which goes on with the pieces
that are here. Nothing of the caller's is overwritten unless it was committed; then all of it is,
and the revision with it, before the call returns or raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from pccl.machines.peer.events import LeftCommitted, PeerEvent, SyncCall, SyncResult
from pccl.protocol import errors
from pccl.protocol.shared_state import (
    Lineage,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
)
from pccl.protocol.types import NOBODY, PeerId, RemovalCause
from pccl.runtime.collective.memory import Range, clash
from pccl.runtime.collective.operand import Operand
from pccl.runtime.hashing import Hasher
from pccl.runtime.requests import Deadline, SharedStateSyncInfo
from pccl.runtime.state.memory.state_hashing import StateHashing
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.memory.stock import Stock
from pccl.runtime.state.progress import ProgressMeter, SyncProgress
from pccl.runtime.state.session import StateSession
from pccl.state.digests import layout_digest

STARVED_MAX = 3
"""Attempts that end because nobody gives what is missing; after that the caller is told."""


class State(Protocol):
    """What a program holds: memory with a revision; ``pccl.SharedState`` is one."""

    @property
    def revision(self) -> int:
        """As the program counts it."""
        ...

    @property
    def memory(self) -> StateMemory:
        """The tensors."""
        ...

    @property
    def lineage(self) -> Lineage | None:
        """Of the synchronization that they are from; None: of none."""
        ...

    def synchronized(self, revision: int, lineage: Lineage) -> None:
        """They are from this one now. Called in any thread."""
        ...


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """What a caller wants.

    Attributes:
        state: his.
        purpose: to synchronize, or to compare only.
        strategy: whose contents count.
        resume: what counts if nobody has the expected revision.
        expect_unchanged: whether to fail rather than to receive anything.
        in_place: whether pieces go straight into the tensors.
        staging_bytes_max: more than that is staged on the disk.
        staging_directory: where; None: where temporary files go.
        on_progress: told how far it is, on the loop's thread.
        timeout_s: budget of all attempts together; None: for ever.
    """

    state: State
    purpose: SyncPurpose = SyncPurpose.SYNC
    strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR
    resume: ResumePolicy = ResumePolicy.NEVER
    expect_unchanged: bool = False
    in_place: bool = False
    staging_bytes_max: int = 1 << 30
    staging_directory: str | None = None
    on_progress: Callable[[SyncProgress], None] | None = None
    timeout_s: float | None = None


class Caller(Protocol):
    """What carries calls to the members: the desk."""

    async def attempt(self, event: SyncCall, sync: StateSync) -> object:
        """One attempt."""
        ...

    async def join_again(self, sync: StateSync) -> None:
        """Come back as a newcomer, who goes on fetching before he is admitted."""
        ...

    def take_stock(self, memory: StateMemory) -> Stock | None:
        """What was fetched of this state before this peer was admitted."""
        ...

    def show(self, memory: StateMemory) -> None:
        """Let newcomers fetch this state."""
        ...

    def feed(self, event: PeerEvent) -> None:
        """The machine has to know of this."""
        ...

    @property
    def run(self) -> bytes:
        """The run's id."""
        ...

    @property
    def peer(self) -> PeerId:
        """The own id in it."""
        ...


class StateSync:
    """One call.

    Args:
        caller: carries it to the members.
        hasher: hashes, copies.
        request: what is wanted.
        deadline: of all attempts together.
        now_ns: the present.

    Attributes:
        memory: what is lent.
        stock: what has been fetched.
        session: of the attempt that is under way, or was last.
    """

    def __init__(
        self,
        caller: Caller,
        hasher: Hasher,
        request: SyncOptions,
        deadline: Deadline | None,
        now_ns: Callable[[], int],
    ) -> None:
        self.memory = request.state.memory
        self.stock = caller.take_stock(self.memory) or Stock(
            self.memory,
            request.staging_bytes_max,
            request.staging_directory,
            in_place=request.in_place,
        )
        self.deadline = deadline
        self.session: StateSession | None = None
        self._caller = caller
        self._hasher = hasher
        self._request = request
        self._begun_by = NOBODY
        """The incarnation of this peer that made the attempt before."""
        self._phase = "hashing"
        self._hashing = StateHashing(hasher)
        self._tx_bytes = self._rx_bytes = self._wrong_pieces = 0
        """Of the attempts before."""
        self._wanted: list[int] = []
        """Pieces that are to be other ones than they were, as of the last attempt."""
        self._wanted_bytes = 0
        self._is_torn = False
        """Whether pieces were written straight into the tensors, and not all of them."""
        self._meter = ProgressMeter(request.on_progress, self.stock, now_ns)
        self._ranges = _ranges(self.memory)

    @property
    def on_progress(self) -> Callable[[SyncProgress], None] | None:
        """Who is told how far it is."""
        return self._request.on_progress

    def check_apart(self, operand: Operand) -> None:
        """Make sure that a collective does not use the same memory.

        Raises:
            ValueError: it does.
        """
        if clash((*operand.ranges, *self._ranges)) is not None:
            raise ValueError(
                "a synchronization of shared state still uses this memory; wait for it"
            )

    async def run(self) -> SharedStateSyncInfo:
        """Make the call.

        Raises:
            PCCLError: it has failed; the state is what it was.
            ValueError: its tensors lie elsewhere by now.
            OSError: there is no room to stage what is to be received.
        """
        self.memory.check_in_place()
        attempts = starved = 0
        try:
            while True:
                attempts += 1
                await self._hash()
                self._enter("waiting")
                peer = self._caller.peer
                try:
                    result = await self._caller.attempt(self._event(), self)
                except errors.CollectiveAborted as error:
                    starved += self._is_starved
                    no_room = self.session.no_room if self.session is not None else None
                    self._fail()
                    if no_room is not None:
                        raise no_room from None
                    if error.result is not errors.Result.RANK_CONNECTION_LOST:
                        raise
                    if starved >= STARVED_MAX:
                        raise errors.StateUnavailable(reason=error.reason) from None
                    self._begun_by = peer
                except errors.Evicted as error:
                    self._fail()
                    if error.cause is not RemovalCause.TOO_SLOW or self._hashing.is_stopped:
                        raise
                    await self._caller.join_again(self)
                    self._begun_by = NOBODY
                else:
                    assert isinstance(result, SyncResult)
                    self._count()
                    return await self._finish(result, attempts)
        except BaseException:
            self._fail()
            raise
        finally:
            self.stock.close()

    def stop(self) -> None:
        """The communicator is closed: fail soon."""
        self._hashing.stop()

    def report(self) -> None:
        """Tell how far it is."""
        session, phase = self.session, self._phase
        fetch = session.fetch if session is not None else None
        if fetch is not None and phase == "waiting":
            phase = "fetching"
        total, wrong = self._wanted_bytes, self._wrong_pieces
        if session is not None:
            total, wrong = session.wanted_bytes, wrong + session.wrong_pieces
        self._meter.report(phase, total, fetch, wrong)

    # -- one attempt -----------------------------------------------------------------------------

    async def _hash(self) -> None:
        self._enter("hashing")
        await self._hashing.run(self.memory)

    def _event(self) -> SyncCall:
        request, state = self._request, self._request.state
        offer = Offer(
            purpose=request.purpose,
            strategy=request.strategy,
            resume=request.resume,
            revision=state.revision,
            lineage=None if self._is_torn else state.lineage,
            stale=self._is_torn,
            unchanged=request.expect_unchanged,
            layout=layout_digest(self.memory.layout),
            content=self.memory.piece_map.digest(may_differ=False),
            extra=self.memory.piece_map.digest(may_differ=True),
        )
        return SyncCall(0, offer, self._begun_by)

    @property
    def _is_starved(self) -> bool:
        session = self.session
        return session is not None and session.is_starved and not session.is_deserted

    def _count(self) -> None:
        """An attempt is over: what it has moved counts."""
        session, self.session = self.session, None
        if session is not None:
            self._tx_bytes += session.tx_bytes
            self._rx_bytes += session.rx_bytes
            self._wrong_pieces += session.wrong_pieces
            self._wanted, self._wanted_bytes = session.wanted, session.wanted_bytes

    def _fail(self) -> None:
        """An attempt has failed: pieces that went straight into the tensors are not undone."""
        self._count()
        if self._request.in_place and self._wanted:
            self._is_torn = True
            self.memory.touch_all()

    async def _finish(self, result: SyncResult, attempts: int) -> SharedStateSyncInfo:
        """It is committed: put what was fetched in place."""
        lineage = Lineage(self._caller.run, result.operation)
        if self._request.purpose is SyncPurpose.SYNC:
            self._enter("placing")

            def place() -> None:
                self.stock.apply(self._wanted)
                self._request.state.synchronized(result.elected.revision, lineage)

            try:
                await self._see_through(place)
            except Exception:
                # Some of it is in place: the others have all of it.
                self.memory.touch_all()
                self._caller.feed(LeftCommitted(result.operation))
                raise
            self._caller.show(self.memory)
        self._enter("done")
        return SharedStateSyncInfo(
            tx_bytes=self._tx_bytes,
            rx_bytes=self._rx_bytes,
            revision=result.elected.revision,
            members=result.members,
            attempts=attempts,
            wrong_pieces=self._wrong_pieces,
            outcome=result,
        )

    async def _see_through(self, place: Callable[[], None]) -> None:
        """Have it done, although the caller may leave meanwhile."""
        placed = False
        left: asyncio.CancelledError | None = None

        def step() -> None:
            nonlocal placed
            place()
            placed = True

        while not placed:
            try:
                await self._hasher.run(step)
            except asyncio.CancelledError as error:  # perhaps before it has begun
                left = error
        if left is not None:
            raise left

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self.report()


def _ranges(memory: StateMemory) -> tuple[Range, ...]:
    found: list[Range] = []
    for view in memory.views:
        if view.nbytes:
            address = _address_of(view)
            found.append((address, address + view.nbytes, True, ""))
    return tuple(found)


def _address_of(view: memoryview) -> int:
    import numpy as np

    array: Any = np.frombuffer(view, np.uint8)
    address: int = array.ctypes.data
    return address
