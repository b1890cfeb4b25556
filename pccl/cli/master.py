"""``pccl master``: one master in the foreground."""

from __future__ import annotations

import ipaddress
import logging
import signal
import threading
from types import FrameType

import click

import pccl
from pccl.cli import logs
from pccl.errors import LinkError

DEFAULT_LISTEN = "127.0.0.1:48148"
"""Loopback unless told otherwise: a master has no password, so nobody opens one by accident."""


def is_loopback(host: str) -> bool:
    """Whether a host, IPv6 in brackets or not, can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of this machine: ``0.0.0.0`` or ``[::]``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def greeting(address: str) -> list[str]:
    """What to tell the user about a master that listens.

    Args:
        address: ``HOST:PORT`` that the master is bound to.
    """
    host, _, port = address.rpartition(":")
    lines = [f"master listening on {address}"]
    if is_loopback(host):
        lines.append("  reachable from this machine only; for others: --listen 0.0.0.0:PORT")
    if is_wildcard(host):
        address = f"HOST:{port}"
        lines.append("  reachable from other machines; HOST below is a name or address of this one")
    lines += [f'  on each peer: pccl.Communicator("{address}")', "  Ctrl-C ends it"]
    return lines


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where to listen; port 0 takes a free one.",
)
@logs.verbose_option(logging.INFO)
def master(listen: str) -> None:
    """Run a master: the process that keeps a run's membership and decides.

    It listens on this machine only unless told otherwise, and runs until Ctrl-C or SIGTERM.
    """
    stopped = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.set()

    for wanted in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wanted, stop)

    try:
        node = pccl.MasterNode(listen)
        node.run()
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from error
    except LinkError as error:
        hint = "choose another address with --listen"
        raise click.ClickException(f"{error.reason}; {hint}") from error
    try:
        click.echo("\n".join(greeting(node.address)))
        stopped.wait()
    finally:
        node.interrupt()
    click.echo("master ended")
