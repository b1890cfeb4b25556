"""What workers report survives the pipe, and nothing else is taken for it."""

from __future__ import annotations

import pytest

from pccl.cli.bench.state.figures import JoinPart, Played, StateTask
from pccl.cli.bench.statistics import CaseDone, Timed
from pccl.cli.processes.reports import Doing, Failed, WorkerReport, decode, encode

KINDS: tuple[type[WorkerReport], ...] = (Doing, Failed, CaseDone, Timed, Played, StateTask)


@pytest.mark.parametrize(
    "report",
    [
        Doing("4 KiB, warming up"),
        Failed("there is no more memory"),
        CaseDone({"seconds": [0.5], "algorithm": "ring"}),
        Timed((7.5, 8.0), (0.001, 0.25), (0.5, 0.0), "round 1: 3 is 2", 0.5, 1 << 63, 7),
        Played(True, (0.5,), (0.25,), tx_bytes=3),
        StateTask("join", 4096, 5, 1, "rate=1mbit", prefetches=True, number=2),
    ],
    ids=lambda report: type(report).__name__,
)
def test_reports_survive_the_pipe(report: WorkerReport) -> None:
    line = encode(report)
    assert "\n" not in line
    assert decode(line + "\n", KINDS) == report
    assert decode(line, (JoinPart,)) is None


@pytest.mark.parametrize(
    "line",
    ["", "hello", "7", "[]", "{}", '{"report": "Doing"}', '{"report": "x", "text": ""}',
     '{"report": []}', '{"report": "Doing", "text": "", "more": 1}'],
)  # fmt: skip
def test_other_lines_are_no_reports(line: str) -> None:
    assert decode(line, KINDS) is None
