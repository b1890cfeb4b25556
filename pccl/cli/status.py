"""``pccl status`` shows a run as its master sees it."""

from __future__ import annotations

import sys
import time

import click

import pccl
from pccl.cli.command_line import interval_option, master_options, timeout_option
from pccl.cli.runs.target import Target, find_target
from pccl.cli.status_view import PlainView, TableView
from pccl.cli.streams import writing
from pccl.errors import PCCLError
from pccl.inquiry import MasterStatus


@click.command()
@master_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@interval_option("Time between two requests of --watch.")
@timeout_option()
def status(
    master: str | None,
    token: str | None,
    as_json: bool,
    watch: bool,
    interval_s: float,
    timeout_s: float,
) -> None:
    """Show the run of the master at HOST:PORT.

    The default is PCCL_MASTER, or else the run of this user's master on this machine.

    Shows members and their open calls, newcomers and what they wait for, open rounds and
    collectives with the missing peers, and removed peers with time and cause. The request does not
    change the run. If the run has a token, the request needs it.

    The exit code is 1 if no master answers, or the answer is not valid.
    """
    target = find_target(master, token)
    is_terminal = sys.stdout.isatty() and not as_json
    view = TableView() if is_terminal else PlainView(as_json=as_json)
    try:
        with writing():
            view.show(ask(target, timeout_s))
        while watch:
            time.sleep(interval_s)
            _show_next(view, target, timeout_s)
    except KeyboardInterrupt:
        raise click.Abort from None
    finally:
        view.close()


def _show_next(view: PlainView | TableView, target: Target, timeout_s: float) -> None:
    """Show the next status, or why there is none; ``--watch`` continues, as a master may return."""
    try:
        found = ask(target, timeout_s)
    except click.ClickException as error:
        with writing():
            view.trouble(error.message)
    else:
        with writing():
            view.show(found)


def ask(target: Target, timeout_s: float) -> MasterStatus:
    """Return the status of the run of a master.

    Raises:
        click.ClickException: there is no answer; the message says why.
    """
    try:
        return pccl.master_status(target.masters, token=target.token, timeout_s=timeout_s)
    except PCCLError as error:
        raise click.ClickException(f"no status from {target.masters}: {error.reason}") from error
