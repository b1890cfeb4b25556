"""``Results``: results of reductions, which a member offers to newcomers for their replay.

Between two synchronizations, often only the results of reductions change a state. A newcomer
fetches the state of the last synchronization, and each later result. It applies the results in
order, and then has the same state as the members.

A member copies and keeps results only while a newcomer watches. Each synchronization restarts the
numbers of the results at 0, so a newcomer notices a missed result.

``LateResults`` keeps what members fetch that were late: results of operations without them.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameKind
from pccl.protocol.operation import LATE_BYTES_MAX
from pccl.protocol.types import NS_PER_S, WEIGHT_MAX, Descriptor, OperationId, PeerId
from pccl.runtime.collective.memory import Array, Memory
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.fetched import FetchedPieces
from pccl.runtime.state.memory.state_memory import StateMemory

if TYPE_CHECKING:
    from pccl.runtime.state.exchange import StateExchange

KEPT_BYTES_MAX = 1 << 30
"""Bytes of results that a member keeps for watchers; above them, it drops the oldest results.

A watcher that misses a result fetches the state instead."""

KEPT_MAX = 4096
"""Largest number of results that a member keeps: each takes memory beyond its bytes."""

LATE_KEPT_NS = 120 * NS_PER_S
"""How long a member keeps each of these results."""

UNREAD_BYTES_MAX = 4 << 20
"""Bytes of unread announcements above which the member forgets the watcher."""

COUNT_MAX = 1 << 36
"""Largest number of values of one result; only an attacker announces more."""

_NEWS = struct.Struct("<32sIIIIQIBQ32sI?")
_PEER = struct.Struct("<Q")
_WEIGHED = struct.Struct("<Qd")
"""Format of one contributor to a weighted average, with its weight."""


@dataclass(frozen=True, slots=True)
class ResultNews:
    """The announcement of one committed reduction.

    Attributes:
        content: digest of the contents that the last synchronization before the reduction elected.
        index: number of earlier observable reductions since that synchronization.
        operation: id of the reduction.
        dtype: dtype of the values.
        count: number of values.
        digest: content digest of the values.
        contributors: members whose values are in the result.
        weights: weights of the contributors in a weighted average; otherwise empty.
    """

    content: bytes
    index: int
    operation: OperationId
    dtype: DataType
    count: int
    digest: bytes
    contributors: tuple[PeerId, ...]
    weights: tuple[float, ...] = ()

    def pack(self) -> bytes:
        """Encode the announcement as the payload of a RESULT frame."""
        op = self.operation
        ids = (op.term, op.group, op.view, op.tag, op.n)
        head = _NEWS.pack(
            *(self.content, self.index, *ids),
            *(self.dtype, self.count, self.digest, len(self.contributors), bool(self.weights)),
        )
        if self.weights:
            pairs = zip(self.contributors, self.weights, strict=True)
            return head + b"".join(_WEIGHED.pack(*pair) for pair in pairs)
        return head + b"".join(_PEER.pack(peer) for peer in self.contributors)

    @staticmethod
    def unpack(packed: bytes | bytearray) -> ResultNews:
        """Decode the payload of a RESULT frame.

        Raises:
            RemoteProtocolError: the payload is malformed.
        """
        try:
            *front, dtype, count, digest, peers, weighted = _NEWS.unpack_from(packed)
            content, index, *ids = front
            each = _WEIGHED if weighted else _PEER
            if len(packed) != _NEWS.size + peers * each.size or count > COUNT_MAX:
                raise ValueError("wrong length, or too many values")
            listed = list(each.iter_unpack(packed[_NEWS.size :]))
            weights = tuple(one[1] for one in listed) if weighted else ()
            if not all(0 <= weight <= WEIGHT_MAX for weight in weights):
                raise ValueError(f"a weight is not from 0 to {WEIGHT_MAX:g}")
            return ResultNews(
                *(content, index, OperationId(*ids), DataType(dtype), count, digest),
                tuple(PeerId(one[0]) for one in listed),
                weights,
            )
        except (struct.error, ValueError) as error:
            raise RemoteProtocolError(func="lane", reason=f"malformed RESULT: {error}") from error


@dataclass(slots=True)
class Loose:
    """A tensor of a state that the library made itself; implements ``state_memory.Tensor``."""

    name: str
    tensor: Array
    dtype: DataType
    data_ptr: int = field(init=False)
    numel: int = field(init=False)
    allow_content_inequality: bool = False
    is_cuda: bool = False

    def __post_init__(self) -> None:
        self.data_ptr, self.numel = self.tensor.ctypes.data, self.tensor.size


def result_memory(name: str, values: Array, dtype: DataType) -> StateMemory:
    """Wrap a result as a state of one tensor. The name is that of its operation."""
    return StateMemory([Loose(name, values, dtype)])


def late_memory(operation: OperationId, asked: Descriptor, values: Array) -> StateMemory:
    """Wrap a result for late members. Only calls with the same descriptor find it."""
    return result_memory(f"{operation} {asked}", values, asked.dtype)


async def fetch_result(exchange: StateExchange, memory: StateMemory, content: bytes) -> bool:
    """Fetch a result that other members offer; return whether one has offered these contents."""
    fetched = FetchedPieces(memory, 0, in_place=True)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ready() -> None:
        if not done.done():
            done.set_result(None)

    fetch = exchange.begin_prefetch(memory, fetched, ready, only=content)
    try:
        await done
        is_whole = len(fetched.verified) == memory.layout.piece_count
        return is_whole and fetch.content == content
    finally:
        exchange.end_prefetch(fetch.operation)


@dataclass(frozen=True, slots=True)
class ResultCopy:
    """A copy of a committed result, which is announced when it has been hashed.

    Attributes:
        memory: the copy.
        news: its announcement, without the digest.
    """

    memory: StateMemory
    news: ResultNews


class Results:
    """The results that one member offers to newcomers.

    Args:
        show: offers a state to newcomers, until ``hide``.
        hide: stops offering a state.
    """

    def __init__(
        self, show: Callable[[StateMemory], None], hide: Callable[[StateMemory], None]
    ) -> None:
        self._show = show
        self._hide = hide
        self._watchers: dict[PeerId, StateSender] = {}
        self._content = b""
        self._index = 0
        self._kept: deque[tuple[StateMemory, bytes]] = deque()
        """Each kept result with its encoded announcement, the oldest first."""
        self._kept_bytes = 0
        self._hashing_bytes = 0
        """Size of the copies that are not announced yet."""

    def watch(self, peer: PeerId, sender: StateSender) -> None:
        """Announce kept and future results to a newcomer. A second call changes nothing.

        A newcomer that does not read is ignored, and may ask again.
        """
        if peer not in self._watchers and not _is_behind(peer, sender):
            self._watchers[peer] = sender
            for _, news in self._kept:
                if _is_behind(peer, sender):
                    break
                sender.send(peer, FrameKind.RESULT, news)

    def forget(self, peers: Collection[PeerId]) -> None:
        """Stop announcing results to ``peers``. Without watchers, drop all results."""
        for peer in peers:
            self._watchers.pop(peer, None)
        if not self._watchers:
            self.clear()

    def synchronized(self, content: bytes) -> None:
        """Restart the numbers of results, because a synchronization elected ``content``."""
        self._content, self._index = content, 0

    def committed(
        self,
        operation: OperationId,
        dtype: DataType,
        result: Memory,
        contributors: tuple[PeerId, ...],
        weights: tuple[float, ...] = (),
    ) -> ResultCopy | None:
        """Count a committed result; if a newcomer watches a synchronized state, return a copy.

        The caller hashes it, and announces it then. While it has too much to hash, there is no
        copy, and a newcomer that misses it fetches the state instead.
        """
        index, self._index = self._index, self._index + 1
        self.forget([peer for peer, sender in self._watchers.items() if _is_behind(peer, sender)])
        busy = self._hashing_bytes > KEPT_BYTES_MAX
        if busy or not self._watchers or not self._content:
            return None
        values = np.ascontiguousarray(result.copy())
        memory = result_memory(str(operation), values, dtype)
        self._hashing_bytes += memory.layout.nbytes
        news = ResultNews(
            self._content, index, operation, dtype, values.size, b"", contributors, weights
        )
        return ResultCopy(memory, news)

    def announce(self, copy: ResultCopy) -> None:
        """Announce a copy that has been hashed, unless no newcomer watches any more."""
        memory = copy.memory
        self._hashing_bytes -= memory.layout.nbytes
        if not self._watchers:
            return
        news = replace(copy.news, digest=memory.piece_map.digest(may_differ=False)).pack()
        self._kept.append((memory, news))
        self._kept_bytes += memory.layout.nbytes
        self._show(memory)
        while len(self._kept) > 1 and (
            self._kept_bytes > KEPT_BYTES_MAX or len(self._kept) > KEPT_MAX
        ):
            self._drop_oldest()
        for peer, sender in self._watchers.items():
            sender.send(peer, FrameKind.RESULT, news)

    def clear(self) -> None:
        """Drop all kept results."""
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        memory, _ = self._kept.popleft()
        self._kept_bytes -= memory.layout.nbytes
        self._hide(memory)


class LateResults:
    """The results that one member keeps for late members.

    Args:
        show: offers a state to other peers, until ``hide``.
        hide: stops offering a state.
    """

    def __init__(
        self, show: Callable[[StateMemory], None], hide: Callable[[StateMemory], None]
    ) -> None:
        self._show = show
        self._hide = hide
        self._staged: dict[OperationId, StateMemory] = {}
        """Complete results of operations that are undecided."""
        self._kept: deque[tuple[StateMemory, int]] = deque()
        """Each kept result, and when to drop it; the oldest first."""
        self._bytes = 0

    def stage(self, operation: OperationId, asked: Descriptor, values: Array) -> StateMemory:
        """Take the result of an operation that is undecided; the caller hashes it."""
        self._bytes += asked.tensor_bytes
        self._make_room()
        memory = self._staged[operation] = late_memory(operation, asked, values)
        return memory

    def is_staged(self, operation: OperationId) -> bool:
        """Whether there is a result of this operation, and it is undecided."""
        return operation in self._staged

    def ended(self, operation: OperationId, now_ns: int, *, committed: bool) -> None:
        """Offer the result of a committed operation; drop that of an aborted one."""
        memory = self._staged.pop(operation, None)
        if memory is None:
            return
        if not committed:
            self._bytes -= memory.layout.nbytes
            return
        self._kept.append((memory, now_ns + LATE_KEPT_NS))
        self._show(memory)
        self._make_room()

    def tick(self, now_ns: int) -> None:
        """Drop the results that are too old."""
        while self._kept and self._kept[0][1] <= now_ns:
            self._drop_oldest()

    def clear(self) -> None:
        """Drop all results."""
        for operation in list(self._staged):
            self.ended(operation, 0, committed=False)
        while self._kept:
            self._drop_oldest()

    def _make_room(self) -> None:
        while self._kept and (self._bytes > LATE_BYTES_MAX or len(self._kept) > KEPT_MAX):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        memory, _ = self._kept.popleft()
        self._bytes -= memory.layout.nbytes
        self._hide(memory)


def _is_behind(peer: PeerId, sender: StateSender) -> bool:
    return sender.waiting_bytes(peer, FrameKind.RESULT) > UNREAD_BYTES_MAX
