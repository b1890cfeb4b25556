"""The run of a command that changes its keys."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator
from typing import NamedTuple

import click

from pccl.cli import streams
from pccl.cli.command_line import F
from pccl.cli.runs.run_file import end_with_run
from pccl.cli.runs.target import NoRun, Target, find_target
from pccl.errors import LocalProtocolError
from pccl.inquiry import MasterStatus, MemberStatus, NewcomerStatus
from pccl.master_node import KeysFile, RunKeys


class KeyedRun(NamedTuple):
    """A run, and the file with its keys.

    Attributes:
        target: how to ask its master; None: only the file is known.
        file: the file.
    """

    target: Target | None
    file: KeysFile


def keys_option(command: F) -> F:
    """Add ``--keys FILE``: where the keys of a run are."""
    return click.option(
        "--keys",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="File with the keys of the run, as `pccl master` was given it.  [default: as the "
        "master on this machine says]",
    )(command)


def keyed_run(master: str | None, token: str | None, keys: str | None) -> KeyedRun:
    """Return the run that a command names.

    Args:
        master: address of its master; None: as in ``find_target``.
        token: value of ``--token``; None: not given.
        keys: value of ``--keys``; None: as the run file of the master says.

    Raises:
        NoRun, SeveralRuns: no run is named, and none or several are live.
        click.ClickException: nothing says where the keys are.
    """
    try:
        target = find_target(master, token)
    except NoRun:
        if keys is None:
            raise
        target = None
    path = keys or (target.keys if target is not None else "")
    if not path:
        raise click.ClickException(
            "no live master of this user is known here by this address: without an address, the "
            "command finds the master of this machine; at a standby, give --keys FILE"
        )
    return KeyedRun(target, KeysFile(path))


@contextlib.contextmanager
def errors_of_keys() -> Generator[None]:
    """Say in a sentence why keys cannot be used."""
    try:
        yield
    except LocalProtocolError as error:
        raise click.ClickException(error.reason) from error
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def peers_of(status: MasterStatus) -> list[MemberStatus | NewcomerStatus]:
    """Return the members and the newcomers that a status lists."""
    return [*status.members, *status.newcomers]


def token_of(keys: RunKeys) -> str | None:
    """Return the newest token of a run. It names the key: no master of another run takes it."""
    newest = keys.tokens.newest()
    return None if newest is None else keys.text_of(newest)


def print_token(text: str) -> None:
    """Print a token, so that the command fails if stdout cannot take it."""
    with streams.writing():
        click.echo(text)
        sys.stdout.flush()


def remind(file: KeysFile) -> None:
    """Say on stderr which masters do not know a change: a standby, or a later start."""
    plain = file.read().tokens.get(0)
    if not end_with_run(str(file.path)):
        click.echo(f"a standby knows this only from a new copy of {file.path}", err=True)
    elif plain is not None and plain.revoked:
        click.echo(
            "the master forgets this when it ends: start it with another PCCL_TOKEN then, or now "
            "and always with --keys FILE",
            err=True,
        )
