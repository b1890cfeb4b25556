"""``Outlet``: the segments that one running collective sends to one peer.

Segments on a lost lane may or may not have arrived. The outlet asks the receiver, and sends only
missing segments again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pccl.collectives.bitmap import missing_in
from pccl.collectives.layout import Segment
from pccl.collectives.route import Hop, Route
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId
from pccl.runtime.collective.announcer import Announcer
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload


class Outlet:
    """The segments for one peer: which are ready, sent, or perhaps lost.

    Args:
        operation: id of the operation.
        link: link to the peer.
        route: all segments for the peer.
        payload: returns the bytes of a segment at a step.
        announcer: announces segments to a peer that pulls; None: all bytes are sent.
    """

    def __init__(
        self,
        operation: OperationId,
        link: Link,
        route: Route,
        payload: Callable[[int, Segment], Payload],
        announcer: Announcer | None = None,
    ) -> None:
        self.link = link
        self.route = route
        self.sent_bytes = 0
        """Payload bytes handed to the link, repetitions included."""
        self.raw_bytes = 0
        """Size of the same payload without quantization."""
        self._unready = set(range(route.count))
        """Numbers of the segments that cannot be sent yet."""
        self.what = 0
        """Fingerprint of the request in frames that are sent before the start; otherwise 0."""
        self.only_announces = False
        """Whether a segment that cannot be announced waits for the start of the operation."""
        self._held: list[tuple[Hop, int | None]] = []
        """These segments, and their hashes."""
        self._operation = operation
        self._payload = payload
        self._announcer = announcer
        self._announced: list[int] = []
        """Numbers of the segments that were announced; the peer may not have pulled them yet."""
        self._question = 0
        """Number of the last question to the peer."""
        self._doubtful: dict[int, int] = {}
        """Number of each segment on a lost lane, and of the first question after the loss. The
        answer to this or a later question says whether the segment arrived."""

    @property
    def ready_count(self) -> int:
        """Number of segments that were ready to send so far."""
        return self.route.count - len(self._unready)

    @property
    def answer_bytes(self) -> int:
        """Length in bytes of a bitmap of all segments."""
        return (self.route.count + 7) // 8

    def offer(self, hop: Hop, check: int | None = None) -> None:
        """Send a segment that is ready; a second call for the segment changes nothing.

        Args:
            hop: the segment, a hop of the route.
            check: hash of the payload, if it is known.
        """
        number, step, segment = hop.number, hop.step, hop.segment
        if number not in self._unready:
            return
        kind, length = FrameKind.DATA, segment.wire_length
        payload = self._payload(step, segment)
        announced = None
        if self.link.pulls and self._announcer is not None:
            announced = self._announcer.announce(payload)
        if announced is not None:
            kind, payload, check = FrameKind.ANNOUNCE, announced, None
            length = len(announced)
            self._announced.append(number)
        elif self.only_announces:
            self._held.append((hop, check))
            return
        self._unready.remove(number)
        self.sent_bytes += segment.wire_length
        self.raw_bytes += segment.length
        header = FrameHeader(kind, self._operation, step, segment.offset, length, self.what)
        self.link.send(header, payload, number, check)

    def send_held(self) -> None:
        """Send the segments that waited for the start, and from now on all others at once."""
        self.only_announces = False
        held, self._held = self._held, []
        for hop, check in held:
            self.offer(hop, check)

    def lane_lost(self, numbers: list[int]) -> None:
        """Ask which of the segments ``numbers``, which a lost lane carried, have arrived."""
        self._question += 1
        self._doubtful.update(dict.fromkeys(numbers, self._question))
        self.ask()

    def ask(self) -> None:
        """Ask about segments that may be lost; call this again for each new lane of the link."""
        if self._doubtful:
            number, what = self._question, self.what
            self.link.ask(FrameHeader(FrameKind.QUERY, self._operation, 0, number, 0, what))

    def have(self, question: int, bitmap: memoryview) -> None:
        """Process the peer's answer to ``question``, and send the lost segments again.

        Raises:
            RemoteProtocolError: the bitmap does not fit, or this side did not ask this question.
        """
        if not 0 < question <= self._question:
            reason = f"the peer answered question {question}, not one from 1 to {self._question}"
            raise RemoteProtocolError(func="lane", reason=reason)
        settled = [number for number, asked in self._doubtful.items() if asked <= question]
        if not settled:
            return
        try:
            missing = missing_in(bitmap, self.route.count)
        except ValueError as error:
            raise RemoteProtocolError(func="lane", reason=str(error)) from error
        for number in settled:
            del self._doubtful[number]
        for number in sorted(set(settled).intersection(missing)):
            # The hash is computed again. If the memory changed since, the old hash would never
            # match the bytes; the digests of the results show such a change.
            self._unready.add(number)
            self.offer(self.route.hops[number])

    def begin_anew(
        self,
        route: Route,
        here: Iterable[int],
        *,
        there: Iterable[int],
        link: Link,
    ) -> None:
        """Switch to another peer and its segments. The caller must call :meth:`ask` next.

        Args:
            route: all segments for the new peer.
            here: numbers of the ready segments; the peer may have some of them.
            there: numbers of the segments that the peer surely has.
            link: link to the new peer.
        """
        self.link.revoke(self._operation)
        self.link = link
        self.route = route
        self._announced.clear()
        self._held.clear()
        self._question += 1
        self._doubtful = dict.fromkeys(here, self._question)
        self._unready = set(range(route.count)).difference(there, self._doubtful)

    def detach(self, final: memoryview | None) -> None:
        """Send waiting segments from other memory.

        Args:
            final: the final values of the tensor; None: the payload function returns other memory
                now.
        """

        def payload_of(header: FrameHeader) -> Payload:
            if final is not None:
                return final[header.offset : header.offset + header.length]
            hop = self.route.legs[header.step][header.offset]
            return self._payload(header.step, hop.segment)

        self.link.detach(self._operation, payload_of)
        self.withdraw()

    def withdraw(self) -> None:
        """Ask which announced segments the peer has; the others are sent or announced again."""
        if self._announced:
            numbers, self._announced = self._announced, []
            self.lane_lost(numbers)

    def revoke(self) -> None:
        """Send nothing more. After this the outlet neither reads nor holds memory."""
        self.link.revoke(self._operation)
        self._payload, self._announcer = _revoked, None


def _revoked(step: int, segment: Segment) -> Payload:
    raise AssertionError("the operation has ended")
