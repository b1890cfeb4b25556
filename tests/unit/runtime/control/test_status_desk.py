"""Who asks a master for its status waits for his turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pccl.protocol.messages import RunQuery, StatusRequest
from pccl.runtime.control.status_desk import PAUSE_NS, StatusDesk


class Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """Time that goes on when it is told to."""

    def __init__(self) -> None:
        self.ns = 0
        self._calls: list[tuple[int, Callable[..., object], Timer]] = []

    def now_ns(self) -> int:
        return self.ns

    def call_at_ns(self, when_ns: int, callback: Callable[..., object], *args: Any) -> Timer:
        timer = Timer()
        self._calls.append((when_ns, lambda: callback(*args), timer))
        return timer

    @property
    def idle(self) -> bool:
        return not any(not timer.cancelled for _, _, timer in self._calls)

    def pass_ns(self, duration_ns: int) -> None:
        self.ns += duration_ns
        due = [call for call in self._calls if call[0] <= self.ns]
        self._calls = [call for call in self._calls if call[0] > self.ns]
        for _, callback, timer in due:
            if not timer.cancelled:
                callback()


def desk() -> tuple[StatusDesk, Clock, list[int]]:
    clock, served = Clock(), list[int]()
    return StatusDesk(clock, lambda connection, _: served.append(connection)), clock, served


def test_the_first_is_served_at_once_and_the_others_one_by_one() -> None:
    made, clock, served = desk()
    for connection in (4, 2, 9):
        made.ask(connection, "here", StatusRequest())
    assert served == [4]
    assert (4 in made, 2 in made) == (False, True)
    clock.pass_ns(PAUSE_NS - 1)
    assert served == [4]
    clock.pass_ns(1)
    assert served == [4, 2]
    clock.pass_ns(PAUSE_NS)
    assert served == [4, 2, 9]
    clock.pass_ns(PAUSE_NS)
    assert clock.idle
    made.ask(5, "here", StatusRequest())
    assert served == [4, 2, 9, 5]


def test_sources_take_turns() -> None:
    """Nobody waits behind all that one of them asks."""
    made, clock, served = desk()
    for connection in range(100):
        made.ask(connection, "crowd", StatusRequest())
    made.ask(200, "standby", RunQuery(version=3))
    made.ask(201, "standby", RunQuery(version=3))
    for _ in range(5):
        clock.pass_ns(PAUSE_NS)
    assert served == [0, 1, 200, 2, 201, 3]


def test_who_has_gone_costs_no_turn() -> None:
    made, clock, served = desk()
    for connection in (1, 2, 3):
        made.ask(connection, "here", StatusRequest())
    made.forget(2)
    made.forget(7)
    clock.pass_ns(PAUSE_NS)
    assert served == [1, 3]


def test_a_closed_desk_serves_nobody() -> None:
    made, clock, served = desk()
    made.ask(1, "here", StatusRequest())
    made.ask(2, "here", StatusRequest())
    made.close()
    clock.pass_ns(10 * PAUSE_NS)
    assert served == [1]
    assert clock.idle
