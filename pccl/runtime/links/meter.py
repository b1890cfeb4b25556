"""``LinkMeter``: measures the links from the traffic that they carry. It sends nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import NS_PER_MS, NS_PER_S, PeerId
from pccl.runtime.clock import Clock
from pccl.topology.segment_limit import LaneFacts
from pccl.transports.base import Connection, PathMeasure
from pccl.transports.link import Link, Links

PERIOD_NS = 2 * NS_PER_S
"""Time between two measurements, short enough to see a collective on a slow link. A measurement
costs one system call per lane."""

CARRIED_MIN = 64 << 10
"""What a link must have carried since the last look, in bytes, so that it counts as a measure."""

ROUND_TRIPS_MIN = 8
"""A link that was busy for a shorter time was not faster than TCP's slow start allowed."""


def facts_of(connection: Connection) -> LaneFacts | None:
    """Return what the kernel reports about a connection, or None if it reports nothing."""
    path = connection.measure()
    if path is None or not path.segment_bytes:
        return None
    return LaneFacts(
        path.segment_bytes,
        path.acked_bytes,
        path.arrived_bytes,
        path.unacknowledged,
        path.retransmits,
        path.ack_ago_ms * NS_PER_MS,
    )


class LinkMeter:
    """Measures the round trips and speeds of one peer's links, and the speed of its uplink.

    Args:
        clock: gives the time.
        links: the links to measure.
    """

    def __init__(self, clock: Clock, links: Links) -> None:
        self._clock = clock
        self._links = links
        self._looked_ns = clock.now_ns()
        self._speeds: dict[PeerId, int] = {}
        """Known speeds of links, in bytes per second."""
        self._before: dict[Connection, PathMeasure] = {}
        """What the lanes had measured at the last look."""
        self._uplink = 0
        """The most that all links have carried at once, in bytes per second."""

    def look(self, own: PeerId) -> tuple[MeasuredLink, ...]:
        """Return all measures, at most once per ``PERIOD_NS``; otherwise ``()``.

        Args:
            own: id of this peer. Its own measure is that of its uplink.
        """
        now_ns = self._clock.now_ns()
        period_ns = now_ns - self._looked_ns
        if period_ns < PERIOD_NS:
            return ()
        self._looked_ns = now_ns
        links = sorted(self._links.all(), key=lambda link: link.peer)
        up = {link.peer for link in links if link.up}
        self._speeds = {peer: speed for peer, speed in self._speeds.items() if peer in up}
        paths = {link.peer: _paths(link) for link in links}
        measured = [one for link in links for one in self._measured(link, paths[link.peer])]
        far = [path for link in links if not link.near for path in paths[link.peer].items()]
        if uplink := self._measured_uplink(dict(far), period_ns):
            measured.append(MeasuredLink(own, LinkMeasure(0, uplink)))
        self._before = {lane: path for of_link in paths.values() for lane, path in of_link.items()}
        return tuple(measured)

    def forget(self, peer: PeerId) -> None:
        """Forget the speed of a link that is down. Its next connection may use another path."""
        self._speeds.pop(peer, None)

    def look_at(self, link: Link) -> tuple[MeasuredLink, ...]:
        """Return the measure of one link, or ``()`` if no lane has measured its path."""
        return self._measured(link, _paths(link))

    def _measured(
        self, link: Link, lanes: Mapping[Connection, PathMeasure]
    ) -> tuple[MeasuredLink, ...]:
        paths = list(lanes.values())
        if not paths:
            return ()
        rtt_ns = min((path.rtt_ns for path in paths if path.rtt_ns), default=0)
        # Inside one machine all links share its processors and memory, so no link has a speed of
        # its own. Measured speeds would make the choice of an algorithm random.
        speed = 0 if link.near else self._speed(link, lanes)
        measure = LinkMeasure(rtt_ns, speed)
        return (MeasuredLink(link.peer, measure),)

    def _measured_uplink(self, far: Mapping[Connection, PathMeasure], period_ns: int) -> int:
        """Return the most that all links together have carried, in bytes per second.

        Most periods show less, because not all links had something to send. So the known speed
        falls slowly, in periods with traffic: to a half in six minutes.
        """
        seen = sum(self._carried(*one)[0] for one in far.items()) * NS_PER_S // period_ns
        if 8 * seen > self._uplink:
            self._uplink = max(seen, self._uplink - self._uplink // 256)
        return max((path.limit_bytes_per_s for path in far.values()), default=0) or self._uplink

    def _speed(self, link: Link, lanes: Mapping[Connection, PathMeasure]) -> int:
        """Return the speed of all lanes together, in bytes per second.

        A measure is a lower bound if the lanes had little to send: it counts only if it exceeds the
        known speed. Otherwise each look moves the known speed half-way down to a lower measure.

        With an upload limit, each lane has little to send at a time, because all links share the
        limit. So a link counts as fast as the limit, until its path turns out to be slower.

        The lanes of a link with a window take turns, and their speeds do not add up.
        """
        peer = link.peer
        if link.bytes_per_s:
            self._speeds[peer] = link.bytes_per_s
            return link.bytes_per_s
        limit = max(path.limit_bytes_per_s for path in lanes.values())
        seen, is_lower_bound = self._seen(lanes)
        known = self._speeds.get(peer, limit)
        speed = max(known, seen) if is_lower_bound else max(seen, (known + seen) // 2)
        if limit:
            speed = min(speed, limit)
        if speed:
            self._speeds[peer] = speed
        return speed

    def _seen(self, lanes: Mapping[Connection, PathMeasure]) -> tuple[int, bool]:
        """Return the speed of all lanes since the last look, and whether they may be faster.

        The kernel's rate of a lane is that of its last packets, when other lanes may have been
        idle. So what all lanes have carried counts, and the time in which they were busy.
        """
        paths = lanes.values()
        if not any(path.busy_ns for path in paths):  # not Linux
            slow_senders = any(path.is_lower_bound for path in paths)
            return sum(path.bytes_per_s for path in paths), slow_senders
        carried = [self._carried(*lane) for lane in lanes.items()]
        nbytes, busy_ns = sum(each for each, _ in carried), max(each for _, each in carried)
        if nbytes < CARRIED_MIN or not busy_ns:
            return 0, True
        rtt_ns = min((path.rtt_ns for path in paths if path.rtt_ns), default=0)
        return nbytes * NS_PER_S // busy_ns, busy_ns < ROUND_TRIPS_MIN * rtt_ns

    def _carried(self, lane: Connection, path: PathMeasure) -> tuple[int, int]:
        """Return how many bytes a lane has carried since the last look, and its busy time."""
        before = self._before.get(lane)
        if before is None:
            return path.acked_bytes, path.busy_ns
        return path.acked_bytes - before.acked_bytes, path.busy_ns - before.busy_ns


def _paths(link: Link) -> dict[Connection, PathMeasure]:
    """Return what the lanes of a link have measured of their paths."""
    measured = ((lane.connection, lane.connection.measure()) for lane in link.lanes)
    return {connection: path for connection, path in measured if path is not None}
