"""The hash of a run: of what happened, and not of how the code calls it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pytest

from pccl.stress.sim.trace import Trace, values_of


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Before:
    peer: int
    why: str | None = None
    inner: object = ()


@dataclass(frozen=True, slots=True)
class Renamed:
    who: int
    reason: str | None = None
    parts: object = ()


def digest(*whats: object) -> str:
    trace = Trace()
    for now_ns, what in enumerate(whats):
        trace.note(now_ns, "p1", what)
    return trace.digest


def test_names_do_not_count() -> None:
    before = Before(1, "gone", (Before(2), Colour.RED, {3: b"x"}, ValueError("no")))
    renamed = Renamed(1, "gone", [Renamed(2), "red", {3: b"x"}, "no"])
    assert values_of(before) == [1, "gone", [[2, None, []], "red", [[3, b"x"]], "no"]]
    assert digest(before) == digest(renamed)


def test_values_and_their_order_do() -> None:
    assert digest(Before(1), Before(2)) != digest(Before(2), Before(1))
    assert digest(Before(1)) != digest(Before(1, ""))
    assert digest("1") != digest(1)


def test_what_may_show_where_it_lives_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot hold a value of type object"):
        digest(Before(1, inner=object()))


def test_the_story_is_for_people() -> None:
    trace = Trace()
    trace.note(1_500_000_000, "p1", Before(7))
    trace.note(1_500_000_000, "network", "deliver 8 bytes")
    assert trace.story() == "   1.500000000 p1       Before(peer=7, why=None, inner=())"
