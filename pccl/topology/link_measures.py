"""What members measure of their links while they use them, and what follows for a view.

State only. Measures are soft: they decide how quickly something is done, never what comes out, so
nobody checks them beyond their bounds, and a restarted master has them from the members again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from pccl.protocol.limits import BYTES_PER_S_MAX, RTT_NS_MAX
from pccl.protocol.types import LinkMeasure, MeasuredLink, PeerId

LinkMatrix = Mapping[tuple[PeerId, PeerId], LinkMeasure]
"""(who has measured, the other end) -> what."""

_CHANGE = 1.5
"""What has become so many times more or less is worth a report."""

_RTT_NOISE_NS = 100_000
"""Round trips that differ by less are the same: that much depends on who is busy."""


class LinkMeasures:
    """What is known of the links of a run; the master's."""

    def __init__(self) -> None:
        self._known: dict[tuple[PeerId, PeerId], LinkMeasure] = {}

    @property
    def matrix(self) -> LinkMatrix:
        """All of it."""
        return self._known

    def note(self, reporter: PeerId, other: PeerId, measure: LinkMeasure) -> None:
        """A peer has reported; what nobody can have measured is cut down."""
        self._known[reporter, other] = LinkMeasure(
            min(measure.rtt_ns, RTT_NS_MAX), min(measure.bytes_per_s, BYTES_PER_S_MAX)
        )

    def forget(self, gone: Collection[PeerId]) -> None:
        """These peers have no links any more."""
        self._known = {
            pair: measure for pair, measure in self._known.items() if not set(pair) & set(gone)
        }


class ToldMeasures:
    """What one peer has told of its links, so that it tells only news."""

    def __init__(self) -> None:
        self._told: dict[PeerId, LinkMeasure] = {}

    def news(self, links: Collection[MeasuredLink]) -> tuple[MeasuredLink, ...]:
        """Those that have changed much since they were told; they count as told now."""
        news = tuple(link for link in links if self._has_changed(link))
        self._told.update({link.peer: link.measure for link in news})
        return news

    def keep(self, peers: Collection[PeerId]) -> None:
        """There are links to these peers only."""
        self._told = {peer: told for peer, told in self._told.items() if peer in peers}

    def all(self) -> Iterator[MeasuredLink]:
        """Everything, for a master that knows nothing."""
        for peer, measure in self._told.items():
            yield MeasuredLink(peer, measure)

    def _has_changed(self, link: MeasuredLink) -> bool:
        told, now = self._told.get(link.peer), link.measure
        if told is None:
            return True
        differs_ns = abs(told.rtt_ns - now.rtt_ns)
        return _is_other(told.bytes_per_s, now.bytes_per_s) or (
            differs_ns > _RTT_NOISE_NS and _is_other(told.rtt_ns, now.rtt_ns)
        )


def _is_other(told: int, now: int) -> bool:
    return max(told, now) > _CHANGE * min(told, now)
