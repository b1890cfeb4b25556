from __future__ import annotations

import pytest

from pccl.machines.history import History, InvariantViolation
from pccl.protocol.limits import HISTORY_EVENTS_MAX, Timing
from pccl.protocol.types import PeerId


class Shown:
    shown = 0

    def __str__(self) -> str:
        Shown.shown += 1
        return "an entry"


def test_it_keeps_the_last_events_only() -> None:
    history = History("peer")
    for number in range(HISTORY_EVENTS_MAX + 10):
        history.entries.append((number * 1_000_000, f"event {number}"))
    lines = str(history).splitlines()
    assert lines[0] == "history of peer (last 256 events):"
    assert len(lines) == 1 + HISTORY_EVENTS_MAX
    assert lines[1] == "      0.010000 event 10"
    assert lines[-1] == "      0.265000 event 265"


def test_text_is_made_when_somebody_asks() -> None:
    history = History("peer")
    history.entries.append((0, Shown()))
    assert Shown.shown == 0
    assert str(history).endswith("an entry")
    assert Shown.shown == 1


def test_the_owner_may_be_named_later() -> None:
    history = History("peer")
    history.owner = f"peer {PeerId(7)}"
    assert str(history) == "history of peer 7 (last 0 events):"


def test_a_violation_tells_the_story() -> None:
    history = History("master")
    history.entries.append((1_500_000_000, "something odd"))
    error = InvariantViolation("two outcomes", history)
    assert isinstance(error, AssertionError)
    assert error.what == "two outcomes"
    assert str(error) == (
        "two outcomes\nhistory of master (last 1 events):\n      1.500000 something odd"
    )
    history.entries.append((2, "later"))
    assert "later" not in str(error)


@pytest.mark.parametrize(
    ("seconds", "ns"), [(0.25, 250_000_000), (10, 10_000_000_000), (0.1, 10**8)]
)
def test_deadlines_in_nanoseconds(seconds: float, ns: int) -> None:
    assert Timing().ns(seconds) == ns
