"""``pccl publish`` publishes a checkpoint; ``pccl subscribe`` writes versions to a file."""

from __future__ import annotations

import json
import logging
import os
import queue
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import click

import pccl
from pccl.cli import logs
from pccl.cli.command_line import (
    Seconds,
    check_file,
    interval_option,
    master_options,
    upload_option,
)
from pccl.cli.runs.target import find_target
from pccl.cli.streams import writing
from pccl.errors import DeadlineExceeded, PCCLError
from pccl.publishing import Subscriber, Version
from pccl.shared_state import SharedState

_group_option = click.option(
    "--group",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="The peer group that publishes.",
)
_Stamp = tuple[int, int]

ROUND_PAUSE_S = 0.05
"""Pause between two calls of ``update_topology``, in seconds: members wait for the next one at most
as long."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@master_options
@_group_option
@interval_option("How often to check FILE for changes.")
@upload_option()
def publish(
    file: Path,
    master: str | None,
    token: str | None,
    group: int,
    interval_s: float,
    upload_bytes_per_s_max: int | None,
) -> None:
    """Publish FILE, which SharedState.save has written, in the run at HOST:PORT.

    The default is PCCL_MASTER, or else the run of this user's master on this machine.

    Publishes FILE again whenever it changes, until Ctrl-C. The process joins the run as a member,
    and takes part in each update_topology, but in no collective. So give it a --group of its own:
    members of its group would wait for it in collectives, and its versions would not count.

    The exit code is 1 if FILE is not a checkpoint at the start, or the run is lost.
    """
    logs.configure(logging.WARNING, "publish")
    target = find_target(master, token)
    try:
        known, state = _stamp(file), SharedState.load(file)
    except (ValueError, OSError) as error:
        raise click.ClickException(f"cannot publish {file}: {error}") from error
    try:
        with pccl.Communicator(
            target.masters,
            group,
            token=target.token,
            upload_bytes_per_s_max=upload_bytes_per_s_max,
        ) as comm:
            comm.connect()
            _show_published(comm.publish(state), state, file)
            lost = queue.SimpleQueue[PCCLError]()
            threading.Thread(target=_take_part, args=(comm, lost), daemon=True).start()
            while True:
                with suppress(queue.Empty):
                    raise lost.get(timeout=interval_s)
                if (stamp := _stamp(file)) not in (known, None):
                    known = stamp
                    try:
                        number = comm.publish(state := SharedState.load(file))
                    except (ValueError, OSError) as error:  # a later look finds it complete
                        click.echo(f"cannot publish {file}: {error}", err=True)
                    else:
                        _show_published(number, state, file)
    except (PCCLError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise click.Abort from None


def _take_part(comm: pccl.Communicator, lost: queue.SimpleQueue[PCCLError]) -> None:
    """Make each ``update_topology`` with the other members, until the run or ``comm`` ends."""
    while True:
        try:
            comm.update_topology()
        except PCCLError as error:
            lost.put(error)
            return
        time.sleep(ROUND_PAUSE_S)


def _show_published(number: int, state: SharedState, file: Path) -> None:
    with writing():
        click.echo(f"version {number}: {state.nbytes} bytes of {file}")


def _stamp(file: Path) -> _Stamp | None:
    """Return what changes with a file; None: there is no file now, or nobody can look at it."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), callback=check_file)
@master_options
@_group_option
@click.option("--once", is_flag=True, help="End after the first version.")
@click.option(
    "--run",
    "command",
    metavar="COMMAND",
    help="Run this in a shell after each version, with PCCL_VERSION and PCCL_FILE set.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    type=Seconds(0.0, min_open=True),
    help="End with an error if no version comes for this long.  [default: no limit]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each version.")
@upload_option()
def subscribe(
    file: Path,
    master: str | None,
    token: str | None,
    group: int,
    once: bool,
    command: str | None,
    timeout_s: float | None,
    as_json: bool,
    upload_bytes_per_s_max: int | None,
) -> None:
    """Write each version that the run at HOST:PORT publishes to FILE, until Ctrl-C.

    The default is PCCL_MASTER, or else the run of this user's master on this machine.

    FILE is a checkpoint, which any reader of safetensors loads. A new version replaces it when it
    is complete and verified. While COMMAND runs, all new versions but the newest are skipped. The
    process is no member of the run; it also serves versions to other readers.

    The exit code is 1 if the master refuses the reader, or if no version comes within --timeout.
    """
    logs.configure(logging.WARNING, "subscribe")
    target = find_target(master, token)
    try:
        with Subscriber(
            target.masters,
            group,
            token=target.token,
            upload_bytes_per_s_max=upload_bytes_per_s_max,
        ) as reader:
            while True:
                version = reader.next(timeout_s)
                version.save(file)
                _show(version, file, as_json=as_json)
                if command is not None:
                    _run(command, version, file)
                if once:
                    return
    except (DeadlineExceeded, PCCLError) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"cannot write {file}: {error.strerror or error}") from error
    except KeyboardInterrupt:
        raise click.Abort from None


def _show(version: Version, file: Path, *, as_json: bool) -> None:
    with writing():
        if as_json:
            found = {
                "version": version.number,
                "bytes": version.nbytes,
                "digest": version.digest,
                "file": str(file),
            }
            click.echo(json.dumps(found))
        else:
            click.echo(f"version {version.number}: {version.nbytes} bytes in {file}")


def _run(command: str, version: Version, file: Path) -> None:
    told = {**os.environ, "PCCL_VERSION": str(version.number), "PCCL_FILE": str(file)}
    status = subprocess.run(command, shell=True, env=told, check=False).returncode
    if status:
        click.echo(f"the command for version {version.number} ended with {status}", err=True)
