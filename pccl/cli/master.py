"""``pccl master`` runs one master in the foreground."""

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
from pccl.cli.command_line import check_address, encrypt_option, metrics_option, read_secret
from pccl.cli.page import http_option, page_of
from pccl.errors import LinkError, LocalProtocolError

DEFAULT_LISTEN = "127.0.0.1:48148"
"""Loopback, so that no user opens a master to other machines by accident."""

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
    """Return the lines that tell the user how to reach a master that listens.

    Args:
        address: ``HOST:PORT`` that the master is bound to.
        token: a new secret, which the user must see; None: the user knows it, or there is none.
        secured: whether peers need a token.
        standby: address of the standby master, if there is one.
        standby_of: address of the active master, if this master is a standby.
    """
    host, _, port = address.rpartition(":")
    lines = [f"master listening on {address}"]
    if is_loopback(host):
        lines.append("  reachable from this machine only; to change that: --listen 0.0.0.0:PORT")
    if is_wildcard(host):
        address = f"HOST:{port}"
        lines.append("  reachable from other machines; HOST: a name or address of this machine")
    if standby_of is not None:
        lines.append(f"  a standby: it begins no run, but takes over the run of {standby_of}")
    address = ",".join(known for known in (standby_of, address, standby) if known is not None)
    lines.append("  on each peer:")
    if token is not None:
        lines.append(f"    export {config.TOKEN}={shlex.quote(token)}")
    elif secured:
        lines.append(f"    set {config.TOKEN}, or {config.TOKEN_FILE}, to the same secret as here")
    lines += [
        f"    pccl join {address} -- python train.py",
        f'    or in Python: pccl.Communicator("{address}")',
        "  Ctrl-C ends this master",
    ]
    return lines


def choose_token(option: str | None) -> tuple[bytes | None, str | None]:
    """Return the run's secret, and its text if the secret is new and the user must see it.

    Args:
        option: ``auto`` for a new secret, the path of a file, or None for the environment.

    Raises:
        click.BadParameter: the file or the environment holds no valid secret.
    """
    if option == AUTO:
        made = secrets.token_urlsafe(AUTO_TOKEN_BYTES)
        return made.encode(), made
    return read_secret(option), None


def refuse_to_be_open(listen: str) -> None:
    """Refuse an address other than loopback, for a master without a token.

    Raises:
        click.BadParameter: other machines can reach ``listen``.
    """
    if not is_loopback(parse_address(listen).host):
        raise click.BadParameter(
            f"without a token, any process that reaches {listen} could join the run, and read and "
            "change its tensors. Give --token auto (or a FILE that holds a secret), and the same "
            "secret to the peers; or --insecure, if only trusted machines can reach the address",
            param_hint="--listen",
        )


def _check_directory(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an empty name, for example from a shell variable that is not set."""
    if value == "":
        raise click.BadParameter("the name of the directory is empty")
    return value


@click.command()
@click.option(
    "--listen",
    "--listen-address",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Address to listen on; port 0: a free one.",
)
@click.option(
    "--token",
    metavar="FILE|auto",
    help="The secret that peers must know: the content of FILE, or a new one, which is printed. "
    f"Default: {config.TOKEN} or {config.TOKEN_FILE}.",
)
@click.option("--insecure", is_flag=True, help="Let every process that reaches the address join.")
@click.option(
    "--state",
    metavar="DIR",
    type=click.Path(file_okay=False),
    callback=_check_directory,
    help="Directory for the identity of the run. A restarted master also learns the run from its "
    "members, but without the directory, a newcomer that comes first begins another run.",
)
@click.option(
    "--standby",
    metavar="HOST:PORT",
    callback=check_address,
    help="Address of the standby master, which this master tells the peers. From then on, a master "
    "needs a majority of the members to continue.",
)
@click.option(
    "--standby-of",
    metavar="HOST:PORT",
    callback=check_address,
    help="Be the standby of this master: begin no run, but take over its run when it dies.",
)
@encrypt_option()
@metrics_option("Serve metrics of the run for Prometheus here.")
@http_option()
@logs.verbose_option(logging.INFO)
def master(
    listen: str,
    token: str | None,
    insecure: bool,
    state: str | None,
    standby: str | None,
    standby_of: str | None,
    metrics: str | None,
    http: str | None,
) -> None:
    """Run a master: the process that admits and evicts peers, and decides joint calls.

    It listens on loopback by default, and runs until Ctrl-C or SIGTERM. If other machines can reach
    it, it needs a token: a secret that both sides of each connection prove to know before anything
    else. Connections that leave this machine are encrypted, with or without a token.
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
            listen,
            token=secret,
            state=state,
            standby=standby,
            standby_of=standby_of,
            metrics=metrics,
        )
        node.run()
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except LinkError as error:
        hint = "choose another address with --listen"
        raise click.ClickException(f"{error.reason}; {hint}") from error
    except LocalProtocolError as error:
        raise click.ClickException(error.reason) from error
    except (ImportError, OSError) as error:  # of the metrics
        raise click.ClickException(getattr(error, "strerror", None) or str(error)) from error
    try:
        words = greeting(
            node.address,
            new_token,
            secured=secret is not None,
            standby=standby,
            standby_of=standby_of,
        )
        if node.metrics_url:
            words.insert(-1, f"  metrics: {node.metrics_url}")
        with page_of(node, http, secured=secret is not None) as more:
            click.echo("\n".join([*words, *more]))
            while not stopped.wait(0.2):  # a limit: a signal just before the wait wakes nothing
                pass
    finally:
        node.interrupt()
    click.echo("master ended")
