"""Events that wait for their listeners."""

from __future__ import annotations

import pytest

from pccl.bindings.event_queue import EventQueue
from pccl.bindings.events import Event, MembersChanged, TrainsAlone


def test_members_are_compared_with_those_before() -> None:
    heard: list[Event] = []
    events = EventQueue(heard.append)
    assert events.met(0, 4, [9, 4])
    assert events.met(3, 4, [4, 7])
    assert not events.met(5, 4, [7, 4])  # in another order
    assert events.members == (4, 7)
    events.deliver()
    assert heard == [
        MembersChanged(step=0, peer_id=4, members=(4, 9), joined=(4, 9), lost=()),
        MembersChanged(step=3, peer_id=4, members=(4, 7), joined=(7,), lost=(9,)),
    ]


def test_what_an_interruption_leaves_is_delivered_the_next_time() -> None:
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise KeyboardInterrupt

    events = EventQueue(listen)
    first, second = TrainsAlone(step=1), TrainsAlone(step=2)
    events.put(first)
    events.put(second)
    assert heard == []
    with pytest.raises(KeyboardInterrupt):
        events.deliver()
    events.deliver()
    assert heard == [first, second]
