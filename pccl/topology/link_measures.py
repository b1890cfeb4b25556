"""The latencies and speeds that members measure on their links, and which of them are reported.

State only. Measures affect how fast an operation is, never its result. So the master only bounds
them, and a restarted master receives them from the members again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pccl.protocol.limits import BYTES_PER_S_MAX, RTT_NS_MAX
from pccl.protocol.link_messages import LinkMeasure, MeasuredLink
from pccl.protocol.types import PeerId

LinkMatrix = Mapping[tuple[PeerId, PeerId], LinkMeasure]
"""(the peer that measured, the peer at the other end) -> its measure."""

_CHANGE = 1.5
"""A measure that has grown or shrunk by this factor is reported."""

_RTT_NOISE_NS = 100_000
"""Smaller differences of round trips are noise: load on either peer causes them."""


class LinkMeasures:
    """The measures of all links of a run, on the master."""

    def __init__(self) -> None:
        self._known: dict[tuple[PeerId, PeerId], LinkMeasure] = {}
        self.uplinks: dict[PeerId, int] = {}
        """What each peer has sent over all its links at once, in bytes per second."""

    @property
    def matrix(self) -> LinkMatrix:
        """All known measures."""
        return self._known

    def note(self, reporter: PeerId, other: PeerId, measure: LinkMeasure) -> bool:
        """Record a report of ``reporter``, cut to what a peer can measure; return if it is news.

        If ``other`` is the reporter itself, the speed is that of its uplink.
        """
        speed = min(measure.bytes_per_s, BYTES_PER_S_MAX)
        if other == reporter:
            is_news = self.uplinks.get(reporter) != speed
            self.uplinks[reporter] = speed
            return is_news
        cut = LinkMeasure(min(measure.rtt_ns, RTT_NS_MAX), speed)
        is_news = self._known.get((reporter, other)) != cut
        self._known[reporter, other] = cut
        return is_news

    def forget(self, gone: Collection[PeerId]) -> None:
        """Forget the measures of these peers, because they have left."""
        for peer in gone:
            self.uplinks.pop(peer, None)
        self._known = {
            pair: measure for pair, measure in self._known.items() if not set(pair) & set(gone)
        }


class ToldMeasures:
    """The measures that one peer has reported, so that it reports only changes."""

    def __init__(self) -> None:
        self._told: dict[PeerId, LinkMeasure] = {}
        self._untold: dict[PeerId, LinkMeasure] = {}
        """Newer ones that differ from these by more than noise of the round trip."""

    def news(self, links: Collection[MeasuredLink]) -> tuple[MeasuredLink, ...]:
        """Return the links whose measure has changed much, and record them as reported."""
        news = tuple(link for link in links if self._has_changed(link))
        self._told.update({link.peer: link.measure for link in news})
        now = self._untold | {link.peer: link.measure for link in links}
        self._untold = {peer: one for peer, one in now.items() if _differs(self._told[peer], one)}
        return news

    def newest(self) -> tuple[MeasuredLink, ...]:
        """Return all measures that differ from the reported ones, and record them as reported.

        That excludes noise of the round trip, which changes without traffic, too.
        """
        news = tuple(MeasuredLink(peer, measure) for peer, measure in self._untold.items())
        self._told.update(self._untold)
        self._untold.clear()
        return news

    def keep(self, peers: Collection[PeerId]) -> None:
        """Keep the measures of links to these peers only."""
        self._told = {peer: told for peer, told in self._told.items() if peer in peers}
        self._untold = {peer: known for peer, known in self._untold.items() if peer in peers}

    def all(self) -> Iterator[MeasuredLink]:
        """Yield all reported measures, for a master that has none."""
        for peer, measure in self._told.items():
            yield MeasuredLink(peer, measure)

    def _has_changed(self, link: MeasuredLink) -> bool:
        told, now = self._told.get(link.peer), link.measure
        if told is None:
            return True
        return _is_other(told.bytes_per_s, now.bytes_per_s) or (
            not _is_noise(told.rtt_ns, now.rtt_ns) and _is_other(told.rtt_ns, now.rtt_ns)
        )


def _differs(told: LinkMeasure, now: LinkMeasure) -> bool:
    return told.bytes_per_s != now.bytes_per_s or not _is_noise(told.rtt_ns, now.rtt_ns)


def _is_noise(told_ns: int, now_ns: int) -> bool:
    return abs(told_ns - now_ns) <= _RTT_NOISE_NS


def _is_other(told: int, now: int) -> bool:
    return max(told, now) > _CHANGE * min(told, now)
