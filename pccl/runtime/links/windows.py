"""``LinkWindows``: lets each link hand over what its window allows; see ``LinkWindow``."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from pccl.protocol.types import NS_PER_MS, PeerId
from pccl.runtime.clock import Clock, Timer
from pccl.topology.link_window import FIRST_BYTES, LineFacts, LinkWindow
from pccl.transports.link import Lane, Link, Links

POLL_NS = 20 * NS_PER_MS
"""Time between two looks at a link with a full window: no event tells what was acknowledged."""

_PORTION = 4
"""The part of a window that must be free: smaller portions would cost more packets."""


@dataclass(slots=True)
class _Line:
    """A link to another machine, and its window."""

    link: Link
    window: LinkWindow
    acked: dict[Lane, int] = field(default_factory=dict[Lane, int])
    """Bytes of each lane that were acknowledged at the last look."""
    idle: dict[Lane, int] = field(default_factory=dict[Lane, int])
    """Lanes on which nothing was on the way, and what each had sent by then."""
    rtt_ns: int = 0

    def facts(self) -> LineFacts:
        """Ask the kernel about all lanes that have sent something."""
        acked_bytes = outstanding_bytes = 0
        before, self.acked = self.acked, {}
        quiet, self.idle = self.idle, {}
        for lane in self.link.lanes:
            known = before.get(lane)
            if known is not None and quiet.get(lane) == lane.sent_bytes:
                self.acked[lane], self.idle[lane] = known, lane.sent_bytes
                continue
            path = lane.connection.measure()
            if path is None:
                continue
            self.acked[lane] = path.acked_bytes
            acked_bytes += path.acked_bytes - (path.acked_bytes if known is None else known)
            on_way_bytes = path.unacknowledged * path.segment_bytes + path.unsent_bytes
            outstanding_bytes += on_way_bytes
            if not on_way_bytes:
                self.idle[lane] = lane.sent_bytes
            if path.rtt_ns:
                self.rtt_ns = min(self.rtt_ns or path.rtt_ns, path.rtt_ns)
        return LineFacts(acked_bytes, outstanding_bytes, self.rtt_ns)


_IDLE = LineFacts(0, 0, 0)


class LinkWindows:
    """Keeps the windows of all links to other machines of one peer.

    Args:
        clock: gives the time, and calls back.
        links: the links.
    """

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock = clock
        self._links = links
        self._lines: dict[PeerId, _Line] = {}
        self._timer: Timer | None = None

    def close(self) -> None:
        """Look at no link any more."""
        self._lines.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def opening(self, lane: Lane) -> None:
        """Note that a link gets a lane; with its first one, begin anew: it may use another line.

        Call this before the link has the lane, and sends on it what waits.
        """
        link, connection = lane.link, lane.connection
        if link.up:
            return
        self._lines.pop(link.peer, None)
        link.unbound()
        path, is_near = connection.measure(), connection.local.host == connection.remote.host
        if is_near or path is None or not path.segment_bytes:
            return
        others = sum(one.link.up for one in self._lines.values())
        window = LinkWindow(FIRST_BYTES // (1 + others))
        self._lines[link.peer] = _Line(link, window)
        link.bind(window.nbytes, partial(self._wait, link.peer))

    def look(self) -> None:
        """Look at all links, at a tick."""
        for peer, line in list(self._lines.items()):
            if self._links.find(peer) is not line.link:
                del self._lines[peer]
            elif line.link.is_busy:
                self._look_at(line)
            else:
                self._pause(line)

    def _look_at(self, line: _Line) -> None:
        link, window = line.link, line.window
        facts = line.facts()
        window.look(facts, self._clock.now_ns(), is_busy=True)
        most = window.nbytes
        if most is None:
            link.open(None)
        elif (room := most - facts.outstanding_bytes) >= most // _PORTION:
            link.open(room)
            if not link.waits:  # it now sends what there is, not what the line takes
                self._pause(line)

    def _pause(self, line: _Line) -> None:
        """End a measurement, because nothing waits for the line."""
        line.acked.clear()
        line.window.look(_IDLE, self._clock.now_ns(), is_busy=False)

    def _wait(self, peer: PeerId) -> None:
        line = self._lines.get(peer)
        if line is None:
            return
        if not line.acked:  # the measurement begins with the first bytes
            line.window.look(line.facts(), self._clock.now_ns(), is_busy=True)
        self._arm()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._clock.call_at_ns(self._clock.now_ns() + POLL_NS, self._poll)

    def _poll(self) -> None:
        self._timer = None
        for line in list(self._lines.values()):
            if line.link.waits:
                self._look_at(line)
        if any(line.link.waits and line.link.up for line in self._lines.values()):
            self._arm()
