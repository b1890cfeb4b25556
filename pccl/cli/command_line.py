"""Commands that end in another command: ``pccl launch -n 4 -- python train.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import pccl.addresses
from pccl import config

F = TypeVar("F", bound=Callable[..., object])


class Seconds(click.FloatRange):
    """A time that can be waited for, in whatever unit."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Check the range, and refuse what is no number."""
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return seconds


def check_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file that could not be written in the end, before the minutes are spent."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {value.absolute().parent}")
    return value


class Wrapper(click.Command):
    """A click command that takes everything behind ``--`` as it is.

    The body finds it with :func:`wrapped_command`. The dashes are required: without them nobody
    could tell whose option is whose.
    """

    example = ""
    """A whole command line, for help and complaints."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the other command aside; the rest is ours."""
        own, dashes, wrapped = _split(args)
        ctx.meta[__name__] = wrapped
        asks_for_help = any(arg in ctx.help_option_names for arg in own)
        if not wrapped and not asks_for_help:
            remedy = "name a command behind --" if dashes else "put -- and then the command"
            raise click.UsageError(f"{remedy}, for example: {self.example}", ctx)
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """``[OPTIONS]``, arguments, and what is behind them."""
        return [*super().collect_usage_pieces(ctx), "-- COMMAND [ARGUMENT]..."]


def wrapped_command(ctx: click.Context) -> list[str]:
    """The command behind ``--``, never empty."""
    command: list[str] = ctx.meta[__name__]
    return command


def check_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse what nobody can dial."""
    if value is None:
        return None
    try:
        pccl.addresses.parse_masters(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


def check_switches() -> None:
    """Refuse here, once, what every peer would refuse in the variables that we pass on.

    Raises:
        click.UsageError: one is neither 0 nor 1.
    """
    try:
        config.resolve_drain()
        config.resolve_progress()
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def token_option(
    text: str = "File that holds the run's secret (PCCL_TOKEN_FILE).",
) -> Callable[[F], F]:
    """Give a command ``--token FILE``, with this help."""
    return click.option(
        "--token",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, readable=True),
        help=text,
    )


def read_secret(file: str | None) -> bytes | None:
    """The run's secret: what is in the file of ``--token``, or else what the environment says.

    Raises:
        click.BadParameter: there is no good secret in it.
    """
    try:
        return config.resolve_token(None) if file is None else config.read_token_file(file)
    except ValueError as error:
        hint = None if file is None else "--token"
        raise click.BadParameter(str(error), param_hint=hint) from error


def check_own_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse where no peer could listen."""
    if value is not None:
        try:
            pccl.addresses.parse_advertised(value, param.name or "address")
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return value


def _split(args: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in args:
        return args, False, []
    at = args.index("--")
    return args[:at], True, args[at + 1 :]
