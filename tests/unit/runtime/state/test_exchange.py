"""When a peer asks again for shared state that a lost lane may have carried."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pccl.protocol.types import OperationId, PeerId
from pccl.runtime.state.exchange import StateExchange

ONE, TWO = PeerId(1), PeerId(2)


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


def lane(peer: PeerId, number: int, *others: int) -> Any:
    """A lane of a link that has these others."""
    lanes = [SimpleNamespace(number=other) for other in others]
    return SimpleNamespace(number=number, link=SimpleNamespace(peer=peer, lanes=lanes))


def test_requests_are_repeated_when_a_lane_is_lost_and_when_it_is_replaced() -> None:
    """In between the other side may still answer on the lost lane, whose end it has not seen."""
    part = Part()
    exchange = exchange_with(part)
    exchange.lane_up(lane(ONE, 0, 0))
    assert part.news() == []
    for number in (0, 1):
        exchange.lane_lost(lane(ONE, number, 2))
    assert part.news() == [ONE, ONE]
    exchange.lane_up(lane(ONE, 3, 2, 3))
    exchange.lane_up(lane(TWO, 0, 0))
    assert part.news() == []
    exchange.lane_up(lane(ONE, 1, 1, 2, 3))
    exchange.lane_up(lane(ONE, 0, 0, 1, 2, 3))
    assert part.news() == [ONE, ONE]
    exchange.lane_up(lane(ONE, 0, 0, 1, 2, 3))
    assert part.news() == []


def test_a_lane_that_another_one_supersedes_is_replaced_at_once() -> None:
    part = Part()
    exchange = exchange_with(part)
    exchange.lane_lost(lane(ONE, 0, 0))
    exchange.lane_up(lane(ONE, 0, 0))
    assert part.news() == [ONE]


def test_lost_lanes_of_a_link_that_is_closed_are_forgotten() -> None:
    part = Part()
    exchange = exchange_with(part)
    exchange.lane_lost(lane(ONE, 0))
    exchange.lane_lost(lane(TWO, 0))
    exchange.forget_peer(ONE)
    assert part.news() == [ONE, TWO]
    for peer in (ONE, TWO):
        exchange.lane_up(lane(peer, 0, 0))
    assert part.news() == [TWO]
