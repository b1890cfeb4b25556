"""``Pulls``: finds out with which peers this process can share memory, and proves it.

Each of two processes of one machine asks to pull from the other. The reader invents random bytes,
the owner stores them in its memory and says where, and the reader finds them there: so it knows
which process is at the other end of the link. If the owner chose the bytes, it could name another
process that happens to have them. After PULL_READY the owner announces its segments. If anything
fails, both go on over the connection, and say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import NO_OPERATION, FrameHeader, FrameKind
from pccl.protocol.types import PeerId
from pccl.topology.tracer import process_to_name
from pccl.transports.announcement import (
    ASK_BYTES_MAX,
    AT_BYTES,
    PROOF_BYTES,
    decode_ask,
    decode_at,
    encode_ask,
    encode_at,
)
from pccl.transports.base import LocalMemory, Shown
from pccl.transports.link import Lane
from pccl.transports.sinks import Collect, Drain, Sink

PULL_KINDS = frozenset(
    (FrameKind.PULL_ASK, FrameKind.PULL_AT, FrameKind.PULL_READY, FrameKind.PULL_FAILED)
)


class Pulls:
    """Agrees with peers of this machine on pulling segments.

    Args:
        memory: memory of this process and of others; None: pull nothing, and announce nothing.
        random_bytes: source of proofs; must be unpredictable outside simulation.
        on_failed: called with a peer that can no longer pull, to send announced segments.
        anyone: whether every process of the same user may read, where the system wants a name.
    """

    def __init__(
        self,
        memory: LocalMemory | None,
        random_bytes: Callable[[int], bytes],
        on_failed: Callable[[PeerId], None],
        *,
        anyone: bool = False,
    ) -> None:
        self._memory = memory
        self._random_bytes = random_bytes
        self._on_failed = on_failed
        self._anyone = anyone
        self._questions: dict[PeerId, tuple[Lane, bytes]] = {}
        """Lane and random bytes of the question to each link that is up; no bytes: answered."""
        self._shown: dict[PeerId, Shown] = {}
        """Answers that the peers have not verified yet."""

    def lane_up(self, lane: Lane) -> None:
        """Ask to pull from the peer if it may be on this machine, unless another lane has asked."""
        peer = lane.link.peer
        if (
            self._memory is None
            or peer in self._questions
            or not self._memory.reaches(lane.connection)
        ):
            return
        proof = self._random_bytes(PROOF_BYTES)
        self._questions[peer] = lane, proof
        self._say(lane, FrameKind.PULL_ASK, encode_ask(proof, self._memory.ancestry))

    def lane_lost(self, lane: Lane) -> None:
        """If ``lane`` has asked, its frames may be lost: ask again on another lane of the link."""
        link = lane.link
        if self._questions.get(link.peer, (None,))[0] is lane:
            del self._questions[link.peer]
            if link.up:
                self.lane_up(link.lanes[0])
        if not link.up:
            self._shown.pop(link.peer, None)

    def frame_started(self, lane: Lane, header: FrameHeader) -> Sink:
        """Return the sink for the payload of a frame of ``PULL_KINDS``.

        Raises:
            RemoteProtocolError: the payload is too long.
        """
        longest = {FrameKind.PULL_ASK: ASK_BYTES_MAX, FrameKind.PULL_AT: AT_BYTES}
        if header.length > longest.get(header.kind, 0):
            reason = f"a {header.kind.name} has {header.length} bytes"
            raise RemoteProtocolError(func="lane", reason=reason)
        if self._memory is None:
            return Drain(header.length)
        take = {
            FrameKind.PULL_ASK: self._asked,
            FrameKind.PULL_AT: self._answered,
            FrameKind.PULL_READY: self._ready,
            FrameKind.PULL_FAILED: self._failed,
        }[header.kind]
        return Collect(bytearray(header.length), partial(take, self._memory, lane))

    def _asked(self, memory: LocalMemory, lane: Lane, payload: bytearray) -> None:
        proof, ancestry = decode_ask(payload)
        if memory.reaches(lane.connection):
            reader = process_to_name(
                memory.scope, memory.ancestry, ancestry, memory.named, anyone=self._anyone
            )
            if reader is not None:
                memory.name(reader)
            shown = self._shown[lane.link.peer] = memory.show(proof)
            self._say(lane, FrameKind.PULL_AT, encode_at(*shown.place))

    def _answered(self, memory: LocalMemory, lane: Lane, payload: bytearray) -> None:
        pid, address = decode_at(payload)
        asked, proof = self._questions.get(lane.link.peer, (lane, b""))
        if not proof or asked is not lane:
            reason = "the peer answered a question for its memory that was not asked"
            raise RemoteProtocolError(func="lane", reason=reason)
        self._questions[lane.link.peer] = lane, b""  # one answer: no process tries many addresses
        if memory.prove(pid, address, proof):
            lane.link.process = pid
            self._say(lane, FrameKind.PULL_READY)

    def _ready(self, memory: LocalMemory, lane: Lane, payload: bytearray) -> None:
        lane.link.pulls = self._shown.pop(lane.link.peer, None) is not None

    def _failed(self, memory: LocalMemory, lane: Lane, payload: bytearray) -> None:
        lane.link.pulls = False
        self._on_failed(lane.link.peer)

    def _say(self, lane: Lane, kind: FrameKind, payload: bytes = b"") -> None:
        lane.say(FrameHeader(kind, NO_OPERATION, 0, 0, len(payload)), payload)
