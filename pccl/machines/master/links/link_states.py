"""The links of a run, as its peers have reported them to the master.

State only. Each end of a link reports that the link is up, or why the link is down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from pccl.protocol.link_messages import LinkPath
from pccl.protocol.types import PeerId
from pccl.topology.ring_order import Pair


@dataclass(frozen=True, slots=True)
class _Link:
    """A link as one of its ends sees it."""

    why_down: str | None
    """Why the link is down; None: it is up."""
    since_ns: int
    relay: PeerId | None = None
    """The relay that carries it, or carried it before it was lost; None: it is direct."""
    path: LinkPath = LinkPath.DIRECT
    """How the two are connected, if it is up."""


class LinkStates:
    """The state of every link, as each end has reported it."""

    def __init__(self) -> None:
        self._links: dict[PeerId, dict[PeerId, _Link]] = {}
        """Reporter -> other peer -> the link as the reporter sees it."""
        self._loads: Counter[PeerId] = Counter()
        """Relay -> how many links it carries, as the younger ends report."""

    def report(
        self,
        reporter: PeerId,
        other: PeerId,
        why_down: str | None,
        now_ns: int,
        relay: PeerId | None = None,
        path: LinkPath = LinkPath.DIRECT,
    ) -> None:
        """Record that the link of ``reporter`` to ``other`` is up, or why it is down.

        Args:
            reporter: the peer that reports its link.
            other: the peer at the other end.
            why_down: why the link is down; None: it is up.
            now_ns: current time.
            relay: the process that forwards the link, if it is up; None: it is direct.
            path: how the two are connected, if the link is up.
        """
        links = self._links.setdefault(reporter, {})
        known = links.get(other)
        changes = known is None or (known.why_down is None) != (why_down is None)
        since_ns = now_ns if changes or known is None else known.since_ns
        if why_down is not None and known is not None:
            relay = known.relay
        self._count(reporter, other, -1)
        links[other] = _Link(why_down, since_ns, relay, path)
        self._count(reporter, other, 1)

    def _count(self, reporter: PeerId, other: PeerId, change: int) -> None:
        relay = self.relay(reporter, other)
        if relay is not None and reporter > other:
            self._loads[relay] += change

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
        return link.relay if link is not None and link.why_down is None else None

    def path(self, reporter: PeerId, other: PeerId) -> LinkPath | None:
        """Return how the two are connected, as ``reporter`` knows it; None: their link is down.

        Only the peer behind a router knows that its port is mapped.
        """
        here = self._links.get(reporter, {}).get(other)
        there = self._links.get(other, {}).get(reporter)
        if here is None or here.why_down is not None:
            return None
        if here.relay is not None:
            return LinkPath.RELAYED
        was_dialled = here.path in (LinkPath.DIRECT, LinkPath.DIALLED_BACK)
        is_mapped = there is not None and (there.why_down, there.path) == (None, LinkPath.MAPPED)
        if here.path is LinkPath.RELAYED:  # but the peer names no relay
            return LinkPath.DIRECT
        return LinkPath.MAPPED if was_dialled and is_mapped else here.path

    def carried_by(self, relay: PeerId) -> int:
        """Return how many links a relay carries."""
        return self._loads[relay]

    def are_direct(self, one: PeerId, other: PeerId) -> bool:
        """Whether the two have a link that needs no relay."""
        relays = (self.relay(one, other), self.relay(other, one))
        return self.are_linked(one, other) and relays == (None, None)

    def down_since_ns(self, one: PeerId, other: PeerId) -> int:
        """Return since when one of the two has reported their link as down; 0 if neither does.

        The other end may report it as up now and then: it does not know that its data arrives
        damaged.
        """
        ends = (self._links.get(one, {}).get(other), self._links.get(other, {}).get(one))
        down = (link for link in ends if link is not None and link.why_down is not None)
        return min((link.since_ns for link in down), default=0)

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
            if link is None or link.why_down is None or link.relay is not None:
                continue  # the loss of a relayed link may be the fault of the relay
            if link.since_ns >= since_ns:
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
            for other in self._links.get(peer, {}):
                self._count(peer, other, -1)
            self._links.pop(peer, None)
        for reporter, links in self._links.items():
            for peer in gone:
                self._count(reporter, peer, -1)
                links.pop(peer, None)
