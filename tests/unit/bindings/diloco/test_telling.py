"""What listeners are told of one replica."""

from __future__ import annotations

from pccl.bindings.diloco.rounds import Average, Contribution, Members, RoundCommitted
from pccl.bindings.diloco.telling import Telling
from pccl.bindings.events import Event, TrainsAlone


def test_a_newcomer_that_adds_nothing_yet_is_company() -> None:
    heard: list[Event] = []
    telling = Telling(heard.append)

    def merge(number: int) -> list[Event]:
        heard.clear()
        committed = RoundCommitted(Contribution(number, 0, 1.0, None, 1), Average((4,), 1.0), 0.5)
        telling.merged(number, committed, 0.5, took_s=0.25, exposed_s=0.0)
        telling.deliver()
        return [event for event in heard if isinstance(event, TrainsAlone)]

    telling.met(0, Members(4, (4, 9)))
    assert merge(0) == []
    telling.met(1, Members(4, (4,)))
    assert merge(1) == [TrainsAlone(step=1)]
    assert merge(2) == []  # it was said
