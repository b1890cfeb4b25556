"""Answers of a master and of members go in, findings come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.cli.doctor import checks
from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.facts import PathFacts, RunFacts, TokenFacts
from pccl.cli.doctor.path_checks import path_findings
from pccl.cli.doctor.run_checks import run_findings
from pccl.inquiry import Examination, MemberDialled, RouterReport
from tests.support.doctor_facts import MACHINE, MADE, PATH, SILENT, STATUS, forwarded, named


def of_run(name: str, made: Examination, path: PathFacts = PATH) -> Finding:
    return named(run_findings(RunFacts(path, examination=made)), name)


def test_a_good_machine_in_a_good_run() -> None:
    findings = [
        *checks.machine_findings(MACHINE),
        checks.outward_finding(MACHINE),
        checks.token_finding(TokenFacts(43), "203.0.113.5"),
        *path_findings(PATH),
        *run_findings(RunFacts(PATH, examination=MADE)),
    ]
    assert [one for one in findings if one.level is not Severity.OK or one.remedy] == []
    assert [one.name for one in findings] == [
        *("interpreter", "packages", "descriptors", "congestion", "loopback", "interface"),
        *("token", "reach out", "interface", "MTU", "round trip", "congestion to the master"),
        *(
            "handshake",
            "long packets",
            "clock",
            "NAT",
            "router",
            "reach in",
            "members",
            "links",
            "throughput",
        ),
    ]


def test_a_refusal() -> None:
    run = RunFacts(PATH, "the two sides have different tokens", "set PCCL_TOKEN")
    (found,) = run_findings(run)
    assert found == Finding("handshake", Severity.FAIL, run.refusal, run.remedy)


@pytest.mark.parametrize(
    ("offset_s", "error_s", "level", "words"),
    [
        (0.0015, 0.002, Severity.OK, "1.50 ms ahead of this one, ± 2.00 ms"),
        (-3600.0, 0.01, Severity.WARN, "3600.0 s behind this one, ± 10.00 ms"),
        (2.5, 1.0, Severity.OK, "2.5 s ahead of"),
    ],
)
def test_the_clock(offset_s: float, error_s: float, level: Severity, words: str) -> None:
    found = of_run("clock", replace(MADE, clock_offset_s=offset_s, clock_error_s=error_s))
    assert (found.level, words in found.found) == (level, True), found


@pytest.mark.parametrize("router", [SILENT, forwarded("100.72.0.4"), RouterReport()])
def test_a_machine_that_the_master_reaches_needs_no_other_router(router: RouterReport) -> None:
    found = of_run("router", replace(MADE, router=router))
    assert (found.level, found.remedy) == (Severity.OK, "")
    missed = of_run("router", replace(MADE, router=router, reason="no answer in time"))
    assert missed.level is Severity.WARN


def test_a_test_that_was_not_made() -> None:
    made = replace(MADE, was_dialled=False, reason="ask again later", seen="")
    found = of_run("reach in", made)
    assert (found.level, found.found) == (Severity.WARN, "not tested: ask again later")
    names = [one.name for one in run_findings(RunFacts(PATH, examination=made))]
    assert names == [
        "handshake",
        "long packets",
        "router",
        "reach in",
        "members",
        "links",
        "throughput",
    ]


def test_members_that_do_not_answer() -> None:
    silent = (MADE.members[0], replace(MADE.members[1], reason="no answer in time"))
    made = replace(MADE, members=silent, member_count=9)
    found = of_run("members", made)
    assert (found.level, found.found) == (
        Severity.WARN,
        "dialled 2 of 9; no answer from p1 at [fd00::2]:4002 (no answer in time)",
    )


def test_many_silent_members_are_counted() -> None:
    silent = tuple(MemberDialled(peer, f"p{peer}", "h", 1, "down") for peer in range(1, 7))
    found = of_run("members", replace(MADE, members=silent, member_count=6)).found
    assert found.endswith("p3 at h:1 (down) and 3 more")


def test_a_master_without_a_run() -> None:
    made = replace(MADE, status=replace(STATUS, waits_for="it stands by"), members=())
    assert "coordinates no run: it stands by" in of_run("handshake", made).found
    assert of_run("members", made).found == "the run has none to dial"


def test_long_packets_that_get_lost() -> None:
    lost = replace(MADE, loses_long="no answer in time")
    found = of_run("long packets", lost)
    assert (found.level, found.found) == (
        Severity.FAIL,
        "short packets arrive, and long ones do not: no answer in time",
    )
    assert found.remedy.startswith("make packets shorter: ip link set dev eth0 mtu 1280, or sysctl")
    assert list(run_findings(RunFacts(PATH, "no answer in time", loses_long=True))) == [found]
