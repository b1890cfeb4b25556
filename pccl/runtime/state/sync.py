"""``StateSync``: one call that synchronizes or compares shared state, with all its attempts.

    hash stale tensors -> offer -> (fetch, verify) -> commit -> write to the tensors

If an attempt loses a member, the call makes another and keeps the verified pieces. Unless the
caller has set ``in_place``, it changes tensors and revision only after the commit. A cancellation
does not interrupt these changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pccl.machines.peer.events import SyncCall, SyncResult
from pccl.protocol import errors
from pccl.protocol.shared_state import (
    Lineage,
    Offer,
    ResumePolicy,
    SharedStateSyncStrategy,
    SyncPurpose,
)
from pccl.protocol.types import NOBODY, PeerId, Quorum
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

if TYPE_CHECKING:
    from pccl.runtime.state.exchange import StateExchange


class State(Protocol):
    """The state of a program: memory with a revision. ``pccl.SharedState`` implements it."""

    @property
    def revision(self) -> int:
        """The revision that the program has set."""
        ...

    @property
    def memory(self) -> StateMemory:
        """The memory of the tensors."""
        ...

    @property
    def lineage(self) -> Lineage | None:
        """The synchronization that elected the contents; None: there was none."""
        ...

    def synchronized(self, revision: int, lineage: Lineage) -> None:
        """Record that this synchronization elected the contents. Any thread may call it."""
        ...


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """The options of one call about shared state.

    Attributes:
        state: state of the caller.
        purpose: synchronize, or only compare.
        strategy: whether this peer sends, receives, or adopts the most popular contents.
        resume: which contents count if no member has the expected revision.
        expect_unchanged: fail instead of receiving contents.
        in_place: write received pieces directly into the tensors.
        staging_bytes_max: bytes to stage in memory; the call stages larger downloads in a file.
        staging_directory: directory of that file; None: the system's for temporary files.
        on_progress: receives progress reports, on the loop's thread.
        timeout_s: time limit for all attempts together, in seconds; None: no limit.
        quorum: when the call continues without late members; None: never.
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
    quorum: Quorum | None = None


class StateSync:
    """One call that synchronizes or compares a shared state.

    Args:
        hasher: hashes and copies, off the event loop.
        request: options of the call.
        fetched: pieces that a prefetch has fetched; None: there are none.
        deadline: time limit of all attempts together.
        now_ns: returns the current time in nanoseconds.

    Attributes:
        memory: memory of the state.
        fetched: fetched pieces of all attempts.
        session: session of the current attempt; None between attempts.
        attempts: counts the attempts, and decides what follows a failure.
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
        """This peer's id in the failed attempt that the next attempt repeats, else ``NOBODY``."""
        self._phase = "hashing"
        self._hashing = StateHashing(hasher)
        self._tx_bytes = self._rx_bytes = self._wrong_pieces = 0
        """Totals of the earlier attempts."""
        self._wanted: tuple[int, ...] = ()
        """Pieces that the last attempt had to replace."""
        self._wanted_bytes = 0
        self._is_torn = False
        """Whether a failed attempt may have written some pieces into the tensors, but not all."""
        self._stop_fetch: Callable[[], None] = lambda: None
        """Ends the fetch for a late call, if there is one."""
        self._meter = ProgressMeter(request.on_progress, self.fetched, now_ns)
        self._ranges = _ranges(self.memory)

    @property
    def on_progress(self) -> Callable[[SyncProgress], None] | None:
        """The callback that receives progress reports."""
        return self._request.on_progress

    def check_apart(self, operand: Operand) -> None:
        """Check that a collective does not use memory of this state.

        Raises:
            ValueError: the collective uses it; wait until the synchronization has returned.
        """
        if clash((*operand.ranges, *self._ranges)) is not None:
            raise ValueError(
                "a synchronization of shared state still uses this memory; wait until it returns"
            )

    def stop(self) -> None:
        """Cancel hashing and make no further attempt, because the communicator is closed."""
        self._hashing.stop()

    def report(self) -> None:
        """Report the progress to the caller."""
        download = self.session.download if self.session is not None else None
        phase = self._phase
        if download is not None and download.pieces is not None and phase == "waiting":
            phase = "fetching"
        self._meter.report(phase, download, self._wanted_bytes, self._wrong_pieces)

    # -- one attempt -----------------------------------------------------------------------------

    async def hash(self) -> None:
        """Begin an attempt: update the digests of stale tensors."""
        self.attempts.count += 1
        self._wanted = ()  # the attempt before may have fetched other contents
        self._enter("hashing")
        await self._hashing.run(self.memory)
        self._enter("waiting")

    def event(self) -> SyncCall:
        """Return the call as an event for the machine, with 0 in place of its number."""
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
        return SyncCall(0, offer, self._begun_by, request.quorum)

    async def fetch_shown(self, exchange: StateExchange, content: bytes) -> bool:
        """Fetch the contents that other members offer; return whether they have this digest."""
        self._count()  # of the attempt that continued without this peer
        if self._request.in_place:
            return False
        self._wanted, self._wanted_bytes = (), 0  # that attempt may have fetched other contents
        if self.memory.piece_map.digest(may_differ=False) == content:
            return True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        prefetch = exchange.begin_prefetch(self.memory, self.fetched, partial(_settle, done))

        def stop() -> None:
            exchange.end_prefetch(prefetch.operation)
            _settle(done)

        self._stop_fetch = stop
        try:
            await done
            download = prefetch.download
            self._rx_bytes += download.rx_bytes
            if prefetch.content != content:  # the call may return with what the peer has
                return False
            self._wanted, self._wanted_bytes = download.wanted, download.wanted_bytes
            return True
        finally:
            stop()

    def failed(self, error: errors.PCCLError, peer: PeerId) -> Next:
        """Record that an attempt failed, which this peer began as ``peer``. Return the next step.

        Raises:
            PCCLError: the call fails without a further attempt.
            OSError, MemoryError: this peer has no room for the missing pieces.
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
        """Add the traffic of the session to the totals, and forget the session."""
        session, self.session = self.session, None
        if session is not None:
            download = session.download
            self._tx_bytes += session.tx_bytes
            self._rx_bytes += download.rx_bytes
            self._wrong_pieces += download.wrong_pieces
            self._wanted, self._wanted_bytes = download.wanted, download.wanted_bytes

    def fail(self) -> None:
        """Record that an attempt failed. Pieces that it wrote in place stay in the tensors."""
        self._stop_fetch()
        self._count()
        if self._request.in_place and self._wanted:
            self._is_torn = True
            self.memory.touch_all()

    async def place(self, result: SyncResult, run: bytes) -> None:
        """Write the fetched pieces into the tensors after the commit. For ``verify``, do nothing.

        Raises:
            Exception: writing failed, perhaps half-way; the other members have the contents.
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
        """Report the end of the call to the caller, and return its outcome."""
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
        """Run ``place`` to its end, even if the caller is cancelled meanwhile."""
        placed = False
        left: asyncio.CancelledError | None = None

        def step() -> None:
            nonlocal placed
            place()
            placed = True

        while not placed:
            try:
                await self._hasher.run(step)
            except asyncio.CancelledError as error:  # perhaps before the step began
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


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
