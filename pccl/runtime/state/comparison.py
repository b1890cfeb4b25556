"""``StateComparison``: finds where this peer's state differs from that of another member."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.shared_state import Difference
from pccl.protocol.types import PeerId
from pccl.runtime.state.frames import StateSender
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.state.compare import content_difference, layout_difference
from pccl.state.fetch.maps import MapRequest
from pccl.state.layout import StateLayout


class StateComparison:
    """Finds where this peer's state differs from that of another member.

    Args:
        memory: memory of this peer's state; its digests are up to date.
        sender: sends the requests.
        reference: the other member.
        now_ns: the current time in nanoseconds.
        answer: called once with the first difference, or with the reason why none was found.
    """

    def __init__(
        self,
        memory: StateMemory,
        sender: StateSender,
        reference: PeerId,
        now_ns: int,
        answer: Callable[[Difference], None],
    ) -> None:
        self.reference = reference
        self._memory = memory
        self._sender = sender
        self._answer = answer
        self._request: MapRequest | None = None
        self._now_ns = now_ns

    def begin(self) -> None:
        """Ask the reference for its layout, or fail at once if the link is down."""
        if self._sender.is_up(self.reference):
            self.ask()
        else:
            self.fail("there is no link to it")

    def ask(self) -> None:
        """Send the current request, perhaps again: a lost lane may have lost it or its answer."""
        kind = FrameKind.LAYOUT_ASK if self._request is None else FrameKind.MAP_ASK
        self._sender.send(self.reference, kind)

    def fail(self, why: str) -> None:
        """Answer that the comparison was impossible, and ``why``."""
        self._answer(Difference("", None, f"peer {self.reference} could not be compared: {why}"))

    def take_layout(self, packed: bytearray) -> None:
        """Compare the layout of the reference. If it is the same, ask for the map.

        Raises:
            RemoteProtocolError: ``packed`` is no layout.
        """
        try:
            theirs = StateLayout.unpack(packed)
        except ValueError as error:
            raise RemoteProtocolError(func="lane", reason=str(error)) from error
        found = layout_difference(self._memory.layout, theirs, self.reference)
        if found is not None:
            self._answer(found)
        elif self._request is None:
            self._request = MapRequest(self._memory.layout, self._now_ns)
            self.ask()

    def take_map(self, header: FrameHeader, digests: bytearray) -> None:
        """Store a part of the reference's map. Once all parts are here, compare the contents.

        Raises:
            RemoteProtocolError: the part does not fit this layout.
        """
        if self._request is None:
            return
        theirs = self._request.take(header.offset, header.what, digests)
        if theirs is None:
            return
        found = content_difference(self._memory.piece_map, theirs)
        if found is None:
            self.fail("its contents are the same by now")
        else:
            self._answer(found)
