"""Maps of other members' shared states: asked for, and compared with the own one."""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.messages import Difference
from pccl.protocol.shared_state import DIGEST_BYTES
from pccl.protocol.types import PeerId
from pccl.runtime.state_memory import StateMemory
from pccl.runtime.state_post import StatePost
from pccl.state.compare import content_difference, layout_difference
from pccl.state.digests import PieceMap
from pccl.state.layout import Layout


class MapRequest:
    """A map that is asked of one peer, as far as it has come.

    Args:
        layout: of the state.
        post: where questions go.
        peer: whose map it is.
        now_ns: the present.
    """

    def __init__(self, layout: Layout, post: StatePost, peer: PeerId, now_ns: int) -> None:
        self.moved_ns = now_ns
        """When something has come last."""
        self._layout = layout
        self._post = post
        self._peer = peer
        self._digests = bytearray(layout.piece_count * DIGEST_BYTES)
        self._missing = len(self._digests)
        self._here: dict[int, None] = {}
        self.ask()

    def ask(self) -> None:
        """Ask for all of it, again perhaps."""
        self._post.send(self._peer, FrameKind.MAP_ASK)

    def take(self, header: FrameHeader, digests: bytearray, now_ns: int) -> PieceMap | None:
        """Some of it has come; returns the whole once it is complete.

        Raises:
            RemoteProtocolError: it does not belong there.
        """
        start = header.offset * DIGEST_BYTES
        whole = header.what == self._layout.piece_count
        if not whole or len(digests) % DIGEST_BYTES or start + len(digests) > len(self._digests):
            raise RemoteProtocolError(func="lane", reason="a map of another state")
        self.moved_ns = now_ns
        if header.offset not in self._here:
            self._here[header.offset] = None
            self._digests[start : start + len(digests)] = digests
            self._missing -= len(digests)
        return PieceMap(self._layout, self._digests) if self._missing <= 0 else None


class StateComparison:
    """Finds out how the own state differs from that of another member.

    Args:
        memory: the own one.
        post: where questions go.
        reference: the other member.
        now_ns: the present.
        answer: called once with what was found.
    """

    def __init__(
        self,
        memory: StateMemory,
        post: StatePost,
        reference: PeerId,
        now_ns: int,
        answer: Callable[[Difference], None],
    ) -> None:
        self.reference = reference
        self._memory = memory
        self._post = post
        self._answer = answer
        self._request: MapRequest | None = None
        self._now_ns = now_ns
        if post.is_up(reference):
            self.ask()
        else:
            self.fail("there is no link to it")

    def ask(self) -> None:
        """Ask, again perhaps: a question or its answer may be lost."""
        if self._request is not None:
            self._request.ask()
        else:
            self._post.send(self.reference, FrameKind.LAYOUT_ASK)

    def fail(self, why: str) -> None:
        """It can't be found out."""
        self._answer(Difference("", None, f"peer {self.reference} could not be compared: {why}"))

    def take_layout(self, packed: bytearray) -> None:
        """The other one's layout is here.

        Raises:
            RemoteProtocolError: it is none.
        """
        try:
            theirs = Layout.unpack(packed)
        except ValueError as error:
            raise RemoteProtocolError(func="lane", reason=str(error)) from error
        found = layout_difference(self._memory.layout, theirs)
        if found is not None:
            self._answer(found)
        elif self._request is None:
            layout = self._memory.layout
            self._request = MapRequest(layout, self._post, self.reference, self._now_ns)

    def take_map(self, header: FrameHeader, digests: bytearray) -> None:
        """Some of the other one's map is here.

        Raises:
            RemoteProtocolError: it does not belong there.
        """
        if self._request is None:
            return
        theirs = self._request.take(header, digests, self._now_ns)
        if theirs is None:
            return
        found = content_difference(self._memory.piece_map, theirs)
        if found is None:
            self.fail("its contents are the same by now")
        else:
            self._answer(found)
