"""The master and the token of a command: from arguments, environment or a run file."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import click

from pccl import config
from pccl.addresses import parse_masters
from pccl.cli.command_line import read_secret
from pccl.cli.runs.run_file import Found, RunFile, find_runs


class Target(NamedTuple):
    """The run that a command asks.

    Attributes:
        masters: address of the master; with standbys, addresses separated by commas.
        token: a token of the run; None: it has none.
        keys: path of the file with the run's keys; empty: none is known.
    """

    masters: str
    token: bytes | None
    keys: str = ""


class NoRun(click.ClickException):
    """No run is named, and no run of this machine is live."""

    exit_code = 2


class SeveralRuns(click.ClickException):
    """No run is named, and several runs of this machine are live."""

    exit_code = 2


def find_target(address: str | None, token_file: str | None) -> Target:
    """Return the run that a command asks.

    The address is the argument, else ``PCCL_MASTER``, else that of the only live ``pccl launch``
    or ``pccl master`` of this user. The token is that of ``token_file``, else of the environment,
    else of the run file that has the address.

    Args:
        address: the argument; None: not given.
        token_file: value of ``--token``; None: not given.

    Raises:
        NoRun, SeveralRuns: no address is given, and no run file or several run files are live.
        click.BadParameter: an address or a secret is malformed.
    """
    masters = address or os.environ.get(config.MASTER)
    if not masters:
        run = _only(find_runs())
        # The token of the environment may belong to another run; the file knows its own.
        token = run.token if token_file is None else read_secret(token_file)
        return Target(run.master, token, run.keys)
    try:
        wanted = config.resolve_masters(address)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    secret = read_secret(token_file)
    for run in find_runs().runs:
        if parse_masters(run.master) == wanted:
            return Target(masters, run.token if secret is None else secret, run.keys)
    return Target(masters, secret)


def _only(found: Found) -> RunFile:
    """Return the only live run.

    Raises:
        NoRun, SeveralRuns: there is none, or there are several.
    """
    if len(found.runs) == 1:
        return found.runs[0]
    if found.runs:
        listed = "\n".join(f"  {_words(run)}" for run in found.runs)
        raise SeveralRuns(f"several runs are live; choose one by its address:\n{listed}")
    ignored = "".join(f"\n  ignored: {reason}" for reason in found.ignored)
    raise NoRun(
        "this user has no live `pccl launch` or `pccl master` on this machine; for another "
        f"master, give its address, HOST:PORT, or set {config.MASTER}{ignored}"
    )


def _words(run: RunFile) -> str:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.since_s))
    return f"{run.master}  (process {run.pid}, since {since}: {run.command})"
