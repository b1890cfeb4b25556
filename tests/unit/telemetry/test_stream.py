"""The events of one peer: the latest are kept, and every listener hears them at once."""

from __future__ import annotations

from pccl.telemetry.events import AddressUnreachable
from pccl.telemetry.stream import KEPT_MAX, EventStream, Stamped


def event(number: int) -> AddressUnreachable:
    return AddressUnreachable(reason=str(number))


def test_the_latest_events_are_kept() -> None:
    stream = EventStream()
    for number in range(KEPT_MAX + 5):
        stream.put(event(number), number)
    assert len(stream.kept) == KEPT_MAX
    assert (stream.kept[0], stream.kept[-1]) == (
        Stamped(5, event(5)),
        Stamped(KEPT_MAX + 4, event(KEPT_MAX + 4)),
    )


def test_listeners_hear_what_comes_while_they_listen() -> None:
    stream, first, second = EventStream(), list[Stamped](), list[Stamped]()
    stream.put(event(0), 0)
    end_first, end_second = stream.listen(first.append), stream.listen(second.append)
    stream.put(event(1), 1)
    end_first()
    end_first()
    stream.put(event(2), 2)
    end_second()
    stream.put(event(3), 3)
    assert [heard.at_ns for heard in first] == [1]
    assert [heard.at_ns for heard in second] == [1, 2]


def test_a_listener_that_listens_twice_hears_twice_and_ends_once() -> None:
    stream, heard = EventStream(), list[Stamped]()
    end = [stream.listen(heard.append) for _ in range(2)]
    stream.put(event(1), 1)
    assert len(heard) == 2
    end[0]()
    stream.put(event(2), 2)
    assert len(heard) == 3
    end[1]()
    stream.put(event(3), 3)
    assert len(heard) == 3


def test_a_listener_may_end_or_begin_within_an_event() -> None:
    stream, heard = EventStream(), list[str]()

    def once(stamped: Stamped) -> None:
        heard.append(f"once {stamped.at_ns}")
        end()
        stream.listen(lambda later: heard.append(f"new {later.at_ns}"))

    end = stream.listen(once)
    stream.listen(lambda stamped: heard.append(f"second {stamped.at_ns}"))
    for number in (1, 2):
        stream.put(event(number), number)
    assert heard == ["once 1", "second 1", "second 2", "new 2"]
