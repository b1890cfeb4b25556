"""``pccl master`` runs one master in the foreground."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import shlex
import signal
import sys
import time
from types import FrameType

import click

import pccl
from pccl import config
from pccl.addresses import is_loopback, parse_address
from pccl.cli import logs
from pccl.cli.command_line import (
    check_address,
    encrypt_option,
    metrics_option,
    read_secret,
    upload_option,
)
from pccl.cli.page import http_option, page_of
from pccl.cli.runs.run_file import Unusable, end_with_run, own_keys_file, run_file
from pccl.errors import LinkError, LocalProtocolError
from pccl.master_node import KEYS_FILE, KeysFile, ensure_token

DEFAULT_LISTEN = "127.0.0.1:48148"
"""Loopback, so that no user opens a master to other machines by accident."""

PROXY_LISTENS = "HOST:443"
"""Stands for the address of a proxy, which the master does not know."""

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
    ends: bool = False,
    proxied: bool = False,
) -> list[str]:
    """Return the lines that tell the user how to reach a master that listens.

    Args:
        address: ``HOST:PORT`` that the master is bound to.
        token: a token that the user must see; None: the user knows it, or there is none.
        secured: whether peers need a token.
        standby: address of the standby master, if there is one.
        standby_of: address of the active master, if this master is a standby.
        ends: whether no later master can continue the run.
        proxied: whether other machines reach it through a proxy.
    """
    host, _, port = address.rpartition(":")
    lines = [f"master listening on {address}"]
    if proxied:
        address = PROXY_LISTENS
        lines.append(f"  reachable through a proxy; {PROXY_LISTENS}: where the proxy listens")
    elif is_loopback(host):
        lines.append("  reachable from this machine only; to change that: --listen 0.0.0.0:PORT")
    elif is_wildcard(host):
        address = f"HOST:{port}"
        lines.append("  reachable from other machines; HOST: a name or address of this machine")
    if ends and (proxied or not is_loopback(host)):
        lines.append("  the run ends with this master; with --state DIR, a restart continues it")
    if standby_of is not None:
        lines.append(f"  a standby: it begins no run, but takes over the run of {standby_of}")
    address = ",".join(known for known in (standby_of, address, standby) if known is not None)
    lines.append("  on each peer:")
    if secured and token is None:
        lines.append(f"    set {config.TOKEN}, or {config.TOKEN_FILE}, to a token of this run")
    given = "" if token is None else f"{config.TOKEN}={shlex.quote(token)} "
    lines += [
        f"    {given}pccl join {address} -- python train.py",
        f'    or in Python: pccl.Communicator("{address}")',
        "  Ctrl-C ends this master",
    ]
    return lines


def choose_token(option: str | None, keys: str | None) -> tuple[bytes | None, str | None]:
    """Return a token of the run, and its text if the user must see it.

    Args:
        option: ``auto`` for the newest token of the run, which is made if there is none; the path
            of a file; or None for the environment.
        keys: path of the file with the run's keys; None: there is none.

    Raises:
        click.BadParameter: the file or the environment holds no valid token.
        click.ClickException: the run's keys cannot be used.
    """
    if option != AUTO:
        return read_secret(option), None
    try:
        made = secrets.token_urlsafe(AUTO_TOKEN_BYTES) if keys is None else _ensured(keys)
    except (LocalProtocolError, ValueError) as error:
        raise click.ClickException(str(getattr(error, "reason", error))) from error
    return made.encode(), made


def _ensured(keys: str) -> str:
    return ensure_token(KeysFile(keys))


def _has_tokens(keys: str | None) -> bool:
    """Whether a run has tokens already."""
    if keys is None or not os.path.exists(keys):
        return False
    try:
        return bool(KeysFile(keys).read().tokens.known)
    except LocalProtocolError as error:
        raise click.ClickException(error.reason) from error


def dialled_here(address: str) -> str:
    """Return the address at which processes of this machine reach a master."""
    host, _, port = address.rpartition(":")
    if not is_wildcard(host):
        return address
    return f"{'[::1]' if host.startswith('[') else '127.0.0.1'}:{port}"


def refuse_to_be_open(listen: str, proxy_from: str | None = None) -> None:
    """Refuse an address other than loopback, or a proxy, for a master without a token.

    Raises:
        click.BadParameter: other machines can reach ``listen``.
    """
    if proxy_from is not None or not is_loopback(parse_address(listen).host):
        where = listen if proxy_from is None else "the proxy"
        raise click.BadParameter(
            f"without a token, any process that reaches {where} could join the run, and read and "
            "change its tensors. Give --token auto (or a FILE that holds a secret), and the same "
            "secret to the peers; or --insecure, if only trusted machines can reach the address",
            param_hint="--listen" if proxy_from is None else "--proxy-from",
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
    help="The token that peers must know: the content of FILE (- is stdin), or one that the run "
    f"makes and prints. Default: {config.TOKEN} or {config.TOKEN_FILE}, else the tokens in --keys.",
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
    "--keys",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="File with the key and the tokens of the run, made if it does not exist. Give a standby a "
    f"copy.  [default: {KEYS_FILE} in the directory of --state]",
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
@click.option(
    "--relay",
    is_flag=True,
    help="Forward what two peers send each other if neither can dial the other and no peer can "
    "forward it. The master sees encrypted bytes only, but needs their bandwidth.",
)
@click.option(
    "--proxy-from",
    metavar="ADDRESS[,...]",
    help="The IP addresses or networks from which a TCP proxy, such as HAProxy, connects to this "
    "master. It must send a header of the PROXY protocol, version 2, which names the source.",
)
@upload_option()
@encrypt_option()
@metrics_option("Serve metrics of the run for Prometheus here.")
@http_option()
@logs.verbose_option(logging.INFO)
def master(
    listen: str,
    token: str | None,
    insecure: bool,
    state: str | None,
    keys: str | None,
    standby: str | None,
    standby_of: str | None,
    relay: bool,
    proxy_from: str | None,
    upload_bytes_per_s_max: int | None,
    metrics: str | None,
    http: str | None,
) -> None:
    """Run a master: the process that admits and evicts peers, and decides joint calls.

    It listens on loopback by default, and runs until Ctrl-C or SIGTERM. If other machines can reach
    it, it needs a token, which both sides prove to know before anything else; `pccl token` makes
    and rotates tokens, `pccl expel` removes a peer. Connections that leave this machine are
    encrypted, with or without a token.
    """
    try:
        parse_address(listen)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen") from error
    stopped = list[int]()  # no event: a handler that sets one may wait for its own thread

    def stop(signum: int, frame: FrameType | None) -> None:
        stopped.append(signum)

    with contextlib.ExitStack() as stack:
        if keys is None and state is not None:
            keys = os.path.join(state, KEYS_FILE)
        if keys is None:
            with contextlib.suppress(Unusable):
                keys = stack.enter_context(own_keys_file())
        if standby_of is not None and token == AUTO and not _has_tokens(keys):
            raise click.UsageError(
                f"a standby needs the keys of the run: copy those of {standby_of} to "
                f"{keys or 'a file'} (--keys FILE), and start it then"
            )
        secret, new_token = choose_token(token, keys)
        secured = secret is not None or _has_tokens(keys)
        if not secured and not insecure:
            refuse_to_be_open(listen, proxy_from)
        for wanted in (signal.SIGINT, signal.SIGTERM):
            signal.signal(wanted, stop)
        try:
            node = pccl.MasterNode(
                listen,
                token=secret,
                state=state,
                keys=keys,
                standby=standby,
                standby_of=standby_of,
                metrics=metrics,
                relay=relay,
                proxy_from=proxy_from,
                upload_bytes_per_s_max=upload_bytes_per_s_max,
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
        stack.callback(node.interrupt)
        if standby_of is None:  # commands ask the master that coordinates the run
            known = None if secret is None else os.fsdecode(secret)
            with contextlib.suppress(Unusable):
                address = dialled_here(node.address)
                where = "" if keys is None else os.path.abspath(keys)
                stack.enter_context(run_file(address, known, sys.argv, where))
        words = greeting(
            node.address,
            new_token,
            secured=secured,
            standby=standby,
            standby_of=standby_of,
            ends=new_token is not None and (keys is None or end_with_run(keys)),
            proxied=proxy_from is not None,
        )
        if node.metrics_url:
            words.insert(-1, f"  metrics: {node.metrics_url}")
        with page_of(node, http, secured=secured) as more:
            click.echo("\n".join([*words, *more]))
            while not stopped:
                time.sleep(0.2)  # a limit: a signal just before it wakes nothing
    click.echo("master ended")
