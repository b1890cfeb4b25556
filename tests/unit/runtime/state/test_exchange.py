"""When a peer asks again for shared state that a lost lane may have carried."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.exchange import StateExchange
from pccl.transports.link import Link

ONE, TWO = PeerId(1), PeerId(2)

_END = SimpleNamespace(host="10.0.0.1")
HERE = SimpleNamespace(local=_END, remote=_END)
"""A connection inside one machine."""


@dataclass
class Part:
    """A download, of which only this is known: of whom it has asked again."""

    asked: list[PeerId] = field(default_factory=list[PeerId])

    def lane_lost(self, peer: PeerId) -> None:
        self.asked.append(peer)

    def news(self) -> list[PeerId]:
        asked, self.asked = self.asked, []
        return asked


def exchange_with(part: Part) -> StateExchange:
    unused: Any = None
    exchange = StateExchange(0, unused, lambda: 0, 1, lambda news: None)
    download: Any = part
    exchange.sessions[OperationId(1, 0, 1, 0, 0)] = download
    return exchange


class Lanes:
    """The lanes of links, which come and go."""

    def __init__(self, exchange: StateExchange) -> None:
        self._exchange = exchange
        self.links = {peer: Link(peer) for peer in (ONE, TWO)}

    def up(self, peer: PeerId, number: int) -> Any:
        link = self.links[peer]
        new: Any = SimpleNamespace(number=number, link=link, pump=lambda: None, connection=HERE)
        old = link.lane(number)
        link.add(new)
        if old is not None:
            self.lose(old)
        self._exchange.lane_up(new)
        return new

    def lose(self, lane: Any) -> None:
        assert lane.link.remove(lane)
        self._exchange.lane_lost(lane)


def test_requests_are_repeated_when_a_lane_is_lost_and_when_it_is_replaced() -> None:
    """In between the other side may still answer on the lost lane, whose end it has not seen."""
    part = Part()
    lanes = Lanes(exchange_with(part))
    all_of_it = [lanes.up(ONE, number) for number in (0, 1, 2)]
    assert part.news() == []
    for lane in all_of_it[:2]:
        lanes.lose(lane)
    assert part.news() == [ONE, ONE]
    lanes.up(ONE, 3)
    lanes.up(TWO, 0)
    assert part.news() == []
    lanes.up(ONE, 1)
    last = lanes.up(ONE, 0)
    assert part.news() == [ONE, ONE]
    lanes.lose(last)
    lanes.up(ONE, 0)
    assert part.news() == [ONE, ONE]


def test_a_lane_that_another_one_supersedes_is_replaced_at_once() -> None:
    part = Part()
    lanes = Lanes(exchange_with(part))
    lanes.up(ONE, 0)
    lanes.up(ONE, 0)
    assert part.news() == [ONE]


def test_a_lane_that_failed_in_its_handshake_is_lost_too() -> None:
    """The other side may have it, and answer on it, until the next one comes up."""
    part = Part()
    exchange = exchange_with(part)
    lanes = Lanes(exchange)
    lanes.up(ONE, 1)
    for number in (0, 1):
        exchange.lane_failed(lanes.links[ONE], number)
    assert part.news() == [ONE, ONE]
    lanes.up(ONE, 0)
    assert part.news() == [ONE]
    lanes.up(ONE, 2)
    assert part.news() == []
