"""Rounds: who plays when, that wrong values are seen, and what memory is counted."""

from __future__ import annotations

import time

import numpy as np
import pytest

from pccl.cli.bench.peer import ReduceSide, new_buffer, timed
from pccl.cli.bench.plan import PLAIN
from pccl.cli.bench.statistics import OURS, Figures
from pccl.cli.bench.values import Array, Exact
from tests.support.patience import patient

FLOAT32 = np.dtype(np.float32)
COUNT = 100_000


class Imagined:
    """One of two peers; the other one's values are added without anybody."""

    def __init__(self, *, in_place: bool = False, begin: int = 0) -> None:
        self.input: Array = new_buffer(4 * COUNT, FLOAT32)
        self.result = self.input if in_place else new_buffer(4 * COUNT, FLOAT32)
        self.diary: list[str] = []
        self._other = Exact(FLOAT32, 1, 2)
        self.round = begin

    def side(self, shift: int = 0) -> ReduceSide:
        values = Exact(FLOAT32, 0, 2)
        return ReduceSide(OURS, PLAIN, self.input, self, values, shift)

    def barrier(self) -> None:
        self.diary.append("meet")

    def figures(self) -> Figures:
        return {}

    def reduce(self) -> str:
        self.diary.append("reduce")
        theirs = np.zeros(COUNT, FLOAT32)
        self._other.input.fill(theirs, self.round)
        np.add(self.input, theirs, out=self.result)
        self.round += 1
        return "ring"


class Forgetful(Imagined):
    """Its second result is never written."""

    def reduce(self) -> str:
        return super().reduce() if self.round != 1 else "ring"


class Meddling(Imagined):
    """It changes its input."""

    def reduce(self) -> str:
        super().reduce()
        self.input[7] = -1.0
        return "ring"


@pytest.mark.parametrize("in_place", [False, True])
def test_right_values(in_place: bool) -> None:
    peer = Imagined(in_place=in_place)
    side = peer.side()
    began_s = time.monotonic()
    for number in range(3):
        side.play(number, keep=number > 0)
    assert side.log.fault == ""
    assert peer.diary == ["meet", "reduce"] * 3
    assert len(side.log.seconds) == len(side.log.cpu_s) == 2
    assert min(side.log.seconds) > 0
    first, second = side.log.began_s
    assert began_s < first < first + side.log.seconds[0] < second < time.monotonic()


def test_a_result_that_was_not_written() -> None:
    side = Forgetful().side()
    for number in range(2):
        side.play(number, keep=True)
    assert side.log.fault.startswith("400000 bytes, round 1: element 0 is ")


def test_wrong_values_count_in_warm_ups_too() -> None:
    side = Meddling().side()
    side.play(0, keep=False)
    expected = "400000 bytes, round 0: the input was changed: element 7 is -1.0"
    assert side.log.fault.startswith(expected)
    assert side.log.seconds == ()


def test_values_may_be_those_of_a_later_round() -> None:
    """What another side has left in the same memory is no right result."""
    right, wrong = Imagined(begin=5).side(shift=5), Imagined().side(shift=5)
    for side in (right, wrong):
        side.play(0, keep=True)
    assert right.log.fault == ""
    assert wrong.log.fault.startswith("400000 bytes, round 0: element ")


def test_timed() -> None:
    found, seconds, cpu_s = timed(lambda: "done")
    assert found == "done"
    assert 0 <= seconds < patient(10.0)
    assert 0 <= cpu_s < patient(10.0)
