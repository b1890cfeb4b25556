"""The judge of a chaos run, told of runs that never were: what is wrong is found, nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pccl.cli.processes.reports import decode
from pccl.stress.chaos.events import (
    KINDS,
    Alone,
    Announced,
    CallFailed,
    DamageFound,
    Event,
    MemorySample,
    PeerJoined,
    Reduced,
    tell,
)
from pccl.stress.chaos.settings import blame_s, patience_s
from pccl.stress.chaos.verdict.judge import judge
from pccl.stress.chaos.verdict.record import Done, Life, RunRecord
from pccl.stress.chaos.verdict.report import write_html, write_json
from pccl.stress.timeline import MASTER, FaultKind, Timeline, TimelineFault

KEYS = {
    "verdict",
    "operations",
    "wrong_values",
    "damaged_inputs",
    "hangs",
    "leaks",
    "false_removals",
    "faults",
    "recovery_s",
}
MIB = 1 << 20


def reduced(at: float, number: int = 1, tag: int = 0, **changes: Any) -> Reduced:
    given: dict[str, Any] = {"contributors": (1, 2), "attempts": 1, "wrong": "", **changes}
    return Reduced(at, 77, number, tag, **given)


def sample(at: float, *, ends: bool = False, **changes: Any) -> MemorySample:
    held = {"descriptors": 10, "threads": 3, "resident_bytes": 50 * MIB, **changes}
    return MemorySample(at, ends=ends, **held)


class Run:
    """Two peers and a master who live from 100 s to 200 s, and what happens to them."""

    def __init__(self, groups: int = 1) -> None:
        timeline = Timeline(7, 2, 100.0, deadline_s=2.0, groups=groups)
        self.record = RunRecord(timeline)
        self.record.began_s, self.record.ended_s = 100.0, 200.0
        self.lives = {index: Life(index, 1000 + index, 99.0) for index in (MASTER, 0, 1)}
        self.record.lives += self.lives.values()
        for index, life in self.lives.items():
            self.add(index, sample(99.5))
            if index >= 0:
                self.add(index, PeerJoined(100.0, index + 1, 0.1))
                self.add(index, reduced(100.5 + index))
            life.ended_s, life.exit_code = 201.0, 0

    def add(self, index: int, event: Event) -> str | None:
        return self.record.add(self.lives[index], event)

    def fault(self, at_s: float, kind: FaultKind, **about: Any) -> None:
        fault = TimelineFault(at_s - 100.0, kind, **about)
        self.record.done.append(Done(fault, at_s, at_s + fault.duration_s))

    def report(self) -> dict[str, Any]:
        for index in self.lives:
            self.add(index, sample(201.0, ends=True))
        self.record.finish(201.0)
        return judge(self.record).report


def test_a_run_in_which_nothing_is_wrong() -> None:
    report = Run().report()
    assert report.keys() >= KEYS
    assert report["verdict"] == "ok"
    assert (report["operations"], report["results"]) == (1, 2)


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (reduced(120.0, 2, wrong="3 elements differ"), "wrong_values"),
        (reduced(120.0, 1, contributors=(1,)), "wrong_values"),  # peer 0 was told (1, 2)
        (DamageFound(120.0, "the input after a failure"), "damaged_inputs"),
        (CallFailed(120.0, "all_reduce", "LocalProtocolError", "a bug", expected=False), "errors"),
        (CallFailed(120.0, "all_reduce", "Evicted", "silent", expected=True), "false_removals"),
    ],
)
def test_what_a_peer_tells_fails_the_run(event: Event, count: str) -> None:
    run = Run()
    run.add(1, event)
    report = run.report()
    assert (report["verdict"], report[count]) == ("failed", 1)
    assert len(report["findings"][count]) == 1


def test_aborts_and_goodbyes_are_no_faults() -> None:
    run = Run()
    run.add(
        1, CallFailed(120.0, "all_reduce", "CollectiveAborted", "peer 3 was lost", expected=True)
    )
    run.add(MASTER, Announced(199.0, 2, "removed", "GOODBYE: it left"))
    run.add(MASTER, Announced(150.0, 9, "removed", "UNREACHABLE: nobody knows who it was"))
    assert run.report()["verdict"] == "ok"


REMOVED = Announced(120.0, 2, "removed", "SILENT: silent for 2 s")


@pytest.mark.parametrize(
    ("kind", "about", "explained"),
    [
        (FaultKind.FREEZE, {"peer": 1, "duration_s": 3.0}, True),
        (FaultKind.FREEZE, {"peer": 0, "duration_s": 3.0}, False),
        (FaultKind.PARTITION, {"peer": 0, "other": 1, "duration_s": 3.0}, True),
        (FaultKind.PARTITION, {"peer": 0, "other": MASTER, "duration_s": 3.0}, False),
        (FaultKind.PARTITION, {"peer": MASTER, "duration_s": 3.0}, True),
        (FaultKind.RESET, {"peer": 1}, True),
        (FaultKind.GARBAGE, {"peer": 1, "amount": 1}, False),
        (FaultKind.MASTER_RESTART, {"duration_s": 0.5}, False),
    ],
)
def test_a_removal_needs_a_fault_of_that_peer(
    kind: FaultKind, about: dict[str, Any], explained: bool
) -> None:
    run = Run()
    run.fault(118.0, kind, **about)
    run.add(MASTER, REMOVED)
    assert run.report()["false_removals"] == (0 if explained else 1)


@pytest.mark.parametrize(
    ("about", "pair", "count"),
    [
        ({"peer": 0}, "1, 2", 0),
        ({"peer": 0}, "2, 3", 1),  # none of the two was concerned
        ({"peer": 0, "other": 2}, "1, 2", 1),  # another link than the damaged one
    ],
)
def test_of_two_that_cannot_talk_either_may_go(
    about: dict[str, Any], pair: str, count: int
) -> None:
    run = Run()
    run.fault(118.0, FaultKind.CORRUPT, duration_s=3.0, amount=0.03, **about)
    run.add(MASTER, replace(REMOVED, text=f"LINK_BROKEN: peers {pair} have no link"))
    assert run.report()["false_removals"] == count


def test_an_id_that_is_given_anew_says_nothing_of_who_had_it_before() -> None:
    run = Run()
    run.fault(118.0, FaultKind.RESET, peer=1)
    run.add(MASTER, REMOVED)
    run.add(0, PeerJoined(130.0, REMOVED.peer, 0.1))  # by a master that was started without state
    assert run.report()["false_removals"] == 0


@pytest.mark.parametrize(("since_s", "explained"), [(-1.0, True), (1.0, False)])
def test_a_fault_explains_for_so_long_and_no_longer(since_s: float, explained: bool) -> None:
    run = Run()
    run.fault(120.0 - 3.0 - blame_s(run.record.timeline) - since_s, FaultKind.FREEZE,
              peer=1, duration_s=3.0)  # fmt: skip
    run.add(MASTER, REMOVED)
    assert run.report()["false_removals"] == (0 if explained else 1)


@pytest.mark.parametrize(("ended_s", "explained"), [(119.9, True), (90.0, False), (130.0, False)])
def test_who_was_killed_may_be_removed_then(ended_s: float, explained: bool) -> None:
    run = Run()
    before = Life(1, 999, 50.0, ended_s=ended_s, exit_code=-9, killed=True)
    run.record.lives.append(before)
    run.add(MASTER, REMOVED)
    assert run.report()["false_removals"] == (0 if explained else 1)


@pytest.mark.parametrize("held", ["descriptors", "threads"])
def test_what_is_still_held_at_the_end_is_a_leak(held: str) -> None:
    run = Run()
    run.lives[0].samples.append(sample(201.0, ends=True, **{held: 11}))
    report = judge(run.record).report
    found = [text for text in report["findings"]["leaks"] if "peer 0" in text]
    assert found == [f"peer 0 (pid 1000): 11 {held} at its end, not {10 if held[0] == 'd' else 3}"]


@pytest.mark.parametrize(("grown_mib", "leaks"), [(20, 0), (40, 1)])
def test_memory_must_be_flat_after_the_warm_up(grown_mib: int, leaks: int) -> None:
    run = Run()
    for second in range(100, 300, 2):  # the first minute, in which it takes 30 MiB, is not counted
        warm = min(1.0, (second - 100) / 60) * 30
        late = grown_mib if second > 250 else 0
        run.add(0, sample(float(second), resident_bytes=round((50 + warm + late) * MIB)))
    report = run.report()
    assert report["leaks"] == leaks
    assert report["memory_growth_bytes_max"] == grown_mib * MIB


def test_a_process_that_fails_is_a_crash_with_its_last_words() -> None:
    run = Run()
    run.lives[1].exit_code = -11
    run.lives[1].said.append("Fatal Python error")
    report = run.report()
    assert (report["verdict"], report["crashes"]) == ("failed", 1)
    expected = "peer 1 (pid 1001) ended by SIGSEGV:\nFatal Python error"
    assert report["findings"]["crashes"] == [expected]


@pytest.mark.parametrize(
    ("call", "kind", "errors"),
    [
        ("connect", FaultKind.MASTER_RESTART, 0),  # none was there to be found
        ("all_reduce", FaultKind.MASTER_RESTART, 1),
        ("all_reduce", FaultKind.MASTER_RESTART_BLANK, 0),
    ],
)
def test_a_member_loses_its_master_only_to_one_that_knew_nothing(
    call: str, kind: FaultKind, errors: int
) -> None:
    run = Run()
    run.fault(118.0, kind, duration_s=1.0)
    run.add(1, CallFailed(120.0, call, "MasterLost", "another one answered", expected=True))
    report = run.report()
    assert report["errors"] == errors
    assert report["verdict"] == ("failed" if errors else "ok")


def test_recovery_is_until_the_next_operation_of_the_others() -> None:
    run = Run()
    for number, at in enumerate((110.0, 112.5, 113.0, 131.0), 2):
        run.add(0, reduced(at, number))
        run.add(1, reduced(at + 0.25, number))  # later at this one: it is the same operation
    for at in (110.0, 112.9, 130.0, 199.0):  # the last one is followed by nothing
        run.fault(at, FaultKind.RESET, peer=0, other=1)
    report = run.report()
    expected = {"count": 3, "median": 1.0, "p95": 2.5, "max": 2.5}
    assert report["recovery_s"] == {"reset": expected}
    assert report["faults"] == {"reset": 4}


def test_with_groups_the_last_one_counts_for_the_master() -> None:
    run = Run(groups=2)
    run.add(0, reduced(111.0, 5, contributors=(1,)))
    run.add(1, reduced(114.0, 5, contributors=(2,)))
    run.fault(110.0, FaultKind.MASTER_RESTART, duration_s=0.5)
    run.fault(110.0, FaultKind.RESET, peer=0, other=MASTER)
    found = run.report()["recovery_s"]
    assert found["master_restart"]["median"] == 4.0
    assert found["reset"]["median"] == 1.0


def test_quiet_time_begins_when_the_last_fault_of_the_peer_itself_is_over() -> None:
    run = Run()
    zero, one = run.lives[0], run.lives[1]
    run.add(0, reduced(150.0, 2))
    run.add(1, reduced(152.0, 2))
    run.fault(155.0, FaultKind.FREEZE, peer=1, duration_s=4.0)
    assert run.record.quiet_s(zero, 170.0) == 20.0  # waits for another one: patience bounds it
    assert run.record.quiet_s(one, 170.0) == 11.0
    assert run.record.quiet_s(one, 157.0) < 0.0  # still frozen
    assert run.record.quiet_s(run.lives[MASTER], 170.0) == 0.0


@pytest.mark.parametrize(("groups", "waiting"), [(1, [1]), (2, [])])
def test_who_has_company_must_have_a_result_with_it(groups: int, waiting: list[int]) -> None:
    run = Run(groups)
    run.add(0, reduced(150.0, 2))
    run.add(1, Alone(150.0))
    found = run.record.without_result(run.lives.values(), 140.0)
    assert [life.index for life in found] == waiting


def test_patience_is_longer_than_any_rule() -> None:
    frozen = TimelineFault(0.0, FaultKind.FREEZE, 0, duration_s=7.0)
    timeline = Timeline(1, 2, 10.0, (frozen,), deadline_s=2.0)
    # 7 frozen, 2 silent, 6 without progress, 2 to link, 10 to recover, 5 for the machine
    assert patience_s(timeline) == pytest.approx(32.0)


def test_events_survive_the_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = [reduced(1.5), REMOVED, sample(2.0, ends=True), PeerJoined(1.0, 3, 0.25)]
    for event in events:
        tell(event)
    lines = capsys.readouterr().out.splitlines()
    assert [decode(line, KINDS) for line in lines] == events
    for broken in ("", "12", '{"report":"none"}', '{"report":"PeerJoined","at":1}', "[]"):
        assert decode(broken, KINDS) is None


def test_reports_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = Run()
    run.fault(110.0, FaultKind.RESET, peer=0, other=1)
    run.add(0, reduced(111.0, 2))
    run.add(1, DamageFound(120.0, "<the input>"))
    run.report()
    judgement = judge(run.record)
    write_json(judgement, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == judgement.report
    write_html(judgement, run.record, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    pictures = re.findall("<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == page.count("<svg") == 3
    for picture in pictures:
        ElementTree.fromstring(picture)  # well-formed
    assert "reset peer 0 - peer 1" in page
    assert "&lt;the input&gt;" in page
    namespaces = re.compile(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"')
    assert "http" not in namespaces.sub("", page)  # it loads nothing
