"""``pccl master``: one master in the foreground."""

from __future__ import annotations

import ipaddress
import logging
import secrets
import shlex
import signal
import threading
from types import FrameType

import click

import pccl
from pccl import config
from pccl.addresses import is_loopback, parse_address
from pccl.cli import logs
from pccl.cli.command_line import check_address, read_secret
from pccl.errors import LinkError, LocalProtocolError

DEFAULT_LISTEN = "127.0.0.1:48148"
"""Loopback unless told otherwise: nobody opens a master to others by accident."""

AUTO = "auto"
AUTO_TOKEN_BYTES = 32


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of this machine: ``0.0.0.0`` or ``[::]``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def greeting(
    address: str,
    token: str | None = None,
    *,
    secured: bool = False,
    standby: str | None = None,
    standby_of: str | None = None,
) -> list[str]:
    """What to tell the user about a master that listens.

    Args:
        address: ``HOST:PORT`` that the master is bound to.
        token: a secret that the user does not know yet.
        secured: whether peers need a token.
        standby: where a second master is expected.
        standby_of: where the master is that this one stands by for.
    """
    host, _, port = address.rpartition(":")
    lines = [f"master listening on {address}"]
    if is_loopback(host):
        lines.append("  reachable from this machine only; for others: --listen 0.0.0.0:PORT")
    if is_wildcard(host):
        address = f"HOST:{port}"
        lines.append("  reachable from other machines; HOST below is a name or address of this one")
    if standby_of is not None:
        lines.append(f"  a standby: it begins no run, and takes over the one of {standby_of}")
    address = ",".join(known for known in (standby_of, address, standby) if known is not None)
    lines.append("  on each peer:")
    if token is not None:
        lines.append(f"    export {config.TOKEN}={shlex.quote(token)}")
    elif secured:
        lines.append(f"    set {config.TOKEN}, or {config.TOKEN_FILE}, to the same secret as here")
    lines += [
        f"    pccl join {address} -- python train.py",
        f'    or in Python: pccl.Communicator("{address}")',
        "  Ctrl-C ends it",
    ]
    return lines


def choose_token(option: str | None) -> tuple[bytes | None, str | None]:
    """The run's secret, and its words if the user has to be told.

    Args:
        option: ``auto``, a file's path, or None: what the environment says.

    Raises:
        click.BadParameter: there is no good secret in it.
    """
    if option == AUTO:
        made = secrets.token_urlsafe(AUTO_TOKEN_BYTES)
        return made.encode(), made
    return read_secret(option), None


def refuse_to_be_open(listen: str) -> None:
    """Without a token, listen where only this machine can reach.

    Raises:
        click.BadParameter: others can.
    """
    if not is_loopback(parse_address(listen).host):
        raise click.BadParameter(
            f"without a token, whoever reaches {listen} could join the run, read its tensors and "
            "spoil them. Give --token auto (or a FILE that holds a secret), and the same secret to "
            "the peers; or --insecure, if nobody else can reach it",
            param_hint="--listen",
        )


def _check_directory(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """An empty name is a variable that was not set."""
    if value == "":
        raise click.BadParameter("an empty name is no directory")
    return value


@click.command()
@click.option(
    "--listen",
    "--listen-address",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where to listen; port 0 takes a free one.",
)
@click.option(
    "--token",
    metavar="FILE|auto",
    help="The secret that peers must know: the content of FILE, or a new one that is printed. "
    f"Without it: {config.TOKEN} or {config.TOKEN_FILE}.",
)
@click.option("--insecure", is_flag=True, help="Let anybody join who reaches the address.")
@click.option(
    "--state",
    metavar="DIR",
    type=click.Path(file_okay=False),
    callback=_check_directory,
    help="Keep there which run this is. A master that is killed may be started again with or "
    "without it: the members know everything; but with it no newcomer can come before them.",
)
@click.option(
    "--standby",
    metavar="HOST:PORT",
    callback=check_address,
    help="Where a second master stands by; the peers are told. From then on no master goes on "
    "without a majority of the members.",
)
@click.option(
    "--standby-of",
    metavar="HOST:PORT",
    callback=check_address,
    help="Be a standby of the master there: begin no run, take over its run when it is gone.",
)
@logs.verbose_option(logging.INFO)
def master(
    listen: str,
    token: str | None,
    insecure: bool,
    state: str | None,
    standby: str | None,
    standby_of: str | None,
) -> None:
    """Run a master: the process that keeps a run's membership and decides.

    It listens on this machine only unless told otherwise, and runs until Ctrl-C or SIGTERM. Where
    others can reach it, it wants a token: a secret that each process of the run proves to know
    before anything else happens on a connection. The token does not encrypt what follows.
    """
    try:
        parse_address(listen)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from error
    secret, new_token = choose_token(token)
    if secret is None and not insecure:
        refuse_to_be_open(listen)
    stopped = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.set()

    for wanted in (signal.SIGINT, signal.SIGTERM):
        signal.signal(wanted, stop)

    try:
        node = pccl.MasterNode(
            listen, token=secret, state=state, standby=standby, standby_of=standby_of
        )
        node.run()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except LinkError as error:
        hint = "choose another address with --listen"
        raise click.ClickException(f"{error.reason}; {hint}") from error
    except LocalProtocolError as error:
        raise click.ClickException(error.reason) from error
    try:
        words = greeting(
            node.address,
            new_token,
            secured=secret is not None,
            standby=standby,
            standby_of=standby_of,
        )
        click.echo("\n".join(words))
        while not stopped.wait(0.2):  # a signal that comes just before it blocks wakes nobody
            pass
    finally:
        node.interrupt()
    click.echo("master ended")
