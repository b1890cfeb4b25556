"""What the doctor knows of a good machine in a good run."""

from __future__ import annotations

from collections.abc import Iterable

from pccl.cli.doctor import checks
from pccl.cli.doctor.checks import Finding
from pccl.cli.doctor.facts import MachineFacts, PathFacts
from pccl.inquiry import (
    Examination,
    ForwardedPort,
    MasterStatus,
    MemberDialled,
    RouterReport,
    Sighting,
)
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
    local="10.0.0.4",
    local_port=41201,
    sightings=(Sighting("the master", "10.0.0.4", 41201),),
    clock_offset_s=0.001,
    clock_error_s=0.006,
    loses_long="",
    relays=False,
    dialled_at="10.0.0.4:5000",
    was_dialled=True,
    was_here=True,
    reason="",
    members=(
        MemberDialled(1, "p0", "10.0.0.1", 4001, ""),
        MemberDialled(2, "p1", "fd00::2", 4002, ""),
    ),
    member_count=2,
    router=RouterReport(reason="10.0.0.4 is not a private address"),
)


SILENT = RouterReport(None, "PCP: no answer; NAT-PMP: no answer; UPnP: no answer", True)


def named(findings: Iterable[Finding], name: str) -> Finding:
    """The one finding with this name."""
    (finding,) = [one for one in findings if one.name == name]
    return finding


def forwarded(host: str) -> RouterReport:
    """A router that forwards a port of this address."""
    return RouterReport(ForwardedPort(MappingProtocol.PCP, host, 48200), "", True)
