"""``Outlet``: what one running collective sends to one peer.

What was given to a lane that is lost may or may not have arrived: the receiver is asked, and only
what it lacks of that is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pccl.collectives.bitmap import missing_in
from pccl.collectives.layout import Segment
from pccl.collectives.route import Route
from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.types import OperationId
from pccl.transports.link import Link
from pccl.transports.outgoing import Payload


class Outlet:
    """The segments for one peer: which are ready, sent, or perhaps lost.

    Args:
        operation: whose segments they are.
        link: where they go.
        route: all of them.
        payload: what a segment carries at a step.
    """

    def __init__(
        self,
        operation: OperationId,
        link: Link,
        route: Route,
        payload: Callable[[int, Segment], Payload],
    ) -> None:
        self.link = link
        self.route = route
        self.sent_bytes = 0
        """Payload bytes handed to the link, repetitions included."""
        self.raw_bytes = 0
        """What those would have been without quantization."""
        self._unready = set(range(route.count))
        """Numbers of what can't be sent yet."""
        self._operation = operation
        self._what = 0
        self._payload = payload
        self._question = 0
        """Number of the last question to the peer."""
        self._doubtful: dict[int, int] = {}
        """Segments that were given to a lane that was lost, by number, and the question that was
        asked after that: its answer, or a later one's, says whether they arrived."""

    @property
    def ready_count(self) -> int:
        """How many segments could be sent so far."""
        return self.route.count - len(self._unready)

    @property
    def answer_bytes(self) -> int:
        """Length of a bitmap of all segments."""
        return (self.route.count + 7) // 8

    def offer(self, step: int, segment: Segment, what: int = 0, check: int | None = None) -> None:
        """A segment can be sent. Told twice changes nothing.

        Args:
            step: of the schedule.
            segment: one of the route.
            what: the fingerprint that goes with what is sent ahead of the start.
            check: the hash of what it carries, if that is known.
        """
        self._what = what
        number = self.route.number(step, segment)
        if number in self._unready:
            self._unready.remove(number)
            self._transmit(step, segment, number, check)

    def lane_lost(self, numbers: list[int]) -> None:
        """A lane is gone: ask which of the segments it was given have arrived."""
        self._question += 1
        self._doubtful.update(dict.fromkeys(numbers, self._question))
        self.ask()

    def ask(self) -> None:
        """Ask (again) about what is doubtful; for every new lane, so that all have been asked."""
        if self._doubtful:
            number, what = self._question, self._what
            self.link.ask(FrameHeader(FrameKind.QUERY, self._operation, 0, number, 0, what))

    def have(self, question: int, bitmap: memoryview) -> None:
        """The peer says which segments it has; send it again what is lost.

        Raises:
            RemoteProtocolError: not a bitmap of this operation's segments, or nobody asked.
        """
        if not 0 < question <= self._question:
            reason = f"answer to question {question}; {self._question} were asked"
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
        segments = list(self.route)
        for number in sorted(set(settled).intersection(missing)):
            # Its hash is made anew: should the memory have changed since it was known, the bytes
            # would never match it, and it is the digests that have to show that.
            self._transmit(*segments[number], number, None)

    def begin_anew(
        self,
        route: Route,
        here: Iterable[int],
        *,
        there: Iterable[int],
        link: Link,
    ) -> None:
        """Go on with other segments, for another peer; ask before any is sent.

        Args:
            route: all segments from now on.
            here: numbers of those that are ready; the peer may have some.
            there: numbers of those that it surely has.
            link: to that peer.
        """
        self.link.revoke(self._operation)
        self.link = link
        self.route = route
        self._question += 1
        self._doubtful = dict.fromkeys(here, self._question)
        self._unready = set(range(route.count)).difference(there, self._doubtful)

    def detach(self, tensor: memoryview) -> None:
        """Send what waits from ``tensor``: all of it is final values, or not needed any more."""
        self.link.detach(self._operation, tensor)

    def revoke(self) -> None:
        """Send nothing more; no memory is read after this, and none is held."""
        self.link.revoke(self._operation)
        self._payload = _revoked

    def _transmit(self, step: int, segment: Segment, number: int, check: int | None) -> None:
        length = segment.wire_length
        header = FrameHeader(
            FrameKind.DATA, self._operation, step, segment.offset, length, self._what
        )
        self.sent_bytes += length
        self.raw_bytes += segment.length
        self.link.send(header, self._payload(step, segment), number, check)


def _revoked(step: int, segment: Segment) -> Payload:
    raise AssertionError("the operation has ended")
