"""Options of commands, and a base class of commands that run another command after ``--``."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import pccl.addresses
from pccl import config
from pccl.checks import MIN_PEERS_MAX, SECONDS_MAX
from pccl.observe.logs import resolve_level, resolve_local_time

F = TypeVar("F", bound=Callable[..., object])

INTERVAL_S_MIN = 0.1

STDIN = "-"
"""Stands for standard input where a command takes a file."""


class Seconds(click.FloatRange):
    """The type of an option that takes a finite number of seconds."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Check the range, and refuse NaN and infinity, and what no timer can hold."""
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        if seconds > SECONDS_MAX:
            self.fail(f"{value!r} is more than {SECONDS_MAX} (ten years).", param, ctx)
        return seconds


def check_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse an output file in a missing folder, before the command runs for minutes."""
    if value is not None and not value.absolute().parent.is_dir():
        raise click.BadParameter(f"the folder {value.absolute().parent} does not exist")
    return value


class Wrapper(click.Command):
    """A click command that leaves everything after ``--`` unparsed: another command.

    The body gets the other command from :func:`wrapped_command`. The dashes are required, because
    they separate the options of the two commands.
    """

    example = ""
    """A whole command line, for help and errors."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the other command in ``ctx``, and parse the arguments before it."""
        own, dashes, wrapped = _split(args)
        ctx.meta[__name__] = wrapped
        asks_for_help = any(arg in ctx.help_option_names for arg in own)
        if not wrapped and not asks_for_help:
            remedy = "name a command after --" if dashes else "put -- and then the command"
            raise click.UsageError(f"{remedy}, for example: {self.example}", ctx)
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return ``[OPTIONS]``, the arguments, and a placeholder for the other command."""
        return [*super().collect_usage_pieces(ctx), "-- COMMAND [ARGUMENT]..."]


def wrapped_command(ctx: click.Context) -> list[str]:
    """Return the command after ``--``, which is never empty."""
    command: list[str] = ctx.meta[__name__]
    return command


def check_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an invalid address of a master, or of several masters."""
    if value is None:
        return None
    try:
        pccl.addresses.parse_masters(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value


def check_name(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a name that no peer can have."""
    try:
        return value if value is None else config.resolve_name(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def check_switches() -> None:
    """Refuse wrong values of the variables that peers inherit.

    Raises:
        click.UsageError: a variable has a value that does not exist.
    """
    try:
        config.resolve_drain()
        config.resolve_drain_s()
        config.resolve_encrypt()
        config.resolve_map_port()
        config.resolve_progress()
        config.resolve_name(None)
        config.resolve_record()
        config.resolve_stacks()
        config.resolve_local()
        config.resolve_upload_max(None)
        resolve_level()
        resolve_local_time()
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def check_metrics(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a wrong address for metrics."""
    try:
        config.resolve_metrics(value or None)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return value or None


def metrics_option(text: str) -> Callable[[F], F]:
    """Return a decorator that adds ``--metrics ADDRESS`` with ``text`` as its help."""
    return click.option(
        "--metrics",
        envvar=config.METRICS,
        metavar="ADDRESS",
        callback=check_metrics,
        help=f"{text} PORT: for this machine only; HOST:PORT; or auto ({config.METRICS}).",
    )


def _check_upload_max(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the limit in bytes per second, 0 for none; None: the option is not given."""
    try:
        return config.parse_upload_max(value) or 0 if value else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def upload_option() -> Callable[[F], F]:
    """Return a decorator that adds ``--upload-max SIZE``: a number of bytes per second."""
    return click.option(
        "--upload-max",
        "upload_bytes_per_s_max",
        envvar=config.UPLOAD_MAX,
        metavar="SIZE",
        callback=_check_upload_max,
        help="Send at most so many bytes per second to other machines, in total. Providers count "
        f"bits: for 40 Mbit/s, give 5MB ({config.UPLOAD_MAX}).",
    )


def min_peers_option() -> Callable[[F], F]:
    """Return the option ``--min-peers``."""
    return click.option(
        "--min-peers",
        metavar="COUNT",
        type=click.IntRange(1, MIN_PEERS_MAX),
        help="Number of members that connect() waits for (PCCL_MIN_PEERS).",
    )


def encrypt_option() -> Callable[[F], F]:
    """Return a decorator that adds ``--encrypt``, for this process and those that it starts."""

    def take(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            os.environ[config.ENCRYPT] = "1"

    return click.option(
        "--encrypt",
        is_flag=True,
        expose_value=False,
        callback=take,
        help="Encrypt connections inside this machine, too. All others always are "
        f"({config.ENCRYPT}).",
    )


def token_option(
    text: str = "File that holds the run's token (PCCL_TOKEN_FILE); - is stdin.",
) -> Callable[[F], F]:
    """Return a decorator that adds ``--token FILE`` with ``text`` as its help."""
    return click.option(
        "--token",
        metavar="FILE",
        help=text,
    )


def timeout_option(default_s: float = 5.0) -> Callable[[F], F]:
    """Return a decorator that adds ``--timeout SECONDS``, for a command that asks a run."""
    return click.option(
        "--timeout",
        "timeout_s",
        metavar="SECONDS",
        type=Seconds(0.0, min_open=True),
        default=default_s,
        show_default=True,
        help="How long to wait for each answer.",
    )


def interval_option(text: str) -> Callable[[F], F]:
    """Return a decorator that adds ``--interval SECONDS`` with ``text`` as its help."""
    return click.option(
        "--interval",
        "interval_s",
        metavar="SECONDS",
        type=Seconds(INTERVAL_S_MIN),
        default=1.0,
        show_default=True,
        help=text,
    )


def master_options(command: F) -> F:
    """Add ``[HOST:PORT]`` and ``--token``: which run a command asks."""
    argument = click.argument(
        "master", metavar="[HOST:PORT]", required=False, callback=check_address
    )
    return argument(token_option()(command))


def read_secret(file: str | None) -> bytes | None:
    """Return the run's token: from the file of ``--token``, or else from the environment.

    Args:
        file: path of the file; ``-``: standard input; None: the environment.

    Raises:
        click.BadParameter: the file, standard input or the environment holds no valid token.
    """
    try:
        if file == STDIN:
            return config.resolve_token(sys.stdin.buffer.read(config.SECRET_BYTES_MAX + 2))
        return config.resolve_token(None) if file is None else config.read_token_file(file)
    except ValueError as error:
        hint = None if file is None else "--token"
        raise click.BadParameter(str(error), param_hint=hint) from error


def check_interface(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse a network interface that this machine does not have."""
    if value is not None:
        try:
            config.resolve_interface(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    return value


def check_own_address(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Refuse an invalid address of this peer."""
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
