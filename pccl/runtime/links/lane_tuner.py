"""Watches one link at work and tells how many lanes this side should send on; see ``lane_count``.

A link whose lanes can't take what there is to send calls :meth:`LaneTuner.awake`; then it is looked
at every ``INTERVAL_NS`` until it has nothing left to send. A link inside one machine is left alone:
more lanes cost time there. That is judged by the round trip as well as by the addresses, since
tunnels and relays end on the own machine, too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pccl.protocol.types import NS_PER_S
from pccl.runtime.clock import Clock, Timer
from pccl.topology.lane_count import LaneCount, Sample
from pccl.transports.lane import Lane
from pccl.transports.link import Link

_log = logging.getLogger("pccl.link")

INTERVAL_NS = NS_PER_S // 20
"""Between two looks: a few in each measurement, and nothing beside the work of the link."""

NEAR_RTT_NS = NS_PER_S // 200
"""A shorter round trip between two ends on one machine is that of loopback. The processor alone
makes it longer only for moments."""

PING_PAUSE_NS = NS_PER_S
ROUND_TRIPS_KEPT = 16
ROUND_TRIPS_NEAR = 4
"""So many must be long before a link inside one machine counts as a long one."""

PINGS_MAX = 32
"""On their way; older ones are forgotten."""


class LaneTuner:
    """The number of lanes of one link, found by trying.

    Args:
        clock: time.
        link: the link.
        on_wish: called when ``wish`` has changed, and while there are fewer lanes than that.
    """

    def __init__(self, clock: Clock, link: Link, on_wish: Callable[[], None]) -> None:
        self._clock = clock
        self._link = link
        self._on_wish = on_wish
        self._count = LaneCount()
        self._timer: Timer | None = None
        self._pings: dict[int, int] = {}
        """When those went out whose answers are awaited, by number."""
        self._ping_number = 0
        self._pinged_ns: int | None = None
        self._round_trips: deque[int] = deque(maxlen=ROUND_TRIPS_KEPT)
        self._looked_ns = 0
        self._sent_bytes: dict[Lane, int] = {}
        """By lane in use, at the last look."""
        link.limit(self.wish)

    @property
    def wish(self) -> int:
        """How many lanes this side wants to send on."""
        return self._count.lanes

    def begin(self) -> None:
        """The link is about to be used."""
        lane, pinged_ns = next(iter(self._link.lanes), None), self._pinged_ns
        late = pinged_ns is None or self._clock.now_ns() - pinged_ns >= PING_PAUSE_NS
        if lane is not None and late and not self._is_short:
            self.ping(lane)
        if self._timer is None:
            self._link.on_backlog = self.awake

    def ping(self, lane: Lane) -> None:
        """Measure the round trip; best on a lane that carries nothing yet."""
        self._ping_number += 1
        self._pinged_ns = self._pings[self._ping_number] = self._clock.now_ns()
        if len(self._pings) > PINGS_MAX:
            del self._pings[next(iter(self._pings))]
        lane.ping(self._ping_number)

    def answered(self, lane: Lane, number: int) -> None:
        """The other side has answered a ping on ``lane``."""
        sent_ns = self._pings.pop(number, None)
        if sent_ns is None:
            return
        self._round_trips.append(self._clock.now_ns() - sent_ns)
        if self._is_short:
            return
        if self._is_near:
            self.ping(lane)  # it has to show that it is a long one
        elif self._timer is None:
            self._link.on_backlog = self.awake

    def awake(self) -> None:
        """The lanes can't take what there is to send."""
        self._link.on_backlog = None
        if self._timer is None and not self._is_near:
            self._take_down()
            self._arm()

    def close(self) -> None:
        """Look no more; the link may use all its lanes."""
        self._link.on_backlog = None
        self._link.limit(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def _is_near(self) -> bool:
        """Whether the link seems to be inside one machine."""
        few = len(self._round_trips) < ROUND_TRIPS_NEAR
        return self._link.near and (few or self._is_short)

    @property
    def _is_short(self) -> bool:
        """Whether the link is certainly inside one machine."""
        near = self._link.near and len(self._round_trips) > 0
        return near and min(self._round_trips) < NEAR_RTT_NS

    def _arm(self) -> None:
        self._timer = self._clock.call_at_ns(self._looked_ns + INTERVAL_NS, self._look)

    def _take_down(self) -> None:
        self._looked_ns = self._clock.now_ns()
        self._sent_bytes = {lane: lane.sent_bytes for lane in self._link.used_lanes}
        self._link.starved = False

    def _look(self) -> None:
        self._timer = None
        link, before = self._link, self._sent_bytes
        elapsed_ns = self._clock.now_ns() - self._looked_ns
        kept = [lane for lane in link.used_lanes if lane in before]
        starved = link.starved or not link.up
        busy = not starved and len(kept) == len(before)  # else something was lost with a lane
        sent_bytes = sum(lane.sent_bytes - before[lane] for lane in kept)
        self._take_down()
        if self._round_trips:
            rtt_ns = min(self._round_trips)
            sample = Sample(self._looked_ns, elapsed_ns, sent_bytes, len(kept), busy, rtt_ns)
            self._tell(sample)
        if starved and not link.backlogged:
            link.on_backlog = self.awake
        else:
            self._arm()

    def _tell(self, sample: Sample) -> None:
        link, before = self._link, self.wish
        if self._count.take(sample):
            _log.debug(
                "lanes to peer %d: %d instead of %d (%s)",
                link.peer, self.wish, before, self._count.reason,
            )  # fmt: skip
            link.limit(self.wish)
            self._sent_bytes = {lane: lane.sent_bytes for lane in link.used_lanes}
            self._on_wish()
        elif len(link.lanes) < self.wish:
            self._on_wish()
