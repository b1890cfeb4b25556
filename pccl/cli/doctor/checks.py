"""Judges facts about a machine and its path to a run. Pure: facts go in, findings come out."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from pccl.addresses import is_loopback
from pccl.cli.doctor.facts import AddressFacts, MachineFacts, PathFacts, RunFacts, TokenFacts
from pccl.inquiry import Examination, RouterReport

REQUIRED = (
    *("pccl", "numpy", "ml_dtypes", "msgpack", "xxhash", "blake3", "safetensors", "cryptography"),
    *("click", "rich"),
)
"""Packages without which the library does not work."""

ASKED = (*REQUIRED, "uvloop", "torch")
"""Packages whose versions the doctor shows."""

NOT_INSTALLED = "not installed"
"""What the library says of UPnP without its extra."""

DESCRIPTORS_NEEDED = 2048
"""Enough for a run of 256 peers: two lanes to each, two descriptors for each lane, and as many for
connections that have not proven the token yet."""

DESCRIPTORS_MIN = 128
"""Below this, a process cannot hold the connections of a small run beside its own files."""

LOOPBACK_BYTES_PER_S_MIN = 200e6
"""A slower interpreter limits a run on a line of 1 Gbit/s."""

PATH_MTU_MIN = 1280
"""The smallest packet that IPv6 allows; a smaller value is a mistake of a tunnel."""

ROUND_TRIP_S_MAX = 0.5
"""Every joint call takes some round trips, so above this they dominate."""

LONG_PATH_S = 0.02
"""Above this, a lost packet costs a connection much of its speed, unless it uses BBR."""

CLOCK_OFFSET_S_MAX = 2.0
"""Above this, the times in the logs of different machines do not tell what came first."""


class Severity(enum.StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        level: how bad it is.
        found: what was found.
        remedy: what to do; empty if there is nothing to do.
    """

    name: str
    level: Severity
    found: str
    remedy: str = ""


def machine_findings(machine: MachineFacts) -> Iterator[Finding]:
    """Judge this machine."""
    yield _interpreter(machine)
    yield _packages(machine)
    yield _descriptors(machine)
    yield _congestion_default(machine)
    yield _loopback(machine.loopback_bytes_per_s)


def outward_finding(machine: MachineFacts) -> Finding:
    """Judge the way to the internet, where no master is given."""
    if not machine.outward:
        remedy = "connect this machine to a network; a run on this machine alone works"
        return Finding("interface", Severity.WARN, "no route to the internet", remedy)
    way = _interface(machine.interface, machine.outward, machine.interface_mtu)
    return Finding("interface", Severity.OK, f"{way}: the default route leaves through it")


def token_finding(token: TokenFacts, host: str) -> Finding:
    """Judge the token; ``host``: numeric host of the master, or empty."""
    if token.flaw:
        return Finding("token", Severity.FAIL, token.flaw)
    if token.nbytes is not None:
        found = f"{token.nbytes} bytes, too hard to guess"
        return Finding("token", Severity.OK, found)
    if not host or is_loopback(host):
        return Finding("token", Severity.OK, "none; that is safe for a run on one machine only")
    found = "none here: if the run has none either, every process that reaches it can join"
    remedy = "give the run's token (PCCL_TOKEN, --token FILE); pccl master --token auto makes one"
    return Finding("token", Severity.WARN, found, remedy)


def router_finding(router: RouterReport, *, is_reached: bool = False) -> Finding:
    """Judge what the router has answered.

    Args:
        router: the answer.
        is_reached: whether the master has reached this machine.
    """
    forwarded = router.forwarded
    if forwarded is not None:
        host = f" of {forwarded.host}" if forwarded.host else ""
        found = f"it forwards port {forwarded.port}{host} to this machine ({forwarded.by})"
        if is_reached or forwarded.public_host or not forwarded.host:
            return Finding("router", Severity.OK, found)
        found += ", but this address is not public: another router lies before it"
        remedy = "ask the provider for a public address, or run `pccl master --relay`"
        return Finding("router", Severity.WARN, found, remedy)
    if not router.was_asked and router.reason:
        return Finding("router", Severity.OK, f"not asked for a port: {router.reason}")
    found = f"it forwards no port to this machine: {router.reason or 'no answer in time'}"
    if is_reached:
        return Finding("router", Severity.OK, f"{found}; none is needed")
    remedy = "switch on PCP, NAT-PMP or UPnP in the router"
    if NOT_INSTALLED in found:
        remedy += "; for UPnP: pip install 'pccl[upnp]'"
    remedy += "; or forward a TCP port to this machine by hand: PCCL_ADVERTISE=:PORT"
    return Finding("router", Severity.WARN, found, remedy)


def address_finding(address: AddressFacts) -> Finding:
    """Judge a variable with an address of this machine."""
    if not address.flaw:
        return Finding(address.variable, Severity.OK, address.value)
    remedy = f"correct {address.variable}, or unset it: peers of this machine fail with it"
    return Finding(address.variable, Severity.FAIL, address.flaw, remedy)


def path_findings(path: PathFacts) -> Iterator[Finding]:
    """Judge the path to one master, as far as the kernel knows it."""
    if path.trouble:
        yield Finding(
            "reach out",
            Severity.FAIL,
            f"no connection to {path.master}: {path.trouble}",
            "check the address, that `pccl master` runs and listens there (--listen), and that "
            "firewalls let its port through",
        )
        return
    via = "" if path.master == path.address else f", which is {path.address}"
    yield Finding("reach out", Severity.OK, f"connected to {path.master}{via}")
    way = _interface(path.interface, path.local, path.interface_mtu)
    yield Finding("interface", Severity.OK, f"{way}: the route to {path.host} leaves through it")
    yield _mtu(path)
    yield _round_trip(path)
    yield _congestion_used(path)


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


# -- one machine -----------------------------------------------------------------------------------


def _interpreter(machine: MachineFacts) -> Finding:
    found = f"{machine.implementation} {machine.python} on {machine.system}"
    if machine.implementation != "CPython":
        return Finding("interpreter", Severity.WARN, found, "use CPython; others are untested")
    if not machine.system.startswith("Linux"):
        return Finding("interpreter", Severity.WARN, found, "use Linux; other systems are untested")
    return Finding("interpreter", Severity.OK, found)


def _packages(machine: MachineFacts) -> Finding:
    versions = machine.versions
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    missing = [name for name in REQUIRED if not versions.get(name)]
    if missing:
        names = ", ".join(missing)
        remedy = "install pccl again, with its requirements"
        return Finding("packages", Severity.FAIL, f"{found}; not installed: {names}", remedy)
    if not versions.get("uvloop"):
        remedy = "pip install uvloop: without it, all transfers are several times slower"
        return Finding("packages", Severity.WARN, f"{found}; not installed: uvloop", remedy)
    return Finding("packages", Severity.OK, found)


def _descriptors(machine: MachineFacts) -> Finding:
    limit = machine.descriptors_max
    found = f"at most {limit} for a process; a run of 256 peers needs up to {DESCRIPTORS_NEEDED}"
    if limit >= DESCRIPTORS_NEEDED:
        return Finding("descriptors", Severity.OK, found)
    level = Severity.WARN if limit >= DESCRIPTORS_MIN else Severity.FAIL
    remedy = f"raise the hard limit: ulimit -Hn {DESCRIPTORS_NEEDED}, or LimitNOFILE= of systemd"
    return Finding("descriptors", level, found, remedy)


def _congestion_default(machine: MachineFacts) -> Finding:
    choices = ", ".join(machine.congestion_choices)
    found = f"{machine.congestion or 'unknown'} by default"
    return Finding("congestion", Severity.OK, found + (f"; loaded: {choices}" if choices else ""))


def _loopback(bytes_per_s: float | None) -> Finding:
    if bytes_per_s is None:
        remedy = "look at the firewall of this machine"
        return Finding("loopback", Severity.FAIL, "this machine cannot connect to itself", remedy)
    found = f"{bytes_per_s / 1e9:.2f} GB/s between two threads of this interpreter"
    if bytes_per_s >= LOOPBACK_BYTES_PER_S_MIN:
        return Finding("loopback", Severity.OK, found)
    remedy = "other work may occupy the processors; a run will not be faster than this"
    return Finding("loopback", Severity.WARN, found, remedy)


def _interface(name: str, address: str, mtu: int | None) -> str:
    size = "" if mtu is None else f", MTU {mtu}"
    return f"{name or 'unknown'} ({address}{size})"


# -- a path ----------------------------------------------------------------------------------------


def _mtu(path: PathFacts) -> Finding:
    if path.path_mtu is None:
        return Finding("MTU", Severity.OK, "the kernel does not know the MTU of the path")
    segment = "" if path.segment_bytes is None else f", TCP segments of {path.segment_bytes} bytes"
    found = f"{path.path_mtu} on the path{segment}"
    if path.path_mtu < PATH_MTU_MIN:
        remedy = f"set the MTU of the tunnel or VPN to {PATH_MTU_MIN} or more"
        return Finding("MTU", Severity.WARN, found, remedy)
    is_local = is_loopback(path.host)
    if not is_local and path.interface_mtu is not None and path.path_mtu < path.interface_mtu:
        found += f", below that of the interface ({path.interface_mtu}): a tunnel lies between"
    return Finding("MTU", Severity.OK, found)


def _round_trip(path: PathFacts) -> Finding:
    median_s = statistics.median(path.round_trips_s)
    found = f"{median_s * 1e3:.2f} ms, the median of {len(path.round_trips_s)} connects"
    if median_s <= ROUND_TRIP_S_MAX:
        return Finding("round trip", Severity.OK, found)
    remedy = "look for a loaded line, or run the master closer to the peers"
    return Finding("round trip", Severity.WARN, found, remedy)


def _congestion_used(path: PathFacts) -> Finding:
    name = "congestion to the master"
    if not path.congestion:
        return Finding(name, Severity.OK, "unknown on this system")
    long = statistics.median(path.round_trips_s) > LONG_PATH_S
    if not long or path.congestion.startswith("bbr"):
        return Finding(name, Severity.OK, path.congestion)
    remedy = "if this path loses packets: sysctl net.ipv4.tcp_congestion_control=bbr"
    return Finding(name, Severity.WARN, f"{path.congestion} on a long path", remedy)


# -- a run -----------------------------------------------------------------------------------------


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
        f"PCCL_ADVERTISE={_bracketed(made.seen)}:PORT; or use a VPN"
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


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


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
        address = f"{_bracketed(member.host)}:{member.port}"
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
