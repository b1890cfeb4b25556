"""``StateSync``: what a late call has fetched is in the tensors when the call returns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pccl.machines.peer.events import SyncResult
from pccl.protocol.errors import CollectiveAborted
from pccl.protocol.shared_state import DIGEST_BYTES, Elected, Lineage
from pccl.protocol.types import SYNC_TAG, OperationId, PeerId
from pccl.runtime.hashing import InlineHasher
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.sync import StateSync, SyncOptions
from pccl.state.attempts import Next
from pccl.state.digests import layout_digest
from tests.support.small_state import PIECE, memory_of

OPERATION = OperationId(1, 0, 1, SYNC_TAG, 0)
DIGEST = b"d" * DIGEST_BYTES
RUN = b"r" * 16


class OwnState:
    """The state of a program: two pieces, of zeros."""

    def __init__(self) -> None:
        self.values = np.zeros(2 * PIECE, np.uint8)
        self.memory: StateMemory = memory_of(self.values)
        self.revision = 3
        self.lineage: Lineage | None = None

    def synchronized(self, revision: int, lineage: Lineage) -> None:
        self.revision, self.lineage = revision, lineage


class OneDownload:
    """An exchange with a member that offers the second piece: ones."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def begin_prefetch(self, memory: StateMemory, fetched: Any, on_ready: Any) -> Any:
        fetched.prepare((1,), {1: DIGEST})
        fetched.slot(1)[:] = bytes([1]) * PIECE
        fetched.put(1, DIGEST)
        on_ready()
        download = SimpleNamespace(rx_bytes=PIECE, wanted=(1,), wanted_bytes=PIECE)
        return SimpleNamespace(operation="prefetch", download=download, content=b"elected")

    def end_prefetch(self, operation: str) -> None:
        self.ended.append(operation)


async def test_a_call_that_had_begun_places_what_it_fetches_late() -> None:
    """Its session wanted nothing, because the operation began without it."""
    state, exchange = OwnState(), OneDownload()
    sync = StateSync(InlineHasher(), SyncOptions(state), None, None, lambda: 0)
    await sync.hash()
    sync.session = begun()
    assert await sync.fetch_shown(exchange, b"elected")  # type: ignore[arg-type]
    assert exchange.ended == ["prefetch"]
    layout = layout_digest(state.memory.layout)
    elected = Elected(7, layout, b"elected", (PeerId(2),), (), ())
    result = SyncResult(OPERATION, elected, (PeerId(2),))
    await sync.place(result, RUN)
    assert state.values.tolist() == [0] * PIECE + [1] * PIECE
    assert (state.revision, state.lineage) == (7, Lineage(RUN, OPERATION))
    assert sync.finish(result).rx_bytes == PIECE


def begun(*wanted: int) -> Any:
    """A session that has begun to fetch these pieces, and has none of them."""
    nbytes = PIECE * len(wanted)
    download = SimpleNamespace(rx_bytes=0, wrong_pieces=0, wanted=wanted, wanted_bytes=nbytes)
    download.has_failed = download.is_deserted = False
    receiver = SimpleNamespace(no_room=None)
    return SimpleNamespace(tx_bytes=0, download=download, receiver=receiver, elected=None)


async def test_a_late_call_that_has_the_contents_places_nothing_of_those_that_it_began() -> None:
    state, exchange = OwnState(), OneDownload()
    sync = StateSync(InlineHasher(), SyncOptions(state), None, None, lambda: 0)
    await sync.hash()
    own = state.memory.piece_map.digest(may_differ=False)
    sync.session = begun(0)
    assert await sync.fetch_shown(exchange, own)  # type: ignore[arg-type]
    assert not exchange.ended, "it has fetched nothing"
    layout = layout_digest(state.memory.layout)
    await sync.place(SyncResult(OPERATION, Elected(7, layout, own, (), (), ()), ()), RUN)
    assert not state.values.any()
    assert state.revision == 7


async def test_a_failed_attempt_leaves_nothing_to_place() -> None:
    """The next call may return at once, for contents that the peer has."""
    state = OwnState()
    sync = StateSync(InlineHasher(), SyncOptions(state), None, None, lambda: 0)
    await sync.hash()
    own = state.memory.piece_map.digest(may_differ=False)
    sync.session = begun(0)
    assert sync.failed(CollectiveAborted(reason="peer 3 is lost"), PeerId(2)) is Next.RETRY
    await sync.hash()
    layout = layout_digest(state.memory.layout)
    await sync.place(SyncResult(OPERATION, Elected(7, layout, own, (), (), ()), ()), RUN)
    assert not state.values.any()
    assert state.revision == 7


async def test_a_late_call_does_not_trust_tensors_that_it_was_writing() -> None:
    state, exchange = OwnState(), OneDownload()
    sync = StateSync(InlineHasher(), SyncOptions(state, in_place=True), None, None, lambda: 0)
    await sync.hash()
    own = state.memory.piece_map.digest(may_differ=False)
    sync.session = begun(0)
    assert not await sync.fetch_shown(exchange, own)  # type: ignore[arg-type]
    sync.fail()
    assert sync.event().offer.stale


async def test_what_it_could_not_fetch_is_placed_nowhere() -> None:
    """Its call may return all the same: for contents that it has."""
    state, exchange = OwnState(), OneDownload()
    sync = StateSync(InlineHasher(), SyncOptions(state), None, None, lambda: 0)
    await sync.hash()
    assert not await sync.fetch_shown(exchange, b"other contents")  # type: ignore[arg-type]
    layout = layout_digest(state.memory.layout)
    result = SyncResult(OPERATION, Elected(7, layout, b"own", (), (), ()), (PeerId(2),))
    await sync.place(result, RUN)
    assert not state.values.any()
    assert state.revision == 7
