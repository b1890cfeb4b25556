"""``pccl token`` makes, lists, rotates and revokes the tokens of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import click

import pccl
from pccl.cli.command_line import F, check_address, timeout_option
from pccl.cli.tokens.target import (
    errors_of_keys,
    keyed_run,
    keys_option,
    peers_of,
    print_token,
    remind,
    token_of,
)
from pccl.errors import PCCLError
from pccl.master_node import Tokens, make_token, revoke_token
from pccl.observe.summary import names_of, who
from pccl.progress import counted


@click.group()
def token() -> None:
    """Make, list, rotate and revoke the tokens of a run, on the machine of its master.

    Give a token to other machines by PCCL_TOKEN, by a file or by stdin, never as an argument:
    other users of the machine could see it.
    """


def _run_options(command: F) -> F:
    argument = click.argument(
        "master", metavar="[HOST:PORT]", required=False, callback=check_address
    )
    return argument(keys_option(command))


@token.command()
@_run_options
def make(master: str | None, keys: str | None) -> None:
    """Print a new reusable token, if fewer than two are valid."""
    _make(master, keys)


@token.command()
@_run_options
def ticket(master: str | None, keys: str | None) -> None:
    """Print a ticket: a token with which only one process can join."""
    _make(master, keys, is_ticket=True)


@token.command()
@_run_options
def rotate(master: str | None, keys: str | None) -> None:
    """Print a new reusable token. Two stay valid: a third one revokes the oldest.

    Members stay, and can reconnect, but no new process joins with a revoked token.
    """
    _make(master, keys, revokes=True)


def _make(
    master: str | None, keys: str | None, *, is_ticket: bool = False, revokes: bool = False
) -> None:
    with errors_of_keys():
        file = keyed_run(master, None, keys).file
        made = make_token(file, is_ticket=is_ticket, revokes=revokes)
        print_token(made.text)
        click.echo(f"this is {'ticket' if is_ticket else 'token'} {made.number}", err=True)
        for number in made.revoked:
            click.echo(f"revoked token {number}", err=True)
        remind(file)


@token.command()
@click.argument("number", type=click.IntRange(0))
@_run_options
def revoke(number: int, master: str | None, keys: str | None) -> None:
    """Revoke the token or ticket NUMBER of `pccl token list`.

    Members that joined with it stay, and can reconnect.
    """
    with errors_of_keys():
        file = keyed_run(master, None, keys).file
        revoke_token(file, number)
        click.echo(f"revoked token {number}", err=True)
        remind(file)


@token.command("list")
@_run_options
@timeout_option()
def list_tokens(master: str | None, keys: str | None, timeout_s: float) -> None:
    """Show the tokens of a run and who joined with them, but no secret."""
    with errors_of_keys():
        target, file = keyed_run(master, None, keys)
        known = file.read()
    joined: dict[int, list[str]] | None = None
    if target is None:
        click.echo("who joined is unknown: give the master's address", err=True)
    else:
        try:
            asks_with = token_of(known) or target.token
            status = pccl.master_status(target.masters, token=asks_with, timeout_s=timeout_s)
        except PCCLError as error:
            click.echo(f"who joined is unknown: {error.reason}", err=True)
        else:
            joined = {}
            for peer in peers_of(status):
                named = who(names_of(status), peer.peer)
                joined.setdefault(peer.token, []).append(named)
    for line in lines_of(known.tokens, joined, int(time.time())):
        click.echo(line)


def lines_of(
    tokens: Tokens, joined: Mapping[int, Sequence[str]] | None, now_s: int
) -> Iterator[str]:
    """Yield a line for each token.

    Args:
        tokens: the tokens of the run.
        joined: names of the present peers, by the number of their token; None: unknown.
        now_s: the time, in seconds since the epoch.
    """
    if not tokens.known:
        yield "the run has no token: any process may join"
    for token in tokens.known:
        kind = "ticket" if token.is_ticket else "token" if token.number else "plain secret"
        state = "revoked" if token.revoked else "spent" if token.is_spent else "valid"
        age = f", {_age(now_s - token.made_s)} old" if token.made_s else ""
        known = None if joined is None else joined.get(token.number, ())
        peers = "" if known is None else f"; present with it: {', '.join(known) or 'nobody'}"
        yield f"{token.number:4}  {kind}, {state}{age}{peers}"
    if tokens.expelled:
        yield counted(len(tokens.expelled), "expelled key")


def _age(age_s: int) -> str:
    for unit, length_s in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if age_s >= length_s:
            return counted(age_s // length_s, unit)
    return counted(max(0, age_s), "second")
