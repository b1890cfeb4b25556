"""Facts of a machine go in, findings come out: each check, without a network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.cli.doctor import checks
from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.facts import MachineFacts, TokenFacts
from pccl.inquiry import RouterReport
from tests.support.doctor_facts import MACHINE, SILENT, forwarded, named


def of_machine(name: str, machine: MachineFacts) -> Finding:
    return named(list(checks.machine_findings(machine)), name)


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
            checks.OUTER_ROUTER,
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


@pytest.mark.parametrize(
    ("host", "seen", "level", "found", "remedy"),
    [
        ("8.8.4.4", "8.8.4.4", Severity.WARN, "the master does not reach it", "let this machine's"),
        (
            "8.8.4.4",
            "9.9.9.9",
            Severity.WARN,
            "sees this machine as 9.9.9.9: another",
            "if the",
        ),
        ("10.0.0.2", "9.9.9.9", Severity.WARN, "this address is not public: another", "if the"),
        ("", "9.9.9.9", Severity.OK, "", ""),
    ],
)
def test_a_router_whose_port_the_master_does_not_reach(
    host: str, seen: str, level: Severity, found: str, remedy: str
) -> None:
    said = checks.router_finding(forwarded(host), seen)
    assert said.level is level
    assert found in said.found
    assert said.remedy.startswith(remedy)
