"""What others see of this machine goes in, and how its links would be made comes out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pccl.cli.doctor.checks import Finding, Severity
from pccl.cli.doctor.link_checks import (
    PortChange,
    links_finding,
    nat_finding,
    port_change,
    reach_in_finding,
)
from pccl.inquiry import Examination, Sighting
from tests.support.doctor_facts import MADE, SILENT, forwarded

OWN, OUT = "10.0.0.4", "198.51.100.7"
NO_ANSWER = f"cannot reach {OUT}:5000: no answer in time"
FORWARD = (
    "forward a TCP port of the router, such as 48200, to this machine, and announce it: pccl join "
    "--advertise :48200 (or PCCL_ADVERTISE=:48200)"
)
OPEN = (
    "open a TCP port, such as 48200, in the firewall of this machine and of its network (in a "
    "cloud, the security group), and announce it: pccl join --advertise :48200 (or "
    "PCCL_ADVERTISE=:48200)"
)


def behind_nat(*ports: int, seen: str = OUT) -> Examination:
    """The own port is 41201; the master sees the first of ``ports``, members the others."""
    names = ("the master", "carol", "dave")
    sightings = tuple(Sighting(by, seen, port) for by, port in zip(names, ports, strict=False))
    at = f"{OUT}:5000"
    return replace(MADE, seen=seen, sightings=sightings, dialled_at=at, reason=NO_ANSWER)


CLOSED = replace(MADE, dialled_at=f"{OUT}:5000", reason=NO_ANSWER)


@pytest.mark.parametrize(
    ("made", "change"),
    [
        (MADE, PortChange.NO_ROUTER),
        (behind_nat(41201, seen="::ffff:10.0.0.4"), PortChange.NO_ROUTER),
        (replace(MADE, sightings=(Sighting("the master", "", 0),)), PortChange.NO_ROUTER),
        (behind_nat(41201), PortChange.KEPT),
        (behind_nat(41201, 41201), PortChange.KEPT),
        (behind_nat(50001), PortChange.UNKNOWN),
        (behind_nat(50001, 50001), PortChange.ONE),
        (behind_nat(50001, 50002), PortChange.EACH),
        (behind_nat(41201, 50002), PortChange.EACH),
    ],
)
def test_what_a_router_does_with_the_port(made: Examination, change: PortChange) -> None:
    assert port_change(made) is change


def test_members_inside_tell_nothing_about_the_router() -> None:
    made = behind_nat(50001)
    inside = Sighting("carol", OWN, 41201)
    seen = replace(made, sightings=(*made.sightings, inside))
    assert port_change(seen) is PortChange.UNKNOWN


def test_a_member_in_a_vpn_tells_nothing_about_the_router() -> None:
    made = behind_nat(41201)
    vpn = Sighting("carol", "10.8.0.1", 50001)
    assert port_change(replace(made, sightings=(*made.sightings, vpn))) is PortChange.KEPT


def test_an_address_for_each_destination_is_symmetric() -> None:
    made = behind_nat(41201)
    other = Sighting("carol", "198.51.100.8", 41201)
    assert port_change(replace(made, sightings=(*made.sightings, other))) is PortChange.EACH


@pytest.mark.parametrize(
    ("made", "found"),
    [
        (behind_nat(41201), "the NAT keeps the port (41201 toward the master)"),
        (
            behind_nat(50001, 50001),
            "the NAT replaces port 41201 by one for all (50001 toward the master, 50001 toward "
            "carol)",
        ),
        (
            behind_nat(50001, 50002),
            "the NAT is symmetric: another port for each destination (50001 toward the master, "
            "50002 toward carol)",
        ),
        (
            behind_nat(50001),
            "the NAT replaces port 41201 (50001 toward the master); whether it is symmetric could "
            "not be told, because no member outside has seen the port, too",
        ),
    ],
)
def test_a_nat_that_keeps_peers_out(made: Examination, found: str) -> None:
    said = nat_finding(made)
    begin = f"the master sees this machine as {OUT}, and its own address is {OWN}; "
    assert said == Finding("NAT", Severity.WARN, begin + found, FORWARD)


def test_a_nat_that_does_no_harm() -> None:
    assert nat_finding(MADE).level is Severity.OK
    reached = replace(behind_nat(50001), reason="")
    assert nat_finding(reached).found.endswith("; the NAT lets peers in")
    assert nat_finding(reached).level is Severity.OK


DIRECT = "direct to members that this machine can dial, because others cannot dial it"


@pytest.mark.parametrize(
    ("made", "found", "remedy"),
    [
        (
            replace(CLOSED, relays=True),
            "to the others, both dial at the same time, and the master forwards until then, or if "
            "that fails",
            f"for direct links: {OPEN}",
        ),
        (
            behind_nat(41201),
            "to the others, both dial at the same time, and a member forwards until then, or if "
            "that fails",
            f"for direct links: {FORWARD}",
        ),
        (
            replace(behind_nat(50001, 50002), relays=True),
            "the master forwards to the others, because the NAT is symmetric",
            f"for direct links: {FORWARD}",
        ),
        (
            replace(behind_nat(50001), relays=True),
            "the master forwards to the others, unless the NAT is not symmetric",
            f"for direct links: {FORWARD}",
        ),
        (
            replace(behind_nat(41201), members=()),
            "no link to the others, because nobody forwards",
            f"start the master with `pccl master --relay`; or {FORWARD}",
        ),
    ],
)
def test_links_of_a_machine_that_nobody_can_dial(
    made: Examination, found: str, remedy: str
) -> None:
    assert links_finding(made) == Finding("links", Severity.WARN, f"{DIRECT}; {found}", remedy)


def test_two_that_nobody_can_dial_and_no_relay() -> None:
    silent = tuple(replace(one, reason="no answer") for one in MADE.members)
    assert links_finding(replace(CLOSED, members=silent)).level is Severity.FAIL


def test_links_of_a_machine_that_others_dial() -> None:
    direct = links_finding(MADE)
    assert direct == Finding("links", Severity.OK, "direct: others dial 10.0.0.4:5000", "")
    mapped = links_finding(replace(MADE, router=forwarded("8.8.4.4")))
    assert mapped.found == "direct: others dial 10.0.0.4:5000, which the router forwards (PCP)"
    untested = links_finding(replace(MADE, was_dialled=False, reason="later", router=SILENT))
    assert untested.found == "this machine dials others; whether they can dial it is not known"


def test_nobody_can_dial_this_machine() -> None:
    said = reach_in_finding(CLOSED)
    assert said == Finding(
        "reach in", Severity.WARN, f"the master cannot reach {OUT}:5000: no answer in time", OPEN,
    )  # fmt: skip
    assert reach_in_finding(behind_nat(41201)).remedy == FORWARD


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("", ""),
        ("another process answered instead of peer 0", ""),
        ("the process does not speak this protocol", ": the process does not speak this protocol"),
    ],
)
def test_another_process_has_this_address(reason: str, why: str) -> None:
    said = reach_in_finding(replace(MADE, was_here=False, reason=reason))
    assert said == Finding(
        "reach in",
        Severity.WARN,
        f"another process than this one has answered the master at 10.0.0.4:5000{why}",
        "correct the address that this machine announces (PCCL_ADVERTISE, --advertise)",
    )
