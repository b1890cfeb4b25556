"""The links of a run, as its peers have reported them to the master.

State only. Each end of a link reports that the link is up, or why the link is down.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from pccl.protocol.types import PeerId
from pccl.topology.ring_order import Pair


@dataclass(frozen=True, slots=True)
class _Link:
    """A link as one of its ends sees it."""

    why_down: str | None
    """Why the link is down; None: it is up."""
    since_ns: int
    relay: PeerId | None = None
    """The relay that carries it; None: it is down, or direct."""


class LinkStates:
    """The state of every link, as each end has reported it."""

    def __init__(self) -> None:
        self._links: dict[PeerId, dict[PeerId, _Link]] = {}
        """Reporter -> other peer -> the link as the reporter sees it."""

    def report(
        self,
        reporter: PeerId,
        other: PeerId,
        why_down: str | None,
        now_ns: int,
        relay: PeerId | None = None,
    ) -> None:
        """Record that ``reporter``'s link to ``other`` is up (None), or why this link is down.

        ``relay``: the relay that carries the link, if it is up; None: it is direct.
        """
        links = self._links.setdefault(reporter, {})
        known = links.get(other)
        changes = known is None or (known.why_down is None) != (why_down is None)
        since_ns = now_ns if changes or known is None else known.since_ns
        links[other] = _Link(why_down, since_ns, relay if why_down is None else None)

    def why_down(self, reporter: PeerId, other: PeerId) -> str | None:
        """Return why ``reporter``'s link to ``other`` is down; None: it is up or not reported."""
        link = self._links.get(reporter, {}).get(other)
        return None if link is None else link.why_down

    def are_linked(self, one: PeerId, other: PeerId) -> bool:
        """Whether at least one of the two reports that their link is up."""
        ends = (self._links.get(one, {}).get(other), self._links.get(other, {}).get(one))
        return any(link is not None and link.why_down is None for link in ends)

    def relay(self, reporter: PeerId, other: PeerId) -> PeerId | None:
        """Return what carries the link as ``reporter`` knows it; None: it is direct, or down."""
        link = self._links.get(reporter, {}).get(other)
        return None if link is None else link.relay

    def relayed(self) -> Iterator[tuple[Pair, PeerId]]:
        """Yield each pair whose link is relayed, as its end with the higher id says, and how."""
        for reporter, links in self._links.items():
            for other, link in links.items():
                if link.relay is not None and reporter > other:
                    yield Pair((reporter, other)), link.relay

    def carried_by(self, relay: PeerId) -> int:
        """Return how many links a relay carries."""
        return sum(by == relay for _, by in self.relayed())

    def linked(self, one: PeerId, others: Iterable[PeerId]) -> set[PeerId]:
        """Return the peers among ``others`` to which ``one`` has a link."""
        return {other for other in others if self.are_linked(one, other)}

    def have_given_up(self, one: PeerId, other: PeerId) -> bool:
        """Whether both peers report that their link is down."""
        return None not in (self.why_down(one, other), self.why_down(other, one))

    def trouble(self, peer: PeerId, reporters: Iterable[PeerId], since_ns: int) -> str | None:
        """Return why a reporter lost its link to ``peer`` at ``since_ns`` or later, else None."""
        for reporter in reporters:
            link = self._links.get(reporter, {}).get(peer)
            if link is not None and link.why_down is not None and link.since_ns >= since_ns:
                return f"its connections to the master and peer {reporter} broke ({link.why_down})"
        return None

    def broken(
        self, peers: Iterable[PeerId], until_ns: int | None = None
    ) -> Iterator[tuple[Pair, str]]:
        """Yield each pair of peers of which one end reports that their link is down, and why.

        A pair comes twice if both of its peers report that their link is down.

        Args:
            peers: the peers whose links to each other are examined.
            until_ns: only links that have been down at least since this time; None: all.
        """
        among = dict.fromkeys(peers)
        for reporter in among:
            for other, link in self._links.get(reporter, {}).items():
                is_old = until_ns is None or link.since_ns <= until_ns
                if link.why_down is not None and is_old and other in among:
                    yield Pair((reporter, other)), link.why_down

    def shift(self, gap_ns: int, now_ns: int) -> None:
        """Shift all times by ``gap_ns``, because this process slept that long."""
        for links in self._links.values():
            for other, link in links.items():
                links[other] = replace(link, since_ns=min(link.since_ns + gap_ns, now_ns))

    def remove(self, gone: Collection[PeerId]) -> None:
        """Forget peers that were removed from the run."""
        for peer in gone:
            self._links.pop(peer, None)
        for links in self._links.values():
            for peer in gone:
                links.pop(peer, None)
