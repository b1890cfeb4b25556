"""``pccl join``: become one peer of a run whose master is elsewhere, as soon as it is there."""

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
    Seconds,
    Wrapper,
    check_address,
    check_own_address,
    check_switches,
    read_secret,
    token_option,
    wrapped_command,
)
from pccl.cli.processes.guard import become
from pccl.cli.processes.programs import find_program

FIRST_PAUSE_S = 0.1
PAUSE_S_MAX = 5.0
PAUSE_GROWTH = 1.5

DIAL_S_MAX = 5.0
"""How long one attempt may take; a machine that is off doesn't refuse, it is silent."""

DIAL_S_MIN = 0.5
"""What the last attempt gets, whatever is left of the time."""


async def wait_for_master(master: str, timeout_s: float | None, who: str = "pccl join") -> None:
    """Dial until somebody answers, with growing pauses; say once on stderr that we wait.

    Args:
        master: its addresses.
        timeout_s: how long; None: for ever.
        who: says so.

    Raises:
        click.ClickException: nobody did within ``timeout_s`` seconds.
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
            reason = await _dial(address.host, address.port, dial_s)
            if not reason:
                break
        if not reason:
            break
        if left_s <= 0.0:
            raise click.ClickException(
                f"no master answered at {master} within {timeout_s:g} s ({reason}); "
                "is `pccl master` running there, and may this machine reach that port?"
            )
        if not waiting:
            waiting = True
            _say(who, f"waiting for a master at {master} ({reason})")
        # Not all peers at once; and once more when the time is over.
        await asyncio.sleep(min(left_s, random.uniform(0.5, 1.0) * pause_s))
        pause_s = min(PAUSE_S_MAX, pause_s * PAUSE_GROWTH)
    if waiting:
        _say(who, f"it answers, after {time.monotonic() - began_s:.1f} s")


async def _dial(host: str, port: int, timeout_s: float) -> str:
    """Connect and leave; returns why that failed, or nothing."""
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


def _reason(error: OSError) -> str:
    """Few words for a failed dial."""
    if error.errno is None:  # several addresses failed, which asyncio tells in one long sentence
        return "no address of it answers"
    text = os.strerror(error.errno) if error.errno > 0 else error.strerror  # below 0: no such name
    return str(text).lower()


def _say(who: str, text: str) -> None:
    click.echo(f"{who}: {text}", err=True)


class JoinCommand(Wrapper):
    """``pccl join`` as click knows it."""

    example = "pccl join host.example:48148 -- python train.py"


@click.command(cls=JoinCommand, epilog=f"Example: {JoinCommand.example}")
@click.argument("master", metavar="HOST:PORT", callback=check_address)
@click.option(
    "--group",
    metavar="GROUP",
    type=click.IntRange(0, PEER_GROUP_MAX),
    help="Peer group (PCCL_GROUP).",
)
@click.option(
    "--advertise",
    metavar="HOST[:PORT]",
    callback=check_own_address,
    help="Where the others reach this peer (PCCL_ADVERTISE); :FIRST-LAST chooses its port.",
)
@click.option(
    "--listen",
    metavar="HOST[:PORT]",
    callback=check_own_address,
    help="Where its port is bound, if not there (PCCL_LISTEN).",
)
@click.option(
    "--lanes",
    metavar="LANES",
    type=click.IntRange(0, LANES_MAX),
    help="Connections per link; 0: chosen by the library (PCCL_LANES).",
)
@token_option()
@click.option(
    "--timeout",
    "timeout_s",
    envvar="PCCL_JOIN_TIMEOUT",
    metavar="SECONDS",
    type=Seconds(0.0, min_open=True),
    help="Give up if there is no master for so long.  [default: never]",
)
@click.pass_context
def join(
    ctx: click.Context,
    master: str,
    group: int | None,
    advertise: str | None,
    listen: str | None,
    lanes: int | None,
    token: str | None,
    timeout_s: float | None,
) -> NoReturn:
    """Wait until a master answers at HOST:PORT, then run COMMAND as a peer of its run.

    COMMAND takes the place of this process, so signals and the exit status are its own. It finds
    the master in PCCL_MASTER; pccl.Communicator() needs no address then. On SIGTERM it says
    goodbye to the run before it ends, so that nobody waits for it.
    """
    check_switches()
    name, *arguments = wrapped_command(ctx)
    program = find_program(name)
    environment = {config.DRAIN: "1", config.PROGRESS: "1", **os.environ, config.MASTER: master}
    given: dict[str, object] = {config.GROUP: group, config.LANES: lanes}
    given |= {config.ADVERTISE: advertise, config.LISTEN: listen}
    environment |= {name: str(value) for name, value in given.items() if value is not None}
    if token is not None:
        read_secret(token)
        environment[config.TOKEN_FILE] = os.path.abspath(token)
        environment.pop(config.TOKEN, None)  # it would come first
    try:
        asyncio.run(wait_for_master(master, timeout_s))
    except KeyboardInterrupt:
        raise click.Abort from None
    sys.stdout.flush()
    sys.stderr.flush()
    become(program, [name, *arguments], environment)
