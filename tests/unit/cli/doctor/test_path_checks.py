"""Facts of a path go in, findings come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.facts import PathFacts
from pccl.cli.doctor.path_checks import path_findings
from tests.support.doctor_facts import PATH, named


def of_path(name: str, path: PathFacts) -> Finding:
    return named(list(path_findings(path)), name)


def test_no_connection() -> None:
    (found,) = path_findings(PathFacts("host.example:1", "connection refused"))
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
