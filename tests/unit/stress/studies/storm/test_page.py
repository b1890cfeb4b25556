from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pccl.stress.studies.storm.figures import OneRound
from pccl.stress.studies.storm.page import kept_spans, loss_difference, summary, write_page
from pccl.stress.studies.storm.storm import Storm, StormTraining
from pccl.stress.studies.storm.tape import (
    HeldOutLoss,
    ReplicaKilled,
    ReplicaStarted,
    ReplicaTrains,
    RoundDone,
    StormBegan,
    TapeEvent,
)
from pccl.stress.timeline import FaultKind, Timeline, TimelineFault

FAULT = TimelineFault(12.0, FaultKind.RESTART, 1, duration_s=0.5)
STORM = Storm(Timeline(7, 2, 40.0, (FAULT,)), StormTraining(source="a <source>", step_s=0.5))


def one_tape(*others: TapeEvent) -> list[TapeEvent]:
    """Both replicas train, with a round every 10 s."""
    rounds = [RoundDone(10.0 * n, 0, "run", n, (0, 1), 40.0, 20.0, 500_000) for n in range(1, 6)]
    losses = [HeldOutLoss(10.0 * n, n, 3.0 - n / 10) for n in (1, 3, 5)]
    entered = [ReplicaTrains(1.0, index, index) for index in range(2)]
    return [StormBegan(10.0), *entered, *rounds, *losses, *others]


def test_the_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    killed = (ReplicaKilled(22.0, 1), ReplicaStarted(22.5, 1), ReplicaTrains(25.0, 1, 1))
    path = tmp_path / "storm.html"
    write_page(STORM, one_tape(*killed), one_tape(), path, "A <storm>")
    page = path.read_text()
    pictures = re.findall("<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == page.count("<svg") == 3
    for picture in pictures:
        ElementTree.fromstring(picture)  # well-formed
    assert "<h1>A &lt;storm&gt;</h1>" in page
    assert "Schedule: a &lt;source&gt;." in page
    assert "<b>3.0 s</b><span>from a kill to training (median)</span>" in page
    assert "<b>2.5 MB</b>" in page
    assert "<b>+0.000</b><span>loss against no faults, at equal steps</span>" in page
    assert "<th>without faults</th>" in page
    namespaces = re.compile(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"')
    assert "http" not in namespaces.sub("", page)


def test_without_losses_and_a_quiet_run_the_page_leaves_them_out(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "storm.html"
    events = [one for one in one_tape() if not isinstance(one, HeldOutLoss)]
    write_page(STORM.quiet, events, None, path, "quiet")
    page = path.read_text()
    assert page.count("<svg") == 2
    assert "without faults" not in page
    assert "Loss on held-out text" not in page


def test_a_summary_counts_the_faults() -> None:
    assert summary(STORM) == "2 replicas, 40 s, seed 7: 1 restart. Schedule: a <source>."
    assert summary(Storm(STORM.timeline, StormTraining()).quiet) == (
        "2 replicas, 40 s, seed 7: no faults."
    )


def test_losses_are_compared_at_equal_steps() -> None:
    own, other = [(0.0, 3.0), (50.0, 2.0)], [(0.0, 3.0), (100.0, 1.0)]
    assert loss_difference({"own": own, "other": other}) == pytest.approx(0.0)
    assert loss_difference({"own": [(25.0, 2.75)], "other": other}) == pytest.approx(0.25)
    longer = [(25.0, 2.75), (101.0, 1.0)]
    assert loss_difference({"own": longer, "other": other}) == pytest.approx(0.25)
    assert loss_difference({"own": longer[1:], "other": other}) is None
    assert loss_difference({"own": own}) is None
    assert loss_difference({"own": [], "other": other}) is None


def test_work_is_kept_between_two_rounds_if_it_is_in_the_second() -> None:
    rounds = [
        OneRound(at, 0, 1.0, frozenset(took_part), frozenset({0, 1}))
        for at, took_part in ((0.0, {0, 1}), (1.0, {0}), (2.0, {0, 1}), (3.0, {0, 1}))
    ]
    assert kept_spans(rounds, 0) == [(0.0, 3.0)]
    assert kept_spans(rounds, 1) == [(1.0, 3.0)]
