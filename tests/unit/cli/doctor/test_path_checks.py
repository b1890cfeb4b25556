"""Facts of a path go in, findings come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.facts import FailedDial, Obstacle, PathFacts
from pccl.cli.doctor.path_checks import path_findings
from tests.support.doctor_facts import PATH, named


def of_path(name: str, path: PathFacts) -> Finding:
    return named(list(path_findings(path)), name)


def failing(host: str, obstacle: Obstacle, reason: str = "no answer in time") -> Finding:
    path = PathFacts("host.example:7", (FailedDial(host, obstacle, reason),), 7)
    (found,) = path_findings(path)
    assert (found.name, found.level) == ("reach out", Severity.FAIL)
    return found


@pytest.mark.parametrize(
    ("host", "obstacle", "remedy"),
    [
        ("203.0.113.5", Obstacle.REFUSED, "start the master there: pccl master --listen 0.0.0.0:7"),
        ("2001:db8::5", Obstacle.REFUSED, "start the master there: pccl master --listen [::]:7"),
        ("127.0.0.1", Obstacle.REFUSED, "start the master here: pccl master --listen 127.0.0.1:7"),
        ("::1", Obstacle.REFUSED, "start the master here: pccl master --listen [::1]:7"),
        ("203.0.113.5", Obstacle.SILENT, "open TCP port 7 in the firewall of the master's machine"),
        ("10.0.0.5", Obstacle.SILENT, "10.0.0.5 is a private address"),
        ("192.168.1.5", Obstacle.NO_ROUTE, "192.168.1.5 is a private address"),
        ("2001:db8::5", Obstacle.NO_ROUTE, "this machine has no way there in IPv6"),
        ("203.0.113.5", Obstacle.NO_ROUTE, "connect this machine to the master's network"),
        ("203.0.113.5", Obstacle.OTHER, "connect this machine to the master's network"),
        ("no.such.host", Obstacle.NO_NAME, "correct the name, or write the IP address"),
    ],
)
def test_no_connection(host: str, obstacle: Obstacle, remedy: str) -> None:
    assert failing(host, obstacle).remedy.startswith(remedy)


def test_one_address_of_several() -> None:
    silent = FailedDial("2001:db8::5", Obstacle.SILENT, "no answer in time")
    path = replace(PATH, failed=(silent,), port=7)
    assert of_path("reach out", path) == Finding(
        "reach out",
        Severity.WARN,
        "connected to host.example:48148, which is 203.0.113.5:48148; no answer at 2001:db8::5: no "
        "answer in time",
        "let TCP port 7 through in IPv6, too, or repair IPv6 on the way, or remove 2001:db8::5 "
        "from the name; until then each dial may take longer, and peers work",
    )
    older = FailedDial("203.0.113.6", Obstacle.REFUSED, "connection refused")
    assert "through in IPv4" in of_path("reach out", replace(path, failed=(older,))).remedy


def test_the_reasons_of_all_addresses() -> None:
    refused = FailedDial("203.0.113.5", Obstacle.REFUSED, "connection refused")
    silent = FailedDial("2001:db8::5", Obstacle.SILENT, "no answer in time")
    (found,) = path_findings(PathFacts("host.example:7", (silent, refused), 7))
    assert found.found == (
        "no connection to host.example:7: 2001:db8::5: no answer in time; 203.0.113.5: connection "
        "refused"
    )
    assert found.remedy.startswith("start the master there")
    nameless = failing("host.example", Obstacle.NO_NAME, "name or service not known")
    assert nameless.found.endswith("host.example has no address: name or service not known")


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
