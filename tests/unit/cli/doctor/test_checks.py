"""Facts go in, findings come out: each check, without a network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.cli.doctor import checks
from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.facts import MachineFacts, PathFacts, RunFacts, TokenFacts
from pccl.inquiry import Examination, ForwardedPort, MasterStatus, MemberDialled, RouterReport
from pccl.machines.router_path import MappingProtocol

MACHINE = MachineFacts(
    implementation="CPython",
    python="3.12.1",
    system="Linux 6.8",
    versions=dict.fromkeys(checks.ASKED, "1.0"),
    descriptors_max=1 << 20,
    congestion="cubic",
    congestion_choices=("reno", "cubic"),
    loopback_bytes_per_s=2e9,
    outward="10.0.0.4",
    interface="eth0",
    interface_mtu=1500,
)
PATH = PathFacts(
    master="host.example:48148",
    address="203.0.113.5:48148",
    host="203.0.113.5",
    local="10.0.0.4",
    interface="eth0",
    interface_mtu=1500,
    path_mtu=1500,
    segment_bytes=1448,
    congestion="cubic",
    round_trips_s=(0.011, 0.010, 0.012),
)
STATUS = MasterStatus(
    run=b"", term=1, uptime_ms=0, roster_version=1, member_count=0, members=(), newcomer_count=0,
    newcomers=(), group_count=0, groups=(), rounds=(), operation_count=0, operations=(),
    ended_count=0, ended=(), link_count=0, links=(),
    removal_count=0, removals=(), waits_for="",
)  # fmt: skip
MADE = Examination(
    status=STATUS,
    seen="10.0.0.4",
    clock_offset_s=0.001,
    clock_error_s=0.006,
    dialled_at="10.0.0.4:5000",
    was_dialled=True,
    reason="",
    members=(
        MemberDialled(1, "p0", "10.0.0.1", 4001, ""),
        MemberDialled(2, "p1", "fd00::2", 4002, ""),
    ),
    member_count=2,
    router=RouterReport(reason="10.0.0.4 is not a private address"),
)


def named(findings: list[Finding], name: str) -> Finding:
    (finding,) = [one for one in findings if one.name == name]
    return finding


def of_machine(name: str, machine: MachineFacts) -> Finding:
    return named(list(checks.machine_findings(machine)), name)


def of_path(name: str, path: PathFacts) -> Finding:
    return named(list(checks.path_findings(path)), name)


def of_run(name: str, made: Examination, path: PathFacts = PATH) -> Finding:
    return named(list(checks.run_findings(RunFacts(path, examination=made))), name)


def test_a_good_machine_in_a_good_run() -> None:
    findings = [
        *checks.machine_findings(MACHINE),
        checks.outward_finding(MACHINE),
        checks.token_finding(TokenFacts(43), "203.0.113.5"),
        *checks.path_findings(PATH),
        *checks.run_findings(RunFacts(PATH, examination=MADE)),
    ]
    assert [one for one in findings if one.level is not Severity.OK or one.remedy] == []
    assert [one.name for one in findings] == [
        *("interpreter", "packages", "descriptors", "congestion", "loopback", "interface"),
        *("token", "reach out", "interface", "MTU", "round trip", "congestion to the master"),
        *("handshake", "clock", "NAT", "router", "reach in", "members", "throughput"),
    ]


@pytest.mark.parametrize(
    ("name", "machine", "level", "words"),
    [
        ("interpreter", replace(MACHINE, implementation="PyPy"), Severity.WARN, "use CPython"),
        ("interpreter", replace(MACHINE, system="Darwin 23"), Severity.WARN, "use Linux"),
        ("packages", replace(MACHINE, versions={}), Severity.FAIL, "install pccl again"),
        (
            "packages",
            replace(MACHINE, versions={**MACHINE.versions, "uvloop": ""}),
            Severity.WARN,
            "pip install uvloop",
        ),
        ("descriptors", replace(MACHINE, descriptors_max=1024), Severity.WARN, "ulimit -Hn 2048"),
        ("descriptors", replace(MACHINE, descriptors_max=64), Severity.FAIL, "ulimit -Hn 2048"),
        ("loopback", replace(MACHINE, loopback_bytes_per_s=1e7), Severity.WARN, "processors"),
        ("loopback", replace(MACHINE, loopback_bytes_per_s=None), Severity.FAIL, "firewall"),
    ],
)
def test_a_machine_that_is_not_fit(
    name: str, machine: MachineFacts, level: Severity, words: str
) -> None:
    found = of_machine(name, machine)
    assert found.level is level
    assert words in found.remedy


def test_torch_may_be_missing() -> None:
    versions = {**MACHINE.versions, "torch": ""}
    found = of_machine("packages", replace(MACHINE, versions=versions))
    assert (found.level, "torch" in found.found) == (Severity.OK, False)


def test_no_network() -> None:
    found = checks.outward_finding(replace(MACHINE, outward="", interface=""))
    assert (found.level, found.found) == (Severity.WARN, "no route to the internet")


@pytest.mark.parametrize(
    ("token", "host", "level"),
    [
        (TokenFacts(43), "203.0.113.5", Severity.OK),
        (TokenFacts(), "127.0.0.1", Severity.OK),
        (TokenFacts(), "::1", Severity.OK),
        (TokenFacts(), "", Severity.OK),
        (TokenFacts(), "203.0.113.5", Severity.WARN),
        (TokenFacts(flaw="PCCL_TOKEN: too short"), "", Severity.FAIL),
    ],
)
def test_the_token(token: TokenFacts, host: str, level: Severity) -> None:
    assert checks.token_finding(token, host).level is level


def test_no_connection() -> None:
    (found,) = checks.path_findings(PathFacts("host.example:1", "connection refused"))
    assert (found.name, found.level) == ("reach out", Severity.FAIL)
    assert found.found == "no connection to host.example:1: connection refused"
    assert "firewalls" in found.remedy


@pytest.mark.parametrize(
    ("name", "path", "level", "words"),
    [
        ("MTU", replace(PATH, path_mtu=576), Severity.WARN, "576 on the path"),
        ("MTU", replace(PATH, path_mtu=1420), Severity.OK, "a tunnel lies between"),
        ("MTU", replace(PATH, path_mtu=None), Severity.OK, "does not know"),
        ("round trip", replace(PATH, round_trips_s=(0.9, 0.1, 0.8)), Severity.WARN, "800.00 ms"),
        (
            "congestion to the master",
            replace(PATH, round_trips_s=(0.1,)),
            Severity.WARN,
            "cubic on a long path",
        ),
        (
            "congestion to the master",
            replace(PATH, round_trips_s=(0.1,), congestion="bbr"),
            Severity.OK,
            "bbr",
        ),
        ("congestion to the master", replace(PATH, congestion=""), Severity.OK, "unknown"),
        ("interface", replace(PATH, interface="", interface_mtu=None), Severity.OK, "unknown (10."),
    ],
)
def test_a_path(name: str, path: PathFacts, level: Severity, words: str) -> None:
    found = of_path(name, path)
    assert (found.level, words in found.found) == (level, True), found


def test_loopback_is_no_tunnel() -> None:
    path = replace(PATH, host="127.0.0.1", path_mtu=65535, interface_mtu=65536)
    assert "tunnel" not in of_path("MTU", path).found


def test_a_refusal() -> None:
    run = RunFacts(PATH, "the two sides have different tokens", "set PCCL_TOKEN")
    (found,) = checks.run_findings(run)
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


def test_a_nat_that_keeps_peers_out() -> None:
    made = replace(MADE, seen="198.51.100.7", dialled_at="198.51.100.7:5000")
    closed = replace(made, reason="cannot reach 198.51.100.7:5000: no answer in time")
    found = of_run("NAT", closed)
    assert found.level is Severity.WARN
    assert "sees this machine as 198.51.100.7, and its own address is 10.0.0.4" in found.found
    assert "PCCL_ADVERTISE=198.51.100.7:PORT" in found.remedy
    assert of_run("NAT", made).level is Severity.OK  # a port is forwarded


def test_an_address_in_other_words_is_no_nat() -> None:
    assert of_run("NAT", replace(MADE, seen="::ffff:10.0.0.4")).found.startswith("none")


def forwarded(host: str) -> RouterReport:
    return RouterReport(ForwardedPort(MappingProtocol.PCP, host, 48200), "", True)


SILENT = RouterReport(None, "PCP: no answer; NAT-PMP: no answer; UPnP: no answer", True)
BY_HAND = "or forward a TCP port to this machine by hand: PCCL_ADVERTISE=:PORT"


@pytest.mark.parametrize(
    ("router", "level", "found", "remedy"),
    [
        (
            forwarded("8.8.4.4"),
            Severity.OK,
            "it forwards port 48200 of 8.8.4.4 to this machine (PCP)",
            "",
        ),
        (forwarded(""), Severity.OK, "it forwards port 48200 to this machine (PCP)", ""),
        (
            forwarded("100.72.0.4"),
            Severity.WARN,
            "it forwards port 48200 of 100.72.0.4 to this machine (PCP), but this address is not "
            "public: another router lies before it",
            "ask the provider for a public address, or run `pccl master --relay`",
        ),
        (
            RouterReport(reason="it is switched off (PCCL_MAP_PORT=0)"),
            Severity.OK,
            "not asked for a port: it is switched off (PCCL_MAP_PORT=0)",
            "",
        ),
        (
            SILENT,
            Severity.WARN,
            "it forwards no port to this machine: PCP: no answer; NAT-PMP: no answer; UPnP: no "
            "answer",
            f"switch on PCP, NAT-PMP or UPnP in the router; {BY_HAND}",
        ),
        (
            RouterReport(None, "PCP: no answer; UPnP: not installed", True),
            Severity.WARN,
            "it forwards no port to this machine: PCP: no answer; UPnP: not installed",
            "switch on PCP, NAT-PMP or UPnP in the router; for UPnP: pip install 'pccl[upnp]'; "
            + BY_HAND,
        ),
        (
            RouterReport(),
            Severity.WARN,
            "it forwards no port to this machine: no answer in time",
            f"switch on PCP, NAT-PMP or UPnP in the router; {BY_HAND}",
        ),
    ],
)
def test_the_router(router: RouterReport, level: Severity, found: str, remedy: str) -> None:
    assert checks.router_finding(router) == Finding("router", level, found, remedy)


@pytest.mark.parametrize("router", [SILENT, forwarded("100.72.0.4"), RouterReport()])
def test_a_machine_that_the_master_reaches_needs_no_other_router(router: RouterReport) -> None:
    found = of_run("router", replace(MADE, router=router))
    assert (found.level, found.remedy) == (Severity.OK, "")
    missed = of_run("router", replace(MADE, router=router, reason="no answer in time"))
    assert missed.level is Severity.WARN


def test_nobody_can_dial_this_machine() -> None:
    found = of_run("reach in", replace(MADE, reason="cannot reach 10.0.0.4:5000: no answer"))
    assert found.level is Severity.WARN
    assert found.found == "the master cannot reach 10.0.0.4:5000: no answer"
    assert "PCCL_ADVERTISE=:48200-48299" in found.remedy


def test_a_test_that_was_not_made() -> None:
    made = replace(MADE, was_dialled=False, reason="ask again later", seen="")
    found = of_run("reach in", made)
    assert (found.level, found.found) == (Severity.WARN, "not tested: ask again later")
    names = [one.name for one in checks.run_findings(RunFacts(PATH, examination=made))]
    assert names == ["handshake", "router", "reach in", "members", "throughput"]


def test_members_that_do_not_answer() -> None:
    silent = (MADE.members[0], replace(MADE.members[1], reason="no answer in time"))
    made = replace(MADE, members=silent, member_count=9)
    found = of_run("members", made)
    assert (found.level, found.found) == (
        Severity.WARN,
        "dialled 2 of 9; no answer from p1 at [fd00::2]:4002 (no answer in time)",
    )
    apart = of_run("members", replace(made, reason="no answer"))  # in neither direction
    assert (apart.level, "no link" in apart.remedy) == (Severity.FAIL, True)


def test_many_silent_members_are_counted() -> None:
    silent = tuple(MemberDialled(peer, f"p{peer}", "h", 1, "down") for peer in range(1, 7))
    found = of_run("members", replace(MADE, members=silent, member_count=6)).found
    assert found.endswith("p3 at h:1 (down) and 3 more")


def test_a_master_without_a_run() -> None:
    made = replace(MADE, status=replace(STATUS, waits_for="it stands by"), members=())
    assert "coordinates no run: it stands by" in of_run("handshake", made).found
    assert of_run("members", made).found == "the run has none to dial"
