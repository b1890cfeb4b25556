"""Configures logging for the commands. The library itself adds no handlers.

Logs go to stderr, so that stdout holds only the output of a command. They are formatted by rich on
a terminal, and are plain lines elsewhere.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

import click

F = TypeVar("F", bound=Callable[..., object])

PLAIN_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure(level: int) -> None:
    """Show records of ``pccl`` from ``level`` on, and warnings of all other packages.

    Args:
        level: a level of :mod:`logging`.
    """
    handler: logging.Handler
    if sys.stderr.isatty():
        # Imported here, so that a piped command does not load rich for its log.
        from rich.console import Console
        from rich.logging import RichHandler

        handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(PLAIN_FORMAT))
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
            configure(logging.DEBUG if value else default_level)

    return click.option(
        "--verbose", "-v", is_flag=True, expose_value=False, callback=callback, help="Log more."
    )
