"""Judges what a master and the members of its run have answered. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pccl.cli.doctor.checks import Finding, Severity, bracketed, router_finding
from pccl.cli.doctor.facts import PathFacts, RunFacts
from pccl.cli.doctor.link_checks import links_finding, nat_finding, reach_in_finding
from pccl.inquiry import Examination

VAGUE = ("", "is the address right?")
"""Remedies of a handshake with something else than a master."""

RIGHT_ADDRESS = "correct the address, or the port: `pccl master` prints it when it starts"

CLOCK_OFFSET_S_MAX = 2.0
"""Above this, the times in the logs of different machines do not tell what came first."""


def run_findings(run: RunFacts) -> Iterator[Finding]:
    """Judge what the master and the members of a run have answered."""
    made = run.examination
    if made is None and run.loses_long:
        yield _long_packets(run.path, run.refusal)
        return
    if made is None:
        remedy = run.remedy if run.remedy not in VAGUE else RIGHT_ADDRESS
        yield Finding("handshake", Severity.FAIL, run.refusal, remedy)
        return
    count = made.member_count
    standing = f"the run has {count} member{'s' * (count != 1)}"
    if made.status.waits_for:
        standing = f"this master coordinates no run: {made.status.waits_for}"
    yield Finding(
        "handshake", Severity.OK, f"the master accepts this version and token; {standing}"
    )
    yield _long_packets(run.path, made.loses_long)
    if made.seen:
        yield _clock(made)
        yield nat_finding(made)
    if made.router is not None:
        yield router_finding(made.router, made.seen, is_reached=made.is_reached)
    yield reach_in_finding(made)
    yield _members(made)
    yield links_finding(made)
    yield Finding(
        "throughput",
        Severity.OK,
        "not measured: a master sends no bulk data; members measure their links while they work",
    )


def _clock(made: Examination) -> Finding:
    offset_s, error_s = made.clock_offset_s, made.clock_error_s
    side = "ahead of" if offset_s > 0 else "behind"
    found = f"the master's is {_span(abs(offset_s))} {side} this one, ± {_span(error_s)}"
    if abs(offset_s) - error_s <= CLOCK_OFFSET_S_MAX:
        return Finding("clock", Severity.OK, found)
    remedy = "set both clocks by NTP, so that times in logs agree; the run does not need it"
    return Finding("clock", Severity.WARN, found, remedy)


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _members(made: Examination) -> Finding:
    if not made.members:
        return Finding("members", Severity.OK, "the run has none to dial")
    dialled = f"dialled {len(made.members)} of {made.member_count}"
    silent: list[str] = []
    for member in made.members:
        address = f"{bracketed(member.host)}:{member.port}"
        if member.reason:
            name = member.name or f"peer {member.peer}"
            silent.append(f"{name} at {address} ({_why(member.reason, address)})")
    if not silent:
        return Finding("members", Severity.OK, f"{dialled}; all answer")
    found = f"{dialled}; no answer from {_named(silent)}"
    if made.is_reached:
        remedy = "they dial this machine, so keep its port open"
    else:
        remedy = "open a port here, or there; the line `links` says what happens without"
    return Finding("members", Severity.WARN, found, remedy)


def _long_packets(path: PathFacts, reason: str) -> Finding:
    if not reason:
        return Finding("long packets", Severity.OK, "they arrive at the master, and come back")
    found = f"short packets arrive, and long ones do not: {reason}"
    remedy = (
        f"make packets shorter: ip link set dev {path.interface or 'INTERFACE'} mtu 1280, or "
        "sysctl net.ipv4.tcp_mtu_probing=1 here and on the master's machine; a tunnel or a VPN on "
        "the way drops long packets and does not say so"
    )
    return Finding("long packets", Severity.FAIL, found, remedy)


def _why(reason: str, address: str) -> str:
    return reason.removeprefix(f"cannot reach {address}: ")


def _named(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:3])
    return shown if len(texts) <= 3 else f"{shown} and {len(texts) - 3} more"
