"""The option ``--http`` of commands that run a master, and the page that it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import click

import pccl
from pccl.addresses import is_loopback, parse_address

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
        "a free port. Beyond loopback, the run needs a token, and the page gets a code of its own. "
        "Needs pccl[page].",
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
    node: pccl.MasterNode, http: str | None, *, secured: bool
) -> Generator[list[str], None, None]:
    """Serve the page of a master that runs; yield the lines that say where it is.

    Args:
        node: the master.
        http: address of the page; None: there is none.
        secured: whether the run has a token.

    Raises:
        click.ClickException: the page cannot be served; the message says what to do.
    """
    if http is None:
        yield []
        return
    page = _page(node, http, secured)
    leave = node.on_event(page.put)
    try:
        page.start()
    except OSError as error:
        leave()
        reason = error.strerror or str(error)
        remedy = f"choose another address with {HINT}, or `auto`"
        raise click.ClickException(f"cannot use {http}: {reason}; {remedy}") from error
    try:
        yield [f"page at {page.url}"]
    finally:
        leave()
        page.close()


def _page(node: pccl.MasterNode, http: str, secured: bool) -> Any:
    host, _, port = http.rpartition(":")
    if not secured and not is_loopback(host):
        raise click.BadParameter(
            f"other machines can reach the page at {host}, so the run needs a token: give the "
            "master one, or serve the page on 127.0.0.1",
            param_hint=HINT,
        )
    try:
        from pccl.observe.page.server import PageServer
    except ImportError as error:
        raise click.ClickException(
            f"the page needs Starlette and Uvicorn ({error}): pip install 'pccl[page]'"
        ) from error
    return PageServer(host, int(port), node.status)
