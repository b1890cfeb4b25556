"""``pccl expel`` removes a peer from a run, and revokes the token with which it joined."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

import pccl
from pccl.cli.command_line import master_options, timeout_option
from pccl.cli.tokens.target import (
    KeyedRun,
    errors_of_keys,
    keyed_run,
    keys_option,
    peers_of,
    print_token,
    remind,
    token_of,
)
from pccl.errors import PCCLError
from pccl.inquiry import MasterStatus, MemberStatus, NewcomerStatus
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
    """Remove the peer NAME (its id or name) from a run, on the machine of the master.

    Its key never joins again, and the token with which it joined is revoked. If other peers have
    joined with this token, they stay, and a new token is printed for processes that join later.

    The exit code is 1 if the master has not removed the peer in time.
    """
    with errors_of_keys():
        run = keyed_run(master, token, keys)
        if run.target is None:
            raise click.UsageError("say which run: HOST:PORT")
        before = run.file.read()
        status = _ask(run.target.masters, token_of(before) or run.target.token, timeout_s)
        peer = _peer(status, name)
        names = names_of(status)
        sharing = [
            who(names, one.peer)
            for one in peers_of(status)
            if one.token == peer.token and one.peer != peer.peer
        ]
        text, after = expel_key(run.file, peer.fingerprint, peer.token, shared=bool(sharing))
    was, now = before.tokens.get(peer.token), after.tokens.get(peer.token)
    if was is not None and not was.revoked and (now is None or now.revoked):
        click.echo(f"revoked token {peer.token}, with which it joined", err=True)
    if sharing and before.tokens.known:
        click.echo(f"others joined with this token, and stay: {', '.join(sharing)}", err=True)
    if text:
        click.echo("the new token, for processes that join from now on:", err=True)
        print_token(text)
    asks_with = [token_of(before) or run.target.token, token_of(after)]
    _wait_until_gone(run, peer.peer, asks_with, timeout_s)
    click.echo(f"expelled peer {who(names, peer.peer)}", err=True)
    if not before.tokens.known:
        click.echo("the run has no token, so a new process may join in its place", err=True)
    with errors_of_keys():
        remind(run.file)


def _ask(masters: str, token: str | bytes | None, timeout_s: float) -> MasterStatus:
    try:
        return pccl.master_status(masters, token=token, timeout_s=timeout_s)
    except PCCLError as error:
        raise click.ClickException(f"no status from {masters}: {error.reason}") from error


def _peer(status: MasterStatus, name: str) -> MemberStatus | NewcomerStatus:
    """Return the peer with this id, or else the only one with this name."""
    found = [one for one in peers_of(status) if name == str(one.peer)]
    found = found or [one for one in peers_of(status) if name == one.name]
    if not found:
        raise click.ClickException(f"the run has no peer {name!r}; see pccl status")
    if len(found) > 1:
        ids = ", ".join(str(one.peer) for one in found)
        raise click.ClickException(f"{len(found)} peers have this name; choose one by id: {ids}")
    return found[0]


def _wait_until_gone(
    run: KeyedRun, gone: int, tokens: Iterable[str | bytes | None], timeout_s: float
) -> None:
    """Wait until the master has applied the change.

    Args:
        run: the run.
        gone: id of the peer.
        tokens: tokens to ask with, in order; after a refusal, the next one.
        timeout_s: the time limit.
    """
    assert run.target is not None
    deadline_s = time.monotonic() + timeout_s
    asks_with = iter(tokens)
    token = next(asks_with)
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            status = pccl.master_status(run.target.masters, token=token, timeout_s=left_s)
        except PCCLError:
            token = next(asks_with, token)
        else:
            if gone not in {one.peer for one in peers_of(status)}:
                return
        time.sleep(min(POLL_S, left_s))
    raise click.ClickException(
        f"the keys are changed, but the master has not removed the peer within {timeout_s:g} s: "
        f"does it use {run.file.path}?"
    )
