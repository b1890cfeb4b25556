"""Rounds: who plays when, that wrong values are seen, and what memory is counted."""

from __future__ import annotations

import dataclasses
import mmap
import sys

import numpy as np
import pytest

from pccl.cli.bench.peers import memory
from pccl.cli.bench.peers.rounds import (
    BenchRounds,
    RoundLog,
    Shifted,
    extra_bytes,
    new_buffer,
    timed,
)
from pccl.cli.bench.peers.values import Array, Values
from pccl.cli.bench.peers.words import (
    Committed,
    Connected,
    Doing,
    Failed,
    Measured,
    Report,
    Task,
    Timed,
    decode,
    encode,
)
from pccl.cli.bench.variants import Variant
from tests.support.patience import patient

FLOAT32 = np.dtype(np.float32)
COUNT = 100_000


class Imagined:
    """One of two peers; the other one's values are added without anybody."""

    def __init__(
        self, name: str, diary: list[str], *, in_place: bool = False, begin: int = 0
    ) -> None:
        self.name = name
        self.input: Array = new_buffer(COUNT, FLOAT32)
        self.result = self.input if in_place else new_buffer(COUNT, FLOAT32)
        self._diary = diary
        self._other = Values(FLOAT32, 1, 2)
        self._round = begin

    def barrier(self) -> None:
        self._diary.append(f"{self.name} meet")

    def reduce(self) -> None:
        self._diary.append(f"{self.name} reduce")
        theirs = np.zeros(COUNT, FLOAT32)
        self._other.fill(theirs, self._round)
        np.add(self.input, theirs, out=self.result)
        self._round += 1


class Forgetful(Imagined):
    """Its second result is never written."""

    def reduce(self) -> None:
        if self._round != 1:
            super().reduce()
        self._round = max(self._round, 1)


class Meddling(Imagined):
    """It changes its input."""

    def reduce(self) -> None:
        super().reduce()
        self.input[7] = -1.0


class Wasteful(Imagined):
    """It has 16 MiB for a moment."""

    def reduce(self) -> None:
        with mmap.mmap(-1, 16 << 20) as area:
            area.write(b"\x01" * (16 << 20))
        super().reduce()


def rounds() -> BenchRounds:
    return BenchRounds(Values(FLOAT32, 0, 2), lambda done: None)


def test_sides_alternate() -> None:
    diary: list[str] = []
    sides = [(Imagined("ours", diary), RoundLog()), (Imagined("theirs", diary), RoundLog())]
    played = rounds()
    played.play(sides, 2, keep=False)
    played.play(sides, 3, keep=True)
    one = ["ours meet", "ours reduce", "theirs meet", "theirs reduce"]
    other = one[2:] + one[:2]
    assert diary == [*one, *other, *one, *other, *one]
    for _, log in sides:
        report = log.to_report()
        assert len(report.seconds) == len(report.cpu_s) == 3
        assert min(report.seconds) > 0
        assert report.fault == ""


@pytest.mark.parametrize("in_place", [False, True])
def test_right_values(in_place: bool) -> None:
    log = RoundLog()
    rounds().play([(Imagined("ours", [], in_place=in_place), log)], 3, keep=True)
    assert log.fault == ""


def test_a_result_that_was_not_written() -> None:
    log = RoundLog()
    rounds().play([(Forgetful("ours", []), log)], 2, keep=True)
    assert log.fault.startswith("400000 bytes, round 1: element 0 is ")


def test_wrong_values_count_in_warm_ups_too() -> None:
    log = RoundLog()
    rounds().play([(Meddling("ours", []), log)], 1, keep=False)
    assert log.fault.startswith("400000 bytes, round 0: the input was changed: element 7 is -1.0")
    assert log.seconds == []


def test_timed() -> None:
    called: list[int] = []
    seconds, cpu_s = timed(lambda: called.append(1))
    assert called == [1]
    assert 0 < seconds < patient(10.0)
    assert 0 <= cpu_s < patient(10.0)


def test_a_log_may_have_inputs_of_its_own() -> None:
    """Of a later round, say: what another side has left there is no right result."""
    log = RoundLog(Shifted(Values(FLOAT32, 0, 2), 5))
    right, wrong = Imagined("ours", [], begin=5), Imagined("ours", [])
    rounds().play([(right, log)], 2, keep=True)
    assert log.fault == ""
    rounds().play([(wrong, log)], 1, keep=True)
    assert log.fault.startswith("400000 bytes, round 0: element ")


@pytest.mark.skipif(sys.platform != "linux", reason="nobody else forgets a peak")
def test_memory_beyond_the_buffers() -> None:
    idle_bytes = memory.resident_bytes()
    frugal = extra_bytes(rounds(), Imagined("ours", []), RoundLog(), idle_bytes)
    wasteful = extra_bytes(rounds(), Wasteful("ours", []), RoundLog(), idle_bytes)
    again = extra_bytes(rounds(), Imagined("ours", []), RoundLog(), idle_bytes)
    # The kernel counts resident pages per core, and adds up late: it may be some dozens off.
    assert 15 << 20 <= wasteful - frugal < 40 << 20
    assert again < wasteful - (8 << 20)  # the peak was forgotten


TIMED = Timed((0.001, 0.25), (0.5, 0.0), "round 1: element 3 is 2, expected 1")


@pytest.mark.parametrize(
    "report",
    [
        Connected(123),
        Doing("rounds", 4096, 7),
        Measured(4096, 5, (1, 2), ("reno", "bbr"), TIMED, None),
        Measured(4096, 5, (), (), TIMED, TIMED),
        Measured(4096, 5, (1,), ("reno",), TIMED, None, 2, "mesh,star", 1.0625, 0.0078, "5eed"),
        Committed((0.5, 0.25)),
        Failed("there is no more memory"),
    ],
    ids=lambda report: type(report).__name__,
)
def test_reports_survive_the_pipe(report: Report) -> None:
    line = encode(report)
    assert "\n" not in line
    assert decode(line + "\n") == report


@pytest.mark.parametrize(
    "line", ["", "hello", "7", "[]", "{}", '{"report": "measured"}', '{"report": "x", "bytes": 1}']
)
def test_other_lines_are_no_reports(line: str) -> None:
    assert decode(line) is None


def test_tasks_survive_the_command_line() -> None:
    task = Task(1, 2, "127.0.0.1:5", (4, 8), "int8", 0, True, 3, 1, 0, listen="127.0.0.1:9")
    assert Task.from_json(task.to_json()) == task
    several = dataclasses.replace(task, variants=(Variant(), Variant("mesh", "int4", 2, 64, True)))
    assert Task.from_json(several.to_json()) == several
