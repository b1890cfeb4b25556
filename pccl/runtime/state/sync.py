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

from pccl.machines.peer.events import SyncCall, SyncResult
from pccl.protocol import errors
from pccl.protocol.shared_state import (
    Lineage,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
)
from pccl.protocol.types import NOBODY, PeerId
from pccl.runtime.collective.memory import Range, clash
from pccl.runtime.collective.operand import Operand
from pccl.runtime.hashing import Hasher
from pccl.runtime.requests import Deadline, SharedStateSyncInfo
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_hashing import StateHashing
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.progress import ProgressMeter, SyncProgress
from pccl.runtime.state.session import StateSession
from pccl.state.attempts import Next, SyncAttempts
from pccl.state.digests import layout_digest


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


class StateSync:
    """One call.

    Args:
        hasher: hashes, copies.
        request: what is wanted.
        fetched: what was fetched of the state already; None: nothing.
        deadline: of all attempts together.
        now_ns: the present.

    Attributes:
        memory: what is lent.
        fetched: what has been fetched.
        session: of the attempt that is under way, or was last.
        attempts: that were begun.
    """

    def __init__(
        self,
        hasher: Hasher,
        request: SyncOptions,
        fetched: FetchedPieces | None,
        deadline: Deadline | None,
        now_ns: Callable[[], int],
    ) -> None:
        self.memory = request.state.memory
        self.fetched = fetched or FetchedPieces(
            self.memory,
            request.staging_bytes_max,
            request.staging_directory,
            in_place=request.in_place,
        )
        self.deadline = deadline
        self.session: StateSession | None = None
        self._hasher = hasher
        self._request = request
        self.attempts = SyncAttempts()
        self._begun_by = NOBODY
        """The incarnation of this peer that made the attempt before."""
        self._phase = "hashing"
        self._hashing = StateHashing(hasher)
        self._tx_bytes = self._rx_bytes = self._wrong_pieces = 0
        """Of the attempts before."""
        self._wanted: tuple[int, ...] = ()
        """Pieces that are to be other ones than they were, as of the last attempt."""
        self._wanted_bytes = 0
        self._is_torn = False
        """Whether pieces were written straight into the tensors, and not all of them."""
        self._meter = ProgressMeter(request.on_progress, self.fetched, now_ns)
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

    def stop(self) -> None:
        """The communicator is closed: fail soon."""
        self._hashing.stop()

    def report(self) -> None:
        """Tell how far it is."""
        download = self.session.download if self.session is not None else None
        phase = self._phase
        if download is not None and download.pieces is not None and phase == "waiting":
            phase = "fetching"
        self._meter.report(phase, download, self._wanted_bytes, self._wrong_pieces)

    # -- one attempt -----------------------------------------------------------------------------

    async def hash(self) -> None:
        """Know what is here, for another attempt."""
        self.attempts.count += 1
        self._enter("hashing")
        await self._hashing.run(self.memory)
        self._enter("waiting")

    def event(self) -> SyncCall:
        """The call as the machine gets it, but for its number."""
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

    def failed(self, error: errors.PCCLError, peer: PeerId) -> Next:
        """An attempt has failed that this peer had begun as ``peer``.

        Raises:
            PCCLError: no other one is to be made.
            OSError: there is no room to stage what is to be received.
        """
        session, starved, no_room = self.session, False, None
        if session is not None:
            starved = session.download.has_failed and not session.download.is_deserted
            no_room = session.receiver.no_room
        self.fail()
        found = self.attempts.after(
            error, starved=starved, no_room=no_room, is_closing=self._hashing.is_stopped
        )
        if isinstance(found, Exception):
            raise found from (error.__cause__ if found is error else None)
        self._begun_by = peer if found is Next.RETRY else NOBODY
        return found

    def _count(self) -> None:
        """An attempt is over: what it has moved counts."""
        session, self.session = self.session, None
        if session is not None:
            download = session.download
            self._tx_bytes += session.tx_bytes
            self._rx_bytes += download.rx_bytes
            self._wrong_pieces += download.wrong_pieces
            self._wanted, self._wanted_bytes = download.wanted, download.wanted_bytes

    def fail(self) -> None:
        """An attempt has failed: pieces that went straight into the tensors are not undone."""
        self._count()
        if self._request.in_place and self._wanted:
            self._is_torn = True
            self.memory.touch_all()

    async def place(self, result: SyncResult, run: bytes) -> None:
        """It is committed: put what was fetched in place.

        Raises:
            Exception: that could not be done, or only in part; the other members have all of it.
        """
        self._count()
        if self._request.purpose is not SyncPurpose.SYNC:
            return
        self._enter("placing")
        lineage = Lineage(run, result.operation)

        def place() -> None:
            self.fetched.apply(self._wanted)
            self._request.state.synchronized(result.elected.revision, lineage)

        try:
            await self._see_through(place)
        except Exception:
            self.memory.touch_all()
            raise

    def finish(self, result: SyncResult) -> SharedStateSyncInfo:
        """All is in place."""
        self._enter("done")
        return SharedStateSyncInfo(
            tx_bytes=self._tx_bytes,
            rx_bytes=self._rx_bytes,
            revision=result.elected.revision,
            members=result.members,
            attempts=self.attempts.count,
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
