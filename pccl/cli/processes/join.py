"""``pccl join`` waits for the master of a run, then becomes one peer of this run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import sys
import time
from typing import NoReturn

import click

import pccl.addresses
from pccl import config
from pccl.checks import LANES_MAX, PEER_GROUP_MAX
from pccl.cli.command_line import (
    STDIN,
    Seconds,
    Wrapper,
    check_address,
    check_interface,
    check_name,
    check_own_address,
    check_switches,
    encrypt_option,
    metrics_option,
    min_peers_option,
    read_secret,
    token_option,
    upload_option,
    wrapped_command,
)
from pccl.cli.processes.guard import become
from pccl.cli.processes.programs import find_program
from pccl.cli.runs.run_file import Unusable
from pccl.cli.runs.stacks import joined_folder
from pccl.errors import PCCLError
from pccl.observe.logs import LEVEL

FIRST_PAUSE_S = 0.1
PAUSE_S_MAX = 5.0
PAUSE_GROWTH = 1.5

DIAL_S_MAX = 5.0
"""Longest attempt, in seconds; a machine that is off does not answer at all."""

DIAL_S_MIN = 0.5
"""Shortest limit of an attempt, in seconds, even if less of ``--timeout`` is left."""


async def wait_for_master(
    master: str, timeout_s: float | None, who: str = "pccl join", *, interface: str = ""
) -> None:
    """Dial a master until it answers, with growing pauses; report the wait once on stderr.

    Args:
        master: address of the master, and of its standbys.
        timeout_s: longest wait in seconds; None: no limit.
        who: name of the command, for its messages.
        interface: network interface to dial through; empty: the system chooses.

    Raises:
        click.ClickException: no master answered within ``timeout_s`` seconds.
    """
    addresses = pccl.addresses.parse_masters(master)
    began_s = time.monotonic()
    pause_s = FIRST_PAUSE_S
    waiting = False
    while True:
        left_s = math.inf if timeout_s is None else began_s + timeout_s - time.monotonic()
        dial_s = min(DIAL_S_MAX, max(DIAL_S_MIN, left_s))
        reason = ""
        for address in addresses:
            if interface:
                reason = await asyncio.to_thread(_knock, str(address), dial_s, interface)
            else:
                reason = await _dial(address.host, address.port, dial_s)
            if not reason:
                break
        if not reason:
            break
        if left_s <= 0.0:
            raise click.ClickException(
                f"no master answered at {master} within {timeout_s:g} s ({reason}); "
                "is `pccl master` running there, and can this machine reach its port?"
            )
        if not waiting:
            waiting = True
            _say(who, f"waiting for a master at {master} ({reason})")
        # Random, so that not all peers dial at once. The last attempt is at the end of the time.
        await asyncio.sleep(min(left_s, random.uniform(0.5, 1.0) * pause_s))
        pause_s = min(PAUSE_S_MAX, pause_s * PAUSE_GROWTH)
    if waiting:
        _say(who, f"the master answered after {time.monotonic() - began_s:.1f} s")


async def _dial(host: str, port: int, timeout_s: float) -> str:
    """Connect and close the connection; return why that failed, or an empty string."""
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return _reason(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""


def _knock(address: str, timeout_s: float, interface: str) -> str:
    """Do the same through an interface."""
    from pccl import inquiry  # loads the library, which is not needed otherwise

    try:
        inquiry.knock(address, interface, timeout_s)
    except PCCLError as error:
        return error.reason.removeprefix(f"cannot reach {address}: ")
    return ""


def _reason(error: OSError) -> str:
    """Return a few words about a failed dial."""
    if error.errno is None:  # several addresses failed; asyncio's text is long
        return "none of its addresses answers"
    text = os.strerror(error.errno) if error.errno > 0 else error.strerror  # below 0: no such name
    return str(text).lower()


def _say(who: str, text: str) -> None:
    click.echo(f"{who}: {text}", err=True)


class JoinCommand(Wrapper):
    """The click command ``pccl join``."""

    example = "pccl join host.example:48148 -- python train.py"


@click.command(cls=JoinCommand, epilog=f"Example: {JoinCommand.example}")
@click.argument("master", metavar="HOST:PORT", callback=check_address)
@click.option(
    "--name",
    "peer_name",
    metavar="NAME",
    callback=check_name,
    help="Name of this peer in logs and status (PCCL_NAME).  [default: HOST:PID]",
)
@click.option(
    "--group",
    metavar="GROUP",
    type=click.IntRange(0, PEER_GROUP_MAX),
    help="Peer group (PCCL_GROUP).",
)
@min_peers_option()
@click.option(
    "--advertise",
    metavar="HOST[:PORT]",
    callback=check_own_address,
    help="Address for other peers, or a range of ports, :FIRST-LAST (PCCL_ADVERTISE).",
)
@click.option(
    "--listen",
    metavar="HOST[:PORT]",
    callback=check_own_address,
    help="Address that this peer binds, if it differs from --advertise (PCCL_LISTEN).",
)
@click.option(
    "--interface",
    metavar="NAME",
    callback=check_interface,
    help="Network interface to listen at, announce and dial from (PCCL_INTERFACE).",
)
@click.option(
    "--no-map-port",
    is_flag=True,
    help="Do not ask the router to forward the peer's port (PCCL_MAP_PORT=0).",
)
@click.option(
    "--lanes",
    metavar="LANES",
    type=click.IntRange(0, LANES_MAX),
    help="Connections per link; 0: the library chooses (PCCL_LANES).",
)
@upload_option()
@encrypt_option()
@metrics_option("Serve the peer's metrics for Prometheus here.")
@token_option()
@click.option(
    "--timeout",
    "timeout_s",
    envvar="PCCL_JOIN_TIMEOUT",
    metavar="SECONDS",
    type=Seconds(0.0, min_open=True),
    help="Give up if no master answers within this time.  [default: never]",
)
@click.pass_context
def join(
    ctx: click.Context,
    master: str,
    peer_name: str | None,
    group: int | None,
    min_peers: int | None,
    advertise: str | None,
    listen: str | None,
    interface: str | None,
    no_map_port: bool,
    lanes: int | None,
    upload_bytes_per_s_max: int | None,
    metrics: str | None,
    token: str | None,
    timeout_s: float | None,
) -> NoReturn:
    """Wait until a master answers at HOST:PORT, then run COMMAND as a peer of its run.

    COMMAND replaces this process, so it gets the signals and sets the exit status. PCCL_MASTER
    holds the address of the master, so pccl.Communicator() needs no address. On SIGTERM, COMMAND
    leaves the run before it ends, so that no member waits for it.
    """
    check_switches()
    name, *arguments = wrapped_command(ctx)
    program = find_program(name)
    defaults = {config.DRAIN: "1", config.PROGRESS: "1"}
    environment = {**defaults, **os.environ, config.MASTER: master}
    environment[LEVEL] = environment.get(LEVEL) or "info"
    given: dict[str, object] = {config.GROUP: group, config.LANES: lanes, config.NAME: peer_name}
    given |= {config.ADVERTISE: advertise, config.LISTEN: listen, config.METRICS: metrics}
    given |= {config.MIN_PEERS: min_peers, config.INTERFACE: interface}
    given[config.MAP_PORT] = 0 if no_map_port else None
    given[config.UPLOAD_MAX] = upload_bytes_per_s_max
    environment |= {name: str(value) for name, value in given.items() if value is not None}
    with contextlib.suppress(Unusable, OSError):  # a help for ``pccl why``, never a reason to fail
        environment.setdefault(config.STACKS_DIR, joined_folder())
    if token == STDIN:
        secret = read_secret(token)
        assert secret is not None
        environment[config.TOKEN] = os.fsdecode(secret)
    elif token is not None:
        read_secret(token)
        environment[config.TOKEN_FILE] = os.path.abspath(token)
        environment.pop(config.TOKEN, None)  # it would override the file
    else:
        read_secret(None)  # a mistake in the environment is one line, and not the program's error
    try:
        through = config.resolve_interface(interface)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    try:
        asyncio.run(wait_for_master(master, timeout_s, interface=through))
    except KeyboardInterrupt:
        raise click.Abort from None
    sys.stdout.flush()
    sys.stderr.flush()
    become(program, [name, *arguments], environment)
