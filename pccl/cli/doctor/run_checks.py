"""Judges what a master and the members of its run have answered. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import IPv6Address, ip_address

from pccl.cli.doctor.checks import Finding, Severity, bracketed, router_finding
from pccl.cli.doctor.facts import PathFacts, RunFacts
from pccl.inquiry import Examination

CLOCK_OFFSET_S_MAX = 2.0
"""Above this, the times in the logs of different machines do not tell what came first."""


def run_findings(run: RunFacts) -> Iterator[Finding]:
    """Judge what the master and the members of a run have answered."""
    made = run.examination
    if made is None:
        yield Finding("handshake", Severity.FAIL, run.refusal, run.remedy)
        return
    count = made.member_count
    standing = f"the run has {count} member{'s' * (count != 1)}"
    if made.status.waits_for:
        standing = f"this master coordinates no run: {made.status.waits_for}"
    yield Finding(
        "handshake", Severity.OK, f"the master accepts this version and token; {standing}"
    )
    if made.seen:
        yield _clock(made)
        yield _nat(run.path, made)
    if made.router is not None:
        yield router_finding(made.router, is_reached=made.was_dialled and not made.reason)
    yield _reach_in(made)
    yield _members(made)
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


def _nat(path: PathFacts, made: Examination) -> Finding:
    if _same_host(path.local, made.seen):
        return Finding(
            "NAT", Severity.OK, f"none: the master sees this machine as {made.seen}, too"
        )
    found = f"the master sees this machine as {made.seen}, and its own address is {path.local}"
    if made.was_dialled and not made.reason:
        return Finding("NAT", Severity.OK, f"{found}; the NAT lets peers in")
    remedy = (
        "forward a TCP port of the router to this machine, and set PCCL_LISTEN=:PORT and "
        f"PCCL_ADVERTISE={bracketed(made.seen)}:PORT; or use a VPN"
    )
    return Finding("NAT", Severity.WARN, found, remedy)


def _same_host(one: str, other: str) -> bool:
    return _plain(one) == _plain(other)


def _plain(host: str) -> object:
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _reach_in(made: Examination) -> Finding:
    if made.was_dialled and not made.reason:
        return Finding("reach in", Severity.OK, f"the master has reached {made.dialled_at}")
    if not made.was_dialled:
        remedy = "run the doctor again later"
        return Finding("reach in", Severity.WARN, f"not tested: {made.reason}", remedy)
    return Finding(
        "reach in",
        Severity.WARN,
        f"the master cannot reach {made.dialled_at}: {_why(made.reason, made.dialled_at)}",
        "open a range of TCP ports in the firewall of this machine and of its network, and set it: "
        "PCCL_ADVERTISE=:48200-48299; until then this machine needs members that it can dial",
    )


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
    if made.was_dialled and made.reason:
        remedy = "no link to them is possible: open ports here, or there"
        return Finding("members", Severity.FAIL, found, remedy)
    remedy = "they must dial this machine, so keep its ports open"
    return Finding("members", Severity.WARN, found, remedy)


def _why(reason: str, address: str) -> str:
    return reason.removeprefix(f"cannot reach {address}: ")


def _named(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:3])
    return shown if len(texts) <= 3 else f"{shown} and {len(texts) - 3} more"
