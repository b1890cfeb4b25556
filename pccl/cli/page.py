"""The option ``--http`` of commands that run a master, and the page that it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeVar
from urllib.parse import quote

import click

import pccl
from pccl.addresses import parse_address

F = TypeVar("F", bound=Callable[..., object])

AUTO = "auto"
LOOPBACK = "127.0.0.1"
HINT = "--http"


def http_option() -> Callable[[F], F]:
    """Return a decorator that adds ``--http``."""
    return click.option(
        HINT,
        metavar="[HOST:]PORT|auto",
        callback=_check,
        help="Serve a page that shows the run, at this address. HOST: 127.0.0.1 by default; auto: "
        "a free port. Beyond loopback, the page needs the run's token. Needs pccl[page].",
    )


def _check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Complete the address, and refuse a malformed one."""
    if value is None:
        return None
    text = "0" if value == AUTO else value
    address = f"{LOOPBACK}:{text}" if text.isascii() and text.isdecimal() else text
    try:
        parse_address(address)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return address


@contextlib.contextmanager
def page_of(
    node: pccl.MasterNode, http: str | None, token: bytes | None, new_token: str | None
) -> Generator[list[str], None, None]:
    """Serve the page of a master that runs; yield the lines that say where it is.

    Args:
        node: the master.
        http: address of the page; None: there is none.
        token: the secret of the run.
        new_token: its text, if the user does not know it yet.

    Raises:
        click.ClickException: the page cannot be served; the message says what to do.
    """
    if http is None:
        yield []
        return
    page = _page(node, http, token)
    leave = node.on_event(page.put)
    try:
        page.start()
    except OSError as error:
        leave()
        reason = error.strerror or str(error)
        raise click.BadParameter(f"cannot use {http}: {reason}", param_hint=HINT) from error
    try:
        is_open = page.access.is_open
        login = f"?token={quote(new_token, safe='')}" if new_token and not is_open else ""
        yield [f"page at {page.url}{login}"]
    finally:
        leave()
        page.close()


def _page(node: pccl.MasterNode, http: str, token: bytes | None) -> Any:
    try:
        from pccl.observe.page.server import PageServer
    except ImportError as error:
        raise click.ClickException(
            f"the page needs Starlette and Uvicorn ({error}): pip install 'pccl[page]'"
        ) from error
    host, _, port = http.rpartition(":")
    try:
        return PageServer(host, int(port), node.status, token)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=HINT) from error
