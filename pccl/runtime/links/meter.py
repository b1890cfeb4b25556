"""``LinkMeter``: reads off the links in use what they can do. It sends nothing for that."""

from __future__ import annotations

from pccl.protocol.types import NS_PER_S, LinkMeasure, MeasuredLink, PeerId
from pccl.runtime.clock import Clock
from pccl.transports.base import PathMeasure
from pccl.transports.link import Link, Links

PERIOD_NS = 2 * NS_PER_S
"""Between two looks: a collective on a slow line is seen, and a look costs one system call a lane.
"""


class LinkMeter:
    """Measures of one peer's links.

    Args:
        clock: time.
        links: the links.
    """

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock = clock
        self._links = links
        self._looked_ns = clock.now_ns()
        self._speeds: dict[PeerId, int] = {}
        """In bytes per second, of the links that have shown any."""

    def look(self) -> tuple[MeasuredLink, ...]:
        """What the links can do, if it is time to look again; otherwise nothing."""
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns < PERIOD_NS:
            return ()
        self._looked_ns = now_ns
        links = sorted(self._links.all(), key=lambda link: link.peer)
        up = {link.peer for link in links if link.up}
        self._speeds = {peer: speed for peer, speed in self._speeds.items() if peer in up}
        return tuple(measured for link in links for measured in self.look_at(link))

    def forget(self, peer: PeerId) -> None:
        """The link is down: what comes up again may be another one."""
        self._speeds.pop(peer, None)

    def look_at(self, link: Link) -> tuple[MeasuredLink, ...]:
        """What one link can do; nothing if nobody knows."""
        paths = [path for lane in link.lanes if (path := lane.connection.measure()) is not None]
        if not paths:
            return ()
        rtt_ns = min((path.rtt_ns for path in paths if path.rtt_ns), default=0)
        # Inside one machine all links share its processors and its memory: none has a speed of its
        # own, and what they seem to have would decide by chance.
        speed = 0 if link.near else self._speed(link.peer, paths)
        measure = LinkMeasure(rtt_ns, speed)
        return (MeasuredLink(link.peer, measure),)

    def _speed(self, peer: PeerId, paths: list[PathMeasure]) -> int:
        """Of all lanes together.

        Nobody sends all the time: what was seen when a lane had little to send counts only if it is
        more than is known; a fall, half of it at each look.
        """
        seen = sum(path.bytes_per_s for path in paths)
        known = self._speeds.get(peer, 0)
        if any(path.is_lower_bound for path in paths):
            speed = max(known, seen)
        else:
            speed = max(seen, (known + seen) // 2)
        if speed:
            self._speeds[peer] = speed
        return speed
