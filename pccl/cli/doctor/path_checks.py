"""Judges facts about the path to a master, as far as the kernel knows it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pccl.addresses import is_loopback
from pccl.cli.doctor.checks import Finding, Severity, bracketed, interface_text, is_inside
from pccl.cli.doctor.facts import FailedDial, Obstacle, PathFacts

PATH_MTU_MIN = 1280
"""The smallest packet that IPv6 allows; a smaller value is a mistake of a tunnel."""

ROUND_TRIP_S_MAX = 0.5
"""Every joint call takes some round trips, so above this they dominate."""

LONG_PATH_S = 0.02
"""Above this, a lost packet costs a connection much of its speed, unless it uses BBR."""


def path_findings(path: PathFacts) -> Iterator[Finding]:
    """Judge the path to one master, as far as the kernel knows it."""
    if not path.address:
        found = f"no connection to {path.master}: {_reasons(path.failed)}"
        yield Finding("reach out", Severity.FAIL, found, _way_in(path))
        return
    via = "" if path.master == path.address else f", which is {path.address}"
    found = f"connected to {path.master}{via}"
    if path.failed:
        found += f"; no answer at {'; '.join(_named(path.failed))}"
        yield Finding("reach out", Severity.WARN, found, _other_way(path.failed[0].host, path))
    else:
        yield Finding("reach out", Severity.OK, found)
    way = interface_text(path.interface, path.local, path.interface_mtu)
    yield Finding("interface", Severity.OK, f"{way}: the route to {path.host} leaves through it")
    yield _mtu(path)
    yield _round_trip(path)
    yield _congestion_used(path)


def _reasons(failed: Sequence[FailedDial]) -> str:
    if len(failed) > 1:
        return "; ".join(_named(failed))
    no_name = failed[0].obstacle is Obstacle.NO_NAME
    return f"{failed[0].host} has no address: {failed[0].reason}" if no_name else failed[0].reason


def _named(failed: Sequence[FailedDial]) -> list[str]:
    return [f"{one.host}: {one.reason}" for one in failed]


def _other_way(host: str, path: PathFacts) -> str:
    """Return what to do about one of several addresses that does not answer."""
    version = "IPv6" if ":" in host else "IPv4"
    return (
        f"let TCP port {path.port} through in {version}, too, or repair {version} on the way, or "
        f"remove {host} from the name; until then each dial may take longer, and peers work"
    )


def _way_in(path: PathFacts) -> str:
    """Return what to do so that a master can be dialled."""
    obstacles = {one.obstacle: one.host for one in reversed(path.failed)}
    if (host := obstacles.get(Obstacle.REFUSED)) is not None:
        here = is_loopback(host)
        every = "[::]" if ":" in host else "0.0.0.0"
        listen = f"{bracketed(host) if here else every}:{path.port}"
        return (
            f"start the master {'here' if here else 'there'}: pccl master --listen "
            f"{listen}; if it runs, correct the port"
            + ("" if here else f", or let TCP port {path.port} through the firewall that refuses")
        )
    if Obstacle.NO_NAME in obstacles:
        return "correct the name, or write the IP address of the master"
    host = next(iter(obstacles.values()))
    if is_inside(host):
        return (
            f"{host} is a private address, which answers only inside its own network: if the "
            "master is elsewhere, write its public address, and forward the port on its router"
        )
    if Obstacle.SILENT in obstacles:
        return (
            f"open TCP port {path.port} in the firewall of the master's machine and of its network "
            "(in a cloud, the security group; at home, forward it on the router), or correct the "
            "address"
        )
    if ":" in host:
        return "this machine has no way there in IPv6: write an IPv4 address of the master"
    return "connect this machine to the master's network, or correct the address"


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
