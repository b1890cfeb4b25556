"""Judges facts about a machine and its path to a run. Pure: facts go in, findings come out."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from pccl.addresses import is_loopback
from pccl.cli.doctor.facts import AddressFacts, MachineFacts, TokenFacts
from pccl.inquiry import RouterReport

REQUIRED = (
    *("pccl", "numpy", "ml_dtypes", "msgpack", "xxhash", "blake3", "safetensors", "cryptography"),
    *("click", "rich"),
)
"""Packages without which the library does not work."""

ASKED = (*REQUIRED, "uvloop", "torch")
"""Packages whose versions the doctor shows."""

OUTER_ROUTER = (
    "if the outer router is yours, make one of the two a bridge, or forward the port on both; if "
    "it is the provider's, ask for a public address (or IPv6), or run `pccl master --relay`"
)
"""What to do about two routers in a row."""

NOT_INSTALLED = "not installed"
"""What the library says of UPnP without its extra."""

DESCRIPTORS_NEEDED = 2048
"""Enough for a run of 256 peers: two lanes to each, two descriptors for each lane, and as many for
connections that have not proven the token yet."""

DESCRIPTORS_MIN = 128
"""Below this, a process cannot hold the connections of a small run beside its own files."""

INSIDE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")))
"""Addresses that each network may use inside (RFC 1918, RFC 4193)."""

LOOPBACK_BYTES_PER_S_MIN = 200e6
"""A slower interpreter limits a run on a line of 1 Gbit/s."""


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
    way = interface_text(machine.interface, machine.outward, machine.interface_mtu)
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


def router_finding(router: RouterReport, seen: str = "", *, is_reached: bool = False) -> Finding:
    """Judge what the router has answered.

    Args:
        router: the answer.
        seen: the address from which the master sees this machine; empty: unknown.
        is_reached: whether the master has reached this machine.
    """
    forwarded = router.forwarded
    if forwarded is not None:
        host = f" of {forwarded.host}" if forwarded.host else ""
        found = f"it forwards port {forwarded.port}{host} to this machine ({forwarded.by})"
        is_other = bool(seen) and forwarded.host not in ("", seen)
        if is_reached or (not seen and forwarded.public_host) or not forwarded.host:
            return Finding("router", Severity.OK, found)
        if not forwarded.public_host:
            found += ", but this address is not public: another router lies before it"
        elif is_other:
            found += f", but the master sees this machine as {seen}: another router lies before it"
        else:
            found += ", but the master does not reach it"
            remedy = "let this machine's firewall accept dials, or restart the router"
            return Finding("router", Severity.WARN, found, remedy)
        return Finding("router", Severity.WARN, found, OUTER_ROUTER)
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


def interface_text(name: str, address: str, mtu: int | None) -> str:
    """Describe a network interface with an address of this machine."""
    size = "" if mtu is None else f", MTU {mtu}"
    return f"{name or 'unknown'} ({address}{size})"


def bracketed(host: str) -> str:
    """Return a numeric host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def is_inside(host: str) -> bool:
    """Whether a numeric host means something only inside its own network."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return any(address in network for network in INSIDE)


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
