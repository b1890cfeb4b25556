"""``Results``: what reductions have come to, shown to newcomers who replay them.

Between two synchronizations a state is often changed by nothing but the results of reductions. A
newcomer who has the state as of the last one, and each result since, in order, can do what the
members did, and has the same in the end, though everything has changed meanwhile.

Results are copied, and kept, only while somebody watches. They are numbered from each
synchronization on, so that whoever came too late for one of them can see that.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from pccl.protocol.data_type import DataType
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameKind
from pccl.protocol.types import WEIGHT_MAX, OperationId, PeerId
from pccl.runtime.collective.memory import Array, Memory
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.digests import piece_digest

KEPT_BYTES_MAX = 1 << 30
"""Results that a member keeps for watchers. The oldest are forgotten.

A watcher that misses one fetches the state instead."""

KEPT_MAX = 4096
"""How many they are at most: of small ones it is not the bytes that take memory."""

UNREAD_BYTES_MAX = 4 << 20
"""News that a watcher has not read. The member forgets the watcher."""

COUNT_MAX = 1 << 36
"""Values of one result: more is malice."""

_NEWS = struct.Struct("<32sIIIIQIBQ32sI?")
_PEER = struct.Struct("<Q")
_WEIGHED = struct.Struct("<Qd")
"""A contributor to a weighted average."""


@dataclass(frozen=True, slots=True)
class ResultNews:
    """That a reduction was committed.

    Attributes:
        content: digest of what the last synchronization before it has elected.
        index: how many were committed since then.
        operation: its id.
        dtype: of the values.
        count: how many they are.
        digest: of the values, all pieces together.
        contributors: whose values are in it.
        weights: of a weighted average those of the contributors; otherwise empty.
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
        """As bytes."""
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
        """What was packed.

        Raises:
            RemoteProtocolError: nothing was.
        """
        try:
            *front, dtype, count, digest, peers, weighted = _NEWS.unpack_from(packed)
            content, index, *ids = front
            each = _WEIGHED if weighted else _PEER
            if len(packed) != _NEWS.size + peers * each.size or count > COUNT_MAX:
                raise ValueError("its length is wrong")
            listed = list(each.iter_unpack(packed[_NEWS.size :]))
            weights = tuple(one[1] for one in listed) if weighted else ()
            if not all(0 <= weight <= WEIGHT_MAX for weight in weights):
                raise ValueError("nobody has such a weight")
            return ResultNews(
                *(content, index, OperationId(*ids), DataType(dtype), count, digest),
                tuple(PeerId(one[0]) for one in listed),
                weights,
            )
        except (struct.error, ValueError) as error:
            raise RemoteProtocolError(func="lane", reason=f"no news: {error}") from error


@dataclass(slots=True)
class Loose:
    """One tensor of a state that nobody but the library knows; see ``state_memory.Tensor``."""

    name: str
    tensor: Array
    dtype: DataType
    data_ptr: int = field(init=False)
    numel: int = field(init=False)
    allow_content_inequality: bool = False
    is_cuda: bool = False

    def __post_init__(self) -> None:
        self.data_ptr, self.numel = self.tensor.ctypes.data, self.tensor.size


def result_memory(operation: OperationId, values: Array, dtype: DataType) -> StateMemory:
    """A result as a state of one tensor."""
    return StateMemory([Loose(str(operation), values, dtype)])


def result_digest(memory: StateMemory) -> bytes:
    """Of a result, hashed here and now."""
    layout = memory.layout
    for number in range(layout.piece_count):
        memory.piece_map[number] = piece_digest(memory.view(layout.piece(number)))
    return memory.piece_map.digest(may_differ=False)


class Results:
    """The results that one member shows.

    Args:
        show: lets newcomers fetch a state, until it is hidden again.
        hide: the opposite.
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
        """With the news of each, the oldest first."""
        self._kept_bytes = 0

    def watch(self, peer: PeerId, sender: StateSender) -> None:
        """A newcomer wants to hear of results; told twice changes nothing.

        One that does not read is refused, and may ask again.
        """
        if peer not in self._watchers and not _is_behind(peer, sender):
            self._watchers[peer] = sender
            for _, news in self._kept:
                if _is_behind(peer, sender):
                    break
                sender.send(peer, FrameKind.RESULT, news)

    def forget(self, peers: Collection[PeerId]) -> None:
        """These don't watch any more."""
        for peer in peers:
            self._watchers.pop(peer, None)
        if not self._watchers:
            self.clear()

    def synchronized(self, content: bytes) -> None:
        """A synchronization has elected this; results are numbered anew."""
        self._content, self._index = content, 0

    def committed(
        self,
        operation: OperationId,
        dtype: DataType,
        result: Memory,
        contributors: tuple[PeerId, ...],
        weights: tuple[float, ...] = (),
    ) -> None:
        """A reduction was committed; its values are still where the caller wants them."""
        index, self._index = self._index, self._index + 1
        self.forget([peer for peer, sender in self._watchers.items() if _is_behind(peer, sender)])
        if not self._watchers or not self._content:
            return
        values = np.ascontiguousarray(result.copy())
        memory = result_memory(operation, values, dtype)
        digest = result_digest(memory)
        news = ResultNews(
            self._content, index, operation, dtype, values.size, digest, contributors, weights
        ).pack()
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
        """Show nothing any more."""
        while self._kept:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        memory, _ = self._kept.popleft()
        self._kept_bytes -= memory.layout.nbytes
        self._hide(memory)


def _is_behind(peer: PeerId, sender: StateSender) -> bool:
    return sender.waiting_bytes(peer, FrameKind.RESULT) > UNREAD_BYTES_MAX
