"""Links of simulated processes: they send some frames twice and corrupt some shared state."""

from __future__ import annotations

from random import Random

from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import PeerId
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload


class Liar:
    """Corrupts shared state frames that a process sends.

    Args:
        rng: chooses frames and bits.
        kind: kind of frame to corrupt.
        probability: chance that a frame is corrupted.
    """

    def __init__(self, rng: Random, kind: FrameKind, probability: float) -> None:
        self._rng = rng
        self._kind = kind
        self._probability = probability
        self.lies = 0

    def changed(self, header: FrameHeader, payload: Payload) -> Payload:
        """Return the payload to send: ``payload``, or a copy with one flipped bit."""
        lies = header.kind is self._kind and header.length > 0
        if not lies or self._rng.random() >= self._probability:
            return payload
        self.lies += 1
        bit = self._rng.randrange(8 * header.length)

        def make() -> memoryview:
            made = payload() if callable(payload) else payload
            assert not isinstance(made, list)
            wrong = bytearray(made)
            wrong[bit // 8] ^= 1 << bit % 8
            return memoryview(wrong)

        return make


class Lips:
    """The sending side of a process. ``liar`` corrupts its frames; None: no frame is corrupted."""

    def __init__(self) -> None:
        self.liar: Liar | None = None


class SimLink(Link):
    """Sends some frames twice, like a sender that lost a lane; the receiver must count them once.

    Args:
        peer: the other end.
        lips: its ``liar`` corrupts the payloads.
        rng: chooses the frames to repeat.
        probability: chance that a frame is repeated.
    """

    def __init__(self, peer: PeerId, lips: Lips, rng: Random, probability: float) -> None:
        super().__init__(peer)
        self._lips = lips
        self._rng = rng
        self._probability = probability

    def send(
        self, header: FrameHeader, payload: Payload, number: int, check: int | None = None
    ) -> None:
        """Queue a frame, perhaps corrupted, and perhaps twice."""
        if self._lips.liar is not None:
            payload = self._lips.liar.changed(header, payload)
        super().send(header, payload, number, check)
        if self._probability and self._rng.random() < self._probability:
            super().send(header, payload, number, check)
