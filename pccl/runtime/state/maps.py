"""Maps of other members' shared states: asked for, and compared with the own one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pccl.protocol.errors import RemoteProtocolError
from pccl.protocol.frame import FrameHeader, FrameKind
from pccl.protocol.shared_state import DIGEST_BYTES, Difference
from pccl.protocol.types import PeerId
from pccl.runtime.state.memory.state_memory import StateMemory
from pccl.runtime.state.post import StatePost
from pccl.state.compare import content_difference, layout_difference
from pccl.state.digests import PieceMap
from pccl.state.layout import StateLayout


class MapRequest:
    """A map that is asked of one peer, as far as it has come.

    It stays open if nothing comes for a while: others are asked then, and what is on its way all
    the same counts when it is here.

    Args:
        layout: of the state.
        post: where questions go.
        peer: whose map it is.
        now_ns: the present.
    """

    def __init__(self, layout: StateLayout, post: StatePost, peer: PeerId, now_ns: int) -> None:
        self.is_overdue = False
        """Whether nothing has come for long."""
        self._moved_ns = self._asked_ns = now_ns
        self._has_begun = False
        """Whether something has come since it was asked for."""
        self._layout = layout
        self._post = post
        self._peer = peer
        self._digests = bytearray(layout.piece_count * DIGEST_BYTES)
        self._missing = len(self._digests)
        self._here: dict[int, None] = {}
        self.ask(now_ns)

    def ask(self, now_ns: int) -> None:
        """Ask for all of it, again perhaps."""
        self._asked_ns = now_ns
        self._has_begun = False
        self._post.send(self._peer, FrameKind.MAP_ASK)

    def progressed(self, now_ns: int) -> None:
        """Bytes of it have come, perhaps of a frame that is not complete."""
        self._moved_ns = now_ns
        self._has_begun = True
        self.is_overdue = False

    def look(self, now_ns: int, stall_ns: int) -> None:
        """Time has passed. A question to which nobody said anything is asked again."""
        self.is_overdue = now_ns - self._moved_ns >= stall_ns
        if self.is_overdue and not self._has_begun and now_ns - self._asked_ns >= stall_ns:
            self.ask(now_ns)

    def take(self, header: FrameHeader, digests: bytearray) -> PieceMap | None:
        """A frame of it is here; returns the whole once it is complete.

        Raises:
            RemoteProtocolError: it does not belong there.
        """
        start = header.offset * DIGEST_BYTES
        whole = header.what == self._layout.piece_count
        if not whole or len(digests) % DIGEST_BYTES or start + len(digests) > len(self._digests):
            raise RemoteProtocolError(func="lane", reason="a map of another state")
        if header.offset not in self._here:
            self._here[header.offset] = None
            self._digests[start : start + len(digests)] = digests
            self._missing -= len(digests)
        return PieceMap(self._layout, self._digests) if self._missing <= 0 else None


class MapMeter:
    """Counts bytes of maps, as a sign of progress: what comes a second time is none.

    Args:
        layout: of the state.
    """

    def __init__(self, layout: StateLayout) -> None:
        self._whole = layout.piece_count * DIGEST_BYTES
        self._before = 0
        self._furthest: Counter[PeerId] = Counter()
        """Of each source's map, how far it has ever come."""

    @property
    def bytes(self) -> int:
        """All together."""
        return self._before + self._furthest.total()

    def begin(self) -> None:
        """From now on maps are of something else."""
        self._before = self.bytes
        self._furthest.clear()

    def progressed(self, source: PeerId, header: FrameHeader, received: int) -> None:
        """So many bytes of a frame are here."""
        here = min(header.offset * DIGEST_BYTES + received, self._whole)
        self._furthest[source] = max(self._furthest[source], here)


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
            self._request.ask(self._now_ns)
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
            theirs = StateLayout.unpack(packed)
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
        theirs = self._request.take(header, digests)
        if theirs is None:
            return
        found = content_difference(self._memory.piece_map, theirs)
        if found is None:
            self.fail("its contents are the same by now")
        else:
            self._answer(found)
