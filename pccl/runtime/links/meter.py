"""``LinkMeter``: measures the links from the traffic that they carry. It sends nothing itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import NS_PER_MS, NS_PER_S, PeerId
from pccl.runtime.clock import Clock
from pccl.topology.cost_model import NEAR_RTT_S
from pccl.topology.segment_limit import LaneFacts
from pccl.transports.base import Connection, PathMeasure
from pccl.transports.link import Link, Links

PERIOD_NS = 2 * NS_PER_S
"""Time between two measurements, short enough to see a collective on a slow link. A measurement
costs one system call per lane."""

CARRIED_MIN = 64 << 10
"""What a link must have carried, in bytes, so that it counts as a measure."""

ROUND_TRIPS_MIN = 8
"""A link that was busy for a shorter time was not faster than TCP's slow start allowed."""

KEPT_SHARE = 0.75
"""By how much the weight of earlier periods falls with each new one."""


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


@dataclass(slots=True)
class _Carried:
    """What a link has carried lately; older bytes and times count less.

    A quotient of sums is steadier than a mean of quotients: a short period counts little.
    """

    nbytes: float = 0.0
    busy_ns: float = 0.0

    @property
    def bytes_per_s(self) -> int:
        return int(self.nbytes * NS_PER_S / self.busy_ns) if self.busy_ns else 0

    def add(self, nbytes: int, busy_ns: int, rtt_ns: int) -> None:
        """Count a period.

        If it was short, TCP's slow start has limited it. Then it counts only if it was fast.
        """
        is_short = busy_ns < ROUND_TRIPS_MIN * rtt_ns
        if is_short and nbytes * NS_PER_S <= self.bytes_per_s * busy_ns:
            return
        self.nbytes = KEPT_SHARE * self.nbytes + nbytes
        self.busy_ns = KEPT_SHARE * self.busy_ns + busy_ns


@dataclass(frozen=True, slots=True)
class _Period:
    """What a link has carried since the last look, and when; a busy time of 0 is unknown."""

    nbytes: int
    busy_ns: int
    ended_ago_ns: int
    """How long ago the other system last acknowledged something."""


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
        self._before: dict[Connection, PathMeasure] = {}
        """What the lanes had measured at the last look that counted them."""
        self._carried: dict[PeerId, _Carried] = {}
        self._rates: dict[PeerId, int] = {}
        """Speeds of links whose connections do not know how long they were busy."""
        self._uplink = 0
        """The most that all links have carried at once, in bytes per second."""

    def look(self, own: PeerId) -> tuple[MeasuredLink, ...]:
        """Return all measures, at most once per ``PERIOD_NS``; otherwise ``()``.

        Args:
            own: id of this peer. Its own measure is that of its uplink.
        """
        now_ns = self._clock.now_ns()
        if now_ns - self._looked_ns < PERIOD_NS:
            return ()
        elapsed_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        links = sorted(self._links.all(), key=lambda link: link.peer)
        for peer in {*self._carried, *self._rates} - {link.peer for link in links if link.up}:
            self.forget(peer)
        paths = {link: _paths(link) for link in links}
        far = {link: lanes for link, lanes in paths.items() if lanes and not link.near}
        periods = {link: self._period(lanes) for link, lanes in far.items()}
        begun = {link for link in far if _has_just_begun(far[link].values(), periods[link])}
        busy = {
            link: each
            for link, each in periods.items()
            if each.nbytes >= CARRIED_MIN and link not in begun
        }
        for link, period in busy.items():
            self._count(link.peer, period, _rtt_ns(far[link].values()))
        measured = [one for link, lanes in paths.items() for one in self._measured(link, lanes)]
        across = {link: each for link, each in busy.items() if _is_across(far[link].values())}
        if uplink := self._measured_uplink(across or busy, elapsed_ns, far.values()):
            measured.append(MeasuredLink(own, LinkMeasure(0, uplink)))
        earlier, self._before = self._before, {}
        for link, lanes in far.items():
            known = earlier if link in begun else lanes
            self._before |= {lane: known[lane] for lane in lanes if lane in known}
        return tuple(measured)

    def forget(self, peer: PeerId) -> None:
        """Forget the speed of a link that is down. Its next connection may use another path."""
        self._carried.pop(peer, None)
        self._rates.pop(peer, None)

    def look_at(self, link: Link) -> tuple[MeasuredLink, ...]:
        """Return the measure of one link, or ``()`` if no lane has measured its path."""
        return self._measured(link, _paths(link))

    def _measured(
        self, link: Link, lanes: Mapping[Connection, PathMeasure]
    ) -> tuple[MeasuredLink, ...]:
        if not lanes:
            return ()
        # Inside one machine all links share its processors and memory, so no link has a speed of
        # its own. Measured speeds would make the choice of an algorithm random.
        speed = 0 if link.near else self._speed(link.peer, lanes.values())
        return (MeasuredLink(link.peer, LinkMeasure(_rtt_ns(lanes.values()), speed)),)

    def _measured_uplink(
        self,
        busy: Mapping[Link, _Period],
        elapsed_ns: int,
        far: Collection[Mapping[Connection, PathMeasure]],
    ) -> int:
        """Return the most that ``busy`` links have carried at once, in bytes per second.

        In most periods only some links are busy. So the known speed falls slowly, in periods with
        traffic: to a half in six minutes. An upload limit counts instead until the line turns out
        to be slower.
        """
        if busy:
            if all(period.busy_ns for period in busy.values()):
                nbytes = sum(period.nbytes for period in busy.values())
                seen = nbytes * NS_PER_S // _any_busy_ns(busy.values(), elapsed_ns)
            else:
                seen = sum(self._speed(link.peer, ()) for link in busy)
            self._uplink = max(seen, self._uplink - self._uplink // 256)
        limits = (path.limit_bytes_per_s for lanes in far for path in lanes.values())
        limit = max(limits, default=0)
        return min(limit, self._uplink) if limit and self._uplink else limit or self._uplink

    def _speed(self, peer: PeerId, paths: Collection[PathMeasure]) -> int:
        """Return the speed of a link in bytes per second; 0: unknown.

        Connections that do not know how long they were busy have rates of their own: a lower bound
        counts if it exceeds the known speed; others move the known speed half-way down.

        With an upload limit, each lane has little to send at a time, because all links share the
        limit. So a link counts as fast as the limit, until its path turns out to be slower.
        """
        limit = max((path.limit_bytes_per_s for path in paths), default=0)
        if peer in self._carried:
            speed = self._carried[peer].bytes_per_s
        elif any(path.busy_ns for path in paths):
            return limit  # it has carried too little
        else:
            seen = sum(path.bytes_per_s for path in paths)
            known = self._rates.get(peer, limit)
            is_lower_bound = not paths or any(path.is_lower_bound for path in paths)
            speed = max(known, seen) if is_lower_bound else max(seen, (known + seen) // 2)
            if speed:
                self._rates[peer] = speed
        return min(speed, limit) if limit else speed

    def _period(self, lanes: Mapping[Connection, PathMeasure]) -> _Period:
        """Return what all lanes have carried since the last look, and the time of the busiest.

        The kernel's rate of a lane is that of its last packets, when other lanes may have been
        idle.
        """
        news = [self._since(*lane) for lane in lanes.items()]
        ended_ago_ms = min(path.ack_ago_ms for path in lanes.values())
        nbytes, busy_ns = sum(each for each, _ in news), max(each for _, each in news)
        return _Period(nbytes, busy_ns, ended_ago_ms * NS_PER_MS)

    def _count(self, peer: PeerId, period: _Period, rtt_ns: int) -> None:
        if period.busy_ns:
            carried = self._carried.setdefault(peer, _Carried())
            carried.add(period.nbytes, period.busy_ns, rtt_ns)

    def _since(self, lane: Connection, path: PathMeasure) -> tuple[int, int]:
        """Return how many bytes a lane has carried since the last look, and its busy time."""
        before = self._before.get(lane)
        if before is None:
            return path.acked_bytes, path.busy_ns
        return path.acked_bytes - before.acked_bytes, path.busy_ns - before.busy_ns


def _has_just_begun(lanes: Collection[PathMeasure], period: _Period) -> bool:
    """Whether a link is busy, and was for a few round trips only, or has carried little.

    Of its bytes many are still to be acknowledged, and would count as fast in the next period. A
    slow link needs several periods to carry enough.
    """
    is_short = period.busy_ns < ROUND_TRIPS_MIN * _rtt_ns(lanes)
    is_busy = any(path.unacknowledged for path in lanes)
    return is_busy and (is_short or period.nbytes < CARRIED_MIN)


def _is_across(lanes: Collection[PathMeasure]) -> bool:
    """Whether a link leads out of its building, over the line that all such links share."""
    return _rtt_ns(lanes) >= NEAR_RTT_S * NS_PER_S


def _any_busy_ns(periods: Collection[_Period], elapsed_ns: int) -> int:
    """Return for how long at least one link was busy, if each was busy without a pause."""
    times = (
        (ended_ns, ended_ns + period.busy_ns)
        for period in periods
        for ended_ns in [max(0, min(period.ended_ago_ns, elapsed_ns - period.busy_ns))]
    )
    covered_ns = until_ns = 0
    for ended_ns, began_ns in sorted(times):  # from the last one back
        covered_ns += max(0, began_ns - max(ended_ns, until_ns))
        until_ns = max(until_ns, began_ns)
    return covered_ns


def _rtt_ns(paths: Collection[PathMeasure]) -> int:
    return min((path.rtt_ns for path in paths if path.rtt_ns), default=0)


def _paths(link: Link) -> dict[Connection, PathMeasure]:
    """Return what the lanes of a link have measured of their paths."""
    measured = ((lane.connection, lane.connection.measure()) for lane in link.lanes)
    return {connection: path for connection, path in measured if path is not None}
