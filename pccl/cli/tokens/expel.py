"""``pccl expel`` removes a member from a run, and revokes the token with which it joined."""

from __future__ import annotations

import time

import click

import pccl
from pccl.cli.command_line import master_options, timeout_option
from pccl.cli.runs.target import Target
from pccl.cli.tokens.target import KeyedRun, errors_of_keys, keyed_run, keys_option
from pccl.errors import PCCLError
from pccl.inquiry import MasterStatus, MemberStatus
from pccl.master_node import expel_key
from pccl.observe.summary import names_of, who

POLL_S = 0.2


@click.command()
@click.argument("name", metavar="NAME")
@master_options
@keys_option
@timeout_option(10.0)
def expel(
    name: str, master: str | None, token: str | None, keys: str | None, timeout_s: float
) -> None:
    """Remove the member NAME (its name or id) from a run, on the machine of the master.

    Its key never joins again, and the token with which it joined is revoked. If other members have
    joined with this token, they stay, and a new token is printed for processes that join later.

    The exit code is 1 if the master has not removed the member in time.
    """
    with errors_of_keys():
        run = keyed_run(master, token, keys)
        if run.target is None:
            raise click.UsageError("say which run: HOST:PORT")
        status = _ask(run.target, timeout_s)
        member = _member(status, name)
        names = names_of(status)
        sharing = [
            who(names, one.peer)
            for one in status.members
            if one.token == member.token and one.peer != member.peer
        ]
        before = run.file.read().tokens
        text, after = expel_key(run.file, member.fingerprint, member.token, shared=bool(sharing))
    _wait_until_gone(run, member, text, timeout_s)
    click.echo(f"expelled peer {who(names, member.peer)}", err=True)
    if not before.known:
        click.echo("the run has no token, so a new process may join in its place", err=True)
    was, now = before.get(member.token), after.tokens.get(member.token)
    if was is not None and not was.revoked and (now is None or now.revoked):
        click.echo(f"revoked token {member.token}, with which it joined", err=True)
    if sharing and before.known:
        click.echo(f"others joined with this token, and stay: {', '.join(sharing)}", err=True)
    if text:
        click.echo("the new token, for processes that join from now on:", err=True)
        click.echo(text)


def _ask(target: Target, timeout_s: float) -> MasterStatus:
    try:
        return pccl.master_status(target.masters, token=target.token, timeout_s=timeout_s)
    except PCCLError as error:
        raise click.ClickException(f"no status from {target.masters}: {error.reason}") from error


def _member(status: MasterStatus, name: str) -> MemberStatus:
    """Return the only member with this name or id."""
    found = [one for one in status.members if name in (str(one.peer), one.name)]
    if not found:
        raise click.ClickException(f"the run has no peer {name!r}; see pccl status")
    if len(found) > 1:
        ids = ", ".join(str(one.peer) for one in found)
        raise click.ClickException(f"{len(found)} peers have this name; choose one by id: {ids}")
    return found[0]


def _wait_until_gone(run: KeyedRun, member: MemberStatus, text: str, timeout_s: float) -> None:
    """Wait until the master has taken up the change.

    The token of the command may be the one that is revoked. From then on, it asks with another.
    """
    assert run.target is not None
    token: str | bytes | None = run.target.token
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            if left_s > 0:
                status = pccl.master_status(run.target.masters, token=token, timeout_s=left_s)
                if all(one.peer != member.peer for one in status.members):
                    return
        except PCCLError:
            with errors_of_keys():
                keys = run.file.read()
            newest = keys.tokens.newest()
            token = run.target.token if newest is None else keys.text_of(newest)
        if left_s <= 0:
            hint = f" New token: {text}" if text else ""
            raise click.ClickException(
                f"the keys are changed, but the master has not removed the member within "
                f"{timeout_s:g} s: does it use {run.file.path}?{hint}"
            )
        time.sleep(min(POLL_S, left_s))
