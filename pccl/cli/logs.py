"""Configures logging for the commands, in the form of :mod:`pccl.observe.logs`.

Logs go to stderr, so that stdout holds only the output of a command.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

import click

from pccl.observe.logs import LineFormatter, ThreadedHandler, resolve_local_time

F = TypeVar("F", bound=Callable[..., object])


def configure(level: int, command: str) -> None:
    """Show records of ``pccl`` from ``level`` on, and warnings of all other packages.

    Args:
        level: a level of :mod:`logging`.
        command: name of the command, which each line shows.

    Raises:
        click.UsageError: ``PCCL_LOG_TIME`` has a wrong value.
    """
    try:
        formatter = LineFormatter(command, local=resolve_local_time())
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    handler = ThreadedHandler(formatter, sys.stderr)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pccl").setLevel(level)


def verbose_option(default_level: int) -> Callable[[F], F]:
    """Return a decorator that adds ``--verbose``, which shows all records of ``pccl``.

    The option configures logging before the command's body runs, with or without the flag.

    Args:
        default_level: lowest level that is shown without the flag.
    """

    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if not ctx.resilient_parsing:
            configure(logging.DEBUG if value else default_level, ctx.info_name or "pccl")

    return click.option(
        "--verbose", "-v", is_flag=True, expose_value=False, callback=callback, help="Log more."
    )
