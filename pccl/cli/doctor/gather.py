"""Collects the facts that the doctor judges."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from pccl import config, inquiry
from pccl.addresses import parse_address
from pccl.cli.bench.machine import congestion_default
from pccl.cli.doctor import network
from pccl.cli.doctor.checks import ASKED, bracketed
from pccl.cli.doctor.facts import (
    AddressFacts,
    FailedDial,
    MachineFacts,
    Obstacle,
    PathFacts,
    RunFacts,
)
from pccl.errors import NotAdmitted, PCCLError, RemoteProtocolError
from pccl.inquiry import LongPacketsLost, RouterReport

CHOICES = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

HOSTS_MAX = 8
"""Addresses of one master that are dialled."""

UNLIMITED = 1 << 20
"""What counts as the limit of descriptors if there is none."""


def interface() -> str:
    """Return the network interface in ``PCCL_INTERFACE``; empty: any, or it is not usable."""
    try:
        return config.resolve_interface()
    except ValueError:
        return ""


def machine_facts() -> MachineFacts:
    """Look at this machine; takes up to two seconds on a slow one."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    outward = network.outward(interface())
    name = interface() or (inquiry.interface_of(outward) if outward else "")
    return MachineFacts(
        implementation=platform.python_implementation(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        versions={name: _version(name) for name in ASKED},
        descriptors_max=UNLIMITED if hard == resource.RLIM_INFINITY else hard,
        congestion=congestion_default() or "",
        congestion_choices=_choices(),
        loopback_bytes_per_s=network.loopback_bytes_per_s(),
        outward=outward,
        interface=name,
        interface_mtu=network.mtu_of(name),
    )


def address_facts(timeout_s: float) -> Iterator[AddressFacts]:
    """Look at ``PCCL_LISTEN``, ``PCCL_ADVERTISE`` and ``PCCL_INTERFACE``, if they are set.

    Args:
        timeout_s: longest look-up of a name.
    """
    for variable, resolve in (
        (config.LISTEN, config.resolve_listen),
        (config.ADVERTISE, config.resolve_advertise),
    ):
        if not (text := os.environ.get(variable)):
            continue
        flaw = ""
        try:
            found = resolve(None)
            hosts = network.resolve(found.host, 0, timeout_s) if found and found.host else []
            for host in hosts if variable == config.LISTEN else []:
                network.check_own(host)
        except ValueError as error:
            flaw = str(error)
        except OSError as error:
            flaw = f"{text!r}: {_reason(error)}"
        yield AddressFacts(variable, text, flaw)
    if text := os.environ.get(config.INTERFACE):
        try:
            config.resolve_interface()
        except ValueError as error:
            yield AddressFacts(config.INTERFACE, text, str(error))
        else:
            shown = ", ".join(inquiry.interface_hosts(text)) or "without an address"
            yield AddressFacts(config.INTERFACE, f"{text} ({shown})")


def path_facts(master: str, timeout_s: float) -> PathFacts:
    """Connect to all addresses of a master, and send nothing; the first that answers counts.

    Args:
        master: address of one master, ``host:port``.
        timeout_s: longest look-up, and longest attempt for each of its addresses.
    """
    given = parse_address(master)
    failed: list[FailedDial] = []
    connected: list[network.Connected] = []
    try:
        hosts = network.resolve(given.host, given.port, timeout_s)
    except OSError as error:
        unknown = FailedDial(given.host, Obstacle.NO_NAME, _reason(error))
        return PathFacts(master, (unknown,), given.port)
    for host in hosts[:HOSTS_MAX]:
        try:
            connected.append(network.connect(host, given.port, timeout_s, interface()))
        except OSError as error:
            failed.append(FailedDial(host, _obstacle(error), _reason(error)))
    if not connected:
        return PathFacts(master, tuple(failed), given.port)
    found = connected[0]
    name = inquiry.interface_of(found.local)
    return PathFacts(
        master,
        tuple(failed),
        given.port,
        address=f"{bracketed(found.host)}:{given.port}",
        host=found.host,
        local=found.local,
        interface=name,
        interface_mtu=network.mtu_of(name),
        path_mtu=found.path_mtu,
        segment_bytes=found.segment_bytes,
        congestion=found.congestion,
        round_trips_s=found.round_trips_s,
    )


def router_facts() -> RouterReport:
    """Ask the router of this machine for a port; takes some seconds if it does not answer."""
    try:
        return inquiry.examine_router()
    except PCCLError as error:
        return RouterReport(reason=error.reason)


def run_facts(path: PathFacts, token: bytes | None, timeout_s: float) -> RunFacts:
    """Ask a master and the members of its run.

    Args:
        path: the path to the master.
        token: the secret of the run; None: as in the environment.
        timeout_s: limit for each answer of the master.
    """
    try:
        made = inquiry.examine_master(path.address, token=token, timeout_s=timeout_s)
    except RemoteProtocolError as error:
        refusal, _, remedy = error.reason.partition(": ")
        return RunFacts(path, refusal, remedy)
    except LongPacketsLost as error:
        return RunFacts(path, error.reason, loses_long=True)
    except NotAdmitted as error:
        return RunFacts(path, error.reason, "see the master's log")
    except PCCLError as error:
        return RunFacts(
            path, error.reason, "restart the process that listens there, or correct the port"
        )
    return RunFacts(path, examination=made)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _choices() -> tuple[str, ...]:
    try:
        return tuple(CHOICES.read_text("ascii").split())
    except OSError:
        return ()


def _obstacle(error: OSError) -> Obstacle:
    if isinstance(error, ConnectionRefusedError):
        return Obstacle.REFUSED
    if isinstance(error, TimeoutError):
        return Obstacle.SILENT
    has_route = error.errno not in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL)
    return Obstacle.OTHER if has_route else Obstacle.NO_ROUTE


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return str(error) if isinstance(error, network.NoNameServer) else "no answer in time"
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return str(error.strerror or error).lower()
